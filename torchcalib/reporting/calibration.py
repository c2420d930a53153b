"""Evaluate calibrators by cross-validation for a report."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchcalib.calibration.affine import AffineScaling, BiasCorrection, TemperatureScaling
from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.calibration.cross_validation import calibrated_by_fold, weights_of_training_parts
from torchcalib.calibration.folds import FoldOptions, folds_of
from torchcalib.calibration.recommendation import Recommendation, applicable, is_advisable, recommendation_of
from torchcalib.calibration.selection import (
    Candidate,
    RowScore,
    candidate_of,
    contributions,
    has_one_class,
    row_scores,
    usable_score,
)
from torchcalib.core.checks import are_counts
from torchcalib.core.events import modes_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import BinStats, with_noise_row
from torchcalib.display.progress import in_parts
from torchcalib.display.words import capitalised, listed, printable
from torchcalib.functional.proper_scores import is_correct
from torchcalib.io.errors import shown
from torchcalib.reporting.catalogue import bins_of, catalogue_of
from torchcalib.reporting.lines import bin_table
from torchcalib.reporting.testing import failure
from torchcalib.results.calibration import CalibrationStage, CalibratorLine
from torchcalib.results.lines import LineInterval

T = TypeVar("T", bound=Calibrator)

SCORES: Mapping[str, Callable[[Predictions], Tensor]] = {
    "accuracy": is_correct,
    "nll": attrgetter("cross_entropy"),
    "brier_score": attrgetter("squared_error"),
}
"""Scores of a `CalibratorLine`, by field."""

_FIELDS = {"nll": "nll", "brier": "brier_score"}
"""Field of a `CalibratorLine` by the name of the score in a `Recommendation`."""

DIAGNOSED = (TemperatureScaling, BiasCorrection, AffineScaling)
"""Calibrators whose likelihoods the diagnosis compares."""

FOLDS = FoldOptions(n_folds=5, seed=0)

_SHOWN_LABELS = 3  # number of labels whose fitted parameters are described, those with the largest ECE

_MOST_SOFT = 2**26
"""Largest number of elements of predictions that are repeated for each class of soft targets."""

_AT_ONCE = 2**21
"""Number of predicted values that are calibrated at once."""


@dataclass(frozen=True)
class FittedCalibrators:
    """Calibrators fitted to all samples, by class, for the diagnosis of a report."""

    fits: dict[type[Calibrator], Calibrator]
    nll: dict[type[Calibrator], Tensor]  # NLL of each sample after calibration `(..., N)`; only for `DIAGNOSED`


def calibration_stage(
    p: Predictions | None,
    why_not: str,
    class_names: Sequence[str] = (),
    effect: float = 1.0,
    *,
    n_bins: int = 15,
    right: bool = False,
) -> tuple[CalibrationStage | None, FittedCalibrators | None, tuple[str, ...]]:
    """Cross-validate every calibrator that supports the task and the weights.

    Return the scores, the calibrators fitted to all samples, and notes. If it is impossible, the first two are None,
    and a note contains the reason. `why_not` is the reason as a clause if `p` is None. `effect` is the design effect of
    clusters.
    """
    if p is not None:
        why_not = _obstacle(p)
        try:
            if not why_not:
                return *_stage(p, class_names, effect, n_bins, right), ()
        # Usually out of memory. The rest of the report is still possible.
        except (RuntimeError, ValueError) as error:
            why_not = f"cross-validation failed with {failure(error)}"
    return None, None, (f"Calibration gains are omitted: {why_not}.",)


def _obstacle(p: Predictions) -> str:
    """Return the reason why calibrators cannot be cross-validated as a clause; empty for none."""
    if p.soft and p.input_preds.numel() * p.num_classes > _MOST_SOFT:
        return "targets are soft, and there are too many samples and classes"
    if has_one_class(p):
        return "all samples have the same class"
    if p.task == "multilabel" and bool((sample_weights(p).sum(-1) == 0).any()):
        return "a label has no known entries"
    if p.groups is not None and len(torch.unique(p.groups)) < 2:
        return "all rows are in one cluster"
    return ""


def fitted(calibrator: T, p: Predictions, class_axis: int = -1, positive_classes: Sequence[int] | None = None) -> T:
    """Return a fitted copy of a calibrator; raise a ValueError if it does not support the task or the weights."""
    is_whole = p.has_labels and are_counts(p.weights)
    if p.task not in calibrator.tasks or (calibrator.whole_weights and not is_whole):
        tasks, counts = ", ".join(calibrator.tasks), " with labels and whole-number weights" * calibrator.whole_weights
        raise ValueError(
            f"`calibrator` must support the data, got "
            f"{shown(calibrator)} for task {p.task}. It supports {tasks}{counts}."
        )
    with torch.inference_mode(False):  # autograd does not support tensors that were created in inference mode
        return calibrator.fit_to(p, class_axis=class_axis, positive_classes=positive_classes)


class _Evaluated(NamedTuple):
    """Evaluation of predictions, calibrated or not."""

    scores: dict[str, Tensor]  # score of each sample `(..., N)`, by field of `CalibratorLine`
    ece: float
    bins: BinStats


Pieces = Iterable[tuple[slice | Tensor, Predictions]]
"""Pieces of calibrated predictions, with their positions in consecutive copies of all samples, one for each split."""


def _evaluated(p: Predictions, pieces: Pieces, n_splits: int, n_bins: int, right: bool) -> _Evaluated:
    """Return the mean scores of each sample over splits, and ECE and bins of the predictions of all splits."""
    n = p.samples[-1]
    shape = (*p.samples[:-1], n_splits * n)
    scores = {name: torch.zeros(shape, dtype=torch.float64, device=p.input_preds.device) for name in SCORES}
    catalogue = catalogue_of(p.task, n_bins, right)
    main = modes_of(p.task)[0]
    accumulator = catalogue.accumulators[bins_of(main)]
    bins: BinStats | None = None
    for at, piece in pieces:
        for name, score_of in SCORES.items():
            scores[name][..., at] = score_of(piece).to(torch.float64)
        of_piece = accumulator.from_predictions(piece)
        bins = of_piece if bins is None else bins + of_piece
    assert bins is not None and bins.noise_flag is not None  # noqa: PT018 - there is a piece, with sums of noise
    bins = accumulator.wrap(with_noise_row(bins.sums, bins.noise_flag))
    means = {name: values.reshape(*shape[:-1], n_splits, n).mean(-2) for name, values in scores.items()}
    ece = next(each for each in catalogue.members if each.key == f"ece/{main}").estimator.value(bins)
    return _Evaluated(means, float(ece), bins)


def _stage(
    p: Predictions, class_names: Sequence[str], effect: float, n_bins: int, right: bool
) -> tuple[CalibrationStage, FittedCalibrators]:
    calibrators, notes = applicable(p)
    groups = None if p.groups is None else p.groups.reshape(-1)  # a cluster of dependent rows is in one fold
    splits, n_folds = folds_of(p, {**FOLDS, "groups": groups})
    score = usable_score("nll", p)
    lines = {"none": _evaluated(p, [(slice(None), p)], 1, n_bins, right)}
    before = contributions(lines["none"].scores[_FIELDS[score]], p, groups)
    candidates: dict[str, Candidate] = {}
    all_fits: dict[str, Calibrator] = {}
    whole = FittedCalibrators({}, {})
    names_by_remark: dict[str, list[str]] = defaultdict(list)
    weights = torch.cat((weights_of_training_parts(p, splits, n_folds), sample_weights(p).unsqueeze(0)))
    for calibrator in in_parts(calibrators, attrgetter("name")):
        fits = calibrator.fit_to(p, weights)
        last = whole.fits[type(calibrator)] = fits.part(len(splits) * n_folds)
        found = _evaluated(p, _held_out(p, fits, splits, n_folds), len(splits), n_bins, right)
        all_fits[calibrator.name], lines[calibrator.name] = fits, found
        in_sample = _calibrated_scores(p, last, score)
        nll = in_sample if score == "nll" else _calibrated_scores(p, last, "nll")
        if type(calibrator) in DIAGNOSED:
            whole.nll[type(calibrator)] = nll
        candidates[calibrator.name] = candidate_of(
            calibrator,
            p,
            contributions(found.scores[_FIELDS[score]], p, groups),
            contributions(in_sample, p, groups),
            (p.cross_entropy, nll),
            is_advisable=is_advisable(calibrator, score),
            effect=effect,
        )
        for remark in last.remarks():
            names_by_remark[remark].append(calibrator.name)

    recommendation = recommendation_of(score, before, candidates, nll_is_infinite=score != "nll")
    best = next(calibrator for calibrator in calibrators if calibrator.name == recommendation.preferred)
    bins = lines[best.name].bins
    if len(splits) > 1:  # the table contains each sample once
        bins = _evaluated(p, _held_out(p, all_fits[best.name], splits[:1], n_folds), 1, n_bins, right).bins
    notes += tuple(
        f"{capitalised(listed(names))}: {remark.replace('`', '')}" for remark, names in names_by_remark.items()
    )
    names = [printable(name) for name in class_names]
    raw = lines["none"].bins
    worst = (raw.share * raw.gap.abs()).sum(-1).nan_to_num(0).argsort(descending=True).tolist()
    words = {each.name: _parameters(whole.fits[type(each)], names, worst) for each in calibrators}
    chosen = whole.fits[type(best)]
    stage = CalibrationStage(
        recommendation=recommendation,
        lines=tuple(_line(name, each, p, recommendation, words) for name, each in lines.items()),
        table=bin_table(p.task, bins),
        calibrator=best,
        n_folds=n_folds,
        n_repeats=len(splits),
        seed=FOLDS["seed"],
        notes=notes,
        label_parameters=tuple(chosen.part(k).in_words() for k in range(len(worst))) if chosen.grad_norm.dim() else (),
    )
    return stage, whole


def _parameters(fit: Calibrator, class_names: Sequence[str], worst: Sequence[int]) -> str:
    """Return the fitted parameters in words; of the first labels in `worst` if every label has its own fit."""
    if not fit.grad_norm.dim():
        return fit.in_words(class_names)
    names = class_names or [f"label {k}" for k in range(len(fit.grad_norm))]
    shown = [f"{names[k]}: {fit.part(k).in_words()}" for k in worst[:_SHOWN_LABELS]]
    return "; ".join([*shown, *["..."] * (len(fit.grad_norm) > _SHOWN_LABELS)])


def _line(
    name: str, found: _Evaluated, p: Predictions, recommendation: Recommendation, words: dict[str, str]
) -> CalibratorLine:
    scores = {field: float(contributions(values, p).sum()) for field, values in found.scores.items()}
    is_preferred = name == recommendation.preferred
    gain = recommendation.gain if is_preferred else recommendation.rcl.get(name)
    interval = recommendation.interval if is_preferred else recommendation.intervals.get(name)
    return CalibratorLine(
        calibrator=name,
        **scores,
        ece=found.ece,
        gain=gain,
        interval=LineInterval(*interval) if interval is not None and math.isfinite(interval[0]) else None,
        parameters=words.get(name, ""),
    )


def _held_out(p: Predictions, fits: Calibrator, splits: Tensor, n_folds: int) -> Pieces:
    """Yield predictions that are calibrated with fits to the other folds, in pieces that bound the memory."""
    n = p.samples[-1]
    if p.task != "multiclass":  # folds can differ between labels
        parts = [calibrated_by_fold(p, fits, folds, n_folds, k * n_folds) for k, folds in enumerate(splits)]
        copies = p if len(splits) == 1 else p.part(torch.arange(n, device=splits.device).repeat(len(splits)))
        yield slice(None), copies.with_values(torch.cat(parts, -1).to(p.dtype))
        return
    for first, by_fold in _folds_by_piece(splits.cpu(), n_folds, max(1, _AT_ONCE // p.num_classes)):
        # One call calibrates the samples of all folds. Shorter folds are padded.
        padded = pad_sequence(by_fold, batch_first=True, padding_value=-1)
        kept = (padded >= 0).flatten().nonzero().squeeze(-1).to(splits.device, non_blocking=True)
        values = p.values[(padded % n).to(splits.device, non_blocking=True)]
        calibrated = fits.part(slice(first, first + len(by_fold))).calibrated_by_fit(values, p.from_logits)
        calibrated = calibrated.flatten(0, 1)[kept]
        positions = torch.cat(by_fold).to(splits.device, non_blocking=True)
        yield positions, p.part(positions % n).with_values(calibrated.to(p.dtype))


def _folds_by_piece(splits: Tensor, n_folds: int, most: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield pieces of consecutive folds, with about `most` samples.

    A piece is the index of its first fold, and the positions of the samples of each fold in copies of all samples.
    """
    piece: list[Tensor] = []
    for at, (k, f) in enumerate(product(range(len(splits)), range(n_folds))):
        of_fold = (splits[k] == f).nonzero().squeeze(-1) + k * splits.shape[-1]
        for positions in torch.split(of_fold, most):
            piece.append(positions)
            if sum(map(len, piece)) >= most:  # few large pieces are faster than many small ones
                yield at + 1 - len(piece), piece
                piece = []
    if piece:
        yield len(splits) * n_folds - len(piece), piece


def _calibrated_scores(p: Predictions, fit: Calibrator, score: RowScore) -> Tensor:
    """Return the score of each sample after calibration, `(..., N)`."""
    rows = max(1, _AT_ONCE // p.num_classes)
    pieces = (p.part(slice(i, i + rows)) for i in range(0, p.samples[-1], rows))
    return torch.cat([row_scores(score, each, fit.calibrated(each.values, each.from_logits)) for each in pieces], -1)
