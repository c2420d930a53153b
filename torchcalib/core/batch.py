"""One pass over the rows of a batch of labels on the CPU, for all states that are sums.

A batch is read in pieces that stay in the cache. In each piece, rows that are ignored or have weight 0 are removed. One
pass over multi-class rows then checks them, and computes the statistics and events that the states need. Binary
predictions are the events, which a state checks in the pass that computes its sums. Weights and parts of the rows, such
as groups, are columns of the pass.

If a batch has another form (soft targets, gradients, other devices), or is invalid, nothing is added.
`InputFormat.read` then converts it, or raises the error.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.ops.dispatch import source_of
from torchcalib.ops.operation import is_plain
from torchcalib.ops.softmax_stats import Detail
from torchcalib.ops.threads import in_threads

if TYPE_CHECKING:
    from torchcalib.core.inputs import InputFormat

_ROWS, _VALUES = 2**17, 2**20  # largest numbers of rows and of predicted values of a piece
_CHUNKS = 64  # largest number of partial sums, and thus of threads; it does not depend on the number of threads
_MAX_SUMS = 2**20  # largest number of partial sums of all chunks
_ALL, _FIRST = slice(None), slice(0, 1)
_FEW_REMOVED = 2**6  # largest number of removed rows between which copying runs of rows is fastest
_MAX_PARTS = 2**12  # largest number of parts: with more, sums of a piece take longer than its rows
_LABELS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))


class Piece(NamedTuple):
    """Rows of a batch as numpy arrays, without rows that are ignored or have weight 0."""

    values: Any  # predictions `(n,)` or `(n, C)`, float32 or float64; those of binary rows are unchecked
    label: Any  # int64 `(n,)`; those of binary rows are unchecked
    # Event of each row: y=1 for binary predictions, and that the top class is the label for multi-class predictions.
    # Multi-class outcomes are uint8. With the detail "label", events are undefined.
    confidence: Any
    outcome: Any
    top: Any  # top class of multi-class rows; None if binary
    totals: Any  # sums of the statistics of multi-class rows `(5, G)`, see `softmax_stats.chunked.labelled_rows`
    weights: Any  # positive, float64 `(n,)`; None for 1
    copies: bool  # whether weights count copies of a row
    groups: Any  # number of the part of each row in [0, G), int64 `(n,)`; None for G = 1
    n_groups: int
    only_group: int | None  # number of the part of all rows, if they are in the same part and have `groups` None
    from_logits: bool
    n_values: int  # number of predicted values of the batch

    def weight_in_groups(self) -> Any:
        """Return the total weight of the rows of each part `(G,)`; a number without `groups`."""
        if self.groups is not None:
            return np.bincount(self.groups, self.weights, self.n_groups)
        return len(self.label) if self.weights is None else self.weights.sum()


class Parts(NamedTuple):
    """Parts of the rows of a batch, such as groups or clusters."""

    keys: Any  # key of the part of each sample, an array with the shape of the samples
    numbers: Callable[[Any], Any]  # maps keys `(n,)` to numbers in [0, n), or -1 for no part; None for invalid keys
    n: int


def takes_pieces(accumulator: Any, task: Task, from_logits: bool) -> bool:
    """Return whether an accumulator has a method `add_piece` for the events of this input."""
    return hasattr(accumulator, "takes_pieces") and accumulator.takes_pieces(task, from_logits)


def add_rows(rows: "Rows", detail: Detail, adders: Sequence[Any], totals: Sequence[Any]) -> bool:
    """Add a batch to sums, numpy arrays, in place. Return False if it is invalid, or not added for another reason.

    Each of the `adders` adds a piece to its entry of `totals` by `add_piece(piece, total)`. `detail` are the statistics
    of rows that they need. If the result is False, the totals may be incomplete.
    """
    places = rows.places()
    n_chunks = min(len(places), _CHUNKS)
    if n_chunks > 1:
        n_chunks = min(n_chunks, _MAX_SUMS // max(1, sum(map(np.size, totals))))
    if n_chunks <= 1:
        return all(_is_added(rows, place, detail, adders, totals) for place in places)
    found = [[np.zeros_like(total) for total in totals] for _ in range(n_chunks)]
    are_added = [False] * n_chunks

    def add_chunks(begin: int, end: int) -> None:
        for k in range(begin, end):
            chunk = places[len(places) * k // n_chunks : len(places) * (k + 1) // n_chunks]
            are_added[k] = all(_is_added(rows, place, detail, adders, found[k]) for place in chunk)

    in_threads(add_chunks, n_chunks, rows.n_values)
    for chunk in found:  # in order, so that the sums do not depend on the threads
        for total, more in zip(totals, chunk, strict=True):
            total += more
    return all(are_added)


def _is_added(rows: "Rows", place: Any, detail: Detail, adders: Sequence[Any], totals: Sequence[Any]) -> bool:
    piece = rows.piece(place, detail)
    if piece is None:
        return False
    return not len(piece.label) or all(map(added_by, adders, repeat(piece), totals))


def added_by(adder: Any, piece: Piece, total: Any) -> bool:
    """Add a piece to `total` in place, and return whether it is valid and therefore added."""
    is_added: bool = adder.add_piece(piece, total)
    return is_added


class Rows(NamedTuple):
    """Rows of a batch, from `rows_of`. An item is an entry of the first axis, such as a row or an image."""

    how: "InputFormat"
    dtype: torch.dtype  # of the predictions
    preds: Any  # array, or tensor of 16 bits, because numpy has no bfloat16
    label: Any  # integers, as all other columns with the shape of the samples
    weights: Any  # array or tensor of 16 bits; None for 1
    copies: bool  # whether weights count copies of a row
    parts: Parts | None
    axis: int | None  # class axis of multi-class predictions: 1 or the last one

    @property
    def n_classes(self) -> int | None:
        """Number of classes; None if binary."""
        return None if self.axis is None else self.preds.shape[self.axis]

    @property
    def n_values(self) -> int:
        """Number of predicted values."""
        return self.label.size * (self.n_classes or 1)

    def places(self) -> list[tuple[int, int, slice]]:
        """Return the pieces: ranges of items, and the slice of their rows."""
        n_items, n_rows = len(self.label), self.label.size
        per_item, per_piece = n_rows // n_items, max(1, min(_ROWS, _VALUES // (self.n_classes or 1)))
        if n_rows <= per_piece:
            return [(0, n_items, _ALL)]
        if per_item < per_piece:
            return [(begin, end, _ALL) for begin, end in _ranges(n_items, per_piece // per_item)]
        ranges = _ranges(per_item, per_piece)
        return [(item, item + 1, slice(begin, end)) for item in range(n_items) for begin, end in ranges]

    def piece(self, place: tuple[int, int, slice], detail: Detail) -> Piece | None:
        """Return a piece, with checked rows if multi-class; None if a row, a label, a weight or a key is invalid."""
        how, parts = self.how, self.parts
        x, y = self._values(place), _column(self.label, place)
        w = None if self.weights is None else _column(self.weights, place)
        keys = None if parts is None else self._keys(parts.keys, place)
        if y.dtype != np.int64:
            y = y.astype(np.int64)
        # 1. Remove rows that are ignored or have weight 0, whose values may be invalid.
        if how.ignore_index is not None:
            x, y, w, keys = _kept(y != how.ignore_index, x, y, w, keys)
        if w is not None and len(w):
            w = w.astype(np.float64, copy=False)
            if not (w.min() >= 0 and w.max() < np.inf):
                return None
            x, y, w, keys = _kept(w > 0, x, y, w, keys)
        # 2. Number of the part of each row
        groups, only_group, n_groups = None, None, 1
        if parts is not None and len(y):
            groups = parts.numbers(keys)
            if groups is None:
                return None
            x, y, w, groups = _kept(groups >= 0, x, y, w, groups)
            if len(groups) and (groups == groups[0]).all():
                groups, only_group = None, int(groups[0])
            elif parts.n > _MAX_PARTS:
                return None
            else:
                n_groups = parts.n
        columns = w, self.copies, groups, n_groups, only_group, how.from_logits, self.n_values
        # 3. Events and statistics
        if self.axis is None or not len(y):
            return Piece(x, y, x, y, None, None, *columns)
        source: Any = source_of("rows", "cpu", self.dtype, self.n_values, "auto")
        tolerance = SUM_TOLERANCE[self.dtype]
        found = source.labelled_rows(x, y, how.from_logits, tolerance, detail, w, groups, n_groups)
        return None if found is None else Piece(x, y, *found, *columns)

    @staticmethod
    def _keys(keys: Any, place: tuple[int, int, slice]) -> Any:
        """Return the keys of a piece `(n,)`; `(1,)` if an item has a single key in memory, as an image its cluster."""
        begin, end, _ = place
        is_shared = end - begin == 1 and keys.ndim > 1 and not any(keys.strides[1:])
        return keys[(begin, *[0] * (keys.ndim - 1))][None] if is_shared else _column(keys, place)

    def first(self) -> Any:
        """Return the first binary predictions, or those of the first multi-class row."""
        return _array_of(self.preds.reshape(-1)[:8]) if self.axis is None else self._values((0, 1, _FIRST))[0]

    def _values(self, place: tuple[int, int, slice]) -> Any:
        """Return the predictions of a piece, `(n,)` or `(n, C)`."""
        if self.axis is None:
            return _column(self.preds, place)
        begin, end, part = place
        values = self.preds[begin:end]
        n_classes = values.shape[self.axis]
        if self.axis != values.ndim - 1:
            one = end - begin == 1
            values = (
                values.reshape(n_classes, -1).T if one else values.reshape(end - begin, n_classes, -1).swapaxes(1, 2)
            )
        return _array_of((values if values.ndim == 2 else values.reshape(-1, n_classes))[part])


def rows_of(
    how: "InputFormat", preds: Tensor, target: Tensor, weights: Tensor | None = None, parts: Parts | None = None
) -> Rows | None:
    """Return the rows of a batch; None if its form or its first values need `InputFormat.read`."""
    dtype, shape = preds.dtype, preds.shape
    if dtype not in how.simple_dtypes:
        how.simple_dtypes[dtype] = how.has_simple_rows and dtype in SUM_TOLERANCE
    if not (how.simple_dtypes[dtype] and preds.is_cpu and target.is_cpu and target.dtype in _LABELS and preds.numel()):
        return None
    if not is_plain(preds, target) or preds.is_neg():  # numpy has no views with negated memory
        return None
    axis, samples = None, shape
    if how.task == "multiclass":
        axis = len(shape) - 1
        if axis > 1:
            how = how.resolved(preds, target)
            target = how.without_class_axis(preds, target)
        if how.axis not in (-1, axis):
            if how.axis not in (1, -axis):
                return None
            axis = 1
        if axis < 1 or shape[axis] < 2 or how.num_classes not in (None, shape[axis]):
            return None
        samples = shape[:axis] + shape[axis + 1 :]
    if not samples or target.shape != samples:
        return None
    copies = True
    if weights is not None:
        is_known = weights.is_cpu and is_plain(weights) and not weights.is_complex() and not weights.is_neg()
        if how.whole_weights or weights.shape != samples or not is_known:
            return None
        copies = not weights.is_floating_point()
        weights = _if_wide(weights)
    values = _if_wide(preds.detach() if preds.requires_grad else preds)
    rows = Rows(how, dtype, values, target.numpy(), weights, copies, parts, axis)
    return None if _may_be_mistaken(how, rows.first()) else rows


def _ranges(n: int, most: int) -> list[tuple[int, int]]:
    """Return ranges of similar sizes of at most `most` that cover [0, n)."""
    n_ranges = -(-n // most)
    return [(n * k // n_ranges, n * (k + 1) // n_ranges) for k in range(n_ranges)]


def _if_wide(x: Tensor) -> Any:
    """Return a tensor as an array, but tensors of 16 bits as they are, because numpy has no bfloat16."""
    return x if x.dtype in (torch.float16, torch.bfloat16) else x.numpy()


def _array_of(x: Any) -> Any:
    """Return an array or a tensor of 16 bits as an array of at least float32."""
    return x.float().numpy() if isinstance(x, Tensor) else x


def _column(x: Any, place: tuple[int, int, slice]) -> Any:
    """Return the values of a piece `(n,)`."""
    begin, end, part = place
    x = x[begin:end]
    x = x if x.ndim == 1 else x.reshape(-1)
    return _array_of(x if part is _ALL else x[part])


def _kept(keep: Any, *columns: Any) -> Sequence[Any]:
    """Return the entries of columns where `keep` is True. A value that all rows share has another length."""
    if keep.all():
        return columns
    if len(keep) == 1:  # of all rows
        return [x if x is None else x[:0] for x in columns]
    removed = np.flatnonzero(~keep)
    if len(removed) > _FEW_REMOVED:
        rows = np.flatnonzero(keep)
        return [x if x is None or len(x) != len(keep) else x.take(rows, 0) for x in columns]
    runs = [slice(begin + 1, end) for begin, end in pairwise([-1, *removed.tolist(), len(keep)])]
    return [x if x is None or len(x) != len(keep) else np.concatenate([x[run] for run in runs]) for x in columns]


def detail_of(accumulators: Iterable[Any], task: Task) -> Detail:
    """Return the statistics of multi-class rows that accumulators need.

    An accumulator that takes no pieces needs all of them, unless it has `only_confidences`.
    """
    needed: set[Detail] = set()
    for accumulator in accumulators:
        of_log_prob, of_square, of_entropy, *others = getattr(accumulator, "of_statistics", None) or (0,) * 5
        if getattr(accumulator, "only_confidences", False):
            needed.add("top")
        elif of_entropy or not takes_pieces(accumulator, task, from_logits=False):
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


def _may_be_mistaken(how: "InputFormat", values: Any) -> bool:
    """Return whether the first values do not rule out the mistakes that `check_mistakes` looks for."""
    value = values.item(0)  # which rules them out in most input
    if not 0 <= value <= 1 if how.from_logits else 0 < value < 1:
        return False
    first = values[:8].tolist()
    return all(x in (0, 1) for x in first) or (how.from_logits and min(first) >= 0 and max(first) <= 1)
