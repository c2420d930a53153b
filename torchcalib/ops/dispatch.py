"""Choose the implementation of an operation by device and size.

`backend="auto"` selects the first implementation that can be loaded. Any other backend raises if it cannot be loaded.

Importing numba takes half a second, and compiling a loop that is not in numba's cache a few seconds more. "auto"
therefore uses a compiled loop only where it pays: for an operation that was called with predictions of at least `LARGE`
values in this process, from this call on for every size; and otherwise once the loop would have saved `ENOUGH`
nanoseconds, or a tenth of it after numba was loaded. An ECE of 10 classes reaches this after about 20,000 updates with
64 rows. The backends differ by rounding errors only. The environment variable TORCHCALIB_NUMBA replaces this rule:
"always" uses compiled loops for every size, and "never" for none.
"""

import importlib
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Literal

import torch

Op = Literal[
    "pava",
    "pava_bc",
    "augmented",
    "rows",
    "events",
    "classes",
    "equal_mass",
    "binary_scores",
    "log_odds",
    "moments",
    "random",
]
Backend = Literal["auto", "triton", "numba", "python", "rounds", "torch"]


LARGE = 2**17  # number of values of predictions in one call that loads compiled code
ENOUGH = 2_000_000_000  # nanoseconds: about the geometric mean of loading a loop from the cache and compiling several
_PER_CALL = 100_000  # nanoseconds that a compiled loop saves for every call, whatever its size

RULE = os.environ.get("TORCHCALIB_NUMBA", "auto")
if RULE not in ("auto", "always", "never"):
    raise ValueError(f"`TORCHCALIB_NUMBA` must be 'auto', 'always' or 'never', got {RULE!r}. Use 'auto'.")

_saved: dict[Op, int] = {}
"""Nanoseconds that compiled loops would have saved for small calls of an operation in this process."""


@dataclass(frozen=True)
class _Choice:
    folder: str  # subpackage of `torchcalib.ops` with the implementations
    cpu: tuple[Backend, ...]  # backends on the CPU, in order of preference
    accelerator: tuple[Backend, ...]  # the same on other devices; "triton" only on CUDA
    saves: int  # nanoseconds that the compiled loop saves for each value on the CPU, in addition to `_PER_CALL`
    plain: str = "plain"  # its module with tensor operations or Python loops; "" for the subpackage itself
    float32: bool = False  # whether the numba loops compute in float32, not in the dtype of the input
    of_predictions: bool = True  # whether the values are predictions, not simulated or repeated ones; see `LARGE`


# "rounds" and "torch" are tensor operations. For isotonic blocks, "numba" and "python" copy the input to the CPU and
# loop over the rows.
_CHOICES: dict[Op, _Choice] = {
    # Labels of 0 and 1 need few rounds, and a round uses the whole GPU even for one long row, unlike a loop.
    # Each round synchronises, but "pava" synchronises at its end anyway.
    "pava": _Choice(
        "isotonic",
        ("numba", "rounds", "python"),
        ("rounds", "numba", "python"),
        saves=10,
        plain="formula",
        of_predictions=False,
    ),
    # "rounds" is not available, because the bounds on block sizes make the algorithm sequential.
    "pava_bc": _Choice(
        "isotonic", ("numba", "python"), ("numba", "python"), saves=700, plain="formula", of_predictions=False
    ),
    # Each step changes the stack of corners, so the algorithm is sequential. It is only used in fits.
    "augmented": _Choice(
        "isotonic", ("numba", "python"), ("numba", "python"), saves=700, plain="formula", of_predictions=False
    ),
    # "numba" and "triton" load a row once, unlike tensor operations. On an H100, "triton" reads as fast as a copy.
    "rows": _Choice("softmax_stats", ("numba", "torch"), ("triton", "torch"), saves=5),
    "events": _Choice("bin_sums", ("numba", "torch"), ("triton", "torch"), saves=20),
    "classes": _Choice("bin_sums", ("numba", "torch"), ("triton", "torch"), saves=25, float32=True),
    # "numba" reads the samples twice, without temporary tensors of their size, and in all threads.
    "equal_mass": _Choice("equal_mass", ("numba", "torch"), ("torch",), saves=10, plain="", float32=True),
    # "numba" checks the values and computes the scores of a block while it is in the cache.
    "binary_scores": _Choice("binary_scores", ("numba", "torch"), ("torch",), saves=15),
    # "numba" computes the exponentials and sums of a row in one pass, instead of six.
    "log_odds": _Choice("log_odds", ("numba", "torch"), ("torch",), saves=2, plain=""),
    # "numba" computes the exponentials and all moments of a row in one pass, instead of ten.
    "moments": _Choice("newton", ("numba", "torch"), ("torch",), saves=5, plain="temperature"),
    # "numba" keeps a word in registers, while operations on arrays read and write it ten to twenty times.
    "random": _Choice("counter_rng", ("numba", "torch"), ("torch",), saves=10, plain="", of_predictions=False),
}
_INSTALL = {"triton": "pip install triton", "numba": "pip install 'torchcalib[fast]'"}


