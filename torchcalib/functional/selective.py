"""Metrics of selective prediction: a model abstains from its least confident predictions.

Acronyms: area under the risk-coverage curve (AURC), its excess over the ideal order (E-AURC), area under the
generalised risk-coverage curve (AUGRC), area under the receiver operating characteristic curve (AUROC).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, is_number, task_read_as
from torchcalib.core.events import Mode, NamedMode, resolve_mode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.tasks import infers_task
from torchcalib.functional.estimator import Declaration, Estimator, metric_function
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import once
from torchcalib.ops.labelled import risk_sums
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import is_plain

_LARGE = 40
"""Smallest number for which the omitted terms of the asymptotic series are below the precision of float64."""


def harmonic_difference(start: Tensor, stop: Tensor) -> Tensor:
    """Return H(stop) - H(start), the sum of 1/i for start < i <= stop, for floating tensors of whole numbers >= 0.

    With x = n + 1/2, H(n) = log(x) + Euler's constant + 1 / (24 x^2) - 7 / (960 x^4) + ... The difference of the
    logarithms is computed by `log1p`, because subtracting two harmonic numbers near 14 would lose the digits of a
    difference near 1e-6. Small numbers use the digamma function, H(n) = digamma(n + 1) + Euler's constant.
    """
    x, y = start + 0.5, stop + 0.5
    large = torch.log1p((stop - start) / x) + (_series(y) - _series(x))
    small = torch.digamma(stop + 1) - torch.digamma(start + 1)
    return torch.where(start < _LARGE, small, large)


def _series(x: Tensor) -> Tensor:
    """Return 1 / (24 x^2) - 7 / (960 x^4) + 31 / (8064 x^6) - 127 / (30720 x^8)."""
    u = 1 / x.square()
    return u * (1 / 24 + u * (-7 / 960 + u * (31 / 8064 - u * (127 / 30720))))


_MAX_POINTS = 2**10
"""Maximum number of points in a risk-coverage curve."""

MODES: dict[Task, tuple[NamedMode, ...]] = {
    "binary": ("top_label", "positive"),
    "multiclass": ("top_label",),
    "multilabel": ("top_label", "classwise"),
}
"""Modes of selective prediction, with the default mode first."""


def of_predicted_class(sample: RankedSample) -> RankedSample:
    """Convert the events y = 1 to the events that the predicted class is true: y = 1 if p > 1/2, otherwise y = 0.

    The confidence becomes max(p, 1 - p), in float64 as for the mode "top_label" of a binary task.
    """
    score = sample.score
    if sample.from_logits:
        is_one, score = score > 0, score.abs()
    else:
        score = score.to(wide_dtype(score.device))
        is_one = score > 0.5
        score = torch.where(is_one, score, 1 - score)
    correct = torch.where(is_one, sample.positives, (1 if sample.n is None else sample.n) - sample.positives)
    # Not `replace`: a sample that is sorted by score is no longer sorted.
    return RankedSample(score, correct, sample.n, sample.from_logits, sample.has_invalid_rows)


@dataclass(frozen=True, eq=False)
class Accepted:
    """Numbers of samples and errors in groups of equal confidence, and among all more confident samples.

    The tensors have the shape `(..., M)` of the sorted sample. The numbers of a group are at its last element. All
    other elements have `n` and `errors` 0, so that they change no sum.
    """

    n: Tensor  # number of samples in the group
    errors: Tensor  # number of errors in the group
    n_before: Tensor  # number of samples with a larger confidence
    errors_before: Tensor  # number of errors among the samples with a larger confidence
    total: Tensor  # number of all samples `(...)`
    total_errors: Tensor  # number of all errors `(...)`
    confidence: Tensor  # confidence of the group as a probability
    computed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)  # cache of `harmonic`

    @classmethod
    def from_sample(cls, sample: RankedSample) -> Self:
        """Compute the numbers from a `RankedSample`, whose positives are the correct predictions."""
        s = sample.sorted()
        wide = wide_dtype(s.score.device)
        counts = s.counts.to(wide)
        errors = (counts - s.positives.to(wide)).masked_fill(~s.counted, 0)
        # Cumulative sums in ascending order of the confidence, up to the end of a group and of the previous group.
        n_upto, n_below = _ends(counts.cumsum(-1), s.ends)
        errors_upto, errors_below = _ends(errors.cumsum(-1), s.ends)
        total, total_errors = counts.sum(-1), errors.sum(-1)
        return cls(
            n=n_upto - n_below,
            errors=errors_upto - errors_below,
            n_before=total.unsqueeze(-1) - n_upto,
            errors_before=total_errors.unsqueeze(-1) - errors_upto,
            total=total,
            total_errors=total_errors,
            confidence=s.confidence,
        )

    @property
    def error_rate(self) -> Tensor:
        """Mean error of each group: the expected error of each of its samples over all orders; 0 without samples."""
        return self.errors / self.n.clamp(min=1)

    @property
    def n_accepted(self) -> Tensor:
        """Number of samples with the confidence of the group or a larger one."""
        return self.n_before + self.n

    @property
    def errors_accepted(self) -> Tensor:
        """Number of errors among the samples in `n_accepted`."""
        return self.errors_before + self.errors

    @once
    def harmonic(self) -> Tensor:
        """H(`n_accepted`) - H(`n_before`), with the harmonic numbers H(n) = 1 + 1/2 + ... + 1/n."""
        return harmonic_difference(self.n_before, self.n_accepted)


def _ends(upto: Tensor, is_last: Tensor) -> tuple[Tensor, Tensor]:
    """Return cumulative sums `(..., M)` at the end of each group and of the previous group; equal at other elements."""
    latest = upto.masked_fill(~is_last, 0).cummax(-1).values
    previous = torch.cat((torch.zeros_like(latest[..., :1]), latest[..., :-1]), -1)
    return latest, previous


def events_of(read_as: Task, mode: Mode | None, modes: Mapping[Task, Sequence[NamedMode]] = MODES) -> tuple[Mode, bool]:
    """Return the mode of the sample, and whether `of_predicted_class` must convert it.

    Multi-label samples contain P(y=1) for each label, as for other rank-based metrics, which can share them.
    """
    mode = resolve_mode(read_as, mode, modes.get(read_as))
    if read_as == "multilabel" and mode == "top_label":
        return "classwise", True
    return mode, False


class RiskCoverageCurve(NamedTuple):
    """Risk-coverage curve; see `risk_coverage_curve`.

    Tensors have the shape `(..., M)`, for M thresholds in descending order. Curves with fewer points end with NaN.

    Attributes:
        coverage: Fraction of samples with at least the confidence `threshold`.
        risk: Error rate of these samples (selective risk).
        generalized_risk: Number of errors among these samples, divided by the number of all samples.
        threshold: Smallest accepted confidence, as a probability.

    Example:
        >>> curve = risk_coverage_curve(torch.tensor([0.2, 0.6, 0.9]), torch.tensor([0, 0, 1]), task="binary")
        >>> curve.risk
        tensor([0.0000, 0.0000, 0.3333], dtype=torch.float64)
    """

    coverage: Tensor
    risk: Tensor
    generalized_risk: Tensor
    threshold: Tensor


@infers_task
def risk_coverage_curve(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    **options: Unpack[InputOptions],
) -> RiskCoverageCurve:
    """Return the risk-coverage curve: error rate of the samples with at least a given confidence, by their fraction.

    There is one point for each distinct confidence. With more than 1,024, it is the last point in each of 1,024
    intervals of coverage. `aurc` and `augrc` are areas under the curve with all points.
    `torchcalib.plots.risk_coverage_curve` draws the curve.

    Args:
        target: Labels. Soft targets are not supported.
        mode: Event whose probability is the confidence; see `aurc`.

    Returns:
        A `RiskCoverageCurve` with tensors `(..., M)`, multi-label `(..., L, M)`, M at most 1,024, in float64. NaN
        without data.

    Gradient:
        None.

    Reference:
        Geifman, El-Yaniv: Selective Classification for Deep Neural Networks (NeurIPS 2017, arXiv:1705.08500).

    Example:
        >>> curve = risk_coverage_curve(torch.tensor([0.2, 0.6, 0.9]), torch.tensor([0, 0, 1]), task="binary")
        >>> curve.coverage
        tensor([0.3333, 0.6667, 1.0000], dtype=torch.float64)
    """
    mode, converts = events_of(task_read_as(task, options), mode)
    input_format = input_format_of(task, options, hard_targets=True, whole_weights=True)
    with torch.no_grad():
        sample = ExactSample(mode).from_predictions(input_format.read(preds, target, options.get("weights")))
        return risk_coverage_curve_of(sample, converts)


def risk_coverage_curve_of(sample: RankedSample, converts: bool = False) -> RiskCoverageCurve:
    """Compute the risk-coverage curve from a `RankedSample`; `converts` applies `of_predicted_class` first."""
    a = Accepted.from_sample(of_predicted_class(sample) if converts else sample)
    total = a.total.unsqueeze(-1)
    columns = (a.n_accepted / total, a.errors_accepted / a.n_accepted, a.errors_accepted / total, a.confidence)
    points = torch.stack([column.flip(-1) for column in columns])
    points = _selected(points, (a.n > 0).flip(-1))
    if points.shape[-1] > _MAX_POINTS:
        interval = (points[0] * _MAX_POINTS).ceil()
        is_last = torch.ones_like(interval, dtype=torch.bool)
        is_last[..., :-1] = interval[..., :-1] != interval[..., 1:]
        few = points[0].isfinite().sum(-1, keepdim=True) <= _MAX_POINTS
        points = _selected(points, (is_last | few) & points[0].isfinite())
    if sample.has_invalid_rows is not None:
        points = points.masked_fill(sample.has_invalid_rows.unsqueeze(-1), torch.nan)
    return RiskCoverageCurve(*points.unbind(0))


def _selected(points: Tensor, kept: Tensor) -> Tensor:
    """Return the points `(4, ..., M)` in a mask `(..., M)`, in order and padded with NaN at the end."""
    length = max(1, int(kept.sum(-1).amax())) if kept.numel() else 1
    order = torch.sort((~kept).to(torch.uint8), dim=-1, stable=True).indices[..., :length]
    points = points.gather(-1, order.expand(len(points), *order.shape))
    return points.masked_fill(~kept.gather(-1, order), torch.nan)


_ONE_VS_REST: dict[Task, tuple[NamedMode, ...]] = {**MODES, "multiclass": ("top_label", "classwise")}
"""Modes of `correctness_auroc`, which also ranks the samples of each class against the rest."""


class RiskSums(NamedTuple):
    """Sums over the samples in descending order of their confidence `(...)`; see `ops.labelled` for the symbols."""

    total: Tensor  # number of all samples
    errors: Tensor  # number of all errors
    risk: Tensor  # sum of the selective risk E_k / k over all samples
    generalized: Tensor  # sum of E_k / N over all samples, by the trapezoidal rule from E_0 = 0
    outranked: Tensor  # fraction of the pairs of a correct prediction and an error whose order is right

    @classmethod
    def from_sample(cls, sample: RankedSample) -> Self:
        """Compute the sums from a `RankedSample`, whose positives are the correct predictions."""
        is_labelled = sample.n is None and sample.positives.dtype == torch.uint8
        if not (is_labelled and sample.score.device.type == "cpu" and is_plain(sample.score)):
            return cls.from_accepted(Accepted.from_sample(sample))
        s = sample.sorted()
        total = s.size.to(torch.float64)
        errors, risk, generalized, above = risk_sums(s.score, s.positives, s.size).unbind(-1)
        return cls(total, errors, risk, generalized / total, 1 - above / (errors * (total - errors)))

    @classmethod
    def from_accepted(cls, a: Accepted) -> Self:
        """Compute the sums from groups of equal confidence, which may have weights.

        A group of m samples with error rate e, after n samples with E errors, adds the sum of (E + i e) / (n + i) for i
        from 1 to m. This is m e + (E - n e) (H(n + m) - H(n)), with the harmonic numbers H.
        """
        excess = a.errors_before - a.n_before * a.error_rate
        middle = a.errors_before + a.errors / 2
        # Each correct sample outranks all errors with a smaller confidence, and half of the errors with the same one.
        outranked = ((a.n - a.errors) * (a.total_errors.unsqueeze(-1) - middle)).sum(-1)
        return cls(
            a.total,
            a.total_errors,
            (a.errors + excess * a.harmonic).sum(-1),
            (a.n / a.total.unsqueeze(-1) * middle).sum(-1),
            outranked / (a.total_errors * (a.total - a.total_errors)),
        )


def aurc_of(s: RiskSums) -> Tensor:
    """Return the area under the risk-coverage curve `(...)`; see `aurc`."""
    return s.risk / s.total


def eaurc_of(s: RiskSums) -> Tensor:
    """Return the excess of the area under the risk-coverage curve over the ideal order `(...)`; see `eaurc`."""
    correct = s.total - s.errors
    ideal = (s.errors - correct * harmonic_difference(correct, s.total)) / s.total
    return (aurc_of(s) - ideal).clamp(min=0)  # rounding errors may make it negative


def augrc_of(s: RiskSums) -> Tensor:
    """Return the area under the generalised risk-coverage curve `(...)`; see `augrc`."""
    return s.generalized / s.total


def correctness_auroc_of(s: RiskSums) -> Tensor:
    """Return the AUROC of confidence as a predictor of correctness `(...)`; see `correctness_auroc`."""
    return s.outranked


def risk_at_coverage_of(a: Accepted, coverage: float) -> Tensor:
    """Return the error rate of the most confident samples `(...)`; see `risk_at_coverage`."""
    # The product coverage * N has a relative error of at most eps, and must not be rounded up for this reason.
    k = (coverage * a.total * (1 - 2 * torch.finfo(a.total.dtype).eps)).ceil()
    accepted = (k.unsqueeze(-1) - a.n_before).clamp(min=0).minimum(a.n)
    return (a.error_rate * accepted).sum(-1) / k


def accuracy_at_coverage_of(a: Accepted, coverage: float) -> Tensor:
    """Return the accuracy of the most confident samples `(...)`; see `accuracy_at_coverage`."""
    return 1 - risk_at_coverage_of(a, coverage)


def coverage_at_risk_of(a: Accepted, risk: float) -> Tensor:
    """Return the largest coverage with at most the given error rate `(...)`; see `coverage_at_risk`."""
    allowed = (a.n > 0) & (a.errors_accepted / a.n_accepted.clamp(min=1) <= risk)
    return a.n_accepted.masked_fill(~allowed, 0).amax(-1) / a.total


def _value(
    sample: RankedSample, formula: Callable[[Any], Tensor], of: type[Accepted] | type[RiskSums], converts: bool
) -> Tensor:
    key = of, converts
    return formula(sample.view(key, lambda: of.from_sample(of_predicted_class(sample) if converts else sample)))


@dataclass(frozen=True, eq=False)
class SelectiveEstimator(Estimator[RankedSample]):
    """Estimator of a metric of selective prediction."""


def _selective(
    formula: Callable[[Any], Tensor],
    of: type[Accepted] | type[RiskSums],
    task: Task | None,
    mode: Mode | None,
    average: Average | None,
    options: Mapping[str, Any],
    modes: Mapping[Task, Sequence[NamedMode]] = MODES,
) -> SelectiveEstimator:
    """Create the estimator of a metric of selective prediction. `formula` maps a statistic `of` to values `(...)`."""
    mode, converts = events_of(task_read_as(task, options), mode, modes)
    formula_of_sample = partial(_value, formula=formula, of=of, converts=converts)
    return SelectiveEstimator.of_events(
        ExactSample, formula_of_sample, task, mode, average, options, hard_targets=True, whole_weights=True
    )


def _check_fraction(name: str, value: object, *, with_zero: bool) -> float:
    """Return `value` as a float. Raise an error unless it is a number in [0, 1], or in (0, 1]."""
    if not is_number(value):
        raise TypeError(f"`{name}` must be a number, got {shown(value)}. Pass a fraction such as 0.1.")
    if math.isnan(value) or not 0 <= value <= 1 or (value == 0 and not with_zero):
        bounds = "in [0, 1]" if with_zero else "above 0 and at most 1"
        raise ValueError(f"`{name}` must be {bounds}, got {shown(value)}. Pass a fraction such as 0.1.")
    return float(value)


of_selection = partial(
    Declaration,
    unit="probability",
    perfect=0.0,
    value_range=(0.0, 1.0),
    stream_options=("resolution",),
    needs_labels=True,
    needs_whole_weights=True,
    diagram="torchcalib.plots.curves:risk_coverage_curve",
    diagram_of_classes="torchcalib.plots.curves:risk_coverage_curve",
)
"""Function that creates the declaration of a metric of selective prediction."""


@metric_function(
    of_selection(
        name="AURC",
        question="mean error rate of the most confident samples, over all coverages",
        source="Geifman et al., Bias-Reduced Uncertainty Estimation, ICLR 2019, arXiv 1805.08206",
    )
)
def aurc(
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SelectiveEstimator:
    """Area under the risk-coverage curve (AURC): mean error rate of the most confident samples, over all coverages.

    AURC = (1/N) sum_{k=1..N} E_k / k, with E_k the number of errors among the k most confident of N samples. A small
    value requires a high accuracy, and errors that are less confident than correct predictions. Samples with equal
    confidence have no order: the value is the mean over all their orders.

    Args:
        target: Labels. Soft targets are not supported.
        mode: Event whose probability is the confidence. A prediction is correct if the event occurs. `"top_label"`
            (default): the predicted class is the true one. The predicted class is the most probable one, y = 0 for
            P(y=1) = 1/2, and either y = 1 or y = 0 of each label for multi-label. `"positive"` (binary) and
            `"classwise"` (multi-label): `preds` are the confidences, and `target` is 1 for a correct prediction.
            `TopK(k)` (multi-class): the true class is among the k most probable classes.
        average: `"macro"` averages multi-label values over labels. None returns `(..., L)`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        NaN without data.

    Gradient:
        None.

    Reference:
        Geifman, Uziel, El-Yaniv: Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers (ICLR 2019,
        arXiv:1805.08206). Some packages integrate from coverage 1/N with the trapezoidal rule instead.

    Example:
        >>> aurc(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]), task="binary")
        tensor(0.0625)
    """
    return _selective(aurc_of, RiskSums, task, mode, average, options)


@metric_function(
    of_selection(
        name="E-AURC",
        question="AURC minus its smallest value for this accuracy",
        source="Geifman et al., Bias-Reduced Uncertainty Estimation, ICLR 2019, arXiv 1805.08206",
    )
)
def eaurc(
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SelectiveEstimator:
    """Excess area under the risk-coverage curve (E-AURC): AURC minus its smallest value for this accuracy.

    E-AURC = AURC - (1/N) (n_err - n_cor (H(N) - H(n_cor))), with n_err errors, n_cor correct predictions, and
    H(n) = 1 + 1/2 + ... + 1/n. The subtracted term is the AURC if all correct predictions are more confident than all
    errors. E-AURC therefore measures the order of the confidences. It is comparable only between models of similar
    accuracy.

    Args:
        target, mode, average: See `aurc`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        0 if all predictions are correct, or all are wrong. NaN without data.

    Gradient:
        None.

    Reference:
        Geifman, Uziel, El-Yaniv: Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers (ICLR 2019,
        arXiv:1805.08206). The sum is exact here, and approximated by an integral there.

    Example:
        >>> eaurc(torch.tensor([0.2, 0.9, 0.6, 0.7]), torch.tensor([0, 0, 1, 1]), task="binary")
        tensor(0.4583)
    """
    return _selective(eaurc_of, RiskSums, task, mode, average, options)


@metric_function(
    of_selection(
        name="AUGRC",
        question="mean fraction of samples that are accepted errors, over all coverages",
        source="Traub et al., Overcoming Common Flaws, NeurIPS 2024, arXiv 2407.01032",
        value_range=(0.0, 0.5),
    )
)
def augrc(
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SelectiveEstimator:
    """Area under the generalised risk-coverage curve (AUGRC): mean fraction of accepted errors, over all coverages.

    The generalised risk at coverage k/N is E_k / N, with E_k the number of errors among the k most confident of N
    samples. AUGRC is the area under the line through these points and (0, 0). It equals
    (1 - AUROC) acc (1 - acc) + (1 - acc)^2 / 2, with the accuracy acc and AUROC = `correctness_auroc`. Unlike AURC, it
    does not give large weights to the few most confident samples.

    Args:
        target, mode, average: See `aurc`.

    Returns:
        A probability in [0, 1/2], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least
        float32). NaN without data.

    Gradient:
        None.

    Reference:
        Traub et al.: Overcoming Common Flaws in the Evaluation of Selective Classification Systems (NeurIPS 2024,
        arXiv:2407.01032).

    Example:
        >>> augrc(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]), task="binary")
        tensor(0.0312)
    """
    return _selective(augrc_of, RiskSums, task, mode, average, options)


@metric_function(
    of_selection(
        name="AUROC of correctness",
        question="probability that a correct prediction is more confident than an error",
        source="Hendrycks & Gimpel, A Baseline for Detecting Misclassified Examples, ICLR 2017, arXiv 1610.02136",
        perfect=1.0,
        better="higher",
    )
)
def correctness_auroc(
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SelectiveEstimator:
    """AUROC of correctness: probability that a correct prediction is more confident than an error.

    AUROC is the area under the receiver operating characteristic curve. Equal confidences count one half. 1/2 is the
    value of a confidence without information, and 1 that of an ideal order. The accuracy has no direct effect.

    Args:
        target: Labels. Soft targets are not supported.
        mode: Event whose probability is the confidence; see `aurc`. `"positive"` (binary) and `"classwise"`
            (multi-label) give the ordinary AUROC of `preds` and `target`. `"classwise"` (multi-class) gives the AUROC
            of each class against the rest.
        average: `"macro"` averages class-wise and multi-label values over classes. None returns `(..., C)`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds` (at least float32).
        NaN if all predictions are correct or all are wrong, and without data.

    Gradient:
        None.

    Reference:
        Hendrycks, Gimpel: A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural Networks
        (ICLR 2017, arXiv:1610.02136).

    Example:
        >>> correctness_auroc(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]), task="binary")
        tensor(1.)
    """
    return _selective(correctness_auroc_of, RiskSums, task, mode, average, options, _ONE_VS_REST)


@metric_function(
    of_selection(
        name="Risk at coverage",
        question="error rate of the most confident samples, at a given coverage",
        source="Geifman & El-Yaniv, Selective Classification, NeurIPS 2017, arXiv 1705.08500",
    )
)
def risk_at_coverage(
    task: Task | None = None,
    *,
    coverage: float = 0.8,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SelectiveEstimator:
    """Selective risk at a coverage: error rate of a given fraction of the samples, the most confident ones.

    The value is E_k / k with k = ceil(coverage N), where E_k is the number of errors among the k most confident of N
    samples. If only some of the samples with equal confidence are accepted, the value is the mean over all choices.

    Args:
        coverage: Fraction of accepted samples, above 0 and at most 1. 1 gives the error rate of all samples.
        target, mode, average: See `aurc`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        NaN without data.

    Gradient:
        None.

    Reference:
        Geifman, El-Yaniv: Selective Classification for Deep Neural Networks (NeurIPS 2017, arXiv:1705.08500).

    Example:
        >>> preds, target = torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 0])
        >>> risk_at_coverage(preds, target, task="binary", coverage=0.75)
        tensor(0.3333)
    """
    coverage = _check_fraction("coverage", coverage, with_zero=False)
    return _selective(partial(risk_at_coverage_of, coverage=coverage), Accepted, task, mode, average, options)


@metric_function(
    of_selection(
        name="Accuracy at coverage",
        question="accuracy of the most confident samples, at a given coverage",
        source="Geifman & El-Yaniv, Selective Classification, NeurIPS 2017, arXiv 1705.08500",
        unit="fraction of samples",
        perfect=1.0,
        better="higher",
    )
)
def accuracy_at_coverage(
    task: Task | None = None,
    *,
    coverage: float = 0.8,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SelectiveEstimator:
    """Accuracy at a coverage: accuracy of a given fraction of the samples, the most confident ones.

    The value is 1 - E_k / k with k = ceil(coverage N), where E_k is the number of errors among the k most confident of
    N samples. If only some of the samples with equal confidence are accepted, the value is the mean over all choices.

    Args:
        coverage: Fraction of accepted samples, above 0 and at most 1. 1 gives the accuracy of all samples.
        target, mode, average: See `aurc`.

    Returns:
        A fraction in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        NaN without data.

    Gradient:
        None.

    Reference:
        Geifman, El-Yaniv: Selective Classification for Deep Neural Networks (NeurIPS 2017, arXiv:1705.08500).

    Example:
        >>> preds, target = torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 0])
        >>> accuracy_at_coverage(preds, target, task="binary", coverage=0.75)
        tensor(0.6667)
    """
    coverage = _check_fraction("coverage", coverage, with_zero=False)
    return _selective(partial(accuracy_at_coverage_of, coverage=coverage), Accepted, task, mode, average, options)


@metric_function(
    of_selection(
        name="Coverage at risk",
        question="largest fraction of samples that a threshold accepts at a given error rate",
        source="Geifman & El-Yaniv, Selective Classification, NeurIPS 2017, arXiv 1705.08500",
        unit="fraction of samples",
        perfect=1.0,
        better="higher",
    )
)
def coverage_at_risk(
    task: Task | None = None,
    *,
    risk: float = 0.05,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> SelectiveEstimator:
    """Coverage at a selective risk: largest fraction of samples that a threshold can accept at this error rate.

    The value is the largest k/N with E_k / k <= risk, where E_k is the number of errors among the k most confident of N
    samples. Samples with equal confidence are accepted or rejected together. The threshold is chosen on the same data,
    so the error rate of new data may be larger.

    Args:
        risk: Largest accepted error rate, in [0, 1].
        target, mode, average: See `aurc`.

    Returns:
        A fraction in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        0 if no threshold has such an error rate. NaN without data.

    Gradient:
        None.

    Reference:
        Geifman, El-Yaniv: Selective Classification for Deep Neural Networks (NeurIPS 2017, arXiv:1705.08500).

    Example:
        >>> preds, target = torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 0])
        >>> coverage_at_risk(preds, target, task="binary", risk=0.05)
        tensor(0.5000)
    """
    risk = _check_fraction("risk", risk, with_zero=True)
    return _selective(partial(coverage_at_risk_of, risk=risk), Accepted, task, mode, average, options)
