"""Summary of a batch of labels on the CPU, by passes that also check the values.

An update of a stream with a few hundred rows spends most of its time in about a hundred calls of Python and torch. The
summary replaces them for the most common input: labels without weights. In every other case, and for invalid values,
there is no summary. `InputFormat.read` then converts the batch, or raises the error.

One pass over multi-class rows checks them and computes the events. Binary predictions are the events. An accumulator
checks them in the pass that computes its sums.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.core.inputs import InputFormat
from torchcalib.ops.dispatch import source_of
from torchcalib.ops.operation import is_plain
from torchcalib.ops.softmax_stats import Detail

_MAX_CONVERTED = 2**20  # largest number of narrow values: `InputFormat.read` converts more of them in pieces


class BatchSummary(NamedTuple):
    """Events of n rows as numpy arrays, and for multi-class rows the sums of their statistics.

    The event is y=1 for binary predictions, and that the top class is correct for multi-class predictions. With detail
    "label", only the number of rows and the sum of the log-probabilities are defined.
    """

    confidence: Any  # confidence of each event `(n,)`, float64 or float32; unchecked, and possibly logits, if binary
    outcome: Any  # outcome of each event, uint8 `(n,)`; unchecked int64 if binary
    # Sums of the first four statistics of `Rows` and of the outcome; None if binary. Those beyond `detail_of` are
    # undefined.
    totals: list[float] | None


def summary_of(how: InputFormat, preds: Tensor, target: Tensor, detail: Detail) -> BatchSummary | None:
    """Return the summary of a batch without weights; None if its form or its values need `InputFormat.read`."""
    shape, dtype = preds.shape, preds.dtype
    if dtype not in how.summaries:
        how.summaries[dtype] = how.is_simple and dtype in SUM_TOLERANCE
    is_binary = how.task == "binary"
    if not how.summaries[dtype] or len(shape) != 2 - is_binary or target.shape != shape[:1] or not shape[0]:
        return None
    if not (preds.is_cpu and target.is_cpu and target.dtype is torch.int64):
        return None
    if not is_plain(preds, target) or preds.is_neg():  # numpy has no views with negated memory
        return None
    values = preds.detach() if preds.requires_grad else preds
    if dtype is torch.float16 or dtype is torch.bfloat16:  # numpy has no bfloat16
        if preds.numel() > _MAX_CONVERTED:
            return None
        values = values.float()
    array = values.numpy()
    if _may_be_mistaken(how, array if is_binary else array[0]):
        return None
    if is_binary:
        return BatchSummary(array, target.numpy(), None)
    source: Any = source_of("rows", "cpu", dtype, preds.numel(), "auto")
    if shape[0] > source.MAX_ROWS or how.num_classes not in (None, shape[1]):
        return None
    found = source.summary(array, target.numpy(), how.from_logits, SUM_TOLERANCE[dtype], detail)
    return None if found is None else BatchSummary(*found)


def takes_summary(accumulator: Any, task: Task, from_logits: bool) -> bool:
    """Return whether `add_summary` of an accumulator can replace the conversion of batches of labels."""
    return hasattr(accumulator, "takes_summary") and accumulator.takes_summary(task, from_logits)


def detail_of(accumulators: Iterable[Any], task: Task) -> Detail:
    """Return the statistics of multi-class rows that accumulators need.

    An accumulator that takes no summaries needs all of them, unless it has `only_confidences`.
    """
    needed: set[Detail] = set()
    for accumulator in accumulators:
        of_log_prob, of_square, of_entropy, *others = getattr(accumulator, "of_statistics", None) or (0,) * 5
        if getattr(accumulator, "only_confidences", False):
            needed.add("top")
        elif of_entropy or not takes_summary(accumulator, task, from_logits=False):
            needed.add("entropy")
        else:
            needed |= {"squares"} if of_square else {"label"} if of_log_prob else {"top"}
            needed |= {"top"} if any(others) else set()
    if "entropy" in needed:
        return "entropy"
    if "squares" in needed:
        return "squares"
    if needed == {"label"}:
        return "label"
    return "confidence" if "label" in needed else "top"


def _may_be_mistaken(how: InputFormat, values: Any) -> bool:
    """Return whether the first values do not rule out the mistakes that `check_mistakes` looks for."""
    value = values.item(0)  # which rules them out in most input
    if not 0 <= value <= 1 if how.from_logits else 0 < value < 1:
        return False
    first = values[:8].tolist()
    return all(x in (0, 1) for x in first) or (how.from_logits and min(first) >= 0 and max(first) <= 1)
