"""What a calibration stage would gain: predictions that are kept whole, and the calibrators that are tried on them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchcalib.calibration_loss.folds import FoldOptions, folds_of
from torchcalib.calibration_loss.recommendation import name_of, recommendation_of
from torchcalib.calibration_loss.training import out_of_fold
from torchcalib.calibrators import Calibrator, DPCalibration, HistogramBinning, Isotonic, Temperature
from torchcalib.predictions import InputFormat, InputOptions, Predictions, read_input
from torchcalib.report.data import CalibrationGain, CalibrationStage
from torchcalib.scores import NLL, Brier, ScoreMetric, ScoreReading

MOST_VALUES = 2**26
"""Values of `preds` that are kept to try calibrators on: 50,000 samples of 1,000 classes, and some more."""

MOST_SAMPLES = 2**20
"""Samples, every label of a sample being one, that are kept to try calibrators on."""

MOST_PRODUCTS = 2**31
"""Samples times squared classes up to which DP calibration is tried: a Newton step takes as many multiplications."""

CALIBRATORS: tuple[Calibrator[Any], ...] = (Temperature(), DPCalibration(), HistogramBinning(), Isotonic())
"""What is tried, the simplest first."""

SCORES: dict[type[ScoreMetric], str] = {NLL: "NLL", Brier: "Brier score"}

FOLDS = FoldOptions(n_folds=5, seed=0)


class KeptSamples:
    """Predictions as they came, one series in one dtype, as long as calibrators can be tried on them.

    Attributes:
        why_not: why they cannot, a clause; empty as long as they can.
    """

    def __init__(self, input_format: InputFormat) -> None:
        self.why_not = ""
        self._format = input_format
        self._pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._n_values = self._n_samples = 0

    def add(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> None:
        """Keep a copy of a piece, which has been checked; or of nothing any more, from the first that does not fit."""
        if self.why_not:
            return
        samples = self._flat(preds)
        self._n_values += samples.numel()
        self._n_samples += len(samples) if self._format.task == "multiclass" else samples.numel()
        if self._n_values > MOST_VALUES or self._n_samples > MOST_SAMPLES:
            self._give_up(
                f"calibrators are tried on up to {MOST_SAMPLES:,} samples and {MOST_VALUES:,} values of predictions, "
                "and there are more. Call torchcalib.recommend on a part of them"
            )
            return
        weights = None if weights is None else weights.detach().reshape(-1)
        labels = self._labels(target, weights, target.shape == preds.shape)
        if labels is None:
            self._give_up("calibrators are fitted to labels, and targets are shares")
            return
        # Copies: callers reuse their buffers.
        piece = samples.detach().clone(), labels.clone(), None if weights is None else weights.clone()
        self._pieces.append(piece)

    def read(self) -> Predictions:
        """Return all of them in canonical form."""
        preds, target, options = self.given()
        return read_input(self._format.task, preds, target, options, hard_targets=True)

    def given(self) -> tuple[Tensor, Tensor, InputOptions]:
        """Return predictions, targets and options of input, as `Calibrator.fit` takes them; classes are last."""
        preds, target, weights = zip(*self._pieces, strict=True)
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

    def _labels(self, target: Tensor, weights: Tensor | None, like_preds: bool) -> Tensor | None:
        """Return integer labels, `(N,)` or for labels `(N, L)`; None if some are shares."""
        labels = self._flat(target) if like_preds else target.reshape(-1)
        if not labels.is_floating_point():
            return labels
        present = torch.ones_like(labels, dtype=torch.bool)
        if weights is not None:
            present &= (weights != 0).unsqueeze(-1) if labels.dim() == 2 else weights != 0
        if bool((present & (labels != labels.round())).any()):
            return None
        labels = torch.where(present, labels, 0).long()
        return labels.argmax(-1) if self._format.task == "multiclass" else labels

    def _give_up(self, why: str) -> None:
        self.why_not, self._pieces = why, []


def calibration_stage(kept: KeptSamples) -> tuple[CalibrationStage | None, tuple[str, ...]]:
    """Try every calibrator that applies; None, and a note of why, where this cannot be done."""
    why_not = kept.why_not
    if not why_not:
        try:
            p = kept.read()
            why_not = _why_no_folds(p)
            if not why_not:
                return _stage(p), ()
        except RuntimeError as error:  # no memory, above all: the rest of the report is worth having
            why_not = f"trying calibrators failed with {type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
    return None, (f"What a calibration stage would gain is left out: {why_not}.",)


def _stage(p: Predictions) -> CalibrationStage:
    """Cross-validate. Every calibrator has the same folds, and one solve for all of them."""
    tried, notes = _applicable(p)
    at, n_folds = folds_of(p, FOLDS)
    raw = _scores(p)
    after: dict[str, dict[str, float]] = {}
    remarked: dict[str, list[str]] = defaultdict(list)
    for calibrator in tried:
        name = name_of(calibrator)
        values = out_of_fold(p, calibrator, at, n_folds)
        after[name] = _scores(replace(p, given=values.to(p.dtype)))
        for remark in calibrator.fit_to(p).remarks():
            remarked[remark].append(name)
    gains = {score: {name: _rcl(raw[score], of[score]) for name, of in after.items()} for score in raw}
    found = tuple(
        CalibrationGain(score, name, after[name][score], gain) for score in raw for name, gain in gains[score].items()
    )
    recommendation = recommendation_of("nll", raw["NLL"], gains["NLL"])
    by_name = {name_of(calibrator): calibrator for calibrator in tried}
    affine = [calibrator for calibrator in tried if isinstance(calibrator, Temperature | DPCalibration)]
    best = affine[-1] if recommendation.best is None else by_name[recommendation.best]
    notes += tuple(f"{_listed(names)}: {remark.replace('`', '')}" for remark, names in remarked.items())
    return CalibrationStage(recommendation, raw, found, best, n_folds, FOLDS["seed"], notes)


def _rcl(raw: float, after: float) -> float:
    """As `torchcalib.rcl` has it; NaN where there is nothing to gain."""
    return float(100 * (1 - torch.tensor(after, dtype=torch.float64) / raw))


def _scores(p: Predictions) -> dict[str, float]:
    return {
        name: float(ScoreReading(metric.score, p.task).read(metric.score.recipe(False).of(p)))
        for metric, name in SCORES.items()
    }


def _applicable(p: Predictions) -> tuple[list[Calibrator[Any]], tuple[str, ...]]:
    """Return what is tried, and words for what is not although the task would allow it."""
    tried: list[Calibrator[Any]] = []
    notes: tuple[str, ...] = ()
    counts = p.weights is None or bool((p.weights == p.weights.round()).all())
    for calibrator in CALIBRATORS:
        if p.task not in calibrator.tasks:
            continue
        if calibrator.whole_weights and not counts:
            notes += (
                f"{_listed([name_of(calibrator)])} is not tried: it counts copies of a sample, and weights are no "
                "counts.",
            )
        elif isinstance(calibrator, DPCalibration) and p.target.numel() * p.num_classes**2 > MOST_PRODUCTS:
            notes += (
                f"DP calibration is not tried: with {p.num_classes:,} classes it takes long. "
                "torchcalib.rcl, which uses it, says what it would gain.",
            )
        else:
            tried.append(calibrator)
    return tried, notes


def _why_no_folds(p: Predictions) -> str:
    """Say what keeps a calibrator from being cross-validated: a class whose samples are none or one."""
    target = p.target.long().reshape(-1, p.target.shape[-1])
    present = torch.ones_like(target, dtype=torch.bool)
    if p.weights is not None:
        present = (p.weights != 0).expand(p.target.shape).reshape(target.shape)
    counts = target.new_zeros(len(target), p.num_classes).scatter_add(-1, target, present.long())
    if p.task == "multilabel":
        short = (counts < 2).any(-1).nonzero().flatten().tolist()
        needed = "cross-validation takes two samples with a label and two without"
        return f"{needed}, and label {_some(short)} has fewer" if short else ""
    alone = (counts[0] == 1).nonzero().flatten().tolist()
    if alone:
        return f"cross-validation takes two samples of a class, and there is one of class {_some(alone)}"
    return "all samples are of one class" if int((counts > 0).sum()) < 2 else ""


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _listed(names: Sequence[str]) -> str:
    """Join names, as the beginning of a sentence."""
    joined = " and ".join(names)
    return joined[:1].upper() + joined[1:]
