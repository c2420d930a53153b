"""Fits as operations: conversion to standard form, series in pieces, and results in the units of the scores."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton.affine import solve_dp
from torchcalib.ops.newton.problem import (
    AT_ZERO,
    CONVERGED,
    FAR,
    NO_DATA,
    PIECE,
    SEPARABLE,
    Problem,
    Solved,
    standard_form,
)
from torchcalib.ops.newton.temperature import solve_temperature
from torchcalib.ops.operation import operation


class AffineFit(NamedTuple):
    """Fits of softmax(alpha s + beta).

    Attributes:
        alpha: `(R, S)`, positive. 0 under `AT_ZERO`, as a limit: a score of -inf stays -inf. 1 under `SEPARABLE`.
        beta: `(R, S, C)`, of sum 0 over the classes with samples, and -inf for the others; 0 under `SEPARABLE`.
        grad_norm: norm of the gradient of the mean NLL in the parameters that are not at a bound `(R, S)`; NaN under
            `SEPARABLE`.
        outcome: int64 `(R, S)`. `CONVERGED`. `AT_ZERO`: the best alpha is not positive, the scores carry no
            information about the class. `SEPARABLE`: no finite (alpha, beta) is best. `STOPPED`: the NLL could not be
            decreased further, but the gradient is not small. `NO_DATA`: no weight, all values are NaN.
        lost: weight of the samples whose label has a score of -inf `(R, S)`. Their NLL is infinite for every
            alpha > 0, so they are left out of the fit.
    """

    alpha: Tensor
    beta: Tensor
    grad_norm: Tensor
    outcome: Tensor
    lost: Tensor


def fit_temperature(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s), alpha > 0, by a bracketed search.

    Args:
        scores: log-probabilities or logits `(S, N, C)`, without +inf and with a finite score in every row.
        target: labels, int64 `(S, N)`.
        weights: `(R, S, N)`. Samples of weight 0 are ignored.
    """
    return AffineFit(*_fit(scores, target, weights, False))


def fit_dp(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s + beta), alpha > 0, by damped Newton steps; see `fit_temperature`.

    A class without samples gets beta = -inf, which maximises the likelihood.
    """
    return AffineFit(*_fit(scores, target, weights, True))


def _like(scores: Tensor, target: Tensor, weights: Tensor, _: bool) -> tuple[Tensor, ...]:
    """Return tensors in the shapes of the results of `_fit`."""
    shape = weights.shape[:-1]
    one = weights.new_empty(shape, dtype=wide_dtype(weights.device))
    outcome = target.new_empty(shape)
    return one, one.new_empty((*shape, scores.shape[-1])), one.clone(), outcome, one.clone()


@operation(
    "fit_affine(Tensor scores, Tensor target, Tensor weights, bool bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like,
)
def _fit(scores: Tensor, target: Tensor, weights: Tensor, bias: bool) -> tuple[Tensor, ...]:
    """Fit some series at a time; further leading axes are series, too."""
    series, n_weightings = scores.shape[:-2], weights.shape[-3]
    n_series, n, n_classes = series.numel(), *scores.shape[-2:]
    scores, target = scores.reshape(n_series, n, n_classes), target.reshape(n_series, n)
    weights = weights.movedim(-3, 0).reshape(n_weightings, n_series, n)
    if not n:  # one sample of weight 0 stands for no data
        scores, target, weights = pad(scores, (0, 0, 0, 1)), pad(target, (0, 1)), pad(weights, (0, 1))
    at_once = max(1, PIECE // max(1, n * n_classes))
    pieces = [slice(i, i + at_once) for i in range(0, max(1, n_series), at_once)]
    solve = solve_dp if bias else solve_temperature
    found = [_fit_series(scores[i], target[i], weights[:, i], solve) for i in pieces]
    joined = (torch.cat(column, 1) for column in zip(*found, strict=True))
    return tuple(x.reshape(n_weightings, *series, *x.shape[2:]).movedim(0, len(series) - 1) for x in joined)


def _fit_series(scores: Tensor, target: Tensor, weights: Tensor, solve: Callable[[Problem], Solved]) -> AffineFit:
    n_classes = scores.shape[-1]
    wide = wide_dtype(scores.device)
    weights = weights.to(wide)
    top = scores.amax(-1, keepdim=True)
    s_label = scores.gather(-1, target.unsqueeze(-1)).to(wide).sub_(top).squeeze(-1)
    lost = s_label == -torch.inf
    unread = (weights == 0).all(0)
    w = weights.masked_fill(lost | (weights == 0), 0)
    total = w.sum(-1)
    w = w / total.unsqueeze(-1)

    standard, mean, scale, usual = standard_form(scores, top, unread)
    s_label = (s_label / scale.unsqueeze(-1)).masked_fill(lost | unread, 0).clamp(min=FAR)
    share = w.new_zeros((*w.shape[:-1], n_classes)).scatter_add(-1, target.expand(w.shape), w)
    held, taken = (scores, top) if standard is None else (standard, None)
    whole = Problem(held, taken, mean, s_label, target, w, share, scale, (w * s_label).sum(-1))

    alpha, beta, grad_norm, outcome = solve(whole)
    if not usual:  # with a score of FAR, alpha can converge to 0 but never equals it
        vanishing = (outcome == CONVERGED) & (alpha < 1e-12)
        alpha, outcome = alpha.masked_fill(vanishing, 0), outcome.masked_fill(vanishing, AT_ZERO)
    empty = ~(total > 0)
    outcome = outcome.masked_fill(empty, NO_DATA)
    separable = outcome == SEPARABLE
    return AffineFit(
        torch.where(separable, 1.0, alpha / scale).masked_fill(empty, torch.nan),
        beta.masked_fill(separable.unsqueeze(-1), 0).masked_fill(empty.unsqueeze(-1), torch.nan),
        grad_norm.masked_fill(empty | separable, torch.nan),
        outcome,
        weights.masked_fill(~lost, 0).sum(-1),
    )
