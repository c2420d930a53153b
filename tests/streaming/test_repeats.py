"""Rows that a `DistributedSampler` repeats, told by what it yields on all ranks."""

import itertools

import pytest
import torch
from helpers.each import check_each
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import torchcalib as tc


def test_every_row_is_seen_first_once_by_the_indices_that_the_sampler_yields():
    check_each(itertools.product([1, 2, 3, 4, 7, 16], [False, True], [False, True]), every_row_is_seen_first_once)


def every_row_is_seen_first_once(setting):
    world, shuffle, drop_last = setting
    for n in (1, 2, 3, 5, 8, 13, 16, 17):
        samplers = [
            DistributedSampler(range(n), world, rank, shuffle=shuffle, drop_last=drop_last) for rank in range(world)
        ]
        for epoch in range(3):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            seen = [list(sampler) for sampler in samplers]
            distinct = [tc.distinct_rows(sampler).tolist() for sampler in samplers]
            assert [len(rows) for rows in distinct] == [len(rows) for rows in seen]
            # In the order in which ranks take turns: a row counts where it comes up for the first time.
            turns = [(seen[rank][i], distinct[rank][i]) for i in range(len(seen[0])) for rank in range(world)]
            had = set()
            for row, first in turns:
                assert first == (row not in had)
                had.add(row)
            assert len(had) == sum(map(sum, distinct)) == (n if not drop_last else len(turns))


def test_as_weights_they_give_the_value_of_the_data_set():
    p = torch.rand(11, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(p, (p > 0.4).long())
    ranks = []
    for rank in range(4):
        sampler = DistributedSampler(data, 4, rank, shuffle=True, seed=2)
        metric = tc.ECE(task="binary")
        for (x, y), weights in zip(
            DataLoader(data, 2, sampler=sampler), tc.distinct_rows(sampler).split(2), strict=True
        ):
            metric.update(x, y, weights=weights)
        ranks.append(metric)
    for metric in ranks[1:]:
        ranks[0].merge_state(metric)
    torch.testing.assert_close(ranks[0].compute(), tc.ece(*data.tensors, task="binary").double(), rtol=1e-6, atol=0)
    assert ranks[0].bin_table().n.sum() == 11


def test_other_samplers_are_refused():
    with pytest.raises(TypeError, match=r"`sampler` must be a torch.utils.data.DistributedSampler, got RandomSampler"):
        tc.distinct_rows(RandomSampler(range(3)))
