"""Curve of the expected calibration difference, by closed forms, and training curve, by its history."""

import math

import numpy as np
import pytest
from helpers.tables import texts
from helpers.trainings import epochs_of

from torchcalib import plots
from torchcalib.plots import DARK, ecd_curve, to_svg, training_curve
from torchcalib.results.history import History, HistoryRow


def test_ecd_curve_has_the_closed_form_and_marks_its_minimum():
    w = -plots.ECD_MINIMUM
    assert w * math.exp(w) == pytest.approx(1 / math.e, rel=1e-15)
    lines = ecd_curve().lines
    curves = {line.get_label()[:5]: line for line in lines if line.get_label().startswith("x = ")}
    marks = {line.get_label(): line.get_xydata()[0] for line in lines if "minimum" in line.get_label()}
    for x, at in ((1, 0.7821882900), (0, 1 - 0.7821882900)):
        p, ecd = curves[f"x = {x}"].get_data()
        inside = (p > 0) & (p < 1)
        expected = (p[inside] - x) * np.log(p[inside] / (1 - p[inside]))
        np.testing.assert_allclose(ecd[inside], expected, rtol=1e-12, atol=1e-15)
        assert ecd[p == x] == 0
        assert np.isnan(ecd[p == 1 - x])
        np.testing.assert_allclose(marks[f"minimum, x = {x}"], [at, -0.2784645428], atol=1e-10)


def test_training_curve_draws_the_history_and_marks_its_minimum_and_warnings():
    monitor, _ = epochs_of([0.2, 1.1, 2.5, 3.0])
    ax = training_curve(monitor.history, title="title")
    lines = {line.get_label(): line for panel in ax.child_axes for line in panel.lines}
    for name, key in (("NLL", "nll"), ("ECD", "ecd"), ("accuracy", "accuracy"), ("ECE", "ece")):
        assert tuple(lines[name].get_xdata()) == (1, 2, 3, 4)
        assert tuple(lines[name].get_ydata()) == monitor.history.column(key)
    assert {"lowest NLL, epoch 2", "warning, epoch 3"} <= {text for panel in ax.child_axes for text in texts(panel)}


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [HistoryRow(1, 1, {"nll": math.inf, "ecd": math.inf}), HistoryRow(2, 2, {"nll": 1.0, "ecd": math.nan})],
        [HistoryRow(0, 10, {"ece": 0.1}), HistoryRow(0, 20, {"ece": 0.2}, "so many words")],
        [HistoryRow(1, 1, {"other": 1.0})],
        [HistoryRow(k, k, {"nll": 1 / (1 + k), "accuracy": 0.5, "confidence": 0.6}) for k in range(100)],
    ],
)
def test_unusual_histories_are_drawn_without_warnings(rows):
    ax = training_curve(History(tuple(rows)), style=DARK)
    assert "<svg" in to_svg(ax)
    assert bool(ax.texts) == (not rows or "other" in rows[0].values)
