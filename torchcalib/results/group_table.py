"""Table of the groups with the largest calibration errors, with adjusted p-values and shrinkage estimates."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import check_choice, check_count
from torchcalib.display.tables import Cell, Column, Table, Tabular, attribute_column, fraction
from torchcalib.display.words import count, p_words, printable
from torchcalib.inference.adjustment import benjamini_hochberg, shrunk_to_mean
from torchcalib.inference.testing import CalibrationTest
from torchcalib.io.errors import short_name

SMALL_P = 0.05
"""Significance level. Groups with a p-value of at least `SMALL_P` are marked "within chance"."""

_EXTRA_REPLICATES = 400
"""Average number of additional replicates per group. Only groups with the smallest possible p-value use them."""

MAX_NAME = 60
"""Maximum number of characters of the name of a group or slice in a table. Longer names are shortened."""

By = Literal["excess", "value", "shrunk", "p_value"]
"""Quantity by which groups are sorted; `excess` is the value minus its noise floor."""


class ColumnTable(Tabular):
    """Base class of tables whose columns are the fields that are tuples."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per row that maps field names to values."""
        columns = {name: column for name, column in vars(self).items() if isinstance(column, tuple)}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of all fields, with tuples converted to lists."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def _table(self, columns: Sequence[Column], title: str, is_quiet: Callable[[Any], bool]) -> Table:
        """Return the formatted table, whose index is the first column."""
        rows = [SimpleNamespace(**row) for row in self.rows()]
        index = [next(iter(vars(self)))]
        return Table.from_items(columns, {"": rows}, title, is_wide=False, is_quiet=is_quiet, index=index)

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, eq=False, repr=False)
class GroupTable(ColumnTable):
    """Table of the k groups with the largest calibration errors, in descending order; see `ByGroup.worst`.

    All fields except `n_groups`, `worst` and `difference_p_value` have k entries.

    Attributes:
        group: Number or name of the group.
        n: Total weight of the samples in the group; the number of samples without weights.
        value: Value of the metric for the samples in the group.
        noise_floor: Expected value under perfect calibration.
        p_value: p-value for perfect calibration, adjusted for multiple testing by the method of Benjamini and Hochberg
            (false discovery rate).
        shrunk: Error shrunk towards the mean over all groups; see `torchcalib.inference.adjustment.shrunk_to_mean`.
        not_significant: True if the error is not significant: the unadjusted p-value is at least 0.05.
        n_groups: Number of groups with samples, including groups that are not in the table.
        worst: Group with the largest shrunk error in the table, if groups differ significantly; None if they do not, or
            if it was not tested. In a report, also the group that the verdict names.
        difference_p_value: p-value of the hypothesis that all groups have the same frequency of the event at the same
            confidence; NaN if too few groups have enough outcomes. None if it was not tested. A report tests it.

    Example:
        >>> from torchcalib import ECE, ByGroup
        >>> metric = ByGroup(ECE(task="binary"), num_groups=2)
        >>> metric.update(torch.full((8,), 0.9), torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]), groups=torch.arange(8) // 4)
        >>> metric.worst().group
        (1, 0)
    """

    group: tuple[int | str, ...]
    n: tuple[float, ...]
    value: tuple[float, ...]
    noise_floor: tuple[float, ...]
    p_value: tuple[float, ...]
    shrunk: tuple[float, ...]
    not_significant: tuple[bool, ...]
    n_groups: int
    worst: int | str | None = None
    difference_p_value: float | None = None

    @classmethod
    def from_test(
        cls,
        groups: Sequence[int | str],
        n: Tensor,
        found: CalibrationTest,
        *,
        k: int | None = None,
        by: By = "excess",
        difference_p_value: float | None = None,
    ) -> "GroupTable":
        """Create the table of the k worst groups from calibration tests. Groups without samples are omitted.

        Args:
            groups: Numbers or names of all G groups.
            n: Total weight of each group `(G,)`.
            found: Calibration tests of all groups, with tensors `(G,)`.
            k: Number of groups in the table; None for all groups.
            by: Quantity by which the groups are sorted; `"excess"` is the value minus the noise floor.
            difference_p_value: p-value of the hypothesis that the groups do not differ; None if it was not tested.
        """
        check_choice("by", by, get_args(By))
        if k is not None:
            check_count("k", k)
        present = (found.statistic.isfinite() & (n > 0)).nonzero().squeeze(-1)
        tests, n = found[present], n[present]
        adjusted = benjamini_hochberg(tests.p_value)
        spread = (tests.high - tests.low) / (2 * NormalDist().inv_cdf((1 + found.level) / 2))
        shrunk = shrunk_to_mean((tests.low + tests.high) / 2, spread)
        excess = tests.statistic.abs() - tests.noise_floor
        criterion = {"excess": excess, "value": tests.statistic.abs(), "shrunk": shrunk.abs(), "p_value": -adjusted}[by]
        # Sort by the criterion, with NaN last. Ties are sorted by the excess.
        order = excess.argsort(descending=True, stable=True)
        order = order[criterion[order].nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)][:k]

        def column(values: Tensor) -> tuple[Any, ...]:
            return tuple(values[order].tolist())

        names = tuple(groups[k] for k in column(present))
        table = cls(
            group=names,
            n=column(n),
            value=column(tests.statistic),
            noise_floor=column(tests.noise_floor),
            p_value=column(adjusted),
            shrunk=column(shrunk),
            not_significant=column(tests.p_value >= SMALL_P),
            n_groups=len(present),
            difference_p_value=difference_p_value,
        )
        if not table.has_difference:
            return table
        return replace(table, worst=names[int(shrunk[order].abs().nan_to_num(0).argmax())])

    def shown_names(self, most: int) -> list[str]:
        """Return one display name per group, without control characters and with long names shortened in the middle.

        A name is not shortened if the shortened name would not be unique.

        Args:
            most: Maximum number of characters of a name, at least 3. Longer names are shortened.
        """
        names = [printable(str(group)) for group in self.group]
        short = [short_name(name, most) for name in names]
        counts = Counter(short)
        return [shortened if counts[shortened] == 1 else name for name, shortened in zip(names, short, strict=True)]

    def layout(self, longest_name: int = MAX_NAME, metric: str = "value") -> Table:
        """Return a formatted `Table` with one row per group.

        Args:
            longest_name: Maximum number of characters of a group name. Longer names are shortened.
            metric: Header of the column with the metric values.
        """
        names = dict(zip(self.group, self.shown_names(longest_name), strict=True))

        def name(group: int | str) -> Cell:
            return Cell(names[group], style="name")

        def chance(within: bool) -> Cell:
            return Cell("within chance" * within)

        columns = [
            attribute_column("group", "group", name, is_number=False, wraps=True),
            attribute_column("n", "n", lambda n: Cell(count(n))),
            attribute_column(metric, "value", fraction),
            attribute_column("expected if calibrated", "noise_floor", fraction),
            attribute_column("p-value", "p_value", lambda p: Cell(p_words(p))),
            attribute_column("shrunk", "shrunk", fraction),
            attribute_column("", "not_significant", chance, is_number=False),
        ]
        title = f"The {len(self)} worst of {count(self.n_groups)} groups"
        title = title if len(self) < self.n_groups else "Groups, the worst first"
        title = ": ".join(filter(None, [title, self.difference]))
        return self._table(columns, title, attrgetter("not_significant"))

    @property
    def has_difference(self) -> bool:
        """Whether groups differ significantly: `difference_p_value` is below 0.05."""
        return self.difference_p_value is not None and self.difference_p_value < SMALL_P

    @property
    def difference(self) -> str:
        """Result of the test of differences as a clause; empty if it was not tested."""
        p_value = self.difference_p_value
        if p_value is None:
            return ""
        if math.isnan(p_value):
            return "too few outcomes to compare groups"
        words = "significant differences" if self.has_difference else "no significant difference"
        return f"{words} (p {p_words(p_value, equals='= ')})"


def resolved(
    found: CalibrationTest, retest: Callable[[Tensor, int], CalibrationTest], n_replicates: int
) -> CalibrationTest:
    """Recompute the smallest possible p-values with more replicates, and return the updated tests.

    With R replicates the smallest possible p-value is 1 / (R + 1). After adjustment for the number of groups, even this
    p-value may not be significant. `retest` returns the tests of groups `(g,)` for a number of replicates.
    """
    n_present = int(found.p_value.isfinite().sum())
    smallest = (found.p_value < 1.5 / (n_replicates + 1)).nonzero().squeeze(-1)
    n_more = _EXTRA_REPLICATES * n_present // max(1, len(smallest))
    if not len(smallest) or n_more <= n_replicates:
        return found
    finer = retest(smallest, n_more).p_value
    return replace(found, p_value=found.p_value.index_copy(0, smallest, finer))
