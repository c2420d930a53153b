"""Diagrams of predictions, metrics and reports equal those of their tables, and several models share one `ax`."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from cases import z_test
from helpers.drawings import legend_of
from helpers.reports import full_report, miscalibrated_data, quick_report
from matplotlib.figure import Figure

import torchcalib as tc
import torchcalib.functional as F
from torchcalib import plots
from torchcalib.plots import to_svg

PROBS, TARGET = miscalibrated_data("binary")
BINARY = {"task": "binary"}
TABLE, TESTED, ISOTONIC, RISK = (
    function(PROBS, TARGET, **BINARY)
    for function in (F.calibration_curve, F.tce_table, F.corp_curve, F.risk_coverage_curve)
)


def metric_of(kind):
    metric = kind(task="binary")
    metric.update(PROBS, TARGET)
    return metric


smooth = partial(plots.reliability_diagram, smooth=True)

EQUAL = {
    "arrays": (plots.reliability_diagram, (PROBS.numpy(), TARGET.tolist()), TABLE),
    "columns": (plots.reliability_diagram, (PROBS[:, None], TARGET), TABLE),
    "maps": (plots.reliability_diagram, (PROBS.reshape(4, 10, 10), TARGET.reshape(4, 10, 10)), TABLE),
    "a metric": (plots.reliability_diagram, (metric_of(tc.ECE),), TABLE),
    "histogram": (plots.confidence_histogram, (PROBS, TARGET), TABLE),
    "histogram of a metric": (plots.confidence_histogram, (metric_of(tc.ECE),), TABLE),
    "tested": (plots.tce_diagram, (PROBS, TARGET), TESTED),
    "tested by a function": (
        partial(plots.tce_diagram, test=z_test, alpha=0.3),
        (PROBS, TARGET),
        F.tce_table(PROBS, TARGET, **BINARY, test=z_test, alpha=0.3),
    ),
    "tested metric": (plots.tce_diagram, (metric_of(tc.TCE),), TESTED),
    "tested report": (plots.tce_diagram, (quick_report("binary"),), quick_report("binary").tests["positive"]),
    "curve": (plots.corp_diagram, (PROBS, TARGET), ISOTONIC),
    "risk": (plots.risk_coverage_curve, (PROBS.numpy(), TARGET.tolist()), RISK),
    "risk of a metric": (plots.risk_coverage_curve, (metric_of(tc.AURC),), RISK),
    "curve of a metric": (plots.corp_diagram, (metric_of(tc.CORP),), ISOTONIC),
}


@pytest.mark.parametrize("case", EQUAL)
def test_diagram_of_every_source_equals_that_of_the_table(case):
    draw, given, table = EQUAL[case]
    if case == "maps":
        with pytest.raises(ValueError, match="or task='binary' if every entry is the probability of its own event"):
            draw(*given)
    options = BINARY if case == "maps" else {}
    # A metric sums float64 values in another order, which moves no coordinate visibly.
    digits = r"\d+\.\d+"
    found, expected = to_svg(draw(*given, **options)), to_svg(draw(table))
    numbers = [np.array(re.findall(digits, svg), float) for svg in (found, expected)]
    np.testing.assert_allclose(*numbers, atol=1e-3)


def test_predictions_that_require_a_gradient_give_the_same_diagram():
    draws = {
        plots.reliability_diagram: (PROBS, TARGET),
        smooth: (PROBS, TARGET),
        plots.confidence_histogram: (PROBS, TARGET),
        plots.tce_diagram: (PROBS, TARGET),
        plots.corp_diagram: (PROBS, TARGET),
        plots.risk_coverage_curve: (PROBS, TARGET),
        plots.bayes_risk_diagram: (PROBS, TARGET),
        plots.classwise_reliability_diagrams: miscalibrated_data("multiclass"),
    }
    torch.set_warn_always(True)  # by default, torch warns only once about the conversion to numbers
    try:
        for draw, (preds, target) in draws.items():
            options = {"weights": torch.ones(len(target)).requires_grad_()} if preds is PROBS else {"most": 1}
            plain, found = (np.ravel(draw(p, target, **options))[0] for p in (preds, preds.clone().requires_grad_()))
            assert to_svg(plain.figure) == to_svg(found.figure)
        leaf = PROBS.clone().requires_grad_()
        assert legend_of(plots.reliability_diagram(F.calibration_curve(leaf, TARGET, **BINARY))) == legend_of(
            plots.reliability_diagram(TABLE)
        )
    finally:
        torch.set_warn_always(False)


def test_legend_contains_the_ece_and_the_interval_and_noise_floor_of_a_report():
    assert legend_of(plots.reliability_diagram(TABLE))[0] == f"ECE {F.ece(PROBS, TARGET, **BINARY).item():.3g}"
    report = full_report("binary")
    line = report.main_line
    for drawn in (report.plot(), plots.reliability_diagram(report)):
        assert legend_of(drawn)[0].splitlines() == [
            f"ECE {line.value:.3g}",
            f"95%: {line.interval.low:.3g} to {line.interval.high:.3g}",
            f"expected if calibrated: {line.noise_floor:.2g}",
        ]
    top = report.plot(mode="top_label", title="top")
    assert legend_of(top)[0].startswith(f"ECE {report['ece/top_label']:.3g}\n")
    labels = quick_report("multilabel")
    assert legend_of(labels.plot())[0].startswith(f"mean ECE of labels {labels['ece']:.3g}\nexpected if calibrated: ")


def points_of(table):
    """Return the points of all bins except those with few samples: below 30 and below half of the mean number."""
    held = (table.n >= 30) | (table.n >= table.n.mean() / 2)
    return torch.stack([table.confidence, table.frequency], -1)[held & (table.n > 0)]


def curves(ax):
    """Return the points of every curve by its legend entry."""
    handles, names = ax.get_legend().legend_handles, [text.get_text() for text in ax.get_legend().get_texts()]
    drawn = {line.get_label(): line for line in ax.lines}
    assert len({handle.get_marker() for handle in handles}) == len(handles), "marks distinguish models without colours"
    assert [handle.get_color() for handle in handles] == [drawn[name].get_color() for name in names]
    return {name: drawn[name].get_xydata() for name in names}


def test_every_model_on_one_ax_has_a_curve_and_a_legend_entry():
    models = {"first": PROBS, "$second_1": PROBS.square()}
    at_once = plots.reliability_diagram(models, TARGET)
    ax = Figure().subplots()
    for name, probs in models.items():
        plots.reliability_diagram(probs, TARGET, ax, label=name)
    found = curves(ax)
    assert len([line for line in ax.lines if line.get_label() == "Perfectly calibrated"]) == 1
    assert len({line.get_color() for line in ax.lines}) == 3
    for (name, points), (other, same), (model, probs) in zip(
        found.items(), curves(at_once).items(), models.items(), strict=True
    ):
        table = F.calibration_curve(probs, TARGET, **BINARY)
        assert name == other == f"{model}\nECE {F.ece(probs, TARGET, **BINARY).item():.3g}"
        np.testing.assert_array_equal(points, points_of(table))
        np.testing.assert_array_equal(points, same)
    label = f"ECE {F.ece(PROBS, TARGET, **BINARY).item():.3g}"
    sources = {"table": TABLE, "metric": metric_of(tc.ECE), "report": quick_report("binary"), "pair": (PROBS, TARGET)}
    mixed = curves(plots.reliability_diagram(sources))
    assert [name.splitlines()[0] for name in mixed] == ["table", "metric", "report", "pair"]
    np.testing.assert_array_equal(mixed["pair\n" + label], mixed["table\n" + label])


def test_risk_coverage_curves_have_the_points_and_the_names_of_models_and_labels():
    ax = plots.risk_coverage_curve({"first": PROBS, "$second_1": PROBS.square()}, TARGET)
    plots.risk_coverage_curve(PROBS, TARGET, ax, label="third")
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), torch.stack((RISK.coverage, RISK.risk), -1))
    assert legend_of(ax) == ["first", "$second_1", "third"]
    assert len({line.get_color() for line in ax.lines}) == 3
    names = ["a", "b", "c"]
    labels = plots.risk_coverage_curve(*miscalibrated_data("multilabel"), task="multilabel", class_names=names)
    assert legend_of(labels) == names


def test_every_class_has_a_curve_with_its_name():
    probs, target = miscalibrated_data("multiclass")
    probs, target = probs[:, :4] / probs[:, :4].sum(-1, keepdim=True), target % 4
    options = {"mode": "classwise", "n_bins": 6}
    ax = plots.reliability_diagram(probs, target, class_names=["a", "b", "c", "d"], **options)
    tables = F.calibration_curve(probs, target, task="multiclass", **options)
    for k, (name, points) in enumerate(curves(ax).items()):
        assert name.startswith("abcd"[k])
        np.testing.assert_array_equal(points, points_of(tables[k]))
    unnamed = plots.reliability_diagram(probs.reshape(4, 100, 4), target.reshape(4, 100), **options)
    assert [name.splitlines()[0] for name in curves(unnamed)] == ["class 0", "class 1", "class 2", "class 3"]


def test_diagrams_of_metrics_per_image():
    """Bins have the voxels of all images, and errors are those of `compute`, for the chosen classes."""
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(4, 3, 6, 5, generator=generator).softmax(1)
    target = torch.randint(0, 3, (4, 6, 5), generator=generator)
    images = tc.Images(classes=["liver", 0], class_names=["background", "organ", "liver"])
    metric = tc.ECE(num_classes=3, mode="classwise", average=None, per_image=images)
    metric.update(preds, target)
    titles = {panel.get_title(loc="left") for panel in metric.plot()[1]}
    expected = zip(("liver", "background"), metric.compute().tolist(), strict=True)
    assert titles == {f"{name}: ECE {value:.3g}" for name, value in expected}
    pooled = F.calibration_curve(preds, target, mode="classwise", class_axis=1)
    torch.testing.assert_close(metric.bin_table().n, pooled.n[[2, 0]])
    top = tc.ECE(num_classes=3, per_image=True)
    top.update(preds, target)
    assert f"ECE {float(top.compute()):.3g}" in " ".join(legend_of(top.plot()[1]))
