"""Weights that exclude the rows which a `DistributedSampler` repeats."""

from collections.abc import Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


def distinct_rows(sampler: "DistributedSampler[Any]") -> Tensor:
    """Return weights that count each row of the data set once, although the sampler repeats rows.

    `DistributedSampler` repeats rows so that all ranks get the same number, which biases every metric. Pass these
    weights to `update`:

        distinct = distinct_rows(sampler).split(batch_size)  # with a DataLoader of this batch_size
        for (x, y), weights in zip(loader, distinct):
            metric.update(model(x), y, weights=weights)

    Args:
        sampler: The sampler on this rank, shuffled or not. Its dataset must have a length.

    Returns:
        int64 `(len(sampler),)` in the order of the sampler: 1 for the first occurrence of a row, 0 for a repetition.
        The sum over ranks is the size of the data set, or with `drop_last` the number of remaining rows.

    Raises:
        TypeError: If `sampler` is not a `DistributedSampler`.

    Example:
        >>> from torch.utils.data import DistributedSampler
        >>> [distinct_rows(DistributedSampler(range(5), num_replicas=2, rank=rank)).tolist() for rank in range(2)]
        [[1, 1, 1], [1, 1, 0]]
    """
    if not isinstance(sampler, DistributedSampler):
        raise TypeError(
            f"`sampler` must be a torch.utils.data.DistributedSampler, got {type(sampler).__name__}. "
            "The repeated rows of other samplers are unknown."
        )
    # The sampler repeats the (shuffled) data set from its beginning, and rank r of R gets positions r, r + R, ...
    positions = torch.arange(len(sampler)) * sampler.num_replicas + sampler.rank
    return (positions < len(cast(Sized, sampler.dataset))).long()
