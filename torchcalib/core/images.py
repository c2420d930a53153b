"""Values per image: which classes they average over, and the state with sums for each image."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import check_flag, is_int
from torchcalib.core.inputs import InputFormat
from torchcalib.core.partition import Partition, SumsByPart
from torchcalib.core.pieces import Parts, add_rows, is_divisible, rows_of, split_images, takes_pieces
from torchcalib.core.predictions import Predictions
from torchcalib.core.state import N_IGNORED, SumState, check_counts
from torchcalib.core.sums import BinStats, Sums, check_sums, has_noise_flag, with_noise_row
from torchcalib.io.errors import shown
from torchcalib.ops.softmax_stats import Detail

Read = Callable[[InputFormat, Tensor, Tensor, Tensor | None], Predictions]
"""Function that converts and checks a batch: of rows, or of images if `batch_dims` of the format is 1."""


@dataclass(frozen=True)
class Images:
    """Options of values per image, for `per_image=` of metrics. `per_image=True` uses the defaults.

    Args:
        classes: Classes or labels with a value of their own, as indices or names. None uses all. Only for class-wise
            and multi-label values.
        include_background: Whether class 0 is among them. Cannot be combined with `classes`.
        ignore_empty: Whether a class that does not occur in an image has the value NaN, which means leave out. Only for
            calibration errors over bins of class-wise and multi-label events.
        class_names: Names of all classes, in the order of the class axis.

    Raises:
        TypeError, ValueError: For invalid arguments.

    Example:
        >>> import torch
        >>> from torchcalib import ece
        >>> liver = Images(classes=["liver"], class_names=["background", "liver", "spleen"])
        >>> preds = torch.tensor([[[0.7, 0.2], [0.2, 0.6], [0.1, 0.2]]])  # one image, 3 classes, 2 voxels
        >>> ece(preds, torch.tensor([[0, 1]]), mode="classwise", per_image=liver)
        tensor(0.3000)
    """

    classes: Sequence[int | str] | None = None
    include_background: bool = True
    ignore_empty: bool = False
    class_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_flag("include_background", self.include_background)
        check_flag("ignore_empty", self.ignore_empty)
        names = self.class_names
        if names is not None:
            is_text = not isinstance(names, str) and all(isinstance(name, str) for name in names)
            if not is_text or len(set(names)) < len(names):
                raise ValueError(f"`class_names` must be distinct names of all classes, got {shown(names)}.")
            object.__setattr__(self, "class_names", tuple(names))
        if self.classes is None:
            return
        if not self.include_background:
            raise ValueError("`include_background` must be True if `classes` is given, got False. Omit class 0 there.")
        if isinstance(self.classes, str) or not isinstance(self.classes, Sequence) or not self.classes:
            raise TypeError(f"`classes` must be a list of class indices or names, got {shown(self.classes)}.")
        object.__setattr__(self, "classes", tuple(map(self._index_of, self.classes)))
        if len(set(self.classes)) < len(self.classes):
            raise ValueError(f"`classes` must be distinct, got {shown(list(self.classes))}.")

    def _index_of(self, name: object) -> int:
        """Return the index of a class from its index or name. Raise ValueError for another one."""
        names = self.class_names
        if is_int(name) and name >= 0:
            return int(name)
        if not isinstance(name, str) or names is None or name not in names:
            known = "" if names is None else f" Names are {', '.join(names)}."
            advice = known or " Pass class_names=[...] to use names."
            raise ValueError(f"`classes` must be class indices, or names in `class_names`, got {shown(name)}.{advice}")
        return names.index(name)

    @property
    def all_classes(self) -> bool:
        """Whether values are those of all classes."""
        return self.classes is None and self.include_background

    def indices(self, num_classes: int) -> list[int]:
        """Return the indices of the classes that have a value. Raise ValueError for an index that does not exist."""
        if self.class_names is not None and len(self.class_names) != num_classes:
            raise ValueError(f"`class_names` must have {num_classes} names, got {len(self.class_names)}.")
        chosen: list[Any] = list(range(not self.include_background, num_classes))
        chosen = chosen if self.classes is None else list(self.classes)
        if not chosen or max(chosen) >= num_classes:
            raise ValueError(f"`classes` must be some of the {num_classes} classes, got {shown(chosen)}.")
        return chosen

    def names(self, num_classes: int) -> list[int | str]:
        """Return the names of the classes that have a value, or their indices."""
        return [k if self.class_names is None else self.class_names[k] for k in self.indices(num_classes)]

    def chosen(self, statistic: Any) -> Any:
        """Return the statistic of the classes that have a value.

        `statistic` has sums `(..., C, F, K)` of all classes, or is a `RankedSample` with scores `(..., C, N)`.
        """
        if self.all_classes and self.class_names is None:
            return statistic
        is_sums = isinstance(statistic, Sums)
        axis = -3 if is_sums else -2
        columns = statistic.sums if is_sums else statistic.score
        index = torch.tensor(self.indices(columns.shape[axis]), device=columns.device)
        if is_sums:
            flag = None if statistic.noise_flag is None else statistic.noise_flag.index_select(-1, index)
            return replace(statistic, sums=columns.index_select(axis, index), noise_flag=flag)
        samples = columns, statistic.positives, statistic.n
        chosen = [x if x is None else x.index_select(axis, index) for x in samples]
        return type(statistic)(*chosen, statistic.from_logits, copies=statistic.copies)

    def without_empty(self, values: Tensor, statistic: Any) -> Tensor:
        """Return values per image and class, with NaN for classes without an event if `ignore_empty`."""
        if not self.ignore_empty:
            return values
        outcomes = statistic.outcomes if isinstance(statistic, BinStats) else statistic.positives
        return values.masked_fill(outcomes.detach().nan_to_num(0).sum(-1) == 0, torch.nan)


def images_of(per_image: bool | Images, has_classes: bool) -> Images:
    """Return the options of values per image. `has_classes` states whether there is one value per class."""
    if per_image is True:
        return Images()
    if not isinstance(per_image, Images):
        raise TypeError(f"`per_image` must be True, False or Images(...), got {shown(per_image)}.")
    if not has_classes and (not per_image.all_classes or per_image.ignore_empty):
        raise ValueError(
            f"`per_image` must not choose classes for a metric with one value per image, got {shown(per_image)}. Pass "
            "mode='classwise', or ignore_index=0 to leave out the voxels of the background."
        )
    return per_image if has_classes else Images()


def mean_over_images(values: Tensor, over_classes: bool, weights: Tensor | None = None) -> Tensor:
    """Return the mean `()`, or `(K,)` per class, of the values `(G,)` or `(G, K)` of G images, without NaN.

    `over_classes` takes the mean over the classes of each image first. With weights `(R, G)` of R replicates, means are
    `(R, ...)`.
    """
    if over_classes:
        values = values.nanmean(-1)
    if weights is None:
        return values.nanmean(0)
    absent = values.isnan()
    columns = torch.stack((values.masked_fill(absent, 0), (~absent).to(values)), -1).reshape(len(values), -1)
    total, n = (weights.to(values) @ columns).reshape(len(weights), *values.shape[1:], 2).unbind(-1)
    return total / n


def image_axes(
    input_format: InputFormat, preds: Tensor, target: Tensor, weights: Tensor | None
) -> tuple[InputFormat, Tensor | None]:
    """Return the format of a batch of images with its class axis, and weights without a channel axis of size 1."""
    found = input_format.resolved(preds, target)
    has_axis = found.task != "binary" and weights is not None and weights.dim() == preds.dim()
    if has_axis and weights is not None and weights.shape[found.axis] == 1:
        weights = weights.squeeze(found.axis)
    return found, weights


@lru_cache(maxsize=16)
def _of_rows(input_format: InputFormat) -> InputFormat:
    """Return the format of a batch whose images are samples. It is kept, because it stores which dtypes it accepts."""
    return replace(input_format, batch_dims=0)


def add_images(
    adder: Any, total: Any, input_format: InputFormat, detail: Detail, preds: Any, target: Any, weights: Any
) -> bool:
    """Add a batch of labels to `total`, a numpy array with sums per image, in place, by the pass of `core.pieces`.

    `adder` adds a piece of an image to it. Return False if the batch is not added. The sums may then be incomplete.
    """
    samples = input_format.samples_of(preds, target)
    numbers = np.arange(len(preds)).reshape(-1, *[1] * (len(samples) - 1))
    parts = Parts(np.broadcast_to(numbers, samples), len(preds), np.asarray)
    rows = rows_of(_of_rows(input_format), preds, target, weights, parts)
    return rows is not None and add_rows(rows, detail, [adder], [total])


@dataclass(frozen=True, eq=False)
class ImagePartition(Partition[Any]):
    """Sums over the rows of every image, and the names of images."""

    cases: Tensor = field(kw_only=True)  # see `SumsOfImages`

    @cached_property
    def names(self) -> list[str]:
        """Name of each image; "" without a name."""
        return list(_decoded(self.cases))


class SumsOfImages(NamedTuple):
    """State of sums per image, in chunks of n images."""

    sums: list[Tensor]  # (n, W): the flattened sums of an image; see `SumState`
    cases: list[Tensor]  # uint8 on the CPU: the name of each image in UTF-8, followed by a byte 0
    n_ignored: Tensor  # see `core.state.Samples`


@dataclass(frozen=True)
class ImageState(SumState[Any]):
    """Operations on a state with sums for each image. Images with the same name are added.

    An image takes 8 bytes for each sum: about 850 for 15 bins, for each class. Chunks of similar sizes are
    concatenated, which adds images of equal names. The number of rows is therefore about twice that of images at most.
    """

    names: ClassVar[tuple[str, ...]] = SumsOfImages._fields
    has_payload: ClassVar[bool] = True

    def empty(self) -> Any:
        """Return the state without images."""
        return SumsOfImages([], [], torch.zeros(N_IGNORED, dtype=torch.float64))

    def join(self, parts: Sequence[Any]) -> Any:
        """Return a state with the given parts, in the order of `names`."""
        return SumsOfImages(*parts)

    def parts(self, state: Any) -> Any:
        """Return the parts of a state to save: the state itself, which is a tuple."""
        return state

    def from_predictions(self, p: Predictions) -> Any:
        """Return the state for one batch, whose first axis has images without names."""
        return self._of_images(super().from_predictions(p), p.samples[0])

    def in_one_pass(self, input_format: InputFormat, detail: Detail, preds: Any, target: Any, weights: Any) -> Any:
        """Return the state for a batch of labels by the pass of `core.pieces`; None if it cannot add the batch."""
        if not takes_pieces(self.accumulator, input_format.task, input_format.from_logits) or not preds.dim():
            return None
        n_images = len(preds)
        by_image: SumState[Any] = SumState(SumsByPart(self.accumulator, n_images), (n_images, *self.shape))
        total = by_image.empty()
        is_added = add_images(by_image, total.numpy(), input_format, detail, preds, target, weights)
        return self._of_images(total, n_images) if is_added else None

    def in_pieces(self, input_format: InputFormat, read: Read, preds: Any, target: Any, weights: Any) -> Any:
        """Return the state for a large batch on the CPU by `read`, with the memory of a piece; None for others."""
        parts = split_images(input_format, _of_rows(input_format), preds, target, weights)
        if parts is None or not is_divisible(self.accumulator):
            return None
        of_image: SumState[Any] = SumState(self.accumulator, self.shape)
        n_ignored, rows = self.empty().n_ignored, []
        for pieces in parts:
            sums: Any = 0
            for how, x, y, w, _ in pieces:
                p = read(how, x, y, w)
                found = self.from_predictions(p) if how.batch_dims else self._of_images(of_image.from_predictions(p), 1)
                sums, n_ignored = sums + found.sums[0], n_ignored + found.n_ignored
            rows.append(sums)
        return SumsOfImages([torch.cat(rows)], [torch.zeros(len(preds), dtype=torch.uint8, device="cpu")], n_ignored)

    def _of_images(self, state: Tensor, n_images: int) -> Any:
        """Return the state of images without names, from the numbers of ignored rows, flags and sums of all images."""
        sizes = [N_IGNORED, n_images * self._n_flags, n_images * self._n_sums]
        n_ignored, flags, sums = torch.split(state, sizes)
        sums = torch.cat((flags.reshape(n_images, self._n_flags), sums.reshape(n_images, self._n_sums)), 1)
        return SumsOfImages([sums], [torch.zeros(n_images, dtype=torch.uint8, device="cpu")], n_ignored)

    @property
    def _n_sums(self) -> int:
        return math.prod(self.shape)

    @property
    def _n_flags(self) -> int:
        return self._offset - N_IGNORED

    def named(self, state: Any, names: Sequence[str]) -> Any:
        """Return the state of one batch with names of its images, in which equal names are added."""
        chunk = _with_distinct_names(state.sums[0], _encoded(names))
        return self._state_from([chunk], state.n_ignored)

    def _state_from(self, chunks: Sequence[tuple[Tensor, Tensor]], n_ignored: Tensor) -> Any:
        return SumsOfImages([sums for sums, _ in chunks], [cases for _, cases in chunks], n_ignored)

    def add(self, state: Any, more: Any) -> Any:
        """Return a state with the images of two states, on the device of the first."""
        chunks = list(zip(state.sums, state.cases, strict=True))
        for sums, cases in zip(more.sums, more.cases, strict=True):
            chunks.append((sums.to(state.n_ignored.device), cases))
            while len(chunks) > 1 and len(chunks[-2][0]) <= 2 * len(chunks[-1][0]):
                chunks[-2:] = [_joined(chunks[-2:])]
        return self._state_from(chunks, state.n_ignored + more.n_ignored.to(state.n_ignored))

    def detach(self, state: Any) -> Any:
        """Return the state without its autograd graph."""
        return state._replace(sums=[sums.detach() for sums in state.sums], n_ignored=state.n_ignored.detach())

    def n_ignored(self, state: Any) -> Tensor:
        """Return the numbers of ignored invalid rows and ignored missing rows, float64 `(2,)`."""
        n_ignored: Tensor = state.n_ignored
        return n_ignored

    def _whole(self, state: Any) -> tuple[Tensor, Tensor]:
        """Return the sums and names of all images."""
        chunks = list(zip(state.sums, state.cases, strict=True))
        if not chunks:
            sums = state.n_ignored.new_zeros(0, self._n_flags + self._n_sums)
            return sums, torch.zeros(0, dtype=torch.uint8, device="cpu")
        return _joined(chunks)

    def statistic(self, state: Any) -> Any:
        """Return an `ImagePartition`."""
        rows, cases = self._whole(state)
        sums = rows[:, self._n_flags :].reshape(len(rows), *self.shape)
        if has_noise_flag(self.accumulator):
            sums = with_noise_row(sums, rows[:, : self._n_flags].reshape(sums.shape[:-2]))
        return ImagePartition(sums, self.accumulator, cases=cases)

    def check(self, parts: Sequence[Any], like: Any) -> Any:
        """Return a copy of a saved state on the device of `like`, or None if its parts are not valid."""
        lists, n_ignored = parts[:2], parts[2]
        if not all(isinstance(part, list | tuple) for part in lists) or len(lists[0]) != len(lists[1]):
            return None
        if not isinstance(n_ignored, Tensor) or (n_ignored.shape, n_ignored.dtype) != ((N_IGNORED,), torch.float64):
            return None
        check_counts("the numbers of ignored rows", n_ignored)
        width = self._n_flags + self._n_sums
        for sums, cases in zip(*lists, strict=True):
            is_valid = isinstance(sums, Tensor) and isinstance(cases, Tensor) and sums.dtype == torch.float64
            if not is_valid or sums.dim() != 2 or sums.shape[1] != width:
                return None
            if cases.dtype != torch.uint8 or cases.dim() != 1 or len(list(_decoded(cases))) != len(sums):
                return None
            flags = sums[:, : self._n_flags].reshape(len(sums), *self.shape[:-2]) if self._n_flags else None
            check_sums(sums[:, self._n_flags :].reshape(len(sums), *self.shape), self.accumulator.ranges, flags)
        device = like.n_ignored.device
        chunks = [
            _with_distinct_names(sums.detach().to(device, copy=True), cases.cpu().clone())
            for sums, cases in zip(*lists, strict=True)
        ]
        return self._state_from(chunks, n_ignored.detach().to(device, copy=True))

    def announce(self, state: Any) -> Tensor:
        """Return the numbers that a rank sends first, float64 `(4,)`: ignored rows, images, and bytes of names."""
        sums, cases = self._whole(state)
        return torch.cat((state.n_ignored.detach(), state.n_ignored.new_tensor([len(sums), len(cases)])))

    def payload(self, state: Any) -> Tensor:
        """Return the bytes of the sums and names of all images, uint8 `(n,)`."""
        sums, cases = self._whole(state)
        return torch.cat((sums.detach().contiguous().flatten().view(torch.uint8), cases.to(sums.device)))

    def payload_size(self, announced: Tensor) -> int:
        """Return the length of the `payload` of the rank that sent `announced`."""
        n_images, n_bytes = (int(x) for x in announced[N_IGNORED:].tolist())
        return 8 * n_images * (self._n_flags + self._n_sums) + n_bytes

    def merged(self, announced: Sequence[Tensor], payloads: Sequence[Tensor]) -> Any:
        """Return the merged state of all ranks."""
        stacked, chunks = torch.stack(list(announced)), []
        for (n_images, n_bytes), payload in zip(stacked[:, N_IGNORED:].tolist(), payloads, strict=True):
            if n_images:
                end = len(payload) - int(n_bytes)
                # Clone, because a view with another dtype must be aligned to its item size.
                sums = payload[:end].clone().view(torch.float64).reshape(int(n_images), -1)
                chunks.append((sums, payload[end:].cpu()))
        return self._state_from([_joined(chunks)] if chunks else [], stacked[:, :N_IGNORED].sum(0))


def case_names(case: Any, n_images: int) -> list[str]:
    """Return the names of the images of a batch. `case` is one name for all images, or a name for each of them.

    Raises:
        TypeError, ValueError: For another type or number of names, and for empty names.
    """
    given = case.tolist() if isinstance(case, Tensor | np.ndarray) else case
    is_one = isinstance(given, str) or is_int(given)
    if not is_one and not (isinstance(given, Sequence) and all(isinstance(x, str) or is_int(x) for x in given)):
        raise TypeError(f"`case` must be text or an int for each image, or for all of them, got {shown(case)}.")
    names = [str(given)] * n_images if is_one else [str(x) for x in given]
    if len(names) != n_images:
        raise ValueError(f"`case` must have one name for each of the {n_images} images, got {len(names)}.")
    if any(not name or "\0" in name for name in names):
        raise ValueError(f"`case` must be names without the character 0, got {shown(case)}. Pass None without names.")
    return names


def _encoded(names: Sequence[str]) -> Tensor:
    """Return the bytes of the names of images, uint8 `(n,)` on the CPU."""
    return torch.from_numpy(np.frombuffer("".join(f"{name}\0" for name in names).encode(), np.uint8).copy())


def _decoded(cases: Tensor) -> Iterator[str]:
    """Return the names of images from the bytes in a state."""
    text = cases.cpu().numpy().tobytes().decode()
    return iter(text.split("\0")[:-1] if text.endswith("\0") else [])


def _joined(chunks: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return all images as one chunk, in which images of equal names are added."""
    if len(chunks) == 1:  # whose names are distinct
        return chunks[0]
    sums = torch.cat([sums for sums, _ in chunks])
    return _with_distinct_names(sums, torch.cat([cases.cpu() for _, cases in chunks]))


def _with_distinct_names(sums: Tensor, cases: Tensor) -> tuple[Tensor, Tensor]:
    """Return a chunk in which images of equal names are added. Images without names are not added."""
    if len(cases) == len(sums):  # no image has a name
        return sums, cases
    names = list(_decoded(cases))
    places: dict[str | int, int] = {}  # keys of images without names are numbers
    index = [places.setdefault(name or k, len(places)) for k, name in enumerate(names)]
    if len(places) == len(names):
        return sums, cases
    sums = sums.new_zeros(len(places), sums.shape[1]).index_add(0, torch.tensor(index, device=sums.device), sums)
    return sums, _encoded([name if isinstance(name, str) else "" for name in places])
