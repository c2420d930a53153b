"""Sums over equal-mass bins, without sorting all samples: compiled loops, or a partition at the edges (quickselect)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.labelled import label_keys
from torchcalib.ops.segments import run_sums

_MAX_COUNT = 2**31  # the compiled loops store counts in 32 bits
_MAX_TIES = 1 / 64  # fraction of tied scores above which sorting is faster than partitioning


def equal_mass_sums(score: Tensor, label: Tensor, n_bins: int, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Return count and sums of scores and labels in equal-mass bins `(..., 3, B)`, and bin ends `(..., B)`.

    Bin i = 1, ..., B ends after `i * N // B` of the N scores that are not missing. An end within a group of equal
    scores is moved to the end of the group. Scores `(..., M)` are float32 or float64 in [0, 1], or NaN if missing.
    Labels are 0 or 1, uint8. Both are contiguous on the CPU, where float64 supports only the backend "torch". There is
    no gradient.
    """
    if backend == "auto" and score.shape[-1] >= _MAX_COUNT:
        backend = "torch"
    sums, ends = source_of("equal_mass", "cpu", score.dtype, score.numel(), backend).sums_and_ends(score, label, n_bins)
    return sums, ends


def sums_and_ends(score: Tensor, label: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """Compute `equal_mass_sums` in plain torch and numpy, by partitioning at the bin edges."""
    # The last bit of a key is the label, so that sorting the keys moves the labels too. Missing scores have larger keys
    # than the score 1.
    keys = label_keys(score, label)
    key_of_1 = int(
        label_keys(torch.ones((), dtype=score.dtype, device="cpu"), torch.ones((), dtype=torch.uint8, device="cpu"))
    )
    ends = torch.empty((*score.shape[:-1], n_bins), dtype=torch.int64, device="cpu")
    for row, into in zip(keys.view(-1, keys.shape[-1]).numpy(), ends.view(-1, n_bins), strict=True):
        size = int(np.count_nonzero(row <= key_of_1))
        cuts = [i * size // n_bins for i in range(1, n_bins + 1)]
        # Many equal scores, among about 1,000 evenly spaced ones, make partitioning slow.
        subsample = np.sort(row[:: len(row) // 1024 + 1] >> 1)
        if int(np.count_nonzero(subsample[1:] == subsample[:-1])) > _MAX_TIES * len(subsample):
            row.sort()
            cuts = [int(np.searchsorted(row, row[cut - 1] | 1, side="right")) if cut else 0 for cut in cuts]
        else:
            cuts = _cuts_by_partition(row, cuts)
        into[:] = torch.tensor(cuts, device="cpu")
    n = ends.diff(prepend=torch.zeros_like(ends[..., :1])).double()
    labels = run_sums(keys.bitwise_and(1), ends)
    return torch.stack((n, run_sums(keys.bitwise_right_shift_(1).view(score.dtype), ends), labels), -2), ends


def _cuts_by_partition(keys: NDArray[np.integer], cuts: list[int]) -> list[int]:
    """Partition `keys` in place. Return the bin ends `cuts`, each moved to the end of its group of equal scores.

    Divide and conquer in O(N log B): partition at the middle cut, then partition both sides independently.
    """
    if not cuts:
        return []
    begin = end = cuts[len(cuts) // 2]  # positions of the keys with the last score before the cut
    if 0 < end < len(keys):
        below, above = keys[:end], keys[end:]
        keys.partition(end)
        top = below.max() | 1  # largest key of the last score before the cut, with label 1
        if above[0] <= top:  # equal scores on both sides: move them next to the cut
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
