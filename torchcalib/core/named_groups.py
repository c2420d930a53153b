"""State of sums for named groups, which appear in the data in any order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.group_sums import SumsByGroup
from torchcalib.core.groups import NO_GROUP, check_group_range, check_names, in_groups
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.core.sums import BinStats, with_noise_row

MAX_GROUPS = 10_000
"""Maximum number of groups. With more, no p-value would be significant after adjustment for multiple testing."""

_MAX_SUMS = 2**27  # maximum number of float64 sums (1 GiB)


class NamedSums(NamedTuple):
    """State of sums for G named groups. The name of an unnamed group is its number."""

    names: tuple[str, ...]
    sums: Tensor  # `BinStats.sums` of all groups `(G, ..., F, B)`
    noise_flag: Tensor  # `BinStats.noise_flag` of all groups `(G, ...)`


@dataclass(frozen=True)
class NamedGroupState:
    """Operations on the sums over bins of named groups. Groups with equal names are added."""

    accumulator: EqualWidthBins  # accumulator of the bins of one group, with sums of noise
    shape: tuple[int, ...]  # shape of `BinStats.sums` for one group

    def empty(self, names: Sequence[str] = ()) -> NamedSums:
        """Return sums of 0 for the groups `names`."""
        most = min(MAX_GROUPS, _MAX_SUMS // math.prod(self.shape))
        if len(names) > most:
            raise ValueError(
                f"`groups` must contain at most {most:,} different groups for a report, got {len(names):,} or more. "
                "Use coarser groups, or torchcalib.ByGroup, which has no limit."
            )
        sums = torch.zeros(len(names), *self.shape, dtype=torch.float64)
        return NamedSums(tuple(names), sums, sums.new_zeros(sums.shape[:-2]))

    def from_groups(self, p: Predictions, groups: Tensor, names: Sequence[str] | None) -> NamedSums:
        """Return the sums of a batch `p`, for the groups that occur in it.

        `groups` contains a number for each sample, or -1 for no group. It is ignored for rows of weight 0. `names` are
        indexed by these numbers; None uses the numbers as names.
        """
        check_names(names)
        numbers = groups.flatten().long()
        if p.weights is not None:  # ignore the group of a row with weight 0 for all labels
            absent = in_all_replicates((p.weights == 0).reshape(-1, len(numbers)), 1)
            numbers = numbers.masked_fill(absent, NO_GROUP)
        check_group_range(numbers, 2**63 - 1 if names is None else len(names))
        present, place = torch.unique(numbers[numbers != NO_GROUP], return_inverse=True)
        present_names = [str(k) if names is None else names[k] for k in present.tolist()]
        batch = self.empty(list(dict.fromkeys(present_names)))
        if not present_names:
            return batch
        places = {name: k for k, name in enumerate(batch.names)}
        index = torch.tensor([places[name] for name in present_names], device=numbers.device)
        numbers = numbers.masked_scatter(numbers != NO_GROUP, index[place])
        by_group = SumsByGroup(self.accumulator, len(places))
        bins = by_group.from_predictions(in_groups(p, numbers, len(places)))
        assert bins.noise_flag is not None  # not None, because the accumulator sums the noise
        return NamedSums(batch.names, bins.sums.detach().to(batch.sums), bins.noise_flag.to(batch.noise_flag))

    def add(self, state: NamedSums, more: NamedSums) -> NamedSums:
        """Return the sum of two states: groups of `state`, followed by the other groups of `more`."""
        total = self.empty(list(dict.fromkeys([*state.names, *more.names])))
        places = {name: k for k, name in enumerate(total.names)}
        for part in (state, more):
            index = torch.tensor([places[name] for name in part.names], dtype=torch.int64)
            total.sums.index_add_(0, index, part.sums)
            total.noise_flag.index_add_(0, index, part.noise_flag)
        return total

    def statistic(self, state: NamedSums) -> BinStats:
        """Return the bins of all groups `(G, ..., B)`, in the order of `state.names`."""
        return self.accumulator.wrap(with_noise_row(state.sums, state.noise_flag))

    def parts(self, state: NamedSums) -> list[Any]:
        """Return the parts of a state to save."""
        return [list(state.names), state.sums, state.noise_flag]

    def check(self, parts: Sequence[Any], like: NamedSums) -> NamedSums | None:
        """Return a saved state, or None if its parts are not valid."""
        names, *tensors = parts
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return None
        check_names(names)
        shapes = [(len(names), *part.shape[1:]) for part in like[1:]]
        if len(set(names)) < len(names) or len(tensors) != len(shapes):
            return None
        for tensor, shape in zip(tensors, shapes, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float64 or tuple(tensor.shape) != shape:
                return None
        self.empty(names)  # raises an error for too many groups
        return NamedSums(tuple(names), *tensors)
