"""The k largest entries of every row, and the rank of its labelled entry, for events of the k most probable classes."""

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.largest.formula import largest_formula
from torchcalib.ops.operation import fused
from torchcalib.ops.softmax_stats import matrices

_FEW = 32  # largest number of entries for the compiled loop, which inserts them one by one


def largest(
    values: Tensor, target: Tensor, k: int, *, from_logits: bool, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of every row in descending order, and the rank of the label `(..., N)`.

    The rank is the number of larger entries, and equal ones with a lower index. It is C for a label outside [0, C), and
    undefined for a row with NaN, whose entries are NaN. Entries have the dtype of `values`, at least float32. In a row
    with logits of +inf, these become 0 and all other logits -inf. Float64 on the CPU supports only "torch".

    Gradient: in `values`, in forward and reverse mode and of any order; 0 in a row with NaN or +inf.
    """
    entries, rank = _largest(values, target, k, from_logits, backend=backend)
    return entries, rank


def _forward(backend: Backend, values: Tensor, target: Tensor, k: int, from_logits: bool) -> tuple[Tensor, Tensor]:
    values = values.detach()
    lead = values.shape[:-1]
    dtype = torch.promote_types(values.dtype, torch.float32)
    entries = torch.empty((k, lead.numel()), dtype=dtype, device=values.device)
    rank = torch.empty(lead, dtype=torch.int64, device=values.device)
    if backend == "auto" and k > _FEW:
        backend = "torch"
    source = source_of("largest", values.device.type, values.dtype, backend)
    labels, ranks = target.reshape(-1), rank.view(-1)
    for rows, matrix in matrices(values):
        source.forward(matrix, labels[rows], from_logits, entries[:, rows], ranks[rows])
    return entries.view(k, *lead).movedim(0, -1), rank


_largest = fused(_forward, largest_formula)
