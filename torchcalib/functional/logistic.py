"""Cox's calibration slope and intercept, and Spiegelhalter's test of calibration."""

import math
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.core.arguments import InputOptions, Task, check_choice, is_number
from torchcalib.core.event_sums import EventSums
from torchcalib.core.events import Events, Mode
from torchcalib.core.partition import AnyPartition, Partition
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.sums import Ranges, Sums
from torchcalib.functional.estimator import (
    Declaration,
    Estimator,
    factory_of,
    metric_function,
    streamed_by,
    tuple_function,
)
from torchcalib.functional.ranked import RankedEstimator, no_average, rank_based
from torchcalib.inference.clusters import ClusteredMean, number_of_clusters, sign_p_value
from torchcalib.inference.simulation import RunCells
from torchcalib.inference.testing import CalibrationTest
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton.logistic import logistic_fit

_CHUNK_EVENTS = 2**13  # number of events whose summands fit in the cache of one core

CoxComponent = Literal["slope", "intercept", "in_the_large", "slope_se", "intercept_se", "p_value"]
SpiegelhalterComponent = Literal["z", "p_value"]


class CoxCalibration(NamedTuple):
    """Logistic regression of the outcomes on the log-odds of the predictions; see `cox`.

    Attributes:
        slope: Regression slope; 1 for a calibrated model. Below 1 predictions are too extreme, above 1 too moderate.
        intercept: Regression intercept: log-odds of the outcome for a prediction of 1/2; 0 for a calibrated model.
        in_the_large: Intercept with the slope fixed at 1. If it is positive, predictions are too low on average.
        slope_se: Standard error of the slope, from the observed Fisher information.
        intercept_se: Standard error of the intercept.
        p_value: p-value of the likelihood-ratio test for slope 1 and intercept 0. Its asymptotic null distribution is
            chi-squared with 2 degrees of freedom.

    Example:
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0])
        >>> cox(preds, target, task="binary").in_the_large
        tensor(-0.1723)
    """

    slope: Tensor
    intercept: Tensor
    in_the_large: Tensor
    slope_se: Tensor
    intercept_se: Tensor
    p_value: Tensor


def cox_from_sample(sample: RankedSample, eps: float | None = None) -> Tensor:
    """Fit outcomes to log-odds by logistic regression. Return the fields of `CoxCalibration` as `(..., 6)`."""
    score, positives, n = sample.score.to(wide_dtype(sample.score.device)), sample.positives, sample.n
    if not score.shape[-1]:  # reductions require at least one element: add an ignored one
        score, positives = pad(score, (0, 1), value=torch.nan), pad(positives, (0, 1))
        n = None if n is None else pad(n, (0, 1))
    if eps is not None:  # clip before `log`, whose infinite derivative at 0 would make the gradient NaN
        limit = math.log1p(-eps) - math.log(eps)
        score = score.clamp(-limit, limit) if sample.from_logits else score.clamp(eps, 1 - eps)
    x = score if sample.from_logits else score.log() - torch.log1p(-score)
    n = torch.ones_like(x) if n is None else n.to(x.dtype)
    k, unbounded = positives.to(x.dtype), None
    # A finite sum proves that no score is missing, and that no log-odds are infinite. Reading it synchronises a GPU.
    if x.device.type != "cpu" or value_if_available(x.detach().sum().isfinite()) is not True:
        counted = ~score.isnan()
        n, k = n.masked_fill(~counted, 0), k.masked_fill(~counted, 0)
        unbounded = (counted & x.isinf() & (n > 0)).any(-1)
        # Exclude ignored samples and infinite log-odds from the sums. Infinite log-odds make the result NaN below.
        x = x.masked_fill(~counted | x.isinf(), 0)
    fit = logistic_fit(x, k, n)
    # The survival function of chi-squared with 2 degrees of freedom is exp(-statistic / 2).
    p_value = torch.exp(-(fit.log_likelihood - fit.log_likelihood_of_identity).clamp(min=0))
    values = (fit.slope, fit.intercept, fit.offset, fit.slope_variance.sqrt(), fit.intercept_variance.sqrt(), p_value)
    found = torch.stack(values, -1)
    return found if unbounded is None else found.masked_fill(unbounded.unsqueeze(-1), torch.nan)


