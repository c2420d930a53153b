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
from torchcalib.calibration.cross_validation import CalibrationOptions, fitted, flat_input, input_options
from torchcalib.calibration.gain import Score, both_scores, score_function
from torchcalib.calibration.isotonic import CentredIsotonicCalibration, IsotonicCalibration, VennAbersCalibration
from torchcalib.calibration.one_against_rest import HistogramBinning, PlattScaling
from torchcalib.calibration.quantiles import BayesianBinning, SplineCalibration
from torchcalib.calibration.selection import (
    Candidate,
    Choice,
    candidate_of,
    choose,
    contributions,
    design_effect,
    has_one_class,
    interval_of,
    row_scores,
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
from torchcalib.display.words import ends, listed, p_words, rounded

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
            (`groups`), and contain the variation of the fit. With a significant likelihood ratio and NLL, the
            differences are those of the fit on its own samples. Ends are at most 100. A weight is the importance of one
            sample, also if it is a whole number.
        gain: gain of `preferred` in percent, corrected for its choice as the best of several calibrators. It is at most
            the uncorrected gain.
        interval: 95% interval of this gain; None for other scores. It can contain 0 for a significant gain: few samples
            can show that predictions are miscalibrated, while the gain of the fit to them is uncertain.
        is_significant: whether there is evidence for a positive gain at the 1% level; True for other scores. See
            `p_value` for calibrators that contain the identity. The gain of others is compared with its standard error
            (two-sided normal test).
        p_value: p-value of the likelihood ratios of all calibrators that contain the identity, adjusted for their
            number (Bonferroni, with weights 1 / k for k parameters), if `preferred` is one of them; otherwise None.
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
    p_value: float | None = None
    nll_is_infinite: bool = False
    advisable: tuple[str, ...] = ()
    obstacle: str = ""

    def advised(self, worthwhile: float, *, is_faulty: bool = False) -> "Recommendation":
        """Return the recommendation for another smallest gain in percent that justifies a calibration stage.

        If `is_faulty`, the text stands beside a verdict of miscalibration: without evidence for a gain, it does not
        advise to use the predictions as they are.
        """
        best = self.preferred if self.gain >= worthwhile and self.is_significant else None
        return replace(self, best=best, text=_in_words(replace(self, best=best), is_faulty))

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
    5%), and the best one of those with equally many; the first one of those that are equal up to rounding.

    Some calibrators contain the identity and are fitted by maximum likelihood: temperature, bias, affine, vector and
    quadratic scaling, and beta calibration. Their evidence is the likelihood ratio, as for causes of miscalibration in
    reports. It has about twice as many standard errors as the paired difference of scores. One of them is worse than
    another one with more parameters if its likelihood is significantly smaller (level 5%) and its held-out score is
    not smaller. All of them together give advice for a calibrated model with a probability of at most about 1%
    (Bonferroni). The gain of other methods must be significant at the 1% level.

    Methods that can assign probability 0 to a possible class, such as isotonic calibration and histogram binning, are
    not recommended by NLL, because the NLL of new data could be infinite. If NLL is infinite without calibration,
    calibrators are compared by the Brier score.

    The gain of the preferred calibrator is corrected for the choice. If several calibrators with equally many
    parameters are within noise, the fit with the largest error is likely to be chosen, for which the gain is corrected.
    For methods without a likelihood ratio, the choice is also repeated in bootstrap samples, and the gain is computed
    on the samples that were not drawn (BBC-CV). The smaller one of both results is used. The gain is not conditioned on
    its own significance.

    Do not choose a calibrator by its calibration error. Histogram binning often has a low expected calibration error
    (ECE), because it makes all predictions of a bin equal. Its proper scores are often the worst of all calibrators.

    Args:
        score: Score; see `calibration_loss`.
        calibrators: candidates. None for all of this package that support the task and the weights, except
            `PlattScaling`, `BayesianBinning`, `SplineCalibration` and `DirichletCalibration`.
        worthwhile: smallest gain in percent of the score that justifies a calibration stage. There must also be
            evidence for it; see `Recommendation.is_significant`.
        **options: Options of the folds, held-out data and options of the input; see `cross_val_calibrate`.

    Returns:
        A `Recommendation`.

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
    # `func` is the function in a functools.partial
    named = score if isinstance(score, str) else getattr(getattr(score, "func", score), "__name__", "score")
    used, before, after, obstacle = named, torch.tensor(torch.nan, device="cpu"), dict[str, Candidate](), ""
    for name, calibrator in zip(names, calibrators, strict=True):
        if isinstance(score, str):
            fitting = fitted(preds, target, task, calibrator, options)
            used = usable_score(score, fitting.p)
            obstacle = "all samples have the same class" if has_one_class(fitting.p) else ""
            groups = options.get("groups")
            p = fitting.p
            held_out = [row_scores(used, p, values) for values in fitting.calibrate(p)]
            parts = contributions(torch.stack(held_out).mean(0), p, groups)
            in_sample, nll, effect = None, None, 1.0
            if fitting.is_cross_validated and parts.dim() == 1:
                whole = calibrator.fit_to(p)
                values = whole.calibrated(p.values, p.from_logits)
                in_sample = contributions(row_scores(used, p, values), p, groups)
                nll = p.cross_entropy, row_scores("nll", p, values)
                if groups is not None:
                    effect = design_effect(p, *nll, groups)
            before = contributions(row_scores(used, p, p.values), p, groups)
            advisable = is_advisable(calibrator, used)
            before, after[name] = (
                before,
                candidate_of(calibrator, p, parts, in_sample, nll, is_advisable=advisable, effect=effect),
            )
            n_axes = 1  # contributions of units
        else:
            before, parts = both_scores(preds, target, task, score, calibrator, options)
            after[name] = Candidate(parts)
            n_axes = 0
        if before.dim() > n_axes:
            shape = tuple(before.shape)
            raise ValueError(f"`preds` must have no batch axes, got {shape}. Pass one data set.")
    return recommendation_of(used, before, after, worthwhile, nll_is_infinite=used != named, obstacle=obstacle)


