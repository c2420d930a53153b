"""Calibration slope and intercept: a logistic regression of the outcomes on the log-odds of the predictions."""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.core.arguments import InputOptions, Task, check_choice, is_number, task_read_as
from torchcalib.core.events import Reduction
from torchcalib.core.ranked import RankedSample
from torchcalib.inference.evidence import Evidence
from torchcalib.metrics.ranked.reading import RankedMetric, RankedReading, evaluate
from torchcalib.metrics.smooth.reading import kept_apart
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton.logistic import logistic_fit

CoxComponent = Literal["slope", "intercept", "in_the_large", "slope_se", "intercept_se", "p_value"]


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


def cox(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    eps: float | None = None,
    reduction: Reduction | None = None,
    **options: Unpack[InputOptions],
) -> CoxCalibration:
    """Cox's calibration slope and intercept: log-odds of the outcome = intercept + slope times predicted log-odds.

    A logistic regression of the outcomes on the predictions' log-odds, fitted by maximum likelihood. It tells two
    kinds of error apart: predictions that are too extreme or too timid (slope), and too high or too low (intercept,
    or, with the slope held at 1, calibration in the large).

    Args:
        preds: probabilities, or logits, whose log-odds do not saturate: binary `(..., N)`, multi-class `(..., N, C)`,
            multi-label `(..., N, L)`.
        target: labels.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        eps: clip probabilities to [eps, 1 - eps]; None takes them as they are.
        reduction: what the confidence is of; see `ece`. Each class or label has a fit of its own; there is no average.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers: copies, also to the standard errors.

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
    read_as = task_read_as(task, options)
    reading = RankedReading(read_as, reduction, kept_apart(task, reduction, options), hard_targets=True)
    values = evaluate(partial(cox_from_sample, eps=_checked(eps)), reading, task, preds, target, options)
    return CoxCalibration(*values.unbind(-1))


def _checked(eps: object) -> float | None:
    """Return a bound on probabilities, or raise."""
    if eps is None:
        return None
    if not is_number(eps):
        raise TypeError(f"`eps` must be a number or None, got {eps!r}.")
    if not 0 < eps < 0.5:
        raise ValueError(f"`eps` must be above 0 and below 0.5, got {eps!r}.")
    return float(eps)


class Cox(RankedMetric):
    """A part of Cox's logistic regression, streamed; see `cox`. `resolution` keeps a sketch instead of every sample.

    Args:
        component: what `compute` returns: a field of `CoxCalibration`.
        eps: see `cox`.
        **options: those of `RankedMetric`, but for `average`: every class keeps its own.
    """

    unit = "of the component: slopes are plain numbers, intercepts log-odds"
    perfect = 1.0
    question = "are predictions too extreme (slope below 1) or too timid (above), too low or too high"
    source = "Cox, Biometrika 1958"
    higher_is_better = None  # a slope is best at 1, an intercept at 0
    plot_lower_bound = None
    plot_upper_bound = None
    hard_targets = True

    def __init__(
        self,
        *,
        task: Task,
        component: CoxComponent = "slope",
        eps: float | None = None,
        reduction: Reduction | None = None,
        **options: Any,
    ) -> None:
        check_choice("component", component, get_args(CoxComponent))
        checked = _checked(eps)
        super().__init__(task=task, reduction=reduction, average=kept_apart(task, reduction, options), **options)
        self.component, self.eps = component, checked
        self.perfect = 1.0 if component in ("slope", "p_value") else 0.0  # type: ignore[misc]

    def _value(self, statistic: RankedSample) -> Tensor:
        return getattr(self._fit(statistic), self.component)  # type: ignore[no-any-return]

    def fit(self) -> CoxCalibration:
        """Return all parts, over all ranks if `torch.distributed` is running."""
        return self._fit(self._synced_statistic())

    def evidence_from(self, statistic: RankedSample, **how: Any) -> Evidence:  # noqa: ARG002
        """Refuse: a slope is no error, and has its own test."""
        raise TypeError(
            "`metric` must be a calibration error to have a noise floor, got Cox. "
            "Its fit() has standard errors and a p-value."
        )

    def _fit(self, sample: RankedSample) -> CoxCalibration:
        return CoxCalibration(*self.reading.read(partial(cox_from_sample, eps=self.eps), sample).unbind(-1))
