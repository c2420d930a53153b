"""Legends, smooth curves, logit axes and panels of classes in reliability diagrams, and diagrams of metrics."""

import re

import numpy as np
import pytest
import torch
from helpers.drawings import drawn_texts, legend_of, overlaps
from helpers.reports import miscalibrated_data
from helpers.tables import bins_of, mixed_bins, texts
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from oracles.binless import smece_at, smece_width, smooth

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.plots import DARK, LIGHT, classwise_reliability_diagrams, reliability_diagram

PROBS, TARGET = miscalibrated_data("binary")
CLASSES = miscalibrated_data("multiclass")


def updated(metric, preds=PROBS, target=TARGET):
    metric.update(preds, target)
    return metric


@pytest.mark.parametrize("style", [LIGHT, DARK])
def test_two_models_fit_into_a_figure_of_560_by_420_pixels_without_overlaps(style):
    tables = {"before": mixed_bins(), "after temperature scaling": bins_of([0.2, 0.7, 0.9], [0, 1, 1])}
    ax = reliability_diagram(tables, style=style)
    found = drawn_texts(ax)
    assert not overlaps(found)
    right = max(box.x1 for _, box in found)
    assert right <= ax.figure.bbox.x1, "the legend is inside the figure"
    assert min(box.x0 for text, box in found if "ECE" in text) > ax.get_window_extent().x1, "and beside the data"


def test_calls_that_share_an_ax_have_one_legend_one_strip_and_different_colours():
    ax = reliability_diagram(mixed_bins())
    reliability_diagram(bins_of([0.2, 0.7, 0.9], [0, 1, 1]), ax=ax)
    assert not overlaps(drawn_texts(ax))
    assert [text.splitlines()[0] for text in legend_of(ax) if "ECE" in text] == ["ECE 0.21", "model 2"]
    assert len(ax.child_axes) == 1
    curve = next(line for line in ax.lines if line.get_label().startswith("model 2"))
    assert curve.get_color() not in (LIGHT.above, LIGHT.below)


def test_legend_of_a_single_model_has_the_shade_of_its_band_and_adds_no_data():
    ax = reliability_diagram(mixed_bins())
    handles = dict(zip(legend_of(ax), ax.get_legend().legend_handles, strict=True))
    band, box = handles["95% of bins if calibrated"], ax.patches[0]
    assert (band.get_color(), band.get_alpha()) == (LIGHT.bar, box.get_alpha())
    assert not texts(ax)
    assert all(len(line.get_xdata()) == 0 for line in ax.lines if line.get_label() != "Perfectly calibrated")


@pytest.mark.parametrize("smooth", [False, True])
def test_a_model_without_data_is_only_in_the_legend(smooth):
    empty = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    ax = reliability_diagram({"a": empty, "b": (PROBS, TARGET)}, smooth=smooth)
    assert legend_of(ax)[0] == "a\nno data"
    assert not texts(ax)
    assert "no data" in texts(reliability_diagram(*empty, task="binary", smooth=smooth))


def test_legend_is_inside_axes_that_have_neighbours():
    first, second = Figure(figsize=(9, 4)).subplots(1, 2)
    reliability_diagram({"a": mixed_bins()}, ax=first)
    inner, frame = first.get_legend().get_window_extent(), first.get_window_extent()
    assert frame.x0 < inner.x0 < inner.x1 < frame.x1 < second.get_window_extent().x0


def marks_of(ax):
    return np.concatenate([c.get_offsets() for c in ax.collections if isinstance(c, PathCollection)])


def smooth_points(ax):
    """Return the points of the only smooth curve."""
    (ribbon,) = (c for c in ax.collections if isinstance(c, LineCollection) and len(c.get_linewidths()) > 20)
    segments = np.array(ribbon.get_segments())
    return np.concatenate([segments[:, 0], segments[-1:, 1]]), ribbon.get_linewidths()


def test_smooth_curve_is_the_kernel_regression_of_the_slow_loop():
    """Blasiok, Nakkiran (ICLR 2024), sec. 4: sum_i K(t, p_i) y_i / sum_i K(t, p_i), at the points of the smECE."""
    ax = reliability_diagram(PROBS, TARGET, smooth=True)
    ones = [1.0] * len(PROBS)
    width = smece_width(PROBS.tolist(), TARGET.tolist(), ones)
    at = np.linspace(0, 1, max(200, round(10 / width)))
    above, below = smooth(TARGET.tolist(), PROBS.tolist(), width), smooth(ones, PROBS.tolist(), width)
    nodes = np.linspace(0, 1, len(below))
    above, below = np.interp(at, nodes, above), np.interp(at, nodes, below)
    shown = below > 1e-3 * below.max()
    points, widths = smooth_points(ax)
    # The transform has errors of about 1e-16 of the largest density, which is at most 1000 times those shown.
    np.testing.assert_allclose(points, np.column_stack([at, above / below])[shown], atol=1e-11)
    assert np.argmax(widths) == np.argmax(below[shown][:-1]), "the curve is widest where the density is largest"
    error = smece_at(width, PROBS.tolist(), TARGET.tolist(), ones)
    assert legend_of(ax) == [f"smECE {error:.3g}\nkernel width {width:.2g}"]


