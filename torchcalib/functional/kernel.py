"""Kernel calibration errors: squared kernel error (SKCE) with its test, and canonical error with a Dirichlet kernel."""

import math
from dataclasses import dataclass
from operator import attrgetter
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
    is_number,
    task_read_as,
)
from torchcalib.core.inputs import input_format_of, read_input
from torchcalib.core.kernel_blocks import (
    BlockAccumulator,
    BlockStats,
    distributions,
    median_distance,
    on_replicate_axes,
    replicate_weights,
    scale_of,
    vectors,
)
from torchcalib.core.predictions import Predictions, by_replicates, in_all_replicates
from torchcalib.core.tasks import infers_task
from torchcalib.functional.estimator import Declaration, Estimator, factory_of, metric_function, streamed_by
from torchcalib.inference.testing import CalibrationTest
from torchcalib.io.errors import shown
from torchcalib.ops import pairwise
from torchcalib.ops.leave_one_out import leave_one_out_mean
from torchcalib.ops.logs import safe_log, wide_dtype
from torchcalib.ops.pairwise import Kernel

Estimate = Literal["unbiased", "biased", "block", "linear"]
InBlocks = Literal["block", "linear"]


@dataclass(frozen=True)
class KernelSettings:
    """Validated options of the squared kernel calibration error; see `skce`."""

    estimator: Estimate
    kernel: Kernel
    bandwidth: float | Literal["median"]
    block_size: int = 32
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, get_args(Estimate))
        check_choice("kernel", self.kernel, get_args(Kernel))
        check_count("block_size", self.block_size, at_least=2)
        if self.chunk is not None:
            check_count("chunk", self.chunk)
        check_bandwidth(self.bandwidth, "median")

    def accumulator(self) -> BlockAccumulator:
        """Return the accumulator for the estimators "block" and "linear"."""
        size = 2 if self.estimator == "linear" else self.block_size
        return BlockAccumulator(self.kernel, self.bandwidth, size, self.chunk)

    def from_predictions(self, p: Predictions) -> Tensor:
        """Compute SKCE from validated predictions: `(...)`, or `(..., L)` for multi-label."""
        if self.estimator in get_args(InBlocks):
            accumulator = self.accumulator()
            return by_replicates(lambda p: accumulator.from_predictions(p).mean, p, accumulator.n_events(p))
        return self._all_pairs(p)

    def _all_pairs(self, p: Predictions) -> Tensor:
        q, r = distributions(p)
        weights = replicate_weights(p)
        if self.bandwidth == "median":
            scale = scale_of(self.kernel, median_distance(q, weights, self.kernel))[..., None, None]
            totals = [  # the median, and therefore the kernel, depends on the weights
                pairwise.pairs(q * scale[..., k, :, :], r, weights[..., k : k + 1, :], self.kernel, self.chunk)
                for k in range(weights.shape[-2])
            ]
            total = torch.cat(totals, -1)
        else:
            total = pairwise.pairs(q * scale_of(self.kernel, self.bandwidth), r, weights, self.kernel, self.chunk)
        n = weights.sum(-1)
        if self.estimator == "biased":
            return on_replicate_axes(total / n.square(), p)
        own = (weights * r.square().sum(-1).unsqueeze(-2)).sum(-1)  # sum of h for each sample paired with itself
        # With one sample, `total - own` is a rounding error. Its division by 0 could result in infinity.
        return on_replicate_axes(((total - own) / (n * (n - 1))).masked_fill(n < 2, torch.nan), p)


def check_bandwidth(bandwidth: object, *names: str) -> None:
    """Raise an error unless `bandwidth` is a positive number or one of the method names in `names`."""
    if bandwidth in names:
        return
    allowed = " or ".join(("a positive number", *map(repr, names)))
    if not is_number(bandwidth):
        raise TypeError(f"`bandwidth` must be {allowed}, got {shown(bandwidth)}. Pass 1.0, for example.")
    if not 0 < float(bandwidth) < math.inf:
        raise ValueError(f"`bandwidth` must be {allowed}, got {bandwidth}. Pass 1.0, for example.")


