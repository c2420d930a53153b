"""Normalise rounded probabilities."""

from torch import Tensor

from torchcalib.io.errors import InputError

_MAX_DECIMALS = 6
_MAX_ROUNDING_ERROR = 0.1  # largest accepted distance of a sum from 1


def without_rounding(probs: Tensor, label: str, start: int) -> Tensor:
    """Divide probabilities `(N, ..., C)` by their sum over classes. Rows with NaN become NaN.

    Errors contain `label`, a description of the probabilities, and the row number. `start` rows precede the first row.

    Raises:
        InputError: if a sum differs from 1 by more than rounding can cause, given the number of decimals.
    """
    total = probs.double().sum(-1, keepdim=True)
    farthest = min(_MAX_ROUNDING_ERROR, probs.shape[-1] * 0.5 * 10.0 ** -decimals_of(probs)) + 1e-3
    wrong = ((total - 1).abs() > farthest).reshape(len(probs), -1).any(1)
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        found = float(total[row].flatten()[0])
        raise InputError(
            f"{label} must sum to 1 within {farthest:.2g} for --normalize, which corrects rounding only, got {found:g} "
            f"in row {start + row + 1}. Check that every class has a column."
        )
    return (probs.double() / total).to(probs.dtype)


def decimals_of(probs: Tensor) -> int:
    """Return the smallest number of decimals that represents all finite values, at most 6."""
    values = probs[probs.isfinite()].double()
    for decimals in range(_MAX_DECIMALS):
        if bool(((values * 10**decimals).round() / 10**decimals - values).abs().le(1e-7).all()):
            return decimals
    return _MAX_DECIMALS
