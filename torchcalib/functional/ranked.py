"""Rank-based calibration metrics: Kolmogorov-Smirnov (KS) error, CORP decomposition and curve, and truthful errors.

CORP stands for consistent, optimally binned, reproducible and PAV-based, with the pool-adjacent-violators (PAV)
algorithm for isotonic regression.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, Self, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_choice, check_count, is_number, task_read_as
from torchcalib.core.events import Mode, resolve_mode
from torchcalib.core.ranked import ExactSample, RankedSample, SortedSample, by_pieces
from torchcalib.core.ranked_bins import Binning
from torchcalib.core.sums import BinStats
from torchcalib.core.tasks import infers_task
from torchcalib.functional.estimator import (
    Declaration,
    Estimator,
    factory_of,
    metric_function,
    streamed_by,
    tuple_function,
)
from torchcalib.inference.simulation import BinCells, BinsWithGaps, LabelRows, RunCells, Simulation
from torchcalib.inference.testing import CalibrationTest, ErrorTest, check_arguments, run_error_test
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.loess import loess
from torchcalib.ops.logs import binary_log_probs, xmul
from torchcalib.ops.segments import run_index

_ISOTONIC = Binning("pava")

_MAX_POINTS = 2**10
"""Maximum number of points in a CORP curve."""


@dataclass(frozen=True, eq=False)
class RankedEstimator(Estimator[RankedSample]):
    """Estimator of a rank-based error."""

    def of_piece(self, sample: RankedSample) -> Tensor:
        """Compute the value `(...)` from a sample that fits into memory."""
        return self.formula(sample)

    def values(self, statistic: RankedSample) -> Tensor:
        """Return the value `(...)` per batch element and per class or label, without averaging over classes."""
        return by_pieces(self.of_piece, statistic)

    def error_test(self) -> ErrorTest:
        """Return the definition of the calibration test, for `run_error_tests`."""
        return ErrorTest(self.values)

    def test_from(self, statistic: RankedSample, **how: Any) -> CalibrationTest:
        """Compute the calibration test from a `RankedSample`; extra leading axes are batch axes."""
        rows = None
        if self.averages and self.input_format.read_as == "multiclass":
            rows = LabelRows.from_sample(statistic)
        return run_error_test(self.error_test(), statistic, rows=rows, average=self.averages, **how)


ranked = partial(RankedEstimator.of_events, ExactSample, whole_weights=True)
"""Function that creates the estimator of a rank-based metric; see `Estimator.of_events`."""

rank_based = partial(
    Declaration,
    unit="probability",
    perfect=0.0,
    value_range=(0.0, 1.0),
    noise_increases=True,
    stream_options=("resolution",),
    has_test=True,
)
"""Function that creates the declaration of a rank-based calibration error."""


def no_average(task: Task | None, mode: Mode | None, options: Mapping[str, Any]) -> Average | None:
    """Return `average` for a metric that is never averaged over classes: None if class-wise, otherwise "macro"."""
    if "average" in options:
        raise TypeError(
            f"`average` must be omitted, got {shown(options['average'])}. The metric has one value per class or label."
        )
    return None if resolve_mode(task_read_as(task, options), mode) == "classwise" else "macro"


DriftNorm = Literal["max", "range"]


def ks_from_sample(sample: RankedSample, norm: DriftNorm = "max") -> Tensor:
    """Return the Kolmogorov-Smirnov calibration error `(...)`, or Kuiper's statistic with `norm="range"`; see `ks`.

    It is computed from cumulative sums at the last sample of each distinct score.
    """
    s = sample.sorted()
    # Without data (total 0), the NaN of 0 / 0 is not masked and becomes the value.
    drift = s.drift.masked_fill(~s.ends & (s.total > 0).unsqueeze(-1), 0)
    if norm == "max":
        return drift.abs().amax(-1)
    return drift.amax(-1).clamp(min=0) - drift.amin(-1).clamp(max=0)


@metric_function(
    rank_based(
        name="KS",
        question="largest cumulative difference between outcomes and probabilities",
        source="Gupta et al., Calibration using Splines, ICLR 2021, sec. 3, arXiv 2006.12800",
    )
)
def ks(
    task: Task | None = None,
    *,
    norm: DriftNorm = "max",
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Kolmogorov-Smirnov (KS) calibration error: the largest cumulative difference between outcomes and probabilities.

    KS = max over j of |D_j|, with D_j = sum_{i <= j} (y_i - p_i) / N. The N samples with outcomes y and probabilities p
    are in ascending order of p. KS does not require bins. Samples with equal p have no order, so D_j is evaluated only
    at the last of them.

    Kuiper's statistic is max_j D_j - min_j D_j, including D_0 = 0. It also detects deviations of opposite sign in
    different ranges of p, which partly cancel in KS.

    Args:
        norm: `"max"`: the largest |D_j|. `"range"`: Kuiper's statistic, between one and two times the largest |D_j|.

    Returns:
        A difference of probabilities in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds`
        (at least float32). NaN without data. It is at least |ESCE|, the absolute expected signed calibration error.

    Gradient:
        With respect to the confidences up to the sample j with the maximum (or minimum) D_j. Ties are averaged.

    Reference:
        Gupta et al.: Calibration of Neural Networks using Splines (ICLR 2021), sec. 3, except that equal scores are
        pooled. Range: Arrieta-Ibarra et al.: Metrics of Calibration for Probabilistic Predictions (JMLR 2022), where it
        is called empirical cumulative calibration error (ECCE-R).

    Example:
        >>> ks(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0667)
    """
    check_choice("norm", norm, get_args(DriftNorm))
    return ranked(partial(ks_from_sample, norm=norm), task, mode, average, options)


