"""Read prediction files into a `ReportBuilder`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchcalib.io.opening import PIECE_BYTES, PredictionFiles, open_predictions
from torchcalib.reporting.building import ReportBuilder


def builder_for(files: PredictionFiles, **settings: Any) -> ReportBuilder:
    """Return an empty builder for the rows of files, which determine the task and the classes."""
    source = files.source
    return ReportBuilder(source=source, from_logits=source.from_logits, **{**settings, **shared_settings(files)})


def shared_settings(files: PredictionFiles) -> dict[str, Any]:
    """Return the arguments of builders of reports and comparisons that files determine."""
    return {
        "task": files.task_of_report,
        "class_axis": -1,  # the last axis in a file contains the classes
        "class_names": files.source.class_names or None,
        "ignore_index": files.ignore_index,
    }


def builder_of(paths: Sequence[Any], opening: Mapping[str, Any], **settings: Any) -> ReportBuilder:
    """Return a builder that contains the predictions in files, or in one list of files.

    `opening` contains the arguments of `open_predictions`, and `settings` those of `ReportBuilder`.
    """
    if len(paths) == 1 and isinstance(paths[0], list | tuple):
        paths = paths[0]
    shared: dict[str, Any] = {name: settings[name] for name in ("nan_policy", "ignore_index") if name in settings}
    given: dict[str, Any] = {**opening, **shared}
    files = open_predictions(paths, **given)
    builder = builder_for(files, **settings)
    for rows in files.chunks(PIECE_BYTES):
        builder.update(**rows.arguments)
    return builder
