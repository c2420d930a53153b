"""Sums over equal-mass bins, without sorting all samples."""

from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of

_MAX_COUNT = 2**31  # the compiled loops store counts in 32 bits


def equal_mass_sums(score: Tensor, label: Tensor, n_bins: int, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Sum over equal-mass bins.

    Bin i = 1, ..., B ends after `i * N // B` of the N scores that are not missing. An end within a group of equal
    scores is moved to the end of the group.

    Args:
        score: float32 or float64 `(..., M)` in [0, 1], or NaN for a missing score, contiguous on the CPU.
        label: 0 or 1, uint8 `(..., M)`, contiguous.
        n_bins: number of bins B.
        backend: implementation, see `dispatch.choose`; float64 supports only "torch".

    Returns:
        Number of samples, sum of scores and sum of labels of every bin, float64 `(..., 3, B)`; and the ends of the bins
        as positions in ascending order, int64 `(..., B)`.

    Gradient: none.
    """
    if backend == "auto" and score.shape[-1] >= _MAX_COUNT:
        backend = "torch"
    sums, ends = source_of("equal_mass", "cpu", score.dtype, backend).equal_mass_sums(score, label, n_bins)
    return sums, ends
