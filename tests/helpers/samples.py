"""Make random samples, and update metrics with them."""

import torch
from cases import N_CLASSES


def tied(task, n=60, seed=0, steps=64, zeros=True):
    """Return probabilities that are multiples of 1 / steps (ties, exact sums), and targets drawn from them.

    With `zeros=False` probabilities are moved away from 0 and 1, where scores may be infinite.
    """
    generator = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        draws = torch.randint(0, N_CLASSES, (n, steps), generator=generator)
        draws = torch.where(torch.rand(n, steps, generator=generator) < 0.5, draws[:, :1], draws)
        preds = torch.nn.functional.one_hot(draws, N_CLASSES).sum(1).double() / steps
        target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    else:
        shape = (n, N_CLASSES) if task == "multilabel" else (n,)
        preds = torch.randint(0, steps + 1, shape, generator=generator).double() / steps
        target = (torch.rand(shape, generator=generator) < 0.3 + 0.5 * preds).long()
    return preds if zeros else preds * 0.875 + 0.125 / (N_CLASSES if task == "multiclass" else 2), target


def updated(metric, *batches, **options):
    """Return a metric after an update with each batch (predictions, targets)."""
    for batch in batches:
        metric.update(*batch, **options)
    return metric
