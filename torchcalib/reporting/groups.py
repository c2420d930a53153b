"""The worst groups of rows: bins of a growing number of groups."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.groups import NO_GROUP, check_group_range, check_groups, in_groups
from torchcalib.core.inputs import InputFormat
from torchcalib.core.predictions import in_all_replicates
from torchcalib.core.sums import settled
from torchcalib.io.saved import saved_tensor, saved_value
from torchcalib.metrics.binned import ECE
from torchcalib.metrics.groups.sums import SumsByGroup
from torchcalib.metrics.groups.table import GroupTable, resolved

MOST_GROUPS = 10_000
"""Largest number of groups of a report; of more, none is significant."""

WORST = 10
"""Number of groups in the table of a report."""

LONGEST_NAME = 1000  # as in files
_MOST_SUMS = 2**27  # 1 GiB
_REPLICATES, _REPLICATES_IN_ALL = 199, 200_000


class GroupBins:
    """Bins of every group, by its name; a number is named by its digits. Methods return new objects.

    Args:
        ece: error of the groups.
    """

    def __init__(self, ece: ECE) -> None:
        self._ece = ece
        self._recipe: EqualWidthBins = ece.recipe  # type: ignore[assignment]  # its bins are of equal width
        self._shape = self._recipe.shape(ece.input_format.read_as, ece.input_format.num_classes)
        self._places: dict[str, int] = {}
        self._sums = torch.zeros(0, *self._shape, dtype=torch.float64)
        self._apart = torch.zeros(0, *self._shape[:-2], dtype=torch.float64)

    def with_rows(
        self, preds: Tensor, target: Tensor, weights: Tensor | None, groups: Tensor, names: Sequence[str] | None
    ) -> Self:
        """Return these bins with more rows.

        Args:
            preds: as for a report.
            target: as for a report.
            weights: as for a report.
            groups: integers of the shape of samples, -1 for none; ignored for rows without weight.
            names: of the groups by their numbers; None if the numbers are the names.

        Raises:
            TypeError, ValueError: for bad input, and too many groups.
        """
        check_names(names)
        input_format: InputFormat = self._ece.input_format
        p = input_format.read(preds, target, weights, batch_shape=())
        check_groups(groups, preds.device, input_format.samples_of(preds))
        numbers = groups.flatten().long()
        if p.weights is not None:  # a row without weight for any label has no group
            absent = in_all_replicates((p.weights == 0).reshape(-1, len(numbers)), 1)
            numbers = numbers.masked_fill(absent, NO_GROUP)
        check_group_range(numbers, 2**63 - 1 if names is None else len(names))
        present, place = torch.unique(numbers[numbers != NO_GROUP], return_inverse=True)
        called = [str(k) if names is None else names[k] for k in present.tolist()]
        made = self._with_groups(called)
        if called:
            where = torch.tensor([made._places[name] for name in called], device=numbers.device)
            numbers = numbers.masked_scatter(numbers != NO_GROUP, where[place])
            of_rows = SumsByGroup(self._recipe, len(made._places)).of(in_groups(p, numbers, len(made._places)))
            assert of_rows.apart is not None  # the bins have noise
            made._sums = made._sums + of_rows.sums.detach().to(made._sums)
            made._apart = made._apart + of_rows.apart.to(made._apart)
        return made

    def __add__(self, other: Self) -> Self:
        """Return the bins of both, groups of equal names together."""
        made = self._with_groups(list(other._places))
        where = torch.tensor([made._places[name] for name in other._places], dtype=torch.int64)
        made._sums = made._sums.index_add(0, where, other._sums)
        made._apart = made._apart.index_add(0, where, other._apart)
        return made

    def table(self) -> GroupTable:
        """Return the worst groups."""
        names = sorted(self._places)  # random numbers depend on the place: not on the order of parts
        held = len(names)
        n_replicates = max(59, min(_REPLICATES, _REPLICATES_IN_ALL // max(1, held)))
        places = torch.tensor([self._places[name] for name in names], dtype=torch.int64)
        sums = settled(self._sums, self._apart)[places]
        bins = self._recipe.wrap(sums)

        def again(numbers: Tensor, n_replicates: int) -> Any:
            return self._ece.evidence_from(self._recipe.wrap(sums[numbers]), n_replicates=n_replicates)

        found = resolved(self._ece.evidence_from(bins, n_replicates=n_replicates), again, n_replicates)
        n = bins.total.reshape(held, -1).amax(-1) if held else torch.zeros(0, dtype=torch.float64)
        return GroupTable.of(names, n, found, k=WORST)

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for `of_state`."""
        return {"names": list(self._places), "sums": self._sums, "apart": self._apart}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], ece: ECE) -> Self:
        """Return the saved bins.

        Raises:
            ValueError: for a state that no bins have.
        """
        made = cls(ece)
        names = [saved_value({"name": name}, "name", str) for name in saved_value(state, "names", list)]
        check_names(names)
        if len(set(names)) < len(names):
            raise ValueError("names of groups must differ")
        made = made._with_groups(names)
        made._sums = saved_tensor(state, "sums", torch.float64, (len(names), *made._shape))
        made._apart = saved_tensor(state, "apart", torch.float64, (len(names), *made._shape[:-2]))
        return made

    def _with_groups(self, names: Sequence[str]) -> Self:
        """Return these bins with more groups, whose bins are empty."""
        made = type(self)(self._ece)
        made._places = dict(self._places)
        for name in names:
            made._places.setdefault(name, len(made._places))
        most = min(MOST_GROUPS, _MOST_SUMS // math.prod(self._shape))
        if len(made._places) > most:
            raise ValueError(
                f"`groups` must be at most {most:,} different ones in a report, got {len(made._places):,} or more. "
                "Report coarser groups; torchcalib.ByGroup takes any number."
            )
        more = len(made._places) - len(self._sums)
        made._sums, made._apart = (torch.cat((x, x.new_zeros(more, *x.shape[1:]))) for x in (self._sums, self._apart))
        return made


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
