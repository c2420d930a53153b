"""Sort a sample by score, and sum over runs of neighbours in that order."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import is_plain, operation

# torch sorts a single row of integers by radix and everything else by comparison. From about this length on, one call
# for each row is faster than one for the batch.
_ROW_BY_ROW = 2048

_MOST_TIES = 1 / 64  # share of equal scores above which a sort is faster than partitions


def order_bits(scores: Tensor) -> Tensor:
    """Return integers in the order of the floats: int32 of float32 and narrower, int64 of float64.

    A float is sign and magnitude, an integer two's complement, so the magnitude bits of negative floats are inverted.
    -0 equals 0. NaN of either sign comes last.
    """
    scores = scores.detach()
    scores = scores.double() if scores.dtype == torch.float64 else scores.float()
    kind, magnitude = (torch.int64, 2**63 - 1) if scores.dtype == torch.float64 else (torch.int32, 2**31 - 1)
    bits = (scores + 0.0).contiguous().view(kind)
    bits = torch.where(bits < 0, bits ^ magnitude, bits)
    return bits.masked_fill(scores.isnan(), magnitude)


def stable_sort(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Sort integers along the last axis, stably; return them and their order.

    On the CPU about ten times as fast as `torch.sort` of the floats.
    """
    n = bits.shape[-1]
    if bits.device.type != "cpu" or n < _ROW_BY_ROW or bits.dim() == 1:
        return torch.sort(bits, dim=-1, stable=True)
    values, order = torch.empty_like(bits), torch.empty_like(bits, dtype=torch.int64)
    for row, out, into in zip(bits.view(-1, n), values.view(-1, n), order.view(-1, n), strict=True):
        torch.sort(row, stable=True, out=(out, into))
    return values, order


@operation("order_of(Tensor score) -> Tensor", fake=lambda score: torch.empty_like(score, dtype=torch.int64))
def order_of(score: Tensor) -> Tensor:
    """Return the stable ascending order of scores along the last axis, int64; NaN last."""
    return stable_sort(order_bits(score))[1]


