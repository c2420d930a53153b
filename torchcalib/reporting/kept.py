"""A buffer of predictions, for bootstrap intervals and calibrators, which need all of them at once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions
from torchcalib.core.inputs import InputFormat, read_input
from torchcalib.core.predictions import Predictions
from torchcalib.io.saved import saved_value

MOST_VALUES = 2**26
"""Largest number of values of `preds`: 50,000 samples of 1,000 classes, and some more."""

MOST_SAMPLES = 2**20
"""Largest number of samples, every label of a sample being one."""

_NOT_CONCATENABLE = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that torch.cat does not combine with others."""


class _Piece(NamedTuple):
    """Predictions `(n,)` or `(n, C)`, targets and weights of one update."""

    preds: Tensor
    target: Tensor
    weights: Tensor | None

    @property
    def present(self) -> Tensor:
        """Which targets have weight, of the shape of `target`."""
        if self.weights is None:
            return torch.ones_like(self.target, dtype=torch.bool)
        present = self.weights != 0
        return (present.unsqueeze(-1) if self.target.dim() == 2 else present).expand(self.target.shape)

    @property
    def has_shares(self) -> bool:
        """Whether some targets are shares rather than labels."""
        target = self.target
        return target.is_floating_point() and bool(((target != target.round()) & self.present).any())


class KeptSamples:
    """Copies of predictions, flattened to one series, up to a maximal number; none of them above that.

    Args:
        input_format: of the predictions.
        n_ranks: number of processes that share the maximal number.

    Attributes:
        why_not: why no predictions are kept any more, a clause; empty as long as they are.
        has_shares: whether some targets are shares rather than labels.
        n_samples: number of samples so far, every label of a sample being one.
        n_values: number of values of `preds` so far.
    """

    def __init__(self, input_format: InputFormat, n_ranks: int = 1) -> None:
        self.why_not = ""
        self.has_shares = False
        self.n_samples = self.n_values = 0
        self._format, self._n_ranks = input_format, n_ranks
        self._pieces: list[_Piece] = []

    @property
    def has_samples(self) -> bool:
        """Whether any predictions are kept."""
        return bool(self._pieces)

    def add(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> None:
        """Keep a copy of a piece that has been checked."""
        samples = self._flat(preds)
        if not len(samples):
            return
        labels = self._flat(target) if target.shape == preds.shape else target.reshape(-1)
        piece = _Piece(samples.detach(), labels.detach(), None if weights is None else weights.detach().reshape(-1))
        self.has_shares |= piece.has_shares
        self.n_samples += len(samples) if self._format.task == "multiclass" else samples.numel()
        self.n_values += samples.numel()
        self.relieve()
        if not self.why_not:  # copies, because callers reuse their buffers
            self._pieces.append(_Piece(*(None if x is None else x.clone() for x in piece)))  # type: ignore[arg-type]

    def relieve(self, n_samples: int = 0, n_values: int = 0) -> None:
        """Drop all predictions if they are too many, together with so many elsewhere."""
        n_samples, n_values = self.n_samples + n_samples, self.n_values + n_values
        if n_samples > MOST_SAMPLES // self._n_ranks or n_values > MOST_VALUES // self._n_ranks:
            self._drop()

    def _drop(self) -> None:
        self._pieces = []
        self.why_not = (
            f"there are more than {MOST_SAMPLES:,} samples or {MOST_VALUES:,} values of predictions. "
            "Call torchcalib.recommend or torchcalib.bootstrap on a part of them"
        )

    def __add__(self, other: "KeptSamples") -> "KeptSamples":
        """Return the predictions of both, those of `other` last."""
        both = KeptSamples(self._format)
        both.n_samples, both.n_values = self.n_samples + other.n_samples, self.n_values + other.n_values
        both.has_shares = self.has_shares or other.has_shares
        both.why_not = self.why_not or other.why_not
        both._pieces = [] if both.why_not else [*self._pieces, *other._pieces]
        both.relieve()
        return both

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values for `of_state`."""
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
        """Return the saved predictions.

        Raises:
            TypeError, ValueError: for a state that no predictions have.
        """
        kept = cls(input_format)
        # Values are not checked again, and labels become indices.
        checked = replace(input_format, class_axis=-1, num_classes=num_classes, validate_args=True)
        for preds, target, weights in saved_value(state, "pieces", list):
            checked.read(preds, target, weights, batch_shape=())
            if preds.dim() != 1 + (input_format.task != "binary"):
                raise ValueError(f"pieces must be flat, got predictions of shape {tuple(preds.shape)}")
            kept._pieces.append(_Piece(preds, target, weights))
        kept.n_samples, kept.n_values = (saved_value(state, name, int) for name in ("n_samples", "n_values"))
        kept.has_shares = saved_value(state, "has_shares", bool)
        if saved_value(state, "too_many", bool):
            kept._drop()
        elif (n_values := sum(piece.preds.numel() for piece in kept._pieces)) != kept.n_values:
            raise ValueError(f"pieces must hold {kept.n_values:,} values, got {n_values:,}")
        kept.relieve()
        return kept

    def read(self) -> Predictions:
        """Return all predictions in canonical form."""
        preds, target, options = self.given()
        return read_input(self._format.task, preds, target, options, hard_targets=not self.has_shares)

    def given(self) -> tuple[Tensor, Tensor, InputOptions]:
        """Return predictions (classes last), targets and options, as `Calibrator.fit` takes them."""
        preds, _, weights = zip(*self._pieces, strict=True)
        target = torch.cat([self._targets(piece) for piece in self._pieces])
        joined = None
        if any(w is not None for w in weights):
            ones = [x.new_ones(len(x), dtype=torch.float64) for x in preds]
            joined = torch.cat([one if w is None else w.to(one) for w, one in zip(weights, ones, strict=True)])
        whole = _Piece(torch.cat(preds), target, joined)
        self._pieces = [whole]  # so that memory holds predictions once
        options = InputOptions(
            from_logits=self._format.from_logits,
            weights=joined,
            ignore_index=self._format.ignore_index,
            positive_classes=self._format.positive_classes,
            validate_args=False,  # every piece has been checked
            nan_policy=self._format.nan_policy,
        )
        return whole.preds, whole.target, options

    def _flat(self, x: Tensor) -> Tensor:
        """Return `(N,)`, or `(N, C)` where there are classes or labels."""
        if self._format.task == "binary":
            return x.reshape(-1)
        return x.movedim(self._format.class_axis, -1).flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)

    def _targets(self, piece: _Piece) -> Tensor:
        """Return integer labels, `(N,)` or multi-label `(N, L)`; or shares if some piece has them."""
        target, multiclass = piece.target, self._format.task == "multiclass"
        if target.is_floating_point():
            if self.has_shares:
                return target
            labels = torch.where(piece.present, target, 0).long()
            return labels.argmax(-1) if multiclass else labels
        if not self.has_shares:
            return target.long() if target.dtype in _NOT_CONCATENABLE else target
        if multiclass:
            classes = torch.arange(piece.preds.shape[-1], device=target.device)
            target = target.long().unsqueeze(-1) == classes
        return target.to(piece.preds)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate tensors; return None if there are none."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
