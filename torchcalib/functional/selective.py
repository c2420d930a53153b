"""Metrics of selective prediction: a model abstains from its least confident predictions.

Acronyms: area under the risk-coverage curve (AURC), its excess over the ideal order (E-AURC), area under the
generalised risk-coverage curve (AUGRC), area under the receiver operating characteristic curve (AUROC).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, is_number, task_read_as
from torchcalib.core.events import Mode, NamedMode
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.functional.estimator import Declaration, Estimator, metric_function
from torchcalib.functional.risk_coverage import (
    MODES,
    Accepted,
    events_of,
    of_predicted_class,
)
from torchcalib.io.errors import shown
from torchcalib.ops.harmonic import harmonic_difference
from torchcalib.ops.labelled import risk_sums
from torchcalib.ops.operation import is_plain

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
