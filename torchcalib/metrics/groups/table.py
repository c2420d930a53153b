"""The worst groups: values, noise floors, adjusted p-values and shrunken estimates."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import NormalDist
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import check_choice, check_count
from torchcalib.core.tables import Cell, Column, Table, Tabular, fraction
from torchcalib.core.words import count, p_words
from torchcalib.inference.testing import CalibrationTest
from torchcalib.io.errors import printable

SMALL_P = 0.05
"""Groups with a p-value of at least this are within chance."""

_REPLICATES_IN_ALL = 400
"""Replicates per group with samples, all of them spent on groups whose p-value is the least possible."""

_LONG = 60
"""Longest name that is shown in full, in letters."""

By = Literal["excess", "value", "shrunk", "p_value"]
"""Order of the groups, the worst first; `excess` is the value minus its noise floor."""


@dataclass(frozen=True, eq=False, repr=False)
class GroupTable(Tabular):
    """Groups with their value and what chance has to do with it; the worst first. All fields are `(k,)`.

    Attributes:
        group: number of the group, or its name.
        n: weight of its samples, their number where all weights are 1.
        value: of the metric over the samples of the group.
        noise_floor: what the value would be on average, if the model were perfectly calibrated there.
        p_value: of "calibrated in this group", adjusted for the number of groups that hold samples by Benjamini and
            Hochberg: of the groups below a bound, that share at most is expected to be calibrated.
        shrunk: the error of the model in the group, estimated from that of all groups too: see `shrunk_to_mean`.
        by_chance: whether the value is within what a calibrated model shows in 95 of 100 groups of this size: too few
            samples, or no error, to tell.
        n_groups: how many groups hold samples, of which these are some.
    """

    group: tuple[int | str, ...]
    n: tuple[float, ...]
    value: tuple[float, ...]
    noise_floor: tuple[float, ...]
    p_value: tuple[float, ...]
    shrunk: tuple[float, ...]
    by_chance: tuple[bool, ...]
    n_groups: int

    @classmethod
    def of(
        cls, groups: Sequence[int | str], n: Tensor, found: CalibrationTest, *, k: int | None = None, by: By = "excess"
    ) -> "GroupTable":
        """Make a table of the k worst groups (None: all) that hold samples, from the evidence of every group `(G,)`."""
        check_choice("by", by, get_args(By))
        if k is not None:
            check_count("k", k)
        held = (found.statistic.isfinite() & (n > 0)).nonzero().squeeze(-1)
        of_held, n = found[held], n[held]
        adjusted = adjusted_p_values(of_held.p_value)
        spread = (of_held.high - of_held.low) / (2 * NormalDist().inv_cdf((1 + found.level) / 2))
        shrunk = shrunk_to_mean((of_held.low + of_held.high) / 2, spread)
        excess = of_held.statistic.abs() - of_held.noise_floor
        ranked = {"excess": excess, "value": of_held.statistic.abs(), "shrunk": shrunk.abs(), "p_value": -adjusted}[by]
        # By the excess where the rest is equal; NaN last.
        order = excess.argsort(descending=True, stable=True)
        order = order[ranked[order].nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)][:k]

        def column(values: Tensor) -> tuple[Any, ...]:
            return tuple(values[order].tolist())

        return cls(
            group=tuple(groups[k] for k in column(held)),
            n=column(n),
            value=column(of_held.statistic),
            noise_floor=column(of_held.noise_floor),
            p_value=column(adjusted),
            shrunk=column(shrunk),
            by_chance=column(of_held.p_value >= SMALL_P),
            n_groups=len(held),
        )

    def __len__(self) -> int:
        return len(self.group)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for every group."""
        columns = {name: column for name, column in vars(self).items() if name != "n_groups"}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def shown_names(self, most: int) -> list[str]:
        """Return names that can be shown: they steer no terminal, and long ones lack their middle.

        A name that would not be told apart from another one stays whole.

        Args:
            most: letters of a name from which on it is long, at least 3.
        """
        names = [printable(str(group)) for group in self.group]
        start = most // 2
        short = [name if len(name) <= most else f"{name[:start]}…{name[start + 1 - most :]}" for name in names]
        times = Counter(short)
        return [less if times[less] == 1 else name for name, less in zip(names, short, strict=True)]

    def layout(self, longest_name: int = _LONG, metric: str = "value") -> Table:
        """Return a row for each group, with names of at most so many letters, and the name of the metric."""
        names = self.shown_names(longest_name)
        rows = [{**row, "name": name} for name, row in zip(names, self.rows(), strict=True)]

        def column(header: str, field: str, cell: Callable[[dict[str, Any]], Cell], **options: Any) -> Column:
            return Column(header, cell, data={field: itemgetter(field)}, **options)

        columns = [
            column("group", "group", lambda row: Cell(row["name"], style="name"), is_number=False, wraps=True),
            column("n", "n", lambda row: Cell(count(row["n"]))),
            column(metric, "value", lambda row: fraction(row["value"])),
            column("noise floor", "noise_floor", lambda row: fraction(row["noise_floor"])),
            column("p", "p_value", lambda row: Cell(p_words(row["p_value"]))),
            column("shrunk", "shrunk", lambda row: fraction(row["shrunk"])),
            column("", "by_chance", lambda row: Cell("within chance" if row["by_chance"] else ""), is_number=False),
        ]
        of_all = f"The {len(self)} worst of {count(self.n_groups)} groups"
        title = of_all if len(self) < self.n_groups else "Groups, the worst first"
        return Table.of(
            columns, {"": rows}, title, is_wide=False, is_quiet=lambda row: row["by_chance"], index=["group"]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a plain value, by name."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        names = self.shown_names(_LONG)
        width = max([12, *(len(name) + 2 for name in names)])
        lines = [f"{'group':>{width}}{'n':>12}{'value':>12}{'noise floor':>14}{'p':>10}{'shrunk':>12}"]
        for name, row in zip(names, self.rows(), strict=True):
            numbers = f"{row['n']:>12.10g}{row['value']:>12.4f}{row['noise_floor']:>14.4f}{p_words(row['p_value']):>10}"
            said = "  within chance" if row["by_chance"] else ""
            lines.append(f"{name:>{width}}{numbers}{row['shrunk']:>12.4f}{said}")
        return "\n".join(lines)


def resolved(
    found: CalibrationTest, again: Callable[[Tensor, int], CalibrationTest], n_replicates: int
) -> CalibrationTest:
    """Return evidence of groups with p-values that are fine enough to be adjusted for their number.

    Of R replicates no p-value is below 1 / (R + 1), which times the number of groups may not be small at all. Groups
    that no replicate has reached get more of them, the more the fewer these groups are.

    Args:
        found: evidence of groups `(G,)`.
        again: evidence of some of the groups, given by their numbers, from so many replicates.
        n_replicates: R.
    """
    n_held = int(found.p_value.isfinite().sum())
    unreached = (found.p_value < 1.5 / (n_replicates + 1)).nonzero().squeeze(-1)
    wanted = _REPLICATES_IN_ALL * n_held // max(1, len(unreached))
    if not len(unreached) or wanted <= n_replicates:
        return found
    finer = again(unreached, wanted).p_value
    return replace(found, p_value=found.p_value.index_copy(0, unreached, finer))


def adjusted_p_values(p_values: Tensor) -> Tensor:
    """Adjust p-values `(m,)` for their number, so that those below a bound have that false discovery rate.

    The k-th least becomes the least of p m / j over all from it on, j its place.

    Source:
        Benjamini, Hochberg: Controlling the false discovery rate (Journal of the Royal Statistical Society B, 1995),
        sec. 3.1.
    """
    m = len(p_values)
    ascending, order = p_values.sort()
    scaled = ascending * m / torch.arange(1, m + 1, dtype=ascending.dtype, device=ascending.device)
    from_here_on = scaled.flip(0).cummin(0).values.flip(0).clamp(max=1) if m else scaled
    return torch.empty_like(p_values).index_copy(0, order, from_here_on)


def shrunk_to_mean(estimates: Tensor, spread: Tensor) -> Tensor:
    """Draw estimates `(G,)` of different precision together, each as far as it is noise: empirical Bayes.

    The errors of groups are taken for normal about a common mean with variance tau^2, and their estimates for normal
    about them with standard deviation `spread`. What the data say of group g is then

        mean + tau^2 / (tau^2 + spread_g^2) (estimate_g - mean),

    with tau^2 by the method of moments, at least 0, and the mean weighed by 1 / (tau^2 + spread^2). An estimate that is
    known without error stays as it is; with NaN for a spread there is none.

    Source:
        Efron, Morris: Data analysis using Stein's estimator (Journal of the American Statistical Association, 1975),
        sec. 2, for the rule; DerSimonian, Laird: Meta-analysis in clinical trials (Controlled Clinical Trials, 1986),
        eq. 8, for tau^2.
    """
    known = estimates.isfinite() & spread.isfinite()
    if int(known.sum()) < 2:
        return estimates
    x, variance = estimates[known], spread[known].square()
    least = variance[variance > 0].min() if bool((variance > 0).any()) else torch.ones_like(variance[0])
    w = 1 / variance.clamp(min=1e-6 * float(least))  # one that claims no error must not weigh infinitely
    mean = (w * x).sum() / w.sum()
    surplus = (w * (x - mean).square()).sum() - (len(x) - 1)
    tau_square = (surplus / (w.sum() - w.square().sum() / w.sum())).clamp(min=0)
    weight = 1 / (tau_square + 1 / w)
    mean = (weight * x).sum() / weight.sum()
    drawn = mean + tau_square * weight * (x - mean)
    return torch.full_like(estimates, torch.nan).masked_scatter(known, drawn)
