"""Verdicts and intervals of `torchcalib.compare`: `python -m benchmarks.comparisons`.

Laws of the first table have two calibrated systems, so that every verdict on a calibration error is false. For exact
calibration, predictions are drawn from their distribution given the outcome: if p has the density f, the density given
y = 1 is proportional to p f(p). Laws of the second table have a difference, which the intervals should contain.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.study import Cell, Found, Part, Row, Study, main
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
from torchcalib.reporting.comparison.system import (
    RANKED_REPLICATES,
    Draws,
    OrderedSample,
    bins_of_calibrated,
    samples_of_calibrated,
    samples_of_flipped,
)
from torchcalib.reporting.testing import LEVEL
from torchcalib.results.lines import Better

N_BINS = 15
MODES: Mapping[Task, tuple[NamedMode, NamedMode]] = {
    "binary": ("positive", "top_label"),
    "multiclass": ("top_label", "classwise"),
}

Values = dict[str, Tensor]
"""Errors by `Line.key`."""

Sample = tuple[dict[str, Tensor], Tensor, Tensor | None]
"""Predictions by system, targets, and clusters or None."""

Scales = tuple[float, float]
"""One number for each system."""


def beta_given(a: float, b: float, target: Tensor, g: torch.Generator) -> Tensor:
    """Return probabilities with the distribution beta(a, b), drawn given the outcomes."""
    y = target.double()
    ones = torch._standard_gamma(a + y, generator=g)
    zeros = torch._standard_gamma(b + 1 - y, generator=g)
    return ones / (ones + zeros)


def binary_targets(n: int, p: float, g: torch.Generator) -> Tensor:
    """Return n labels with the frequency p."""
    return torch.bernoulli(torch.full((n,), p, dtype=torch.float64), generator=g).long()


def beta_views(a: float, b: float, n: int, g: torch.Generator, constant: bool = False) -> Sample:
    """Return two systems with beta(a, b) that share only the outcome, or one and the constant mean."""
    target = binary_targets(n, a / (a + b), g)
    other = torch.full((n,), a / (a + b), dtype=torch.float64) if constant else beta_given(a, b, target, g)
    return {"a": beta_given(a, b, target, g), "b": other}, target, None


def mixture(n: int, g: torch.Generator, constant: bool = False) -> Sample:
    """Return two systems with the mixture of beta(2, 8) and beta(8, 2), or one and its two-valued coarsening."""
    target = binary_targets(n, 0.5, g)

    def view() -> tuple[Tensor, Tensor]:
        # P(second component | y = 1) = 0.8
        second = torch.rand(n, generator=g, dtype=torch.float64) < torch.where(target == 1, 0.8, 0.2)
        return torch.where(second, beta_given(8, 2, target, g), beta_given(2, 8, target, g)), second

    a, component = view()
    return {"a": a, "b": torch.where(component, 0.8, 0.2).double() if constant else view()[0]}, target, None


def normal_log_odds(n: int, g: torch.Generator, scales: Scales = (1.5, 1.5), factors: Scales = (1.0, 1.0)) -> Sample:
    """Return two systems with log-odds N(+-s^2 / 2, s^2) given the outcome, multiplied by a factor for each system."""
    target = binary_targets(n, 0.5, g)
    sign = 2.0 * target - 1
    a, b = (
        (factor * (sign * s**2 / 2 + s * torch.randn(n, generator=g, dtype=torch.float64))).sigmoid()
        for s, factor in zip(scales, factors, strict=True)
    )
    return {"a": a, "b": b}, target, None


def nested_log_odds(n: int, g: torch.Generator) -> Sample:
    """Return a system with log-odds of two features, and one with the log-odds of the first of them."""
    target = binary_targets(n, 0.5, g)
    first, second = ((2.0 * target - 1) * 0.5 + torch.randn(n, generator=g, dtype=torch.float64) for _ in range(2))
    return {"a": (first + second).sigmoid(), "b": first.sigmoid()}, target, None


def clustered(n: int, g: torch.Generator) -> Sample:
    """Return nested systems for 50 clusters of rows with outcomes that share part of the noise.

    Features are independent; y = 1 if a normal variable with correlation 0.3 within clusters is below a limit.
    """
    p = (1.5 * torch.randn(n, generator=g, dtype=torch.float64)).sigmoid()
    cluster = torch.arange(n) % 50
    shared = torch.randn(50, generator=g, dtype=torch.float64)[cluster]
    own = torch.randn(n, generator=g, dtype=torch.float64)
    target = (math.sqrt(0.3) * shared + math.sqrt(0.7) * own < torch.special.ndtri(p)).long()
    grid = (1.5 * torch.special.ndtri((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)).sigmoid()
    above = float(grid[grid > 0.5].mean())
    return {"a": p, "b": torch.where(p > 0.5, above, 1 - above).double()}, target, cluster


def classes(
    num_classes: int, n: int, g: torch.Generator, scales: Scales = (2.0, 2.0), factors: Scales = (1.0, 1.0)
) -> Sample:
    """Return two posteriors of classes with Gaussian features that share only the label, with `factors` of logits."""
    target = torch.randint(num_classes, (n,), generator=g)
    means = torch.nn.functional.one_hot(target, num_classes).double()
    a, b = (
        (factor * s * (s * means + torch.randn(n, num_classes, generator=g, dtype=torch.float64))).softmax(-1)
        for s, factor in zip(scales, factors, strict=True)
    )
    return {"a": a, "b": b}, target, None


def changed(n: int, g: torch.Generator, factor: float = 1.0, shift: float = 0.0) -> Sample:
    """Return a calibrated system with normal log-odds z, and the log-odds `factor` z + `shift` of the same rows."""
    z = 1.5 * torch.randn(n, generator=g, dtype=torch.float64)
    target = torch.bernoulli(z.sigmoid(), generator=g).long()
    return {"a": z.sigmoid(), "b": (factor * z + shift).sigmoid()}, target, None


class Law(NamedTuple):
    """Distribution of two systems and their targets."""

    name: str
    task: Task
    draw: Callable[[int, torch.Generator], Sample]
    n: int = 500
    is_calibrated: bool = True
    has_ranks: bool = False  # whether rank-based errors are simulated


CALIBRATED = (
    Law("normal log-odds, equal accuracy", "binary", normal_log_odds, has_ranks=True),
    Law("normal log-odds, 1.5 and 0.5", "binary", partial(normal_log_odds, scales=(1.5, 0.5)), has_ranks=True),
    Law("normal log-odds, nested", "binary", nested_log_odds, has_ranks=True),
    Law("beta mixture, equal accuracy", "binary", mixture, has_ranks=True),
    Law("beta mixture and two values", "binary", partial(mixture, constant=True), has_ranks=True),
    Law("beta(0.5, 9.5), equal accuracy", "binary", partial(beta_views, 0.5, 9.5), has_ranks=True),
    Law("beta(0.5, 9.5) and constant", "binary", partial(beta_views, 0.5, 9.5, constant=True), has_ranks=True),
    Law("beta(0.5, 20), equal accuracy", "binary", partial(beta_views, 0.5, 20), has_ranks=True),
    Law("beta(0.5, 20) and constant", "binary", partial(beta_views, 0.5, 20, constant=True), has_ranks=True),
    Law("5 classes, equal accuracy", "multiclass", partial(classes, 5), has_ranks=True),
    Law("5 classes, different accuracy", "multiclass", partial(classes, 5, scales=(2.0, 0.7)), has_ranks=True),
    Law("10 classes, equal accuracy", "multiclass", partial(classes, 10), has_ranks=True),
    Law("10 classes, different accuracy", "multiclass", partial(classes, 10, scales=(2.0, 0.7)), has_ranks=True),
    Law("normal log-odds and two values, 50 clusters", "binary", clustered, has_ranks=True),
)
DIFFERENT = (
    Law("z and 1.3 z", "binary", partial(changed, factor=1.3), is_calibrated=False),
    Law("z and 2 z", "binary", partial(changed, factor=2.0), is_calibrated=False),
    Law("z and z + 0.5", "binary", partial(changed, shift=0.5), is_calibrated=False),
    Law(
        "both over-confident by 1.5, sharpness 1.5 and 0.5",
        "binary",
        partial(normal_log_odds, scales=(1.5, 0.5), factors=(1.5, 1.5)),
        is_calibrated=False,
    ),
    Law("10 classes, logits times 1 and 1.5", "multiclass", partial(classes, 10, factors=(1.0, 1.5)), 500, False),
)
LARGE = ("normal log-odds, equal accuracy", "normal log-odds, 1.5 and 0.5", "normal log-odds, nested")
LARGE += ("10 classes, equal accuracy", "10 classes, different accuracy")
LAWS = (*CALIBRATED, *(law._replace(n=2000, has_ranks=False) for law in CALIBRATED if law.name in LARGE), *DIFFERENT)
LAWS += tuple(law._replace(n=2000) for law in DIFFERENT)


def errors(
    p: Predictions, clusters: Tensor | None, modes: Sequence[NamedMode], ranked: bool, seed: int
) -> list[Values]:
    """Return the errors of D data sets `(D,)`; and their replicates `(R, D)`: bootstrap, null and, if given, clusters.

    The functions and the random numbers are those of `torchcalib.compare`, for D data sets at once.
    """
    n = p.samples[-1]
    of_rows = torch.arange(n) if clusters is None else clusters
    draws = Draws(seed, RANKED_REPLICATES, of_rows.device)
    groups = torch.arange(int(of_rows.max()) + 1)
    counts, signs = draws.weights(groups), draws.signs(groups)
    found: list[Values] = [{} for _ in range(3 if clusters is None else 4)]
    if not ranked:
        weights = counts[:, of_rows].double()
        for key, loss in (("nll", p.cross_entropy), ("brier", p.squared_error)):
            found[0][key], found[1][key] = loss.mean(-1), (weights @ loss.T) / weights.sum(-1, keepdim=True)
    tested = [each for each in catalogue_of(p.task, N_BINS).members if each.is_error and "debiased" not in each.key]
    for mode in modes:
        name = sample_of(mode) if ranked else bins_of(mode)
        members = [each for each in tested if each.statistic == name]
        if ranked:
            sample = ExactSample(mode).from_predictions(p)
            order = order_of(sample.score)
            ordered = OrderedSample.from_sample(sample)
            rows = torch.arange(n).expand(order.shape).gather(-1, order)
            resampled = ExactSample(mode).from_predictions(p.resampled(counts[:, of_rows].double()))
            samples: list[list[RankedSample]] = [[sample], [OrderedSample.from_sample(resampled)]]
            samples.append(list(samples_of_calibrated(ordered, rows, seed, RANKED_REPLICATES)))
            if clusters is not None:
                samples.append(list(samples_of_flipped(ordered, of_rows[rows], signs)))
            for columns, chunks in zip(found, samples, strict=True):
                parts = [values(members, {name: each}) for each in chunks]
                columns |= {key: torch.cat([x[key] for x in parts]) for key in parts[0]}
            continue
        accumulator = EqualWidthBins(mode, N_BINS, False, with_noise=True)
        plain = replace(accumulator, with_noise=False)
        cells = plain.cells(p)
        shape = *cells.columns.shape[:-1], N_BINS
        bin_of = torch.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1) * N_BINS + cells.index.unsqueeze(-2)
        place = torch.stack([bin_of, of_rows.expand(bin_of.shape)]).flatten(1)
        size = math.prod(shape), len(groups)
        table = torch.sparse_coo_tensor(place, cells.columns.flatten(), size, check_invariants=False)

        def summed(weights: Tensor, table: Tensor = table, shape: tuple[int, ...] = shape) -> Tensor:
            """Return the sums of all cells `(R, ..., F, B)` for weights of the groups `(R, G)`."""
            return (table @ weights.double().T).T.reshape(len(weights), *shape)

        b, drawn = accumulator.from_predictions(p), plain.wrap(summed(counts))
        bins = [b, drawn, bins_of_calibrated(b, residuals(drawn), seed)]
        if clusters is not None:
            flipped = residuals(plain.wrap(summed(signs)))
            bins.append(BinCells.from_bins(b).with_gaps(flipped / b.n.masked_fill(b.n == 0, 1)))
        for columns, each in zip(found, bins, strict=True):
            columns |= values(members, {name: each})
    return found


def residuals(b: BinStats) -> Tensor:
    """Return the sum of outcomes minus confidences in each bin."""
    return b.sums[..., 2, :] - b.sums[..., 1, :]


def outcomes(law: Law, n_sets: int, ranked: bool) -> dict[str, dict[str, float]]:
    """Return shares of data sets by `Line.key`, and the mean difference beyond chance; in batches of data sets.

    `significant`: p <= 5%. `excludes_0`: the interval excludes 0. `agree`: both or none. `covered`: the interval
    contains the mean difference beyond chance of all data sets.
    """
    found: dict[str, list[Tensor]] = defaultdict(list)
    num_classes = 1 if law.task == "binary" else law.draw(2, torch.Generator())[0]["a"].shape[-1]
    at_once = 4 if ranked else max(5, min(100, 250_000 // (law.n * num_classes)))
    for seed in range(0, n_sets, at_once):
        sets = [law.draw(law.n, torch.Generator().manual_seed(seed + k)) for k in range(min(at_once, n_sets - seed))]
        clusters, target = sets[0][2], torch.stack([target for _, target, _ in sets])
        modes = modes_of(law.task)[: 1 if ranked else None]
        by_system = []
        for name in ("a", "b"):
            probs = torch.stack([preds[name] for preds, _, _ in sets])
            input_format = InputFormat(law.task, num_classes=None if law.task == "binary" else num_classes)
            p = input_format.read(probs, target, None, batch_shape=(len(sets),))
            by_system.append(errors(p, clusters, modes, ranked, seed))
        n_clusters = None if clusters is None else float(clusters.max()) + 1
        for key in by_system[0][0]:
            pair, bootstrap, *nulls = ((a[key], b[key]) for a, b in zip(*by_system, strict=True) if key in a)
            better: Better = "nearer to 0" if key.startswith("esce") else "lower"
            test = pair_test(pair, bootstrap, nulls, better, n_clusters)
            columns = test.value - test.chance, test.low, test.high, test.p_value
            found[key].append(torch.stack([each.double() for each in columns]))
    return {key: summary(*torch.cat(parts, -1)) for key, parts in found.items()}


def summary(beyond: Tensor, low: Tensor, high: Tensor, p_value: Tensor) -> dict[str, float]:
    """Return the shares and the mean of `outcomes` for one line, from its values in all data sets."""
    significant, excludes = p_value <= (1 - LEVEL) * (1 + 1e-9), (low > 0) | (high < 0)
    truth = beyond.mean()
    shares = {
        "significant": significant,
        "excludes_0": excludes,
        "agree": significant == excludes,
        "covered": (low <= truth) & (truth <= high),
    }
    return {"beyond": float(truth), **{name: float(each.double().mean()) for name, each in shares.items()}}


KINDS = {f"{law.name}, n = {law.n}": law for law in LAWS}
CELLS = [(name, kind) for name, law in KINDS.items() for kind in ("bins", "ranks") if kind == "bins" or law.has_ranks]
NOT_MEASURED = Found("", {})
RANKED = ("ace", "tce", "ks", "atb", "mcb")


def measured(name: str, kind: str, n_sets: int) -> dict[str, dict[str, float]]:
    return outcomes(KINDS[name], n_sets, ranked=kind == "ranks")


def tables(found: dict[Cell, Found]) -> Iterator[list[Row] | str]:
    """Yield the share of lines whose interval and p-value agree, false verdicts, coverage and power."""
    agreeing = [(each.sets, x["agree"]) for each in found.values() for x in each.values.values() if "agree" in x]
    n_agree, n_lines = sum(round(n * share) for n, share in agreeing), sum(n for n, _ in agreeing)
    yield f"They agree in {n_agree:,} of {n_lines:,} lines."
    false = list[Row]()
    for name, law in KINDS.items():
        if law.is_calibrated:
            of_bins, of_ranks = (found.get((name, kind), NOT_MEASURED) for kind in ("bins", "ranks"))
            shares = (of_ranks.values.get(f"{error}/{MODES[law.task][0]}") for error in RANKED)
            of_errors = ("" if x is None else f"{100 * x['significant']:.1f}" for x in shares)
            false.append(
                (law.name, law.n, of_bins.sets, *both_modes(law, of_bins, "excludes_0"), of_ranks.sets, *of_errors)
            )
    yield false
    for share in ("covered", "excludes_0"):
        rows = list[Row]()
        for name, law in KINDS.items():
            if not law.is_calibrated:
                of_bins = found.get((name, "bins"), NOT_MEASURED)
                scores = (
                    f"{100 * of_bins.values[key][share]:.1f}" if of_bins.values else "" for key in ("nll", "brier")
                )
                rows.append((law.name, law.n, of_bins.sets, *both_modes(law, of_bins, share), *scores))
        yield rows


def both_modes(law: Law, found: Found, share: str) -> list[str]:
    """Return the share in percent of each error over bins, in both modes."""
    cells = []
    for name in ("ece", "esce", "mce", "rmsce"):
        # The class-wise ESCE is always 0.
        keys = [
            key for mode in MODES[law.task] if (key := f"{name}/{mode}") in found.values and key != "esce/classwise"
        ]
        cells.append(" / ".join(f"{100 * found.values[key][share]:.1f}" for key in keys))
    return cells


STUDY = Study("comparisons", 1_000, [Part(CELLS, measured, tables)])

if __name__ == "__main__":
    main(STUDY)
