"""
Benchmarks
==========

Time and memory of torchcalib and of the functions that one would call instead, on the same data.

`python -m benchmarks.run` in the repository measures them on your machine.
All sides of a job run in turn, usually nine times after one warm-up round, and the median counts.
Memory is the peak of resident memory during one call in a new process, without the data and the result.
"""

import json
import math

import matplotlib.pyplot as plt

from benchmarks.job import DEVICE, EVERYDAY, OURS, REASONS, WITHOUT_NUMBA, jobs_of
from benchmarks.readme import name
from benchmarks.record import compared
from benchmarks.run import RESULTS, is_gpu

files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
machines = [content for content in files if "families" in content]
processors = [content for content in machines if not is_gpu(content["machine"])]
gpus = [content for content in machines if is_gpu(content["machine"])]

# sphinx_gallery_start_ignore
TITLES = {
    "ECE, 50,000 x 1,000": "ECE, 50,000 rows, 1,000 classes",
    "ECE in batches of 256, 50,000 x 1,000": "ECE in batches of 256 rows, 1,000 classes",
    "100 updates of eight metrics, 256 x 1,000": "100 updates of eight metrics, 256 rows",
    "NLL, Brier, ECD, accuracy, ECE, ESCE, MCE and RMSCE, 50,000 x 1,000": "eight metrics in one pass",
    "the same and class-wise ECE, 50,000 x 1,000": "eight metrics and class-wise ECE",
    "binary ECE, 50,000": "binary ECE, 50,000 rows",
    "binary ECE, 1 million": "binary ECE, 1 million rows",
    "binary ECE, 10 million": "binary ECE, 10 million rows",
    "gradient of ECE + NLL, one collection, 50,000 x 1,000": "gradient of ECE + log loss, one pass",
    "gradient of ECE + NLL, two functions, 50,000 x 1,000": "gradient of ECE + log loss, two passes",
    "TCE, 50,000": "TCE, 50,000 rows",
    "ACE, 1 million, float32": "ACE, 1 million rows, float32",
    "ACE, 1 million, float64": "ACE, 1 million rows, float64",
    "CORP, 1 million": "isotonic curve (CORP), 1 million rows",
    "temperature, 10,000 x 100": "temperature, 10,000 rows, 100 classes",
    "temperature, 10,000 x 100, L-BFGS": "temperature, 10,000 rows, 100 classes",
    "DP, 10,000 x 100": "affine scaling, 10,000 rows, 100 classes",
    "Bayes risk, 10,000 x 1,000, reject": "Bayes risk with rejection, 10,000 rows",
}
LOWER_BOUND = "torch.softmax into a reused buffer, 1,024 rows at a time"
PEERS = {
    LOWER_BOUND: "torch.softmax alone",
    "torchmetrics functional calibration error": "torchmetrics",
    "torchmetrics MulticlassCalibrationError": "torchmetrics",
    "probmetrics log loss + Brier + ECE + accuracy": "probmetrics, four metrics",
    "relplot binnedECE": "relplot",
    "torch gradient of cross entropy": "torch cross_entropy alone",
    "authors' procedure: one scipy.stats.binomtest a prediction": "one SciPy test per row",
    "sklearn calibration_curve(strategy='quantile')": "scikit-learn",
    "sklearn IsotonicRegression.fit": "scikit-learn, fit only",
    "probmetrics TemperatureScalingCalibrator": "probmetrics",
    "torch.optim.LBFGS(lr=0.01, max_iter=50), as Guo et al. run it": "L-BFGS of Guo et al.",
    "psrcal AffineCalLogLoss, float64 (scipy L-BFGS-B, 100 iterations)": "psrcal",
    "torch: softmax @ cost, argmin, gather": "plain torch",
}


def records(content):
    """Return all measured jobs of a machine that use compiled code, except everyday jobs and kernels."""
    families = [records for family, records in content["families"].items() if family not in (EVERYDAY, "kernels")]
    return [record for records in families for record in records if record["numba"]]


def draw_everyday():
    """Ratios of everyday jobs, with a marker for each machine, with numba and without."""
    measured = [content for content in machines if EVERYDAY in content["families"]]
    if not measured:
        print("Not yet measured.")
        return
    records = {id(content): content["families"][EVERYDAY] for content in measured}
    order = [each.job for each in reversed(compared(records[id(measured[0])], numba=True))]
    _, ax = plt.subplots(figsize=(9, 0.26 * len(order) + 1.4), layout="constrained")
    for k, content in enumerate(measured):
        for numba, marker in ((True, "o"), (False, "x")):
            some = compared(records[id(content)], numba=numba)
            found = [(each.ratio, order.index(each.job.removesuffix(WITHOUT_NUMBA))) for each in some]
            if found:
                label = f"{name(content['machine'])}{'' if numba else WITHOUT_NUMBA}"
                ax.plot(*zip(*found, strict=True), marker, color=f"C{k}", label=label)
    goals = {job.name: job.peers[0].goal for job in jobs_of(EVERYDAY)}
    ax.plot([goals[job] for job in order], range(len(order)), "|", color="0.5", markersize=12, label="goal with numba")
    ax.axvline(1, color="0.3", linewidth=0.8)
    ax.set(xscale="log", xlabel="time of torchcalib / time of the alternative (log scale)", yticks=range(len(order)))
    ax.set_yticklabels(order, fontsize=8)
    ax.grid(axis="x", alpha=0.3)
    ax.margins(y=0.01)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), frameon=False, fontsize=8)