@dataclass(frozen=True, eq=False)
class CoxEstimator(RankedEstimator):
    """Estimator of Cox's calibration model, or of one of its results."""

    component: CoxComponent | None = None  # None for all fields of `CoxCalibration` on the last axis

    def of_piece(self, sample: RankedSample) -> Tensor:
        """Compute the component `(...)`, or all `(..., 6)`, from a sample that fits into memory."""
        fields = self.formula(sample)
        return fields if self.component is None else fields[..., CoxCalibration._fields.index(self.component)]

    def test_from(
        self, statistic: RankedSample, *, clusters: AnyPartition | None = None, level: float = 0.95, **_: Any
    ) -> CalibrationTest:
        """Return the likelihood-ratio test of slope 1 and intercept 0; the interval is NaN.

        For a calibrated model the statistic has a chi-squared distribution with 2 degrees of freedom and mean 2. For
        clusters of dependent rows, the p-value is that of a score test; see `score_test_of_clusters`.
        """
        p_value = replace(self, component="p_value").value(statistic)
        nan = torch.full_like(p_value, torch.nan)
        floor = torch.full_like(p_value, 2.0)
        test = CalibrationTest(-2 * p_value.log(), floor, p_value, nan, nan, level, "likelihood ratio, asymptotic")
        return test if clusters is None else _with_clusters(test, statistic, clusters)


@tuple_function(
    CoxCalibration,
    rank_based(
        name="Cox",
        question="slope or intercept of the logistic regression of outcomes on predicted log-odds",
        source="Cox, Biometrika 1958, doi 10.1093/biomet/45.3-4.562",
        unit="dimensionless (slopes) or log-odds (intercepts)",
        perfect=1.0,
        value_range=(-math.inf, math.inf),
        better=None,
        noise_increases=False,
        needs_labels=True,
    ),
)
def cox(
    task: Task | None = None,
    *,
    eps: float | None = None,
    mode: Mode | None = None,
    **options: Unpack[InputOptions],
) -> CoxEstimator:
    """Cox's calibration slope and intercept: log-odds of the outcome = intercept + slope * predicted log-odds.

    The logistic regression of the outcomes on the log-odds of the predictions is fitted by maximum likelihood. A slope
    below 1 means that predictions are too extreme. An intercept above 0 means that predictions are too low. With the
    slope fixed at 1 the intercept is called calibration in the large.

    Args:
        target: Labels.
        eps: Clip probabilities to [eps, 1 - eps]. None does not clip.
        mode: Event whose probability is the confidence; see `ece`. Classes or labels are fitted separately and not
            averaged.

    Returns:
        A `CoxCalibration` with tensors `(...)`, class-wise and multi-label `(..., C)`, in the dtype of `preds` (at
        least float32). Intercepts are log-odds. NaN without data. Special cases:

        - Probabilities are exactly 0 or 1 (infinite log-odds): all fields are NaN, unless `eps` is given.
        - The predictions separate the outcomes: the slope is inf (-inf if the order is reversed). Intercept, standard
          errors and p-value are NaN.
        - All predictions are equal: slope, intercept, standard errors and p-value are NaN.
        - All outcomes are equal: slope, intercept, standard errors and p-value are NaN; `in_the_large` is inf or -inf.
        - The fit does not converge, for example with log-odds in the hundreds: the affected fields are NaN.

    Gradient:
        For slope, intercept and in_the_large, by implicit differentiation of the fit. None for standard errors and
        p-value.

    Reference:
        Cox: Two further applications of a model for binary regression (Biometrika 1958). Van Calster et al.:
        Calibration: the Achilles heel of predictive analytics (BMC Medicine 2019), for the names.

    Example:
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0])
        >>> cox(preds, target, task="binary").slope
        tensor(0.9416)
    """
    if not (eps is None or is_number(eps)):
        raise TypeError(f"`eps` must be a number or None, got {shown(eps)}. A common value is 1e-6.")
    if eps is not None and not 0 < eps < 0.5:
        raise ValueError(f"`eps` must be above 0 and below 0.5, got {shown(eps)}. A common value is 1e-6.")
    average, formula = no_average(task, mode, options), partial(cox_from_sample, eps=eps)
    return CoxEstimator.of_events(
        ExactSample, formula, task, mode, average, options, hard_targets=True, whole_weights=True
    )


