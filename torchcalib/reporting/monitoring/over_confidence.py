"""Warnings of growing over-confidence."""

import math
from collections.abc import Sequence

from torchcalib.reporting.monitoring.history import History, HistoryRow


class OverConfidenceWarning(UserWarning):
    """A model becomes over-confident while it trains."""


def crossings(ecd: Sequence[float], threshold: float) -> list[bool]:
    """Return at which values over-confidence has grown beyond a threshold.

    Over-confidence is max(ECD, 0), and growth is its increase over the lowest value so far: a model that begins
    under-confident must reach an ECD of `threshold`, one that begins with an ECD of 0.3 must reach 0.3 + `threshold`.
    The next crossing needs a growth of at most half of the threshold in between (hysteresis), so that values near the
    threshold do not cross it in every epoch.

    Args:
        ecd: one value for each epoch, in nats; NaN, for an epoch without data, is ignored.
        threshold: in nats.

    Example:
        >>> crossings([-0.5, 0.02, 0.06, 0.2, 0.01, 0.09], threshold=0.05)
        [False, False, True, False, False, True]
    """
    crossed = []
    least, is_armed = math.inf, True
    for value in ecd:
        over = max(value, 0.0) if not math.isnan(value) else least
        least = min(least, over)
        growth = over - least  # NaN for inf - inf, which is not above the threshold
        crossed.append(is_armed and growth > threshold)
        is_armed = not crossed[-1] and (is_armed or growth <= threshold / 2)
    return crossed


def words(history: History, name: str) -> str:
    """Return the warning of the last row: how much over-confidence has grown, and advice.

    Args:
        history: up to that row.
        name: of the ECD in logs.
    """
    now = history.rows[-1]
    ecd = now.values["ecd"]
    # The last one, because the model may have been under-confident for long before it.
    calmest = min(reversed(history.rows[:-1]), key=lambda row: _over_confidence(row.values.get("ecd", math.nan)))
    sentences = [
        f"over-confidence grows: in {_place(now, history)} the cross-entropy exceeds the entropy of the predictions by "
        f"{ecd:.3g} nats ({name}), against {calmest.values['ecd']:.3g} in {_place(calmest, history)}.",
        _means(now),
        _advice(history),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _over_confidence(ecd: float) -> float:
    return math.inf if math.isnan(ecd) else max(ecd, 0.0)


def _place(row: HistoryRow, history: History) -> str:
    return f"epoch {row.epoch}" + (f" (step {row.step:,})" if history.unit == "step" else "")


def _means(row: HistoryRow) -> str:
    """Return mean confidence and accuracy, whose difference is the signed error."""
    accuracy, confidence = row.values.get("accuracy", math.nan), row.values.get("confidence", math.nan)
    if math.isnan(accuracy) or math.isnan(confidence):
        return ""
    return f"Mean confidence is {confidence:.1%}, accuracy {accuracy:.1%}."


def _advice(history: History) -> str:
    """Return advice that depends on whether the NLL still falls and the accuracy still rises."""
    best, now = history.best, history.rows[-1]
    if best is None:
        return "Calibrate the model (torchcalib.calibration.TemperatureScaling)."
    if best is now:
        return "The NLL still falls: continue the training, and calibrate the final model by temperature scaling."
    nll = f"The NLL was lowest in {_place(best, history)}, {best.values['nll']:.4g}, and is {now.values['nll']:.4g} now"
    before, after = best.values.get("accuracy", math.nan), now.values.get("accuracy", math.nan)
    keep = f"keep the model of {_place(best, history)} (early stopping)"
    if after > before:
        return (
            f"{nll}, while the accuracy has risen from {before:.1%} to {after:.1%}: {keep}, or calibrate this one "
            "(torchcalib.calibration.TemperatureScaling)."
        )
    stands = ", and the accuracy has not risen since" if after <= before else ""
    return f"{nll}{stands}: {keep}."
