"""Simulated predictions of realistic size and kind, the same in every run."""

import torch
from torch import Tensor


def like_imagenet_dogs(n: int) -> tuple[Tensor, Tensor]:
    """Return float64 P(positive) and labels: one in eight is positive, and most predictions are nearly certain."""
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(n, generator=generator) < 0.125
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return torch.where(target, 4 + 3 * noise, 4 * noise - 10).sigmoid(), target.long()


def softmax_outputs(n: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return float32 softmax outputs and labels, with an accuracy of 75 %."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, num_classes, (n,), generator=generator)
    guess = torch.where(torch.rand(n, generator=generator) < 0.75, target, target.roll(1))
    logits = torch.randn(n, num_classes, generator=generator)
    logits[torch.arange(n), guess] += 9
    return logits.softmax(-1), target


def overconfident_logits(n: int, num_classes: int, separation: float = 3.1) -> tuple[Tensor, Tensor]:
    """Return float32 logits of an over-confident network, and labels; for 100 classes the accuracy is 70 %.

    The classes are Gaussians, whose means lie in a space with fewer dimensions than classes, so that some overlap. The
    logits are 1.5 times the sum of the true log-likelihoods and an error for each class.
    """
    generator = torch.Generator().manual_seed(0)
    dims = min(64, 2 * num_classes)
    target = torch.randint(0, num_classes, (n,), generator=generator)
    means = separation * torch.randn(num_classes, dims, generator=generator) / dims**0.5
    features = means[target] + torch.randn(n, dims, generator=generator)
    log_likelihood = features @ means.T - means.square().sum(-1) / 2
    return 1.5 * (log_likelihood + 0.3 * torch.randn(num_classes, generator=generator)), target
