"""What needs no bins: smECE, Spiegelhalter's z, Cox's regression, ICI; and Kuiper's range, which KS offers."""

import math

import numpy as np
import pytest
import torch
from cases import CASES, N_CLASSES, cox_part, spiegelhalter_part
from oracles import binless as oracle
from oracles.ranked import events
from scipy import stats

import torchcalib as tc
from torchcalib.binless.smece import SmoothingRecipe, smece_from_cells
from torchcalib.kernels.smoothing_cells import cell_index
from torchcalib.kernels.smoothing_grids import GRIDS, N_CELLS, steps_of
from torchcalib.predictions import read_input
from torchcalib.statistics import BinStats

F64 = torch.float64
LOOPS = {tc.SmECE: oracle.smece, tc.Spiegelhalter: oracle.spiegelhalter, tc.Cox: oracle.cox, tc.ICI: oracle.ici}
BINLESS = [case for case in CASES if case.cls in LOOPS]
OF_LOOP = ("component", "bandwidth", "eps", "span", "degree")


def calibrated(n, lead=(), seed=0, scale=1.0):
    """Probabilities, skewed to the lower half, and outcomes of `scale` times their log-odds."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(*lead, n, generator=generator, dtype=F64) - 1
    target = torch.rand(*lead, n, generator=generator, dtype=F64) < (scale * logits).sigmoid()
    return logits.sigmoid(), target.long()


def looped(case, preds, target, weights=None):
    if case.options.get("from_logits"):
        preds = preds.softmax(-1) if case.task == "multiclass" else preds.sigmoid()
    columns = events(case.task, case.options.get("reduction"), preds.tolist(), target.tolist())
    given = {name: case.options[name] for name in OF_LOOP if name in case.options}
    ones = [1.0] * len(target) if weights is None else weights.tolist()
    values = [LOOPS[case.cls](confidence, outcome, ones, **given) for confidence, outcome in columns]
    apart = case.cls in (tc.Cox, tc.Spiegelhalter) or case.options.get("average", "macro") is None
    return torch.tensor(values if apart else [sum(values) / len(values)], dtype=F64)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", BINLESS, ids=str)
def test_slow_loop_value(case, weighted):
    preds, target = case.data(n=35, seed=4)
    weights = case.weights(35) if weighted else None
    expected = looped(case, preds, target, weights)
    found = case.call(preds, target, weights=weights).reshape(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


# Smooth ECE.


@pytest.mark.parametrize("width", [*(k / 1024 for k in range(2, 13)), 0.0123, 0.049, 0.05, 0.3, 1.0])
def test_slow_loop_smece_at_a_width(width):
    preds, target = calibrated(40)
    preds[:4] = torch.tensor([0, 1, 0.5, 1 / 1024])
    found = tc.smece(preds, target, task="binary", bandwidth=width)
    expected = oracle.smece_at(width, preds.tolist(), target.tolist(), [1.0] * 40)
    assert found.item() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("gap", [0.003, 0.006, 0.0095, 0.012, 0.03])
def test_slow_loop_width_where_it_is_small(gap):
    """Soft targets a little above the confidence: widths for which the grids differ."""
    preds = torch.linspace(0.05, 0.9, 60, dtype=F64)
    target, ones = preds + gap, [1.0] * 60
    width = tc.smece_width(preds, target, task="binary").item()
    assert width == oracle.smece_width(preds.tolist(), target.tolist(), ones)
    assert abs(width - gap) < 0.2 * gap + 1 / 1024
    value = oracle.smece(preds.tolist(), target.tolist(), ones)
    assert tc.smece(preds, target, task="binary").item() == pytest.approx(value, abs=1e-13)


def test_law_series_of_very_different_widths_are_a_loop():
    preds = torch.linspace(0.02, 0.9, 50, dtype=F64).expand(6, 50)
    target = preds + torch.tensor([0.002, 0.004, 0.0085, 0.02, 0.05, 0.09], dtype=F64).unsqueeze(-1)
    widths = tc.smece_width(preds, target, task="binary")
    assert len(widths.unique()) == 6
    values = torch.stack([tc.smece(p, y, task="binary") for p, y in zip(preds, target, strict=True)])
    torch.testing.assert_close(tc.smece(preds, target, task="binary"), values, rtol=0, atol=1e-15)


def test_law_cells_are_between_the_nodes_of_all_grids():
    nodes = sorted(i / m for m in GRIDS for i in range(1, m + 1))
    assert len(nodes) == N_CELLS
    values = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=F64)
    expected = torch.searchsorted(torch.tensor(nodes, dtype=F64), values, right=True)
    assert cell_index(values).tolist() == expected.tolist()
    assert cell_index(torch.tensor([0.0, 1.0, math.nan])).tolist() == [0, N_CELLS - 1, 0]
    for k in range(2, 11):  # the nodes of every grid are among them
        assert any(m % steps_of(k / 1024) == 0 for m in GRIDS)


def test_law_smece_is_read_from_bins_alone_as_closely_as_cells_are_narrow():
    """What tests of calibration draw has weight, confidence and outcome of every cell, and no more."""
    preds, target = calibrated(20_000, scale=0.8)
    cells = SmoothingRecipe("positive_class", True).of(read_input("binary", preds, target, {}))
    value = smece_from_cells(cells)
    assert cells.sums.shape == (6, N_CELLS)
    assert cells.noise.sum().item() == pytest.approx((preds * (1 - preds)).sum().item())
    assert smece_from_cells(BinStats(cells.sums[:3])).item() == pytest.approx(value.item(), rel=1e-4)


def test_the_state_of_smece_is_below_a_megabyte_whatever_comes():
    metric = tc.SmECE(task="binary")
    assert metric.state.numel() * 8 < 1e6
    preds, target = calibrated(5000)
    for part in range(0, 5000, 1000):
        metric.update(preds[part : part + 1000], target[part : part + 1000])
    assert metric.state.numel() * 8 < 1e6
    torch.testing.assert_close(metric.compute(), tc.smece(preds, target, task="binary"), rtol=1e-12, atol=0)
    assert metric.width() == tc.smece_width(preds, target, task="binary")


def test_closed_form_smece_of_a_constant_residual():
    """Soft targets 0.1 above everywhere: the smoothed residual is 0.1 of the density, whatever the width."""
    preds = torch.linspace(0.05, 0.85, 200, dtype=F64)
    for bandwidth in (0.02, 0.3, None):
        value = tc.smece(preds, preds + 0.1, task="binary", bandwidth=bandwidth)
        assert value.item() == pytest.approx(0.1, abs=1e-6)


def test_widths_of_classes_are_kept_apart():
    preds, target = calibrated(60, lead=(N_CLASSES,))
    widths = tc.smece_width(preds.T, target.T, task="multilabel")
    assert widths.tolist() == [tc.smece_width(p, y, task="binary").item() for p, y in zip(preds, target, strict=True)]
    assert tc.smece_width(preds[:, :0].T, target[:, :0].T, task="multilabel").isnan().all()


# Spiegelhalter.


def test_law_z_of_calibrated_predictions_is_standard_normal():
    """2,000 data sets: the Kolmogorov-Smirnov test of the p-values, which are uniform."""
    preds, target = calibrated(500, lead=(2000,), seed=1)
    z, p_value = tc.spiegelhalter(preds, target, task="binary")
    assert stats.kstest(z.numpy(), "norm").pvalue > 0.01
    assert stats.kstest(p_value.numpy(), "uniform").pvalue > 0.01


def test_closed_form_z_of_over_confidence_is_positive_and_of_timidity_negative():
    for scale, sign in ((0.5, 1), (2.0, -1)):
        z, p_value = tc.spiegelhalter(*calibrated(2000, scale=scale), task="binary")
        assert sign * z > 4
        assert p_value < 1e-4


def test_closed_form_z_where_nothing_can_vary():
    def test_of(preds, target):
        return tc.spiegelhalter(torch.tensor(preds), torch.tensor(target), task="binary")

    z, p_value = test_of([1.0, 0.0, 0.5], [0, 0, 1])
    assert (z.item(), p_value.item()) == (math.inf, 0)
    for part in test_of([1.0, 0.0, 0.5], [1, 0, 1]):
        assert part.isnan()


def test_parts_of_the_test_are_those_of_the_stream():
    preds, target = calibrated(100, lead=(3,))
    metric = tc.Spiegelhalter(task="multilabel", num_labels=3)
    metric.update(preds.T, target.T)
    for found, expected in zip(metric.test(), tc.spiegelhalter(preds.T, target.T, task="multilabel"), strict=True):
        torch.testing.assert_close(found, expected)


# Cox.


@pytest.mark.parametrize("component", tc.CoxCalibration._fields)
@pytest.mark.parametrize("seed", range(3))
def test_slow_loop_every_part_of_cox(component, seed):
    preds, target = calibrated(50, seed=seed, scale=0.6)
    weights = torch.arange(50) % 3
    expected = oracle.cox(preds.tolist(), target.tolist(), weights.tolist(), component)
    value = cox_part(preds, target, task="binary", component=component, weights=weights)
    assert value.item() == pytest.approx(expected, rel=1e-10)


def test_closed_form_cox_of_two_predictions():
    """Two values of p make the model saturated: the line goes through the log-odds of both frequencies."""
    low, high, n = (0.2, 3), (0.7, 12), 20  # prediction, ones of n
    preds = torch.tensor([low[0]] * n + [high[0]] * n, dtype=F64)
    target = torch.cat([(torch.arange(n) < ones).long() for _, ones in (low, high)])
    (x0, f0), (x1, f1) = ((np.log(p / (1 - p)), ones / n) for p, ones in (low, high))
    slope = (np.log(f1 / (1 - f1)) - np.log(f0 / (1 - f0))) / (x1 - x0)
    variance = (1 / (n * f0 * (1 - f0)) + 1 / (n * f1 * (1 - f1))) / (x1 - x0) ** 2
    fit = tc.cox(preds, target, task="binary")
    assert fit.slope.item() == pytest.approx(slope, rel=1e-12)
    assert fit.intercept.item() == pytest.approx(np.log(f0 / (1 - f0)) - slope * x0, rel=1e-12)
    assert fit.slope_se.item() == pytest.approx(math.sqrt(variance), rel=1e-12)


def test_closed_form_cox_without_a_maximum():
    def fit(preds, target, **options):
        return tc.cox(torch.tensor(preds, dtype=F64), torch.tensor(target), task="binary", **options)

    def undetermined(found, but=()):
        return all(value.isnan() for name, value in found._asdict().items() if name not in ("in_the_large", *but))

    for order, limit in (([0, 0, 1, 1], math.inf), ([1, 1, 0, 0], -math.inf), ([0, 1, 1, 1], math.inf)):
        separated = fit([0.2, 0.4, 0.6, 0.7], order)
        assert separated.slope.item() == limit
        assert undetermined(separated, ("slope",))
        assert separated.in_the_large.isfinite()
    quasi = fit([0.2, 0.5, 0.5, 0.7], [0, 0, 1, 1])  # both outcomes at the border
    assert quasi.slope.item() == math.inf
    equal = fit([0.3, 0.3, 0.3, 0.3], [0, 1, 0, 1])
    assert undetermined(equal)
    assert equal.in_the_large.item() == pytest.approx(-math.log(0.3 / 0.7), abs=1e-12)
    for label, limit in ((1, math.inf), (0, -math.inf)):
        same = fit([0.3, 0.4, 0.6], [label] * 3)
        assert undetermined(same)
        assert same.in_the_large.item() == limit
    certain = [0.0, 0.2, 0.4, 0.7, 1.0], [0, 1, 0, 1, 1]
    assert all(value.isnan() for value in fit(*certain))
    clipped = fit(*certain, eps=0.01)
    assert all(value.isfinite() for value in clipped)
    torch.testing.assert_close(clipped, fit([0.01, 0.2, 0.4, 0.7, 0.99], certain[1]))


def test_logits_beyond_what_probabilities_hold_are_taken_as_they_are():
    logits, target = torch.tensor([-60.0, -50, 55, 70, 45, -40], dtype=F64), torch.tensor([0, 1, 1, 1, 0, 0])
    a, b, _ = oracle.logistic((logits / 50).tolist(), target.tolist(), [1.0] * 6)
    fit = tc.cox(logits, target, task="binary", from_logits=True)
    assert fit.slope.item() == pytest.approx(b / 50, rel=1e-10)
    assert fit.intercept.item() == pytest.approx(a, rel=1e-10)


@pytest.mark.parametrize(("factor", "shift"), [(300, 0), (1e4, 0), (1, 100), (300, -1e4)])
def test_law_cox_knows_neither_the_unit_nor_the_origin_of_logits(factor, shift):
    p, target = calibrated(500)
    logits = p.logit()
    near = tc.cox(logits, target, task="binary", from_logits=True)
    far = tc.cox(factor * logits + shift, target, task="binary", from_logits=True)
    assert (far.slope * factor).item() == pytest.approx(near.slope.item(), rel=1e-9)
    assert (far.intercept + far.slope * shift).item() == pytest.approx(near.intercept.item(), abs=1e-9)
    assert far.p_value < 1e-9


def test_an_offset_that_is_not_found_is_no_number():
    p, target = calibrated(500)
    far = tc.cox(p.logit() + 1e4, target, task="binary", from_logits=True)
    assert far.in_the_large.isnan()


def test_law_p_values_of_cox_are_uniform_for_calibrated_predictions():
    """The test is asymptotic: over 1,000 samples, 1,000 times."""
    preds, target = calibrated(1000, lead=(1000,), seed=2)
    fit = tc.cox(preds, target, task="binary")
    assert stats.kstest(fit.p_value.numpy(), "uniform").pvalue > 0.01
    inside = ((fit.slope - 1).abs() < 1.96 * fit.slope_se).double().mean().item()
    assert inside == pytest.approx(0.95, abs=3 * math.sqrt(0.05 * 0.95 / 1000))


def test_law_the_gradient_of_cox_is_that_of_its_optimum():
    preds, target = calibrated(30, scale=0.7)
    for component in ("slope", "intercept", "in_the_large"):
        leaf = preds.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda p, c=component: cox_part(p, target, task="binary", component=c), leaf)


def test_parts_of_cox_are_those_of_the_stream_and_of_a_sketch_nearly():
    preds, target = calibrated(3000, scale=0.7)
    expected = tc.cox(preds, target, task="binary")
    for options, tolerance in (({}, 1e-10), ({"resolution": 512}, 1e-3)):
        metric = tc.Cox(task="binary", **options)
        metric.update(preds[:1000], target[:1000])
        metric.update(preds[1000:], target[1000:])
        for found, value in zip(metric.fit(), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)


# ICI.


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_closed_form_ici_of_a_polynomial(degree):
    """Soft targets on a polynomial of p: a local polynomial of that degree meets it everywhere."""
    preds = torch.rand(80, generator=torch.Generator().manual_seed(0), dtype=F64)
    curve = 0.3 + (0.2 * preds if degree else 0) + (0.4 * preds.square() if degree == 2 else 0)
    distance = (preds - curve).abs()
    target = torch.as_tensor(curve, dtype=F64).expand(80)
    for component, value in (("ici", distance.mean()), ("emax", distance.max()), ("e50", distance.quantile(0.5))):
        found = tc.ici(preds, target, task="binary", degree=degree, component=component, span=0.4)
        assert found.item() == pytest.approx(value.item(), abs=1e-9)


def test_closed_form_ici_of_one_prediction_is_its_gap():
    preds, target = torch.full((10,), 0.3, dtype=F64), (torch.arange(10) < 5).long()
    for component in ("ici", "e50", "e90", "emax"):
        found = tc.ici(preds, target, task="binary", component=component)
        assert found.item() == pytest.approx(0.2, abs=1e-12)


def test_slow_loop_ici_with_ties_that_fill_neighbourhoods():
    preds = torch.tensor([0.1] * 8 + [0.4, 0.5, 0.6, 0.9], dtype=F64)
    target = (torch.arange(12) % 3 == 0).long()
    found = tc.ici(preds, target, task="binary", span=0.6, component="emax")
    # Eight at 0.1 are more than 60 %: they have their mean, 3/8. Elsewhere the fit is determined.
    x, y = preds.numpy(), target.numpy()
    fitted = oracle.loess(x, y, span=0.6)
    assert (fitted[:8] == 3 / 8).all()
    assert found.item() == pytest.approx(np.abs(fitted - x).max(), abs=1e-9)


def test_law_pooled_points_change_little():
    preds, target = calibrated(6000, scale=0.7)
    for component, tolerance in (("ici", 2e-5), ("e50", 2e-4), ("e90", 2e-4)):
        exact = tc.ici(preds, target, task="binary", n_points=6000, component=component)
        pooled = tc.ici(preds, target, task="binary", component=component)
        assert pooled.item() == pytest.approx(exact.item(), abs=tolerance)


# Kuiper.


def test_slow_loop_kuiper():
    preds, target = calibrated(50, seed=3)
    order = preds.argsort()
    drift = np.concatenate(([0], np.cumsum((target - preds)[order].numpy()) / 50))
    assert tc.ks(preds, target, task="binary", norm="range").item() == pytest.approx(np.ptp(drift), abs=1e-14)
    up = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=F64)
    value = tc.ks(up, torch.tensor([1, 1, 0, 0]), task="binary", norm="range")  # up by 1.4, and down to where it began
    assert value.item() == pytest.approx(1.4 / 4, abs=1e-15)


# Arguments.


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (tc.smece, {"bandwidth": 0.001}, "`bandwidth` must be from 0.00195312 to 1, got 0.001"),
        (tc.smece, {"bandwidth": "wide"}, "`bandwidth` must be a number or None, got 'wide'"),
        (tc.cox, {"eps": 0.5}, "`eps` must be above 0 and below 0.5, got 0.5"),
        (tc.cox, {"eps": True}, "`eps` must be a number or None, got True"),
        (tc.ici, {"span": 0}, "`span` must be above 0 and at most 1, got 0"),
        (tc.ici, {"span": None}, "`span` must be a number, got None"),
        (tc.ici, {"degree": 3}, "`degree` must be at most 2, got 3"),
        (tc.ici, {"n_points": 1}, "`n_points` must be at least 2, got 1"),
        (tc.ici, {"component": "mean"}, "`component` must be one of 'ici', 'e50', 'e90', 'emax', got 'mean'"),
        (tc.ks, {"norm": "l2"}, "`norm` must be one of 'max', 'range', got 'l2'"),
    ],
)
def test_bad_arguments_are_named(function, options, message):
    classes = {tc.smece: tc.SmECE, tc.cox: tc.Cox, tc.ici: tc.ICI, tc.ks: tc.KS}
    preds, target = calibrated(5)
    for call in (
        lambda: function(preds, target, task="binary", **options),
        lambda: classes[function](task="binary", **options),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert message in str(raised.value)


@pytest.mark.parametrize(
    "function", [tc.smece, tc.smece_width, tc.spiegelhalter, tc.cox, tc.ici, tc.SmECE, tc.Spiegelhalter, tc.Cox, tc.ICI]
)
def test_a_task_that_there_is_not_is_named(function):
    given = () if isinstance(function, type) else calibrated(5)
    with pytest.raises(ValueError, match="`task` must be one of 'binary', 'multiclass', 'multilabel', got 'bin'"):
        function(*given, task="bin")


@pytest.mark.parametrize("cls", [tc.Cox, tc.Spiegelhalter])
def test_parts_that_there_are_not_are_refused(cls):
    with pytest.raises(ValueError, match="`component` must be one of"):
        cls(task="binary", component="none")


def test_tests_take_labels_only():
    preds, _ = calibrated(5)
    for function in (spiegelhalter_part, cox_part):
        with pytest.raises(TypeError, match="`target` must be integer labels where labels are counted"):
            function(preds, preds, task="binary")
