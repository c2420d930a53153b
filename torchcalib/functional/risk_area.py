"""Area under the Bayes risk curve: the proper score of a weight w over operating points c.

Two classes: z is the log-odds of the prediction, and c = sigmoid(u). The score for y = 1 is the integral of w(c) (1-c)
over u > z, where the decision is a miss. The score for y = 0 is the integral of w(c) c over u < z (false alarms).

Several classes: the operating points are the points c of the simplex. The decision is the class k with the largest
q_k / c_k. A wrong decision costs 1 / c_h for the true class h.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack, get_args

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Beta
from torch.nn.functional import logsigmoid

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Reduction,
    Task,
    check_choice,
    check_count,
    check_result,
    check_seed,
    task_read_as,
)
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreSum
from torchcalib.functional.estimator import Declaration, metric_function
from torchcalib.functional.scores import Score, ScoreEstimator, scored
from torchcalib.io.errors import shown
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.host_values import constant
from torchcalib.ops.logs import safe_log, wide_dtype, xmul
from torchcalib.special.beta import betainc, is_true_without_sync

WeightFunction = Callable[[Tensor], Tensor]
AreaWeight = Literal["uniform", "beta22"] | Beta | WeightFunction
AreaComponent = Literal["value", "standard_error"]

_N_PANELS = 1024
_LAST = math.asinh(708 / 2)  # sigmoid(-708) is the smallest normal number
_Z, _LEGENDRE = np.polynomial.legendre.leggauss(8)
_NODES, _SHARES = ((1 + _Z) / 2).tolist(), (_LEGENDRE / 2).tolist()
_SMALLEST = 1e-6  # smallest argument of `betainc`
_NEGLIGIBLE = 1e-9  # a weight below this number at the last operating point is assumed to vanish
_PIECE = 2**18  # number of products that are computed together


@dataclass(frozen=True)
class _BetaWeight:
    """Density of Beta(a, b) times a factor."""

    a: float
    b: float
    factor: float = 1.0

    def costs(self, p: Tensor, not_p: Tensor, log_odds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the prediction p for y = 1 and y = 0."""
        miss = self._integral(self.b, self.a, not_p, p, -log_odds)
        return miss, self._integral(self.a, self.b, p, not_p, log_odds)

    def _integral(self, a: float, b: float, x: Tensor, not_x: Tensor, log_odds: Tensor) -> Tensor:
        """Return the integral of c^(a-1) (1-c)^(b-2) / B(a, b) over c in [0, x], times the factor."""
        if b == 2:  # I_x(a, 1) = x^a
            return self.factor * (a + 1) * x.pow(a)
        if b >= 1 + _SMALLEST:  # B(a, b-1) / B(a, b) = (a+b-1) / (b-1)
            swap = x > 0.5  # then only 1-x is accurate
            own, other = (constant(value, x.dtype, x.device) for value in (a, b - 1))
            first, second = torch.where(swap, other, own), torch.where(swap, own, other)
            share = betainc(first, second, torch.where(swap, not_x, x))
            return self.factor * (a + b - 1) / (b - 1) * torch.where(swap, 1 - share, share)
        return _integrals(_BetaWeight(a, b, self.factor).at, log_odds)[1]

    def at(self, u: Tensor) -> Tensor:
        """Return the weights of operating points with log-odds u."""
        log_scale = math.lgamma(self.a + self.b) - math.lgamma(self.a) - math.lgamma(self.b)
        return self.factor * (log_scale + (self.a - 1) * logsigmoid(u) + (self.b - 1) * logsigmoid(-u)).exp()

    def __repr__(self) -> str:
        return f"Beta({self.a:g}, {self.b:g})"


