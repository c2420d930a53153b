"""Bins of the sorted sample: tied groups, equal-mass bins, PAVA and PAVA-BC blocks; isotonic regression.

Every binning is `Blocks`, and every step after `pooled` makes coarser blocks of those it is given: tied groups become
equal-mass bins or PAVA blocks. A table of counts per cell, cells in the order of the score, is blocks too.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, Op, choose, implementation
from torchcalib.ops.host_values import largest, look
from torchcalib.ops.isotonic import reference
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import operation
from torchcalib.ops.sorting import order_bits, stable_sort

Ties = Literal["pool", "split"]
Variant = Literal["code", "paper"]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A binning of a sample in ascending order of its scores; int64 throughout.

    Attributes:
        index: block of every sample `(..., N)`, samples in the order in which they were given.
        n: samples in every block `(..., B)`, weights counted. B is the largest number of blocks in the batch: rows
            that have fewer end in blocks of 0 samples.
        positives: samples of outcome 1 in every block `(..., B)`.
    """

    index: Tensor
    n: Tensor
    positives: Tensor

    @property
    def frequency(self) -> Tensor:
        """Mean outcome of every block `(..., B)`, float64; NaN in a block of 0 samples."""
        wide = wide_dtype(self.n.device)
        return self.positives.to(wide) / self.n.to(wide)


def pooled(scores: Tensor, outcomes: Tensor, weights: Tensor | None = None, *, ties: Ties = "pool") -> Blocks:
    """Sort a sample by score and pool equal scores: the finest blocks that do not depend on the order of the samples.

    Args:
        scores: floating `(..., N)`. -0 equals 0; NaN comes last.
        outcomes: 0 or 1, `(..., N)`, of any dtype.
        weights: whole numbers `(..., N)`, of any dtype: k stands for k copies. A sample of weight 0 is not read; it
            stands in a block of 0 samples at the end.
        ties: "pool": samples of equal score are one block. "split": every sample is a block, those of equal score in
            the order given (a stable sort; the published code of [TCE] splits them in the order of its sort). Weights
            are then 0 or 1, for copies of one sample could be parted.

    Returns:
        Blocks. No data gives no blocks.

    Raises:
        ValueError: `weights` are not whole numbers, or above 1 with `ties="split"`; `ties` is another word.

    Gradient: none.
    """
    if ties not in ("pool", "split"):
        raise ValueError(f"`ties` must be 'pool' or 'split', got {ties!r}. Pooled ties do not depend on sample order.")
    bits = order_bits(scores)
    counts = None if weights is None else _whole(weights, ties).expand_as(bits)
    if counts is not None:
        bits = bits.masked_fill(counts == 0, torch.iinfo(bits.dtype).max)
    bits, order = stable_sort(bits)
    first = torch.ones_like(bits, dtype=torch.bool)
    if ties == "pool":
        first[..., 1:] = bits[..., 1:] != bits[..., :-1]
    # Columns in the order of the scores; the index goes back to the order given.
    n = torch.ones_like(order) if counts is None else counts.gather(-1, order)
    positives = n * (outcomes.expand_as(order) == 1).gather(-1, order)
    if ties == "split":
        rank = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        return Blocks(torch.empty_like(order).scatter(-1, order, rank), n, positives)
    into, n_blocks = _numbered(first)
    return Blocks(torch.empty_like(order).scatter(-1, order, into), *_sums(into, n_blocks, n, positives))


def block_ends(
    op: Literal["pava", "pava_bc"],
    begins: Tensor,
    positives: Tensor,
    n: Tensor,
    *,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
) -> Tensor:
    """Return where the blocks of `pava` or `pava_bc` end in a sample that is sorted already.

    Args:
        op: which of the two.
        begins: where a tied group begins, bool `(..., M)`.
        positives: whole numbers `(..., M)`, bool or of an integer dtype.
        n: as `positives`; an element of 0 samples opens no block.
        n_min: see `pava_bc`.
        n_max: see `pava_bc`.
        variant: see `pava_bc`.

    Returns:
        int64 `(..., B)`: block b is the elements from the end of the one before up to, and without, its own. Rows that
        have fewer blocks than others end in empty ones.

    Raises:
        TypeError, ValueError: for `n_min`, `n_max` and `variant` as `pava_bc` does.

    Gradient: none.
    """
    low, high = _bounds(n.sum(-1), n_min, n_max, variant) if op == "pava_bc" else (None, None)
    starts = block_starts(op, n, positives, "auto", low, high, variant == "paper", begins)
    begun = starts.cumsum(-1, dtype=torch.int32)
    n_blocks = max(1, largest(begun[..., -1:], bound=begun.shape[-1]))  # a batch of no series has bins too
    numbers = torch.ones_like(begun[..., :n_blocks]).cumsum(-1, dtype=torch.int32)
    return torch.searchsorted(begun, numbers, right=True)


