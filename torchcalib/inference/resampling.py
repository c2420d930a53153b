"""Random weights of resampled units, and percentile bootstrap intervals for any metric.

Replicates are the first axis everywhere: R replicates of the weights of N rows are `(R, N)`, and R replicates of a
metric with values `(...)` are `(R, ...)`. Code that needs much memory for each replicate computes a few at a time.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, Literal, Self, Unpack, get_args, get_origin

import torch
from torch import Tensor

from torchcalib._bridges import Advising
from torchcalib.core.arguments import (
    InputOptions,
    Task,
    check_count,
    check_level,
    check_seed,
    task_of,
    unknown_argument,
)
from torchcalib.core.checks import check_indices
from torchcalib.core.clusters import effective_number, least_of_batch
from torchcalib.core.inputs import flattened, read_input
from torchcalib.core.predictions import Predictions, in_all_replicates, replicates_at_once
from torchcalib.core.tasks import infers_task
from torchcalib.io.errors import shown
from torchcalib.ops.counter_rng import multinomial_counts, poisson_counts, random_words
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import cell_sums
from torchcalib.special.beta import betainc
from torchcalib.special.binomial import t_critical

Law = Literal["multinomial", "poisson", "sign"]
"""Distribution of the weights of U units in a replicate.

- "multinomial": how often each unit occurs in U draws with replacement. This is the bootstrap of Efron (1979).
- "poisson": independent Poisson counts of mean 1. The number of units need not be known, so rows can be streamed
  (Oza and Russell 2001).
- "sign": -1 or 1, each with probability 1/2. They multiply residuals, which gives the wild bootstrap with Rademacher
  weights (Cameron, Gelbach and Miller 2008).
