"""Which files are meant: those that patterns name, and the share of them that one of several processes reads."""

from __future__ import annotations

from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from torchcalib.io.reader import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def expanded(names: Iterable[str]) -> tuple[Path, ...]:
    """Return the files that names and patterns stand for, in the order given.

    A name with `*`, `?` or `[...]` in it is a pattern, unless a file is called so; `**` stands for any folders. What a
    pattern matches comes in the order of its names, character by character: `part-10` stands before `part-9`.

    Raises:
        InputError: a pattern matches nothing.
    """
    found: list[Path] = []
    for name in names:
        if not any(letter in name for letter in "*?[") or Path(name).exists():
            found.append(Path(name))
            continue
        matched = sorted(glob(name, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not matched:
            raise InputError(f"`{name}` must match at least one file, got none. Check the pattern and the folder.")
        found += map(Path, matched)
    return tuple(found)


def share_of(paths: Sequence[Path], rank: int, n_ranks: int) -> tuple[Path, ...]:
    """Return the files that one of `n_ranks` processes reads: a run of them, so that all runs together are in order.

    A file goes to the rank in whose part of all bytes its middle byte lies. Sizes stand for rows, for they are known
    without opening a file, let alone counting the lines of a table. `.npy` files are one data set, which is not split.
    """
    if paths and paths[0].suffix.lower() == ".npy":
        return tuple(paths) if rank == 0 else ()
    sizes = [path.stat().st_size for path in paths]
    total = max(1, sum(sizes))
    middles = [end - size / 2 for size, end in zip(sizes, accumulate(sizes), strict=True)]
    owners = [min(int(middle * n_ranks / total), n_ranks - 1) for middle in middles]
    return tuple(path for path, owner in zip(paths, owners, strict=True) if owner == rank)
