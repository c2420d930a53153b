"""The largest entries of every row in plain torch, in chunks."""

import torch
from torch import Tensor

from torchcalib.ops.logs import spread_infinite_logits

_CHUNK = 2**18  # entries per chunk on the CPU: more would not fit into the cache
_CHUNK_OFF_CPU = 2**24  # entries per chunk on other devices: larger chunks need fewer kernel launches


def forward(values: Tensor, target: Tensor, from_logits: bool, entries: Tensor, rank: Tensor) -> None:
    """Fill `entries` `(k, R)` and `rank` `(R,)` for rows `(R, C)`; see `largest`."""
    size = max(1, (_CHUNK if values.device.type == "cpu" else _CHUNK_OFF_CPU) // values.shape[-1])
    for start in range(0, len(values), size):
        rows = slice(start, start + size)
        found, rank[rows] = largest_formula(values[rows], target[rows], len(entries), from_logits)
        entries[:, rows] = found.T


def largest_formula(values: Tensor, target: Tensor, k: int, from_logits: bool) -> tuple[Tensor, Tensor]:
    """Return the results of `largest` by differentiable operations."""
    n_classes = values.shape[-1]
    x = values.to(torch.promote_types(values.dtype, torch.float32))
    broken = x.detach().amax(-1, keepdim=True).isnan()  # the maximum is NaN if any entry is
    x = spread_infinite_logits(x) if from_logits else x
    entries = x.topk(k, -1).values.masked_fill(broken, torch.nan)
    label, x = target.unsqueeze(-1), x.detach()
    known = (label >= 0) & (label < n_classes)
    own = x.gather(-1, label.masked_fill(~known, 0))
    before = torch.arange(n_classes, device=x.device) < label
    rank = ((x > own) | ((x == own) & before)).sum(-1)
    return entries, rank.masked_fill(~known.squeeze(-1), n_classes)