def is_advisable(calibrator: Calibrator, score: str) -> bool:
    """Return whether the expected score of new data is finite after a fit."""
    return score != "nll" or not calibrator.assigns_zero


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
    before, after = before.cpu(), {name: each.on_cpu() for name, each in after.items()}
    raw, is_nll = float(before.sum()), score == "nll"
    rcl = {name: 100 * (1 - float(each.parts.sum()) / raw) if raw else math.nan for name, each in after.items()}
    advisable = (
        [] if obstacle else [name for name, each in after.items() if each.is_advisable and math.isfinite(rcl[name])]
    )
    if advisable:
        choice = choose(before, {name: after[name] for name in advisable}, is_nll=is_nll)
    else:
        choice = Choice(max(rcl, key=lambda name: -math.inf if math.isnan(rcl[name]) else rcl[name]))
    found = Recommendation(
        text="",
        score=score,
        raw=raw,
        rcl=rcl,
        best=None,
        preferred=choice.name,
        intervals={name: interval_of(before, after[name], is_nll=is_nll) for name in after if before.dim() and raw},
        gain=choice.gain,
        interval=choice.interval,
        is_significant=choice.is_significant,
        p_value=choice.p_value,
        nll_is_infinite=nll_is_infinite,
        advisable=tuple(advisable),
        obstacle=obstacle,
    )
    return found.advised(worthwhile)


def applicable(p: Predictions) -> tuple[list[Calibrator], tuple[str, ...]]:
    """Return the calibrators that support the predictions, and notes on calibrators that are omitted."""
    found: list[Calibrator] = []
    slow, fractional = [], []
    counts = p.has_labels and are_counts(p.weights)
    for calibrator in (method() for method in CALIBRATORS):
        if p.task not in calibrator.tasks:
            continue
        if calibrator.whole_weights and not counts:
            fractional.append(calibrator.name)
        elif calibrator.is_slow_for(p):
            slow.append(calibrator.name)
        else:
            found.append(calibrator)
    notes = []
    if fractional:
        why = "weights are not whole numbers" if p.has_labels else "targets are soft"
        notes.append(f"Omitted, because {why}: {listed(fractional)}.")
    if slow:
        notes.append(
            f"Omitted, because they are slow for {p.num_classes:,} classes: {listed(slow)}. "
            "Call torchcalib.calibration.relative_calibration_loss to compute their gain."
        )
    return found, tuple(notes)


_LEAVE, _NONE = "Use the predictions as they are", "No calibrator is advised for this sample"


def _in_words(found: Recommendation, is_faulty: bool) -> str:
    if found.nll_is_infinite:
        words = _in_words(replace(found, nll_is_infinite=False), is_faulty)
        return f"NLL is infinite, so calibrators are compared by the Brier score. {words}"
    score, name, gain, leave = found.score_name, found.preferred, found.gain, _NONE if is_faulty else _LEAVE
    if math.isnan(found.raw):
        return f"{score} is undefined, and so is the gain of calibration."
    if found.raw == 0:
        return f"{score} is 0: there is nothing to gain by calibration."
    if math.isnan(gain):
        reason = "no calibrator was compared" + f" that keeps {score} finite on new data" * (found.score != "brier")
        return f"{leave}: {found.obstacle or reason}."
    is_tiny = 0 < gain < 0.05  # rounds to 0.0%
    shown = "less than 0.1%" if is_tiny else f"{gain:.1f}%" if gain < 99.95 else ">99.9%"
    is_certain = True
    if found.interval is not None and math.isfinite(found.interval[0]):
        is_certain = found.interval[0] > 0
        shown += f" (95% interval {ends(*found.interval)})"
    if found.best is not None:
        uncertain = "" if is_certain else " This gain is uncertain: fit it to more samples."
        return f"Add {name}: it cuts {score} by {shown}{_compared(found)}.{uncertain}"
    if not gain > 0:
        return f"{leave}: no calibrator lowers {score} significantly ({name} {_gains(gain)})."
    if not found.is_significant:
        evidence = "" if found.p_value is None else f" (p {p_words(found.p_value, equals='= ')})"
        return f"{leave}: the gain of {name} is not significant at the 1% level{evidence}, {shown} of {score}."
    return f"{leave}: the preferred calibrator, {name}, cuts {score} by {'' if is_tiny else 'only '}{shown}."


def _compared(found: Recommendation) -> str:
    others = {key: found.rcl[key] for key in found.advisable if key != found.preferred}
    if found.preferred != TemperatureScaling.name and TemperatureScaling.name in found.rcl:
        others = {TemperatureScaling.name: found.rcl[TemperatureScaling.name]}
    if not others:
        return ""
    other = max(others, key=lambda key: round(others[key], 4))  # the first one of those that are equal
    within = ", a difference within noise" if others[other] > found.gain else ""
    return f"; {other} {_gains(others[other])}{within}"


def _gains(value: float) -> str:
    if math.isfinite(value):
        return f"gains {rounded(round(value, 1) + 0, '.1f')}%"  # + 0 turns -0 into 0
    return "leaves it infinite" if math.isnan(value) else "makes it infinite"
