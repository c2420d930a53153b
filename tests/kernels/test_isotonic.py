"""Bins of the sorted sample, against slow loops, recorded blocks, scikit-learn and laws."""

from itertools import product

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
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import ranked as oracle

from torchcalib.kernels.isotonic import Blocks, equal_mass, equal_mass_cuts, pava, pava_bc, pooled


def members(blocks, weights=None):
    """Samples of positive weight of every block of one row, as sets."""
    out = {}
    for i, block in enumerate(blocks.index.tolist()):
        if weights is None or weights[i] > 0:
            out.setdefault(block, set()).add(i)
    return [out[block] for block in sorted(out)]


@st.composite
def samples(draw, max_weight):
    """A small sample with many ties: scores, outcomes, weights."""
    n = draw(st.integers(1, 24))
    distinct = draw(st.integers(1, 30))
    scores = draw(st.lists(st.integers(0, distinct), min_size=n, max_size=n))
    outcomes = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    weights = draw(st.lists(st.integers(0, max_weight), min_size=n, max_size=n))
    return [s / 32 for s in scores], outcomes, weights


def tensors(sample):
    scores, outcomes, weights = sample
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(outcomes), torch.tensor(weights)


# Recorded blocks of the published code, and of a literal Algorithm 3.


def recorded_blocks(expected):
    for entry in expected:
        folder = (entry["file"] or "").partition("_")[0]
        kind = entry["case"].rpartition("/")[2]
        if folder in ("imagenet", "sim") and kind in ("bins", "bins_alg3", "tce_alg3_literal"):
            yield entry, "code" if kind == "bins" else "paper"


def load(recorded, entry):
    arrays = recorded(entry["file"])
    case = entry["case"].split("/")
    return (arrays[f"p_{case[2]}"], arrays[f"y_{case[2]}"]) if len(case) > 1 else (arrays["probs"], arrays["targets"])


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("backend", PAVA_BC_BACKENDS)
def test_pava_bc_recorded_sizes_positives_and_edges(recorded, expected, backend, ties):
    entries = list(recorded_blocks(expected))
    assert len(entries) == 2 * 2 + 6 * 2
    for entry, variant in entries:
        scores, outcomes = load(recorded, entry)
        n_min, n_max = entry["args"]["n_min"], entry["args"]["n_max"]
        blocks = pava_bc(
            pooled(scores, outcomes, ties=ties), n_min=n_min, n_max=n_max, variant=variant, backend=backend
        )
        value = entry["value"]
        assert blocks.n.tolist() == value["sizes"], entry["case"]
        assert blocks.positives.tolist() == value.get("positives", blocks.positives.tolist()), entry["case"]
        if "edges" in value:
            cuts = blocks.n.cumsum(-1)[:-1]
            ordered = scores.sort().values
            middle = (ordered[cuts - 1] + ordered[cuts]) / 2
            torch.testing.assert_close(middle.tolist(), value["edges"][1:-1], rtol=1e-12, atol=0)


# Slow loops.


STEPS = [("pooled", ""), ("equal_mass", ""), *(("pava", backend) for backend in PAVA_BACKENDS)]
STEPS += [(variant, backend) for variant in VARIANTS for backend in PAVA_BC_BACKENDS]


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize(("step", "backend"), STEPS)
@given(data=st.data())
@settings(max_examples=200)
def test_blocks_are_those_of_a_slow_loop(step, backend, ties, data):
    sample = data.draw(samples(3 if ties == "pool" else 1))
    _, outcomes, weights = sample
    counted, expected = oracle.Sample(outcomes, weights), oracle.groups(*sample, ties)
    scores, labels, copies = tensors(sample)
    scores[copies == 0] = torch.nan  # not read
    labels = labels.double().masked_fill(copies == 0, torch.nan)
    blocks = pooled(scores, labels, copies, ties=ties)
    if step == "pava":
        expected, blocks = oracle.pava(counted, expected), pava(blocks, backend=backend)
    elif step == "equal_mass":
        n_bins = data.draw(st.integers(1, 30))
        expected, blocks = oracle.equal_mass(counted, expected, n_bins), equal_mass(blocks, n_bins)
    elif step in VARIANTS:
        n = sum(weights)
        assume(n > 1)
        n_min = data.draw(st.integers(1, n - 1))
        n_max = data.draw(st.integers(n_min, n + 2))
        expected = oracle.pava_bc(counted, expected, n_min, n_max, step)
        blocks = pava_bc(blocks, n_min=n_min, n_max=n_max, variant=step, backend=backend)
    found = (blocks.n.tolist(), blocks.positives.tolist()) if step == "equal_mass" else table(blocks)
    assert found == counted.table(expected)
    assert members(blocks, weights) == [set(block) for block in expected if block]


