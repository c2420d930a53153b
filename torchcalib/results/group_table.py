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
from torchcalib.inference.testing import CalibrationTest
from torchcalib.io.errors import short_name

SMALL_P = 0.05
"""Significance level. Groups with a p-value of at least `SMALL_P` are marked "within chance"."""

_EXTRA_REPLICATES = 400
"""Average number of additional replicates per group. Only groups with the smallest possible p-value use them."""

_MAX_NAME = 60
"""Maximum number of characters of a group name in a table. Longer names are shortened."""

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
        shrunk: Error shrunk towards the mean over all groups; see `shrunk_to_mean`.
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
        adjusted = adjusted_p_values(tests.p_value)
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

    def layout(self, longest_name: int = _MAX_NAME, metric: str = "value") -> Table:
        """Return a formatted `Table` with one row per group.

        Args:
            longest_name: Maximum number of characters of a group name. Longer names are shortened.
            metric: Header of the column with the metric values.
        """
        names = self.shown_names(longest_name)
        rows = [SimpleNamespace(**row, name=name) for name, row in zip(names, self.rows(), strict=True)]

        def name_cell(row: Any) -> Cell:
            return Cell(row.name, style="name")

        def chance(within: bool) -> Cell:
            return Cell("within chance" * within)

        columns = [
            Column("group", name_cell, is_number=False, wraps=True, data={"group": attrgetter("group")}),
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
        return Table.from_items(
            columns, {"": rows}, title, is_wide=False, is_quiet=attrgetter("not_significant"), index=["group"]
        )

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


def adjusted_p_values(p_values: Tensor) -> Tensor:
    """Adjust p-values `(m,)` for multiple testing by the Benjamini-Hochberg method (false discovery rate).

    For ascending p-values p_1, ..., p_m, the adjusted value of p_k is the minimum of 1 and p_j m / j over j >= k.

    Reference:
        Benjamini, Hochberg: Controlling the false discovery rate (Journal of the Royal Statistical Society B, 1995),
        sec. 3.1.
    """
    m = len(p_values)
    ascending, order = p_values.sort()
    scaled = ascending * m / torch.arange(1, m + 1, dtype=ascending.dtype, device=ascending.device)
    adjusted = scaled.flip(0).cummin(0).values.flip(0).clamp(max=1) if m else scaled
    return torch.empty_like(p_values).index_copy(0, order, adjusted)


def shrunk_to_mean(estimates: Tensor, spread: Tensor) -> Tensor:
    """Shrink estimates for groups `(G,)` towards their common mean (empirical Bayes).

    The true errors of the groups are assumed to be normal with a common mean and variance tau^2. Each estimate is
    assumed to be normal around the true error with standard deviation `spread`. The posterior mean for group g is

        mean + tau^2 / (tau^2 + spread_g^2) (estimate_g - mean),

    with tau^2 >= 0 by the method of moments, and weights 1 / (tau^2 + spread_g^2) in the mean. An estimate with spread
    0 is practically unchanged. NaN where the spread is NaN. Fewer than two finite estimates are returned unchanged.

    Reference:
        Efron, Morris: Data analysis using Stein's estimator (Journal of the American Statistical Association, 1975),
        sec. 2, for the rule; DerSimonian, Laird: Meta-analysis in clinical trials (Controlled Clinical Trials, 1986),
        eq. 8, for tau^2.
    """
    known = estimates.isfinite() & spread.isfinite()
    if int(known.sum()) < 2:
        return estimates
    x, variance = estimates[known], spread[known].square()
    least = variance[variance > 0].min() if bool((variance > 0).any()) else torch.ones_like(variance[0])
    w = 1 / variance.clamp(min=1e-6 * float(least))  # the clamp prevents an infinite weight for spread 0
    mean = (w * x).sum() / w.sum()
    surplus = (w * (x - mean).square()).sum() - (len(x) - 1)
    tau_square = (surplus / (w.sum() - w.square().sum() / w.sum())).clamp(min=0)
    weight = 1 / (tau_square + 1 / w)
    mean = (weight * x).sum() / weight.sum()
    shrunk = mean + tau_square * weight * (x - mean)
    return torch.full_like(estimates, torch.nan).masked_scatter(known, shrunk)
