"""What runs an op and what stops it: errors at the entry, the choice of an implementation, the sort."""

import importlib.util
import sys
from functools import partial

import pytest
import torch
from helpers.blocks import random_sample, table
from helpers.kernels import NUMBA
from helpers.refusals import assert_refused

from torchcalib.ops import dispatch
from torchcalib.ops.isotonic import equal_mass, pava, pava_bc, pooled
from torchcalib.ops.sorting import order_bits, stable_sort

TRITON = importlib.util.find_spec("triton")


def test_wrong_arguments_of_blocks_are_refused():
    blocks, one = pooled(torch.linspace(0, 1, 40), torch.zeros(40)), pooled(torch.tensor([0.3]), torch.tensor([1]))

    def weighed(w, ties):
        return partial(pooled, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), torch.tensor(w), ties=ties)

    bounds = partial(pava_bc, blocks)
    calls = [
        (partial(bounds, n_min=40, n_max=40), "`n_min` must be below the number of samples, got 40 for 40 samples."),
        (partial(pava_bc, one, n_min=1), "below the number of samples, got 1 for 1 samples"),
        (partial(bounds, n_min=9, n_max=8), "`n_min` must be at most `n_max`, got 9 and 8"),
        (partial(bounds, n_min=9), "`n_min` must be at most `n_max`, got 9 and 8"),
        (partial(bounds, n_min=0), "`n_min` must be positive, got 0."),
        (partial(bounds, n_min=2.0), "`n_min` must be an integer, got float."),
        (partial(bounds, n_max=True), "`n_max` must be an integer, got bool."),
        (partial(bounds, variant="book"), "`variant` must be 'code' or 'paper', got 'book'."),
        (partial(bounds, backend="rounds"), "must be one of 'auto', 'numba', 'python' for pava_bc on cpu,"),
        (weighed([1.0, 0.5], "pool"), "`weights` must be whole numbers, got 0.5."),
        (weighed([1.0, torch.nan], "pool"), "`weights` must be whole numbers, got nan."),
        (weighed([1, 2], "split"), "`weights` must be 0 or 1 with ties='split', got 2."),
        (weighed([1, 1], "join"), "`ties` must be 'pool' or 'split', got 'join'."),
        (partial(equal_mass, blocks, 0), "`n_bins` must be positive, got 0"),
    ]
    assert_refused((words, call, TypeError if "integer" in words else ValueError, [words]) for call, words in calls)
    assert pava_bc(one).n.tolist() == [1]  # one sample is a block unless more are asked for


@pytest.fixture
def without(monkeypatch):
    """Take packages away: `without("numba")`."""

    def take(*packages):
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)
            monkeypatch.delitem(sys.modules, f"torchcalib.ops.isotonic.{package}", raising=False)
        dispatch._load.cache_clear()

    yield take
    dispatch._load.cache_clear()


def test_without_packages_a_forced_choice_raises_and_an_automatic_one_falls_back(without):
    without("triton", "numba")
    blocks = pooled(torch.linspace(0, 1, 40), torch.arange(40) % 3 == 0)
    with pytest.raises(ImportError, match=r"`backend` must be installed, got 'numba'.*torchcalib\[fast\]"):
        pava_bc(blocks, backend="numba")
    with pytest.raises(ImportError, match=r"`backend` must be installed, got 'triton'.*pip install triton"):
        dispatch.choose("pava_bc", torch.device("cuda"), "triton")
    choices = [("pava", "cpu", "rounds"), ("pava_bc", "cpu", "python"), ("isotonic_regression", "cpu", "python"),
               ("pava_bc", "cuda", "python"), ("isotonic_regression", "cuda", "python")]  # fmt: skip
    for op, device, backend in choices:
        choice = dispatch.choose(op, torch.device(device))
        assert choice.backend == backend
        assert "numba cannot be used" in choice.why
        assert "torchcalib[fast]" in choice.why
        assert ("triton cannot be used" in choice.why) == (device == "cuda")
    for read in (pava, pava_bc):
        assert table(read(blocks)) == table(read(blocks, backend="python"))


def test_first_choices_of_devices():
    choices = [("pava", "cuda", "rounds"), ("pava", "mps", "rounds")]
    choices += [(op, "cpu", "numba") for op in ("pava", "pava_bc", "rows") if NUMBA]
    choices += [(op, "cuda", "triton") for op in ("pava_bc", "isotonic_regression") if TRITON]
    for op, device, backend in choices:
        assert dispatch.choose(op, torch.device(device)) == (backend, "")
    if TRITON:
        assert dispatch.choose("pava", torch.device("cuda"), "triton") == ("triton", "")


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_where_triton_cannot_launch_another_runs(without, monkeypatch):
    """A machine with a CUDA device and no driver that triton can build."""
    without()
    monkeypatch.delitem(sys.modules, "torchcalib.ops.isotonic.triton", raising=False)
    monkeypatch.setattr("triton.runtime.driver", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choice = dispatch.choose("pava_bc", torch.device("cuda"))
    assert choice.backend in ("numba", "python")
    assert "triton cannot be used (no kernel can be launched" in choice.why


def test_triton_runs_on_the_cpu_in_its_interpreter_alone(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for op in ("pava", "pava_bc", "isotonic_regression"):
        with pytest.raises(ValueError, match=r"on cpu, got 'triton'\. .*TRITON_INTERPRET=1"):
            dispatch.choose(op, torch.device("cpu"), "triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert dispatch.choose(op, torch.device("cpu")).backend != "triton"
        monkeypatch.delenv("TRITON_INTERPRET")


@pytest.mark.cuda
@pytest.mark.parametrize("distinct", [None, 40])
def test_on_cuda_blocks_are_those_of_the_cpu(distinct):
    scores, outcomes, weights = random_sample(3001, lead=(3,), distinct=distinct, weighted=True)
    for step in (lambda b: b, pava, pava_bc, lambda b: pava_bc(b, variant="paper"), lambda b: equal_mass(b, 7)):
        here = step(pooled(scores, outcomes, weights))
        there = step(pooled(scores.cuda(), outcomes.cuda(), weights.cuda()))
        for name in ("index", "n", "positives"):
            assert torch.equal(getattr(there, name).cpu(), getattr(here, name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sort_by_bits_is_the_stable_sort_of_floats(dtype):
    special = [0.5, *(sign * x for x in (0.0, torch.inf, 1.0, 1e-40, torch.nan) for sign in (1, -1))]
    special = torch.tensor(special, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for shape in ((6,), (2, 6), (3, 2500), (5000,)):
        tied = special[torch.randint(0, len(special), shape, generator=generator)]
        for scores in (tied, torch.randn(shape, generator=generator).to(dtype)):
            assert torch.equal(stable_sort(order_bits(scores))[1], scores.sort(dim=-1, stable=True).indices)
