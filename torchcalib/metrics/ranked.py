"""Metrics of a sample in order of its scores: KS, and the CORP decomposition with its curve."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Self, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_average, check_choice, task_read_as
from torchcalib.core.documentation import documented
from torchcalib.core.events import Mode, resolve_mode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.ranked import ExactSample, RankedSample, SortedSample, by_pieces
from torchcalib.core.ranked_bins import Binning
from torchcalib.inference.simulation import RunCells, Simulation
from torchcalib.inference.testing import CalibrationTest, ErrorTest, check_arguments, evidence_of
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.estimator import Estimator, functional
from torchcalib.ops.isotonic import isotonic_regression
from torchcalib.ops.logs import binary_log_probs, xmul
from torchcalib.ops.sorting import run_index

_MOST_POINTS = 2**10


def ranked(
    formula: Callable[[RankedSample], Tensor],
    task: Task,
    mode: Mode | None,
    average: Average | None,
    options: Mapping[str, Any],
    *,
    hard_targets: bool = False,
) -> Estimator[RankedSample]:
    """Return the estimator of a metric of samples in order; arguments as of `binned`."""
    mode = resolve_mode(task_read_as(task, options), mode)
    is_classwise = mode == "classwise"
    check_average(average, is_classwise)
    input_format = input_format_of(task, options, hard_targets=hard_targets, whole_weights=True)
    return Estimator(input_format, ExactSample(mode), formula, is_classwise and average is not None)


def kept_apart(task: Task, mode: Mode | None, options: Mapping[str, Any]) -> Average | None:
    """Return the `average` of a metric that never averages over classes or labels.

    Raises:
        TypeError: if `options` has an `average`, which such a metric does not take.
    """
    if "average" in options:
        raise TypeError(
            f"`average` must not be given, got {options['average']!r}. Each class or label keeps a value of its own."
        )
    return None if resolve_mode(task_read_as(task, options), mode) == "classwise" else "macro"


class RankedMetric(CalibrationMetric[RankedSample]):
    """A metric of samples in order, over a stream.

    The state is all samples: 5 bytes each for float32 (9 for multi-class logits, 8 more with weights). With
    `resolution` it is a sketch of constant size.
    """

    stream_options = ("resolution",)
    perfect = 0.0
    unit = "probability"
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0

    has_interval = True
    """Whether `test` computes an interval, from about two thousand replicates."""

    def from_sample(self, sample: RankedSample) -> Tensor:
        """Return the value of every batch element."""
        return self.estimator.formula(sample)

    def without_noise(self, sample: RankedSample) -> Tensor:
        """Return the error of samples whose outcomes are frequencies instead of labels."""
        return self.from_sample(sample)

    def test_from(self, statistic: RankedSample, *, with_interval: bool = True, **how: Any) -> CalibrationTest:
        """Return the evidence of a statistic such as this metric's, which may have further axes in front."""
        test = ErrorTest(
            partial(by_pieces, self.from_sample),
            without_noise=partial(by_pieces, self.without_noise),
            signed=self.is_signed,
            with_interval=with_interval and self.has_interval,
        )
        return evidence_of(test, statistic, average=self.estimator.averages, **how)


DriftNorm = Literal["max", "range"]


def ks_from_sample(sample: RankedSample, norm: DriftNorm = "max") -> Tensor:
    """Kolmogorov-Smirnov calibration error `(...)`: max |cumulative difference of outcomes and probabilities|.

    It is looked at where the score changes. Kuiper's is the largest difference less the least, of which one, before the
    first sample, is 0.
    """
    s = sample.sorted()
    gap = s.positives - s.confidence * (1 if s.n is None else s.n)
    total = s.total.unsqueeze(-1)
    cumulative = gap.masked_fill(~s.counted, 0).cumsum(-1) / total
    is_last = torch.cat((s.begins[..., 1:], torch.ones_like(s.begins[..., :1])), -1)
    # Without data nothing is masked: every sum is 0 / 0, and the value NaN.
    drift = cumulative.masked_fill(~is_last & (total > 0), 0)
    if norm == "max":
        return drift.abs().amax(-1)
    return drift.amax(-1).clamp(min=0) - drift.amin(-1).clamp(max=0)


