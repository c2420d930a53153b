"""Calibrators by isotonic fits: isotonic calibration, centred isotonic calibration, and Venn-Abers predictors."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.calibration.calibrator import sample_weights
from torchcalib.calibration.one_against_rest import OneAgainstRest
from torchcalib.core.predictions import Predictions
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.isotonic import augmented_means, block_ends
from torchcalib.ops.labelled import sort_labelled
from torchcalib.ops.logs import inside, safe_log, wide_dtype
from torchcalib.ops.operation import is_plain
from torchcalib.ops.segments import run_sums, with_same_batch
from torchcalib.ops.sorting import sorted_columns, tie_begins


class IsotonicCalibration(OneAgainstRest):
    """Isotonic calibration: the non-decreasing function of the predictions with the least squared error.

    It also minimises the negative log-likelihood (NLL). A block is a run of scores with equal calibrated probability,
    found by the pool-adjacent-violators algorithm. Equal scores are in the same block. The function is linear between
    two blocks, and constant beyond the first and the last block. The fit is exact. Separable data give a step from 0
    to 1. Probabilities of 0 and 1 are possible. Therefore the NLL of new data may be infinite. The gradient is the
    slope between blocks, and 0 in them.

    Multi-class tasks calibrate one class against the rest and normalise. A class without samples gets probability 0.
    A row whose calibrated probabilities are all 0 becomes uniform.

    Attributes:
        knots: first and last score of each block `(..., K)`, ascending, in the units of the predictions. Multi-class:
            `(..., C, K)`.
        rates: calibrated probabilities at the knots, of the shape of `knots`.

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
    assigns_zero: ClassVar[bool] = True
    initial: ClassVar = {"knots": [torch.nan] * 2, "rates": [torch.nan] * 2}
    ranges: ClassVar = {"rates": (0, 1)}

    def binary_calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        wide = wide_dtype(values.device)
        x = finite(values.to(wide))
        if self.knots.dim() == 1:  # a single fit needs no copies of the knots for the leading axes of `values`
            above = torch.searchsorted(self.knots, x.detach().contiguous(), right=True)
            above = above.clamp(1, self.knots.shape[-1] - 1)
            low, high, low_rate, high_rate = (
                column[at] for column in (self.knots, self.rates) for at in (above - 1, above)
            )
        else:
            x, knots, rates = with_same_batch(x, self.knots, self.rates)
            knots = knots.contiguous()
            above = torch.searchsorted(knots, x.detach().contiguous(), right=True).clamp(1, knots.shape[-1] - 1)
            low, high = knots.gather(-1, above - 1), knots.gather(-1, above)
            low_rate, high_rate = rates.gather(-1, above - 1), rates.gather(-1, above)
        part = ((x - low) / torch.where(high > low, high - low, 1)).clamp(0, 1)
        p = low_rate + part * (high_rate - low_rate)
        return (safe_log(p) - safe_log(1 - p) if from_logits else p).to(values.dtype)

    def shown_parameters(self) -> list[str]:
        return [f"n_knots={self.knots.shape[-1]}"]

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        if self.rates.dim() > 1:
            return f"one increasing function for each of {len(self.rates)} classes against the rest"
        return f"{len(set(self.rates.tolist()))} levels"

    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        score, positives, n, size, unknown = sorted_counts(p, weights)
        ends = block_ends("pava", tie_begins(score), positives, n).minimum(size.unsqueeze(-1))
        begins = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)
        is_block = ends > begins
        # Rows with fewer blocks repeat their last knot, which is the largest.
        places = torch.stack((begins, ends - 1), -1).flatten(-2).clamp(0, score.shape[-1] - 1)
        positives, total = run_sums(torch.stack((positives, n)), ends.expand(2, *ends.shape))
        rates = (positives / total).repeat_interleave(2, -1)
        score = finite(score.to(rates.dtype))
        knots = self.block_knots(score.gather(-1, places), rates, score, n, ends)
        knots, rates = (x.masked_fill(~is_block.repeat_interleave(2, -1), -torch.inf) for x in (knots, rates))
        empty = unknown | ~is_block.any(-1, keepdim=True)
        knots = knots.cummax(-1).values.masked_fill(empty, torch.nan)
        rates = rates.cummax(-1).values.masked_fill(empty, torch.nan)
        return {"knots": knots, "rates": rates, "converged": ~empty.squeeze(-1)}

    def block_knots(self, knots: Tensor, rates: Tensor, score: Tensor, n: Tensor, ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return two knots for each block: here its first and its last score, which are `knots`."""
        return knots


class CentredIsotonicCalibration(IsotonicCalibration):
    """Centred isotonic calibration (CIR): isotonic calibration that is strictly increasing between its blocks.

    Every block of `IsotonicCalibration` is replaced by one knot: the weighted mean of its scores, with the calibrated
    probability of the block. The function is linear between the knots, and constant before the first and after the last
    knot. Different scores between these knots get different probabilities. Every task is supported; multi-class tasks
    calibrate one class against the rest and normalise.

    As in the paper, a block with calibrated probability 0 or 1 keeps its first and last score, with a constant function
    between them. Therefore the negative log-likelihood (NLL) of new data may be infinite. A multi-class row whose
    calibrated probabilities are all 0 becomes uniform. (The package probmetrics also returns 0 and 1 for binary
    tasks. For multi-class tasks it raises probabilities to 1e-30 before the normalisation.)

    The mean and the interpolation use the units of the predictions. So fits to logits and to their probabilities
    differ. Logits are preferable if many probabilities are near 0 or 1. Infinite logits do not enter the mean score of
    a block with finite logits.

    Separable data give a step from 0 to 1. A class without samples gets probability 0. Without data, calibrated
    predictions are NaN. The gradient is the slope between knots.

    Attributes:
        knots: two scores for each block `(..., K)`, ascending, in the units of the predictions: twice the mean score,
            or the first and the last score if the probability is 0 or 1. Multi-class: `(..., C, K)`.
        rates: calibrated probabilities at the knots, of the shape of `knots`.

    Reference:
        Oron, Flournoy: Centered Isotonic Regression: Point and Interval Estimation for Dose-Response Studies (2017),
        arXiv 1701.05964.

    Example:
        >>> preds = torch.tensor([0.1, 0.3, 0.4, 0.8])
        >>> CentredIsotonicCalibration().fit(preds, torch.tensor([0, 1, 0, 1]))(preds)
        tensor([0.0000, 0.4000, 0.5556, 1.0000])
    """

    name = "centred isotonic calibration"

    def block_knots(self, knots: Tensor, rates: Tensor, score: Tensor, n: Tensor, ends: Tensor) -> Tensor:
        """Return the mean score of each block twice, but the first and the last score if its rate is 0 or 1."""
        n = n.masked_fill(score.abs() >= _INFINITE, 0).to(score.dtype)
        sums, total = run_sums(torch.stack((n * score, n)), ends.expand(2, *ends.shape))
        mean = sums / total
        first, last = knots[..., ::2], knots[..., 1::2]
        # Rounding must not move the mean out of its block. The mean is NaN if all scores are infinite.
        centre = mean.clamp(first, last).repeat_interleave(2, -1)
        return torch.where((rates > 0) & (rates < 1) & ~centre.isnan(), centre, knots)

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        if self.rates.isnan().any():
            return "no samples of positive weight"
        if self.rates.dim() > 1:
            return f"one increasing function for each of {len(self.rates)} classes against the rest"
        n_knots = 1 + int((self.knots.diff() > 0).sum())
        return f"increasing through {n_knots} points, from {self.rates[0]:.3g} to {self.rates[-1]:.3g}"


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
    are NaN. The gradient is 0. A weight is a number of samples, which may be fractional, and the test sample has weight
    1. Divide other weights by their mean.

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
    initial: ClassVar = {"knots": [torch.nan], "lower": [torch.nan] * 2, "upper": [torch.nan] * 2}
    ranges: ClassVar = {"lower": (0, 1), "upper": (0, 1)}

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
            p0, p1 = (p.transpose(-1, -2) for p in self._interval(self.scores_of_classes(values, from_logits)))
        return self._as_given(p0, dtype), self._as_given(p1, dtype)

    def binary_calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        """Return p1 / (1 - p0 + p1), or its log-odds log p1 - log(1 - p0)."""
        p0, p1 = self._interval(values)
        if from_logits:
            found = (p1.log() - (1 - p0).log()).to(values.dtype)
        else:
            found = inside((p1 / (1 - p0 + p1)).to(values.dtype))
        return torch.where(values.isnan(), values, found)

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

    def shown_parameters(self) -> list[str]:
        return [f"n_knots={self.knots.shape[-1]}"]

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        if self.lower.isnan().any():
            return "no samples of positive weight"
        if self.lower.dim() > 1:
            return f"one step function for each of {len(self.lower)} classes against the rest"
        p = self.upper / (1 - self.lower + self.upper)
        return f"a step function with {len(self.knots)} steps, from {p[0]:.3g} to {p[-1]:.3g}"

    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        score, positives, n, size, unknown = sorted_counts(p, weights)
        knots, lower, upper = augmented_means(finite(score), tie_begins(score), positives, n, size)
        empty = unknown | (size == 0).unsqueeze(-1)
        lower, upper = lower.masked_fill(empty, torch.nan), upper.masked_fill(empty, torch.nan)
        return {"knots": knots, "lower": lower, "upper": upper, "converged": ~empty.squeeze(-1)}


def _at(column: Tensor, index: Tensor) -> Tensor:
    """Return the elements at an index, for a column `(K,)` of all leading axes, or of the batch of the index."""
    return column[index] if column.dim() == 1 else column.gather(-1, index)


def sorted_counts(p: Predictions, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ascending scores, and the weights of positives and of all samples, `(..., M)`.

    Elements without samples, or of weight 0, are last, and have score +inf. Also return the number of other elements
    `(...)`, and True for unknown weights `(..., 1)`. Weights are in `wide_dtype`, in which means of up to 9e7 samples
    are compared exactly.
    """
    w = sample_weights(p, weights)
    unknown = w.isnan().any(-1, keepdim=True)  # instead of errors that would synchronise the device
    n = w.nan_to_num(0).to(wide_dtype(w.device))
    scores, is_positive = p.values.expand(w.shape).masked_fill(n == 0, torch.nan), (p.target == 1).expand(w.shape)
    if not w.shape[-1]:  # one element of weight 0 represents empty data
        scores, n, is_positive = pad(scores, (0, 1), value=torch.nan), pad(n, (0, 1)), pad(is_positive, (0, 1))
    on_cpu = scores.device.type == "cpu" and is_plain(scores, n)
    if on_cpu and not p.from_logits and value_if_available(((n == 0) | (n == 1)).all()):  # twice as fast
        score, label, size = sort_labelled(scores.clamp(0, 1), is_positive.to(torch.uint8))
        given = torch.arange(score.shape[-1], device="cpu") < size.unsqueeze(-1)
        return score.masked_fill(~given, torch.inf), (label & given).to(n), given.to(n), size, unknown
    # The sign of the weights encodes the outcome, because one column is faster to sort than two.
    score, signed, _, size = sorted_columns(scores, torch.where(is_positive, n, -n), None)
    return score, signed.clamp(min=0), signed.abs(), size, unknown


_INFINITE = 1e30
"""Replaces infinite logits, because differences of infinite values would be NaN."""


def finite(scores: Tensor) -> Tensor:
    """Replace infinite scores by finite ones of the same sign."""
    return scores.clamp(-_INFINITE, _INFINITE)
