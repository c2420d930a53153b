"""Buffer of predictions for bootstrap intervals and calibrators, which need all predictions at once."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torchcalib.core.inputs import InputFormat
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.core.predictions import Predictions
from torchcalib.core.saved import saved_count, saved_tensor, saved_value
from torchcalib.ops.logs import wide_dtype

MAX_VALUES = 2**26
"""Maximum number of elements of `preds` in a buffer: about 67,000 samples of 1,000 classes."""

MAX_SAMPLES = 2**20
"""Maximum number of samples in a buffer (multi-label: samples times labels)."""

_SMALL = 2**12
"""Maximum number of samples in a stored batch that is concatenated with the next batch."""

_SAVED = ("input_preds", "input_target", "weights", "copies", "complement", "groups")
"""Attributes of `Predictions` that are saved."""


@dataclass(frozen=True, eq=False)
class PredictionBuffer:
    """Copies of all predictions. The buffer drops them if it exceeds `MAX_SAMPLES` or `MAX_VALUES`."""

    input_format: InputFormat
    n_ranks: int = 1  # number of processes; each may store 1 / `n_ranks` of the limits
    n_samples: int = 0  # number of samples added so far (multi-label: samples times labels)
    n_values: int = 0  # number of elements of `preds` added so far
    are_stored: bool = True  # False if some predictions are hidden states, whose logits are not written
    # Copies of the batches, in their order. Small batches are concatenated. `groups` are the identifiers of clusters.
    pieces: list[Predictions] = field(default_factory=list)

    @property
    def why_not(self) -> str:
        """Reason why the predictions were dropped, as a clause; an empty string if no limit is exceeded."""
        if not self.are_stored:
            return "the logits of hidden states are not written. Pass some of the logits to torchcalib.report"
        if self.n_samples * self.n_ranks <= MAX_SAMPLES and self.n_values * self.n_ranks <= MAX_VALUES:
            return ""
        return (
            f"there are more than {MAX_SAMPLES:,} samples or {MAX_VALUES:,} predicted values. "
            "Call torchcalib.calibration.recommend or torchcalib.inference.bootstrap on a part of the data"
        )

    def from_predictions(self, p: Predictions) -> Self:
        """Return a new buffer that contains only the batch `p`, which must have no batch axes."""
        n_samples, n_values = p.samples.numel(), p.input_preds.numel()
        are_stored = not isinstance(p.input_preds, LinearLogits)
        empty = replace(self, n_samples=n_samples, n_values=n_values, are_stored=are_stored, pieces=[])
        return replace(empty, pieces=[_copied(p)] if empty.n_samples and not empty.why_not else [])

    def __add__(self, other: Self) -> Self:
        n_samples, n_values = self.n_samples + other.n_samples, self.n_values + other.n_values
        are_stored = self.are_stored and other.are_stored
        both = replace(self, n_samples=n_samples, n_values=n_values, are_stored=are_stored, pieces=[])
        if both.why_not:
            return both
        pieces = list(self.pieces)
        for piece in other.pieces:
            pieces.append(piece)
            # Concatenate pieces of similar size: this limits their number, and copies each sample only a few times.
            while len(pieces) > 1 and pieces[-2].samples[-1] <= min(_SMALL, 2 * pieces[-1].samples[-1]):
                pieces[-2:] = [_joined(pieces[-2:])]
        return replace(both, pieces=pieces)

    def limited(self, n_samples: int, n_values: int) -> Self:
        """Return an empty buffer if these totals over all buffers to be merged exceed a limit, otherwise `self`."""
        dropped = replace(self, n_samples=n_samples, n_values=n_values, pieces=[])
        return dropped if dropped.why_not else self

    def predictions(self) -> Predictions:
        """Return all predictions as one batch. Targets are integers if all targets are labels."""
        if len(self.pieces) > 1:
            self.pieces[:] = [_joined(self.pieces)]
        return replace(self.pieces[0])  # a copy, because `Predictions` caches derived values

    def state(self) -> dict[str, Any]:
        """Return the buffered predictions as a dict of tensors and Python values, which `loaded` restores."""
        pieces = [{name: getattr(piece, name) for name in _SAVED} for piece in self.pieces]
        sizes = {"n_samples": self.n_samples, "n_values": self.n_values}
        return {**sizes, "are_stored": self.are_stored, "pieces": pieces}

    def loaded(self, state: Any) -> Self:
        """Return a buffer, restored from a result of `state()`, with the checks of new predictions."""
        pieces = [self._loaded(piece) for piece in saved_value(state, "pieces", list)]
        n_samples, n_values = saved_count(state, "n_samples"), saved_count(state, "n_values")
        are_stored = saved_value(state, "are_stored", bool)
        loaded = replace(self, n_samples=n_samples, n_values=n_values, are_stored=are_stored, pieces=pieces)
        if not loaded.why_not and (size := sum(piece.input_preds.numel() for piece in pieces)) != n_values:
            raise ValueError(f"`pieces` must contain {n_values:,} predicted values, got {size:,}. The file is corrupt.")
        return replace(loaded, pieces=[]) if loaded.why_not else loaded

    def _loaded(self, piece: dict[str, Any]) -> Predictions:
        """Return a checked element of `pieces`. Multi-label `(L, N)` is checked as binary with one batch axis."""
        original, task = self.input_format, self.input_format.read_as
        is_multiclass, n_batch = task == "multiclass", int(task == "multilabel")
        num_classes = original.num_classes if is_multiclass else None
        stored = InputFormat(
            "multiclass" if is_multiclass else "binary",
            original.from_logits,
            class_axis=-1,
            batch_dims=n_batch,
            num_classes=num_classes,
        )
        p = stored.read(piece["input_preds"], piece["input_target"], piece["weights"])
        axes = [*p.samples[:-1]]
        has_more_axes = piece["input_preds"].dim() != 1 + n_batch + is_multiclass
        if p.replicates or has_more_axes or (axes and original.num_classes not in (None, *axes)):
            raise ValueError(f"`pieces` must have no batch axes, got shape {tuple(p.samples)}. The file is corrupt.")
        complement = groups = None
        if piece["complement"] is not None:
            complement = saved_tensor(piece, "complement", torch.float64, tuple(p.input_preds.shape))
            stored.read(complement, p.input_target, p.weights)
        if piece["groups"] is not None:
            groups = saved_tensor(piece, "groups", torch.int64, (*[1] * n_batch, p.samples[-1]))
        copies = saved_value(piece, "copies", bool)
        return _copied(replace(p, task=task, complement=complement, groups=groups, copies=copies))


def _copied(p: Predictions) -> Predictions:
    """Return a copy that always has weights, and has integer targets if all targets are labels."""
    ones = torch.ones(p.samples, dtype=wide_dtype(p.input_preds.device), device=p.input_preds.device)
    weights = ones if p.weights is None else ones * p.weights.detach()
    target, present = p.input_target.detach().clone(), weights != 0
    if target.is_floating_point():
        labels = target.masked_fill(~(present.unsqueeze(-1) if p.soft else present), 0)
        if bool((labels == labels.round()).all()):
            target = labels.argmax(-1) if p.soft else labels.long()
    return replace(
        p,
        input_preds=p.input_preds.detach().clone(),
        input_target=target,
        weights=weights,
        zero_weight=~present,
        complement=None if p.complement is None else p.complement.detach().clone(),
        groups=None if p.groups is None else p.groups.clone(),
        dtype=torch.promote_types(p.input_preds.dtype, torch.float32),
        has_labels=not target.is_floating_point(),
        sum_tolerance=math.inf,  # no check that probabilities sum to 1, which was done before
        n_invalid=None,
        n_dropped=None,
        n_annotators=None,
    )


def _joined(pieces: list[Predictions]) -> Predictions:
    """Concatenate predictions; see `_moved`. If any have soft targets, labels are converted to soft targets."""
    first, has_labels = pieces[0], all(piece.has_labels for piece in pieces)
    per_class = first.task == "multiclass"
    axis = -2 if per_class else -1
    sizes = [piece.input_preds.shape[axis] for piece in pieces]
    shape = list(pieces[0].input_preds.shape)
    shape[axis] = sum(sizes)
    dtype = reduce(torch.promote_types, (piece.input_preds.dtype for piece in pieces))
    whole = pieces[0].input_preds.new_empty(shape, dtype=dtype)
    for k, part in enumerate(torch.split(whole, sizes, axis)):
        part.copy_(pieces[k].input_preds)
        pieces[k] = replace(pieces[k], input_preds=part)
    input_preds = whole

    def target(piece: Predictions) -> Tensor:
        labels = piece.input_target
        if has_labels or not piece.has_labels:
            return labels
        return (one_hot(labels, piece.num_classes) if per_class else labels).to(piece.input_preds)

    def joined(columns: Iterable[Tensor | None], axis: int = -1) -> Any:
        found = [column.to(input_preds.device) for column in columns if column is not None]
        return torch.cat(found, axis) if found else None

    return replace(
        first,
        input_preds=input_preds,
        input_target=joined(map(target, pieces), -2 if per_class and not has_labels else -1),
        weights=joined(piece.weights for piece in pieces),
        zero_weight=joined(piece.zero_weight for piece in pieces),
        complement=joined(piece.complement for piece in pieces),
        groups=joined(piece.groups for piece in pieces),
        dtype=torch.promote_types(input_preds.dtype, torch.float32),
        has_labels=has_labels,
        copies=all(piece.copies for piece in pieces),
    )
