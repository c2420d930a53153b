"""Rows that a sampler gave to several ranks, told apart from those seen first."""

from collections.abc import Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


def distinct_rows(sampler: "DistributedSampler[Any]") -> Tensor:
    """Which rows of this rank are seen first, and which the sampler repeated so that all ranks have equally many.

    `DistributedSampler` gives every rank as many rows as any other, and fills up with rows that another rank (or, of a
    small data set, this one) has already. Counted twice, they make every metric a little wrong. What is returned here,
    as `weights` of `update`, counts each row of the data set once, whatever the number of ranks, shuffled or not:

        distinct = distinct_rows(sampler).split(batch_size)  # with a DataLoader of this batch_size
        for (x, y), weights in zip(loader, distinct):
            metric.update(model(x), y, weights=weights)

    Args:
        sampler: the rank's sampler; its dataset has a length.

    Returns:
        int64 `(len(sampler),)`: 1 for a row seen first and 0 for a repeated one, in the order in which the sampler
        yields them. They sum, over ranks, to the number of rows of the data set, or to what `drop_last` leaves of it.

    Raises:
        TypeError: for what is no `DistributedSampler`.

    Example:
        >>> from torch.utils.data import DistributedSampler
        >>> [distinct_rows(DistributedSampler(range(5), num_replicas=2, rank=rank)).tolist() for rank in range(2)]
        [[1, 1, 1], [1, 1, 0]]
    """
    if not isinstance(sampler, DistributedSampler):
        raise TypeError(
            f"`sampler` must be a torch.utils.data.DistributedSampler, got {type(sampler).__name__}. "
            "Other samplers repeat no rows, or have rules of their own."
        )
    # The sampler puts the rows in order, shuffled or not, goes round again until they are enough, and deals them out.
    dealt = torch.arange(len(sampler)) * sampler.num_replicas + sampler.rank
    return (dealt < len(cast(Sized, sampler.dataset))).long()
