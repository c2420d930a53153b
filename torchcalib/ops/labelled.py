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

from torchcalib.ops.operation import operation

_HALF = 0x3F000000  # bits of the float32 number 1/2
_BLOCK = 2**15  # number of predictions per pass, small enough for the cache


def most_probable(p: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Return max(p, 1 - p), float64, and whether the more probable outcome occurred, uint8, both `(..., M)`.

    `p` `(..., M)` is P(y=1), float32 or float64, and `label` is y. For p = 1/2, y = 0 counts as more probable. NaN in
    `p` gives NaN. There is no gradient.
    """
    confidence, correct = (
        torch.empty(p.shape, dtype=torch.float64, device="cpu"),
        torch.empty(p.shape, dtype=torch.bool, device="cpu"),
    )
    columns = [x.detach().reshape(-1).numpy() for x in (p, label, confidence, correct)]
    for start in range(0, p.numel(), _BLOCK):
        given, labels, most, is_correct = (x[start : start + _BLOCK] for x in columns)
        np.copyto(most, given)
        np.equal(labels == 1, most > 0.5, out=is_correct)
        np.maximum(most, 1 - most, out=most)
    return confidence, correct.view(torch.uint8)


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
    complements = _complement_keys(score, label)
    keys = label_keys(score, label) if complements is None else complements
    label = torch.empty(label.shape, dtype=torch.uint8, device="cpu")
    keys.numpy().sort(axis=-1)
    score = keys.view(score.dtype) if complements is None else torch.empty(score.shape, dtype=score.dtype, device="cpu")
    in_order, labels, scores = keys.view(-1).numpy(), label.view(-1).numpy(), score.view(-1).numpy()
    for start in range(0, len(in_order), _BLOCK):
        block = in_order[start : start + _BLOCK]
        labels[start : start + _BLOCK] = block & 1
        np.right_shift(block, 1, out=block)
        if complements is not None:
            np.subtract(_HALF, block, out=block)
            np.subtract(1, block.view(np.float32), out=scores[start : start + _BLOCK], dtype=np.float64)
    ones = torch.ones((*score.shape[:-1], 1), dtype=score.dtype, device="cpu")
    return score, label, torch.searchsorted(score, ones, right=True).squeeze(-1)


def _complement_keys(score: Tensor, label: Tensor) -> Tensor | None:
    """Return int32 sort keys of float64 scores s in [1/2, 1] if all 1 - s are float32 numbers; otherwise None.

    Such are the confidences of float32 probabilities. Sorting int32 takes half the time of int64. Keys are as for
    `label_keys`, with the bits of 1/2 minus those of 1 - s, which increase with s.
    """
    if score.dtype != torch.float64:
        return None
    keys = torch.empty(score.shape, dtype=torch.int32, device="cpu")
    given, labels, found = (x.detach().reshape(-1).numpy() for x in (score, label, keys))
    for start in range(0, len(found), _BLOCK):
        values, block = given[start : start + _BLOCK], found[start : start + _BLOCK]
        exact = 1 - values
        if not (exact.min() >= 0 and exact.max() <= 0.5):
            return None  # also for NaN
        np.copyto(block.view(np.float32), exact, casting="same_kind")
        if not np.array_equal(block.view(np.float32), exact):
            return None
        np.subtract(_HALF, block, out=block)
        np.left_shift(block, 1, out=block)
        np.bitwise_or(block, labels[start : start + _BLOCK], out=block)
    return keys


@cache
def largest_key(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """Return the integer dtype of the keys for scores of a dtype, and the bits of a missing score in it."""
    return (torch.int32, 2**30 - 1) if dtype == torch.float32 else (torch.int64, 2**62 - 1)


def label_keys(score: Tensor, label: Tensor) -> Tensor:
    """Return integer sort keys: the bits of the probability, shifted left by one, and the label as the last bit."""
    integer, top = largest_key(score.dtype)
    keys = torch.empty(score.shape, dtype=integer, device="cpu")
    given, labels, found = (x.detach().reshape(-1).numpy() for x in (score, label, keys))
    for start in range(0, len(found), _BLOCK):
        block = found[start : start + _BLOCK]
        np.abs(given[start : start + _BLOCK], out=block.view(given.dtype))  # converts -0 to 0
        np.minimum(block, top, out=block)
        np.left_shift(block, 1, out=block)
        np.bitwise_or(block, labels[start : start + _BLOCK], out=block)
    return keys


def risk_sums(score: Tensor, correct: Tensor, size: Tensor) -> Tensor:
    """Return four sums over sorted samples, float64 `(..., 4)` on the CPU: S, R, G and A.

    `score` `(..., M)`, M >= 1, is ascending, and `size` `(...)` is the number of samples; further elements are ignored.
    `correct` is 0 or 1, uint8. There is no gradient.

    - S is the number of errors, and R the sum of E_k / k over all samples.
    - With E errors above a group of m samples, of which e are errors, G is the sum of m (E + e / 2) over all groups.
    - A is the sum of (m - e) (E + e / 2): the pairs of a correct prediction and an error that is more confident. Equal
      confidences count one half.
    """
    rows = [x.reshape(-1, score.shape[-1]).numpy() for x in (score, correct)]
    sums = torch.empty((*size.shape, 4), dtype=torch.float64, device="cpu")
    for scores, labels, n, into in zip(*rows, size.reshape(-1).tolist(), sums.view(-1, 4).numpy(), strict=True):
        _fill_sums(scores[:n], labels[:n], into)
    return sums


def _fill_sums(score: np.ndarray, correct: np.ndarray, sums: np.ndarray) -> None:
    """Compute `risk_sums` of one row."""
    n = len(score)
    errors, risk = np.zeros(n + 1, np.int64), 0.0  # E_k without ties, and the sum of E_k / k
    for start in range(0, n, _BLOCK):
        block = errors[start + 1 : start + 1 + _BLOCK]
        np.subtract(1, correct[::-1][start : start + _BLOCK], out=block)
        block[0] += errors[start]
        torch.from_numpy(block).cumsum_(0)  # several times faster than numpy
        risk += (block / np.arange(start + 1.0, start + 1 + len(block))).sum()
    generalized = errors.sum() - errors[-1] / 2
    tied = np.flatnonzero(score[1:] == score[:-1])
    if tied.size:  # replace E_k in groups of equal scores, in which `wrong` of `size` samples are errors
        starts = np.flatnonzero(np.diff(tied, prepend=-2) > 1)
        size = np.diff(starts, append=tied.size) + 1
        first = n - tied[starts] - size
        before, wrong = errors[first], errors[first + size] - errors[first]
        place = np.arange(1, size.sum() + 1) - np.repeat(size.cumsum() - size, size)
        rank = np.repeat(first, size) + place
        change = np.repeat(before, size) + place * np.repeat(wrong / size, size) - errors[rank]
        risk += (change / rank).sum()
        generalized += (size * before + wrong * (size + 1) / 2).sum() - errors[rank].sum()
    sums[:] = errors[-1], risk, generalized, generalized - errors[-1] ** 2 / 2
