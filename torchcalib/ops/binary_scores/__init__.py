"""Sums of the log loss or the squared error of binary predictions, in the pass that checks all values.

A separate check would read predictions and targets once more. The pass checks a block of values while it is in the
cache, and marks invalid values by the sum NaN. No valid value has a score of NaN.
"""

from typing import Literal

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of

Kind = Literal["log", "square"]


def score_sums(values: Tensor, target: Tensor, kind: Kind, *, from_logits: bool, backend: Backend = "auto") -> Tensor:
    """Return the sums of a score over the last axis, float64 `(...)` for values and targets `(..., N)` on the CPU.

    With P(y=1) = p and target t, "log" is -t log p - (1 - t) log(1 - p) in nats, with 0 log 0 = 0, and "square" is
    (p - t)^2. `values` are p, or logits with `from_logits`; NaN and probabilities outside [0, 1] are invalid. `target`
    is int64, or floating in [0, 1]; other numbers are invalid. A sum over an invalid value is NaN.

    Arithmetic is float64, and the relative error of a score is below 1e-14, also for p near 0 and 1. Log losses of
    narrower logits and integer targets are float32. Their error is then below 5e-7, as far as they exceed 1e-37. Sums
    are float64. With numba, they do not depend on the number of threads. There is no gradient.
    """
    values, target = values.detach(), target.detach()
    if not values.numel():
        return torch.zeros(values.shape[:-1], dtype=torch.float64, device="cpu")
    sums: Tensor = source_of("binary_scores", "cpu", values.dtype, values.numel(), backend).score_sums(
        values, target, kind, from_logits
    )
    return sums
