"""Blocks of the sorted sample and isotonic regression, against slow loops, recorded blocks and scikit-learn."""

import numpy as np
import pytest
import torch
from helpers.blocks import (
    PAVA_BACKENDS,
    PAVA_BC_BACKENDS,
    TIES,
    VARIANTS,
    assert_large_counts_are_exact,
    random_sample,
    table,
)
from helpers.kernels import F64
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import ranked as oracle

from torchcalib.ops.isotonic import Blocks, equal_mass, equal_mass_cuts, isotonic_regression, pava, pava_bc, pooled

of_pava = pytest.mark.parametrize("backend", PAVA_BACKENDS)
STEPS = [("pooled", ""), ("equal_mass", ""), *(("pava", backend) for backend in PAVA_BACKENDS)]
STEPS += [(variant, backend) for variant in VARIANTS for backend in PAVA_BC_BACKENDS]
of_steps = pytest.mark.parametrize(("step", "backend"), STEPS)
of_ties = pytest.mark.parametrize("ties", TIES)


def assert_slow_loop(step, backend, ties, sample, bounds, own_bounds):
    """Demand the blocks of a slow loop, each with its samples, of scores, outcomes and weights of rows `(R, N)`."""
    *columns, weights = sample
    columns = [x.double().masked_fill(weights == 0, torch.nan) for x in columns]  # not read
    blocks = pooled(*columns, weights, ties=ties)
    if step == "pava":
        blocks = pava(blocks, backend=backend)
    elif step == "equal_mass":
        blocks = equal_mass(blocks, **bounds)
    elif step in VARIANTS:
        blocks = pava_bc(blocks, **bounds, variant=step, backend=backend)
    of_rows = [x.tolist() for x in (*sample, blocks.index, blocks.n, blocks.positives)]
    for scores, outcomes, weights, index, *found in zip(*of_rows, strict=True):
        counted, parts = oracle.Sample(outcomes, weights), oracle.groups(scores, outcomes, weights, ties)
        if step == "pava":
            parts = oracle.pava(counted, parts)
        elif step == "equal_mass":
            parts = oracle.equal_mass(counted, parts, **bounds)
        elif step in VARIANTS:
            parts = oracle.pava_bc(counted, parts, *own_bounds(sum(weights)), step)
        if step != "equal_mass":  # rows of fewer blocks than others end in blocks of no samples
            assert not any(found[0][len(parts) :])
            found = [column[: len(parts)] for column in found]
        assert tuple(found) == counted.table(parts)
        members = [{i for i, at in enumerate(index) if at == b and weights[i]} for b in range(len(parts))]
        assert members == [set(part) for part in parts]


@of_ties
@of_steps
@given(data=st.data())
@settings(max_examples=200)
def test_blocks_are_those_of_a_slow_loop(step, backend, ties, data):
    """Of a small sample with many ties."""
    n, distinct = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 30))
    most = (distinct, 1, 3 if ties == "pool" else 1)
    columns = [data.draw(st.lists(st.integers(0, top), min_size=n, max_size=n)) for top in most]
    sample = torch.tensor(columns)[:, None]
    total = int(sample[2].sum())
    bounds, own_bounds = {}, None
    if step == "equal_mass":
        bounds = {"n_bins": data.draw(st.integers(1, 30))}
    elif step in VARIANTS:
        assume(total > 1)
        n_min = data.draw(st.integers(1, total - 1))
        n_max = data.draw(st.integers(n_min, total + 2))
        bounds, own_bounds = {"n_min": n_min, "n_max": n_max}, lambda _: (n_min, n_max)
    assert_slow_loop(step, backend, ties, sample, bounds, own_bounds)


