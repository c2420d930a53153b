"""Worked examples and closed forms. The expected values are written as arithmetic expressions."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from oracles import bin_of
from torch.distributions import Categorical, Exponential, Independent, MultivariateNormal, Normal, StudentT

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.ops.segments import bin_index

F64 = torch.float64
BINARY, MULTI = {"task": "binary"}, {"task": "multiclass"}
LOG_ODDS, LOGITS = {**BINARY, "from_logits": True}, {**MULTI, "from_logits": True}

# [CE] Example of the binary calibration error: ten items, three bins
ITEMS = torch.tensor([0.61, 0.39, 0.31, 0.76, 0.22, 0.59, 0.92, 0.83, 0.57, 0.41], dtype=F64)
LABELS = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 0])
LOW = (0.31 + 0.22) / 2
MIDDLE = (0.61 + 0.39 + 0.59 + 0.57 + 0.41) / 5
HIGH = (0.76 + 0.92 + 0.83) / 3


def test_binary_example_of_the_paper_has_its_published_errors():
    gaps = [1 / 2 - LOW, 4 / 5 - MIDDLE, 2 / 3 - HIGH]
    given = {"preds": ITEMS, "target": LABELS, "task": "binary", "n_bins": 3}
    expected = (2 * abs(gaps[0]) + 5 * abs(gaps[1]) + 3 * abs(gaps[2])) / 10
    assert F.ece(**given).item() == pytest.approx(expected, abs=1e-15)
    assert expected == pytest.approx(0.241, abs=1e-12)
    assert F.esce(**given).item() == pytest.approx((2 * gaps[0] + 5 * gaps[1] + 3 * gaps[2]) / 10, abs=1e-15)
    assert F.esce(**given).item() == pytest.approx(7 / 10 - ITEMS.mean().item(), abs=1e-15)
    assert F.mce(**given).item() == pytest.approx(4 / 5 - MIDDLE, abs=1e-15)
    squares = (2 * gaps[0] ** 2 + 5 * gaps[1] ** 2 + 3 * gaps[2] ** 2) / 10
    assert F.rmsce(**given).item() == pytest.approx(math.sqrt(squares), abs=1e-15)
    noise = (2 * (1 / 2 * 1 / 2) / 1 + 5 * (4 / 5 * 1 / 5) / 4 + 3 * (2 / 3 * 1 / 3) / 2) / 10
    assert squares < noise, "the value must be clamped at 0"
    assert F.rmsce(**given, debiased=True).item() == 0
    table = F.calibration_curve(**given)
    assert table.n.tolist() == [2, 5, 3]
    assert table.gap.tolist() == pytest.approx(gaps, abs=1e-15)


def test_binary_example_of_the_paper_has_recorded_scores():
    top = F.ece(ITEMS, LABELS, task="binary", mode="top_label", n_bins=3)
    assert top.item() == pytest.approx(0.201, abs=1e-12)
    assert F.nll(ITEMS, LABELS, task="binary").item() == pytest.approx(0.7924975746213627, abs=1e-12)
    assert F.brier_score(ITEMS, LABELS, task="binary").item() == pytest.approx(0.26827, abs=1e-12)
    assert F.ecd(ITEMS, LABELS, task="binary").item() == pytest.approx(0.21187034267260557, abs=1e-12)


# [TALK] Nine samples of three classes. Only the top label matters; the other classes share the rest of the probability.
CONFIDENCE = [0.78, 0.64, 0.92, 0.58, 0.51, 0.85, 0.70, 0.63, 0.83]
TOP_LABELS = [0, 1, 1, 0, 2, 0, 2, 0, 1]
IS_CORRECT = [True, True, False, True, False, True, True, False, True]


def three_class_example():
    rows = [[c if k == top else (1 - c) / 2 for k in range(3)] for c, top in zip(CONFIDENCE, TOP_LABELS, strict=True)]
    target = [top if right else (top + 1) % 3 for top, right in zip(TOP_LABELS, IS_CORRECT, strict=True)]
    return torch.tensor(rows, dtype=F64), torch.tensor(target)


def test_three_class_example_with_five_and_fifteen_bins_has_the_closed_form_ece():
    gaps = [1 / 2 - (0.58 + 0.51) / 2, 3 / 4 - (0.78 + 0.64 + 0.70 + 0.63) / 4, 2 / 3 - (0.92 + 0.85 + 0.83) / 3]
    expected = (2 * abs(gaps[0]) + 4 * abs(gaps[1]) + 3 * abs(gaps[2])) / 9
    assert expected == pytest.approx(0.94 / 9, abs=1e-12)  # 0.104444...
    preds, target = three_class_example()
    for n_bins, value in ((5, 0.94 / 9), (15, 2.96 / 9)):
        assert F.ece(preds, target, task="multiclass", n_bins=n_bins).item() == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("dtype", "right", "n_at_six_tenths", "expected"),
    [
        (torch.float64, False, 2, 2.12 / 9),  # 0.7 is the lower end of [0.7, 0.8): bins {0.64, 0.63} and {0.70, 0.78}
        (torch.float64, True, 3, 1.58 / 9),  # 0.7 is the upper end of (0.6, 0.7]
        (torch.float32, False, 3, 1.58 / 9),  # the float32 nearest to 0.7 is below 7/10
        (torch.float32, True, 3, 1.58 / 9),
    ],
)
def test_three_class_example_with_a_confidence_at_a_bin_edge(dtype, right, n_at_six_tenths, expected):
    preds, target = three_class_example()
    given = {"preds": preds.to(dtype), "target": target, "task": "multiclass", "n_bins": 10, "right": right}
    assert F.calibration_curve(**given).n[6].item() == n_at_six_tenths
    assert F.ece(**given).item() == pytest.approx(expected, abs=1e-7)


# [ECD] Bounds and special values


def test_lower_bound_of_binary_ecd_has_the_closed_form():
    """min over p of (p - 1) log(p / (1-p)) is -W(1/e), at p = 1 / (1 + W(1/e))."""
    w = 0.2784645427610738
    assert w * math.exp(w) == pytest.approx(1 / math.e, abs=1e-15)
    p = torch.linspace(1e-6, 1 - 1e-6, 200_001, dtype=F64)
    lowest, where = F.ecd(p, torch.ones_like(p), task="binary", reduction="none").min(0)
    assert lowest.item() == pytest.approx(-w, abs=1e-10)
    assert p[where].item() == pytest.approx(1 / (1 + w), abs=1e-5)
    at_bound = F.ecd(torch.tensor([1 / (1 + w)], dtype=F64), torch.tensor([1]), task="binary")
    assert at_bound.item() == pytest.approx(-w, abs=1e-15)


@pytest.mark.parametrize(("n_classes", "p", "bound"), [
    (2, 0.782188298078562, -0.2784645427610738), (3, 0.683501061185603, -0.4630555133655489),
    (10, 0.47596314496359343, -1.1010029972769728), (100, 0.2755846102960781, -2.6286495970202823),
    (1000, 0.1844847648137121, -4.4205016039429275),
])  # fmt: skip
def test_lower_bound_of_multiclass_ecd_has_the_closed_form(n_classes, p, bound):
    row = torch.full((1, n_classes), (1 - p) / (n_classes - 1), dtype=F64)
    row[0, 0] = p
    assert F.ecd(row, torch.tensor([0]), task="multiclass").item() == pytest.approx(bound, abs=1e-9)


def test_scores_of_certain_predictions_have_the_closed_form():
    p, y = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1, 0, 0, 1])
    assert F.ecd(p, y, task="binary", reduction="none").tolist() == [0, math.inf, 0, math.inf]
    assert F.nll(p, y, task="binary", reduction="none").tolist() == [0, math.inf, 0, math.inf]
    assert F.brier_score(p, y, task="binary", reduction="none").tolist() == [0, 1, 0, 1]
    rows = torch.stack([1 - p, p], -1)
    assert F.ecd(rows, y, task="multiclass", reduction="none").tolist() == [0, math.inf, 0, math.inf]
    assert F.brier_score(rows, y, task="multiclass", reduction="none").tolist() == [0, 2, 0, 2]


@pytest.mark.parametrize("function", [F.nll, F.brier_score, F.ecd])
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_gradients_of_scores_are_finite_at_certain_predictions(function, from_logits, task):
    certain = torch.tensor([-math.inf, math.inf]) if from_logits else torch.tensor([0.0, 1.0])
    preds = certain if task == "binary" else torch.stack([-certain if from_logits else 1 - certain, certain], -1)
    for target in ([0, 1], [1, 0]):
        leaf = preds.clone().requires_grad_()
        function(leaf, torch.tensor(target), task=task, from_logits=from_logits).backward()
        assert leaf.grad.isfinite().all(), (target, leaf.grad)
    # the gradient of an infinite loss: 0 in probabilities, (q - t) / N in logits
    if function is F.nll and task == "binary":
        assert leaf.grad.tolist() == ([-0.5, 0.5] if from_logits else [0, 0])


def test_scores_of_saturated_logits_are_exact():
    """The probabilities round to 0 and 1 in every dtype, but the scores are computed from the logits."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        z, y = torch.tensor([200.0, -200.0, 200.0], dtype=dtype), torch.tensor([0, 1, 1])
        rows = torch.stack([torch.zeros_like(z), z], -1)
        for score in (partial(F.nll, reduction="none"), partial(F.ecd, reduction="none")):
            assert score(z, y, **LOG_ODDS).tolist() == pytest.approx([200, 200, 0], abs=1e-30)
            assert score(rows, y, **LOGITS).tolist() == pytest.approx([200, 200, 0])


