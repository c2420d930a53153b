"""Folders with a file of class-first predictions and a file of labels for each image, as nnU-Net writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchcalib.io.arrays import Npy, Npz
from torchcalib.io.errors import InputError, quoted, reading
from torchcalib.io.reader import Array

if TYPE_CHECKING:
    from torch import Tensor

_READERS = {".npz": Npz, ".npy": Npy}
_NAMES = ("probabilities", "softmax", "logits", "preds", "seg", "labels", "target", "data")
"""Names of the array in an archive with several arrays. nnU-Net writes `probabilities`, earlier `softmax`."""

_MAX_BYTES = 2**33
"""Largest array that is decoded. Archives may expand to a thousand times their size."""


class CaseFile(NamedTuple):
    """Files of the predictions and labels of an image, whose name is their stem."""

    name: str
    preds: Path
    target: Path


def case_files(paths: Sequence[Path]) -> list[CaseFile]:
    """Return the images of a folder of predictions and a folder of labels, sorted by name."""
    if len(paths) != 2 or not all(path.is_dir() for path in paths):
        raise InputError(
            f"`FILE` must be a folder of predictions and a folder of labels with --per-image, got "
            f"{quoted([str(path) for path in paths])}. Save arrays as PREDS/CASE.npz and LABELS/CASE.npz, or .npy."
        )
    preds, target = ({f.stem: f for f in sorted(path.iterdir()) if f.suffix in _READERS} for path in paths)
    if not preds or set(preds) - set(target):
        missing = sorted(set(preds) - set(target))
        found = f"no labels of {quoted(missing[:3])}" if missing else f"no .npz or .npy file in {str(paths[0])!r}"
        raise InputError(
            f"Each image must have predictions and labels of the same name, got {found}. Check the folders."
        )
    return [CaseFile(name, path, target[name]) for name, path in preds.items()]


def array_of(path: Path) -> Tensor:
    """Return the array in a file: the only one, or the one with a known name."""
    reader = _READERS[path.suffix](path)
    names = list(reader.arrays)
    chosen = names if len(names) == 1 else [name for name in _NAMES if name in names][:1]
    if not chosen:
        raise InputError(f"`{path}` must contain one array, or one named {quoted(_NAMES)}, got {quoted(names)}.")
    array: Array = reader.arrays[chosen[0]]
    if array.problem:
        raise InputError(f"`{chosen[0]}` in `{path}` {array.problem}")
    if not array.shape or array.row_bytes * array.shape[0] > _MAX_BYTES:
        raise InputError(f"`{path}` must contain an array of at most 8 GiB, got shape {array.shape}. Split the image.")
    with reading(str(path), reader.format):
        (found,) = next(reader.rows(chosen, max(1, array.shape[0])))
    tensor: Tensor = found
    return tensor


def case_of(files: CaseFile) -> tuple[Tensor, Tensor]:
    """Return predictions `(1, C, ...)` or `(1, ...)` and labels `(1, ...)` of an image."""
    preds, target = array_of(files.preds), array_of(files.target)
    if preds.dtype.is_floating_point and target.dtype.is_floating_point and bool((target == target.round()).all()):
        target = target.long()
    return preds.unsqueeze(0), target.unsqueeze(0)
