"""The constrained PAVA (PAVA-BC) of `isotonic.formula` as a Triton kernel, with one program per row.

Only `dispatch` imports this module, because Triton is optional. The speed on a GPU has not been measured.

A row consists of the elements `begin..stop-1` of flat columns. Its stack of blocks uses the same range of three buffers
in global memory. The finished blocks are at `begin..top-1`. `w` and `s` are weight and sum of the current block.

Addresses are int64, because row * length can exceed 2^31. A Triton variable cannot change its dtype in a loop, so sums
are initialised by a zero of their dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# One warp, because a program is sequential. Without fused multiply-add, products are rounded as on the CPU.
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
_MARKED = tl.constexpr(128)  # number of block starts that `_mark` stores at a time


def pava_bc(weight: Tensor, values: Tensor, n_min: Tensor, n_max: Tensor, paper: bool) -> Tensor:
    """Return True at the first element of each block of `formula.pava_bc`, bool `(R, G)`, without synchronising.

    `weight` and `values` are the numbers of samples and positives of tied groups. The block sizes are one per row.
    """
    first = torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)
    first[:, :1].fill_(True)
    stack = [torch.empty_like(first, dtype=torch.int64) for _ in range(3)]  # weights, sums and ends of blocks
    if first.numel():
        columns = [column.contiguous() for column in (weight, values, n_min, n_max)]
        with torch.cuda.device_of(weight):
            _pava_bc[(len(weight),)](*columns, *stack, first, weight.shape[-1], paper, **_OPTIONS)
    return first


@triton.jit(do_not_specialize=["length"])
def _pava_bc(weight, values, low, high, size, total, ends, first, length, paper: tl.constexpr):
    """Run `formula.pava_bc` on one row."""
    row = tl.program_id(0).to(tl.int64)
    n_min = tl.load(low + row)
    n_max = tl.load(high + row)
    begin = row * length
    stop = begin + length

    # Reserve the last n_min samples, rounded up to whole tied groups, for the final block.
    tail = stop
    tail_size = tl.full([], 0, tl.int64)
    tail_total = tl.full([], 0, tl.int64)
    while (tail > begin) & (tail_size < n_min):
        tail -= 1
        tail_size += tl.load(weight + tail)
        tail_total += tl.load(values + tail)

    # Algorithm 2, main loop: each tied group starts a block. Merge the last two blocks as long as the rule requires it.
    top = begin
    w = tl.full([], 0, tl.int64)
    s = tl.full([], 0, tl.int64)
    for i in range(begin, tail):
        v = tl.load(weight + i)
        y = tl.load(values + i)
        if v != 0:
            both = w + v
            if (w > 0) & (both > n_min) & ((both > n_max) | (s * v < y * w)):
                _push(size, total, ends, top, w, s, i)
                top += 1
                w = v
                s = y
            else:
                w = both
                s += y
                while _violates(size, total, begin, top, w, s, n_min, n_max):
                    top -= 1
                    w += tl.load(size + top)
                    s += tl.load(total + top)

    # Algorithm 2, last lines: merge the final block with the previous one if n_max allows it.
    if (w > 0) & ((w if paper else n_min) + tail_size > n_max):
        _push(size, total, ends, top, w, s, tail)
        top += 1
        w = tail_size
        s = tail_total
    else:
        w += tail_size
        s += tail_total

    if paper:
        # Algorithm 3: merge neighbouring blocks of equal mean, from the last to the first.
        # The mean of a merged block does not change, so the direction does not matter.
        while top > begin:
            top -= 1
            below_w = tl.load(size + top)
            below_s = tl.load(total + top)
            if below_s * w == s * below_w:
                w += below_w
                s += below_s
            else:
                tl.store(first + tl.load(ends + top), True)
                w = below_w
                s = below_s
    else:
        _mark(first, ends, begin, top)


@triton.jit
def _push(size, total, ends, top, w, s, end):
    """Push a block with weight `w` and sum `s` on the stack. The barriers make the stores visible to all threads."""
    tl.debug_barrier()
    tl.store(size + top, w)
    tl.store(total + top, s)
    tl.store(ends + top, end)
    tl.debug_barrier()


@triton.jit
def _violates(size, total, begin, top, w, s, n_min, n_max):
    """Return True if the block with weight `w` and sum `s` must be merged with the top of the stack (Algorithm 2)."""
    below = top > begin
    below_w = tl.load(size + top - 1, mask=below, other=0)
    below_s = tl.load(total + top - 1, mask=below, other=0)
    both = below_w + w
    return below & ((both <= n_min) | ((both <= n_max) & (below_s * w >= s * below_w)))


@triton.jit
def _mark(first, ends, begin, top):
    """Set `first` to True where each block except the first starts, at the end of the previous block."""
    for start in range(begin, top, _MARKED):
        slot = start + tl.arange(0, _MARKED)
        end = tl.load(ends + slot, mask=slot < top, other=0)
        tl.store(first + end, True, mask=slot < top)
