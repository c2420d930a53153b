"""Metrics of selective prediction: a model abstains from its least confident predictions.

Acronyms: area under the risk-coverage curve (AURC), its excess over the ideal order (E-AURC), area under the
generalised risk-coverage curve (AUGRC), area under the receiver operating characteristic curve (AUROC).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, is_number, task_read_as
from torchcalib.core.documentation import documented
from torchcalib.core.events import Mode, NamedMode, resolve_mode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.estimator import Estimator, functional
from torchcalib.metrics.ranked import RankedMetric, ranked
from torchcalib.ops.harmonic import harmonic_difference
from torchcalib.ops.logs import wide_dtype

_MAX_POINTS = 2**10
"""Maximum number of points in a risk-coverage curve."""

_MODES: dict[Task, tuple[NamedMode, ...]] = {
    "binary": ("top_label", "positive"),
    "multiclass": ("top_label",),
    "multilabel": ("top_label", "classwise"),
}
"""Modes of selective prediction, with the default mode first."""

_ONE_VS_REST: dict[Task, tuple[NamedMode, ...]] = {**_MODES, "multiclass": ("top_label", "classwise")}
"""Modes of `correctness_auroc`, which also ranks the samples of each class against the rest."""


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
    return replace(sample, score=score, positives=correct)


@dataclass(frozen=True, eq=False)
class Accepted:
    """Numbers of samples and errors in groups of equal confidence, and among all more confident samples.

    The tensors have the shape `(..., M)` of the sorted sample. The numbers of a group are at its last element. All
    other elements have `n` and `errors` 0, so that they change no sum.

    Attributes:
        n: number of samples in the group.
        errors: number of errors in the group.
        n_before: number of samples with a larger confidence.
        errors_before: number of errors among the samples with a larger confidence.
        total: number of all samples `(...)`.
        total_errors: number of all errors `(...)`.
        confidence: confidence of the group as a probability.
    """

    n: Tensor
    errors: Tensor
    n_before: Tensor
    errors_before: Tensor
    total: Tensor
    total_errors: Tensor
    confidence: Tensor

    @classmethod
    def of(cls, sample: RankedSample) -> Self:
        """Compute the numbers from a `RankedSample`, whose positives are the correct predictions."""
        s = sample.sorted()
        wide = wide_dtype(s.score.device)
        counts = s.counts.to(wide)
        errors = (counts - s.positives.to(wide)).masked_fill(~s.counted, 0)
        is_last = torch.cat((s.begins[..., 1:], torch.ones_like(s.begins[..., :1])), -1)
        # Cumulative sums in ascending order of the confidence, up to the end of a group and of the previous group.
        n_upto, n_below = _ends(counts.cumsum(-1), is_last)
        errors_upto, errors_below = _ends(errors.cumsum(-1), is_last)
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


def _ends(upto: Tensor, is_last: Tensor) -> tuple[Tensor, Tensor]:
    """Return cumulative sums at the end of each group and of the previous group; both are equal at other elements.

    Args:
        upto: cumulative sums `(..., M)`, which do not decrease.
        is_last: True for the last element of each group, bool `(..., M)`.
    """
    latest = upto.masked_fill(~is_last, 0).cummax(-1).values
    previous = torch.cat((torch.zeros_like(latest[..., :1]), latest[..., :-1]), -1)
    return latest, previous


def aurc_of(a: Accepted) -> Tensor:
    """Return the area under the risk-coverage curve `(...)`; see `aurc`.

    A group of m samples with error rate e, after n samples with E errors, adds the sum of (E + i e) / (n + i) for i
    from 1 to m. This is m e + (E - n e) (H(n + m) - H(n)), with the harmonic numbers H.
    """
    excess = a.errors_before - a.n_before * a.error_rate
    return (a.errors + excess * harmonic_difference(a.n_before, a.n_accepted)).sum(-1) / a.total


def eaurc_of(a: Accepted) -> Tensor:
    """Return the excess of the area under the risk-coverage curve over the ideal order `(...)`; see `eaurc`."""
    correct = a.total - a.total_errors
    ideal = (a.total_errors - correct * harmonic_difference(correct, a.total)) / a.total
    return (aurc_of(a) - ideal).clamp(min=0)  # rounding errors may make it negative


def augrc_of(a: Accepted) -> Tensor:
    """Return the area under the generalised risk-coverage curve `(...)`; see `augrc`."""
    return (a.n / a.total.unsqueeze(-1) * (a.errors_before + a.errors / 2)).sum(-1) / a.total


def correctness_auroc_of(a: Accepted) -> Tensor:
    """Return the AUROC of confidence as a predictor of correctness `(...)`; see `correctness_auroc`."""
    errors = a.total_errors.unsqueeze(-1)
    # Each correct sample outranks all errors with a smaller confidence, and half of the errors with the same one.
    outranked = (a.n - a.errors) * (errors - a.errors_before - a.errors / 2)
    return outranked.sum(-1) / (a.total_errors * (a.total - a.total_errors))


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


def _value(sample: RankedSample, formula: Callable[[Accepted], Tensor], converts: bool) -> Tensor:
    return formula(Accepted.of(of_predicted_class(sample) if converts else sample))


def _selective(
    formula: Callable[[Accepted], Tensor],
    task: Task,
    mode: Mode | None,
    average: Average | None,
    options: Mapping[str, Any],
    modes: Mapping[Task, Sequence[NamedMode]] = _MODES,
) -> Estimator[RankedSample]:
    """Create the estimator of a metric of selective prediction. `formula` maps `Accepted` to values `(...)`."""
    mode, converts = _events(task, mode, options, modes)
    formula_of_sample = partial(_value, formula=formula, converts=converts)
    return ranked(formula_of_sample, task, mode, average, options, hard_targets=True)


def _events(
    task: Task, mode: Mode | None, options: Mapping[str, Any], modes: Mapping[Task, Sequence[NamedMode]] = _MODES
) -> tuple[Mode, bool]:
    """Return the mode of the sample, and whether `of_predicted_class` must convert it.

    Multi-label samples contain P(y=1) for each label, as for other rank-based metrics, which can share them.
    """
    read_as = task_read_as(task, options)
    mode = resolve_mode(read_as, mode, modes.get(read_as))
    if read_as == "multilabel" and mode == "top_label":
        return "classwise", True
    return mode, False


def _check_fraction(name: str, value: object, *, with_zero: bool) -> float:
    """Return `value` as a float. Raise an error unless it is a number in [0, 1], or in (0, 1]."""
    if not is_number(value):
        raise TypeError(f"`{name}` must be a number, got {value!r}. Pass a fraction such as 0.1.")
    if math.isnan(value) or not 0 <= value <= 1 or (value == 0 and not with_zero):
        bounds = "in [0, 1]" if with_zero else "above 0 and at most 1"
        raise ValueError(f"`{name}` must be {bounds}, got {value!r}. Pass a fraction such as 0.1.")
    return float(value)


def _aurc(
    *, task: Task, mode: Mode | None = None, average: Average | None = "macro", **options: Unpack[InputOptions]
) -> Estimator[RankedSample]:
    """Area under the risk-coverage curve (AURC): mean error rate of the most confident samples, over all coverages.

    AURC = (1/N) sum_{k=1..N} E_k / k, with E_k the number of errors among the k most confident of N samples. A small
    value requires a high accuracy, and errors that are less confident than correct predictions. Samples with equal
    confidence have no order: the value is the mean over all their orders.

    Args:
        target: Integer labels.
        mode: Event whose probability is the confidence. A prediction is correct if the event occurs. `"top_label"`
            (default): the predicted class is the true one. The predicted class is the most probable one, y = 0 for
            P(y=1) = 1/2, and either y = 1 or y = 0 of each label for multi-label. `"positive"` (binary) and
            `"classwise"` (multi-label): `preds` are the confidences, and `target` is 1 for a correct prediction.
            `TopK(k)` (multi-class): the true class is among the k most probable classes.
        average: `"macro"` averages multi-label values over labels. None returns `(..., L)`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        NaN without data.

    Raises:
        TypeError, ValueError: for invalid input.

    Gradient:
        None.

    Reference:
        Geifman, Uziel, El-Yaniv: Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers (ICLR 2019,
        arXiv:1805.08206). Some packages integrate from coverage 1/N with the trapezoidal rule instead.

    Example:
        >>> aurc(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]), task="binary")
        tensor(0.0625)
    """
    return _selective(aurc_of, task, mode, average, options)


def _eaurc(
    *, task: Task, mode: Mode | None = None, average: Average | None = "macro", **options: Unpack[InputOptions]
) -> Estimator[RankedSample]:
    """Excess area under the risk-coverage curve (E-AURC): AURC minus its smallest value for this accuracy.

    E-AURC = AURC - (1/N) (n_err - n_cor (H(N) - H(n_cor))), with n_err errors, n_cor correct predictions, and
    H(n) = 1 + 1/2 + ... + 1/n. The subtracted term is the AURC if all correct predictions are more confident than all
    errors. E-AURC therefore measures the order of the confidences. It is comparable only between models of similar
    accuracy.

    Args:
        target: Integer labels.
        mode: Event whose probability is the confidence; see `aurc`.
        average: `"macro"` averages multi-label values over labels. None returns `(..., L)`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        0 if all predictions are correct, or all are wrong. NaN without data.

    Raises:
        TypeError, ValueError: for invalid input.

    Gradient:
        None.

    Reference:
        Geifman, Uziel, El-Yaniv: Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers (ICLR 2019,
        arXiv:1805.08206). The sum is exact here, and approximated by an integral there.

    Example:
        >>> eaurc(torch.tensor([0.2, 0.9, 0.6, 0.7]), torch.tensor([0, 0, 1, 1]), task="binary")
        tensor(0.4583)
    """
    return _selective(eaurc_of, task, mode, average, options)


def _augrc(
    *, task: Task, mode: Mode | None = None, average: Average | None = "macro", **options: Unpack[InputOptions]
) -> Estimator[RankedSample]:
    """Area under the generalised risk-coverage curve (AUGRC): mean fraction of accepted errors, over all coverages.

    The generalised risk at coverage k/N is E_k / N, with E_k the number of errors among the k most confident of N
    samples. AUGRC is the area under the line through these points and (0, 0). It equals
    (1 - AUROC) acc (1 - acc) + (1 - acc)^2 / 2, with the accuracy acc and AUROC = `correctness_auroc`. Unlike AURC, it
    does not give large weights to the few most confident samples.

    Args:
        target: Integer labels.
        mode: Event whose probability is the confidence; see `aurc`.
        average: `"macro"` averages multi-label values over labels. None returns `(..., L)`.

    Returns:
        A probability in [0, 1/2], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least
        float32). NaN without data.

    Raises:
        TypeError, ValueError: for invalid input.

    Gradient:
        None.

    Reference:
        Traub et al.: Overcoming Common Flaws in the Evaluation of Selective Classification Systems (NeurIPS 2024,
        arXiv:2407.01032).

    Example:
        >>> augrc(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]), task="binary")
        tensor(0.0312)
    """
    return _selective(augrc_of, task, mode, average, options)


def _correctness_auroc(
    *, task: Task, mode: Mode | None = None, average: Average | None = "macro", **options: Unpack[InputOptions]
) -> Estimator[RankedSample]:
    """AUROC of correctness: probability that a correct prediction is more confident than an error.

    AUROC is the area under the receiver operating characteristic curve. Equal confidences count one half. 1/2 is the
    value of a confidence without information, and 1 that of an ideal order. The accuracy has no direct effect.

    Args:
        target: Integer labels.
        mode: Event whose probability is the confidence; see `aurc`. `"positive"` (binary) and `"classwise"`
            (multi-label) give the ordinary AUROC of `preds` and `target`. `"classwise"` (multi-class) gives the AUROC
            of each class against the rest.
        average: `"macro"` averages class-wise and multi-label values over classes. None returns `(..., C)`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` with `average=None`, in the dtype of `preds` (at least float32).
        NaN if all predictions are correct or all are wrong, and without data.

    Raises:
        TypeError, ValueError: for invalid input.

    Gradient:
        None.

    Reference:
        Hendrycks, Gimpel: A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural Networks
        (ICLR 2017, arXiv:1610.02136).

    Example:
        >>> correctness_auroc(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]), task="binary")
        tensor(1.)
    """
    return _selective(correctness_auroc_of, task, mode, average, options, _ONE_VS_REST)


def _risk_at_coverage(
    *,
    task: Task,
    coverage: float = 0.8,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Selective risk at a coverage: error rate of a given fraction of the samples, the most confident ones.

    The value is E_k / k with k = ceil(coverage N), where E_k is the number of errors among the k most confident of N
    samples. If only some of the samples with equal confidence are accepted, the value is the mean over all choices.

    Args:
        target: Integer labels.
        coverage: Fraction of accepted samples, above 0 and at most 1. 1 gives the error rate of all samples.
        mode: Event whose probability is the confidence; see `aurc`.
        average: `"macro"` averages multi-label values over labels. None returns `(..., L)`.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        NaN without data.

    Raises:
        TypeError, ValueError: for invalid input.

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
    return _selective(partial(risk_at_coverage_of, coverage=coverage), task, mode, average, options)


def _accuracy_at_coverage(
    *,
    task: Task,
    coverage: float = 0.8,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Accuracy at a coverage: accuracy of a given fraction of the samples, the most confident ones.

    The value is 1 - E_k / k with k = ceil(coverage N), where E_k is the number of errors among the k most confident of
    N samples. If only some of the samples with equal confidence are accepted, the value is the mean over all choices.

    Args:
        target: Integer labels.
        coverage: Fraction of accepted samples, above 0 and at most 1. 1 gives the accuracy of all samples.
        mode: Event whose probability is the confidence; see `aurc`.
        average: `"macro"` averages multi-label values over labels. None returns `(..., L)`.

    Returns:
        A fraction in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        NaN without data.

    Raises:
        TypeError, ValueError: for invalid input.

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
    return _selective(partial(accuracy_at_coverage_of, coverage=coverage), task, mode, average, options)


def _coverage_at_risk(
    *,
    task: Task,
    risk: float = 0.05,
    mode: Mode | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Estimator[RankedSample]:
    """Coverage at a selective risk: largest fraction of samples that a threshold can accept at this error rate.

    The value is the largest k/N with E_k / k <= risk, where E_k is the number of errors among the k most confident of N
    samples. Samples with equal confidence are accepted or rejected together. The threshold is chosen on the same data,
    so the error rate of new data may be larger.

    Args:
        target: Integer labels.
        risk: Largest accepted error rate, in [0, 1].
        mode: Event whose probability is the confidence; see `aurc`.
        average: `"macro"` averages multi-label values over labels. None returns `(..., L)`.

    Returns:
        A fraction in [0, 1], `(...)`, or `(..., L)` with `average=None`, in the dtype of `preds` (at least float32).
        0 if no threshold has such an error rate. NaN without data.

    Raises:
        TypeError, ValueError: for invalid input.

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
    return _selective(partial(coverage_at_risk_of, risk=risk), task, mode, average, options)


aurc = functional(_aurc)
eaurc = functional(_eaurc)
augrc = functional(_augrc)
correctness_auroc = functional(_correctness_auroc)
risk_at_coverage = functional(_risk_at_coverage)
accuracy_at_coverage = functional(_accuracy_at_coverage)
coverage_at_risk = functional(_coverage_at_risk)


class SelectiveMetric(RankedMetric):
    """Base class for streaming metrics of selective prediction.

    They have no gradient, and no test, because they are not calibration errors.
    """

    is_differentiable = False

    def curve(self) -> "RiskCoverageCurve":
        """Return the risk-coverage curve, over all ranks if `torch.distributed` is running.

        Raises:
            ValueError: for `CorrectnessAUROC` with the mode "classwise" of a multi-class task.
        """
        _, converts = _events(self.input_format.task, self.settings["mode"], self._options_of_events)
        return risk_coverage_curve_of(self._synced_statistic(), converts)

    @property
    def _options_of_events(self) -> dict[str, Any]:
        return {"positive_classes": self.input_format.positive_classes}

    def test_from(self, statistic: RankedSample, **how: Any) -> CalibrationTest:
        """Raise TypeError, because the metric is not a calibration error."""
        return CalibrationMetric.test_from(self, statistic, **how)


class AURC(SelectiveMetric):
    """Streaming area under the risk-coverage curve (AURC); see `aurc`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> metric = AURC(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.0625, dtype=torch.float64)
    """

    factory = staticmethod(_aurc)
    question = "mean error rate of the most confident samples, over all coverages"
    source = "Geifman et al., Bias-Reduced Uncertainty Estimation, ICLR 2019"


class EAURC(SelectiveMetric):
    """Streaming excess area under the risk-coverage curve (E-AURC); see `eaurc`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> metric = EAURC(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.9, 0.6, 0.7]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.4583, dtype=torch.float64)
    """

    factory = staticmethod(_eaurc)
    question = "AURC minus its smallest value for this accuracy"
    source = "Geifman et al., Bias-Reduced Uncertainty Estimation, ICLR 2019"


class AUGRC(SelectiveMetric):
    """Streaming area under the generalised risk-coverage curve (AUGRC); see `augrc`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> metric = AUGRC(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.0312, dtype=torch.float64)
    """

    factory = staticmethod(_augrc)
    question = "mean fraction of samples that are accepted errors, over all coverages"
    source = "Traub et al., Overcoming Common Flaws, NeurIPS 2024"
    plot_upper_bound = 0.5


class CorrectnessAUROC(SelectiveMetric):
    """Streaming AUROC of correctness; see `correctness_auroc`.

    AUROC is the area under the receiver operating characteristic curve. The state contains all samples, or a sketch if
    `resolution` is given.

    Example:
        >>> metric = CorrectnessAUROC(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    factory = staticmethod(_correctness_auroc)
    question = "probability that a correct prediction is more confident than an error"
    source = "Hendrycks & Gimpel, A Baseline for Detecting Misclassified Examples, ICLR 2017"
    perfect = 1.0  # value of an ideal order; undefined for a predictor without errors
    higher_is_better = True


class RiskAtCoverage(SelectiveMetric):
    """Streaming selective risk at a coverage; see `risk_at_coverage`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> metric = RiskAtCoverage(task="binary", coverage=0.75)
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.3333, dtype=torch.float64)
    """

    factory = staticmethod(_risk_at_coverage)
    question = "error rate of the most confident samples, at a given coverage"
    source = "Geifman & El-Yaniv, Selective Classification, NeurIPS 2017"


class AccuracyAtCoverage(SelectiveMetric):
    """Streaming accuracy at a coverage; see `accuracy_at_coverage`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> metric = AccuracyAtCoverage(task="binary", coverage=0.75)
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.6667, dtype=torch.float64)
    """

    factory = staticmethod(_accuracy_at_coverage)
    question = "accuracy of the most confident samples, at a given coverage"
    source = "Geifman & El-Yaniv, Selective Classification, NeurIPS 2017"
    perfect = 1.0
    unit = "fraction of samples"
    higher_is_better = True


class CoverageAtRisk(SelectiveMetric):
    """Streaming coverage at a selective risk; see `coverage_at_risk`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> metric = CoverageAtRisk(task="binary", risk=0.05)
        >>> metric.update(torch.tensor([0.2, 0.6, 0.9, 0.7]), torch.tensor([0, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    factory = staticmethod(_coverage_at_risk)
    question = "largest fraction of samples that a threshold accepts at a given error rate"
    source = "Geifman & El-Yaniv, Selective Classification, NeurIPS 2017"
    perfect = 1.0
    unit = "fraction of samples"
    higher_is_better = True


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


@documented
def risk_coverage_curve(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    mode: Mode | None = None,
    **options: Unpack[InputOptions],
) -> RiskCoverageCurve:
    """Return the risk-coverage curve: error rate of the samples with at least a given confidence, by their fraction.

    There is one point for each distinct confidence. With more than 1,024, it is the last point in each of 1,024
    intervals of coverage. `aurc` and `augrc` are areas under the curve with all points.
    `torchcalib.plots.risk_coverage_curve` draws the curve.

    Args:
        target: Integer labels.
        mode: Event whose probability is the confidence; see `aurc`.

    Returns:
        A `RiskCoverageCurve` with tensors `(..., M)`, multi-label `(..., L, M)`, M at most 1,024, in float64. NaN
        without data.

    Raises:
        TypeError, ValueError: for invalid input.

    Gradient:
        None.

    Reference:
        Geifman, El-Yaniv: Selective Classification for Deep Neural Networks (NeurIPS 2017, arXiv:1705.08500).

    Example:
        >>> curve = risk_coverage_curve(torch.tensor([0.2, 0.6, 0.9]), torch.tensor([0, 0, 1]), task="binary")
        >>> curve.coverage
        tensor([0.3333, 0.6667, 1.0000], dtype=torch.float64)
    """
    mode, converts = _events(task, mode, options)
    input_format = input_format_of(task, options, hard_targets=True, whole_weights=True)
    with torch.no_grad():
        sample = ExactSample(mode).of(input_format.read(preds, target, options.get("weights")))
        return risk_coverage_curve_of(sample, converts)


def risk_coverage_curve_of(sample: RankedSample, converts: bool = False) -> RiskCoverageCurve:
    """Compute the risk-coverage curve from a `RankedSample`; `converts` applies `of_predicted_class` first."""
    a = Accepted.of(of_predicted_class(sample) if converts else sample)
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
    """Return the points `(4, ..., M)` in a mask `(..., M)`, in their order and padded with NaN at the end."""
    length = max(1, int(kept.sum(-1).amax())) if kept.numel() else 1
    order = torch.sort((~kept).to(torch.uint8), dim=-1, stable=True).indices[..., :length]
    points = points.gather(-1, order.expand(len(points), *order.shape))
    return points.masked_fill(~kept.gather(-1, order), torch.nan)
