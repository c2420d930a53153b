"""The problem that is solved, how a solution can end, and when it is good enough."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchcalib.ops.host_values import look
from torchcalib.ops.newton.standard_form import PIECE, standard_pieces

CONVERGED, AT_ZERO, SEPARABLE, STOPPED, NO_DATA = range(5)
"""How a fit can end; see `AffineFit`."""

GRADIENT = 1e-10  # what is aimed at: norm of the gradient of the mean NLL, in units of the scores and of their scale
DECREMENT = 1e-15  # and what a further Newton step would take off the NLL, twice
PROMISED = 1e-9, 1e-12  # what is enough of both where rounding allows no more
FLAT = 1e-14  # a slope that is rounding
NOISE = 1e-13  # what rounding does to the sum of an NLL, as a share of it and of 1
ROUNDS = 200


@dataclass(frozen=True)
class Problem:
    """Fits in standard form.

    Attributes:
        scores: less the row's largest, over their scale `(S, N, C)`; if `top` is there, as they were given.
        top: the largest of every row `(S, N, 1)` where scores are brought to standard form as they are read: one
            float64 copy of many scores would cost more than all that is done with it. None where they are in it.
        mean: mean of every row, in standard form `(S, N)`.
        s_label: scores of the labels, in standard form `(S, N)`.
        target: labels `(S, N)`.
        w: weights of sum 1 `(R, S, N)`.
        share: shares of the classes `(R, S, C)`.
        scale: what the scores were divided by `(S,)`.
        of_label: mean score of the label `(R, S)`.
    """

    scores: Tensor
    top: Tensor | None
    mean: Tensor
    s_label: Tensor
    target: Tensor
    w: Tensor
    share: Tensor
    scale: Tensor
    of_label: Tensor

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of scores in standard form `(S, n, C)` and of `w` `(R, S, n)` that stay in cache."""
        n_weightings, n_series, n = self.w.shape
        rows = max(1, PIECE // max(1, n_weightings * n_series * self.scores.shape[-1]))
        weights = torch.split(self.w, rows, -1) if n else ()
        if self.top is None:
            return zip((s.to(self.w.dtype) for s in torch.split(self.scores, rows, 1)), weights, strict=True)
        pieces = standard_pieces(self.scores, self.top, 1 / self.scale, self.w.dtype, rows)
        return zip(pieces, weights, strict=True)

    def rough(self, at_most: int | None = None) -> "Problem":
        """Return the problem of the mean of all weightings in float32, on about `at_most` samples if given."""
        every = slice(None, None, 1 if at_most is None else max(1, self.scores.shape[1] // at_most))
        w = self.w.mean(0, keepdim=True)[..., every]
        w = w / w.sum(-1, keepdim=True)
        s_label = self.s_label[:, every]
        of_label = (w * s_label).sum(-1)
        return Problem(
            self.scores[:, every],
            None if self.top is None else self.top[:, every],
            self.mean[:, every].float(),
            s_label.float(),
            self.target[:, every],
            w.float(),
            self.share.mean(0, keepdim=True).float(),
            self.scale.float(),
            of_label.float(),
        )

    def some(self, weightings: slice) -> "Problem":
        """Return the problem of some of the weightings."""
        return replace(self, w=self.w[weightings], share=self.share[weightings], of_label=self.of_label[weightings])


Solved = tuple[Tensor, Tensor, Tensor, Tensor]
"""alpha and beta, in units of the standard form, gradient norm and outcome"""


def all_true(flag: Tensor) -> bool:
    """Return whether all are, as far as values can be looked at."""
    return look(flag.all()) is True


def enough(norm: Tensor, slope: Tensor) -> Tensor:
    """Return whether a fit that could not go on has what is promised: from its gradient, and the slope along a step."""
    gradient, decrement = PROMISED
    return (norm < gradient) & (slope >= -decrement)
