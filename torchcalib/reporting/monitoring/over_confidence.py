"""When over-confidence grows, and how this is said."""

import math
from collections.abc import Sequence

from torchcalib.reporting.monitoring.history import History, HistoryRow


class OverConfidenceWarning(UserWarning):
    """A model becomes over-confident while it trains."""


def crossings(ecd: Sequence[float], threshold: float) -> list[bool]:
    """Tell at which values over-confidence has grown beyond a threshold.

    Over-confidence is the ECD where it is above 0. It has grown beyond the threshold when it is more than that above
    the least over-confidence so far: a model that begins under-confident must come to an ECD of `threshold`, one that
    begins with an ECD of 0.3 to 0.3 + `threshold`. It is told once, and again only after no more than half of the
    threshold was left of the growth; values that waver about a threshold would otherwise be told of in every epoch.

    Args:
        ecd: one value for each epoch, in nats; NaN, where there was no data, changes nothing.
        threshold: in nats.

    Example:
        >>> crossings([-0.5, 0.02, 0.06, 0.2, 0.01, 0.09], threshold=0.05)
        [False, False, True, False, False, True]
    """
    told = []
    least, is_armed = math.inf, True
    for value in ecd:
        over = max(value, 0.0) if not math.isnan(value) else least
        least = min(least, over)
        growth = over - least  # NaN for inf - inf, which is no growth
        told.append(is_armed and growth > threshold)
        is_armed = not told[-1] and (is_armed or growth <= threshold / 2)
    return told


def words(history: History, name: str) -> str:
    """Say that over-confidence has grown up to the last row, by how much, and what there is to do.

    Args:
        history: up to that row.
        name: what the ECD is called where it is logged.
    """
    now = history.rows[-1]
    ecd = now.values["ecd"]
    # The last of them: before it the model may have been under-confident for long.
    calmest = min(reversed(history.rows[:-1]), key=lambda row: _over_confidence(row.values.get("ecd", math.nan)))
    said = [
        f"over-confidence grows: in {_place(now, history)} the outcomes surprise the model by {ecd:.3g} nats more than "
        f"it expects ({name}), against {calmest.values['ecd']:.3g} in {_place(calmest, history)}.",
        _claim(now),
        _advice(history),
    ]
    return " ".join(sentence for sentence in said if sentence)


def _over_confidence(ecd: float) -> float:
    return math.inf if math.isnan(ecd) else max(ecd, 0.0)


def _place(row: HistoryRow, history: History) -> str:
    return f"epoch {row.epoch}" + (f" (step {row.step:,})" if history.unit == "step" else "")


def _claim(row: HistoryRow) -> str:
    """Confidence beside accuracy, where the signed error is the difference of the two."""
    accuracy, confidence = row.values.get("accuracy", math.nan), row.values.get("confidence", math.nan)
    if math.isnan(accuracy) or math.isnan(confidence):
        return ""
    return f"It claims to be right with {confidence:.1%} on average and is right in {accuracy:.1%} of samples."


def _advice(history: History) -> str:
    """What to do, by whether the NLL still falls and the accuracy still rises."""
    best, now = history.best, history.rows[-1]
    if best is None:
        return "Calibrate the model (torchcalib.Temperature)."
    if best is now:
        return "Its NLL still falls: train on, and calibrate the model at the end (torchcalib.Temperature)."
    nll = f"Its NLL was least in {_place(best, history)}, {best.values['nll']:.4g}, and is {now.values['nll']:.4g} now"
    before, after = best.values.get("accuracy", math.nan), now.values.get("accuracy", math.nan)
    keep = f"keep the model of {_place(best, history)} (early stopping)"
    if after > before:
        return (
            f"{nll}, while its accuracy has risen from {before:.1%} to {after:.1%}: {keep}, or calibrate this one "
            "(torchcalib.Temperature)."
        )
    stands = ", and its accuracy has not risen since" if after <= before else ""
    return f"{nll}{stands}: {keep}."
