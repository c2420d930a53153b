"""Reports and comparisons of Arrow datasets, on one machine with all its cores. Requires pyarrow."""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Unpack

from torchcalib.core.arguments import check_count
from torchcalib.integrations.partitions import ComparisonTableOptions, Partitions, ReportTableOptions
from torchcalib.results.comparison import Comparison
from torchcalib.results.report import Report

import pyarrow.dataset  # isort: skip  # after the error for a missing pyarrow


def report(
    dataset: "pyarrow.dataset.Dataset", *, n_threads: int | None = None, **options: Unpack[ReportTableOptions]
) -> Report:
    """Return the report of the rows of an Arrow dataset, as `torchcalib.report` of one table with all rows.

    Every row group of a Parquet file, and every file of another format, is one partition. The file system of the
    dataset may be an object store, also one of fsspec.

    Args:
        dataset: result of `pyarrow.dataset.dataset`, with columns of predictions and targets.
        n_threads: number of partitions that are read at the same time; None for the number of cores.
        **options: see `torchcalib.integrations.partitions.ReportTableOptions`.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: for invalid options and for invalid rows.
    """
    partitions = Partitions.of_report(**options)
    return partitions.report(_states(dataset, partitions, n_threads))


def compare(
    dataset: "pyarrow.dataset.Dataset",
    systems: Mapping[str, str],
    *,
    n_threads: int | None = None,
    **options: Unpack[ComparisonTableOptions],
) -> Comparison:
    """Return the comparison of systems in a dataset, given as names of predictions by system; see `report`."""
    partitions = Partitions.of_comparison(systems, **options)
    return partitions.comparison(_states(dataset, partitions, n_threads))


def _states(dataset: Any, partitions: Partitions, n_threads: int | None) -> Iterator[bytes | None]:
    """Yield the states of the partitions, in their order. They are merged while the next ones are computed."""
    if n_threads is not None:
        check_count("n_threads", n_threads)

    def state_of(numbered: tuple[int, Any]) -> bytes | None:
        number, fragment = numbered
        return partitions.state(number, fragment.to_batches(schema=dataset.schema, batch_readahead=2))

    n_workers = n_threads or os.cpu_count() or 1
    computed: deque[Future[bytes | None]] = deque()
    with ThreadPoolExecutor(n_workers) as pool:
        fragments = (
            part
            for each in dataset.get_fragments()
            for part in (each.split_by_row_group() if isinstance(each, pyarrow.dataset.ParquetFileFragment) else [each])
        )
        for numbered in enumerate(fragments):
            computed.append(pool.submit(state_of, numbered))
            if len(computed) > 2 * n_workers:  # no more states wait in memory if merging is slower
                yield computed.popleft().result()
        while computed:
            yield computed.popleft().result()
