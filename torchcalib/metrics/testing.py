"""Test of calibration with any calibration error as its statistic."""

from copy import deepcopy
from typing import Any

from torch import Tensor

from torchcalib.core.arguments import Task, task_by_position, task_of
from torchcalib.core.arrays import as_tensors
from torchcalib.core.tasks import cluster_ids, inferred_task
from torchcalib.functional.binned import BinnedEstimator
from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.base import CalibrationMetric, check_counts
from torchcalib.metrics.clustered import Clustered
from torchcalib.metrics.errors import ECE


@task_by_position
def calibration_test(
    metric: Any = None,
    preds: Any = None,
    target: Any = None,
    *,
    task: Task | None = None,
    weights: Tensor | None = None,
    sample_weight: Tensor | None = None,
    clusters: Any = None,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
    **options: Any,
) -> CalibrationTest:
    """Test whether a model is calibrated, with a calibration error as the test statistic.

    The result also contains an interval and the noise floor, the expected error under perfect calibration. Outcomes are
    simulated from the predicted confidences and the metric is recomputed (consistency resampling). Confidences are
    assumed to be fixed. An integer weight is a number of independent copies; a floating weight is the importance of a
    row. Rank-based errors have no test for floating weights, unless all are 0 or 1. A sketch counts whole floating
    weights as copies.

    Rows are assumed to be independent, unless `clusters` are given. Pixels of an image, tokens of a document or answers
    to a question are dependent: without clusters, p-values are then too small and intervals too narrow.

    The p-value holds for one look at the data: repeated looks at growing data give more false alarms.

    The variance of a soft target is estimated by its squared distance from the confidence. Targets that are all 0 or 1
    are labels for any dtype. This is checked separately for each batch element, label and group. With floating
    weights, floating targets are always treated as soft; see `BinStats.noise`.

    Outcomes of different classes are dependent. For an average over the classes of a multi-class task, the label of
    each row is simulated from its predicted distribution (`torchcalib.inference.simulation`). For soft targets, more
    than 2^25 rows times replicates, and multi-label tasks, the p-value is a Cauchy combination of the p-values of the
    classes; see `CalibrationTest.smallest_p_value`. For signed errors, the statistic is the absolute value of the
    average over independent labels. Over mutually exclusive classes, this average and its noise floor are 0.

    Args:
        metric: Calibration error such as `RMSCE(task="binary")`. Only its configuration is used; its state is ignored.
            Omit it for `ECE`: `calibration_test(preds, target)`.
        preds: Predictions, as for `CalibrationMetric.update`.
        target: Labels or soft targets, as for `CalibrationMetric.update`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`. None is the task of `metric`, or inferred from the data.
        weights: Non-negative weight per sample.
        sample_weight: Alias of `weights`, as in scikit-learn.
        clusters: Cluster of each sample, integers or strings, or one for each entry of the first axis. Only
            samples of different clusters are independent; see `Clustered`.
        level: Level of the interval, in (0, 1).
        n_replicates: Number R of simulated replicates. The smallest possible p-value is 1 / (R + 1).
        seed: Seed for the simulation, which is the same on every device.
        **options: Options of `ECE` if `metric` is omitted, such as `from_logits` and `n_bins`.

    Returns:
        A `CalibrationTest` with tensors in the shape of the metric value; NaN without data. `ECE`, `ACE`, `ESCE` and
        `RMSCE` have a confidence interval for their expected value over samples of this size, in closed form. It
        contains the value. An interval of ECE, ACE or RMSCE above the noise floor rejects calibration. For ESCE and
        debiased RMSCE, an interval without 0 does; that of debiased RMSCE is for the error without noise. The interval
        is NaN for ECE, ACE and RMSCE of fewer than 5 expected events or complements, for other errors, for isotonic
        bins, and for averages over classes, whose covariances are not stored.

    Raises:
        TypeError, ValueError: for invalid input.

    Gradient:
        None.

    Reference:
        Vaicenavicius et al.: Evaluating model calibration in classification (AISTATS 2019), for whole labels; Broecker,
        Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007), for
        consistency resampling. For the interval see `torchcalib/inference/intervals.py`.

    Example:
        >>> import torch
        >>> from torchcalib import ECE
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.8]), torch.tensor([0, 1, 0, 1])
        >>> found = calibration_test(ECE(task="binary", n_bins=2), preds, target)
        >>> round(found.statistic.item(), 4), round(found.p_value.item(), 2)
        (0.15, 1.0)
    """
    if not (metric is None or isinstance(metric, CalibrationMetric)):  # the metric is omitted
        if preds is not None and target is not None:
            raise TypeError(
                f"`metric` must be a calibration error from torchcalib, got {metric!r:.80}. "
                "Pass an error such as ECE(task='binary')."
            )
        metric, preds, target = (None, metric, target) if preds is None else (None, metric, preds)
    preds, target, weights = as_tensors(preds, target, weights, sample_weight)
    if metric is None:
        metric = ECE(inferred_task(preds, target, options) if task is None else task, **options)
    elif options or (task is not None and task_of(task) != metric.settings["task"]):
        name = next(iter(options), "task")
        raise TypeError(
            f"`{name}` must be an option of the metric, got another value in the call. Pass "
            f"{type(metric).__name__}({name}=...)."
        )
    is_plain = clusters is None or isinstance(metric, Clustered)
    fresh = deepcopy(metric) if is_plain else Clustered(metric)
    fresh.reset()
    given = {} if clusters is None else {"clusters": cluster_ids(clusters, preds)}
    fresh.update(preds, target, weights, **given)
    how: dict[str, Any] = {"level": level, "n_replicates": n_replicates, "seed": seed}
    plain = metric.metric if isinstance(metric, Clustered) else metric
    if isinstance(plain.estimator, BinnedEstimator) and not fresh._would_sync:
        p = plain.input_format.read(preds, target, weights, batch_shape=plain.batch_shape, drop_invalid=True)
        how["rows"] = plain.estimator.label_rows(p)
        statistic = fresh.statistic()
        check_counts(statistic)
        return fresh.test_from(statistic, **how)
    return fresh.test(**how)
