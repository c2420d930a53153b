"""What the tests of binomial decisions share: levels, probabilities, and where two p-values must decide alike."""

import numpy as np
import torch

ALPHAS = (0.001, 0.01, 0.05, 0.1)
SPECIAL_P = (0.0, 1.0, 5e-324, 1e-310, 1e-19, 1 - 1e-16, 0.5, 1 / 3, 2 / 3, 0.9, 0.95, 0.99)


def tensor(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def all_counts(n, p):
    """Every k of n trials against every p: k `(n+1, 1)`, p `(P,)`."""
    return torch.arange(n + 1)[:, None], tensor(p)


def decided_alike(got, want, alpha, error):
    """Whether p-values decide alike wherever `want` is further from alpha than the relative error of both."""
    got, want = np.asarray(got), np.asarray(want)
    clear = abs(want - alpha) > error * alpha
    return np.array_equal(got[clear] <= alpha, want[clear] <= alpha)