class CORPDecomposition(NamedTuple):
    """CORP decomposition of a score: `score = mcb - dsc + unc`; see `corp`.

    The recalibrated predictions are the isotonic regression of the outcomes on the predictions.

    Attributes:
        score: Mean score of the predictions.
        mcb: Miscalibration (MCB): score of the predictions minus score of the recalibrated predictions; >= 0.
        dsc: Discrimination (DSC): uncertainty minus score of the recalibrated predictions; >= 0.
        unc: Uncertainty (UNC): score of the constant prediction of the mean outcome.

    Example:
        >>> corp(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]), task="binary").unc
        tensor(0.2500)
    """

    score: Tensor
    mcb: Tensor
    dsc: Tensor
    unc: Tensor


CORPScore = Literal["brier", "nll"]
Component = Literal["mcb", "dsc", "unc", "score"]


@dataclass(frozen=True, eq=False)
class CORPEstimator(RankedEstimator):
    """Estimator of the CORP decomposition, or of one of its components."""

    score: CORPScore
    component: Component | None = None  # None for all fields of `CORPDecomposition` on the last axis
    binning: ClassVar[Binning] = _ISOTONIC

    def of_piece(self, sample: RankedSample) -> Tensor:
        """Compute the component `(...)`, or all `(..., 4)`, from a sample that fits into memory."""
        parts = sample.view((CORPEstimator, self.score), lambda: self.formula(sample))
        return parts if self.component is None else parts[..., CORPDecomposition._fields.index(self.component)]

    def test_from(self, statistic: RankedSample, **how: Any) -> CalibrationTest:
        """Compute the calibration test from a `RankedSample`. Raise ValueError for components other than MCB."""
        if self.component != "mcb":
            raise ValueError(
                f"`component` must be 'mcb' for a test of calibration, got {shown(self.component)}. "
                "Use CORP(component='mcb')."
            )
        return super().test_from(replace(statistic, log_scored=self.score == "nll"), **how)


def corp_from_sample(sample: RankedSample, score: CORPScore) -> Tensor:
    """Compute the fields of `CORPDecomposition` from a `RankedSample`, as a tensor `(..., 4)`."""
    blocks = _ISOTONIC.from_sample(sample)
    s, n, k = blocks.sample, blocks.n.detach(), blocks.outcomes.detach()
    total = blocks.total.detach()
    of_rates = _brier_of_rate if score == "brier" else _nll_of_rate
    per_element = (_brier_of if score == "brier" else _nll_of)(s)
    own = per_element.masked_fill(~s.counted, 0).sum(-1) / total
    recalibrated = of_rates(k, n).sum(-1) / total
    naive = of_rates(k.sum(-1), total) / total
    return torch.stack((own, own - recalibrated, naive - recalibrated, naive), -1)


def _brier_of_rate(k: Tensor, n: Tensor) -> Tensor:
    """Return the sum of (k/n - y)^2 over n outcomes y, of which k are 1."""
    return k * (n - k) / n.masked_fill(n == 0, 1)


