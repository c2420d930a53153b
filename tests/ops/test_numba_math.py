"""Functions of numba loops against the math module."""

import math

import numpy as np
import pytest

numba_math = pytest.importorskip("torchcalib.ops.numba_math", reason="needs numba")

POSITIVE = np.geomspace(1e-30, 1e30, 601).astype(np.float32)


def test_exp_and_log_have_the_documented_precision():
    """log n and log1p lose precision neither near 1 nor near 0; the bounds are those of the docstrings."""
    for x in np.linspace(-87, 87, 601).astype(np.float32):
        assert float(numba_math.exp(x)) == pytest.approx(math.exp(float(x)), rel=2e-7)
    near_one = (1 + np.linspace(-0.01, 0.01, 101)).astype(np.float32)
    for x in (*POSITIVE, *near_one):
        assert float(numba_math.log(x)) == pytest.approx(math.log(float(x)), rel=3e-7, abs=1e-9)


def test_log1p_has_float64_precision():
    """The series is cut after degree 21 of |s| < 0.172, where the next term is below 1e-18."""
    for x in (*POSITIVE, *np.linspace(0, 3, 301).astype(np.float32)):
        assert float(numba_math.log1p(x)) == pytest.approx(math.log1p(float(x)), rel=1e-15, abs=0)