@cache
def _load(op: Op, backend: Backend) -> tuple[ModuleType | None, str]:
    """Return the module of a backend and "", or None and the error message with the installation command."""
    choice = _CHOICES[op]
    name = backend if backend in _INSTALL else choice.plain
    try:
        module = importlib.import_module(f"torchcalib.ops.{choice.folder}.{name}".rstrip("."))
        if backend == "triton" and torch.cuda.is_available():
            try:  # the code that launches kernels requires a C compiler
                importlib.import_module("triton").runtime.driver.active.get_current_device()
            except Exception as error:  # a failed build can raise an error of any type
                raise ImportError(f"Triton requires a C compiler and a CUDA driver: {error}") from error
    except (ImportError, RuntimeError) as error:  # numba raises RuntimeError if it finds no cache folder
        return None, f"got {backend!r} ({error}). Use 'auto', or install the backend: {_INSTALL.get(backend, '')}."
    return module, ""


def _pays(op: Op, n_values: int) -> bool:
    """Return whether a call with this number of values uses compiled code on the CPU, and count what it would save."""
    if RULE != "auto":
        return RULE == "always"
    choice, saved = _CHOICES[op], _saved.get(op, 0)
    if saved >= ENOUGH:
        return True
    if n_values >= LARGE and choice.of_predictions:
        for name in _CHOICES:  # numba is loaded, so that any other loop has to save only a tenth
            _saved[name] = max(_saved.get(name, 0), ENOUGH * 9 // 10)
        _saved[op] = ENOUGH
        return True
    _saved[op] = saved + _PER_CALL + choice.saves * n_values
    return _saved[op] >= ENOUGH


@cache
def _order(op: Op, device_type: str) -> tuple[Backend, ...]:
    """Return the backends of an operation on a device, in order of preference."""
    if device_type == "cpu":
        return _CHOICES[op].cpu
    order = _CHOICES[op].accelerator
    return order if device_type == "cuda" else tuple(name for name in order if name != "triton")


@cache
def _best(op: Op, device_type: str, is_compiled: bool) -> Backend:
    """Return the first backend of a device that can be loaded. Unless `is_compiled`, skip the first one, "numba"."""
    order = _order(op, device_type)[not is_compiled :]
    return next(name for name in order if _load(op, name)[0] is not None)


def choose(op: Op, device_type: str, n_values: int, backend: Backend = "auto") -> Backend:
    """Return the backend of an operation on a device; only "auto" is replaced. Raise if it cannot be used.

    On the CPU, "triton" requires TRITON_INTERPRET=1, which enables the interpreter of Triton.
    """
    if backend == "auto":
        return _best(op, device_type, device_type != "cpu" or _pays(op, n_values))
    order = _order(op, device_type)
    interpreted = device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if backend not in order and not (backend == "triton" and interpreted):
        allowed = ", ".join(repr(name) for name in ("auto", *order))
        hint = " On the CPU, 'triton' requires TRITON_INTERPRET=1." if backend == "triton" else ""
        raise ValueError(
            f"`backend` must be one of {allowed} for {op!r} on {device_type}, got {backend!r}. Use 'auto'.{hint}"
        )
    implementation(op, backend)
    return backend


def source_of(op: Op, device_type: str, dtype: torch.dtype, n_values: int, backend: Backend) -> ModuleType:
    """Return the module that implements an operation for a device type, a dtype and a number of values.

    Float64 predictions on the CPU use "torch" for operations whose loops are `float32`, and "numba" raises ValueError.
    """
    if dtype == torch.float64 and device_type == "cpu" and _CHOICES[op].float32 and backend in ("auto", "numba"):
        if backend == "numba":
            raise ValueError(
                f"`backend` must be 'auto' or 'torch' for float64 on the CPU, got {backend!r}. Use 'auto'."
            )
        backend = "torch"
    if backend == "auto":
        return _best_module(op, device_type, device_type != "cpu" or _pays(op, n_values))
    return implementation(op, choose(op, device_type, n_values, backend))


@cache
def _best_module(op: Op, device_type: str, is_compiled: bool) -> ModuleType:
    return implementation(op, _best(op, device_type, is_compiled))


def implementation(op: Op, backend: Backend) -> ModuleType:
    """Return the module of a backend for an operation. Raise ImportError if it cannot be loaded."""
    module, reason = _load(op, backend)
    if module is None:
        raise ImportError(f"`backend` must be installed, {reason}")
    return module
