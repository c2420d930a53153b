"""Accuracy, computed from the same statistics of a row as the scores."""

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from torchcalib.core.arguments import Average, InputOptions, Task
from torchcalib.core.events import top_label
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreSum
from torchcalib.metrics.scores.engine import Score, ScoreMetric, evaluate
from torchcalib.ops.logs import wide_dtype


def share_right(p: Predictions) -> Tensor:
    """Return whether the most probable class is the true one `(..., N)`; for soft targets its share."""
    outcome = top_label(p).outcome
    return outcome.to(wide_dtype(outcome.device))


def _largest_share(_: ScoreSum, priors: Tensor, __: Task) -> Tensor:
    return priors.amax(-1)


_ACCURACY = Score(share_right, _largest_share)


def accuracy(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    **options: Unpack[InputOptions],
) -> Tensor:
    """Accuracy: share of samples whose most probable class is the true one; ties go to the first class.

    It equals 1 minus the Bayes risk with a cost of 1 for every error. It does not measure calibration, but it costs
    nothing beside the scores, which need the same statistics of a row.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels; or soft targets, where the share of the most probable class counts; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        priors: class priors that replace the class frequencies of the data; `[1/C] * C` gives balanced accuracy.
        average: `"macro"` averages multi-label values over labels; None returns `(..., L)`.
        **options: see `torchcalib.InputOptions`.

    Returns:
        `(...)` in [0, 1], in the dtype of `preds` (at least float32); NaN without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        None: decisions are piecewise constant.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.1, for 0-1 costs.

    Example:
        >>> import torch
        >>> accuracy(torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1]), task="binary")
        tensor(0.6667)
    """
    return evaluate(_ACCURACY, preds, target, options, task=task, normalize=None, priors=priors, average=average)


class Accuracy(ScoreMetric):
    """Accuracy, streamed; see `accuracy`.

    Example:
        >>> import torch
        >>> metric = Accuracy(task="binary")
        >>> metric.update(torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.6667, dtype=torch.float64)
    """

    score = _ACCURACY
    is_differentiable = False
    higher_is_better = True
    unit, perfect, plot_lower_bound, plot_upper_bound = "share of samples", 1.0, 0.0, 1.0
    question = "how often is the most probable class the true one"
    source = "Ferrer & Ramos, Evaluating Posterior Probabilities, sec. 2.3.1, for 0-1 costs"
