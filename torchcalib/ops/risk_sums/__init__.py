"""Sums over the samples in descending order of their confidence, from which areas under risk-coverage curves follow.

E_k is the number of errors among the k most confident samples. Samples with equal confidence have no order: E_k is then
the mean over all their orders, which is linear in k within a group of ties.
"""

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of


def risk_sums(score: Tensor, correct: Tensor, size: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Return four sums over sorted samples, float64 `(..., 4)` on the CPU: S, R, G and A.

    `score` `(..., M)`, M >= 1, is ascending, and `size` `(...)` is the number of samples; further elements are ignored.
    `correct` is 0 or 1, uint8. There is no gradient.

    - S is the number of errors, and R the sum of E_k / k over all samples.
    - With E errors above a group of m samples, of which e are errors, G is the sum of m (E + e / 2) over all groups.
    - A is the sum of (m - e) (E + e / 2): the pairs of a correct prediction and an error that is more confident. Equal
      confidences count one half.
    """
    rows = [x.reshape(-1, score.shape[-1]).numpy() for x in (score, correct)]
    sums = torch.empty((*size.shape, 4), dtype=torch.float64)
    fill = source_of("risk_sums", "cpu", score.dtype, backend).fill_sums
    for scores, labels, n, into in zip(*rows, size.reshape(-1).tolist(), sums.view(-1, 4).numpy(), strict=True):
        fill(scores[:n], labels[:n], into)
    return sums


def fill_sums(score: np.ndarray, correct: np.ndarray, sums: np.ndarray) -> None:
    """Compute `risk_sums` of one row in numpy."""
    wrong, n = 1.0 - correct[::-1], len(score)
    is_end = np.append(score[-1:0:-1] != score[-2::-1], [True] * (n > 0))
    ends = np.concatenate(([0], np.flatnonzero(is_end) + 1))
    errors = np.concatenate(([0.0], wrong.cumsum()))[ends]
    ranks = np.arange(1, n + 1)
    middle = (errors[1:] + errors[:-1]) / 2
    sums[0], sums[1] = errors[-1], (np.interp(ranks, ends, errors) / ranks).sum()
    sums[2], sums[3] = np.diff(ends) @ middle, (np.diff(ends) - np.diff(errors)) @ middle
