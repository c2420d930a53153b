"""Affine scaling of probabilities q to softmax(alpha log q + beta); with beta = 0 temperature scaling.

Ensemble temperature scaling mixes temperature scaling, the predictions, and the uniform distribution.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.calibration.batches import BatchFitMixin
from torchcalib.calibration.calibrator import format_values, sample_weights
from torchcalib.calibration.likelihood import (
    FlatFits,
    check_class_count,
    log_scores,
    remarks_of_fits_with_biases,
    scaled_and_shifted,
    temperature_fit,
    temperature_in_words,
)
from torchcalib.core.checks import enforce, hidden_rule, label_rule
from torchcalib.core.linear_logits import LinearLogits, linear_logits
from torchcalib.core.predictions import Predictions
from torchcalib.display.words import listed, rounded
from torchcalib.ops.logs import binary_log_probs, safe_log, sigmoid, softmax, wide_dtype
from torchcalib.ops.newton import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE
from torchcalib.ops.newton.fits import fit_affine, fit_bias
from torchcalib.ops.newton.mixture import fit_mixture
from torchcalib.ops.newton.scores import PIECE
from torchcalib.ops.newton.temperature import solve_by_moments

_REMARKS = {
    AT_ZERO: "the fitted scale is 0: no positive scale improves on predictions that ignore the input.",
    SEPARABLE: (
        "no finite scale or bias is best: the likelihood never falls as one of them grows without bound, as for labels "
        "that can be separated without error. The predictions are left unchanged."
    ),
}

_SMALLEST = -1e30  # replaces log 0, because differences of infinite values would be NaN
_FEW_ROWS = 32  # number of hidden states from which the first estimate of a temperature is computed
_SHOWN_BIASES = 3  # number of biases in a description of the fitted parameters


class _Affine(BatchFitMixin):
    """Calibrator that maps probabilities q to softmax(alpha log q + beta).

    A probability of 0 stays 0 for every alpha.
    """

    in_log_odds = True
    initial: ClassVar = {
        "alpha": 1.0,
        "beta": [0.0, 0.0],
        "absent": [False, False],
        "lost": 0.0,
        "outcome": CONVERGED,
    }

    contains_identity: ClassVar[bool] = True
    with_scale: ClassVar[bool] = True
    with_bias: ClassVar[bool] = True
    lost_consequence: ClassVar[str] = "their NLL is infinite for every scale, and the fit leaves them out."

    @property
    def temperature(self) -> Tensor:
        return 1 / self.alpha

    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        if self.task != "multiclass":
            log_odds = values
            if not from_logits:
                log_p, log_not_p = binary_log_probs(values, from_logits=False)
                log_odds = log_p - log_not_p
            alpha, beta = self.alpha.to(log_odds), self.beta.to(log_odds)
            shifted = alpha[..., None] * log_odds + (beta[..., 1:] - beta[..., :1])
            log_odds = torch.where(log_odds.isinf(), log_odds, shifted)
            return log_odds if from_logits else sigmoid(log_odds)
        alpha, beta = self.alpha, self.beta
        check_class_count(values, beta.shape[-1])
        log_q = log_scores(values, from_logits)
        alpha, beta = alpha.to(log_q)[..., None, None], beta.to(log_q)[..., None, :]
        z = scaled_and_shifted(log_q, log_q, alpha, beta)
        return z.log_softmax(-1) if from_logits else softmax(z)

    @property
    def free(self) -> tuple[bool, bool, bool]:  # type: ignore[override]  # depends on the class
        return self.with_scale, False, self.with_bias

    def buffers_of(self, a: Tensor, b: Tensor, absent: Tensor) -> dict[str, Tensor]:
        return {"alpha": a[:, 0], "beta": b, "absent": absent}

    def n_parameters(self, num_classes: int) -> float:
        """Return 1 for the temperature plus C - 1 for the biases, if they are fitted."""
        return self.with_scale + self.with_bias * (num_classes - 1)

    def remarks(self) -> list[str]:
        return remarks_of_fits_with_biases(self.outcome, _REMARKS, self.absent, self.lost, self.lost_consequence)

    def shown_parameters(self) -> list[str]:
        scale = [f"temperature={format_values(self.temperature)}"] if self.with_scale else []
        return [*scale, *[f"beta={format_values(self.beta)}"] * self.with_bias]

    def in_words(self, class_names: Sequence[str] = ()) -> str:
        words = []
        if self.with_scale:
            words.append(temperature_in_words(float(self.temperature)))
        if self.with_bias and self.task == "multiclass":
            order = self.beta.abs().nan_to_num(0).argsort(descending=True).tolist()
            names = class_names or [f"class {k}" for k in range(len(order))]
            shown = [f"{rounded(float(self.beta[k]), '+.2g')} for {names[k]}" for k in order[:_SHOWN_BIASES]]
            words.append(f"{'largest biases' if len(order) > _SHOWN_BIASES else 'biases'} {listed(shown)}")
        elif self.with_bias:
            words.append(f"bias {rounded(float(self.beta[1] - self.beta[0]), '+.2g')} in log-odds")
        return ", ".join(words)

    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        if p.task == "multiclass":
            scores = p.values if p.from_logits else p.log_probs
        else:
            log_p, log_not_p = p.binary_log_probs
            log_odds = p.values.to(wide_dtype(p.values.device)) if p.from_logits else log_p - log_not_p
            scores = torch.stack(((-log_odds).clamp(max=0), log_odds.clamp(max=0)), -1)
        flat = FlatFits.from_predictions(p, scores, weights)
        if self.with_bias:
            fit_biases = fit_affine if self.with_scale else fit_bias
            fit = fit_biases(flat.scores, flat.target.long(), flat.weights)
        else:
            fit = temperature_fit(p, flat, weights)
        # A class without samples gets the mean bias of the others, which is 0. One class alone determines no bias.
        absent = fit.beta == -torch.inf
        is_single = absent.sum(-1) == absent.shape[-1] - 1
        beta = fit.beta.masked_fill(absent | is_single.unsqueeze(-1), 0)
        outcome = fit.outcome.masked_fill(is_single, CONVERGED)
        fit = fit._replace(alpha=fit.alpha.masked_fill(is_single, 1), beta=beta, outcome=outcome)
        return flat.parameters(**fit._asdict(), absent=absent)


class TemperatureScaling(_Affine):
    """Temperature scaling: softmax(logits / T) with the temperature T > 0 that minimises the negative log-likelihood.

    For probabilities q, logits are log q. The fit is a bracketed Newton search in float64 to a gradient norm below
    1e-9, for logits of any scale. Temperature scaling cannot shift probability from one class to another. See
    `AffineScaling` for data without an optimal temperature.

    Attributes:
        temperature: T = 1 / alpha, of the batch shape of the fit `(...)`.
        alpha: scale of the logits `(...)`.
        outcome: end of the fit, int64 `(...)`, a code of `torchcalib.ops.newton`.
        lost: total weight of the samples whose label has probability 0, `(...)`. The fit leaves them out.

    Reference:
        Guo et al.: On Calibration of Modern Neural Networks (ICML 2017); [EPSR] Ferrer, Ramos: Evaluating Posterior
        Probabilities (TMLR), sec. 2.4.2, with beta = 0.

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.01, 0.8, 0.05])
        >>> calibrator = TemperatureScaling().fit(preds, torch.tensor([1, 0, 0, 1, 0]))
        >>> calibrator
        TemperatureScaling(temperature=4.074, task='binary', from_logits=False)
        >>> calibrator(preds)
        tensor([0.6317, 0.7555, 0.2445, 0.5843, 0.3268])
    """

    name = "temperature scaling"
    with_bias = False

    def fit_from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        logit_scale: float | None = None,
        softcap: float | None = None,
        vocab_group: Any = None,
        weights: Tensor | None = None,
        ignore_index: int | None = None,
    ) -> Self:
        """Fit the temperature to hidden states and a linear head, without writing the logits.

        The fit takes about four passes over the blocks of logits. The first one evaluates several temperatures, from
        which an interpolation starts Newton steps. The last step changes T by less than a factor of 1e-5. `grad_norm`
        is the gradient before this step. The fitted calibrator is that of `fit` to the logits. Call it with logits, or
        pass its temperature to `torchcalib.functional.from_hidden`.

        Args:
            hidden: Input of the head `(..., N, H)`.
            weight: Weight of the head `(V, H)`.
            target: Labels `(..., N)`.
            bias, logit_scale, softcap, vocab_group: See `torchcalib.functional.from_hidden`.
            weights: Non-negative weight of each sample `(..., N)`, or None for 1.
            ignore_index: Rows with this label are ignored.

        Returns:
            The calibrator itself.

        Raises:
            TypeError, ValueError: for invalid input, as in `torchcalib.functional.from_hidden`.

        Warns:
            UserWarning: see `fit`.

        Example:
            >>> hidden, weight = torch.randn(200, 8), torch.randn(1000, 8)
            >>> labels = torch.distributions.Categorical(logits=hidden @ weight.T / 2).sample()
            >>> calibrator = TemperatureScaling().fit_from_hidden(hidden, weight, labels)
            >>> torch.allclose(calibrator.alpha, TemperatureScaling().fit(hidden @ weight.T, labels).alpha)
            True
        """
        preds = linear_logits(
            hidden, weight, bias=bias, logit_scale=logit_scale, softcap=softcap, vocab_group=vocab_group
        )
        # The first pass of the fit checks the values.
        how = {"from_logits": True, "ignore_index": ignore_index, "weights": weights, "validate_args": False}
        return self.adopt(self.fit_to(self.read(preds, target, task="multiclass", options=how)))

    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        if not isinstance(p.input_preds, LinearLogits):
            return super().parameters_for(p, weights)
        w = sample_weights(p, weights)
        used = w != 0
        logits, target, w = p.input_preds.detach()[used], p.input_target[used], w[used]
        enforce([label_rule(target, p.num_classes)], None, None, False)

        def moments(rows: slice, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            found = logits[rows].moments(target[rows], alpha)
            enforce([hidden_rule(found.mean[0])], None, None, False)
            return found.label, found.mean, found.variance

        every, few = slice(None), slice(None, None, max(1, len(w) // _FEW_ROWS))
        estimate = torch.ones_like(w.sum())
        for rows in (few, every):
            alpha, grad_norm, outcome, lost = solve_by_moments(partial(moments, rows), w[rows], estimate)
            estimate = torch.where(outcome == CONVERGED, alpha, estimate)
        converged = (outcome == CONVERGED) | (outcome == AT_ZERO)
        beta = torch.zeros(p.num_classes, dtype=alpha.dtype, device=alpha.device)
        beta = beta.masked_fill(outcome == NO_DATA, torch.nan)
        found = {"alpha": alpha, "beta": beta, "grad_norm": grad_norm, "outcome": outcome, "lost": lost}
        return {**found, "absent": torch.zeros_like(beta, dtype=torch.bool), "converged": converged}


class AffineScaling(_Affine):
    """Affine scaling: softmax(logits / T + beta) with the temperature T and one bias beta per class.

    The fit minimises the negative log-likelihood (NLL). [EPSR] calls the method direction-preserving (DP), because T is
    the same for all classes. For probabilities q, logits are log q. The fit is a damped Newton search in float64 to a
    gradient norm below 1e-9, for logits of any scale. `fit` warns in each of these cases, where alpha = 1 / T:

    - **Separable data**: some (alpha, beta) makes every label the most probable class, at least by a tie. No finite
      alpha is then best. Predictions are then left unchanged (alpha 1, beta 0), and `converged` is False.
    - **No positive alpha is optimal**: alpha is 0, and predictions become the class frequencies (uniform for
      `TemperatureScaling`). This is the optimum, and `converged` is True. Predictions of probability 1 are unchanged,
      and do not count in the frequencies.
    - **A class without samples** gets the mean bias of the other classes, 0. The likelihood would be largest for
      probability 0, which makes the log loss of new data infinite. Samples of probability 0 or 1 do not count. If all
      samples have the same class, predictions are left unchanged.
    - **Infinite NLL**: a sample whose label has probability 0 has an infinite NLL for every alpha > 0. The fit leaves
      such samples out. A label of probability 1 has an NLL of 0 for all parameters, and does not affect the fit.
    - **No data**: calibrated predictions are NaN.

    Attributes:
        temperature: T, of the batch shape of the fit `(...)`.
        alpha: scale of the logits `(...)`.
        beta: bias of each class `(..., C)`, with sum 0; of the classes 0 and 1 for binary and multi-label predictions.
        outcome: end of the fit, int64 `(...)`, a code of `torchcalib.ops.newton`.
        lost: total weight of the samples whose label has probability 0, `(...)`.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2 and 2.5.3 (DP calibration).

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6])
        >>> calibrator = AffineScaling().fit(preds, torch.tensor([1, 1, 0, 0, 1]))
        >>> calibrator(preds).mean()
        tensor(0.6000)
    """

    name = "affine scaling"
    largest_fit = 2, 2**31


class BiasCorrection(_Affine):
    """Bias correction: softmax(logits + beta) with one bias beta per class, for shifted class frequencies.

    The fit minimises the negative log-likelihood (NLL) by damped Newton steps in float64. At the optimum, the mean
    calibrated probability of each class is its frequency. For probabilities q, logits are log q. See `AffineScaling`
    for classes without samples, samples whose label has probability 0, and for no data.

    Attributes:
        beta: bias of each class `(..., C)`, with sum 0; of the classes 0 and 1 for binary and multi-label predictions.
        outcome: end of the fit, int64 `(...)`, a code of `torchcalib.ops.newton`.
        lost: total weight of the samples whose label has probability 0, `(...)`.

    Reference:
        Alexandari, Kundaje, Shrikumar: Maximum likelihood with bias-corrected calibration is hard-to-beat at label
        shift adaptation (ICML 2020), with T = 1.

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6])
        >>> calibrator = BiasCorrection().fit(preds, torch.tensor([1, 1, 0, 0, 1]))
        >>> calibrator(preds).mean()
        tensor(0.6000)
    """

    name = "bias correction"
    largest_fit = 2, 2**31
    with_scale = False
    lost_consequence = "their NLL is infinite, and the fit leaves them out."


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
    largest_fit = 1, 2**25
    lost_consequence = "the fit of the temperature leaves them out."
    initial: ClassVar = {**TemperatureScaling.initial, "weights": [1.0, 0.0, 0.0]}
    ranges: ClassVar = {"weights": (0, 1)}

    def n_parameters(self, num_classes: int) -> float:  # noqa: ARG002
        """Return 3: the temperature and two of the three weights, whose sum is 1."""
        return 3

    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
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
            log_odds = log_odds.to(values.dtype)
            return log_odds if from_logits else sigmoid(log_odds)
        log_q = wide.log_softmax(-1) if from_logits else safe_log(wide)
        found = _log_mixture(log_weights[..., None, None, :], scaled(log_q, True), log_q, values.shape[-1])
        found = found.masked_fill((log_q == -torch.inf) & without_uniform.unsqueeze(-1), -torch.inf)
        found = found.to(values.dtype)
        return found if from_logits else softmax(found)

    def shown_parameters(self) -> list[str]:
        return [f"temperature={format_values(self.temperature)}", f"weights={format_values(self.weights)}"]

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
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
