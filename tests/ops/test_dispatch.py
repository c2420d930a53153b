"""Choice of the implementation of an operation, and the errors of impossible choices."""

import importlib.util
import runpy
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
        clear()

    def clear():
        dispatch._load.cache_clear()
        dispatch._best.cache_clear()
        dispatch._best_module.cache_clear()

    yield take
    clear()


def test_missing_packages_raise_for_explicit_choices_and_fall_back_for_auto(without):
    without("triton", "numba")
    n, positives = torch.ones(40, dtype=torch.int64), torch.arange(40) % 3 == 0
    with pytest.raises(ImportError, match=r"`backend` must be installed, got 'numba'.*torchcalib\[fast\]"):
        find("pava_bc", n, positives, backend="numba")
    with pytest.raises(ImportError, match=r"`backend` must be installed, got 'triton'.*pip install triton"):
        dispatch.choose("events", "cuda", 9, "triton")
    choices = [("pava", "cpu", "rounds"), ("pava_bc", "cpu", "python"), ("pava_bc", "cuda", "python")]
    for op, device, backend in choices:
        assert dispatch.choose(op, device, 9) == backend
    for op in ("pava", "pava_bc"):
        assert torch.equal(find(op, n, positives)[0], find(op, n, positives, backend="python")[0])


def test_auto_selects_the_fastest_implementation_of_a_device(monkeypatch):
    monkeypatch.setattr(dispatch, "RULE", "always")
    choices = [("pava", "cuda", "rounds"), ("pava", "mps", "rounds")]
    choices += [(op, "cpu", "numba") for op in ("pava", "pava_bc", "rows") if NUMBA]
    choices += [("events", "cuda", "triton")] if TRITON else []
    for op, device, backend in choices:
        assert dispatch.choose(op, device, 9) == backend


@pytest.fixture
def auto(monkeypatch):
    """Set the rule of a new process."""
    monkeypatch.setattr(dispatch, "RULE", "auto")
    monkeypatch.setattr(dispatch, "ENOUGH", 2_000_000_000)
    monkeypatch.setattr(dispatch, "_saved", {})


@pytest.mark.skipif(not NUMBA, reason="numba is not installed")
@pytest.mark.parametrize("op", dispatch._CHOICES)
def test_small_calls_use_compiled_code_once_it_would_have_saved_enough(op, auto):
    choice = dispatch._CHOICES[op]
    plain, per_call = choice.cpu[1], 100_000 + 1_000 * choice.saves
    n_plain = -(-dispatch.ENOUGH // per_call) - 1
    assert n_plain >= 2_000  # many updates of a stream
    assert {dispatch.choose(op, "cpu", 1_000) for _ in range(n_plain)} == {plain}
    assert [dispatch.choose(op, "cpu", 1_000) for _ in range(2)] == ["numba"] * 2
    others = [name for name in dispatch._CHOICES if name != op]
    assert [dispatch.choose(name, "cpu", 1_000) for name in others] == [
        dispatch._CHOICES[name].cpu[1] for name in others
    ]


@pytest.mark.skipif(not NUMBA, reason="numba is not installed")
@pytest.mark.parametrize("op", dispatch._CHOICES)
def test_one_call_loads_compiled_code_for_many_predictions_only(op, auto):
    choice = dispatch._CHOICES[op]
    assert dispatch.choose(op, "cpu", dispatch.LARGE - 1) == choice.cpu[1]
    assert dispatch.choose(op, "cpu", dispatch.LARGE) == choice.cpu[not choice.of_predictions]


@pytest.mark.skipif(not NUMBA, reason="numba is not installed")
@pytest.mark.parametrize("op", dispatch._CHOICES)
def test_after_a_large_call_an_operation_uses_its_loop_for_any_size_and_others_use_theirs_sooner(op, auto):
    choice = dispatch._CHOICES[op]
    assert dispatch.choose("rows", "cpu", dispatch.LARGE) == "numba"
    n_plain = 0 if op == "rows" else -(-dispatch.ENOUGH // 10 // (100_000 + 1_000 * choice.saves)) - 1
    assert [dispatch.choose(op, "cpu", 1_000) for _ in range(n_plain)] == [choice.cpu[1]] * n_plain
    assert dispatch.choose(op, "cpu", 1_000) == "numba"


@pytest.mark.parametrize(("rule", "compiled"), [("always", True), ("never", False)])
def test_the_environment_variable_replaces_the_rule(rule, compiled, monkeypatch):
    monkeypatch.setattr(dispatch, "RULE", rule)
    for op, choice in dispatch._CHOICES.items():
        expected = choice.cpu[0 if compiled and NUMBA else 1]
        assert [dispatch.choose(op, "cpu", n) for n in (1, 2**30)] == [expected] * 2


def test_other_rules_are_errors(monkeypatch):
    monkeypatch.setenv("TORCHCALIB_NUMBA", "on")
    with pytest.raises(ValueError, match="`TORCHCALIB_NUMBA` must be 'auto', 'always' or 'never', got 'on'"):
        runpy.run_path(dispatch.__file__)


def test_other_accelerators_use_the_backends_of_cuda_without_triton(without):
    without("triton")
    for op in dispatch._CHOICES:
        expected = dispatch.choose(op, "cuda", 9)
        assert [dispatch.choose(op, name, 9) for name in ("mps", "xpu", "privateuseone")] == [expected] * 3
        with pytest.raises(ValueError, match="`backend` must be one of 'auto'"):
            dispatch.choose(op, "mps", 9, "triton")


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_another_implementation_is_selected_if_triton_cannot_launch(without, monkeypatch):
    """A machine with a CUDA device, but without a driver that Triton can use."""
    without()
    monkeypatch.delitem(sys.modules, "torchcalib.ops.bin_sums.triton", raising=False)
    monkeypatch.setattr("triton.runtime.driver", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert dispatch.choose("events", "cuda", 9) == "torch"
    with pytest.raises(ImportError, match=r"got 'triton' \(Triton requires a C compiler and a CUDA driver"):
        dispatch.choose("events", "cuda", 9, "triton")


def test_triton_on_the_cpu_requires_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"on cpu, got 'triton'\. .*TRITON_INTERPRET=1"):
        dispatch.choose("events", "cpu", 9, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose("events", "cpu", 9) != "triton"


@pytest.mark.cuda
@pytest.mark.parametrize("distinct", [None, 40])
def test_blocks_on_cuda_equal_those_on_the_cpu(distinct):
    scores, outcomes, weights = random_sample(3001, lead=(3,), distinct=distinct, weighted=True)
    for op, options in (("pava", {}), ("pava_bc", {}), ("pava_bc", {"variant": "paper"})):
        here = find_in_sample(op, scores, outcomes, weights, **options)
        there = find_in_sample(op, scores.cuda(), outcomes.cuda(), weights.cuda(), **options)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there, here, strict=True))
