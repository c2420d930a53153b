"""Bins of the sorted sample, against slow loops, recorded blocks, scikit-learn and laws."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from helpers.blocks import PAVA_BACKENDS, PAVA_BC_BACKENDS, TIES, VARIANTS, random_sample, table
from hypothesis import given, settings
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
def samples(draw, max_weight=1):
    """A small sample with many ties: scores, outcomes, weights."""
    n = draw(st.integers(1, 24))
    distinct = draw(st.integers(1, 30))
    scores = draw(st.lists(st.integers(0, distinct), min_size=n, max_size=n))
    outcomes = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    weights = draw(st.lists(st.integers(0, max_weight), min_size=n, max_size=n)) if max_weight > 1 else [1] * n
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


def test_default_bounds_are_those_of_the_recorded_blocks(recorded):
    """N = 50,000: N // 20 = 2,500 and N // 5 = 10,000, the bounds of [TCE] Table 5."""
    arrays = recorded("imagenet_dogs_alexnet.npz")
    blocks = pooled(arrays["probs"], arrays["targets"])
    assert table(pava_bc(blocks)) == table(pava_bc(blocks, n_min=2500, n_max=10000))


# Slow loops.


@given(samples(max_weight=3))
def test_pooled_slow_loop(sample):
    _, outcomes, weights = sample
    parts = oracle.groups(*sample)
    blocks = pooled(*tensors(sample))
    assert members(blocks, weights) == [set(part) for part in parts]
    assert table(blocks) == oracle.Sample(outcomes, weights).table(parts)


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("backend", PAVA_BACKENDS)
@given(data=st.data())
def test_pava_slow_loop(backend, ties, data):
    sample = data.draw(samples(max_weight=3 if ties == "pool" else 1))
    _, outcomes, weights = sample
    counted = oracle.Sample(outcomes, weights)
    expected = oracle.pava(counted, oracle.groups(*sample, ties))
    blocks = pava(pooled(*tensors(sample), ties=ties), backend=backend)
    assert table(blocks) == counted.table(expected)
    assert members(blocks, weights) == [set(block) for block in expected]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("backend", PAVA_BC_BACKENDS)
@given(data=st.data())
@settings(max_examples=200)
def test_pava_bc_slow_loop(backend, ties, variant, data):
    sample = data.draw(samples(max_weight=3 if ties == "pool" else 1))
    _, outcomes, weights = sample
    if sum(weights) < 2:
        return
    n_min = data.draw(st.integers(1, sum(weights) - 1))
    n_max = data.draw(st.integers(n_min, sum(weights) + 2))
    counted = oracle.Sample(outcomes, weights)
    expected = oracle.pava_bc(counted, oracle.groups(*sample, ties), n_min, n_max, variant)
    blocks = pava_bc(pooled(*tensors(sample), ties=ties), n_min=n_min, n_max=n_max, variant=variant, backend=backend)
    assert table(blocks) == counted.table(expected)
    assert members(blocks, weights) == [set(block) for block in expected]