@dataclass(frozen=True, eq=False)
class KernelEstimator(Estimator[BlockStats]):
    """Estimator of the squared kernel calibration error, with validated options `settings`."""

    settings: KernelSettings

    def __call__(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the metric value, `(...)` or `(..., L)`, in the dtype of `preds` (at least float32)."""
        p = self.input_format.read(preds, target, weights)
        value = self.settings.from_predictions(p)
        return (value.mean(-1) if self.averages else value).to(p.dtype)

    def test_from(self, statistic: BlockStats, *, level: float = 0.95, **_: Any) -> CalibrationTest:
        """Compute the one-sided test of calibration from sums over blocks, by normal approximation; see `skce_test`."""
        return _asymptotic(torch.stack((statistic.mean, statistic.variance_of_mean, statistic.p_value)), level)


@metric_function(
    Declaration(
        name="SKCE",
        question="mean inner product of residuals, weighted by the similarity of the predictions",
        source="Widmann, Lindsten, Zachariah, Calibration tests in multi-class classification, NeurIPS 2019, "
        "table 1, arXiv 1910.11385",
        unit="squared probability",
        perfect=0.0,
        value_range=(-2.0, 2.0),
        has_test=True,
        allows_clusters=False,
    )
)
def skce(
    task: Task | None = None,
    *,
    estimator: Estimate = "unbiased",
    kernel: Kernel = "laplacian",
    bandwidth: float | Literal["median"] = 1.0,
    block_size: int = 32,
    average: Average | None = "macro",
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> KernelEstimator:
    """Squared kernel calibration error (SKCE): mean inner product of residuals, weighted by a kernel of predictions.

    SKCE is the mean over pairs of samples of h = (e_y - p)^T (e_y' - p') k(p, p'). Here p is the vector of
    probabilities, e_y the one-hot vector of the true class, and k a kernel. Primes denote the second sample. The
    population value is 0 if the model is calibrated in the strong sense: P(Y = k | p) = p_k for all classes k jointly.
    Otherwise it is positive.

    Unlike a binned error, the unbiased estimate has expected value 0 for a calibrated model at any sample size. It can
    therefore be negative. `skce_test` tests whether the value is significantly different from 0. For a binary task
    h = 2 (y - p) (y' - p') k.

    Args:
        target: Labels; or soft targets, which replace e_y. Compared with labels sampled from the soft targets, the
            variance is smaller. The expected value is the same, except that the bias of "biased" is smaller.
        estimator: `"unbiased"` is the mean over all pairs of different samples, in O(N^2) time. `"biased"` is the mean
            over all pairs, including each sample with itself. It is never negative, and biased upwards. `"block"` is
            the mean of the unbiased estimates for blocks of `block_size` consecutive samples; incomplete blocks are
            ignored. It takes O(N) time, has a larger variance, and is unbiased only if the order of the samples is
            random. `"linear"` is "block" with `block_size=2`.
        kernel: `"laplacian"`: exp(-d / bandwidth) with the total variation distance d = sum_k |p_k - p'_k| / 2.
            `"gaussian"`: exp(-d^2 / (2 bandwidth^2)) with the Euclidean distance d.
        bandwidth: A positive number. Total variation is in [0, 1], Euclidean distance in [0, sqrt(2)]. Or `"median"`,
            the median distance between predictions of up to 1,024 evenly spaced samples. The kernel then depends on the
            data.
        block_size: Number of samples in a block for `estimator="block"`, at least 2.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in [-2, 2] ("biased" in [0, 2]), in the dtype of `preds`
        (at least float32). NaN with fewer than two samples, or without a complete block.

    Gradient:
        Defined everywhere; the derivative of |p_k - p'_k| is 0 where p_k = p'_k. Reverse mode, first order. A median
        bandwidth is a constant. Memory: a few copies of the input for all pairs, one chunk for blocks.

    Reference:
        Widmann, Lindsten, Zachariah: Calibration tests in multi-class classification: A unifying framework (NeurIPS
        2019), eq. 4-5 and table 1.

    Example:
        >>> preds = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1]])
        >>> skce(preds, torch.tensor([1, 1, 1]), task="multiclass")
        tensor(0.3850)
    """
    settings = KernelSettings(estimator, kernel, bandwidth, block_size, chunk)
    averages = check_average(average, task_read_as(task, options) == "multilabel")
    input_format = input_format_of(task, options, whole_weights=estimator != "biased")
    return KernelEstimator(input_format, settings.accumulator(), attrgetter("mean"), averages, settings)


@streamed_by(skce)
def skce_over_blocks(
    task: Task | None = None,
    *,
    estimator: InBlocks = "linear",
    kernel: Kernel = "laplacian",
    bandwidth: float = 1.0,
    block_size: int = 32,
    average: Average | None = "macro",
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> Estimator[BlockStats]:
    """Return the estimator of `skce` for a stream, which is a mean over blocks."""
    if estimator in get_args(Estimate) and estimator not in get_args(InBlocks):
        raise ValueError(
            f"`estimator` must be 'block' or 'linear' for a streaming metric, got {shown(estimator)}. "
            "To use all pairs of samples, store the predictions and call torchcalib.functional.skce."
        )
    check_bandwidth(bandwidth)
    given: dict[str, Any] = {"kernel": kernel, "block_size": block_size, "average": average, "chunk": chunk}
    return factory_of(skce)(task, estimator=estimator, bandwidth=bandwidth, **given, **options)


def _asymptotic(found: Tensor, level: float = 0.95, method: str = "normal approximation") -> CalibrationTest:
    """Convert mean, variance of the mean and p-value `(3, ...)` to a `CalibrationTest` with a normal interval."""
    mean, variance, p_value = found
    margin = (
        math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64, device="cpu")).item() * variance.sqrt()
    )
    return CalibrationTest(mean, torch.zeros_like(mean), p_value, mean - margin, mean + margin, level, method)


_MAX_H = 2.0
"""Upper bound of the terms |h| of `skce`: |h| <= |e_y - p| |e_y' - p'| <= 2."""


@infers_task
def skce_test(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    estimator: Estimate = "linear",
    kernel: Kernel = "laplacian",
    bandwidth: float | Literal["median"] = 1.0,
    block_size: int = 32,
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> CalibrationTest:
    """Test whether a model is calibrated in the strong sense, with the squared kernel calibration error (SKCE).

    The null hypothesis is P(Y = k | p) = p_k for all classes k jointly. The test is one-sided: a negative SKCE is never
    significant. The p-value holds for one look at the data: repeated looks at growing data give more false alarms. Use
    `torchcalib.SequentialTest` for repeated looks.

    Args:
        preds: Probabilities or logits; see `skce`.
        target: Labels or soft targets; see `skce`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        estimator: `"linear"` or `"block"`: normal approximation of the mean over independent blocks. Larger blocks have
            more power. The order of the samples must be random. `"unbiased"`: p-value from the Hoeffding bound
            exp(-floor(N / 2) value^2 / 8) for a positive value. It is valid for every sample size, but has much less
            power.
        kernel: See `skce`.
        bandwidth: See `skce`. A median depends only on the predictions, so the test remains valid.
        block_size: See `skce`.

    Returns:
        A `CalibrationTest` with tensors `(...)`, multi-label `(..., L)`, in the dtype of `preds` (at least float32).
        The statistic is the SKCE estimate. The interval is a normal approximation (NaN for "unbiased"). The p-value is
        1 where all residuals are 0. NaN with fewer than two blocks ("unbiased": fewer than two samples).

    Gradient:
        Defined for the statistic and the p-value; see `skce`.

    Reference:
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
    settings = KernelSettings(estimator, kernel, bandwidth, block_size, chunk)
    if estimator == "biased":
        raise ValueError("`estimator` must be 'linear', 'block' or 'unbiased', got 'biased'. Use 'unbiased'.")
    p = read_input(task, preds, target, options, whole_weights=True)
    if estimator == "unbiased":
        value = settings.from_predictions(p)
        n_pairs = (on_replicate_axes(replicate_weights(p).sum(-1), p) / 2).floor()
        bound = (-n_pairs * value.clamp(min=0).square() / (2 * _MAX_H**2)).exp()
        return _asymptotic(
            torch.stack((value, torch.full_like(value, torch.nan), bound)).to(p.dtype),
            method="bound on the tail probability (conservative)",
        )
    return _asymptotic(_normal_test(settings, p).to(p.dtype))


