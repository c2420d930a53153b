"""Tests of calibration by regression and by the Brier score: Cox's slope and intercept, Spiegelhalter's z."""

import math
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.core.arguments import InputOptions, Task, check_choice, is_number, task_read_as
from torchcalib.core.event_sums import EventSums
from torchcalib.core.events import Events, Mode, resolve_mode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import Sums
from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.estimator import Estimator, functional
from torchcalib.metrics.ranked import RankedMetric, kept_apart, ranked
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton.logistic import logistic_fit

_EVENTS = 2**13  # of a series that are summed at a time: by one thread, in memory that is at hand

CoxComponent = Literal["slope", "intercept", "in_the_large", "slope_se", "intercept_se", "p_value"]
SpiegelhalterComponent = Literal["z", "p_value"]


class CoxCalibration(NamedTuple):
    """The logistic regression of the outcomes on the log-odds of the predictions.

    Attributes:
        slope: 1 for a calibrated model; below 1 predictions are too extreme, above 1 not extreme enough.
        intercept: log-odds of the outcome where the prediction is 1/2; 0 for a calibrated model.
        in_the_large: the intercept with the slope held at 1: above 0 predictions are too low on the whole.
        slope_se: standard error of the slope, from the observed information.
        intercept_se: standard error of the intercept.
        p_value: of the likelihood-ratio test that slope and intercept are 1 and 0, which asymptotically is chi-squared
            with 2 degrees of freedom.
    """

    slope: Tensor
    intercept: Tensor
    in_the_large: Tensor
    slope_se: Tensor
    intercept_se: Tensor
    p_value: Tensor


def cox_from_sample(sample: RankedSample, eps: float | None = None) -> Tensor:
    """The fields of `CoxCalibration`, as `(..., 6)`."""
    score, positives, n = sample.score.to(wide_dtype(sample.score.device)), sample.positives, sample.n
    if not score.shape[-1]:  # one element that is left out, so that nothing further on need think of none
        score, positives = pad(score, (0, 1), value=torch.nan), pad(positives, (0, 1))
        n = None if n is None else pad(n, (0, 1))
    counted = ~score.isnan()
    if eps is not None:  # before the logarithm, whose slope at 0 would make the gradient NaN
        limit = math.log1p(-eps) - math.log(eps)
        score = score.clamp(-limit, limit) if sample.from_logits else score.clamp(eps, 1 - eps)
    x = score if sample.from_logits else score.log() - torch.log1p(-score)
    n = counted.to(x.dtype) if n is None else n.to(x.dtype).masked_fill(~counted, 0)
    k = positives.to(x.dtype).masked_fill(~counted, 0)
    unbounded = (counted & x.isinf() & (n > 0)).any(-1)
    # What is left out, and what has no place on the line, is out of the sums; the latter makes the result NaN.
    x = x.masked_fill(~counted | x.isinf(), 0)
    fit = logistic_fit(x, k, n)
    # The p-value of chi-squared with 2 degrees of freedom is exp(-statistic / 2).
    p_value = torch.exp(-(fit.log_likelihood - fit.log_likelihood_of_identity).clamp(min=0))
    values = (fit.slope, fit.intercept, fit.offset, fit.slope_variance.sqrt(), fit.intercept_variance.sqrt(), p_value)
    return torch.stack(values, -1).masked_fill(unbounded.unsqueeze(-1), torch.nan)


