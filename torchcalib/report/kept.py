"""Predictions that are kept as they came, for what takes all of them at once."""

import torch
from torch import Tensor

from torchcalib.predictions import InputFormat, InputOptions, Predictions, read_input

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
    """

    def __init__(self, input_format: InputFormat, n_ranks: int = 1) -> None:
        self.why_not = ""
        self.has_shares = False
        self._format = input_format
        self._pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._n_values = self._n_samples = 0
        self._most_values, self._most_samples = MOST_VALUES // n_ranks, MOST_SAMPLES // n_ranks

    @property
    def has_samples(self) -> bool:
        """Whether any are kept."""
        return bool(self._pieces)

    def add(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> None:
        """Keep a copy of a piece, which has been checked; or of nothing any more, from the first that does not fit."""
        if self.why_not:
            return
        samples = self._flat(preds)
        if not len(samples):  # which are neither labels nor shares
            return
        self._n_values += samples.numel()
        self._n_samples += len(samples) if self._format.task == "multiclass" else samples.numel()
        if self._n_values > self._most_values or self._n_samples > self._most_samples:
            self._give_up(
                f"there are more than {MOST_SAMPLES:,} samples or {MOST_VALUES:,} values of predictions. "
                "Call torchcalib.recommend or torchcalib.bootstrap on a part of them"
            )
            return
        labels = self._flat(target) if target.shape == preds.shape else target.reshape(-1)
        weights = None if weights is None else weights.detach().reshape(-1)
        self.has_shares |= bool(_are_shares(labels, weights).any())
        # Copies: callers reuse their buffers.
        piece = samples.detach().clone(), labels.detach().clone(), None if weights is None else weights.clone()
        self._pieces.append(piece)

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

    def _give_up(self, why: str) -> None:
        self.why_not, self._pieces = why, []


def _present(target: Tensor, weights: Tensor | None) -> Tensor:
    """Return which targets count, of the shape of `target`."""
    if weights is None:
        return torch.ones_like(target, dtype=torch.bool)
    return ((weights != 0).unsqueeze(-1) if target.dim() == 2 else weights != 0).expand(target.shape)


def _are_shares(target: Tensor, weights: Tensor | None) -> Tensor:
    """Return which targets are shares of votes, and no labels."""
    return (target != target.round()) & _present(target, weights) if target.is_floating_point() else target.new_zeros(1)
