"""Risk-coverage diagrams: the points are those of the curve, for each source."""

import numpy as np
import pytest
import torch
from helpers.reports import miscalibrated_data, quick_report

import torchcalib as tc
import torchcalib.functional as F
from torchcalib import plots

PROBS, TARGET = miscalibrated_data("binary")


def test_every_source_draws_the_points_of_the_curve():
    curve = F.risk_coverage_curve(PROBS, TARGET, task="binary")
    metric = tc.AURC(task="binary")
    metric.update(PROBS, TARGET)
    expected = torch.stack((curve.coverage, curve.risk), -1).numpy()
    for given in ((PROBS, TARGET), (PROBS.numpy(), TARGET.tolist()), (curve,), (metric,)):
        (line,) = plots.risk_coverage_curve(*given).lines
        np.testing.assert_allclose(line.get_xydata(), expected, rtol=1e-12)


def test_models_and_labels_have_legend_entries():
    ax = plots.risk_coverage_curve({"first": PROBS, "$second_1": PROBS.square()}, TARGET)
    plots.risk_coverage_curve(PROBS, TARGET, ax, label="third")
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["first", "$second_1", "third"]
    assert len({line.get_color() for line in ax.lines}) == 3
    labels = plots.risk_coverage_curve(
        *miscalibrated_data("multilabel"), task="multilabel", class_names=["a", "b", "c"]
    )
    assert [text.get_text() for text in labels.get_legend().get_texts()] == ["a", "b", "c"]


def test_wrong_sources_raise_errors():
    with pytest.raises(TypeError, match="`target` must be given"):
        plots.risk_coverage_curve(PROBS)
    with pytest.raises(ValueError, match="at least one model"):
        plots.risk_coverage_curve({})
    with pytest.raises(TypeError, match="got a report"):
        plots.risk_coverage_curve(quick_report("binary"))
    with pytest.raises(ValueError, match="at most 10 curves"):
        plots.risk_coverage_curve({str(k): PROBS for k in range(11)}, TARGET)
