"""CORP decomposition of a score into miscalibration, discrimination and uncertainty."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task, check_choice, task_read_as
from torchcalib.core.events import Reduction
from torchcalib.core.ranked import RankedSample, SortedSample
from torchcalib.core.ranked_bins import Binning
from torchcalib.inference.evidence import Evidence
from torchcalib.metrics.ranked.reading import RankedReading, TestedRankedMetric, evaluate
from torchcalib.ops.isotonic import isotonic_regression
from torchcalib.ops.logs import binary_log_probs, xmul


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
    """Score, MCB, DSC and UNC, the fields of `CORPDecomposition`, as `(..., 4)`."""
    blocks = Binning("pava").of(sample)
    s, n, k = blocks.sample, blocks.n.detach(), blocks.outcomes.detach()
    total = blocks.total.detach()
    of_rates = _brier_of_rate if score == "brier" else _nll_of_rate
    per_element = (_brier_of if score == "brier" else _nll_of)(s)
    own = per_element.masked_fill(~s.counted, 0).sum(-1) / total
    recalibrated = of_rates(k, n).sum(-1) / total
    naive = of_rates(k.sum(-1), total) / total
    return torch.stack((own, own - recalibrated, naive - recalibrated, naive), -1)


def _mcb_of_frequencies(sample: RankedSample, score: CORPScore) -> Tensor:
    """MCB `(...)` of outcomes that are no whole numbers, in the order of their elements: the frequencies of each."""
    s = sample.sorted()
    n = s.counts.to(s.confidence.dtype)
    best = n * isotonic_regression(s.positives / n, n)
    per_element, of_rates = (_brier_of, _brier_of_rate) if score == "brier" else (_nll_of, _nll_of_rate)
    return (per_element(s) - of_rates(best, n)).masked_fill(~s.counted, 0).sum(-1) / n.sum(-1)


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
        NLL, which is infinite (and MCB with it) where a probability of 0 was given to what happened; the probabilities
        of finite logits are never 0. NaN without data.
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
    check_choice("score", score, get_args(CORPScore))
    reading = RankedReading(task_read_as(task, options), reduction, average, hard_targets=True)
    values = evaluate(partial(corp_from_sample, score=score), reading, task, preds, target, options)
    return CORPDecomposition(*values.unbind(-1))


class CORP(TestedRankedMetric):
    """A part of the CORP decomposition of a score, streamed; see `corp`.

    Args:
        component: `"mcb"`, `"dsc"`, `"unc"` or `"score"`: what `compute` returns.
        score: `"brier"` or `"nll"`.
        **options: those of `RankedMetric`.
    """

    unit = "of the score: squared probability, or nats"
    question = "how large is a part of the score: by default what the best rising recalibration would gain"
    source = "Dimitriadis et al., Stable reliability diagrams, PNAS 2021, eq. 1-3"
    higher_is_better = None  # it depends on the component
    plot_upper_bound = None
    hard_targets = True

    def __init__(self, *, component: Component = "mcb", score: CORPScore = "brier", **options: Any) -> None:
        check_choice("component", component, get_args(Component))
        check_choice("score", score, get_args(CORPScore))
        super().__init__(**options)
        self.component, self.score = component, score

    def from_sample(self, sample: RankedSample) -> Tensor:
        """Read the part."""
        return corp_from_sample(sample, self.score)[..., CORPDecomposition._fields.index(self.component)]

    def without_noise(self, sample: RankedSample) -> Tensor:
        """Read what the best rising recalibration would gain if it had the frequencies themselves to go by."""
        return _mcb_of_frequencies(sample, self.score)

    def evidence_from(self, statistic: RankedSample, **how: Any) -> Evidence:
        """Return the evidence of a statistic; of MCB alone, for the other parts do not measure calibration."""
        if self.component != "mcb":
            raise ValueError(
                f"`component` must be 'mcb' for evidence of calibration, got {self.component!r}. "
                "Make CORP(component='mcb')."
            )
        return super().evidence_from(replace(statistic, log_scored=self.score == "nll"), **how)

    def decomposition(self) -> CORPDecomposition:
        """Return all parts, over all ranks if `torch.distributed` is running."""
        return self._parts(self._synced_statistic())

    def _parts(self, sample: RankedSample) -> CORPDecomposition:
        values = self.reading.read(partial(corp_from_sample, score=self.score), sample)
        return CORPDecomposition(*values.unbind(-1))
