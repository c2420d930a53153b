"""Vector scaling, and penalised fits of smoothed log-probabilities, as torch operations."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton import CONVERGED, NO_DATA, SEPARABLE
from torchcalib.ops.newton.descent import all_true
from torchcalib.ops.newton.scores import LARGE_SCALE, PIECE, Samples, is_certain, is_near_top
from torchcalib.ops.newton.structured import (
    DIAGONAL,
    FULL,
    SoftmaxRegression,
    StructuredMinimum,
    identity,
    minimise,
)
from torchcalib.ops.operation import operation


class StructuredFit(NamedTuple):
    """Fits of softmax(W x + b)."""

    weight: Tensor  # diagonal of W `(R, S, C)`, or W `(R, S, C, C)`
    bias: Tensor  # b `(R, S, C)`
    grad_norm: Tensor  # norm of the gradient of the objective in all parameters, `(R, S)`; NaN for `SEPARABLE`
    # int64 `(R, S)`: `CONVERGED`, `SEPARABLE` (the NLL has no finite minimiser), `STOPPED` (the gradient is not small)
    # or `NO_DATA` (total weight 0, all values NaN)
    outcome: Tensor


def fit_vector(scores: Tensor, target: Tensor, weights: Tensor, alpha: Tensor) -> StructuredFit:
    """Fit softmax(a * s + b) with a scale and a bias per class, by minimising the negative log-likelihood (NLL).

    Classes with a score of -inf have probability 0. Samples whose label has a score of -inf are left out. The bias of a
    class without samples is -inf. The other biases have sum 0. Arguments are as for `fits.fit_temperature`, and the
    initial scale `alpha` `(R, S)`. `SEPARABLE` fits have this scale and bias 0.
    """
    return StructuredFit(*_fit(scores, target, weights, alpha, None, None, alpha, False))


def fit_structured(
    scores: Tensor,
    target: Tensor,
    weights: Tensor,
    alpha: Tensor,
    smoothing: Tensor,
    ridge: Tensor,
    start: Tensor,
    full: bool,
) -> StructuredFit:
    """Fit softmax(W x + b) with a ridge penalty, where x are smoothed log-probabilities; see `smoothed_log_probs`.

    The objective is the mean negative log-likelihood plus

        ridge_0 sum_k (W_kk - 1)^2 + ridge_1 sum_{k != l} W_kl^2 + ridge_2 sum_k b_k^2

    with positive factors `ridge` `(R, S, 3)`. It is strictly convex, so that every fit with data has one minimum.
    Arguments are as for `fits.fit_temperature`, and the inverse temperature `alpha`, the `smoothing` and the initial
    diagonal `start`, each `(R, S)`. W is diagonal unless `full`.
    """
    return StructuredFit(*_fit(scores, target, weights, alpha, smoothing, ridge, start, full))


def smoothed_log_probs(log_q: Tensor, alpha: Tensor, smoothing: Tensor) -> Tensor:
    """Return log((1 - e) softmax(alpha log q) + e / C) for the smoothing e in (0, 1], finite also where q = 0.

    `log_q` are log-probabilities up to a constant per row, `(..., N, C)`. `alpha` and `smoothing` are `(...)`.
    """
    smoothing = smoothing[..., None, None]
    log_q = log_q - log_q.detach().amax(-1, keepdim=True)
    z = (alpha[..., None, None] * log_q).masked_fill(log_q == -torch.inf, -torch.inf)
    return torch.log(z.softmax(-1) * (1 - smoothing) + smoothing / log_q.shape[-1])


Solution = tuple[Tensor, ...]


def _empty_results(
    scores: Tensor,
    target: Tensor,
    weights: Tensor,  # noqa: ARG001
    alpha: Tensor,
    smoothing: Tensor | None,  # noqa: ARG001
    ridge: Tensor | None,  # noqa: ARG001
    start: Tensor,  # noqa: ARG001
    full: bool,
) -> Solution:
    bias = alpha.new_empty((*alpha.shape, scores.shape[-1]))
    weight = bias.new_empty((*bias.shape, scores.shape[-1])) if full else bias.clone()
    return weight, bias, torch.empty_like(alpha), target.new_empty(alpha.shape)


@operation(
    "fit_structured(Tensor scores, Tensor target, Tensor weights, Tensor alpha, Tensor? smoothing, Tensor? ridge,"
    " Tensor start, bool full) -> (Tensor, Tensor, Tensor, Tensor)",
    _empty_results,
)
def _fit(
    scores: Tensor,
    target: Tensor,
    weights: Tensor,
    alpha: Tensor,
    smoothing: Tensor | None,
    ridge: Tensor | None,
    start: Tensor,
    full: bool,
) -> Solution:
    """Solve the fits of all replicates and batch elements `(..., S, N, C)`, few at a time; None is vector scaling."""
    given = Samples.flattened(scores, target, weights)
    n_replicates, n_elements, n = given.w.shape
    wide = wide_dtype(scores.device)
    alpha, start = (each.movedim(-2, 0).reshape(n_replicates * n_elements).to(wide) for each in (alpha, start))
    if smoothing is not None and ridge is not None:
        smoothing = smoothing.movedim(-2, 0).reshape(alpha.shape).to(wide)
        ridge = ridge.movedim(-3, 0).reshape(-1, 3).to(wide)
    element = torch.arange(n_elements, device=scores.device).repeat(n_replicates)
    batch_size = max(1, PIECE // max(1, n * scores.shape[-1]))
    solutions, similar = [], None
    for first in range(0, max(1, len(element)), batch_size):
        i = slice(first, first + batch_size)
        of_scores, of_target, w = given.x[element[i]], given.target[element[i]], given.w.flatten(0, 1)[i]
        if batch_size == 1 and scores.device.type == "cpu":
            used = w[0] != 0
            if value_if_available(used.any() & ~used.all()):  # for folds, leave out the samples of the held-out fold
                of_scores, of_target, w = of_scores[:, used], of_target[:, used], w[:, used]
        samples = of_scores.to(wide), of_target, w.to(wide), alpha[i]
        if smoothing is None or ridge is None:
            solution, found = _solve_vector(*samples, similar)
        else:
            solution, found = _solve_structured(*samples, similar, smoothing[i], ridge[i], start[i], full)
        solutions.append(solution)
        # A single fit is large. The next one starts at its result if it is a fit to the same samples.
        is_similar = batch_size == n_elements == 1 and found is not None and all_true(found.outcome == CONVERGED)
        similar = found if is_similar else None
    joined = [torch.cat(column) for column in zip(*solutions, strict=True)]
    return given.batch_axes_restored([x.reshape(n_replicates, n_elements, *x.shape[1:]) for x in joined])


def _solve_vector(
    scores: Tensor, target: Tensor, weights: Tensor, alpha: Tensor, similar: StructuredMinimum | None
) -> tuple[Solution, StructuredMinimum | None]:
    if not len(scores):
        return _empty_results(scores, target, weights, alpha, None, None, alpha, False), None
    # Unused rows may contain NaN.
    unused = weights == 0
    scores = scores.masked_fill_(unused.unsqueeze(-1), 0)
    certain = is_certain(scores)
    extent = scores.amax((-1, -2)) - scores.masked_fill(scores == -torch.inf, 0).amin((-1, -2))
    if value_if_available((extent <= LARGE_SCALE).all()) is not True:
        # Very low scores may represent the -inf of masked classes.
        near = is_near_top(scores - scores.amax(-1, keepdim=True))
        scores = scores.masked_fill(~near, -torch.inf)
    excluded = scores == -torch.inf
    # Leave out samples whose label has probability 0 or 1: their NLL is infinite, or 0 for all parameters.
    lost = excluded.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    w = weights.masked_fill(lost, 0)
    empty = ~(w.sum(-1, keepdim=True) > 0)
    w = w.masked_fill(certain, 0)
    total = w.sum(-1, keepdim=True)
    all_certain = ~(total > 0)
    w = (w / total).masked_fill(all_certain, 0)
    share = torch.zeros_like(scores[:, 0]).scatter_add(-1, target, w)
    present = share > 0
    separable = _separates_a_class(scores, target, w) | all_certain.squeeze(-1)
    excluded = excluded | ~present.unsqueeze(-2)
    given = None if value_if_available(excluded.any()) is False else excluded

    # Standardise the scores of each class. Newton steps do not depend on this, but their rounding errors do.
    scores = scores.masked_fill_(excluded, 0)
    weight_of = w.unsqueeze(-1) * ~excluded
    norm = weight_of.sum(-2).clamp(min=torch.finfo(w.dtype).tiny)
    mean = (weight_of * scores).sum(-2) / norm
    scores = scores.sub_(mean.unsqueeze(-2)).masked_fill_(excluded | unused.unsqueeze(-1), 0)
    spread = ((weight_of * scores.square()).sum(-2) / norm).sqrt()
    spread = torch.where(spread > 0, spread, 1)
    x = scores.div_(spread.unsqueeze(-2))

    # Temperature scaling in the parameters of the standardised scores.
    start = torch.stack((alpha.unsqueeze(-1) * spread, alpha.unsqueeze(-1) * mean), -1)
    start = start.nan_to_num(0).masked_fill(~present.unsqueeze(-1), 0)
    fixed = separable | empty.squeeze(-1)
    minimum = minimise(SoftmaxRegression(DIAGONAL, x, given, target, w, None), start, fixed, similar)
    theta, gradient, outcome, _ = minimum
    # Convert from standardised scores (s - mean) / spread to the original ones.
    scale = theta[..., 0] / spread
    bias = theta[..., 1] - scale * mean
    gradient = torch.stack((gradient[..., 0] * spread + gradient[..., 1] * mean, gradient[..., 1]), -1)
    # Biases have sum 0 over the classes with samples, and are -inf for the others.
    bias = bias.masked_fill(~present, 0)
    bias = bias - bias.sum(-1, keepdim=True) / present.sum(-1, keepdim=True).clamp(min=1)
    scale = torch.where(present, scale, alpha.unsqueeze(-1))
    bias = bias.masked_fill(~present, -torch.inf)

    outcome = outcome.masked_fill(separable, SEPARABLE).masked_fill(empty.squeeze(-1), NO_DATA)
    separable = (outcome == SEPARABLE).unsqueeze(-1)
    scale = torch.where(separable, alpha.unsqueeze(-1), scale).masked_fill(empty, torch.nan)
    bias = bias.masked_fill(separable, 0).masked_fill(empty, torch.nan)
    grad_norm = gradient.square().sum((-1, -2)).sqrt().masked_fill((separable | empty).squeeze(-1), torch.nan)
    return (scale, bias, grad_norm, outcome), minimum


def _separates_a_class(scores: Tensor, target: Tensor, w: Tensor) -> Tensor:
    """Return whether the score of some class separates its samples from all others, bool `(F,)`.

    The likelihood of vector scaling then rises without bound with the scale of this class. Few samples per class often
    have this property. Other separable data are recognised by the Newton steps.
    """
    n_classes = scores.shape[-1]
    label = target.unsqueeze(-1)
    is_used = (w > 0).unsqueeze(-1)
    own = scores.gather(-1, label).masked_fill(~is_used, torch.inf).squeeze(-1)
    lowest = scores.new_full((len(scores), n_classes), torch.inf).scatter_reduce(-1, target, own, "amin")
    others = scores.scatter(-1, label, -torch.inf).masked_fill(~is_used, -torch.inf).amax(-2)
    return ((lowest >= others) & (lowest < torch.inf)).any(-1)


def _solve_structured(
    scores: Tensor,
    target: Tensor,
    weights: Tensor,
    alpha: Tensor,
    similar: StructuredMinimum | None,
    smoothing: Tensor,
    ridge: Tensor,
    start: Tensor,
    full: bool,
) -> tuple[Solution, StructuredMinimum | None]:
    if not len(scores):
        return _empty_results(scores, target, weights, alpha, None, None, alpha, full), None
    unused = weights == 0
    total = weights.sum(-1)
    empty = ~(total > 0)
    total = total.masked_fill(empty, 1)
    w = weights / total.unsqueeze(-1)
    x = smoothed_log_probs(scores, alpha, smoothing).masked_fill_(unused.unsqueeze(-1), 0)
    layout = FULL if full else DIAGONAL
    theta = identity(layout, len(x), x) * start[:, None, None]
    of_diagonal, of_others, of_biases = ridge.unsqueeze(-1).unbind(-2)
    factors = of_others.unsqueeze(-1).expand_as(theta).clone()
    layout.own(factors).copy_(of_diagonal.expand_as(theta[..., 0]))
    factors[..., -1] = of_biases
    minimum = minimise(SoftmaxRegression(layout, x, None, target, w, factors), theta, empty, similar)
    theta, gradient, outcome, _ = minimum
    theta = theta.masked_fill(empty[:, None, None], torch.nan)
    weight = theta[..., :-1] if full else theta[..., 0]
    grad_norm = gradient.square().sum((-1, -2)).sqrt().masked_fill(empty, torch.nan)
    return (weight, theta[..., -1], grad_norm, outcome.masked_fill(empty, NO_DATA)), minimum
