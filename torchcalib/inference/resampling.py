"""Draws with replacement: of samples, or of groups of them."""

import torch
from torch import Tensor

from torchcalib.core.checks import check_numbering
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.ops.counter_rng import multinomial_counts
from torchcalib.ops.logs import wide_dtype


class Resampling:
    """Draws with replacement, of samples or of groups of them, as often as there are any.

    Args:
        p: whose samples are drawn; those that are left out in all series are not.
        seed: of the draws.
        groups: integers `(N,)`; samples of equal number are drawn together.

    Raises:
        TypeError, ValueError: for groups that are no integers `(N,)`.
    """

    def __init__(self, p: Predictions, seed: int, groups: Tensor | None = None) -> None:
        n = p.samples[-1]
        self._seed, self._device = seed, p.given.device
        self._present = torch.ones(n, dtype=torch.bool, device=self._device)
        if p.weights is not None:
            self._present = ~in_all_replicates(p.weights == 0, 1).expand(n)
        self._unit_of: Tensor | None = None  # what is drawn with each sample; None: itself
        self._n_units = n
        if groups is not None:
            check_numbering("groups", groups)
            if groups.shape != (n,):
                raise ValueError(f"`groups` must have one number per sample, shape {(n,)}, got {tuple(groups.shape)}.")
            names, index = torch.unique(groups.to(self._device)[self._present], return_inverse=True)
            self._unit_of = torch.zeros(n, dtype=torch.int64, device=self._device).masked_scatter(self._present, index)
            self._n_units = max(1, len(names))
        elif not bool(self._present.all()):
            self._unit_of = (self._present.cumsum(-1) - 1).clamp(min=0)
            self._n_units = max(1, int(self._present.sum()))

    def counts(self, replicates: Tensor) -> Tensor:
        """Return how often every sample is drawn in each of these replicates, `(r, N)` of the dtype of sums."""
        drawn = multinomial_counts(self._seed, replicates, self._n_units, wide_dtype(self._device))
        return drawn if self._unit_of is None else drawn[:, self._unit_of].masked_fill(~self._present, 0)
