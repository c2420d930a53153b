"""Predictions of image and text classifiers for the example gallery.

Recorded predictions are read from the folder `$TORCHCALIB_DATA`. They are not part of the repository. Without them, a
system with the same number of rows and classes, and with a similar accuracy and confidence, is simulated.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

FOLDER = Path(os.environ.get("TORCHCALIB_DATA", "data"))


@dataclass(frozen=True)
class System:
    """Predictions of one system.

    Attributes:
        preds: Logits `(N, C)`, or probabilities of the event `(N,)`.
        target: Labels `(N,)`.
        is_recorded: Whether the predictions are recorded instead of simulated.
        description: Name of the model and data.
    """

    preds: Tensor
    target: Tensor
    is_recorded: bool
    description: str

    def __str__(self) -> str:
        source = "Recorded predictions of" if self.is_recorded else "Simulated predictions, similar to those of"
        return f"{source} {self.description}"


def predictions(name: str) -> System:
    """Return the recorded predictions of a system if they are available, otherwise simulated ones.

    Args:
        name: A key of `SYSTEMS`.
    """
    description, simulate = SYSTEMS[name]
    path = FOLDER / f"{name}.npz"
    if not path.is_file():
        return System(*simulate(), is_recorded=False, description=description)
    with np.load(path, allow_pickle=False) as file:
        preds = next(file[key] for key in ("logits", "log_probs", "probs") if key in file)
        target = file["targets"].astype(np.int64)
    return System(torch.from_numpy(preds), torch.from_numpy(target), is_recorded=True, description=description)


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


SYSTEMS: dict[str, tuple[str, Callable[[], tuple[Tensor, Tensor]]]] = {
    "cifar10_resnet20": (
        "ResNet-20 on the CIFAR-10 test set",
        lambda: _multiclass(10_000, 10, 6.0, 2.0, 0.3, seed=0),
    ),
    "cifar100_resnet20": (
        "ResNet-20 on the CIFAR-100 test set",
        lambda: _multiclass(10_000, 100, 4.6, 1.6, 0.3, seed=1),
    ),
    "imagenet_dogs_alexnet": (
        "AlexNet on ImageNet, dogs against the rest",
        lambda: _rare(50_000, 3.4, 1.2, 0.6, seed=2),
    ),
    "imagenet_dogs_resnet18": (
        "ResNet-18 on ImageNet, dogs against the rest",
        lambda: _rare(50_000, 4.0, 1.1, 0.4, seed=2),
    ),
    "agnews_gpt2": (
        "GPT-2 on AG News, without training",
        lambda: _biased(7_600, (1.5, -0.9, 0.5, -0.5), 1.9, 0.5),
    ),
}
"""Description of each system, and a function that simulates it."""
