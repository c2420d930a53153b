"""Work of each rank in test_linear_softmax_stats.py: ranks hold parts of the classes of a linear layer."""

import pytest
import torch
import torch.distributed as dist

from torchcalib.ops.linear_softmax_stats import Head, all_bins, largest, moments, rows

N_CLASSES = 37


def layer(dtype=torch.float32):
    """Return hidden states, targets, weight and bias. Products of small multiples of 1/4 are exact in every dtype."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-4, 5, (3, 5, 8), generator=generator)
    weight = torch.randint(-6, 7, (N_CLASSES, 8), generator=generator) / 4
    bias = torch.randint(-8, 9, (N_CLASSES,), generator=generator) / 4
    target = torch.randint(0, N_CLASSES, (3, 5), generator=generator)
    return hidden.to(dtype), target, weight.to(dtype), bias.to(dtype)


def results(hidden, target, head, **options):
    """Return all results that do not depend on the order of sums over all classes of a block."""
    found = rows(hidden, target, head, **options)
    return [*found, *moments(hidden, target, head, **options), *largest(hidden, head, 5, **options)]


def gradients(hidden, target, head, **options):
    leaves = [x for x in (hidden, *head) if isinstance(x, torch.Tensor)]
    found = rows(hidden, target, head, **options)
    return torch.autograd.grad(sum(k * x.sum() for k, x in enumerate(found[:4], 1)), leaves)


def with_gradient(x):
    return x.clone().requires_grad_()


def compare_with_one_process(rank, world, folder):
    """Compare groups of one rank, two ranks and so on, with equal and unequal parts, to this process alone."""
    groups = [dist.new_group(list(range(n + 1))) for n in range(world)]
    hidden, target, weight, bias = layer()
    target[0, 0] = -100
    bias[20:30] = -torch.inf
    options = {"softcap": 5.0, "temperature": torch.tensor([1.0, 0.5])}
    whole = Head(weight, bias, **options)
    for n, group in enumerate(groups, 1):
        if rank >= n:
            continue
        size = -(-N_CLASSES // n)
        own = slice(rank * size, (rank + 1) * size)
        head = Head(weight[own], bias[own], **options)
        found = results(hidden, target, head, vocab_group=group)
        # One block per rank: sums are merged in the same order.
        for a, b in zip(found, results(hidden, target, whole, block=size), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        # Unequal parts, and several blocks per rank: rounding differs.
        cuts = [0, *(k * k + 1 for k in range(1, n)), N_CLASSES]
        own = slice(cuts[rank], cuts[rank + 1])
        head = Head(weight[own], bias[own], **options)
        found = results(hidden, target, head, vocab_group=group, block=3)
        for a, b in zip(found, results(hidden, target, whole), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12, equal_nan=True)
        bins = all_bins(hidden, target, head, n_bins=5, vocab_group=group)
        torch.testing.assert_close(bins, all_bins(hidden, target, whole, n_bins=5), rtol=1e-6, atol=1e-9)
        compare_gradients(group, own)
        with pytest.raises(ValueError, match="`vocab_group` must be None"):
            torch.vmap(lambda h, y, head=head, group=group: rows(h, y, head, vocab_group=group))(hidden, target)


def compare_gradients(group, own):
    hidden, target, weight, bias = layer()
    scale, temperature = torch.tensor(1.5), torch.tensor([1.0, 0.5])
    given = [with_gradient(x) for x in (hidden, weight[own], bias[own], scale, temperature)]
    found = gradients(given[0], target, Head(*given[1:4], 5.0, given[4]), vocab_group=group, block=3)
    given = [with_gradient(x) for x in (hidden, weight, bias, scale, temperature)]
    of_hidden, of_weight, of_bias, *others = gradients(given[0], target, Head(*given[1:4], 5.0, given[4]))
    for a, b in zip(found, (of_hidden, of_weight[own], of_bias[own], *others), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
