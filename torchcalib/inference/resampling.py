"""Percentile bootstrap intervals for any metric, computed from replicate weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, check_count, check_level, check_seed, unknown_argument
from torchcalib.core.checks import check_indices
from torchcalib.core.clusters import effective_number, least_of_batch
from torchcalib.core.documentation import resolving_task
from torchcalib.core.inputs import flattened, read_input
from torchcalib.core.predictions import Predictions, in_all_replicates, replicates_at_once
from torchcalib.io.errors import shown
from torchcalib.ops.counter_rng import multinomial_counts
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import cell_sums
from torchcalib.special.beta import betainc
from torchcalib.special.bin_tests import t_critical


@dataclass(frozen=True, eq=False)
class Interval:
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
        return self._ordered[max(1, self._rank) - 1]

    @property
    def high(self) -> Tensor:
        """Upper end of the interval `(...)`; NaN if a replicate is NaN, or for too few clusters."""
        return self._ordered[-max(1, self._rank)]

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
        bias = self._corrected_bias
        return self.low - bias, self.high - bias

    def p_value(self, low: float | Tensor = 0.0, high: float | Tensor = 0.0) -> Tensor:
        """Return the two-sided p-value `(...)` of the hypothesis that the expected value is in [`low`, `high`].

        It inverts the interval `without_bias`: the p-value is at most 1 - L if the interval of level L excludes all
        values from `low` to `high`. The smallest p-value is 2 / (R + 1). NaN if a replicate is NaN.

        Reference:
            Davison, Hinkley: Bootstrap Methods and their Application (1997), eq. 4.11 and ch. 5.
        """
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
        ignored = ~(self.bias.abs() > self.standard_error / 4)
        return self.bias.masked_fill(ignored, 0)

    @property
    def _rank(self) -> int:
        """Rank of `low` in ascending order of the replicates, and of `high` in descending order."""
        tail = (1 - self.level) / 2
        if self.n_clusters is not None:
            tail = _expanded_tail(tail, self.n_clusters)
        # 1e-9 corrects rounding: 20 * (1 - 0.9) / 2 is slightly below 1.
        return math.floor((len(self.replicates) + 1) * tail + 1e-9)

    @property
    def _ordered(self) -> Tensor:
        """Replicates in ascending order `(R, ...)`; all are NaN if one is NaN, or if there are too few clusters.

        Both ends of the interval are replicates. Interpolation would fail between finite and infinite replicates.
        """
        missing = self.replicates.isnan().any(0) | (self._rank < 1)
        return self.replicates.sort(0).values.masked_fill(missing, torch.nan)

    def __repr__(self) -> str:
        """Return the value and the interval as text."""
        return f"Interval(value={self.value}, low={self.low}, high={self.high}, level={self.level})"


def _sizes(p: Predictions, present: Tensor, index: Tensor) -> Tensor:
    """Return the total weight of each group `(G, ...)`, from the group index of the rows in the mask `present`."""
    n = torch.ones(p.samples, dtype=wide_dtype(index.device), device=index.device)
    n = (n if p.weights is None else n * p.weights)[..., present]
    return cell_sums(index.expand(n.shape), n.unsqueeze(-2), int(index.max()) + 1 if len(index) else 1).movedim(-1, 0)


@lru_cache  # all lines of a report have the same two arguments
def _expanded_tail(tail: float, n: float) -> float:
    """Return the probability of a normal variable beyond sqrt(n / (n - 1)) t, for the quantile t at `tail`.

    The t-distribution has n - 1 degrees of freedom. The bootstrap variance is too small by (n - 1) / n.
    """
    df = max(1.0, n - 1)
    t = float(t_critical(torch.tensor(df, dtype=torch.float64), 2 * tail))
    return float(torch.special.ndtr(torch.tensor(-t * math.sqrt((df + 1) / df), dtype=torch.float64)))


def nominal_tail(tail: Tensor, n: float) -> Tensor:
    """Return the tail probability whose percentile `_expanded_tail` moves outwards to `tail` (inverse function)."""
    df = torch.tensor(max(1.0, n - 1), dtype=torch.float64)
    t = -torch.special.ndtri(tail.double()) / ((df + 1) / df).sqrt()
    beyond = betainc(df / 2, 0.5, df / (df + t.square())) / 2  # P(T > |t|) for Student's t-distribution
    return torch.where(t > 0, beyond, 1 - beyond)


class Resampling:
    """Resampling of samples, or of groups of samples, with replacement.

    Args:
        p: predictions. Samples with weight 0 in all batch elements are never resampled.
        seed: seed of the random numbers.
        groups: group index of each sample, integers `(N,)`; the samples of a group are resampled together.

    Raises:
        TypeError: if `groups` are not integers.
        ValueError: if `groups` do not have shape `(N,)`.
    """

    def __init__(self, p: Predictions, seed: int, groups: Tensor | None = None) -> None:
        n = p.samples[-1]
        self._seed, self._device = seed, p.given.device
        self._present = torch.ones(n, dtype=torch.bool, device=self._device)
        if p.weights is not None:
            self._present = ~in_all_replicates(p.weights == 0, 1).expand(n)
        self._unit_of: Tensor | None = None  # group index of each sample; None: each sample is a group
        self._n_units = n
        self.n_clusters: float | None = None  # effective number of groups, if groups were given
        if groups is not None:
            check_indices("groups", groups)
            if groups.shape != (n,):
                raise ValueError(f"`groups` must have one number per sample, shape {(n,)}, got {tuple(groups.shape)}.")
        if groups is not None or not bool(self._present.all()):
            names = torch.arange(n) if groups is None else groups
            units, index = torch.unique(names.to(self._device)[self._present], return_inverse=True)
            self._unit_of = torch.zeros(n, dtype=torch.int64, device=self._device).masked_scatter(self._present, index)
            self._n_units = max(1, len(units))
            if groups is not None:
                self.n_clusters = least_of_batch(effective_number(_sizes(p, self._present, index)))

    def counts(self, replicates: Tensor) -> Tensor:
        """Return the counts of each sample in the replicates with indices `(r,)`: `(r, N)` of dtype `wide_dtype`."""
        drawn = multinomial_counts(self._seed, replicates, self._n_units, wide_dtype(self._device))
        return drawn if self._unit_of is None else drawn[:, self._unit_of].masked_fill(~self._present, 0)


@resolving_task
def bootstrap(
    metric: Callable[..., Any],
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
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
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_replicates: number R of replicates.
        level: level of the interval, in (0, 1).
        seed: seed of the random numbers, which are equal on all devices.
        groups: cluster of dependent samples, such as a patient or a video, integers `(N,)`. The samples of a cluster
            are resampled together and share a fold. For few clusters, the interval is moved outwards; see `Interval`.
        weights: weights of samples `(..., N)`, which are multiplied by the resampling counts.
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
    draws = Resampling(p, seed, groups)
    if groups is not None and "groups" in _parameters(metric):
        options["groups"] = groups
    lead = p.samples[:-2] if p.task == "multilabel" else p.samples[:-1]  # all labels of a sample share its weight

    def drawn_weights(streams: Tensor) -> Tensor:
        """Return the replicate weights `(r, ..., N)` for replicates with indices `(r,)`."""
        drawn = draws.counts(streams)
        drawn = drawn.reshape(len(streams), *[1] * len(lead), p.samples[-1]).expand(-1, *lead, -1)
        return drawn if weights is None else drawn * weights

    with torch.no_grad():
        value = metric(preds, target, task=task, weights=weights, **options)
        streams = torch.arange(n_replicates, device=preds.device)
        found = []
        for some in torch.split(streams, replicates_at_once(math.prod(lead) * p.samples[-1])):
            found.append(metric(preds, target, task=task, weights=drawn_weights(some), **options))
            _check_values(found[-1], value, len(some))
    if isinstance(value, tuple):
        parts = [torch.cat(part) for part in zip(*found, strict=True)]
        intervals: list[Any] = [
            Interval(v, part, level, draws.n_clusters) for v, part in zip(value, parts, strict=True)
        ]
        return type(value)(*intervals) if hasattr(value, "_fields") else tuple(intervals)
    return Interval(value, torch.cat(found), level, draws.n_clusters)


def _check_names(metric: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that neither `bootstrap` nor the metric accepts."""
    parameters = _parameters(metric)
    if not parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return
    if unknown := [name for name in options if name not in parameters and name not in InputOptions.__annotations__]:
        known = set(signature(bootstrap).parameters) - {"options"} | set(parameters)
        raise unknown_argument(unknown[0], known, "bootstrap")


def _parameters(metric: Callable[..., Any]) -> Mapping[str, Parameter]:
    """Return the parameters of a function by name; empty if it has no signature, like some builtins."""
    try:
        return signature(metric).parameters
    except ValueError:
        return {}


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
