"""The worst groups of rows: bins of a growing number of groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.groups import NO_GROUP, check_group_range, in_groups
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.core.sums import settled
from torchcalib.inference.testing import CalibrationTest, ErrorTest, evidence_of
from torchcalib.io.saved import saved_tensor, saved_value
from torchcalib.metrics.binned import ece_from_bins
from torchcalib.metrics.groups.sums import SumsByGroup
from torchcalib.metrics.groups.table import GroupTable, resolved

MOST_GROUPS = 10_000
"""Largest number of groups of a report; of more, none is significant."""

WORST = 10
"""Number of groups in the table of a report."""

LONGEST_NAME = 1000  # as in files
_MOST_SUMS = 2**27  # 1 GiB
_REPLICATES, _REPLICATES_IN_ALL = 199, 200_000


@dataclass(frozen=True, eq=False)
class GroupBins:
    """Bins of every group, by its name; a number is named by its digits.

    Attributes:
        accumulator: of the bins of a group.
        shape: of the sums of a group.
        places: of the groups in the sums, by their names.
        sums: `BinStats.sums` of every group.
        apart: `BinStats.apart` of every group.
    """

    accumulator: EqualWidthBins
    shape: tuple[int, ...]
    places: Mapping[str, int]
    sums: Tensor
    apart: Tensor

    @classmethod
    def empty(cls, accumulator: EqualWidthBins, shape: tuple[int, ...], names: Sequence[str] = ()) -> Self:
        """Return empty bins of these groups."""
        most = min(MOST_GROUPS, _MOST_SUMS // math.prod(shape))
        if len(names) > most:
            raise ValueError(
                f"`groups` must be at most {most:,} different ones in a report, got {len(names):,} or more. "
                "Report coarser groups; torchcalib.ByGroup takes any number."
            )
        sums = torch.zeros(len(names), *shape, dtype=torch.float64)
        return cls(accumulator, shape, {name: k for k, name in enumerate(names)}, sums, sums.new_zeros(sums.shape[:-2]))

    def of_rows(self, p: Predictions, groups: Tensor, names: Sequence[str] | None) -> Self:
        """Return the bins of a batch alone.

        Args:
            p: predictions.
            groups: integers, one for each sample, -1 for none; ignored for rows without weight.
            names: of the groups by their numbers; None if the numbers are the names.

        Raises:
            TypeError, ValueError: for bad groups, and too many of them.
        """
        check_names(names)
        numbers = groups.flatten().long()
        if p.weights is not None:  # a row without weight for any label has no group
            absent = in_all_replicates((p.weights == 0).reshape(-1, len(numbers)), 1)
            numbers = numbers.masked_fill(absent, NO_GROUP)
        check_group_range(numbers, 2**63 - 1 if names is None else len(names))
        present, place = torch.unique(numbers[numbers != NO_GROUP], return_inverse=True)
        called = [str(k) if names is None else names[k] for k in present.tolist()]
        made = self.empty(self.accumulator, self.shape, list(dict.fromkeys(called)))
        if called:
            where = torch.tensor([made.places[name] for name in called], device=numbers.device)
            numbers = numbers.masked_scatter(numbers != NO_GROUP, where[place])
            found = SumsByGroup(self.accumulator, len(made.places)).of(in_groups(p, numbers, len(made.places)))
            assert found.apart is not None  # the bins have noise
            return replace(made, sums=found.sums.detach().to(made.sums), apart=found.apart.to(made.apart))
        return made

    def __add__(self, other: Self) -> Self:
        made = self.empty(self.accumulator, self.shape, list(dict.fromkeys([*self.places, *other.places])))
        for part in (self, other):
            where = torch.tensor([made.places[name] for name in part.places], dtype=torch.int64)
            made.sums.index_add_(0, where, part.sums)
            made.apart.index_add_(0, where, part.apart)
        return made

    def table(self) -> GroupTable:
        """Return the worst groups."""
        names = sorted(self.places)  # random numbers depend on the place: not on the order of parts
        held = len(names)
        n_replicates = max(59, min(_REPLICATES, _REPLICATES_IN_ALL // max(1, held)))
        places = torch.tensor([self.places[name] for name in names], dtype=torch.int64)
        sums = settled(self.sums, self.apart)[places]
        average = self.accumulator.mode == "classwise"

        def tested(some: Tensor, n_replicates: int) -> CalibrationTest:
            bins = self.accumulator.wrap(some)
            return evidence_of(ErrorTest(ece_from_bins), bins, average=average, n_replicates=n_replicates)

        found = tested(sums, n_replicates)
        found = resolved(found, lambda numbers, n: tested(sums[numbers], n), n_replicates)
        n = self.accumulator.wrap(sums).total.reshape(held, -1).amax(-1) if held else sums.new_zeros(0)
        return GroupTable.of(names, n, found, k=WORST)

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for `loaded`."""
        return {"names": list(self.places), "sums": self.sums, "apart": self.apart}

    def loaded(self, state: Any) -> Self:
        """Return the saved bins, given empty ones."""
        names = [saved_value({"name": name}, "name", str) for name in saved_value(state, "names", list)]
        check_names(names)
        if len(set(names)) < len(names):
            raise ValueError("names of groups must differ")
        made = self.empty(self.accumulator, self.shape, names)
        sums = saved_tensor(state, "sums", torch.float64, tuple(made.sums.shape))
        return replace(made, sums=sums, apart=saved_tensor(state, "apart", torch.float64, tuple(made.apart.shape)))


def check_names(names: Sequence[str] | None) -> None:
    """Raise for names that are no strings, or too long."""
    if names is None:
        return
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`group_names` must be a list of strings, got {names!r:.80}. Write str(name) for each.")
    longest = max(map(len, names), default=0)
    if longest > LONGEST_NAME:
        raise ValueError(
            f"`group_names` must have at most {LONGEST_NAME:,} letters each, got {longest:,}. Give shorter ones."
        )
