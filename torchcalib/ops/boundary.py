"""Voxels near the edges of a segmentation."""

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor


def near_edge(labels: Tensor, width: float, spacing: Sequence[float], known: Tensor | None = None) -> Tensor:
    """Return whether another label is at most `width` away, for labels `(B, *S)` with D = `len(spacing)` axes S.

    `known` is a mask of the voxels with a label; None for all.
    """
    found = torch.zeros_like(labels, dtype=torch.bool)
    n_lead = labels.dim() - len(spacing)
    for offset in _half_ball(width, spacing, labels.shape[n_lead:]):
        # Both voxels of a pair are near the edge. The pairs of -offset are those of offset.
        sizes = zip(offset, labels.shape[n_lead:], strict=True)
        slices = [(slice(max(0, -d), size - max(0, d)), slice(max(0, d), size - max(0, -d))) for d, size in sizes]
        here, there = ((..., *one) for one in zip(*slices, strict=True))
        differs = labels[here] != labels[there]
        if known is not None:
            differs &= known[here] & known[there]
        found[here] |= differs
        found[there] |= differs
    return found


def _half_ball(width: float, spacing: Sequence[float], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield one of each pair of opposite offsets between voxels whose distance is at most `width`."""
    reach = [min(size - 1, math.floor(width / step * (1 + 1e-12))) for step, size in zip(spacing, sizes, strict=True)]
    for offset in product(*(range(-r, r + 1) for r in reach)):
        if offset > (0,) * len(offset):  # in lexicographic order
            square = sum((d * step) ** 2 for d, step in zip(offset, spacing, strict=True))
            if square <= width**2 * (1 + 1e-12):
                yield offset
