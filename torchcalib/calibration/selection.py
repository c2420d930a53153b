"""Choose a calibrator by cross-validated scores of samples, and estimate its gain on new data."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import sample_weights
from torchcalib.core.predictions import Predictions
from torchcalib.ops.bisection import bisect
from torchcalib.ops.logs import wide_dtype

_Z, _Z_99 = 1.959963984540054, 2.5758293035489004  # 97.5% and 99.5% quantile of the normal distribution
_MOST = 100.0  # largest possible gain of a score that is not negative, in percent


_N_BOOTSTRAP, _MAX_UNITS = 200, 1_000
"""Number of bootstrap samples to correct the gain for the choice of the calibrator, and largest number of units.

More units are added up in random blocks, which have the same sampling distribution of sums.
"""


RowScore = Literal["nll", "brier"]
_ROW_SCORES = {"nll": "cross_entropy", "brier": "squared_error"}
"""Attribute of `Predictions` with the score of each sample, by score."""


def usable_score(score: RowScore, p: Predictions) -> RowScore:
    """Return `"brier"` instead of `"nll"` if the NLL of predictions is infinite."""
    return "brier" if score == "nll" and bool(contributions(p.cross_entropy, p).sum().isinf().any()) else score


def effective_samples(p: Predictions) -> float:
    """Return the effective number of samples, (sum w)^2 / sum w^2 for weights w; for labels the smallest one."""
    w = sample_weights(p)
    return float((w.sum(-1).square() / w.square().sum(-1)).nan_to_num(0).min())


def row_scores(score: RowScore, p: Predictions, values: Tensor) -> Tensor:
    """Return the score of each sample `(..., N)` for calibrated values of the predictions, float64."""
    found: Tensor = getattr(p.with_values(values.to(p.dtype)), _ROW_SCORES[score])
    return found.to(wide_dtype(found.device))


def class_counts(p: Predictions) -> Tensor:
    """Return the number of samples with positive weight of each class `(..., C)`, int64; 2 classes if binary."""
    target = p.target.long()
    present = torch.ones_like(target) if p.weights is None else (p.weights != 0).expand(target.shape).long()
    return target.new_zeros((*target.shape[:-1], p.num_classes)).scatter_add(-1, target * present, present)


def has_one_class(p: Predictions) -> bool:
    """Return whether all samples have the same class; multi-label: whether this is so for every label."""
    return bool(((class_counts(p) > 0).sum(-1) < 2).all())


def contributions(scores: Tensor, p: Predictions, groups: Tensor | None = None) -> Tensor:
    """Return the contribution of each independent unit to the mean score, `(..., U)`. Their sum is the mean score.

    Scores are `(..., N)`, for multi-label `(..., L, N)`. `groups` `(N,)` are groups of dependent samples; None if
    samples are independent.
    """
    w = sample_weights(p)
    parts = (w * scores).masked_fill(w == 0, 0) / w.sum(-1, keepdim=True)
    if p.task == "multilabel":
        parts = parts.mean(-2)
    if groups is None:
        return parts
    _, index = torch.unique(groups.reshape(-1), return_inverse=True)
    return parts.new_zeros(*parts.shape[:-1], int(index.max()) + 1).index_add(-1, index, parts)


class Candidate(NamedTuple):
    """Scores after calibration with one method."""

    parts: Tensor  # contributions of independent units to the cross-validated mean score `(U,)`, or this score `()`
    # mean score of a fit to all samples on the same samples; NaN if the score is not cross-validated
    in_sample: float = math.nan
    n_samples: float = 0  # effective number of samples, (sum w)^2 / sum w^2; 0 for the number of units
    # number of parameters of the method; among methods within noise, those with the fewest are preferred
    n_parameters: float = math.inf
    is_advisable: bool = True  # whether the method cannot assign probability 0, or the score remains finite if it does


class Choice(NamedTuple):
    """Chosen calibrator, and its gain in percent; see the fields `preferred`, `gain`, ... of `Recommendation`."""

    name: str
    gain: float = math.nan
    interval: tuple[float, float] | None = None
    is_significant: bool = True


def choose(before: Tensor, after: Mapping[str, Candidate]) -> Choice:
    """Return the smallest candidate within noise of the best one, and its gain, corrected for the choice.

    `before` contains the contributions of independent units to the raw score `(U,)`. If it is the raw score `()`, the
    best candidate is chosen, without interval. The scores in `after` are finite.
    """
    raw, names = float(before.sum()), list(after)
    gains = [100 * (1 - float(each.parts.sum()) / raw) for each in after.values()]
    if not before.dim():
        best = max(range(len(names)), key=gains.__getitem__)
        return Choice(names[best], gains[best])
    parts = torch.stack([each.parts for each in after.values()])
    sizes = torch.tensor([each.n_parameters for each in after.values()], dtype=torch.float64)
    index, n_rivals = (int(x) for x in _preferred(parts, sizes, torch.ones_like(before).unsqueeze(0)))
    chosen = after[names[index]]
    gain = gains[index] - 100 * _optimism_of_choice(chosen, n_rivals) / abs(raw)
    if len(names) > 1 and len(before) > 1:
        gain = min(gain, _gain_out_of_bag(before, parts, sizes))
    error = 100 * standard_error(before, chosen) / abs(raw)
    low, high = gain - _Z * error, interval_of(gains[index], error)[1]
    is_significant = gain > _Z_99 * error
    if is_significant and error > 0:
        z, z_low = _given_significance(gain / error)
        is_significant = z > 0
        if is_significant:
            gain, low = error * z, error * z_low
    return Choice(names[index], gain, (low, high), is_significant)


def interval_of(gain: float, error: float) -> tuple[float, float]:
    """Return the 95% interval of a gain in percent with a standard error."""
    return gain - _Z * error, min(gain + _Z * error, _MOST)


def _given_significance(z: float) -> tuple[float, float]:
    """Return the estimate of the mean of a normal variable that exceeded `_Z_99`, and its lower 97.5% limit.

    Only significant gains lead to advice. They are too large on average, because noise is one of the reasons for their
    significance. The conditional likelihood of the mean m, given Z > c, is the density phi(z - m) / Phi(m - c). Its
    maximum solves z = E[Z | Z > c]. The limit solves P(Z > z | Z > c) = 0.025. For large z, they approach z and
    z - 1.96.

    Reference:
        Zhong, Prentice: Bias-reduced estimators and confidence intervals for odds ratios in genome-wide association
        studies (Biostatistics, 2008), sec. 2.
    """
    normal = NormalDist()

    def mean_is_below(m: float) -> bool:
        return m + normal.pdf(_Z_99 - m) / normal.cdf(m - _Z_99) < z

    def tail_is_below(m: float) -> bool:
        return normal.cdf(m - z) / normal.cdf(m - _Z_99) < 0.025

    return bisect(mean_is_below, -5.0, z, 60)[1], bisect(tail_is_below, -5.0, z, 60)[1]


def standard_error(before: Tensor, after: Candidate) -> float:
    """Return the standard error of the cross-validated score as an estimate for new data, given the raw score.

    The first part is that of a ratio of means over independent units (delta method; Cochran, Sampling Techniques,
    1977, eq. 2.46). It describes test samples for given fits. The second part is the variation of the fit. Near the
    optimum, the excess of the score is quadratic in the error of the parameters. Let their standardised errors be k
    normal variables e, and N the number of units. The true excess is |e|^2 / (2 N), and that in cross-validation
    (2 k - |e|^2) / (2 N). The difference has the variance 2 k / N^2, of which the first part contains k / N^2. The rest
    is o^2 / k for the optimism o = k / N, the held-out score minus the score of the fit on its own samples.
    For the NLL k = N o (Akaike 1974), which is also the effective number of parameters of a penalised method. For the
    Brier score, whose optimism is smaller, this overestimates the variance.
    """
    parts = after.parts.cpu()
    residual = parts - parts.sum() / before.sum() * before
    n = parts.numel()
    if n < 2:
        return math.nan
    variance = n / (n - 1) * (residual - residual.mean()).square().sum()
    if math.isfinite(after.in_sample):
        optimism = _optimism(after)
        variance = variance + optimism**2 / max(1.0, min(n, after.n_samples or n) * optimism)
    return float(variance.sqrt())


def _optimism(after: Candidate) -> float:
    """Return the held-out score minus the in-sample score, at least that of one parameter and independent samples."""
    return max(float(after.parts.sum()) - after.in_sample, 1 / (after.n_samples or after.parts.numel()))


def _optimism_of_choice(after: Candidate, n_rivals: int) -> float:
    """Return the expected error of the score of the best of several fits with k parameters that are equally good.

    With the errors e of `standard_error`, the cross-validated excess of a fit is (2 k - |e|^2) / (2 N), and its true
    excess is |e|^2 / (2 N). The best score is that of the largest |e|^2, which increases the true excess. For m fits
    with independent errors, the difference is (M - k) / N for the expected maximum M of m chi-squared variables with k
    degrees of freedom, M = integral of 1 - F^m. Here k / N is the optimism of the fit.
    """
    k = after.n_parameters
    if n_rivals < 2 or not math.isfinite(k) or not math.isfinite(after.in_sample):
        return 0.0
    x = torch.linspace(0, k + 20 * math.sqrt(k) + 20, 4_001, dtype=torch.float64)
    cdf = torch.special.gammainc(torch.tensor(k / 2, dtype=torch.float64), x / 2)
    largest = float(torch.trapezoid(1 - cdf**n_rivals, x))
    return _optimism(after) * (largest / k - 1)


def _preferred(parts: Tensor, sizes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the smallest candidate that is not significantly worse than the best one, `(B,)`.

    It is the best candidate of its size. Also return the number of candidates of this size within noise, `(B,)`.
    `parts` are the contributions of U units to the scores of M candidates `(M, U)`. `weights` are the numbers of copies
    of each unit in B samples `(B, U)`.
    """
    n = weights.sum(-1, keepdim=True)
    sums = weights @ parts.mT
    best = sums.argmin(-1, keepdim=True)
    difference = sums - sums.gather(-1, best)
    products = (parts * weights.unsqueeze(-2)) @ parts.mT
    squares = products.diagonal(dim1=-2, dim2=-1)
    with_best = products.gather(-1, best.unsqueeze(-2).expand(-1, len(parts), -1)).squeeze(-1)
    square = squares + squares.gather(-1, best) - 2 * with_best
    variance = ((square - difference.square() / n) * n / (n - 1)).nan_to_num(0).clamp(min=0)
    within_noise = difference <= _Z * variance.sqrt()
    smallest = sizes.masked_fill(~within_noise, math.inf).amin(-1, keepdim=True)
    rivals = within_noise & (sizes == smallest)
    return sums.masked_fill(~rivals, math.inf).argmin(-1), rivals.sum(-1)


