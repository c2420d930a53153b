"""Choice of the implementation of an operation, and the errors of impossible choices."""

import importlib.util
import sys

import pytest
import torch
from helpers.blocks import find, find_in_sample, random_sample
from helpers.kernels import NUMBA

from torchcalib.ops import dispatch

TRITON = importlib.util.find_spec("triton")


@pytest.fixture
def without(monkeypatch):
    """Return a function that simulates missing packages: `without("numba")`."""

    def take(*packages):
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)
            loaded = [
                name for name in sys.modules if name.startswith("torchcalib.ops.") and name.endswith(f".{package}")
            ]
            for name in loaded:
                monkeypatch.delitem(sys.modules, name)
        dispatch._load.cache_clear()

    yield take
    dispatch._load.cache_clear()


def test_missing_packages_raise_for_explicit_choices_and_fall_back_for_auto(without):
    without("triton", "numba")
    n, positives = torch.ones(40, dtype=torch.int64), torch.arange(40) % 3 == 0
    with pytest.raises(ImportError, match=r"`backend` must be installed, got 'numba'.*torchcalib\[fast\]"):
        find("pava_bc", n, positives, backend="numba")
    with pytest.raises(ImportError, match=r"`backend` must be installed, got 'triton'.*pip install triton"):
        dispatch.choose("pava_bc", torch.device("cuda"), "triton")
    choices = [("pava", "cpu", "rounds"), ("pava_bc", "cpu", "python"), ("pava_bc", "cuda", "python")]
    for op, device, backend in choices:
        assert dispatch.choose(op, torch.device(device)) == backend
    for op in ("pava", "pava_bc"):
        assert torch.equal(find(op, n, positives)[0], find(op, n, positives, backend="python")[0])


def test_auto_selects_the_fastest_implementation_of_a_device():
    choices = [("pava", "cuda", "rounds"), ("pava", "mps", "rounds")]
    choices += [(op, "cpu", "numba") for op in ("pava", "pava_bc", "rows") if NUMBA]
    choices += [("pava_bc", "cuda", "triton")] if TRITON else []
    for op, device, backend in choices:
        assert dispatch.choose(op, torch.device(device)) == backend


def test_other_accelerators_use_the_backends_of_cuda_without_triton(without):
    without("triton")
    for op in dispatch._CHOICES:
        expected = dispatch.choose(op, torch.device("cuda"))
        assert [dispatch.choose(op, torch.device(name)) for name in ("mps", "xpu", "privateuseone")] == [expected] * 3
        with pytest.raises(ValueError, match="`backend` must be one of 'auto'"):
            dispatch.choose(op, torch.device("mps"), "triton")


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_another_implementation_is_selected_if_triton_cannot_launch(without, monkeypatch):
    """A machine with a CUDA device, but without a driver that Triton can use."""
    without()
    monkeypatch.delitem(sys.modules, "torchcalib.ops.isotonic.triton", raising=False)
    monkeypatch.setattr("triton.runtime.driver", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert dispatch.choose("pava_bc", torch.device("cuda")) in ("numba", "python")
    with pytest.raises(ImportError, match=r"got 'triton' \(Triton requires a C compiler and a CUDA driver"):
        dispatch.choose("pava_bc", torch.device("cuda"), "triton")


def test_triton_on_the_cpu_requires_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"on cpu, got 'triton'\. .*TRITON_INTERPRET=1"):
        dispatch.choose("pava_bc", torch.device("cpu"), "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose("pava_bc", torch.device("cpu")) != "triton"


@pytest.mark.cuda
@pytest.mark.parametrize("distinct", [None, 40])
def test_blocks_on_cuda_equal_those_on_the_cpu(distinct):
    scores, outcomes, weights = random_sample(3001, lead=(3,), distinct=distinct, weighted=True)
    for op, options in (("pava", {}), ("pava_bc", {}), ("pava_bc", {"variant": "paper"})):
        here = find_in_sample(op, scores, outcomes, weights, **options)
        there = find_in_sample(op, scores.cuda(), outcomes.cuda(), weights.cuda(), **options)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there, here, strict=True))