def _normal_test(settings: KernelSettings, p: Predictions) -> Tensor:
    accumulator = settings.accumulator()

    def statistics(p: Predictions) -> Tensor:
        s = accumulator.from_predictions(p)
        return torch.stack((s.mean, s.variance_of_mean, s.p_value), -1)

    return by_replicates(statistics, p, accumulator.n_events(p)).movedim(-1, 0)


_GRID = (*(10 ** (-5 + 4 * k / 14) for k in range(15)), *(0.2 * k for k in range(1, 6)))
"""Candidates for `bandwidth="likelihood"`, as in the authors' code."""

_MIN_LOG_DENSITY = -1e20  # smaller log densities represent a density of 0


def _log_distributions(p: Predictions) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, probabilities and targets `(..., N, C)`, in float64 if the device supports it.

    Predictions with weight 0 are replaced by uniform probabilities, because they may be NaN and NaN times 0 is NaN. The
    gradient of a log-probability of -inf is 0.
    """
    values, target = vectors(p)
    if p.weights is not None:
        absent = in_all_replicates(p.weights == 0, len(p.samples)).unsqueeze(-1)
        values = values.masked_fill(absent, 0 if p.from_logits else 1 / values.shape[-1])
        target = target if p.has_labels else target.masked_fill(absent, 0)
    wide = values.to(wide_dtype(values.device))
    if p.from_logits:
        top = wide.amax(-1, keepdim=True) == torch.inf  # classes with logit +inf share the total probability equally
        wide = torch.where(top, torch.where(wide == torch.inf, 0.0, -torch.inf), wide)
        log_q = wide.log_softmax(-1)
        log_q = log_q.masked_fill(log_q == -torch.inf, -torch.inf)
        q = log_q.exp()
    else:
        log_q, q = safe_log(wide), wide
    if p.has_labels:
        target = target.unsqueeze(-1) == torch.arange(wide.shape[-1], device=wide.device)
    return log_q, q, target.to(wide.dtype)


def _log_normaliser(q: Tensor, bandwidth: Tensor) -> Tensor:
    """Return the log normalising constant of Dirichlet densities with parameters q / bandwidth + 1, `(..., N)`."""
    alpha = q / bandwidth[..., None, None] + 1
    return alpha.sum(-1).lgamma() - alpha.lgamma().sum(-1)


def _most_likely_bandwidth(log_q: Tensor, q: Tensor, copies: Tensor, chunk: int | None) -> Tensor:
    """Return the bandwidth in `_GRID` with the largest leave-one-out log-likelihood, `(...)`, weighted by `copies`."""
    log_q, q = log_q.detach(), q.detach()
    best = torch.full_like(copies.sum(-1), -torch.inf)
    chosen = torch.ones_like(best)
    for bandwidth in _GRID:
        h = torch.full_like(best, bandwidth)
        log_density = leave_one_out_mean(
            log_q / bandwidth, q, _log_normaliser(q, h), q[..., :0], copies, chunk
        ).log_total
        is_positive = (log_density > _MIN_LOG_DENSITY) & (copies > 0)
        likelihood = (copies * log_density).masked_fill(~is_positive, 0).sum(-1)
        is_better = likelihood > best
        best, chosen = torch.where(is_better, likelihood, best), torch.where(is_better, h, chosen)
    return chosen


@dataclass(frozen=True)
class DirichletSettings:
    """Validated options of the canonical calibration error; see `canonical_error`."""

    p: Literal[1, 2]
    bandwidth: float | Literal["likelihood"]
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_choice("p", self.p, (1, 2))
        check_bandwidth(self.bandwidth, "likelihood")
        if self.chunk is not None:
            check_count("chunk", self.chunk)

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the canonical calibration error per batch element, `(...)`, without the p-th root."""
        log_q, q, target = _log_distributions(p)
        copies = torch.ones_like(q[..., 0])
        if p.weights is not None:
            copies = p.weights.expand(*p.replicates, *p.samples).to(q.dtype)
            log_q, q, target = (x.expand(*p.replicates, *x.shape) for x in (log_q, q, target))
        counted = copies.nan_to_num()
        if self.bandwidth == "likelihood":
            h = _most_likely_bandwidth(log_q, q, counted, self.chunk)
        else:
            h = torch.full(q.shape[:-2], float(self.bandwidth), dtype=q.dtype, device=q.device)
        scaled, normaliser = log_q / h[..., None, None], _log_normaliser(q, h)
        gap = leave_one_out_mean(scaled, q, normaliser, target, counted, self.chunk).mean - q
        distance = (gap.abs() if self.p == 1 else gap.square()).sum(-1)
        return (copies * distance.masked_fill(copies == 0, 0)).sum(-1) / copies.sum(-1)


