"""Risk-coverage curves of selective prediction, and the sample behind all its metrics.

A model abstains from its least confident predictions. Its coverage is the fraction of accepted predictions, and its
selective risk is their error rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, task_read_as
from torchcalib.core.events import Mode, NamedMode, resolve_mode
from torchcalib.core.inputs import input_format_of
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.tasks import infers_task
from torchcalib.ops.harmonic import harmonic_difference
from torchcalib.ops.host_values import once
from torchcalib.ops.logs import wide_dtype

_MAX_POINTS = 2**10
"""Maximum number of points in a risk-coverage curve."""

MODES: dict[Task, tuple[NamedMode, ...]] = {
    "binary": ("top_label", "positive"),
    "multiclass": ("top_label",),
    "multilabel": ("top_label", "classwise"),
}
"""Modes of selective prediction, with the default mode first."""


def of_predicted_class(sample: RankedSample) -> RankedSample:
    """Convert the events y = 1 to the events that the predicted class is true: y = 1 if p > 1/2, otherwise y = 0.

    The confidence becomes max(p, 1 - p), in float64 as for the mode "top_label" of a binary task.
    """
    score = sample.score
    if sample.from_logits:
        is_one, score = score > 0, score.abs()
    else:
        score = score.to(wide_dtype(score.device))
        is_one = score > 0.5
        score = torch.where(is_one, score, 1 - score)
    correct = torch.where(is_one, sample.positives, (1 if sample.n is None else sample.n) - sample.positives)
    # Not `replace`: a sample that is sorted by score is no longer sorted.
    return RankedSample(score, correct, sample.n, sample.from_logits, sample.has_invalid_rows)


@dataclass(frozen=True, eq=False)
class Accepted:
    """Numbers of samples and errors in groups of equal confidence, and among all more confident samples.

    The tensors have the shape `(..., M)` of the sorted sample. The numbers of a group are at its last element. All
    other elements have `n` and `errors` 0, so that they change no sum.
    """

    n: Tensor  # number of samples in the group
    errors: Tensor  # number of errors in the group
    n_before: Tensor  # number of samples with a larger confidence
    errors_before: Tensor  # number of errors among the samples with a larger confidence
    total: Tensor  # number of all samples `(...)`
    total_errors: Tensor  # number of all errors `(...)`
    confidence: Tensor  # confidence of the group as a probability
    computed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)  # cache of `harmonic`

    @classmethod
    def from_sample(cls, sample: RankedSample) -> Self:
        """Compute the numbers from a `RankedSample`, whose positives are the correct predictions."""
        s = sample.sorted()
        wide = wide_dtype(s.score.device)
        counts = s.counts.to(wide)
        errors = (counts - s.positives.to(wide)).masked_fill(~s.counted, 0)
        # Cumulative sums in ascending order of the confidence, up to the end of a group and of the previous group.
        n_upto, n_below = _ends(counts.cumsum(-1), s.ends)
        errors_upto, errors_below = _ends(errors.cumsum(-1), s.ends)
        total, total_errors = counts.sum(-1), errors.sum(-1)
        return cls(
            n=n_upto - n_below,
            errors=errors_upto - errors_below,
            n_before=total.unsqueeze(-1) - n_upto,
            errors_before=total_errors.unsqueeze(-1) - errors_upto,
            total=total,
            total_errors=total_errors,
            confidence=s.confidence,
        )

    @property
    def error_rate(self) -> Tensor:
        """Mean error of each group: the expected error of each of its samples over all orders; 0 without samples."""
        return self.errors / self.n.clamp(min=1)

    @property
    def n_accepted(self) -> Tensor:
        """Number of samples with the confidence of the group or a larger one."""
        return self.n_before + self.n

    @property
    def errors_accepted(self) -> Tensor:
        """Number of errors among the samples in `n_accepted`."""
        return self.errors_before + self.errors

    @once
    def harmonic(self) -> Tensor:
        """H(`n_accepted`) - H(`n_before`), with the harmonic numbers H(n) = 1 + 1/2 + ... + 1/n."""
        return harmonic_difference(self.n_before, self.n_accepted)


def _ends(upto: Tensor, is_last: Tensor) -> tuple[Tensor, Tensor]:
    """Return cumulative sums `(..., M)` at the end of each group and of the previous group; equal at other elements."""
    latest = upto.masked_fill(~is_last, 0).cummax(-1).values
    previous = torch.cat((torch.zeros_like(latest[..., :1]), latest[..., :-1]), -1)
    return latest, previous


def events_of(read_as: Task, mode: Mode | None, modes: Mapping[Task, Sequence[NamedMode]] = MODES) -> tuple[Mode, bool]:
    """Return the mode of the sample, and whether `of_predicted_class` must convert it.

    Multi-label samples contain P(y=1) for each label, as for other rank-based metrics, which can share them.
    """
    mode = resolve_mode(read_as, mode, modes.get(read_as))
    if read_as == "multilabel" and mode == "top_label":
        return "classwise", True
    return mode, False


class RiskCoverageCurve(NamedTuple):
    """Risk-coverage curve; see `risk_coverage_curve`.

    Tensors have the shape `(..., M)`, for M thresholds in descending order. Curves with fewer points end with NaN.

    Attributes:
        coverage: Fraction of samples with at least the confidence `threshold`.
        risk: Error rate of these samples (selective risk).
        generalized_risk: Number of errors among these samples, divided by the number of all samples.
        threshold: Smallest accepted confidence, as a probability.

    Example:
        >>> curve = risk_coverage_curve(torch.tensor([0.2, 0.6, 0.9]), torch.tensor([0, 0, 1]), task="binary")
        >>> curve.risk
        tensor([0.0000, 0.0000, 0.3333], dtype=torch.float64)
    """

    coverage: Tensor
    risk: Tensor
    generalized_risk: Tensor
    threshold: Tensor


@infers_task
def risk_coverage_curve(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    mode: Mode | None = None,
    **options: Unpack[InputOptions],
) -> RiskCoverageCurve:
    """Return the risk-coverage curve: error rate of the samples with at least a given confidence, by their fraction.

    There is one point for each distinct confidence. With more than 1,024, it is the last point in each of 1,024
    intervals of coverage. `aurc` and `augrc` are areas under the curve with all points.
    `torchcalib.plots.risk_coverage_curve` draws the curve.

    Args:
        target: Labels. Soft targets are not supported.
        mode: Event whose probability is the confidence; see `aurc`.

    Returns:
        A `RiskCoverageCurve` with tensors `(..., M)`, multi-label `(..., L, M)`, M at most 1,024, in float64. NaN
        without data.

    Gradient:
        None.

    Reference:
        Geifman, El-Yaniv: Selective Classification for Deep Neural Networks (NeurIPS 2017, arXiv:1705.08500).

    Example:
        >>> curve = risk_coverage_curve(torch.tensor([0.2, 0.6, 0.9]), torch.tensor([0, 0, 1]), task="binary")
        >>> curve.coverage
        tensor([0.3333, 0.6667, 1.0000], dtype=torch.float64)
    """
    mode, converts = events_of(task_read_as(task, options), mode)
    input_format = input_format_of(task, options, hard_targets=True, whole_weights=True)
    with torch.no_grad():
        sample = ExactSample(mode).from_predictions(input_format.read(preds, target, options.get("weights")))
        return risk_coverage_curve_of(sample, converts)


def risk_coverage_curve_of(sample: RankedSample, converts: bool = False) -> RiskCoverageCurve:
    """Compute the risk-coverage curve from a `RankedSample`; `converts` applies `of_predicted_class` first."""
    a = Accepted.from_sample(of_predicted_class(sample) if converts else sample)
    total = a.total.unsqueeze(-1)
    columns = (a.n_accepted / total, a.errors_accepted / a.n_accepted, a.errors_accepted / total, a.confidence)
    points = torch.stack([column.flip(-1) for column in columns])
    points = _selected(points, (a.n > 0).flip(-1))
    if points.shape[-1] > _MAX_POINTS:
        interval = (points[0] * _MAX_POINTS).ceil()
        is_last = torch.ones_like(interval, dtype=torch.bool)
        is_last[..., :-1] = interval[..., :-1] != interval[..., 1:]
        few = points[0].isfinite().sum(-1, keepdim=True) <= _MAX_POINTS
        points = _selected(points, (is_last | few) & points[0].isfinite())
    if sample.has_invalid_rows is not None:
        points = points.masked_fill(sample.has_invalid_rows.unsqueeze(-1), torch.nan)
    return RiskCoverageCurve(*points.unbind(0))


def _selected(points: Tensor, kept: Tensor) -> Tensor:
    """Return the points `(4, ..., M)` in a mask `(..., M)`, in order and padded with NaN at the end."""
    length = max(1, int(kept.sum(-1).amax())) if kept.numel() else 1
    order = torch.sort((~kept).to(torch.uint8), dim=-1, stable=True).indices[..., :length]
    points = points.gather(-1, order.expand(len(points), *order.shape))
    return points.masked_fill(~kept.gather(-1, order), torch.nan)
