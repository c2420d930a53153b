"""Generators of the source papers: recorded samples, and properties of their populations."""

from functools import partial

import pytest
import torch

import torchcalib.functional as F
from benchmarks import simulate

F64 = torch.float64


def test_scores_of_epsr_section_3_1_equal_recordings(expected):
    """The recorded scores were computed in float32."""
    for name, system, settings in (
        ("cal", "cal", {}),
        ("mcs-o", "mcs", {"scale": 2.0}),
        ("mcs-u", "mcs", {"scale": 0.48}),
        ("cal-h", "cal", {"variance": 0.19}),
    ):
        answer = next(e["value"] for e in expected if e["case"] == f"ferrer/synthetic/sec3.1|{name}")
        systems = simulate.mismatched_systems(2, 100_000, prior=0.6, **settings)
        given = {"target": systems.target, "task": "multiclass", "from_logits": True, "normalize": "prior"}
        assert F.nll(getattr(systems, system), **given).item() == pytest.approx(answer["nce"], abs=1e-6)
        assert F.brier_score(getattr(systems, system), **given).item() == pytest.approx(answer["nbs"], abs=1e-6)


def test_samples_equal_recordings(recorded):
    arrays = recorded("sim_ecd.npz")
    for sigma, name in ((0, "0"), (0.5, "0p5"), (2, "2")):
        preds, target = simulate.noisy_evidence(sigma)
        torch.testing.assert_close(preds, arrays[f"p_{name}"], rtol=1e-12, atol=1e-15)
        assert torch.equal(target, arrays[f"y_{name}"].long())
    for k in (2, 10):
        arrays, systems = recorded(f"sim_ferrer_k{k}.npz"), simulate.mismatched_systems(k)
        assert torch.equal(systems.target, arrays["targets"].long())
        for name in ("cal", "mcp", "mcs", "mcps"):
            torch.testing.assert_close(getattr(systems, name), arrays[name], rtol=1e-11, atol=1e-12)
    arrays = recorded("sim_gda.npz")
    for train, test in ((0.5, 0.5), (0.5, 0.4), (0.5, 0.6), (0.01, 0.01), (0.01, 0.0), (0.01, 0.02)):
        sample, name = simulate.gaussian_discriminant(train, test), f"{train:.2f}-{test:.2f}".replace("0.", "")
        assert torch.equal(sample.target, arrays[f"y_{name}"].long())
        # The recorded fit stopped at a tolerance of 1e-10.
        torch.testing.assert_close(sample.preds, arrays[f"p_{name}"], rtol=0, atol=2e-9)


def test_samples_are_equal_for_equal_seeds_only():
    fit = partial(simulate.gaussian_discriminant, 0.5, 0.5, n_train=50, n_test=9)
    draws = [
        lambda **options: simulate.noisy_evidence(1.0, 50, **options),
        lambda **options: vars(simulate.mismatched_systems(3, 50, **options)).values(),
        lambda **options: list(vars(fit(**options)).values())[:6],
    ]
    for draw in draws:
        assert all(torch.equal(a, b) for a, b in zip(draw(seed=3), draw(seed=3), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(draw(seed=3), draw(seed=4), strict=True))


def test_class_counts_and_true_posteriors_follow_the_parameters():
    systems = simulate.mismatched_systems(10, 2_000)
    assert systems.target.bincount().tolist() == [1600] + [44] * 9
    sample = simulate.gaussian_discriminant(0.3, 0.0, n_train=200, n_test=30)
    assert (len(sample.features), len(sample.train_features), sample.target.sum()) == (30, 200, 0)
    assert sample.posterior.max() == 0
    sample = simulate.gaussian_discriminant(0.5, 0.2, n_test=100_000)
    assert F.ece(sample.posterior, sample.target, task="binary") < 0.01
    assert F.ece(sample.preds, sample.target, task="binary") > 0.2


def test_logistic_fit_has_zero_gradient():
    for ridge in (0.0, 1.0, 50.0):
        sample = simulate.gaussian_discriminant(0.2, 0.2, n_train=400, n_test=1, ridge=ridge)
        w = torch.tensor([sample.slope, sample.intercept], dtype=F64, requires_grad=True)
        z = w[0] * sample.train_features + w[1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(z, sample.train_target.double(), reduction="sum")
        (loss + ridge / 2 * w[0] ** 2).backward()
        assert w.grad.abs().max() < 1e-9
