"""Percentile bootstrap: intervals for every metric, from samples weighed by how often they are drawn.

A replicate is a row of integer weights, so that the predictions are read once for all of them. What is drawn follows
from a hash of the seed, the replicate and the place of the sample: the same on every device.
"""

import math
import typing
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from torchcalib.kernels.draws import multinomial_counts, poisson_counts
from torchcalib.kernels.row_stats import wide_dtype
from torchcalib.predictions import (
    InputOptions,
    Predictions,
    Task,
    check_count,
    check_numbering,
    check_seed,
    in_all_replicates,
    read_input,
    replicates_at_once,
)
from torchcalib.states import SumsKind
from torchcalib.streaming import StreamingMetric

S = TypeVar("S")


@dataclass(frozen=True, eq=False)
class Interval:
    """A value and what the bootstrap says of it.

    Attributes:
        value: of the data themselves `(...)`.
        replicates: of every replicate `(R, ...)`.
        level: share of data sets like this one whose interval holds the value of the population, as nearly as the
            bootstrap can tell.

    Raises:
        TypeError, ValueError: for a level that is not in (0, 1), or too few replicates for it.
    """

    value: Tensor
    replicates: Tensor
    level: float

    def __post_init__(self) -> None:
        _check_level(self.level, len(self.replicates))

    @property
    def low(self) -> Tensor:
        """Lower end `(...)`; NaN where the value of a replicate is."""
        return self._in_order[self._outside - 1]

    @property
    def high(self) -> Tensor:
        """Upper end `(...)`; NaN where the value of a replicate is."""
        return self._in_order[-self._outside]

    @property
    def bias(self) -> Tensor:
        """Mean of the replicates less the value `(...)`: about how much the value is too high.

        Near 0 for a mean, such as the NLL. Binned errors of few samples a bin are too high, for chance gaps count like
        true ones; a replicate of the sample is so once more. Both ends of the interval share in that. Not so an error
        that takes off the noise of its bins (`rmsce(debiased=True)`): replicates repeat samples, which it takes for
        new ones, so that its interval lies too high and tells nothing.
        """
        return self.replicates.mean(0) - self.value

    @property
    def standard_error(self) -> Tensor:
        """Standard deviation of the replicates `(...)`."""
        return self.replicates.std(0)

    @property
    def _outside(self) -> int:
        return _outside(self.level, len(self.replicates))

    @property
    def _in_order(self) -> Tensor:
        # Values of replicates, never anything between two of them, of which one may be infinite.
        missing = self.replicates.isnan().any(0)
        return self.replicates.sort(0).values.masked_fill(missing, torch.nan)

    def __repr__(self) -> str:
        """Say the value and the ends."""
        return f"Interval(value={self.value}, low={self.low}, high={self.high}, level={self.level})"


def _outside(level: float, n_replicates: int) -> int:
    """Return which replicate from either end is that of the interval. The small number keeps 0.025 * 40 whole."""
    return math.floor((n_replicates + 1) * (1 - level) / 2 + 1e-9)