"""


@dataclass(frozen=True, eq=False)
class Weights:
    """Random weights of units in replicates. A unit is a row, or all rows of a cluster or of a random group.

    A weight depends only on the seed, the law, the number of the replicate and the number of the unit (and for
    "multinomial" on the number of units). It does not depend on batches, their order, or the device.

    Reference:
        Efron: Bootstrap methods: another look at the jackknife (Annals of Statistics, 1979); Oza, Russell: Online
        bagging and boosting (AISTATS 2001); Cameron, Gelbach, Miller: Bootstrap-based improvements for inference with
        clustered errors (Review of Economics and Statistics, 2008).
    """

    seed: int
    units: Tensor  # number of each unit, int64 (U,); "multinomial" uses only how many there are
    law: Law
    place: Tensor | None = None  # index of the unit of each entry (N,), -1 for weight 0; None: entries are units
    first: int = 0  # number of the random stream of replicate 0, which separates ranks and independent sets of weights

    @classmethod
    def with_replacement(cls, seed: int, present: Tensor, groups: Tensor | None = None) -> Self:
        """Return weights of N entries that are drawn with replacement, alone or in `groups` `(N,)` of equal weight.

        `present` is a mask of the entries that can be drawn; the others have weight 0.
        """
        n_units = len(present)
        place = None  # all entries are units
        if groups is not None:
            units, index = torch.unique(groups[present], return_inverse=True)
            place = torch.full_like(present, -1, dtype=torch.int64).masked_scatter(present, index)
            n_units = len(units)
        elif not bool(present.all()):
            place = (present.cumsum(0) - 1).masked_fill(~present, -1)
            n_units = int(present.sum())
        # Without any entry, a single unit with no entries keeps the shapes valid.
        units = torch.arange(n_units if place is None else max(1, n_units), device=present.device)
        return cls(seed, units, "multinomial", place)

    def in_replicates(self, replicates: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weights of all entries in the replicates with these numbers `(r,)`: `(r, N)`, `wide_dtype`."""
        dtype = dtype or wide_dtype(self.units.device)
        streams = self.first + replicates
        if self.law == "multinomial":
            weights = multinomial_counts(self.seed, streams, len(self.units), dtype)
        elif self.law == "poisson":
            weights = poisson_counts(self.seed, streams, self.units, dtype)
        else:  # the leading bit of a random word in [0, 2^32)
            weights = (2 * (random_words(self.seed, streams, self.units) >> 31) - 1).to(dtype)
        return weights if self.place is None else weights[:, self.place].masked_fill(self.place < 0, 0)

    def chunks(self, n_replicates: int, elements: int, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """Yield the weights `(r, N)` of R replicates, a few at a time if each needs `elements` values in memory."""
        replicates = torch.arange(n_replicates, device=self.units.device)
        for some in torch.split(replicates, replicates_at_once(elements)):
            yield self.in_replicates(some, dtype)


def resampled_rows(p: Predictions, seed: int, groups: Tensor | None = None) -> tuple[Weights, float | None]:
    """Return weights of the rows of `p` or of `groups`, and the effective number of groups (None for rows).

    Rows with weight 0 in all batch elements are never drawn. Groups are integers `(N,)`; others raise an error.
    """
    n, device = p.samples[-1], p.input_preds.device
    present = torch.ones(n, dtype=torch.bool, device=device)
    if p.weights is not None:
        present = ~in_all_replicates(p.weights == 0, 1).expand(n)
    if groups is None:
        return Weights.with_replacement(seed, present), None
    check_indices("groups", groups)
    if groups.shape != (n,):
        raise ValueError(f"`groups` must have one number per sample, shape {(n,)}, got {tuple(groups.shape)}.")
    weights = Weights.with_replacement(seed, present, groups.to(device))
    assert weights.place is not None  # set for groups
    row_weights = torch.ones(p.samples, dtype=wide_dtype(device), device=device)
    row_weights = (row_weights if p.weights is None else row_weights * p.weights)[..., present]
    index = weights.place[present].expand(row_weights.shape)
    sizes = cell_sums(index, row_weights.unsqueeze(-2), len(weights.units)).squeeze(-2).movedim(-1, 0)
    return weights, least_of_batch(effective_number(sizes))


@dataclass(frozen=True, eq=False)
class Interval(Advising):
    """Value of a metric with its percentile bootstrap interval.

    Attributes:
        value: metric of the data `(...)`.
        replicates: metric of the R bootstrap replicates `(R, ...)`.
        level: nominal coverage probability of the interval, in (0, 1).
        n_clusters: effective number of resampled clusters; None if rows were resampled. With few clusters, percentiles
            underestimate the uncertainty. They are moved outwards as far as the interval of a mean with normal
            clusters requires (expanded percentiles). The interval is NaN if this is beyond the smallest and the
            largest replicate: at level 0.95, ten clusters need 116 replicates, and five need 1,048.

    Raises:
        TypeError: if `level` is not a number.
        ValueError: if `level` is not in (0, 1), or requires more replicates.

    Reference:
        Hesterberg: What teachers should know about the bootstrap (The American Statistician, 2015), for expanded
        percentiles.
    """

    value: Tensor
    replicates: Tensor
    level: float
    n_clusters: float | None = None

    def __post_init__(self) -> None:
        check_level(self.level, len(self.replicates))

    @property
    def low(self) -> Tensor:
        """Lower end of the interval `(...)`; NaN if a replicate is NaN, or for too few clusters."""
        return self._ends[0]

    @property
    def high(self) -> Tensor:
        """Upper end of the interval `(...)`; NaN if a replicate is NaN, or for too few clusters."""
        return self._ends[1]

    @property
    def bias(self) -> Tensor:
        """Mean of the replicates minus the value `(...)`, an estimate of the bias of the metric.

        The bias is near 0 for means such as the negative log-likelihood (NLL). With few samples in a bin, binned errors
        are too high, because they include sampling noise. Each replicate adds noise again, which shifts both ends of
        the interval upwards. Debiased errors (`rmsce(debiased=True)`) treat repeated samples as independent. Their
        intervals are too high and should not be used.
        """
        return self.replicates.mean(0) - self.value

    @property
    def standard_error(self) -> Tensor:
        """Standard deviation of the replicates `(...)`."""
        return self.replicates.std(0)

    @property
    def without_bias(self) -> tuple[Tensor, Tensor]:
        """Both ends of the interval `(...)`, minus a bias above a quarter of the standard error.

        The result usually contains `value`.

        Reference:
            Efron, Tibshirani: An Introduction to the Bootstrap (1993), ch. 10.3, for the limit of a quarter.
        """
        low, high = self._ends
        bias = self._corrected_bias
        return low - bias, high - bias

    def p_value(self, low: float | Tensor = 0.0, high: float | Tensor = 0.0) -> Tensor:
        """Return the two-sided p-value `(...)` of the hypothesis that the expected value is in [`low`, `high`].

        It inverts the interval `without_bias`: the p-value is at most 1 - L if the interval of level L excludes all
        values from `low` to `high`. The smallest p-value is 2 / (R + 1). NaN if a replicate is NaN.

        Reference:
            Davison, Hinkley: Bootstrap Methods and their Application (1997), eq. 4.11 and ch. 5.
        """
        # (1 + r) / (R + 1) for the smaller number r of replicates on one side, twice for both sides (eq. 4.11)
        replicates = self.corrected
        fewest = torch.minimum((replicates <= high).sum(0), (replicates >= low).sum(0))
        tail = (1 + fewest).double() / (len(replicates) + 1)
        if self.n_clusters is not None:
            tail = nominal_tail(tail, self.n_clusters)
        return (2 * tail).clamp(max=1).masked_fill(replicates.isnan().any(0), torch.nan)

    @property
    def corrected(self) -> Tensor:
        """Replicates minus the bias that `without_bias` subtracts, `(R, ...)`."""
        return self.replicates - self._corrected_bias

    @property
    def _corrected_bias(self) -> Tensor:
        """Bias that `without_bias` subtracts `(...)`; 0 for a small or undefined one."""
        bias = self.bias
        return bias.masked_fill(~(bias.abs() > self.standard_error / 4), 0)

    @property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Both ends of the interval `(...)`; NaN if a replicate is NaN, or if there are too few clusters.

        Both are replicates. Interpolation would fail between finite and infinite replicates.
        """
        tail = (1 - self.level) / 2
        if self.n_clusters is not None:
            tail = _expanded_tail(tail, self.n_clusters)
        # 1e-9 corrects rounding: 20 * (1 - 0.9) / 2 is slightly below 1.
        rank = math.floor((len(self.replicates) + 1) * tail + 1e-9)
        missing = self.replicates.isnan().any(0) | (rank < 1)
        rank, ordered = max(1, rank), self.replicates.sort(0).values
        return ordered[rank - 1].masked_fill(missing, torch.nan), ordered[-rank].masked_fill(missing, torch.nan)

    def __repr__(self) -> str:
        return f"Interval(value={self.value}, low={self.low}, high={self.high}, level={self.level})"


@lru_cache  # all lines of a report have the same two arguments
def _expanded_tail(tail: float, n: float) -> float:
    """Return the probability of a normal variable beyond sqrt(n / (n - 1)) t, for the quantile t at `tail`.

    The t-distribution has n - 1 degrees of freedom. The bootstrap variance is too small by (n - 1) / n.
    """
    # Expanded percentile (Hesterberg 2015): Phi(-sqrt(n / (n - 1)) t) with n = df + 1
    df = max(1.0, n - 1)
    t = float(t_critical(torch.tensor(df, dtype=torch.float64, device="cpu"), 2 * tail))
    return float(torch.special.ndtr(torch.tensor(-t * math.sqrt((df + 1) / df), dtype=torch.float64, device="cpu")))


def nominal_tail(tail: Tensor, n: float) -> Tensor:
    """Return the tail probability whose percentile `_expanded_tail` moves outwards to `tail` (inverse function)."""
    # Solve Phi(-sqrt(n / (n - 1)) t) = `tail` for t, and return the tail of Student's t-distribution beyond it.
    df = torch.tensor(max(1.0, n - 1), dtype=torch.float64, device="cpu")
    t = -torch.special.ndtri(tail.double()) / ((df + 1) / df).sqrt()
    beyond = betainc(df / 2, 0.5, df / (df + t.square())) / 2  # P(T > |t|) for Student's t-distribution
    return torch.where(t > 0, beyond, 1 - beyond)


@infers_task
def bootstrap(
    metric: Callable[..., Any],
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    n_replicates: int = 1000,
    level: float = 0.95,
    seed: int = 0,
    groups: Tensor | None = None,
    weights: Tensor | None = None,
    **options: Any,
) -> Any:
    """Percentile bootstrap interval of a metric.

    Each replicate resamples N rows with replacement and computes the metric. The interval reaches from the
    `(1 - level) / 2` quantile of the replicates to the `(1 + level) / 2` quantile. All leading (batch) axes of `preds`
    share the same resampled rows. Calibration losses refit their calibrator in every replicate. All copies of a sample
    are in the same fold.

    The interval includes the bias of the metric. Binned errors are too high; see `Interval.bias`. For calibration
    losses, the interval includes the variation of the data, but not of the split into folds.

    Args:
        metric: metric function of torchcalib, such as `ece` or `partial(relative_calibration_loss, score="brier")`. A
            custom function is called as `metric(preds, target, task=task, weights=weights, **options)`. For weights
            `(R, ..., N)` it must return a floating tensor `(R, ...)`, or a named tuple of these tensors.
        preds: probabilities or logits, binary `(..., N)`, multi-class `(..., N, C)` or multi-label `(..., N, L)`.
        target: labels, soft targets or annotator counts, as for the metric.
        task: `"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it.
        n_replicates: number R of replicates.
        level: level of the interval, in (0, 1).
        seed: seed of the random numbers, which are equal on all devices.
        groups: cluster of dependent samples, such as a patient or a video, integers `(N,)`. The samples of a cluster
            are resampled together and share a fold. For few clusters, the interval is moved outwards; see `Interval`.
        weights: weights of samples `(..., N)`, which are multiplied by the resampling counts. A metric gets the
            products as integers if `weights` are integers or None: they are numbers of copies. With floating weights
            they are floating: debiased errors then count all copies of a row as one sample of higher importance.
        **options: options of the metric.

    Returns:
        `Interval` with values `(...)`; a named tuple of intervals if the metric returns a named tuple. Samples with
        weight 0 or `ignore_index` are never resampled. About 2^22 weights are in memory at a time.

    Raises:
        TypeError, ValueError: if an argument is invalid, or `metric` returns a wrong type or shape.

    Gradient:
        None.

    Reference:
        Efron, Tibshirani: An Introduction to the Bootstrap (1993), ch. 13.3; [EPSR] Ferrer, Ramos: Evaluating
        Posterior Probabilities (TMLR), for calibration losses.

    Example:
        >>> from torchcalib.functional import brier_score
        >>> preds, target = torch.tensor([0.9, 0.8, 0.3, 0.6, 0.2]), torch.tensor([1, 1, 0, 0, 1])
        >>> found = bootstrap(brier_score, preds, target, task="binary")
        >>> [round(x.item(), 3) for x in (found.low, found.value, found.high)]
        [0.038, 0.228, 0.464]
    """
    task = task_of(task, options.get("num_classes"), options.get("num_labels"))
    check_count("n_replicates", n_replicates)
    check_level(level, n_replicates)
    check_seed(seed)
    if not callable(metric):
        raise TypeError(f"`metric` must be a function such as torchcalib.functional.ece, got {shown(metric)}.")
    _check_names(metric, options)
    names = InputOptions.__annotations__
    given = {name: options.pop(name) for name in names if name in options}
    preds, target, given = flattened(task, preds, target, {**given, "weights": weights})
    weights = given.pop("weights", None)
    p = read_input(task, preds, target, {"weights": weights, **given})
    options |= given
    if p.replicates:
        raise ValueError(
            f"`weights` must have one value per sample, got shape {tuple(p.weights.shape)}. "  # type: ignore[union-attr]
            "Remove the replicate axes."
        )
    rows, n_clusters = resampled_rows(p, seed, groups)
    if groups is not None and "groups" in _accepted(metric)[0]:
        options["groups"] = groups
    lead = p.samples[:-2] if p.task == "multilabel" else p.samples[:-1]  # all labels of a sample share its weight
    with torch.no_grad():
        value = metric(preds, target, task=task, weights=weights, **options)
        found = []
        dtype = torch.int32 if p.copies else None  # integers, so that the metric counts them as samples
        for counts in rows.chunks(n_replicates, math.prod(lead) * p.samples[-1], dtype):
            drawn = counts.reshape(len(counts), *[1] * len(lead), p.samples[-1]).expand(-1, *lead, -1)
            drawn = drawn if weights is None else drawn * weights
            found.append(metric(preds, target, task=task, weights=drawn, **options))
            _check_values(found[-1], value, len(drawn))
            del counts, drawn  # so that the next weights reuse its memory
    if isinstance(value, tuple):
        parts = [torch.cat(part) for part in zip(*found, strict=True)]
        intervals: list[Any] = [Interval(v, part, level, n_clusters) for v, part in zip(value, parts, strict=True)]
        return type(value)(*intervals) if hasattr(value, "_fields") else tuple(intervals)
    return Interval(value, torch.cat(found), level, n_clusters)


def _check_names(metric: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that neither `bootstrap` nor the metric accepts."""
    names, accepts_all = _accepted(metric)
    if accepts_all:
        return
    if unknown := [name for name in options if name not in names and name not in InputOptions.__annotations__]:
        known = set(signature(bootstrap).parameters) - {"options"} | names
        raise unknown_argument(unknown[0], known, "bootstrap")


def _accepted(metric: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of the arguments of a function, and whether it may accept others.

    The type of `**options` names its options. Some builtins have no signature.
    """
    try:
        parameters = signature(metric).parameters
    except ValueError:
        return set(), True
    names, accepts_all = set(parameters), False
    for parameter in parameters.values():
        if parameter.kind != Parameter.VAR_KEYWORD:
            continue
        names.discard(parameter.name)
        if get_origin(parameter.annotation) is Unpack:
            names |= get_args(parameter.annotation)[0].__annotations__.keys()
        else:
            accepts_all = True
    return names, accepts_all


def _check_values(values: Any, value: Any, n: int) -> None:
    """Raise unless a metric returned floating tensors `(n, ...)` for weights `(n, ..., N)`."""
    whole, parts = (value, values) if isinstance(value, tuple) else ((value,), (values,))
    for one, several in zip(whole, parts, strict=True):
        if not isinstance(one, Tensor) or not isinstance(several, Tensor):
            raise TypeError(f"`metric` must return a tensor, or a named tuple of tensors, got {type(one).__name__}.")
        if not several.is_floating_point():
            raise TypeError(f"`metric` must return a floating tensor, got {several.dtype}. Convert it with .double().")
        if several.shape != (n, *one.shape):
            raise ValueError(
                f"`metric` must return shape {(n, *one.shape)} for weights of {n} replicates, "
                f"got {tuple(several.shape)}. It must accept weights with a leading axis of replicates, as the "
                "functions of torchcalib do."
            )
