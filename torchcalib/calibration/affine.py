"""Temperature scaling and DP calibration: softmax(alpha log q + beta)."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator, Transform, series_weights
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import binary_log_probs, safe_log, wide_dtype
from torchcalib.ops.newton.fits import AffineFit, fit_dp, fit_temperature
from torchcalib.ops.newton.problem import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE, STOPPED

_REMARKS = {
    AT_ZERO: "the fitted scale is 0: no positive scale improves on predictions that ignore the input.",
    SEPARABLE: (
        "no finite scale is best: the labels can be separated without error, and the likelihood rises with the scale "
        "for ever. The predictions are left as they are."
    ),
    STOPPED: "the fit stopped before its gradient was small. Are the predictions of a usual size?",
    NO_DATA: "there are no samples of positive weight: the transform gives NaN.",
}


class AffineTransform(Transform):
    """softmax(alpha log q + beta).

    Attributes:
        alpha: scale `(...)`: the inverse of the temperature; see `DPCalibration` for what it is where there is no best.
        beta: bias of each class `(..., C)`, of sum 0; of the classes 0 and 1 where a sample has one value. -inf for a
            class that had no samples.
        outcome: how the fit ended, int64 `(...)`, a code of `torchcalib.ops.newton`.
        lost: weight of the samples that were given probability 0 for their label, `(...)`; the fit is to the others.

    A probability of 0 stays 0, whatever alpha. A prediction that is certain of a class whose beta is -inf is left as
    it is.
    """

    alpha: Tensor
    beta: Tensor
    outcome: Tensor
    lost: Tensor

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        for name, value in (("alpha", 1.0), ("beta", [0.0, 0.0]), ("lost", 0.0)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))
        self.register_buffer("outcome", torch.tensor(CONVERGED))

    @property
    def temperature(self) -> Tensor:
        """1 / alpha `(...)`."""
        return 1 / self.alpha

    def calibrated(self, values: Tensor) -> Tensor:
        """Scale and shift log-probabilities."""
        if self.task != "multiclass":
            log_odds = _log_odds(values, self.from_logits)
            alpha, beta = self.alpha.to(log_odds), self.beta.to(log_odds)
            shifted = alpha[..., None] * log_odds + (beta[..., 1:] - beta[..., :1])
            log_odds = torch.where(log_odds.isinf(), log_odds, shifted)
            return log_odds if self.from_logits else log_odds.sigmoid()
        # Logits are log-probabilities but for a constant; small ones would lose digits to the log of a sum.
        log_q = values - values.detach().amax(-1, keepdim=True) if self.from_logits else safe_log(values)
        if log_q.shape[-1] != self.beta.shape[-1]:
            raise ValueError(
                f"`preds` must have {self.beta.shape[-1]} classes, as those the calibrator was fitted to, got "
                f"{log_q.shape[-1]}. Set class_axis if the classes are on another axis."
            )
        alpha, beta = self.alpha.to(log_q)[..., None, None], self.beta.to(log_q)[..., None, :]
        z = (alpha * log_q).masked_fill(log_q == -torch.inf, -torch.inf) + beta
        z = torch.where((z == -torch.inf).all(-1, keepdim=True), log_q, z)
        return z.log_softmax(-1) if self.from_logits else z.softmax(-1)

    def remarks(self) -> list[str]:
        """Return what there is to say against the fit."""
        n_fits = self.outcome.numel()
        found = [
            f"`alpha` of {int((self.outcome == code).sum())} of {n_fits} fits: {words}" if n_fits > 1 else words
            for code, words in _REMARKS.items()
            if bool((self.outcome == code).any())
        ]
        absent = (self.beta == -torch.inf).any(tuple(range(self.beta.dim() - 1))).nonzero().flatten().tolist()
        if absent:
            found.append(
                f"`target` has no samples of class {', '.join(map(str, absent[:8]))}{', ...' if absent[8:] else ''}: "
                "calibrated predictions give it probability 0. Calibrate on samples of every class."
            )
        if bool((self.lost > 0).any()):
            found.append(
                f"`preds` gives probability 0 to the label of samples of total weight {float(self.lost.max()):g}: "
                "their NLL is infinite whatever the scale, and the fit is to the others."
            )
        return found


def _log_odds(values: Tensor, from_logits: bool) -> Tensor:
    if from_logits:
        return values
    log_p, log_not_p = binary_log_probs(values, from_logits=False)
    return log_p - log_not_p


class _Affine(Calibrator[AffineTransform]):
    in_log_odds = True

    @abstractmethod
    def _solve(self, scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit: ...

    def fit_to(self, p: Predictions, weights: Tensor | None = None) -> AffineTransform:
        """Fit to what has been read; see `Calibrator.fit_to`."""
        with torch.no_grad():
            if p.task == "multiclass":
                scores, target = (p.values if p.from_logits else p.log_probs), p.target
            else:
                log_p, log_not_p = p.binary_log_probs
                log_odds = p.values.to(wide_dtype(p.values.device)) if p.from_logits else log_p - log_not_p
                scores, target = torch.stack(((-log_odds).clamp(max=0), log_odds.clamp(max=0)), -1), p.target.long()
            w = series_weights(p, weights)
            batch, samples, n_classes = w.shape[:-1], target.shape, scores.shape[-1]
            n_series, n_weightings = samples[:-1].numel(), w.shape[: w.dim() - target.dim()].numel()
            fit = self._solve(
                scores.reshape(n_series, samples[-1], n_classes),
                target.reshape(n_series, samples[-1]),
                w.reshape(n_weightings, n_series, samples[-1]),
            )
        transform = AffineTransform(p.task, from_logits=p.from_logits)
        transform.alpha, transform.beta = fit.alpha.reshape(batch), fit.beta.reshape(*batch, n_classes)
        transform.grad_norm, transform.outcome = fit.grad_norm.reshape(batch), fit.outcome.reshape(batch)
        transform.lost = fit.lost.reshape(batch)
        transform.converged = (transform.outcome == CONVERGED) | (transform.outcome == AT_ZERO)
        return transform


@dataclass(frozen=True)
class Temperature(_Affine):
    """Temperature scaling: softmax(alpha log q) with the alpha > 0 of the smallest NLL.

    Fitted in float64 by a bracketed Newton search to a gradient norm below 1e-9, from any start and for any size of
    logits. It cannot shift probability from one class to another; see `DPCalibration` for where there is no best alpha.

    Source:
        Guo et al.: On Calibration of Modern Neural Networks (ICML 2017); [EPSR] Ferrer, Ramos: Evaluating Posterior
        Probabilities (TMLR), sec. 2.4.2, with beta = 0.

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.01, 0.8, 0.05])
        >>> transform = Temperature().fit(preds, torch.tensor([1, 0, 0, 1, 0]), task="binary")
        >>> transform(preds)
        tensor([0.6317, 0.7555, 0.2445, 0.5843, 0.3268])
    """

    def _solve(self, scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
        return fit_temperature(scores, target, weights)


@dataclass(frozen=True)
class DPCalibration(_Affine):
    """DP calibration: softmax(alpha log q + beta) with the alpha > 0 and beta of the smallest NLL.

    Named for direction-preserving: the scale is one for all classes. Fitted in float64 by a damped Newton search to a
    gradient norm below 1e-9, from any start and for any size of logits.

    - **Separable**: if some (alpha, beta) makes every label the likeliest class, the likelihood rises with alpha for
      ever. The transform then leaves predictions as they are (alpha 1, beta 0), and `converged` is False.
    - **No positive alpha is best**: alpha is 0, predictions become the class shares (under `Temperature` uniform).
      That is the optimum, and `converged` is True.
    - **A class without samples** gets beta = -inf, which is where the likelihood is largest: probability 0.
    - **Infinite NLL**: samples whose label was given probability 0 keep an infinite NLL under every alpha > 0. The fit
      is to the others; `lost` is their weight.
    - **No data**: NaN.

    `fit` warns of each of these.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2 and 2.5.3.

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6])
        >>> transform = DPCalibration().fit(preds, torch.tensor([1, 1, 0, 0, 1]), task="binary")
        >>> transform(preds).mean()
        tensor(0.6000)
    """

    def _solve(self, scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
        return fit_dp(scores, target, weights)
