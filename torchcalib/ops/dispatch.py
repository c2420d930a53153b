"""Choose the implementation of an operation by device.

`backend="auto"` selects the first implementation that can be loaded. Any other backend raises if it cannot be loaded.
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
    "random",
    "moments",
]
Backend = Literal["auto", "triton", "numba", "python", "rounds", "torch"]


@dataclass(frozen=True)
class _Choice:
    folder: str  # subpackage of `torchcalib.ops` with the implementations
    cpu: tuple[Backend, ...]  # backends on the CPU, in order of preference
    accelerator: tuple[Backend, ...]  # the same on other devices; "triton" only on CUDA
    plain: str = "chunked"  # its module with tensor operations or Python loops; "" for the subpackage itself
    float32: bool = False  # whether the numba loops compute in float32, not in the dtype of the input


# "rounds" and "torch" are tensor operations. For isotonic blocks, "triton" runs one sequential loop per row, and all
# rows in parallel on the GPU; "numba" and "python" copy the input to the CPU and loop over the rows.
_CHOICES: dict[Op, _Choice] = {
    # Labels of 0 and 1 need few rounds, and a round uses the whole GPU even for one long row, unlike a loop.
    # Each round synchronises, but "pava" synchronises at its end anyway.
    "pava": _Choice("isotonic", ("numba", "rounds", "python"), ("rounds", "numba", "python"), plain="formula"),
    # "rounds" is not available, because the bounds on block sizes make the algorithm sequential.
    "pava_bc": _Choice("isotonic", ("numba", "python"), ("triton", "numba", "python"), plain="formula"),
    # Each step changes the stack of corners, so the algorithm is sequential. It is only used in fits.
    "augmented": _Choice("isotonic", ("numba", "python"), ("numba", "python"), plain="formula"),
    # "numba" and "triton" load a row once, unlike tensor operations. On an H100, "triton" reads as fast as a copy.
    "rows": _Choice("softmax_stats", ("numba", "torch"), ("triton", "torch")),
    "events": _Choice("bin_sums", ("numba", "torch"), ("triton", "torch")),
    "classes": _Choice("bin_sums", ("numba", "torch"), ("triton", "torch"), float32=True),
    # "numba" reads the samples twice, without temporary tensors of their size, and in all threads.
    "equal_mass": _Choice("equal_mass", ("numba", "torch"), ("torch",), plain="", float32=True),
    # "numba" checks the values and computes the scores of a block while it is in the cache.
    "binary_scores": _Choice("binary_scores", ("numba", "torch"), ("torch",)),
    # "numba" computes all moments of a row in one pass.
    "moments": _Choice("newton.moments", ("numba", "torch"), ("torch",), plain=""),
    # "numba" keeps a word in registers, while operations on arrays read and write it ten to twenty times.
    "random": _Choice("counter_rng", ("numba", "torch"), ("torch",), plain=""),
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
            _check_launch()
    except (ImportError, RuntimeError) as error:  # numba raises RuntimeError if it finds no cache folder
        return None, f"got {backend!r} ({error}). Use 'auto', or install the backend: {_INSTALL.get(backend, '')}."
    return module, ""


def _check_launch() -> None:
    """Raise ImportError if Triton cannot build the code that launches kernels, which requires a C compiler."""
    try:
        importlib.import_module("triton").runtime.driver.active.get_current_device()
    except Exception as error:  # a failed build can raise an error of any type
        raise ImportError(f"Triton requires a C compiler and a CUDA driver: {error}") from error


def choose(op: Op, device: torch.device, backend: Backend = "auto") -> Backend:
    """Return the backend of an operation on a device; only "auto" is replaced. Raise if it cannot be used.

    On the CPU, "triton" requires TRITON_INTERPRET=1, which enables the interpreter of Triton.
    """
    choice = _CHOICES[op]
    order = choice.cpu if device.type == "cpu" else choice.accelerator
    if device.type != "cuda" and "triton" in order:
        order = tuple(name for name in order if name != "triton")
    if backend == "auto":
        for name in order:
            if _load(op, name)[0] is not None:
                return name
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if backend not in order and not (backend == "triton" and interpreted):
        allowed = ", ".join(repr(name) for name in ("auto", *order))
        hint = " On the CPU, 'triton' requires TRITON_INTERPRET=1." if backend == "triton" else ""
        raise ValueError(
            f"`backend` must be one of {allowed} for {op!r} on {device.type}, got {backend!r}. Use 'auto'.{hint}"
        )
    implementation(op, backend)
    return backend


@cache
def source_of(op: Op, device_type: str, dtype: torch.dtype, backend: Backend) -> ModuleType:
    """Return the module that implements an operation for this device type and dtype of the predictions.

    Float64 predictions on the CPU use "torch" for operations whose loops are `float32`, and "numba" raises ValueError.
    """
    if dtype == torch.float64 and device_type == "cpu" and _CHOICES[op].float32 and backend in ("auto", "numba"):
        if backend == "numba":
            raise ValueError(
                f"`backend` must be 'auto' or 'torch' for float64 on the CPU, got {backend!r}. Use 'auto'."
            )
        backend = "torch"
    return implementation(op, choose(op, torch.device(device_type), backend))


def implementation(op: Op, backend: Backend) -> ModuleType:
    """Return the module of a backend for an operation. Raise ImportError if it cannot be loaded."""
    module, reason = _load(op, backend)
    if module is None:
        raise ImportError(f"`backend` must be installed, {reason}")
    return module
