"""Choose a calibrator by likelihoods and cross-validated scores of samples, and estimate its gain on new data."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.core.predictions import Predictions
from torchcalib.ops.logs import wide_dtype

_Z, _Z_99 = 1.959963984540054, 2.5758293035489004  # 97.5% and 99.5% quantile of the normal distribution
_MOST = 100.0  # largest possible gain of a score that is not negative, in percent
_LEVEL, _WITHIN_NOISE = 0.01, 0.05  # levels of the evidence for a gain, and of the tests between calibrators
_PER_PARAMETER = 5.0  # samples per parameter, from which likelihood ratios are close to their chi-squared law
_TIE = 1e-6  # scores whose relative difference is smaller are equal: it can be the rounding of a fit or of float32

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
    """Return the number of samples with positive weight of each class `(..., C)`, int64; 2 classes if binary.

    A sample with a soft target counts for every class of positive probability.
    """
    if not p.has_labels:
        shares = p.target if p.soft else torch.stack((1 - p.target, p.target), -1)
        return ((shares > 0) & (sample_weights(p) != 0).unsqueeze(-1)).sum(-2)
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
    return parts if groups is None else _sums_of_groups(parts, groups)


def _sums_of_groups(parts: Tensor, groups: Tensor) -> Tensor:
    """Return the sums `(..., G)` of values `(..., N)` over the samples of each group."""
    _, index = torch.unique(groups.reshape(-1), return_inverse=True)
    return parts.new_zeros(*parts.shape[:-1], int(index.max()) + 1).index_add(-1, index, parts)


def likelihood_ratio(p: Predictions, before: Tensor, after: Tensor, effect: float = 1.0) -> float:
    """Return the likelihood-ratio statistic of a fit, from the NLL of each sample before and after it `(..., N)`.

    The fit is that of maximum likelihood in a family with k parameters that contains the identity. If predictions are
    calibrated, the statistic has a chi-squared distribution with k degrees of freedom (Wilks 1938). It is divided by
    the design effect of floating weights (Kish) and by `effect`, that of clusters. Samples with infinite NLL are left
    out.

    Soft targets are means of unknown numbers of labels, so that cross entropy is a quasi-likelihood, whose scale is
    estimated in two ways. The statistic is divided by the larger one.

    - Residuals: sum w^2 |t - q|^2 / sum w (1 - |q|^2) for targets t and predictions q `(C,)`, times `effect`.
    - Direction of the fit: let D_u be the decrease of the sum over unit u, a row or a cluster, and T = sum D_u. The
      variance of the score is sum (D_u - mean D)^2, and its information 2 T. With this scale alone, the statistic is
      at most the robust Wald statistic (Cauchy-Schwarz), which has the same limit law for any variance function.

    Reference:
        Wedderburn: Quasi-likelihood functions, generalized linear models, and the Gauss-Newton method (Biometrika,
        1974); Papke, Wooldridge: Econometric methods for fractional response variables (Journal of Applied
        Econometrics, 1996), sec. 3.
    """
    w = sample_weights(p)
    used = w.masked_fill(before.isinf() | (w == 0), 0)
    decrease = (used * (before - after)).masked_fill(used == 0, 0)
    if p.has_labels:
        scale = 1.0 if p.copies else float(w.sum() / w.square().sum())
        return 2 * scale / max(1.0, effect) * float(decrease.sum())
    by_unit = decrease.sum(-2) if p.task == "multilabel" else decrease
    if p.groups is not None:
        by_unit = _sums_of_groups(by_unit, p.groups)
    total = float(by_unit.sum())
    noise = 1 - p.probs.square().sum(-1) if p.task == "multiclass" else p.probs * p.not_probs
    residuals, expected = (float(x.masked_fill(used == 0, 0).sum()) for x in (used**2 * p.squared_error, used * noise))
    if total <= 0 or expected <= 0:
        return 0.0
    in_direction = float((by_unit - by_unit.mean()).square().sum()) / (2 * total)
    return 2 * total / max(residuals / expected * max(1.0, effect), in_direction)


def design_effect(p: Predictions, before: Tensor, after: Tensor, groups: Tensor) -> float:
    """Return the variance of the sum of decreases of the NLL over groups, divided by that of independent samples."""
    decrease = contributions((before - after).masked_fill(before.isinf(), 0), p)
    by_group = _sums_of_groups(decrease, groups)
    of_groups, of_samples = (float((x - x.mean()).square().sum()) for x in (by_group, decrease))
    return of_groups / of_samples if of_samples else 1.0


def chi_squared_tail(statistic: float, n_parameters: float) -> float:
    """Return the probability that a chi-squared variable with these degrees of freedom is at least `statistic`."""
    half = torch.tensor((n_parameters / 2, max(statistic, 0) / 2), dtype=torch.float64, device="cpu")
    return float(torch.special.gammaincc(half[0], half[1]))


class Candidate(NamedTuple):
    """Scores after calibration with one method."""

    parts: Tensor  # contributions of independent units to the cross-validated mean score `(U,)`, or this score `()`
    # the same for a fit to all samples, on the same samples; None if the score is not cross-validated
    in_sample: Tensor | None = None
    n_samples: float = 0  # effective number of samples, (sum w)^2 / sum w^2; 0 for the number of units
    # number of parameters of the method; among methods within noise, those with the fewest are preferred
    n_parameters: float = math.inf
    is_advisable: bool = True  # whether the method cannot assign probability 0, or the score remains finite if it does
    statistic: float = math.nan  # result of `likelihood_ratio`; NaN for other methods, and for too few samples

    def on_cpu(self) -> "Candidate":
        """Return the candidate with tensors on the CPU."""
        return self._replace(parts=self.parts.cpu(), in_sample=None if self.in_sample is None else self.in_sample.cpu())

    @property
    def has_likelihood(self) -> bool:
        """Whether the evidence for this method is a likelihood ratio."""
        return not math.isnan(self.statistic)


def candidate_of(
    calibrator: Calibrator,
    p: Predictions,
    held_out: Tensor,
    in_sample: Tensor | None,
    nll: tuple[Tensor, Tensor] | None,
    *,
    is_advisable: bool,
    effect: float = 1.0,
) -> Candidate:
    """Return the candidate for a calibrator; `nll` are the NLL of each sample before and after the fit to all samples.

    `held_out` and `in_sample` are contributions of units to scores. `effect` is the design effect of clusters.
    """
    n, n_fits = effective_samples(p), p.samples[:-1].numel()
    n_parameters = n_fits * calibrator.n_parameters(p.num_classes)
    statistic = math.nan
    if (
        calibrator.contains_identity
        and nll is not None
        and n / max(1.0, effect) * n_fits >= _PER_PARAMETER * (n_parameters + n_fits)
    ):
        statistic = likelihood_ratio(p, *nll, effect)
    return Candidate(held_out, in_sample, n, n_parameters, is_advisable, statistic)


class Choice(NamedTuple):
    """Chosen calibrator, and its gain in percent; see the fields `preferred`, `gain`, ... of `Recommendation`."""

    name: str
    gain: float = math.nan
    interval: tuple[float, float] | None = None
    is_significant: bool = True
    p_value: float | None = None


def choose(before: Tensor, after: Mapping[str, Candidate], *, is_nll: bool) -> Choice:
    """Return the smallest candidate within noise of the best one, and its gain, corrected for the choice.

    `before` contains the contributions of independent units to the raw score `(U,)`. If it is the raw score `()`, the
    best candidate is chosen, without interval. The scores in `after` are finite, and those of the NLL if `is_nll`.

    If the likelihood ratio of any candidate is significant at level 1%, shared in proportion to 1 / k (Bonferroni),
    predictions are miscalibrated, and the chosen candidate is significant if it has a likelihood ratio too. The gain of
    other candidates must exceed 0 by 2.58 standard errors.

    Reference:
        Genovese, Roeder, Wasserman: False discovery control with p-value weighting (Biometrika, 2006), for weights.
    """
    raw, names = float(before.sum()), list(after)
    gains = [100 * (1 - float(each.parts.sum()) / raw) for each in after.values()]
    if not before.dim():
        best = max(range(len(names)), key=gains.__getitem__)
        return Choice(names[best], gains[best])
    tested = [each for each in after.values() if each.has_likelihood]
    total = sum(1 / each.n_parameters for each in tested)
    tails = [each.n_parameters * chi_squared_tail(each.statistic, each.n_parameters) for each in tested]
    p_value = min([1.0, *(total * tail for tail in tails)])

    def choice_among(candidates: Sequence[str]) -> Choice:
        parts = torch.stack([after[name].parts for name in candidates])
        sizes = torch.tensor([after[name].n_parameters for name in candidates], dtype=torch.float64, device="cpu")
        kept = torch.tensor(
            [p_value >= _LEVEL or not _is_worse(after[name], tested) for name in candidates], device="cpu"
        )
        index, n_rivals = (int(x) for x in _preferred(parts, sizes, torch.ones_like(before).unsqueeze(0), kept))
        chosen, raw_gain = after[candidates[index]], gains[names.index(candidates[index])]
        gain = raw_gain - 100 * _optimism_of_choice(chosen, n_rivals) / abs(raw)
        is_likely = chosen.has_likelihood and p_value < _LEVEL
        if len(candidates) > 1 and len(before) > 1 and not is_likely:
            gain = min(gain, _gain_out_of_bag(before, parts, sizes))
        low, high = interval_of(before, chosen, is_nll=is_nll)
        interval = low - (raw_gain - gain), high
        if chosen.has_likelihood:
            return Choice(candidates[index], gain, interval, p_value < _LEVEL and gain > 0, p_value)
        error = 100 * standard_error(before, chosen) / abs(raw)
        return Choice(candidates[index], gain, interval, gain > _Z_99 * error)

    choice = choice_among(names)
    if choice.p_value is None and not choice.is_significant and p_value < _LEVEL:
        return choice_among([name for name in names if after[name].has_likelihood])
    return choice


def _is_worse(candidate: Candidate, tested: Sequence[Candidate]) -> bool:
    """Return whether a candidate with more parameters has a significantly larger likelihood, at level 5%.

    Its held-out score must not be larger. A real effect can be smaller than the error of its estimate, so that a
    fit with many parameters is worse on new data.
    """
    return candidate.has_likelihood and any(
        chi_squared_tail(each.statistic - candidate.statistic, each.n_parameters - candidate.n_parameters)
        < _WITHIN_NOISE
        for each in tested
        if each.n_parameters > candidate.n_parameters and each.parts.sum() <= candidate.parts.sum()
    )


def interval_of(before: Tensor, after: Candidate, *, is_nll: bool) -> tuple[float, float]:
    """Return the 95% interval of the gain in percent on new data of the fit to all samples.

    It is the cross-validated gain plus and minus 1.96 standard errors, except for the NLL of candidates with a
    significant likelihood ratio. Let z be the standardised estimates of k parameters with true values m, and e = z - m.
    Near the optimum, the sum of the decreases of the NLL in the sample is |z|^2 / 2, and the gain on new data of this
    fit is |z|^2 / 2 - z e. With k = 1, e is standard normal. With more parameters, the others add a mean of k - 1 and a
    variance of 2 (k - 1) to z e, whose variance is that of the decreases in the sample.
    """
    raw = float(before.sum())
    gain = 100 * (1 - float(after.parts.sum()) / raw)
    is_likely = after.has_likelihood and chi_squared_tail(after.statistic, after.n_parameters) < _LEVEL
    if after.in_sample is None or not (is_nll and is_likely):
        error = 100 * standard_error(before, after) / abs(raw)
        return gain - _Z * error, min(gain + _Z * error, _MOST)
    per_parameter, k = _optimism(after) / after.n_parameters, after.n_parameters
    variance = _variance_of_ratio(before, after.in_sample) + 2 * (k - 1) * per_parameter**2
    half = 100 * _Z * math.sqrt(variance) / abs(raw)
    centre = gain + 100 * per_parameter / abs(raw)
    return min(gain, centre - half), min(max(gain, centre + half), _MOST)


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
    n = after.parts.numel()
    variance = _variance_of_ratio(before, after.parts)
    if after.in_sample is not None:
        optimism = _optimism(after)
        variance += optimism**2 / max(1.0, min(n, after.n_samples or n) * optimism)
    return math.sqrt(variance)


def _variance_of_ratio(before: Tensor, parts: Tensor) -> float:
    """Return the variance of the sum of `parts` `(U,)` in multiples of that of `before`; NaN for a single unit."""
    residual = parts - parts.sum() / before.sum() * before
    n = parts.numel()
    return n / (n - 1) * float((residual - residual.mean()).square().sum()) if n > 1 else math.nan


def _optimism(after: Candidate) -> float:
    """Return the held-out score minus the in-sample score, at least that of one parameter and independent samples."""
    assert after.in_sample is not None  # only scores that are cross-validated have an optimism
    least = 1 / (after.n_samples or after.parts.numel())
    return max(float(after.parts.sum()) - float(after.in_sample.sum()), least)


def _optimism_of_choice(after: Candidate, n_rivals: int) -> float:
    """Return the expected error of the score of the best of several fits with k parameters that are equally good.

    With the errors e of `standard_error`, the cross-validated excess of a fit is (2 k - |e|^2) / (2 N), and its true
    excess is |e|^2 / (2 N). The best score is that of the largest |e|^2, which increases the true excess. For m fits
    with independent errors, the difference is (M - k) / N for the expected maximum M of m chi-squared variables with k
    degrees of freedom, M = integral of 1 - F^m. Here k / N is the optimism of the fit.
    """
    k = after.n_parameters
    if n_rivals < 2 or not math.isfinite(k) or after.in_sample is None:
        return 0.0
    x = torch.linspace(0, k + 20 * math.sqrt(k) + 20, 4_001, dtype=torch.float64, device="cpu")
    cdf = torch.special.gammainc(torch.tensor(k / 2, dtype=torch.float64, device="cpu"), x / 2)
    largest = float(torch.trapezoid(1 - cdf**n_rivals, x))
    return _optimism(after) * (largest / k - 1)


def _preferred(parts: Tensor, sizes: Tensor, weights: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the index of the smallest candidate that is not significantly worse than the best one, `(B,)`.

    It is the best candidate of its size, and the first one of those that differ by rounding only. Also return the
    number of candidates of this size within noise, `(B,)`. `parts` are the contributions of U units to the scores of M
    candidates `(M, U)`. `weights` are the numbers of copies of each unit in B samples `(B, U)`. `kept` is False for
    candidates that are excluded `(M,)`; None excludes none.
    """
    n = weights.sum(-1, keepdim=True)
    sums = weights @ parts.mT
    if kept is not None:
        sums = sums.masked_fill(~kept, math.inf)
    best = sums.argmin(-1, keepdim=True)
    tie = _TIE * sums.gather(-1, best).abs()
    difference = sums - sums.gather(-1, best)
    products = (parts * weights.unsqueeze(-2)) @ parts.mT
    squares = products.diagonal(dim1=-2, dim2=-1)
    with_best = products.gather(-1, best.unsqueeze(-2).expand(-1, len(parts), -1)).squeeze(-1)
    square = squares + squares.gather(-1, best) - 2 * with_best
    variance = ((square - difference.square() / n) * n / (n - 1)).nan_to_num(0).clamp(min=0)
    within_noise = difference <= _Z * variance.sqrt() + tie
    smallest = sizes.masked_fill(~within_noise, math.inf).amin(-1, keepdim=True)
    rivals = within_noise & (sizes == smallest)
    of_rivals = sums.masked_fill(~rivals, math.inf)
    is_best = of_rivals <= of_rivals.amin(-1, keepdim=True) + tie
    return is_best.long().argmax(-1), rivals.sum(-1)


