"""Which implementation runs an op, by device. A forced choice raises, an automatic one falls back and says why."""

import importlib
from functools import cache
from types import ModuleType
from typing import Literal, NamedTuple

import torch

Op = Literal["pava", "pava_bc", "isotonic_regression"]
Backend = Literal["auto", "numba", "python", "rounds"]

# What runs an op where, best first. "rounds" are tensor operations and run on any device; "numba" and "python" are
# loops over one sequence after another, and bring the columns of another device to the CPU.
_ORDER: dict[Op, dict[str, tuple[Backend, ...]]] = {
    # Counts: labels of 0 and 1 are pooled in few rounds.
    "pava": {"cpu": ("numba", "rounds", "python"), "other": ("rounds", "numba", "python")},
    # Real targets can need a round for each block, the loop never more than one pass.
    "isotonic_regression": {"cpu": ("numba", "python", "rounds"), "other": ("numba", "python", "rounds")},
    # The bounds make it sequential.
    "pava_bc": {"cpu": ("numba", "python"), "other": ("numba", "python")},
}


class Choice(NamedTuple):
    """What runs an op, and why nothing that is preferred to it does ("" where it is the first choice)."""

    backend: Backend
    why: str


@cache
def _load_numba() -> tuple[ModuleType | None, str]:
    """Return the compiled loops, or None and the reason. A missing cache folder makes numba raise RuntimeError."""
    try:
        return importlib.import_module("torchcalib.kernels.isotonic_numba"), ""
    except (ImportError, RuntimeError) as error:
        return None, f"numba cannot be used ({error}); pip install 'torchcalib[fast]'"


def choose(op: Op, device: torch.device, backend: Backend = "auto") -> Choice:
    """Return the implementation of an op for tensors on a device.

    Raises:
        ValueError: a forced backend does not implement the op.
        ImportError: "numba" is forced and cannot be loaded.
    """
    order = _ORDER[op]["cpu" if device.type == "cpu" else "other"]
    if backend == "auto":
        why = ""
        for name in order:
            if name != "numba" or _load_numba()[0] is not None:
                return Choice(name, why)
            why = _load_numba()[1]
    if backend not in order:
        allowed = ", ".join(repr(name) for name in ("auto", *order))
        raise ValueError(f"`backend` must be one of {allowed} for {op}, got {backend!r}. Leave it at 'auto'.")
    if backend == "numba" and _load_numba()[0] is None:
        raise ImportError(f"`backend` must be installed, got 'numba'. {_load_numba()[1]}.")
    return Choice(backend, "")


def numba_loops() -> ModuleType:
    """Return the compiled loops, once `choose` has answered "numba"."""
    module, why = _load_numba()
    if module is None:
        raise ImportError(why)
    return module
