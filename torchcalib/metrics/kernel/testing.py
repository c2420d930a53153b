"""Is the model calibrated: the test that comes with the squared kernel calibration error."""

from typing import Literal, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, task_read_as
from torchcalib.core.inputs import read_input
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.metrics.kernel.blocks import CalibrationTest
from torchcalib.metrics.kernel.skce import Estimator, KernelReading
from torchcalib.metrics.kernel.vectors import by_way, ways_of_weighing
from torchcalib.ops.pairwise import Kernel

_LARGEST = 2.0
"""|h| of two samples is at most |e_y - p| |e_y' - p'| <= 2."""


def skce_test(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    estimator: Estimator = "linear",
    kernel: Kernel = "laplacian",
    bandwidth: float | Literal["median"] = 1.0,
    block_size: int = 32,
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> CalibrationTest:
    """Test whether a model is calibrated in the strong sense, by its squared kernel calibration error.

    Args:
        preds: see `skce`.
        target: see `skce`.
        task: see `skce`.
        estimator: `"linear"` or `"block"`: the blocks are independent, so their mean is normal if they are many, and
            its standard deviation is that of the blocks; the test is asymptotic, and larger blocks have more power. The
            order must be random.
            `"unbiased"`: a bound of the p-value that holds for every sample size, exp(-floor(N / 2) value^2 / 8) for a
            positive value (Hoeffding's, as |h| <= 2); it needs far more data to reject.
        kernel: see `skce`.
        bandwidth: see `skce`; the median follows from the predictions alone, and the test holds given these.
        block_size: see `skce`.
        chunk: see `skce`.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers: copies, which are taken for
            samples of their own.

    Returns:
        `value` and `p_value`, each `(...)`, multi-label `(..., L)`, in the dtype of `preds` (at least float32). The
        test is one-sided: a negative value never rejects calibration. The p-value is 1 where all residuals are 0. It
        is NaN with fewer than two blocks (for "unbiased", fewer than two samples).

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Of the value as `skce`; through the p-value as well.

    Source:
        Widmann, Lindsten, Zachariah: Calibration tests in multi-class classification (NeurIPS 2019), lemmas 2 and 3.

    Example:
        >>> import torch
        >>> g = torch.Generator().manual_seed(0)
        >>> preds = torch.randn(1000, 3, generator=g).softmax(-1)
        >>> target = torch.multinomial(preds, 1, generator=g).squeeze(-1)
        >>> skce_test(preds, target, task="multiclass", estimator="block").p_value > 0.05
        tensor(True)
        >>> skce_test(preds, (target + 1) % 3, task="multiclass", estimator="block").p_value < 1e-9
        tensor(True)
    """
    reading = KernelReading(task_read_as(task, options), estimator, kernel, bandwidth, block_size, "macro", chunk)
    if estimator == "biased":
        raise ValueError("`estimator` must be 'linear', 'block' or 'unbiased' of a test, got 'biased'.")
    p = read_input(task, preds, target, options, **reading.demands)
    found = _bounded(reading, p) if estimator == "unbiased" else _normal(reading, p)
    return CalibrationTest(found.value.to(p.dtype), found.p_value.to(p.dtype))


def _normal(reading: KernelReading, p: Predictions) -> CalibrationTest:
    recipe = reading.recipe()
    found = by_replicates(lambda p: torch.stack(recipe.of(p).test(), -1), p, recipe.n_events(p))
    return CalibrationTest(*found.unbind(-1))


def _bounded(reading: KernelReading, p: Predictions) -> CalibrationTest:
    value = reading.of(p)
    n_pairs = (by_way(ways_of_weighing(p).sum(-1), p) / 2).floor()
    return CalibrationTest(value, (-n_pairs * value.clamp(min=0).square() / (2 * _LARGEST**2)).exp())
