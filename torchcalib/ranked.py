"""Readings of a sample in order: TCE and its general form GCE, KS, and the CORP decomposition of scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.binned import BinnedMetric, BinReading, evaluate, statistic_of
from torchcalib.binnings import Binning, Bins, Norm, RankedBins, Test, norm_over_bins
from torchcalib.bins import TCETable
from torchcalib.kernels.isotonic import Ties, Variant
from torchcalib.kernels.row_stats import binary_log_probs, xmul
from torchcalib.predictions import (
    Average,
    InputFormat,
    InputOptions,
    Task,
    check_average,
    check_task,
    count_of_outputs,
    read_input,
    task_read_as,
)
from torchcalib.reductions import Reduction, resolve_reduction
from torchcalib.samples import ExactSample, LogitCells, RankedSample, SortedSample, by_pieces
from torchcalib.statistics import BinStats
from torchcalib.streaming import StreamingMetric

# --------------------------------------------------------------------------------------------------------------------
# Bins, a loss in each, and a norm over them


def rejected_percent(b: BinStats, alpha: float, test: Test) -> Tensor:
    """Share of every bin's samples that the test rejects, in percent `(..., B)`."""
    assert isinstance(b, RankedBins)
    return 100 * b.rejected(alpha, test) / b.n


def _tce_from_bins(b: BinStats, alpha: float, test: Test, norm: Norm) -> Tensor:
    return norm_over_bins(partial(rejected_percent, alpha=alpha, test=test), b, norm)


def _gce_from_bins(b: BinStats, loss: Callable[[BinStats], Tensor], norm: Norm) -> Tensor:
    return norm_over_bins(loss, b, norm)


def _check_test(alpha: float, test: Test) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise TypeError(f"`alpha` must be a number, got {alpha!r}.")
    if not 0 < alpha < 1:
        raise ValueError(f"`alpha` must lie between 0 and 1, both excluded, got {alpha}. 0.05 is usual.")
    _check_word("test", test, Test)


def _check_word(name: str, word: object, allowed: Any) -> None:
    if word not in get_args(allowed):
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, get_args(allowed)))}, got {word!r}.")


def _tce_reduction(task: Task, reduction: Reduction | None) -> Reduction | None:
    """One class against the rest, averaged, is how [TCE] Remark 2 extends it to several classes."""
    return "classwise" if task == "multiclass" and reduction is None else reduction