def _gain_out_of_bag(before: Tensor, parts: Tensor, sizes: Tensor) -> float:
    """Return the gain in percent of the choice among candidates, on units that did not decide the choice (BBC-CV).

    `before` `(U,)` and `parts` `(M, U)` are the contributions of U units to the raw score and to those of M candidates.

    Reference:
        Tsamardinos, Greasidou, Borboudakis: Bootstrapping the out-of-sample predictions for efficient and accurate
        cross-validation (Machine Learning, 2018). Scores are pooled over bootstrap samples here.
    """
    generator = torch.Generator().manual_seed(0)
    n = min(before.numel(), _MAX_UNITS)
    block = torch.randperm(before.numel(), generator=generator) % n
    columns = torch.cat((before.unsqueeze(0), parts)).double()
    columns = columns.new_zeros(len(columns), n).index_add(-1, block, columns)
    drawn = torch.randint(n, (_N_BOOTSTRAP, n), generator=generator)
    weights = torch.zeros(_N_BOOTSTRAP, n, dtype=torch.float64).scatter_add(-1, drawn, torch.ones_like(drawn).double())
    chosen = _preferred(columns[1:], sizes, weights)[0].unsqueeze(-1)
    out_of_bag = (weights == 0).double() @ columns.mT
    return 100 * (1 - float(out_of_bag[:, 1:].gather(-1, chosen).sum() / out_of_bag[:, 0].sum()))