def _nll_of_rate(k: Tensor, n: Tensor) -> Tensor:
    """Return the negative log-likelihood for n outcomes, of which k are 1, and the prediction k/n.

    Simulated sums of clusters may be below 0 or above n, and are replaced by these.
    """
    k = k.clamp(min=0).minimum(n)
    divisor = n.masked_fill(n == 0, 1)
    return 0 - torch.xlogy(k, k / divisor) - torch.xlogy(n - k, (n - k) / divisor)


def _brier_of(s: SortedSample) -> Tensor:
    """Return the sum of (p - y)^2 over the copies of each sample, `(..., N)`."""
    ones = s.positives.to(s.confidence.dtype)
    zeros = s.counts - ones
    not_p = torch.sigmoid(-s.score.to(s.confidence.dtype)) if s.from_logits else 1 - s.confidence
    return ones * not_p.square() + zeros * s.confidence.square()


def _nll_by_outcome(s: SortedSample) -> tuple[Tensor, Tensor]:
    """Return the sums of negative log-likelihoods over the copies of each sample with y = 1 and y = 0, `(..., N)`."""
    values = s.score.to(s.confidence.dtype) if s.from_logits else s.confidence.masked_fill(~s.counted, 0.5)
    log_p, log_not_p = binary_log_probs(values, s.from_logits)
    ones = s.positives.to(s.confidence.dtype)
    return 0 - xmul(ones, log_p), 0 - xmul(s.counts - ones, log_not_p)


def _nll_of(s: SortedSample) -> Tensor:
    """Return the sum of negative log-likelihoods over the copies of each sample, `(..., N)`."""
    of_ones, of_zeros = _nll_by_outcome(s)
    return of_ones + of_zeros


