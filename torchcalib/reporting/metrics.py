"""The metrics that a report is read from: what there is of them, and how much at most."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.events import NamedReduction, reductions_of
from torchcalib.core.sums import EqualWidthBins
from torchcalib.metrics.base import StreamingMetric
from torchcalib.metrics.binned import ECE
from torchcalib.metrics.collection import CalibrationCollection
from torchcalib.metrics.ranked import KS
from torchcalib.reporting.lines import SCORES

MOST_BINS = 1000  # more can neither be drawn nor read
MOST_COPIES = 2**53  # every whole number up to here is one of float64
_MOST_SUMS = 2**27  # 1 GiB


def metrics_of(
    task: Task,
    given: Mapping[str, Any],
    bins: Mapping[str, Any],
    in_order: Iterable[NamedReduction],
    device: torch.device | str = "cpu",
) -> CalibrationCollection:
    """Return the metrics that a report is read from: every score by class, bins of every reduction, and samples.

    Args:
        task: as which predictions are read.
        given: arguments that all metrics have in common, among them how many classes or labels.
        bins: those of the bins.
        in_order: reductions whose samples are kept.
        device: where the states are.

    Raises:
        ValueError: their sums would take too much memory.
    """
    num_outputs = given.get("num_classes", given.get("num_labels"))
    if num_outputs is not None:
        check_size(task, num_outputs, bins["n_bins"])
    members: dict[str, StreamingMetric[Any]] = {m.__name__: m(**given, keep_classes=True) for m in SCORES}
    for reduction in reductions_of(task):
        members[reduction] = ECE(**given, **bins, reduction=reduction, with_ecd=has_table(task, reduction))
    for reduction in in_order:
        members[sample_name(reduction)] = KS(**given, reduction=reduction)
    collection = CalibrationCollection(members).to(device)
    collection.persistent()  # for `ReportBuilder.state`
    return collection


def check_size(task: Task, num_outputs: int, n_bins: int) -> None:
    """Raise where the sums of a report of so many classes or labels would take more than a gigabyte."""
    per_output = 3 * len(SCORES) * (2 if task == "multilabel" else 1) + (4 if task == "multilabel" else 3) * n_bins
    if task != "binary" and num_outputs * per_output > _MOST_SUMS:
        what = "labels" if task == "multilabel" else "classes"
        raise ValueError(
            f"`preds` must have at most {_MOST_SUMS // per_output:,} {what} with {n_bins} bins, got {num_outputs:,}: "
            f"sums of each are kept. Check that {what} are the axis they are taken for, or compute single metrics."
        )


def check_saved_size(task: Task, num_classes: int | None, bins: Mapping[str, Any], sums: Mapping[str, Any]) -> None:
    """Raise before memory is taken for more classes than were saved."""
    recipes = [EqualWidthBins(reduction, **bins, with_noise=True) for reduction in reductions_of(task)]
    needed = sum(math.prod(recipe.shape(task, num_classes)) for recipe in recipes)
    there = sum(value.numel() for value in sums.values() if isinstance(value, Tensor))
    if needed > there:
        raise ValueError(f"{num_classes} classes in bins are {needed:,} numbers, got {there:,}")


def has_table(task: Task, reduction: NamedReduction) -> bool:
    """Class-wise bins of a multi-class task make no table, which would be one for each of C classes."""
    return reduction != "classwise" or task == "multilabel"


def sample_name(reduction: NamedReduction) -> str:
    """Name of the metric that holds every sample."""
    return f"sample of {reduction}"


def with_samples(metrics: CalibrationCollection, reductions: Iterable[NamedReduction]) -> CalibrationCollection:
    """Return the metrics without those that hold samples of other reductions."""
    names = {sample_name(reduction) for reduction in reductions}
    left = {name: m for name, m in metrics.items() if name in names or not isinstance(m, KS)}
    return metrics if len(left) == len(metrics) else CalibrationCollection(left)


def are_counts(weights: Tensor | None) -> bool:
    """Whether every weight is a number of copies, as far as it is a weight at all."""
    if weights is None:
        return True
    w = weights.detach().double()
    return bool(((w == w.round()) & (w <= MOST_COPIES)).all())
