"""Isotonic calibration by the pool-adjacent-violators algorithm (PAVA)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.core.predictions import Predictions
from torchcalib.ops.isotonic import block_ends
from torchcalib.ops.logs import safe_log, wide_dtype
from torchcalib.ops.sorting import run_sums, sorted_columns, tie_begins


class IsotonicCalibration(Calibrator):
    """Isotonic calibration: the non-decreasing function of the predictions with the least squared error.

    It also minimises the negative log-likelihood (NLL), and supports binary and multi-label predictions. A block is a
    run of scores with equal calibrated probability, found by the pool-adjacent-violators algorithm. Equal scores are in
    the same block. The function is linear between two blocks, and constant beyond the first and the last block. The
    fit is exact. Separable data give a step from 0 to 1. Probabilities of 0 and 1 are possible. Therefore the NLL of
    new data may be infinite. `weights` must be whole numbers. The gradient is the slope between blocks, and 0 in them.

    Attributes:
        knots: first and last score of each block `(..., K)`, ascending, in the units of the predictions.
        rates: calibrated probabilities at the knots `(..., K)`.

    Reference:
        Zadrozny, Elkan: Transforming classifier scores into accurate multiclass probability estimates (KDD 2002);
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.3; Brummer, du Preez: The PAV
        algorithm optimizes binary proper scoring rules (2013).

    Example:
        >>> preds = torch.tensor([0.1, 0.3, 0.4, 0.8])
        >>> IsotonicCalibration().fit(preds, torch.tensor([0, 1, 0, 1]))(preds)
        tensor([0.0000, 0.5000, 0.5000, 1.0000])
    """

    name = "isotonic calibration"
    tasks = ("binary", "multilabel")
    whole_weights = True
    initial: ClassVar = {"knots": [torch.nan] * 2, "rates": [torch.nan] * 2}

    knots: Tensor
    rates: Tensor

    def calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        """Return calibrated values by linear interpolation between the knots."""
        wide = wide_dtype(values.device)
        x = _finite(values.to(wide))
        if self.knots.dim() == 1:  # a single fit needs no copies of the knots for the leading axes of `values`
            above = torch.searchsorted(self.knots, x.detach().contiguous(), right=True)
            above = above.clamp(1, self.knots.shape[-1] - 1)
            low, high, low_rate, high_rate = (
                column[at] for column in (self.knots, self.rates) for at in (above - 1, above)
            )
        else:
            batch = torch.broadcast_shapes(self.knots.shape[:-1], x.shape[:-1])  # type: ignore[no-untyped-call]
            x = x.expand(*batch, x.shape[-1])
            knots = self.knots.expand(*batch, self.knots.shape[-1]).contiguous()
            rates = self.rates.expand(knots.shape)
            above = torch.searchsorted(knots, x.detach().contiguous(), right=True).clamp(1, knots.shape[-1] - 1)
            low, high = knots.gather(-1, above - 1), knots.gather(-1, above)
            low_rate, high_rate = rates.gather(-1, above - 1), rates.gather(-1, above)
        part = ((x - low) / torch.where(high > low, high - low, 1)).clamp(0, 1)
        p = low_rate + part * (high_rate - low_rate)
        return (safe_log(p) - safe_log(1 - p) if from_logits else p).to(values.dtype)

    def remarks(self) -> list[str]:
        """Return a sentence if there are no samples of positive weight."""
        empty = bool(self.rates.isnan().any())
        return ["there are no samples of positive weight: calibrated predictions are NaN."] if empty else []

    def shown_parameters(self) -> list[str]:
        """Return the number of knots as text, for `repr`."""
        return [f"n_knots={self.knots.shape[-1]}"]

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        """Return the number of levels; see `Calibrator.in_words`."""
        return "" if self.rates.dim() > 1 else f"{len(torch.unique(self.rates))} levels"

    def parameters_for(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        """Return `knots`, `rates` and `converged` by name; see `Calibrator.parameters_for`."""
        w = sample_weights(p, weights)
        unknown = w.isnan().any(-1, keepdim=True)  # instead of errors that would synchronise the device
        n = w.nan_to_num(0).long()
        # The sign of the counts encodes the outcome, because one column is faster to sort than two.
        scores, signed = p.values.expand(w.shape).masked_fill(n == 0, torch.nan), torch.where(p.target == 1, n, -n)
        if not w.shape[-1]:  # one element of weight 0 represents empty data
            scores, signed = pad(scores, (0, 1), value=torch.nan), pad(signed, (0, 1))
        score, signed, _, size = sorted_columns(scores, signed, None)
        n, positives = signed.abs(), signed.clamp(min=0)
        ends = block_ends("pava", tie_begins(score), positives, n).minimum(size.unsqueeze(-1))
        begins = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)
        is_block = ends > begins
        # Rows with fewer blocks repeat their last knot, which is the largest.
        places = torch.stack((begins, ends - 1), -1).flatten(-2).clamp(0, score.shape[-1] - 1)
        rates = (run_sums(positives, ends) / run_sums(n, ends)).repeat_interleave(2, -1)
        knots = _finite(score.gather(-1, places).to(w.dtype))
        knots, rates = (x.masked_fill(~is_block.repeat_interleave(2, -1), -torch.inf) for x in (knots, rates))
        empty = unknown | ~is_block.any(-1, keepdim=True)
        knots = knots.cummax(-1).values.masked_fill(empty, torch.nan)
        rates = rates.cummax(-1).values.masked_fill(empty, torch.nan)
        return {"knots": knots, "rates": rates, "converged": ~empty.squeeze(-1)}


def _finite(scores: Tensor) -> Tensor:
    """Clamp infinite logits, because differences of infinite values would be NaN."""
    return scores.clamp(-1e30, 1e30)
