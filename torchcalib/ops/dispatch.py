"""Which implementation runs an op, by device. A forced choice raises, an automatic one falls back and says why."""

import importlib
import os
from functools import cache
from types import ModuleType
from typing import Literal, NamedTuple

import torch

Op = Literal["pava", "pava_bc", "isotonic_regression", "rows", "events", "classes", "smoothing"]
Backend = Literal["auto", "triton", "numba", "python", "rounds", "torch"]

# What runs an op where, best first. "rounds" and "torch" are tensor operations. Of blocks, "triton" is a loop
# for each row, all rows side by side on the GPU, and "numba" and "python" are loops over one row after another, which
# bring the columns of another device to the CPU.
_ORDER: dict[Op, dict[str, tuple[Backend, ...]]] = {
    # Counts: labels of 0 and 1 are pooled in few rounds. Each waits for the GPU, and triton's one launch never does;
    # but rounds spread a long row over the whole GPU, which a loop leaves idle, and `pava` waits at its end anyhow.
    "pava": {
        "cpu": ("numba", "rounds", "python"),
        "cuda": ("rounds", "triton", "numba", "python"),
        "other": ("rounds", "numba", "python"),
    },
    # Real targets can need a round for each block, the loop never more than one pass.
    "isotonic_regression": {
        "cpu": ("numba", "python", "rounds"),
        "cuda": ("triton", "numba", "python", "rounds"),
        "other": ("numba", "python", "rounds"),
    },
    # The bounds make it sequential.
    "pava_bc": {
        "cpu": ("numba", "python"),
        "cuda": ("triton", "numba", "python"),
        "other": ("numba", "python"),
    },
    # One read of every row; numba's loop holds a row in the first cache, tensor operations pass over it many times.
    "rows": {"cpu": ("numba", "torch"), "cuda": ("triton", "torch"), "other": ("torch",)},
    "events": {"cpu": ("numba", "torch"), "cuda": ("triton", "torch"), "other": ("torch",)},
    "classes": {"cpu": ("numba", "torch"), "cuda": ("triton", "torch"), "other": ("torch",)},
    "smoothing": {"cpu": ("numba", "torch"), "other": ("torch",)},
}

# The folder of an op; each backend is a module in it. `_MODULES` gives its name, and how to install what it needs.
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


class Choice(NamedTuple):
    """What runs an op, and why nothing that is preferred to it does ("" where it is the first choice)."""

    backend: Backend
    why: str


@cache
def _load(op: Op, backend: Backend) -> tuple[ModuleType | None, str]:
    """Return the module of a backend, or None and the reason. A missing cache folder makes numba raise RuntimeError."""
    name, install = _MODULES[backend]
    try:
        return importlib.import_module(f"torchcalib.ops.{_FOLDERS[op]}.{name}"), ""
    except (ImportError, RuntimeError) as error:
        return None, f"{backend} cannot be used ({error}); {install}"


def choose(op: Op, device: torch.device, backend: Backend = "auto") -> Choice:
    """Return the implementation of an op for tensors on a device.

    Raises:
        ValueError: a forced backend does not implement the op on the device. On the CPU "triton" runs in Triton's
            interpreter alone, which the environment variable TRITON_INTERPRET=1 turns on.
        ImportError: a forced backend cannot be loaded.
    """
    order = _ORDER[op].get(device.type, _ORDER[op]["other"])
    if backend == "auto":
        reasons: list[str] = []
        for name in order:
            module, why = _load(op, name)
            if module is not None:
                return Choice(name, "; ".join(reasons))
            reasons.append(why)
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if backend not in order and not (backend == "triton" and interpreted):
        allowed = ", ".join(repr(name) for name in ("auto", *order))
        hint = " On the CPU 'triton' needs TRITON_INTERPRET=1." if backend == "triton" else ""
        raise ValueError(
            f"`backend` must be one of {allowed} for {op} on {device.type}, got {backend!r}. Leave it at 'auto'.{hint}"
        )
    implementation(op, backend)
    return Choice(backend, "")


@cache
def source_of(op: Op, device_type: str, dtype: torch.dtype, backend: Backend) -> ModuleType:
    """Return the module that runs an op for predictions of a dtype; numba's loops over rows are float32."""
    if dtype == torch.float64 and device_type == "cpu" and op in ("rows", "classes") and backend in ("auto", "numba"):
        if backend == "numba":
            raise ValueError(
                f"`backend` must be 'auto' or 'torch' for float64 on the CPU, got {backend!r}. Leave it at 'auto'."
            )
        backend = "torch"
    return implementation(op, choose(op, torch.device(device_type), backend).backend)


def implementation(op: Op, backend: Backend) -> ModuleType:
    """Return the module in which a backend has an op.

    Raises:
        ImportError: it cannot be loaded.
    """
    module, why = _load(op, backend)
    if module is None:
        raise ImportError(f"`backend` must be installed, got {backend!r}. {why}.")
    return module
