"""What a score is, and the one engine that reads every score."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_average,
)
from torchcalib.core.checks import read_priors
from torchcalib.core.inputs import read_input
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreRecipe, ScoreSum, known
from torchcalib.metrics.base import StreamingMetric
from torchcalib.metrics.estimator import Estimator, input_format_of
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
        priors: class priors `(..., C)`, or None for those of the data.
    """

    score: Score
    task: Task
    normalize: Literal["prior"] | None = None
    priors: Tensor | Sequence[float] | None = None
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

    def checked(self, num_classes: int) -> "ScoreReading":
        """Return the reading with priors that have been checked, as float64."""
        return self if self.priors is None else replace(self, priors=read_priors(self.priors, num_classes))

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
        return s.share if self.priors is None else torch.as_tensor(self.priors).to(s.sums)

    def _averaged(self, value: Tensor) -> Tensor:
        return value.mean(-1) if self.task == "multilabel" and self.average else value


@dataclass(frozen=True, eq=False)
class ScoreEstimator(Estimator[ScoreSum]):
    """The mean of a score.

    Attributes:
        reading: from sums to the value. Its priors are as they were given: the predictions tell how many there must be.
    """

    reading: ScoreReading

    def of(self, p: Predictions) -> Tensor:
        """Return the value of checked predictions."""
        return self.reading.checked(p.num_classes).read(self.accumulator.of(p))  # type: ignore[arg-type]

    def streamed(self, num_classes: int | None, *, keep_classes: bool = False, **_: Any) -> "ScoreEstimator":
        """Return the estimator of a stream; see `ScoreMetric`."""
        reading = self.reading
        if reading.priors is not None:
            reading = reading.checked(known("num_classes", num_classes) if reading.task == "multiclass" else 2)
        accumulator = reading.score.recipe(reading.by_class or keep_classes)
        input_format = replace(self.input_format, num_classes=num_classes)
        return replace(self, input_format=input_format, accumulator=accumulator, formula=reading.read, reading=reading)


def scored(
    score: Score,
    /,
    *,
    task: Task,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Return the estimator of the mean of a score.

    Args:
        score: the score of a sample.
        task: the task of the input.
        normalize: "prior" divides by the score of always predicting the class priors.
        priors: class priors that the score is reported for.
        average: multi-label: "macro", or None for a value for each label.
        **options: those of `InputOptions`.
    """
    demands = {"hard_targets": priors is not None, "least_votes": score.least_votes}
    input_format = input_format_of(task, options, **demands)
    reading = ScoreReading(score, input_format.read_as, normalize, priors, average)
    return ScoreEstimator(input_format, score.recipe(reading.by_class), reading.read, False, reading)


def evaluate(score: Score, preds: Tensor, target: Tensor, options: InputOptions, **how: Any) -> Tensor:
    """Return the mean of a score over predictions; see `scored` for the arguments."""
    return scored(score, **how, **options)(preds, target, options.get("weights"))


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
    """

    score: Score
    stream_options = ("keep_classes",)

    def __init__(self, score: Score | None = None, /, **options: Any) -> None:
        if not (score is None or isinstance(score, Score)):
            raise TypeError(f"arguments must be given by name, got {score!r} by position. Write `task=`, for example.")
        if score is not None:
            self.score = score
        super().__init__(partial(scored, self.score), **options)
