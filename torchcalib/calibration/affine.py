"""Affine scaling of log-probabilities, softmax(alpha log q + beta): temperature scaling and DP calibration."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator, Transform, sample_weights
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import binary_log_probs, safe_log, wide_dtype
from torchcalib.ops.newton.fits import fit_dp, fit_temperature
from torchcalib.ops.newton.problem import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE, STOPPED

_REMARKS = {
    AT_ZERO: "the fitted scale is 0: no positive scale improves on predictions that ignore the input.",
    SEPARABLE: (
        "no finite scale is best: the labels can be separated without error, and the likelihood rises with the "
        "scale without bound. The predictions are left unchanged."
    ),
    STOPPED: "the fit stopped before its gradient was small. Check the scale of the predictions.",
    NO_DATA: "there are no samples of positive weight: the transform gives NaN.",
}


class AffineTransform(Transform):
    """softmax(alpha log q + beta).

    A probability of 0 stays 0, whatever alpha. A prediction that is certain of a class with beta -inf is unchanged.

    Attributes:
        alpha: scale `(...)`, the inverse of the temperature; see `AffineScaling` if no alpha is optimal.
        beta: bias of each class `(..., C)`, with sum 0; of the classes 0 and 1 for binary and multi-label predictions.
            -inf for a class without samples.
        outcome: end of the fit, int64 `(...)`, a code of `torchcalib.ops.newton`.
        lost: weight of the samples whose label has probability 0, `(...)`; the fit leaves them out.
    """

    initial: ClassVar = {"alpha": 1.0, "beta": [0.0, 0.0], "lost": 0.0, "outcome": CONVERGED}

    alpha: Tensor
    beta: Tensor
    outcome: Tensor
    lost: Tensor

    @property
    def temperature(self) -> Tensor:
        """1 / alpha `(...)`."""
        return 1 / self.alpha

    def calibrated(self, values: Tensor) -> Tensor:
        """Scale and shift log-probabilities."""
        if self.task != "multiclass":
            log_odds = values
            if not self.from_logits:
                log_p, log_not_p = binary_log_probs(values, from_logits=False)
                log_odds = log_p - log_not_p
            alpha, beta = self.alpha.to(log_odds), self.beta.to(log_odds)
            shifted = alpha[..., None] * log_odds + (beta[..., 1:] - beta[..., :1])
            log_odds = torch.where(log_odds.isinf(), log_odds, shifted)
            return log_odds if self.from_logits else log_odds.sigmoid()
        # Logits are log-probabilities up to a constant. A log-softmax would round small logits.
        log_q = values - values.detach().amax(-1, keepdim=True) if self.from_logits else safe_log(values)
        if log_q.shape[-1] != self.beta.shape[-1]:
            raise ValueError(
                f"`preds` must have {self.beta.shape[-1]} classes, as in the fit of the calibrator, got "
                f"{log_q.shape[-1]}. Set class_axis if the classes are on another axis."
            )
        alpha, beta = self.alpha.to(log_q)[..., None, None], self.beta.to(log_q)[..., None, :]
        z = (alpha * log_q).masked_fill(log_q == -torch.inf, -torch.inf) + beta
        z = torch.where((z == -torch.inf).all(-1, keepdim=True), log_q, z)
        return z.log_softmax(-1) if self.from_logits else z.softmax(-1)

    def remarks(self) -> list[str]:
        """See `Transform.remarks`."""
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
                "its calibrated probability is 0. Calibrate on samples of every class."
            )
        if bool((self.lost > 0).any()):
            found.append(
                f"`preds` gives probability 0 to the label of samples of total weight {float(self.lost.max()):g}: "
                "their NLL is infinite for every scale, and the fit leaves them out."
            )
        return found


class _Affine(Calibrator[AffineTransform]):
    in_log_odds = True

    with_bias: ClassVar[bool]

    def fit_to(self, p: Predictions, weights: Tensor | None = None) -> AffineTransform:
        """See `Calibrator.fit_to`."""
        with torch.no_grad():
            if p.task == "multiclass":
                scores, target = (p.values if p.from_logits else p.log_probs), p.target
            else:
                log_p, log_not_p = p.binary_log_probs
                log_odds = p.values.to(wide_dtype(p.values.device)) if p.from_logits else log_p - log_not_p
                scores, target = torch.stack(((-log_odds).clamp(max=0), log_odds.clamp(max=0)), -1), p.target.long()
            w = sample_weights(p, weights)
            batch, n, n_classes = w.shape[:-1], target.shape[-1], scores.shape[-1]
            n_series, n_weightings = target.shape[:-1].numel(), w.shape[: w.dim() - target.dim()].numel()
            solve = fit_dp if self.with_bias else fit_temperature
            fit = solve(
                scores.reshape(n_series, n, n_classes),
                target.reshape(n_series, n),
                w.reshape(n_weightings, n_series, n),
            )
        outcome = fit.outcome.reshape(batch)
        return AffineTransform.of(
            p,
            alpha=fit.alpha.reshape(batch),
            beta=fit.beta.reshape(*batch, n_classes),
            grad_norm=fit.grad_norm.reshape(batch),
            outcome=outcome,
            lost=fit.lost.reshape(batch),
            converged=(outcome == CONVERGED) | (outcome == AT_ZERO),
        )


@dataclass(frozen=True)
class TemperatureScaling(_Affine):
    """Temperature scaling: softmax(alpha log q) with the alpha > 0 that minimises the NLL.

    Fitted in float64 by a bracketed Newton search to a gradient norm below 1e-9, for logits of any scale. It cannot
    shift probability from one class to another. See `AffineScaling` if no alpha is optimal.

    Source:
        Guo et al.: On Calibration of Modern Neural Networks (ICML 2017); [EPSR] Ferrer, Ramos: Evaluating Posterior
        Probabilities (TMLR), sec. 2.4.2, with beta = 0.

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.01, 0.8, 0.05])
        >>> transform = TemperatureScaling().fit(preds, torch.tensor([1, 0, 0, 1, 0]), task="binary")
        >>> transform(preds)
        tensor([0.6317, 0.7555, 0.2445, 0.5843, 0.3268])
    """

    name = "temperature scaling"
    with_bias = False


@dataclass(frozen=True)
class AffineScaling(_Affine):
    """DP calibration: softmax(alpha log q + beta) with the alpha > 0 and the beta that minimise the NLL.

    It is affine scaling of the logits with one scale for all classes, hence direction-preserving (DP). Fitted in
    float64 by a damped Newton search to a gradient norm below 1e-9, for logits of any scale.

    - **Separable**: if some (alpha, beta) makes every label the most probable class, the likelihood rises with alpha
      without bound. The transform then leaves predictions unchanged (alpha 1, beta 0), and `converged` is False.
    - **No positive alpha is optimal**: alpha is 0, and predictions become the class frequencies (under
      `TemperatureScaling` uniform). This is the optimum, and `converged` is True.
    - **A class without samples** has beta = -inf, where the likelihood is largest: probability 0.
    - **Infinite NLL**: a sample whose label has probability 0 has an infinite NLL for every alpha > 0. The fit leaves
      such samples out; `lost` is their weight.
    - **No data**: NaN.

    `fit` warns in each of these cases.

    Source:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2 and 2.5.3.

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6])
        >>> transform = AffineScaling().fit(preds, torch.tensor([1, 1, 0, 0, 1]), task="binary")
        >>> transform(preds).mean()
        tensor(0.6000)
    """

    name = "DP calibration"
    with_bias = True
