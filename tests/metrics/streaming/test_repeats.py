"""Rows repeated by a `DistributedSampler`, identified from the indices of all ranks."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import torchcalib as tc
import torchcalib.functional as F


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 16])
def test_distinct_rows_marks_the_first_occurrence_of_each_row(world):
    options = itertools.product((1, 2, 3, 5, 8, 13, 16, 17), [False, True], [False, True], range(3))
    for n, shuffle, drop_last, epoch in options:
        samplers = [DistributedSampler(range(n), world, k, shuffle=shuffle, drop_last=drop_last) for k in range(world)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        seen = [list(sampler) for sampler in samplers]
        distinct = [tc.integrations.distinct_rows(sampler).tolist() for sampler in samplers]
        assert [len(rows) for rows in distinct] == [len(rows) for rows in seen]
        # Ranks take turns: a row counts where it occurs for the first time.
        had = set()
        turns = (itertools.chain(*zip(*ranks, strict=True)) for ranks in (seen, distinct))
        for row, first in zip(*turns, strict=True):
            assert first == (row not in had)
            had.add(row)
        assert len(had) == sum(map(sum, distinct)) == (sum(map(len, seen)) if drop_last else n)


def test_distinct_rows_as_weights_give_the_value_of_the_data_set():
    p = torch.rand(11, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(p, (p > 0.4).long())
    whole = tc.ECE(task="binary")
    for rank in range(4):
        sampler, metric = DistributedSampler(data, 4, rank, shuffle=True, seed=2), tc.ECE(task="binary")
        batches = zip(
            DataLoader(data, 2, sampler=sampler), tc.integrations.distinct_rows(sampler).split(2), strict=True
        )
        for (x, y), weights in batches:
            metric.update(x, y, weights=weights)
        whole.merge_state(metric)
    torch.testing.assert_close(whole.compute(), F.ece(*data.tensors, task="binary").double(), rtol=1e-6, atol=0)
    assert whole.bin_table().n.sum() == 11