@streamed_by(cox)
def cox_component(
    task: Task | None = None,
    *,
    component: CoxComponent = "slope",
    eps: float | None = None,
    mode: Mode | None = None,
    **options: Unpack[InputOptions],
) -> CoxEstimator:
    """Return the estimator of a field of `CoxCalibration`; see `cox`."""
    check_choice("component", component, get_args(CoxComponent))
    estimator: Any = factory_of(cox)(task, eps=eps, mode=mode, **options)
    return replace(estimator, component=component)  # type: ignore[no-any-return]


_MAX_LOG_ODDS = 750.0  # above the log-odds of every float64 below 1, and below minus those of every positive one


def _with_clusters(test: CalibrationTest, sample: RankedSample, clusters: AnyPartition) -> CalibrationTest:
    """Return the likelihood-ratio test with the p-value of a score test for clusters, if that is larger."""
    cells = RunCells.from_sample(replace(sample, log_scored=True))
    table = clusters.residuals(cells.upper)
    assert cells.log_odds is not None  # set for log scores
    # Certain predictions have infinite log-odds and, if they are right, residual 0. The product must be 0.
    log_odds = cells.log_odds.masked_fill(cells.n == 0, 0).clamp(-_MAX_LOG_ODDS, _MAX_LOG_ODDS)
    residual = table[..., 1, :]
    scores = torch.stack((residual.sum(-1), (residual * log_odds.unsqueeze(-2)).sum(-1)), -1)
    n_clusters, mean = number_of_clusters(table), ClusteredMean.of_gaps(cells, table)
    p_value = score_test_of_clusters(scores, n_clusters).maximum(test.p_value)
    # Expected statistic: trace(I^-1 V) for the Fisher information I and the covariance V of the score.
    powers = torch.stack((torch.ones_like(log_odds), log_odds), -1)
    information = (powers * cells.spread.unsqueeze(-1)).mT @ powers
    floor = (torch.linalg.pinv(information, hermitian=True) @ (scores.mT @ scores)).diagonal(dim1=-2, dim2=-1).sum(-1)
    return replace(
        test,
        p_value=p_value.masked_fill(test.p_value.isnan(), torch.nan),
        noise_floor=floor.maximum(test.noise_floor),
        method=f"{test.method}, and score test of clusters",
        design_effect=mean.design_effect,
        n_clusters=clusters.n_distinct or int(n_clusters.max()),
        n_merged=int(n_clusters.max()),
        effective_clusters=mean.effective_number,
    )


def score_test_of_clusters(scores: Tensor, n_clusters: Tensor) -> Tensor:
    """Return the p-value `(...)` of the hypothesis that the scores of G clusters have mean 0.

    Hotelling's test, with the uncentred covariance V = sum u_k u_k^T of the scores u_k, `(..., G, 2)`. They are
    derivatives of the log-likelihood by intercept and slope, summed over a cluster.
    For q = U^T V^-1 U / G with U = sum u_k, the p-value is (1 - q)^((G - 2) / 2). It is 1 for G <= 2. It is exact for
    independent normal scores with equal covariance, otherwise an approximation for many clusters. `n_clusters` is the
    number of clusters with data, `(...)`.
    """
    total = scores.sum(-2)
    covariance = scores.mT @ scores
    scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt().clamp(min=1e-300)
    correlation = covariance / scale.unsqueeze(-1) / scale.unsqueeze(-2)
    z = total / scale
    q = (z * (torch.linalg.pinv(correlation, hermitian=True) @ z.unsqueeze(-1)).squeeze(-1)).sum(-1)
    q = (q / n_clusters.clamp(min=1)).clamp(0, 1)
    p_value: Tensor = (1 - q) ** ((n_clusters - 2).clamp(min=0) / 2)
    return p_value