def sorted_columns(score: Tensor, positives: Tensor, n: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Sort elements by score, stably. Elements without a score (NaN) come last and are not counted.

    Args:
        score: floating `(..., M)`, M >= 1.
        positives: `(..., M)`.
        n: `(..., M)` or None.

    Returns:
        The three in ascending order of the score, with +inf for NaN, and the number of scores `(...)`.

    Gradient: in all three; the order is a constant.
    """
    order = order_of(score.detach())
    size = score.isnan().logical_not().sum(-1)
    score, positives = score.gather(-1, order), positives.expand_as(order).gather(-1, order)
    n = None if n is None else n.expand_as(order).gather(-1, order)
    return score.masked_fill(score.isnan(), torch.inf), positives, n, size


def tie_begins(score: Tensor) -> Tensor:
    """Return where a sorted score `(..., M)` is higher than the one before it, or is the first."""
    begins = torch.ones_like(score, dtype=torch.bool)
    begins[..., 1:] = score[..., 1:] != score[..., :-1]
    return begins


@operation(
    "sort_labelled(Tensor score, Tensor label) -> (Tensor, Tensor, Tensor)",
    fake=lambda score, label: (
        torch.empty_like(score),
        torch.empty_like(label),
        score.new_empty(score.shape[:-1], dtype=torch.int64),
    ),
)
def sort_labelled(score: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort probabilities with their labels, like `sorted_columns` except for the order of equal scores.

    The bits of a probability leave the last place of a signed integer free for the label. So one sort of plain
    integers is enough, several times as fast as a sort that carries an index.

    Args:
        score: `(..., M)` float32 or float64 in [0, 1], or NaN for a missing score. On the CPU.
        label: `(..., M)` 0 or 1, uint8.

    Returns:
        Scores, labels (uint8) and the number of scores. A missing score becomes a number above 1.

    Gradient: none.
    """
    keys = _keys(score, label)
    keys.numpy().sort(axis=-1)
    label = keys.bitwise_and(1).to(torch.uint8)
    score = keys.bitwise_right_shift_(1).view(score.dtype)
    ones = torch.ones((*score.shape[:-1], 1), dtype=score.dtype)
    return score, label, torch.searchsorted(score, ones, right=True).squeeze(-1)


@operation(
    "equal_mass_sums(Tensor score, Tensor label, int n_bins) -> (Tensor, Tensor)",
    fake=lambda score, label, n_bins: (  # noqa: ARG005
        score.new_empty((*score.shape[:-1], 3, n_bins), dtype=torch.float64),
        score.new_empty((*score.shape[:-1], n_bins), dtype=torch.int64),
    ),
)
def equal_mass_sums(score: Tensor, label: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """Sum over bins of equal mass without a sort: partition the samples at every cut (quickselect).

    Args:
        score: see `sort_labelled`.
        label: see `sort_labelled`.
        n_bins: B. Cut i of N scores is at `i * N // B`, moved behind the scores equal to the last one before it.

    Returns:
        Samples, sum of scores and sum of labels `(..., 3, B)`, float64; and the ends of the bins in ascending order of
        the scores `(..., B)`.

    Gradient: none.
    """
    keys = _keys(score, label)
    certain = int(_keys(torch.ones((), dtype=score.dtype), torch.ones((), dtype=torch.uint8)))
    ends = torch.empty((*score.shape[:-1], n_bins), dtype=torch.int64)
    for row, into in zip(keys.view(-1, keys.shape[-1]).numpy(), ends.view(-1, n_bins), strict=True):
        size = int(np.count_nonzero(row <= certain))
        cuts = [i * size // n_bins for i in range(1, n_bins + 1)]
        into[:] = torch.tensor(_cuts_by_sort(row, cuts) if _has_many_ties(row) else _cuts_by_partition(row, cuts))
    n = ends.diff(prepend=torch.zeros_like(ends[..., :1])).double()
    labels = run_sums(keys.bitwise_and(1), ends)
    return torch.stack((n, run_sums(keys.bitwise_right_shift_(1).view(score.dtype), ends), labels), -2), ends


def _keys(score: Tensor, label: Tensor) -> Tensor:
    """Return integers in the order of the probabilities, with the label in the last place; see `sort_labelled`."""
    integer, top = (torch.int32, 2**30 - 1) if score.dtype == torch.float32 else (torch.int64, 2**62 - 1)
    keys = score.abs().view(integer).clamp_(max=top)  # abs turns -0 into 0 and copies
    return keys.bitwise_left_shift_(1).bitwise_or_(label)


def _has_many_ties(keys: NDArray[np.integer]) -> bool:
    """Return whether a subsample of 1,024 keys has many ties: partitions among ties do not get shorter."""
    some = np.sort(keys[:: len(keys) // 1024 + 1] >> 1)
    return int(np.count_nonzero(some[1:] == some[:-1])) > _MOST_TIES * len(some)


def _cuts_by_sort(keys: NDArray[np.integer], cuts: list[int]) -> list[int]:
    """Sort keys in place; return the cuts, moved behind ties."""
    keys.sort()
    return [int(np.searchsorted(keys, keys[cut - 1] | 1, side="right")) if cut else 0 for cut in cuts]


def _cuts_by_partition(keys: NDArray[np.integer], cuts: list[int]) -> list[int]:
    """Partition keys in place at every cut; return the cuts, moved behind ties.

    The middle cut is found first. Then the two sides are independent: a divide and conquer of O(N log B).
    """
    if not cuts:
        return []
    begin = end = cuts[len(cuts) // 2]  # range of the scores that are equal to the last one before the cut
    if 0 < end < len(keys):
        below, above = keys[:end], keys[end:]
        keys.partition(end)
        top = below.max() | 1  # the largest key of this score
        if above[0] <= top:
            begin, above_of_score = int(np.count_nonzero(below < top - 1)), int(np.count_nonzero(above <= top))
            end += above_of_score
            if begin > 0:
                below.partition(begin)
            if above_of_score < len(above):
                above.partition(above_of_score)
    return [
        *_cuts_by_partition(keys[:begin], [cut for cut in cuts if cut < begin]),
        *(begin if cut == begin else end for cut in cuts if begin <= cut <= end),
        *(end + cut for cut in _cuts_by_partition(keys[end:], [cut - end for cut in cuts if cut > end])),
    ]


def end_of_ties(score: Tensor, ends: Tensor) -> Tensor:
    """Move ends of runs `(..., B)` of sorted scores `(..., M)` behind the last score of their tie."""
    last = score.gather(-1, (ends - 1).clamp(min=0))
    return torch.where(ends > 0, torch.searchsorted(score, last, right=True), 0)


def run_index(ends: Tensor, length: int) -> Tensor:
    """Return the run of each of `length` elements, from the ends of B runs `(..., B)`; B behind the last run."""
    # The number of runs that end at or before an element: a cumulative count, cheaper than a binary search for each.
    counts = torch.zeros((*ends.shape[:-1], length + 1), dtype=ends.dtype, device=ends.device)
    return counts.scatter_add(-1, ends, torch.ones_like(ends)).cumsum(-1)[..., :-1]


def run_sums(x: Tensor, ends: Tensor) -> Tensor:
    """Sum over runs of elements: run b is the elements `ends[b - 1]` (0 for the first) up to before `ends[b]`.

    Args:
        x: `(..., M)` of any real dtype. Elements behind the last run are ignored.
        ends: `(..., B)` int64, not decreasing, at most M.

    Returns:
        `(..., B)`, each run summed by itself in the dtype of sums; 0 for an empty run.

    Gradient: that of a sum, in every mode and of any order.
    """
    if x.device.type == "cpu" and is_plain(x, ends):
        return _run_sums_of_arrays(x, ends)
    # One place more for the elements behind the last run, which may be infinite.
    wide = wide_dtype(x.device)
    sums = torch.zeros((*ends.shape[:-1], ends.shape[-1] + 1), dtype=wide, device=x.device)
    return sums.scatter_add(-1, run_index(ends, x.shape[-1]), x.to(wide))[..., :-1]


def _run_sums_of_arrays(x: Tensor, ends: Tensor) -> Tensor:
    """Sum runs of all rows with one `reduceat`, which needs strictly increasing places: empty runs are left out."""
    values, stops = (t.reshape(ends.shape[:-1].numel(), t.shape[-1]).numpy() for t in (x, ends))
    begins = np.concatenate((np.zeros_like(stops[:, :1]), stops), -1)  # the last begins behind all runs
    held = np.diff(begins, append=x.shape[-1]) > 0
    places = (begins + x.shape[-1] * np.arange(len(begins))[:, None])[held]
    sums = np.zeros(begins.shape)
    if places.size:
        sums[held] = np.add.reduceat(values.ravel(), places, dtype=sums.dtype)
    return torch.from_numpy(sums[:, :-1].reshape(ends.shape))
