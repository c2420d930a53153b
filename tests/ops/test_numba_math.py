"""Functions of numba loops against the math module."""

import math

import numpy as np
import pytest

numba_math = pytest.importorskip("torchcalib.ops.numba_math", reason="needs numba")

POSITIVE = np.geomspace(1e-30, 1e30, 601).astype(np.float32)


def test_exp_and_log_have_the_documented_precision():
    """log n and log1p lose precision neither near 1 nor near 0; the bounds are those of the docstrings."""
    for x in np.linspace(-87, 87, 601).astype(np.float32):
        assert float(numba_math.exp32(x)) == pytest.approx(math.exp(float(x)), rel=2e-7)
    near_one = (1 + np.linspace(-0.01, 0.01, 101)).astype(np.float32)
    for x in np.linspace(0, 1, 301).astype(np.float32):
        assert float(numba_math.log1p_of_fraction32(x)) == pytest.approx(math.log1p(float(x)), rel=3e-7)
    for x in (*POSITIVE, *near_one):
        assert float(numba_math.log32(x)) == pytest.approx(math.log(float(x)), rel=3e-7, abs=1e-9)


def test_log1p_has_float64_precision():
    """The series is cut after degree 21 of |s| < 0.172, where the next term is below 1e-18."""
    for x in (*POSITIVE, *np.linspace(0, 3, 301).astype(np.float32)):
        assert float(numba_math.log1p32(x)) == pytest.approx(math.log1p(float(x)), rel=1e-15, abs=0)


def test_float64_functions_have_the_documented_precision():
    """The bounds are those of the docstrings. The exact functions of `math` have errors of at most 1e-16."""
    small = np.geomspace(1e-300, 1, 601)
    for x in (-700 * small, *np.linspace(-708, 709, 601)):
        for value in np.atleast_1d(x):
            assert numba_math.exp64(value) == pytest.approx(math.exp(value), rel=4e-16, abs=0) or value <= -708
    for x in (*small, *np.geomspace(1, 1e300, 601), *(1 - small / 2), 5e-324, 2.0**-1022):
        assert numba_math.log64(x) == pytest.approx(math.log(x), rel=1e-15, abs=0)
    for x in (*small[:-1], *np.linspace(0, 1, 301)[:-1], *(1 - np.geomspace(1e-15, 1, 101))):
        assert numba_math.log_of_complement(x) == pytest.approx(math.log1p(-x), rel=1e-15, abs=0)
        assert numba_math.log1p_of_fraction(x) == pytest.approx(math.log1p(x), rel=1e-15, abs=0)
    for x in (*small, *np.geomspace(1, 1e300, 601)):
        assert numba_math.log1p64(x) == pytest.approx(math.log1p(x), rel=1e-15, abs=0)
    limits = [numba_math.exp64(x) for x in (-709.1, -math.inf, 0.0)]
    assert limits == [0, 0, 1]
    assert math.isnan(numba_math.exp64(math.nan))
    assert numba_math.log64(0.0) == numba_math.log_of_complement(1.0) == -math.inf
