"""Metrics that are updated from one reading of the input and synced together."""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torchmetrics import Metric, MetricCollection

from torchcalib.streaming.faults import unchanged_on_error, unsynced_on_error
from torchcalib.streaming.metric import StreamingMetric
from torchcalib.streaming.ranks import met_over_ranks


class CalibrationCollection(MetricCollection):
    """Metrics that are updated from one reading of the input and synced in one collective.

    Takes what `torchmetrics.MetricCollection` takes (a list or a dict of metrics, `prefix`, `postfix`), all of them
    torchcalib metrics. Members whose input format and sums agree share the work; their states stay their own, so none
    is ever mistaken for another. An update that fails for one member changes none.

    Example:
        >>> import torch
        >>> from torchcalib import ECE, NLL, CalibrationCollection
        >>> metrics = CalibrationCollection([NLL(task="binary"), ECE(task="binary", n_bins=10)])
        >>> metrics.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> {name: round(value.item(), 4) for name, value in metrics.compute().items()}
        {'NLL': 0.2284, 'ECE': 0.2}
    """

    def __init__(
        self, metrics: Any, *additional_metrics: Metric, prefix: str | None = None, postfix: str | None = None
    ) -> None:
        super().__init__(metrics, *additional_metrics, prefix=prefix, postfix=postfix, compute_groups=False)

    def add_metrics(self, metrics: Any, *additional_metrics: Metric) -> None:
        """Add members, as `MetricCollection` does.

        Raises:
            TypeError: for a metric that is not torchcalib's.
        """
        before = dict(self._modules)
        super().add_metrics(metrics, *additional_metrics)
        for name, metric in self._modules.items():
            if not isinstance(metric, StreamingMetric):
                self._modules = before
                raise TypeError(
                    f"`metrics` must be torchcalib metrics, got {type(metric).__name__} as {name!r}. "
                    "Keep others in a torchmetrics.MetricCollection beside this one."
                )

    def update(  # type: ignore[override]  # MetricCollection itself overrides ModuleDict.update with another meaning
        self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None
    ) -> None:
        """Add a batch to every member; see `StreamingMetric.update`."""
        with self._sharing():
            # torchmetrics looks for every member which keywords it takes, if there are any.
            super().update(preds, target, **({} if weights is None else {"weights": weights}))

    def forward(self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Add a batch to every member and return the batch's own values, with their gradients."""
        with self._sharing():
            values: dict[str, Tensor] = super().forward(preds, target, weights=weights)
        return values

    def compute(self) -> dict[str, Tensor]:
        """Return all values, over all ranks; the members' states meet in one collective."""
        with self._synced():
            values: dict[str, Tensor] = super().compute()
        return values

    def __getitem__(self, key: str, copy_state: bool = True) -> StreamingMetric[Any]:
        """Return a member by its name."""
        metric = super().__getitem__(key, copy_state)
        assert isinstance(metric, StreamingMetric)  # add_metrics lets in no other
        return metric

    def _members(self) -> list[StreamingMetric[Any]]:
        return [m for m in self._modules.values() if isinstance(m, StreamingMetric)]

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        shared: dict[Hashable, Any] = {}
        with unchanged_on_error(*self._members()):
            for metric in self._members():
                metric.share(shared)
            try:
                yield
            finally:
                for metric in self._members():
                    metric.share(None)

    @contextmanager
    def _synced(self) -> Iterator[None]:
        """Sync all members that would each sync for themselves; each undoes it on its own after its compute."""
        groups: dict[Any, list[StreamingMetric[Any]]] = defaultdict(list)
        for metric in self._members():
            if (
                metric._computed is None  # else its value stands, as torchmetrics has it, and needs no sync
                and metric._to_sync
                and not metric._is_synced
                and metric.dist_sync_fn is None
                and metric.distributed_available_fn()
            ):
                groups[metric.process_group].append(metric)
        together = [metric for group in groups.values() for metric in group]
        with ExitStack() as stack:
            for metric in together:
                stack.enter_context(unsynced_on_error(metric))
            for process_group, group in groups.items():
                for metric, state in zip(group, met_over_ranks(group, process_group), strict=True):
                    metric._cache = metric._copy_state_dict()
                    metric.state, metric._is_synced, metric._to_sync = state, True, False
            try:
                yield
            finally:
                for metric in together:
                    metric._to_sync = metric.sync_on_compute
