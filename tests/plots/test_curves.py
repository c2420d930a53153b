"""Curve of the expected calibration difference, by closed forms, and training curve, by its history."""

import math

import numpy as np
import pytest
import torch
from helpers.tables import texts
from helpers.trainings import epochs_of

import torchcalib.functional as F
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


@pytest.mark.parametrize("weight", ["uniform", "beta22", torch.sqrt])
def test_bayes_risk_diagram_is_the_weighted_risk_with_its_area(weight):
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 200, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (200,), generator=generator)
    ax = plots.bayes_risk_diagram({"first": p, "second": q}, y, weight=weight)
    first, second = (line for line in ax.lines if "area" in line.get_label())
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "better constant decision"
    c = torch.arange(1, 512, dtype=torch.float64) / 512
    w = {"uniform": torch.ones_like(c), "beta22": 2 * c * (1 - c)}.get(weight, c.sqrt())
    for line, preds in ((first, p), (second, q)):
        curve = F.bayes_risk_curve(preds, y, "binary", points=c)
        np.testing.assert_allclose(line.get_ydata(), w * curve.risk)
        area = F.bayes_risk_area(preds, y, "binary", weight=weight)
        assert line.get_label().endswith(f"\narea {area:.3g}")
        if weight != "uniform":  # bounded, so that a sum over the points is accurate
            assert np.sum(line.get_ydata()) / 512 == pytest.approx(area.item(), rel=0.02)
    constant = next(line for line in ax.lines if line.get_label() == "_constant decision")
    np.testing.assert_allclose(constant.get_ydata(), w * curve.cheapest)
    assert ax.get_ylim() == (0, pytest.approx(2 * max(constant.get_ydata())))
    labels = plots.bayes_risk_diagram(
        torch.stack((p, q), -1), torch.stack((y, 1 - y), -1), task="multilabel", class_names=["a", "b"]
    )
    assert [line.get_label().split("\n")[0] for line in labels.lines[1:3]] == ["a", "b"]
    assert "no data" in texts(plots.bayes_risk_diagram(p[:0], y[:0], task="binary"))


def test_score_chart_has_a_bar_for_each_system_and_score():
    scores = {"raw": {"NCE": 0.9, "RCL": -3.0}, "cal": {"NCE": torch.tensor(0.7), "RCL": -math.inf}}
    ax = plots.score_chart(scores, style=DARK)
    assert [[bar.get_height() for bar in bars] for bars in ax.containers] == [[0.9, -3], [pytest.approx(0.7), 0]]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["NCE", "RCL"]
    assert {"0.9", "-3", "0.7", "-inf"} <= set(texts(ax))


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
