"""`GroupBins`: the group accumulator of a report, which adds new groups as they appear in the data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.groups import NO_GROUP, check_group_range, in_groups
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.core.sums import with_noise_row
from torchcalib.inference.testing import CalibrationTest, ErrorTest, run_error_test
from torchcalib.io.saved import saved_tensor, saved_value
from torchcalib.metrics.binned import ECE
from torchcalib.metrics.groups.sums import SumsByGroup
from torchcalib.metrics.groups.table import GroupTable, resolved

MAX_GROUPS = 10_000
"""Maximum number of groups. With more, no p-value would be significant after adjustment for multiple testing."""

WORST = 10
"""Number of groups in the table of a report."""

MAX_NAME_LENGTH = 1000  # maximum number of characters in a group name
_MAX_SUMS = 2**27  # maximum number of float64 sums (1 GiB)
_MIN_VARIANCE = 3.0  # smallest variance of the number of outcomes in a group whose gap is tested
_SMALLEST = 1e-4  # confidences are clipped to [1e-4, 1 - 1e-4] before their log-odds are computed
_REPLICATES, _TOTAL_REPLICATES = 199, 200_000  # maximum numbers of simulated replicates, for one and for all groups


@dataclass(frozen=True, eq=False)
class GroupBins:
    """Sums over equal-width bins for each group.

    Groups are identified by name. The name of an unnamed group is its number.

    Attributes:
        accumulator: accumulator of the bins of one group.
        shape: shape of `BinStats.sums` for one group.
        places: mapping from the name of each group to its index in `sums`.
        sums: `BinStats.sums` of all groups `(G, *shape)`.
        noise_flag: `BinStats.noise_flag` of all groups `(G, ...)`, 0 for labels with integer weights.
    """

    accumulator: EqualWidthBins
    shape: tuple[int, ...]
    places: Mapping[str, int]
    sums: Tensor
    noise_flag: Tensor

    @classmethod
    def empty(cls, accumulator: EqualWidthBins, shape: tuple[int, ...], names: Sequence[str] = ()) -> Self:
        """Return bins with sums of 0 for the groups `names`."""
        most = min(MAX_GROUPS, _MAX_SUMS // math.prod(shape))
        if len(names) > most:
            raise ValueError(
                f"`groups` must contain at most {most:,} different groups for a report, got {len(names):,} or more. "
                "Use coarser groups, or torchcalib.ByGroup, which has no limit."
            )
        sums = torch.zeros(len(names), *shape, dtype=torch.float64)
        return cls(accumulator, shape, {name: k for k, name in enumerate(names)}, sums, sums.new_zeros(sums.shape[:-2]))

    def of_rows(self, p: Predictions, groups: Tensor, names: Sequence[str] | None) -> Self:
        """Return the bins of a batch `p`, for the groups that occur in it.

        Args:
            p: predictions.
            groups: group number of each sample, or -1 for no group; ignored for rows of weight 0.
            names: names of the groups, indexed by group number; None uses the numbers.

        Raises:
            TypeError, ValueError: for invalid groups, and for too many groups.
        """
        check_names(names)
        numbers = groups.flatten().long()
        if p.weights is not None:  # ignore the group of a row with weight 0 for all labels
            absent = in_all_replicates((p.weights == 0).reshape(-1, len(numbers)), 1)
            numbers = numbers.masked_fill(absent, NO_GROUP)
        check_group_range(numbers, 2**63 - 1 if names is None else len(names))
        present, place = torch.unique(numbers[numbers != NO_GROUP], return_inverse=True)
        present_names = [str(k) if names is None else names[k] for k in present.tolist()]
        batch = self.empty(self.accumulator, self.shape, list(dict.fromkeys(present_names)))
        if present_names:
            # Replace group numbers by indices into the sums.
            index = torch.tensor([batch.places[name] for name in present_names], device=numbers.device)
            numbers = numbers.masked_scatter(numbers != NO_GROUP, index[place])
            bins = SumsByGroup(self.accumulator, len(batch.places)).from_predictions(
                in_groups(p, numbers, len(batch.places))
            )
            assert bins.noise_flag is not None  # not None, because `bin_estimators` enables `with_noise`
            return replace(
                batch, sums=bins.sums.detach().to(batch.sums), noise_flag=bins.noise_flag.to(batch.noise_flag)
            )
        return batch

    def __add__(self, other: Self) -> Self:
        total = self.empty(self.accumulator, self.shape, list(dict.fromkeys([*self.places, *other.places])))
        for part in (self, other):
            index = torch.tensor([total.places[name] for name in part.places], dtype=torch.int64)
            total.sums.index_add_(0, index, part.sums)
            total.noise_flag.index_add_(0, index, part.noise_flag)
        return total

    def table(self) -> GroupTable:
        """Return a table of the groups whose expected calibration error (ECE) most exceeds its noise floor."""
        names = sorted(self.places)  # a fixed order, because simulated outcomes depend on the position of a group
        n_groups = len(names)
        n_replicates = max(59, min(_REPLICATES, _TOTAL_REPLICATES // max(1, n_groups)))
        places = torch.tensor([self.places[name] for name in names], dtype=torch.int64)
        sums = with_noise_row(self.sums, self.noise_flag)[places]
        average = self.accumulator.mode == "classwise"
        ece = ErrorTest(ECE.from_bins, interval=ECE.interval_kind)

        def test(group_sums: Tensor, n_replicates: int) -> CalibrationTest:
            bins = self.accumulator.wrap(group_sums)
            return run_error_test(ece, bins, average=average, n_replicates=n_replicates)

        result = test(sums, n_replicates)
        result = resolved(result, lambda numbers, n: test(sums[numbers], n), n_replicates)
        n = self.accumulator.wrap(sums).total.reshape(n_groups, -1).amax(-1) if n_groups else sums.new_zeros(0)
        return GroupTable.from_test(names, n, result, k=WORST)

    def gaps(self) -> tuple[list[str], Tensor]:
        """Return the names of large groups, and for each two score statistics in standard errors, `(G, 2)`.

        The first is the mean gap, outcome minus confidence. The second is the sum of gaps times the log-odds of the
        confidence, the derivative of the log-likelihood in the logarithm of a temperature: it is negative if
        confidences are too close to 0 and 1. Groups are large if the variance of the number of outcomes is at least 3
        for a calibrated model, so that both are approximately normal.
        """
        bins = self.accumulator.wrap(with_noise_row(self.sums, self.noise_flag))
        log_odds = bins.confidence.nan_to_num(0.5).clamp(_SMALLEST, 1 - _SMALLEST).logit()

        def standardised(x: Tensor) -> Tensor:
            total, noise = (
                each.reshape(len(self.places), -1).sum(-1) for each in (x * bins.n * bins.gap, x.square() * bins.noise)
            )
            return (total / noise.sqrt()).nan_to_num(0, 0, 0)

        large = bins.noise.reshape(len(self.places), -1).sum(-1) >= _MIN_VARIANCE
        statistics = torch.stack((standardised(torch.ones_like(log_odds)), standardised(log_odds)), -1)
        return [name for name, is_large in zip(self.places, large.tolist(), strict=True) if is_large], statistics[large]

    def state(self) -> dict[str, Any]:
        """Return the group names and sums as a dict of lists and tensors, which `loaded` restores."""
        return {"names": list(self.places), "sums": self.sums, "noise_flag": self.noise_flag}

    def loaded(self, state: Any) -> Self:
        """Return bins, restored from a result of `state()`; see `Accumulator.loaded`."""
        names = [saved_value({"name": name}, "name", str) for name in saved_value(state, "names", list)]
        check_names(names)
        if len(set(names)) < len(names):
            raise ValueError("`names` must be unique, got duplicates. The file is corrupt.")
        empty = self.empty(self.accumulator, self.shape, names)
        sums = saved_tensor(state, "sums", torch.float64, tuple(empty.sums.shape))
        return replace(
            empty, sums=sums, noise_flag=saved_tensor(state, "noise_flag", torch.float64, tuple(empty.noise_flag.shape))
        )


def check_names(names: Sequence[str] | None) -> None:
    """Raise an error unless all group names are strings of at most 1,000 characters."""
    if names is None:
        return
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`group_names` must be a list of strings, got {names!r:.80}. Convert each name with str().")
    longest = max(map(len, names), default=0)
    if longest > MAX_NAME_LENGTH:
        raise ValueError(
            f"`group_names` must have at most {MAX_NAME_LENGTH:,} characters each, got {longest:,}. Use shorter names."
        )
