"""Common implementation of scores: means over samples, optionally normalised or reweighted to given class priors."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import Average, Reduction, Task, check_average, check_choice
from torchcalib.core.checks import read_priors
from torchcalib.core.inputs import input_format_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreAccumulator, ScoreSum, known
from torchcalib.core.tasks import as_tensors
from torchcalib.functional.estimator import Estimator, of_arrays
from torchcalib.io.errors import shown
from torchcalib.ops.binary_scores import Kind
from torchcalib.ops.logs import xmul

if TYPE_CHECKING:
    from torchcalib.core.images import Images


def zero(s: ScoreSum, _: Tensor, __: Task) -> Tensor:
    """Return 0 for each batch element, the mean score of a constant prediction that is calibrated; see `Score`."""
    return torch.zeros_like(s.total)


class Score(NamedTuple):
    """Definition of a score: its value per sample, and its mean for the constant prediction of the class priors."""

    per_sample: Callable[..., Tensor]  # function from `Predictions` and `arguments` to scores `(..., N)`
    # Function from sums by class, class priors and task to the mean score `(...)` of the constant prediction
    of_prior: Callable[[ScoreSum, Tensor, Task], Tensor] = zero
    normalizable: bool = False  # whether the mean score may be divided by that of the constant prediction
    arguments: tuple[Hashable, ...] = ()
    min_annotators: int = 0  # minimum number of annotators per target
    of_statistics: tuple[float, ...] | None = None  # see `ScoreAccumulator`
    kind: Kind | None = None  # its name in `Predictions.score_sum`, for scores that have one
    score_range: tuple[float, float] = (-math.inf, math.inf)  # smallest and largest score


@of_arrays
def mean_score(s: ScoreSum) -> Tensor:
    """Return the weighted mean of the scores over all samples, `(...)`."""
    n, score = s.sums[..., 0, :], s.sums[..., 1, :]
    return score.sum(-1) / n.sum(-1)


vars(mean_score)["norm"] = "score"  # which `core.batch.error_of_batch` computes on an accelerator


def mean_over_classes(s: ScoreSum) -> Tensor:
    """Return the mean over classes of the mean score in each class, `(...)`; NaN if a class has no samples."""
    return (s.score / s.n).mean(-1)


@dataclass(frozen=True, eq=False)
class ScoreEstimator(Estimator[ScoreSum]):
    """Estimator of a mean score, optionally normalised or reweighted to given class priors."""

    score: Score  # Definition of the score
    normalize: bool  # Whether the mean is divided by the mean score of a model that always predicts the class priors
    # Class priors `(C,)`, validated once the number of classes is known. None means the class frequencies in the data.
    priors: Tensor | Sequence[float] | None
    reduction: Reduction = "mean"  # `"mean"`, or `"none"` for the score of every sample

    def __call__(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean score, or with `reduction="none"` the score of every sample."""
        if self.reduction == "none":
            return self.per_sample(preds, target, weights)
        return super().__call__(preds, target, weights)

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the mean score for validated predictions, `(...)` or `(..., L)`."""
        return self.with_checked_priors(p.num_classes).value(self.accumulator.from_predictions(p))

    def per_sample(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
        """Return the score of every sample `(..., N)`, multi-label `(..., N, L)`; NaN in rows with weight 0."""
        if self.normalize or self.priors is not None:
            name, given = ("normalize", "prior") if self.normalize else ("priors", self.priors)
            raise ValueError(f"`{name}` must be None with reduction='none', got {shown(given)}. Use reduction='mean'.")
        preds, target, weights = as_tensors(preds, target, weights, **self.input_format.conversion)
        how = self.input_format.resolved(preds, target, self.input_format.batch_dims)
        how.check_axis(preds)
        samples = how.samples_of(preds)
        p = how.read(preds, target, weights, batch_shape=samples[:-1])
        scores = self.score.per_sample(p, *self.score.arguments).to(p.dtype)
        if p.weights is not None:
            scores = scores.masked_fill((p.weights == 0) | p.weights.isnan(), torch.nan)
        return scores.transpose(-1, -2) if self.input_format.read_as == "multilabel" else scores

    def values(self, statistic: ScoreSum) -> Tensor:
        """Return the mean score `(...)` per batch element, for multi-label `(..., L)`."""
        value = self.formula(statistic)
        if self.priors is not None:
            value = xmul(self._class_priors(statistic), statistic.score / statistic.n).sum(-1)
        return value / self._of_prior(statistic) if self.normalize else value

    def of_prior(self, s: ScoreSum) -> Tensor:
        """Return the mean score `(...)` of a model that always predicts the class priors, from sums by class."""
        value = self._of_prior(s)
        return value.mean(-1) if self.averages else value

    def _of_prior(self, s: ScoreSum) -> Tensor:
        return self.score.of_prior(s, self._class_priors(s), self.input_format.read_as)

    def _class_priors(self, s: ScoreSum) -> Tensor:
        return s.share if self.priors is None else torch.as_tensor(self.priors).to(s.sums, non_blocking=True)

    def with_checked_priors(self, num_classes: int) -> Self:
        """Return a copy of this estimator with validated class priors, in float64."""
        return self if self.priors is None else replace(self, priors=read_priors(self.priors, num_classes))

    def streamed(self, num_classes: int | None, **_: Any) -> Self:
        """Return a copy of this estimator for a streaming metric, with validated priors."""
        made = super().streamed(num_classes)
        if self.priors is not None:
            is_multiclass = self.input_format.read_as == "multiclass"
            made = made.with_checked_priors(known("num_classes", num_classes) if is_multiclass else 2)
        return made


def scored(
    score: Score,
    task: Task | None,
    options: Mapping[str, Any],
    *,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    stratified: bool = False,
    per_image: "bool | Images" = False,
) -> ScoreEstimator:
    """Return the estimator of a mean score, with values `(...)`, or `(..., L)` for multi-label with `average=None`.

    `normalize="prior"` divides by the score of a model that always predicts the class priors. `priors` replace the
    class frequencies in the data. `reduction="none"` returns the score of every sample, not multiplied by its weight;
    see `ScoreEstimator.per_sample`. `stratified` averages the mean scores of the classes.
    """
    check_choice("reduction", reduction, get_args(Reduction))
    hard_targets = stratified or priors is not None
    input_format = input_format_of(task, options, hard_targets=hard_targets, min_annotators=score.min_annotators)
    if normalize not in (None, "prior") or (normalize and not score.normalizable):
        allowed = "None or 'prior'" if score.normalizable else "None"
        raise ValueError(f"`normalize` must be {allowed}, got {shown(normalize)}. Omit it for the mean score.")
    averages = check_average(average, input_format.read_as == "multilabel")
    normalizes = normalize is not None
    by_class = normalizes or hard_targets
    accumulator = ScoreAccumulator(
        score.per_sample, score.arguments, by_class, score.kind, score.of_statistics, score.score_range
    )
    formula = mean_over_classes if stratified else mean_score
    made = ScoreEstimator(input_format, accumulator, formula, averages, score, normalizes, priors, reduction)
    if per_image is False:
        return made
    if reduction == "none":
        raise ValueError("`per_image` must be False with reduction='none', got True. Use reduction='mean'.")
    if getattr(per_image, "ignore_empty", False):
        raise ValueError(
            "`per_image` must have ignore_empty=False for a score, got True. Scores of voxels without an event count."
        )
    return made.per_image(per_image, input_format.read_as == "multilabel")
