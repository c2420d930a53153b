"""Boundary bands of segmentations, as weights of metrics."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchcalib.core.arguments import check_positive, is_int
from torchcalib.core.arrays import as_tensor
from torchcalib.io.errors import shown
from torchcalib.ops.boundary import near_edge


def boundary_band(
    target: Any, width: float, spacing: Sequence[float] | None = None, *, ignore_index: int | None = None
) -> Tensor:
    """Return a mask of the voxels near an edge of the target, to pass as `weights`.

    The band contains the voxels whose Euclidean distance from a voxel of the same image with another label is at most
    `width`. With `width=1` these are the voxels on both sides of an edge. Far from edges, most probabilities are near 0
    or 1. These voxels dominate the errors of all voxels.

    Metrics have a weight for each sample, not for each label. Evaluate regions near their own edges one at a time, as
    binary images.

    The function compares the labels with shifted ones, on their device, in integer arithmetic. The number of shifts
    grows with the volume of a ball of radius `width`. In 3-D, it is 3 for a width of 1 voxel, and 61 for 3 voxels.

    Args:
        target: Integer labels `(B, ...)` or `(B, 1, ...)` of images on the first axis. With `spacing`, the last axes
            are those of space, and all others are those of images. Regions `(B, L, ...)` have a band each.
        width: Largest distance, in voxels, or in the unit of `spacing`.
        spacing: Distance of adjacent voxels on each axis of space, such as millimetres. None counts voxels.
        ignore_index: Label without edges, whose voxels are not in the band.

    Returns:
        Bool tensor of the shape of `target`.

    Raises:
        TypeError: For labels that are not integers, or arguments that are not numbers.
        ValueError: For invalid arguments.

    Example:
        >>> import torch
        >>> boundary_band(torch.tensor([[0, 0, 0, 1, 1]]), 1)
        tensor([[False, False,  True,  True, False]])
        >>> boundary_band(torch.tensor([[0, 0, 0, 1, 1]]), 2.0, spacing=[2.5])
        tensor([[False, False, False, False, False]])
    """
    labels = as_tensor("target", target)
    if labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"`target` must be integer labels, got {labels.dtype}. Convert them with target.long().")
    check_positive("width", width)
    if not (ignore_index is None or is_int(ignore_index)):
        raise TypeError(f"`ignore_index` must be an int or None, got {shown(ignore_index)}.")
    n_axes = labels.dim() - 1 if spacing is None else len(spacing)
    if n_axes < 1 or n_axes > labels.dim():
        raise ValueError(
            f"`target` must have at least {max(1, n_axes) + (spacing is None)} axes, got shape {tuple(labels.shape)}. "
            "Add an axis of images with target.unsqueeze(0)."
        )
    steps = [1.0] * n_axes if spacing is None else list(spacing)
    for step in steps:
        check_positive("spacing", step)
    return near_edge(labels, width, steps, None if ignore_index is None else labels != ignore_index)