def test_equal_mass_cut_inside_a_tie_goes_to_its_end_paper_arithmetic():
    """8 samples in 2 bins: the cut at 4 falls inside the tie 0.5 x 4 (samples 2..5), and goes to 6."""
    assert equal_mass_cuts(8, 2) == [0, 4, 8]
    assert equal_mass_cuts(7, 3) == [0, 2, 4, 7]
    scores = torch.tensor([0.1, 0.2, 0.5, 0.5, 0.5, 0.5, 0.8, 0.9])
    assert equal_mass(pooled(scores, torch.zeros(8)), 2).n.tolist() == [6, 2]
    assert equal_mass(pooled(scores, torch.zeros(8), ties="split"), 2).n.tolist() == [4, 4]


# Parity with scikit-learn.


@pytest.mark.parametrize("backend", PAVA_BACKENDS)
def test_pava_parity_with_scikit_learn(backend):
    isotonic = pytest.importorskip("sklearn.isotonic")
    for distinct, weighted in ((None, False), (40, False), (40, True)):
        scores, outcomes, weights = random_sample(2000, distinct=distinct, weighted=weighted)
        blocks = pava(pooled(scores, outcomes, weights), backend=backend)
        keep = torch.ones(2000, dtype=torch.bool) if weights is None else weights > 0
        fitted = blocks.frequency.gather(-1, blocks.index)[keep]
        rows = (scores[keep].numpy(), outcomes[keep].double().numpy())
        own = None if weights is None else weights[keep].numpy()
        expected = isotonic.IsotonicRegression().fit(*rows, sample_weight=own).predict(rows[0])
        np.testing.assert_allclose(fitted.numpy(), expected, rtol=1e-12, atol=1e-13)


# Laws.


@pytest.mark.parametrize("n", [37, 3000])  # short rows are sorted together, long ones one by one
@pytest.mark.parametrize("ties", TIES)
def test_law_batch_axis_is_a_loop(n, ties):
    scores, outcomes, weights = random_sample(n, lead=(2, 3), distinct=n // 3, weighted=ties == "pool")
    steps = [pava, lambda b: pava(b, backend="rounds"), lambda b: pava(b, backend="python")]
    steps += [pava_bc, lambda b: pava_bc(b, variant="paper"), lambda b: equal_mass(b, 4), lambda b: b]
    for step in steps:
        blocks = step(pooled(scores, outcomes, weights, ties=ties))
        for i, j in product(range(2), range(3)):
            own = None if weights is None else weights[i, j]
            one = step(pooled(scores[i, j], outcomes[i, j], own, ties=ties))
            width = one.n.shape[-1]
            assert torch.equal(blocks.n[i, j, :width], one.n)
            assert torch.equal(blocks.positives[i, j, :width], one.positives)
            assert not blocks.n[i, j, width:].any()
            assert torch.equal(blocks.index[i, j], one.index)


@pytest.mark.parametrize("backend", PAVA_BC_BACKENDS)
@pytest.mark.parametrize("n", [2, 500])
def test_pava_bc_slow_loop_at_default_bounds(backend, n):
    """N // 20 and N // 5 as in [TCE] Table 5, and at least 1."""
    for variant, ties, distinct in product(VARIANTS, TIES, (None, 40)):
        scores, outcomes, _ = random_sample(n, distinct=distinct)
        counted = oracle.Sample(outcomes.tolist())
        parts = oracle.groups(scores.tolist(), outcomes.tolist(), ties=ties)
        expected = counted.table(oracle.pava_bc(counted, parts, max(1, n // 20), max(1, n // 5), variant))
        blocks = pava_bc(pooled(scores, outcomes, ties=ties), variant=variant, backend=backend)
        assert table(blocks) == expected, (variant, ties, distinct)


@pytest.mark.parametrize("backend", PAVA_BACKENDS)
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


@pytest.mark.parametrize("backend", PAVA_BACKENDS)
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


@pytest.mark.parametrize("backend", PAVA_BACKENDS)
def test_large_counts_are_exact(backend):
    assert_large_counts_are_exact("cpu", backend)
