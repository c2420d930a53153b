"""Reports and comparisons of Spark DataFrames. Requires Java, and `pip install "torchcalib[spark]"`."""

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import pyarrow as pa

from torchcalib.integrations.partitions import SPLIT_EVERY, ComparisonTableOptions, Partitions, ReportTableOptions
from torchcalib.results.comparison import Comparison
from torchcalib.results.report import Report

try:
    from pyspark import TaskContext
    from pyspark.sql import DataFrame
    from pyspark.sql.functions import col, floor
except ImportError as error:
    raise ImportError(
        "`torchcalib.integrations.spark` needs pyspark, which is not installed. Install it: "
        "pip install 'torchcalib[spark]'."
    ) from error

_SCHEMA = "partition long, state binary"
_LEVELS = 2


def report(dataframe: DataFrame, **options: Unpack[ReportTableOptions]) -> Report:
    """Return the report of the rows of a Spark DataFrame, as `torchcalib.report` of one table with all rows.

    Every partition becomes one row with its state, and only these rows move; see `ReportBuilder.state_bytes`.

    Args:
        dataframe: DataFrame with columns of predictions and targets. It is computed once.
        **options: see `torchcalib.integrations.partitions.ReportTableOptions`.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: for invalid options; Spark raises its own error for errors in a worker.
    """
    partitions = Partitions.of_report(**options)
    return partitions.report(_states(dataframe, partitions))


def compare(dataframe: DataFrame, systems: Mapping[str, str], **options: Unpack[ComparisonTableOptions]) -> Comparison:
    """Return the comparison of systems in a DataFrame, given as names of predictions by system; see `report`."""
    partitions = Partitions.of_comparison(systems, **options)
    return partitions.comparison(_states(dataframe, partitions))


def _states(dataframe: DataFrame, partitions: Partitions) -> Iterator[bytes]:
    """Yield the states of groups of partitions, in the order of the partitions."""

    def row_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context: Any = TaskContext.get()
        yield from partitions.row(context.partitionId(), batches).to_batches()

    def merged(rows: pa.Table) -> pa.Table:  # Spark counts the arguments, also `self` of a method
        return partitions.merged_row(rows)

    rows: Any = dataframe.mapInArrow(row_of, _SCHEMA)
    for level in range(1, _LEVELS + 1):
        group = floor(col("partition") / SPLIT_EVERY**level)
        rows = rows.groupBy(group).applyInArrow(merged, _SCHEMA)
    for row in rows.orderBy("partition").toLocalIterator():
        yield bytes(row["state"])
