"""Expected score divergence, and the semi-empirical score."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator, series_weights
from torchcalib.calibration.cross_validation import DEFAULT, CalibrationOptions, training
from torchcalib.calibration.gain import Score, ScoreFunction, score_function
from torchcalib.core.arguments import Task
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.core.sums import weighted
from torchcalib.ops.logs import wide_dtype


class ScoreDivergence(NamedTuple):
    """A score in the eyes of calibrated predictions, which take the place of the unknown distribution of the classes.

    Attributes:
        divergence: mean expected score of the predictions less that of the calibrated ones `(...)`, >= 0 for a proper
            score: KL divergence for the NLL, squared distance for the Brier score.
        semi_empirical: mean expected score of the predictions `(...)`.
    """

    divergence: Tensor
    semi_empirical: Tensor


def score_divergence(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    score: Score = "nll",
    calibrator: Calibrator[Any] = DEFAULT,
    **options: Unpack[CalibrationOptions],
) -> ScoreDivergence:
    """Expected score divergence between calibrated and raw predictions, and the semi-empirical score.

    Classes are drawn, in expectation, from the calibrated predictions; only the samples are data. If the calibrated
    predictions are as good as they can be, the semi-empirical score agrees with the score on the labels, and the
    divergence with the calibration loss. Where they differ, the calibrator has not found what is there to find.

    Args:
        preds: see `calibration_loss`.
        target: see `calibration_loss`.
        task: see `calibration_loss`.
        score: see `calibration_loss`. A function must be a mean over samples that takes `weights`; it is called twice
            for every class. Not for multi-label input.
        calibrator: see `calibration_loss`.
        **options: see `calibration_loss`.

    Returns:
        A `ScoreDivergence` of `(...)` (means over labels), float64 for `"nll"` and `"brier"`.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Warns:
        UserWarning: see `calibration_loss`.

    Gradient:
        In `preds`, the fitted transforms being constants.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), eq. 24-26.

    Example:
        >>> preds, target = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
        >>> score_divergence(preds, target, task="binary", train_on_test=True).divergence
        tensor(0.0470, dtype=torch.float64)
    """
    function = score_function(score)
    p, calibrate, n_fits = training(preds, target, task, calibrator, options)

    def divergence(p: Predictions) -> Tensor:
        after = p.with_values(calibrate(p).to(p.values.dtype))
        found = _divergence_by_class(function, p, after) if callable(score) else _divergence(score, p, after)
        return torch.stack(found, -1)

    return ScoreDivergence(*by_replicates(divergence, p, p.given.numel() * (n_fits + 1)).unbind(-1))


def _divergence(score: Literal["nll", "brier"], p: Predictions, after: Predictions) -> ScoreDivergence:
    q = after.probs
    seen = replace(p, given_target=q, hard=False)
    if score == "nll":
        own = _mean(p, 0 - after.neg_entropy)
        whole = _mean(p, seen.cross_entropy)
        return ScoreDivergence(whole - own, whole)
    variance = q * (1 - q)
    own = _mean(p, variance.sum(-1) if p.task == "multiclass" else variance)
    apart = _mean(p, seen.squared_error)
    return ScoreDivergence(apart, apart + own)


def _mean(p: Predictions, per_sample: Tensor) -> Tensor:
    """Return the mean over samples, and over labels."""
    wide = wide_dtype(per_sample.device)
    mean = weighted(per_sample, p.weights, wide).sum(-1)
    mean = mean / weighted(torch.ones_like(per_sample), p.weights, wide).sum(-1)
    return mean.mean(-1) if p.task == "multilabel" else mean


def _divergence_by_class(function: ScoreFunction, p: Predictions, after: Predictions) -> ScoreDivergence:
    """Take the expectation over classes by weighing every sample with its probability of each class."""
    if p.task == "multilabel":
        raise ValueError(
            "`score` must be 'nll' or 'brier' for task='multilabel', got a function. Take a label at a time."
        )
    w = series_weights(p, None)
    q = after.probs if p.task == "multiclass" else torch.stack((after.not_probs, after.probs), -1)
    total = w.sum(-1)
    raw = own = torch.zeros_like(total)
    for k in range(q.shape[-1]):
        of_class = (w * q[..., k]).masked_fill(w == 0, 0)
        # Weights below what a score accepts are none at all.
        of_class = of_class.masked_fill(of_class < 1e-150, 0).detach()
        share = of_class.sum(-1) / total
        given: dict[str, Any] = {"task": p.task, "from_logits": p.from_logits, "weights": of_class}
        for which, preds in (("raw", p.values), ("own", after.values)):
            samples = preds.shape[:-1] if p.task == "multiclass" else preds.shape
            target = torch.full(samples, k, dtype=torch.int64, device=w.device)
            value = torch.where(share == 0, 0, share * function(preds, target, **given))
            raw, own = (raw + value, own) if which == "raw" else (raw, own + value)
    return ScoreDivergence(raw - own, raw)