@tuple_function(
    CORPDecomposition,
    rank_based(
        name="CORP",
        question="component of a score, such as miscalibration, by isotonic regression",
        source="Dimitriadis et al., Stable reliability diagrams, PNAS 2021, eq. 1-3, doi 10.1073/pnas.2016191118",
        unit="squared probability (Brier score) or nats (log loss)",
        value_range=(0.0, math.inf),
        better=None,
        needs_labels=True,
        diagram="torchcalib.plots.reliability:corp_diagram",
    ),
)
def corp(
    task: Task | None = None,
    *,
    score: CORPScore = "brier",
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> CORPEstimator:
    """CORP decomposition of a score into miscalibration (MCB), discrimination (DSC) and uncertainty (UNC).

    score = MCB - DSC + UNC. CORP stands for consistent, optimally binned, reproducible and PAV-based, with the
    pool-adjacent-violators (PAV) algorithm. Predictions are recalibrated by isotonic regression of the outcomes on the
    predictions. This is the best monotone recalibration for the sample and does not require bins.

    MCB is the score minus the score after recalibration. UNC is the score of a model that always predicts the mean
    outcome. DSC is UNC minus the score after recalibration.

    Args:
        target: Labels. Soft targets are not supported.
        score: `"brier"`: (p - y)^2. `"nll"`: the negative log-likelihood.
        mode: Event whose probability is the confidence; see `ece`. The binary score of this event is decomposed.

    Returns:
        A `CORPDecomposition` with tensors `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds` (at least
        float32). NaN without data. The negative log-likelihood (NLL) is in nats. NLL and its MCB are infinite if an
        outcome has predicted probability 0, which is impossible for finite logits. UNC and DSC are 0 if all outcomes
        are equal.

    Gradient:
        For the score and MCB with respect to the confidences, for a fixed order of the samples. None for DSC and UNC.

    Reference:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), eq. 1-3.

    Example:
        >>> corp(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]), task="binary").mcb
        tensor(0.1083)
    """
    check_choice("score", score, get_args(CORPScore))
    formula = partial(corp_from_sample, score=score)
    return CORPEstimator.of_events(
        ExactSample, formula, task, mode, average, options, score, hard_targets=True, whole_weights=True
    )


@streamed_by(corp)
def corp_component(
    task: Task | None = None,
    *,
    component: Component = "mcb",
    score: CORPScore = "brier",
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> CORPEstimator:
    """Return the estimator of a field of `CORPDecomposition`; see `corp`."""
    check_choice("component", component, get_args(Component))
    estimator: Any = factory_of(corp)(task, score=score, mode=mode, average=average, **options)
    return replace(estimator, component=component)  # type: ignore[no-any-return]


CllrComponent = Literal["value", "min", "loss"]


def cllr_from_sample(sample: RankedSample, component: CllrComponent) -> Tensor:
    """Compute a component of the cost of log-likelihood ratios from a `RankedSample`, `(...)`; see `cllr`."""
    blocks = _ISOTONIC.from_sample(sample)
    s, n, k = blocks.sample, blocks.n.detach(), blocks.outcomes.detach()
    n_ones, n_zeros = k.sum(-1, keepdim=True), (n - k).sum(-1, keepdim=True)
    of_ones, of_zeros = (part.masked_fill(~s.counted, 0).sum(-1, keepdim=True) for part in _nll_by_outcome(s))
    own = (of_ones / n_ones + of_zeros / n_zeros).squeeze(-1)
    # PAV pools the same samples for every prior, so that the recalibrated predictions only need balanced counts.
    ones = k / n_ones
    least = _nll_of_rate(ones, ones + (n - k) / n_zeros).sum(-1)
    parts = torch.stack((own, least, own - least), -1)  # a stack, so that the minimum has gradient 0 instead of none
    return parts[..., get_args(CllrComponent).index(component)] / (2 * math.log(2))


@metric_function(
    Declaration(
        name="Cllr",
        question="cross entropy of log-likelihood ratios for equal priors, or its minimum after isotonic regression",
        source="Bruemmer & du Preez, Application-independent evaluation of speaker detection, "
        "Computer Speech & Language 2006, doi 10.1016/j.csl.2005.08.001",
        unit="bits",
        perfect=0.0,
        value_range=(0.0, math.inf),
        stream_options=("resolution",),
        needs_labels=True,
    )
)
def cllr(
    task: Task | None = None,
    *,
    component: CllrComponent = "value",
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Cost of log-likelihood ratios (Cllr), and its minimum over all increasing functions of them (min-Cllr), in bits.

    Cllr = 1/2 (mean of log2(1 + exp(-s)) for y = 1, plus mean of log2(1 + exp(s)) for y = 0), for log-likelihood ratios
    s = log(p(x | y=1) / p(x | y=0)). It is the cross entropy for equal class priors, divided by its value for
    predictions of 1/2: `nll(..., priors=[0.5, 0.5], normalize="prior")`. It is 1 for s = 0, which has no information.

    min-Cllr is the Cllr after isotonic regression of the outcomes on s by the pool-adjacent-violators (PAV) algorithm,
    on the same data. It depends only on the order of s, and measures discrimination. The difference is the calibration
    loss.

    Args:
        preds: Log-likelihood ratios with `from_logits=True`, or posterior probabilities for equal priors. For logits of
            posteriors at the class frequency f of y = 1, subtract log(f / (1-f)).
        target: Labels. Soft targets are not supported.
        component: `"value"`: Cllr. `"min"`: min-Cllr. `"loss"`: Cllr minus min-Cllr.

    Returns:
        `(...)`, or `(..., C)` with `average=None`, in [0, inf], in the dtype of `preds` (at least float32). NaN unless
        both outcomes occur. min-Cllr is at most 1.

    Gradient:
        For the value and the loss with respect to the confidences. 0 for min-Cllr.

    Reference:
        Bruemmer, du Preez: Application-independent evaluation of speaker detection (Computer Speech & Language 2006).

    Example:
        >>> ratios, target = torch.tensor([-2.0, 0.5, 3.0, 1.0]), torch.tensor([0, 1, 1, 0])
        >>> cllr(ratios, target, task="binary", from_logits=True)
        tensor(0.7079)
        >>> cllr(ratios, target, task="binary", from_logits=True, component="min")
        tensor(0.5000)
    """
    check_choice("component", component, get_args(CllrComponent))
    return ranked(partial(cllr_from_sample, component=component), task, mode, average, options, hard_targets=True)


@dataclass(frozen=True, eq=False)
class CORPCurve:
    """CORP curve: isotonic regression of the outcomes on the confidences, with a consistency band; see `corp_curve`.

    Tensors have the shape `(..., M)`, for M points in ascending order of the confidence.

    Attributes:
        confidence: Confidence at each point. More than 1,024 samples are pooled into 1,024 points.
        n: Total weight of the samples at each point; 0 for a point that is empty because of ties.
        frequency: Isotonic regression of the outcomes on the confidences.
        band_low: Lower limit of the band. If the model is calibrated, the regression at a given point lies in the band
            with probability `level`. NaN without data.
        band_high: Upper limit of the band.
        level: Level of the band.

    Example:
        >>> curve = corp_curve(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]), task="binary")
        >>> curve.confidence
        tensor([0.2000, 0.6000, 0.7000, 0.9000], dtype=torch.float64)
    """

    confidence: Tensor
    n: Tensor
    frequency: Tensor
    band_low: Tensor
    band_high: Tensor
    level: float

    def __getitem__(self, index: Any) -> Self:
        """Index the batch axes: `curve[k]` is the curve for class k."""
        if self.n.dim() < 2:
            raise IndexError("`curve` must have a batch axis to index, got none. Use its attributes.")
        columns = (self.confidence, self.n, self.frequency, self.band_low, self.band_high)
        confidence, n, frequency, low, high = (column[index] for column in columns)
        return type(self)(confidence, n, frequency, low, high, self.level)


@infers_task
def corp_curve(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
    **options: Unpack[InputOptions],
) -> CORPCurve:
    """Return the curve of a CORP reliability diagram: isotonic regression of the outcomes, with a consistency band.

    CORP stands for consistent, optimally binned, reproducible and PAV-based (pool-adjacent-violators algorithm). It
    does not require bins. For the band, outcomes are simulated from the confidences and the regression is repeated
    (consistency resampling). `torchcalib.plots.corp_diagram` draws the curve.

    Args:
        target: Labels. Soft targets are not supported.
        level: Level of the band, in (0, 1).
        n_replicates: Number of simulated replicates.
        seed: Seed for the simulation, which is the same on every device.

    Returns:
        A `CORPCurve` with tensors `(..., M)`, class-wise and multi-label `(..., C, M)`, M at most 1,024, in float64.

    Gradient:
        None.

    Reference:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), fig. 2 and
        sec. "Uncertainty quantification" (consistency bands by resampling).

    Example:
        >>> curve = corp_curve(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]), task="binary")
        >>> curve.frequency
        tensor([0.0000, 0.6667, 0.6667, 0.6667], dtype=torch.float64)
    """
    check_arguments(level, n_replicates, seed)
    estimator: Estimator[RankedSample] = ranked(_recalibrated, task, mode, "macro", options, hard_targets=True)
    with torch.no_grad():
        return curve_of(estimator.statistic(preds, target, options.get("weights")), level, n_replicates, seed)


def curve_of(sample: RankedSample, level: float = 0.95, n_replicates: int = 999, seed: int = 0) -> CORPCurve:
    """Compute the CORP curve from a `RankedSample`; see `corp_curve`."""
    cells = RunCells.from_sample(sample, _MAX_POINTS)
    observed = cells.with_gaps(cells.gap)
    low, high = [], []
    flat = cells.map(lambda x: x.reshape(-1, x.shape[-1]))
    for index in range(len(flat.n)):  # one batch element at a time limits the memory
        element = flat.map(itemgetter(index))
        simulation = Simulation(element, index, seed, n_replicates)
        fits = torch.cat([_recalibrated(some) for some in simulation.statistics()]).sort(0).values
        outside = max(0, round((n_replicates + 1) * (1 - level) / 2) - 1)
        low.append(fits[outside])
        high.append(fits[n_replicates - 1 - outside])
    frequency = _recalibrated(observed)
    band_low, band_high = (torch.stack(ends).reshape(frequency.shape) for ends in (low, high))
    return CORPCurve(observed.score.clone(), cells.n, frequency, band_low, band_high, level)


def _recalibrated(sample: Any) -> Tensor:
    """Return the isotonic regression of the outcomes at every position of a sorted sample, `(..., M)`."""
    blocks = _ISOTONIC.from_sample(sample)
    index = run_index(blocks.ends, sample.score.shape[-1]).clamp(max=blocks.ends.shape[-1] - 1)
    return blocks.frequency.gather(-1, index)


def atb_from_sample(sample: RankedSample) -> Tensor:
    """Return the averaged two-bin calibration error `(...)` from a `RankedSample`; see `atb`."""
    s = sample.sorted()
    # The integrand is constant between adjacent confidences. The interval between tied confidences has width 0, so
    # that their order has no effect.
    zero = torch.zeros_like(s.drift[..., :1])
    lower = torch.cat((zero, s.drift), -1)
    upper = lower[..., -1:] - lower
    edges = torch.cat((zero, s.confidence.masked_fill(~s.counted, 1), torch.ones_like(zero)), -1)
    return (edges.diff(dim=-1) * (lower.square() + upper.square())).sum(-1)


@metric_function(
    rank_based(
        name="ATB",
        question="squared error over two bins, averaged over their boundary",
        source="Hartline, Hu & Wu, A Perfectly Truthful Calibration Measure, COLT 2026, arXiv 2508.13100",
        unit="squared probability",
    )
)
def atb(
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Averaged two-bin calibration error (ATB): squared error over two bins, averaged over their boundary.

    ATB = integral from 0 to 1 of (L(q)^2 + U(q)^2) dq, where L(q) is the sum of (p_i - y_i) / N over all samples with
    p_i < q, and U(q) is the sum over all others.

    ATB is truthful: if outcomes are independent, the true probabilities minimize its expected value. Other calibration
    errors, such as ECE and smECE, can be smaller on average for predictions that differ from the true probabilities.
    Report ATB if a person or a model is rewarded for a small calibration error.

    For true probabilities t, the expected value is ATB with y = t, plus mean(t (1 - t)) / N. The second term does not
    depend on the predictions, unless they select the event: for "top_label" and `TopK`, ATB is not truthful. Use
    "classwise" for multi-class tasks.

    ATB does not measure discrimination: always predicting mean(t) has the same expected value as predicting t. The
    square root of ATB has the unit of a probability. It is usually smaller than ECE, because residuals of both signs
    cancel in the two bins.

    Returns:
        A squared probability in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds` (at least
        float32). NaN without data.

    Gradient:
        With respect to the confidences. ATB is continuous, and differentiable if no confidences are equal. For equal
        confidences, the gradient is that for one order of the samples.

    Reference:
        Hartline, Hu, Wu: A Perfectly Truthful Calibration Measure (COLT 2026, PMLR 336, arXiv 2508.13100).

    Example:
        >>> atb(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0129)
    """
    return ranked(atb_from_sample, task, mode, average, options)


