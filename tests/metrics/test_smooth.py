"""Metrics without bins: bandwidths of smooth errors, and limits of Spiegelhalter's z, the ICI and Cox's regression.

tests/contract compares every metric with a slow loop.
"""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from helpers.samples import updated
from oracles import binless as oracle

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.inputs import read_input
from torchcalib.core.sums import BinStats
from torchcalib.functional import smooth
from torchcalib.functional.smooth import (
    SmoothingAccumulator,
    occupied_cells,
    smece_from_bins,
    smece_from_cells,
    sums_of_cells,
)
from torchcalib.inference.simulation import BinCells
from torchcalib.ops.smoothing.cells import N_CELLS

F64 = torch.float64


def calibrated(n, lead=(), seed=0, scale=1.0):
    """Return probabilities, mostly below 1/2, and outcomes whose log-odds are `scale` times theirs."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(*lead, n, generator=generator, dtype=F64) - 1
    target = torch.rand(*lead, n, generator=generator, dtype=F64) < (scale * logits).sigmoid()
    return logits.sigmoid(), target.long()


# Smooth ECE


@pytest.mark.parametrize("gap", [0.003, 0.0095, 0.03])
def test_small_bandwidths_of_smece_equal_slow_loop(gap):
    """Soft targets slightly above the confidence give bandwidths at which the grids of both computations differ."""
    preds = torch.linspace(0.05, 0.9, 60, dtype=F64)
    target, ones = preds + gap, [1.0] * 60
    width = F.smece_width(preds, target, task="binary").item()
    assert width == oracle.smece_width(preds.tolist(), target.tolist(), ones)
    assert abs(width - gap) < 0.2 * gap + 1 / 1024
    value = oracle.smece(preds.tolist(), target.tolist(), ones)
    assert F.smece(preds, target, task="binary").item() == pytest.approx(value, abs=1e-13)


def test_batch_elements_and_labels_have_separate_bandwidths():
    preds = torch.linspace(0.02, 0.9, 50, dtype=F64).expand(6, 50)
    target = preds + torch.tensor([0.002, 0.004, 0.0085, 0.02, 0.05, 0.09], dtype=F64).unsqueeze(-1)
    for function in (F.smece, F.smece_width):
        each = torch.stack([function(p, y, task="binary") for p, y in zip(preds, target, strict=True)])
        assert len(each.unique()) == 6
        torch.testing.assert_close(function(preds, target, task="binary", batch_dims=1), each, rtol=0, atol=1e-15)
    torch.testing.assert_close(
        F.smece_width(preds.T, target.T, task="multilabel"), F.smece_width(preds, target, task="binary", batch_dims=1)
    )
    assert F.smece_width(preds[:, :0].T, target[:, :0].T, task="multilabel").isnan().all()
    metric = tc.SmECE(task="binary", batch_shape=(6,))
    for part in (slice(0, 20), slice(20, 50)):
        metric.update(preds[:, part], target[:, part])
    torch.testing.assert_close(metric.width(), each)
    assert metric.state[0].numel() * 8 < 1e6


@pytest.mark.parametrize("average", ["macro", None])
def test_smece_of_a_batch_does_not_depend_on_the_size_of_its_pieces(average, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(4, 50, 3, generator=generator).softmax(-1)
    target = torch.randint(0, 3, (4, 50), generator=generator)
    how = {"task": "multiclass", "mode": "classwise", "average": average, "batch_dims": 1}
    expected = F.smece(preds, target, **how, weights=torch.rand(4, 50, generator=generator))
    monkeypatch.setattr(smooth, "_CHUNK", 1)
    generator.manual_seed(0)
    again = torch.randn(4, 50, 3, generator=generator).softmax(-1)
    labels = torch.randint(0, 3, (4, 50), generator=generator)
    found = F.smece(again, labels, **how, weights=torch.rand(4, 50, generator=generator))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_smece_from_cell_means_is_close_to_the_exact_value():
    """Simulations of calibration tests have only weight, confidence and outcome of each cell."""
    preds, target = calibrated(20_000, scale=0.8)
    cells = SmoothingAccumulator("positive", True).from_predictions(read_input("binary", preds, target, {}))
    value = smece_from_cells(cells)
    assert cells.sums.shape == (6, N_CELLS)
    assert cells.noise.sum().item() == pytest.approx((preds * (1 - preds)).sum().item())
    assert smece_from_cells(BinStats(cells.sums[:3])).item() == pytest.approx(value.item(), rel=1e-4)


@pytest.mark.parametrize("bandwidth", [None, 2 / 1024, 0.0071, 5 / 1024, 0.013, 0.06, 0.4], ids=str)
def test_errors_of_simulated_cells_equal_those_of_all_cells(bandwidth):
    """The test of SmECE omits empty cells. The scales of the gaps give widths on all kinds of grids."""
    preds, target = calibrated(300, lead=(2, 1))
    preds[0, 0, :4] = torch.tensor([0, 1, 0.5, 1 / 1024])
    preds[1, 0, 50:] = preds[1, 0, 0]  # fewer cells with data than in the first batch element
    weights = torch.rand(2, 1, 300, generator=torch.Generator().manual_seed(1), dtype=F64)
    read = read_input("binary", preds, target, {"batch_dims": 2, "weights": weights})
    cells = SmoothingAccumulator("positive", True).from_predictions(read)
    # The third element has no data.
    cells = replace(cells, sums=torch.cat((cells.sums, 0 * cells.sums[:1])), noise_flag=None)
    few = BinCells.from_bins(replace(cells, sums=sums_of_cells(cells.sums, occupied_cells(cells))))
    assert few.n.shape[-1] < 300
    scales = torch.tensor([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 20], dtype=F64)[:, None, None, None]
    noise = torch.randn(9, *few.n.shape, generator=torch.Generator().manual_seed(2), dtype=F64)
    gaps = few.within_bounds(scales * noise * few.variance.sqrt()).masked_fill(few.n == 0, 0)
    full = cells.n.new_zeros(9, *cells.n.shape)
    for one in np.ndindex(3, 1):
        data = cells.n[one] > 0
        full[(..., *one, data)] = gaps[(..., *one, slice(int(data.sum())))]
    expected = smece_from_cells(BinCells.from_bins(cells).with_gaps(full), bandwidth)
    found = smece_from_bins(few.with_gaps(gaps), bandwidth)
    assert found[:, 2].isnan().all()
    if bandwidth is None:
        assert expected[:, 0].min() < 4 / 1024
        assert expected[:, 0].max() > 100 / 1024
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13, equal_nan=True)
    torch.testing.assert_close(smece_from_bins(few.with_gaps(gaps[0]), bandwidth), expected[0], equal_nan=True)


def test_smece_of_a_maximally_wrong_model_has_width_1():
    one = BinStats(torch.tensor([[1e7], [1e7], [0], [1], [1]], dtype=F64), has_noise=True)
    assert smece_from_bins(one, None).item() == pytest.approx(smece_from_bins(one, 1.0).item(), abs=1e-15)


# Spiegelhalter's z


def test_spiegelhalter_z_without_variance_is_infinite_or_nan():
    def test_of(preds, target):
        given = torch.tensor(preds), torch.tensor(target), "binary"
        return F.spiegelhalter(*given), F.spiegelhalter(*given, component="p_value")

    z, p_value = test_of([1.0, 0.0, 0.5], [0, 0, 1])
    assert (z.item(), p_value.item()) == (math.inf, 0)
    for part in test_of([1.0, 0.0, 0.5], [1, 0, 1]):
        assert part.isnan()


# Integrated calibration index (ICI)


def test_ici_of_soft_targets_with_ties_equals_slow_loop():
    generator = torch.Generator().manual_seed(0)
    preds, target = torch.rand(2, 80, generator=generator, dtype=F64)
    preds[:20] = preds[20:40]
    for degree, component in product(range(3), ("ici", "e50", "e90", "emax")):
        how = {"degree": degree, "component": component, "span": 0.4}
        expected = oracle.ici(preds.tolist(), target.tolist(), [1] * 80, **how)
        assert F.ici(preds, target, task="binary", **how).item() == pytest.approx(expected, abs=1e-9), how


def test_ici_with_ties_larger_than_the_span_equals_slow_loop():
    preds = torch.tensor([0.1] * 8 + [0.4, 0.5, 0.6, 0.9], dtype=F64)
    target = (torch.arange(12) % 3 == 0).long()
    found = F.ici(preds, target, task="binary", span=0.6, component="emax")
    # The eight samples at 0.1 are more than 60 %, so that the fit there is their mean, 3/8.
    x, y = preds.numpy(), target.numpy()
    fitted = oracle.loess(x, y, span=0.6)
    assert (fitted[:8] == 3 / 8).all()
    assert found.item() == pytest.approx(np.abs(fitted - x).max(), abs=1e-9)


def test_ici_of_pooled_points_is_close_to_the_exact_value():
    preds, target = calibrated(2500, scale=0.7)
    for component, tolerance in (("ici", 2e-5), ("e50", 2e-4), ("e90", 2e-4)):
        exact = F.ici(preds, target, task="binary", n_points=2500, component=component)
        pooled = F.ici(preds, target, task="binary", component=component)
        assert pooled.item() == pytest.approx(exact.item(), abs=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [60, 300])
def test_sketches_and_copies_are_pooled_like_samples(n, dtype):
    """Samples and copies are pooled if their number exceeds `n_points`. Values agree up to the order of sums."""
    preds, target = calibrated(n, scale=0.7)
    preds = (preds * 32).round().div(32).to(dtype)  # about 30 distinct scores, fewer than `n_points`
    for component in ("ici", "e50", "e90", "emax"):
        options = {"task": "binary", "n_points": 64, "component": component}
        expected = F.ici(preds.double(), target, **options)
        metric = updated(tc.ICI(resolution=2048, **options), (preds[:50], target[:50]), (preds[50:], target[50:]))
        torch.testing.assert_close(metric.compute(), expected, rtol=1e-10, atol=1e-12)
    pairs, counts = torch.stack((preds.double(), target.double())).unique(dim=1, return_counts=True)
    copies = F.ici(pairs[0], pairs[1].long(), weights=counts, **options)
    torch.testing.assert_close(copies, expected, rtol=1e-10, atol=1e-12)


# Cox's regression


def test_cox_without_a_maximum_is_infinite_or_nan():
    def fit(preds, target, **options):
        return F.cox(torch.tensor(preds, dtype=F64), torch.tensor(target), task="binary", **options)

    def is_undetermined(found, but=()):
        return all(value.isnan() for name, value in found._asdict().items() if name not in ("in_the_large", *but))

    for order, limit in (([0, 0, 1, 1], math.inf), ([1, 1, 0, 0], -math.inf), ([0, 1, 1, 1], math.inf)):
        separated = fit([0.2, 0.4, 0.6, 0.7], order)
        assert separated.slope.item() == limit
        assert is_undetermined(separated, ("slope",))
        assert separated.in_the_large.isfinite()
    quasi = fit([0.2, 0.5, 0.5, 0.7], [0, 0, 1, 1])  # both outcomes at the boundary
    assert quasi.slope.item() == math.inf
    equal = fit([0.3, 0.3, 0.3, 0.3], [0, 1, 0, 1])
    assert is_undetermined(equal)
    assert equal.in_the_large.item() == pytest.approx(-math.log(0.3 / 0.7), abs=1e-12)
    for label, limit in ((1, math.inf), (0, -math.inf)):
        same = fit([0.3, 0.4, 0.6], [label] * 3)
        assert is_undetermined(same)
        assert same.in_the_large.item() == limit
    certain = [0.0, 0.2, 0.4, 0.7, 1.0], [0, 1, 0, 1, 1]
    assert all(value.isnan() for value in fit(*certain))
    clipped = fit(*certain, eps=0.01)
    assert all(value.isfinite() for value in clipped)
    torch.testing.assert_close(clipped, fit([0.01, 0.2, 0.4, 0.7, 0.99], certain[1]))


@pytest.mark.parametrize(("factor", "shift"), [(300, 0), (1e4, 0), (1, 100), (300, -1e4)])
def test_cox_is_equivariant_to_affine_maps_of_the_logits(factor, shift):
    p, target = calibrated(500)
    logits = p.logit()
    near = F.cox(logits, target, task="binary", from_logits=True)
    far = F.cox(factor * logits + shift, target, task="binary", from_logits=True)
    assert (far.slope * factor).item() == pytest.approx(near.slope.item(), rel=1e-9)
    assert (far.intercept + far.slope * shift).item() == pytest.approx(near.intercept.item(), abs=1e-9)
    assert far.p_value < 1e-9
    if (factor, shift) == (300, -1e4):
        assert far.in_the_large.isnan()  # the offset is too large to be found


def test_streamed_parts_equal_those_of_the_function():
    preds, target = calibrated(100, lead=(3,), scale=0.7)
    given = {"preds": preds.T, "target": target.T, "task": "multilabel"}
    cox, z = (updated(cls(task="multilabel", num_labels=3), (preds.T, target.T)) for cls in (tc.Cox, tc.Spiegelhalter))
    torch.testing.assert_close(cox.fit(), F.cox(**given))
    tested = cox.test()
    torch.testing.assert_close(tested.p_value, F.cox(**given).p_value)
    chi2 = pytest.importorskip("scipy.stats").chi2
    assert chi2.sf(tested.statistic.numpy(), 2) == pytest.approx(tested.p_value.tolist())
    assert tested.method.startswith("likelihood ratio")
    found = z.test()
    torch.testing.assert_close(found.statistic, F.spiegelhalter(**given))
    torch.testing.assert_close(found.p_value, F.spiegelhalter(**given, component="p_value"))
    assert (found.noise_floor == math.sqrt(2 / math.pi)).all()  # E|z| of a standard normal variable
    assert found.low.isnan().all()


@pytest.mark.parametrize("mode", ["top_label", "classwise", tc.TopK(2, only=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
def test_cox_of_classes_with_probability_near_1_equals_slow_loop(dtype, mode):
    """The expected slope is fitted to log-odds that are computed from the logits by definition."""
    rows = [[40, 0, 0], [0, 1, 0], [1, 0, 2], [0, 0, 0.5], [3, 2, 0], [0, 2, 3], [0, -1, 4], [4, 0, 0.25]]
    logits, target = torch.tensor(rows).to(dtype), torch.tensor([1, 1, 2, 0, 0, 2, 1, 2])
    rest = [[row[:k] + row[k + 1 :] for k in range(3)] for row in rows]
    odds = torch.tensor(rows, dtype=F64) - torch.tensor(rest, dtype=F64).logsumexp(-1)
    ranks = torch.tensor(rows).argsort(dim=-1, descending=True, stable=True)
    claimed = torch.arange(3).expand(8, 3) if mode == "classwise" else ranks[:, :1]
    claimed = ranks[:, 1:2] if isinstance(mode, tc.TopK) else claimed
    happened = (claimed == target[:, None]).double()
    columns = zip((odds.gather(-1, claimed) / 20).T.tolist(), happened.T.tolist(), strict=True)
    expected = torch.tensor([oracle.logistic(x, y, [1.0] * 8)[1] / 20 for x, y in columns], dtype=F64)
    given = {"task": "multiclass", "mode": mode, "from_logits": True}
    slope = F.cox(logits, target, **given).slope
    torch.testing.assert_close(slope.double().reshape(-1), expected, rtol=4 * torch.finfo(slope.dtype).eps, atol=1e-9)
    for resolution in (None, 2048):
        metric = updated(tc.Cox(num_classes=3, resolution=resolution, **given), (logits, target))
        torch.testing.assert_close(metric.compute().reshape(-1), expected, rtol=1e-9, atol=1e-9)
