"""Blocks of the sorted sample, compared with slow loops and recorded blocks."""

import pytest
import torch
from helpers.blocks import (
    PAVA_BACKENDS,
    PAVA_BC_BACKENDS,
    TIES,
    VARIANTS,
    assert_large_counts_are_exact,
    find,
    find_in_sample,
    random_sample,
    table,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import ranked as oracle

from torchcalib.ops.isotonic import MANY, block_ends

of_pava = pytest.mark.parametrize("backend", PAVA_BACKENDS)
STEPS = [("pava", backend) for backend in PAVA_BACKENDS]
STEPS += [(variant, backend) for variant in VARIANTS for backend in PAVA_BC_BACKENDS]
of_steps = pytest.mark.parametrize(("step", "backend"), STEPS)
of_ties = pytest.mark.parametrize("ties", TIES)


def options_of(step, **bounds):
    """Return the algorithm and the arguments of `block_ends` for a test case."""
    return ("pava", {}) if step == "pava" else ("pava_bc", {"variant": step, **bounds})


def assert_slow_loop(step, backend, ties, sample, bounds, own_bounds):
    """Compare blocks and their samples with a slow loop, for scores, outcomes and weights `(R, N)`."""
    op, options = options_of(step, **bounds)
    of_rows = [x.tolist() for x in (*sample, *find_in_sample(op, *sample, ties=ties, backend=backend, **options))]
    for scores, outcomes, weights, index, *found in zip(*of_rows, strict=True):
        counted, parts = oracle.Sample(outcomes, weights), oracle.groups(scores, outcomes, weights, ties)
        parts = (
            oracle.pava(counted, parts)
            if op == "pava"
            else oracle.pava_bc(counted, parts, *own_bounds(sum(weights)), step)
        )
        assert not any(found[0][len(parts) :])  # rows with fewer blocks are padded by empty blocks
        assert tuple(column[: len(parts)] for column in found) == counted.table(parts)
        members = [{i for i, at in enumerate(index) if at == b and weights[i]} for b in range(len(parts))]
        assert members == [set(part) for part in parts]


@of_ties
@of_steps
@given(data=st.data())
@settings(max_examples=40)
def test_blocks_equal_slow_loop(step, backend, ties, data):
    """Small samples with many ties."""
    n, distinct = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 30))
    most = (distinct, 1, 3 if ties == "pool" else 1)
    columns = [data.draw(st.lists(st.integers(0, top), min_size=n, max_size=n)) for top in most]
    sample = torch.tensor(columns)[:, None]
    total = int(sample[2].sum())
    bounds, own_bounds = {}, None
    if step in VARIANTS:
        assume(total > 1)
        n_min = data.draw(st.integers(1, total - 1))
        n_max = data.draw(st.integers(n_min, total + 2))
        bounds, own_bounds = {"n_min": n_min, "n_max": n_max}, lambda _: (n_min, n_max)
    assert_slow_loop(step, backend, ties, sample, bounds, own_bounds)


