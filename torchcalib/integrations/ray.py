"""Reports and comparisons of Ray datasets. Requires `pip install "torchcalib[ray]"`."""

from collections.abc import Mapping
from itertools import count
from typing import Any, Unpack

from torchcalib.integrations.partitions import SPLIT_EVERY, ComparisonTableOptions, Partitions, ReportTableOptions
from torchcalib.results.comparison import Comparison
from torchcalib.results.report import Report

try:
    import ray
    import ray.data
except ImportError as error:
    raise ImportError(
        "`torchcalib.integrations.ray` needs Ray Data, which is not installed. Install it: "
        "pip install 'torchcalib[ray]'."
    ) from error


def report(dataset: "ray.data.Dataset", **options: Unpack[ReportTableOptions]) -> Report:
    """Return the report of the rows of a Ray dataset, as `torchcalib.report` of one table with all rows.

    Every block is one partition. A worker reads its rows, and only its state moves; see `ReportBuilder.state_bytes`.

    Args:
        dataset: dataset with columns of predictions and targets. It is executed once, in the order of its blocks.
        **options: see `torchcalib.integrations.partitions.ReportTableOptions`.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: for invalid options; Ray raises its own error for errors in a worker.
    """
    partitions = Partitions.of_report(**options)
    return partitions.report(_states(dataset, partitions))


def compare(
    dataset: "ray.data.Dataset", systems: Mapping[str, str], **options: Unpack[ComparisonTableOptions]
) -> Comparison:
    """Return the comparison of systems in a Ray dataset, given as names of predictions by system; see `report`."""
    partitions = Partitions.of_comparison(systems, **options)
    return partitions.comparison(_states(dataset, partitions))


class _States:
    """Function of a block that returns its state. Each task has a copy, whose `numbers` begin at 0."""

    def __init__(self, partitions: Partitions) -> None:
        self.partitions, self.numbers = partitions, count()

    def __call__(self, block: Any) -> Any:
        # A task that is started again has the same identifier.
        identifier = f"{ray.get_runtime_context().get_task_id()} {next(self.numbers)}"
        return self.partitions.row(0, [block], identifier)


def _states(dataset: "ray.data.Dataset", partitions: Partitions) -> list[bytes]:
    """Return the states of at most `SPLIT_EVERY` parts, in the order of the rows."""
    execution = dataset.context.execution_options
    before, execution.preserve_order = execution.preserve_order, True
    try:
        rows = dataset.map_batches(_States(partitions).__call__, batch_size=None, batch_format="pyarrow").materialize()
        while rows.count() > SPLIT_EVERY:
            rows = rows.map_batches(partitions.merged_row, batch_size=SPLIT_EVERY, batch_format="pyarrow").materialize()
        return [row["state"] for row in rows.take_all()]
    finally:
        execution.preserve_order = before
