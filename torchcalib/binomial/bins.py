"""Decisions of the two-sided test for many samples a bin, at the price of a comparison for most."""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.binomial.beta import in_pieces
from torchcalib.binomial.two_sided import TIE, p_value, two_tails
from torchcalib.kernels.looking import look

_MARGIN = 1e-9  # critical values keep this far (relative) from alpha: rounding is 1e-13 here, 3e-11 in scipy at n = 1e6


class CriticalValues(NamedTuple):
    """What is known of the decision "p-value <= alpha" as a function of p: rejected up to `rejected_to` and from
    `rejected_from` on, kept from `kept_from` to `kept_to`, all inclusive. In between the test itself has to be made.
    """

    rejected_to: Tensor
    kept_from: Tensor
    kept_to: Tensor
    rejected_from: Tensor


def critical_values(k: Tensor, n: Tensor, alpha: float) -> CriticalValues:
    """Return, for every (k, n), where the decision `binomial_test(k, n, p) <= alpha` is known without a test.

    Let p > k/n (the other side is the mirror image), b_j = P(j), c = 1 + 1e-7, and J(p) the first outcome from n p on
    with b_J <= c b_k. The p-value is V(p) = F(p) + S_J(p) with F = P(X <= k) and S_j = P(X >= j). It jumps down where
    J steps up, and may rise in between, so that a single critical value would be wrong. But two facts bound it from
    one point p.

    Kept. J does not fall as p grows, for b_j / b_k is a constant times odds^(j-k). So for p' from k/n to p, with J =
    J(p), V(p') >= F(p') + S_J(p') =: G(p'). The derivative of G is n times P(J-1) - P(k), both of n - 1 trials, whose
    ratio is a constant times odds^(J-1-k): G falls to its least value at a known t, and rises from there. If t >= p,
    then V(p') >= G(p') >= G(p) = V(p). Else G' grows from t to p, as both probabilities are on the far side of their
    maxima (which is checked), so that V(p') >= G(t) >= V(p) - (p-t) G'(p). If this is more than alpha, all p' from k/n
    to p are kept.

    Rejected. From S_j one term to the next falls by at least (n-j)/(j+1) odds, so that V(p) <= F + b_J / (1-r) <= F +
    c b_k / (1-r) with r = (n-J)/(J+1) times the odds at which b_J = c b_k, the largest that J is ever used with. For
    p' >= p, F and b_k are smaller, J is not, and r does not grow with J. Hence F + c b_k / (1-r) <= alpha rejects all
    p' >= p.

    Why r does not grow: log r = L_J - s_J, where s_i = log((i+1)/(n-i)), m = J-k, m L_J = log c + s_k + ... + s_{J-1}.
    So (m+1) L_{J+1} = m L_J + s_J, and the claim is s_J - L_J <= (m+1) (s_{J+1} - s_J). Its left side is at most the
    mean of s_J - s_i over i = k .. J-1. The part -log(n-i) of s_i is convex: its mean is at most (m+1)/2 times its
    next step. The part log(i+1), with N = J+1: the sum over i is the log of N^m k!/(N-1)!, which is the product over t
    = k+1 .. N-1 of (1+1/t)^(t-k). These m factors grow with t, so each is at most (1+1/N)^(N-k) = (1+1/N)^(m+1); the
    mean of their logs is at most m+1 times log(1+1/N), the next step.

    A certificate holds or does not hold; where it is tried decides only how much stays uncertain: some 0.05 standard
    deviations of k/n on either side.
    """
    k, n = torch.broadcast_tensors(k.double(), n.double())  # type: ignore[no-untyped-call]
    axes = [1] * k.dim()
    side = torch.tensor([1.0, -1.0], dtype=torch.float64, device=k.device).reshape(2, *axes)
    # Points are tried at even steps of asin(sqrt(p)), whose standard deviation is 1/(2 sqrt(n)) everywhere.
    limit = torch.stack((_upper_limit(k, n, alpha), 1 - _upper_limit(n - k, n, alpha)))
    tried = torch.tensor(_TRIED_FIRST, dtype=torch.float64, device=k.device).reshape(-1, 1, *axes)
    certify = partial(_certificate, alpha=alpha)
    angle = limit.clamp(0, 1).sqrt().asin() + side * tried / (2 * n.sqrt())
    kept, rejected = side * (k / n), torch.full_like(limit, torch.inf)  # both times `side`: farther out is larger
    for last in (False, True):
        p = angle.clamp(0, math.pi / 2).sin().square()
        verdict = in_pieces(certify, k.expand_as(p), n.expand_as(p), p, side.expand_as(p))
        keeps, rejects = verdict > 0, verdict < 0
        kept = torch.where(keeps, side * p, -torch.inf).amax(0).maximum(kept)
        rejected = torch.where(rejects, side * p, torch.inf).amin(0).minimum(rejected)
        if not last:
            near, far = (t.abs().clamp(0, 1).sqrt().asin() for t in (kept, torch.minimum(rejected, (side + 1) / 2)))
            parts = torch.arange(1, 7, dtype=torch.float64, device=k.device).reshape(-1, 1, *axes) / 7
            angle = near + (far - near) * parts
    return CriticalValues(-rejected[1], -kept[1], kept[0], rejected[0])


