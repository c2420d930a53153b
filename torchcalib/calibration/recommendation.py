"""Recommend whether to add a calibration stage, from cross-validated scores with intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import torch
from torch import Tensor

from torchcalib.calibration.affine import (
    AffineScaling,
    BiasCorrection,
    EnsembleTemperatureScaling,
    TemperatureScaling,
)
from torchcalib.calibration.binary import BetaCalibration, QuadraticScaling
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.cross_validation import CalibrationOptions, Fitting, fitted, flat_input, input_options
from torchcalib.calibration.gain import Score, both_scores, score_function
from torchcalib.calibration.isotonic import CentredIsotonicCalibration, IsotonicCalibration, VennAbersCalibration
from torchcalib.calibration.one_against_rest import HistogramBinning, OneAgainstRest, PlattScaling
from torchcalib.calibration.quantiles import BayesianBinning, SplineCalibration
from torchcalib.calibration.selection import (
    Candidate,
    Choice,
    RowScore,
    choose,
    class_counts,
    contributions,
    effective_samples,
    has_one_class,
    interval_of,
    row_scores,
    standard_error,
    usable_score,
)
from torchcalib.calibration.structured import (
    DirichletCalibration,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)
from torchcalib.core.arguments import Task
from torchcalib.core.checks import are_counts
from torchcalib.core.predictions import Predictions
from torchcalib.core.tasks import infers_task
from torchcalib.display.words import ends, listed

CALIBRATORS: tuple[type[Calibrator], ...] = (
    TemperatureScaling,
    BiasCorrection,
    EnsembleTemperatureScaling,
    AffineScaling,
    BetaCalibration,
    QuadraticScaling,
    VectorScaling,
    StructuredVectorScaling,
    StructuredMatrixScaling,
    HistogramBinning,
    IsotonicCalibration,
    CentredIsotonicCalibration,
    VennAbersCalibration,
)
"""Calibrators that are compared by default, simple ones first."""

ON_REQUEST: tuple[type[Calibrator], ...] = (PlattScaling, BayesianBinning, SplineCalibration, DirichletCalibration)
"""Calibrators that are compared only if they are passed, because others are similar, or their fits take long or need
selected penalties."""

_LIMITS: tuple[tuple[tuple[type, ...], int, int], ...] = (
    ((AffineScaling, BiasCorrection), 2, 2**31),
    ((StructuredMatrixScaling, DirichletCalibration), 2, 2**23),
    ((EnsembleTemperatureScaling,), 1, 2**25),
    ((VectorScaling, StructuredVectorScaling, OneAgainstRest), 1, 2**22),
)
"""Calibrators, exponent k, and the largest (number of samples) * (number of classes)^k, which limits their run time."""


@dataclass(frozen=True)
class Recommendation:
    """Recommendation whether to add a calibration stage.

    Attributes:
        text: the recommendation in one or two sentences.
        score: name of the score: `"nll"`, `"brier"` or the name of a function. It is `"brier"` instead of `"nll"` if
            NLL is infinite without calibration.
        raw: score of the uncalibrated predictions.
        rcl: relative calibration loss (RCL) of each calibrator in percent, by name.
        best: name of the recommended calibrator; None if none is worthwhile.
        preferred: name of the calibrator with the fewest parameters that is not significantly worse than the best one,
            even if it is not worthwhile; the best one of those with equally many.
        intervals: 95% interval of the gain of each calibrator in percent, `(low, high)`, by name; empty for other
            scores than `"nll"` and `"brier"`. Its target is the gain on new data of the fit to all samples.
            Standard errors are those of paired differences between independent samples, or between clusters
            (`groups`), and contain the variation of the fit. Ends are at most 100. A weight is the importance of one
            sample, also if it is a whole number.
        gain: gain of `preferred` in percent, corrected for its choice as the best of several calibrators and, if it is
            significant, for this selection. It is at most the uncorrected gain.
        interval: 95% interval of this gain; None for other scores. If the correction for selection is large, it can
            contain 0.
        is_significant: whether the gain is positive at the 1% level (two-sided normal test), also after the correction
            for this selection; True for other scores.
        nll_is_infinite: whether the Brier score was used because the NLL is infinite.
        advisable: names of the calibrators that can be recommended; see `recommend`.
        obstacle: reason why no calibrator can be recommended, as a clause; empty for none.
    """

    text: str
    score: str
    raw: float
    rcl: Mapping[str, float]
    best: str | None
    preferred: str
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    gain: float = math.nan
    interval: tuple[float, float] | None = None
    is_significant: bool = True
    nll_is_infinite: bool = False
    advisable: tuple[str, ...] = ()
    obstacle: str = ""

    def advised(self, worthwhile: float) -> "Recommendation":
        """Return the recommendation for another smallest gain in percent that justifies a calibration stage."""
        best = self.preferred if self.gain >= worthwhile and self.is_significant else None
        return replace(self, best=best, text=_in_words(replace(self, best=best)))

    @property
    def score_name(self) -> str:
        """Display name of the score, such as "NLL"."""
        return _SCORE_NAMES.get(self.score, self.score)


_SCORE_NAMES = {"nll": "NLL", "brier": "Brier score", "bayes_risk": "Bayes risk"}


@infers_task
def recommend(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    score: Score = "nll",
    calibrators: Sequence[Calibrator] | None = None,
    worthwhile: float = 5.0,
    **options: Unpack[CalibrationOptions],
) -> Recommendation:
    """Recommend whether to add a calibration stage, and which calibrator to use.

    Calibrators are compared by the cross-validated score. For `"nll"` and `"brier"`, the calibrator with the fewest
    parameters among those that are not significantly worse than the best one is preferred (paired difference, level
    5%), and the best one of those with equally many. Methods that can assign probability 0 to a possible class, such as
    isotonic calibration and histogram binning, are not recommended by NLL, because the NLL of new data could be
    infinite. If NLL is infinite without calibration, calibrators are compared by the Brier score.

    The gain of the preferred calibrator is corrected for the choice: in each bootstrap sample, the choice is repeated,
    and the gain is computed on the samples that were not drawn (BBC-CV). If several calibrators with equally many
    parameters are within noise, the fit with the largest error is likely to be chosen, for which the gain is corrected
    too. The smaller one of both results is used.

    Do not choose a calibrator by its calibration error. Histogram binning often has a low expected calibration error
    (ECE), because it makes all predictions of a bin equal. Its proper scores are often the worst of all calibrators.

    Args:
        preds: Probabilities or logits: binary `(N,)`, multi-class `(N, C)`, multi-label `(N, L)`.
        target: Labels; see `torchcalib.functional.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it.
        score: Score; see `calibration_loss`.
        calibrators: candidates. None for all of this package that support the task and the weights, except
            `BayesianBinning` and `SplineCalibration`.
        worthwhile: smallest gain in percent of the score that justifies a calibration stage. The lower end of its 99%
            interval must also be positive.
        **options: Options of the folds, held-out data and options of the input; see `cross_val_calibrate`.

    Returns:
        A `Recommendation`.

    Raises:
        TypeError, ValueError: for invalid input.

    Warns:
        UserWarning: see `calibration_loss`.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 4; Tsamardinos, Greasidou, Borboudakis:
        Bootstrapping the out-of-sample predictions for efficient and accurate cross-validation (Machine Learning,
        2018), the method BBC-CV.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> logits = torch.randn(1000, generator=generator)
        >>> target = (torch.rand(1000, generator=generator) < logits.sigmoid()).long()
        >>> recommend(3 * logits, target, task="binary", from_logits=True).best
        'temperature scaling'
    """
    if calibrators is not None and not calibrators:
        raise ValueError("`calibrators` must contain at least one calibrator, got none. Omit it to use the default.")
    preds, target, task, options = flat_input(preds, target, task, options)
    if calibrators is None:
        p = TemperatureScaling().read(preds, target, task=task, options=input_options(options))
        calibrators, _ = applicable(p)
    names = [calibrator.name for calibrator in calibrators]
    names = [name if names.count(name) == 1 else repr(each) for name, each in zip(names, calibrators, strict=True)]
    score_function(score)  # raises for an unknown score
    if math.isnan(worthwhile):
        raise ValueError("`worthwhile` must be a number of percent, got nan. Omit it for 5.")
    used, before, after, obstacle = _name_of_score(score), torch.tensor(torch.nan), dict[str, Candidate](), ""
    for name, calibrator in zip(names, calibrators, strict=True):
        if isinstance(score, str):
            fitting = fitted(preds, target, task, calibrator, options)
            used = usable_score(score, fitting.p)
            obstacle = "all samples have the same class" if has_one_class(fitting.p) else ""
            before, after[name] = _candidate(fitting, calibrator, used, options.get("groups"))
            n_axes = 1  # contributions of units
        else:
            before, parts = both_scores(preds, target, task, score, calibrator, options)
            after[name] = Candidate(parts)
            n_axes = 0
        if before.dim() > n_axes:
            shape = tuple(before.shape)
            raise ValueError(f"`preds` must have no batch axes, got {shape}. Pass one data set.")
    is_infinite = used != _name_of_score(score)
    return recommendation_of(used, before, after, worthwhile, nll_is_infinite=is_infinite, obstacle=obstacle)


def _candidate(
    fitting: Fitting, calibrator: Calibrator, score: RowScore, groups: Tensor | None
) -> tuple[Tensor, Candidate]:
    """Return the contributions of independent units to the raw mean score `(..., U)`, and the candidate."""
    p = fitting.p
    held_out = [row_scores(score, p, values) for values in fitting.calibrate(p)]
    parts = contributions(torch.stack(held_out).mean(0), p, groups)
    in_sample = math.nan
    if fitting.is_cross_validated and parts.dim() == 1:
        whole = calibrator.fit_to(p)
        in_sample = float(contributions(row_scores(score, p, whole.calibrated(p.values, p.from_logits)), p).sum())
    before = contributions(row_scores(score, p, p.values), p, groups)
    n_parameters, advisable = calibrator.n_parameters(p.num_classes), is_advisable(calibrator, p, score)
    return before, Candidate(parts, in_sample, effective_samples(p), n_parameters, advisable)


def is_advisable(calibrator: Calibrator, p: Predictions, score: str) -> bool:
    """Return whether the expected score of new data is finite after a fit to these predictions."""
    if score != "nll" or calibrator.zeros == "never":
        return True
    return calibrator.zeros == "absent classes" and not bool((class_counts(p) == 0).any())


def recommendation_of(
    score: str,
    before: Tensor,
    after: Mapping[str, Candidate],
    worthwhile: float = 5.0,
    *,
    nll_is_infinite: bool = False,
    obstacle: str = "",
) -> Recommendation:
    """Return the recommendation for scores before and after each calibrator.

    `before` contains the contributions of independent units to the raw score `(U,)`, or is the raw score `()`.
    `worthwhile` is the smallest gain in percent that justifies a calibration stage. `nll_is_infinite` is True if
    `score` replaces an infinite NLL. `obstacle` is a clause that explains why no calibrator can be recommended; empty
    for none.
    """
    before, after = before.cpu(), {name: each._replace(parts=each.parts.cpu()) for name, each in after.items()}
    raw = float(before.sum())
    rcl = {name: 100 * (1 - float(each.parts.sum()) / raw) if raw else math.nan for name, each in after.items()}
    errors = {name: 100 * standard_error(before, after[name]) / abs(raw) for name in after if before.dim() and raw}
    advisable = (
        [] if obstacle else [name for name, each in after.items() if each.is_advisable and math.isfinite(rcl[name])]
    )
    if advisable:
        choice = choose(before, {name: after[name] for name in advisable})
    else:
        choice = Choice(max(rcl, key=lambda name: -math.inf if math.isnan(rcl[name]) else rcl[name]))
    found = Recommendation(
        text="",
        score=score,
        raw=raw,
        rcl=rcl,
        best=None,
        preferred=choice.name,
        intervals={name: interval_of(rcl[name], error) for name, error in errors.items()},
        gain=choice.gain,
        interval=choice.interval,
        is_significant=choice.is_significant,
        nll_is_infinite=nll_is_infinite,
        advisable=tuple(advisable),
        obstacle=obstacle,
    )
    return found.advised(worthwhile)


def applicable(p: Predictions) -> tuple[list[Calibrator], tuple[str, ...]]:
    """Return the calibrators that support the predictions, and notes on calibrators that are omitted."""
    found: list[Calibrator] = []
    slow, fractional = [], []
    counts = are_counts(p.weights)
    for calibrator in (method() for method in CALIBRATORS):
        if p.task not in calibrator.tasks:
            continue
        if calibrator.whole_weights and not counts:
            fractional.append(calibrator.name)
        elif _is_slow(calibrator, p):
            slow.append(calibrator.name)
        else:
            found.append(calibrator)
    notes = []
    if fractional:
        notes.append(f"Omitted, because weights are not whole numbers: {listed(fractional)}.")
    if slow:
        notes.append(
            f"Omitted, because they are slow for {p.num_classes:,} classes: {listed(slow)}. "
            "Call torchcalib.calibration.relative_calibration_loss to compute their gain."
        )
    return found, tuple(notes)


def _is_slow(calibrator: Calibrator, p: Predictions) -> bool:
    if p.task != "multiclass":
        return False
    n, n_classes = p.target.numel(), p.num_classes
    return any(isinstance(calibrator, kinds) and n * n_classes**exponent > most for kinds, exponent, most in _LIMITS)


def _name_of_score(score: Score) -> str:
    if isinstance(score, str):
        return score
    return getattr(getattr(score, "func", score), "__name__", "score")  # `func` is the function in a functools.partial


_LEAVE = "Use the predictions as they are"


def _in_words(found: Recommendation) -> str:
    if found.nll_is_infinite:
        words = _in_words(replace(found, nll_is_infinite=False))
        return f"NLL is infinite, so calibrators are compared by the Brier score. {words}"
    score, name, gain = found.score_name, found.preferred, found.gain
    if math.isnan(found.raw):
        return f"{score} is undefined, and so is the gain of calibration."
    if found.raw == 0:
        return f"{score} is 0: there is nothing to gain by calibration."
    if math.isnan(gain):
        reason = "no calibrator was compared" + f" that keeps {score} finite on new data" * (found.score != "brier")
        return f"{_LEAVE}: {found.obstacle or reason}."
    is_tiny = 0 < gain < 0.05  # rounds to 0.0%
    shown = "less than 0.1%" if is_tiny else f"{gain:.1f}%" if gain < 99.95 else ">99.9%"
    if found.interval is not None and math.isfinite(found.interval[0]):
        shown += f" (95% interval {ends(*found.interval, digits=3)})"
    if found.best is not None:
        return f"Add {name}: it cuts {score} by {shown}{_compared(found)}."
    if not gain > 0:
        return f"{_LEAVE}: no calibrator lowers {score} significantly ({name} {_gains(gain)})."
    if not found.is_significant:
        return f"{_LEAVE}: the gain of {name} is not significant at the 1% level, {shown} of {score}."
    return f"{_LEAVE}: the preferred calibrator, {name}, cuts {score} by {'' if is_tiny else 'only '}{shown}."


def _compared(found: Recommendation) -> str:
    """Return a clause on temperature scaling, or on the calibrator with the largest gain if it is recommended."""
    simple, name = TemperatureScaling.name, found.preferred
    if name != simple and simple in found.rcl:
        return f"; {simple} {_gains(found.rcl[simple])}"
    others = {key: found.rcl[key] for key in found.advisable if key != name}
    if not others:
        return ""
    next_best = max(others, key=lambda key: others[key])
    within = ", a difference within noise" if others[next_best] > found.rcl[name] else ""
    return f"; {next_best} {_gains(others[next_best])}{within}"


def _gains(value: float) -> str:
    if math.isfinite(value):
        return f"gains {round(value, 1) + 0:.1f}%"  # + 0 turns -0 into 0
    return "leaves it infinite" if math.isnan(value) else "makes it infinite"
