"""Bins over a sorted sample (equal mass, equal width, given edges or isotonic blocks), and a test in each bin.

Isotonic blocks result from the pool adjacent violators algorithm (PAVA) or its variant with constraints (PAVA-BC).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.core.arguments import check_choice, check_count, check_flag, check_result
from torchcalib.core.sums import BinStats
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import constant, once, value_if_available
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import equal_width_edges, run_sums

if TYPE_CHECKING:
    from torchcalib.core.bins import BinTable, TCETable
    from torchcalib.core.ranked import RankedSample, SortedSample

Ties = Literal["pool", "split"]
Variant = Literal["code", "paper"]
Bins = Literal["equal_width", "equal_mass", "pava", "pava_bc"]
TestName = Literal["binomial", "t"]
Test = TestName | Callable[[Tensor, Tensor, Tensor], Tensor]
"""Two-sided test: a name, or a function from successes, trials and probabilities to p-values; see `tce`."""

N_QUANTILES = 33

_ROUNDING = 16 * torch.finfo(torch.float64).eps
"""Bound on the relative error of a probability that is computed from log-odds x, for probabilities of at least 1e-4.

The error is at most |x| eps.
"""

_MIN_PARTITIONED = 2**16  # for this many elements or more, a partition at the bin ends is faster than sorting


@dataclass(frozen=True, eq=False)
class RankedBins(BinStats):
    """Sums over the bins of a sorted sample, together with the sample."""

    # Function that returns the sorted sample. It is called once, when `sample` is first used.
    sort_sample: "Callable[[], SortedSample]"
    # int64 `(..., B)`. Bin b contains the elements from `ends[b - 1]` (0 for the first bin) up to and excluding
    # `ends[b]`. A batch element with fewer than B bins has empty bins at the end.
    ends: Tensor
    given: Tensor | None  # edges `(B + 1,)` from the caller; None if the bins depend on the sample
    from_outcomes: bool = False  # whether the bins depend on the outcomes, as isotonic blocks do
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # cache of the properties

    @once
    def sample(self) -> "SortedSample":
        """Elements in ascending order of their scores."""
        return self.sort_sample()

    @property
    def spread(self) -> Tensor:
        """Sum of outcome variances under perfect calibration `(..., B)`; NaN if the bins depend on the outcomes."""
        return self._variances[0]

    @property
    def noise(self) -> Tensor:
        """Variance as `BinStats.noise`; NaN if the bins depend on the outcomes, which are then dependent."""
        return self._variances[1]

    @once
    def _variances(self) -> tuple[Tensor, Tensor]:
        if self.from_outcomes:
            return torch.full_like(self.n, torch.nan), torch.full_like(self.n, torch.nan)
        spread, noise = (run_sums(variance, self.ends) for variance in self.sample.variances)
        return spread, noise

    @once
    def weight_square(self) -> Tensor:
        """See `BinStats`."""
        if self.sample.copies:
            return self.n
        return run_sums(self.sample.counts.square().to(self.n.dtype), self.ends)

    @once
    def residual_square(self) -> Tensor:
        """See `BinStats`."""
        return run_sums(self.sample.residual_squares, self.ends)

    def with_noise(self) -> BinStats:
        """Return the sums as a `BinStats` with the four sums of the noise, which does not store the sample."""
        noise = torch.stack((self.spread, self.noise, self.weight_square, self.residual_square), -2)
        sums = torch.cat((self.sums[..., :3, :], noise, self.sums[..., 3:, :]), -2)
        return BinStats(sums, has_noise=True, upper=self.sample.upper(self.ends))

    @property
    def edges(self) -> Tensor:
        """Bin edges `(..., B + 1)` from 0 to 1: the edges from the caller, or the midpoints between adjacent bins."""
        if self.given is not None:
            return self.given
        p, inner, size = self.sample.confidence, self.ends[..., :-1], self.sample.size.unsqueeze(-1)
        last, following = p.gather(-1, (inner - 1).clamp(min=0)), p.gather(-1, inner.clamp(max=p.shape[-1] - 1))
        middle = (last + following) / 2
        middle = torch.where(middle > last, middle, following)  # between adjacent floats it may round down
        middle = torch.where(inner == 0, 0.0, torch.where(inner == size, 1.0, middle))
        outer = torch.zeros_like(self.n[..., :1])
        return torch.cat((outer, middle, outer + 1), -1)

    def rejected(self, alpha: float, test: Test) -> Tensor:
        """Return the number of samples `(..., B)` in each bin that the test rejects at significance level `alpha`."""
        from torchcalib.special.binomial import count_rejected, rejected_in_bins, t_interval

        p, n = self.sample.confidence.detach(), self.n.detach().long()
        # Random signs of clusters give outcomes that are not whole numbers, and may be below 0 or above n.
        k = self.sums[..., 2, :].detach().round().long().clamp(min=0).minimum(n)
        counts = None if self.sample.n is None else self.sample.counts
        if test == "binomial":
            return rejected_in_bins(p, self.ends, k, n, alpha, counts).to(self.sums.dtype)
        if callable(test):
            checked = partial(_checked_p_values, test)
            return count_rejected(checked, p, self.ends, k, n, alpha, counts).to(self.sums.dtype)
        low, high = t_interval(k, n, alpha)
        accepted = torch.stack((torch.searchsorted(p, low), torch.searchsorted(p, high, right=True)))
        begins = torch.cat((torch.zeros_like(self.ends[..., :1]), self.ends[..., :-1]), -1)
        first, last = accepted.maximum(begins).minimum(self.ends).unbind()
        if counts is not None:
            upto = torch.cat((torch.zeros_like(counts[..., :1]), counts.cumsum(-1)), -1)
            first, last = upto.gather(-1, first), upto.gather(-1, last)
        return self.n - (last - first)

    def quantiles(self) -> Tensor:
        """Return the sorted predictions in each bin at 33 evenly spaced ranks `(..., B, 33)`; NaN in an empty bin."""
        begins = torch.cat((torch.zeros_like(self.ends[..., :1]), self.ends[..., :-1]), -1)
        ranks = torch.linspace(0, 1, N_QUANTILES, dtype=self.n.dtype, device=self.n.device)
        if self.sample.n is None:
            place = begins.unsqueeze(-1) + ((self.ends - begins - 1).unsqueeze(-1) * ranks).round().long()
        else:
            upto = self.sample.counts.cumsum(-1)
            before = torch.where(begins > 0, upto.gather(-1, (begins - 1).clamp(min=0)), 0)
            rank = before.unsqueeze(-1) + ((self.n - 1).clamp(min=0).unsqueeze(-1) * ranks).round().long()
            place = torch.searchsorted(upto, rank.flatten(-2), right=True).reshape(rank.shape)
        p = self.sample.confidence.detach()
        at = p.gather(-1, place.clamp(0, p.shape[-1] - 1).flatten(-2)).reshape(place.shape)
        return at.masked_fill((self.n == 0).unsqueeze(-1), torch.nan)

    def table(self) -> "BinTable":
        """Return the statistics of the bins as a `BinTable`."""
        from torchcalib.core.bins import BinTable

        return BinTable.from_bins(self, self.edges)

    def test_table(self, alpha: float, test: Test) -> "TCETable":
        """Return the bins as a `TCETable`, with the samples that the test rejects at significance level `alpha`."""
        from torchcalib.core.bins import BinTable, TCETable

        table = self.table()
        columns = {name: getattr(table, name) for name in BinTable.__dataclass_fields__}
        return TCETable(**columns, rejected=self.rejected(alpha, test), quantiles=self.quantiles())


def _checked_p_values(test: Callable[..., Tensor], successes: Tensor, trials: Tensor, p: Tensor) -> Tensor:
    """Return the p-values of a user-defined test. Raise ValueError unless there is one in [0, 1] for each `p`."""
    advice = "Compute it elementwise; the three arguments have this shape."
    value = check_result("test", test(successes, trials, p), p.shape, "a p-value for each prediction", advice)
    if value_if_available(((value >= 0) & (value <= 1)).all()) is False:  # False for NaN, too
        wrong = float(value[~((value >= 0) & (value <= 1))][0])
        raise ValueError(f"`test` must return p-values in [0, 1], got {wrong:g}. Clamp them, and replace NaN by 1.")
    return value


@dataclass(frozen=True)
class Binning:
    """Checked options for the partition of a sorted sample into bins; see `tce` for those of PAVA-BC."""

    bins: Bins | tuple[float, ...] = "equal_width"  # name of the partition, or edges from 0 to 1
    n_bins: int = 15  # number of equal-width or equal-mass bins
    right: bool = False  # whether equal-width bins and bins with given edges are `(a, b]` instead of `[a, b)`
    n_min: int | None = None
    n_max: int | None = None
    variant: Variant = "code"
    ties: Ties = "pool"  # "pool" keeps samples with equal scores together; "split" uses the order of the input

    def __post_init__(self) -> None:
        if isinstance(self.bins, str):
            check_choice("bins", self.bins, get_args(Bins))
        check_count("n_bins", self.n_bins, at_most=2**20)
        check_flag("right", self.right)
        for name, value, allowed in (("variant", self.variant, get_args(Variant)), ("ties", self.ties, get_args(Ties))):
            if value not in allowed:
                raise ValueError(f"`{name}` must be {' or '.join(map(repr, allowed))}, got {shown(value)}.")
        for name in ("n_min", "n_max"):
            if (bound := getattr(self, name)) is not None:
                check_count(name, bound)
        if self.n_min is not None and self.n_max is not None and self.n_min > self.n_max:
            raise ValueError(f"`n_min` must be at most `n_max`, got {self.n_min} and {self.n_max}.")

    @classmethod
    def from_bins(cls, bins: Bins | Sequence[float] | Tensor, **options: object) -> "Binning":
        """Create a binning from the argument `bins` of a metric: a name, or increasing edges from 0 to 1.

        NaN at the end of the edges is ignored; `optimal_bins` adds it to classes with fewer bins than others.
        """
        if isinstance(bins, str):
            if bins not in get_args(Bins):
                names = ", ".join(map(repr, get_args(Bins)))
                raise ValueError(f"`bins` must be one of {names} or edges from 0 to 1, got {shown(bins)}.")
            return cls(bins, **options)  # type: ignore[arg-type]
        try:
            edges = tuple(float(edge) for edge in bins)
            while edges and math.isnan(edges[-1]):
                edges = edges[:-1]
        except (TypeError, ValueError):
            raise TypeError(
                f"`bins` must be a name or a sequence of edges, got {shown(bins)}. Pass the number of bins as n_bins."
            ) from None
        rises = all(a < b for a, b in pairwise(edges))
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != 1 or not rises:
            raise ValueError(f"`bins` must be edges that increase from 0 to 1, got {list(edges)}.")
        return cls(edges, **options)  # type: ignore[arg-type]

    @property
    def is_isotonic(self) -> bool:
        """Whether the bins are isotonic blocks, which depend on the outcomes and require labels."""
        return self.bins in ("pava", "pava_bc")

    def from_sample(self, sample: "RankedSample") -> RankedBins:
        """Sort a sample by score, and return the sums over its bins."""
        from torchcalib.ops.sorting import end_of_ties, order_of

        given: Tensor | None = None
        if self.ties == "split" and sample.n is not None and value_if_available((sample.n > 1).any()):
            raise ValueError(
                f"`weights` must be 0 or 1 with ties='split', got {float(sample.n.max()):g}. "
                "Repeat the samples, or pass ties='pool'."
            )
        is_long = sample.score.shape[-1] >= _MIN_PARTITIONED and sample.ecd is None
        if is_long and self.bins == "equal_mass" and self.ties == "pool" and sample.is_labelled:
            from torchcalib.ops.equal_mass import equal_mass_sums

            sums, ends = equal_mass_sums(sample.score.contiguous(), sample.positives.contiguous(), self.n_bins)
            return RankedBins(sums, sample.sorted, ends, None)
        ordered = sample.sorted(stable=self.ties == "split")
        size = ordered.size.unsqueeze(-1)
        if self.bins == "equal_mass":
            # Bin i ends before sample i * N // B of N samples. Tied elements belong to the bin of the first one.
            i, total = torch.arange(1, self.n_bins + 1, device=ordered.size.device), ordered.total.unsqueeze(-1)
            # i * N // B in two parts, because with large weights the product overflows int64.
            cuts = i * (total // self.n_bins) + i * (total % self.n_bins) // self.n_bins
            if ordered.n is not None:
                counts = ordered.counts
                cuts = torch.searchsorted(counts.cumsum(-1) - counts, cuts)
            ends = cuts if self.ties == "split" else end_of_ties(ordered.score.detach(), cuts)
        elif self.bins in ("pava", "pava_bc"):
            ends = self._isotonic_ends(ordered)
        else:
            given = self._edges(ordered.confidence)
            inner = given[1:-1]
            if ordered.from_logits:  # probabilities within rounding error of an edge are treated as equal to it
                inner = inner * (1 + _ROUNDING if self.right else 1 - _ROUNDING)
            # Broadcast by addition instead of `expand`, because under vmap `searchsorted` needs contiguous memory.
            inner = inner + torch.zeros_like(size, dtype=given.dtype)
            # Ignored elements come last, with scores of at least 1, which is above every inner edge.
            ends = torch.searchsorted(ordered.confidence.detach(), inner, right=self.right)
            ends = torch.cat((ends, size), -1)
        ends = ends.minimum(size).contiguous()
        sums = self._sums(ordered, ends)
        if sample.ecd is not None:
            # The order may differ from that of `ordered` for equal scores, which are in the same bin or in input order.
            column = sample.ecd.expand_as(sample.score).gather(-1, order_of(sample.score.detach()))
            column = pad(column, (0, ordered.score.shape[-1] - column.shape[-1]))
            sums = torch.cat((sums, run_sums(column, ends).unsqueeze(-2)), -2)
        return RankedBins(sums, lambda: ordered, ends, given, self.is_isotonic)

    def _edges(self, like: Tensor) -> Tensor:
        if isinstance(self.bins, tuple):
            return constant(self.bins, like.dtype, like.device)
        return equal_width_edges(self.n_bins, like)

    def _isotonic_ends(self, ordered: "SortedSample") -> Tensor:
        from torchcalib.ops import isotonic

        begins = torch.ones_like(ordered.begins) if self.ties == "split" else ordered.begins
        positives = ordered.positives.detach().masked_fill(~ordered.counted, 0)
        positives = positives.long() if positives.is_floating_point() else positives
        n = ordered.counted if ordered.n is None else ordered.counts
        if self.bins == "pava":
            return isotonic.block_ends("pava", begins, positives, n)
        return isotonic.block_ends(
            "pava_bc", begins, positives, n, n_min=self.n_min, n_max=self.n_max, variant=self.variant
        )

    def _sums(self, ordered: "SortedSample", ends: Tensor) -> Tensor:
        wide = wide_dtype(ends.device)
        if ordered.n is None:
            n = ends.diff(prepend=torch.zeros_like(ends[..., :1])).to(wide)
            confidence = run_sums(ordered.confidence if ordered.from_logits else ordered.score, ends)
        else:
            n = run_sums(ordered.n, ends)
            confidence = run_sums(ordered.confidence * ordered.n, ends)
        return torch.stack((n, confidence, run_sums(ordered.positives, ends)), -2)