@pytest.mark.parametrize("n", [2, 500])
@of_ties
@of_steps
def test_batches_with_default_bounds_equal_slow_loop(step, backend, ties, n):
    """The default bounds are N // 20 and N // 5 for each row, as in [TCE] Table 5, and at least 1."""
    for distinct in (None, 40):
        scores, outcomes, weights = random_sample(n, lead=(4,), distinct=distinct, weighted=True)
        sample = scores, outcomes, weights.clamp(1, None if ties == "pool" else 1)
        assert_slow_loop(step, backend, ties, sample, {}, lambda size: (max(1, size // 20), max(1, size // 5)))


@of_ties
@pytest.mark.parametrize("backend", PAVA_BC_BACKENDS)
def test_pava_bc_blocks_equal_recordings(recorded, expected, backend, ties):
    """Blocks of the published code, and of a literal implementation of Algorithm 3."""
    variants = {"bins": "code", "bins_alg3": "paper", "tce_alg3_literal": "paper"}
    entries = [entry for entry in expected if (entry["file"] or "").startswith(("imagenet_", "sim_"))]
    entries = [entry for entry in entries if entry["case"].rpartition("/")[2] in variants]
    assert len(entries) == 2 * 2 + 6 * 2
    for entry in entries:
        arrays, case, value = recorded(entry["file"]), entry["case"].split("/"), entry["value"]
        names = (f"p_{case[2]}", f"y_{case[2]}") if len(case) > 1 else ("probs", "targets")
        scores, outcomes = (arrays[name] for name in names)
        bounds = {name: entry["args"][name] for name in ("n_min", "n_max")}
        variant = variants[case[-1]]
        _, n, positives = find_in_sample(
            "pava_bc", scores, outcomes, ties=ties, **bounds, variant=variant, backend=backend
        )
        assert n.tolist() == value["sizes"], entry["case"]
        assert positives.tolist() == value.get("positives", positives.tolist()), entry["case"]
        if "edges" in value:
            cuts = n.cumsum(-1)[:-1]
            ordered = scores.sort().values
            middle = (ordered[cuts - 1] + ordered[cuts]) / 2
            torch.testing.assert_close(middle.tolist(), value["edges"][1:-1], rtol=1e-12, atol=0)


@of_steps
def test_rows_without_data_have_no_blocks(step, backend):
    op, options = options_of(step)
    scores, outcomes, _ = random_sample(50)
    weights = torch.arange(2)[:, None].expand(2, 50)
    _, n, _ = find_in_sample(op, scores.expand(2, 50), outcomes.expand(2, 50), weights, backend=backend, **options)
    assert n.sum(-1).tolist() == [0, 50]
    for shape in ((0,), (3, 0), (0, 3)):
        nothing = torch.zeros(shape, dtype=torch.int64)
        ends, n, _ = find(op, nothing, nothing, backend=backend, **options)
        assert ends.shape[:-1] == shape[:-1]
        assert not n.any()


@of_steps
def test_blocks_of_cell_counts_equal_those_of_the_samples(step, backend):
    """A table of counts with empty cells gives the blocks of the counted samples."""
    op, options = options_of(step)
    scores, outcomes, _ = random_sample(600, distinct=64)
    cell = (scores * 64).long()
    n = torch.zeros(70, dtype=torch.int64).scatter_add(0, cell, torch.ones_like(cell))
    positives = torch.zeros(70, dtype=torch.int64).scatter_add(0, cell, outcomes)
    of_sample = find_in_sample(op, scores, outcomes, backend=backend, **options)[1:]
    of_cells = find(op, n, positives, backend=backend, **options)[1:]
    assert table(*of_cells) == table(*of_sample)


@of_steps
def test_empty_cells_belong_to_the_block_before_them(step, backend):
    n, positives = torch.tensor([0, 30, 0, 8, 5, 0]), torch.tensor([0, 9, 0, 8, 5, 0])
    op, options = options_of(step, n_min=5, n_max=9)
    ends, n, _ = find(op, n, positives, backend=backend, **options)
    expected = ([3, 6], [30, 13]) if op == "pava" else ([3, 4, 6], [30, 8, 5])
    if step == "paper":  # both blocks have the mean 1
        expected = [3, 6], [30, 13]
    assert (ends.tolist(), n.tolist()) == expected


def test_a_single_sample_forms_a_block_at_the_default_bounds():
    n = torch.ones(40, dtype=torch.int64)
    assert find("pava_bc", n[:1], n[:1])[1].tolist() == [1]


@of_pava
def test_large_counts_are_exact(backend):
    assert_large_counts_are_exact("cpu", backend)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bounds", [{}, {"n_min": 1, "n_max": 1}, {"n_min": 2, "n_max": 3}, {"n_min": 5, "n_max": 25}])
def test_many_rows_at_once_have_the_blocks_of_single_rows(variant, bounds):
    """With ties, elements of weight 0, rows of different sizes, and a row without samples."""
    g = torch.Generator().manual_seed(0)
    n = torch.randint(0, 4, (MANY, 40), generator=g) + torch.tensor([1, *[0] * 39])
    n[-1] = 0 if not bounds else n[-1]
    rises = torch.rand(n.shape, generator=g) < torch.linspace(0, 1, 40)
    begins = torch.rand(n.shape, generator=g) < 0.7
    begins[:, 0] = True
    columns = begins, torch.where(rises, n, n // 2), n
    how = {"variant": variant, "backend": "python", **bounds}
    for row, found in enumerate(block_ends("pava_bc", *columns, **how)):
        alone = block_ends("pava_bc", *(x[row : row + 1] for x in columns), **how)[0]
        assert found[: len(alone)].tolist() == alone.tolist()
        assert bool((found[len(alone) :] == 40).all())


@pytest.mark.parametrize("step", ["pava", "pava_bc"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_labels_of_any_dtype_without_ties_have_the_blocks_of_counts(step, dtype):
    g = torch.Generator().manual_seed(0)
    positives = torch.bernoulli(torch.linspace(0.1, 0.9, 40).expand(2 * MANY, 40), generator=g)
    begins, n = torch.ones(positives.shape, dtype=torch.bool), torch.ones(positives.shape, dtype=dtype)
    found = block_ends(step, begins, positives.to(dtype), n)
    assert torch.equal(found, block_ends(step, begins, positives.long(), n.long(), backend="python"))
    if step == "pava":
        assert torch.equal(found, block_ends(step, begins, positives.to(dtype), n, backend="rounds"))
