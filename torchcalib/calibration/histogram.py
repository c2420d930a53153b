"""Histogram binning."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator, Transform, series_weights
from torchcalib.core.arguments import check_count, check_flag
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import bin_index, bin_sums

Empty = Literal["keep", "zero"]


class HistogramTransform(Transform):
    """Every probability becomes the share of ones in its bin.

    Attributes:
        rate: share of ones in every bin `(..., B)`; NaN in a bin that had no samples, where predictions stay as they
            are.
        right: whether bins are `(a, b]`.
    """

    rate: Tensor

    def __init__(self, *args: object, right: bool = False, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.right = right
        self.register_buffer("rate", torch.full((1,), torch.nan, dtype=torch.float64))

    def calibrated(self, values: Tensor) -> Tensor:
        """Look up the rate of the bin of every value."""
        p = values.to(wide_dtype(values.device))
        p = p.sigmoid() if self.from_logits else p
        index = bin_index(p, self.rate.shape[-1], self.right)
        batch = torch.broadcast_shapes(self.rate.shape[:-1], index.shape[:-1])  # type: ignore[no-untyped-call]
        index = index.expand(*batch, index.shape[-1])
        rate = self.rate.expand(*batch, self.rate.shape[-1]).gather(-1, index).to(values.dtype)
        return torch.where(rate.isnan() | values.isnan(), values, rate.logit() if self.from_logits else rate)

    def remarks(self) -> list[str]:
        """Return what there is to say against the fit."""
        if bool(self.rate.isnan().all(-1).any()):
            return ["there are no samples of positive weight: predictions are left as they are."]
        return []

    def get_extra_state(self) -> dict[str, object]:
        """Return what the buffers do not hold, for the `state_dict`."""
        return {**super().get_extra_state(), "right": self.right}


@dataclass(frozen=True)
class HistogramBinning(Calibrator[HistogramTransform]):
    """Histogram binning: a probability becomes the share of ones among the samples of its equal-width bin.

    For binary and multi-label predictions. The optimum has a formula: separable data, a single class and infinite
    scores need no care, and rates of 0 and 1 are possible.

    Attributes:
        n_bins: B.
        right: bins are `(i/B, (i+1)/B]` rather than `[i/B, (i+1)/B)`.
        empty: what becomes of predictions in a bin without samples. `"keep"`: they stay as they are. `"zero"`: they
            become 0, as in the published code of [EPSR].

    Gradient of the transform: 0 in the bins that had samples.

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
    tasks = ("binary", "multilabel")

    def __post_init__(self) -> None:
        check_count("n_bins", self.n_bins)
        check_flag("right", self.right)
        if self.empty not in get_args(Empty):
            raise ValueError(f"`empty` must be 'keep' or 'zero', got {self.empty!r}.")

    def fit_to(self, p: Predictions, weights: Tensor | None = None) -> HistogramTransform:
        """Fit to what has been read; see `Calibrator.fit_to`."""
        with torch.no_grad():
            w = series_weights(p, weights)
            ones = (w * p.target.to(w.dtype)).masked_fill(w == 0, 0)
            index = bin_index(p.probs, self.n_bins, self.right).expand(w.shape)
            n, k = bin_sums(index, (w, ones), self.n_bins).unbind(-2)
        transform = HistogramTransform(p.task, from_logits=p.from_logits, right=self.right)
        some = n.sum(-1, keepdim=True) > 0
        transform.rate = (k / n).masked_fill((n == 0) & some, 0) if self.empty == "zero" else k / n
        transform.converged = some.squeeze(-1)
        transform.grad_norm = torch.zeros_like(n[..., 0])
        return transform
