"""Weights that exclude rows repeated by a `DistributedSampler`."""

from collections.abc import Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


def distinct_rows(sampler: "DistributedSampler[Any]") -> Tensor:
    """Return weights that are 1 for the first occurrence of each row, and 0 for rows repeated by the sampler.

    `DistributedSampler` repeats rows to give all ranks the same number of rows. Repeated rows bias every metric. To
    exclude them, pass these weights to `update`::

        distinct = distinct_rows(sampler).split(batch_size)  # with a DataLoader of this batch_size
        for (x, y), weights in zip(loader, distinct):
            metric.update(model(x), y, weights=weights)

    Args:
        sampler: The sampler on this rank, shuffled or not. Its dataset must have a length.

    Returns:
        int64 `(len(sampler),)` in the order of the sampler. The sum over all ranks is the size of the data set. With
        `drop_last` it is the number of remaining rows.

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
            "For other samplers, pass weight 0 for repeated rows to `update`."
        )
    # The sampler repeats the (shuffled) data set from its beginning. Rank r of R gets positions r, r + R, ...
    positions = torch.arange(len(sampler), device="cpu") * sampler.num_replicas + sampler.rank
    return (positions < len(cast(Sized, sampler.dataset))).long()
