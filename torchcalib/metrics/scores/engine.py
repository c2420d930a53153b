"""What a score is, and the one engine that reads every score."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    NanPolicy,
    Task,
    check_average,
    check_internal,
    count_of_outputs,
)
from torchcalib.core.checks import read_priors
from torchcalib.core.inputs import InputFormat, read_input
from torchcalib.core.predictions import by_replicates
from torchcalib.core.sums import ScoreRecipe, ScoreSum, known
from torchcalib.metrics.base import StreamingMetric
from torchcalib.ops.logs import xmul


class Score(NamedTuple):
    """A per-sample score, and its mean for one who always predicts the class priors.

    Attributes:
        per_sample: predictions (and `arguments`) to scores `(..., N)`.
        of_prior: sums by class, class priors and task to the mean score of predicting those priors.
        normalizable: whether a share of `of_prior` means something.
        arguments: further arguments of `per_sample`.
        least_votes: how many votes must be known to stand behind every target; see `InputFormat`.
    """

    per_sample: Callable[..., Tensor]
    of_prior: Callable[[ScoreSum, Tensor, Task], Tensor]
    normalizable: bool = False
    arguments: tuple[Hashable, ...] = ()
    least_votes: int = 0

    def recipe(self, by_class: bool) -> ScoreRecipe:
        """The sums that this score is read from."""
        return ScoreRecipe(self.per_sample, self.arguments, by_class)


@dataclass(frozen=True, eq=False)
class ScoreReading:
    """From sums of a score to its value: the mean, over samples or with the classes at given priors, normalised.

    Attributes:
        priors: checked class priors `(..., C)`, or None for those of the data.
    """

    score: Score
    task: Task
    normalize: Literal["prior"] | None = None
    priors: Tensor | None = None
    average: Average | None = "macro"

    def __post_init__(self) -> None:
        if self.normalize not in (None, "prior") or (self.normalize and not self.score.normalizable):
            offered = " or 'prior'" if self.score.normalizable else ""
            raise ValueError(f"`normalize` must be None{offered}, got {self.normalize!r}.")
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
        if self.normalize is not None:
            value = value / self.score.of_prior(s, self._class_priors(s), self.task)
        return self._averaged(value)

    def of_prior(self, s: ScoreSum) -> Tensor:
        """Read what always predicting the class priors would get; `s` must keep classes apart."""
        return self._averaged(self.score.of_prior(s, self._class_priors(s), self.task))

    def _class_priors(self, s: ScoreSum) -> Tensor:
        return s.share if self.priors is None else self.priors.to(s.sums)

    def _averaged(self, value: Tensor) -> Tensor:
        return value.mean(-1) if self.task == "multilabel" and self.average else value


def evaluate(
    score: Score,
    preds: Tensor,
    target: Tensor,
    options: InputOptions,
    *,
    task: Task,
    normalize: Literal["prior"] | None,
    priors: Tensor | Sequence[float] | None,
    average: Average | None,
) -> Tensor:
    """Read the input, sum the score over it, and read the value."""
    p = read_input(task, preds, target, options, hard_targets=priors is not None, least_votes=score.least_votes)
    checked = None if priors is None else read_priors(priors, p.num_classes)
    reading = ScoreReading(score, p.task, normalize, checked, average)
    recipe = score.recipe(reading.by_class)
    return by_replicates(lambda p: reading.read(recipe.of(p)), p, recipe.n_events(p)).to(p.dtype)


def per_sample(score: Score, preds: Tensor, target: Tensor, task: Task, options: InputOptions) -> Tensor:
    """Return the score of every sample, NaN where a row is left out."""
    p = read_input(task, preds, target, options, least_votes=score.least_votes)
    scores = score.per_sample(p, *score.arguments).to(p.dtype)
    if p.weights is not None:
        scores = scores.masked_fill((p.weights == 0) | p.weights.isnan(), torch.nan)
    return scores.transpose(-1, -2) if task == "multilabel" else scores


class ScoreMetric(StreamingMetric[ScoreSum]):
    """Mean of a per-sample score over a stream.

    The state is 2 sums; where `normalize` or `priors` keep the classes apart, 3 for each class.

    Args:
        score: replaces the class's own score. Passed by subclasses.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_classes: C of a multi-class task; needed with `normalize` or `priors`, else only checked.
        num_labels: L of a multi-label task.
        from_logits, ignore_index, positive_classes, class_axis, validate_args, nan_policy: see
            `torchcalib.InputOptions`.
        normalize, priors, average: see the function of the same name.
        batch_shape: leading axes to keep apart, one value each; all other axes but the class axis are samples.
        keep_classes: keep the classes apart even where the value does not ask for it.
        **kwargs: those of `torchmetrics.Metric`.
    """

    score: Score

    def __init__(
        self,
        score: Score | None = None,
        /,
        *,
        task: Task,
        num_classes: int | None = None,
        num_labels: int | None = None,
        from_logits: bool = False,
        normalize: Literal["prior"] | None = None,
        priors: Tensor | Sequence[float] | None = None,
        average: Average | None = "macro",
        ignore_index: int | None = None,
        positive_classes: Sequence[int] | None = None,
        class_axis: int = -1,
        batch_shape: tuple[int, ...] = (),
        validate_args: bool = True,
        nan_policy: NanPolicy = "raise",
        keep_classes: bool = False,
        **kwargs: Any,
    ) -> None:
        check_internal(score, Score)
        if score is not None:
            self.score = score
        input_format = InputFormat(
            task,
            from_logits=from_logits,
            ignore_index=ignore_index,
            class_axis=class_axis,
            num_classes=count_of_outputs(task, num_classes, num_labels),
            validate_args=validate_args,
            nan_policy=nan_policy,
            hard_targets=priors is not None,
            positive_classes=positive_classes,
            least_votes=self.score.least_votes,
        )
        task = input_format.read_as
        if priors is not None:
            priors = read_priors(priors, known("num_classes", num_classes) if task == "multiclass" else 2)
        reading = ScoreReading(self.score, task, normalize, priors, average)
        super().__init__(
            input_format,
            self.score.recipe(reading.by_class or keep_classes),
            batch_shape,
            **kwargs,
        )
        self.reading = reading

    def _value(self, statistic: ScoreSum) -> Tensor:
        return self.reading.read(statistic)
