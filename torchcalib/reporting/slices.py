"""Search for miscalibrated slices: the intersections of the values of several columns.

A slice has two statistics S = sum_k x_k D_k over the bins k of its rows. D_k is the sum of outcomes minus confidences.
For the mean gap, x = 1. For the slope, which detects over- and under-confidence, x is the log-odds of the mean
confidence of the bin.

The sums of a slice are added from those of the combinations of all columns, the parts of a `Partition`. The outcomes of
a calibrated model are simulated in these combinations. Overlapping slices therefore share their outcomes. The p-value
of a slice compares its larger statistic with the largest one of all slices in each replicate. It is valid for any
overlap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations as subsets
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, check_count, check_flag, is_number, weights_from
from torchcalib.core.clusters import identifiers, numbered, of_samples
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedMode
from torchcalib.core.groups import columns_of, in_groups, levels_of
from torchcalib.core.inputs import input_format_of
from torchcalib.core.partition import SumsByPart
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.sums import BinStats, weighted, with_noise_row
from torchcalib.core.tasks import per_sample, prepare
from torchcalib.functional.binned import ece_from_bins
from torchcalib.inference.adjustment import shrunk_to_mean, step_down
from torchcalib.inference.clusters import random_signs
from torchcalib.inference.intervals import ErrorIntervals, normal_quantile
from torchcalib.inference.roots import cells_of, clipped_log_odds
from torchcalib.inference.sample_size import POWER
from torchcalib.inference.simulation import BinCells, Simulation
from torchcalib.inference.testing import ErrorTest, run_error_test
from torchcalib.io.errors import shown
from torchcalib.io.text import combinations, parts_of_combinations
from torchcalib.ops.segments import cell_sums
from torchcalib.reporting.catalogue import bins_of, catalogue_of
from torchcalib.results.slice_table import SliceTable

DEPTH, MIN_SIZE = 3, 50
"""Defaults of `slices`, and settings of a report: largest number of combined columns, and smallest number of rows."""

_MAX_COMBINATIONS = 2**16
_MAX_SIMULATED, _MIN_REPLICATES = 2**27, 199  # simulated sums of outcomes
_TOTAL_REPLICATES = 200_000  # simulated replicates of ECE, for all slices
_MAX_CLUSTERS, _FEWEST_CLUSTERS = 2**10, 2**8  # clusters that are not merged, for few and for many combinations
_MAX_CLUSTER_SUMS = 2**24  # sums of clusters in all combinations
_SIGNS_AT_ONCE = 64  # replicates of the random signs of clusters


class Intersections(NamedTuple):
    """Slices of up to `depth` columns, as sums of the G combinations of all columns."""

    names: list[str]
    matrix: Tensor  # sparse (S, G), 1 if the slice contains the combination
    places: list[Tensor]  # for each set of columns, the slice of each combination `(G,)`; -1 for none
    n_small: int  # number of slices with too few rows

    @property
    def columns(self) -> Tensor:
        """Number of the set of columns of each slice, in the order of `places`, `(S,)`."""
        sizes = torch.tensor([len(torch.unique(place[place >= 0])) for place in self.places], device="cpu")
        return torch.arange(len(self.places), device="cpu").repeat_interleave(sizes)

    @classmethod
    def of(cls, parts: Sequence[Sequence[str]], sizes: Tensor, depth: int, min_size: float) -> "Intersections":
        """Return all slices of at least `min_size` rows.

        `parts` has the values of each combination, such as ["age=old", "sex=f"], and "" for a missing value. `sizes`
        `(G,)` is the number of rows of each combination.
        """
        columns = []
        for column in zip(*parts, strict=True):
            texts = sorted(set(column) - {""})
            level = {"": -1, **{text: k for k, text in enumerate(texts)}}
            columns.append((torch.tensor([level[text] for text in column], device="cpu"), texts))
        names: list[str] = []
        places: list[Tensor] = []
        n_small = 0
        for size in range(1, min(depth, len(columns)) + 1):
            for chosen in subsets(columns, size):
                numbers, levels = combinations([(codes, len(texts)) for codes, texts in chosen])
                n_rows = torch.zeros(len(levels), dtype=sizes.dtype, device="cpu").index_add(0, numbers, sizes)
                complete, large = (levels >= 0).all(-1) & (n_rows > 0), n_rows >= min_size
                n_small += int((complete & ~large).sum())
                is_kept = complete & large
                place = (is_kept.cumsum(0) + len(names) - 1).masked_fill(~is_kept, -1)
                places.append(place[numbers])
                names += [
                    ", ".join(texts[k] for k, (_, texts) in zip(row, chosen, strict=True))
                    for row in levels[is_kept].tolist()
                ]
        slices = torch.cat(places)
        parts_of = torch.arange(len(parts), device="cpu").repeat(len(places))
        index = torch.stack((slices, parts_of))[:, slices >= 0]
        ones = torch.ones(index.shape[1], dtype=torch.float64, device="cpu")
        matrix = torch.sparse_coo_tensor(index, ones, (len(names), len(parts)), check_invariants=True)
        return cls(names, matrix.coalesce(), places, n_small)

    def sums(self, of_parts: Tensor) -> Tensor:
        """Return the sums `(S, ...)` of slices from those of combinations `(G, ...)`."""
        sums: Tensor = torch.sparse.mm(self.matrix, of_parts.flatten(1))
        return sums.reshape(-1, *of_parts.shape[1:])


def n_rows_of(bins: BinStats) -> Tensor:
    """Return the number of rows of each combination `(G,)`; the effective number for floating weights."""
    cells = BinCells.from_bins(bins)
    return (cells.n / cells.unit).nan_to_num(0, posinf=0).sum(-1)


def table_of_slices(
    slices: Intersections,
    bins: BinStats,
    accumulator: Any,
    *,
    effect: float = 1.0,
    by_cluster: Tensor | None = None,
    n_replicates: int = 999,
    seed: int = 0,
    k: int | None = None,
) -> SliceTable:
    """Return the k most significant slices from the bins `(G, B)` of the combinations of all columns.

    For dependent rows, `effect` is the design effect of all slices, or `by_cluster` has the sums of `_cluster_sums`.
    """
    if not slices.names:
        return SliceTable.empty(slices.n_small)
    n_replicates = min(n_replicates, max(_MIN_REPLICATES, _MAX_SIMULATED // max(1, bins.n.numel())))
    test = _SearchTest.of(slices, cells_of(bins, effect), by_cluster, n_replicates, seed)
    of_slices = accumulator.wrap(slices.sums(bins.sums))
    own = cells_of(of_slices, test.effect * effect)
    n, z = own.n.sum(-1), normal_quantile(0.95, own.n)
    spread = own.noise.sum(-1).sqrt() / n
    low, high = ErrorIntervals(own, z).mean_gap
    few = max(59, min(199, _TOTAL_REPLICATES // max(1, len(n))))
    ece = run_error_test(ErrorTest(ece_from_bins), of_slices, n_replicates=few, seed=seed)
    gap = (own.share * own.gap).sum(-1)
    order = torch.argsort(test.statistic, descending=True, stable=True)
    order = order[torch.argsort(test.p_value[order], stable=True)][:k]

    def column(values: Tensor) -> tuple[float, ...]:
        return tuple(values[order].tolist())

    return SliceTable(
        slice=tuple(slices.names[j] for j in order.tolist()),
        n=column(n),
        gap=column(gap),
        shrunk=column(shrunk_to_mean((low + high) / 2, (high - low) / (2 * z))),
        ece=column(ece.statistic),
        noise_floor=column(ece.noise_floor),
        ecce=(math.nan,) * len(order),
        statistic=column(test.statistic),
        p_value=column(test.p_value),
        detectable=column((test.critical + float(torch.special.ndtri(z.new_tensor(POWER)))) * spread),
        spread=column(spread),
        n_slices=len(n),
        n_small=slices.n_small,
        critical_value=test.critical,
    )


class _SearchTest(NamedTuple):
    """Result of the tests of all slices."""

    statistic: Tensor  # larger statistic of each slice `(S,)`
    p_value: Tensor  # adjusted for all slices `(S,)`
    critical: float  # quantile of the largest statistic
    effect: Tensor  # design effect of the mean gap of each slice, at least 1, `(S,)`

    @classmethod
    def of(
        cls, slices: Intersections, cells: BinCells, by_cluster: Tensor | None, n_replicates: int, seed: int
    ) -> "_SearchTest":
        """Compare the statistics of slices with simulated outcomes, and with random signs of the sums of clusters.

        The p-value is the larger one of both tests, as in `inference.clusters`. A design effect f divides the
        statistics by sqrt(f), and multiplies their skewness by it, as if all rows of a cluster were one.
        """
        weights = _slice_weights(cells)
        third = cells.unit * cells.noise * (1 - 2 * cells.confidence)  # third cumulant of the sum of outcomes

        def of_slices(sums: Tensor, power: int) -> Tensor:
            return slices.sums((weights.pow(power) * sums.nan_to_num(0).unsqueeze(-1)).sum(-2))

        variance = of_slices(cells.noise, 2)
        skewness = (of_slices(third, 3) / variance.pow(1.5)).nan_to_num(0)

        def larger(deviation: Tensor) -> Tensor:
            """Return the larger statistic of each slice `(r, S)` for sums of deviations `(r, G, B)`."""
            of_parts = (deviation.unsqueeze(-1) * weights).sum(-2)  # (r, G, 2)
            z = slices.sums(of_parts.movedim(0, 1)).movedim(0, 1) / variance.sqrt()
            return without_skewness(z.nan_to_num(0, posinf=0, neginf=0), skewness).abs().amax(-1)

        def simulated() -> Iterator[Tensor]:
            for replicates in Simulation(cells, 0, seed, n_replicates).statistics():
                yield larger(replicates.gap * cells.n)

        if by_cluster is None:
            observed = larger((cells.outcomes - cells.expected).unsqueeze(0))[0]
            return cls(observed, *step_down(observed, simulated()), torch.ones_like(observed))
        # The variance of a slice is the sum of squares of its clusters. It is too small if no rare outcome occurred. It
        # is therefore at least that of independent rows, times the design effect of all slices of the same columns.
        sums = slices.sums(by_cluster.movedim(1, 0))  # (S, C, 2)
        squares = sums.square().sum(1)
        of_columns = variance.new_zeros(2, len(slices.places), 2)
        of_columns.index_add_(1, slices.columns, torch.stack((squares, variance)))
        common = (of_columns[0] / of_columns[1]).nan_to_num(1, posinf=1).clamp(min=1)[slices.columns]
        robust = squares.maximum(variance * common)
        effect = (robust / variance).nan_to_num(1, posinf=1)
        z = (sums.sum(1) / robust.sqrt()).nan_to_num(0, posinf=0, neginf=0)
        observed = without_skewness(z, skewness * effect.sqrt()).abs().amax(-1)
        signs = random_signs(sums[0, :, 0], seed, n_replicates)  # (R, C)
        flipped = (
            (torch.einsum("rc,sck->rsk", each, sums) / robust.sqrt()).nan_to_num(0).abs().amax(-1)
            for each in torch.split(signs, _SIGNS_AT_ONCE)
        )
        tests = [step_down(observed, replicates) for replicates in (simulated(), flipped)]
        p_values, critical = zip(*tests, strict=True)
        return cls(observed, p_values[0].maximum(p_values[1]), max(critical), effect[:, 0])


def _slice_weights(cells: BinCells) -> Tensor:
    """Return the weights x of the mean gap and of the slope in each bin `(G, B, 2)`."""
    return torch.stack((torch.ones_like(cells.n), clipped_log_odds(cells)), -1)


def _cluster_sums(
    p: Predictions, part: Tensor, clusters: Tensor, accumulator: EqualWidthBins, bins: BinStats
) -> Tensor:
    """Return both statistics of each cluster in each combination of columns, float64 `(C, G, 2)`.

    `part` is the combination of each row `(N,)`, and `clusters` its cluster. More clusters than `_MAX_CLUSTERS` are
    merged at random, because sums of independent clusters are independent.
    """
    events, weights = accumulator.events(p), _slice_weights(cells_of(bins, 1.0)).to(part.device)
    n_parts = len(weights)
    number = numbered(clusters, max(_FEWEST_CLUSTERS, min(_MAX_CLUSTERS, _MAX_CLUSTER_SUMS // n_parts)))
    confidence, outcome = (x.reshape(-1).double() for x in (events.confidence, events.outcome))
    residual = weighted(
        outcome - confidence, None if events.weights is None else events.weights.reshape(-1), torch.float64
    )
    columns = residual * weights[part, accumulator.cell(confidence)].T
    n_clusters = int(number.max()) + 1 if number.numel() else 1
    sums = cell_sums(number * n_parts + part, columns, n_clusters * n_parts)
    return sums.reshape(2, n_clusters, n_parts).movedim(0, -1).cpu()


def without_skewness(z: Tensor, skewness: Tensor) -> Tensor:
    """Return standardised sums with a nearly normal distribution.

    w = (6 / g) ((1 + g z / 2)^(1/3) - 1) + g / 6 for the skewness g of z. It increases with z, and is nearly normal.
    Slices with rare outcomes then do not dominate the largest statistic. The level of the test does not depend on it.

    Reference:
        Wilson, Hilferty: The distribution of chi-square (PNAS 1931), for a gamma distribution with this skewness.
    """
    g = torch.where(skewness.abs() < 1e-4, 1e-4, skewness)  # the limit g = 0 is z
    base = 1 + g * z / 2
    return 6 / g * (base.sign() * base.abs().pow(1 / 3) - 1) + g / 6


def slices(
    preds: Any,
    target: Any,
    columns: Any,
    task: Task | None = None,
    *,
    depth: int = DEPTH,
    min_size: float = MIN_SIZE,
    n_bins: int = 4,
    n_replicates: int = 999,
    seed: int = 0,
    clusters: Any = None,
    cumulative: bool = False,
    class_names: Sequence[str | int] | None = None,
    sample_weight: Any = None,
    **options: Unpack[InputOptions],
) -> SliceTable:
    """Search for slices of the rows, such as "age=old, sex=f", in which a model is miscalibrated.

    Slices are all intersections of the values of up to `depth` columns. The event of multi-class predictions is that
    the predicted class is right. p-values are adjusted for all slices (step-down max-T of Westfall and Young 1993).
    Their null distribution is simulated from the confidences, and is therefore valid for small slices and rare
    outcomes. `SliceTable.detectable` is the smallest error that the search finds.

    For dependent rows, pass `clusters`. The p-value is then the larger one of this test and of random signs of the
    residuals of each cluster, which have the same sign in all slices. It is too small for few clusters with rare
    outcomes, as is that of `Clustered`.

    Args:
        preds: Probabilities, or logits with `from_logits=True`: binary `(N,)`, multi-class `(N, C)`. None infers
            `from_logits` from all values.
        target: Labels, or soft targets.
        columns: DataFrame, dict of columns, or list of arrays `(N,)`. Text, and up to 10 different numbers, are values
            of the column. A column of more numbers is divided into `n_bins` ranges with similar numbers of rows. A row
            with a missing value is in no slice of this column. Missing values are None, NaN and "", and -1 in a column
            of up to 10 integers.
        task: `"binary"` or `"multiclass"`; None infers it from the shapes.
        depth: Largest number of columns that are combined.
        min_size: Smallest number of rows of a slice; smallest effective number for floating weights.
        n_bins: Number of ranges of a column of numbers.
        n_replicates: Number of simulated replicates. The smallest p-value is 1 / (`n_replicates` + 1).
        seed: Seed of the simulation.
        clusters: Cluster of each row `(N,)`, integers or text, if rows are dependent.
        cumulative: Whether to compute `ecce` and `multicalibration_error`. They need a sort of all rows, and as much
            time as the search.
        class_names: Names of the classes, if `target` is text.
        sample_weight: Alias of `weights`, as in scikit-learn.
        **options: `from_logits`, `weights`, `ignore_index` and others of `torchcalib.functional.InputOptions`.

    Returns:
        The table of all slices, the most significant first.

    Raises:
        TypeError, ValueError: For invalid input, a multi-label task, or more than 65,536 combinations of all columns.

    Reference:
        Arrieta-Ibarra et al.: Metrics of calibration for probabilistic predictions (JMLR 2022), for ECCE-R; Guy et al.:
        Measuring multi-calibration (arXiv 2506.11251), for `multicalibration_error`.

    Example:
        >>> import torch, torchcalib
        >>> g = torch.Generator().manual_seed(0)
        >>> age, sex = torch.randint(0, 2, (2, 4000), generator=g)
        >>> p = torch.rand(4000, generator=g)
        >>> y = torch.bernoulli(p, generator=g)
        >>> too_high = torch.where((age == 1) & (sex == 0), p.sqrt(), p)
        >>> found = torchcalib.slices(too_high, y, {"age": age, "sex": sex})
        >>> found.slice[0], round(found.gap[0], 2), found.p_value[0]
        ('age=1, sex=0', -0.17, 0.001)
    """
    for name, value in {"depth": depth, "n_bins": n_bins, "n_replicates": n_replicates}.items():
        check_count(name, value)
    check_flag("cumulative", cumulative)
    if not is_number(min_size) or not min_size >= 0:
        raise ValueError(
            f"`min_size` must be a number of at least 0, got {shown(min_size)}. The default is {MIN_SIZE}."
        )
    # 1. Predictions
    weights = weights_from(options.pop("weights", None), sample_weight)
    rows, mode, samples = _rows_of(preds, target, task, class_names, weights, dict(options))
    device, read_as = rows.input_preds.device, "binary" if mode == "positive" else "multiclass"
    # 2. Combinations of the values of all columns
    numbers, parts = _combinations_of(columns, samples, device, n_bins)
    keys = None if clusters is None else of_samples(identifiers(clusters, device), samples)
    # 3. Sums over the bins of each combination
    accumulator = replace(catalogue_of(read_as, with_classes=False).accumulators[bins_of(mode)], with_ecd=False)
    by_part: SumsByPart[BinStats] = SumsByPart(accumulator, len(parts))
    sums = by_part.from_predictions(in_groups(rows, numbers, len(parts)))
    assert sums.noise_flag is not None  # not None, because the accumulator sums the noise
    bins = accumulator.wrap(with_noise_row(sums.sums.detach(), sums.noise_flag).cpu())
    # 4. Tests of all intersections
    part, found = numbers.reshape(-1), Intersections.of(parts, n_rows_of(bins), depth, min_size)
    by_cluster = None if keys is None else _cluster_sums(rows, part, keys.reshape(-1), accumulator, bins)
    table = table_of_slices(found, bins, accumulator, by_cluster=by_cluster, n_replicates=n_replicates, seed=seed)
    if not cumulative:
        return table
    # 5. Cumulative errors
    ecce, of_all = _ecce(ExactSample(mode).from_predictions(rows), part.cpu().numpy(), found)
    by_name = dict(zip(found.names, ecce, strict=True))
    ecce = [by_name[name] for name in table.slice]
    spread = float(bins.noise.sum().sqrt() / bins.n.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num(np.append(ecce, of_all) / np.append(table.spread, spread), posinf=np.inf)
    return replace(table, ecce=tuple(ecce), multicalibration_error=float(ratios.max()) * spread)


def _rows_of(
    preds: Any, target: Any, task: Task | None, class_names: Any, weights: Any, options: Any
) -> tuple[Predictions, NamedMode, tuple[int, ...]]:
    """Return the predictions, their events, and the shape of the rows."""
    given = {name: options.pop(name, None) for name in ("from_logits", "ignore_index", "positive_classes")}
    p = prepare(preds, target, task, class_names=class_names, **given)
    given["from_logits"] = p.from_logits
    read_as = "binary" if given["positive_classes"] is not None else p.task
    if read_as not in ("binary", "multiclass"):
        raise ValueError(
            f"`task` must be 'binary' or 'multiclass' for slices, got {shown(read_as)}. Pass one label: "
            "slices(preds[:, k], target[:, k], columns)."
        )
    input_format = input_format_of(p.task, {**options, **{k: v for k, v in given.items() if v is not None}})
    own = None if weights is None else per_sample("weights", weights, p.preds)
    rows = input_format.read(p.preds, p.target, own, batch_shape=())
    return rows, "positive" if read_as == "binary" else "top_label", input_format.samples_of(p.preds, p.target)


def _combinations_of(
    columns: Any, samples: tuple[int, ...], device: torch.device, n_bins: int
) -> tuple[Tensor, list[list[str]]]:
    """Return the combination of the values of all columns in each row, and the parts of each combination."""
    found = columns_of(columns, samples)
    if found is None:
        raise TypeError(
            f"`columns` must be a DataFrame, a dict of columns or a list of arrays with {samples[0]:,} rows, got "
            f"{shown(columns)}. Pass a dict such as {{'age': age, 'sex': sex}}."
        )
    if not found:
        raise ValueError("`columns` must contain at least one column, got none. Pass a dict such as {'age': age}.")
    levels = levels_of(found, samples, device, "columns", n_bins)
    numbers, of_parts = combinations([(codes, len(texts)) for codes, texts in levels.values()])
    if len(of_parts) > _MAX_COMBINATIONS:
        raise ValueError(
            f"`columns` must have at most {_MAX_COMBINATIONS:,} combinations of values, got {len(of_parts):,}. Pass "
            "fewer columns, or coarser values."
        )
    return numbers, parts_of_combinations(of_parts.tolist(), {name: texts for name, (_, texts) in levels.items()})


def _ecce(sample: RankedSample, part: NDArray[Any], slices: Intersections) -> tuple[list[float], float]:
    """Return ECCE-R of each slice, and of all rows. `part` is the combination of columns of each row `(N,)`.

    Rows are sorted once by their score, and then by slice for each set of columns. Equal scores have no order.
    """
    score, positives = (x.detach().cpu().numpy() for x in (sample.score, sample.positives))
    order = np.argsort(score)
    order = order[~np.isnan(score[order])]  # without ignored rows
    score, part = score[order], part[order]
    n = None if sample.n is None else sample.n.detach().cpu().numpy()[order].astype(float)
    confidence = 1 / (1 + np.exp(-score.astype(float))) if sample.from_logits else score.astype(float)
    residual = positives[order].astype(float) - (confidence if n is None else n * confidence)
    has_ties = bool((score[1:] == score[:-1]).any())
    found = np.zeros(1 + len(slices.names))  # the last entry is that of all rows, and of rows in no slice before it
    for place in (*slices.places, torch.full((slices.matrix.shape[1],), -1, device="cpu")):
        first = int(place.min())
        codes = (place - first).numpy()
        # Stable sorting of 16-bit integers is linear.
        key = (codes.astype(np.uint16) if codes.max() < 2**16 else codes)[part]
        by_slice = np.argsort(key, kind="stable")
        sizes = np.bincount(key)
        numbers = np.flatnonzero(sizes)
        starts = (sizes.cumsum() - sizes)[numbers]
        sums = residual[by_slice].cumsum()
        before = np.append(0.0, sums)[starts]
        total = sizes if n is None else np.bincount(key, n)
        if has_ties:
            ordered = score[by_slice]
            is_end = np.append(ordered[1:] != ordered[:-1], True)
            is_end[starts[1:] - 1] = True
            ends = np.flatnonzero(is_end)
            sums, starts = sums[ends], np.searchsorted(ends, starts)
        high = (np.maximum.reduceat(sums, starts) - before).clip(min=0)
        low = (np.minimum.reduceat(sums, starts) - before).clip(max=0)
        found[numbers + first] = (high - low) / total[numbers]
    return found[:-1].tolist(), float(found[-1])
