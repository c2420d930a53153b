"""Calibrators that use quantiles of the score: Bayesian binning into quantiles, and spline recalibration."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.calibration.isotonic import IsotonicCalibration, sorted_counts
from torchcalib.core.arguments import check_count, check_positive
from torchcalib.core.predictions import Predictions
from torchcalib.ops.host_values import largest
from torchcalib.ops.logs import inside, wide_dtype
from torchcalib.ops.sorting import end_of_ties

_PIECE = 2**20  # number of float64 values of basis functions in memory
_EPS = 2.0**-52  # smallest probability of spline recalibration


class _OfProbabilities(IsotonicCalibration):
    """Calibrator whose map is linear between probabilities, also for logits."""

    assigns_zero = False

    def binary_calibrated(self, values: Tensor, from_logits: bool) -> Tensor:
        wide = values.to(wide_dtype(values.device))
        p = super().binary_calibrated(wide.sigmoid() if from_logits else wide, False)
        return inside(p).logit().to(values.dtype) if from_logits else inside(p.to(values.dtype))

    def counts_of_probabilities(self, p: Predictions, weights: Tensor | None) -> tuple[Tensor, ...]:
        p = replace(p, from_logits=False, input_preds=p.probs, complement=None)
        score, *rest = sorted_counts(p, weights)
        return score.clamp(0, 1).to(wide_dtype(score.device)), *rest


class BayesianBinning(_OfProbabilities):
    """Bayesian binning into quantiles (BBQ): the mean of many equal-mass histograms, weighted by their evidence.

    A model has B bins of about N / B samples each. A bin has n samples, k of them positive. Let m be the midpoint of
    its interval. The prior of its frequency is Beta(a, b), with a = s m / B and b = s (1 - m) / B. Here s is
    `prior_size`. The posterior mean of the frequency is (k + a) / (n + a + b). The evidence of the model is

        prod_b G(s / B) / G(n + s / B) * G(k + a) / G(a) * G(n - k + b) / G(b)

    with the gamma function G. The models have N^(1/3) / c to c N^(1/3) bins, where c is `factor`, and equal prior
    probabilities. The calibrated probability is the mean of the posterior means, weighted by the evidence. It is a step
    function of the prediction, in (0, 1), and need not increase. Equal predictions are in the same bin, and bins meet
    halfway between two predictions. Every task is supported; multi-class tasks calibrate one class against the rest and
    normalise. Without data, calibrated predictions are NaN. `weights` must be whole numbers, because the models and
    their evidence depend on the number of samples. The gradient is 0.

    Args:
        prior_size: equivalent sample size s of the prior of all bins of a model, positive; 2 as published.
        factor: factor c between the cube root of N and the largest number of bins, at least 1; 10 as published.

    Attributes:
        knots: ends of the steps in probability `(..., K)`, ascending: the end of one step is the start of the next.
            Multi-class: `(..., C, K)`.
        rates: calibrated probabilities at the knots, of the shape of `knots`.

    Raises:
        TypeError, ValueError: for invalid arguments.

    Reference:
        Naeini, Cooper, Hauskrecht: Obtaining Well Calibrated Probabilities Using Bayesian Binning (AAAI 2015), doi
        10.1609/aaai.v29i1.9602.

    Example:
        >>> preds = torch.tensor([0.1, 0.3, 0.4, 0.8])
        >>> BayesianBinning().fit(preds, torch.tensor([0, 1, 0, 1]))(preds)
        tensor([0.1444, 0.6831, 0.2957, 0.7783])
    """

    name = "Bayesian binning into quantiles"
    whole_weights = True
    settings = ("prior_size", "factor")

    def __init__(self, prior_size: float = 2.0, factor: float = 10.0, *, from_logits: bool | None = None) -> None:
        super().__init__(from_logits=from_logits)
        check_positive("prior_size", prior_size)
        check_positive("factor", factor, at_least=1)
        self.prior_size, self.factor = prior_size, factor

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        if self.rates.isnan().any():
            return "no samples of positive weight"
        if self.rates.dim() > 1:
            return f"one step function for each of {len(self.rates)} classes against the rest"
        return f"a step function with {int((self.rates.diff() != 0).sum())} steps"

    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        score, positives, n, size, unknown = self.counts_of_probabilities(p, weights)
        positives, n, wide, size = positives.long(), n.long(), score.dtype, size.unsqueeze(-1)
        n_elements = score.shape[-1]
        place = torch.arange(n_elements, device=score.device)
        # Edge i is halfway between elements i - 1 and i. The first bin starts at 0, and the last one ends at 1.
        edges = pad((score[..., 1:] + score[..., :-1]) / 2, (1, 1))
        edges = edges.masked_fill(torch.arange(n_elements + 1, device=score.device) >= size, 1)
        edges[..., 0] = 0

        n_before, positives_before = pad(torch.stack((n, positives)).cumsum(-1), (1, 0))
        total = n_before[..., -1:]
        middle = total.to(wide) ** (1 / 3)
        least = (middle / self.factor).floor().clamp(min=1)
        most = (middle * self.factor).ceil().minimum(total).clamp(min=1)
        counted = n.cumsum(-1) - n  # samples before each element
        begins, rates, evidence = [], [], []
        # Under `torch.compile` and `vmap`, the number of elements replaces the unknown sum of the weights.
        bound = math.ceil(self.factor * n_elements ** (1 / 3))
        for n_bins in range(1, max(1, largest(most, bound)) + 1):
            # Bin i of N samples ends before sample i * N // B, or with the group of equal scores that contains it.
            cuts = torch.arange(1, n_bins + 1, device=score.device) * total // n_bins
            cuts = torch.searchsorted(counted, cuts).minimum(size)
            ends = end_of_ties(score, cuts).minimum(size)
            starts = pad(ends, (1, 0))[..., :-1]
            n_of_bins, positives_of_bins = (
                (x.gather(-1, ends) - x.gather(-1, starts)).to(wide) for x in (n_before, positives_before)
            )
            middle_of_bins = (edges.gather(-1, starts) + edges.gather(-1, ends)) / 2
            eps = torch.finfo(wide).eps
            prior, middle_of_bins = self.prior_size / n_bins, middle_of_bins.clamp(eps, 1 - eps)
            a, b = prior * middle_of_bins, prior * (1 - middle_of_bins)
            rate = (positives_of_bins + a) / (n_of_bins + prior)
            log_evidence = (
                math.lgamma(prior)
                - (n_of_bins + prior).lgamma()
                + (positives_of_bins + a).lgamma()
                - a.lgamma()
                + (n_of_bins - positives_of_bins + b).lgamma()
                - b.lgamma()
            )
            log_evidence = log_evidence.masked_fill(n_of_bins == 0, 0).sum(-1)  # empty bins have none
            is_model = (n_bins >= least) & (n_bins <= most)
            begins.append(starts)
            rates.append(rate)
            evidence.append(log_evidence.masked_fill(~is_model.squeeze(-1), -torch.inf))
        share = torch.stack(evidence, -1).softmax(-1).unsqueeze(-2)

        # The mean of step functions from its steps: each model adds the difference of its rates where a bin begins.
        steps = score.new_zeros((*score.shape[:-1], n_elements + 1))
        for k, (start, rate) in enumerate(zip(begins, rates, strict=True)):
            steps = steps.scatter_add(
                -1, start, share[..., k] * rate.diff(dim=-1, prepend=torch.zeros_like(rate[..., :1]))
            )
        mean = steps.cumsum(-1).gather(-1, place.minimum((size - 1).clamp(min=0)))
        empty = unknown | (size == 0)
        knots = edges.repeat_interleave(2, -1)[..., 1:-1].masked_fill(empty, torch.nan)
        mean = mean.repeat_interleave(2, -1).masked_fill(empty, torch.nan)
        return {"knots": knots, "rates": mean, "converged": ~empty.squeeze(-1)}


class SplineCalibration(_OfProbabilities):
    """Spline recalibration: adds the slope of a spline of the cumulative difference of outcome and probability.

    Let D(t) be the sum of y - p over the fraction t of samples with the smallest probabilities p, divided by the number
    N of all samples. A natural cubic spline s with equidistant knots is fitted to D by least squares. Its slope at t
    is the difference of frequency and probability at this quantile. The calibrated probability of a sample is p plus
    the mean slope over all samples with the same prediction. So predictions of a calibrated model hardly change. The
    result need not increase. Between two probabilities of the fit it is linear, and beyond the first and the last one
    it is constant.

    Let S be the sum of the probabilities of the fit. Calibrated probabilities are at least p / (1 + S), and at most
    1 - (1 - p) / (1 + N - S). The first limit is the posterior mean of a frequency r p if none of the S expected events
    occurred. The number of events has a Poisson distribution, and r the prior Gamma(1, 1). Probabilities and the limits
    are clipped to [2^-52, 1 - 2^-52]. So the negative log-likelihood (NLL) of new data is finite.

    Every task is supported; multi-class tasks calibrate one class against the rest and normalise. For two classes this
    equals the binary fit, because exchanging the classes exchanges the result. Without data, calibrated predictions are
    NaN. The gradient is the slope between probabilities of the fit.

    Differences from the authors' code:

    - Sample i of N ends at t = i / N, and D(0) = 0 is part of the fit. In the code, sample i is at (i - 1) / (N - 1).
    - Samples with the same prediction share the mean slope. In the code, each sample has the slope at its own t.
    - Between two samples the code exchanges the weights of the linear interpolation.
    - Results are limited as above. In the code, they are limited to [0, 1].
    - The authors calibrate the largest probability of each row. Here, every class is calibrated.

    The first three differences vanish for many samples with different predictions.

    Args:
        n_knots: number of knots of the spline, at least 2; 6 as published.

    Attributes:
        knots: probabilities of the fit `(..., K)`, ascending. Multi-class: `(..., C, K)`.
        rates: calibrated probabilities at the knots, of the shape of `knots`.

    Raises:
        TypeError, ValueError: for an invalid number of knots.

    Reference:
        Gupta, Rahimi, Ajanthan, Mensink, Sminchisescu, Hartley: Calibration of Neural Networks using Splines (ICLR
        2021), arXiv 2006.12800, sec. 4; the authors' code `spline-calibration`, `get_recalibration_function`.

    Example:
        >>> preds = torch.tensor([0.1, 0.3, 0.4, 0.8])
        >>> SplineCalibration(n_knots=3).fit(preds, torch.tensor([0, 1, 0, 1]))(preds)
        tensor([0.3893, 0.4951, 0.4382, 0.7440])
    """

    name = "spline recalibration"
    settings = ("n_knots",)
    state_format = 2

    def __init__(self, n_knots: int = 6, *, from_logits: bool | None = None) -> None:
        super().__init__(from_logits=from_logits)
        check_count("n_knots", n_knots, at_least=2)
        self.n_knots = n_knots

    def shown_parameters(self) -> list[str]:
        return []  # `settings` has the number of knots of the spline

    def in_words(self, class_names: Sequence[str] = ()) -> str:  # noqa: ARG002
        if self.rates.isnan().any():
            return "no samples of positive weight"
        return f"the probability plus the slope of a spline with {self.n_knots} knots"

    def binary_parameters(self, p: Predictions, weights: Tensor | None) -> dict[str, Tensor]:
        score, positives, n, size, unknown = self.counts_of_probabilities(p, weights)
        score, size = score.clamp(_EPS, 1 - _EPS), size.unsqueeze(-1)
        place = torch.arange(score.shape[-1], device=score.device).expand(score.shape)
        total = n.sum(-1, keepdim=True)
        total = torch.where(total > 0, total, 1).to(score)
        # t and D(t) before each element, and after the last one
        t = pad(n.cumsum(-1), (1, 0)) / total
        cumulated = pad((positives - n * score).cumsum(-1), (1, 0)) / total
        # First and one after the last element with the same score. D within such a group depends on its order, and has
        # no weight. Trapezoidal weights treat both ends of the groups in the same way.
        first, after = torch.searchsorted(score, score), end_of_ties(score, place + 1)
        share = t.gather(-1, after) - t.gather(-1, first)
        half = share.masked_fill(after != place + 1, 0) / 2
        n_rows = max(1, _PIECE // max(1, self.n_knots * t.shape[:-1].numel()))
        pieces = [torch.split(x, n_rows, -1) for x in (t, cumulated, pad(half, (1, 0)).scatter_add(-1, first, half))]

        matrix = t.new_zeros((*t.shape[:-1], self.n_knots, self.n_knots))
        right = matrix[..., :1]
        for piece, height, weight in zip(*pieces, strict=True):
            values = _natural_spline(piece, self.n_knots)
            weighted = (values * weight.unsqueeze(-1)).mT
            matrix, right = matrix + weighted @ values, right + weighted @ height.unsqueeze(-1)
        # The smallest solution of the normal equations, because few different scores determine no unique spline.
        solution = torch.linalg.pinv(matrix, hermitian=True) @ right
        s = torch.cat([(_natural_spline(piece, self.n_knots) @ solution).squeeze(-1) for piece in pieces[0]], -1)
        slope = (s.gather(-1, after) - s.gather(-1, first)) / share
        # Numbers of samples: for floating weights, those of Kish's effective number
        unit = 1.0 if p.copies else total / n.square().sum(-1, keepdim=True)
        expected = unit * (n * score).sum(-1, keepdim=True)
        lowest, highest = score / (1 + expected), 1 - (1 - score) / (1 + unit * total - expected)
        rates = (score + slope).clamp(lowest, highest).clamp(_EPS, 1 - _EPS)

        empty = unknown | (size == 0)
        used = pad(place, (0, 1), value=score.shape[-1]).minimum((size - 1).clamp(min=0))  # at least two knots
        return {
            "knots": score.gather(-1, used).masked_fill(empty, torch.nan),
            "rates": rates.gather(-1, used).masked_fill(empty, torch.nan),
            "converged": ~empty.squeeze(-1),
        }


def _natural_spline(t: Tensor, n_knots: int) -> Tensor:
    """Return the values of all basis functions at t in [0, 1], `(..., K)`.

    Basis function j is the natural cubic spline with value 1 at knot j and 0 at the other equidistant knots. Let h be
    the distance of knots, y the values of a spline at the knots, and c its second derivatives there. c is 0 at both
    ends. At the other knots, c_(j-1) + 4 c_j + c_(j+1) = 6 / h^2 (y_(j-1) - 2 y_j + y_(j+1)). Between two knots,

        s = A y_j + B y_(j+1) + h^2 / 6 ((A^3 - A) c_j + (B^3 - B) c_(j+1)),   A = (x_(j+1) - t) / h,   B = 1 - A.
    """
    unit = torch.eye(n_knots, dtype=t.dtype, device=t.device)
    h = 1 / (n_knots - 1)
    # Rows of second differences y_(j-1) - 2 y_j + y_(j+1) at the inner knots, and the tridiagonal matrix of c.
    differences = unit.diff(n=2, dim=0)
    tridiagonal = (differences + 6 * unit[1:-1])[:, 1:-1]
    second = torch.zeros_like(unit)
    second[1:-1] = 6 / h**2 * torch.linalg.solve(tridiagonal, differences)
    j = (t / h).floor().long().clamp(0, n_knots - 2)
    b = (t / h - j).unsqueeze(-1)
    a = 1 - b
    return a * unit[j] + b * unit[j + 1] + h**2 / 6 * ((a**3 - a) * second[j] + (b**3 - b) * second[j + 1])