@dataclass(frozen=True)
class SpiegelhalterAccumulator(EventSums[Sums]):
    """Accumulator of three sums: weight, Brier score minus its expected value, and variance of this difference."""

    n_cells = 1

    @property
    def n_quantities(self) -> int:
        """Number of sums: 3."""
        return 3

    @property
    def ranges(self) -> Ranges:
        """Ranges of the three quantities."""
        return (1, 1), (-1, 1), (0, 1 / 16)

    def cell(self, confidence: Tensor) -> Tensor:
        """Return cell index 0 for every event."""
        return torch.zeros_like(confidence, dtype=torch.int64)

    def quantities(self, events: Events) -> tuple[Tensor, ...]:
        """Return the summands 1, (y - p) (1 - 2 p) and (1 - 2 p)^2 p (1 - p) for confidence p and outcome y."""
        p, y = self._wide(events)
        not_p = 1 - p if events.complement is None else events.complement
        factor = not_p - p
        return torch.ones_like(p), (y * not_p - (1 - y) * p) * factor, factor.square() * p * not_p

    def events(self, p: Predictions) -> Events:
        """Return the events in `p`, with an accurate `complement` (1 - confidence) if available."""
        events = super().events(p)
        if p.zero_weight is not None:  # NaN in a row of weight 0 would make the gradient NaN
            per_class = p.task == "multiclass" and self.mode == "classwise"
            absent = p.zero_weight.unsqueeze(-2) if per_class else p.zero_weight
            events = replace(events, confidence=events.confidence.masked_fill(absent, 0.5))
        if p.task == "multiclass" or not (p.from_logits or p.complement is not None):
            return events
        if self.mode == "top_label":
            return replace(events, complement=torch.where(p.predicts_one, p.not_probs, p.probs))
        return replace(events, complement=p.not_probs)

    def of_events(self, events: Events, p: Predictions) -> Sums:
        """Return the sums over all events in `p`, computed in chunks."""
        totals: list[Tensor] = []
        for start in range(0, max(1, events.confidence.shape[-1]), _CHUNK_EVENTS):
            columns = self.columns(events.map(itemgetter((..., slice(start, start + _CHUNK_EVENTS)))), p)
            sums = [column.sum(-1, keepdim=True) for column in columns]
            totals = [total + more for total, more in zip(totals, sums, strict=True)] if totals else sums
        return self.wrap(torch.stack(totals, -2))

    def wrap(self, sums: Tensor) -> Sums:
        """Convert a tensor of the three sums `(..., 3, 1)` to `Sums`."""
        return Sums(sums)


def spiegelhalter_from_sums(s: Sums, component: SpiegelhalterComponent = "z") -> Tensor:
    """Return Spiegelhalter's z statistic or its two-sided p-value, `(...)`."""
    _, excess, variance = s.sums.squeeze(-1).unbind(-1)
    z = excess / variance.sqrt()
    return z if component == "z" else torch.erfc(z.abs() / math.sqrt(2))


