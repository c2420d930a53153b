"""Where the decision of the two-sided test is known for a whole range of p at once."""

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.special.binomial import TIE, Tails, tails_at_jump

_MARGIN = 1e-9  # critical values keep this far (relative) from alpha: rounding is 1e-13 here, 3e-11 in scipy at n = 1e6
_PIECE = 512  # bins at a time: what is computed for them fits the cache


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
    with b_J <= c b_k. The p-value is V(p) = F(p) + S_J(p) with F = P(X <= k) and S_j = P(X >= j). As b_j / b_k is a
    constant times odds^(j-k), J does not fall as p grows: outcome j is in its turn up to the point p_j where b_j =
    c b_k, for which there is a formula. Between p_(J-1) and p_J the p-value is smooth; at p_J it jumps down by b_J, to
    F + S_(J+1). In between it may rise, so that a single critical value would be wrong. But two facts bound it.

    Kept. For p' from k/n to p, with J = J(p), V(p') >= F(p') + S_J(p') =: G(p'). The derivative of G is n times P(J-1)
    - P(k), both of n - 1 trials, whose ratio is a constant times odds^(J-1-k): G falls to its least value at a known
    t, and rises from there. If t >= p, then V(p') >= G(p') >= G(p) = V(p). Else G' grows from t to p, as both
    probabilities are on the far side of their maxima (which is checked), so that V(p') >= G(t) >= V(p) - (p-t) G'(p).
    If this is more than alpha, all p' from k/n to p are kept.

    Rejected. F falls as p grows. And S_J(p_J) does not grow with J: over l = log odds, the derivative of S_j is
    j (1-p) b_j; between p_(j-1) and p_j, b_j = c b_k exp((j-k) (l-l_j)), and b_k (1-p) falls (p > k/n). With m = j-k
    the rise of S_j from p to p_j is therefore at most j (1-p) (c b_k - b_j) / m, all at p. At p = p_(j-1), where
    c b_k = b_(j-1) and j (1-p) b_j = (n-j+1) p b_(j-1), this is b_(j-1) (j - (n+1) p) / m, and less than b_(j-1), as
    (n+1) p > k. But b_(j-1) is what the jump there takes off: S_j(p_j) <= S_j(p_(j-1)) + b_(j-1) = S_(j-1)(p_(j-1)).
    Hence, since G on a piece is at most the greater of its values at the two ends (it falls, then rises):

        V(p) + j (1-p) (c b_k - b_j) / m <= alpha, j = J(p), rejects all p' >= p. At p_j it reads V(p_j) <= alpha.
        F(p_j) + S_(j+1)(p_j) <= alpha and V(p_(j+1)) <= alpha reject all p' > p_j.

    That the p_j grow, and that outcome j has its turn, is checked at one j: (n+1) p_j < j says that b_(j-1) > b_j
    there. l_(j+1) is the mean of m times l_j and once s_j = log((j+1)/(n-j)), and the check is l_j < s_(j-1): so it
    holds for j+1 too, and l_(j+1) > l_j.

    Both are tried at four neighbouring jumps around the likely last one that ends above alpha. Mostly it is the
    border, and the decision is known everywhere but 1e-9 around it; else between two jumps, 1/(2n) apart or more.
    """
    k, n = torch.broadcast_tensors(k.double(), n.double())  # type: ignore[no-untyped-call]
    pieces = zip(torch.split(k.reshape(-1), _PIECE), torch.split(n.reshape(-1), _PIECE), strict=True)
    found = torch.cat([_critical_values(*piece, alpha) for piece in pieces], -1)
    return CriticalValues(*found.reshape(4, *k.shape).unbind())


def _critical_values(k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return the four critical values of every one of a row of bins, (4, B)."""
    fraction = k / n
    # Both sides are one problem: p < k/n for k is 1-p > (n-k)/n for n-k. If k = n, nothing lies beyond.
    k, n = torch.stack((k, n - k)), n.expand(2, -1)
    every = k == n
    k, n = k.masked_fill(every, 0), n.masked_fill(every, 1)
    window = torch.arange(-1, 3, dtype=torch.float64, device=k.device).reshape(-1, 1, 1)
    j = (_likely_jump(k, n, alpha) + window).maximum(k + 1).minimum(n)
    k, n = k.expand(j.shape), n.expand(j.shape)
    tails = tails_at_jump(k, n, j)
    keeps, rejects = verdicts(tails, n, alpha)
    next_rejects = torch.cat((rejects[1:] & (j[1:] == j[:-1] + 1), torch.zeros_like(rejects[:1]))) | (j == n)
    after = tails.near + tails.far - (tails.log_pmf + TIE).exp()
    rejects_after = next_rejects & (after <= alpha * (1 - _MARGIN) - 1e-12)
    band = _MARGIN / (j - k) + 1e-14  # log odds so near a jump that rounding may put them on its other side
    known_to = torch.where(keeps, tails.log_odds - band, -torch.inf).amax(0)
    known_from = torch.where(rejects_after, tails.log_odds + band, torch.inf)
    known_from = torch.where(rejects, tails.log_odds, torch.inf).minimum(known_from).amin(0)
    # As p, rounded to the side where it is known. At p = 0 and p = 1 the p-value is 0, or 1 if that is k/n.
    sign = torch.tensor([[1.0], [-1.0]], dtype=torch.float64, device=k.device)
    limit = (sign + 1) / 2
    kept = (sign * known_to).sigmoid() * (1 - sign * 4e-16)
    kept = torch.where(every, limit, torch.where(known_to == -torch.inf, fraction, kept))
    rejected = ((sign * known_from).sigmoid() * (1 + sign * 4e-16)).clamp(max=1)
    rejected = torch.where(every, sign * torch.inf, rejected)
    return torch.stack((rejected[1], kept[1], kept[0], rejected[0]))


def _likely_jump(k: Tensor, n: Tensor, alpha: float) -> Tensor:
    """Return about the last j with V(p_j) > alpha: a whole number, that need not be an outcome."""
    z = NormalDist().inv_cdf(alpha / 2)
    limit = (k + z * z / 2 - z * (z * z / 4 + k - k * k / n).sqrt()) / (n + z * z)  # Wilson (1927)
    stretch = torch.tensor([0.8, 1.0, 1.25], dtype=torch.float64, device=k.device).reshape(-1, 1, 1)
    j = (k + 2 * (n * limit - k) * stretch).round().maximum(k + 1).minimum(n)
    # V at three jumps: p from Stirling's formula, tails from the normal approximation of Peizer and Pratt (1968).
    # Its normal deviate is nearly linear in j.
    up, down = torch.stack((j, k.expand(j.shape))) + 0.5, (n + 0.5) - torch.stack((j, k.expand(j.shape)))
    rareness = torch.xlogy(up, up) + torch.xlogy(down, down)
    log_odds = (rareness[0] - rareness[1]) / (j - k)
    p, q = log_odds.sigmoid(), (-log_odds).sigmoid()
    last = torch.stack((k.expand(j.shape), j - 1))
    up, down = last + 0.5, (n - 0.5) - last
    deviance = torch.xlogy(up, up / (n * p)) + torch.xlogy(down, down / (n * q))
    d = last + 2 / 3 - (n + 1 / 3) * p + 0.02 * (q / (last + 1) - p / (n - last) + (q - 0.5) / (n + 1))
    deviate = d / (up - n * p).abs() * (2 / (1 + 1 / (6 * n)) * deviance).sqrt()
    value = torch.special.ndtr(torch.stack((deviate[0], -deviate[1]))).sum(0)
    y = torch.special.ndtri((value / 2).clamp(1e-300, 0.5))
    at = ((y > z).sum(0) - 1).clamp(0, 1).unsqueeze(0)
    (j0, y0), (j1, y1) = (torch.stack((j, y)).gather(1, (at + i).expand(2, 1, *at.shape[1:]))[:, 0] for i in (0, 1))
    return torch.where(j1 > j0, j0 + (z - y0) * (j1 - j0) / (y1 - y0), j0).nan_to_num(0.0).floor()


def verdicts(tails: Tails, n: Tensor, alpha: float, rejected_from: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return where p keeps everything between k/n and itself, and where it rejects everything beyond itself.

    The argument is that of `critical_values`; p is where the tails were taken, seen from the side of k.
    `rejected_from` are log odds from which on the test is known to reject.
    """
    k, first, log_odds = tails.k, tails.first, tails.log_odds
    p, q, pmf = log_odds.sigmoid(), (-log_odds).sigmoid(), tails.log_pmf.exp()
    value = tails.near + tails.far
    none = first > n  # no outcome of the far side is rare enough: the p-value is F, and falls
    count = first - k
    end = log_odds + (TIE - tails.log_ratio) / count
    in_turn = none | ((n + 1) * end.sigmoid() < first)
    excess = tails.log_ratio + (first / (n - k)).log() - log_odds  # log of the rising term of G' over the falling one
    turn = (log_odds - excess / (count - 1)).sigmoid()
    falls = none | (excess <= 0) | (count == 1)  # if J = k+1, then G = 1
    convex = ((n - 1) * turn >= k) & ((n - 1) * p <= first - 1)
    dip = (p - turn) * pmf * (n - k) / q * excess.expm1()
    keeps = in_turn & (falls | convex) & (value - torch.where(falls, 0.0, dip) > alpha * (1 + _MARGIN))
    rise = first * q * pmf * (math.exp(TIE) - tails.log_ratio.exp()).clamp(min=0) / count
    if rejected_from is not None:
        # Half a band allows for rounding. A jump that ends above alpha is a whole band before `rejected_from`.
        none = none | (end >= rejected_from - _MARGIN / count / 2)
    rejects = in_turn & (value + torch.where(none, 0.0, rise) <= alpha * (1 - _MARGIN))
    return keeps, rejects