def tce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "pava_bc",
    n_bins: int = 15,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    alpha: float = 0.05,
    test: Test = "binomial",
    norm: Norm = "l1",
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Test-based calibration error: the percentage of predictions that the outcomes of their bin refute.

    Every prediction is the hypothesis that the outcomes of its bin come true with that probability, and the exact
    two-sided binomial test (`torchcalib.binomial_test`) is made of it; every decision is that of scipy.
    Unlike a difference of probabilities this judges a prediction of 0.001 as strictly as one of 0.5.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: integer labels.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        bins: `"pava_bc"`: isotonic blocks of bounded size; `"pava"`: isotonic blocks, neighbours of equal mean merged;
            `"equal_mass"`, as in `ace`; `"equal_width"`, as in `ece`; or edges that rise from 0 to 1.
        n_bins: number of equal-mass or equal-width bins.
        n_min: least size of a PAVA-BC block. Default: N // 20, at least 1.
        n_max: greatest size of a PAVA-BC block. Default: N // 5, at least 1. A block breaks the two bounds only where
            ties or the variant force it: a group of equal scores is never split (`ties="pool"`); the final block of
            "code" may hold up to `n_max + n_min`; "paper" merges neighbours of equal mean; and where 2 n_min > n_max,
            the block before the final one may be short.
        variant: `"code"` follows the authors' code, which made the tables of the paper; `"paper"` follows Algorithm 2
            and 3 to the letter.
        alpha: level of the test; a prediction is rejected if its p-value is at most this.
        test: `"binomial"`, or `"t"` for a t-test of the bin's labels, as the authors offer. It is another test.
        norm: over bins: `"l1"` is the share of all samples that are rejected; `"l2"` is the root of the weighted mean
            square of the bins' shares; `"max"` is the share of the worst bin.
        reduction: what the confidence is of; see `ece`. None is `"classwise"` for a multi-class task.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        right: equal-width bins, and those of given edges, are `(a, b]` instead of `[a, b)`.
        ties: `"pool"` takes samples of equal score together, so that the order of the samples does not matter;
            `"split"` takes them in the order given, as the published code does.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers. `positive_classes` is the K-vs-rest
            of the paper.

    Returns:
        Percent in [0, 100], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds`
        (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input, such as `n_min` above `n_max` or not below the number of samples; the
            message says what must hold.

    Gradient:
        None: a count of decisions.

    Source:
        [TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), eq. 7,
        Algorithms 2 and 3, Remark 2.

    Example:
        >>> p = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9])
        >>> tce(p, torch.tensor([1, 1, 1, 1, 1, 1]), task="binary", bins="equal_width", n_bins=2)
        tensor(50.)
    """
    _check_test(alpha, test)
    _check_word("norm", norm, Norm)
    reading = _tested(task, options, bins, n_bins, n_min, n_max, variant, reduction, average, right, ties)
    from_bins = partial(_tce_from_bins, alpha=alpha, test=test, norm=norm)
    return evaluate(from_bins, reading, task, preds, target, options, hard_targets=True)


def tce_table(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    bins: Bins | Sequence[float] | Tensor = "pava_bc",
    n_bins: int = 15,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    alpha: float = 0.05,
    test: Test = "binomial",
    reduction: Reduction | None = None,
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> TCETable:
    """Table of the bins that TCE is read from: edges, n, share, confidence, frequency, gap, how many are rejected.

    Args are those of `tce`.

    Returns:
        A `TCETable` of `(..., B)`, class-wise and multi-label `(..., C, B)`, in float64. `rejected.sum() / n.sum()` is
        the TCE, and `torchcalib.tce_diagram` draws it. Its column `ecd` is NaN.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), fig. 1.

    Example:
        >>> p = torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9])
        >>> table = tce_table(p, torch.tensor([1, 1, 1, 1, 1, 1]), task="binary", bins="equal_width", n_bins=2)
        >>> table.rejected
        tensor([3., 0.], dtype=torch.float64)
    """
    _check_test(alpha, test)
    reading = _tested(task, options, bins, n_bins, n_min, n_max, variant, reduction, "macro", right, ties)
    sample, _ = statistic_of(reading, task, preds, target, options, hard_targets=True)
    assert isinstance(sample, RankedSample)
    return reading.binning.of(sample).test_table(alpha, test)


def _tested(
    task: Task,
    options: InputOptions,
    bins: Bins | Sequence[float] | Tensor,
    n_bins: int,
    n_min: int | None,
    n_max: int | None,
    variant: Variant,
    reduction: Reduction | None,
    average: Average | None,
    right: bool,
    ties: Ties,
) -> BinReading:
    read_as = task_read_as(task, options)
    binning = Binning.given(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    return BinReading(read_as, binning, _tce_reduction(read_as, reduction), average, from_sample=True)


def gce(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    loss: Callable[[BinStats], Tensor],
    bins: Bins | Sequence[float] | Tensor = "equal_width",
    norm: Norm = "l1",
    n_bins: int = 15,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    right: bool = False,
    ties: Ties = "pool",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Generalised calibration error: a loss of one's own in every bin, and a norm over the bins.

    ECE is `loss=lambda b: b.gap.abs()` over equal-width bins, ACE the same over equal-mass bins, MCE with `norm="max"`.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels; soft targets too, unless the bins are isotonic.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        loss: from bins to a loss each, `(..., B)`. It is given what every bin holds: `n`, `share`, `confidence`,
            `frequency`, `gap`, all `(..., B)`. An empty bin does not count, whatever its loss.
        bins: see `tce`.
        norm: `"l1"`: sum share loss; `"l2"`: sqrt(sum share loss^2); `"max"`: the greatest.
        n_bins: see `tce`.
        n_min: see `tce`.
        n_max: see `tce`.
        variant: see `tce`.
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        right: see `tce`.
        ties: see `tce`.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers.

    Returns:
        What the loss is measured in, `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds`
        (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, as far as the loss has one; the bin a sample falls in is a constant.

    Source:
        [TCE] Matsubara et al.: TCE: A Test-Based Approach to Measuring Calibration Error (UAI 2023), Definition 1.

    Example:
        >>> p, y = torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 1, 1])
        >>> gce(p, y, task="binary", loss=lambda b: b.gap.abs(), bins="equal_mass", n_bins=2)
        tensor(0.1500)
    """
    _check_loss(loss)
    _check_word("norm", norm, Norm)
    binning = Binning.given(bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties)
    reading = BinReading(task_read_as(task, options), binning, reduction, average, from_sample=True)
    return evaluate(partial(_gce_from_bins, loss=loss, norm=norm), reading, task, preds, target, options)


def _check_loss(loss: object) -> None:
    if not callable(loss):
        raise TypeError(f"`loss` must be a function from bins to a loss each, got {loss!r}. Try lambda b: b.gap.abs().")


class TCE(BinnedMetric):
    """Test-based calibration error in percent, streamed; see `tce`.

    Example:
        >>> metric = TCE(task="binary", bins="equal_width", n_bins=2)
        >>> metric.update(torch.tensor([0.1, 0.1, 0.1, 0.9, 0.9, 0.9]), torch.tensor([1, 1, 1, 1, 1, 1]))
        >>> metric.compute()
        tensor(50., dtype=torch.float64)
    """

    from_sample = True
    is_differentiable = False
    unit = "percent"
    plot_upper_bound = 100.0
    question = "which share of predictions do the outcomes of their bin refute"
    source = "Matsubara et al., TCE, UAI 2023, eq. 7"

    def __init__(
        self,
        *,
        task: Task,
        bins: Bins | Sequence[float] | Tensor = "pava_bc",
        n_bins: int = 15,
        n_min: int | None = None,
        n_max: int | None = None,
        variant: Variant = "code",
        alpha: float = 0.05,
        test: Test = "binomial",
        norm: Norm = "l1",
        reduction: Reduction | None = None,
        right: bool = False,
        ties: Ties = "pool",
        **options: Any,
    ) -> None:
        _check_test(alpha, test)
        _check_word("norm", norm, Norm)
        super().__init__(
            task=task,
            reduction=_tce_reduction(task_read_as(task, options), reduction),
            binning=Binning.given(
                bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties
            ),
            from_bins=partial(_tce_from_bins, alpha=alpha, test=test, norm=norm),
            hard_targets=True,
            **options,
        )
        self.alpha, self.test = alpha, test

    def table(self) -> TCETable:
        """Return the table of the bins, over all ranks if `torch.distributed` is running; see `tce_table`."""
        sample = self._synced_statistic()
        assert isinstance(sample, RankedSample)
        return self.reading.binning.of(sample).test_table(self.alpha, self.test)


class GCE(BinnedMetric):
    """Generalised calibration error, streamed; see `gce`. A `loss` that is a lambda does not pickle."""

    from_sample = True
    unit = "of the loss"
    plot_lower_bound = None
    plot_upper_bound = None
    question = "how large is a loss of one's own over the bins"
    source = "Matsubara et al., TCE, UAI 2023, Definition 1"

    def __init__(
        self,
        *,
        loss: Callable[[BinStats], Tensor],
        bins: Bins | Sequence[float] | Tensor = "equal_width",
        norm: Norm = "l1",
        n_bins: int = 15,
        n_min: int | None = None,
        n_max: int | None = None,
        variant: Variant = "code",
        right: bool = False,
        ties: Ties = "pool",
        **options: Any,
    ) -> None:
        _check_loss(loss)
        _check_word("norm", norm, Norm)
        super().__init__(
            binning=Binning.given(
                bins, n_bins=n_bins, right=right, n_min=n_min, n_max=n_max, variant=variant, ties=ties
            ),
            from_bins=partial(_gce_from_bins, loss=loss, norm=norm),
            **options,
        )


# --------------------------------------------------------------------------------------------------------------------
# The sample itself


@dataclass(frozen=True)
class RankedReading:
    """From predictions to a sample in order, and from that to a value.

    Attributes are those of `binned.BinReading`.
    """

    task: Task
    reduction: Reduction | None = None
    average: Average | None = "macro"
    resolution: int | None = None

    def __post_init__(self) -> None:
        check_task(self.task)
        check_average(self.average, resolve_reduction(self.task, self.reduction) == "classwise")

    def recipe(self) -> ExactSample | LogitCells:
        """The statistic that is read."""
        reduction = resolve_reduction(self.task, self.reduction)
        return ExactSample(reduction) if self.resolution is None else LogitCells(reduction, self.resolution)

    def read(self, from_sample: Callable[[RankedSample], Tensor], sample: RankedSample) -> Tensor:
        """Read the value `(..., *)` of values `(*)` for a series; classes are averaged if asked."""
        values = by_pieces(from_sample, sample)
        classwise = resolve_reduction(self.task, self.reduction) == "classwise"
        return values.mean(sample.score.dim() - 2) if classwise and self.average is not None else values


def _read_sample(
    task: Task, preds: Tensor, target: Tensor, options: InputOptions, reading: RankedReading, hard_targets: bool
) -> tuple[RankedSample, torch.dtype]:
    p = read_input(task, preds, target, options, hard_targets=hard_targets, whole_weights=True)
    return ExactSample(resolve_reduction(reading.task, reading.reduction)).of(p), p.dtype


def ks_from_sample(sample: RankedSample) -> Tensor:
    """Greatest cumulative difference of outcomes and probabilities, looked at between different scores."""
    s = sample.sorted()
    gap = s.positives - s.confidence * (1 if s.n is None else s.n)
    total = s.total.unsqueeze(-1)
    cumulative = gap.masked_fill(~s.counted, 0).cumsum(-1) / total
    is_last = torch.cat((s.begins[..., 1:], torch.ones_like(s.begins[..., :1])), -1)
    return cumulative.abs().masked_fill(~is_last & (total > 0), 0).amax(-1)


def ks(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Kolmogorov-Smirnov calibration error: how far outcomes and probabilities drift apart, summed by score.

    max over j of |sum_{i <= j} (y_i - p_i)| / N, samples in ascending order of p. It needs no bins. Samples of equal
    score carry no order, so the sums are looked at only behind the last of them.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels or soft targets; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        reduction: what the confidence is of; see `ece`.
        average: `"macro"` averages class-wise and multi-label values over classes; None returns `(..., C)`.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers.

    Returns:
        A probability in [0, 1], `(...)`, or `(..., C)` for classes that are not averaged, in the dtype of `preds`
        (at least float32); NaN without data. At least |ESCE|.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences up to the one where the maximum is reached (shared evenly on ties).

    Source:
        Gupta et al.: Calibration of Neural Networks using Splines (ICLR 2021), sec. 3; ties are pooled here.

    Example:
        >>> ks(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.0667)
    """
    reading = RankedReading(task_read_as(task, options), reduction, average)
    sample, dtype = _read_sample(task, preds, target, options, reading, hard_targets=False)
    return reading.read(ks_from_sample, sample).to(dtype)


class CORPDecomposition(NamedTuple):
    """A score, and its parts: `score = mcb - dsc + unc`.

    Attributes:
        score: mean score of the predictions.
        mcb: miscalibration: what the score loses against the predictions recalibrated by isotonic regression; >= 0.
        dsc: discrimination: what recalibrated predictions gain over always predicting the share of ones; >= 0.
        unc: uncertainty: the score of always predicting the share of ones.
    """

    score: Tensor
    mcb: Tensor
    dsc: Tensor
    unc: Tensor


CORPScore = Literal["brier", "nll"]
Component = Literal["mcb", "dsc", "unc", "score"]


def corp_from_sample(sample: RankedSample, score: CORPScore) -> Tensor:
    """Return score, MCB, DSC and UNC `(..., 4)`."""
    blocks = Binning("pava").of(sample)
    s, n, k = blocks.sample, blocks.n.detach(), blocks.sums[..., 2, :].detach()
    total = blocks.total.detach()
    of_rates = _brier_of_rate if score == "brier" else _nll_of_rate
    per_element = (_brier_of if score == "brier" else _nll_of)(s)
    own = per_element.masked_fill(~s.counted, 0).sum(-1) / total
    recalibrated = of_rates(k, n).sum(-1) / total
    naive = of_rates(k.sum(-1), total) / total
    return torch.stack((own, own - recalibrated, naive - recalibrated, naive), -1)


def _brier_of_rate(k: Tensor, n: Tensor) -> Tensor:
    """Sum of (k/n - y)^2 over n samples of which k are 1."""
    return k * (n - k) / n.masked_fill(n == 0, 1)


def _nll_of_rate(k: Tensor, n: Tensor) -> Tensor:
    """Sum of -log of k/n or 1 - k/n over n samples of which k are 1."""
    held = n.masked_fill(n == 0, 1)
    return 0 - torch.xlogy(k, k / held) - torch.xlogy(n - k, (n - k) / held)


def _brier_of(s: SortedSample) -> Tensor:
    """Sum of (p - y)^2 over the samples of every element."""
    ones = s.positives.to(s.confidence.dtype)
    zeros = s.counts - ones
    not_p = torch.sigmoid(-s.score.to(s.confidence.dtype)) if s.from_logits else 1 - s.confidence
    return ones * not_p.square() + zeros * s.confidence.square()


def _nll_of(s: SortedSample) -> Tensor:
    """Sum of -log of the probability of what happened over the samples of every element."""
    values = s.score.to(s.confidence.dtype) if s.from_logits else s.confidence.masked_fill(~s.counted, 0.5)
    log_p, log_not_p = binary_log_probs(values, s.from_logits)
    ones = s.positives.to(s.confidence.dtype)
    return 0 - xmul(ones, log_p) - xmul(s.counts - ones, log_not_p)


def corp(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    score: CORPScore = "brier",
    reduction: Reduction | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> CORPDecomposition:
    """CORP decomposition of a score into miscalibration, discrimination and uncertainty: score = MCB - DSC + UNC.

    Predictions are recalibrated by isotonic regression of the outcomes on them, samples of equal score pooled, which
    is the best any rising function of them can do on this sample. No bins have to be chosen.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: integer labels.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        score: `"brier"`: (p - y)^2; `"nll"`: -log of the probability of what happened.
        reduction: what the confidence is of; see `ece`. The score is that of the binary event.
        average: `"macro"` averages class-wise and multi-label values over classes; None keeps `(..., C)`.
        **options: see `torchcalib.InputOptions`. `weights` must be whole numbers.

    Returns:
        A `CORPDecomposition` of `(...)`, or `(..., C)`, in the dtype of `preds` (at least float32). In nats for the
        NLL, which is infinite (and MCB with it) where a probability of 0 was given to what happened. NaN without data.
        A class that never happens, or always, has UNC and DSC 0.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, through the score: the order of the samples is a constant. DSC and UNC have none.

    Source:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), eq. 1-3.

    Example:
        >>> corp(torch.tensor([0.2, 0.7, 0.9, 0.6]), torch.tensor([0, 1, 0, 1]), task="binary").mcb
        tensor(0.1083)
    """
    _check_word("score", score, CORPScore)
    reading = RankedReading(task_read_as(task, options), reduction, average)
    sample, dtype = _read_sample(task, preds, target, options, reading, hard_targets=True)
    values = reading.read(partial(corp_from_sample, score=score), sample).to(dtype)
    return CORPDecomposition(*values.unbind(-1))


class RankedMetric(StreamingMetric[RankedSample]):
    """A reading of a sample in order, over a stream.

    The state is every sample, 5 bytes for one of float32 (13 with weights), or with `resolution` a sketch of constant
    size.

    Args:
        task, num_classes, num_labels, from_logits, ignore_index, positive_classes, class_axis, validate_args: see
            `BinnedMetric`.
        reduction, average, batch_shape, resolution: see `BinnedMetric`.
        hard_targets: whether targets must be labels.
        **kwargs: those of `torchmetrics.Metric`.
    """

    perfect = 0.0
    unit = "probability"
    plot_lower_bound: float | None = 0.0
    plot_upper_bound: float | None = 1.0

    def __init__(
        self,
        *,
        task: Task,
        num_classes: int | None = None,
        num_labels: int | None = None,
        from_logits: bool = False,
        reduction: Reduction | None = None,
        average: Average | None = "macro",
        ignore_index: int | None = None,
        positive_classes: Sequence[int] | None = None,
        class_axis: int = -1,
        batch_shape: tuple[int, ...] = (),
        validate_args: bool = True,
        resolution: int | None = None,
        hard_targets: bool = False,
        **kwargs: Any,
    ) -> None:
        reading = RankedReading(
            task_read_as(task, {"positive_classes": positive_classes}), reduction, average, resolution
        )
        super().__init__(
            InputFormat(
                task,
                from_logits=from_logits,
                ignore_index=ignore_index,
                positive_classes=positive_classes,
                class_axis=class_axis,
                num_classes=count_of_outputs(task, num_classes, num_labels),
                validate_args=validate_args,
                hard_targets=hard_targets,
                whole_weights=True,
            ),
            reading.recipe(),
            batch_shape,
            **kwargs,
        )
        self.reading = reading


class KS(RankedMetric):
    """Kolmogorov-Smirnov calibration error, streamed; see `ks`. `resolution` keeps a sketch instead of every sample."""

    question = "how far do outcomes and probabilities drift apart, summed by score"
    source = "Gupta et al., Calibration using Splines, ICLR 2021, sec. 3"

    def _value(self, statistic: RankedSample) -> Tensor:
        return self.reading.read(ks_from_sample, statistic)


class CORP(RankedMetric):
    """A part of the CORP decomposition of a score, streamed; see `corp`.

    Args:
        component: `"mcb"`, `"dsc"`, `"unc"` or `"score"`: what `compute` returns.
        score: `"brier"` or `"nll"`.
        **options: those of `RankedMetric`.
    """

    question = "how much would the best rising recalibration gain on this sample"
    source = "Dimitriadis et al., Stable reliability diagrams, PNAS 2021, eq. 1-3"
    higher_is_better = None  # it depends on the component
    plot_upper_bound = None

    def __init__(self, *, component: Component = "mcb", score: CORPScore = "brier", **options: Any) -> None:
        _check_word("component", component, Component)
        _check_word("score", score, CORPScore)
        super().__init__(hard_targets=True, **options)
        self.component, self.score = component, score

    def _value(self, statistic: RankedSample) -> Tensor:
        return getattr(self._parts(statistic), self.component)  # type: ignore[no-any-return]

    def decomposition(self) -> CORPDecomposition:
        """Return all parts, over all ranks if `torch.distributed` is running."""
        return self._parts(self._synced_statistic())

    def _parts(self, sample: RankedSample) -> CORPDecomposition:
        values = self.reading.read(partial(corp_from_sample, score=self.score), sample)
        return CORPDecomposition(*values.unbind(-1))