@dataclass(frozen=True, eq=False)
class SpiegelhalterEstimator(Estimator[Sums]):
    """Estimator of Spiegelhalter's statistic or its p-value."""

    def test_from(
        self,
        statistic: Sums,
        *,
        clusters: Partition[Any] | None = None,
        level: float = 0.95,
        n_replicates: int = 999,
        seed: int = 0,
        **_: Any,
    ) -> CalibrationTest:
        """Return z, its two-sided p-value and the noise floor sqrt(2 / pi), the expected |z| for a calibrated model.

        For clusters of dependent rows, the p-value is at least that of random signs of the clusters.
        """
        z, p_value = spiegelhalter_from_sums(statistic), spiegelhalter_from_sums(statistic, "p_value")
        floor, nan = torch.full_like(z, math.sqrt(2 / math.pi)), torch.full_like(z, torch.nan)
        test = CalibrationTest(z, floor, p_value, nan, nan, level, "normal approximation, two-sided")
        if clusters is None:
            return test
        n, excess, _variance = clusters.sums.squeeze(-1).movedim(0, -1).unbind(-2)  # each (..., G)
        # A value is (y - p) (1 - 2 p). Its mean is 0 for a calibrated model, and residuals have no leverage.
        expected = statistic.sums[..., 2, 0]
        effect = excess.square().sum(-1) / expected
        mean = ClusteredMean(n, excess, expected, torch.ones_like(expected))
        n_merged = int((n > 0).sum(-1).max())
        return replace(
            test,
            p_value=sign_p_value(excess, seed, n_replicates).maximum(p_value),
            noise_floor=floor * effect.clamp(min=1).sqrt(),
            method=f"{test.method}, and random signs of clusters",
            design_effect=effect,
            n_clusters=clusters.n_distinct or n_merged,
            n_merged=n_merged,
            effective_clusters=mean.effective_number,
        )


@metric_function(
    Declaration(
        name="Spiegelhalter",
        question="Brier score minus its expected value for a calibrated model, in standard deviations",
        source="Spiegelhalter, Statistics in Medicine 1986, doi 10.1002/sim.4780050506",
        unit="standard deviations",
        perfect=0.0,
        better="nearer to 0",
        has_test=True,
        needs_labels=True,
    )
)
def spiegelhalter(
    task: Task | None = None,
    *,
    component: SpiegelhalterComponent = "z",
    mode: Mode | None = None,
    **options: Unpack[InputOptions],
) -> Estimator[Sums]:
    """Spiegelhalter's test of calibration: standardised difference between the Brier score and its expected value.

    z = sum (y - p) (1 - 2 p) / sqrt(sum (1 - 2 p)^2 p (1 - p)) for confidences p and outcomes y. It is approximately
    standard normal for a calibrated model. A positive z means that the Brier score is worse than expected (mostly
    over-confidence). Errors on both sides of p = 1/2 can cancel, so a small |z| does not prove calibration. The p-value
    holds for one look at the data: repeated looks at growing data give more false alarms. Use `sequential_test` for
    repeated looks.

    Args:
        target: Labels. Soft targets are not accepted, because their variance is unknown.
        component: `"z"`, or `"p_value"` for the two-sided p-value. `Spiegelhalter(...).test()` returns z and p-value.
        mode: Event whose probability is the confidence; see `ece`. Classes or labels are tested separately and not
            averaged.

    Returns:
        `(...)`, class-wise and multi-label `(..., C)`, in the dtype of `preds` (at least float32). NaN without data.
        If every probability is 0, 1/2 or 1, the variance is 0. Then z is +inf and the p-value 0 if a prediction of 0 or
        1 is wrong; otherwise z and the p-value are NaN.

    Gradient:
        With respect to the confidences, where z is finite.

    Reference:
        Spiegelhalter: Probabilistic prediction in patient management and clinical trials (Statistics in Medicine 1986).

    Example:
        >>> spiegelhalter(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(-0.8296)
    """
    check_choice("component", component, get_args(SpiegelhalterComponent))
    average = no_average(task, mode, options)
    formula = partial(spiegelhalter_from_sums, component=component)
    return SpiegelhalterEstimator.of_events(
        SpiegelhalterAccumulator, formula, task, mode, average, options, hard_targets=True
    )
