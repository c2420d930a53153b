"""Predictions of image and text classifiers for the example gallery.

Recorded predictions are read from the folder `$TORCHCALIB_DATA`. They are not part of the repository. Without them, a
system with the same number of rows and classes, and with a similar accuracy and confidence, is simulated.
"""

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot


class System(NamedTuple):
    """Logits `(N, C)` or probabilities of the event `(N,)` of a system, and labels `(N,)`."""

    preds: Tensor
    target: Tensor
    title: str

    def __str__(self) -> str:
        return self.title


def predictions(name: str) -> System:
    """Return the recorded predictions of a system in `SYSTEMS` if they are available, otherwise simulated ones."""
    description, simulate, options = SYSTEMS[name]
    path = Path(os.environ.get("TORCHCALIB_DATA", "data"), f"{name}.npz")
    if not path.is_file():
        return System(*simulate(*options), f"Simulated predictions, similar to those of {description}")
    with np.load(path, allow_pickle=False) as file:
        preds = next(file[key] for key in ("logits", "log_probs", "probs") if key in file)
        target = file["targets"].astype(np.int64)
    return System(torch.from_numpy(preds), torch.from_numpy(target), f"Recorded predictions of {description}")


def _multiclass(
    n: int, n_classes: int, separation: float, sharpness: float, class_error: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Simulate logits of an over-confident classifier.

    Features of class k are Gaussian around `m e_k`, with unit variance. The distance m differs between samples, because
    some are easier than others. The log-posterior is then `m x` up to a constant. The classifier multiplies it by
    `sharpness` and adds a fixed error for each class.
    """
    g = torch.Generator().manual_seed(seed)
    target = torch.arange(n) % n_classes
    distance = separation * (0.25 + torch.rand(n, 1, generator=g))
    features = distance * one_hot(target, n_classes) + torch.randn(n, n_classes, generator=g)
    errors = class_error * torch.randn(n_classes, generator=g)
    return (sharpness * distance * features + errors).float(), target


def _biased(n: int, class_errors: tuple[float, ...], separation: float, sharpness: float) -> tuple[Tensor, Tensor]:
    """Simulate log-probabilities of a classifier that prefers some classes, whatever the input is."""
    logits, target = _multiclass(n, len(class_errors), separation, sharpness, 0.0, seed=3)
    return (logits + torch.tensor(class_errors)).log_softmax(-1), target


def _rare(n: int, separation: float, sharpness: float, offset: float, seed: int) -> tuple[Tensor, Tensor]:
    """Simulate probabilities of an event with frequency 1 / 8. They are too large on average, and too extreme."""
    g = torch.Generator().manual_seed(seed)
    target = (torch.arange(n) % 8 == 0).long()
    evidence = separation**2 * (target - 0.5) + separation * torch.randn(n, generator=g, dtype=torch.float64)
    return (sharpness * (evidence - math.log(7)) + offset).sigmoid(), target


SYSTEMS = {
    "cifar10_resnet20": ("ResNet-20 on the CIFAR-10 test set", _multiclass, (10_000, 10, 6.0, 2.0, 0.3, 0)),
    "cifar100_resnet20": ("ResNet-20 on the CIFAR-100 test set", _multiclass, (10_000, 100, 4.6, 1.6, 0.3, 1)),
    "imagenet_dogs_alexnet": ("AlexNet on ImageNet, dogs against the rest", _rare, (50_000, 3.4, 1.2, 0.6, 2)),
    "imagenet_dogs_resnet18": ("ResNet-18 on ImageNet, dogs against the rest", _rare, (50_000, 4.0, 1.1, 0.4, 2)),
    "agnews_gpt2": ("GPT-2 on AG News, without training", _biased, (7_600, (1.5, -0.9, 0.5, -0.5), 1.9, 0.5)),
}
"""Description of each system, and a function that simulates it with its arguments."""
