"""Reliability diagram and histogram of confidence draw the numbers of their table."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.reports import quick_report
from helpers.tables import bins_of, mixed_bins, texts
from matplotlib.colors import to_rgba

import torchcalib as tc
from torchcalib.plots import DARK, LIGHT, confidence_histogram, corp_diagram, reliability_diagram, to_png

EDGE_CASES = {
    "200 bins": lambda: bins_of(torch.linspace(0, 1, 20).tolist(), [0, 1] * 10, 200),
    "all in one bin": lambda: bins_of([0.99] * 7, [1] * 7, 15),
    "one sample": lambda: bins_of([1.0], [0], 15),
    "no data": lambda: bins_of([], [], 15),
    "nearly all in one bin": lambda: bins_of([0.01] * 9000 + [0.2, 0.5, 0.8], [0] * 9000 + [0, 1, 1], 15),
    "fractional weights": lambda: bins_of([0.2, 0.7], [0, 1], 15, weights=torch.tensor([0.25, 0.003])),
    "millions": lambda: bins_of([0.2, 0.7], [0, 1], 15, weights=torch.tensor([3.1e9, 2.5e6])),
}


@pytest.mark.parametrize("draw", [reliability_diagram, confidence_histogram])
def test_edge_cases_are_drawn_without_warnings(draw):
    for case, table in EDGE_CASES.items():
        ax = draw(table(), style=DARK, title="title")
        assert to_png(ax, dpi=40).startswith(b"\x89PNG")
        assert ("no data" in texts(ax)) == (case == "no data"), case


def test_reliability_diagram_draws_marks_gaps_and_counts_of_the_table():
    table, ax = mixed_bins(), reliability_diagram(mixed_bins())
    held = table.n > 0
    (marks,) = (c for c in ax.collections if len(c.get_offsets()) > 1)
    np.testing.assert_array_equal(marks.get_offsets(), torch.stack([table.confidence, table.frequency], -1)[held])
    slope = np.diff(marks.get_sizes()) / np.diff(table.share[held].numpy())
    np.testing.assert_allclose(slope, slope[0])
    assert slope[0] > 0
    assert marks.get_sizes().min() > 0
    lines = next(c for c in ax.collections if hasattr(c, "get_segments"))
    expected = [[[c, c], [c, f]] for c, f in zip(table.confidence[held], table.frequency[held], strict=True)]
    np.testing.assert_allclose(lines.get_segments(), expected)
    (strip,) = ax.child_axes
    assert [bar.get_height() for bar in strip.patches] == [1, 0, 3, 2, 4]
    np.testing.assert_allclose([bar.get_x() for bar in strip.patches], [0, 0.2, 0.4, 0.6, 0.8])
    assert texts(strip) == ["1", "3", "2", "4"]


@pytest.mark.parametrize("weight", [None, 0.01, 100.0])
def test_bins_with_few_samples_are_grey_and_hollow(weight):
    """Bins of 500, 2 and 40 samples: only the second has fewer than 30, and less than half of the mean number.

    Floating weights have any unit, and Kish's number of rows.
    """
    weights = None if weight is None else torch.full((542,), weight)
    table = bins_of([0.1] * 500 + [0.5] * 2 + [0.9] * 40, [0] * 500 + [1, 1] + [0] * 40, weights=weights)
    torch.testing.assert_close(table.effective_n[table.n > 0], torch.tensor([500.0, 2, 40]).double())
    ax = reliability_diagram(table)
    lines = next(c for c in ax.collections if hasattr(c, "get_segments"))
    (marks,) = (c for c in ax.collections if len(c.get_offsets()) > 1)
    muted, below = to_rgba(LIGHT.muted), to_rgba(LIGHT.below)
    assert [tuple(color) for color in lines.get_colors()] == [below, muted, below]
    assert [tuple(color) for color in marks.get_edgecolors()] == [below, muted, below]
    assert [tuple(color) for color in marks.get_facecolors()] == [below, to_rgba(LIGHT.paper), below]
    assert lines.get_linewidths()[1] < min(lines.get_linewidths()[0], lines.get_linewidths()[2])
    assert [box.get_alpha() for box in ax.patches] == [0.28, 0.28, 0.16], "the pale box of few samples is drawn last"
    curve = next(line for line in reliability_diagram({"a": table}).lines if line.get_label().startswith("a"))
    np.testing.assert_allclose(curve.get_xdata(), [0.1, 0.9])
    # With few samples in all bins, none is grey.
    (marks,) = (c for c in reliability_diagram(mixed_bins()).collections if len(c.get_offsets()) > 1)
    assert muted not in {tuple(color) for color in marks.get_edgecolors()}


def test_axes_name_the_probability_and_only_the_top_label_has_a_confidence():
    binary = torch.tensor([0.2, 0.9, 0.6]), torch.tensor([0, 1, 0])
    classes = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.9, 0.0]]), torch.tensor([0, 2])
    metric = tc.ECE(task="multiclass", num_classes=3)
    metric.update(*classes)
    answers = replace(quick_report("multiclass"), settings={"kind": "confidence"})
    for preds, options, words in (
        (binary, {}, "predicted probability"),
        (binary, {"mode": "top_label"}, "confidence"),
        (classes, {}, "confidence"),
        (classes, {"mode": "classwise"}, "predicted probability"),
        (classes, {"positive_classes": [1]}, "predicted probability"),
        (metric, {}, "confidence"),
        ({"a": metric, "b": classes}, {}, "confidence"),
        ({"a": metric, "b": binary}, {}, "predicted probability"),
        (mixed_bins(), {}, "predicted probability"),
        (quick_report("binary"), {}, "predicted probability"),
        (quick_report("multilabel"), {}, "predicted probability"),
        (answers, {}, "confidence"),
    ):
        assert reliability_diagram(preds, **options).get_xlabel() == f"mean {words} of the bin", options
        if not isinstance(preds, dict) and options.get("mode") != "classwise":
            assert confidence_histogram(preds, **options).get_xlabel() == words
    assert corp_diagram(*binary).get_xlabel() == "predicted probability"
    smooth = reliability_diagram(*classes, smooth=True)
    assert smooth.get_xlabel() == "confidence"


def test_histogram_draws_counts_edges_and_both_means():
    ax = confidence_histogram(bins_of([0.1, 0.3, 0.3, 0.9], [0, 0, 1, 1]))
    assert [bar.get_height() for bar in ax.patches] == [1, 2, 0, 0, 1]
    np.testing.assert_allclose([bar.get_x() for bar in ax.patches], [0, 0.2, 0.4, 0.6, 0.8])
    means = [line.get_xdata()[0] for line in ax.lines]
    np.testing.assert_allclose(means, [(0.1 + 0.3 + 0.3 + 0.9) / 4, 2 / 4])
    for case, log, expected in (
        ("nearly all in one bin", None, "log"),
        ("nearly all in one bin", False, "linear"),
        ("all in one bin", None, "linear"),
        ("all in one bin", True, "log"),
    ):
        table = EDGE_CASES[case]()
        ax = confidence_histogram(table, log=log)
        assert ax.get_yscale() == expected
        bottom, top = ax.get_ylim()
        assert bottom < table.n[table.n > 0].min() <= table.n.max() < top
