"""Streaming kernel calibration error."""

from torchcalib.core.kernel_blocks import BlockStats
from torchcalib.functional.kernel import skce
from torchcalib.metrics.base import CalibrationMetric


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