def test_brier_score_of_a_confident_logit_has_no_cancellation():
    z, rows, y = torch.tensor([20.0]), torch.tensor([[0.0, 20.0]]), torch.tensor([1])
    expected = 1 / (1 + math.exp(20)) ** 2
    assert F.brier_score(z, y, **LOG_ODDS).item() == pytest.approx(expected, rel=1e-5)
    assert F.brier_score(rows, y, **LOGITS).item() == pytest.approx(2 * expected, rel=1e-5)


def test_infinite_logits_give_the_scores_of_probabilities_0_and_1():
    inf = math.inf
    z = torch.tensor([[inf, 0.0, 1.0], [-inf, 0.0, 0.0], [inf, inf, 5.0], [-inf, -inf, 3.0]])
    y = torch.tensor([0, 1, 1, 2])
    expected = [0, math.log(2), math.log(2), 0]
    assert F.nll(z, y, **LOGITS, reduction="none").tolist() == pytest.approx(expected, abs=1e-7)
    assert F.ece(z[:1], y[:1], **LOGITS).item() == 0


def test_class_wise_ecd_of_saturated_logits_has_the_closed_form():
    """Classes against the rest: log(1 - q_k) is the log-sum-exp of the other logits, not the log of a rounded 0."""
    z, y = torch.tensor([[100.0, 0.0, 0.0]]), torch.tensor([1])
    table = F.calibration_curve(z, y, task="multiclass", from_logits=True, mode="classwise", n_bins=1)
    log_rest = math.log(2) - 100  # log(1 - q_0): the log-sum-exp of all logits is 100 in float64
    assert table.ecd[0].item() == pytest.approx(-log_rest, rel=1e-6)
    assert table.ecd[1].item() == pytest.approx(100, rel=1e-6)
    assert table.ecd[2].item() == pytest.approx(0, abs=1e-12)


