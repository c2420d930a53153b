"""The commands `torchcalib report FILE ...` and `torchcalib merge PART ...`."""

import argparse
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.saving import save_calibrator
from torchcalib.cli.files import check_logits, check_pages, in_rows, print_json, report_settings
from torchcalib.cli.inputs import opened
from torchcalib.cli.messages import computing, output, warn, working
from torchcalib.core.tasks import infer_task
from torchcalib.display.words import printable
from torchcalib.io.image_folders import case_of
from torchcalib.io.opening import PIECE_BYTES, PredictionFiles
from torchcalib.io.rows import Rows
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.catalogue import check_size
from torchcalib.reporting.render import terminal
from torchcalib.results.report import Report

_FEW_ROWS = 20
"""Largest number of rows for which equal targets in two shards cause no warning: they may be a coincidence."""


def report(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Read the files, then write and print their report."""
    if arguments.out is not None:
        check_pages(arguments.out)
    if arguments.per_image:
        _finish(_of_cases(arguments), arguments)
        return
    with working("opening the files"):
        files = opened(arguments, paths)
    builder, remarks = _accumulated(arguments, files)
    _finish(builder, arguments, remarks)


def merge(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Load and merge saved states one by one, then write and print one report."""
    if arguments.out is not None:
        check_pages(arguments.out)
    with working("merging", len(paths)) as advance:
        whole = ReportBuilder.load(paths[0])
        for path in paths[1:]:
            advance(1, f"merging {path.name}")
            part = ReportBuilder.load(path)
            try:
                whole.merge(part)
            except ValueError as error:
                raise ValueError(f"`{path}` cannot be merged with `{paths[0]}`: {error}") from error
    _finish(whole, arguments)


def _of_cases(arguments: argparse.Namespace) -> ReportBuilder:
    """Return a builder with the images in two folders, which are its groups and its clusters."""
    names = [case.name for case in arguments.cases]
    builder: ReportBuilder | None = None
    with working("reading", len(names)) as advance:
        for k, files in enumerate(arguments.cases):
            preds, target = case_of(files)
            if builder is None:
                builder = ReportBuilder(**_settings_of_cases(arguments, preds, target))
            try:
                groups = torch.full(target.shape if preds.shape == target.shape else preds[:, 0].shape, k)
                builder.update(preds, target, groups=groups, group_names=names, clusters=torch.tensor([k]))
            except ValueError as error:
                raise ValueError(f"in image `{printable(files.name)}`: {error}") from error
            advance(1)
    assert builder is not None  # there is at least one image
    return builder


def _settings_of_cases(arguments: argparse.Namespace, preds: Tensor, target: Tensor) -> dict[str, Any]:
    """Return the arguments of the builder for images, whose classes are axis 1."""
    task = arguments.task or infer_task(preds, target, {"class_axis": 1})
    names = None if arguments.class_names is None else arguments.class_names.split(",")
    return {
        "task": task,
        "class_axis": None if task == "binary" else 1,
        "from_logits": bool(arguments.from_logits),
        "class_names": names,
        "ignore_index": arguments.ignore_index,
        **report_settings(arguments),
    }


def _accumulated(arguments: argparse.Namespace, files: PredictionFiles) -> tuple[ReportBuilder, list[str]]:
    """Return a builder with the rows of all files, and remarks on files with equal targets."""
    builder = ReportBuilder(**files.settings, **report_settings(arguments))
    check_size(files.task, files.source.shape[-1], arguments.n_bins)  # fail early, before rows are read
    n_files = len(files.source.files)
    targets, remarks = _Targets(), []
    with working("reading", files.n_rows) as advance:
        for k, reader in enumerate(files.readers, 1):
            names = reader.paths
            label = " + ".join(path.name for path in names)
            advance(0, f"reading {label}, file {k} of {n_files}")
            where = f" of `{names[0]}`" if n_files > len(names) else ""
            targets.start(str(names[0]))
            for rows in files.chunks_of(reader, PIECE_BYTES):
                whole = len(rows) == files.n_rows
                with nullcontext() if whole else in_rows(targets.n + 1, len(rows), where):
                    if targets.n == 0:
                        check_logits(arguments, files, rows.preds, f"in `{names[0]}`")
                    builder.update(**rows.arguments)
                targets.update(rows)
                if arguments.save_calibrator is not None and (why_not := builder.why_no_calibration()):
                    raise _no_calibrator(why_not)
                advance(len(rows))
            remarks += targets.remark()
    return builder, remarks


class _Targets:
    """Digest of the targets in each file, which finds two files with the same targets."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, bytes], str] = {}  # first file with these targets

    def start(self, name: str) -> None:
        """Begin a file."""
        self.name, self.n, self.digest, self.is_constant = name, 0, blake2b(), True

    def update(self, rows: Rows) -> None:
        """Add rows of the file."""
        self.n += len(rows)
        self.digest.update(rows.target.numpy().tobytes())
        self.is_constant &= bool((rows.target == rows.target.flatten()[0]).all())

    def remark(self) -> list[str]:
        """Return a remark if an earlier file has the same targets, which are not the same by chance."""
        same = self.seen.setdefault((self.n, self.digest.digest()), self.name)
        if same == self.name or self.n < _FEW_ROWS or self.is_constant:
            return []
        return [
            f"`{same}` and `{self.name}` have the same {self.n:,} targets in the same order, and their predictions are "
            f"pooled. If these are two models, run torchcalib compare {same} {self.name}."
        ]


def _finish(builder: ReportBuilder, arguments: argparse.Namespace, remarks: Sequence[str] = ()) -> None:
    """Write all results, then print them. `remarks` become notes in the report, and warnings on stderr."""
    save, state = arguments.save_calibrator, arguments.save_state
    if state is not None:
        builder.save(state)
    if state is None or arguments.out is not None or save is not None:
        with computing("computing values, intervals and calibrators"):
            finished = builder.report()
        finished = replace(finished, notes=(*finished.notes, *remarks))
        is_advised = finished.calibration is not None and finished.calibration.recommendation.best is not None
        if save is not None:
            fit = _fitted(builder, finished)
            if is_advised:
                save_calibrator(fit, save)
        paths: tuple[Path, ...] = ()
        if arguments.out is not None:
            with working("writing the files"):
                paths = finished.save(arguments.out, diagrams=arguments.diagrams)
        if arguments.json:
            output(finished.to_json())
        else:
            terminal.show(finished, arguments.all)
            terminal.show_paths(paths)
        if is_advised and save is not None and finished.calibration is not None and not arguments.json:
            terminal.show_calibrator(Path(save), finished.calibration, finished.settings["from_logits"])
    elif arguments.json:
        print_json({"state": str(state)})
    if state is not None and not arguments.json:
        terminal.show_state(Path(state), builder.source)
    for remark in remarks:
        warn(remark)
    if save is not None and not is_advised:
        warn(f"no calibrator is saved to `{printable(save)}`, because none is recommended for this data.")


def _fitted(builder: ReportBuilder, finished: Report) -> Calibrator:
    if finished.calibration is None:
        raise _no_calibrator(builder.why_no_calibration() or finished.notes[-1].removesuffix("."))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the report contains these warnings as notes
        return builder.fit(finished.calibration.calibrator)


def _no_calibrator(reason: str) -> ValueError:
    return ValueError(
        f"`--save-calibrator` must be used with data to which calibrators can be fitted, got unsuitable data: {reason}."
    )