_TRIED_FIRST = (-0.4, -0.2, -0.05, 0.05, 0.2, 0.5)


def _upper_limit(k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return the Clopper-Pearson upper limit, to some per cent of its distance from k/n (Paulson, Camp and Pratt)."""
    z = torch.special.ndtri(torch.tensor(1 - alpha / 2, dtype=torch.float64, device=k.device))
    a, b = k + 1, n - k
    root = 3 * z * (9 * a * b * (9 * n + 5 - z * z) + n + 1).clamp(min=0).sqrt()
    ratio = (81 * a * b - 9 * n - 8 - root) / (81 * a * a - 9 * a * (2 + z * z) + 1)
    limit: Tensor = 1 / (1 + (a / b).square() * ratio**3)
    return limit


def _certificate(k: Tensor, n: Tensor, p: Tensor, side: Tensor, alpha: float) -> Tensor:
    """Return 1 where p keeps everything between k/n and itself, -1 where it rejects everything beyond itself, or 0."""
    tails = two_tails(k, n, p)
    first, near, log_odds = tails.first, tails.k, tails.log_odds
    excess = (
        tails.log_ratio + (first / (n - near)).log() - log_odds
    )  # log of the rising term of G' over the falling one
    turn = log_odds - excess / (first - 1 - near)
    slope = tails.log_pmf.exp() * (n - near) * excess.expm1() * (1 + log_odds.exp())
    dip = (log_odds.sigmoid() - turn.sigmoid()) * slope
    convex = ((n - 1) * turn.sigmoid() >= near) & ((n - 1) * log_odds.sigmoid() <= first - 1)
    falls = (excess <= 0) | (first > n)
    least = tails.near + tails.far - torch.where(falls, 0.0, dip)
    keeps = (falls | convex) & (least > alpha * (1 + _MARGIN))
    last_odds = log_odds + (TIE - tails.log_ratio) / (first - near)
    ratio = torch.where(first < n, last_odds.exp() * (n - first) / (first + 1), 0.0)
    bound = tails.near + (tails.log_pmf + TIE).exp() / (1 - ratio)
    rejects = (ratio < 1) & (bound <= alpha * (1 - _MARGIN))
    verdict = keeps.double() - rejects.double()  # never both
    return verdict.where((p > 0) & (p < 1) & (side * (n * p - k) > 0), 0.0)


@torch.no_grad()
def rejects(p: Tensor, index: Tensor, k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Whether the test of each sample's probability against its bin rejects: `binomial_test(k, n, p) <= alpha`.

    Every decision is that of the test; but the test is made only for samples whose p lies close to a critical value
    of its bin (`critical_values`), once for each different p. All others cost a comparison. Where values cannot be
    looked at (`torch.compile`, `vmap`) every sample is tested.

    Args:
        p: probabilities, floating `(..., N)`.
        index: the bin of every sample, int64 `(..., N)`.
        k: successes of every bin, `(..., B)`.
        n: trials of every bin, `(..., B)`; bins without samples may hold 0.
        alpha: level of the test, in (0, 1).

    Returns:
        bool `(..., N)`; False where p is NaN.
    """
    p = p.double()
    lead, n_bins = p.shape[:-1], k.shape[-1]
    k, n = (t.double().expand(*lead, n_bins).reshape(-1) for t in (k, n))
    # One table of the bins of the whole batch: index_select is several times as fast as gather.
    series = torch.arange(lead.numel(), device=p.device).reshape(*lead, 1)
    index = (index + series * n_bins if lead else index).reshape(-1)
    flat = p.reshape(-1)
    rejected_to, kept_from, kept_to, rejected_from = (t.index_select(0, index) for t in critical_values(k, n, alpha))
    rejected = (flat <= rejected_to) | (flat >= rejected_from)
    unsure = ~(rejected | ((flat >= kept_from) & (flat <= kept_to)))
    seen = look(unsure.any())
    if seen is None:
        rejected = p_value(k[index], n[index], flat) <= alpha
    elif seen:
        values, value = torch.unique(flat[unsure], return_inverse=True)
        cases, case = torch.unique(value * len(k) + index[unsure], return_inverse=True)
        place = cases % len(k)
        rejected[unsure] = (p_value(k[place], n[place], values[cases // len(k)]) <= alpha)[case]
    return rejected.reshape(p.shape)


def rejected_in_bins(
    p: Tensor, ends: Tensor, k: Tensor, n: Tensor, alpha: float, counts: Tensor | None = None
) -> Tensor:
    """Temporary."""
    from torchcalib.kernels.ranking import run_index, run_sums

    index = run_index(ends, p.shape[-1])
    inside = index < ends.shape[-1]
    r = rejects(p.where(inside, torch.nan), index.clamp(max=ends.shape[-1] - 1), k, n, alpha)
    c = r.long() if counts is None else r * counts
    return run_sums(c, ends).long()
