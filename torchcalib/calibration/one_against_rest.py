"""Calibrators of a single probability, which calibrate the classes of a multi-class task one against the rest."""

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.likelihood import check_class_count
from torchcalib.core.predictions import Predictions
from torchcalib.ops.log_odds import log_odds
from torchcalib.ops.logs import wide_dtype


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

    @abstractmethod
    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        """Return the parameters and `converged` for binary or multi-label predictions; see `parameters_for`."""

    @abstractmethod
    def binary_calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        """Map probabilities or log-odds `(..., N)` to calibrated values; see `Calibrator.calibrated`."""

    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        """Return the fitted parameters by name, with an axis of classes if multi-class."""
        if p.task != "multiclass":
            return self.binary_parameters(p, weights)
        found = self.binary_parameters(_of_each_class(p), None if weights is None else weights.unsqueeze(-2))
        return {**found, "converged": found["converged"].all(-1)}

    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        """Calibrate every class, and normalise the rows; see `Calibrator.calibrated`."""
        if self.task != "multiclass":
            return self.binary_calibrated(values, from_logits)
        check_class_count(values, getattr(self, next(iter(self.initial))).shape[-2])  # every parameter is (..., C, K)
        scores = log_odds(values) if from_logits else values
        found = self.binary_calibrated(scores.transpose(-1, -2), from_logits).transpose(-1, -2)
        if from_logits:
            log_q = logsigmoid(found)
            return log_q.masked_fill((log_q == -torch.inf).all(-1, keepdim=True), 0).log_softmax(-1)
        q = found.masked_fill((found == 0).all(-1, keepdim=True), 1)
        return q / q.sum(-1, keepdim=True)


def _of_each_class(p: Predictions) -> Predictions:
    """Return the predictions of each class against the rest, with the classes as labels `(..., C, N)`."""
    values = log_odds(p.values) if p.from_logits else p.values
    classes = torch.arange(p.num_classes, device=values.device).unsqueeze(-1)
    return Predictions(
        "multilabel",
        p.from_logits,
        values.transpose(-1, -2),
        (p.target.unsqueeze(-2) == classes).to(wide_dtype(values.device)),
        None if p.weights is None else p.weights.unsqueeze(-2),
        p.dtype,
        p.n_invalid,
        p.weighted,
    )