def _gain_out_of_bag(before: Tensor, parts: Tensor, sizes: Tensor) -> float:
    """Return the gain in percent of the choice among candidates, on units that did not decide the choice (BBC-CV).

    `before` `(U,)` and `parts` `(M, U)` are the contributions of U units to the raw score and to those of M candidates.

    Reference:
        Tsamardinos, Greasidou, Borboudakis: Bootstrapping the out-of-sample predictions for efficient and accurate
        cross-validation (Machine Learning, 2018). Scores are pooled over bootstrap samples here.
    """
    generator = torch.Generator().manual_seed(0)
    n = min(before.numel(), _MAX_UNITS)
    block = torch.randperm(before.numel(), generator=generator, device="cpu") % n
    columns = torch.cat((before.unsqueeze(0), parts)).double()
    columns = columns.new_zeros(len(columns), n).index_add(-1, block, columns)
    drawn = torch.randint(n, (_N_BOOTSTRAP, n), generator=generator, device="cpu")
    weights = torch.zeros(_N_BOOTSTRAP, n, dtype=torch.float64, device="cpu").scatter_add(
        -1, drawn, torch.ones_like(drawn).double()
    )
    chosen = _preferred(columns[1:], sizes, weights)[0].unsqueeze(-1)
    out_of_bag = (weights == 0).double() @ columns.mT
    return 100 * (1 - float(out_of_bag[:, 1:].gather(-1, chosen).sum() / out_of_bag[:, 0].sum()))