def draw_times():
    """Bars of the ratios of times, for each machine."""
    for content in processors:
        bars = [
            (f"{TITLES.get(record['job'], record['job'])} | {PEERS.get(peer, peer)}", 1 / found["ratio"])
            for record in records(content)
            for peer, found in record["peers"].items()
            if found["ratio"]
        ]
        bars.sort(key=lambda bar: bar[1])
        _, ax = plt.subplots(figsize=(9, 0.33 * len(bars) + 1.2), layout="constrained")
        speed = [value for _, value in bars]
        drawn = ax.barh([label for label, _ in bars], [v - 1 for v in speed], left=1)
        for bar, value in zip(drawn, speed, strict=True):
            bar.set_color("C0" if value >= 1 else "C3")
        for row, value in enumerate(speed):
            text = f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
            ax.annotate(text, (max(value, 1), row), (4, 0), textcoords="offset points", va="center", fontsize=8)
        ax.axvline(1, color="0.3", linewidth=0.8)
        ax.set(xscale="log", xlabel="times faster than the alternative (log scale)", xlim=(None, 3 * max(speed)))
        ax.set_title(name(content["machine"]), fontsize=10, loc="right")
        ax.margins(y=0.01)
        ax.spines[["top", "right"]].set_visible(False)


def draw_memory():
    """Extra memory of each job, for each machine."""
    for content in processors:
        measured = [record for record in records(content) if set(record["extra_bytes"]) - {OURS}]
        measured = [record for record in measured if "class-wise" not in record["job"]]  # only a lower bound beside it
        _, ax = plt.subplots(figsize=(9, 0.55 * len(measured) + 1.4), layout="constrained")
        for row, record in enumerate(reversed(measured)):
            sizes = {
                side: size / 1e6 for side, size in record["extra_bytes"].items() if size and "softmax into" not in side
            }
            ax.plot(list(sizes.values()), [row] * len(sizes), color="0.8", zorder=0)
            for k, (side, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
                ours = side == OURS
                ax.plot(size, row, "o" if ours else "s", color="C0" if ours else "C1")
                label = "torchcalib" if ours else PEERS.get(side, side)
                ax.annotate(
                    label, (size, row), (0, 6 - 19 * (k % 2)), textcoords="offset points", ha="center", fontsize=8
                )
        ax.set(
            xscale="log",
            xlabel="extra memory in MB (log scale)",
            yticks=range(len(measured)),
            ylim=(-0.5, len(measured)),
        )
        ax.margins(x=0.15)
        ax.set_yticklabels([TITLES.get(record["job"], record["job"]) for record in reversed(measured)])
        ax.grid(axis="x", alpha=0.3)
        ax.set_title(name(content["machine"]), fontsize=10)


def print_states():
    """Sizes of the states of streaming metrics."""
    for content in processors:
        for record in records(content):
            for side, sizes in record["state_bytes"].items():
                label = "torchcalib" if side == OURS else PEERS.get(side, side)
                (first, small), (last, large) = sizes.items()
                print(f"ECE, {label}: {small:,} bytes after {first} batch, {large:,} bytes after {last} batches of 256")


# Jobs whose growth is drawn, and for each panel: the job, the size on the x axis, the size that is a unit of work
PANELS = (
    ("binary ECE, 1 million", "n", ("n",), "rows (binary)", "ns per row"),
    ("ECE, 50,000 x 1,000", "n", ("n",), "rows (1,000 classes)", "ns per row"),
    ("ECE, 50,000 x 1,000", "num_classes", ("n", "num_classes"), "classes (8.4 million logits)", "ns per logit"),
    ("binary ECE, 1 million", "n_bins", ("n",), "bins (1 million rows)", "ns per row"),
    ("ECE of 1,000 groups, binary, 1 million", "num_groups", ("n",), "groups (1 million rows)", "ns per row"),
    ("20 updates and values of eight metrics, 256 x 1,000, 2 ranks", "ranks", (), "ranks", "ms for 20 values"),
)


def draw_growth():
    """Time of torchcalib per unit of work, for different sizes. Each machine is a line."""
    fig, axes = plt.subplots(2, 3, figsize=(10, 6), layout="constrained")
    for content in processors:
        grown = {record["job"]: record["growth"] for record in records(content)}
        for ax, (job, axis, units, label, unit) in zip(axes.flat, PANELS, strict=True):
            points = [point for point in grown.get(job, []) if varies(point, grown[job], axis)]
            points = sorted(points, key=lambda point: point[axis])
            scale = 1e9 if units else 1e3
            costs = [scale * point["seconds"]["median"] / math.prod(point[size] for size in units) for point in points]
            ax.plot([point[axis] for point in points], costs, "o-", label=name(content["machine"]))
            ax.set(xlabel=label, ylabel=unit)
            if axis == "ranks":
                ax.set(xticks=[point[axis] for point in points], ylim=(0, None))
            else:
                ax.set(xscale="log", yscale="log", ylim=(10 ** math.floor(math.log10(min(costs))), None))
            ax.grid(alpha=0.3)
    fig.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", frameon=False, fontsize=9)


def varies(point, points, axis):
    """Return whether a point belongs to the series of points in which the size `axis` varies."""
    if axis not in point:
        return False
    others = {size: value for size, value in point.items() if size not in (axis, "n", "seconds")}
    if axis == "n":  # other sizes are those of the job
        return others in ({}, {"num_classes": 1_000})
    work = point["n"] * point.get("num_classes", 1)
    return others == {} and sum(abs(other["n"] * other.get("num_classes", 1) / work - 1) < 0.1 for other in points) > 1


def print_limits(contents, family):
    """Share of the limits of each machine. Limits are alternatives that read or copy as many bytes, or exponentials."""
    for content in contents:
        print(f"{name(content['machine'])}:")
        goals = {job.name: job.peers[0].goal for job in jobs_of(family)}
        for each in compared(content["families"].get(family, []), numba=True):
            if "as many" in each.peer:
                is_missed = goals[each.job] is not None and each.ratio > goals[each.job]
                why = REASONS.get(family, {}).get(each.job, "") if is_missed else ""
                share = f"{1 / each.ratio:.0%} of the speed of {each.peer}{why and f' ({why})'}"
                print(f"  {each.job}: {1000 * each.ours:.3g} ms, {share}")


def print_machines():
    """Measured machines."""
    vendors = sorted({content["machine"]["cpu"] for content in processors})
    print(f"Processors measured: {', '.join(vendors)}.")
    print_limits(gpus, DEVICE)
    if not gpus:
        print("GPU: not yet measured.")
    if len(vendors) == 1:
        print("Processor of a second vendor: not yet measured.")


# sphinx_gallery_end_ignore

# %%
# Everyday jobs
# -------------
#
# Each point is the time of torchcalib divided by that of an alternative, which a person would write in ten lines of
# torch, numpy, scikit-learn or torchmetrics. Below 1, torchcalib is faster. The values of both sides agree.
# The alternatives are in `benchmarks/by_hand.py
# <https://github.com/torchcalib/torchcalib/blob/main/benchmarks/by_hand.py>`_.

draw_everyday()

# %%
# Large jobs
# ----------
#
# Each bar is the time of the alternative divided by the time of torchcalib. Above 1, torchcalib is faster.
# Some alternatives are lower bounds that compute less, such as `torch.softmax` alone.
# ECE, TCE and ACE are the expected, test-based and adaptive calibration error.

draw_times()

# %%
# The time of one SciPy test per row is extrapolated from 2% of the rows.
#
# Memory
# ------
#
# Extra memory of one call, in MB, for jobs whose memory was measured.

draw_memory()

# %%
# A streaming metric also has a state, which is kept between batches:

print_states()

# %%
# Growth
# ------
#
# Time of torchcalib for the expected calibration error (ECE), for different numbers of rows, classes, bins, groups and
# ranks. A horizontal line means that the time is proportional to the work.

draw_growth()

# %%
# A call has a fixed cost, which dominates small batches. Each update adds to the sums of all bins of all groups.
# The state has 600 bytes per group with 15 bins, so the time is proportional to the number of groups beyond the number
# of rows. Ranks compete for the cores of one machine, so the time rises if there are more ranks than cores.
#
# Limits of the machine
# ---------------------
#
# A kernel must read its input, and compute exponentials or logarithms. The larger of these two times is a limit
# (`roofline model <https://doi.org/10.1145/1498765.1498785>`_). The percentages state how close each kernel comes.
# Both limits are measured on all threads. The gradient also allocates its result of 200 MB.

print_limits(processors, "kernels")

# %%
# Other machines
# --------------

print_machines()

# %%
# `All results with their goals
# <https://github.com/torchcalib/torchcalib/blob/main/benchmarks/results/README.md>`_ are in tables for developers.
