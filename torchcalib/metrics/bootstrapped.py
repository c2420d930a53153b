"""Intervals of metrics that stream, of which the state is sums."""

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from torchcalib.core.arguments import check_count, check_level, check_seed
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.state import N_LEFT_OUT, SumsKind, left_out_of
from torchcalib.inference.bootstrap import Interval
from torchcalib.metrics.base import StreamingMetric
from torchcalib.metrics.description import Description
from torchcalib.metrics.wrappers import WrappedMetric
from torchcalib.ops.counter_rng import poisson_counts
from torchcalib.ops.logs import wide_dtype

S = TypeVar("S")


@dataclass(frozen=True)
class Replicates(SumsKind[S]):
    """Sums over the samples, and over R replicates of them `(1 + R, ...)`; behind them how many rows were drawn for."""

    def empty(self) -> Tensor:
        """Return zeros."""
        return torch.zeros(N_LEFT_OUT + math.prod(self.shape) + 1, dtype=torch.float64)

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
        return torch.cat((left_out_of(p, flat), flat, flat.new_full((1,), n)))


class Bootstrapped(WrappedMetric[S]):
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
            Use different seeds for metrics that `merge_state` merges in one process, and for ranks outside
            `torch.distributed` (a `dist_sync_fn` of Ray, MPI or Horovod).
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
        if not isinstance(metric.kind, SumsKind) or isinstance(metric, WrappedMetric):
            raise ValueError(
                f"`metric` must have sums as its state, got {metric}. Pass `resolution` for sums of what depends on "
                "the order, or keep the predictions and use torchcalib.inference."
            )
        check_count("n_replicates", n_replicates)
        check_level(level, n_replicates)
        check_seed(seed)
        self.n_replicates, self.level, self.seed = n_replicates, level, seed
        self._n_rows, self._rank, self._in_forward = 0, 0, False
        recipe: Any = metric.kind.recipe
        # Replicates show what chance does, without sums that say it.
        if hasattr(recipe, "with_noise"):
            recipe = replace(recipe, with_noise=False)
        super().__init__(metric, recipe, **kwargs)

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

    @torch.jit.unused
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
        if isinstance(incoming_state, Bootstrapped):
            incoming_state = incoming_state.metric_state
        if isinstance(incoming_state, dict):
            state, described = self.checked_state("incoming_state", incoming_state)
            if described.draws == self._description().draws and min(self._n_rows, int(state[-1])) > 0:
                raise ValueError(
                    f"`incoming_state` must have drawn other numbers, got seed={self.seed} in both. "
                    "Make metrics that are to be merged with a seed for each."
                )
        super().merge_state(incoming_state)

    def _description(self) -> Description:
        return super()._description()._replace(draws=[self.seed, self._rank])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Go on drawing behind the rows that were seen."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._n_rows = int(self.state[-1])

    def _state_kind(self) -> Replicates[S]:
        kind = super()._state_kind()
        assert isinstance(kind, SumsKind)  # as __init__ has seen to
        return Replicates(kind.recipe, (1 + self.n_replicates, *kind.shape))

    def _state_of(self, p: Predictions) -> Tensor:
        return self.kind.drawn(p, self.seed, self._rank, self._n_rows)

    @property
    def _adds_up(self) -> bool:
        """No: the draws follow from how many rows there were before."""
        return False

    @property
    def _counts_what(self) -> tuple[object, ...]:
        return (self.recipe, self.n_replicates, self.seed, self._n_rows)

    def _configuration(self) -> dict[str, object]:
        return {**super()._configuration(), "class": type(self.metric).__name__, "n_replicates": self.n_replicates}

    def _value(self, statistic: S) -> Tensor:
        return self.metric._value(statistic)[0]