# Distributions


def test_gaussian_ecd_equals_half_of_nees_minus_the_dimension():
    """[ECD] eq. 10-11; NEES is the normalised estimation error squared."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(50, 3, 3))
    covariance = a @ a.transpose(0, 2, 1) + np.eye(3)
    mean = rng.normal(size=(50, 3))
    value = mean + 1.5 * rng.normal(size=(50, 3))
    distribution = MultivariateNormal(torch.from_numpy(mean), torch.from_numpy(covariance))
    x = torch.from_numpy(value)
    error = value - mean
    nees = np.mean([e @ np.linalg.inv(c) @ e for e, c in zip(error, covariance, strict=True)])
    assert nees == pytest.approx(3.021529881386549, abs=1e-10)  # recorded from scipy's multivariate_normal
    assert F.nees(distribution, x).item() == pytest.approx(nees, abs=1e-10)
    assert F.ecd(distribution, x).item() == pytest.approx((nees - 3) / 2, abs=1e-10)


@pytest.mark.parametrize("d", [1, 4])
def test_independent_normal_gives_the_values_of_the_diagonal_gaussian(d):
    generator = torch.Generator().manual_seed(0)
    mean, scale = torch.randn(7, d, generator=generator), torch.rand(7, d, generator=generator) + 0.5
    x = torch.randn(7, d, generator=generator)
    independent = Independent(Normal(mean, scale), 1)
    full = MultivariateNormal(mean, torch.diag_embed(scale**2))
    for function in (F.nees, F.ecd):
        torch.testing.assert_close(function(independent, x), function(full, x))
    first = Normal(mean[:, 0], scale[:, 0])
    torch.testing.assert_close(F.nees(first, x[:, 0]), ((x - mean) / scale)[:, 0].square().mean())
    single = MultivariateNormal(torch.zeros(d), torch.eye(d))  # one distribution for all values
    torch.testing.assert_close(F.nees(single, x), x.square().sum(-1).mean())
    with pytest.raises(ValueError, match="`target` must have the batch and event shape of the distribution"):
        F.nees(single, torch.zeros(7, d + 1))


def test_ecd_of_a_categorical_distribution_equals_the_multiclass_ecd():
    preds = torch.softmax(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), -1)
    target = torch.arange(9) % 4
    for given in ({}, {"weights": torch.arange(9.0)}):
        found = F.ecd(Categorical(preds), target, **given)
        torch.testing.assert_close(found, F.ecd(preds, target, **MULTI, **given))


def test_ecd_of_an_exponential_distribution_has_the_closed_form():
    """Exponential with rate 2: entropy 1 - log 2, -log p(x) = 2 x - log 2."""
    x = torch.tensor([0.5, 1.0])
    assert F.ecd(Exponential(torch.full((2,), 2.0)), x).item() == pytest.approx((1 + 2) / 2 - 1)
    assert F.ecd(StudentT(torch.tensor([3.0])), torch.tensor([0.0]), reduction="none").shape == (1,)


# Numbers that other packages compute wrongly


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("n_bins", [1, 3, 10, 15, 49, 100, 1000])
def test_bin_edges_and_their_neighbours_get_the_bin_of_the_slow_loop(dtype, right, n_bins):
    edges = (torch.arange(n_bins + 1, dtype=F64) / n_bins).to(dtype)
    values = torch.cat([edges, *(torch.nextafter(edges, edges.new_tensor(to)) for to in (2, -1))])
    values = values[(values >= 0) & (values <= 1)].double().unique().to(dtype)  # dtypes of 16 bits have few values
    expected = [bin_of(v, n_bins, right) for v in values.double().tolist()]
    assert bin_index(values, n_bins, right).tolist() == expected


def test_ece_of_70_000_float16_predictions_does_not_overflow():
    """The sum over 70,000 predictions of 0.5 exceeds 65,504, the largest float16."""
    preds, target = torch.full((70_000,), 0.5, dtype=torch.float16), torch.zeros(70_000, dtype=torch.int64)
    assert F.ece(preds, target, **BINARY).item() == 0.5


def test_ece_of_more_than_2_to_24_predictions_is_exact():
    """With predictions of 0.7 and accuracy 0.6, ECE is 0.1. Float32 counts stop at 2^24, float32 sums much earlier."""
    metric = tc.ECE(task="binary")
    piece = torch.full((5_000_000,), 0.7)
    target = (torch.arange(5_000_000) % 5 < 3).to(torch.int8)
    for _ in range(4):
        metric.update(piece, target)
    assert metric.compute().item() == pytest.approx(0.1, abs=1e-7)
    assert metric.bin_table().n.sum().item() == 20_000_000


def test_normalised_scores_of_predicted_priors_are_one():
    target = torch.tensor([0, 0, 1, 2, 2, 2])
    priors = torch.tensor([2 / 6, 1 / 6, 3 / 6], dtype=F64)
    rows = priors.expand(6, 3)
    for function in (F.nll, F.brier_score):
        assert function(rows, target, task="multiclass", normalize="prior").item() == pytest.approx(1, abs=1e-14)
    other = torch.tensor([0.5, 0.25, 0.25], dtype=F64)
    for function in (F.nll, F.brier_score):
        given = function(other.expand(6, 3), target, task="multiclass", normalize="prior", priors=other)
        assert given.item() == pytest.approx(1, abs=1e-14)
    assert F.ecd(rows, target, task="multiclass").item() == pytest.approx(0, abs=1e-14)


def test_priors_for_a_class_without_samples_give_nan_unless_they_are_0():
    preds, target = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2]], dtype=F64), torch.tensor([0, 1])
    assert F.nll(preds, target, task="multiclass", priors=[0.5, 0.25, 0.25]).isnan()
    expected = -0.5 * math.log(0.5) - 0.5 * math.log(0.6)
    assert F.nll(preds, target, task="multiclass", priors=[0.5, 0.5, 0]).item() == pytest.approx(expected)


def test_bin_of_a_confidence_at_an_edge_is_independent_of_the_batch():
    """A float32 sigmoid of this logit is above or below 0.55, depending on how its code is vectorised."""
    z = torch.full((1024,), 0.20067058503627777)
    z = torch.cat([z, z + 0.05])
    y = (torch.arange(2048) >= 1024).long()
    given = {"task": "binary", "from_logits": True, "n_bins": 20}
    whole = F.ece(z, y, **given)
    assert F.ece(torch.stack([z, z], 1)[:, 0], y, **given) == whole
    metric = tc.ECE(**given)
    for k in range(0, 2048, 5):
        metric.update(z[k : k + 5], y[k : k + 5])
    assert metric.compute().item() == pytest.approx(whole.item(), abs=1e-7)


def test_8_bit_label_156_is_not_taken_for_ignore_index_minus_100():
    rows = torch.full((3, 200), 1 / 200)
    labels = torch.tensor([156, 3, 4], dtype=torch.uint8)  # 156 is -100 as a signed 8-bit integer
    assert not F.nll(rows, labels, task="multiclass", ignore_index=-100, reduction="none").isnan().any()
