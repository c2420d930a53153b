"""Vector scaling, structured vector and matrix scaling, and Dirichlet calibration of multi-class predictions."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchcalib.calibration.batches import BatchFitMixin
from torchcalib.calibration.calibrator import Calibrator, format_values
from torchcalib.calibration.likelihood import (
    FlatFits,
    check_class_count,
    log_scores,
    remarks_of_fits,
    remarks_of_fits_with_biases,
    scaled_and_shifted,
    temperature_fit,
    temperature_in_words,
)
from torchcalib.core.arguments import Task, check_positive
from torchcalib.core.predictions import Predictions
from torchcalib.display.words import rounded
from torchcalib.ops.logs import softmax, wide_dtype
from torchcalib.ops.newton import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE
from torchcalib.ops.newton.fits import AffineFit
from torchcalib.ops.newton.structured import fit_structured, fit_vector, smoothed_log_probs


class _MultiClass(Calibrator):
    """Calibrator of multi-class predictions with a bias per class."""

    tasks = ("multiclass",)
    problems: ClassVar[Mapping[int, str]]
    """Sentence for each outcome with a problem."""

    def read(self, preds: Tensor, target: Tensor, *, task: Task, options: Mapping[str, Any]) -> Predictions:
        if task != "multiclass" or options.get("positive_classes") is not None:
            found = repr(task) if task != "multiclass" else "'multiclass' with `positive_classes`"
            raise ValueError(
                f"`task` must be 'multiclass' for {type(self).__name__}, got {found}. Use AffineScaling for binary and "
                "multi-label predictions and for a set of classes."
            )
        return super().read(preds, target, task=task, options=options)

    @abstractmethod
    def solve(self, flat: FlatFits, temperature: AffineFit) -> dict[str, Tensor]:
        """Return the buffers, `(R, S, *)` each. `temperature` is the fit of a temperature only."""

    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        flat = FlatFits.from_predictions(p, p.values if p.from_logits else p.log_probs, weights)
        return flat.parameters(**self.solve(flat, temperature_fit(p, flat, weights)))

    def log_probs_of(self, values: Tensor, from_logits: bool) -> Tensor:
        """Return log-probabilities up to a constant per row, after a check of the number of classes."""
        check_class_count(values, self.bias.shape[-1])
        return log_scores(values, from_logits)

    def remarks(self) -> list[str]:
        return remarks_of_fits(self.outcome, self.problems)


_INFINITE = 1e30  # 1 / temperature of separable data; an infinite value would give NaN for scores of 0


class VectorScaling(_MultiClass, BatchFitMixin):
    """Vector scaling: softmax(a * s + b) with one scale a and one bias b per class, for logits s.

    The fit minimises the negative log-likelihood (NLL). For probabilities q, s = log q. Scales may be negative. A
    constant that is added to all logits of a row changes the result: pass `logits.log_softmax(-1)` to calibrate the
    probabilities. The fit is a damped Newton search in float64 to a gradient norm below 1e-9, for logits of any scale.
    It has 2 C parameters: with fewer than about 50 samples per class, prefer `StructuredVectorScaling`. `fit` warns in
    each of these cases:

    - **Separable data**: the likelihood rises without bound for some direction of (a, b). This is common with few
      samples per class: it suffices that the score of one class separates its samples from the others. The result is
      then temperature scaling (equal scales, no bias), and `converged` is False.
    - **A class without samples** gets the mean scale and bias of the other classes. The likelihood would be largest for
      probability 0, which makes the log loss of new data infinite. Samples of probability 0 or 1 do not count. If all
      samples have the same class, predictions are left unchanged.
    - **Infinite NLL**: a sample whose label has probability 0 has an infinite NLL. The fit leaves such samples out.
      Probabilities of 0 and 1 are unchanged.
    - **No data**: calibrated predictions are NaN.

    The memory of the fit is that of about 6 float64 copies of the predictions. For more than 256 classes, Newton steps
    are computed by conjugate gradients, without the Hessian.

    Attributes:
        scale: scale a of each class `(..., C)`, where `...` is the batch shape of the fit.
        bias: bias b of each class `(..., C)`, with sum 0.
        outcome: end of the fit, int64 `(...)`, a code of `torchcalib.ops.newton`.
        lost: total weight of the samples whose label has probability 0, `(...)`.

    Reference:
        Guo et al.: On Calibration of Modern Neural Networks (ICML 2017), sec. 4.2.

    Example:
        >>> logits = torch.tensor([[2, 0], [1, 0.5], [0, 1], [0.3, 0], [0, 0.4], [2, 1], [0.5, 2], [1.5, 0]])
        >>> target = torch.tensor([0, 1, 1, 0, 0, 0, 1, 1])
        >>> calibrator = VectorScaling().fit(logits, target, task="multiclass", from_logits=True)
        >>> calibrator.predict_proba(logits).mean(0)
        tensor([0.5000, 0.5000])
    """

    name = "vector scaling"
    contains_identity = True
    largest_fit = 1, 2**22
    initial: ClassVar = {
        "scale": [1.0, 1.0],
        "bias": [0.0, 0.0],
        "absent": [False, False],
        "lost": 0.0,
        "outcome": CONVERGED,
    }
    problems: ClassVar = {
        SEPARABLE: (
            "no finite scales are best: some labels can be separated without error. Only the temperature is fitted. "
            "StructuredVectorScaling has a finite optimum."
        ),
    }

    free = True, True, True

    def buffers_of(self, a: Tensor, b: Tensor, absent: Tensor) -> dict[str, Tensor]:
        mean = a.masked_fill(absent, torch.nan).nanmean(-1, keepdim=True)
        return {"scale": torch.where(absent, mean, a), "bias": b, "absent": absent}

    def solve(self, flat: FlatFits, temperature: AffineFit) -> dict[str, Tensor]:
        scale, bias, grad_norm, outcome = fit_vector(flat.scores, flat.target, flat.weights, temperature.alpha)
        # Classes without samples get the mean scale and bias of the others. One class alone determines neither.
        absent = bias == -torch.inf
        is_single = (absent.sum(-1) == absent.shape[-1] - 1).unsqueeze(-1)
        mean = scale.masked_fill(absent, torch.nan).nanmean(-1, keepdim=True)
        return {
            "scale": torch.where(absent, mean, scale).masked_fill(is_single, 1),
            "bias": bias.masked_fill(absent | is_single, 0),
            "absent": absent,
            "grad_norm": grad_norm,
            "outcome": outcome.masked_fill(is_single.squeeze(-1), CONVERGED),
            "lost": temperature.lost,
        }

    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        log_q = self.log_probs_of(values, from_logits)
        scale, bias = self.scale.to(log_q)[..., None, :], self.bias.to(log_q)[..., None, :]
        z = scaled_and_shifted(values if from_logits else log_q, log_q, scale, bias)
        return z.log_softmax(-1) if from_logits else softmax(z)

    def n_parameters(self, num_classes: int) -> float:
        """Return the number of scales and biases, without the constant that the biases share."""
        return 2 * num_classes - 1

    def remarks(self) -> list[str]:
        consequence = "their NLL is infinite, and the fit leaves them out."
        return remarks_of_fits_with_biases(self.outcome, self.problems, self.absent, self.lost, consequence)

    def shown_parameters(self) -> list[str]:
        return [f"scale={format_values(self.scale)}", f"bias={format_values(self.bias)}"]

    def in_words(self, class_names: Sequence[str] = ()) -> str:
        return f"{_range('scales', self.scale, class_names)}, {_range('biases', self.bias, class_names)}"


class _LogLinear(_MultiClass):
    """Calibrator softmax(W x + b), penalised, where x are smoothed log-probabilities."""

    full: ClassVar[bool]
    """Whether the weight is the buffer `matrix` instead of `scale`."""

    @abstractmethod
    def smoothed(self, values: Tensor, from_logits: bool) -> Tensor:
        """Return x `(..., N, C)` for predictions."""

    @property
    def _weight(self) -> str:
        return "matrix" if self.full else "scale"

    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        x = self.smoothed(values, from_logits)
        if self.full:  # in float64, because torch.autocast rounds the factors of a float32 product to half precision
            wide = wide_dtype(x.device)
            z = (x.to(wide) @ self.matrix.to(wide).mT).to(x)
        else:
            z = self.scale.to(x)[..., None, :] * x
        return self.normalised(z, from_logits)

    def calibrated_by_fit(self, values: Tensor, from_logits: bool) -> Tensor:
        """Multiply by one matrix at a time, because a batch of small products is rounded differently."""
        if not self.full:
            return super().calibrated_by_fit(values, from_logits)
        x = self.smoothed(values, from_logits)
        wide = wide_dtype(x.device)
        products = [rows @ matrix.mT for rows, matrix in zip(x.to(wide), self.matrix.to(wide), strict=True)]
        return self.normalised(torch.stack(products).to(x), from_logits)

    def normalised(self, z: Tensor, from_logits: bool) -> Tensor:
        z = z + self.bias.to(z)[..., None, :]
        return z.log_softmax(-1) if from_logits else softmax(z)

    def in_words(self, class_names: Sequence[str] = ()) -> str:
        scale = self.matrix.diagonal(dim1=-2, dim2=-1) if self.full else self.scale
        words = [_range("scales", scale, class_names), _range("biases", self.bias, class_names)]
        if self.full:
            largest = float((self.matrix - torch.diag_embed(scale)).abs().max())
            words.insert(1, f"other factors of at most {largest:.2g}")
        return ", ".join(words)


class _Structured(_LogLinear):
    """Penalised calibrator of smoothed log-probabilities after temperature scaling."""

    settings = ("penalty",)
    initial: ClassVar = {"alpha": 1.0, "smoothing": 0.0, "bias": [0.0, 0.0], "outcome": CONVERGED}
    problems: ClassVar = {
        AT_ZERO: "the fitted temperature is infinite: no scale improves on predictions that ignore the input.",
        SEPARABLE: "all labels have the largest score of their row: the temperature is 1e-30, which stands for 0.",
    }

    def __init__(self, penalty: float = 1.0, *, from_logits: bool | None = None) -> None:
        super().__init__(from_logits=from_logits)
        check_positive("penalty", penalty)
        self.penalty = penalty

    @property
    def temperature(self) -> Tensor:
        return 1 / self.alpha

    def n_parameters(self, num_classes: int) -> float:
        return 1 + num_classes * (num_classes if self.full else 1) + num_classes

    def smoothed(self, values: Tensor, from_logits: bool) -> Tensor:
        log_q = self.log_probs_of(values, from_logits)
        return smoothed_log_probs(log_q, self.alpha.to(log_q), self.smoothing.to(log_q))

    def shown_parameters(self) -> list[str]:
        return [f"{name}={format_values(getattr(self, name))}" for name in ("temperature", self._weight, "bias")]

    def in_words(self, class_names: Sequence[str] = ()) -> str:
        return f"{temperature_in_words(float(self.temperature))}; {super().in_words(class_names)}"

    def solve(self, flat: FlatFits, temperature: AffineFit) -> dict[str, Tensor]:
        # If all samples are lost, because their labels have probability 0, no temperature is best.
        alpha = temperature.alpha.masked_fill(temperature.outcome == NO_DATA, 1)
        alpha = alpha.masked_fill(temperature.outcome == SEPARABLE, _INFINITE)
        # Weight 1 / (N + 1) of the uniform distribution, and factors of the penalty: C / N for the diagonal and the
        # biases, C (C - 1) / N for other entries.
        total = flat.weights.sum(-1).to(alpha)
        n_classes, smoothing = flat.scores.shape[-1], 1 / (1 + total)
        factors = torch.tensor((1, n_classes - 1, 1), dtype=alpha.dtype, device=alpha.device)
        ridge = self.penalty * n_classes * factors / total.masked_fill(~(total > 0), 1).unsqueeze(-1)
        start = torch.ones_like(alpha)
        fit = fit_structured(flat.scores, flat.target, flat.weights, alpha, smoothing, ridge, start, self.full)
        is_normal = (fit.outcome == CONVERGED) & (temperature.outcome != NO_DATA)
        return {
            "alpha": alpha.masked_fill(fit.outcome == NO_DATA, torch.nan),
            "smoothing": smoothing,
            self._weight: fit.weight,
            "bias": fit.bias,
            "grad_norm": fit.grad_norm,
            "outcome": torch.where(is_normal, temperature.outcome, fit.outcome),
        }


class StructuredVectorScaling(_Structured):
    """Structured vector scaling (SVS): softmax(a * x + b) with a ridge penalty, after temperature scaling.

    The temperature T minimises the negative log-likelihood (NLL). Let q be the softmax(logits / T) of a sample. Then
    x = log((1 - e) q + e / C), where e = 1 / (N + 1) for N samples and C classes. For weighted samples, N is the sum of
    the weights. The scale a and the bias b of each class minimise the mean NLL plus

        penalty * C / N * (sum_k (a_k - 1)^2 + sum_k b_k^2)

    The penalty keeps the result close to temperature scaling if there are few samples per class. The fit is a damped
    Newton search in float64 to a gradient norm below 1e-9. The penalised optimum is unique and finite for all data:

    - **Separable data**: if every label has the largest score of its row, T is 1e-30, which stands for 0. The softmax
      is then 1 for the largest score, and 1 - e (1 - 1 / C) after smoothing. `converged` is False, and `fit` warns.
    - **No positive 1 / T is optimal**: x is constant, `converged` is True, and `fit` warns.
    - **Classes without samples** have small positive calibrated probabilities.
    - **Probabilities of 0 and 1**: calibrated probabilities are positive, because x is finite.
    - **No data**: calibrated predictions are NaN, and `fit` warns.

    The memory of the fit is that of about 6 float64 copies of the predictions. For more than 256 classes, Newton steps
    are computed by conjugate gradients, without the Hessian.

    Args:
        penalty: factor of the penalty, positive; 1 as published.

    Attributes:
        temperature: T, of the batch shape of the fit `(...)`.
        alpha: 1 / T `(...)`.
        smoothing: e `(...)`.
        scale: scale a of each class `(..., C)`.
        bias: bias b of each class `(..., C)`.
        outcome: end of the fit, int64 `(...)`, a code of `torchcalib.ops.newton`.

    Raises:
        TypeError, ValueError: for an invalid penalty.

    Reference:
        Berta, Holzmüller, Jordan, Bach: Structured Matrix Scaling for Multi-Class Calibration (AISTATS 2026,
        arXiv:2511.03685). The smoothing and the factors of the penalty are those of the authors' package probmetrics.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
        >>> target = torch.tensor([0, 1, 2, 1])
        >>> calibrator = StructuredVectorScaling().fit(logits, target, from_logits=True)
        >>> calibrator.predict_proba(logits)[3]
        tensor([0.5474, 0.2831, 0.1695])
    """

    name = "structured vector scaling"
    largest_fit = 1, 2**22
    full = False
    initial: ClassVar = {**_Structured.initial, "scale": [1.0, 1.0]}


class StructuredMatrixScaling(_Structured):
    """Structured matrix scaling (SMS): softmax(W x + b) with a ridge penalty, after temperature scaling.

    x is the vector of smoothed log-probabilities of `StructuredVectorScaling`, after temperature scaling. The matrix W
    and the bias b minimise the mean negative log-likelihood plus

        penalty * (C / N sum_k (W_kk - 1)^2 + C / N sum_k b_k^2 + C (C - 1) / N sum_{k != l} W_kl^2)

    The larger penalty of the off-diagonal entries reflects their number. Unusual data are treated as in
    `StructuredVectorScaling`. The fit has C (C + 1) parameters. Up to 22 classes, it is a damped Newton search. For
    more classes, Newton steps are computed by conjugate gradients. Each of their iterations takes time proportional to
    N C^2. Above about 300 classes the off-diagonal entries are small: prefer `StructuredVectorScaling`.

    Args:
        penalty: factor of the penalty, positive; 1 as published.

    Attributes:
        matrix: W `(..., C, C)`; row k has the factors of the score of class k.
        temperature, alpha, smoothing, bias, outcome: see `StructuredVectorScaling`.

    Raises:
        TypeError, ValueError: for an invalid penalty.

    Reference:
        Berta, Holzmüller, Jordan, Bach: Structured Matrix Scaling for Multi-Class Calibration (AISTATS 2026,
        arXiv:2511.03685). The smoothing and the factors of the penalty are those of the authors' package probmetrics.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
        >>> target = torch.tensor([0, 1, 2, 1])
        >>> calibrator = StructuredMatrixScaling().fit(logits, target, from_logits=True)
        >>> calibrator.predict_proba(logits)[3]
        tensor([0.5122, 0.3169, 0.1709])
    """

    name = "structured matrix scaling"
    largest_fit = 2, 2**23
    full = True
    initial: ClassVar = {**_Structured.initial, "matrix": [[1.0, 0.0], [0.0, 1.0]]}


_SMOOTHING = torch.finfo(torch.float64).eps
_DIAGONAL = 1e-6


class DirichletCalibration(_LogLinear):
    """Dirichlet calibration: softmax(W log q + b) with off-diagonal and intercept regularisation (ODIR).

    This is the form of calibrated probabilities if the predictions of each class have a Dirichlet distribution. The
    matrix W and the bias b minimise the mean negative log-likelihood plus

        off_diagonal / (C (C - 1)) sum_{k != l} W_kl^2 + intercept / C sum_k b_k^2

    for C classes. The diagonal is free in the publication. Here 1e-6 / C sum_k (W_kk - 1)^2 is added, so that a finite
    optimum exists for all data. Probabilities are smoothed by 2.2e-16 before the logarithm, so that log 0 is finite.
    The publication selects the penalties by cross-validation: compare `cross_val_calibrate` for several values. The
    default penalties are those of `StructuredMatrixScaling`, which decrease with the number of samples.

    The fit is a damped Newton search in float64 to a gradient norm below 1e-9. For more than 22 classes, Newton steps
    are computed by conjugate gradients. Each of their iterations takes time proportional to N C^2, and their number
    increases with C (C + 1) / N. `fit` therefore raises a ValueError for N rows if N C^3 > 2^36, as for more than
    68,719 rows of 100 classes, 2,545 of 300, or 68 of 1,000. Use `StructuredVectorScaling` instead. Small penalties
    take many times as long as the default ones.

    - **Separable data**: the diagonal becomes large, and calibrated probabilities are close to 0 and 1.
    - **Classes without samples** have small positive calibrated probabilities, which depend on the prediction.
    - **Probabilities of 0 and 1**: calibrated probabilities are positive.
    - **No data**: calibrated predictions are NaN, and `fit` warns.

    Args:
        off_diagonal: factor of the penalty of the off-diagonal entries, positive; None for C^2 (C - 1)^2 / N with N
            samples. For weighted samples, N is the sum of the weights.
        intercept: factor of the penalty of the biases, positive; None for C^2 / N.

    Attributes:
        matrix: W `(..., C, C)`; row k has the factors of the score of class k.
        bias: bias b of each class `(..., C)`.
        outcome: end of the fit, int64 `(...)`, a code of `torchcalib.ops.newton`.

    Raises:
        TypeError, ValueError: for invalid penalties, and in `fit` for too many classes.

    Reference:
        Kull, Perello-Nieto, Kängsepp, Silva Filho, Song, Flach: Beyond temperature scaling: Obtaining well-calibrated
        multiclass probabilities with Dirichlet calibration (NeurIPS 2019, arXiv:1910.12656).

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]]).repeat(2, 1)
        >>> target = torch.tensor([0, 1, 2, 1, 1, 2, 0, 0])
        >>> calibrator = DirichletCalibration().fit(logits, target, from_logits=True)
        >>> calibrator.predict_proba(logits)[3]
        tensor([0.4540, 0.3789, 0.1671])
    """

    name = "Dirichlet calibration"
    largest_fit = 3, 2**36
    full = True
    settings = ("off_diagonal", "intercept")
    initial: ClassVar = {"matrix": [[1.0, 0.0], [0.0, 1.0]], "bias": [0.0, 0.0], "outcome": CONVERGED}
    problems: ClassVar = {}

    def __init__(
        self,
        off_diagonal: float | None = None,
        intercept: float | None = None,
        *,
        from_logits: bool | None = None,
    ) -> None:
        super().__init__(from_logits=from_logits)
        for name, value in (("off_diagonal", off_diagonal), ("intercept", intercept)):
            if value is not None:
                check_positive(name, value)
        self.off_diagonal, self.intercept = off_diagonal, intercept

    def n_parameters(self, num_classes: int) -> float:
        return num_classes * (num_classes + 1)

    def smoothed(self, values: Tensor, from_logits: bool) -> Tensor:
        log_q = self.log_probs_of(values, from_logits)
        of_fits = self.bias[..., 0].to(log_q)
        return smoothed_log_probs(log_q, torch.ones_like(of_fits), torch.full_like(of_fits, _SMOOTHING))

    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        if self.is_slow_for(p):
            n, n_classes = p.target.numel(), p.num_classes
            raise ValueError(
                f"`preds` must have at most {self.largest_fit[1]:,} = N * C^3 for N rows and C classes for "
                f"DirichletCalibration, which fits C (C + 1) parameters, got {n:,} rows and {n_classes:,} classes. "
                "Use StructuredVectorScaling, or StructuredMatrixScaling for a penalised matrix."
            )
        return super().parameters_for(p, weights)

    def shown_parameters(self) -> list[str]:
        return [f"{name}={format_values(getattr(self, name))}" for name in ("matrix", "bias")]

    def solve(self, flat: FlatFits, temperature: AffineFit) -> dict[str, Tensor]:
        n_classes, start = flat.scores.shape[-1], temperature.alpha.nan_to_num(1).clamp(1e-3, 1e2)
        alpha = torch.ones_like(start)
        total = flat.weights.sum(-1).to(alpha)
        per_row = alpha / total.masked_fill(~(total > 0), 1)
        n_others = max(1, n_classes * (n_classes - 1))
        of_others = n_others * per_row if self.off_diagonal is None else alpha * self.off_diagonal / n_others
        of_biases = n_classes * per_row if self.intercept is None else alpha * self.intercept / n_classes
        ridge = torch.stack((alpha * _DIAGONAL / n_classes, of_others, of_biases), -1)
        smoothing = torch.full_like(alpha, _SMOOTHING)
        fit = fit_structured(flat.scores, flat.target, flat.weights, alpha, smoothing, ridge, start, self.full)
        return {"matrix": fit.weight, "bias": fit.bias, "grad_norm": fit.grad_norm, "outcome": fit.outcome}


def _range(what: str, values: Tensor, class_names: Sequence[str]) -> str:
    ends = []
    for k in (int(values.argmin()), int(values.argmax())):
        label = class_names[k] if k < len(class_names) else f"class {k}"
        ends.append(f"{rounded(float(values[k]))} ({label})")
    return f"{what} from {ends[0]} to {ends[1]}"
