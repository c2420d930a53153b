"""Histogram binning."""

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import sample_weights
from torchcalib.calibration.one_against_rest import OneAgainstRest
from torchcalib.core.arguments import check_choice, check_count, check_flag
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import bin_index, bin_sums, with_same_batch

Empty = Literal["keep", "zero"]


class HistogramBinning(OneAgainstRest):
    """Histogram binning: replaces a probability by the frequency of positives in its equal-width bin.

    Multi-class tasks calibrate one class against the rest and normalise. The fit is in closed form, also for separable
    data, a single class and infinite logits. Frequencies of 0 and 1 are possible. A multi-class row whose calibrated
    probabilities are all 0 becomes uniform. The gradient is 0 in bins with samples.

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
    zeros = "any class"
    settings = ("n_bins", "right", "empty")
    initial: ClassVar = {"rate": [torch.nan]}

    rate: Tensor

    def __init__(self, n_bins: int = 15, right: bool = False, empty: Empty = "keep") -> None:
        super().__init__()
        check_count("n_bins", n_bins)
        check_flag("right", right)
        check_choice("empty", empty, get_args(Empty))
        self.n_bins, self.right, self.empty = n_bins, right, empty

    def binary_calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        """Return the frequency of positives (or its logit) in the bin of each value."""
        p = values.to(wide_dtype(values.device))
        p = p.sigmoid() if from_logits else p
        index = bin_index(p, self.rate.shape[-1], self.right)
        rate, index = with_same_batch(self.rate, index)
        rate = rate.gather(-1, index).to(values.dtype)
        return torch.where(rate.isnan() | values.isnan(), values, rate.logit() if from_logits else rate)

    def remarks(self) -> list[str]:
        """Return a sentence if there are no samples of positive weight."""
        empty = bool(self.rate.isnan().all(-1).any())
        return ["there are no samples of positive weight: predictions are left unchanged."] if empty else []

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        """Return the number of bins; see `Calibrator.in_words`."""
        return f"{self.n_bins} equal-width bins"

    def n_parameters(self, num_classes: int) -> float:
        """Return the number of bins of all probabilities with their own fit."""
        return self.n_bins * (num_classes if num_classes > 2 else 1)

    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        """Return `rate` and `converged` by name; see `Calibrator.parameters_for`."""
        w = sample_weights(p, weights)
        positives = (w * p.target.to(w.dtype)).masked_fill(w == 0, 0)
        index = bin_index(p.probs, self.n_bins, self.right).expand(w.shape)
        n, k = bin_sums(index, (w, positives), self.n_bins).unbind(-2)
        has_data = n.sum(-1, keepdim=True) > 0
        rate = (k / n).masked_fill((n == 0) & has_data, 0) if self.empty == "zero" else k / n
        return {"rate": rate, "converged": has_data.squeeze(-1)}
