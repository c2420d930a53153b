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
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.ops.bin_sums.formula import LEAST_WEIGHT, MOST_WEIGHT
from torchcalib.ops.dispatch import choose, source_of
from torchcalib.ops.operation import mode_of

if TYPE_CHECKING:
    from torchcalib.core.inputs import InputFormat
    from torchcalib.ops.softmax_stats import Detail

_ROWS, _VALUES = 2**17, 2**20  # largest numbers of rows and of predicted values of a piece
_LARGE, _CONVERTED = 2**20, 2**19  # numbers of values above which `split` divides a batch, and of a piece
_MAX_SUMS = 2**18  # largest number of partial sums of all ranges of a batch
_TOGETHER = 2**22  # largest number of rows of a piece that needs no arrays of its size
_PER_RANGE = 2**18  # smallest number of rows of a range of such pieces
_ALL, _FIRST = slice(None), slice(0, 1)
_LARGE_ITEM = 2**9  # smallest number of rows of an item, such as an image, that is a piece of its own
_FEW_CLASSES = 32  # largest number of classes whose probabilities are added class by class
_FEW_REMOVED = 2**6  # largest number of removed rows between which copying runs of rows is fastest
_MAX_PARTS = 2**12  # largest number of parts: with more, sums of a piece take longer than its rows
_PER_PART = 2**8  # number of rows of a piece for each part, whose sums are added to the state after each piece
_NO_LABEL = -(2**63)  # label of rows that a mask excludes
_INT64 = np.dtype(np.int64)
_NARROW = frozenset((torch.float16, torch.bfloat16))
_LABELS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))
_WEIGHTS = _LABELS | _NARROW | {torch.float32, torch.float64}