@pytest.mark.parametrize("backend", PAVA_BC_BACKENDS)
def test_pava_bc_slow_loop_at_default_bounds(backend):
    for variant, ties, distinct in product(VARIANTS, TIES, (None, 40)):
        scores, outcomes, _ = random_sample(500, distinct=distinct)
        counted = oracle.Sample(outcomes.tolist())
        parts = oracle.groups(scores.tolist(), outcomes.tolist(), ties=ties)
        expected = counted.table(oracle.pava_bc(counted, parts, 500 // 20, 500 // 5, variant))
        blocks = pava_bc(pooled(scores, outcomes, ties=ties), variant=variant, backend=backend)
        assert table(blocks) == expected, (variant, ties, distinct)


@pytest.mark.parametrize("ties", TIES)
@given(data=st.data())
def test_equal_mass_slow_loop(ties, data):
    sample = data.draw(samples(max_weight=3 if ties == "pool" else 1))
    _, outcomes, weights = sample
    n_bins = data.draw(st.integers(1, 30))
    counted = oracle.Sample(outcomes, weights)
    expected = oracle.equal_mass(counted, oracle.groups(*sample, ties), n_bins)
    blocks = equal_mass(pooled(*tensors(sample), ties=ties), n_bins)
    assert (blocks.n.tolist(), blocks.positives.tolist()) == counted.table(expected)
    assert members(blocks, weights) == [set(block) for block in expected if block]


def test_equal_mass_of_split_ties_is_slices_between_the_cuts():
    scores, outcomes, _ = random_sample(253, distinct=20)
    ordered = outcomes[scores.argsort(stable=True)]
    for n_bins in (1, 7, 10, 15, 300):
        cuts = [i * 253 // n_bins for i in range(n_bins + 1)]
        assert equal_mass_cuts(253, n_bins) == cuts
        blocks = equal_mass(pooled(scores, outcomes, ties="split"), n_bins)
        assert blocks.n.tolist() == np.diff(cuts).tolist()
        assert blocks.positives.tolist() == [int(ordered[a:b].sum()) for a, b in pairwise(cuts)]


def test_equal_mass_cut_inside_a_tie_goes_to_its_end_paper_arithmetic():
    """8 samples in 2 bins: the cut at 4 falls inside the tie 0.5 x 4 (samples 2..5), and goes to 6."""
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


@pytest.mark.parametrize("binning", [pava, pava_bc, lambda b: pava_bc(b, variant="paper"), lambda b: equal_mass(b, 9)])
def test_law_sample_order(binning):
    for distinct, weighted, seed in product((None, 15, 100), (False, True), range(3)):
        scores, outcomes, weights = random_sample(400, distinct=distinct, weighted=weighted)
        blocks = binning(pooled(scores, outcomes, weights))
        order = torch.randperm(400, generator=torch.Generator().manual_seed(seed))
        again = binning(pooled(scores[order], outcomes[order], None if weights is None else weights[order]))
        assert torch.equal(again.n, blocks.n)
        assert torch.equal(again.positives, blocks.positives)
        read = slice(None) if weights is None else weights[order] > 0
        assert torch.equal(again.index[read], blocks.index[order][read])


@pytest.mark.parametrize("n", [37, 3000])  # short rows are sorted together, long ones one by one
@pytest.mark.parametrize("ties", TIES)
def test_law_batch_axis_is_a_loop(n, ties):
    scores, outcomes, weights = random_sample(n, lead=(2, 3), distinct=n // 3, weighted=ties == "pool")
    steps = [pava, lambda b: pava(b, backend="rounds"), lambda b: pava(b, backend="python")]
    steps += [pava_bc, lambda b: pava_bc(b, variant="paper"), lambda b: equal_mass(b, 4), lambda b: b]
    for step in steps:
        blocks = step(pooled(scores, outcomes, weights, ties=ties))
        for i in range(2):
            for j in range(3):
                own = None if weights is None else weights[i, j]
                one = step(pooled(scores[i, j], outcomes[i, j], own, ties=ties))
                width = one.n.shape[-1]
                assert torch.equal(blocks.n[i, j, :width], one.n)
                assert torch.equal(blocks.positives[i, j, :width], one.positives)
                assert not blocks.n[i, j, width:].any()
                assert torch.equal(blocks.index[i, j], one.index)


def test_law_integer_weights_are_repeats():
    scores, outcomes, weights = random_sample(300, weighted=True)
    for binning in (pava, pava_bc, lambda b: equal_mass(b, 9)):
        repeated = binning(pooled(scores.repeat_interleave(weights), outcomes.repeat_interleave(weights)))
        for dtype in (torch.int64, torch.float64):
            assert table(binning(pooled(scores, outcomes, weights.to(dtype)))) == table(repeated)


@pytest.mark.parametrize("ties", TIES)
def test_law_weight_zero_is_not_read(ties):
    scores, outcomes, _ = random_sample(300, distinct=50)
    weights = (torch.arange(300) % 3 != 0).double()
    kept = weights > 0
    scores[~kept] = torch.tensor([torch.nan, torch.inf]).repeat(50).double()
    given = torch.where(kept, outcomes.double(), torch.nan)
    for binning in (pava, pava_bc, lambda b: equal_mass(b, 9)):
        blocks = binning(pooled(scores, given, weights, ties=ties))
        alone = binning(pooled(scores[kept], outcomes[kept], ties=ties))
        assert table(blocks) == table(alone)
        assert torch.equal(blocks.index[kept], alone.index)


def test_law_narrow_scores_are_read_as_they_are():
    wide, outcomes, _ = random_sample(1000)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scores = wide.to(dtype)
        for binning in (pava, pava_bc, lambda b: equal_mass(b, 9)):
            assert table(binning(pooled(scores, outcomes))) == table(binning(pooled(scores.double(), outcomes)))


@pytest.mark.parametrize("variant", VARIANTS)
@given(st.integers(0, 10**6), st.integers(2, 80), st.data())
def test_law_size_bounds_without_ties(variant, seed, n, data):
    """Bounds hold but where the docstring says; every exception is named here."""
    n_min = data.draw(st.integers(1, n - 1))
    n_max = data.draw(st.integers(n_min, n))
    generator = torch.Generator().manual_seed(seed)
    blocks = pooled(torch.randperm(n, generator=generator) / n, torch.rand(n, generator=generator) < 0.3)
    sizes = pava_bc(blocks, n_min=n_min, n_max=n_max, variant=variant).n.tolist()
    assert sum(sizes) == n
    assert sizes[-1] >= n_min
    assert all(size >= n_min for size in sizes[:-2])
    if len(sizes) > 1 and sizes[-2] < n_min:
        assert 2 * n_min > n_max
    if variant == "code":
        assert all(size <= n_max for size in sizes[:-1])
        assert sizes[-1] <= n_max + n_min


# Edge cases.


@pytest.mark.parametrize("backend", PAVA_BACKENDS)
def test_one_sample(backend):
    for label in (0, 1):
        blocks = pooled(torch.tensor([0.3]), torch.tensor([label]))
        for one in (blocks, pava(blocks, backend=backend), equal_mass(blocks, 1)):
            assert (one.index.tolist(), one.n.tolist(), one.positives.tolist()) == ([0], [1], [label])
        assert equal_mass(blocks, 4).n.sum() == 1


@pytest.mark.parametrize("backend", PAVA_BC_BACKENDS)
def test_two_samples_default_bounds(backend):
    """N = 2: bounds 1 and 1, nothing may merge but equal means under "paper"."""
    rising, level = (pooled(torch.tensor([0.3, 0.4]), torch.tensor(y)) for y in ([0, 1], [1, 1]))
    assert table(pava_bc(rising, backend=backend)) == ([1, 1], [0, 1])
    assert table(pava_bc(level, backend=backend)) == ([1, 1], [1, 1])
    assert table(pava_bc(level, backend=backend, variant="paper")) == ([2], [2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_scores_equal_is_one_block(variant):
    blocks = pooled(torch.full((60,), 0.25), torch.arange(60) % 4 == 0)
    for one in (blocks, pava(blocks), pava_bc(blocks, variant=variant)):
        assert table(one) == ([60], [15])
        assert not one.index.any()
    assert equal_mass(blocks, 5).n.tolist() == [60, 0, 0, 0, 0]


def test_all_labels_equal():
    """PAVA: one block. PAVA-BC "code": blocks of n_max, and the last n_min joined to the rest; "paper": one block."""
    blocks = pooled(torch.linspace(0, 1, 100), torch.zeros(100))
    assert table(pava(blocks)) == ([100], [0])
    # 95 samples in blocks of 20: 20 20 20 20 15; the final 5 join the 15, for 5 + 5 <= 20.
    assert table(pava_bc(blocks)) == ([20, 20, 20, 20, 20], [0] * 5)
    assert table(pava_bc(blocks, variant="paper")) == ([100], [0])


def test_tail_rules_differ_closed_form():
    """19 falling samples fill a block of n_max; then the tail: 5 + 5 <= 20 joins it by "code", 20 + 5 > 20 does not."""
    labels = torch.tensor([1] * 10 + [0] * 10 + [1] * 5)
    blocks = pooled(torch.linspace(0, 1, 25), labels)
    assert table(pava_bc(blocks, n_min=5, n_max=20)) == ([25], [15])
    assert table(pava_bc(blocks, n_min=5, n_max=20, variant="paper")) == ([20, 5], [10, 5])


def test_no_data_gives_no_blocks():
    for lead in ((), (3,)):
        blocks = pooled(torch.empty(*lead, 0), torch.empty(*lead, 0))
        for one in (blocks, pava(blocks), pava(blocks, backend="rounds"), pava_bc(blocks)):
            assert one.n.shape == one.index.shape == (*lead, 0)
        assert equal_mass(blocks, 3).n.tolist() == torch.zeros(*lead, 3).tolist()


def test_a_row_without_data_beside_one_with():
    weights = torch.stack([torch.zeros(50), torch.ones(50)])
    scores, outcomes, _ = random_sample(50)
    blocks = pooled(scores.expand(2, 50), outcomes.expand(2, 50), weights)
    for backend in ("auto", "rounds", "python"):
        n = pava(blocks, backend=backend).n
        assert n.sum(-1).tolist() == [0, 50]
    assert pava_bc(blocks).n.sum(-1).tolist() == [0, 50]


def test_counts_per_cell_are_blocks_too():
    """A table of counts, empty cells among them, gives the blocks of the samples it counts."""
    scores, outcomes, _ = random_sample(600, distinct=64)
    cell = (scores * 64).long()
    n = torch.zeros(70, dtype=torch.int64).scatter_add(0, cell, torch.ones_like(cell))
    positives = torch.zeros(70, dtype=torch.int64).scatter_add(0, cell, outcomes)
    sample = pooled(scores, outcomes)
    cells = Blocks(torch.arange(70), n, positives)
    for backend in ("python", "rounds"):
        assert table(pava(cells, backend=backend)) == table(pava(sample))
    assert table(pava_bc(cells)) == table(pava_bc(sample))
    assert table(equal_mass(cells, 6)) == table(equal_mass(sample, 6))


@pytest.mark.parametrize("backend", PAVA_BC_BACKENDS)
def test_an_empty_cell_falls_to_the_block_before(backend):
    cells = Blocks(torch.arange(6), torch.tensor([0, 30, 0, 8, 5, 0]), torch.tensor([0, 9, 0, 8, 5, 0]))
    blocks = pava_bc(cells, n_min=5, n_max=9, backend=backend)
    assert (blocks.n.tolist(), blocks.index.tolist()) == ([30, 8, 5], [0, 0, 0, 1, 2, 2])
    assert pava(cells, backend="python").index.tolist() == pava(cells, backend="rounds").index.tolist()


def test_large_counts_are_exact():
    """Means that differ by 1e-18 are told apart: (10^9 - 1) / 10^9 against (10^9 - 2) / (10^9 - 1), falling."""
    n, k = torch.tensor([10**9, 10**9 - 1]), torch.tensor([10**9 - 1, 10**9 - 2])
    falling = Blocks(torch.arange(2), n, k)
    rising = Blocks(torch.arange(2), n.flip(0), k.flip(0))
    for backend in ("python", "rounds"):
        assert pava(falling, backend=backend).n.tolist() == [2 * 10**9 - 1]
        assert pava(rising, backend=backend).n.tolist() == [10**9 - 1, 10**9]
