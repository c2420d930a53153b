"""Folds for cross-validation: stratified by class, with groups kept whole, or as given."""

from typing import TypedDict

import torch
from torch import Tensor

from torchcalib.core.arguments import check_count, check_seed
from torchcalib.core.checks import check_numbering
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.ops.host_values import look


class FoldOptions(TypedDict, total=False):
    """How samples are dealt to the folds of a cross-validation.

    - `n_folds` (default 5): how many folds; every class has the same number of samples in each, up to one.
    - `seed` (default 0): of the random deal, which is the same on every device.
    - `groups` (default None): integers `(N,)` or `(..., N)`. Samples of equal number share a fold (a patient, a video).
      Large groups are dealt first, each to the fold that has least of its classes.
    - `folds` (default None): a ready assignment, integers `(N,)` or `(..., N)`, one for every fold.
    """

    n_folds: int
    seed: int
    groups: Tensor | None
    folds: Tensor | None


def folds_of(p: Predictions, options: FoldOptions) -> tuple[Tensor, int]:
    """Return the fold of every sample, int64 of the shape of `p.target`, and the number of folds.

    Raises:
        TypeError, ValueError: bad options, and a class whose samples are all in one fold: without that fold nothing
            would be known of it.
    """
    n_folds, seed = options.get("n_folds", 5), options.get("seed", 0)
    groups, folds = options.get("groups"), options.get("folds")
    check_count("n_folds", n_folds, at_least=2)
    check_seed(seed)
    present = torch.ones_like(p.target, dtype=torch.bool)
    if p.weights is not None:
        present = ~in_all_replicates(p.weights == 0, p.target.dim()).expand(p.target.shape)
    target = p.target.masked_fill(~present, 0).long()
    if folds is not None:
        if groups is not None:
            raise ValueError("`groups` must be None where `folds` are given, got both. The folds say it all.")
        labels, at = torch.unique(_per_sample("folds", folds, p), return_inverse=True)
        if len(labels) < 2:
            raise ValueError(f"`folds` must name at least 2 folds, got {labels.tolist()}.")
        n_folds = len(labels)
    elif groups is not None:
        at = _dealt_groups(target, present, _per_sample("groups", groups, p), p.num_classes, n_folds, seed)
    else:
        at = _dealt(target, present, n_folds, seed)
    _check_training_parts(at, target, present, p.num_classes, n_folds, options)
    return at, n_folds


def _per_sample(name: str, numbers: Tensor, p: Predictions) -> Tensor:
    """Check integers of samples and return them for every series."""
    check_numbering(name, numbers)
    labels = p.task == "multilabel"  # whose canonical form is (..., L, N)
    shape = p.target.shape[:-2] + p.target.shape[-1:] if labels else p.target.shape
    if numbers.shape not in (shape, shape[-1:]):
        raise ValueError(f"`{name}` must have one number per sample, shape {tuple(shape)}, got {tuple(numbers.shape)}.")
    numbers = numbers.to(p.target.device).long()
    return (numbers.unsqueeze(-2) if labels and numbers.dim() > 1 else numbers).expand(p.target.shape)


def _dealt(target: Tensor, present: Tensor, n_folds: int, seed: int) -> Tensor:
    """Deal samples like cards, those of a class one after the other in random order."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.rand(target.shape[-1], generator=generator, dtype=torch.float32).to(target.device)
    shuffled = key.argsort()
    by_class = torch.where(present, target, torch.iinfo(torch.int64).max)[..., shuffled]
    order = shuffled[by_class.sort(dim=-1, stable=True).indices]
    turn = torch.arange(target.shape[-1], device=target.device) % n_folds
    return torch.empty_like(target).scatter_(-1, order, turn.expand(target.shape))


def _dealt_groups(target: Tensor, present: Tensor, groups: Tensor, n_classes: int, n_folds: int, seed: int) -> Tensor:
    """Deal whole groups, each to the fold that has least of its classes, as shares of these classes."""
    rows = [x.reshape(-1, target.shape[-1]).cpu() for x in (target, present, groups)]
    found = []
    for of_row, there, group in zip(*rows, strict=True):
        names, index = torch.unique(group, return_inverse=True)
        counts = torch.zeros(len(names), n_classes, dtype=torch.float64)
        counts.index_put_((index, of_row), there.double(), accumulate=True)
        shuffled = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
        order = shuffled[counts.sum(-1)[shuffled].sort(stable=True, descending=True).indices]
        total = counts.sum(0).clamp(min=1)
        held, fold_of = torch.zeros(n_folds, n_classes, dtype=torch.float64), torch.zeros(len(names), dtype=torch.int64)
        for g in order.tolist():
            fold = int((held @ (counts[g] / total.square())).argmin())
            fold_of[g] = fold
            held[fold] += counts[g]
        found.append(fold_of[index])
    return torch.stack(found).reshape(target.shape).to(target.device) if found else torch.zeros_like(target)


def _check_training_parts(
    at: Tensor, target: Tensor, present: Tensor, n_classes: int, n_folds: int, options: FoldOptions
) -> None:
    """Raise where a class has samples in one fold only."""
    cell = at * n_classes + target
    counts = cell.new_zeros((*cell.shape[:-1], n_folds * n_classes)).scatter_add(-1, cell, present.long())
    counts = counts.reshape(*cell.shape[:-1], n_folds, n_classes)
    total = counts.sum(-2)
    alone = ((counts == total.unsqueeze(-2)) & (counts > 0)).flatten(0, -2).any(0)
    if look(alone.any()):
        label = int(alone.int().argmax())
        name = next((name for name in ("folds", "groups") if options.get(name) is not None), None)
        if name is not None:
            raise ValueError(
                f"`{name}` must leave samples of every class in every training part, got class {label} in one fold "
                "only. Spread the class over two folds, or pass train_on_test=True."
            )
        raise ValueError(
            f"`target` must have at least 2 samples of every class for cross-validation, got 1 of class {label}. "
            "Drop the class with ignore_index, give `calibration`, or pass train_on_test=True."
        )
