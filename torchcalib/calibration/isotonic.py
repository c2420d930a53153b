"""Isotonic calibration."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.calibration.calibrator import Calibrator, Transform, series_weights
from torchcalib.core.predictions import Predictions
from torchcalib.ops.isotonic import block_ends
from torchcalib.ops.logs import safe_log, wide_dtype
from torchcalib.ops.sorting import run_sums, sorted_columns, tie_begins


class IsotonicTransform(Transform):
    """A rising function, linear between knots and constant beyond them.

    Attributes:
        knots: scores `(..., K)`, ascending, in the units of the predictions; two for a block, its first and last score.
        rates: calibrated probabilities there `(..., K)`.
    """

    knots: Tensor
    rates: Tensor

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        for name in ("knots", "rates"):
            self.register_buffer(name, torch.full((2,), torch.nan, dtype=torch.float64))

    def calibrated(self, values: Tensor) -> Tensor:
        """Interpolate between the knots."""
        wide = wide_dtype(values.device)
        x = _finite(values.to(wide))
        batch = torch.broadcast_shapes(self.knots.shape[:-1], x.shape[:-1])  # type: ignore[no-untyped-call]
        x = x.expand(*batch, x.shape[-1])
        knots = self.knots.expand(*batch, self.knots.shape[-1]).contiguous()
        rates = self.rates.expand(knots.shape)
        above = torch.searchsorted(knots, x.detach().contiguous(), right=True).clamp(1, knots.shape[-1] - 1)
        low, high = knots.gather(-1, above - 1), knots.gather(-1, above)
        low_rate, high_rate = rates.gather(-1, above - 1), rates.gather(-1, above)
        part = ((x - low) / torch.where(high > low, high - low, 1)).clamp(0, 1)
        p = low_rate + part * (high_rate - low_rate)
        return (safe_log(p) - safe_log(1 - p) if self.from_logits else p).to(values.dtype)

    def remarks(self) -> list[str]:
        """Return what there is to say against the fit."""
        empty = bool(self.rates.isnan().any())
        return ["there are no samples of positive weight: the transform gives NaN."] if empty else []


@dataclass(frozen=True)
class Isotonic(Calibrator[IsotonicTransform]):
    """Isotonic calibration (PAVA): the best rising function of the prediction, in squares and in NLL alike.

    For binary and multi-label predictions. Samples of equal score are pooled. Between the scores of two blocks the
    function is linear, beyond the first and the last it is constant. The optimum is found exactly; separable data give
    the step from 0 to 1, and rates of 0 and 1 are possible, so that the NLL of new data may be infinite. `weights` must
    be whole numbers.

    Gradient of the transform: the slope between blocks, 0 inside them.

    Source:
        Zadrozny, Elkan: Transforming classifier scores into accurate multiclass probability estimates (KDD 2002);
        [EPSR] sec. 2.4.3; Brummer, du Preez: The PAV algorithm optimizes binary proper scoring rules (2013).

    Example:
        >>> preds = torch.tensor([0.1, 0.3, 0.4, 0.8])
        >>> Isotonic().fit(preds, torch.tensor([0, 1, 0, 1]), task="binary")(preds)
        tensor([0.0000, 0.5000, 0.5000, 1.0000])
    """

    tasks = ("binary", "multilabel")
    whole_weights = True

    def fit_to(self, p: Predictions, weights: Tensor | None = None) -> IsotonicTransform:
        """Fit to what has been read; see `Calibrator.fit_to`."""
        with torch.no_grad():
            w = series_weights(p, weights)
            unknown = w.isnan().any(-1, keepdim=True)  # a bad row, where reading values back would synchronise
            n = w.nan_to_num(0).long()
            # Copies, negative for outcome 0: one column costs less to sort than two.
            scores, signed = p.values.expand(w.shape).masked_fill(n == 0, torch.nan), torch.where(p.target == 1, n, -n)
            if not w.shape[-1]:  # one element of weight 0 stands for no data
                scores, signed = pad(scores, (0, 1), value=torch.nan), pad(signed, (0, 1))
            score, signed, _, size = sorted_columns(scores, signed, None)
            n, positives = signed.abs(), signed.clamp(min=0)
            ends = block_ends("pava", tie_begins(score), positives, n).minimum(size.unsqueeze(-1))
            begins = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)
            held = ends > begins
            # Rows with fewer blocks end in copies of their last knot, the largest one.
            places = torch.stack((begins, ends - 1), -1).flatten(-2).clamp(0, score.shape[-1] - 1)
            rates = (run_sums(positives, ends) / run_sums(n, ends)).repeat_interleave(2, -1)
            knots = _finite(score.gather(-1, places).to(w.dtype))
            knots, rates = (x.masked_fill(~held.repeat_interleave(2, -1), -torch.inf) for x in (knots, rates))
            empty = unknown | ~held.any(-1, keepdim=True)
        transform = IsotonicTransform(p.task, from_logits=p.from_logits)
        transform.knots = knots.cummax(-1).values.masked_fill(empty, torch.nan)
        transform.rates = rates.cummax(-1).values.masked_fill(empty, torch.nan)
        transform.converged = ~empty.squeeze(-1)
        transform.grad_norm = torch.zeros_like(transform.knots[..., 0])
        return transform


def _finite(scores: Tensor) -> Tensor:
    """Bring infinite logits within reach of a difference."""
    return scores.clamp(-1e30, 1e30)
