"""Calibration loss, relative calibration loss, expected score and expected score divergence."""

from collections.abc import Callable, Mapping, Sequence
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
from torchcalib.core.arguments import InputOptions, Task
from torchcalib.core.checks import read_priors
from torchcalib.core.inputs import read_input
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.core.sums import weighted
from torchcalib.core.tasks import infers_task
from torchcalib.functional.proper_scores import brier_score, nll
from torchcalib.io.errors import shown
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


@infers_task
def expected_score(
    preds: Tensor,
    target: Tensor,
    task: Task | None = None,
    *,
    score: Score = "nll",
    reference: Calibrator | None = None,
    priors: Tensor | Sequence[float] | None = None,
    normalize: Literal["prior"] | None = None,
    **options: Unpack[CalibrationOptions],
) -> Tensor:
    """Expected score of the predictions under a reference distribution of the classes.

    The score of a prediction depends on the class, whose distribution is not known. A reference distribution replaces
    it: sample i has class k with probability t_ik. The value is the mean over samples of sum_k t_ik score(q_i, k).

    | reference distribution | arguments |
    |---|---|
    | empirical | `target`: labels |
    | true posteriors, or proportions of annotators | `target`: soft targets, or counts |
    | semi-empirical: posteriors of a calibrator | `reference=AffineScaling()`, with labels as `target` |
    | with other class priors | also `priors` |

    The empirical reference needs no model of the posteriors. A semi-empirical one varies less, but is wrong where the
    calibrator is. A large difference between the two shows this. For the NLL and affine scaling that is fitted to the
    same data they are equal.

    Args:
        preds: Probabilities or logits: binary `(...)`, otherwise with a class axis.
        target: Labels, soft targets or counts; see `torchcalib.functional.nll`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`. `num_classes` or `num_labels` implies it.
        score: `"nll"`, `"brier"`, or a function as for `calibration_loss`. A function must be a weighted mean over
            samples with the option `weights`, such as `partial(bayes_risk, cost=...)`. It is called for each class.
        reference: Calibrator whose posteriors are the reference, by default cross-validated; see
            `cross_val_calibrate`. None uses `target`.
        priors: Class priors `(C,)` that replace the mean of the reference. Samples are weighted by the ratio of the
            priors, so that the distribution of predictions within a class does not change.
        normalize: `"prior"` divides by the expected score of a model that always predicts the class priors: the mean of
            the reference, or `priors`.
        **options: Options of the folds and held-out data for a calibrator, and options of the input; see
            `cross_val_calibrate`.

    Returns:
        Value `(...)`, in the dtype of `preds` (at least float32). NaN without data.

    Raises:
        TypeError, ValueError: for invalid input.

    Warns:
        UserWarning: see `calibration_loss`.

    Gradient:
        With respect to `preds`; the reference distribution is constant.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 3.4 and Table 1; semi-empirical reference
        eq. 24-26; priors app. A, eq. 36-37.

    Example:
        >>> preds, target = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
        >>> expected_score(preds, target, task="binary")
        tensor(0.5185)
        >>> expected_score(preds, target, task="binary", reference=DEFAULT, train_on_test=True)
        tensor(0.5185)
        >>> expected_score(preds, torch.tensor([0.9, 0.9, 0.3, 0.7, 0.6]), task="binary", normalize="prior")
        tensor(0.8670)
    """
    score_function(score)
    if normalize not in (None, "prior"):
        raise ValueError(f"`normalize` must be None or 'prior', got {shown(normalize)}. Omit it for the mean score.")

    def expected(p: Predictions, q: Tensor) -> Tensor:
        if priors is None and normalize is None:
            return _expected(score, p, q.detach()).to(p.dtype)
        function = score_function(score)
        scores, shares = _by_class(function, p, q.detach())
        if priors is not None:
            shares = read_priors(priors, p.num_classes).to(shares).expand_as(shares)
        value = _combined(scores, shares)
        if normalize is not None:  # by the expected score of the constant prediction of the class priors
            constant = shares.unsqueeze(-2) if p.task == "multiclass" else shares[..., 1:]
            of_constant = [_of_class(function, constant, k, p.task) for k in range(shares.shape[-1])]
            value = value / _combined(torch.stack(of_constant, -1), shares)
        return _mean_of_labels(p, value).to(p.dtype)

    preds, target, task, options = flat_input(preds, target, task, options)
    if reference is not None:
        fitting = fitted(preds, target, task, reference, options)
        return fitting.by_replicates(lambda p, values: expected(p, _calibrated(p, values)[1]))
    if given := [name for name in options if name not in InputOptions.__annotations__]:
        raise ValueError(f"`{given[0]}` must be left out without a calibrator, got it. Pass reference=AffineScaling().")
    p = read_input(task, preds, target, input_options(options))
    if p.task == "multiclass":
        q = p.target if p.soft else p.target.unsqueeze(-1) == torch.arange(p.num_classes, device=p.target.device)
    else:
        q = torch.stack((1 - p.target, p.target), -1)
    q = q.to(wide_dtype(q.device))
    return by_replicates(lambda p: expected(p, q), p, q.numel())


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
            samples with the option `weights`. It is called twice for each class.
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
    score_function(score)

    def divergence(p: Predictions, values: Tensor) -> Tensor:
        after, q = _calibrated(p, values)
        if score == "brier":
            gap = _mean(p, _with_target(p, q).squared_error)
            return torch.stack((gap, gap + _mean(p, _variance(p, q))), -1)
        whole, own = (_expected(score, predictions, q) for predictions in (p, after))
        return torch.stack((whole - own, whole), -1)

    preds, target, task, options = flat_input(preds, target, task, options)
    fitting = fitted(preds, target, task, calibrator, options)
    return ScoreDivergence(*fitting.by_replicates(divergence).unbind(-1))


