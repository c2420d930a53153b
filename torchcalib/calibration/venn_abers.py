"""Inductive Venn-Abers predictors."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.calibration.isotonic import finite, sorted_counts
from torchcalib.calibration.likelihood import NO_DATA_REMARK
from torchcalib.calibration.one_against_rest import OneAgainstRest
from torchcalib.core.predictions import Predictions
from torchcalib.ops.isotonic import augmented_means
from torchcalib.ops.log_odds import log_odds
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import with_same_batch
from torchcalib.ops.sorting import tie_begins


class VennAbersCalibration(OneAgainstRest):
    """Inductive Venn-Abers predictor: two isotonic fits per prediction, with the test sample added to the data.

    Let p0 and p1 be the isotonic fits at the test score if the test sample is added with label 0 or 1. If calibration
    and test data are exchangeable, the fit with the true label is perfectly calibrated, for any sample size. The
    calibrated probability is p1 / (1 - p0 + p1), which minimises the largest regret of the log loss. It is never 0 or
    1, so that the negative log-likelihood (NLL) is finite. Every task is supported; multi-class tasks calibrate one
    class against the rest and normalise.

    The fit is exact, with O(N log N) operations for N samples, and O(log N) for each prediction. p0 and p1 only depend
    on the order of the scores. So fits to logits and to their probabilities are equal, except for rounding. Separable
    data and classes without samples need no special case: p1 - p0 is large there. Without data, calibrated predictions
    are NaN. `weights` must be whole numbers. The gradient is 0.

    Attributes:
        knots: scores at which p0 or p1 has a step `(..., K)`, ascending, in the units of the predictions. Multi-class:
            `(..., C, K)`.
        lower: p0 between the knots `(..., K + 1)`: element i is p0 for scores from knot i - 1 up to below knot i.
        upper: p1 between the knots `(..., K + 1)`: element i is p1 for scores above knot i - 1 up to knot i.

    Reference:
        Vovk, Petej: Venn-Abers Predictors (UAI 2014), arXiv 1211.0025; Vovk, Petej, Fedorova: Large-scale probabilistic
        predictors with and without guarantees of validity (NeurIPS 2015), arXiv 1511.00213, sec. 2 and 4.

    Example:
        >>> preds = torch.tensor([0.1, 0.3, 0.4, 0.8])
        >>> calibrator = VennAbersCalibration().fit(preds, torch.tensor([0, 1, 0, 1]))
        >>> calibrator(preds)
        tensor([0.3333, 0.5000, 0.5000, 0.6667])
        >>> calibrator.predict_interval(torch.tensor([0.2, 0.9]))
        (tensor([0.0000, 0.5000]), tensor([0.6667, 1.0000]))
    """

    name = "Venn-Abers calibration"
    whole_weights = True
    initial: ClassVar = {"knots": [torch.nan], "lower": [torch.nan] * 2, "upper": [torch.nan] * 2}

    knots: Tensor
    lower: Tensor
    upper: Tensor

    def predict_interval(self, preds: Tensor) -> tuple[Tensor, Tensor]:
        """Return p0 and p1, the calibrated probabilities of y = 1 if the test sample had label 0 or 1.

        Args:
            preds: as for `forward`.

        Returns:
            p0 and p1 in [0, 1] with p0 <= p1, each of the shape and dtype of `forward`. Multi-class: the probabilities
            of each class against the rest, which are not normalised.

        Raises:
            RuntimeError, TypeError, ValueError: see `forward`.

        Gradient:
            0 with respect to `preds`.

        Reference:
            Vovk, Petej, Fedorova (2015), arXiv 1511.00213, sec. 2.
        """
        values, from_logits, dtype = self._canonical(preds)
        if self.task != "multiclass":
            p0, p1 = self._interval(values)
        else:
            scores = (log_odds(values) if from_logits else values).transpose(-1, -2)
            p0, p1 = (p.transpose(-1, -2) for p in self._interval(scores))
        return self._as_given(p0, dtype), self._as_given(p1, dtype)

    def binary_calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        """Return p1 / (1 - p0 + p1), or its log-odds log p1 - log(1 - p0)."""
        p0, p1 = self._interval(values)
        found = p1.log() - (1 - p0).log() if from_logits else p1 / (1 - p0 + p1)
        return torch.where(values.isnan(), values, found.to(values.dtype))

    def _interval(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return p0 and p1 for values `(..., N)`, NaN for NaN."""
        x = finite(values.detach().to(wide_dtype(values.device)))
        knots, lower, upper = self.knots, self.lower, self.upper
        if knots.dim() > 1:
            x, knots, lower, upper = with_same_batch(x, knots, lower, upper)
        at = torch.searchsorted(knots.contiguous(), x.contiguous(), right=True)
        on_knot = _at(pad(knots, (1, 0), value=-torch.inf), at) == x
        p0, p1 = _at(lower, at), _at(upper, at - on_knot.long())
        return p0.masked_fill(x.isnan(), torch.nan), p1.masked_fill(x.isnan(), torch.nan)

    def remarks(self) -> list[str]:
        """Return a sentence if there are no samples of positive weight."""
        empty = bool(self.lower.isnan().any())
        return [NO_DATA_REMARK] if empty else []

    def shown_parameters(self) -> list[str]:
        """Return the number of knots as text, for `repr`."""
        return [f"n_knots={self.knots.shape[-1]}"]

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        """Return the number of steps and the range of calibrated probabilities as a clause."""
        if self.lower.isnan().any():
            return "no samples of positive weight"
        if self.lower.dim() > 1:
            return f"one step function for each of {len(self.lower)} classes against the rest"
        p = self.upper / (1 - self.lower + self.upper)
        return f"a step function with {len(self.knots)} steps, from {p[0]:.3g} to {p[-1]:.3g}"

    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        """Return `knots`, `lower`, `upper` and `converged` by name; see `Calibrator.parameters_for`."""
        score, positives, n, size, unknown = sorted_counts(p, weights)
        knots, lower, upper = augmented_means(finite(score), tie_begins(score), positives, n, size)
        empty = unknown | (size == 0).unsqueeze(-1)
        lower, upper = lower.masked_fill(empty, torch.nan), upper.masked_fill(empty, torch.nan)
        return {"knots": knots, "lower": lower, "upper": upper, "converged": ~empty.squeeze(-1)}


def _at(column: Tensor, index: Tensor) -> Tensor:
    """Return the elements at an index, for a column `(K,)` of all leading axes, or of the batch of the index."""
    return column[index] if column.dim() == 1 else column.gather(-1, index)