@infers_task
def canonical_error(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    p: Literal[1, 2] = 1,
    bandwidth: float | Literal["likelihood"] = "likelihood",
    average: Average | None = "macro",
    chunk: int | None = None,
    **options: Unpack[InputOptions],
) -> Tensor:
    """Canonical calibration error: mean distance between probability vectors and conditional class frequencies.

    It is the mean over samples i of sum_k |E[y_k | q_i] - q_ik|^p, for predicted probabilities q and outcomes y. The
    conditional expectation is estimated from all other samples as
    sum_{j != i} k(q_i; q_j) y_j / sum_{j != i} k(q_i; q_j). The kernel k(.; q_j) is the Dirichlet density with
    parameters q_j / bandwidth + 1. As in the reference, the p-th root is omitted.

    The population value is 0 only if the model is calibrated for all classes jointly. The estimate is consistent, but
    biased upwards for few samples; `skce` has an unbiased estimator. For a binary task the sum over both classes is
    twice the term for y = 1.

    Args:
        target: Labels or soft targets.
        p: Exponent, 1 or 2.
        bandwidth: A positive number or `"likelihood"`. The variance of the kernel is about q (1 - q) bandwidth.
            `"likelihood"` selects one of 20 candidates from 1e-5 to 1 by the leave-one-out log-likelihood of the
            predictions. Predictions with an estimated density of 0 are excluded from this likelihood.

    Returns:
        `(...)`, or `(..., L)` for multi-label with `average=None`, in [0, 2], in the dtype of `preds` (at least
        float32). NaN with fewer than two samples. If all kernels are 0 because a probability q_ik is 0, the estimate
        is its limit for q_ik -> 0. Only the samples j with the smallest q_jk contribute to this limit.

    Gradient:
        With respect to the predictions, including the kernels; reverse mode, first order. A bandwidth selected by
        `"likelihood"` and log 0 are constants. Time: O(N^2 C). Memory: a few copies of the input.

    Reference:
        Popordanoska, Sayer, Blaschko: A Consistent and Differentiable Lp Canonical Calibration Error Estimator (NeurIPS
        2022), sec. 3, eq. 9-10. Unlike the authors' code, this function does not add log(bandwidth) to each
        log-likelihood, because the Dirichlet density does not contain this factor.

    Example:
        >>> preds = torch.tensor([[0.7, 0.3], [0.7, 0.3], [0.7, 0.3]])
        >>> canonical_error(preds, torch.tensor([0, 0, 1]), task="multiclass", bandwidth=0.1)
        tensor(0.4667)
    """
    settings = DirichletSettings(p, bandwidth, chunk)
    averages = check_average(average, task_read_as(task, options) == "multilabel")
    given = input_format_of(task, options, whole_weights=True).read(preds, target, options.get("weights"))
    value = by_replicates(settings.from_predictions, given, given.samples.numel() * given.num_classes)
    return (value.mean(-1) if averages else value).to(given.dtype)
