"""Reports and comparisons of Dask collections. Requires `pip install "torchcalib[dask]"`."""

from collections.abc import Mapping
from typing import Any, Unpack

from torchcalib.integrations.partitions import SPLIT_EVERY, ComparisonTableOptions, Partitions, ReportTableOptions
from torchcalib.results.comparison import Comparison
from torchcalib.results.report import Report

try:
    import dask
except ImportError as error:
    raise ImportError(
        "`torchcalib.integrations.dask` needs dask, which is not installed. Install it: pip install 'torchcalib[dask]'."
    ) from error


def report(collection: Any, **options: Unpack[ReportTableOptions]) -> Report:
    """Return the report of the rows of a Dask DataFrame or bag, as `torchcalib.report` of one table with all rows.

    Every partition becomes a state in its worker, and only states move; see `ReportBuilder.state_bytes`.

    Args:
        collection: DataFrame with columns of predictions and targets, or a bag of dicts with these keys. It is computed
            once, by the scheduler that is active.
        **options: see `torchcalib.integrations.partitions.ReportTableOptions`.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: for invalid options and for invalid rows.
    """
    partitions = Partitions.of_report(**options)
    return partitions.report([_state(collection, partitions)])


def compare(collection: Any, systems: Mapping[str, str], **options: Unpack[ComparisonTableOptions]) -> Comparison:
    """Return the comparison of systems in a collection, given as names of predictions by system; see `report`."""
    partitions = Partitions.of_comparison(systems, **options)
    return partitions.comparison([_state(collection, partitions)])


def _state(collection: Any, partitions: Partitions) -> bytes | None:
    """Return the state of all partitions, merged in a tree in the order of the rows.

    Delayed calls run in threads if no other scheduler is active. Those of a bag would start processes, which import the
    main module of a script again.
    """
    state_of = dask.delayed(partitions.state)
    merged = dask.delayed(partitions.merged)
    states = [state_of(number, [rows]) for number, rows in enumerate(collection.to_delayed(optimize_graph=False))]
    while len(states) > 1:
        states = [merged(states[k : k + SPLIT_EVERY]) for k in range(0, len(states), SPLIT_EVERY)]
    found: bytes | None = states[0].compute() if states else None
    return found