ICIComponent = Literal["ici", "e50", "e90", "emax"]
_QUANTILE_LEVELS: dict[str, float] = {"e50": 0.5, "e90": 0.9, "emax": 1.0}


def ici_from_sample(sample: RankedSample, component: ICIComponent, span: float, degree: int, n_points: int) -> Tensor:
    """Compute the mean or a quantile `(...)` of |confidence - smoothed outcome| over all samples; see `ici`."""
    # More samples than points, with copies; under `vmap` and `torch.compile` their number is unknown.
    may_exceed = sample.score.shape[-1] > n_points or (
        sample.n is not None and value_if_available((sample.n.sum(-1) <= n_points).all()) is not True
    )
    if may_exceed:
        bins = Binning("equal_mass", n_points).from_sample(sample)
        return _ici_at_points(bins.confidence, bins.frequency, bins.n.detach(), component, span, degree)
    s = sample.sorted()
    n = s.counts.to(s.confidence.dtype)
    return _ici_at_points(s.confidence, s.positives / n, n, component, span, degree)


def ici_from_bins(bins: BinStats, component: ICIComponent, span: float, degree: int) -> Tensor:
    """Compute the mean or a quantile of the distances `(...)` from narrow bins, with one point for each bin.

    Bins may be `BinsWithGaps` with replicates `(R, ..., B)`, which share the weights of the local regressions.
    """
    cells = bins.cells if isinstance(bins, BinsWithGaps) else BinCells.from_bins(bins)
    return _ici_at_points(cells.confidence, cells.confidence + bins.gap, cells.n, component, span, degree)


