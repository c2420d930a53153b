"""Ensemble temperature scaling: a mixture of temperature scaling, the predictions, and the uniform distribution."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.calibration.affine import TemperatureScaling
from torchcalib.calibration.calibrator import format_values, sample_weights
from torchcalib.calibration.likelihood import temperature_in_words
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import safe_log, wide_dtype
from torchcalib.ops.newton import NO_DATA
from torchcalib.ops.newton.mixture import fit_mixture
from torchcalib.ops.newton.scores import PIECE

_SMALLEST = -1e30  # replaces log 0, because differences of infinite values would be NaN


class EnsembleTemperatureScaling(TemperatureScaling):
    """Ensemble temperature scaling: w_1 softmax(logits / T) + w_2 softmax(logits) + w_3 / C for C classes.

    The temperature T minimises the negative log-likelihood (NLL) of softmax(logits / T) first, as in
    `TemperatureScaling`. The weights are at least 0 with sum 1, and minimise the NLL of the mixture. This is a convex
    problem, solved in float64 to a violation of the optimality conditions below 1e-9. For probabilities q, logits are
    log q. Each label of a multi-label task is a problem with C = 2. The order of the classes of a sample is unchanged.
    If w_3 > 0, every class has at least the probability w_3 / C, which bounds the NLL. Special cases:

    - **Separable data, no positive 1 / T optimal**: the temperature is fitted as in `TemperatureScaling`, with the same
      warnings. If two components are equal, only the first one gets weight.
    - **Infinite NLL**: the fit of T leaves out samples whose label has probability 0, but the fit of the weights does
      not. The weight w_3 is then positive.
    - **Classes without samples** have no special role.
    - **No data**: calibrated predictions are NaN.

    Attributes:
        weights: w_1, w_2 and w_3, of the batch shape of the fit `(..., 3)`.
        temperature: T = 1 / alpha, `(...)`.
        alpha: scale of the logits in the first component `(...)`.
        grad_norm: norm of the violation of the optimality conditions of the weights and of the gradient in alpha.
        outcome: end of the fit of T, int64 `(...)`, a code of `torchcalib.ops.newton`.
        lost: total weight of the samples whose label has probability 0, `(...)`.

    Reference:
        Zhang, Kailkhura, Han: Mix-n-Match: Ensemble and compositional methods for uncertainty calibration in deep
        learning (ICML 2020), eq. 9. The authors' code minimises the squared error by default.

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.01, 0.8, 0.05])
        >>> calibrator = EnsembleTemperatureScaling().fit(preds, torch.tensor([1, 0, 0, 1, 0]))
        >>> calibrator(preds)
        tensor([0.7280, 0.7793, 0.2207, 0.6710, 0.2435])
    """

    name = "ensemble temperature scaling"
    lost_consequence = "the fit of the temperature leaves them out."
    initial: ClassVar = {**TemperatureScaling.initial, "weights": [1.0, 0.0, 0.0]}

    weights: Tensor

    def n_parameters(self, num_classes: int) -> float:  # noqa: ARG002
        """Return 3: the temperature and two of the three weights, whose sum is 1."""
        return 3

    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        """Return the mixture for logits or probabilities; see `Calibrator.calibrated`."""
        wide = values.to(wide_dtype(values.device))
        scaled, log_weights = super().calibrated, self.weights.to(wide).log().clamp(min=_SMALLEST)
        without_uniform = (self.weights[..., 2] == 0).unsqueeze(-1)  # infinite logits then stay infinite
        if self.task != "multiclass":
            given = wide if from_logits else safe_log(wide) - safe_log(1 - wide)
            s, z = (x.clamp(_SMALLEST, -_SMALLEST) for x in (given, scaled(given, True)))
            log_p, log_not_p = (
                _log_mixture(log_weights.unsqueeze(-2), logsigmoid(x), logsigmoid(y), 2) for x, y in ((z, s), (-z, -s))
            )
            log_odds = torch.where(given.isinf() & without_uniform, given, log_p - log_not_p)
            return (log_odds if from_logits else log_odds.sigmoid()).to(values.dtype)
        log_q = wide.log_softmax(-1) if from_logits else safe_log(wide)
        found = _log_mixture(log_weights[..., None, None, :], scaled(log_q, True), log_q, values.shape[-1])
        found = found.masked_fill((log_q == -torch.inf) & without_uniform.unsqueeze(-1), -torch.inf)
        return (found if from_logits else found.exp()).to(values.dtype)

    def shown_parameters(self) -> list[str]:
        """Return the temperature and the weights as text, for `repr`."""
        return [f"temperature={format_values(self.temperature)}", f"weights={format_values(self.weights)}"]

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        """Return the temperature and the weights as a clause; for one fit."""
        if bool(self.outcome == NO_DATA):
            return "no samples"
        components = (
            temperature_in_words(float(self.temperature)),
            "unchanged predictions",
            "uniform distribution",
        )
        parts = zip(self.weights.tolist(), components, strict=True)
        return ", ".join(f"{100 * weight:.3g}% {component}" for weight, component in parts if weight > 0)

    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        """Return the fitted temperature and the weights of the mixture; see `Calibrator.parameters_for`."""
        temperature = super().parameters_for(p, weights)
        w, alpha = sample_weights(p, weights), temperature["alpha"]
        n_elements = p.target.numel()
        batch, n_replicates = alpha.shape, w.shape[: w.dim() - p.target.dim()].numel()
        alpha, w = alpha.reshape(n_replicates, *p.target.shape[:-1]), w.reshape(n_replicates, *p.target.shape)
        w = w / w.sum(-1, keepdim=True)
        # Solve few replicates at a time, because the probabilities of each one are stored.
        size = max(1, PIECE // max(1, n_elements))
        same = _label_probs(p, torch.ones_like(alpha[:1]))
        fits = []
        for start in range(0, max(1, n_replicates), size):
            part = slice(start, start + size)
            scaled = _label_probs(p, alpha[part])
            components = (scaled, same.expand_as(scaled), torch.full_like(scaled, 1 / p.num_classes))
            used = torch.stack(components, -1).masked_fill((w[part] == 0).unsqueeze(-1), 1)
            fits.append(fit_mixture(used, w[part]))
        mixture = [torch.cat(column) for column in zip(*fits, strict=True)]
        grad_norm = torch.hypot(temperature["grad_norm"].nan_to_num(0), mixture[1].reshape(batch))
        converged = temperature["converged"] & mixture[2].reshape(batch)
        return {
            **temperature,
            "weights": mixture[0].reshape(*batch, 3),
            "grad_norm": grad_norm.masked_fill(temperature["grad_norm"].isnan(), torch.nan),
            "converged": converged,
        }


def _log_mixture(log_weights: Tensor, log_scaled: Tensor, log_q: Tensor, n_classes: int) -> Tensor:
    """Return log(w_1 scaled + w_2 q + w_3 / C), for log weights `(..., 3)`."""
    scaled, same, uniform = log_weights.unbind(-1)
    mixed = torch.logaddexp(scaled + log_scaled.clamp(min=_SMALLEST), same + log_q.clamp(min=_SMALLEST))
    return torch.logaddexp(mixed, uniform - math.log(n_classes))


def _label_probs(p: Predictions, alpha: Tensor) -> Tensor:
    """Return the probability of the label under softmax(alpha s), `(R, ..., N)`, for alpha `(R, ...)`."""
    if p.task != "multiclass":
        log_p, log_not_p = p.binary_log_probs
        s = p.values.to(alpha.dtype) if p.from_logits else log_p - log_not_p
        s = torch.where(p.target == 1, s, -s)
        return torch.where(s.isinf(), s, alpha.unsqueeze(-1) * s).sigmoid()
    log_q = p.log_probs.to(alpha.dtype)
    impossible = log_q == -torch.inf
    label = p.target.unsqueeze(-1)
    found = []
    for scale in alpha:  # one replicate at a time, because scaled logits have the size of all predictions
        z = (scale[..., None, None] * log_q).masked_fill(impossible, -torch.inf)
        found.append((z.gather(-1, label).squeeze(-1) - z.logsumexp(-1)).exp())
    return torch.stack(found) if found else alpha.new_empty((0, *p.target.shape))
