r"""
What other packages report, and why
===================================

Packages return different numbers for the same predictions.
This page shows the numbers, the rule behind each, and a check of that rule in NumPy.

Packages that are installed when this page is built are called now.
For other packages, the page shows values that were recorded with the version in the last table.
`python -m benchmarks.other_packages` in the repository records them.

Expected calibration error (ECE)
--------------------------------

All ECE values below have ten bins of equal width.
The figure shows each value divided by that of torchcalib.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from benchmarks import other_packages as others

found = others.all_values()
predictions = {key: make() for key, make in others.CASES.items()}


def values(metric, case):
    """Return the results of all packages for one metric and one case."""
    results = {package: entry["values"].get(metric, {}).get(case) for package, entry in found.items()}
    return {package: value for package, value in results.items() if value is not None}


# sphinx_gallery_start_ignore
cases = [
    "binary",
    "200 probabilities of 1",
    "probabilities on bin edges",
    "70,000 rows in half precision",
    "three classes",
    "three classes, two in the labels",
    "three classes, ignored rows",
]
names = [name for name in found if "ECE" in found[name]["values"] and name != "torchcalib"]
fig, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
for k, name in enumerate(names):
    for row, case in enumerate(cases):
        ours, theirs = values("ECE", case)["torchcalib"], values("ECE", case).get(name)
        if isinstance(theirs, float):
            label = name if case == "binary" else None
            ax.scatter(theirs / ours, row + (k - 3) / 10, s=40, color=f"C{k}", marker="os^Dv<>"[k], label=label)
ax.axvline(1, color="0.5", linewidth=1, zorder=0)
ax.set(xlabel="ECE of the package / ECE of torchcalib", yticks=range(len(cases)), yticklabels=cases)
ax.invert_yaxis()
ax.grid(axis="x", alpha=0.3)
_ = fig.legend(loc="outside right upper", frameon=False)
# sphinx_gallery_end_ignore

# %%
# Each table below has one row per package, with its value and the reason for a difference.
# "NumPy" is the value that the stated rule gives in a few lines of NumPy.
# The rule explains the difference if both columns agree.


def binned(index, confidence, outcome):
    """ECE for a given bin of each sample, with sums in float64."""
    gaps = np.bincount(index, outcome - confidence.astype(float))
    return np.abs(gaps).sum() / len(outcome)


def bin_rule(rule, p, n_bins=10):
    """Bin of each probability by the rule of a package."""
    edges = np.linspace(0, 1, n_bins + 1)
    if rule == "[a, b), last bin closed":  # torchcalib
        exact = np.arange(n_bins + 1) / n_bins
        return (np.searchsorted(exact, p.astype(float), side="right") - 1).clip(max=n_bins - 1)
    if rule == "[a, b), 1 in a bin of its own":  # torchmetrics
        lower = np.arange(n_bins + 1) * p.dtype.type(1 / n_bins)
        upper = 1 - np.arange(n_bins + 1)[::-1] * p.dtype.type(1 / n_bins)  # as torch.linspace computes edges
        edges = np.where(np.arange(n_bins + 1) < (n_bins + 1) / 2, lower, upper).astype(p.dtype)
        return np.searchsorted(edges, p, side="right") - 1
    if rule == "int(p / width)":  # relplot
        return (p / (1 / n_bins)).astype(int)
    if rule == "[a, b), edges by numpy.linspace":  # netcal
        return (np.searchsorted(edges, p, side="right") - 1).clip(max=n_bins - 1)
    if rule == "(a, b]":  # uncertainty-calibration
        return np.searchsorted(np.arange(1, n_bins + 1) / n_bins, p)
    if rule == "(a, b], one bin fewer":  # MAPIE
        return np.digitize(p, np.linspace(0, 1, n_bins), right=True)
    raise KeyError(rule)


RULES = {
    "torchcalib": "[a, b), last bin closed",
    "torchmetrics": "[a, b), 1 in a bin of its own",
    "torch-uncertainty": "[a, b), 1 in a bin of its own",
    "netcal": "[a, b), edges by numpy.linspace",
    "relplot": "int(p / width)",
    "uncertainty-calibration": "(a, b]",
    "probmetrics": "[a, b), 1 in a bin of its own",
    "MAPIE": "(a, b], one bin fewer",
}


def by_rule(package, p, y):
    """ECE by the bin rule of a package, in NumPy."""
    if package == "probmetrics":
        p = p.clip(1e-7, 1 - 1e-7)
    return binned(bin_rule(RULES[package], p), p, y)


# sphinx_gallery_start_ignore
def table(metric, case, reasons, check=None):
    """Return a table of the results of all packages for one metric and one case."""
    rows = []
    for package, value in values(metric, case).items():
        row = {"package": package, metric: f"{value:.4f}" if isinstance(value, float) else value.split(". ")[0]}
        if check is not None:
            reproduced = check(package)
            row["NumPy"] = "" if reproduced is None else f"{reproduced:.4f}"
        rows.append(row | {"reason": reasons.get(package, "")})
    pd.set_option("display.max_colwidth", None)
    return pd.DataFrame(rows).set_index("package").rename_axis(None)


def binary_check(case):
    """Return a check of binary predictions."""
    p, y = predictions["ECE", case].arrays
    return lambda package: by_rule(package, p, y)


# sphinx_gallery_end_ignore

# %%
# **Ordinary binary predictions.** Seven packages agree.

few = "numpy.linspace(0, 1, n_bins) has 10 edges and thus 9 bins"
table("ECE", "binary", {"MAPIE": few}, binary_check("binary"))

# %%
# **Probabilities of exactly 1.** Saturated networks often predict 1.0 in float32.
# Here, 200 predictions of 1.0 are right in 90%, and 200 predictions of 0.92 are right in all cases.
# In one bin, the two errors cancel in part.

own_bin = "1.0 is in an additional bin, above the last one"
table(
    "ECE",
    "200 probabilities of 1",
    {
        "torchmetrics": own_bin,
        "torch-uncertainty": "calls torchmetrics",
        "relplot": own_bin,
        "netcal": "clips probabilities below 1",
        "probmetrics": "clips probabilities to 1 - 1e-7, then calls torchmetrics",
        "MAPIE": few,
    },
    binary_check("200 probabilities of 1"),
)

# %%
# **Probabilities on bin edges.** All predictions are multiples of 0.1 in float64, 100 of each.
# A bin is closed on the left or on the right, and edges have rounding errors.
# For example, `0.3 / 0.1` is 2.9999999999999996, and `numpy.linspace(0, 1, 11)[3]` is 0.30000000000000004.
# torchcalib compares with the float64 value of `i / n_bins`; `right=True` selects (a, b].

table(
    "ECE",
    "probabilities on bin edges",
    {
        "torchmetrics": own_bin + "; the edge torch.linspace(0, 1, 11)[3] is above 0.3",
        "torch-uncertainty": "calls torchmetrics",
        "netcal": "edges by numpy.linspace: 0.3, 0.6 and 0.7 are in the bin below",
        "relplot": "bin int(p / 0.1): 0.3, 0.6 and 0.7 are in the bin below; 1.0 is in an additional bin",
        "uncertainty-calibration": "bins are (a, b]: 0 and 0.1 share a bin, 0.9 and 1 do not",
        "probmetrics": "clips probabilities to [1e-7, 1 - 1e-7], then calls torchmetrics",
        "MAPIE": "nine bins (a, b]",
    },
    binary_check("probabilities on bin edges"),
)

# %%
# **One value above 1 by rounding.** One of 2,000 predictions is 1.0000001, as after a softmax in float32.
# torchmetrics assumes logits if any value is outside [0, 1], and applies the sigmoid to the whole batch.
# torchcalib raises an error that states the number of rows and the remedy.


def sigmoid_of_all(package):
    """ECE after a sigmoid of all values for the packages that assume logits."""
    p, y = predictions["ECE", "one value of 1.0000001"].arrays
    if package not in ("torchmetrics", "torch-uncertainty"):
        return None
    return by_rule(package, 1 / (1 + np.exp(-p)), y)


table(
    "ECE",
    "one value of 1.0000001",
    {
        "torchcalib": "error, because from_logits=False was declared",
        "torchmetrics": "applies the sigmoid to all predictions",
        "torch-uncertainty": "calls torchmetrics",
        "netcal": "clips the value",
        "relplot": "puts the value into the additional bin",
        "probmetrics": "clips the value",
        "MAPIE": few,
    },
    sigmoid_of_all,
)

# %%
# **70,000 rows in half precision.** torchmetrics counts rows in the precision of the predictions.
# The largest finite float16 number is 65,504, so the count is infinite and every fraction of rows is 0.
# torchcalib computes in at least float32, with sums in float64.


def without_overflow(package):
    """ECE by the rule of a package that does not sum in float16."""
    p, y = predictions["ECE", "70,000 rows in half precision"].arrays
    return by_rule(package, p, y) if package in ("torchcalib", "relplot", "uncertainty-calibration") else None


overflow = "the number of rows overflows in float16"
table(
    "ECE",
    "70,000 rows in half precision",
    {
        "torchmetrics": overflow,
        "torch-uncertainty": "calls torchmetrics",
        "probmetrics": "calls torchmetrics",
        "relplot": "divides by the bin width in float16",
        "uncertainty-calibration": "bins are (a, b]",
        "MAPIE": few,
    },
    without_overflow,
)

# %%
# **Multi-class predictions.** All packages use the confidence of the top label by default.
# Here the mean confidence exceeds the accuracy in every bin.
# The ECE is then the difference of mean confidence and accuracy, for any bins, as the NumPy column shows.


def mean_gap(_):
    """Mean confidence minus accuracy."""
    p, y = predictions["ECE", "three classes"].arrays
    return p.max(-1).mean() - (p.argmax(-1) == y).mean()


table("ECE", "three classes", {}, mean_gap)

# %%
# **Three classes, but only two in the labels.** Rows with the third label are removed, as in a small batch.


def renormalised(package):
    """ECE of the second class after the third was dropped, as in probmetrics."""
    if package != "probmetrics":
        return None
    p, y = predictions["ECE", "three classes, two in the labels"].arrays
    return by_rule(package, p[:, 1] / p[:, :2].sum(-1), y)


table(
    "ECE",
    "three classes, two in the labels",
    {
        "netcal": "infers a binary task from two distinct labels, and rejects three columns",
        "probmetrics": "drops the third class, renormalises, and computes a binary ECE",
    },
    renormalised,
)

# %%
# **Rows to ignore.** Every fifth target is -1, with `ignore_index=-1`. Other packages have no such option.

table("ECE", "three classes, ignored rows", {"torch-uncertainty": "calls torchmetrics"})

# %%
# Maximum calibration error (MCE)
# -------------------------------
#
# The MCE is the largest gap of a bin. The predictions are those with 200 values of 1.0.

table(
    "MCE",
    "200 probabilities of 1",
    {
        "torchmetrics": own_bin + ", where accuracy is 90%",
        "torch-uncertainty": "calls torchmetrics",
        "netcal": "clips probabilities below 1",
        "probmetrics": "clips probabilities to 1 - 1e-7, then calls torchmetrics",
    },
)

# %%
# Adaptive calibration error (ACE)
# --------------------------------
#
# The ACE uses bins of equal numbers of samples. First, ordinary binary predictions in ten bins.

top_label = "uses the confidence of the predicted class, max(p, 1 - p)"
table("ACE", "binary", {"torch-uncertainty": top_label})

# %%
# **Ties.** Five values occur 40 times each, in 15 bins. torchcalib never splits equal predictions.
# Its value thus does not depend on the order of rows. `ties="split"` splits them in the given order.

tied = {
    "torch-uncertainty": top_label + "; splits ties between bins in the order of an unstable sort",
    "netcal": "quantiles coincide, and the histogram rejects bins of width 0",
}
table("ACE", "ties", tied)

# %%
# The same rows in reversed order:

table("ACE", "ties, rows reversed", tied)

# %%
# Brier score
# -----------
#
# The Brier score of a binary prediction is :math:`(p - y)^2`, or twice that as a sum over both classes.

table("Brier score", "binary", {"probmetrics": "sum over both classes, which is twice the binary score"})

# %%
# With three or more classes, all packages return the sum over classes.

table("Brier score", "three classes", {})

# %%
# Smooth calibration error (smECE)
# --------------------------------
#
# relplot is the package of the authors of smECE. It smooths with a reflected Gaussian kernel.

logit_kernel = 'default kernel_type="logit"; "reflected" gives the value of relplot'
table("smECE", "binary", {"torch-uncertainty": logit_kernel, "probmetrics": "calls relplot"})

# %%
# Three classes, with the confidence of the top label:

table("smECE", "three classes", {"torch-uncertainty": logit_kernel, "probmetrics": "calls relplot"})

# %%
# Miscalibration component (MCB) of the Brier score
# -------------------------------------------------
#
# The MCB is the Brier score minus the Brier score after isotonic regression. Without ties, values agree:

table("MCB", "binary", {})

# %%
# Five values occur 40 times each, with all positives of a value before its negatives:

table("MCB", "ties", {})

# %%
# The same rows in reversed order:

table(
    "MCB",
    "ties, rows reversed",
    {"scoringrules": "does not pool equal predictions, so that the value depends on the order of rows"},
)

# %%
# Temperature
# -----------
#
# The temperature minimises the log loss of the fitted data, which has one minimum. Logits in float64:

table(
    "temperature",
    "three classes, float64",
    {"torch-uncertainty": "100 iterations of L-BFGS with learning rate 0.1 do not converge"},
)

# %%
# The same logits in float32:

table(
    "temperature",
    "three classes, float32",
    {
        "torch-uncertainty": "100 iterations of L-BFGS with learning rate 0.1 do not converge",
        "netcal": "numerical derivatives of a float32 loss are 0, so that the start value 1 is returned",
        "scikit-learn": "minimises the log loss in float32",
    },
)

# %%
# torcheval has none of these metrics. Its `weighted_calibration` is the mean prediction divided by the mean outcome.

table("mean prediction / mean outcome", "binary", {})

# %%
# Versions
# --------

pd.DataFrame(
    {
        "version": {name: entry["version"] for name, entry in found.items()},
        "computed": {name: entry["date"] or "when this page was built" for name, entry in found.items()},
    }
)