@pytest.mark.parametrize("n", [2, 500])
@of_ties
@of_steps
def test_batches_at_default_bounds_are_those_of_a_slow_loop(step, backend, ties, n):
    """N // 20 and N // 5 of every row as in [TCE] Table 5, and at least 1."""
    for distinct in (None, 40):
        scores, outcomes, weights = random_sample(n, lead=(4,), distinct=distinct, weighted=True)
        weights = weights.clamp(1, None if ties == "pool" else 1)
        bounds = {"n_bins": 4} if step == "equal_mass" else {}
        sample = scores, outcomes, weights
        assert_slow_loop(step, backend, ties, sample, bounds, lambda size: (max(1, size // 20), max(1, size // 5)))


@of_ties
@pytest.mark.parametrize("backend", PAVA_BC_BACKENDS)
def test_pava_bc_recorded_sizes_positives_and_edges(recorded, expected, backend, ties):
    """Blocks of the published code, and of a literal Algorithm 3."""
    variants = {"bins": "code", "bins_alg3": "paper", "tce_alg3_literal": "paper"}
    entries = [entry for entry in expected if (entry["file"] or "").startswith(("imagenet_", "sim_"))]
    entries = [entry for entry in entries if entry["case"].rpartition("/")[2] in variants]
    assert len(entries) == 2 * 2 + 6 * 2
    for entry in entries:
        arrays, case, value = recorded(entry["file"]), entry["case"].split("/"), entry["value"]
        names = (f"p_{case[2]}", f"y_{case[2]}") if len(case) > 1 else ("probs", "targets")
        scores, outcomes = (arrays[name] for name in names)
        bounds = {name: entry["args"][name] for name in ("n_min", "n_max")}
        blocks = pava_bc(pooled(scores, outcomes, ties=ties), **bounds, variant=variants[case[-1]], backend=backend)
        assert blocks.n.tolist() == value["sizes"], entry["case"]
        assert blocks.positives.tolist() == value.get("positives", blocks.positives.tolist()), entry["case"]
        if "edges" in value:
            cuts = blocks.n.cumsum(-1)[:-1]
            ordered = scores.sort().values
            middle = (ordered[cuts - 1] + ordered[cuts]) / 2
            torch.testing.assert_close(middle.tolist(), value["edges"][1:-1], rtol=1e-12, atol=0)


def test_equal_mass_cut_inside_a_tie_goes_to_its_end_paper_arithmetic():
    """8 samples in 2 bins: the cut at 4 falls inside the tie 0.5 x 4 (samples 2..5), and goes to 6."""
    assert equal_mass_cuts(8, 2) == [0, 4, 8]
    assert equal_mass_cuts(7, 3) == [0, 2, 4, 7]
    scores = torch.tensor([0.1, 0.2, 0.5, 0.5, 0.5, 0.5, 0.8, 0.9])
    assert equal_mass(pooled(scores, torch.zeros(8)), 2).n.tolist() == [6, 2]
    assert equal_mass(pooled(scores, torch.zeros(8), ties="split"), 2).n.tolist() == [4, 4]


@of_pava
def test_rows_without_data_have_no_blocks(backend):
    steps = [lambda b: b, lambda b: pava(b, backend=backend), lambda b: equal_mass(b, 3)]
    steps += [lambda b: pava_bc(b, backend=backend)] if backend in PAVA_BC_BACKENDS else []
    scores, outcomes, _ = random_sample(50)
    beside = pooled(scores.expand(2, 50), outcomes.expand(2, 50), torch.arange(2)[:, None].expand(2, 50))
    for step in steps:
        assert step(beside).n.sum(-1).tolist() == [0, 50]
        for lead in ((), (3,)):
            found = step(pooled(torch.empty(*lead, 0), torch.empty(*lead, 0)))
            assert found.index.shape == (*lead, 0)
            assert not found.n.any()


@of_pava
def test_counts_per_cell_are_blocks_too(backend):
    """A table of counts, empty cells among them, gives the blocks of the samples it counts."""
    scores, outcomes, _ = random_sample(600, distinct=64)
    cell = (scores * 64).long()
    n = torch.zeros(70, dtype=torch.int64).scatter_add(0, cell, torch.ones_like(cell))
    positives = torch.zeros(70, dtype=torch.int64).scatter_add(0, cell, outcomes)
    sample, cells = pooled(scores, outcomes), Blocks(torch.arange(70), n, positives)
    empty = Blocks(torch.arange(6), torch.tensor([0, 30, 0, 8, 5, 0]), torch.tensor([0, 9, 0, 8, 5, 0]))
    assert table(pava(cells, backend=backend)) == table(pava(sample, backend=backend))
    assert table(equal_mass(cells, 6)) == table(equal_mass(sample, 6))
    # An empty cell falls to the block before.
    assert pava(empty, backend=backend).index.tolist() == pava(empty, backend="python").index.tolist()
    if backend in PAVA_BC_BACKENDS:
        assert table(pava_bc(cells, backend=backend)) == table(pava_bc(sample, backend=backend))
        blocks = pava_bc(empty, n_min=5, n_max=9, backend=backend)
        assert (blocks.n.tolist(), blocks.index.tolist()) == ([30, 8, 5], [0, 0, 0, 1, 2, 2])


@of_pava
def test_large_counts_are_exact(backend):
    assert_large_counts_are_exact("cpu", backend)


# Real targets.


@of_pava
def test_isotonic_regression_parity_with_scikit_learn(backend):
    isotonic = pytest.importorskip("sklearn.isotonic")
    generator = np.random.default_rng(0)
    y = generator.standard_normal(3000) + np.linspace(0, 2, 3000)
    w = generator.random(3000) + 0.1
    fitted = isotonic_regression(torch.from_numpy(y), torch.from_numpy(w), backend=backend)
    expected = isotonic.isotonic_regression(y, sample_weight=w)
    torch.testing.assert_close(fitted.numpy(), expected, rtol=1e-12, atol=1e-13)


@of_pava
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(0.1, 5)), min_size=1, max_size=25))
def test_isotonic_regression_slow_loop(backend, rows):
    fitted = isotonic_regression(*torch.tensor(rows, dtype=F64).T, backend=backend)
    np.testing.assert_allclose(fitted.numpy(), oracle.weighted_isotonic(*zip(*rows, strict=True)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lead", [(), (2, 3)])
@of_pava
def test_isotonic_regression_gradcheck(lead, backend):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(*lead, 9, generator=generator, dtype=F64, requires_grad=True)
    w = (torch.rand(*lead, 9, generator=generator, dtype=F64) + 0.5).requires_grad_()

    def fit(y, w):
        return isotonic_regression(y, w, backend=backend)

    assert torch.autograd.gradcheck(fit, (y, w))
    assert torch.autograd.gradgradcheck(fit, (y, w))


@of_pava
def test_isotonic_regression_of_any_shape_dtype_and_weight_zero(backend):
    def fit(*columns):
        return isotonic_regression(*columns, backend=backend)

    y = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) + torch.linspace(0, 2, 50)
    expected = torch.stack([fit(row) for row in y.view(6, 50)])
    # Sums of up to 50 terms may be taken in another order.
    torch.testing.assert_close(fit(y).view(6, 50), expected, rtol=1e-6, atol=1e-6)
    for lead in ((), (3,)):
        assert fit(torch.empty(*lead, 0)).shape == (*lead, 0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, F64):
        assert torch.equal(fit(torch.tensor([1, 3, 2, 4], dtype=dtype)), torch.tensor([1, 2.5, 2.5, 4], dtype=dtype))
    y, w = torch.tensor([[9.0, 1.0, 5.0, torch.nan, 3.0], [0.0, 1.0, 1.0, 0.0, 0.0]], dtype=F64)
    assert fit(y, w).tolist() == [1, 1, 5, 5, 5]  # the block before
    assert fit(y, 0 * w).isnan().all()
