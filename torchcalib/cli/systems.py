"""Systems that `torchcalib compare` compares: their files and names. No file is opened."""

import argparse
import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torchcalib.display.words import printable
from torchcalib.io.paths import check_paths, expanded


class System(NamedTuple):
    """Files of one system in a comparison, and the name of its predictions; None to search for a common name."""

    paths: tuple[Path, ...]
    preds: str | None


def systems_of(arguments: argparse.Namespace) -> dict[str, System]:
    """Return the files and the name of the predictions of every system, by system name."""
    several = arguments.preds or []
    if len(several) > 1 and len(arguments.systems) == 1:
        return _systems_in_one_file(arguments.systems[0], several)
    if len(several) > 1:
        raise ValueError(
            f"--preds must be given once for several files, got {len(several)} times. Name one file to compare its "
            "columns, or use the same column names in all files."
        )
    names: list[str] = []
    paths: list[tuple[Path, ...]] = []
    for given in arguments.systems:
        name, equals, files = given.partition("=")
        if not equals or Path(given).exists():
            name, files = "", given
        elif not name.strip():
            raise ValueError(f"A system must be NAME=FILES with a name, got {given!r}. Write a name before the =.")
        names.append(name)
        paths.append(_files_of(files))
    unnamed = [(given, of[0]) for given, of, name in zip(arguments.systems, paths, names, strict=True) if not name]
    defaults = iter(_default_names(unnamed))
    names = [printable(name or next(defaults)) for name in names]
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise ValueError(f"Systems must have different names, got `{repeated[0]}` twice. Rename one with NAME=FILES.")
    if len(names) < 2:
        check_paths(paths[0])
        raise ValueError(
            "There must be at least two systems, got one. Name another file, or each system in this file: --preds A "
            "--preds B. For a single system use `torchcalib report`."
        )
    preds = several[0] if several else None
    return {name: System(check_paths(of), preds) for name, of in zip(names, paths, strict=True)}


def _systems_in_one_file(given: str, several: Sequence[str]) -> dict[str, System]:
    """Return systems whose predictions are different columns or arrays in one file, by system name."""
    paths = check_paths(_files_of(given))
    systems: dict[str, System] = {}
    for option in several:
        name, equals, preds = option.partition("=")
        if not equals:
            name = preds = option
        name = printable(name.strip())
        if not name or not preds or name in systems:
            raise ValueError(f"--preds must be [NAME=]COLUMNS with different names, got {option!r}. Rename it.")
        systems[name] = System(paths, preds)
    return systems


def _files_of(given: str) -> tuple[Path, ...]:
    return (Path(given),) if Path(given).exists() else expanded(given.split(","))


def _default_names(systems: Sequence[tuple[str, Path]]) -> list[str]:
    """Return a name for each system, given as pairs of argument and first file.

    The name is the file stem, or the folder name for a pattern. Repeated names are prefixed with the folder, or else
    are the whole argument.
    """
    names = []
    for given, file in systems:
        is_pattern = glob.has_magic(given) and not Path(given).exists()
        names.append(file.parent.name or file.stem if is_pattern else file.stem)
    in_folders = [f"{file.parent.name}/{name}" for (_, file), name in zip(systems, names, strict=True)]
    for longer in (in_folders, [given for given, _ in systems]):
        times = Counter(names)
        names = [long if times[name] > 1 else name for name, long in zip(names, longer, strict=True)]
    return names
