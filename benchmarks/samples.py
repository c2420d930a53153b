"""Data of timed jobs: simulated predictions of realistic size and kind, the same in every run."""

import atexit
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rows = tuple[Tensor, Tensor]
"""Predictions and targets."""


def binary(n: int, dtype: torch.dtype = torch.float32) -> Rows:
    """Return P(positive) and labels: one in eight is positive, and most predictions are nearly certain."""
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(n, generator=generator) < 0.125
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return torch.where(target, 4 + 3 * noise, 4 * noise - 10).sigmoid().to(dtype), target.long()


def binary_logits(n: int) -> Rows:
    p, y = binary(n, torch.float64)
    return p.logit().float(), y


def logits(
    n: int, num_classes: int, separation: float = 3.1, dtype: torch.dtype = torch.float32, gradient: bool = False
) -> Rows:
    """Return logits of an over-confident network, and labels; for 100 classes the accuracy is 70 %.

    The classes are Gaussians, whose means lie in a space with fewer dimensions than classes, so that some overlap. The
    logits are 1.5 times the sum of the true log-likelihoods and an error for each class.
    """
    generator = torch.Generator().manual_seed(0)
    dims = min(64, 2 * num_classes)
    target = torch.randint(0, num_classes, (n,), generator=generator)
    means = separation * torch.randn(num_classes, dims, generator=generator) / dims**0.5
    features = means[target] + torch.randn(n, dims, generator=generator)
    log_likelihood = features @ means.T - means.square().sum(-1) / 2
    values = 1.5 * (log_likelihood + 0.3 * torch.randn(num_classes, generator=generator))
    return values.to(dtype).requires_grad_(gradient), target


def probabilities(n: int, num_classes: int) -> Rows:
    """Return float64 probabilities and labels."""
    z, y = logits(n, num_classes, dtype=torch.float64)
    return z.softmax(-1), y


def softmax_outputs(n: int, num_classes: int) -> Rows:
    """Return float32 softmax outputs and labels, with an accuracy of 75 %."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, num_classes, (n,), generator=generator)
    guess = torch.where(torch.rand(n, generator=generator) < 0.75, target, target.roll(1))
    values = torch.randn(n, num_classes, generator=generator)
    values[torch.arange(n), guess] += 9
    return values.softmax(-1), target


def multi_label(n: int, num_labels: int) -> Rows:
    """Return float32 probabilities and 0/1 targets, both `(N, L)`."""
    p, y = binary(n * num_labels)
    return p.view(n, num_labels), y.view(n, num_labels)


def volumes(n: int, shape: tuple[int, ...]) -> Rows:
    """Return over-confident class-first probabilities `(B, C, ...)`, and labels, of n voxels.

    The shape is `shape`, or `(B, C, n / B)` for another number of voxels.
    """
    n_images, n_classes, *space = shape
    space = space if n_images * math.prod(space) == n else [n // n_images]
    z, y = logits(n_images * math.prod(space), n_classes)
    return z.softmax(-1).view(n_images, *space, n_classes).movedim(-1, 1).contiguous(), y.view(n_images, *space)


def grouped(data: Callable[..., Rows], n: int, num_groups: int, **options: Any) -> tuple[Tensor, ...]:
    """Return predictions, targets and random groups, of which none is empty."""
    num_groups, generator = min(num_groups, n), torch.Generator().manual_seed(1)
    others = torch.randint(num_groups, (n - num_groups,), generator=generator)
    groups = torch.cat((torch.arange(num_groups), others))[torch.randperm(n, generator=generator)]
    return *data(n, **options), groups


def arrays(data: Callable[..., Rows], n: int, **options: Any) -> tuple[Any, ...]:
    return tuple(x.numpy() for x in data(n, **options))


def lists(data: Callable[..., Rows], n: int, **options: Any) -> tuple[Any, ...]:
    return tuple(x.tolist() for x in data(n, **options))


def folder() -> Path:
    """Return a new folder that is removed when the process ends."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path)
    return path


def csv_file(n: int, num_classes: int = 10) -> tuple[Path]:
    """Return a file with a column for each class and the column "target"."""
    q, y = probabilities(n, num_classes)
    path = folder() / "predictions.csv"
    names = ",".join([*(f"prob_{k}" for k in range(num_classes)), "target"])
    table = np.column_stack((q.numpy(), y.numpy()))
    np.savetxt(path, table, ["%.17g"] * num_classes + ["%d"], delimiter=",", header=names, comments="")
    return (path,)
