"""Calibration curves of the log-odds with three parameters: beta calibration and quadratic scaling."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.calibration.calibrator import Calibrator, format_values
from torchcalib.calibration.likelihood import FlatFits, remarks_of_fits
from torchcalib.core.arguments import check_choice, is_number
from torchcalib.core.predictions import Predictions
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import sigmoid, wide_dtype
from torchcalib.ops.newton import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE
from torchcalib.ops.newton.regression import RegressionFit, fit_logistic_regression

_REMARKS = {
    AT_ZERO: "the fitted curve is constant: no increasing curve improves on predictions that ignore the input.",
    SEPARABLE: (
        "no finite parameters are best: the likelihood never falls as one of them grows without bound, as for labels "
        "that can be separated without error. The predictions are left unchanged."
    ),
}
_EPS = 2.0**-52  # as in the authors' code of beta calibration; the log-odds of 2^-52 are -36


_COMMON = {"absent": [False, False], "lost": 0.0, "outcome": CONVERGED}

Parameters = Literal["abm", "am", "ab", "a"]


class _Curve(Calibrator):
    """Calibrator that maps log-odds s to log-odds linear in parameters a, b and c. Infinite logits are unchanged."""

    tasks = ("binary", "multilabel")
    contains_identity = True

    def n_parameters(self, num_classes: int) -> float:  # noqa: ARG002
        return 3

    @abstractmethod
    def curve(self, s: Tensor) -> Tensor:
        """Return calibrated log-odds for finite log-odds s, `(..., N)`."""

    @abstractmethod
    def fit_curve(self, s: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Return a, b, c, the norm of the gradient and the outcome, `(R, S)` each.

        `s` contains finite log-odds `(S, N)`, and `target` labels `(S, N)`. `weights` have the shape `(R, S, N)`.
        """

    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        s = _log_odds(values, from_logits)
        certain = s.isinf()
        s = torch.where(certain, s, self.curve(s.masked_fill(certain, 0))).to(values.dtype)
        return s if from_logits else sigmoid(s)

    def remarks(self) -> list[str]:
        found = remarks_of_fits(self.outcome, _REMARKS)
        for k in (0, 1):
            if bool(self.absent[..., k].any()):
                found.append(
                    f"`target` has no samples of class {k}: the predictions are left unchanged. Calibrate on samples "
                    "of every class."
                )
        if bool((self.lost > 0).any()):
            found.append(
                f"`preds` has infinite logits with the wrong sign in samples of total weight {float(self.lost.max()):g}"
                ": their NLL is infinite, and the fit leaves them out."
            )
        return found

    def shown_parameters(self) -> list[str]:
        return [f"{name}={format_values(getattr(self, name))}" for name in "abc"]

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        if bool(self.outcome == NO_DATA):
            return "no samples"
        before = torch.tensor([0.1, 0.5, 0.9], dtype=self.a.dtype, device=self.a.device)
        low, middle, high = (f"{100 * p:.3g}%" for p in self.calibrated(before, False).tolist())
        parameters = ", ".join(shown.replace("=", " ") for shown in self.shown_parameters())
        return f"{parameters}: 10% becomes {low}, 50% becomes {middle} and 90% becomes {high}"

    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        flat = FlatFits.from_predictions(p, _log_odds(p.values, p.from_logits), weights)
        s, target, w = flat.scores, flat.target, flat.weights
        is_wrong = s == torch.where(target == 1, -torch.inf, torch.inf)
        lost = w.masked_fill(~is_wrong, 0).sum(-1)
        used = w.masked_fill(s.isinf(), 0)
        a, b, c, grad_norm, outcome = self.fit_curve(s.nan_to_num(0, 0, 0), target, used)
        # A single class determines no curve: its likelihood is largest for the probability 0 of the other one.
        absent = torch.stack([((used > 0) & (target == k)).sum(-1) == 0 for k in (0, 1)], -1)
        absent = absent & (outcome != NO_DATA).unsqueeze(-1)
        unchanged = absent.any(-1) | (outcome == SEPARABLE)
        identity = [cast("float", self.initial[name]) for name in "abc"]
        a, b, c = (x.masked_fill(unchanged, value) for x, value in zip((a, b, c), identity, strict=True))
        return flat.parameters(a=a, b=b, c=c, absent=absent, grad_norm=grad_norm, outcome=outcome, lost=lost)


