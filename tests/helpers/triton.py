"""Fixtures for tests of Triton kernels, which run on a CUDA device, or on the CPU in Triton's interpreter.

The interpreter takes about a millisecond per element of a row. Triton reads the variable that selects it on import, so
that a test file runs a second time in a fresh process.
"""

import importlib.util
import os

import pytest
import torch

NEEDS_TRITON = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else pytest.param("cuda", marks=pytest.mark.cuda)
on_device = pytest.fixture(params=[DEVICE])(lambda request: torch.device(request.param))
ARCHITECTURES = {"A100": 80, "H100": 90, "B200": 100}
"""Compute capability of GPUs, times 10."""
needs_compiler = pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")


def poison(monkeypatch, name):
    """Fill the output of `torch.<name>` with NaN or 10^6, which reveals elements that a kernel does not write."""
    make = getattr(torch, name)

    def filled(*arguments, **options):
        x = make(*arguments, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(10**6) if x.dtype == torch.int64 else x

    monkeypatch.setattr(torch, name, filled)


def assert_compiles(module, kernel, types, constants, monkeypatch, cache, **options):
    """Compile a kernel for GPUs that need not be present, without using earlier compilations."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    function = getattr(importlib.import_module(f"torchcalib.ops.{module}"), kernel)
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    for architecture in ARCHITECTURES.values():
        target = GPUTarget("cuda", architecture, 32)
        compiled = triton.compile(ASTSource(function, signature, constants), target=target, **options)
        assert f".entry {kernel}(" in compiled.asm["ptx"]
        assert f".target sm_{architecture}" in compiled.asm["ptx"]