def _ks(
    *,
    task: Task,
    norm: DriftNorm = "max",
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Kolmogorov-Smirnov calibration error: how far outcomes and probabilities drift apart, summed by score.

    max over j of |sum_{i <= j} (y_i - p_i)| / N, samples in ascending order of p. It needs no bins. Samples of equal
    score carry no order, so the sums are looked at only behind the last of them.

    Kuiper's statistic is the range of the same sums, 0 among them: it also sees a drift up that another one ends.

    Args:
        norm: of the sums: `"max"`, the largest |sum|, or `"range"`, the largest less the least (Kuiper), which is at
            least that and at most twice.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds`
        (at least float32); NaN without data. At least |ESCE|.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences up to the one where the maximum (and the minimum) is reached (shared evenly on ties).

    Source:
        Gupta et al.: Calibration of Neural Networks using Splines (ICLR 2021), sec. 3; ties are pooled here. Range:
        Arrieta-Ibarra et al.: Metrics of Calibration for Probabilistic Predictions (JMLR 2022), as ECCE-R.

    Example:
        >>> ks(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0667)
    """
    check_choice("norm", norm, get_args(DriftNorm))
    return ranked(partial(ks_from_sample, norm=norm), task, mode, average, options)


ks = functional(_ks)


class KS(RankedMetric):
    """Kolmogorov-Smirnov calibration error, streamed; see `ks`. `resolution` keeps a sketch instead of every sample."""

    factory = staticmethod(_ks)
    question = "how far do outcomes and probabilities drift apart, summed by score"
    source = "Gupta et al., Calibration using Splines, ICLR 2021, sec. 3"


class CORPDecomposition(NamedTuple):
    """A score, and its parts: `score = mcb - dsc + unc`.

    Attributes:
        score: mean score of the predictions.
        mcb: miscalibration: what the score loses against the predictions recalibrated by isotonic regression; >= 0.
        dsc: discrimination: what recalibrated predictions gain over always predicting the share of ones; >= 0.
        unc: uncertainty: the score of always predicting the share of ones.
    """

    score: Tensor
    mcb: Tensor
    dsc: Tensor
    unc: Tensor


CORPScore = Literal["brier", "nll"]
Component = Literal["mcb", "dsc", "unc", "score"]


def corp_from_sample(sample: RankedSample, score: CORPScore) -> Tensor:
    """Score, MCB, DSC and UNC, the fields of `CORPDecomposition`, as `(..., 4)`."""
    blocks = Binning("pava").of(sample)
    s, n, k = blocks.sample, blocks.n.detach(), blocks.outcomes.detach()
    total = blocks.total.detach()
    of_rates = _brier_of_rate if score == "brier" else _nll_of_rate
    per_element = (_brier_of if score == "brier" else _nll_of)(s)
    own = per_element.masked_fill(~s.counted, 0).sum(-1) / total
    recalibrated = of_rates(k, n).sum(-1) / total
    naive = of_rates(k.sum(-1), total) / total
    return torch.stack((own, own - recalibrated, naive - recalibrated, naive), -1)


def _mcb_of_frequencies(sample: RankedSample, score: CORPScore) -> Tensor:
    """MCB `(...)` of outcomes that are no whole numbers, in the order of their elements: the frequencies of each."""
    s = sample.sorted()
    n = s.counts.to(s.confidence.dtype)
    best = n * isotonic_regression(s.positives / n, n)
    per_element, of_rates = (_brier_of, _brier_of_rate) if score == "brier" else (_nll_of, _nll_of_rate)
    return (per_element(s) - of_rates(best, n)).masked_fill(~s.counted, 0).sum(-1) / n.sum(-1)


def _brier_of_rate(k: Tensor, n: Tensor) -> Tensor:
    """Sum of (k/n - y)^2 over n samples of which k are 1."""
    return k * (n - k) / n.masked_fill(n == 0, 1)


def _nll_of_rate(k: Tensor, n: Tensor) -> Tensor:
    """Sum of -log of k/n or 1 - k/n over n samples of which k are 1."""
    held = n.masked_fill(n == 0, 1)
    return 0 - torch.xlogy(k, k / held) - torch.xlogy(n - k, (n - k) / held)


def _brier_of(s: SortedSample) -> Tensor:
    """Sum of (p - y)^2 over the samples of every element."""
    ones = s.positives.to(s.confidence.dtype)
    zeros = s.counts - ones
    not_p = torch.sigmoid(-s.score.to(s.confidence.dtype)) if s.from_logits else 1 - s.confidence
    return ones * not_p.square() + zeros * s.confidence.square()


def _nll_of(s: SortedSample) -> Tensor:
    """Sum of -log of the probability of what happened over the samples of every element."""
    values = s.score.to(s.confidence.dtype) if s.from_logits else s.confidence.masked_fill(~s.counted, 0.5)
    log_p, log_not_p = binary_log_probs(values, s.from_logits)
    ones = s.positives.to(s.confidence.dtype)
    return 0 - xmul(ones, log_p) - xmul(s.counts - ones, log_not_p)


def _corp(
    *,
    task: Task,
    score: CORPScore = "brier",
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """CORP decomposition of a score into miscalibration, discrimination and uncertainty: score = MCB - DSC + UNC.

    Predictions are recalibrated by isotonic regression of the outcomes on them, samples of equal score pooled, which
    is the best any rising function of them can do on this sample. No bins have to be chosen.

    Args:
        target: integer labels.
        score: `"brier"`: (p - y)^2; `"nll"`: -log of the probability of what happened.
        mode: what the confidence is of; see `ece`. The score is that of the binary event.

    Returns:
        A `CORPDecomposition` of `(...)`, or `(..., C)`, in the dtype of `preds` (at least float32). In nats for the
        NLL, which is infinite (and MCB with it) where a probability of 0 was given to what happened; the probabilities
        of finite logits are never 0. NaN without data.
        A class that never happens, or always, has UNC and DSC 0.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, through the score: the order of the samples is a constant. DSC and UNC have none.

    Source:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), eq. 1-3.

    Example:
        >>> corp(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]), task="binary").mcb
        tensor(0.1083)
    """
    check_choice("score", score, get_args(CORPScore))
    return ranked(partial(corp_from_sample, score=score), task, mode, average, options, hard_targets=True)


corp = functional(_corp, CORPDecomposition)


class CORP(RankedMetric):
    """A part of the CORP decomposition of a score, streamed; see `corp`.

    Args:
        component: `"mcb"`, `"dsc"`, `"unc"` or `"score"`: what `compute` returns.
    """

    factory = staticmethod(_corp)
    unit = "of the score: squared probability, or nats"
    question = "how large is a part of the score: by default what the best rising recalibration would gain"
    source = "Dimitriadis et al., Stable reliability diagrams, PNAS 2021, eq. 1-3"
    higher_is_better = None  # it depends on the component
    plot_upper_bound = None

    def __init__(self, task: Task | None = None, *, component: Component = "mcb", **options: Any) -> None:
        check_choice("component", component, get_args(Component))
        super().__init__(task, **options)
        self.component = component

    def from_sample(self, sample: RankedSample) -> Tensor:
        """Return the component of every batch element."""
        return super().from_sample(sample)[..., CORPDecomposition._fields.index(self.component)]

    def without_noise(self, sample: RankedSample) -> Tensor:
        """Return the gain of the best rising recalibration to the frequencies themselves."""
        return _mcb_of_frequencies(sample, self.settings["score"])

    def test_from(self, statistic: RankedSample, **how: Any) -> CalibrationTest:
        """Return the evidence of a statistic. Only MCB measures calibration."""
        if self.component != "mcb":
            raise ValueError(
                f"`component` must be 'mcb' for evidence of calibration, got {self.component!r}. "
                "Make CORP(component='mcb')."
            )
        return super().test_from(replace(statistic, log_scored=self.settings["score"] == "nll"), **how)

    def decomposition(self) -> CORPDecomposition:
        """Return all parts, over all ranks if `torch.distributed` is running."""
        return CORPDecomposition(*self.estimator.value(self._synced_statistic()).unbind(-1))

    def _value(self, statistic: RankedSample) -> Tensor:
        return getattr(CORPDecomposition(*self.estimator.value(statistic).unbind(-1)), self.component)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class CORPCurve:
    """Frequency over confidence, by isotonic regression. All are `(..., M)` but the level, in order of the confidence.

    Attributes:
        confidence: of the points, which are samples, or where there are many, runs of neighbouring ones.
        n: samples of each point, weights counted; one that ties have left empty has 0.
        frequency: isotonic regression of the outcomes on the confidences.
        band_low, band_high: between which the regression lies, point by point, in a share `level` of data sets, if the
            confidences are the probabilities of the outcomes: a consistency band. NaN without data.
        level: of the band.
    """

    confidence: Tensor
    n: Tensor
    frequency: Tensor
    band_low: Tensor
    band_high: Tensor
    level: float

    def __getitem__(self, index: Any) -> Self:
        """Index the batch axes: `curve[k]` is the curve of class k."""
        if self.n.dim() < 2:
            raise IndexError("a curve of one series has no batch axis to index")
        columns = (self.confidence, self.n, self.frequency, self.band_low, self.band_high)
        confidence, n, frequency, low, high = (column[index] for column in columns)
        return type(self)(confidence, n, frequency, low, high, self.level)


@documented
def corp_curve(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    mode: Mode | None = None,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
    **options: Unpack[InputOptions],
) -> CORPCurve:
    """Curve of a CORP reliability diagram: isotonic regression of the outcomes, with a consistency band.

    No bins have to be chosen: blocks of equal frequency follow from the sample. The band is found by drawing outcomes
    anew as if every confidence were true, and regressing these in the same way. `torchcalib.plots.corp_diagram` draws
    it.

    Args:
        target: integer labels.
        level: of the band, in (0, 1).
        n_replicates: R.
        seed: of the draws, which are the same on every device.

    Returns:
        A `CORPCurve` of `(..., M)`, class-wise and multi-label `(..., C, M)`, M at most 1,024, in float64.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        None.

    Source:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), fig. 2 and
        sec. "Uncertainty quantification" (consistency bands by resampling).

    Example:
        >>> curve = corp_curve(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]), task="binary")
        >>> curve.frequency
        tensor([0.0000, 0.6667, 0.6667, 0.6667], dtype=torch.float64)
    """
    check_arguments(level, n_replicates, seed)
    mode = resolve_mode(task_read_as(task, options), mode)
    input_format = input_format_of(task, options, hard_targets=True, whole_weights=True)
    with torch.no_grad():
        sample = ExactSample(mode).of(input_format.read(preds, target, options.get("weights")))
        return curve_of(sample, level, n_replicates, seed)


def curve_of(sample: RankedSample, level: float = 0.95, n_replicates: int = 999, seed: int = 0) -> CORPCurve:
    """Return the curve of samples; see `corp_curve`."""
    cells = RunCells.of(sample, _MOST_POINTS)
    observed = cells.with_gaps(cells.gap)
    low, high = [], []
    flat = cells.map(lambda x: x.reshape(-1, x.shape[-1]))
    for place in range(len(flat.n)):  # one series at a time, to limit the memory
        one = flat.map(itemgetter(place))
        fits = Simulation(one, place, seed, n_replicates).compute(_recalibrated).sort(0).values
        outside = max(0, round((n_replicates + 1) * (1 - level) / 2) - 1)
        low.append(fits[outside])
        high.append(fits[n_replicates - 1 - outside])
    frequency = _recalibrated(observed)
    band_low, band_high = (torch.stack(ends).reshape(frequency.shape) for ends in (low, high))
    return CORPCurve(observed.score.clone(), cells.n, frequency, band_low, band_high, level)


def _recalibrated(sample: Any) -> Tensor:
    """Return the isotonic regression at every element of a sample in order."""
    blocks = Binning("pava").of(sample)
    index = run_index(blocks.ends, sample.score.shape[-1]).clamp(max=blocks.ends.shape[-1] - 1)
    return blocks.frequency.gather(-1, index)