def _ici_at_points(
    confidence: Tensor, frequency: Tensor, n: Tensor, component: ICIComponent, span: float, degree: int
) -> Tensor:
    """Compute the mean or a quantile of |confidence - smoothed frequency| `(...)` over points `(..., M)`."""
    empty = n == 0
    confidence, frequency = confidence.masked_fill(empty, 0), frequency.masked_fill(empty, 0)
    distance = (confidence - loess(confidence, frequency, n, span, degree)).abs()
    if component == "ici":
        return (n * distance).sum(-1) / n.sum(-1)
    return _quantile(distance, n.expand_as(distance), _QUANTILE_LEVELS[component])


def _quantile(x: Tensor, n: Tensor, share: float) -> Tensor:
    """Return the quantile `(...)` of values `(..., M)` with integer multiplicities `n`, as `torch.quantile` does."""
    ordered, order = x.masked_fill(n == 0, torch.inf).sort(-1)
    cumulative = n.gather(-1, order).cumsum(-1)
    rank = share * (cumulative[..., -1:] - 1).clamp(min=0)
    ranks = torch.cat((rank.floor(), rank.ceil()), -1)
    index = torch.searchsorted(cumulative, ranks + 0.5).clamp(max=x.shape[-1] - 1)
    below, above = ordered.gather(-1, index).unbind(-1)
    value = below + (above - below) * (rank - rank.floor()).squeeze(-1)
    return value.masked_fill(cumulative[..., -1] == 0, torch.nan)


