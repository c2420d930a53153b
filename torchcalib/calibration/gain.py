"""Calibration loss, relative calibration loss, and expected score divergence."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.calibration.cross_validation import (
    DEFAULT,
    CalibrationOptions,
    as_given,
    fitted,
    flat_input,
    input_options,
)
from torchcalib.core.arguments import Task
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import weighted
from torchcalib.core.tasks import infers_task
from torchcalib.io.errors import shown
from torchcalib.metrics.proper_scores import brier_score, nll
from torchcalib.ops.logs import wide_dtype

ScoreFunction = Callable[..., Tensor]
Score = Literal["nll", "brier"] | ScoreFunction
_SCORES: Mapping[str, ScoreFunction] = {"nll": nll, "brier": brier_score}


@infers_task
def calibration_loss(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    score: Score = "nll",
    calibrator: Calibrator = DEFAULT,
    **options: Unpack[CalibrationOptions],
) -> Tensor:
    """Calibration loss: score of the predictions minus score of the calibrated predictions.

    It estimates how much a calibration stage improves the score of new data, in the unit of the score. It is negative
    if calibration is harmful. For calibrated predictions it is slightly negative on average.

    Args:
        preds: Probabilities or logits: binary `(...)`, otherwise with a class axis.
        target: Labels; see `torchcalib.functional.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it.
        score: `"nll"` (negative log-likelihood), `"brier"`, or a function `score(preds, target, task=..., **options)`
            that is smaller for better predictions. For the Bayes risk pass `partial(bayes_risk, cost=...)`. Calibrators
            always minimise the NLL.
        calibrator: Calibration method; see `torchcalib.calibration`. By default it is cross-validated: each sample is
            calibrated with a fit to the other folds.
        **options: Options of the folds, held-out data and options of the input; see `cross_val_calibrate`.

    Returns:
        Loss `(...)`, in the dtype of `preds` (at least float32). -inf if only the calibrated score is infinite.

    Raises:
        TypeError, ValueError: for invalid input.

    Warns:
        UserWarning: a fit did not reach its optimum, or has no optimum and leaves predictions unchanged. The true gain
            may be larger. Fits to replicates do not warn.

    Gradient:
        With respect to `preds`; the fitted parameters are constants.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2.

    Example:
        >>> preds, target = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
        >>> calibration_loss(preds, target, task="binary", train_on_test=True)
        tensor(0.0470)
        >>> from functools import partial
        >>> from torchcalib.functional import bayes_risk
        >>> costly = partial(bayes_risk, cost=[[0, 1], [2, 0]])
        >>> calibration_loss(1 - preds, target, task="binary", score=costly, train_on_test=True)
        tensor(0.6000)
    """
    raw, after = both_scores(preds, target, task, score, calibrator, options)
    return raw - after


@infers_task
def relative_calibration_loss(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    score: Score = "nll",
    calibrator: Calibrator = DEFAULT,
    **options: Unpack[CalibrationOptions],
) -> Tensor:
    """Relative calibration loss (RCL) in percent: 100 (raw score - calibrated score) / raw score.

    It is the percentage of the raw score that a calibration stage removes, at most 100; see `calibration_loss`.

    Args:
        preds: Probabilities or logits: binary `(...)`, otherwise with a class axis.
        target: Labels; see `torchcalib.functional.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it.
        score: Score; see `calibration_loss`.
        calibrator: Calibration method; see `torchcalib.calibration`. By default it is cross-validated: each sample is
            calibrated with a fit to the other folds.
        **options: Options of the folds, held-out data and options of the input; see `cross_val_calibrate`.

    Returns:
        Loss `(...)`, in the dtype of `preds` (at least float32). 100 if only the raw score is infinite, -inf if only
        the calibrated score is infinite. NaN if both are infinite.

    Raises:
        TypeError, ValueError: for invalid input.

    Warns:
        UserWarning: see `calibration_loss`.

    Gradient:
        With respect to `preds`; the fitted parameters are constants.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2.

    Example:
        >>> preds, target = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
        >>> relative_calibration_loss(preds, target, task="binary", train_on_test=True)
        tensor(9.0581)
    """
    raw, after = both_scores(preds, target, task, score, calibrator, options)
    return 100 * (1 - after / raw)


def score_function(score: object) -> ScoreFunction:
    """Return the function for a score; raise ValueError for an unknown score."""
    if callable(score):
        return score
    if not isinstance(score, str) or score not in _SCORES:
        raise ValueError(f"`score` must be 'nll', 'brier' or a function of preds and target, got {shown(score)}.")
    return _SCORES[score]


def both_scores(
    preds: Tensor,
    target: Tensor,
    task: Task | None,
    score: Score,
    calibrator: Calibrator,
    options: CalibrationOptions,
) -> tuple[Tensor, Tensor]:
    """Return the scores of the raw and the calibrated predictions, `(...)`, or `(R, ...)` with R replicates."""
    function = score_function(score)
    preds, target, task, options = flat_input(preds, target, task, options)
    fitting = fitted(preds, target, task, calibrator, options)
    given: dict[str, Any] = {name: value for name, value in input_options(options).items() if value is not None}

    def calibrated_score(p: Predictions, values: Tensor) -> Tensor:
        labels, how = target, dict(given)
        replicates = values.shape[: values.dim() - p.values.dim()]
        if p.task != task:  # with `positive_classes`, calibrated predictions are binary
            values, labels = values.to(p.dtype), p.target.long()
            how = {"from_logits": p.from_logits} | ({} if p.weights is None else {"weights": sample_weights(p)})
        else:
            values = as_given(p, values, options)
            if p.replicates:
                # An ignored label has weight 0. The largest weight of the labels is therefore the weight of the sample.
                how["weights"] = sample_weights(p).amax(-2) if p.task == "multilabel" else sample_weights(p)
        how |= _batch_dims(values, p.task)
        return function(values, labels.expand(*replicates, *labels.shape), task=p.task, **how)

    raw = function(preds, target, task=task, **given)
    return raw, fitting.by_replicates(calibrated_score)


class ScoreDivergence(NamedTuple):
    """Expected scores under the calibrated predictions, which replace the unknown class distributions.

    Attributes:
        divergence: mean expected score of the predictions minus mean expected score of the calibrated predictions,
            `(...)`. At least 0 for a proper score: the Kullback-Leibler divergence for the negative log-likelihood, the
            squared distance for the Brier score.
        semi_empirical: mean expected score of the predictions, `(...)`.
    """

    divergence: Tensor
    semi_empirical: Tensor


@infers_task
def score_divergence(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    score: Score = "nll",
    calibrator: Calibrator = DEFAULT,
    **options: Unpack[CalibrationOptions],
) -> ScoreDivergence:
    """Expected score divergence between calibrated and raw predictions, and the semi-empirical score.

    The expectation is over classes with the calibrated predictions as their distribution. The mean is over samples.
    For a perfect calibrator, the semi-empirical score equals the expected score on the labels. The divergence then
    equals the calibration loss. A difference between these two shows that miscalibration remains after calibration.

    Args:
        preds: Probabilities or logits: binary `(...)`, otherwise with a class axis.
        target: Labels; see `torchcalib.functional.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it.
        score: `"nll"`, `"brier"`, or a function as for `calibration_loss`. A function must be a weighted mean over
            samples with the option `weights`. It is called twice for each class. Multi-label input is not supported.
        calibrator: Calibration method; see `torchcalib.calibration`. By default it is cross-validated: each sample is
            calibrated with a fit to the other folds.
        **options: Options of the folds, held-out data and options of the input; see `cross_val_calibrate`.

    Returns:
        A `ScoreDivergence` with tensors `(...)`, float64 for `"nll"` and `"brier"`. Multi-label: means over labels.

    Raises:
        TypeError, ValueError: for invalid input.

    Warns:
        UserWarning: see `calibration_loss`.

    Gradient:
        With respect to `preds`; the fitted parameters are constants.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), eq. 24-26.

    Example:
        >>> preds, target = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
        >>> score_divergence(preds, target, task="binary", train_on_test=True).divergence
        tensor(0.0470, dtype=torch.float64)
    """
    function = score_function(score)

    def divergence(p: Predictions, values: Tensor) -> Tensor:
        after = p.with_values(values.to(p.values.dtype))
        replicates = after.input_preds.shape[: after.input_preds.dim() - p.input_preds.dim()]
        after = replace(after, input_target=p.input_target.expand(*replicates, *p.input_target.shape))
        found = _divergence_by_class(function, p, after) if callable(score) else _divergence(score, p, after)
        return torch.stack(found, -1)

    preds, target, task, options = flat_input(preds, target, task, options)
    fitting = fitted(preds, target, task, calibrator, options)
    return ScoreDivergence(*fitting.by_replicates(divergence).unbind(-1))


def _divergence(score: Literal["nll", "brier"], p: Predictions, after: Predictions) -> ScoreDivergence:
    q = after.probs
    drawn = replace(p, input_target=q, has_labels=False)  # soft targets give the expectation over classes
    if score == "nll":
        own = _mean(p, 0 - after.neg_entropy)
        whole = _mean(p, drawn.cross_entropy)
        return ScoreDivergence(whole - own, whole)
    variance = q * (1 - q)
    own = _mean(p, variance.sum(-1) if p.task == "multiclass" else variance)
    divergence = _mean(p, drawn.squared_error)
    return ScoreDivergence(divergence, divergence + own)


def _batch_dims(values: Tensor, task: Task) -> dict[str, int]:
    """Return the option `batch_dims` for flat predictions, or no option without leading axes."""
    axes = values.dim() - 1 - (task != "binary")
    return {"batch_dims": axes} if axes else {}


def _mean(p: Predictions, per_sample: Tensor) -> Tensor:
    """Return the weighted mean over samples and labels, `(...)`."""
    wide = wide_dtype(per_sample.device)
    mean = weighted(per_sample, p.weights, wide).sum(-1)
    mean = mean / weighted(torch.ones_like(per_sample), p.weights, wide).sum(-1)
    return mean.mean(-1) if p.task == "multilabel" else mean


def _divergence_by_class(function: ScoreFunction, p: Predictions, after: Predictions) -> ScoreDivergence:
    """Return the `ScoreDivergence` for a score function, with fields `(...)`.

    Each class in turn is the target of all samples, with its calibrated probabilities as weights.
    """
    if p.task == "multilabel":
        raise ValueError(
            "`score` must be 'nll' or 'brier' for task='multilabel', got a function. Call it for one label at a time."
        )
    w = sample_weights(p)
    q = after.probs if p.task == "multiclass" else torch.stack((after.not_probs, after.probs), -1)
    total = w.sum(-1)
    raw = own = torch.zeros_like(total)
    for k in range(q.shape[-1]):
        of_class = (w * q[..., k]).masked_fill(w == 0, 0)
        # Products with smaller weights could underflow.
        of_class = of_class.masked_fill(of_class < 1e-150, 0).detach()
        share = of_class.sum(-1) / total
        given: dict[str, Any] = {"task": p.task, "from_logits": p.from_logits, "weights": of_class}
        for which, preds in (("raw", p.values), ("own", after.values)):
            samples = preds.shape[:-1] if p.task == "multiclass" else preds.shape
            target = torch.full(samples, k, dtype=torch.int64, device=w.device)
            score = function(preds, target, **given, **_batch_dims(preds, p.task))
            value = torch.where(share == 0, 0, share * score)
            raw, own = (raw + value, own) if which == "raw" else (raw, own + value)
    return ScoreDivergence(raw - own, raw)
