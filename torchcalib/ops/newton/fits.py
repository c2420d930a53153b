"""Maximum likelihood fits of softmax(alpha s + beta) with both parameters or one of them, as torch operations.

Each fit converts scores s to standard form, calls a solver, and converts the results to the units of the scores.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE
from torchcalib.ops.newton.affine import solve_affine
from torchcalib.ops.newton.scores import (
    MASKED_SCORE,
    PIECE,
    LabelledScores,
    Samples,
    Solution,
    is_certain,
    standard_form,
)
from torchcalib.ops.newton.temperature import solve_temperature
from torchcalib.ops.operation import operation


class AffineFit(NamedTuple):
    """Fits of softmax(alpha s + beta), which minimise the mean negative log-likelihood (NLL).

    Samples with a single class of finite score, their label, are excluded too: their NLL is 0 for all parameters.
    """

    # Inverse temperature `(R, S)`, positive; 1 for `SEPARABLE`, 0 for `AT_ZERO`. Classes with a score of -inf have
    # probability 0, also for alpha = 0.
    alpha: Tensor
    # Biases `(R, S, C)`, 0 for `SEPARABLE`. Their sum over the classes with samples in the fit is 0. The biases of
    # other classes are -inf.
    beta: Tensor
    # Norm of the gradient of the mean NLL in alpha and beta, `(R, S)`; NaN for `SEPARABLE`. The derivative in alpha
    # does not count for `AT_ZERO`. The mean is over the samples in the fit.
    grad_norm: Tensor
    # int64 `(R, S)`: `CONVERGED`; `AT_ZERO` (no positive alpha is better than 0); `SEPARABLE` (the NLL has no finite
    # minimiser, or is constant, as no sample is in the fit); `STOPPED` (the NLL could not be decreased, but the
    # gradient is not small); or `NO_DATA` (total weight 0, all values NaN)
    outcome: Tensor
    # Weight of the samples whose label has a score of -inf, `(R, S)`. They are excluded from the fit, because their NLL
    # is infinite for every alpha > 0.
    lost: Tensor


def fit_temperature(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s) with alpha > 0 (temperature scaling) by a bracketed search; beta is 0.

    Scores `(S, N, C)` are log-probabilities or logits, without +inf and with a finite score in every row. The `target`
    has int64 labels `(S, N)`. Samples with weight 0, of the replicate weights `(R, S, N)`, are ignored.
    """
    return AffineFit(*_fit(scores, target, weights, False, True))


def fit_affine(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s + beta) with alpha > 0 (affine scaling of the logits) by damped Newton steps.

    Arguments are as for `fit_temperature`. The bias beta of a class without samples in the fit is -inf, which
    maximises the likelihood.
    """
    return AffineFit(*_fit(scores, target, weights, True, True))


def fit_bias(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(s + beta) by damped Newton steps; for the arguments see `fit_affine`."""
    return AffineFit(*_fit(scores, target, weights, True, False))


def _empty_results(scores: Tensor, target: Tensor, weights: Tensor, *_: bool) -> tuple[Tensor, ...]:
    shape = weights.shape[:-1]
    one = weights.new_empty(shape, dtype=wide_dtype(weights.device))
    outcome = target.new_empty(shape)
    return one, one.new_empty((*shape, scores.shape[-1])), one.clone(), outcome, one.clone()


@operation(
    "fit_affine(Tensor scores, Tensor target, Tensor weights, bool bias, bool scale)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _empty_results,
)
def _fit(scores: Tensor, target: Tensor, weights: Tensor, bias: bool, scale: bool) -> tuple[Tensor, ...]:
    """Fit `(..., N, C)` with any batch axes, few batch elements at a time; return the fields of `AffineFit`."""
    given = Samples.flattened(scores, target, weights)
    n_elements, n, n_classes = given.x.shape
    batch_size = max(1, PIECE // max(1, n * n_classes))
    pieces = [slice(i, i + batch_size) for i in range(0, max(1, n_elements), batch_size)]
    solve = partial(solve_affine, free_scale=scale) if bias else solve_temperature
    solutions = [_solve_batch(given.x[i], given.target[i], given.w[:, i], solve) for i in pieces]
    return given.batch_axes_restored([torch.cat(column, 1) for column in zip(*solutions, strict=True)])


def _solve_batch(
    scores: Tensor, target: Tensor, weights: Tensor, solve: Callable[[LabelledScores], Solution]
) -> AffineFit:
    n_classes = scores.shape[-1]
    wide = wide_dtype(scores.device)
    weights = weights.to(wide)
    top = scores.amax(-1, keepdim=True)
    label_score = scores.gather(-1, target.unsqueeze(-1)).to(wide).sub_(top).squeeze(-1)
    lost = label_score == -torch.inf
    unused = (weights == 0).all(0)
    w = weights.masked_fill(lost | (weights == 0), 0)
    has_samples = w.sum(-1) > 0

    # Without very low scores, no class can be masked, and no row is certain.
    standard, mean, scale, is_moderate = standard_form(scores, top, unused)
    if not is_moderate:
        w = w.masked_fill(is_certain(scores), 0)
    total = w.sum(-1)
    w = w / total.unsqueeze(-1)
    label_score = (label_score / scale.unsqueeze(-1)).masked_fill(lost | unused, 0).clamp(min=MASKED_SCORE)
    share = w.new_zeros((*w.shape[:-1], n_classes)).scatter_add(-1, target.expand(w.shape), w)
    kept, kept_top = (scores, top) if standard is None else (standard, None)
    label_mean = (w * label_score).sum(-1)
    in_standard_form = LabelledScores(
        kept, kept_top, mean, label_score, target, w, share, scale, label_mean, has_masked=not is_moderate
    )
    alpha, beta, grad_norm, outcome = solve(in_standard_form)
    if not is_moderate:  # with scores of MASKED_SCORE, iterations approach but do not reach a minimum at alpha = 0
        vanishing = (outcome == CONVERGED) & (alpha < 1e-12)
        alpha, outcome = alpha.masked_fill(vanishing, 0), outcome.masked_fill(vanishing, AT_ZERO)
    # Results in the units of the original scores.
    empty = ~has_samples
    outcome = outcome.masked_fill(~(total > 0), SEPARABLE).masked_fill(empty, NO_DATA)
    separable = outcome == SEPARABLE
    return AffineFit(
        torch.where(separable, 1.0, alpha / scale).masked_fill(empty, torch.nan),
        beta.masked_fill(separable.unsqueeze(-1), 0).masked_fill(empty.unsqueeze(-1), torch.nan),
        grad_norm.masked_fill(empty | separable, torch.nan),
        outcome,
        weights.masked_fill(~lost, 0).sum(-1),
    )
