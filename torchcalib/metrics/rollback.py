"""Context managers that restore the state of metrics after an error."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchmetrics import Metric
from torchmetrics.utilities.exceptions import TorchMetricsUserError


@contextmanager
def unchanged_on_error(*metrics: Metric) -> Iterator[None]:
    """Restore the metrics if the `with` block raises. Tensors are not copied, because updates are not in place."""
    before = [{**metric.__dict__, **metric._copy_state_dict()} for metric in metrics]
    try:
        yield
    except BaseException:
        for metric, attributes in zip(metrics, before, strict=True):
            metric.__dict__.clear()
            metric.__dict__.update(attributes)
        raise


def refuse_if_synced(metric: Metric, method: str) -> None:
    """Raise TorchMetricsUserError if the metric is synced, because `unsync` would discard the changes by `method`."""
    if metric._is_synced:
        raise TorchMetricsUserError(
            f"`{method}` must be called before `sync` or after `unsync`, got a synced {type(metric).__name__}. "
            "Call unsync() first."
        )


@contextmanager
def unsynced_on_error(metric: Metric) -> Iterator[None]:
    """Unsync the metric if the `with` block syncs it and then raises."""
    was_synced = metric._is_synced
    try:
        yield
    except BaseException:
        if metric._is_synced and not was_synced:
            metric.unsync()
        raise
