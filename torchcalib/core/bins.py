"""Tables of bins with consistency bands, the ranges of frequencies expected under perfect calibration."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from operator import itemgetter
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.core.arguments import check_choice, check_choice_or_function, check_positive, check_result
from torchcalib.core.sums import BinStats
from torchcalib.display.tables import Cell, Column, Table, Tabular, fraction, number, to_text
from torchcalib.display.words import count, decimals, edges_in_words, percent
from torchcalib.ops.count_moments import deviation_quantiles
from torchcalib.ops.logs import xmul


def root(x: Tensor) -> Tensor:
    """Return sqrt(x), with gradient 0 at 0 instead of infinity."""
    zero = x == 0
    return x.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def equal_width_edges(n_bins: int, like: Tensor) -> Tensor:
    """Return the edges `i / n_bins` of equal-width bins `(n_bins + 1,)`, with the dtype and device of `like`."""
    return torch.arange(n_bins + 1, dtype=like.dtype, device=like.device) / n_bins


Norm = Literal["l1", "l2", "max", "mean"]


def norm_over_bins(loss: Tensor, n: Tensor, norm: Norm) -> Tensor:
    """Return the norm over bins of a loss `(..., B)` of bins with n samples, `(...)`; NaN without data.

    "l1" is the mean weighted by n, "l2" the root of the weighted mean square, "max" the maximum, and "mean" the mean
    without weights. Empty bins are ignored.
    """
    total = n.sum(-1, keepdim=True)
    loss = loss.masked_fill((n == 0) & (total > 0), 0)
    if norm == "max":
        return loss.masked_fill(total == 0, torch.nan).amax(-1)
    if norm == "mean":
        return loss.sum(-1) / (n > 0).sum(-1)
    if norm == "l1":
        return (n / total * loss).sum(-1)
    return root((n / total * loss.square()).sum(-1))


DistanceName = Literal["squared", "absolute", "huber"]
Distance = DistanceName | Callable[[Tensor, Tensor], Tensor]
"""Distance d(y, P) of outcomes and probabilities: a name, or an elementwise function; see `estimation_error`."""


def estimation_errors(frequency: Tensor, distance: Distance, delta: float) -> Tensor:
    """Return the mean distance of the outcomes in each bin to their frequency `(..., B)`; NaN in an empty bin.

    A bin with frequency f has outcomes 1 and 0 in the proportion f to 1 - f, so that no sum over samples is needed.
    """
    empty = frequency.isnan()
    f = frequency.masked_fill(empty, 0.5).clamp(0, 1)  # weighted sums may exceed 1 by a rounding error
    to_one, to_zero = (_distance(torch.full_like(f, y), f, distance, delta) for y in (1.0, 0.0))
    return (xmul(f, to_one) + xmul(1 - f, to_zero)).masked_fill(empty, torch.nan)


def _distance(outcome: Tensor, probability: Tensor, distance: Distance, delta: float) -> Tensor:
    if callable(distance):
        advice = "Compute it elementwise; both arguments have this shape."
        result = distance(outcome, probability)
        return check_result("distance", result, outcome.shape, "a distance for each bin", advice)
    if distance == "huber":
        return torch.nn.functional.huber_loss(probability, outcome, reduction="none", delta=delta)
    error = outcome - probability
    return error.abs() if distance == "absolute" else error.square()


def check_distance(distance: object, delta: object) -> None:
    """Raise an error for an invalid distance, or an invalid threshold of the Huber loss."""
    check_choice_or_function("distance", distance, get_args(DistanceName), "(outcome, probability) -> distances")
    check_positive("delta", delta)


Row = Mapping[str, float]


def _unless_empty(cell: Callable[[Row], Cell]) -> Callable[[Row], Cell]:
    """Return a function that returns an empty cell for a bin without data, and `cell(row)` for other bins."""
    return lambda row: cell(row) if row["n"] else Cell()


def _column(
    header: str, fields: str, cell: Callable[[Row], Cell], *, is_number: bool = True, only_page: bool = False
) -> Column:
    """Return a table column for space-separated field names. Empty bins display only edges, count and share."""
    shown = cell if fields in ("lower upper", "n effective_n", "share") else _unless_empty(cell)
    data = {name: itemgetter(name) for name in fields.split()}
    return Column(header, shown, is_number=is_number, shown="page" if only_page else "always", data=data)


@dataclass(frozen=True, eq=False, repr=False)
class BinTable(Tabular):
    """Statistics of B bins. All fields have shape `(..., B)`; an empty bin has n = 0, gap 0 and NaN means.

    Notebooks display it as a table. `to_pandas`, `to_markdown` and `to_latex` export it, and
    `torchcalib.plots.reliability_diagram` plots it.

    Attributes:
        lower, upper: edges of the bin.
        n: total weight: the number of samples if all weights are 1.
        effective_n: effective number of samples (Kish 1965), (sum w)^2 / sum w^2 for floating weights w. Equal to `n`
            for integer weights. NaN if no variances were summed.
        share: n / N, the fraction of all samples.
        confidence: mean confidence.
        frequency: mean outcome.
        gap: frequency - confidence. A positive gap is under-confidence if the confidence is above 0.5.
        ecd: mean entropic calibration difference (ECD), in nats.
        band_low, band_high: consistency band. Under perfect calibration it contains the frequency with probability 95%,
            or more if few outcomes are possible. Bands are not corrected for multiple testing. NaN for isotonic bins,
            which depend on the outcomes, and if no variances were summed.

    Reference:
        Broecker, Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007).

    Example:
        >>> import torch
        >>> from torchcalib.functional import calibration_curve
        >>> table = calibration_curve(torch.tensor([0.2, 0.3, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        >>> table.gap
        tensor([0.2500, 0.1000], dtype=torch.float64)
    """

    lower: Tensor
    upper: Tensor
    n: Tensor
    effective_n: Tensor
    share: Tensor
    confidence: Tensor
    frequency: Tensor
    gap: Tensor
    ecd: Tensor
    band_low: Tensor
    band_high: Tensor

    @classmethod
    def from_bins(cls, b: BinStats, edges: Tensor) -> Self:
        """Return the table of bins with edges `(..., B + 1)`. The field `ecd` is NaN if it was not summed."""
        lower, upper = edges[..., :-1].expand(b.n.shape), edges[..., 1:].expand(b.n.shape)
        means = b.share, b.confidence, b.frequency, b.gap, b.ecd
        expected, noise = b.sums[..., 1, :].detach(), b.noise
        ends = []  # of the 95% consistency band
        for probability in (0.025, 0.975):
            quantile = torch.full_like(noise, probability)[None]
            deviation = deviation_quantiles(quantile, b.n.detach(), expected, b.spread, noise)
            ends.append(((expected + deviation[0] * noise.sqrt()) / b.n.detach()).clamp(0, 1))
        return cls(lower, upper, b.n, b.effective_n, *means, *ends)

    def mean(self, column: str) -> Tensor:
        """Return the mean of a field, such as "confidence", over all samples `(...)`; NaN without data."""
        means: Tensor = getattr(self, column)
        return (self.share * means.masked_fill((self.n == 0) & (self.share == 0), 0)).sum(-1)

    def estimation_error(
        self, distance: Distance = "squared", *, delta: float = 0.5, norm: Norm | None = None
    ) -> Tensor:
        """Return the estimation error of each bin `(..., B)`, or its norm over bins `(...)`; NaN without data.

        The estimation error is the mean distance of the outcomes in the bin to their frequency. See
        `torchcalib.functional.estimation_error` for the arguments: `norm="l1"` is the total error, and "mean" the
        averaged error within bins.
        """
        check_distance(distance, delta)
        errors = estimation_errors(self.frequency, distance, delta)
        if norm is None:
            return errors
        check_choice("norm", norm, get_args(Norm))
        return norm_over_bins(errors, self.n, norm)

    def __getitem__(self, index: Any) -> Self:
        """Index the batch axes, for example `table[k]` for class k of a class-wise table."""
        if self.n.dim() < 2:
            shape = tuple(self.n.shape)
            raise IndexError(f"a table must have a batch axis, got fields of shape {shape}. Index table.gap instead.")
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))

    def to_dict(self) -> dict[str, NDArray[np.float64]]:
        """Return a dict from field names to numpy arrays."""
        return {field.name: getattr(self, field.name).detach().cpu().numpy() for field in fields(self)}

    def layout(self, title: str = "") -> Table:
        """Return a table with one row per bin, and one section per batch element."""
        values = {name: column for name, column in self.to_dict().items() if column.ndim == self.n.dim()}
        indices = list(product(*map(range, self.n.shape[:-1])))
        sections = {
            str(list(index)) if index else "": [
                dict(zip(values, row, strict=True))
                for row in zip(*(column[index].tolist() for column in values.values()), strict=True)
            ]
            for index in indices
        }
        is_quiet: Callable[[Row], bool] = lambda row: not row["n"]  # noqa: E731
        return Table.from_items(self._columns(), sections, title, is_quiet=is_quiet, heading_name="index")

    def _columns(self) -> list[Column]:
        def band(row: Row) -> Cell:
            low, high = row["band_low"], row["band_high"]
            return Cell() if math.isnan(low) else Cell(f"{decimals(low)} to {decimals(high)}")

        return [
            _column("bin", "lower upper", self._range_cell(), is_number=False),
            _column("count", "n effective_n", lambda row: Cell(count(row["n"]))),
            _column("share", "share", lambda row: Cell(percent(row["share"]))),
            _column("mean confidence", "confidence", lambda row: fraction(row["confidence"])),
            _column("frequency", "frequency", lambda row: fraction(row["frequency"])),
            _column("if calibrated, 95%", "band_low band_high", band, only_page=True),
            _column("gap", "gap", lambda row: fraction(row["gap"], "+")),
            _column("mean ECD (nats)", "ecd", lambda row: fraction(row["ecd"], "+")),
        ]

    def _range_cell(self) -> Callable[[Row], Cell]:
        """Return a function from a row to the cell with its edges, which differ from those of other bins."""
        texts = edges_in_words([*self.lower.flatten().tolist(), *self.upper.flatten().tolist()])
        return lambda row: Cell(" to ".join(texts.get(row[end], "undefined") for end in ("lower", "upper")))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return to_text(self.layout(), with_page=True)


@dataclass(frozen=True, eq=False, repr=False)
class TCETable(BinTable):
    """`BinTable` with the results of the tests of the test-based calibration error (TCE).

    The test compares each prediction with the outcomes in its bin. Bins are in ascending order of the predictions.
    `torchcalib.plots.tce_diagram` draws the test-based reliability diagram of the table.

    Attributes:
        rejected: total weight of the samples in each bin whose prediction the test rejects, `(..., B)`.
        quantiles: sorted predictions in the bin at 33 evenly spaced ranks, `(..., B, 33)`; NaN in an empty bin.

    Reference:
        [TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error, UAI 2023, eq. 7.

    Example:
        >>> import torch
        >>> from torchcalib.functional import tce_table
        >>> table = tce_table(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0, 0, 1]), task="binary", bins=[0, 0.5, 1])
        >>> table.rejected
        tensor([0., 0.], dtype=torch.float64)
    """

    rejected: Tensor
    quantiles: Tensor

    def _columns(self) -> list[Column]:
        return [
            _column("bin", "lower upper", self._range_cell(), is_number=False),
            _column("count", "n effective_n", lambda row: Cell(count(row["n"]))),
            _column("mean prediction", "confidence", lambda row: number(row["confidence"])),
            _column("empirical probability", "frequency", lambda row: number(row["frequency"])),
            _column("rejected", "rejected", lambda row: Cell(count(row["rejected"]))),
            Column(
                "share rejected",
                _unless_empty(lambda row: Cell(percent(row["rejected"] / row["n"]))),
                data={"share_rejected": lambda row: row["rejected"] / row["n"] if row["n"] else math.nan},
            ),
            Column(
                "estimation error",
                _unless_empty(lambda row: number(row["frequency"] * (1 - row["frequency"]))),
                data={"estimation_error": lambda row: row["frequency"] * (1 - row["frequency"])},
            ),
        ]

    @property
    def tce(self) -> Tensor:
        """Percentage of all samples that the test rejects, in [0, 100], `(...)`; NaN without data."""
        return 100 * self.rejected.sum(-1) / self.n.sum(-1)
