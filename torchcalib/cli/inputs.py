"""Open prediction files, and check the places of results. Importing this module does not import torch.

`main` opens the files before it imports the module of a command. Errors in headers are therefore fast.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchcalib.cli.options import is_file
from torchcalib.cli.systems import System
from torchcalib.io.opening import PredictionFiles, Unconverted, open_predictions, open_without_targets
from torchcalib.io.writing import is_of_system


def opening(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `open_predictions` for the command line options."""
    return {
        "preds": arguments.preds,
        "target": arguments.target,
        "weights": arguments.weights,
        "groups": getattr(arguments, "groups", None),
        "clusters": getattr(arguments, "clusters", None),
        "ids": getattr(arguments, "id", None),
        "pred": arguments.pred,
        "from_logits": True if arguments.from_logits else False if arguments.from_probs else None,
        "task": arguments.task,
        "class_names": None if arguments.class_names is None else arguments.class_names.split(","),
        "ignore_index": arguments.ignore_index,
        "nan_policy": arguments.nan_policy,
        "normalize": arguments.normalize,
    }


def opened(arguments: argparse.Namespace, paths: Sequence[Path], preds: str | None = None) -> PredictionFiles:
    """Open prediction files with the command line options, once. `preds` overrides the option --preds."""
    known: dict[object, PredictionFiles] = vars(arguments).setdefault("opened", {})
    key = (tuple(paths), preds)
    if key not in known:
        given = opening(arguments)
        known[key] = open_predictions(paths, **(given if preds is None else {**given, "preds": preds}))
    return known[key]


def opened_systems(arguments: argparse.Namespace, systems: Mapping[str, System]) -> dict[str, PredictionFiles]:
    """Open the files of all systems, which must agree in task, shape, class order and weights.

    They must also agree in the number of rows, unless rows are joined by --id.
    """
    files = {name: opened(arguments, system.paths, system.preds) for name, system in systems.items()}
    for (a, first), (b, second) in pairwise(files.items()):
        classes = [predictions.source.class_names for predictions in (first, second)]
        for kind, found_a, found_b in (
            ("task", first.task_of_report, second.task_of_report),
            ("number of rows", *((p.n_rows for p in (first, second)) if arguments.id is None else (0, 0))),
            ("shape of a row of predictions", first.source.shape[1:], second.source.shape[1:]),
            ("order of classes", *(", ".join(names) if all(classes) else "" for names in classes)),
            ("weights, or none", *("some" if p.source.weights else "none" for p in (first, second))),
        ):
            if found_a != found_b:
                remedy = ", or join them by --id" if kind == "number of rows" else ""
                raise ValueError(
                    f"Systems must have the same {kind}, got {found_a} in `{a}` and {found_b} in `{b}`. "
                    f"Compare predictions of the same rows{remedy}."
                )
    return files


def opened_to_convert(arguments: argparse.Namespace, paths: Sequence[Path]) -> Unconverted:
    """Open prediction files in which targets are not required, once."""
    if "opened" not in arguments:
        arguments.opened = open_without_targets(paths, arguments.preds)
    found: Unconverted = arguments.opened
    return found


def check_places(arguments: argparse.Namespace, options: Sequence[str], inputs: Sequence[Path]) -> None:
    """Check that the files for results, which the options name, differ from the inputs, and can be written.

    Unless --out is one of these files, it is a file by its ending, or a folder, which is created.
    """
    if options and "out" not in options and getattr(arguments, "out", None) is not None:
        make_place(arguments.out, inputs)
    given = {option: Path(place) for option in options if (place := getattr(arguments, option)) is not None}
    for option, path in given.items():
        _check_place(f"--{option.replace('_', '-')}", path, inputs)
    if len({path.resolve() for path in given.values()}) < len(given):
        first, second = (f"`--{option.replace('_', '-')}`" for option in given)
        raise ValueError(f"{second} must not be the file of {first}, got {str(path)!r} for both. Name two files.")


def make_place(out: str, inputs: Sequence[Path]) -> None:
    """Check that a file for results can be written, or create the folder for them, unless it exists."""
    if is_file(out):
        _check_place("--out", Path(out), inputs)
    else:
        make_folder(out)


def make_folder(out: str) -> None:
    """Create a folder for results, unless it exists."""
    if not out or (Path(out).exists() and not Path(out).is_dir()):
        raise ValueError(f"`--out` must be a folder, got {out!r}. Name another folder.")
    Path(out).mkdir(parents=True, exist_ok=True)


def _check_place(option: str, path: Path, inputs: Sequence[Path]) -> None:
    """Raise ValueError unless a file for results can be written, and is not an input file."""
    folder = path.parent
    if path.is_dir() or not path.name:
        raise ValueError(f"`{option}` must be a file, got the folder {str(path)!r}. Name a file in it.")
    if is_of_system(path) or (path.exists() and not path.is_file()):
        raise ValueError(f"`{option}` must be a file, got the device or pipe {str(path)!r}. Name another one.")
    if not folder.is_dir():
        raise ValueError(f"`{option}` must be in a folder that exists, got {str(path)!r}. Create the folder.")
    if not os.access(folder, os.W_OK):
        found = f"got {str(path)!r}. Name another one."
        raise ValueError(f"`{option}` must be in a folder that can be written to, {found}")
    if any(path.exists() and path.samefile(other) for other in inputs):
        raise ValueError(f"`{option}` must not be an input file, got {str(path)!r}. Name another one.")