def _cox(
    *,
    task: Task,
    eps: float | None = None,
    mode: Mode | None = None,
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Cox's calibration slope and intercept: log-odds of the outcome = intercept + slope times predicted log-odds.

    A logistic regression of the outcomes on the predictions' log-odds, fitted by maximum likelihood. It tells two
    kinds of error apart: predictions that are too extreme or too timid (slope), and too high or too low (intercept,
    or, with the slope held at 1, calibration in the large).

    Args:
        target: labels.
        eps: clip probabilities to [eps, 1 - eps]; None takes them as they are.
        mode: what the confidence is of; see `ece`. Each class or label has a fit of its own; there is no average.

    Returns:
        A `CoxCalibration` of `(...)`, or `(..., C)` for classes, in log-odds, in the dtype of `preds` (at least
        float32); NaN without data. Where the likelihood has no maximum there is no number that looks like one:

        - a probability of exactly 0 or 1 has no log-odds: all is NaN, unless `eps` is given;
        - the predictions separate the outcomes: the slope is inf (or -inf, if they do in the wrong order), intercept,
          errors and p-value NaN;
        - all predictions are equal: slope, intercept, errors and p-value NaN;
        - all outcomes are equal: the same, and `in_the_large` is inf or -inf;
        - log-odds of hundreds: what the fit does not find is NaN.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Of slope, intercept and in_the_large in the predictions, by implicit differentiation of the fit. The errors and
        the p-value are constants.

    Source:
        Cox: Two further applications of a model for binary regression (Biometrika 1958). Van Calster et al.:
        Calibration: the Achilles heel of predictive analytics (BMC Medicine 2019), for the names.

    Example:
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0])
        >>> cox(preds, target, task="binary").slope
        tensor(0.9416)
    """
    if not (eps is None or is_number(eps)):
        raise TypeError(f"`eps` must be a number or None, got {eps!r}.")
    if eps is not None and not 0 < eps < 0.5:
        raise ValueError(f"`eps` must be above 0 and below 0.5, got {eps!r}.")
    average = kept_apart(task, mode, options)
    return ranked(partial(cox_from_sample, eps=eps), task, mode, average, options, hard_targets=True)


cox = functional(_cox, CoxCalibration)


class Cox(RankedMetric):
    """A part of Cox's logistic regression, streamed; see `cox`. `resolution` keeps a sketch instead of every sample.

    Args:
        component: what `compute` returns: a field of `CoxCalibration`.
    """

    factory = staticmethod(_cox)
    unit = "of the component: slopes are plain numbers, intercepts log-odds"
    perfect = 1.0
    question = "are predictions too extreme (slope below 1) or too timid (above), too low or too high"
    source = "Cox, Biometrika 1958"
    higher_is_better = None  # a slope is best at 1, an intercept at 0
    plot_lower_bound = None
    plot_upper_bound = None

    def __init__(self, task: Task | None = None, *, component: CoxComponent = "slope", **options: Any) -> None:
        check_choice("component", component, get_args(CoxComponent))
        super().__init__(task, **options)
        self.component = component
        self.perfect = 1.0 if component in ("slope", "p_value") else 0.0  # type: ignore[misc]

    def _value(self, statistic: RankedSample) -> Tensor:
        return getattr(self._fit(statistic), self.component)  # type: ignore[no-any-return]

    def fit(self) -> CoxCalibration:
        """Return all parts, over all ranks if `torch.distributed` is running."""
        return self._fit(self._synced_statistic())

    def test_from(self, statistic: RankedSample, **how: Any) -> CalibrationTest:  # noqa: ARG002
        """Refuse: a slope is no error, and has its own test."""
        raise TypeError(
            "`metric` must be a calibration error to have a noise floor, got Cox. "
            "Its fit() has standard errors and a p-value."
        )

    def _fit(self, sample: RankedSample) -> CoxCalibration:
        return CoxCalibration(*self.estimator.value(sample).unbind(-1))


class SpiegelhalterTest(NamedTuple):
    """Spiegelhalter's test.

    Attributes:
        z: how many standard deviations the Brier score lies above what a calibrated model has.
        p_value: how often chance alone would take |z| that far in a calibrated model.
    """

    z: Tensor
    p_value: Tensor


@dataclass(frozen=True)
class SpiegelhalterAccumulator(EventSums[Sums]):
    """Weight, excess of the Brier score over its expectation, and the variance of that."""

    n_cells = 1

    @property
    def n_quantities(self) -> int:
        """Return 3."""
        return 3

    def cell(self, confidence: Tensor) -> Tensor:
        """Return the only cell."""
        return torch.zeros_like(confidence, dtype=torch.int64)

    def quantities(self, events: Events) -> tuple[Tensor, ...]:
        """Return 1, (y - p) (1 - 2 p), (1 - 2 p)^2 p (1 - p), with 1 - p taken from the events where they have it."""
        p, y = self._wide(events)
        not_p = 1 - p if events.complement is None else events.complement
        lever = not_p - p
        return torch.ones_like(p), (y * not_p - (1 - y) * p) * lever, lever.square() * p * not_p

    def events(self, p: Predictions) -> Events:
        """Return the events of `p`, with complements if P(y=0) is known more exactly than as 1 - P(y=1)."""
        events = super().events(p)
        if p.absent is not None:  # products of NaN have NaN derivatives, even times a weight of 0
            per_class = p.task == "multiclass" and self.mode == "classwise"
            absent = p.absent.unsqueeze(-2) if per_class else p.absent
            events = replace(events, confidence=events.confidence.masked_fill(absent, 0.5))
        if p.task == "multiclass" or not (p.from_logits or p.rest is not None):
            return events
        if self.mode == "top_label":
            return replace(events, complement=torch.where(p.predicts_one, p.not_probs, p.probs))
        return replace(events, complement=p.not_probs)

    def of_events(self, events: Events, p: Predictions) -> Sums:
        """Take the sums over events of `p`, a chunk of them at a time."""
        totals: list[Tensor] = []
        for start in range(0, max(1, events.confidence.shape[-1]), _EVENTS):
            columns = self.columns(events.map(itemgetter((..., slice(start, start + _EVENTS)))), p)
            sums = [column.sum(-1, keepdim=True) for column in columns]
            totals = [total + more for total, more in zip(totals, sums, strict=True)] if totals else sums
        return self.wrap(torch.stack(totals, -2))

    def wrap(self, sums: Tensor) -> Sums:
        """Return `sums` as `Sums`."""
        return Sums(sums)


def spiegelhalter_from_sums(s: Sums) -> Tensor:
    """The z value and its p-value, the fields of `SpiegelhalterTest`, as `(..., 2)`."""
    _, excess, variance = s.sums.squeeze(-1).unbind(-1)
    z = excess / variance.sqrt()
    return torch.stack((z, torch.erfc(z.abs() / math.sqrt(2))), -1)


def _spiegelhalter(*, task: Task, mode: Mode | None = None, **options: Unpack[InputOptions]) -> Estimator[Sums]:
    """Spiegelhalter's test of calibration, by the Brier score: what it is, and what it should be.

    z = sum (y - p) (1 - 2 p) / sqrt(sum (1 - 2 p)^2 p (1 - p)), about standard normal for a calibrated model. Above 0
    the score is worse than the probabilities claim (mostly over-confident), below 0 better. Errors on both sides of
    1/2 can cancel, so a small |z| is no proof of calibration.

    Args:
        target: labels. (A soft target's variance is unknown.)
        mode: what the confidence is of; see `ece`. Class-wise there is a test for each class or label, and no
            average: p-values have none.

    Returns:
        A `SpiegelhalterTest` of `(...)`, or `(..., C)` for classes, in the dtype of `preds` (at least float32). Where
        every probability is 0, 1/2 or 1 nothing can vary: z is +inf, and the p-value 0, if one of 0 or 1 was wrong, and
        else NaN, as without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, where z is finite.

    Source:
        Spiegelhalter: Probabilistic prediction in patient management and clinical trials (Statistics in Medicine 1986).

    Example:
        >>> spiegelhalter(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        SpiegelhalterTest(z=tensor(-0.8296), p_value=tensor(0.4068))
    """
    kept_apart(task, mode, options)
    accumulator = SpiegelhalterAccumulator(resolve_mode(task_read_as(task, options), mode))
    return Estimator(input_format_of(task, options, hard_targets=True), accumulator, spiegelhalter_from_sums, False)


spiegelhalter = functional(_spiegelhalter, SpiegelhalterTest)


class Spiegelhalter(CalibrationMetric[Sums]):
    """Spiegelhalter's test, streamed in 3 sums (for each class); see `spiegelhalter`.

    Args:
        component: `"z"` or `"p_value"`: what `compute` returns.
    """

    factory = staticmethod(_spiegelhalter)
    perfect = 0.0
    unit = "standard deviations"
    question = "is the Brier score what it should be if the probabilities were right"
    source = "Spiegelhalter, Statistics in Medicine 1986"
    higher_is_better = None  # z is best at 0
    plot_lower_bound = None
    plot_upper_bound = None

    def __init__(self, task: Task | None = None, *, component: SpiegelhalterComponent = "z", **options: Any) -> None:
        check_choice("component", component, get_args(SpiegelhalterComponent))
        super().__init__(task, **options)
        self.component = component
        if component == "p_value":
            self.perfect, self.unit = 1.0, "probability"  # type: ignore[misc]

    def _value(self, statistic: Sums) -> Tensor:
        return getattr(self._test(statistic), self.component)  # type: ignore[no-any-return]

    def test_from(self, statistic: Sums, *, level: float = 0.95, **_: Any) -> CalibrationTest:
        """Return z, the expected |z| of a calibrated model, and the p-value. There is no interval."""
        z, p_value = self._test(statistic)
        floor, without = torch.full_like(z, math.sqrt(2 / math.pi)), torch.full_like(z, torch.nan)
        return CalibrationTest(z, floor, p_value, without, without, level)

    def _test(self, sums: Sums) -> SpiegelhalterTest:
        return SpiegelhalterTest(*self.estimator.value(sums).unbind(-1))