@dataclass(frozen=True, eq=False)
class ICIEstimator(RankedEstimator):
    """Estimator of the integrated calibration index."""

    component: ICIComponent
    span: float
    degree: int
    n_points: int

    def test_from(self, statistic: RankedSample, **how: Any) -> CalibrationTest:
        """Compute the calibration test from a `RankedSample`, divided into the points of the regression."""
        n_points = min(self.n_points, max(1, statistic.score.shape[-1]))
        bins = Binning("equal_mass", n_points).from_sample(statistic).with_noise()
        test = ErrorTest(partial(ici_from_bins, component=self.component, span=self.span, degree=self.degree))
        found = run_error_test(test, bins, average=self.averages, **how)
        return replace(found, statistic=self.value(statistic))


@metric_function(
    rank_based(
        name="ICI",
        question="mean distance between predictions and a smooth calibration curve",
        source="Austin & Steyerberg, Statistics in Medicine 2019, doi 10.1002/sim.8281",
        value_range=(0.0, math.inf),
    )
)
def ici(
    task: Task | None = None,
    *,
    component: ICIComponent = "ici",
    span: float = 0.75,
    degree: int = 2,
    n_points: int = 1024,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Integrated calibration index (ICI): mean distance between the predictions and a smooth calibration curve.

    ICI = mean |p - f(p)|, where f is a local regression (loess) of the outcomes on the predictions p. At each p, a
    polynomial is fitted to the nearest samples with tricube weights. Values of f may be outside [0, 1].

    The curve is fitted at every prediction, as in R with `loess(y ~ p, surface = "direct")` and its defaults. (The
    paper uses the R default, which interpolates between a few fits.) More than `n_points` samples, including copies,
    are first pooled into `n_points` equal-mass bins. This changes the value in about the sixth digit.

    Args:
        component: Summary of the distances |p - f(p)|: the mean `"ici"`, the median `"e50"`, the 90th percentile
            `"e90"` or the maximum `"emax"`.
        span: Fraction of the samples in each local fit, in (0, 1].
        degree: Degree of the local polynomial: 0, 1 or 2.
        n_points: Maximum number of points at which the curve is fitted. The time is proportional to its square.

    Returns:
        `(...)`, or `(..., C)` with `average=None`, at least 0 and usually below 1, in the dtype of `preds` (at least
        float32). NaN without data.

    Gradient:
        With respect to the confidences, including their effect on the curve, except where the set of neighbours
        changes. The backward pass stores about 20 numbers per pair of points.

    Reference:
        Austin, Steyerberg: The Integrated Calibration Index (ICI) and related metrics for quantifying the calibration
        of logistic regression models (Statistics in Medicine 2019). Cleveland, Devlin: Locally Weighted Regression
        (JASA 1988).

    Example:
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0])
        >>> ici(preds, target, task="binary")
        tensor(0.4000)
    """
    check_choice("component", component, get_args(ICIComponent))
    if not is_number(span):
        raise TypeError(f"`span` must be a number, got {shown(span)}. The default is 0.75.")
    if not 0 < span <= 1:
        raise ValueError(f"`span` must be above 0 and at most 1, got {shown(span)}. The default is 0.75.")
    check_count("degree", degree, at_least=0, at_most=2)
    check_count("n_points", n_points, at_least=2, at_most=2**14)
    settings: dict[str, Any] = {"component": component, "span": float(span), "degree": degree, "n_points": n_points}
    formula = partial(ici_from_sample, **settings)
    return ICIEstimator.of_events(
        ExactSample, formula, task, mode, average, options, *settings.values(), whole_weights=True
    )