def _check_level(level: object, n_replicates: int) -> None:
    if not isinstance(level, int | float) or isinstance(level, bool):
        raise TypeError(f"`level` must be a number, got {level!r}. A 95 % interval has level 0.95.")
    if not 0 < level < 1:
        raise ValueError(f"`level` must be between 0 and 1, got {level!r}. A 95 % interval has level 0.95.")
    if _outside(level, n_replicates) < 1:
        raise ValueError(
            f"`n_replicates` must be at least {math.ceil(2 / (1 - level)) - 1} for level={level}, got "
            f"{n_replicates}. None of so few would lie outside."
        )


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

    As many samples as there are, drawn with replacement, are a replicate; the metric is computed of each, and the
    interval reaches from the `(1 - level) / 2` quantile of its values to the `(1 + level) / 2` quantile. Leading axes
    of `preds` are series of the same samples, models say, which are drawn for all of them alike. Calibration losses
    fit their calibrator anew in every replicate, and all copies of a sample are in one fold.

    The interval is one of the value that the data have, with the bias that it has: see `Interval.bias` for the binned
    errors, which are too high. For calibration losses it covers the choice of data, not the deal into folds.

    Args:
        metric: a function of torchcalib such as `ece`, `partial(rcl, score="brier")`, or another one that is called as
            `metric(preds, target, task=task, weights=weights, **options)` and returns `(R, ...)` for weights
            `(R, ..., N)`. It may return a named tuple of such tensors.
        preds: binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`, as for the metric.
        target: as for the metric.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n_replicates: R.
        level: in (0, 1).
        seed: of the draws, which are the same on every device.
        groups: integers `(N,)`; samples of equal number (a patient, a video) are drawn together, and share a fold.
        weights: `(..., N)`; a sample has its weight each time it is drawn.
        **options: those of the metric.

    Returns:
        An `Interval` of `(...)`; for a named tuple one of its kind, of intervals. Samples that weight 0 or
        `ignore_index` leave out are not drawn. Memory is that of the predictions and of some 2^22 weights.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        None.

    Source:
        Efron, Tibshirani: An Introduction to the Bootstrap (1993), ch. 13.3; [EPSR] Ferrer, Ramos: Evaluating
        Posterior Probabilities (TMLR), for calibration losses.

    Example:
        >>> from torchcalib import brier_score
        >>> preds, target = torch.tensor([0.9, 0.8, 0.3, 0.6, 0.2]), torch.tensor([1, 1, 0, 0, 1])
        >>> found = bootstrap(brier_score, preds, target, task="binary")
        >>> [round(x.item(), 3) for x in (found.low, found.value, found.high)]
        [0.038, 0.228, 0.464]
    """
    check_count("n_replicates", n_replicates)
    _check_level(level, n_replicates)
    check_seed(seed)
    if not callable(metric):
        raise TypeError(f"`metric` must be a function such as torchcalib.ece, got {metric!r}.")
    names = InputOptions.__annotations__
    p = read_input(task, preds, target, {"weights": weights, **{k: v for k, v in options.items() if k in names}})
    if p.replicates:
        raise ValueError(
            f"`weights` must have one value per sample, got shape {tuple(p.weights.shape)}. "  # type: ignore[union-attr]
            "Take one way of weighing at a time."
        )
    draws = Resampling(p, seed, groups)
    if groups is not None and _takes(metric, "groups"):
        options["groups"] = groups
    lead = p.samples[:-2] if p.task == "multilabel" else p.samples[:-1]  # of labels there is one weight for all

    def weighed(streams: Tensor) -> Tensor:
        """Weights of replicates `(r, ..., N)`."""
        drawn = draws.counts(streams)
        drawn = drawn.reshape(len(streams), *[1] * len(lead), p.samples[-1]).expand(-1, *lead, -1)
        return drawn if weights is None else drawn * weights

    with torch.no_grad():
        value = metric(preds, target, task=task, weights=weights, **options)
        streams = torch.arange(n_replicates, device=preds.device)
        found = []
        for some in torch.split(streams, replicates_at_once(math.prod(lead) * p.samples[-1])):
            found.append(metric(preds, target, task=task, weights=weighed(some), **options))
            _check_values(found[-1], value, len(some))
    if isinstance(value, tuple):
        parts = [torch.cat(part) for part in zip(*found, strict=True)]
        intervals: list[Any] = [Interval(v, part, level) for v, part in zip(value, parts, strict=True)]
        return type(value)(*intervals) if hasattr(value, "_fields") else tuple(intervals)
    return Interval(value, torch.cat(found), level)


class Resampling:
    """Draws with replacement, of samples or of groups of them, as often as there are any.

    Args:
        p: whose samples are drawn; those that are left out in all series are not.
        seed: of the draws.
        groups: integers `(N,)`; samples of equal number are drawn together.
    """

    def __init__(self, p: Predictions, seed: int, groups: Tensor | None = None) -> None:
        n = p.samples[-1]
        self._seed, self._device = seed, p.given.device
        self._present = torch.ones(n, dtype=torch.bool, device=self._device)
        if p.weights is not None:
            self._present = ~in_all_replicates(p.weights == 0, 1).expand(n)
        self._unit_of: Tensor | None = None  # what is drawn with each sample; None: itself
        self._n_units = n
        if groups is not None:
            check_numbering("groups", groups)
            if groups.shape != (n,):
                raise ValueError(f"`groups` must have one number per sample, shape {(n,)}, got {tuple(groups.shape)}.")
            names, index = torch.unique(groups.to(self._device)[self._present], return_inverse=True)
            self._unit_of = torch.zeros(n, dtype=torch.int64, device=self._device).masked_scatter(self._present, index)
            self._n_units = max(1, len(names))
        elif not bool(self._present.all()):
            self._unit_of = (self._present.cumsum(-1) - 1).clamp(min=0)
            self._n_units = max(1, int(self._present.sum()))

    def counts(self, replicates: Tensor) -> Tensor:
        """Return how often every sample is drawn in each of these replicates, `(r, N)` of the dtype of sums."""
        drawn = multinomial_counts(self._seed, replicates, self._n_units, wide_dtype(self._device))
        return drawn if self._unit_of is None else drawn[:, self._unit_of].masked_fill(~self._present, 0)


def _takes(metric: Callable[..., Any], option: str) -> bool:
    """Whether a function declares an option, by its name or in the typed dict of its keywords."""
    try:
        parameters = signature(metric).parameters.values()
    except ValueError:  # a builtin that tells none
        return False
    for parameter in parameters:
        kinds = typing.get_args(parameter.annotation)  # of Unpack[CalibrationOptions]
        if parameter.name == option or any(option in getattr(kind, "__annotations__", ()) for kind in kinds):
            return True
    return False


def _check_values(values: Any, value: Any, n: int) -> None:
    """Raise if a metric has not taken weights `(n, ..., N)` for n values."""
    whole, parts = (value, values) if isinstance(value, tuple) else ((value,), (values,))
    for one, several in zip(whole, parts, strict=True):
        if not isinstance(one, Tensor) or not isinstance(several, Tensor):
            raise TypeError(f"`metric` must return a tensor, or a named tuple of tensors, got {type(one).__name__}.")
        if not several.is_floating_point():
            raise TypeError(f"`metric` must return floating values, got {several.dtype}. Convert them with .double().")
        if several.shape != (n, *one.shape):
            raise ValueError(
                f"`metric` must return {(n, *one.shape)} for weights of {n} replicates, got {tuple(several.shape)}. "
                "Let it take weights with a leading axis, as the functions of torchcalib do."
            )


@dataclass(frozen=True)
class Replicates(SumsKind[S]):
    """Sums over the samples, and over R replicates of them `(1 + R, ...)`; behind them how many rows were drawn for."""

    def empty(self) -> Tensor:
        """Return zeros."""
        return torch.zeros(2 + math.prod(self.shape), dtype=torch.float64)

    def statistic(self, state: Tensor) -> S:
        """Return the sums as the statistic they are, with an axis of 1 + R in front."""
        return super().statistic(state[:-1])

    def drawn(self, p: Predictions, seed: int, rank: int, first: int) -> Tensor:
        """Return the state of a batch whose first row is row `first` of this rank."""
        n = p.samples[-1]
        counters = torch.arange(first, first + n, device=p.given.device)
        streams = torch.arange(self.shape[0] - 1, device=p.given.device) + (rank << 32)
        wide = wide_dtype(p.given.device)

        def sums_of(counts: Tensor) -> Tensor:
            return self.recipe.of(p.resampled(counts)).sums

        sums = [sums_of(torch.ones(1, n, dtype=wide, device=p.given.device))]
        with torch.no_grad():
            sums += [
                sums_of(poisson_counts(seed, some, counters, wide))
                for some in torch.split(streams, replicates_at_once(self.recipe.n_events(p)))
            ]
        flat = torch.cat([part.flatten() for part in sums])
        invalid = flat.new_zeros(1) if p.n_invalid is None else p.n_invalid.to(flat).reshape(1)
        return torch.cat((invalid, flat, flat.new_full((1,), n)))


def _of_metric(name: str) -> Any:
    """Make a property that is the attribute of the metric that is bootstrapped."""
    return property(lambda self: getattr(self.metric, name))


class Bootstrapped(StreamingMetric[S]):
    """A metric with a bootstrap interval, streamed in constant memory.

    `compute` returns the value of the metric, which loggers take; `interval` the `Interval`. Every row has a Poisson
    variable of mean 1 as its weight in each of R replicates, so that rows need not be known beforehand, nor kept: the
    state is 1 + R times that of the metric. Replicates of all ranks add up, each rank drawing for its own rows.

    Args:
        metric: a metric whose state is sums: all scores, and errors over equal-width bins; or, with `resolution`, any.
            It is taken for what it is, not for what it has seen.
        n_replicates: R.
        level: of the interval, in (0, 1).
        seed: of the draws: the same rows in the same order on the same rank give the same interval on every device.
            Metrics that are to be merged with `merge_state` in one process need seeds of their own.
        **kwargs: those of `torchmetrics.Metric`.

    Raises:
        TypeError, ValueError: for a metric that keeps samples, bad arguments, and in `update` for bad input.

    Source:
        Oza, Russell: Online bagging and boosting (AISTATS 2001), for the weights.

    Example:
        >>> from torchcalib import NLL
        >>> metric = Bootstrapped(NLL(task="binary"), n_replicates=100)
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 0]))
        >>> metric.compute()
        tensor(0.4004, dtype=torch.float64)
        >>> found = metric.interval()
        >>> bool(found.low < found.value) and bool(found.value < found.high)
        True
    """

    kind: Replicates[S]

    is_differentiable, higher_is_better = _of_metric("is_differentiable"), _of_metric("higher_is_better")
    plot_lower_bound, plot_upper_bound = _of_metric("plot_lower_bound"), _of_metric("plot_upper_bound")
    unit, perfect = _of_metric("unit"), _of_metric("perfect")
    question, source = _of_metric("question"), _of_metric("source")

    def __init__(
        self,
        metric: StreamingMetric[S],
        *,
        n_replicates: int = 200,
        level: float = 0.95,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        if not isinstance(metric, StreamingMetric):
            raise TypeError(f"`metric` must be a torchcalib metric, got {type(metric).__name__}.")
        if not isinstance(metric.kind, SumsKind) or isinstance(metric, Bootstrapped):
            raise ValueError(
                f"`metric` must have sums as its state, got {metric}. Pass `resolution` for sums of what depends on "
                "the order, or keep the predictions and use torchcalib.bootstrap."
            )
        check_count("n_replicates", n_replicates)
        _check_level(level, n_replicates)
        check_seed(seed)
        # In a tuple, for as a module it would bring a state of its own; and first, for what the state is made of.
        self._of: tuple[StreamingMetric[S]] = (deepcopy(metric),)
        self.n_replicates, self.level, self.seed = n_replicates, level, seed
        self._n_rows, self._rank, self._in_forward = 0, 0, False
        super().__init__(metric.input_format, metric.recipe, metric.batch_shape, **kwargs)

    @property
    def metric(self) -> StreamingMetric[S]:
        """What is bootstrapped, as it was made."""
        return self._of[0]

    def interval(self) -> Interval:
        """Return the value and its interval, over all ranks if `torch.distributed` is running.

        Raises:
            ValueError: if rows that came on CUDA were bad.
        """
        values = self.metric._value(self._synced_statistic())
        return Interval(values[0], values[1:], self.level)

    def reset(self) -> None:
        """Forget everything seen; the draws begin anew."""
        super().reset()
        if not self._in_forward:  # where torchmetrics sets the state aside for that of the batch
            self._n_rows = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch as `update` does and return the batch's own value, with its gradient."""
        self._in_forward = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._in_forward = False

    def update(self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None) -> None:
        """Add a batch; see `StreamingMetric.update`."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank = torch.distributed.get_rank()
        super().update(preds, target, weights=weights)
        rows = preds.numel() // math.prod(self.batch_shape)
        self._n_rows += (
            rows if self.input_format.task == "binary" else rows // preds.shape[self.input_format.class_axis]
        )

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the state of another one; see `StreamingMetric.merge_state`.

        Raises:
            ValueError: if the two do not count the same thing, or have drawn the same numbers for different rows.
        """
        if isinstance(incoming_state, Bootstrapped) and (
            (self.seed, self._rank) == (incoming_state.seed, incoming_state._rank)
            and min(self._n_rows, incoming_state._n_rows) > 0
        ):
            raise ValueError(
                f"`incoming_state` must have drawn other numbers, got seed={self.seed} in both. "
                "Make metrics that are to be merged with a seed for each."
            )
        super().merge_state(incoming_state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Go on drawing behind the rows that were seen."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._n_rows = int(self.state[-1])

    def _state_kind(self) -> Replicates[S]:
        kind = self.metric.kind
        assert isinstance(kind, SumsKind)  # as __init__ has seen to
        return Replicates(kind.recipe, (1 + self.n_replicates, *kind.shape))

    def _state_of(self, p: Predictions) -> Tensor:
        return self.kind.drawn(p, self.seed, self._rank, self._n_rows)

    @property
    def _counts_what(self) -> tuple[object, ...]:
        return (self.recipe, self.n_replicates, self.seed, self._n_rows)

    def _configuration(self) -> dict[str, object]:
        return {**self.metric._configuration(), "n_replicates": self.n_replicates}

    def _value(self, statistic: S) -> Tensor:
        return self.metric._value(statistic)[0]
