"""The k largest entries of every row, and the rank of its labelled entry, for events of the k most probable classes."""

import torch
from torch import Tensor

from torchcalib.ops.logs import spread_infinite_logits
from torchcalib.ops.operation import fused
from torchcalib.ops.softmax_stats import matrices

_CHUNK = 2**18  # entries of rows per chunk on the CPU: more would not fit into the cache
_CHUNK_OFF_CPU = 2**24  # the same on other devices: larger chunks need fewer kernel launches


def largest(values: Tensor, target: Tensor, k: int, *, from_logits: bool) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of every row in descending order, and the rank of the label `(..., N)`.

    The rank is the number of larger entries, and equal ones with a lower index. It is C for a label outside [0, C), and
    undefined for a row with NaN, whose entries are NaN. Entries have the dtype of `values`, at least float32. In a row
    with logits of +inf, these become 0 and all other logits -inf.

    Gradient: in `values`, in forward and reverse mode and of any order; 0 in a row with NaN or +inf.
    """
    entries, rank = _largest(values, target, k, from_logits)
    return entries, rank


def _forward(_: str, values: Tensor, target: Tensor, k: int, from_logits: bool) -> tuple[Tensor, Tensor]:
    values = values.detach()
    lead = values.shape[:-1]
    dtype = torch.promote_types(values.dtype, torch.float32)
    entries = torch.empty((k, lead.numel()), dtype=dtype, device=values.device)
    rank = torch.empty(lead, dtype=torch.int64, device=values.device)
    labels, ranks = target.reshape(-1), rank.view(-1)
    for rows, matrix in matrices(values):
        _fill(matrix, labels[rows], from_logits, entries[:, rows], ranks[rows])
    return entries.view(k, *lead).movedim(0, -1), rank


def _fill(values: Tensor, target: Tensor, from_logits: bool, entries: Tensor, rank: Tensor) -> None:
    """Fill `entries` `(k, R)` and `rank` `(R,)` for rows `(R, C)`, in chunks."""
    size = max(1, (_CHUNK if values.device.type == "cpu" else _CHUNK_OFF_CPU) // values.shape[-1])
    for start in range(0, len(values), size):
        rows = slice(start, start + size)
        found, rank[rows] = _formula(values[rows], target[rows], len(entries), from_logits)
        entries[:, rows] = found.T


def _formula(values: Tensor, target: Tensor, k: int, from_logits: bool) -> tuple[Tensor, Tensor]:
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


_largest = fused(_forward, _formula)
