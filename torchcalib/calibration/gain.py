"""Calibration loss, and its share of the score."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.cross_validation import (
    DEFAULT,
    CalibrationOptions,
    as_given,
    class_axis_from_the_end,
    input_options,
    training,
)
from torchcalib.core.arguments import Task
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.metrics.proper_scores import brier_score, nll

ScoreFunction = Callable[..., Tensor]
Score = Literal["nll", "brier"] | ScoreFunction
_SCORES: Mapping[str, ScoreFunction] = {"nll": nll, "brier": brier_score}


def calibration_loss(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    score: Score = "nll",
    calibrator: Calibrator[Any] = DEFAULT,
    **options: Unpack[CalibrationOptions],
) -> Tensor:
    """Calibration loss: the score of the predictions less that of the calibrated ones, in the unit of the score.

    What a calibration stage would gain on new data of this kind. Negative where calibrating harms, as it does a little
    where there is nothing to gain.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: integer labels; see `torchcalib.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        score: `"nll"`, `"brier"`, or any function that is called as `score(preds, target, task=..., **input options)`
            and is small for good predictions: for Bayes risk `partial(bayes_risk, cost=...)`. Calibrators are always
            fitted to the NLL.
        calibrator: what to fit; see `torchcalib.calibration`.
        **options: see `torchcalib.InputOptions`, and `CalibrationOptions` for folds and for other ways of training.

    Returns:
        `(...)`, in the dtype of `preds` (at least float32); -inf if only calibrated predictions score infinite.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Warns:
        UserWarning: a fit has no optimum, so that it leaves predictions as they are, or did not reach it. There may be
            more to gain then. Of fits to rows that are weighed in several ways nothing is said.

    Gradient:
        In `preds`, the fitted transforms being constants.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2.

    Example:
        >>> import torch
        >>> preds, target = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
        >>> calibration_loss(preds, target, task="binary", train_on_test=True)
        tensor(0.0470)
        >>> from functools import partial
        >>> from torchcalib import bayes_risk
        >>> dear = partial(bayes_risk, cost=[[0, 1], [2, 0]])
        >>> calibration_loss(1 - preds, target, task="binary", score=dear, train_on_test=True)
        tensor(0.6000)
    """
    raw, after = both_scores(preds, target, task, score, calibrator, options)
    return raw - after


def rcl(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    score: Score = "nll",
    calibrator: Calibrator[Any] = DEFAULT,
    **options: Unpack[CalibrationOptions],
) -> Tensor:
    """Relative calibration loss in percent: the share of the score that a calibration stage would take away.

    100 (raw - calibrated) / raw, of at most 100; see `calibration_loss` for the arguments.

    Returns:
        `(...)`, in the dtype of `preds` (at least float32). 100 if only the raw score is infinite, -inf if only the
        calibrated one is, NaN if both are.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Warns:
        UserWarning: see `calibration_loss`.

    Gradient:
        In `preds`, the fitted transforms being constants.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2.

    Example:
        >>> import torch
        >>> preds, target = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
        >>> rcl(preds, target, task="binary", train_on_test=True)
        tensor(9.0581)
    """
    raw, after = both_scores(preds, target, task, score, calibrator, options)
    return 100 * (1 - after / raw)


def score_function(score: object) -> ScoreFunction:
    """Return the function that a score is computed by, or raise."""
    if callable(score):
        return score
    if not isinstance(score, str) or score not in _SCORES:
        raise ValueError(f"`score` must be 'nll', 'brier' or a function of preds and target, got {score!r}.")
    return _SCORES[score]


def both_scores(
    preds: Tensor, target: Tensor, task: Task, score: Score, calibrator: Calibrator[Any], options: CalibrationOptions
) -> tuple[Tensor, Tensor]:
    """Score the predictions as they are, and calibrated; `(R, ...)` each if rows are weighed in R ways."""
    function = score_function(score)
    p, calibrate, n_fits = training(preds, target, task, calibrator, options)
    given: dict[str, Any] = {name: value for name, value in input_options(options).items() if value is not None}
    if p.replicates and "class_axis" in given:
        given["class_axis"] = class_axis_from_the_end(p, options)

    def scored(p: Predictions, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        raw = function(preds, target, task=task, **given)
        if p.task != task:  # a set of classes against the rest: calibrated predictions are binary
            after, labels = calibrate(p).to(p.dtype), p.target.long()
            labels = labels.expand(*after.shape[: after.dim() - labels.dim()], *labels.shape)
            given = {"from_logits": p.from_logits} | ({} if p.weights is None else {"weights": p.weights})
        else:
            after = as_given(p, calibrate(p), options)
            labels = target.expand(*after.shape[: after.dim() - preds.dim()], *target.shape)
        return raw, function(after, labels, task=p.task, **given)

    if not p.replicates:
        return scored(p, given)
    assert p.weights is not None
    at_once, n_axes = replicates_at_once(p.given.numel() * (n_fits + 1)), len(p.replicates)
    # The weights as they were given, for that is what a score takes, and as they were read.
    ways = [torch.split(w.flatten(0, n_axes - 1), at_once) for w in (given.pop("weights"), p.weights)]
    scores = [scored(p.weighed(read), {**given, "weights": raw}) for raw, read in zip(*ways, strict=True)]
    raw, after = (torch.cat(part).reshape(*p.replicates, *part[0].shape[1:]) for part in zip(*scores, strict=True))
    return raw, after
