"""False verdicts of `torchcalib.compare`, and its power: `python -m benchmarks.comparisons` writes comparisons.md.

In each law both systems are calibrated, so that every verdict on a calibration error is false. For exact calibration,
predictions are drawn from their distribution given the outcome: if p has the density f, the density given y = 1 is
proportional to p f(p). Results of single laws are stored in comparisons.json, and a later run replaces them.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from torchcalib.core.arguments import Task
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedMode, modes_of
from torchcalib.core.inputs import InputFormat
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.sums import BinStats
from torchcalib.inference.simulation import BinCells
from torchcalib.ops.sorting import order_of
from torchcalib.reporting.catalogue import bins_of, catalogue_of, sample_of, values
from torchcalib.reporting.comparison.differences import pair_test
from torchcalib.reporting.comparison.null import (
    OrderedSample,
    bins_of_calibrated,
    samples_of_calibrated,
    samples_of_flipped,
)
from torchcalib.reporting.comparison.system import RANKED_REPLICATES, Draws
from torchcalib.reporting.testing import LEVEL
from torchcalib.results.lines import Better

RECORD = Path(__file__).resolve().parent / "results" / "comparisons.json"
N, N_BINS = 500, 15

Values = dict[str, Tensor]
"""Errors by `Line.key`."""

Sample = tuple[dict[str, Tensor], Tensor, Tensor | None]
"""Predictions by system, targets, and clusters or None."""


def beta_given(a: float, b: float, target: Tensor, g: torch.Generator) -> Tensor:
    """Return probabilities with the distribution beta(a, b), drawn given the outcomes."""
    y = target.double()
    ones = torch._standard_gamma(a + y, generator=g)
    zeros = torch._standard_gamma(b + 1 - y, generator=g)
    return ones / (ones + zeros)


def beta_views(a: float, b: float, g: torch.Generator, constant: bool = False) -> Sample:
    """Return two systems with beta(a, b) that share only the outcome, or one and the constant mean."""
    target = torch.bernoulli(torch.full((N,), a / (a + b), dtype=torch.float64), generator=g).long()
    other = torch.full((N,), a / (a + b), dtype=torch.float64) if constant else beta_given(a, b, target, g)
    return {"a": beta_given(a, b, target, g), "b": other}, target, None


def mixture(g: torch.Generator, constant: bool = False) -> Sample:
    """Return two systems with the mixture of beta(2, 8) and beta(8, 2), or one and its two-valued coarsening."""
    target = torch.bernoulli(torch.full((N,), 0.5, dtype=torch.float64), generator=g).long()

    def view() -> tuple[Tensor, Tensor]:
        # P(second component | y = 1) = 0.8
        second = torch.rand(N, generator=g, dtype=torch.float64) < torch.where(target == 1, 0.8, 0.2)
        return torch.where(second, beta_given(8, 2, target, g), beta_given(2, 8, target, g)), second

    a, component = view()
    return {"a": a, "b": torch.where(component, 0.8, 0.2).double() if constant else view()[0]}, target, None


def normal_log_odds(g: torch.Generator, scale: float = 1.5, other_scale: float | None = None) -> Sample:
    """Return two systems with log-odds N(+-s^2 / 2, s^2) given the outcome; the second scale may differ."""
    target = torch.bernoulli(torch.full((N,), 0.5, dtype=torch.float64), generator=g).long()
    sign = 2.0 * target - 1

    def view(s: float) -> Tensor:
        return (sign * s**2 / 2 + s * torch.randn(N, generator=g, dtype=torch.float64)).sigmoid()

    return {"a": view(scale), "b": view(scale if other_scale is None else other_scale)}, target, None


def nested_log_odds(g: torch.Generator) -> Sample:
    """Return a system with log-odds of two features, and one with the log-odds of the first of them."""
    target = torch.bernoulli(torch.full((N,), 0.5, dtype=torch.float64), generator=g).long()
    first, second = ((2.0 * target - 1) * 0.5 + torch.randn(N, generator=g, dtype=torch.float64) for _ in range(2))
    return {"a": (first + second).sigmoid(), "b": first.sigmoid()}, target, None


def clustered(g: torch.Generator) -> Sample:
    """Return nested systems for 50 clusters of 10 rows with outcomes that share part of the noise.

    Features are independent; y = 1 if a normal variable with correlation 0.3 within clusters is below a limit.
    """
    p = (1.5 * torch.randn(N, generator=g, dtype=torch.float64)).sigmoid()
    cluster = torch.arange(N) % 50
    shared = torch.randn(50, generator=g, dtype=torch.float64)[cluster]
    own = torch.randn(N, generator=g, dtype=torch.float64)
    target = (math.sqrt(0.3) * shared + math.sqrt(0.7) * own < torch.special.ndtri(p)).long()
    grid = (1.5 * torch.special.ndtri((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)).sigmoid()
    above = float(grid[grid > 0.5].mean())
    return {"a": p, "b": torch.where(p > 0.5, above, 1 - above).double()}, target, cluster


def classes(g: torch.Generator, num_classes: int, scale: float = 2.0, other_scale: float | None = None) -> Sample:
    """Return two posteriors of classes with Gaussian features, which share only the label."""
    target = torch.randint(num_classes, (N,), generator=g)
    means = torch.nn.functional.one_hot(target, num_classes).double()

    def view(s: float) -> Tensor:
        features = s * means + torch.randn(N, num_classes, generator=g, dtype=torch.float64)
        return (s * features).softmax(-1)

    return {"a": view(scale), "b": view(scale if other_scale is None else other_scale)}, target, None


def over_confident(g: torch.Generator) -> Sample:
    """Return a calibrated system with normal log-odds z, and the over-confident log-odds 1.3 z."""
    z = 1.5 * torch.randn(N, generator=g, dtype=torch.float64)
    return {"a": z.sigmoid(), "b": (1.3 * z).sigmoid()}, torch.bernoulli(z.sigmoid(), generator=g).long(), None


class Law(NamedTuple):
    """Distribution of two systems and their targets."""

    name: str
    task: Task
    draw: Callable[[torch.Generator], Sample]


LAWS = (
    Law("normal log-odds, equal accuracy", "binary", normal_log_odds),
    Law("normal log-odds, 1.5 and 0.5", "binary", lambda g: normal_log_odds(g, 1.5, 0.5)),
    Law("normal log-odds, nested", "binary", nested_log_odds),
    Law("beta mixture, equal accuracy", "binary", mixture),
    Law("beta mixture and two values", "binary", lambda g: mixture(g, True)),
    Law("beta(0.5, 9.5), equal accuracy", "binary", lambda g: beta_views(0.5, 9.5, g)),
    Law("beta(0.5, 9.5) and constant", "binary", lambda g: beta_views(0.5, 9.5, g, True)),
    Law("beta(0.5, 20), equal accuracy", "binary", lambda g: beta_views(0.5, 20, g)),
    Law("beta(0.5, 20) and constant", "binary", lambda g: beta_views(0.5, 20, g, True)),
    Law("5 classes, equal accuracy", "multiclass", lambda g: classes(g, 5)),
    Law("5 classes, different accuracy", "multiclass", lambda g: classes(g, 5, 2.0, 0.7)),
    Law("10 classes, equal accuracy", "multiclass", lambda g: classes(g, 10)),
    Law("10 classes, different accuracy", "multiclass", lambda g: classes(g, 10, 2.0, 0.7)),
    Law("normal log-odds and two values, 50 clusters", "binary", clustered),
    Law("z and 1.3 z (power)", "binary", over_confident),
)


def errors(
    p: Predictions, clusters: Tensor | None, modes: Sequence[NamedMode], ranked: bool, seed: int
) -> list[Values]:
    """Return the errors of D data sets `(D,)`; and their replicates `(R, D)`: bootstrap, null and, if given, clusters.

    The functions and the random numbers are those of `torchcalib.compare`, for D data sets at once.
    """
    of_rows = torch.arange(p.samples[-1]) if clusters is None else clusters
    draws = Draws(seed, RANKED_REPLICATES, of_rows.device)
    groups = torch.arange(int(of_rows.max()) + 1)
    counts, signs = draws.weights(groups)[:, of_rows].double(), draws.signs(groups)[:, of_rows]
    found: list[Values] = [{} for _ in range(3 if clusters is None else 4)]
    if not ranked and p.task == "binary":
        loss = binary_cross_entropy(p.values, p.target, reduction="none")
        found[0]["nll"], found[1]["nll"] = loss.mean(-1), (counts @ loss.T) / counts.sum(-1, keepdim=True)
    tested = [each for each in catalogue_of(p.task, N_BINS).members if each.is_error and "debiased" not in each.key]
    for mode in modes:
        name = sample_of(mode) if ranked else bins_of(mode)
        members = [each for each in tested if each.statistic == name]
        if ranked:
            sample = ExactSample(mode).from_predictions(p)
            order = order_of(sample.score)
            ordered = OrderedSample.from_sample(sample)
            rows = torch.arange(N).expand(order.shape).gather(-1, order)
            samples: list[list[RankedSample]] = [
                [sample],
                [OrderedSample.from_sample(ExactSample(mode).from_predictions(p.resampled(counts)))],
            ]
            samples.append(list(samples_of_calibrated(ordered, rows, seed, RANKED_REPLICATES)))
            if clusters is not None:
                samples.append(list(samples_of_flipped(ordered, of_rows[rows], draws.signs(groups))))
            for columns, chunks in zip(found, samples, strict=True):
                parts = [values(members, {name: each}) for each in chunks]
                columns |= {key: torch.cat([x[key] for x in parts]) for key in parts[0]}
            continue
        accumulator = EqualWidthBins(mode, N_BINS, False, with_noise=True)
        b, plain = accumulator.from_predictions(p), replace(accumulator, with_noise=False)
        drawn = plain.from_predictions(p.resampled(counts))
        bins = [b, drawn, bins_of_calibrated(b, residuals(drawn), seed)]
        if clusters is not None:
            flipped = residuals(plain.from_predictions(p.resampled(signs)))
            bins.append(BinCells.from_bins(b).with_gaps(flipped / b.n.masked_fill(b.n == 0, 1)))
        for columns, each in zip(found, bins, strict=True):
            columns |= values(members, {name: each})
    return found


def residuals(b: BinStats) -> Tensor:
    """Return the sum of outcomes minus confidences in each bin."""
    return b.sums[..., 2, :] - b.sums[..., 1, :]


def verdicts(law: Law, n_sets: int, ranked: bool) -> dict[str, float]:
    """Return the share of data sets with p <= 5% by `Line.key`, in batches of data sets."""
    found: Counter[str] = Counter()
    at_once = 4 if ranked else 50
    for seed in range(0, n_sets, at_once):
        sets = [law.draw(torch.Generator().manual_seed(seed + k)) for k in range(min(at_once, n_sets - seed))]
        clusters, target = sets[0][2], torch.stack([target for _, target, _ in sets])
        modes = modes_of(law.task)[: 1 if ranked else None]
        by_system = []
        for name in ("a", "b"):
            probs = torch.stack([preds[name] for preds, _, _ in sets])
            num_classes = None if law.task == "binary" else probs.shape[-1]
            p = InputFormat(law.task, num_classes=num_classes).read(probs, target, None, batch_shape=(len(sets),))
            by_system.append(errors(p, clusters, modes, ranked, seed))
        n_clusters = None if clusters is None else float(clusters.max()) + 1
        for key in by_system[0][0]:
            pair, bootstrap, *nulls = ((a[key], b[key]) for a, b in zip(*by_system, strict=True) if key in a)
            better: Better = "nearer to 0" if key.startswith("esce") else "lower"
            test = pair_test(pair, bootstrap, nulls, better, n_clusters)
            found[key] += int((test.p_value <= (1 - LEVEL) * (1 + 1e-9)).sum())
    return {key: count / n_sets for key, count in found.items()}


def table(records: Mapping[str, Any]) -> str:
    """Return the tables of all stored results in Markdown."""
    binned = [f"{error}/{mode}" for error in ("ece", "esce", "mce", "rmsce") for mode in ("main", "other")]
    ranked = ["ace", "tce", "ks", "atb", "mcb"]
    main_modes = {"binary": "positive", "multiclass": "top_label"}
    other_modes = {"binary": "top_label", "multiclass": "classwise"}
    lines = [
        "# False verdicts of comparisons",
        "",
        "Share of data sets in which one of two systems is called better or worse calibrated (p <= 0.05, not adjusted) "
        f"although both are calibrated, in percent. {N} samples; {RANKED_REPLICATES} replicates; the functions of "
        "`torchcalib.compare`. Standard error at 5%: 0.7 for 1,000 data sets, 1.5 for 200. Two numbers: main mode "
        "(positive class or top label) / other mode (top label or class-wise). Empty: not computed. Computed by "
        "`python -m benchmarks.comparisons`.",
        "",
        "| law | data sets | ECE | ESCE | MCE | RMSCE | data sets | ACE | TCE | KS | ATB | MCB |",
        f"|---|{'---:|' * 11}",
    ]
    for law in LAWS:
        modes = {"main": main_modes[law.task], "other": other_modes[law.task]}
        cells = [law.name]
        of_bins, of_ranks = (records.get(f"{law.name}, {kind}") for kind in ("bins", "ranks"))
        cells.append("" if of_bins is None else f"{of_bins['sets']:,}")
        for first, second in zip(binned[::2], binned[1::2], strict=True):
            keys = ["/".join((key.split("/")[0], modes[key.split("/")[1]])) for key in (first, second)]
            cells.append("" if of_bins is None else " / ".join(f"{100 * of_bins['found'][key]:.1f}" for key in keys))
        cells.append("" if of_ranks is None else f"{of_ranks['sets']:,}")
        shares = {} if of_ranks is None else of_ranks["found"]
        cells += [f"{100 * shares[key]:.1f}" if (key := f"{name}/{modes['main']}") in shares else "" for name in ranked]
        lines.append(f"| {' | '.join(cells)} |")
    power = records.get(f"{LAWS[-1].name}, bins")
    if power is not None:
        lines += [
            "",
            "The last row is not calibrated: its second system has the log-odds 1.3 z. There, the difference in NLL is "
            f"significant in {power['found']['nll']:.1%} of the data sets.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate the laws, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=1000, help="data sets for errors over equal-width bins")
    parser.add_argument("--ranked-sets", type=int, default=200, help="data sets for rank-based errors")
    parser.add_argument("--laws", type=int, nargs="*", default=range(len(LAWS)), help="numbers of the laws")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for law in (LAWS[k] for k in arguments.laws):
        for kind, n_sets in (("bins", arguments.sets), ("ranks", arguments.ranked_sets)):
            if not n_sets:
                continue
            record = {"sets": n_sets, "found": verdicts(law, n_sets, kind == "ranks")}
            records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
            records[f"{law.name}, {kind}"] = record
            RECORD.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
            RECORD.with_suffix(".md").write_text(table(records))
            print(f"{law.name}, {kind}: {record}", flush=True)


if __name__ == "__main__":
    main()
