"""The k largest entries of rows and the rank of the label equal a sort in Python."""

import math

import pytest
import torch
from helpers.kernels import of_either_input

from torchcalib.ops import largest as module
from torchcalib.ops.largest import largest

of_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def rows(n_rows, n_classes, seed=0):
    """Return rows of integers with many ties, and labels."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (n_rows, n_classes), generator=g), torch.randint(n_classes, (n_rows,), generator=g)


def slow_loop(row, label, k, from_logits):
    """Sort the classes of one row by descending value, then by index."""
    if from_logits and math.inf in row:
        row = [0.0 if x == math.inf else -math.inf for x in row]
    order = sorted(range(len(row)), key=lambda j: (-row[j], j))
    return [row[j] for j in order[:k]], order.index(label) if 0 <= label < len(row) else len(row)


def check(values, target, k, from_logits):
    found, rank = largest(values, target, k, from_logits=from_logits)
    assert (found.shape, found.dtype) == ((*values.shape[:-1], k), torch.promote_types(values.dtype, torch.float32))
    flat = values.double().reshape(-1, values.shape[-1]).tolist()
    expected = [slow_loop(row, h, k, from_logits) for row, h in zip(flat, target.flatten().tolist(), strict=True)]
    assert found.double().reshape(-1, k).tolist() == [entries for entries, _ in expected]
    assert rank.flatten().tolist() == [place for _, place in expected]


@of_dtypes
@pytest.mark.parametrize(("n_classes", "k"), [(1, 1), (2, 2), (5, 3), (64, 7), (65, 1), (300, 300)])
@of_either_input
def test_entries_and_ranks_equal_a_slow_loop(dtype, n_classes, k, from_logits):
    x, target = rows(40, n_classes)
    check(x.to(dtype), target, k, from_logits)
    target[:3] = torch.tensor([-1, n_classes, -100])
    check(x.to(dtype), target, k, from_logits)


@of_dtypes
def test_infinite_logits_are_replaced_by_their_limit_and_nan_rows_give_nan(dtype):
    x, target = rows(60, 9)
    x = x.to(dtype)
    x[x > 8], x[x < -8] = math.inf, -math.inf
    check(x, target, 4, True)
    x[7, 3] = math.nan
    found, _ = largest(x, target, 4, from_logits=True)
    assert found.isnan().all(-1).nonzero().flatten().tolist() == [7]


def test_batches_strides_and_empty_input_are_supported():
    x, target = rows(24, 12)
    x = x.float()
    check(x.view(2, 3, 4, 12), target.view(2, 3, 4), 5, True)
    check(x.T.contiguous().T, target, 5, True)
    check(x[::2, ::2], target[::2] % 6, 5, True)
    check(x[None].expand(3, -1, -1), target.expand(3, -1), 5, True)
    found, rank = largest(x[:0], target[:0], 5, from_logits=True)
    assert (found.shape, rank.shape) == ((0, 5), (0,))


def test_chunks_give_the_results_of_one_chunk(monkeypatch):
    x, target = rows(50, 8)
    expected = largest(x.float(), target, 3, from_logits=True)
    monkeypatch.setattr(module, "_CHUNK", 30)
    for a, b in zip(largest(x.float(), target, 3, from_logits=True), expected, strict=True):
        assert a.equal(b)


def test_gradient_equals_that_of_a_sort_and_is_zero_for_invalid_rows():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(6, 7, generator=g, dtype=torch.float64, requires_grad=True)
    target = torch.randint(7, (6,), generator=g)
    assert torch.autograd.gradcheck(lambda x: largest(x, target, 3, from_logits=True)[0], x)
    bad = x.detach().clone()
    bad[0, 0], bad[1, 1] = math.nan, math.inf
    bad.requires_grad_()
    found, _ = largest(bad, target, 3, from_logits=True)
    (slope,) = torch.autograd.grad(found[2:].sum() + found[1, 0], bad)
    assert slope[:2].eq(0).all()
    assert slope[2:].sum(-1).eq(3).all()
