"""What the distances to votes have in common: the two distributions of every sample, and the parts of a distance."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import ScoreSum
from torchcalib.metrics.proper_scores import Score, ScoreMetric
from torchcalib.ops import logs
from torchcalib.ops.logs import safe_log, wide_dtype, xmul
from torchcalib.special.shares import mean_log_share

VotesComponent = Literal["value", "noise_floor", "corrected"]
Parts = Mapping[VotesComponent, Callable[[Predictions], Tensor]]
"""The per-sample scores that are components of one distance."""
LEAST_VOTES: Mapping[VotesComponent, int] = dict(zip(get_args(VotesComponent), (0, 1, 2), strict=True))
"""How many votes must be known to stand behind every target."""


class Shares(NamedTuple):
    """What is predicted and what was voted, for every sample; all of the sums' dtype.

    Attributes:
        q: predicted probabilities `(..., N, C)`; binary and multi-label C = 2, of no and of yes.
        log_q: their logs, exact where q is saturated.
        t: shares of votes `(..., N, C)`.
        n: numbers of votes `(..., N, 1)`, 1 for a label; it means nothing where they are not known.
    """

    q: Tensor
    log_q: Tensor
    t: Tensor
    n: Tensor

    @property
    def entropy_of_votes(self) -> Tensor:
        """Entropy of the shares as they are `(..., N)`, in nats."""
        return 0 - logs.neg_entropy(self.t, safe_log(self.t))

    @property
    def entropy_lost_to_chance(self) -> Tensor:
        """Entropy of the prediction less what that of n votes drawn from it is on average `(..., N)`, in nats."""
        return xmul(self.q, mean_log_share(self.q, self.n) - self.log_q).sum(-1)


def shares_of(p: Predictions) -> Shares:
    """Read both distributions of every sample."""
    wide = wide_dtype(p.values.device)
    if p.task == "multiclass":
        q, log_q = p.probs.to(wide), p.log_probs.to(wide)
        classes = torch.arange(p.num_classes, device=q.device)
        t = p.target.to(wide) if p.soft else (p.target.unsqueeze(-1) == classes).to(wide)
    else:
        log_yes, log_no = p.binary_log_probs
        q, log_q = torch.stack((p.not_probs, p.probs), -1), torch.stack((log_no, log_yes), -1)
        t = torch.stack((1 - p.target, p.target), -1)
    n = torch.ones_like(t[..., 0]) if p.n_votes is None else p.n_votes
    return Shares(q, log_q, t, n.unsqueeze(-1))


def _zero(s: ScoreSum, _: Tensor, __: Task) -> Tensor:
    return torch.zeros_like(s.total)


def votes_score(parts: Parts, component: VotesComponent = "value") -> Score:
    """Return the score that is one component of a distance."""
    if component not in parts:
        raise ValueError(f"`component` must be one of {', '.join(map(repr, parts))}, got {component!r}.")
    return Score(parts[component], _zero, least_votes=LEAST_VOTES[component])


class VotesMetric(ScoreMetric):
    """Mean of a distance to votes over a stream.

    Args:
        component: see the function of the same name.
        **options: those of `ScoreMetric`, without `normalize` and `priors`: votes belong to no single class.
    """

    parts: Parts

    def __init__(self, *, component: VotesComponent = "value", **options: Any) -> None:
        for name in ("normalize", "priors"):
            if options.get(name) is not None:
                raise ValueError(
                    f"`{name}` must be None for distances to votes, got {options[name]!r}: they belong to no class."
                )
        super().__init__(votes_score(self.parts, component), **options)
