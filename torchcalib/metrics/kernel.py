"""Squared kernel calibration error (SKCE), and the test of calibration by it."""

import math
from dataclasses import dataclass
from typing import Any, Literal, Unpack, get_args

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
from torchcalib.core.documentation import documented
from torchcalib.core.inputs import input_format_of, read_input
from torchcalib.core.kernel_blocks import (
    BlockAccumulator,
    BlockStats,
    by_way,
    distributions,
    median_distance,
    scale_of,
    ways_of_weighing,
)
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.estimator import Estimator, functional
from torchcalib.ops import pairwise
from torchcalib.ops.pairwise import Kernel

Estimate = Literal["unbiased", "biased", "block", "linear"]
InBlocks = Literal["block", "linear"]


@dataclass(frozen=True)
class KernelReading:
    """From predictions to the error: the only place where its options are checked.

    Attributes:
        task: that predictions are one of once they are read.
        others: see `skce`.
    """

    task: Task
    estimator: Estimate
    kernel: Kernel
    bandwidth: float | Literal["median"]
    block_size: int
    average: Average | None
    chunk: int | None

    def __post_init__(self) -> None:
        check_task(self.task)
        check_choice("estimator", self.estimator, get_args(Estimate))
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

    def accumulator(self) -> BlockAccumulator:
        """The sums of an estimator in blocks."""
        size = 2 if self.estimator == "linear" else self.block_size
        return BlockAccumulator(self.kernel, self.bandwidth, size, self.chunk)

    def of(self, p: Predictions) -> Tensor:
        """Read the value of predictions, for each label `(..., L)`."""
        if self.in_blocks:
            accumulator = self.accumulator()
            return by_replicates(lambda p: accumulator.of(p).mean, p, accumulator.n_events(p))
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


@dataclass(frozen=True, eq=False)
class KernelEstimator(Estimator[BlockStats]):
    """A squared kernel calibration error of all pairs or of blocks.

    Attributes:
        reading: its options.
    """

    reading: KernelReading

    def __call__(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the value of predictions."""
        p = self.input_format.read(preds, target, weights)
        return self.reading.averaged(self.reading.of(p)).to(p.dtype)


def _mean_of_blocks(statistic: BlockStats) -> Tensor:
    return statistic.mean


def _skce(
    *,
    task: Task,
    estimator: Estimate = "unbiased",
    kernel: Kernel = "laplacian",
    bandwidth: float | Literal["median"] = 1.0,
    block_size: int = 32,
    average: Average | None = "macro",
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> KernelEstimator:
    """Squared kernel calibration error: do the residuals of like predictions point the same way.

    The mean over pairs of samples of h = (e_y - p)^T (e_y' - p') k(p, p'), with p the whole vector of probabilities and
    e_y the indicator of the true class. Its expectation is 0 if the model is calibrated in the strong sense, that
    P(Y = k | p) = p_k for all k together, and positive if it is not. Unlike a binned error an unbiased estimate of it
    is 0 on average for a calibrated model of any sample size; so it is negative about half of the time. See `skce_test`
    for how far from 0 is too far.

    Binary predictions are taken for those of two classes: h is 2 (y - p)(y' - p') k.

    Args:
        target: labels; or soft targets, which take the place of the indicator. The estimates are then those of
            labels drawn from them, with less variance; the biased one is nearer to the truth.
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
        >>> preds = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1]])
        >>> skce(preds, torch.tensor([1, 1, 1]), task="multiclass")
        tensor(0.3850)
    """
    reading = KernelReading(task_read_as(task, options), estimator, kernel, bandwidth, block_size, average, chunk)
    input_format = input_format_of(task, options, **reading.demands)
    averages = reading.task == "multilabel" and average is not None
    return KernelEstimator(input_format, reading.accumulator(), _mean_of_blocks, averages, reading)


skce = functional(_skce)


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
) -> KernelEstimator:
    if estimator in get_args(Estimate) and estimator not in get_args(InBlocks):
        raise ValueError(
            f"`estimator` must be 'block' or 'linear' of a stream, got {estimator!r}: all pairs of samples cannot "
            "be computed from sums. Keep the predictions and call torchcalib.functional.skce."
        )
    check_bandwidth(bandwidth)
    given: dict[str, Any] = {"kernel": kernel, "block_size": block_size, "average": average, "chunk": chunk}
    return _skce(task=task, estimator=estimator, bandwidth=bandwidth, **given, **options)


class SKCE(CalibrationMetric[BlockStats]):
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

    def test_from(self, statistic: BlockStats, *, level: float = 0.95, **_: Any) -> CalibrationTest:
        """Test a statistic by the normal distribution of the mean of its blocks, one-sided; see `skce_test`."""
        return _asymptotic(torch.stack((statistic.mean, statistic.variance_of_mean, statistic.p_value)), level)


def _asymptotic(found: Tensor, level: float = 0.95) -> CalibrationTest:
    """Return the test of mean, its variance and the p-value `(3, ...)`."""
    mean, variance, p_value = found
    margin = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)).item() * variance.sqrt()
    return CalibrationTest(mean, torch.zeros_like(mean), p_value, mean - margin, mean + margin, level)


_LARGEST = 2.0
"""|h| of two samples is at most |e_y - p| |e_y' - p'| <= 2."""


@documented
def skce_test(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    estimator: Estimate = "linear",
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

    Returns:
        `CalibrationTest` of `(...)`, multi-label `(..., L)`, in the dtype of `preds` (at least float32). The statistic
        is the estimate, its interval that of the normal distribution (NaN for "unbiased"). The test is one-sided: a
        negative value never rejects calibration. The p-value is 1 where all residuals are 0. It is NaN with fewer than
        two blocks (for "unbiased", fewer than two samples).

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
    return _asymptotic(found.to(p.dtype))


def _normal(reading: KernelReading, p: Predictions) -> Tensor:
    accumulator = reading.accumulator()

    def tested(p: Predictions) -> Tensor:
        s = accumulator.of(p)
        return torch.stack((s.mean, s.variance_of_mean, s.p_value), -1)

    return by_replicates(tested, p, accumulator.n_events(p)).movedim(-1, 0)


def _bounded(reading: KernelReading, p: Predictions) -> Tensor:
    value = reading.of(p)
    n_pairs = (by_way(ways_of_weighing(p).sum(-1), p) / 2).floor()
    bound = (-n_pairs * value.clamp(min=0).square() / (2 * _LARGEST**2)).exp()
    return torch.stack((value, torch.full_like(value, torch.nan), bound))
