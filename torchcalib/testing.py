"""Assertions on calibration for tests of models, such as with pytest."""

from typing import Any, Unpack

from torchcalib.core.arguments import Task, check_positive, is_number
from torchcalib.display.words import ONE_LOOK, significant
from torchcalib.io.errors import shown
from torchcalib.reporting.options import ReportOptionsDict
from torchcalib.results.conditions import ALPHA, MAX_ECE, Condition
from torchcalib.results.report import Report

__all__ = ["assert_calibrated"]


def assert_calibrated(
    probs: Any,
    labels: Any,
    task: Task | None = None,
    *,
    alpha: float = ALPHA,
    max_ece: float = MAX_ECE,
    require_detectable: float | None = None,
    clusters: Any = None,
    **options: Unpack[ReportOptionsDict],
) -> Report:
    """Raise AssertionError if predictions are miscalibrated by more than sampling noise, and by a relevant amount.

    The assertion fails if the expected calibration error (ECE) has a p-value below `alpha` and is above `max_ece`. A
    large p-value alone is no proof of calibration: with few samples, the test detects large errors only. The error
    message contains the verdict of the report and the values. The p-value holds for one look at the data: a check of
    new data every day gives more false alarms than a single check. Use `torchcalib.SequentialTest` for repeated looks.

    Args:
        probs: probabilities, or logits with `from_logits=True`; see `torchcalib.report`.
        labels: labels.
        task: `"binary"`, `"multiclass"` or `"multilabel"`. None infers the task from the shapes.
        alpha: level of the test, in (0, 1): a calibrated model fails with at most this probability.
        max_ece: largest ECE that is accepted even if it is significant, above 0.
        require_detectable: size of a mean signed error, such as 0.02. The assertion also fails if the data are too few
            to find it with a probability of 80%; see `Report.minimum_detectable_error`. None requires nothing.
        clusters: cluster of each sample; see `torchcalib.report`. Only samples of different clusters are treated as
            independent.
        **options: see `torchcalib.reporting.options.ReportOptionsDict`, such as `weights` and `n_bins`.

    Returns:
        The report, without calibrators. It contains intervals only with `with_intervals=True`.

    Raises:
        AssertionError: if the predictions are miscalibrated, or if there are too few.
        TypeError, ValueError: for invalid input, and if the ECE has no p-value, as for some soft targets.

    Example:
        >>> import torch
        >>> p = torch.rand(500, generator=torch.Generator().manual_seed(0))
        >>> y = torch.bernoulli(p, generator=torch.Generator().manual_seed(1))
        >>> assert_calibrated(p, y).n
        500.0
        >>> assert_calibrated(p.square(), y)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        AssertionError: Badly biased towards y = 0. P(y = 1) is too low: ...
    """
    __tracebackhide__ = True  # of pytest
    if not is_number(alpha) or not 0 < alpha < 1:
        raise ValueError(f"`alpha` must be a number between 0 and 1, got {shown(alpha)}. A level of 1% is 0.01.")
    check_positive("max_ece", max_ece)
    if require_detectable is not None:
        check_positive("require_detectable", require_detectable)
    quick: ReportOptionsDict = {"with_calibration": False, "with_intervals": False, **options}
    found = Report.from_predictions(probs, labels, task, clusters=clusters, **quick)
    condition = Condition.parse(f"p(ece) < {alpha!r} and ece > {max_ece!r}")
    outcome = condition.outcome(found)
    if outcome.holds:
        raise AssertionError(f"{found.sentence} The assertion fails if {condition.text}, and {outcome}. {ONE_LOOK}")
    detectable = found.minimum_detectable_error
    if require_detectable is not None and not detectable <= require_detectable:
        raise AssertionError(
            f"There are too few rows to find a mean error of {require_detectable:g}: the smallest one that is found "
            f"with 80% probability is {significant(detectable)}. See torchcalib.required_n for the number of rows."
        )
    return found
