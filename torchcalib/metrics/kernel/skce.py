"""Squared kernel calibration error."""

import math
from dataclasses import dataclass
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_average,
    check_choice,
    check_count,
    check_task,
    is_number,
    task_read_as,
)
from torchcalib.core.inputs import read_input
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.metrics import estimator as engine
from torchcalib.metrics.base import StreamingMetric
from torchcalib.metrics.kernel.blocks import BlockRecipe, BlockStats, CalibrationTest, median_distance, scale_of
from torchcalib.metrics.kernel.vectors import by_way, distributions, ways_of_weighing
from torchcalib.ops import pairwise
from torchcalib.ops.pairwise import Kernel

Estimator = Literal["unbiased", "biased", "block", "linear"]
InBlocks = Literal["block", "linear"]


@dataclass(frozen=True)
class KernelReading:
    """From predictions to the error: the only place where its options are checked.

    Attributes:
        task: that predictions are one of once they are read.
        others: see `skce`.
    """

    task: Task
    estimator: Estimator
    kernel: Kernel
    bandwidth: float | Literal["median"]
    block_size: int
    average: Average | None
    chunk: int | None

    def __post_init__(self) -> None:
        check_task(self.task)
        check_choice("estimator", self.estimator, get_args(Estimator))
        check_choice("kernel", self.kernel, get_args(Kernel))
        check_average(self.average, self.task == "multilabel")
        check_count("block_size", self.block_size, at_least=2)
        if self.chunk is not None:
            check_count("chunk", self.chunk)
        check_bandwidth(self.bandwidth, "median")

    @property
    def in_blocks(self) -> bool:
        """Whether samples are cut into blocks, so that sums are enough."""
        return self.estimator in ("block", "linear")

    @property
    def demands(self) -> dict[str, bool]:
        """What the reading demands of input; arguments of `InputFormat`."""
        return {"whole_weights": self.estimator != "biased"}

    def recipe(self) -> BlockRecipe:
        """The sums of an estimator in blocks."""
        size = 2 if self.estimator == "linear" else self.block_size
        return BlockRecipe(self.kernel, self.bandwidth, size, self.chunk)

    def of(self, p: Predictions) -> Tensor:
        """Read the value of predictions, for each label `(..., L)`."""
        if self.in_blocks:
            recipe = self.recipe()
            return by_replicates(lambda p: recipe.of(p).mean, p, recipe.n_events(p))
        return self._all_pairs(p)

    def _all_pairs(self, p: Predictions) -> Tensor:
        """Read the value from all pairs of samples."""
        q, r = distributions(p)
        weights = ways_of_weighing(p)
        if self.bandwidth == "median":
            scale = scale_of(self.kernel, median_distance(q, weights, self.kernel))[..., None, None]
            ways = [  # each with a kernel of its own
                pairwise.pairs(q * scale[..., k, :, :], r, weights[..., k : k + 1, :], self.kernel, self.chunk)
                for k in range(weights.shape[-2])
            ]
            total = torch.cat(ways, -1)
        else:
            total = pairwise.pairs(q * scale_of(self.kernel, self.bandwidth), r, weights, self.kernel, self.chunk)
        n = weights.sum(-1)
        if self.estimator == "biased":
            return by_way(total / n.square(), p)
        own = (weights * r.square().sum(-1).unsqueeze(-2)).sum(-1)  # of a copy with itself, which is no pair
        # With one sample the sums cancel up to rounding, and rounding error / 0 would be infinite.
        return by_way(((total - own) / (n * (n - 1))).masked_fill(n < 2, torch.nan), p)

    def averaged(self, value: Tensor) -> Tensor:
        """Average over labels, if asked."""
        return value.mean(-1) if self.task == "multilabel" and self.average is not None else value


def check_bandwidth(bandwidth: object, *names: str) -> None:
    """Raise unless `bandwidth` is a positive number, or one of the names of ways to choose it."""
    if bandwidth in names:
        return
    offered = " or ".join(("a positive number", *map(repr, names)))
    if not is_number(bandwidth):
        raise TypeError(f"`bandwidth` must be {offered}, got {bandwidth!r}.")
    if not 0 < float(bandwidth) < math.inf:
        raise ValueError(f"`bandwidth` must be {offered}, got {bandwidth}.")


