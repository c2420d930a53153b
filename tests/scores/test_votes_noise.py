"""Noise of few votes, and corrections for it: against sums over all counts, and drawn votes."""

import math

import oracles
import pytest
import torch
from helpers.votes import DISTANCES

from torchcalib.binomial import entropy_of_counts, mean_distance_of_share, mean_log_share


def expected_of_share(of, p, n):
    """The sum over all counts, in logs, for numbers of votes beyond those of exact whole numbers."""
    total = 0.0
    for x in range(n + 1):
        log_chance = math.lgamma(n + 1) - math.lgamma(x + 1) - math.lgamma(n - x + 1)
        log_chance += (x * math.log(p) if x else 0) + ((n - x) * math.log1p(-p) if n > x else 0)
        total += math.exp(log_chance) * of(x / n)
    return total


@pytest.mark.parametrize("n", [1, 2, 7, 48, 49, 50, 99, 150, 400, 3000])
def test_slow_sum_over_all_counts_of_what_is_expected_of_a_share(n):
    """Rounding of the slow sum's chances grows with n; up to 100 expected votes the rule is good for 1e-10."""
    votes = torch.tensor(float(n), dtype=torch.float64)
    for p in (0.0, 1.0):
        share = torch.tensor(p, dtype=torch.float64)
        assert mean_distance_of_share(share, votes) == 0
        assert float(p * mean_log_share(share, votes)) == pytest.approx(0, abs=2e-9)
    for p in (1e-6, 0.02, 1 / 3, 0.5, 0.97, 1 - 1e-9):
        share = torch.tensor(p, dtype=torch.float64)
        distance = expected_of_share(lambda t, p=p: abs(t - p), p, n)
        assert float(mean_distance_of_share(share, votes)) == pytest.approx(distance, rel=1e-9, abs=1e-15), p
        entropy = expected_of_share(lambda t: oracles.xlogy(t, t), p, n)
        tolerance = max(1e-14 * n, 0 if n * p < 50 else 1e-10 if n * p < 100 else 2e-9)
        assert float(p * mean_log_share(share, votes)) == pytest.approx(entropy, rel=0, abs=tolerance), p


@pytest.mark.parametrize("n", [2, 3, 10])
def test_noise_floor_and_corrections_of_drawn_votes(n):
    """The mean over drawn votes is what is expected, within 4.5 standard errors; uncorrected it is not."""
    q, truth = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.2, 0.1])
    generator = torch.Generator().manual_seed(n)
    preds = q.expand(20_000, -1)

    def away(distance, votes, expected, component="value"):
        scores = DISTANCES[distance][1](preds, votes, task="multiclass", component=component)
        return abs(float(scores.mean()) - expected) / float(scores.std()) * math.sqrt(len(scores))

    def drawn(p):
        votes = torch.multinomial(p.expand(20_000, -1), n, replacement=True, generator=generator)
        return torch.nn.functional.one_hot(votes, 3).sum(-2)

    votes = drawn(q)
    for name, (function, *_) in DISTANCES.items():
        floor = function(preds, votes, task="multiclass", component="noise_floor")
        assert away(name, votes, float(floor)) < 4.5, name
    votes, p, t = drawn(truth), q.tolist(), truth.tolist()
    kl = sum(tk * math.log(tk / qk) for qk, tk in zip(p, t, strict=True)) - too_large(t, n)
    entropy = entropy_of(p) - entropy_of(t) - too_large(t, n)
    for name, expected in (("votes", float((q - truth).square().sum())), ("kl", kl), ("entropy", entropy)):
        assert away(name, votes, expected, "corrected") < 4.5 < away(name, votes, expected), name


def too_large(q, n):
    """What is stated of the bias that remains in a corrected entropy."""
    return sum(p * ((1 - p) ** (n - 1) - sum((1 - p) ** v / v for v in range(n, 3000))) for p in q)


def entropy_of(q):
    return -sum(oracles.xlogy(p, p) for p in q)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_corrected_entropy_is_off_by_what_is_stated_and_that_is_less(n):
    """Expectations over all counts of two classes; of ten, from those of each, less than Miller-Madow's."""
    for p in (0.5, 0.3, 0.1):
        plain = found = 0.0
        for k in range(n + 1):
            chance, t = math.comb(n, k) * p**k * (1 - p) ** (n - k), k / n
            shares = torch.tensor([t, 1 - t], dtype=torch.float64)
            found += chance * float(entropy_of_counts(shares, torch.tensor([float(n)], dtype=torch.float64)))
            plain += chance * entropy_of([t, 1 - t])
        bias = found - entropy_of([p, 1 - p])
        assert bias == pytest.approx(too_large([p, 1 - p], n), abs=1e-12)
        assert abs(bias) < entropy_of([p, 1 - p]) - plain
    total = sum(1 / k for k in range(1, 11))
    q = [1 / k / total for k in range(1, 11)]
    plain = -oracles.entropy_floor(q, n)
    # Which adds (K - 1) / 2n, K classes having votes.
    miller = plain + (sum(1 - (1 - p) ** n for p in q) - 1) / (2 * n)
    assert abs(too_large(q, n)) < abs(miller) / 2 < abs(plain) / 2
