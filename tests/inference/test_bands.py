"""Consistency bands of bin tables and of the CORP curve: scipy's quantiles, scikit-learn's regression, simulation."""

import pytest
import torch
from helpers.null_distribution import F64, MOVED, calibrated, close, miscalibrated
from scipy import stats

import torchcalib as tc
import torchcalib.functional as F


def test_band_of_equal_confidences_has_the_quantiles_of_scipy():
    table = F.calibration_curve(torch.full((100,), 0.8), torch.ones(100, dtype=torch.int64), task="binary", n_bins=2)
    quantiles = stats.binom.ppf([0.025, 0.975], 100, float(torch.tensor(0.8))) / 100
    assert [float(table.band_low[1]), float(table.band_high[1])] == pytest.approx(quantiles, abs=1e-6)
    assert table.band_low[0].isnan()


@pytest.mark.parametrize("bins", ["equal_width", "equal_mass"])
def test_bands_contain_95_percent_of_frequencies_of_calibrated_models(bins):
    p, y, _ = calibrated("uniform", 1_000, 200)
    table = F.calibration_curve(p, y, task="binary", bins=bins, n_bins=10, batch_dims=1)
    inside = (table.band_low <= table.frequency) & (table.frequency <= table.band_high)
    assert 0.94 < float(inside.double().mean()) < 0.98  # 2,000 bins; above 95%, because counts are whole numbers


def test_streamed_bands_equal_functions_and_isotonic_bins_have_nan():
    p, y, _ = calibrated("uniform", 500, 1)
    metric = tc.ECE(task="binary")
    metric.update(p[0], y[0])
    plain = F.calibration_curve(p[0], y[0], task="binary")
    close(metric.bin_table().band_low, plain.band_low)
    close(metric.bin_table().band_high, plain.band_high)
    assert F.calibration_curve(p[0], y[0], task="binary", bins="pava").band_low.isnan().all()
    assert F.tce_table(p[0], y[0], task="binary").band_high.isnan().all()
    assert not F.tce_table(p[0], y[0], task="binary", bins="equal_mass").band_high.isnan().any()


def test_corp_curve_equals_isotonic_regression_of_scikit_learn():
    regression = pytest.importorskip("sklearn.isotonic").IsotonicRegression()
    p, y, _ = calibrated("beta(8,1)", 300, 1)
    curve = F.corp_curve(p[0], y[0], task="binary", n_replicates=39)
    order = p[0].argsort()
    close(curve.confidence, p[0][order])
    expected = regression.fit_transform(p[0][order].numpy(), y[0][order].numpy())
    close(curve.frequency, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_corp_bands_contain_only_curves_of_calibrated_models():
    p, y, _ = calibrated("uniform", 300, 40)
    wrong, outcomes, _ = miscalibrated("uniform", 300, 10, MOVED["temperature 1.4"])
    for preds, target, least, most in ((p, y, 0.92, 0.98), (wrong.square(), outcomes, 0, 0.5)):
        curve = F.corp_curve(preds, target, task="binary", n_replicates=99, batch_dims=1)
        inside = (curve.band_low <= curve.frequency) & (curve.frequency <= curve.band_high)
        assert (
            least < float(inside.double().mean()) < most
        )  # points of a curve are dependent: 40 curves are not 12,000 points


def test_corp_curve_of_many_samples_is_pooled_and_without_data_is_nan():
    p, y, _ = calibrated("uniform", 3_000, 2)
    many = F.corp_curve(p, y, task="binary", n_replicates=39, batch_dims=1)
    assert many.n.shape == (2, 1_024)
    assert many.n.sum(-1).tolist() == [3_000, 3_000]
    close(many[1].frequency, many.frequency[1])
    with pytest.raises(IndexError, match="must have a batch axis"):
        many[0][0]
    assert F.corp_curve(p[0, :0], y[0, :0], task="binary", n_replicates=39).frequency.isnan().all()


def test_diagrams_draw_the_curve_and_its_bands():
    plots = pytest.importorskip("torchcalib.plots")
    p, y, _ = calibrated("uniform", 200, 2)
    curve = F.corp_curve(p, y, task="binary", n_replicates=39, batch_dims=1)
    ax = plots.corp_diagram(curve[0], style=plots.DARK, title="one")
    drawn = torch.from_numpy(ax.lines[1].get_xydata())
    close(drawn, torch.stack((curve[0].confidence, curve[0].frequency), -1))
    assert len(ax.collections) == 2  # the band and the points
    with pytest.raises(ValueError, match="`preds` must have no batch axes, got curves"):
        plots.corp_diagram(curve)
    empty = F.corp_curve(p[0, :0], y[0, :0], task="binary", n_replicates=39)
    assert "no data" in [text.get_text() for text in plots.corp_diagram(empty).texts]
    table = F.calibration_curve(p[0], y[0], task="binary", n_bins=10)
    boxes = plots.reliability_diagram(table).containers[0]
    edges = [[box.get_y(), box.get_y() + box.get_height()] for box in boxes]
    close(torch.tensor(edges, dtype=F64), torch.stack((table.band_low, table.band_high), -1))
