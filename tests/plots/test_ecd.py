"""The curves of the expected calibration difference, by closed forms."""

import math

import numpy as np
import pytest

from torchcalib import plots
from torchcalib.plots import ecd_curve


def test_minimum_closed_form_is_minus_w_of_1_over_e():
    w = -plots.ECD_MINIMUM
    assert w * math.exp(w) == pytest.approx(1 / math.e, rel=1e-15)


def test_curves_closed_form_with_their_minimum_marked():
    lines = ecd_curve().lines
    curves = {line.get_label()[:5]: line for line in lines if line.get_label().startswith("x = ")}
    for x in (0, 1):
        p, ecd = curves[f"x = {x}"].get_data()
        inside = (p > 0) & (p < 1)
        expected = (p[inside] - x) * np.log(p[inside] / (1 - p[inside]))
        np.testing.assert_allclose(ecd[inside], expected, rtol=1e-12, atol=1e-15)
        assert ecd[p == x] == 0
        assert np.isnan(ecd[p == 1 - x])
    marks = {line.get_label(): line.get_xydata()[0] for line in lines if "minimum" in line.get_label()}
    for x, p in ((1, 0.7821882900), (0, 1 - 0.7821882900)):
        np.testing.assert_allclose(marks[f"minimum, x = {x}"], [p, -0.2784645428], atol=1e-10)
