"""Split samples into the folds of a cross-validation: random, stratified, given, and with whole groups."""

from dataclasses import replace
from typing import Literal, TypedDict

import torch
from torch import Tensor

from torchcalib.core.arguments import check_count, check_seed
from torchcalib.core.checks import check_indices
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available

_ENOUGH, _MOST_REPEATS = 1_000, 5
"""Number of held-out predictions above which one random split suffices, and largest default number of splits."""


class FoldOptions(TypedDict, total=False):
    """Options of the folds of a cross-validation; see `cross_val_calibrate`."""

    n_folds: int
    n_repeats: int | None
    seed: int
    groups: Tensor | None
    folds: Tensor | Literal["random", "stratified"] | None


def folds_of(p: Predictions, options: FoldOptions) -> tuple[Tensor, int]:
    """Return the fold of each sample in S splits, int64 `(S, *)` for targets of shape `*`, and the number of folds."""
    n_folds, n_repeats, seed = options.get("n_folds", 5), options.get("n_repeats"), options.get("seed", 0)
    groups, folds = options.get("groups"), options.get("folds")
    check_count("n_folds", n_folds, at_least=2)
    if n_repeats is not None:
        check_count("n_repeats", n_repeats)
    check_seed(seed)
    if not p.has_labels:  # folds keep the most probable classes of soft targets in every training part
        labels = p.target.argmax(-1) if p.soft else (p.target > 0.5).long()
        p = replace(p, input_target=labels, has_labels=True)
    present = torch.ones_like(p.target, dtype=torch.bool)
    if p.weights is not None:
        present = ~in_all_replicates(p.weights == 0, p.target.dim()).expand(p.target.shape)
    target = p.target.masked_fill(~present, 0).long()
    if folds is None or isinstance(folds, str):
        if groups is None:
            n_units = int(present.sum(-1).max()) if present.numel() else 0
            name, unit = "preds", "samples with a weight above 0"
        else:
            n_units, name, unit = len(torch.unique(_per_sample("groups", groups, p)[present])), "groups", "groups"
        if n_units == 1:  # no sample is left for a fit
            raise ValueError(f"`{name}` must contain at least 2 {unit} for cross-validation, got {n_units}.")
    if isinstance(folds, str) and folds not in ("random", "stratified"):
        raise ValueError(f"`folds` must be 'random', 'stratified' or fold numbers, got {shown(folds)}.")
    if folds is not None and not isinstance(folds, str):
        if groups is not None:
            raise ValueError("`groups` must be None if `folds` are given, got both. Pass one of them.")
        if n_repeats not in (None, 1):
            raise ValueError(f"`n_repeats` must be None if `folds` are given, got {n_repeats}. They are one split.")
        labels, at = torch.unique(_per_sample("folds", folds, p), return_inverse=True)
        if len(labels) < 2:
            raise ValueError(f"`folds` must contain at least 2 folds, got {shown(labels.tolist())}.")
        counts = _counts_by_fold(at, target, present, p.num_classes, len(labels))
        alone = ((counts == counts.sum(-2, keepdim=True)) & (counts > 1)).flatten(0, -2).any(0)
        if value_if_available(alone.any()):
            raise ValueError(
                "`folds` must leave samples of every class in every training part, got class "
                f"{int(alone.int().argmax())} in one fold only. Spread the class over two folds, or pass "
                "train_on_test=True."
            )
        return at.unsqueeze(0), len(labels)
    is_stratified = folds == "stratified"
    if n_repeats is None:
        n_repeats = 1 if is_stratified else min(_MOST_REPEATS, -(-_ENOUGH // max(1, p.target.shape[-1])))
    splits = []
    for k in range(n_repeats):
        if groups is not None:
            of_sample = _per_sample("groups", groups, p)
            at = _grouped(target, present, of_sample, p.num_classes, n_folds, seed + k, is_stratified)
        elif is_stratified:
            # Shuffle the samples of each class, and assign the folds in turn.
            key = torch.where(present, target, torch.iinfo(torch.int64).max)
            at = _shuffled_ranks(key, seed + k) % n_folds
        else:
            rank = _shuffled_ranks(present.to(torch.int64).neg(), seed + k)  # samples with a weight come first
            at = rank % n_folds
            counts = _counts_by_fold(at, target, present, p.num_classes, n_folds)
            total = counts.sum(-2)
            is_alone = ((counts.amax(-2) == total) & (total > 1)).gather(-1, target) & present
            first = torch.full_like(total, torch.iinfo(torch.int64).max).scatter_reduce(
                -1, target, torch.where(present, rank, torch.iinfo(torch.int64).max), "amin"
            )
            at = torch.where(is_alone & (rank == first.gather(-1, target)), (at + 1) % n_folds, at)
        splits.append(at)
    return torch.stack(splits), n_folds


def _per_sample(name: str, numbers: Tensor, p: Predictions) -> Tensor:
    """Check that there is one integer per sample, and expand them to the shape of `p.target`."""
    check_indices(name, numbers)
    labels = p.task == "multilabel"  # the canonical form is (..., L, N)
    shape = p.target.shape[:-2] + p.target.shape[-1:] if labels else p.target.shape
    if numbers.shape not in (shape, shape[-1:]):
        raise ValueError(f"`{name}` must have one number per sample, shape {tuple(shape)}, got {tuple(numbers.shape)}.")
    numbers = numbers.to(p.target.device).long()
    return (numbers.unsqueeze(-2) if labels and numbers.dim() > 1 else numbers).expand(p.target.shape)


def _counts_by_fold(at: Tensor, target: Tensor, present: Tensor, n_classes: int, n_folds: int) -> Tensor:
    """Return the number of samples of each class in each fold, int64 `(..., F, C)`."""
    cell = at * n_classes + target
    counts = cell.new_zeros((*cell.shape[:-1], n_folds * n_classes)).scatter_add(-1, cell, present.long())
    return counts.reshape(*cell.shape[:-1], n_folds, n_classes)


def _shuffled_ranks(key: Tensor, seed: int) -> Tensor:
    """Return the rank of each sample by its key `(..., N)`, int64. Samples with equal keys are in random order."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = (
        torch.rand(key.shape[-1], generator=generator, dtype=torch.float32, device="cpu").to(key.device).argsort()
    )
    order = shuffled[key[..., shuffled].sort(dim=-1, stable=True).indices]
    rank = torch.arange(key.shape[-1], device=key.device)
    return torch.empty_like(key).scatter_(-1, order, rank.expand(key.shape))


def _grouped(
    target: Tensor, present: Tensor, groups: Tensor, n_classes: int, n_folds: int, seed: int, is_stratified: bool
) -> Tensor:
    rows = [x.reshape(-1, target.shape[-1]).cpu() for x in (target, present, groups)]
    found = []
    for labels, is_present, group in zip(*rows, strict=True):
        names, index = torch.unique(group, return_inverse=True)
        counts = torch.zeros(len(names), n_classes, dtype=torch.float64, device="cpu")
        counts.index_put_((index, labels), is_present.double(), accumulate=True)
        generator = torch.Generator().manual_seed(seed)
        shuffled = torch.randperm(len(names), generator=generator, device="cpu")
        order = shuffled[counts.sum(-1)[shuffled].sort(stable=True, descending=True).indices]
        if is_stratified:
            total = counts.sum(0).clamp(min=1)
            load = torch.zeros(n_folds, counts.shape[-1], dtype=torch.float64, device="cpu")
            fold_of = torch.zeros(len(counts), dtype=torch.int64, device="cpu")
            for g in order.tolist():
                fold = int((load @ (counts[g] / total.square())).argmin())
                fold_of[g] = fold
                load[fold] += counts[g]
        else:  # the next `n_folds` groups by size are assigned to different folds, in random order
            turns = torch.rand(
                -(-len(names) // n_folds), n_folds, generator=generator, dtype=torch.float32, device="cpu"
            )
            fold_of = torch.empty_like(order).scatter_(0, order, turns.argsort(-1).flatten()[: len(names)])
        # The groups of a class that are all in one fold are spread over two folds.
        has_class = counts > 0
        in_fold = torch.zeros(n_folds, has_class.shape[-1], device="cpu").index_add(0, fold_of, has_class.float())
        n_groups = has_class.sum(0)
        for k in ((in_fold.amax(0) == n_groups) & (n_groups > 1)).nonzero().flatten().tolist():
            holders = has_class[:, k].nonzero().flatten()
            if bool((fold_of[holders] == fold_of[holders[0]]).all()):  # an earlier move may have separated them
                fold_of[holders[0]] = (fold_of[holders[0]] + 1) % n_folds
        found.append(fold_of[index])
    return torch.stack(found).reshape(target.shape).to(target.device) if found else torch.zeros_like(target)
