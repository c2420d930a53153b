"""Accuracy, which a report gives beside the scores: as a metric of its own torchmetrics has it."""

from torch import Tensor

from torchcalib.predictions import Predictions, Task
from torchcalib.reductions import top_label
from torchcalib.scores.engine import Score, ScoreMetric
from torchcalib.statistics import ScoreSum


def _hit(p: Predictions) -> Tensor:
    return top_label(p).outcome


def _largest_share(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return priors.amax(-1)


class Accuracy(ScoreMetric):
    """How often the most probable class is the true one (for soft targets its share of votes), streamed."""

    score = Score(_hit, _largest_share)
    higher_is_better = True
    unit, perfect, plot_lower_bound, plot_upper_bound = "share of samples", 1.0, 0.0, 1.0
    question = "how often is the most probable class the true one"
    source = ""