@dataclass(frozen=True)
class _WeightFunction:
    """Weight as a function of operating points: numbers c in (0, 1), or `rows` on the simplex of classes."""

    function: WeightFunction
    rows: bool

    def costs(self, _: Tensor, __: Tensor, log_odds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of a prediction for y = 1 and y = 0."""
        return _integrals(self.at, log_odds)

    def at(self, u: Tensor) -> Tensor:
        """Return the weights of operating points with log-odds u."""
        c, not_c = (x.sigmoid().clamp(torch.finfo(u.dtype).tiny, 1 - torch.finfo(u.dtype).eps / 2) for x in (u, -u))
        return self.checked(torch.stack((not_c, c), -1) if self.rows else c, c.shape)

    def checked(self, points: Tensor, shape: torch.Size) -> Tensor:
        """Return the weights of operating points. Raise an error if their shape or values are wrong."""
        kind = "rows of class probabilities" if self.rows else "numbers"
        advice = f"Operating points are {kind}, shape {tuple(points.shape)}."
        weights = check_result("weight", self.function(points), shape, "the weight of each operating point", advice)
        if is_true_without_sync(~(weights >= 0).all()):
            raise ValueError("`weight` must return numbers of at least 0, got a negative number or NaN. Use a density.")
        return weights.to(points.dtype)

    def __repr__(self) -> str:  # without an address, which would differ between processes
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)


def read_weight(weight: object, rows: bool) -> _BetaWeight | _WeightFunction | None:
    """Return the checked weight of operating points, which are rows of C numbers or single ones; None if constant."""
    if isinstance(weight, str) and weight in _NAMED:
        return _NAMED[weight]
    if isinstance(weight, Beta) and weight.batch_shape.numel() == 1:
        a, b = float(weight.concentration1), float(weight.concentration0)
        return None if a == b == 1 else _BetaWeight(a, b)
    if callable(weight):
        return _WeightFunction(weight, rows)
    raise ValueError(
        f"`weight` must be 'uniform', 'beta22', a torch.distributions.Beta of two numbers or a function of operating "
        f"points, got {shown(weight)}. Use 'uniform' for the cross entropy."
    )


_NAMED: dict[object, _BetaWeight | None] = {"uniform": None, "beta22": _BetaWeight(2, 2, 1 / 3)}


def weights_at(weight: AreaWeight, points: Tensor) -> Tensor:
    """Return the weights of operating points `(K,)` in (0, 1); see `bayes_risk_area`."""
    read = read_weight(weight, rows=False)
    return torch.ones_like(points) if read is None else read.at(points.logit())


def _integrals(weight: Callable[[Tensor], Tensor], log_odds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores for y = 1 and y = 0, given the weight as a function of the log-odds of operating points.

    The log-odds u = 2 sinh(s) are divided into panels of equal width in s: narrow ones near u = 0, wide ones where all
    weights are nearly powers of c or 1-c. Integrals over panels are summed once. Each sample adds a part of a panel,
    which provides the gradient.
    """
    node, share = (constant(values, log_odds.dtype, log_odds.device) for values in (_NODES, _SHARES))

    def between(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        width = (end - start).unsqueeze(-1)
        s = start.unsqueeze(-1) + width * node
        u = 2 * s.sinh()
        density = weight(u) * 2 * s.cosh() * width
        return (density * (-u).sigmoid()) @ share, (density * u.sigmoid()) @ share

    step = 2 * _LAST / _N_PANELS
    edge = torch.arange(_N_PANELS + 1, dtype=log_odds.dtype, device=log_odds.device) * step - _LAST
    missed, accepted = between(edge[:-1], edge[1:])
    zero = missed[:1] * 0
    missed = torch.cat((missed.flip(-1).cumsum(-1).flip(-1), zero))
    accepted = torch.cat((zero, accepted.cumsum(-1)))

    at = (log_odds.masked_fill(~log_odds.isfinite(), 0) / 2).asinh()
    panel = ((at.detach() + _LAST) / step).long().clamp(0, _N_PANELS - 1)
    miss = missed[panel + 1] + between(at, edge[panel + 1])[0]
    alarm = accepted[panel] + between(edge[panel], at)[1]

    # The score of a certain and wrong prediction is finite only if the weight vanishes at this end.
    low, high = weight(2 * torch.stack((edge[0], edge[-1])).sinh()).unbind()
    miss = torch.where(log_odds == -torch.inf, _to_end(missed[0], low), miss).masked_fill(log_odds == torch.inf, 0)
    alarm = torch.where(log_odds == torch.inf, _to_end(accepted[-1], high), alarm)
    return miss, alarm.masked_fill(log_odds == -torch.inf, 0)


def _to_end(integral: Tensor, last: Tensor) -> Tensor:
    return torch.where(last > _NEGLIGIBLE, torch.inf, integral)


def _points(num_classes: int, n_points: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return operating points `(M, C)` and the ratio of the uniform density to their density, `(M,)`.

    With uniform points the variance of 1 / c_h would be infinite. One coordinate of each point is therefore drawn with
    an additional factor c_h^(-1/2) of the density, for all classes h in turn. The ratio is that to the mean density.
    """
    wide = wide_dtype(device)
    counter = torch.arange(n_points, device=device)
    words = random_words(seed, torch.arange(num_classes + 1, device=device), counter)
    uniform = (words.to(wide) + 0.5) / 2**32
    gammas = -uniform[:-1].T.log()  # Gamma(1)
    chosen = counter % num_classes == torch.arange(num_classes, device=device).unsqueeze(-1)
    half = (2 * math.pi * uniform[-1:].T).cos().square()  # Gamma(1) times this number has the distribution Gamma(1/2)
    gammas = torch.where(chosen.T, gammas * half, gammas)
    c = gammas / gammas.sum(-1, keepdim=True)
    scale = math.exp(math.lgamma(num_classes - 0.5) - math.lgamma(num_classes) - math.lgamma(0.5))
    return c, 1 / (scale * (chosen.to(wide).mean(-1) * c.rsqrt()).sum(-1))


@dataclass(frozen=True)
class _Area:
    """Score of a weight, and how it is computed for several classes."""

    weight: _BetaWeight | _WeightFunction | None  # None means uniform
    component: AreaComponent
    n_points: int
    seed: int

    def of_predictions(self, p: Predictions) -> Tensor:
        """Return the score of each prediction, `(..., N)`."""
        if self.weight is None:
            return p.cross_entropy if self.component == "value" else torch.zeros_like(p.cross_entropy)
        if p.task != "multiclass":
            log_p, log_not_p = p.binary_log_probs
            return self.of_two(self.weight, p.probs, p.not_probs, log_p - log_not_p, p.target)
        wide = wide_dtype(p.target.device)
        classes = torch.arange(p.num_classes, device=p.target.device)
        t = p.target if p.soft else p.target.unsqueeze(-1) == classes
        return self.of_classes(self.weight, p.probs.to(wide), p.log_probs.to(wide), t.to(wide))

    def of_prior(self, _: ScoreSum, priors: Tensor, __: Task) -> Tensor:
        """Return the expected score of the constant prediction of the class priors, `(...)`."""
        log_priors = safe_log(priors)
        if self.weight is None:
            return 0 - xmul(priors, log_priors).sum(-1)
        return self.of_classes(self.weight, priors, log_priors, priors)

    def of_classes(self, weight: _BetaWeight | _WeightFunction, q: Tensor, log_q: Tensor, target: Tensor) -> Tensor:
        """Return the score `(...)` for probabilities q and target distributions `(..., C)`."""
        check_classes(weight, q.shape[-1])
        if isinstance(weight, _WeightFunction) and q.shape[-1] > 2:
            return self.of_points(weight, log_q, target)
        return self.of_two(weight, q[..., 1], q[..., 0], log_q[..., 1] - log_q[..., 0], target[..., 1])

    def of_two(
        self, weight: _BetaWeight | _WeightFunction, p: Tensor, not_p: Tensor, log_odds: Tensor, target: Tensor
    ) -> Tensor:
        """Return the score for probabilities p of y = 1 and targets, each `(...)`."""
        if self.component != "value":
            return torch.zeros_like(log_odds)
        miss, alarm = weight.costs(p, not_p, log_odds)
        return xmul(target, miss) + xmul(1 - target, alarm)

    def of_points(self, weight: _WeightFunction, log_q: Tensor, target: Tensor) -> Tensor:
        """Return the Monte Carlo estimate of the score, or its standard error, `(...)`."""
        num_classes = log_q.shape[-1]
        if self.n_points < num_classes:
            raise ValueError(f"`n_points` must be at least {num_classes}, the number of classes, got {self.n_points}.")
        points, ratio = _points(num_classes, self.n_points, self.seed, log_q.device)
        # With the divisor C-1 the uniform weight gives the cross entropy for every number of classes C.
        ratio = ratio * weight.checked(points, ratio.shape) / (num_classes - 1)
        costs = ratio.unsqueeze(-1) / points
        total = square = torch.zeros_like(log_q[..., 0])
        at_once = max(1, _PIECE // max(1, log_q.numel()))
        for c, cost in zip(torch.split(points, at_once), torch.split(costs, at_once), strict=True):
            decision = (log_q.unsqueeze(-2) - c.log()).argmax(-1)
            saved = target.gather(-1, decision) * cost[torch.arange(len(c), device=c.device), decision]
            score = (target @ cost.T - saved).clamp(min=0)
            total, square = total + score.sum(-1), square + score.square().sum(-1)
        mean = total / self.n_points
        if self.component == "value":
            return mean
        return ((square / self.n_points - mean.square()).clamp(min=0) / (self.n_points - 1)).sqrt()


def check_classes(weight: _BetaWeight | _WeightFunction | None, num_classes: int) -> None:
    """Raise ValueError for a weight of two classes if there are more."""
    if num_classes > 2 and isinstance(weight, _BetaWeight):
        raise ValueError(
            f"`weight` must be 'uniform' or a function for {num_classes} classes, got {weight!r}. Pass a density "
            "on the simplex, such as lambda c: Dirichlet(a).log_prob(c).exp(), or positive_classes=[...]."
        )


def _score_of(p: Predictions, area: _Area) -> Tensor:
    return area.of_predictions(p)


@metric_function(
    Declaration(
        name="Bayes risk area",
        question="weighted integral of the Bayes risk over all ratios of the costs",
        source="Ferrer & Ramos, Evaluating Posterior Probabilities, arXiv 2408.02841, sec. 2.3.4",
        unit="cost",
        perfect=0.0,
        value_range=(0.0, math.inf),
    )
)
def bayes_risk_area(
    task: Task | None = None,
    *,
    weight: AreaWeight = "uniform",
    component: AreaComponent = "value",
    n_points: int = 1024,
    seed: int = 0,
    normalize: Literal["prior"] | None = None,
    priors: Tensor | Sequence[float] | None = None,
    average: Average | None = "macro",
    reduction: Reduction = "mean",
    **options: Unpack[InputOptions],
) -> ScoreEstimator:
    """Area under the Bayes risk curve: integral of the Bayes risk over operating points c, with a weight w(c).

    Every weight defines a proper score. For two classes c is a number in (0, 1). A miss costs 1/c and a false alarm
    1/(1-c), and the decision is class 1 if its probability is above c; see `bayes_risk_curve`. The uniform weight gives
    the cross entropy in nats (`nll`), and the weight 2 c (1-c) the Brier score. In the literature on proper scores the
    costs are often 1-c and c. The weight is then w(c) / (c (1-c)).

    For C > 2 classes c is a point on the simplex. The decision is the class k with the largest q_k / c_k, and a wrong
    decision costs 1 / c_h for the true class h. The value is the mean over uniform points, divided by C-1. The uniform
    weight again gives the cross entropy, by an exact formula. For a function, the mean is estimated by the Monte Carlo
    method. Because the points are fixed, the estimate is itself a proper score.

    For soft targets the value is the expected score of sampled labels. For the Brier score of a binary target t it is
    larger by t (1-t) than `brier_score`.

    Args:
        weight: The weight w. `"uniform"`: 1, the density of Beta(1, 1). For two classes also `"beta22"`, which is
            2 c (1-c), a third of the density of Beta(2, 2), and `torch.distributions.Beta(a, b)`, its density (not in
            calls that `torch.compile` traces). Or a function from operating points to weights of at least 0. For binary
            and multi-label tasks the points are numbers c of any shape, and the weights have the same shape. For
            multi-class tasks the points are rows `(..., C)`, and the weights have the shape `(...)`. For two classes a
            row is (1-c, c).
        component: `"value"`, or `"standard_error"` of the Monte Carlo method. It is the mean of the standard errors of
            all samples. The standard error of the value is at most this large, because the samples share the points.
            The component is 0 for two classes and for the uniform weight, which do not need this method.
        n_points: Number M of Monte Carlo points, at least C.
        seed: Seed of the points, which are the same on every device.
        normalize: `"prior"` divides by the value of a model that always predicts the class priors.
        priors: Class priors that replace the class frequencies in the data, as in `nll`.

    Returns:
        `(...)`, multi-label `(..., L)` with `average=None`, in [0, inf], in the dtype of `preds` (at least float32).
        NaN without data. For two classes the relative error is below 1e-8 for a smooth weight, and of the order 1e-3
        for a weight with jumps. A prediction with probability 0 of the true class has an infinite score, unless the
        weight vanishes there.

    Raises:
        TypeError, ValueError: For invalid input, or a weight with a wrong shape or a negative value.

    Gradient:
        With respect to the predictions for two classes and for the uniform weight. None for Monte Carlo estimates,
        which are means of Bayes risks.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.4, eq. 34 and fig. 4.

    Example:
        >>> from torch.distributions import Beta
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1])
        >>> bayes_risk_area(preds, target, task="binary")
        tensor(0.2284)
        >>> bayes_risk_area(preds, target, task="binary", weight=Beta(2, 2))
        tensor(0.1400)
        >>> bayes_risk_area(preds, target, task="binary", weight=lambda c: 6 * c * (1 - c))
        tensor(0.1400)
    """
    check_choice("component", component, get_args(AreaComponent))
    check_count("n_points", n_points, at_least=2)
    check_seed(seed)
    rows = task_read_as(task, options) == "multiclass"
    area = _Area(read_weight(weight, rows), component, n_points, seed)
    score = Score(_score_of, area.of_prior, normalizable=component == "value", arguments=(area,))
    return scored(score, task, options, normalize=normalize, priors=priors, average=average, reduction=reduction)
