"""Any metric that streams, of every group of rows."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import check_count
from torchcalib.core.groups import check_groups, in_groups
from torchcalib.core.ranked import RankedSample
from torchcalib.core.state import SamplesKind, SumsKind
from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.groups.samples import MOST_GROUPS, GroupedSample, GroupedSamplesKind
from torchcalib.metrics.groups.sums import SumsByGroup
from torchcalib.metrics.groups.table import By, GroupTable, resolved
from torchcalib.metrics.rollback import refuse_if_synced
from torchcalib.metrics.wrappers import WrappedMetric

S = TypeVar("S")


class ByGroup(WrappedMetric[Any]):
    """A metric of every group of rows (site, class of customers, language), streamed: thousands of groups in one pass.

    `update` takes the number of the group of every row beside the predictions, and `compute` returns a value for each
    group, which is that of the metric over the rows of the group alone. The groups are one more axis in front of what
    the metric keeps, so that the state of sums is G times that of the metric; a metric that keeps samples keeps 4 bytes
    more with each.

    A row of group -1 belongs to no group and counts nowhere, as do rows that weight 0, `ignore_index` or `nan_policy`
    leave out, whose numbers are not read.

    `SKCE` cuts blocks within each update, and here within each group of each update. Samples of a group that do not
    fill a block at the end of an update are dropped.

    In a `CalibrationCollection` the numbers go to those members that are metrics by group.

    Args:
        metric: any metric of torchcalib but another one that wraps one. Only its configuration is used.
        num_groups: G; groups are numbered from 0.
        **kwargs: those of `torchmetrics.Metric`.

    Raises:
        TypeError, ValueError: for bad arguments, and in `update` for bad input.

    Example:
        >>> import torch
        >>> from torchcalib import ECE
        >>> metric = ByGroup(ECE(task="binary"), num_groups=3)
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), groups=torch.tensor([0, 2, 2]))
        >>> metric.compute()
        tensor([0.2000,    nan, 0.2000], dtype=torch.float64)
    """

    def __init__(self, metric: CalibrationMetric[Any], *, num_groups: int, **kwargs: Any) -> None:
        if not isinstance(metric, CalibrationMetric):
            raise TypeError(
                f"`metric` must be a torchcalib metric, got {type(metric).__name__}. "
                "For a function use torchcalib.functional.by_group."
            )
        if isinstance(metric, WrappedMetric):
            raise ValueError(
                f"`metric` must be a metric that wraps no other, got {type(metric).__name__}. Pass its `metric`."
            )
        check_count("num_groups", num_groups, at_most=MOST_GROUPS)
        self.num_groups = num_groups
        super().__init__(metric, **kwargs)

    def update(  # type: ignore[override]  # rows without a group are no input of this one
        self, preds: Tensor, target: Tensor, *, groups: Tensor, weights: Tensor | None = None
    ) -> None:
        """Add a batch.

        Args:
            preds: see `CalibrationMetric.update`.
            target: see there.
            groups: integers in [0, num_groups), or -1 for none, one for every sample: of the shape of `preds` without
                its class axis.
            weights: see there.

        Raises:
            TypeError, ValueError, RuntimeError, TorchMetricsUserError: see `CalibrationMetric.update`. On CUDA rows
                with a bad number are left out and counted, and `compute` raises.
        """
        refuse_if_synced(self, "update")
        reading, p = self._reading(preds, target, weights)
        check_groups(groups, preds.device, self.input_format.samples_of(preds))
        of_groups = (*reading, "groups", self.num_groups)
        validate_args, drop_invalid = self.input_format.validate_args, self._drops_invalid
        p = self._once(
            of_groups,
            lambda: in_groups(p, groups, self.num_groups, validate_args=validate_args, drop_invalid=drop_invalid),
        )
        self._add(preds, self._once((*of_groups, *self._counts_what), lambda: self._state_of(p)))

    def n(self) -> Tensor:
        """Return the weight of the samples of every group, their number where all weights are 1: float64 `(G, ...)`.

        Over all ranks if `torch.distributed` is running. Of labels, of which each may have entries of its own that are
        ignored, it is that of the label with the most. For `SKCE` it is the number of blocks.
        """
        return self._n_of(self._synced_statistic())

    def _n_of(self, statistic: Any) -> Tensor:
        total: Tensor = statistic.read(_size) if isinstance(statistic, GroupedSample) else statistic.total
        return total.flatten(1 + len(self.batch_shape)).amax(-1) if total.dim() > 1 + len(self.batch_shape) else total

    def test_from(self, statistic: Any, **how: Any) -> CalibrationTest:
        """Return the evidence of a statistic, `(G, ...)`; NaN for a group without samples."""
        metric = self.metric
        if not isinstance(statistic, GroupedSample):
            return metric.test_from(statistic, **how)

        def columns(sample: RankedSample) -> Tensor:
            found = metric.test_from(sample, **how)
            return torch.stack((found.statistic, found.noise_floor, found.p_value, found.low, found.high), -1)

        value, noise_floor, p_value, low, high = statistic.read(columns).unbind(-1)
        return CalibrationTest(
            statistic=value, noise_floor=noise_floor, p_value=p_value, low=low, high=high, level=how["level"]
        )

    def worst(self, k: int | None = 10, *, by: By = "excess", n_replicates: int = 199, seed: int = 0) -> GroupTable:
        """Return the k worst groups, over all ranks if `torch.distributed` is running.

        A small group of a calibrated model has a large error by chance alone. So groups are put in order by the part of
        their value that chance does not explain, p-values are adjusted for how many groups were looked at, and groups
        whose value is within what chance shows are marked.

        Args:
            k: how many; None for all that hold samples.
            by: "excess": the value less its noise floor; "value"; "shrunk"; "p_value". Of signed errors the absolute
                value.
            n_replicates: R, for every group; those that no replicate reaches get more, so that p-values are small
                enough to be adjusted.
            seed: of the draws.

        Returns:
            A `GroupTable`. Print it, or take `rows()`.

        Raises:
            TypeError: the metric is no error of calibration.
            ValueError: for bad arguments, or if there is more than one value for a group.
        """
        statistic = self._synced_statistic()
        found = self.test_from(statistic, level=0.95, n_replicates=n_replicates, seed=seed)
        if found.statistic.dim() > 1:
            raise ValueError(
                f"`metric` must have one value for each group, got shape {tuple(found.statistic.shape)}. "
                "Average over classes, and keep no batch axes apart."
            )

        def again(groups: Tensor, n_replicates: int) -> CalibrationTest:
            if isinstance(statistic, GroupedSample):
                some: Any = statistic.of_groups(groups)
            else:
                some = self.accumulator.wrap(statistic.sums[groups])  # type: ignore[union-attr]  # an accumulator of sums
            return self.test_from(some, level=0.95, n_replicates=n_replicates, seed=seed)

        found = resolved(found, again, n_replicates)
        return GroupTable.of(range(self.num_groups), self._n_of(statistic), found, k=k, by=by)

    def _state_kind(self) -> SumsKind[Any] | SamplesKind:
        kind = self.metric.kind
        if isinstance(kind, SamplesKind):
            return GroupedSamplesKind(kind.accumulator, kind.lead, kind.from_logits, self.batch_shape, self.num_groups)
        accumulator: Any = kind.accumulator if isinstance(kind, SumsKind) else None
        if not isinstance(kind, SumsKind) or not (hasattr(accumulator, "cells") or hasattr(accumulator, "of_groups")):
            raise ValueError(
                f"`metric` must keep sums that can be split by group, or samples, got {self.metric}. "
                "Use torchcalib.functional.by_group with its function."
            )
        return SumsKind(SumsByGroup(accumulator, self.num_groups), (self.num_groups, *kind.shape))

    @property
    def _counts_what(self) -> tuple[object, ...]:
        return (self.accumulator, self.num_groups)

    def _configuration(self) -> dict[str, object]:
        return {**self.metric._configuration(), "num_groups": self.num_groups}

    def _value(self, statistic: Any) -> Tensor:
        if isinstance(statistic, GroupedSample):
            return statistic.read(self.metric._value)
        return self.metric._value(statistic)


def _size(sample: RankedSample) -> Tensor:
    """Number of samples of every series."""
    counted = ~sample.score.isnan()
    return (counted if sample.n is None else sample.n.masked_fill(~counted, 0)).sum(-1).double()
