"""The papers' generators: the recorded samples themselves, and what their populations must be like."""

import math
from functools import partial

import pytest
import torch

import torchcalib as tc
from torchcalib import simulate

F64 = torch.float64
DISCRIMINANT_CASES = [("50-50", 0.5, 0.5), ("50-40", 0.5, 0.4), ("50-60", 0.5, 0.6),
                      ("01-01", 0.01, 0.01), ("01-00", 0.01, 0.0), ("01-02", 0.01, 0.02)]  # fmt: skip


@pytest.mark.parametrize(("sigma", "name"), [(0, "0"), (0.5, "0p5"), (2, "2")])
def test_recorded_noisy_evidence(recorded, sigma, name):
    arrays = recorded("sim_ecd.npz")
    preds, target = simulate.noisy_evidence(sigma)
    torch.testing.assert_close(preds, arrays[f"p_{name}"], rtol=1e-12, atol=1e-15)
    assert torch.equal(target, arrays[f"y_{name}"].long())


@pytest.mark.parametrize("k", [2, 10])
def test_recorded_mismatched_systems(recorded, k):
    arrays = recorded(f"sim_ferrer_k{k}.npz")
    systems = simulate.mismatched_systems(k)
    assert torch.equal(systems.target, arrays["targets"].long())
    for name in ("cal", "mcp", "mcs", "mcps"):
        torch.testing.assert_close(getattr(systems, name), arrays[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "system", "settings"),
    [("cal", "cal", {}), ("mcs-o", "mcs", {"scale": 2.0}), ("mcs-u", "mcs", {"scale": 0.48}),
     ("cal-h", "cal", {"variance": 0.19})],
)  # fmt: skip
def test_recorded_scores_of_section_3_1(expected, name, system, settings):
    """The recorded scores were computed in float32."""
    answer = next(e["value"] for e in expected if e["case"] == f"ferrer/synthetic/sec3.1|{name}")
    systems = simulate.mismatched_systems(2, 100_000, prior=0.6, **settings)
    given = {"task": "multiclass", "from_logits": True, "normalize": "prior"}
    log_q = getattr(systems, system)
    assert tc.nll(log_q, systems.target, **given).item() == pytest.approx(answer["nce"], abs=1e-6)
    assert tc.brier_score(log_q, systems.target, **given).item() == pytest.approx(answer["nbs"], abs=1e-6)


@pytest.mark.parametrize(("name", "train", "test"), DISCRIMINANT_CASES)
def test_recorded_gaussian_discriminant(recorded, name, train, test):
    """The recorded fit stopped at a tolerance of 1e-10."""
    arrays = recorded("sim_gda.npz")
    sample = simulate.gaussian_discriminant(train, test)
    assert torch.equal(sample.target, arrays[f"y_{name}"].long())
    torch.testing.assert_close(sample.preds, arrays[f"p_{name}"], rtol=0, atol=2e-9)


def test_seeds_reproduce_and_differ_on_any_device():
    fit = partial(simulate.gaussian_discriminant, 0.5, 0.5, n_train=50, n_test=9)
    draws = [
        lambda **options: simulate.noisy_evidence(1.0, 50, **options),
        lambda **options: vars(simulate.mismatched_systems(3, 50, **options)).values(),
        lambda **options: list(vars(fit(**options)).values())[:6],
    ]
    for draw in draws:
        assert all(torch.equal(a, b) for a, b in zip(draw(seed=3), draw(seed=3), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(draw(seed=3), draw(seed=4), strict=True))
        # The meta device holds no numbers, and takes what is moved to it.
        assert {tensor.device.type for tensor in draw(device="meta")} == {"meta"}


def test_shapes_and_truncated_counts():
    systems = simulate.mismatched_systems(10, 2_000)
    assert systems.target.bincount().tolist() == [1600] + [44] * 9
    assert systems.cal.shape == systems.mcps.shape == (1996, 10)
    torch.testing.assert_close(systems.mcs.exp().sum(-1), torch.ones(1996, dtype=F64))
    sample = simulate.gaussian_discriminant(0.3, 0.0, n_train=200, n_test=30)
    assert (len(sample.features), len(sample.train_features), sample.target.sum()) == (30, 200, 0)
    assert sample.posterior.max() == 0


def test_law_true_posteriors_are_calibrated_and_the_others_are_not():
    systems = simulate.mismatched_systems(3, 100_000)
    given = {"target": systems.target, "task": "multiclass", "from_logits": True}
    best = tc.nll(systems.cal, **given)
    assert tc.ece(systems.cal, **given) < 0.005
    assert abs(tc.ecd(systems.cal, **given)) < 0.005
    for worse in (systems.mcp, systems.mcs, systems.mcps):
        assert tc.nll(worse, **given) > 1.1 * best
        assert tc.ece(worse, **given) > 0.02
    assert tc.ecd(systems.mcs, **given) > 0.05
    preds, target = simulate.noisy_evidence(0, 100_000)
    assert tc.ece(preds, target, task="binary") < 0.01
    sample = simulate.gaussian_discriminant(0.5, 0.2, n_test=100_000)
    assert tc.ece(sample.posterior, sample.target, task="binary") < 0.01
    assert tc.ece(sample.preds, sample.target, task="binary") > 0.2


def test_logistic_fit_is_a_minimum():
    for ridge in (0.0, 1.0, 50.0):
        sample = simulate.gaussian_discriminant(0.2, 0.2, n_train=400, n_test=1, ridge=ridge)
        w = torch.tensor([sample.slope, sample.intercept], dtype=F64, requires_grad=True)
        z = w[0] * sample.train_features + w[1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(z, sample.train_target.double(), reduction="sum")
        (loss + ridge / 2 * w[0] ** 2).backward()
        assert w.grad.abs().max() < 1e-9


def test_wrong_parameters():
    calls = [
        (lambda: simulate.noisy_evidence(-1.0), ValueError, "`sigma`"),
        (lambda: simulate.noisy_evidence("2"), TypeError, "`sigma`"),
        (lambda: simulate.noisy_evidence(1.0, 0), ValueError, "`n`"),
        (lambda: simulate.mismatched_systems(1), ValueError, "`num_classes`"),
        (lambda: simulate.mismatched_systems(2, 2.5), TypeError, "`n`"),
        (lambda: simulate.mismatched_systems(2, variance=0.0), ValueError, "`variance`"),
        (lambda: simulate.mismatched_systems(2, scale=-1.0), ValueError, "`scale`"),
        (lambda: simulate.mismatched_systems(2, prior=1.0), ValueError, "`prior`"),
        (lambda: simulate.mismatched_systems(2, assumed_prior=0), ValueError, "`assumed_prior`"),
        (lambda: simulate.gaussian_discriminant(0.5, 0.5, mean=math.nan), ValueError, "`mean`"),
        (lambda: simulate.gaussian_discriminant(0.0, 0.5), ValueError, "`train_share`"),
        (lambda: simulate.gaussian_discriminant(0.5, 1.5), ValueError, "`test_share`"),
        (lambda: simulate.gaussian_discriminant(0.001, 0.5, n_train=5), ValueError, "both classes"),
        (lambda: simulate.gaussian_discriminant(0.5, 0.5, std=0.0), ValueError, "`std`"),
        (lambda: simulate.gaussian_discriminant(0.5, 0.5, ridge=-1.0), ValueError, "`ridge`"),
        (lambda: simulate.gaussian_discriminant(0.5, 0.5, mean=50.0, ridge=0.0, n_train=50), ValueError, "`ridge`"),
    ]  # fmt: skip
    for call, error, part in calls:
        with pytest.raises(error, match=part):
            call()
