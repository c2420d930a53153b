"""The table of the bins that a binned error is read from."""

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, task_read_as
from torchcalib.core.bins import BinTable
from torchcalib.core.events import Reduction
from torchcalib.core.ranked_bins import Binning, Bins
from torchcalib.metrics.binned.reading import BinReading, statistic_of


def bin_table(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    n_bins: int = 15,
    reduction: Reduction | None = None,
    right: bool = False,
    **options: Unpack[InputOptions],
) -> BinTable:
    """Table of the bins that a binned error is read from: n, share, confidence, frequency, gap, mean ECD, edges, and
    between which frequencies those of a calibrated model would lie.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        bins: `"equal_width"` over [0, 1], `"equal_mass"` as in `ace`, or any other that `tce` takes. All but
            equal-width ones take whole `weights`, and PAVA and PAVA-BC take labels.
        n_bins: number of equal-width or equal-mass bins B.
        reduction: what the confidence is of; see `ece`.
        right: bins are `(a, b]` instead of `[a, b)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        A `BinTable` of `(..., B)`, class-wise and multi-label `(..., C, B)`, in float64.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, Tables I-II.

    Example:
        >>> import torch
        >>> table = bin_table(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary", n_bins=2)
        >>> print(table.to_dict()["gap"].round(4), table.to_dict()["ecd"].round(4))
        [-0.2  0.2] [-0.2773 -0.237 ]
        >>> table = bin_table(torch.full((100,), 0.8), torch.tensor([0, 1, 1, 1]).repeat(25), task="binary", n_bins=2)
        >>> print(table)
              lower      upper          n      share confidence  frequency        gap        ecd   band_low  band_high
             0.0000     0.5000          0     0.0000          -          -          -          -          -          -
             0.5000     1.0000        100     1.0000     0.8000     0.7500    -0.0500     0.0693     0.7200     0.8800
    """
    reading = BinReading(task_read_as(task, options), Binning.given(bins, n_bins=n_bins, right=right), reduction)
    return reading.table(statistic_of(reading, task, preds, target, options, with_ecd=True))
