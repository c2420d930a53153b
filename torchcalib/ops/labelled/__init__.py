"""Scores with labels 0 and 1 on the CPU: the confidence of the more probable outcome, sorted scores, and their sums.

A score and its label are packed into one integer. numpy sorts integers by vector instructions, which is faster than an
index, and faster than a radix sort in compiled code.

Areas under risk-coverage curves follow from sums over the samples in descending order of their confidence. E_k is the
number of errors among the k most confident samples. Samples with equal confidence have no order: E_k is then the mean
over all their orders, which is linear in k within a group of ties.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.operation import operation


def most_probable(p: Tensor, label: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Return max(p, 1 - p), float64, and whether the more probable outcome occurred, uint8, both `(..., M)`.

    `p` `(..., M)` is P(y=1), float32 or float64, and `label` is y. For p = 1/2, y = 0 counts as more probable. NaN in
    `p` gives NaN. There is no gradient.
    """
    found: tuple[Tensor, Tensor] = source_of("labelled", "cpu", p.dtype, backend).confidences(p.detach(), label)
    return found


@operation(
    "sort_labelled(Tensor score, Tensor label) -> (Tensor, Tensor, Tensor)",
    fake=lambda score, label: (
        torch.empty_like(score),
        torch.empty_like(label),
        score.new_empty(score.shape[:-1], dtype=torch.int64),
    ),
)
def sort_labelled(score: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort probabilities and their uint8 labels `(..., M)`, and count the present scores `(...)`.

    Scores are float32 or float64. Tied scores are sorted by label. Missing scores (NaN) become numbers above 1.
    """
    return sorted_by_keys(score, label)


def sorted_by_keys(score: Tensor, label: Tensor, backend: Backend = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sort_labelled`."""
    source = source_of("labelled", "cpu", score.dtype, backend)
    keys = source.label_keys(score, label)
    keys.numpy().sort(axis=-1)
    score, label = source.split(keys, score.dtype)
    ones = torch.ones((*score.shape[:-1], 1), dtype=score.dtype)
    return score, label, torch.searchsorted(score, ones, right=True).squeeze(-1)


@cache
def largest_key(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """Return the integer dtype of the keys for scores of a dtype, and the bits of a missing score in it."""
    return (torch.int32, 2**30 - 1) if dtype == torch.float32 else (torch.int64, 2**62 - 1)


def label_keys(score: Tensor, label: Tensor) -> Tensor:
    """Return integer sort keys: the bits of the probability, shifted left by one, and the label as the last bit."""
    integer, top = largest_key(score.dtype)
    keys = score.abs().view(integer).clamp_(max=top)  # `abs` copies, and converts -0 to 0
    return keys.bitwise_left_shift_(1).bitwise_or_(label.to(integer))  # faster than different dtypes


def split(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scores and labels of `label_keys`. The scores are in the memory of the keys."""
    label = keys.bitwise_and(1).to(torch.uint8)
    return keys.bitwise_right_shift_(1).view(dtype), label


def confidences(p: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `most_probable` in plain torch."""
    p = p.double()
    return torch.maximum(p, 1 - p), ((label == 1) == (p > 0.5)).to(torch.uint8)


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
    fill = source_of("labelled", "cpu", score.dtype, backend).fill_sums
    for scores, labels, n, into in zip(*rows, size.reshape(-1).tolist(), sums.view(-1, 4).numpy(), strict=True):
        fill(scores[:n], labels[:n], into)
    return sums


def fill_sums(score: np.ndarray, correct: np.ndarray, sums: np.ndarray) -> None:
    """Compute `risk_sums` of one row in numpy."""
    wrong, n = 1.0 - correct[::-1], len(score)
    is_end = np.append(score[-1:0:-1] != score[-2::-1], [True] * (n > 0))
    ends = np.concatenate(([0], np.flatnonzero(is_end) + 1))
    errors = np.concatenate(([0.0], wrong.cumsum()))[ends]
    ranks, sizes = np.arange(1, n + 1), np.diff(ends)
    middle = (errors[1:] + errors[:-1]) / 2
    up_to = errors[1:] if len(sizes) == n else np.interp(ranks, ends, errors)  # without ties, or with them
    sums[0], sums[1] = errors[-1], (up_to / ranks).sum()
    sums[2], sums[3] = (sizes * middle).sum(), ((sizes - np.diff(errors)) * middle).sum()
