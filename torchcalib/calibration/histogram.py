"""Histogram binning."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator, Transform, sample_weights
from torchcalib.core.arguments import check_choice, check_count, check_flag
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import bin_index, bin_sums

Empty = Literal["keep", "zero"]


class HistogramTransform(Transform):
    """Replaces every probability by the frequency of its bin.

    Attributes:
        rate: frequency of positives in every bin `(..., B)`; NaN in a bin without samples, where predictions are
            unchanged.
        right: whether bins are `(a, b]`.
    """

    settings = (*Transform.settings, "right")
    initial: ClassVar = {"rate": [torch.nan]}

    rate: Tensor
    right = False

    def calibrated(self, values: Tensor) -> Tensor:
        """Return the frequency of the bin of every value."""
        p = values.to(wide_dtype(values.device))
        p = p.sigmoid() if self.from_logits else p
        index = bin_index(p, self.rate.shape[-1], self.right)
        batch = torch.broadcast_shapes(self.rate.shape[:-1], index.shape[:-1])  # type: ignore[no-untyped-call]
        index = index.expand(*batch, index.shape[-1])
        rate = self.rate.expand(*batch, self.rate.shape[-1]).gather(-1, index).to(values.dtype)
        return torch.where(rate.isnan() | values.isnan(), values, rate.logit() if self.from_logits else rate)

    def remarks(self) -> list[str]:
        """See `Transform.remarks`."""
        empty = bool(self.rate.isnan().all(-1).any())
        return ["there are no samples of positive weight: predictions are left unchanged."] if empty else []


@dataclass(frozen=True)
class HistogramBinning(Calibrator[HistogramTransform]):
    """Histogram binning: replaces a probability by the frequency of positives in its equal-width bin.

    For binary and multi-label predictions. The fit is in closed form, also for separable data, a single class and
    infinite scores. Frequencies of 0 and 1 are possible.

    Attributes:
        n_bins: number of bins B.
        right: bins are `(i/B, (i+1)/B]` rather than `[i/B, (i+1)/B)`.
        empty: result in a bin without samples: `"keep"` leaves predictions unchanged, `"zero"` makes them 0, as in the
            published code of [EPSR].

    Gradient of the transform: 0 in bins with samples.

    Source:
        Zadrozny, Elkan: Obtaining calibrated probability estimates (ICML 2001); [EPSR] sec. 2.4.3.

    Example:
        >>> preds = torch.tensor([0.9, 0.8, 0.1, 0.2])
        >>> HistogramBinning(n_bins=2).fit(preds, torch.tensor([1, 0, 0, 0]), task="binary")(preds)
        tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """

    n_bins: int = 15
    right: bool = False
    empty: Empty = "keep"
    name = "histogram binning"
    tasks = ("binary", "multilabel")

    def __post_init__(self) -> None:
        check_count("n_bins", self.n_bins)
        check_flag("right", self.right)
        check_choice("empty", self.empty, get_args(Empty))

    def fit_to(self, p: Predictions, weights: Tensor | None = None) -> HistogramTransform:
        """See `Calibrator.fit_to`."""
        with torch.no_grad():
            w = sample_weights(p, weights)
            ones = (w * p.target.to(w.dtype)).masked_fill(w == 0, 0)
            index = bin_index(p.probs, self.n_bins, self.right).expand(w.shape)
            n, k = bin_sums(index, (w, ones), self.n_bins).unbind(-2)
        some = n.sum(-1, keepdim=True) > 0
        rate = (k / n).masked_fill((n == 0) & some, 0) if self.empty == "zero" else k / n
        transform = HistogramTransform.of(p, rate=rate, converged=some.squeeze(-1))
        transform.right = self.right
        return transform
