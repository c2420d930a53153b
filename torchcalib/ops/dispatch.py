"""Choice of the implementation of an op, by device. A forced choice raises; an automatic choice falls back."""

import importlib
import os
from functools import cache
from types import ModuleType
from typing import Literal

import torch

Op = Literal["pava", "pava_bc", "isotonic_regression", "rows", "events", "classes", "smoothing"]
Backend = Literal["auto", "triton", "numba", "python", "rounds", "torch"]

# The implementations of an op on a device, in order of preference. "rounds" and "torch" are tensor operations. For
# isotonic blocks "triton" is a loop for each row, all rows in parallel on the GPU; "numba" and "python" are loops over
# one row after another, which copy the columns from another device to the CPU.
_ORDER: dict[Op, dict[str, tuple[Backend, ...]]] = {
    # Labels of 0 and 1 are pooled in few rounds. Each round synchronises the GPU, unlike triton's one launch. But
    # rounds use the whole GPU for a long row, a loop does not, and `pava` synchronises at its end anyway.
    "pava": {
        "cpu": ("numba", "rounds", "python"),
        "cuda": ("rounds", "triton", "numba", "python"),
        "other": ("rounds", "numba", "python"),
    },
    # Real targets can need a round for each block; the loop needs one pass.
    "isotonic_regression": {
        "cpu": ("numba", "python", "rounds"),
        "cuda": ("triton", "numba", "python", "rounds"),
        "other": ("numba", "python", "rounds"),
    },
    # The bounds on block sizes make it sequential.
    "pava_bc": {
        "cpu": ("numba", "python"),
        "cuda": ("triton", "numba", "python"),
        "other": ("numba", "python"),
    },
    # numba and triton read a row once, tensor operations many times. On one core, in ms, numba against torch: rows of
    # 256 x 1,000 logits 0.14 and 0.52, their gradient 0.14 and 1.07, sums of classes 0.28 and 0.77, their gradient 0.35
    # and 1.41; 1,000,000 events 1.1 and 10.5. triton has not been measured on a GPU.
    "rows": {"cpu": ("numba", "torch"), "cuda": ("triton", "torch"), "other": ("torch",)},
    "events": {"cpu": ("numba", "torch"), "cuda": ("triton", "torch"), "other": ("torch",)},
    "classes": {"cpu": ("numba", "torch"), "cuda": ("triton", "torch"), "other": ("torch",)},
    "smoothing": {"cpu": ("numba", "torch"), "other": ("torch",)},
}

# The folder of an op. Each backend is a module in it; `_MODULES` holds the module's name and the command to install it.
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
    """Return the module of a backend, or None and the reason. numba raises RuntimeError without a cache folder."""
    name, install = _MODULES[backend]
    try:
        module = importlib.import_module(f"torchcalib.ops.{_FOLDERS[op]}.{name}")
        if backend == "triton" and torch.cuda.is_available():
            _check_launch()
    except (ImportError, RuntimeError) as error:
        return None, f"{backend} cannot be used ({error}); {install}"
    return module, ""


def _check_launch() -> None:
    """Raise ImportError if Triton cannot build its launcher: it needs a C compiler, which not every machine has."""
    try:
        importlib.import_module("triton").runtime.driver.active.get_current_device()
    except Exception as error:  # any error of the build
        raise ImportError(f"no kernel can be launched: {error}") from error


def choose(op: Op, device: torch.device, backend: Backend = "auto") -> Backend:
    """Return the implementation of an op for tensors on a device.

    Raises:
        ValueError: a forced backend does not implement the op on the device. On the CPU "triton" runs in Triton's
            interpreter only, which the environment variable TRITON_INTERPRET=1 turns on.
        ImportError: a forced backend cannot be loaded.
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
    """Return the module that runs an op for predictions of a dtype. Numba's loops over rows are float32.

    Raises:
        ValueError: see `choose`; or numba was forced for float64 rows.
        ImportError: a forced backend cannot be loaded.
    """
    if dtype == torch.float64 and device_type == "cpu" and op in ("rows", "classes") and backend in ("auto", "numba"):
        if backend == "numba":
            raise ValueError(
                f"`backend` must be 'auto' or 'torch' for float64 on the CPU, got {backend!r}. Leave it at 'auto'."
            )
        backend = "torch"
    return implementation(op, choose(op, torch.device(device_type), backend))


def implementation(op: Op, backend: Backend) -> ModuleType:
    """Return the module of a backend.

    Raises:
        ImportError: the module cannot be loaded.
    """
    module, why = _load(op, backend)
    if module is None:
        raise ImportError(f"`backend` must be installed, got {backend!r}. {why}.")
    return module
