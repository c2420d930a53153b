"""Streaming smooth calibration error."""

from torch import Tensor

from torchcalib.functional.smooth import SmoothingCells, smece, width_from_cells
from torchcalib.metrics.base import CalibrationMetric


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
