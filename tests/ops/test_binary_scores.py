"""Sums of binary scores that check their input, compared with loops in float64 of the math module."""

import math

import numpy as np
import pytest
import torch
from helpers.kernels import F64, NUMBA, assert_same_on_any_number_of_threads, of_backends
from helpers.products import each_value

from torchcalib.ops.binary_scores import score_sums
from torchcalib.ops.dispatch import implementation

KINDS = ("log", "square")


def log_probs(x, from_logits):
    """Return log p and log(1 - p), without cancellation."""
    if from_logits:
        rest = math.log1p(math.exp(-abs(x)))
        return min(x, 0) - rest, min(-x, 0) - rest
    return (math.log(x) if x else -math.inf), (math.log1p(-x) if x < 1 else -math.inf)


def score(x, t, kind, from_logits):
    """Return -t log p - (1 - t) log(1 - p), with 0 log 0 = 0, or (p - t)^2."""
    one, zero = log_probs(x, from_logits)
    if kind == "log":
        return (-t * one if t else 0) + (-(1 - t) * zero if t < 1 else 0)
    p, rest = (math.exp(one), math.exp(zero)) if from_logits else (x, 1 - x)
    return ((1 - t) * p - t * rest) ** 2


def sample(n, from_logits, dtype, shares, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.randn(n, generator=generator, dtype=F64)
    t = torch.rand(n, generator=generator, dtype=F64)
    x = (x if from_logits else x.sigmoid()).to(dtype)
    return x, t.to(torch.promote_types(dtype, torch.float32)) if shares else (t < 0.5).long()


def error_of(x, target, kind, from_logits):
    """Return the largest relative error of a score: log losses of labels are float32 for narrow logits."""
    is_narrow = x.dtype != F64 and not target.is_floating_point()
    return 5e-7 if is_narrow and kind == "log" and from_logits else 1e-14


@of_backends
@each_value(dtype=[torch.float32, F64, torch.bfloat16], kind=KINDS, from_logits=[True, False], shares=[True, False])
def test_sums_equal_float64_loops(dtype, kind, from_logits, shares, backend):
    """Sums of n terms of one sign have a relative error of about sqrt(n) eps, plus that of a score."""
    for n in (1, 63, 3000):
        x, t = sample(n, from_logits, dtype, shares, seed=n)
        exact = math.fsum(score(a, b, kind, from_logits) for a, b in zip(x.tolist(), t.tolist(), strict=True))
        for target in (t, t.to(x.dtype)) if not shares and dtype != torch.bfloat16 else (t,):
            found = score_sums(x, target, kind, from_logits=from_logits, backend=backend)
            assert found.item() == pytest.approx(exact, rel=1e-14 + error_of(x, target, kind, from_logits))
            assert found.dtype == F64


@of_backends
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_extreme_values(backend, dtype):
    tiny = 1e-30 if dtype == torch.float32 else 1e-300
    for x, t, from_logits, expected in (
        (0.0, 0, False, 0), (1.0, 1, False, 0), (1.0, 0, False, math.inf), (0.0, 1, False, math.inf),
        (-0.0, 0, False, 0), (tiny, 0, False, float(torch.tensor(tiny, dtype=dtype))), (math.inf, 1, True, 0),
        (-math.inf, 0, True, 0), (math.inf, 0, True, math.inf), (-50.0, 0, True, math.exp(-50)),
        (50.0, 0, True, 50), (-800.0, 1, True, 800), (0.0, 1, True, math.log(2)),
    ):  # fmt: skip
        for target in (torch.tensor([t]), torch.tensor([t], dtype=dtype)):
            z = torch.tensor([x], dtype=dtype)
            found = score_sums(z, target, "log", from_logits=from_logits, backend=backend)
            error = error_of(z, target, "log", from_logits)
            assert found.item() == pytest.approx(expected, rel=error, abs=0), (x, t)


@of_backends
@pytest.mark.parametrize("kind", KINDS)
def test_invalid_values_make_the_sum_of_their_series_nan(backend, kind):
    for wrong in (-0.1, 1.1, math.nan, math.inf):
        for position in (0, 2000, 2999):
            x, t = sample(3000, False, torch.float32, shares=True)
            assert score_sums(x, t, kind, from_logits=False, backend=backend).isnan().logical_not()
            for column in (x, t):
                kept = column[position].clone()
                column[position] = wrong
                assert score_sums(x, t, kind, from_logits=False, backend=backend).isnan()
                column[position] = kept
    x, t = sample(300, True, torch.float32, shares=False)
    for wrong in (-1, 2):
        assert score_sums(x, t.index_fill(0, torch.tensor(7), wrong), kind, from_logits=True, backend=backend).isnan()
    x[3] = math.nan
    assert score_sums(x, t, kind, from_logits=True, backend=backend).isnan()


@of_backends
@pytest.mark.parametrize("kind", KINDS)
def test_any_memory_layout_gives_the_sums_of_every_series(backend, kind):
    x, t = (column.view(300, 10) for column in sample(3000, False, torch.float32, shares=False))
    expected = torch.stack([score_sums(x[:, k].clone(), t[:, k].clone(), kind, from_logits=False) for k in range(10)])
    wide = torch.stack((x, x), 1)[:, 0]
    for a, b in ((x.T, t.T), (x.T.contiguous(), t.T), (wide.T, t.T), (x.T.contiguous(), t.T.contiguous())):
        found = score_sums(a, b, kind, from_logits=False, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    cube = score_sums(x.T.reshape(2, 5, 300), t.T.reshape(2, 5, 300), kind, from_logits=False, backend=backend)
    torch.testing.assert_close(cube, expected.view(2, 5), rtol=1e-13, atol=0)
    assert score_sums(x[:0].T, t[:0].T, kind, from_logits=False, backend=backend).tolist() == [0] * 10


@of_backends
@each_value(kind=KINDS, from_logits=[True, False], dtype=[None, "float32", "float64", "int64", "uint8", "bool"])
def test_absent_rows_may_be_invalid_and_invalid_weights_are_found(kind, from_logits, dtype, backend):
    source, n, n_groups = implementation("binary_scores", backend), 2500, 3
    x, target = (column.numpy().copy() for column in sample(n, from_logits, F64, shares=False))
    label, groups = target.astype(np.int64), np.arange(n) % 7 % n_groups
    weights = None if dtype is None else (np.arange(n) % 3).astype(dtype)
    label[1::5] = 1
    for ignored in (255, 1) if weights is None else (None, 255, 1):
        y, values = label.copy(), x.copy()
        absent = np.zeros(n, bool) if weights is None else weights == 0
        y[absent] = 7
        if ignored == 255:
            y[1::5] = ignored
        absent |= y == ignored
        values[absent] = math.nan
        scores = [score(p, t, kind, from_logits) for p, t in zip(x[~absent].tolist(), y[~absent].tolist(), strict=True)]
        w = np.ones(n) if weights is None else weights.astype(float)
        for of, n_parts in ((None, 1), (groups, n_groups)):
            part = np.zeros(n, np.int64) if of is None else of
            expected = [np.bincount(part[~absent], s, n_parts) for s in (w[~absent], w[~absent] * scores)]
            found = source.labelled_sums(values, y, kind, from_logits, weights, of, n_parts, ignored)
            np.testing.assert_allclose(np.reshape(found, (2, -1)), expected, rtol=1e-12)
            invalid = () if weights is None else {"f": (-1, math.nan, math.inf), "i": (-1,)}.get(weights.dtype.kind, ())
            for value in invalid:
                column, at = weights.copy(), np.flatnonzero(~absent)[-1]
                column[at] = value
                found = source.labelled_sums(values, y, kind, from_logits, column, of, n_parts, ignored)
                assert np.isnan(found[1]).all()


@pytest.mark.skipif(not NUMBA, reason="numba is not installed")
def test_compiled_sums_do_not_depend_on_the_number_of_threads():
    x, t = sample(2**20 + 5, False, torch.float32, shares=False)
    assert_same_on_any_number_of_threads(lambda: [score_sums(x, t, "log", from_logits=False, backend="numba")])
