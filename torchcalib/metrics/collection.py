"""Metrics that are updated from one reading of the input and synced together."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from torchcalib.core.arguments import check_flag
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.checkpoint import holds_state, read_state
from torchcalib.metrics.rollback import refuse_if_synced, unchanged_on_error, unsynced_on_error
from torchcalib.metrics.sync import dropped_over_ranks, met_over_ranks


class CalibrationCollection(MetricCollection):
    """Metrics that are updated from one reading of the input and synced in one collective.

    Takes what `torchmetrics.MetricCollection` takes (a list or a dict of metrics, `prefix`, `postfix`), all of them
    torchcalib metrics. Members whose input format and sums agree share the work; their states stay their own, so none
    is ever mistaken for another. An update that fails for one member changes none, and neither does a state that one of
    them refuses to load. With `persistent=True` the `state_dict` carries the states of all members, those added later
    too; see `CalibrationMetric.state_dict`.

    Example:
        >>> import torch
        >>> from torchcalib import ECE, NLL, CalibrationCollection
        >>> metrics = CalibrationCollection([NLL(task="binary"), ECE(task="binary", n_bins=10)])
        >>> metrics.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> {name: round(value.item(), 4) for name, value in metrics.compute().items()}
        {'NLL': 0.2284, 'ECE': 0.2}
    """

    __jit_unused_properties__: ClassVar[list[str]] = ["compute_groups", "metric_state"]

    def __init__(
        self,
        metrics: Any,
        *additional_metrics: Metric,
        prefix: str | None = None,
        postfix: str | None = None,
        persistent: bool = False,
    ) -> None:
        check_flag("persistent", persistent)
        self._all_persistent = persistent  # first, for members are added in there
        super().__init__(metrics, *additional_metrics, prefix=prefix, postfix=postfix, compute_groups=False)

    def add_metrics(self, metrics: Any, *additional_metrics: Metric) -> None:
        """Add members, as `MetricCollection` does.

        Raises:
            TypeError: for a metric that is not torchcalib's.
        """
        before = dict(self._modules)
        super().add_metrics(metrics, *additional_metrics)
        for name, metric in self._modules.items():
            if not isinstance(metric, CalibrationMetric):
                self._modules = before
                raise TypeError(
                    f"`metrics` must be torchcalib metrics, got {type(metric).__name__} as {name!r}. "
                    "Keep others in a torchmetrics.MetricCollection beside this one."
                )
        if self._all_persistent:
            self.persistent(True)

    def update(  # type: ignore[override]  # MetricCollection itself overrides ModuleDict.update with another meaning
        self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> None:
        """Add a batch to every member; see `CalibrationMetric.update`, and `ByGroup`, the only one to take `groups`."""
        with self._sharing():
            # torchmetrics looks for every member which keywords it takes, if there are any.
            super().update(preds, target, **_given(weights=weights, groups=groups))

    @torch.jit.unused
    def forward(
        self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Add a batch to every member and return the batch's own values, with their gradients."""
        with self._sharing():
            values: dict[str, Tensor] = super().forward(preds, target, **_given(weights=weights, groups=groups))
        return values

    def compute(self) -> dict[str, Tensor]:
        """Return all values, over all ranks; the members' states meet in one collective."""
        with self._synced():
            values: dict[str, Tensor] = super().compute()
        return values

    def n_dropped(self) -> dict[str, int]:
        """Return how many rows every member has dropped, over all ranks; see `CalibrationMetric.n_dropped`."""
        over_ranks: dict[int, int] = {}  # by identity: equality of metrics is another metric
        for process_group, group in self._to_be_synced(lambda m: m.dist_sync_fn is None and m._would_sync).items():
            counts = dropped_over_ranks(group, process_group)
            over_ranks.update(zip(map(id, group), counts, strict=True))
        return {
            self._set_name(name): over_ranks[id(metric)] if id(metric) in over_ranks else metric.n_dropped()
            for name, metric in self._by_name().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over states that were saved; see `CalibrationMetric.state_dict`. If one is refused, none is loaded."""
        with unchanged_on_error(*self._members()):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Check the states of all members before any takes its own: torch loads them one by one."""
        for name, metric in self._by_name().items():
            of_member = f"{prefix}{name}."
            if holds_state(state_dict, of_member):
                refuse_if_synced(metric, "load_state_dict")
                read_state(metric, "state_dict", state_dict, of_member)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getitem__(self, key: str, copy_state: bool = True) -> CalibrationMetric[Any]:
        """Return a member by its name."""
        metric = super().__getitem__(key, copy_state)
        assert isinstance(metric, CalibrationMetric)  # add_metrics lets in no other
        return metric

    def _members(self) -> list[CalibrationMetric[Any]]:
        return list(self._by_name().values())

    def _by_name(self) -> dict[str, CalibrationMetric[Any]]:
        return {name: m for name, m in self._modules.items() if isinstance(m, CalibrationMetric)}

    def _to_be_synced(self, which: Callable[[CalibrationMetric[Any]], bool]) -> dict[Any, list[CalibrationMetric[Any]]]:
        """Those members of which this is true, by their process group."""
        groups: dict[Any, list[CalibrationMetric[Any]]] = defaultdict(list)
        for metric in self._members():
            if which(metric):
                groups[metric.process_group].append(metric)
        return groups

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
        # A value that was computed stands, as torchmetrics has it, and needs no sync.
        groups = self._to_be_synced(lambda m: m._computed is None and m.dist_sync_fn is None and m._would_sync)
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


def _given(**columns: Tensor | None) -> dict[str, Tensor]:
    return {name: column for name, column in columns.items() if column is not None}