class Piece(NamedTuple):
    """Rows of a batch as numpy arrays, without rows of weight 0, and without ignored ones unless `ignored` is given."""

    values: Any  # predictions `(n,)` or `(n, C)`, float32 or float64; those of binary rows are unchecked
    label: Any  # int64 `(n,)`; those of binary rows are unchecked
    # Event of each row: y=1 for binary predictions, and that the top class is the label for multi-class predictions.
    # Multi-class outcomes are uint8. With the detail "label", events are undefined. With `has_columns`, they are None.
    confidence: Any
    outcome: Any
    top: Any  # top class of multi-class rows; None if binary
    totals: Any  # sums of the statistics of multi-class rows `(6, G)`, see `softmax_stats.plain.labelled_rows`
    weights: Any  # positive, float64 `(n,)`; None for 1
    copies: bool  # whether weights count copies of a row
    groups: Any  # number of the part of each row in [0, G), int64 `(n,)`; None for G = 1
    n_groups: int
    only_group: int | None  # number of the part of all rows, if they are in the same part and have `groups` None
    from_logits: bool
    n_values: int  # number of predicted values of the batch
    ignored: int | None  # label of the rows to leave out, whose values may be invalid
    # Whether probabilities are in the order of classes in memory, without events. Values and labels are unchecked.
    has_columns: bool = False

    def by_group(self) -> "Iterator[Piece]":
        """Yield the rows of each part as a piece without totals."""
        order = self.groups.argsort(kind="stable")
        begins = np.searchsorted(self.groups[order], np.arange(self.n_groups + 1))
        names = ("values", "label", "confidence", "outcome", "top", "weights")
        columns = {name: x for name in names if (x := getattr(self, name)) is not None}
        for group, (begin, end) in enumerate(pairwise(begins.tolist())):
            rows = order[begin:end]
            if len(rows):
                of_group: Any = {name: x[rows] for name, x in columns.items()}
                yield self._replace(**of_group, totals=None, groups=None, n_groups=1, only_group=group)

    def weight_in_groups(self) -> Any:
        """Return the total weight of the rows of each part `(G,)`; a number without `groups`."""
        if self.groups is not None:
            return np.bincount(self.groups, self.weights, self.n_groups)
        return len(self.label) if self.weights is None else self.weights.sum()


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

    @property
    def is_ready(self) -> bool:
        """Whether any range of rows is a piece without a copy."""
        has_columns = self.weights is not None or self.parts is not None or self.input_format.ignore_index is not None
        if self.axis is not None or has_columns or self.dtype.itemsize < 4 or self.label.dtype != _INT64:
            return False
        is_contiguous: bool = self.preds.flags.c_contiguous and self.label.flags.c_contiguous
        return self.label.ndim == 1 and is_contiguous

    def places(self) -> list[_Place]:
        """Return the places of the pieces. Pieces contain no more than one item if each large item is in one part."""
        keys = None if self.parts is None else self.parts.keys
        is_by_item = keys is not None and keys.ndim > 1 and not any(keys.strides[1:])
        n_parts = 0 if self.parts is None or self.parts.n > _MAX_PARTS else self.parts.n
        n_rows = max(_ROWS, _PER_PART * n_parts)
        return _places(self.label.shape, self.n_classes, n_rows, _VALUES, _LARGE_ITEM if is_by_item else _ROWS)

    def piece(self, place: _Place, detail: "Detail", keeps_ignored: bool = False) -> Piece | None:
        """Return a piece; None if a label, a weight, a part or a multi-class row is invalid.

        Binary rows are not checked. With `keeps_ignored`, ignored rows of binary pieces and of columns are not removed.
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
        ignored, keeps_ignored = input_format.ignore_index, keeps_ignored and (has_columns or self.axis is None)
        if keeps_ignored and w is not None and w.dtype == np.bool_:
            ignored = _NO_LABEL if ignored is None else ignored
            if y.min() == _NO_LABEL:
                return None
            y, w = np.where(w, y, ignored), None
        if ignored is not None and not (keeps_ignored and w is None):
            x, y, w, keys = _kept(y != ignored, x, y, w, keys)
            ignored = None
        if w is not None and len(w):
            least = w.min().item()  # NaN if a weight is NaN
            if not (least >= 0 and (self.copies or w.max().item() <= MOST_WEIGHT)):
                return None
            if least < LEAST_WEIGHT:
                x, y, w, keys = _kept(w != 0, x, y, w, keys)
                if len(w) and w.min().item() < LEAST_WEIGHT:
                    return None
            w = w.astype(np.float64, copy=False)
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
                x, y, w, groups = (x, y, w, groups) if is_known else _kept(groups >= 0, x, y, w, groups)
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
        found = source.labelled_rows(x, y, input_format.from_logits, tolerance, detail, w, groups, n_groups)
        return None if found is None else Piece(x, y, *found, *columns)

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
    # Code that divides rows by itself needs no small pieces, whose calls take time.
    is_whole = len(adders) == 1 and rows.is_ready
    places = [] if is_whole else rows.places()
    n = len(label) if is_whole else min(len(places), _MAX_SUMS // sum(map(np.size, totals)))
    if n <= 1:
        return all(_add_piece(rows, place, detail, adders, totals) for place in places)
    found: list[tuple[int, bool, Sequence[Any]]] = []

    def add(begin: int, end: int) -> None:
        """Add a range of rows or of pieces to sums of its own."""
        if is_whole:
            some: Any = ((k, min(k + _TOGETHER, end), _ALL) for k in range(begin, end, _TOGETHER))
        else:
            some = places[len(places) * begin // n : len(places) * end // n]
        sums = [np.zeros(total.shape) for total in totals]
        is_added = all(_add_piece(rows, place, detail, adders, sums) for place in some)
        found.append((begin, is_added, sums))

    if rows.axis is not None or choose("events", "cpu", n_values) == "numba":
        from torchcalib.ops.threads import PER_RANGE, in_threads

        in_threads(add, n, n_values, _PER_RANGE if is_whole else PER_RANGE)
    else:  # Operations of torch use several threads by themselves. Together with other threads, they are slower.
        add(0, n)
    for _, _, sums in sorted(found, key=itemgetter(0)):
        for total, more in zip(totals, sums, strict=True):
            total += more
    return all(is_added for _, is_added, _ in found)


def _add_piece(
    rows: LabelledRows, place: _Place, detail: "Detail", adders: Sequence[Any], totals: Sequence[Any]
) -> bool:
    """Add a piece to the totals. Return False if it is invalid."""
    may_ignore = rows.weights is not None or rows.input_format.ignore_index is not None
    keeps_ignored = may_ignore and all(getattr(adder, "skips_ignored", False) for adder in adders)
    piece = rows.piece(place, detail, keeps_ignored)
    if piece is None:
        return False
    if not len(piece.label):
        return True
    is_added = True
    for adder, total in zip(adders, totals, strict=True):
        is_added = is_added and adder.add_piece(piece, total)
    return is_added


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


def _places(samples: Sequence[int], n_classes: int, n_rows: int, n_values: int, most_in_item: int) -> list[_Place]:
    """Return places of pieces of at most `n_rows` rows and `n_values` predicted values, for samples of this shape.

    Items with at least `most_in_item` rows are pieces of their own.
    """
    n_items = samples[0]
    per_item, per_piece = math.prod(samples) // n_items, max(1, min(n_rows, n_values // n_classes))
    if per_item < min(per_piece, most_in_item):
        return [(begin, end, _ALL) for begin, end in _ranges(n_items, per_piece // per_item)]
    ranges = _ranges(per_item, per_piece)
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


def _ranges(n: int, most: int) -> list[tuple[int, int]]:
    """Return ranges of similar sizes of at most `most` that cover [0, n)."""
    n_ranges = -(-n // most)
    return [(n * k // n_ranges, n * (k + 1) // n_ranges) for k in range(n_ranges)]


def _kept(keep: Any, *columns: Any) -> Sequence[Any]:
    """Return the entries of columns where `keep` is True. A key that all rows share has another length."""
    if keep.all():
        return columns
    removed = np.flatnonzero(~keep)
    if len(removed) > _FEW_REMOVED:
        rows = np.flatnonzero(keep)
        return [x if x is None or len(x) != len(keep) else x.take(rows, 0) for x in columns]
    runs = [slice(begin + 1, end) for begin, end in pairwise([-1, *removed.tolist(), len(keep)])]
    return [x if x is None or len(x) != len(keep) else np.concatenate([x[run] for run in runs]) for x in columns]


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
