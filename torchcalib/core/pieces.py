"""One pass over the rows of a batch of labels on the CPU, for all states that are sums.

A batch is read in pieces that stay in the cache. In each piece, rows that are ignored or have weight 0 are removed. One
pass over multi-class rows then checks them, and computes the statistics and events that the states need. Binary
predictions are the events, which a state checks in the pass that computes its sums. Weights and parts of the rows, such
as groups, are columns of the pass.

If a batch has another form (soft targets, gradients, other devices), or is invalid, nothing is added.
`InputFormat.read` then converts it, or raises the error.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.ops.dispatch import choose, source_of
from torchcalib.ops.operation import mode_of
from torchcalib.ops.segments import COMPILED_WEIGHTS, kept, with_weight

if TYPE_CHECKING:
    from torchcalib.core.inputs import InputFormat
    from torchcalib.ops.softmax_stats import Detail

_ROWS, _VALUES = 2**17, 2**20  # largest numbers of rows and of predicted values of a piece
_LARGE, _CONVERTED = 2**20, 2**19  # numbers of values above which `split` divides a batch, and of a piece
_CHUNKS = 64  # largest number of partial sums, and thus of threads; it does not depend on the number of threads
_SHARES = 8  # a large batch has a multiple of this number of pieces for compiled loops; a power of two
_MAX_SUMS = 2**18  # largest number of partial sums of all chunks
_TOGETHER, _FEWEST = 2**22, 2**18  # largest and smallest numbers of rows of pieces that need no arrays of their size
_ALL, _FIRST = slice(None), slice(0, 1)
_LARGE_ITEM = 2**9  # smallest number of rows of an item, such as an image, that is a piece of its own
_FEW_CLASSES = 32  # largest number of classes whose probabilities are added class by class
_MAX_PARTS = 2**12  # largest number of parts: with more, sums of a piece take longer than its rows
_PER_PART = 2**8  # number of rows of a piece for each part, whose sums are added to the state after each piece
_NO_LABEL = -(2**63)  # label of rows that a mask excludes
_INT64 = np.dtype(np.int64)
_NARROW = frozenset((torch.float16, torch.bfloat16))
_LABELS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))
_WEIGHTS = _LABELS | _NARROW | {torch.float32, torch.float64}


class Piece(NamedTuple):
    """Rows of a batch as numpy arrays, without ignored rows unless `ignored` is given.

    Rows of weight 0 are also removed, except from binary pieces without parts.
    """

    values: Any  # predictions `(n,)`, or `(N, C)` at `places`, float32 or float64; those of binary rows are unchecked
    label: Any  # int64 `(n,)`; those of binary rows are unchecked
    # Event of each row: y=1 for binary predictions, and that the top class is the label for multi-class predictions.
    # Multi-class outcomes are uint8. With the detail "label", events are undefined. With `has_columns`, they are None.
    confidence: Any
    outcome: Any
    top: Any  # top class of multi-class rows; None if binary
    totals: Any  # sums of the statistics of multi-class rows `(6, G)`, see `softmax_stats.plain.labelled_rows`
    weights: Any  # positive float64 `(n,)`, or those of the batch, unchecked, if binary without parts; None for 1
    copies: bool  # whether weights count copies of a row
    groups: Any  # number of the part of each row in [0, G), int64 `(n,)`; None for G = 1
    n_groups: int
    only_group: int | None  # number of the part of all rows, if they are in the same part and have `groups` None
    from_logits: bool
    n_values: int  # number of predicted values of the batch
    ignored: int | None  # label of the rows to leave out, whose values may be invalid
    # Whether probabilities are in the order of classes in memory, without events. Values and labels are unchecked.
    has_columns: bool = False
    places: Any = None  # place in `values` of each multi-class row; None if `values` are the rows

    @property
    def rows(self) -> Any:
        """Predictions of the rows, copied if others are between them."""
        return self.values if self.places is None else self.values.take(self.places, 0)

    def by_group(self) -> "Iterator[Piece]":
        """Yield the rows of each part as a piece without totals."""
        order = self.groups.argsort(kind="stable")
        begins = np.searchsorted(self.groups[order], np.arange(self.n_groups + 1))
        names = ("label", "confidence", "outcome", "top", "weights")
        columns = {name: x for name in names if (x := getattr(self, name)) is not None}
        for group, (begin, end) in enumerate(pairwise(begins.tolist())):
            rows = order[begin:end]
            if len(rows):
                of_group: Any = {name: x[rows] for name, x in columns.items()}
                places = rows if self.places is None else self.places[rows]
                of_group |= {"places": places} if self.top is not None else {"values": self.values[rows]}
                yield self._replace(**of_group, totals=None, groups=None, n_groups=1, only_group=group)


class Parts(NamedTuple):
    """Parts of the rows of a batch, such as groups or clusters."""

    keys: Any  # key of the part of each sample, an integer array with the shape of the samples
    n: int  # number of parts G
    numbers: Callable[[Any], Any]  # maps keys `(n,)` to numbers of parts; rows with a number of -1 have no part


def takes_pieces(accumulator: Any, task: Task, from_logits: bool) -> bool:
    """Return whether an accumulator has a method `add_piece` for the events of this input."""
    return hasattr(accumulator, "takes_pieces") and accumulator.takes_pieces(task, from_logits)


_Place = tuple[int, int, slice]
"""Place of a piece: first and last item, and the slice of their rows."""


class LabelledRows(NamedTuple):
    """Rows of a batch, from `rows_of`. An item is an entry of the first axis, such as a row or an image."""

    input_format: "InputFormat"
    dtype: torch.dtype  # of the predictions
    preds: Any  # array, or tensor of 16 bits, because numpy has no bfloat16
    label: Any  # integers, with the shape of the samples, as `weights`
    weights: Any  # array, or tensor of 16 bits; None for 1
    copies: bool  # whether weights count copies of a row
    parts: Parts | None
    axis: int | None  # class axis of multi-class predictions: 1 or the last one
    n_classes: int  # 1 if binary

    def places(self, n_adders: int, has_loops: bool) -> list[_Place]:
        """Return the places of the pieces, which compiled loops read or not.

        Pieces contain no more than one item if each large item is in one part.
        """
        keys = None if self.parts is None else self.parts.keys
        is_by_item = keys is not None and keys.ndim > 1 and not any(keys.strides[1:])
        n_parts = 0 if self.parts is None or self.parts.n > _MAX_PARTS else self.parts.n
        n_rows, n_values, shares = max(_ROWS, _PER_PART * n_parts), _VALUES, _SHARES
        # Values need no copy, unless rows between them are absent. Rows of other class axes are transposed.
        is_ready = self.dtype.itemsize >= 4 and self.preds.flags.c_contiguous and self.axis in (None, self.label.ndim)
        has_absent = self.weights is not None or self.input_format.ignore_index is not None
        if not has_loops:  # few calls of torch; `ops.softmax_stats` divides rows that are not copied
            is_copied = not is_ready or has_absent or self.parts is not None
            n_values, shares = 2 * _VALUES if is_copied else self.preds.size, 1
        if self.weights is not None:
            is_ready = is_ready and self.weights.dtype in COMPILED_WEIGHTS and self.weights.flags.c_contiguous
        is_ready = is_ready and (has_loops or not has_absent)  # plain code copies the other rows
        if is_ready and self.parts is None and self.axis is None and n_adders == 1 and self.label.dtype == _INT64:
            # Code that reads each row once needs no small pieces, whose calls take time.
            n_rows = n_values = min(max(_FEWEST, -(-self.label.size // shares)), _TOGETHER)
        most_in_item = _LARGE_ITEM if is_by_item else _ROWS
        return _places(self.label.shape, self.n_classes, n_rows, n_values, most_in_item, shares)

    def piece(self, place: _Place, detail: "Detail") -> Piece | None:
        """Return a piece; None if a label, a weight, a part or a multi-class row is invalid.

        Binary rows and, without parts, their weights are not checked, and all of them are kept.
        """
        input_format, parts, label = self.input_format, self.parts, self.label
        if place[2] is _ALL and label.ndim == 1 and self.weights is parts is None and self.dtype.itemsize >= 4:
            x, y, w, keys = self.preds[place[0] : place[1]], label[place[0] : place[1]], None, None
        else:
            x, y, w, keys = self._columns(place)
        if y.dtype != _INT64:
            y = y.astype(_INT64)
        has_columns = detail == "classes" and not input_format.from_logits and self.n_classes <= _FEW_CLASSES
        has_columns = has_columns and self.axis is not None and len(y) >= _LARGE_ITEM
        # 1. Remove rows that are ignored or have weight 0, whose values may be invalid. A mask is an ignored label.
        #    The pass over binary rows or columns removes ignored ones, and that over binary rows those of weight 0.
        ignored = input_format.ignore_index
        if has_columns and w is not None and w.dtype == np.bool_:
            ignored = _NO_LABEL if ignored is None else ignored
            if y.min() == _NO_LABEL:
                return None
            y, w = np.where(w, y, ignored), None
        # Rows of several classes are not copied, but read at their places.
        values, places = x, None
        x = None if self.axis is not None and not has_columns else x
        keeps_ignored = self.axis is None or has_columns
        if ignored is not None and not (keeps_ignored and (w is None or (self.axis is None and parts is None))):
            places, x, y, w, keys = kept(y != ignored, places, x, y, w, keys)
            ignored = None
        if w is not None and (self.axis is not None or parts is not None):
            found = with_weight(w, places, x, y, keys)
            if found is None:
                return None
            w, places, x, y, keys = found
        # 2. Number of the part of each row
        only_group, n_groups = None, 1
        groups: Any = None
        if parts is not None and len(y):
            groups = parts.numbers(keys).astype(np.int64, copy=False)
            is_known = groups.view(np.uint64).max() < parts.n  # negative numbers are large then
            if not is_known and (groups.min() < -1 or groups.max() >= parts.n):
                return None
            if groups[0] == groups[-1] and (groups == groups[0]).all():
                groups, only_group = None, int(groups[0])
                y = y if only_group >= 0 else y[:0]
            elif parts.n > _MAX_PARTS:
                return None
            else:
                if not is_known:
                    places, x, y, w, groups = kept(groups >= 0, places, x, y, w, groups)
                n_groups = parts.n
        n_values = label.size * self.n_classes
        columns: Any = w, self.copies, groups, n_groups, only_group, input_format.from_logits, n_values, ignored
        # 3. Events and statistics
        if self.axis is None or not len(y):
            return Piece(x, y, x, y, None, None, *columns)
        tolerance = SUM_TOLERANCE[self.dtype]
        if has_columns:
            x = x if x.strides[0] == x.itemsize else np.ascontiguousarray(x.T).T
            total = x.sum(1)
            is_valid = _sum_to_one(total, tolerance)
            if not is_valid and ignored is not None:
                is_valid = _sum_to_one(total[y != ignored], tolerance)
            return Piece(x, y, None, None, None, None, *columns)._replace(has_columns=True) if is_valid else None
        source: Any = source_of("rows", "cpu", self.dtype, n_values, "auto")
        detail = "top" if detail == "classes" else detail
        options = input_format.from_logits, tolerance, detail
        found = source.labelled_rows(values, y, *options, w, groups, n_groups, places)
        return None if found is None else Piece(values, y, *found, *columns)._replace(places=places)

    def _columns(self, place: _Place) -> tuple[Any, Any, Any, Any]:
        """Return predictions `(n,)` or `(n, C)`, labels, weights and keys of a piece.

        Keys are `(1,)` if an item has a single key in memory, as an image has one cluster.
        """
        begin, end, _ = place
        weights = None if self.weights is None else _array_of(_part(self.weights, place))
        keys = None if self.parts is None else self.parts.keys
        if keys is not None and end - begin == 1 and keys.ndim > 1 and not any(keys.strides[1:]):
            keys = keys[(begin, *[0] * (keys.ndim - 1))][None]
        elif keys is not None:
            keys = _part(keys, place)
        return _array_of(_part(self.preds, place, self.axis)), _part(self.label, place), weights, keys


def rows_of(
    input_format: "InputFormat",
    preds: Tensor,
    target: Tensor,
    weights: Tensor | None = None,
    parts: Parts | None = None,
) -> LabelledRows | None:
    """Return the rows of a batch; None if its form or its first values need `InputFormat.read`."""
    if preds.is_nested:  # without a shape
        return None
    dtype, shape = preds.dtype, preds.shape
    if dtype not in input_format.simple_dtypes:
        input_format.simple_dtypes[dtype] = input_format.has_simple_rows and dtype in SUM_TOLERANCE
    has_simple_dtypes = input_format.simple_dtypes[dtype] and target.dtype in _LABELS
    if not (has_simple_dtypes and preds.is_cpu and target.is_cpu and preds.numel()):
        return None
    # numpy has no views with negated memory
    if mode_of(preds, target) != "numbers" or preds.is_neg() or target.is_neg() or target.is_nested:
        return None
    axis, samples, n_classes = None, shape, 1
    if input_format.task == "multiclass":
        axis = len(shape) - 1
        if axis > 1:
            input_format = input_format.resolved(preds, target)
            target = input_format.without_class_axis(preds, target)
        if input_format.axis not in (-1, axis):
            if input_format.axis not in (1, -axis):
                return None
            axis = 1
        n_classes, samples = shape[axis], shape[:axis] + shape[axis + 1 :]
        if n_classes < 2 or input_format.num_classes not in (None, n_classes):
            return None
    if not samples or target.shape != samples:
        return None
    copies = True
    if weights is not None:
        if input_format.whole_weights or not weights.is_cpu or weights.is_nested or weights.dtype not in _WEIGHTS:
            return None
        if weights.shape != samples or mode_of(weights) != "numbers" or weights.is_neg():
            return None
        copies = not weights.is_floating_point()
    of_rows: Any = weights if weights is None or weights.dtype in _NARROW else weights.numpy()
    values: Any = preds.detach() if preds.requires_grad else preds
    values = values if dtype in _NARROW else values.numpy()
    rows = LabelledRows(input_format, dtype, values, target.numpy(), of_rows, copies, parts, axis, n_classes)
    if len(shape) > 2 or dtype in _NARROW or (axis is None and len(shape) > 1):
        values = rows._columns((0, 1, _FIRST))[0]
    return None if _may_be_mistaken(input_format, values if axis is None else values[0]) else rows


def is_divisible(accumulator: Any) -> bool:
    """Return whether the sums of a batch are the sums over its pieces. Sums over pairs of rows are not."""
    return hasattr(accumulator, "ranges") and not getattr(accumulator, "has_pairs", False)


def add_rows(rows: LabelledRows, detail: "Detail", adders: Sequence[Any], totals: Sequence[Any]) -> bool:
    """Add a batch to sums, numpy arrays, in place. Return False if it is invalid, or not added for another reason.

    Each of the `adders` adds a piece to its entry of `totals` by `add_piece(piece, total)`. `detail` are the statistics
    of rows that they need. If the result is False, the totals may be incomplete.
    """
    label, n_values = rows.label, rows.label.size * rows.n_classes
    if rows.parts is None and label.size <= _ROWS and n_values <= _VALUES:
        return _add_piece(rows, (0, len(label), _ALL), detail, adders, totals)
    has_loops = choose("rows" if rows.n_classes > 1 else "events", "cpu", n_values) == "numba"
    places = rows.places(len(adders), has_loops)
    n_chunks = 1 if len(places) == 1 else min(len(places), _CHUNKS, _MAX_SUMS // sum(map(np.size, totals)))
    if n_chunks > 1:
        return _add_chunks(rows, places, detail, adders, totals, n_chunks, has_loops)
    return all(_add_piece(rows, place, detail, adders, totals) for place in places)


def _add_piece(
    rows: LabelledRows, place: _Place, detail: "Detail", adders: Sequence[Any], totals: Sequence[Any]
) -> bool:
    """Add a piece to the totals. Return False if it is invalid."""
    piece = rows.piece(place, detail)
    if piece is None:
        return False
    if not len(piece.label):
        return True
    is_added = True
    for adder, total in zip(adders, totals, strict=True):
        is_added = is_added and adder.add_piece(piece, total)
    return is_added


def _add_chunks(
    rows: LabelledRows,
    places: list[_Place],
    detail: "Detail",
    adders: Sequence[Any],
    totals: Sequence[Any],
    n_chunks: int,
    has_loops: bool,
) -> bool:
    """Add chunks of consecutive pieces: the first to the totals, others to sums of their own.

    Compiled loops work in several threads.
    """
    from torchcalib.ops.threads import in_threads

    found = [totals, *([np.zeros_like(total) for total in totals] for _ in range(n_chunks - 1))]
    are_added = [True] * n_chunks

    def add(begin: int, end: int) -> None:
        for k in range(begin, end):
            for place in places[len(places) * k // n_chunks : len(places) * (k + 1) // n_chunks]:
                are_added[k] &= _add_piece(rows, place, detail, adders, found[k])

    if has_loops:
        in_threads(add, n_chunks, rows.label.size * rows.n_classes)
    else:
        add(0, n_chunks)  # operations of torch use several threads by themselves, and wait for each other in ours
    for chunk in found[1:]:
        for total, more in zip(totals, chunk, strict=True):
            total += more
    return all(are_added)


def split(
    input_format: "InputFormat", preds: Any, target: Any, weights: Any = None, keys: Any = None
) -> Iterator[tuple["InputFormat", Tensor, Tensor, Tensor | None, Tensor | None]] | None:
    """Divide a large batch on the CPU for `InputFormat.read`, whose memory is proportional to the values that it reads.

    Yield the format of each piece, predictions, targets, weights and keys (integers with the shape of the samples).
    Return None for a small batch, and if the form of the batch does not allow pieces.
    """
    given = [x for x in (preds, target, weights, keys) if x is not None]
    if not all(isinstance(x, Tensor) and x.is_cpu and not x.is_nested for x in given) or input_format.batch_dims:
        return None
    if preds.numel() <= _LARGE:
        return None
    if mode_of(*given) != "numbers" or (weights is not None and weights.dim() > preds.dim()):
        return None
    axis, n_classes = None, 1
    samples = preds.shape
    if input_format.task != "binary":
        resolved = input_format.resolved(preds, target)
        axis = resolved.axis % preds.dim()
        if not -preds.dim() <= resolved.axis < preds.dim() or axis not in (1, preds.dim() - 1):
            return None
        n_classes, samples = preds.shape[axis], preds.shape[:axis] + preds.shape[axis + 1 :]
        target, input_format = resolved.without_class_axis(preds, target), replace(resolved, class_axis=-1)
    has_all_classes = axis is not None and target.shape == preds.shape
    has_shares = has_all_classes and (input_format.task == "multilabel" or target.is_floating_point())
    if not (target.shape == samples or has_shares) or any(x.shape != samples for x in given[2:]):
        return None

    def pieces() -> Iterator[Any]:
        for place in _places(samples, n_classes, _ROWS, _CONVERTED, _ROWS):
            of_target = _part(target, place, axis if has_shares else None)
            others = [None if x is None else _part(x, place) for x in (weights, keys)]
            yield input_format, _part(preds, place, axis), of_target, *others

    return pieces()


def split_images(
    input_format: "InputFormat", of_rows: "InputFormat", preds: Any, target: Any, weights: Any = None
) -> Iterator[Iterator[Any]] | None:
    """Divide a large batch of images for `InputFormat.read`. Return None as `split` does.

    Yield the pieces of consecutive images as `split` does: a single piece for several images, or pieces of the rows of
    one image, with the format `of_rows`.
    """
    given = [x for x in (preds, target, weights) if x is not None]
    if not all(isinstance(x, Tensor) and x.is_cpu and not x.is_nested and x.dim() for x in given):
        return None
    if preds.numel() <= _LARGE or mode_of(*given) != "numbers" or len({len(x) for x in given}) > 1:
        return None
    n_images = len(preds)
    at_once = max(1, _CONVERTED * n_images // preds.numel())

    def parts() -> Iterator[Iterator[Any]]:
        for begin in range(0, n_images, at_once):
            images: Any = [None if x is None else x[begin : begin + at_once] for x in (preds, target, weights)]
            pieces = split(of_rows, *images) if at_once == 1 else None
            yield iter([(input_format, *images, None)]) if pieces is None else pieces

    return parts()


def _places(
    samples: Sequence[int], n_classes: int, n_rows: int, n_values: int, most_in_item: int, shares: int = 1
) -> list[_Place]:
    """Return places of pieces of at most `n_rows` rows and `n_values` predicted values, for samples of this shape.

    Items with at least `most_in_item` rows are pieces of their own. The number of pieces is as for `_ranges`.
    """
    n_items = samples[0]
    per_item, per_piece = math.prod(samples) // n_items, max(1, min(n_rows, n_values // n_classes))
    if per_item < min(per_piece, most_in_item):
        return [(begin, end, _ALL) for begin, end in _ranges(n_items, per_piece // per_item, shares)]
    ranges = _ranges(per_item, per_piece, shares)
    return [(item, item + 1, slice(begin, end)) for item in range(n_items) for begin, end in ranges]


def _part(x: Any, place: _Place, axis: int | None = None) -> Any:
    """Return the samples of a piece of an array or a tensor: `(n,)`, or `(n, C)` with a class axis."""
    begin, end, part = place
    x = x[begin:end]
    if axis is None:
        return (x if x.ndim == 1 else x.reshape(-1))[part]
    n_classes = x.shape[axis]
    if axis < x.ndim - 1:  # the transpose of one item is a view
        x = x.reshape(end - begin, n_classes, -1).swapaxes(1, 2)
        x = x[0] if end - begin == 1 else x
    return x.reshape(-1, n_classes)[part]


def _array_of(x: Any) -> Any:
    """Return an array, or a tensor of 16 bits as an array of float32."""
    return x.float().numpy() if isinstance(x, Tensor) else x


def _ranges(n: int, most: int, shares: int) -> list[tuple[int, int]]:
    """Return ranges of similar sizes of at most `most` that cover [0, n).

    Their number is a multiple of `shares` or of its largest possible divisor, a power of two, so that each thread gets
    as many of them.
    """
    n_ranges = -(-n // most)
    shares = min(shares, 1 << (n_ranges - 1).bit_length())
    n_ranges = min(n, -(-n_ranges // shares) * shares)
    return [(n * k // n_ranges, n * (k + 1) // n_ranges) for k in range(n_ranges)]


def detail_of(accumulators: Iterable[Any], task: Task) -> "Detail":
    """Return the statistics of multi-class rows that accumulators need.

    An accumulator that takes no pieces needs all of them, unless it has `only_confidences`.
    """
    needed: set[Detail] = set()
    for accumulator in accumulators:
        of_log_prob, of_square, of_entropy, *others = getattr(accumulator, "of_statistics", None) or (0,) * 5
        if getattr(accumulator, "only_confidences", False):
            needed.add("classes" if accumulator.mode == "classwise" else "top")
        elif of_entropy or not takes_pieces(accumulator, task, from_logits=False):
            needed.add("entropy")
        else:
            needed |= {"squares"} if of_square else {"label"} if of_log_prob else {"top"}
            needed |= {"top"} if any(others) else set()
    if needed == {"classes"}:
        return "classes"
    if "entropy" in needed:
        return "entropy"
    if "squares" in needed:
        return "squares"
    if needed == {"label"}:
        return "label"
    return "confidence" if "label" in needed else "top"


def _sum_to_one(totals: Any, tolerance: float) -> bool:
    """Return whether the sums of probabilities of rows are 1."""
    return not len(totals) or bool(totals.max() - 1 <= tolerance and 1 - totals.min() <= tolerance)


def _may_be_mistaken(input_format: "InputFormat", values: Any) -> bool:
    """Return whether the first values do not rule out the mistakes that `check_mistakes` reports."""
    value = values.item(0)  # rules out mistakes in most input, before the others are converted
    if not 0 <= value <= 1 if input_format.from_logits else 0 < value < 1:
        return False
    first = values[:8].tolist()
    return all(x in (0, 1) for x in first) or (input_format.from_logits and min(first) >= 0 and max(first) <= 1)
