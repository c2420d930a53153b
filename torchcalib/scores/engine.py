"""What a score is, and the one engine that reads every score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.kernels.row_stats import xmul
from torchcalib.predictions import (
    Average,
    InputFormat,
    Predictions,
    Task,
    check_average,
    count_of_outputs,
    read_priors,
)
from torchcalib.reductions import top_label
from torchcalib.statistics import ScoreRecipe, ScoreSum
from torchcalib.streaming import StreamingMetric

Normalize = Literal["prior", "classes"]


class Score(NamedTuple):
    """A per-sample score, and its mean for one who always predicts the class priors."""

    per_sample: Callable[..., Tensor]
    of_prior: Callable[[ScoreSum, Tensor, Task], Tensor]
    normalizations: tuple[Normalize, ...] = ()
    arguments: tuple[float | None, ...] = ()

    def recipe(self, by_class: bool) -> ScoreRecipe:
        """The sums that this score is read from."""
        return ScoreRecipe(self.per_sample, self.arguments, by_class)


@dataclass(frozen=True)
class ScoreReading:
    """From sums of a score to its value: the mean, over samples or with the classes at given priors, normalised.

    The only place where the options of a reading are checked.
    """

    score: Score
    task: Task
    normalize: Normalize | None = None
    priors: Tensor | Sequence[float] | None = None
    average: Average | None = "macro"

    def __post_init__(self) -> None:
        if self.normalize not in (None, *self.score.normalizations):
            offered = ", ".join(map(repr, self.score.normalizations))
            raise ValueError(f"`normalize` must be None{' or ' * bool(offered)}{offered}, got {self.normalize!r}.")
        if self.priors is not None and self.task != "multiclass":
            read_priors(self.priors, 2)
        check_average(self.average, self.task == "multilabel")

    @property
    def by_class(self) -> bool:
        """Whether the sums must keep classes apart."""
        return self.normalize is not None or self.priors is not None

    def read(self, s: ScoreSum) -> Tensor:
        """Read the value, `(...)`, or `(..., L)` for labels that are not averaged."""
        value = s.score.sum(-1) / s.total
        if self.priors is not None:
            value = xmul(self._class_priors(s), s.score / s.n).sum(-1)
        if self.normalize == "prior":
            value = value / self.score.of_prior(s, self._class_priors(s), self.task)
        elif self.normalize == "classes" and self.task == "multiclass":
            value = value / s.n.shape[-1]
        return self._averaged(value)

    def of_prior(self, s: ScoreSum) -> Tensor:
        """Read what always predicting the class priors would get; `s` must keep classes apart."""
        return self._averaged(self.score.of_prior(s, self._class_priors(s), self.task))

    def _class_priors(self, s: ScoreSum) -> Tensor:
        return s.share if self.priors is None else read_priors(self.priors, s.n.shape[-1]).to(s.sums)

    def _averaged(self, value: Tensor) -> Tensor:
        return value.mean(-1) if self.task == "multilabel" and self.average else value


def evaluate(
    score: Score,
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    normalize: Normalize | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Read the input, sum the score over it, and read the value."""
    reading = ScoreReading(score, task, normalize, priors, average)
    p = InputFormat(task, hard_targets=priors is not None, **options).read(preds, target, weights)
    return reading.read(score.recipe(reading.by_class).of(p)).to(p.dtype)


def per_sample(
    score: Score,
    preds: Tensor,
    target: Tensor,
    task: Task,
    weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the score of every sample, NaN where a row is left out."""
    p = InputFormat(task, **options).read(preds, target, weights)
    scores = score.per_sample(p, *score.arguments)
    if p.weights is not None:
        scores = scores.masked_fill((p.weights == 0) | p.weights.isnan(), torch.nan)
    return scores.transpose(-1, -2) if task == "multilabel" else scores


class ScoreMetric(StreamingMetric[ScoreSum]):
    """Mean of a per-sample score over a stream.

    The state is 3 sums; where `normalize` or `priors` keep the classes apart, 3 for each class.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_classes: C of a multi-class task; needed with `normalize` or `priors`, else only checked.
        num_labels: L of a multi-label task.
        from_logits, ignore_index, class_axis, validate_args: see `torchcalib.InputOptions`.
        normalize, priors, average: see the function of the same name.
        batch_shape: leading axes to keep apart, one value each; all other axes but the class axis are samples.
        **kwargs: those of `torchmetrics.Metric`.
    """

    score: ClassVar[Score]

    def __init__(
        self,
        *,
        task: Task,
        num_classes: int | None = None,
        num_labels: int | None = None,
        from_logits: bool = False,
        normalize: Normalize | None = None,
        priors: Tensor | Sequence[float] | None = None,
        average: Average | None = "macro",
        ignore_index: int | None = None,
        class_axis: int = -1,
        batch_shape: tuple[int, ...] = (),
        validate_args: bool = True,
        **kwargs: Any,
    ) -> None:
        reading = ScoreReading(self.score, task, normalize, priors, average)
        if priors is not None and num_classes is not None:
            read_priors(priors, num_classes)
        super().__init__(
            InputFormat(
                task,
                from_logits=from_logits,
                ignore_index=ignore_index,
                class_axis=class_axis,
                num_classes=count_of_outputs(task, num_classes, num_labels),
                validate_args=validate_args,
                hard_targets=priors is not None,
            ),
            self.score.recipe(reading.by_class),
            batch_shape,
            **kwargs,
        )
        self.reading = reading

    def _value(self, statistic: ScoreSum) -> Tensor:
        return self.reading.read(statistic)


def _hit(p: Predictions) -> Tensor:
    return top_label(p).outcome


def _largest(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return priors.amax(-1)


ACCURACY = Score(_hit, _largest)
"""How often the most probable class is the true one (for soft targets its share of votes)."""