class BetaCalibration(_Curve):
    """Beta calibration: log-odds a log p - b log(1 - p) + c of the probability p, with a, b >= 0.

    It supports binary and multi-label predictions. a = b = 1 and c = 0 leave predictions unchanged. The curve is exact
    if the probabilities of both classes have beta distributions. It never decreases, and can be S-shaped or inversely
    S-shaped without symmetry. The fit minimises the negative log-likelihood (NLL) for a, b >= 0 by damped Newton steps
    in float64 to a gradient norm below 1e-9. The authors' procedure gives the same optimum unless both coefficients
    are negative without the constraint. Special cases, of which `fit` warns unless stated otherwise:

    - **Separable data**: a threshold separates the classes, and no finite parameters are optimal. Predictions are then
      left unchanged, and `converged` is False.
    - **No increasing curve is optimal**: a and b are 0, and predictions become the frequency of class 1. This is the
      optimum, and `converged` is True.
    - **All samples have the same class**: predictions are left unchanged. The likelihood would be largest for
      probability 0 of the other class, which makes the log loss of new data infinite.
    - **Infinite logits** are left unchanged, and the fit leaves them out. `fit` warns if their sign is wrong.
    - **No data**: calibrated predictions are NaN.

    Probabilities are clipped to [2^-52, 1 - 2^-52]. So predictions of 0 and 1 are calibrated too.

    Args:
        parameters: the fitted parameters, as in the package betacal: `"abm"` for all three; `"am"` for a = b, which is
            affine scaling (Platt scaling of the log-odds); `"ab"` for a curve through (1/2, 1/2), with
            c = (a - b) log 2; and `"a"` for both, which is temperature scaling.

    Attributes:
        a: coefficient of log p, of the batch shape of the fit `(...)`.
        b: coefficient of -log(1 - p), `(...)`.
        c: constant term `(...)`.
        outcome: end of the fit, int64 `(...)`, a code of `torchcalib.ops.newton`.
        lost: total weight of the samples with infinite logits of the wrong sign, `(...)`. The fit leaves them out.

    Raises:
        TypeError, ValueError: for unknown parameters.

    Reference:
        Kull, Silva Filho, Flach: Beta calibration: a well-founded and easily implemented improvement on logistic
        calibration for binary classifiers (AISTATS 2017), eq. 1 and sec. 4; with m = 1/2 in sec. 3.

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6])
        >>> calibrator = BetaCalibration().fit(preds, torch.tensor([1, 1, 0, 0, 1]))
        >>> calibrator(preds).mean()
        tensor(0.6000)
    """

    name = "beta calibration"
    settings = ("parameters",)
    attribute_of: ClassVar = {"parameters": "form"}
    initial: ClassVar = {"a": 1.0, "b": 1.0, "c": 0.0, **_COMMON}

    def __init__(self, parameters: Parameters = "abm", *, from_logits: bool | None = None) -> None:
        super().__init__(from_logits=from_logits)
        check_choice("parameters", parameters, get_args(Parameters))
        self.form = parameters

    def n_parameters(self, num_classes: int) -> float:  # noqa: ARG002
        return len(self.form)

    def curve(self, s: Tensor) -> Tensor:
        """Return a log p - b log(1 - p) + c for log-odds s."""
        a, b, c = (x.to(s).unsqueeze(-1) for x in (self.a, self.b, self.c))
        log_p, log_not_p = logsigmoid(s), logsigmoid(-s)
        return a * log_p - b * log_not_p + c

    def fit_curve(self, s: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Fit a, b and c; see `_Curve.fit_curve`.

        Fit without the constraint first. If a coefficient is negative, a or b is 0 at the optimum of the convex
        problem. Then use the better one of the fits with a = 0 and with b = 0.
        """
        if "b" not in self.form:  # a = b: log-odds a s + c
            line = self._increasing(s, target, weights)
            return line.coefficients, line.coefficients, line.intercept, line.grad_norm, line.outcome
        # a log p - b log(1 - p) = m s + d (v - 2 log 2), with m = (a + b) / 2, d = (a - b) / 2 and
        # v = -2 log cosh(s / 2). For small s, log p and -log(1 - p) nearly differ by a constant only.
        v = -(s.abs() + 2 * torch.log1p(torch.expm1(-s.abs()) / 2))
        fit = self._regression(torch.stack((s, v), -2), target, weights)
        m, d = fit.coefficients.unbind(-1)
        a, b, intercept = m + d, m - d, fit.intercept
        grad_norm, outcome = fit.grad_norm, fit.outcome
        negative = (a < 0) | (b < 0) | ((a == 0) & (b == 0))
        if value_if_available(negative.any()) is not False:
            only_a = self._increasing(logsigmoid(s) + math.log(2), target, weights)
            only_b = self._increasing(-logsigmoid(-s) - math.log(2), target, weights)
            # The NLL of separable data is that of the last iteration: for a threshold, both fits are separable.
            has_a = only_a.nll < only_b.nll
            slope, constant, _, edge_norm, edge_outcome = (
                torch.where(has_a, x, y) for x, y in zip(only_a, only_b, strict=True)
            )
            a = torch.where(negative, slope.masked_fill(~has_a, 0), a)
            b = torch.where(negative, slope.masked_fill(has_a, 0), b)
            intercept = torch.where(negative, constant, intercept)
            grad_norm = torch.where(negative, edge_norm, grad_norm)
            outcome = torch.where(negative, edge_outcome, outcome)
        return a, b, intercept + (a - b) * math.log(2), grad_norm, outcome

    def _regression(self, x: Tensor, target: Tensor, weights: Tensor) -> RegressionFit:
        """Fit a logistic regression to features `(S, D, N)`, without intercept if `parameters` has no "m"."""
        if "m" in self.form:
            return fit_logistic_regression(x, target, weights)
        # The likelihood of (-x, 1 - y) is that of (x, y) without intercept. So the intercept of both is 0.
        both = torch.cat((x, -x), -1), torch.cat((target, 1 - target), -1), torch.cat((weights, weights), -1)
        fit = fit_logistic_regression(*both)
        return fit._replace(intercept=torch.zeros_like(fit.intercept))

    def _increasing(self, x: Tensor, target: Tensor, weights: Tensor) -> RegressionFit:
        """Fit a logistic regression on one feature `(S, N)` with a slope of at least 0."""
        fit = self._regression(x.unsqueeze(-2), target, weights)
        # Without the feature, the optimal probability is the frequency of class 1, or 1/2 without intercept.
        frequency = weights.masked_fill(target != 1, 0).sum(-1) / weights.sum(-1)
        frequency = frequency if "m" in self.form else torch.full_like(frequency, 0.5)
        entropy = -torch.special.xlogy(frequency, frequency) - torch.special.xlogy(1 - frequency, 1 - frequency)
        slope = fit.coefficients.squeeze(-1)
        at_zero = (slope <= 0) & (fit.outcome != NO_DATA) & ~fit.intercept.isinf()
        return RegressionFit(
            slope.clamp(min=0),  # without the axis of features
            torch.where(at_zero, frequency.logit(), fit.intercept),
            torch.where(at_zero, entropy, fit.nll),
            fit.grad_norm.masked_fill(at_zero, 0),
            fit.outcome.masked_fill(at_zero, AT_ZERO),
        )


class QuadraticScaling(_Curve):
    """Quadratic scaling: log-odds a + b s + c s^2 of the log-odds s.

    It supports binary and multi-label predictions. a = c = 0 and b = 1 leave predictions unchanged. Without c, it is
    affine scaling (Platt scaling of the log-odds). The curve is not constrained: it turns at the log-odds -b / (2 c),
    and a negative b inverts predictions. The fit minimises the negative log-likelihood (NLL), which is convex. It uses
    damped Newton steps in float64 to a gradient norm below 1e-9. Special cases, of which `fit` warns unless stated
    otherwise:

    - **Separable data**: some parameters give every label a probability above 1/2, and no finite parameters are
      optimal. Predictions are then left unchanged, and `converged` is False.
    - **A single class, infinite logits, no data, and probabilities of 0 and 1**: see `BetaCalibration`.

    Args:
        ridge: factor of the penalty a^2 + c^2, which is added to the mean NLL.

    Attributes:
        a: constant term, of the batch shape of the fit `(...)`.
        b: coefficient of s, `(...)`.
        c: coefficient of s^2, `(...)`.
        outcome, lost: see `BetaCalibration`.

    Raises:
        TypeError, ValueError: `ridge` is not a number of at least 0.

    Reference:
        CalArena (arXiv 2605.30188), and the package probmetrics, `RegularizedQuadraticScalingCalibrator`.

    Example:
        >>> preds = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.2, 0.6])
        >>> calibrator = QuadraticScaling().fit(preds, torch.tensor([1, 0, 0, 1, 1, 0]))
        >>> calibrator(preds).mean()
        tensor(0.5000)
    """

    name = "quadratic scaling"
    settings = ("ridge",)
    initial: ClassVar = {"a": 0.0, "b": 1.0, "c": 0.0, **_COMMON}

    def __init__(self, ridge: float = 0.0, *, from_logits: bool | None = None) -> None:
        super().__init__(from_logits=from_logits)
        if not is_number(ridge):
            raise TypeError(f"`ridge` must be a number, got {shown(ridge)}.")
        if not 0 <= ridge < math.inf:
            raise ValueError(f"`ridge` must be a finite number of at least 0, got {shown(ridge)}.")
        self.ridge = ridge

    def curve(self, s: Tensor) -> Tensor:
        """Return a + b s + c s^2 for log-odds s."""
        a, b, c = (x.to(s).unsqueeze(-1) for x in (self.a, self.b, self.c))
        return a + (b + c * s) * s

    def fit_curve(self, s: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        fit = fit_logistic_regression(torch.stack((s, s.square()), -2), target, weights, (self.ridge, 0.0, self.ridge))
        return fit.intercept, *fit.coefficients.unbind(-1), fit.grad_norm, fit.outcome


def _log_odds(values: Tensor, from_logits: bool) -> Tensor:
    values = values.to(wide_dtype(values.device))
    if from_logits:
        return values
    p = values.clamp(_EPS, 1 - _EPS)
    return p.log() - torch.log1p(-p)