def skce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    estimator: Estimator = "unbiased",
    kernel: Kernel = "laplacian",
    bandwidth: float | Literal["median"] = 1.0,
    block_size: int = 32,
    average: Average | None = "macro",
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Squared kernel calibration error: do the residuals of like predictions point the same way.

    The mean over pairs of samples of h = (e_y - p)^T (e_y' - p') k(p, p'), with p the whole vector of probabilities and
    e_y the indicator of the true class. Its expectation is 0 if the model is calibrated in the strong sense, that
    P(Y = k | p) = p_k for all k together, and positive if it is not. Unlike a binned error an unbiased estimate of it
    is 0 on average for a calibrated model of any sample size; so it is negative about half of the time. See `skce_test`
    for how far from 0 is too far.

    Binary predictions are taken for those of two classes: h is 2 (y - p)(y' - p') k.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels; or soft targets, which take the place of the indicator. The estimates are then those of
            labels drawn from them, with less variance; the biased one is nearer to the truth.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        estimator: `"unbiased"`: the mean over all pairs of different samples, O(N^2) time. `"biased"`: over all pairs,
            each sample with itself too; never negative, too large by the mean of h(x, x) / N. `"block"`: the mean over
            the unbiased estimates of blocks of `block_size` samples, in the order given, without the rest; O(N)
            time, unbiased if the order is random (not sorted by class, say), and more variable. `"linear"`: that with
            blocks of two.
        kernel: `"laplacian"` exp(-d / bandwidth) of the total variation d = sum_k |p_k - p'_k| / 2 of two predictions,
            or `"gaussian"` exp(-d^2 / (2 bandwidth^2)) of their Euclidean distance; times the identity over classes.
        bandwidth: a number; total variation lies in [0, 1], Euclidean distance in [0, sqrt(2)]. Or "median", the median
            distance of two of the samples (of 1,024 evenly spread ones if there are more); the estimate is then
            unbiased only for the kernel that this gives.
        block_size: samples of a block for `estimator="block"`, at least 2.
        average: multi-label: `"macro"` is the mean over labels, None returns `(..., L)`.
        chunk: what is held at a time: rows on a side of a tile of pairs, or blocks. None chooses.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers, but for "biased". Copies of a sample
            are samples of their own: a pair of two of them counts, and in blocks they stand one after the other. So a
            bootstrap of rows makes an unbiased estimate too large.

    Returns:
        In [-2, 2], "biased" in [0, 2], `(...)`, in the dtype of `preds` (at least float32). NaN with fewer samples
        than a pair, or a block, needs.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        Everywhere (0 for |p_k - p'_k| where the two are equal), once, in reverse mode. A median is a constant. Memory
        beside input and gradient: a few copies of the input for all pairs, and tiles; for blocks a chunk alone.

    Source:
        Widmann, Lindsten, Zachariah: Calibration tests in multi-class classification: A unifying framework (NeurIPS
        2019), eq. 4-5 and table 1.

    Example:
        >>> import torch
        >>> preds = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1]])
        >>> skce(preds, torch.tensor([1, 1, 1]), task="multiclass")
        tensor(0.3850)
    """
    reading = KernelReading(task_read_as(task, options), estimator, kernel, bandwidth, block_size, average, chunk)
    p = read_input(task, preds, target, options, **reading.demands)
    return reading.averaged(reading.of(p)).to(p.dtype)


def _streamed(
    *,
    task: Task,
    estimator: InBlocks = "linear",
    kernel: Kernel = "laplacian",
    bandwidth: float = 1.0,
    block_size: int = 32,
    average: Average | None = "macro",
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> engine.Estimator[BlockStats]:
    reading = KernelReading(task_read_as(task, options), estimator, kernel, bandwidth, block_size, average, chunk)
    if not reading.in_blocks:
        raise ValueError(
            f"`estimator` must be 'block' or 'linear' of a stream, got {estimator!r}: all pairs of samples cannot "
            "be had from sums. Keep the predictions and call torchcalib.skce."
        )
    check_bandwidth(bandwidth)
    averages = task == "multilabel" and average is not None
    input_format = engine.input_format_of(task, options, **reading.demands)
    return engine.Estimator(input_format, reading.recipe(), _mean_of_blocks, averages)


def _mean_of_blocks(statistic: BlockStats) -> Tensor:
    return statistic.mean


class SKCE(StreamingMetric[BlockStats]):
    """Squared kernel calibration error, streamed, as the mean over blocks of samples; see `skce`.

    Blocks are cut within each update, in the order of its samples, and what is left at its end is no part of any. So
    the value depends on where a stream is cut, and is unbiased wherever that is; updates of multiples of `block_size`
    give the value of one call. The state is 3 sums (for each label), which add, merge and sync. All pairs cannot be
    had from sums: `estimator="unbiased"` and `"biased"` are for the function. `ByGroup` cuts blocks within each group.

    Args:
        estimator: `"linear"`, blocks of two, or `"block"`.
        kernel, block_size, average, chunk: see `skce`.
        bandwidth: a number; each update would have another median.

    Example:
        >>> import torch
        >>> metric = SKCE(task="multiclass")
        >>> metric.update(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]), torch.tensor([1, 1]))
        >>> metric.compute()
        tensor(0.1317, dtype=torch.float64)
    """

    perfect, unit = 0.0, "squared probability"
    plot_lower_bound, plot_upper_bound = -2.0, 2.0
    question = "do the residuals of like predictions point the same way, over all classes together"
    source = "Widmann, Lindsten, Zachariah, Calibration tests in multi-class classification, NeurIPS 2019, table 1"

    factory = staticmethod(_streamed)

    def test(self) -> CalibrationTest:
        """Test whether the model is calibrated, over all ranks if `torch.distributed` is running; see `skce_test`.

        Returns:
            `value` and `p_value`, each of the batch's shape, and multi-label `(..., L)`.

        Raises:
            ValueError: if rows that came on CUDA were bad.
        """
        return self._synced_statistic().test()
