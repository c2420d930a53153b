"""Streaming metrics per group of rows."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import check_count
from torchcalib.core.groups import check_groups, check_names, crossed_names, in_groups, numbered_groups
from torchcalib.core.partition import AnyPartition, SumsByPart
from torchcalib.core.pieces import Parts
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sampled_partition import MAX_PARTS, SampledPartition, SampledPartState
from torchcalib.core.state import SampleState, SumState
from torchcalib.core.tasks import as_tensors
from torchcalib.inference.testing import CalibrationTest
from torchcalib.io.errors import shown
from torchcalib.metrics.base import CalibrationMetric, WrappedMetric, check_counts
from torchcalib.metrics.engine import refuse_if_synced
from torchcalib.results.group_table import By, GroupTable, resolved


class PartitionedMetric(WrappedMetric[Any]):
    """Base class for wrappers whose statistic is a `Partition`: sums, or samples, of parts of the rows."""

    _column = "groups"

    def __init__(self, metric: CalibrationMetric[Any], n_parts: int, **kwargs: Any) -> None:
        if not isinstance(metric, CalibrationMetric):
            raise TypeError(
                f"`metric` must be a torchcalib metric, got {type(metric).__name__}. "
                "Pass a metric such as ECE(...). For a function use torchcalib.by_group or torchcalib.bootstrap."
            )
        if isinstance(metric, WrappedMetric):
            raise ValueError(
                f"`metric` must be a metric that is not a wrapper, got {type(metric).__name__}. Pass the metric that "
                "it wraps."
            )
        if metric.images is not None:
            raise ValueError(
                f"`metric` must have no `per_image`, got {metric}. Its method cases() has the test and the intervals."
            )
        self.n_parts = n_parts
        super().__init__(metric, **kwargs)

    @abstractmethod
    def _keys(self, given: Any, device: torch.device, samples: tuple[int, ...]) -> Tensor:
        """Return the key of the part of each sample, with the shape `samples`, from the argument of `update`."""

    def _numbers(self) -> Callable[[Any], Any]:
        """Return the function from keys to numbers of parts for `core.pieces.Parts`."""
        return np.asarray

    def _parts_of(self, preds: Tensor, target: Tensor, **named: Any) -> Parts | None:
        if list(named) != [self._column] or named[self._column] is None:
            return None
        keys = self._keys(named[self._column], preds.device, self.input_format.samples_of(preds, target))
        accumulator: Any = self.kind.accumulator
        return Parts(keys.numpy(), accumulator.n_parts, self._numbers())

    def _add_in_parts(self, preds: Any, target: Any, weights: Any, sample_weight: Any, given: Any) -> Tensor:
        """Add a batch to the state, and return the keys of its samples; `given` is the argument that has them."""
        refuse_if_synced(self, "update")
        preds, target, weights = as_tensors(preds, target, weights, sample_weight, **self.input_format.conversion)

        def keys() -> Tensor:
            samples = self.input_format.samples_of(preds, target, len(self.batch_shape))
            return self._keys(given, preds.device, samples)

        if self._shared is None:
            found = keys()
            batch = self._state_of(preds, target, weights, found)
            self.keep_axis(preds, target)
        else:
            key, p = self._keyed_predictions(preds, target, weights)
            found = keys()
            key = (*key, self._column, *self._identity_of_keys, self.kind)
            batch = self._cached(key, lambda: self._state_of_piece(p, found))
        self._add(preds, batch)
        return found

    @property
    def _identity_of_keys(self) -> tuple[Hashable, ...]:
        """Values that determine the keys of samples, in addition to the argument of `update`."""
        return ()

    def _state_of_piece(self, p: Predictions, keys: Tensor | None) -> Any:
        assert keys is not None  # `_add_in_parts` computes them
        return self.kind.from_predictions(self._assigned(p, keys))

    def _assigned(self, p: Predictions, groups: Tensor) -> Predictions:
        how = {"validate_args": self.input_format.validate_args, "drop_invalid": self.device.type != "cpu"}
        return in_groups(p, groups, self.n_parts, **how)

    def _state_kind(self) -> SumState[Any] | SampleState:
        kind = self.metric.kind
        if isinstance(kind, SampleState):
            sample = kind.accumulator, kind.leading_shape, kind.from_logits
            return SampledPartState(*sample, self.batch_shape, self._num_stored_groups)
        accumulator: Any = kind.accumulator if isinstance(kind, SumState) else None
        can_split = hasattr(accumulator, "cells") or hasattr(accumulator, "of_groups")
        if not isinstance(kind, SumState) or not (kind.is_additive and can_split):
            raise ValueError(
                f"`metric` must store samples, or sums that can be split by group, got {self.metric}. "
                "Use torchcalib.functional.by_group with its function."
            )
        return self._state_of_sums(accumulator, kind.shape)

    @property
    def _num_stored_groups(self) -> int | None:
        """Number of groups in a state of samples; None for clusters with any identifier."""
        return self.n_parts

    def _state_of_sums(self, accumulator: Any, shape: tuple[int, ...]) -> SumState[Any]:
        """Return the operations on a state of sums, which have `shape` for one group."""
        return SumState(SumsByPart(accumulator, self.n_parts), (self.n_parts, *shape))

    def _configuration(self) -> dict[str, object]:
        return {**self.metric._configuration(), "num_groups": self.n_parts}


class ByGroup(PartitionedMetric):
    """Compute a streaming metric separately for groups of rows, such as sites, customer segments or languages.

    `update` accepts one group number per row, and `compute` returns one value per group. All groups are processed in
    one pass. A state of sums is G times as large as for the metric itself. Each stored sample takes 4 additional bytes.

    Rows with group -1 are ignored. Group numbers are not checked in rows ignored by weight 0, `ignore_index` or
    `nan_policy`. `SKCE` (squared kernel calibration error) forms blocks within each group of each update, and drops
    incomplete blocks. A `CalibrationCollection` passes `groups` to its `ByGroup` metrics.

    Args:
        metric: A torchcalib metric, not a wrapper. Only its configuration and its device are used; its accumulated
            state is ignored.
        num_groups: Number of groups G. Group numbers are 0 to G - 1.
        group_names: Names of the G groups, instead of their number. `update` then also accepts text. A dict such as
            `{"age": ["old", "young"], "sex": ["f", "m"]}` names the combinations of the values of several columns,
            "age=old, sex=f" and so on. `update` then accepts these columns.
        **kwargs: Arguments of `torchmetrics.Metric`.

    Raises:
        TypeError, ValueError: For invalid arguments, and in `update` for invalid input.

    Example:
        >>> import torch
        >>> from torchcalib import ECE
        >>> metric = ByGroup(ECE(task="binary"), num_groups=3)
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), groups=torch.tensor([0, 2, 2]))
        >>> metric.compute()
        tensor([0.2000,    nan, 0.2000], dtype=torch.float64)
    """

    def __init__(
        self,
        metric: CalibrationMetric[Any],
        *,
        num_groups: int | None = None,
        group_names: Sequence[str] | Mapping[str, Sequence[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(group_names, Mapping):
            group_names = crossed_names(group_names)
        check_names(group_names)
        if group_names is not None and num_groups in (None, len(group_names)):
            num_groups = len(group_names)
        elif num_groups is None or group_names is not None:
            raise TypeError(
                f"`num_groups` must be the number of groups, or omitted with `group_names`, got {shown(num_groups)} "
                f"and {shown(group_names)}. Pass one of them."
            )
        check_count("num_groups", num_groups, at_most=MAX_PARTS)
        self.num_groups = num_groups
        self.group_names = None if group_names is None else tuple(group_names)
        super().__init__(metric, num_groups, **kwargs)

    def update(  # type: ignore[override]  # `groups` is required
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        groups: Any,
        sample_weight: Tensor | None = None,
    ) -> None:
        """Add a batch to the state.

        Args:
            preds: Probabilities or logits; see `CalibrationMetric.update`.
            target: Labels or soft targets; see `CalibrationMetric.update`.
            groups: Group number per sample, integers in [0, num_groups), or -1 for no group. With `group_names` also
                text, which is empty for no group. The shape is that of `preds` without the class axis. With
                `group_names` also several such columns: a DataFrame, a dict or a list of arrays. A row with a missing
                value (None, NaN, "", or -1 in a column of integers) has no group. Values of several columns are read,
                which synchronises a GPU.
            weights: Non-negative weight per sample.
            sample_weight: Alias of `weights`.

        Raises:
            TypeError, ValueError, RuntimeError, TorchMetricsUserError: See `CalibrationMetric.update`. On CUDA, rows
                with an invalid group number are ignored and counted, and `compute` raises.
        """
        self._add_in_parts(preds, target, weights, sample_weight, groups)

    _own_update = update  # type: ignore[assignment]  # with another argument

    def _keys(self, given: Any, device: torch.device, samples: tuple[int, ...]) -> Tensor:
        groups, names = numbered_groups(given, self.group_names, device, samples)
        if names is not None and self.group_names is None:
            raise TypeError(
                f"`groups` must be numbers for a metric without names of groups, got {shown(names[0])}. "
                "Create it with ByGroup(metric, group_names=[...])."
            )
        check_groups(groups, device, samples)
        return groups

    def _configuration(self) -> dict[str, object]:
        names = {} if self.group_names is None else {"group_names": self.group_names}
        return {**super()._configuration(), **names}

    def n(self) -> Tensor:
        """Return the total weight of the samples in every group, float64 `(G, ...)`.

        Without weights this is the number of samples, for `SKCE` the number of blocks. For multi-label it is the
        maximum over labels. It is computed over all ranks if `torch.distributed` is running.
        """
        return self._n_of(self._synced_statistic())

    def _n_of(self, groups: AnyPartition) -> Tensor:
        total, n_lead = groups.sizes, 1 + len(self.batch_shape)
        return total.flatten(n_lead).amax(-1) if total.dim() > n_lead else total

    def test_from(self, statistic: Any, **how: Any) -> CalibrationTest:
        """Return the calibration test for every group, with tensors `(G, ...)`; NaN for a group without samples."""
        metric = self.metric
        if not isinstance(statistic, SampledPartition):
            return metric.test_from(statistic.each, **how)

        def columns(sample: RankedSample) -> Tensor:
            found = metric.test_from(sample, **how)
            return torch.stack((found.statistic, found.noise_floor, found.p_value, found.low, found.high), -1)

        value, noise_floor, p_value, low, high = statistic.evaluate(columns).unbind(-1)
        return CalibrationTest(
            value, noise_floor, p_value, low, high, how["level"], "consistency resampling within each group"
        )

    def worst(self, k: int | None = 10, *, by: By = "excess", n_replicates: int = 199, seed: int = 0) -> GroupTable:
        """Return the k groups with the largest calibration error, over all ranks if `torch.distributed` is running.

        Small groups have large errors because of sampling noise, even if the model is calibrated. Groups are therefore
        sorted by the error minus its noise floor, the expected error under perfect calibration. p-values are adjusted
        for the number of groups. Groups whose error is not significant are marked "within chance". The p-values hold
        for one look at the data: repeated looks at growing data give more false alarms. Use
        `ByGroup(SequentialTest(...))` for repeated looks.

        Args:
            k: Number of groups in the table; None for all groups with samples.
            by: Quantity to sort by: `"excess"` (value minus noise floor), `"value"`, `"shrunk"` or `"p_value"`. Signed
                errors are sorted by their absolute value.
            n_replicates: Number of simulated replicates per group. Groups with the smallest possible p-value are
                simulated again with more replicates, because adjusted p-values cannot be small otherwise.
            seed: Seed for the simulation.

        Returns:
            A `GroupTable` with one row per group, the worst group first.

        Raises:
            TypeError: If the metric is not a calibration error.
            ValueError: For invalid arguments, or if there is more than one value per group. Also for floating weights
                of a rank-based error, unless all are 0 or 1.
        """
        statistic = self._synced_statistic()
        check_counts(statistic)
        found = self.test_from(statistic, level=0.95, n_replicates=n_replicates, seed=seed)
        if found.statistic.dim() > 1:
            raise ValueError(
                f"`metric` must have one value for each group, got shape {tuple(found.statistic.shape)}. "
                "Use average='macro' and no batch_shape."
            )

        def retest(groups: Tensor, n_replicates: int) -> CalibrationTest:
            return self.test_from(statistic.restricted(groups), level=0.95, n_replicates=n_replicates, seed=seed)

        found = resolved(found, retest, n_replicates)
        return GroupTable.from_test(
            self.group_names or range(self.num_groups), self._n_of(statistic), found, k=k, by=by
        )

    def _value(self, statistic: Any) -> Tensor:
        values: Tensor = statistic.evaluate(self.metric._value)
        return values
