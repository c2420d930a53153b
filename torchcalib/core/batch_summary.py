"""Summary of a batch of labels on the CPU, by one pass that also checks the values.

An update of a stream with a few hundred rows spends most of its time in about a hundred calls of Python and torch. The
summary replaces them for the most common input: labels without weights. In every other case, and for invalid values,
there is no summary. `InputFormat.read` then converts the batch, or raises the error.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.core.inputs import InputFormat
from torchcalib.ops.dispatch import Op, source_of
from torchcalib.ops.operation import is_plain
from torchcalib.ops.softmax_stats import Detail

_MAX_CONVERTED = 2**20  # largest number of narrow values: `InputFormat.read` converts more of them in pieces


class BatchSummary(NamedTuple):
    """Events of n rows as numpy arrays, and for multi-class rows the sums of their statistics.

    The event is y=1 for binary predictions, and that the top class is correct for multi-class predictions.
    """

    confidence: Any  # confidence of each event, float64 `(n,)`
    outcome: Any  # outcome of each event, uint8 `(n,)`
    # Sums of the first four statistics of `Rows` and of the outcome; None if binary. Those beyond `detail_of` are
    # undefined.
    totals: list[float] | None


def summary_of(how: InputFormat, preds: Tensor, target: Tensor, detail: Detail) -> BatchSummary | None:
    """Return the summary of a batch without weights; None if its form or its values need `InputFormat.read`."""
    shape, dtype = preds.shape, preds.dtype
    if dtype not in how.summaries:
        how.summaries[dtype] = _operation(how, dtype)
    op = how.summaries[dtype]
    if op is None or len(shape) != 2 - (how.task == "binary") or target.shape != shape[:1]:
        return None
    source: Any = source_of(op, "cpu", dtype, "auto")
    if not (0 < shape[0] <= source.MAX_ROWS and preds.is_cpu and target.is_cpu and target.dtype == torch.int64):
        return None
    if how.task != "binary" and how.num_classes not in (None, shape[1]):
        return None
    if not is_plain(preds, target) or preds.is_neg():  # numpy has no views with negated memory
        return None
    narrow = dtype in (torch.float16, torch.bfloat16)  # numpy has no bfloat16
    if narrow and preds.numel() > _MAX_CONVERTED:
        return None
    values = (preds.float() if narrow else preds).detach().numpy()
    if _may_be_mistaken(how, values if how.task == "binary" else values[0]):
        return None
    found = source.summary(values, target.numpy(), how.from_logits, SUM_TOLERANCE[dtype], detail)
    return None if found is None else BatchSummary(*found)


def _operation(how: InputFormat, dtype: torch.dtype) -> Op | None:
    """Return the operation that summarises batches of a format and a dtype, or None if they have no summary."""
    # The sigmoid of torch rounds differently, and a probability of a calibrator can be the edge of a bin.
    if not how.is_simple or dtype not in SUM_TOLERANCE or (how.task == "binary" and how.from_logits):
        return None
    return "events" if how.task == "binary" else "rows"


def detail_of(accumulators: Iterable[Any], task: Task) -> Detail:
    """Return the statistics of multi-class rows that accumulators need.

    An accumulator that takes no summaries needs all of them, unless it sorts scores.
    """
    detail: Detail = "confidence"
    for accumulator in accumulators:
        if getattr(accumulator, "sorts_scores", False):
            continue
        if not (hasattr(accumulator, "takes_summary") and accumulator.takes_summary(task)):
            return "entropy"
        _, of_square, of_entropy, *_ = getattr(accumulator, "of_statistics", None) or (0,) * 5
        if of_entropy:
            return "entropy"
        detail = "squares" if of_square else detail
    return detail


def _may_be_mistaken(how: InputFormat, values: Any) -> bool:
    """Return whether the first values do not rule out the mistakes that `check_mistakes` looks for."""
    first = values[:8].tolist()
    return all(x in (0, 1) for x in first) or (how.from_logits and min(first) >= 0 and max(first) <= 1)
