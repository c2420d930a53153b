"""Streaming calibration errors over bins and of ranked samples, and their test."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import Tensor

from torchcalib.core.arguments import Task, task_by_position, task_of
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.kernel_blocks import BlockStats
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats, Sums
from torchcalib.core.tasks import as_tensors, cluster_ids, infer_task
from torchcalib.functional.binned import BinnedEstimator, ace, ece, esce, full_ece, mce, mean_bin_error, rmsce
from torchcalib.functional.kernel import skce
from torchcalib.functional.logistic import CoxCalibration, cox, spiegelhalter
from torchcalib.functional.ranked import CORPDecomposition, atb, cllr, corp, ici, ks
from torchcalib.functional.smooth import SmoothingCells, smece, width_from_cells
from torchcalib.functional.test_based import estimation_error, gce, tce
from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.base import CalibrationMetric, check_counts
from torchcalib.metrics.clustered import Clustered


class FullECE(CalibrationMetric[BinStats], function=full_ece):
    """Streaming Full-ECE; see `full_ece`. The size of the state does not depend on the number of classes.

    Example:
        >>> import torch
        >>> metric = FullECE(task="multiclass", n_bins=2)
        >>> metric.update(torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]]), torch.tensor([0, 1]))
        >>> metric.compute()
        tensor(0.3000, dtype=torch.float64)
    """


class BinnedMetric(CalibrationMetric[BinStats | RankedSample]):
    """Base class for streaming calibration errors over bins.

    The state for equal-width bins contains 7 sums per bin and class: weight, confidence, outcome and four sums for the
    sampling noise (see `BinStats.has_noise`). `with_ecd=True` adds the entropic calibration difference
    (ECD). An additional number per batch element and class indicates soft targets or floating weights.

    For bins that depend on the data, the state contains all samples: 5 bytes each for float32 probabilities, 13 with
    weights. With `resolution` it is a sketch of constant size. The ECD of the bins follows from the samples, except
    for the top label of several classes.
    """

    estimator: BinnedEstimator

    def bin_table(self) -> BinTable:
        """Return the table of bins, over all ranks if `torch.distributed` is running; see `calibration_curve`.

        With `per_image`, bins contain the voxels of all images, and the table has the chosen classes.
        """
        statistic: Any = self._synced_statistic()
        return self.estimator.table(statistic if self.images is None else self.images.chosen(statistic.whole))


class ECE(BinnedMetric, function=ece):
    """Streaming expected calibration error (ECE); see `ece`.

    Example:
        >>> import torch
        >>> metric = ECE(task="multiclass", num_classes=3, n_bins=5)
        >>> metric.update(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.9, 0.0]]), torch.tensor([0, 2]))
        >>> metric.compute()
        tensor(0.6000, dtype=torch.float64)
    """


class ACE(BinnedMetric, function=ace):
    """Streaming adaptive calibration error (ACE); see `ace`. Stores all samples, or a sketch with `resolution`.

    Example:
        >>> import torch
        >>> metric = ACE(task="binary", n_bins=2)
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1]))
        >>> metric.compute()
        tensor(0.1500, dtype=torch.float64)
    """


class ESCE(BinnedMetric, function=esce):
    """Streaming expected signed calibration error (ESCE); see `esce`.

    Example:
        >>> import torch
        >>> metric = ESCE(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0667, dtype=torch.float64)
    """


class MeanBinError(BinnedMetric, function=mean_bin_error):
    """Streaming mean bin error: mean |frequency - confidence| over non-empty bins; see `mean_bin_error`.

    Example:
        >>> import torch
        >>> metric = MeanBinError(task="binary", n_bins=5)
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 0]))
        >>> metric.compute()
        tensor(0.4667, dtype=torch.float64)
    """


class MCE(BinnedMetric, function=mce):
    """Streaming maximum calibration error (MCE); see `mce`.

    Example:
        >>> import torch
        >>> metric = MCE(task="binary", n_bins=2)
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.2000, dtype=torch.float64)
    """


class RMSCE(BinnedMetric, function=rmsce):
    """Streaming root mean squared calibration error (RMSCE); see `rmsce`.

    Example:
        >>> import torch
        >>> metric = RMSCE(task="binary", n_bins=2)
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.2000, dtype=torch.float64)
    """


class TCE(BinnedMetric, function=tce):
    """Streaming test-based calibration error (TCE), in percent; see `tce`.

    To pickle a metric with a user-defined `test`, the function must be a named one of a module.

    Example:
        >>> import torch
        >>> metric = TCE(task="binary", bins="equal_width", n_bins=2)
        >>> metric.update(torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9]), torch.tensor([1, 1, 1, 1, 1, 1]))
        >>> metric.compute()
        tensor(50., dtype=torch.float64)
    """

    def table(self) -> TCETable:
        """Return the table of bins with the number of rejected predictions, over all ranks; see `tce_table`."""
        bins = self.estimator.ranked_bins(self._synced_statistic())  # type: ignore[arg-type]  # a RankedSample
        return bins.test_table(self.settings["alpha"], self.settings["test"])

    is_differentiable = False


class GCE(BinnedMetric, function=gce):
    """Streaming generalised calibration error (GCE); see `gce`. To pickle the metric, `loss` must be a named function.

    Example:
        >>> import torch
        >>> metric = GCE(task="binary", loss=lambda b: b.gap.abs(), bins="equal_mass", n_bins=2)
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1]))
        >>> metric.compute()
        tensor(0.1500, dtype=torch.float64)
    """


class EstimationError(BinnedMetric, function=estimation_error):
    """Streaming estimation error of bins; see `estimation_error`.

    To pickle a metric with a user-defined `distance`, the function must be a named one of a module.

    Example:
        >>> import torch
        >>> metric = EstimationError(task="binary", bins=[0, 0.5, 1])
        >>> metric.update(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.8, 0.9]), torch.tensor([0, 0, 1, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.1250, dtype=torch.float64)
    """

    is_differentiable = False


class SKCE(CalibrationMetric[BlockStats], function=skce):
    """Streaming squared kernel calibration error (SKCE), a mean over blocks of samples; see `skce`.

    Each update is divided into blocks of consecutive samples, and an incomplete last block is ignored. The value
    therefore depends on the batch sizes. It is unbiased if the order of the samples is random. It equals the value of
    `skce` for all data if every batch size is a multiple of the block size. `ByGroup` forms blocks within each group.

    The state contains 3 sums, for multi-label 3 sums per label. The estimators "unbiased" and "biased" are only
    available in `skce`, because they require all pairs of samples.

    Args:
        estimator: `"linear"`, with blocks of two, or `"block"`.
        kernel: See `skce`.
        bandwidth: A positive number. `"median"` is not supported, because the median would differ between updates.
        block_size: See `skce`.
        average: See `skce`.
        chunk: See `skce`.

    Example:
        >>> import torch
        >>> metric = SKCE(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]), torch.tensor([1, 1]))
        >>> metric.compute()
        tensor(0.1317, dtype=torch.float64)
    """


class SmECE(CalibrationMetric[SmoothingCells], function=smece):
    """Streaming smooth expected calibration error (smECE); see `smece`.

    The state contains 6 sums for each of 15,888 cells of the confidence: 763 kB per class for any number of samples.
    The value equals `smece` for all samples, up to rounding errors. `test` does not compute an interval.

    Example:
        >>> import torch
        >>> metric = SmECE(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.1753, dtype=torch.float64)
    """

    def width(self) -> Tensor:
        """Return the selected kernel width, over all ranks if `torch.distributed` is running; see `smece_width`."""
        return width_from_cells(self._synced_statistic())


class KS(CalibrationMetric[RankedSample], function=ks):
    """Streaming Kolmogorov-Smirnov (KS) calibration error; see `ks`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = KS(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0667, dtype=torch.float64)
    """


class CORP(CalibrationMetric[RankedSample], function=corp):
    """Streaming CORP decomposition of a score into miscalibration, discrimination and uncertainty; see `corp`.

    The state contains all samples, or a sketch if `resolution` is given. `decomposition()` returns all components.

    Args:
        component: Field of `CORPDecomposition` that `compute` returns: `"mcb"`, `"dsc"`, `"unc"` or `"score"`.

    Example:
        >>> import torch
        >>> metric = CORP(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]))
        >>> metric.compute()
        tensor(0.1083, dtype=torch.float64)
    """

    def decomposition(self) -> CORPDecomposition:
        """Return all components of the decomposition, over all ranks if `torch.distributed` is running."""
        of_all = replace(self.estimator, component=None)  # type: ignore[call-arg]  # a `CORPEstimator`
        return CORPDecomposition(*of_all.value(self._synced_statistic()).unbind(-1))


class Cllr(CalibrationMetric[RankedSample], function=cllr):
    """Streaming cost of log-likelihood ratios (Cllr), min-Cllr or their difference, in bits; see `cllr`.

    The state contains all samples, or a sketch if `resolution` is given. `NLL(priors=[0.5, 0.5], normalize="prior")`
    computes Cllr from sums.

    Example:
        >>> import torch
        >>> metric = Cllr(task="binary", from_logits=True)
        >>> metric.update(torch.tensor([-2.0, 0.5, 3.0, 1.0]), torch.tensor([0, 1, 1, 0]))
        >>> metric.compute()
        tensor(0.7079, dtype=torch.float64)
    """


class ICI(CalibrationMetric[RankedSample], function=ici):
    """Streaming integrated calibration index (ICI); see `ici`. Stores all samples, or a sketch with `resolution`.

    Example:
        >>> import torch
        >>> metric = ICI(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.4000, dtype=torch.float64)
    """


class ATB(CalibrationMetric[RankedSample], function=atb):
    """Streaming averaged two-bin calibration error (ATB); see `atb`.

    The state contains all samples, or a sketch if `resolution` is given.

    Example:
        >>> import torch
        >>> metric = ATB(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.0129, dtype=torch.float64)
    """


class Cox(CalibrationMetric[RankedSample], function=cox):
    """Streaming calibration slope or intercept from Cox's logistic regression; see `cox`.

    The state contains all samples, or a sketch if `resolution` is given. `fit()` returns all fields.

    Args:
        component: Field of `CoxCalibration` that `compute` returns.

    Example:
        >>> import torch
        >>> metric = Cox(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9, 0.6, 0.3, 0.5]), torch.tensor([0, 1, 1, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.9416, dtype=torch.float64)
    """

    def __init__(self, task: Task | None = None, **options: Any) -> None:
        super().__init__(task, **options)
        self.perfect = 1.0 if self.settings["component"] in ("slope", "p_value") else 0.0

    def fit(self) -> CoxCalibration:
        """Return all results of the regression, over all ranks if `torch.distributed` is running."""
        of_all = replace(self.estimator, component=None)  # type: ignore[call-arg]  # a `CoxEstimator`
        return CoxCalibration(*of_all.value(self._synced_statistic()).unbind(-1))


class Spiegelhalter(CalibrationMetric[Sums], function=spiegelhalter):
    """Streaming test of calibration by Spiegelhalter; see `spiegelhalter`. The state is 3 sums per class.

    Example:
        >>> import torch
        >>> metric = Spiegelhalter(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(-0.8296, dtype=torch.float64)
    """

    def __init__(self, task: Task | None = None, **options: Any) -> None:
        super().__init__(task, **options)
        if self.settings["component"] == "p_value":
            self.perfect, self.unit = 1.0, "probability"


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

    The p-value holds for one look at the data: repeated looks at growing data give more false alarms. Use
    `SequentialTest` for repeated looks.

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
        with preds.device:  # not the default device
            metric = ECE(infer_task(preds, target, options) if task is None else task, **options)
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
