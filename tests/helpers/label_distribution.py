"""Distances to label distributions (votes), each with a slow loop over classes for one sample."""

import oracles
import torch

import torchcalib as tc

DISTANCES = {
    "tv": (tc.total_variation, tc.total_variation_per_sample, tc.TotalVariation, oracles.total_variation_of,
           oracles.total_variation_floor),
    "kl": (tc.kl_divergence, tc.kl_divergence_per_sample, tc.KLDivergence, oracles.kl_of, oracles.entropy_floor),
    "entropy": (tc.entropy_difference, tc.entropy_difference_per_sample, tc.EntropyDifference,
                oracles.entropy_difference_of, oracles.entropy_floor),
    "votes": (tc.votes_distance, tc.votes_distance_per_sample, tc.VotesDistance, oracles.brier_of,
              oracles.brier_floor),
}  # fmt: skip
SETTINGS = [(name, c) for name in DISTANCES for c in ("value", "noise_floor", "corrected")]
SETTINGS.remove(("tv", "corrected"))
TASKS = ("binary", "multiclass", "multilabel")
C = 4


def data(task, n=30, lead=()):
    """Return logits, and counts of at least two votes for each row."""
    generator = torch.Generator().manual_seed(0)
    shape = (*lead, n) if task == "binary" else (*lead, n, C)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    counts = torch.randint(0, 9, shape if task == "multiclass" else (*shape, 2), generator=generator)
    counts[..., 0] += 2 * (counts.sum(-1) < 2)
    return logits, counts


def known_entropy(counts):
    """Return sum_k n_k / n (1 / n_k + ... + 1 / (n - 1))."""
    n = sum(counts)
    return sum(k / n * sum(1 / j for j in range(k, n)) for k in counts if k)


def corrected(name, q, t, n):
    """Return the distance corrected for the noise of few votes.

    The entropy of votes uses digamma functions of whole numbers, which are sums of inverses, and the jackknife over
    votes. The squared distance uses the unbiased variance.
    """
    if name == "votes":
        return oracles.brier_of(q, t) - sum(share * (1 - share) for share in t) / (n - 1)
    counts = [round(share * n) for share in t]
    without = [[k - (j == i) for j, k in enumerate(counts)] for i, voted in enumerate(counts) for _ in range(voted)]
    entropy = n * known_entropy(counts) - (n - 1) * sum(map(known_entropy, without)) / n
    other = oracles.nll_of(q, t) if name == "kl" else -sum(oracles.xlogy(p, p) for p in q)
    return other - entropy


def slow(name, component, task, q, votes):
    """Return the value of one sample, from probabilities over classes and counts of votes."""
    n = sum(votes)
    t = [v / n for v in votes]
    if component == "noise_floor":
        value = DISTANCES[name][4](q, n)
    else:
        value = DISTANCES[name][3](q, t) if component == "value" else corrected(name, q, t, n)
    return value / 2 if name == "votes" and task != "multiclass" else value


def as_classes(task, logits, counts):
    """Return rows of probabilities over classes, and their counts."""
    if task == "multiclass":
        return logits.softmax(-1).reshape(-1, C).tolist(), counts.reshape(-1, C).tolist()
    p = logits.sigmoid().reshape(-1)
    return torch.stack((1 - p, p), -1).tolist(), counts.reshape(-1, 2).tolist()
