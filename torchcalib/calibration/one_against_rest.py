"""Calibrators of a single probability, which calibrate the classes of a multi-class task one against the rest.

The base class, and its simplest examples: histogram binning and Platt scaling.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.calibration.likelihood import NO_DATA_REMARK, FlatFits, check_class_count, remarks_of_fits
from torchcalib.core.arguments import check_choice, check_count, check_flag
from torchcalib.core.predictions import Predictions
from torchcalib.display.words import rounded
from torchcalib.ops.log_odds import log_odds
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton import CONVERGED
from torchcalib.ops.newton.regression import fit_logistic_regression
from torchcalib.ops.segments import bin_index, bin_sums, with_same_batch

Empty = Literal["keep", "zero"]


class OneAgainstRest(Calibrator):
    """Base class of calibrators that map one probability. They support every task.

    In a multi-class task, every class k has its own fit to P(y = k), or to its log-odds for logits, with the outcome
    y = k. The calibrated probabilities of a row are divided by their sum. If all of them are 0, the result is uniform,
    as in scikit-learn. For two classes this equals the fit to the binary task, if the method treats both classes in
    the same way. The parameters have an axis of classes after the batch axes.

    Reference:
        Zadrozny, Elkan: Transforming classifier scores into accurate multiclass probability estimates (KDD 2002),
        sec. 5.
    """

    largest_fit: ClassVar = 1, 2**22
    no_data_remark: ClassVar[str] = NO_DATA_REMARK

    @abstractmethod
    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        """Return the parameters and `converged` for binary or multi-label predictions; see `parameters_for`."""

    @abstractmethod
    def binary_calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        """Map probabilities or log-odds `(..., N)` to calibrated values; see `Calibrator.calibrated`."""

    def remarks(self) -> list[str]:
        return [] if bool(self.converged.all()) else [self.no_data_remark]

    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        """Return the fitted parameters by name, with an axis of classes if multi-class."""
        if p.task != "multiclass":
            return self.binary_parameters(p, weights)
        scores = self.scores_of_classes(p.values, p.from_logits)
        classes = torch.arange(p.num_classes, device=scores.device).unsqueeze(-1)
        found = self.binary_parameters(
            Predictions(
                "multilabel",
                p.from_logits,
                scores,
                (p.target.unsqueeze(-2) == classes).to(wide_dtype(scores.device)),
                None if p.weights is None else p.weights.unsqueeze(-2),
                p.dtype,
                p.n_invalid,
                p.weighted,
            ),
            None if weights is None else weights.unsqueeze(-2),
        )
        found["converged"] = found["converged"].all(-1)
        if "grad_norm" in found:
            found["grad_norm"] = found["grad_norm"].amax(-1)
        return found

    def scores_of_classes(self, values: Tensor, from_logits: bool) -> Tensor:
        """Return the score of each class against the rest, `(..., C, N)`: its probability, or its log-odds."""
        return (log_odds(values) if from_logits else values).transpose(-1, -2)

    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        if self.task != "multiclass":
            return self.binary_calibrated(values, from_logits)
        check_class_count(values, getattr(self, next(iter(self.initial))).shape[-2])  # every parameter is (..., C, K)
        scores = self.scores_of_classes(values, from_logits)
        found = self.binary_calibrated(scores, from_logits).transpose(-1, -2)
        if from_logits:
            log_q = logsigmoid(found)
            return log_q.masked_fill((log_q == -torch.inf).all(-1, keepdim=True), 0).log_softmax(-1)
        q = found.masked_fill((found == 0).all(-1, keepdim=True), 1)
        return q / q.sum(-1, keepdim=True)


class HistogramBinning(OneAgainstRest):
    """Histogram binning: replaces a probability by the frequency of positives in its equal-width bin.

    Multi-class tasks calibrate one class against the rest and normalise. The fit is in closed form, also for separable
    data, a single class and infinite logits. The frequencies 0 and 1 are possible. The negative log-likelihood (NLL) of
    new data may therefore be infinite. A multi-class row whose calibrated probabilities are all 0 becomes uniform. The
    gradient is 0 in bins with samples.

    Args:
        n_bins: number of bins B.
        right: bins are `(i/B, (i+1)/B]` instead of `[i/B, (i+1)/B)`.
        empty: result in a bin without samples: `"keep"` leaves predictions unchanged, `"zero"` makes them 0, as in the
            published code of [EPSR].

    Attributes:
        rate: frequency of positives in every bin `(..., B)`, multi-class `(..., C, B)`; NaN where predictions are left
            unchanged.

    Raises:
        TypeError, ValueError: for invalid arguments.

    Reference:
        Zadrozny, Elkan: Obtaining calibrated probability estimates (ICML 2001); [EPSR] Ferrer, Ramos: Evaluating
        Posterior Probabilities (TMLR), sec. 2.4.3.

    Example:
        >>> preds = torch.tensor([0.9, 0.8, 0.1, 0.2])
        >>> HistogramBinning(n_bins=2).fit(preds, torch.tensor([1, 0, 0, 0]))(preds)
        tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """

    name = "histogram binning"
    assigns_zero = True
    settings = ("n_bins", "right", "empty")
    initial: ClassVar = {"rate": [torch.nan]}
    ranges: ClassVar = {"rate": (0, 1)}
    no_data_remark = "there are no samples of positive weight: predictions are left unchanged."

    def __init__(
        self, n_bins: int = 15, right: bool = False, empty: Empty = "keep", *, from_logits: bool | None = None
    ) -> None:
        super().__init__(from_logits=from_logits)
        check_count("n_bins", n_bins)
        check_flag("right", right)
        check_choice("empty", empty, get_args(Empty))
        self.n_bins, self.right, self.empty = n_bins, right, empty

    def binary_calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        p = values.to(wide_dtype(values.device))
        p = p.sigmoid() if from_logits else p
        index = bin_index(p, self.rate.shape[-1], self.right)
        rate, index = with_same_batch(self.rate, index)
        rate = rate.gather(-1, index).to(values.dtype)
        return torch.where(rate.isnan() | values.isnan(), values, rate.logit() if from_logits else rate)

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        return f"{self.n_bins} equal-width bins"

    def n_parameters(self, num_classes: int) -> float:
        return self.n_bins * (num_classes if num_classes > 2 else 1)

    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        w = sample_weights(p, weights)
        positives = (w * p.target.to(w.dtype)).masked_fill(w == 0, 0)
        index = bin_index(p.probs, self.n_bins, self.right).expand(w.shape)
        n, k = bin_sums(index, (w, positives), self.n_bins).unbind(-2)
        has_data = n.sum(-1, keepdim=True) > 0
        rate = (k / n).masked_fill((n == 0) & has_data, 0) if self.empty == "zero" else k / n
        return {"rate": rate, "converged": has_data.squeeze(-1)}


class PlattScaling(OneAgainstRest):
    """Platt scaling: the probability sigmoid(a s + b) of the score s, fitted to smoothed labels.

    The score is the prediction as it is: the logit, or the probability itself, as in scikit-learn. No logistic curve of
    the probability is the identity. Probabilities that are calibrated already therefore become worse. Use
    `AffineScaling` for probabilities: the same curve of the log-odds, without smoothed labels.

    Let N+ and N- be the sums of the weights in class 1 and class 0. The smoothed labels are (N+ + 1) / (N+ + 2) for
    class 1, and 1 / (N- + 2) for class 0: posterior means of labels under a uniform prior. With them, the negative
    log-likelihood (NLL) has a finite optimum for all data, also for separable data and a single class. Calibrated
    probabilities are never 0 or 1 for finite scores. The fit uses damped Newton steps in float64. Infinite logits are
    left unchanged, and the fit leaves them out.

    Multi-class tasks calibrate the score of each class against the rest and normalise. With logits, this score is the
    logit of the class. So a constant that is added to all logits of a row changes the result. Without data, calibrated
    predictions are NaN.

    Attributes:
        coefficients: b and a, `(..., 2)`, multi-class `(..., C, 2)`.
        outcome: end of the fit, int64, a code of `torchcalib.ops.newton`.

    Reference:
        Platt: Probabilistic outputs for support vector machines and comparisons to regularized likelihood methods
        (1999), sec. 2.2; Lin, Lin, Weng: A note on Platt's probabilistic outputs for support vector machines (Machine
        Learning 68, 2007), doi 10.1007/s10994-007-5018-6, eq. 1 to 3.

    Example:
        >>> logits, target = torch.tensor([-2.0, -1.0, 1.0, 2.0]), torch.tensor([0, 0, 1, 1])
        >>> PlattScaling().fit(logits, target).predict_proba(logits)
        tensor([0.2062, 0.3376, 0.6624, 0.7938])
    """

    name = "Platt scaling"
    initial: ClassVar = {"coefficients": [0.0, 1.0], "outcome": CONVERGED}

    def scores_of_classes(self, values: Tensor, from_logits: bool) -> Tensor:  # noqa: ARG002
        """Return the prediction for each class, `(..., C, N)`."""
        return values.transpose(-1, -2)

    def binary_calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        s = values.to(wide_dtype(values.device))
        b, a = self.coefficients.to(s).unsqueeze(-1).unbind(-2)
        z = torch.where(s.isinf(), s, a * s.masked_fill(s.isinf(), 0) + b)
        return (z if from_logits else z.sigmoid()).to(values.dtype)

    def remarks(self) -> list[str]:
        return remarks_of_fits(self.outcome, {})

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        if self.coefficients.dim() > 1:
            return f"one sigmoid for each of {len(self.coefficients)} classes against the rest"
        b, a = self.coefficients.tolist()
        return f"log-odds {rounded(a)} times the prediction {rounded(b, '+.3g')}"

    def n_parameters(self, num_classes: int) -> float:
        return 2 * (num_classes if num_classes > 2 else 1)

    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        flat = FlatFits.from_predictions(p, p.values.to(wide_dtype(p.values.device)), weights)
        s, is_positive = flat.scores, flat.target == 1
        w = flat.weights.masked_fill(s.isinf(), 0)
        positives, negatives = (w.masked_fill(~mask, 0).sum(-1, keepdim=True) for mask in (is_positive, ~is_positive))
        target = torch.where(is_positive, (positives + 1) / (positives + 2), 1 / (negatives + 2))
        # A sample with target t is one of label 1 and weight t, and one of label 0 and weight 1 - t.
        twice, labels = s.nan_to_num(0, 0, 0).repeat(1, 2), torch.cat((torch.ones_like(s), torch.zeros_like(s)), -1)
        fit = fit_logistic_regression(
            twice.unsqueeze(-2), labels, torch.cat((w * target, w * (1 - target)), -1).nan_to_num(0)
        )
        coefficients = torch.cat((fit.intercept.unsqueeze(-1), fit.coefficients), -1)
        return flat.parameters(coefficients=coefficients, outcome=fit.outcome, grad_norm=fit.grad_norm)