def _calibrated(p: Predictions, values: Tensor) -> tuple[Predictions, Tensor]:
    """Return the predictions with calibrated values, which may have leading axes of replicates.

    Also return their class distributions `(..., N, C)`; P(y=0) and P(y=1) for binary and multi-label tasks.
    """
    after = p.with_values(values.to(p.values.dtype))
    replicates = after.input_preds.shape[: after.input_preds.dim() - p.input_preds.dim()]
    after = replace(after, input_target=p.input_target.expand(*replicates, *p.input_target.shape))
    return after, after.probs if p.task == "multiclass" else torch.stack((after.not_probs, after.probs), -1)


def _with_target(p: Predictions, q: Tensor) -> Predictions:
    """Return the predictions with class distributions as soft targets, which give the expectation over classes."""
    return replace(p, input_target=q if p.task == "multiclass" else q[..., 1], has_labels=False)


def _expected(score: Score, p: Predictions, q: Tensor) -> Tensor:
    """Return the mean expected score `(...)` under class distributions q `(..., N, C)`."""
    if callable(score):
        return _mean_of_labels(p, _combined(*_by_class(score, p, q)))
    if score == "nll":
        return _mean(p, _with_target(p, q).cross_entropy)
    return _mean(p, _with_target(p, q).squared_error + _variance(p, q))


def _variance(p: Predictions, q: Tensor) -> Tensor:
    """Return the Brier score of the distributions q under themselves, `(..., N)`."""
    variance = (q * (1 - q)).sum(-1)
    return variance if p.task == "multiclass" else variance / 2


def _mean_of_labels(p: Predictions, values: Tensor) -> Tensor:
    return values.mean(-1) if p.task == "multilabel" else values


def _combined(scores: Tensor, shares: Tensor) -> Tensor:
    return torch.where(shares == 0, 0, shares * scores).sum(-1)


def _batch_dims(values: Tensor, task: Task) -> dict[str, int]:
    """Return the option `batch_dims` for flat predictions, or no option without leading axes."""
    axes = values.dim() - 1 - (task != "binary")
    return {"batch_dims": axes} if axes else {}


def _mean(p: Predictions, per_sample: Tensor) -> Tensor:
    """Return the weighted mean over samples and labels, `(...)`."""
    wide = wide_dtype(per_sample.device)
    mean = weighted(per_sample, p.weights, wide).sum(-1)
    mean = mean / weighted(torch.ones_like(per_sample), p.weights, wide).sum(-1)
    return _mean_of_labels(p, mean)


def _by_class(function: ScoreFunction, p: Predictions, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean score of each class and its share, each `(..., C)`, for class distributions q `(..., N, C)`.

    Each class in turn is the target of all samples, with its probabilities as weights.
    """
    w = sample_weights(p)
    scores, shares = [], []
    for k in range(q.shape[-1]):
        of_class = (w * q[..., k]).masked_fill(w == 0, 0)
        # Products with smaller weights could underflow.
        of_class = of_class.masked_fill(of_class < 1e-150, 0).detach()
        scores.append(_of_class(function, p.values, k, p.task, from_logits=p.from_logits, weights=of_class))
        shares.append(of_class.sum(-1) / w.sum(-1))
    return torch.stack(scores, -1), torch.stack(shares, -1)


def _of_class(function: ScoreFunction, values: Tensor, k: int, task: Task, **options: Any) -> Tensor:
    """Return the score `(...)` of predictions with class k as the target; labels of a multi-label task are a batch."""
    task = "multiclass" if task == "multiclass" else "binary"
    samples = values.shape[:-1] if task == "multiclass" else values.shape
    target = torch.full(samples, k, dtype=torch.int64, device=values.device)
    return function(values, target, task=task, **options, **_batch_dims(values, task))
