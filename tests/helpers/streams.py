"""Metrics that were updated with batches."""


def updated(metric, *batches, **options):
    """Return a metric after an update with each batch (predictions, targets)."""
    for batch in batches:
        metric.update(*batch, **options)
    return metric
