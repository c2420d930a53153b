"""Warnings about growing over-confidence during training.

Over-confidence is max(ECD, 0), where ECD is the entropic calibration difference: cross-entropy minus entropy, in nats.
"""

import math
from collections.abc import Sequence

from torchcalib.display.words import rounded
from torchcalib.results.history import History, HistoryRow


class OverConfidenceWarning(UserWarning):
    """Warning that the over-confidence of a model has grown during training; see `torchcalib.Monitor`."""


def crossings(ecd: Sequence[float], threshold: float) -> list[bool]:
    """Return for each epoch whether the growth of over-confidence crosses a threshold in nats; NaN is ignored.

    Growth is over-confidence minus its lowest value so far. For a model that starts under-confident, the crossing is at
    an ECD of `threshold`. After a crossing, growth must fall to half of the threshold before the next crossing
    (hysteresis). Values that fluctuate around the threshold therefore cross it once.

    Example:
        >>> crossings([-0.5, 0.02, 0.06, 0.2, 0.01, 0.09], threshold=0.05)
        [False, False, True, False, False, True]
    """
    crossed = []
    least, is_armed = math.inf, True
    for value in ecd:
        over = max(value, 0.0) if not math.isnan(value) else least
        least = min(least, over)
        growth = over - least  # NaN for inf - inf; `growth > threshold` is then False
        crossed.append(is_armed and growth > threshold)
        is_armed = not crossed[-1] and (is_armed or growth <= threshold / 2)
    return crossed


def warning_text(history: History, name: str) -> str:
    """Return the text of the warning for the last row. `name` is that of the ECD in logs."""
    now = history.rows[-1]
    # Growth starts at the last row with the lowest over-confidence, which is 0 for under-confident rows.
    earlier = [row for row in reversed(history.rows[:-1]) if not math.isnan(row.values.get("ecd", math.nan))]
    lowest = min(earlier, key=lambda row: max(row.values["ecd"], 0.0))
    accuracy, confidence = (now.values.get(key, math.nan) for key in ("accuracy", "confidence"))
    sentences = [
        f"over-confidence grows: in {_place(now, history)} the cross-entropy exceeds the entropy of the predictions by "
        f"{rounded(now.values['ecd'])} nats ({name}), up from {rounded(lowest.values['ecd'])} in "
        f"{_place(lowest, history)}."
    ]
    if not (math.isnan(accuracy) or math.isnan(confidence)):
        sentences.append(f"Mean confidence is {confidence:.1%}, accuracy {accuracy:.1%}.")
    return " ".join([*sentences, _advice(history)])


def _place(row: HistoryRow, history: History) -> str:
    return f"epoch {row.epoch}" + (f" (step {row.step:,})" if history.unit == "step" else "")


def _advice(history: History) -> str:
    """Return advice that depends on the change of accuracy since the lowest negative log-likelihood (NLL)."""
    best, now = history.best, history.rows[-1]
    if best is None:
        return "Calibrate the model (torchcalib.calibration.TemperatureScaling)."
    if best is now:
        return "NLL is still falling: continue training, and calibrate the final model by temperature scaling."
    nll = f"NLL was lowest in {_place(best, history)} ({best.values['nll']:.4g}) and is now {now.values['nll']:.4g}"
    before, after = best.values.get("accuracy", math.nan), now.values.get("accuracy", math.nan)
    keep = f"use the model from {_place(best, history)} (early stopping)"
    if after > before:
        return (
            f"{nll}, while accuracy has risen from {before:.1%} to {after:.1%}: {keep}, or calibrate the current model "
            "(torchcalib.calibration.TemperatureScaling)."
        )
    return f"{nll}{', and accuracy has not risen since' if after <= before else ''}: {keep}."
