"""Choose the implementation of an operation by device.

`"auto"` uses the first implementation that can be loaded. Other backends raise an error if they cannot be used.
"""

import importlib
import os
from functools import cache
from types import ModuleType
from typing import Literal

import torch

Op = Literal["pava", "pava_bc", "isotonic_regression", "rows", "events", "classes", "smoothing"]
Backend = Literal["auto", "triton", "numba", "python", "rounds", "torch"]

# Implementations of each operation by device, in order of preference. "rounds" and "torch" are tensor operations.
# For isotonic blocks, "triton" runs one sequential loop per row, with all rows in parallel on the GPU. "numba" and
# "python" loop over the rows on the CPU, and copy the columns from another device.
_ORDER: dict[Op, dict[str, tuple[Backend, ...]]] = {
    # Labels of 0 and 1 are pooled in few rounds. Rounds use the whole GPU even for one long row, unlike the loop. Each
    # round synchronises, but `pava` synchronises at its end anyway.
    "pava": {
        "cpu": ("numba", "rounds", "python"),
        "cuda": ("rounds", "triton", "numba", "python"),
        "other": ("rounds", "numba", "python"),
    },
    # Real targets can take one round per block, whereas the loop takes one pass.
    "isotonic_regression": {
        "cpu": ("numba", "python", "rounds"),
        "cuda": ("triton", "numba", "python", "rounds"),
        "other": ("numba", "python", "rounds"),
    },
    # The bounds on block sizes make the algorithm sequential, so there are no "rounds".
    "pava_bc": {
        "cpu": ("numba", "python"),
        "cuda": ("triton", "numba", "python"),
        "other": ("numba", "python"),
    },
    # "numba" and "triton" load a row once, tensor operations many times. "triton" has not been measured on a GPU.
    "rows": {"cpu": ("numba", "torch"), "cuda": ("triton", "torch"), "other": ("torch",)},
    "events": {"cpu": ("numba", "torch"), "cuda": ("triton", "torch"), "other": ("torch",)},
    "classes": {"cpu": ("numba", "torch"), "cuda": ("triton", "torch"), "other": ("torch",)},
    "smoothing": {"cpu": ("numba", "torch"), "other": ("torch",)},
}

# Folder of each operation. `_MODULES` maps a backend to its module in that folder and to its installation command.
_FOLDERS: dict[Op, str] = {
    "pava": "isotonic",
    "pava_bc": "isotonic",
    "isotonic_regression": "isotonic",
    "rows": "softmax_stats",
    "events": "bin_sums",
    "classes": "bin_sums",
    "smoothing": "smoothing",
}
_MODULES: dict[Backend, tuple[str, str]] = {
    "triton": ("triton", "pip install triton"),
    "numba": ("numba", "pip install 'torchcalib[fast]'"),
    "python": ("reference", ""),
    "rounds": ("reference", ""),
    "torch": ("reference", ""),
}


@cache
def _load(op: Op, backend: Backend) -> tuple[ModuleType | None, str]:
    """Return the module of a backend and "", or None and the reason why it cannot be loaded."""
    name, install = _MODULES[backend]
    try:
        module = importlib.import_module(f"torchcalib.ops.{_FOLDERS[op]}.{name}")
        if backend == "triton" and torch.cuda.is_available():
            _check_launch()
    except (ImportError, RuntimeError) as error:  # numba raises RuntimeError if it finds no cache folder
        return None, f"{backend} cannot be used ({error}); {install}"
    return module, ""


def _check_launch() -> None:
    """Raise ImportError if Triton cannot build its launcher, which needs a C compiler."""
    try:
        importlib.import_module("triton").runtime.driver.active.get_current_device()
    except Exception as error:  # a failed build raises errors of many types
        raise ImportError(f"no kernel can be launched: {error}") from error


def choose(op: Op, device: torch.device, backend: Backend = "auto") -> Backend:
    """Return the backend that runs an operation on a device, given the required backend or "auto".

    Raises:
        ValueError: if the required backend does not implement the operation on the device. On the CPU, "triton" needs
            Triton's interpreter, which the environment variable TRITON_INTERPRET=1 enables.
        ImportError: if the required backend cannot be loaded.
    """
    order = _ORDER[op].get(device.type, _ORDER[op]["other"])
    if backend == "auto":
        return next(name for name in order if _load(op, name)[0] is not None)
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if backend not in order and not (backend == "triton" and interpreted):
        allowed = ", ".join(repr(name) for name in ("auto", *order))
        hint = " On the CPU 'triton' needs TRITON_INTERPRET=1." if backend == "triton" else ""
        raise ValueError(
            f"`backend` must be one of {allowed} for {op} on {device.type}, got {backend!r}. Leave it at 'auto'.{hint}"
        )
    implementation(op, backend)
    return backend


@cache
def source_of(op: Op, device_type: str, dtype: torch.dtype, backend: Backend) -> ModuleType:
    """Return the module that implements an operation for predictions with this device type and dtype.

    The numba loops over rows compute in float32. So float64 rows use "torch" on the CPU.

    Raises:
        ValueError: as for `choose`, or if "numba" is required for float64 rows.
        ImportError: if the required backend cannot be loaded.
    """
    if dtype == torch.float64 and device_type == "cpu" and op in ("rows", "classes") and backend in ("auto", "numba"):
        if backend == "numba":
            raise ValueError(
                f"`backend` must be 'auto' or 'torch' for float64 on the CPU, got {backend!r}. Leave it at 'auto'."
            )
        backend = "torch"
    return implementation(op, choose(op, torch.device(device_type), backend))


def implementation(op: Op, backend: Backend) -> ModuleType:
    """Return the module of a backend for an operation.

    Raises:
        ImportError: if the module cannot be loaded.
    """
    module, reason = _load(op, backend)
    if module is None:
        raise ImportError(f"`backend` must be installed, got {backend!r}. {reason}.")
    return module
