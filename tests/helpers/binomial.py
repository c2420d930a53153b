"""Significance levels and probabilities for tests of binomial decisions."""

import numpy as np
import torch

ALPHAS = (0.001, 0.01, 0.05, 0.1)
SPECIAL_P = (0.0, 1.0, 5e-324, 1e-310, 1e-19, 1 - 1e-16, 0.5, 1 / 3, 2 / 3, 0.9, 0.95, 0.99)


def tensor(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64)
