"""The metrics that a report accumulates, and limits on their size."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedReduction, reductions_of
from torchcalib.metrics.base import StreamingMetric
from torchcalib.metrics.binned import ECE
from torchcalib.metrics.collection import CalibrationCollection
from torchcalib.metrics.ranked import KS
from torchcalib.reporting.lines import SCORES, has_table

MOST_BINS = 1000  # more are neither visible nor readable
MOST_COPIES = 2**53  # integers up to here are exact in float64
_MOST_SUMS = 2**27  # 1 GiB


def metrics_of(
    task: Task,
    given: Mapping[str, Any],
    bins: Mapping[str, Any],
    in_order: Iterable[NamedReduction],
    device: torch.device | str = "cpu",
) -> CalibrationCollection:
    """Return the metrics of a report: every score by class, bins of every reduction, and ranked samples.

    Args:
        task: of the predictions.
        given: common arguments of all metrics, among them the number of classes or labels.
        bins: arguments of the bins.
        in_order: reductions with ranked samples.
        device: of the states.

    Raises:
        ValueError: if the sums take too much memory.
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
    """Raise if the sums of a report with so many classes or labels take more than a gigabyte."""
    per_output = 3 * len(SCORES) * (2 if task == "multilabel" else 1) + (4 if task == "multilabel" else 3) * n_bins
    if task != "binary" and num_outputs * per_output > _MOST_SUMS:
        what = "labels" if task == "multilabel" else "classes"
        raise ValueError(
            f"`preds` must have at most {_MOST_SUMS // per_output:,} {what} with {n_bins} bins, got {num_outputs:,}: "
            f"the report keeps sums of each. Check the class axis, or compute single metrics."
        )


def check_saved_size(task: Task, num_classes: int | None, bins: Mapping[str, Any], sums: Mapping[str, Any]) -> None:
    """Raise before memory is allocated for more classes than were saved."""
    recipes = [EqualWidthBins(reduction, **bins, with_noise=True) for reduction in reductions_of(task)]
    needed = sum(math.prod(recipe.shape(task, num_classes)) for recipe in recipes)
    there = sum(value.numel() for value in sums.values() if isinstance(value, Tensor))
    if needed > there:
        raise ValueError(f"{num_classes} classes in bins are {needed:,} numbers, got {there:,}")


def sample_name(reduction: NamedReduction) -> str:
    """Return the name of the metric with the ranked samples."""
    return f"sample of {reduction}"


def with_samples(metrics: CalibrationCollection, reductions: Iterable[NamedReduction]) -> CalibrationCollection:
    """Return the metrics without ranked samples of other reductions."""
    names = {sample_name(reduction) for reduction in reductions}
    left = {name: m for name, m in metrics.items() if name in names or not isinstance(m, KS)}
    return metrics if len(left) == len(metrics) else CalibrationCollection(left)


def are_counts(weights: Tensor | None) -> bool:
    """Return whether every weight is a whole number."""
    if weights is None:
        return True
    w = weights.detach().double()
    return bool(((w == w.round()) & (w <= MOST_COPIES)).all())
