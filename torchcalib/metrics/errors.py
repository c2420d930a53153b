"""Streaming calibration errors over bins."""

from torch import Tensor

from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.kernel_blocks import BlockStats
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats
from torchcalib.functional.binned import BinnedEstimator, ace, ece, esce, full_ece, mce, rmsce
from torchcalib.functional.kernel import skce
from torchcalib.functional.smooth import SmoothingCells, smece, width_from_cells
from torchcalib.functional.test_based import estimation_error, gce, tce
from torchcalib.metrics.base import CalibrationMetric


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
        """Return the table of bins, over all ranks if `torch.distributed` is running; see `calibration_curve`."""
        return self.estimator.table(self._synced_statistic())


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