def equal_mass_cuts(n: int, n_bins: int) -> list[int]:
    """Return the cuts of n sorted samples into bins of equal mass: cut i at `i * n // n_bins`, from 0 to n.

    Integers, and not `int(linspace(0, 1, n_bins + 1) * n)`, which rounds some cuts to one sample below.
    """
    return [i * n // n_bins for i in range(n_bins + 1)]


def equal_mass(blocks: Blocks, n_bins: int) -> Blocks:
    """Join blocks into bins of equal mass.

    Cuts are those of `equal_mass_cuts`. A cut that falls inside a block goes to the end of that block, for a block is
    never split: with pooled ties a bin may therefore hold more than its share, or nothing.

    Args:
        blocks: of `pooled`, or a table of counts.
        n_bins: B.

    Returns:
        Blocks, exactly B of them.

    Raises:
        ValueError: `n_bins` is not positive.

    Gradient: none.
    """
    if n_bins < 1:
        raise ValueError(f"`n_bins` must be positive, got {n_bins}. Common values are 10 and 15.")
    # The bin of a block is the number of inner cuts at or before its first sample.
    start = blocks.n.cumsum(-1) - blocks.n
    total = blocks.n.sum(-1, keepdim=True)
    cuts = torch.arange(1, n_bins, device=start.device) * total // n_bins
    passed = torch.searchsorted(start, cuts)
    into = start.new_zeros((*start.shape[:-1], start.shape[-1] + 1))
    into = into.scatter_add(-1, passed, torch.ones_like(passed)).cumsum(-1)[..., :-1]
    return _joined(blocks, into, n_bins)


def pava(blocks: Blocks, *, backend: Backend = "auto") -> Blocks:
    """Join blocks into those of isotonic least squares; neighbours of equal mean are merged, so means strictly rise.

    Means of counts are compared exactly.

    Args:
        blocks: of `pooled`, or a table of counts; with a forced backend other than "python" up to 3e9 samples.
        backend: see `dispatch`. All give the same blocks.

    Returns:
        Blocks. The fitted value of a sample is `blocks.frequency.gather(-1, blocks.index)`.

    Gradient: none.
    """
    return _joined(blocks, *_numbered(block_starts("pava", blocks.n, blocks.positives, backend)))


def pava_bc(
    blocks: Blocks,
    *,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    backend: Backend = "auto",
) -> Blocks:
    """Join blocks into those of PAVA with bounds on their size ([TCE] Algorithm 2, 3).

    Samples are taken in the order of their scores, and the top two blocks merged if together they hold at most
    `n_min`, or at most `n_max` while the mean of the earlier one is at least that of the later. The last `n_min`
    samples are the final block, joined to the one before it if the two fit in `n_max`.

    The two variants differ in how they end:

    - "code" (the authors' code, which made the tables of the paper) joins the final block if `n_min` plus its own
      size is at most `n_max`, whatever the size of the block before it; neighbours of equal mean stay apart.
    - "paper" counts the size of the block before it, and then merges neighbours of equal mean (Algorithm 3).

    With pooled ties a tied group is taken whole. The final block is then the fewest groups that hold `n_min` samples.

    A block holds `n_min` to `n_max` samples, except that

    - the final block exceeds `n_max`, by at most `n_min`, where "code" joins it to a block too large for it;
    - merged neighbours of equal mean exceed `n_max` under "paper";
    - where `2 * n_min > n_max`, the block before the final one may hold fewer than `n_min`: the samples ended before
      it was full, and it does not fit into the final one;
    - with pooled ties, a tied group larger than `n_max` is a block of its own or in the final one; the final block
      holds more than `n_min` samples, and so may pass `n_max` by more, if the group that it begins with is large; and
      a block stays below `n_min` if the next group would carry the two beyond `n_max`, or beyond `n_min` while its
      mean is the higher one.

    Args:
        blocks: of `pooled`, with a forced backend other than "python" up to 3e9 samples. Under `ties="split"` they
            follow the published code.
        n_min: at least 1. Default: N // 20 of every row, at least 1.
        n_max: at least `n_min`. Default: N // 5 of every row, at least 1.
        variant: "code" or "paper".
        backend: see `dispatch`. All give the same blocks. It is a sequential algorithm: on CUDA rows run side by side;
            from other devices, and where triton is missing, the counts are brought to the CPU.

    Returns:
        Blocks. A row without data has none (`n` is 0 throughout).

    Raises:
        TypeError: a bound is not an integer.
        ValueError: a bound is not positive; `n_min > n_max`; a row has at most the `n_min` samples that were asked
            for; `variant` is another word.

    Gradient: none.
    """
    low, high = _bounds(blocks.n.sum(-1), n_min, n_max, variant)
    first = block_starts("pava_bc", blocks.n, blocks.positives, backend, low, high, variant == "paper")
    return _joined(blocks, *_numbered(first))


def isotonic_regression(y: Tensor, weights: Tensor | None = None, *, backend: Backend = "auto") -> Tensor:
    """Return the rising sequence nearest to `y` in weighted squares: the mean of every PAVA block.

    Args:
        y: real targets `(..., N)` in the order of their scores. Bool and integer labels without weights are pooled as
            counts, in few rounds on any device.
        weights: real, not negative, `(..., N)`. A target of weight 0 is not read; it gets the value of the block
            before it, or of the first block if there is none.
        backend: see `dispatch`. All give the same values up to rounding.

    Returns:
        `(..., N)`, computed in float64; floating `y` keeps its dtype. A row without weight is NaN.

    Gradient: everywhere the blocks do not change, in `y` the mean of the gradient over the block, weighted by
    `weights`; in positive `weights` the same mean times the residual. Both orders follow from the block means.

    Source: Best and Chakravarti 1990; Ayer et al. 1955.
    """
    wide = wide_dtype(y.device)
    op: Op = "pava" if weights is None and not y.is_floating_point() else "isotonic_regression"
    w = torch.ones_like(y, dtype=wide) if weights is None else weights.to(wide).expand_as(y)
    total = w * y.to(wide).masked_fill(w == 0, 0)
    counted = torch.int64 if op == "pava" else wide
    with torch.no_grad():
        first = block_starts(op, w.to(counted), total.to(counted), backend)
    block = first.cumsum(-1) - 1
    # The blocks are found without a gradient; it flows through their means, by the rules of scatter and gather.
    zeros = torch.zeros_like(total)
    mean = zeros.scatter_add(-1, block, total) / zeros.scatter_add(-1, block, w)
    return mean.gather(-1, block).to(y.dtype if y.is_floating_point() else wide)


@operation(
    "block_starts(str op, Tensor weight, Tensor values, str backend, Tensor? low=None, Tensor? high=None, "
    "bool paper=False, Tensor? begins=None) -> Tensor",
    fake=lambda op, weight, *_: torch.empty_like(weight, dtype=torch.bool),  # noqa: ARG005
)
def block_starts(
    op: Op,
    weight: Tensor,
    values: Tensor,
    backend: Backend,
    low: Tensor | None = None,
    high: Tensor | None = None,
    paper: bool = False,
    begins: Tensor | None = None,
) -> Tensor:
    """Return where a block begins: bool, the shape of `weight`, which stands in the order of the scores.

    With `begins` elements are pooled first, into groups that begin there. One operation to `torch.compile` and `vmap`,
    for its loops are not made of tensor operations.
    """
    chosen = choose(op, weight.device, backend).backend
    if backend == "auto" and op != "isotonic_regression" and _may_overflow(weight, values):
        chosen = "python"  # whose integers have no end
    if begins is not None and chosen in ("rounds", "triton"):
        into, n_groups = _numbered(begins)
        groups = _sums(into, n_groups, weight.long(), values.long())
        return block_starts(op, *groups, backend, low, high, paper).gather(-1, into) & begins  # type: ignore[no-any-return]
    length = weight.shape[-1]
    columns = [weight, values] if begins is None else [weight, values, begins]
    rows = [column.detach().reshape(-1, length) if length else column.new_zeros(0, 0) for column in columns]
    bounds = [] if low is None or high is None else [low.flatten(), high.flatten()]
    if chosen == "rounds":
        return reference.pava_rounds(*rows).view(weight.shape)
    source = implementation(op, chosen)
    loop = source.pava_bc if op == "pava_bc" else source.pava
    if chosen == "triton":
        # The kernels take all rows at once, with buffers of their own.
        found: Tensor = loop(*rows, *bounds, paper) if bounds else loop(*rows)
        return found.view(weight.shape)
    first = np.zeros(rows[0].shape, dtype=np.bool_)
    first[:, :1] = True
    limits = [bound.tolist() for bound in bounds]
    arrays = [column.cpu().contiguous().numpy() for column in rows]
    opens = None if begins is None else [np.flatnonzero(row) for row in arrays.pop()]
    pooled = arrays if opens is None else _pooled(arrays, opens)
    for row, (w, v) in enumerate(zip(*pooled, strict=True)):
        own = [*(limit[row] for limit in limits), paper] if limits else []
        if chosen == "numba":
            buffers = [np.empty_like(w), np.empty_like(v), np.empty(len(w), dtype=np.int64)]
        else:
            w, v = w.tolist(), v.tolist()
            buffers = [[0] * len(w) for _ in range(3)]
        count = loop(w, v, *own, *buffers)
        ends = buffers[2][: max(count - 1, 0)]
        first[row, ends if opens is None else opens[row][ends]] = True
    return torch.from_numpy(first).to(weight.device).view(weight.shape)


def _pooled(columns: list[np.ndarray], opens: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Return the sums of each column `(R, N)` over groups of elements, an array for each row.

    Args:
        columns: of integers.
        opens: where the groups of each row begin.
    """
    length = columns[0].shape[-1]
    if all(len(places) == length for places in opens):
        return [list(column.astype(np.int64)) for column in columns]
    sizes = np.cumsum([len(places) for places in opens])[:-1]
    begins = np.concatenate([row * length + places for row, places in enumerate(opens)])
    return [np.split(np.add.reduceat(column.ravel(), begins, dtype=np.int64), sizes) for column in columns]


def _may_overflow(weight: Tensor, values: Tensor) -> bool:
    """Whether the products that compare two means may pass 2^63: from some 3e9 samples on, weights counted."""
    if not weight.numel() or weight.dtype == torch.bool:  # each element a sample, of which no memory holds so many
        return False
    sums = weight.sum(-1, dtype=torch.float64) * values.abs().sum(-1, dtype=torch.float64)
    return bool(sums.max() >= 2.0**62)


def _numbered(first: Tensor) -> tuple[Tensor, int]:
    """Return the block of every element from where blocks begin, and the largest number of blocks in a row."""
    into = first.cumsum(-1) - 1
    return into, largest(into[..., -1:] + 1, bound=into.shape[-1])


def _joined(blocks: Blocks, into: Tensor, n_blocks: int) -> Blocks:
    """Join blocks: block b becomes part of block `into[b]`."""
    return Blocks(into.gather(-1, blocks.index), *_sums(into, n_blocks, blocks.n, blocks.positives))


def _sums(into: Tensor, n_blocks: int, n: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
    """Sum both columns over the elements of every block."""
    zeros = n.new_zeros((*into.shape[:-1], n_blocks))
    return zeros.scatter_add(-1, into, n), zeros.scatter_add(-1, into, positives)


def _whole(weights: Tensor, ties: Ties) -> Tensor:
    """Return weights as int64 counts; raises where one is not a whole number."""
    if weights.is_floating_point() and not (bad := weights != weights.round()).logical_not().all():
        value = weights[bad].flatten()[0].item()
        raise ValueError(f"`weights` must be whole numbers, got {value}. Bins of samples count copies.")
    if ties == "split" and (weights > 1).any():
        raise ValueError(
            f"`weights` must be 0 or 1 with ties='split', got {weights.max().item()}. Repeat the samples or pool ties."
        )
    return weights.to(torch.int64)


def _bounds(total: Tensor, n_min: int | None, n_max: int | None, variant: Variant) -> tuple[Tensor, Tensor]:
    """Return the checked bounds of every row on the size of a block."""
    if variant not in ("code", "paper"):
        raise ValueError(f"`variant` must be 'code' or 'paper', got {variant!r}. 'code' made the published tables.")
    low, high = _bound("n_min", n_min, total, 20), _bound("n_max", n_max, total, 5)
    short = (total > 0) & (low > high)
    if look(short.any()):
        raise ValueError(
            f"`n_min` must be at most `n_max`, got {_at(low, short)} and {_at(high, short)} for {_at(total, short)} "
            "samples. Lower `n_min` or raise `n_max`."
        )
    short = (total > 0) & (total <= low) if n_min is not None else torch.zeros_like(short)
    if look(short.any()):
        raise ValueError(
            f"`n_min` must be below the number of samples, got {_at(low, short)} for {_at(total, short)} samples. "
            "Lower `n_min` or give more samples."
        )
    return low, high


def _bound(name: str, value: int | None, total: Tensor, share: int) -> Tensor:
    """Return a bound for every row: the value given, or the row's share of its samples."""
    if value is None:
        return (total // share).clamp(min=1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, got {type(value).__name__}. Leave it out for N // {share}.")
    if value < 1:
        raise ValueError(f"`{name}` must be positive, got {value}. Leave it out for N // {share}.")
    return torch.full_like(total, value)


def _at(values: Tensor, where: Tensor) -> int:
    """Return the first of the values where the condition holds."""
    return int(values[where].flatten()[0])
