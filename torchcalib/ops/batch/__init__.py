"""Sums over one batch for all metrics that consist of sums: checks of values, statistics of rows, bins and scores.

`added` adds the sums of a batch to states without waiting for the device. With Triton one launch reads binary
predictions, and another one adds to the states. Multi-class predictions need one or two more for `softmax_stats`.
"""

from importlib import import_module

import torch
from torch import Tensor

from torchcalib.ops.batch.formula import Columns, Plan
from torchcalib.ops.dispatch import Backend, choose
from torchcalib.ops.softmax_stats import Detail, scores_and_tops

__all__ = ["Columns", "Plan", "added"]


def added(states: Tensor, columns: Columns, plan: Plan, backend: Backend = "auto") -> Tensor:
    """Return states `(n,)`, float64, one after another, plus those of a batch. No argument has a gradient.

    Rows with invalid values are counted, and have no effect on other sums. Results have the same bits in every call
    with Triton. In plain torch on a GPU the last digits can vary.
    """
    values = columns.values
    uses_triton = choose("rows", values.device.type, values.numel(), backend) == "triton"
    source = import_module(f"{__name__}.{'triton' if uses_triton else 'plain'}")
    target, of_rows = columns.target, None
    if not uses_triton:
        target = target.long()
    elif target.dtype == torch.bool:  # which Triton does not load
        target = target.view(torch.uint8)
    columns = columns._replace(target=target)
    if values.dim() > 1:
        options = columns.from_logits, columns.tolerance, _detail(plan)
        of_rows = scores_and_tops(values, target, *options, backend=backend)
    result: Tensor = source.added(states, columns, of_rows, plan)
    return result


def _detail(plan: Plan) -> Detail:
    if "neg_entropy" in plan.scores:
        return "entropy"
    return "squares" if "squared_error" in plan.scores else "confidence" if "log_prob" in plan.scores else "top"
