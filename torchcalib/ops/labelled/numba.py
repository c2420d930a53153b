"""Keys of scores with labels by compiled loops. Only `dispatch` imports this module, at first use.

Each function makes one pass in all threads. Plain torch makes several, and fills a new tensor in each.
"""

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.labelled import largest_key
from torchcalib.ops.numba_math import compiled_loop
from torchcalib.ops.threads import in_threads


@compiled_loop
def _fill_keys(bits, label, largest, keys):
    """Fill `keys`; `largest` are the bits of a missing score. Twice its value and 1 are all bits except the sign."""
    for i in range(keys.size):
        keys[i] = min(bits[i] & (largest << 1 | 1), largest) << 1 | label[i]  # the sign of -0 is dropped


@compiled_loop
def _split(keys, label):
    """Move the last bit of each key to `label`."""
    for i in range(keys.size):
        label[i] = keys[i] & 1
        keys[i] >>= 1


@compiled_loop
def _fill_confidences(p, label, confidence, correct):
    for i in range(p.size):
        x = np.float64(p[i])
        predicts_one = x > 0.5
        confidence[i] = x if predicts_one else 1 - x
        correct[i] = (label[i] == 1) == predicts_one


def label_keys(score: Tensor, label: Tensor) -> Tensor:
    """Return the same as `labelled.label_keys`."""
    integer, largest = largest_key(score.dtype)
    keys = torch.empty(score.shape, dtype=integer)
    bits, labels, out = (x.reshape(-1).numpy() for x in (score.view(integer), label, keys))
    in_threads(lambda a, b: _fill_keys(bits[a:b], labels[a:b], largest, out[a:b]), bits.size, bits.size)
    return keys


def split(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the same as `labelled.split`."""
    label = torch.empty(keys.shape, dtype=torch.uint8)
    packed, labels = keys.view(-1).numpy(), label.view(-1).numpy()
    in_threads(lambda a, b: _split(packed[a:b], labels[a:b]), packed.size, packed.size)
    return keys.view(dtype), label


def confidences(p: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as `labelled.confidences`."""
    confidence, correct = torch.empty(p.shape, dtype=torch.float64), torch.empty(p.shape, dtype=torch.uint8)
    given = [x.reshape(-1).numpy() for x in (p, label, confidence, correct)]
    in_threads(lambda a, b: _fill_confidences(*(x[a:b] for x in given)), p.numel(), p.numel())
    return confidence, correct
