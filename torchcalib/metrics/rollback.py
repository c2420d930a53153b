"""What becomes of metrics when something fails: they are as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchmetrics import Metric
from torchmetrics.utilities.exceptions import TorchMetricsUserError


@contextmanager
def unchanged_on_error(*metrics: Metric) -> Iterator[None]:
    """Put the metrics back as they were if the body raises. Tensors of a state are replaced, never written into."""
    before = [{**metric.__dict__, **metric._copy_state_dict()} for metric in metrics]
    try:
        yield
    except BaseException:
        for metric, attributes in zip(metrics, before, strict=True):
            metric.__dict__.clear()
            metric.__dict__.update(attributes)
        raise


def refuse_if_synced(metric: Metric, method: str) -> None:
    """Raise if what a method adds would be added to the ranks' sum, which `unsync` throws away."""
    if metric._is_synced:
        raise TorchMetricsUserError(
            f"`{method}` must be called before `sync` or after `unsync`, got a synced {type(metric).__name__}. "
            "Call unsync() first."
        )


@contextmanager
def unsynced_on_error(metric: Metric) -> Iterator[None]:
    """Return to the rank's own state if the body raises while the ranks' sum is in place."""
    was_synced = metric._is_synced
    try:
        yield
    except BaseException:
        if metric._is_synced and not was_synced:
            metric.unsync()
        raise
