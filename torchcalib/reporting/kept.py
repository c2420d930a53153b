"""Predictions that are kept as they came, for what takes all of them at once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions
from torchcalib.core.inputs import InputFormat, read_input
from torchcalib.core.predictions import Predictions
from torchcalib.io.saved import saved_value

MOST_VALUES = 2**26
"""Values of `preds` that are kept: 50,000 samples of 1,000 classes, and some more."""

MOST_SAMPLES = 2**20
"""Samples, every label of a sample being one, that are kept."""

_JOINED_WITH_NONE = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that torch.cat takes with no other."""


class KeptSamples:
    """Predictions as they came, one series in one dtype, up to a number: for what takes all of them at once.

    Args:
        input_format: what they are.
        n_ranks: among how many processes, which join what they kept, the number is shared.

    Attributes:
        why_not: why none are kept any more, a clause; empty as long as they are.
        has_shares: whether some targets are shares of votes, and no labels.
        n_samples: how many samples there were, every label of a sample being one.
        n_values: how many values of `preds`.
    """

    def __init__(self, input_format: InputFormat, n_ranks: int = 1) -> None:
        self.why_not = ""
        self.has_shares = False
        self._format = input_format
        self._pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.n_samples = self.n_values = 0
        self._n_ranks = n_ranks

    @property
    def has_samples(self) -> bool:
        """Whether any are kept."""
        return bool(self._pieces)

    def add(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> None:
        """Keep a copy of a piece, which has been checked; or of nothing any more, from the first that does not fit."""
        samples = self._flat(preds)
        if not len(samples):  # which are neither labels nor shares
            return
        labels = self._flat(target) if target.shape == preds.shape else target.reshape(-1)
        weights = None if weights is None else weights.detach().reshape(-1)
        self.has_shares |= bool(_are_shares(labels, weights).any())
        self.n_samples += len(samples) if self._format.task == "multiclass" else samples.numel()
        self.n_values += samples.numel()
        self.relieve()
        if self.why_not:
            return
        # Copies: callers reuse their buffers.
        piece = samples.detach().clone(), labels.detach().clone(), None if weights is None else weights.clone()
        self._pieces.append(piece)

    def relieve(self, n_samples: int = 0, n_values: int = 0) -> None:
        """Keep none any more if they are too many, with so many elsewhere that are to be together with these."""
        share = self._n_ranks
        if self.n_samples + n_samples > MOST_SAMPLES // share or self.n_values + n_values > MOST_VALUES // share:
            self._give_up()

    def _give_up(self) -> None:
        self._pieces = []
        self.why_not = (
            f"there are more than {MOST_SAMPLES:,} samples or {MOST_VALUES:,} values of predictions. "
            "Call torchcalib.recommend or torchcalib.bootstrap on a part of them"
        )

    def __add__(self, other: "KeptSamples") -> "KeptSamples":
        """Return the samples of both, those of `other` last."""
        both = KeptSamples(self._format)
        both.n_samples, both.n_values = self.n_samples + other.n_samples, self.n_values + other.n_values
        both.has_shares = self.has_shares or other.has_shares
        both.why_not = self.why_not or other.why_not
        both._pieces = [] if both.why_not else [*self._pieces, *other._pieces]
        both.relieve()
        return both

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values, of which `of_state` makes the same again."""
        alike = groupby(self._pieces, lambda piece: [None if t is None else (t.dtype, t.shape[1:]) for t in piece])
        return {
            "n_samples": self.n_samples,
            "n_values": self.n_values,
            "has_shares": self.has_shares,
            "too_many": bool(self.why_not),
            "pieces": [tuple(map(_joined, zip(*some, strict=True))) for _, some in alike],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], input_format: InputFormat, num_classes: int | None) -> Self:
        """Return what was saved.

        Raises:
            TypeError, ValueError: it is no such thing, or holds predictions that could not have been added.
        """
        kept = cls(input_format)
        # Nobody looks at the values later on, and labels become places in tables.
        checked = replace(input_format, class_axis=-1, num_classes=num_classes, validate_args=True)
        for preds, target, weights in saved_value(state, "pieces", list):
            checked.read(preds, target, weights, batch_shape=())
            if preds.dim() != 1 + (input_format.task != "binary"):
                raise ValueError(f"pieces must be flat, got predictions of shape {tuple(preds.shape)}")
            kept._pieces.append((preds, target, weights))
        kept.n_samples, kept.n_values = (saved_value(state, name, int) for name in ("n_samples", "n_values"))
        kept.has_shares = saved_value(state, "has_shares", bool)
        if saved_value(state, "too_many", bool):
            kept._give_up()
        elif sum(preds.numel() for preds, _, _ in kept._pieces) != kept.n_values:
            raise ValueError(f"pieces must hold the {kept.n_values:,} values that were counted, got others")
        kept.relieve()
        return kept

    def read(self) -> Predictions:
        """Return all of them in canonical form."""
        preds, target, options = self.given()
        return read_input(self._format.task, preds, target, options, hard_targets=not self.has_shares)

    def given(self) -> tuple[Tensor, Tensor, InputOptions]:
        """Return predictions, targets and options of input, as `Calibrator.fit` takes them; classes are last."""
        preds, _, weights = zip(*self._pieces, strict=True)
        target = [self._targets(*piece) for piece in self._pieces]
        joined = None
        if any(w is not None for w in weights):
            ones = [x.new_ones(len(x), dtype=torch.float64) for x in preds]
            joined = torch.cat([one if w is None else w.to(one) for w, one in zip(weights, ones, strict=True)])
        self._pieces = [(torch.cat(preds), torch.cat(target), joined)]  # nor are the pieces held beside them
        options = InputOptions(
            from_logits=self._format.from_logits,
            weights=joined,
            ignore_index=self._format.ignore_index,
            positive_classes=self._format.positive_classes,
            validate_args=False,  # every piece has been checked
            nan_policy=self._format.nan_policy,
        )
        return *self._pieces[0][:2], options

    def _flat(self, x: Tensor) -> Tensor:
        """Return `(N,)`, or `(N, C)` where there are classes or labels."""
        if self._format.task == "binary":
            return x.reshape(-1)
        return x.movedim(self._format.class_axis, -1).flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)

    def _targets(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
        """Return integer labels, `(N,)` or for labels `(N, L)`; or shares if there are any in some piece."""
        multiclass = self._format.task == "multiclass"
        if self.has_shares and multiclass and not target.is_floating_point():
            classes = torch.arange(preds.shape[-1], device=target.device)
            return (target.long().unsqueeze(-1) == classes).to(preds)
        if self.has_shares:
            return target if target.is_floating_point() else target.to(preds)
        if not target.is_floating_point():
            return target.long() if target.dtype in _JOINED_WITH_NONE else target
        present = _present(target, weights)
        labels = torch.where(present, target, 0).long()
        return labels.argmax(-1) if multiclass else labels


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Join what pieces have of one kind, or nothing of any."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _present(target: Tensor, weights: Tensor | None) -> Tensor:
    """Return which targets count, of the shape of `target`."""
    if weights is None:
        return torch.ones_like(target, dtype=torch.bool)
    return ((weights != 0).unsqueeze(-1) if target.dim() == 2 else weights != 0).expand(target.shape)


def _are_shares(target: Tensor, weights: Tensor | None) -> Tensor:
    """Return which targets are shares of votes, and no labels."""
    return (target != target.round()) & _present(target, weights) if target.is_floating_point() else target.new_zeros(1)