def test_smooth_curve_of_metrics_equals_that_of_the_predictions():
    expected, _ = smooth_points(reliability_diagram(PROBS, TARGET, smooth=True))
    for metric in (tc.SmECE(task="binary"), tc.ACE(task="binary"), tc.KS(task="binary")):
        found, _ = smooth_points(reliability_diagram(updated(metric), smooth=True))
        np.testing.assert_allclose(found, expected, atol=1e-11)  # sums in another order
    # A sketch moves p by at most 1 / (4 * 4096). A kernel K of width h has |dK| / K = distance / h^2, and the distance
    # is at most 1 / 2. Numerator and denominator of the curve, which is at most 1, change by this fraction each.
    sketch = updated(tc.ACE(task="binary", resolution=4096))
    found, _ = smooth_points(reliability_diagram(sketch, smooth=True))
    width = F.smece_width(PROBS, TARGET, task="binary").item()
    np.testing.assert_allclose(found, expected, atol=2 * 0.5 / width**2 / (4 * 4096))


def test_logit_axis_has_plain_ticks_and_triangles_beyond_its_ends():
    n = 20_000
    table = bins_of([1e-4] * n + [0.4] * 50 + [0.999] * n, [0] * n + [1, 0] * 25 + [1] * (n - 30) + [0] * 30, 5)
    ax = reliability_diagram(table, logit=True)
    assert (ax.get_xscale(), ax.get_yscale()) == ("logit", "logit")
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert {"0.001", "0.01", "0.1", "0.5", "0.9", "0.99"} <= set(labels)
    low, high = ax.get_ylim()
    assert 0 < low < 1e-4 < 0.999 < high < 1
    lowest = min(y for _, y in marks_of(ax))
    assert lowest == low, "a frequency of 0 is at the end of the axis"
    assert not overlaps(drawn_texts(ax))


def test_panels_show_the_classes_with_the_largest_errors_first():
    errors = F.ece(*CLASSES, task="multiclass", mode="classwise", average=None)
    order = errors.argsort(descending=True).tolist()
    names = [f"name {k}" for k in range(12)]
    axes = classwise_reliability_diagrams(*CLASSES, most=4, class_names=names)
    assert [ax.get_title(loc="left") for ax in axes] == [f"name {k}: ECE {errors[k]:.3g}" for k in order[:4]]
    table = F.calibration_curve(*CLASSES, task="multiclass", mode="classwise")[order[0]]
    np.testing.assert_array_equal(marks_of(axes[0]), torch.stack([table.confidence, table.frequency], -1)[table.n > 0])
    assert len({(*ax.get_xlim(), *ax.get_ylim()) for ax in axes}) == 1
    assert not overlaps(drawn_texts(axes[0].figure.axes[0]))


def test_panels_of_a_metric_have_its_name():
    metric = updated(tc.ESCE(task="multiclass", mode="classwise", num_classes=12), *CLASSES)
    values = F.esce(*CLASSES, task="multiclass", mode="classwise", average=None)
    largest = values.abs().argmax()
    title = classwise_reliability_diagrams(metric, most=1)[0].get_title(loc="left")
    assert title == f"class {largest}: ESCE {values[largest]:.3g}".replace("-", "−")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: updated(tc.MCE(task="binary")), "MCE, positive class"),
        (lambda: updated(tc.ECE(task="multiclass", mode=tc.TopK(2)), *CLASSES), "ECE, 2 most probable classes"),
        (lambda: updated(tc.TCE(task="binary")), "TCE, positive class"),
        (lambda: updated(tc.SmECE(task="binary")), "SmECE, positive class"),
        (lambda: updated(tc.CORP(task="binary")), "CORP .*, positive class"),
        (lambda: updated(tc.AURC(task="binary")), "AURC 0"),
        (lambda: updated(tc.NLL(task="binary")), ""),
    ],
)
def test_a_metric_plots_its_own_diagram_and_given_values_as_torchmetrics(make, words):
    metric, ax = make(), Figure().subplots()
    figure, drawn = metric.plot(ax=ax)
    assert (figure, drawn) == (ax.figure, ax)
    assert re.match(words, ax.get_title(loc="left"))
    assert bool(ax.get_title(loc="left")) == bool(words)
    plain = metric.plot([torch.tensor(0.1), torch.tensor(0.2)], ax=Figure().subplots())[1]
    assert plain.lines[0].get_ydata().tolist() == pytest.approx([0.1, 0.2])


def test_a_metric_without_ax_uses_pyplot_and_classwise_metrics_return_an_array_of_axes():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = updated(tc.ECE(task="multiclass", mode="classwise", num_classes=12), *CLASSES).plot()
    assert axes.shape == (6,)
    assert pyplot.gcf() is figure
    pyplot.close(figure)
