"""Which array of a file is which: by the name it is given in the call, or by the names people use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from torchcalib.io.reader import FLOATS, WHOLE, InputError, quoted

if TYPE_CHECKING:
    from torchcalib.io.reader import Array, Reader

LOG_PROBS = ("log_probs", "logprobs", "log_prob", "log_probabilities")
_LOGITS = (
    "logits",
    "logit",
    *LOG_PROBS,
)  # log-probabilities are logits: softmax gives the probabilities back
_PROBS = ("probs", "prob", "probabilities", "probability", "softmax", "y_prob", "p")
_NEUTRAL = ("preds", "pred", "predictions", "scores", "score", "outputs", "output", "y_pred", "y_score")
_TARGETS = ("targets", "target", "labels", "label", "y_true", "y", "gt")
_WEIGHTS = ("weights", "weight", "sample_weight")

NUMBERED = re.compile(r"(.+?)[_.]?(\d+)")  # prob_0, prob.0, prob0


class Roles(NamedTuple):
    """Names of the arrays that are used."""

    preds: str
    target: str
    weights: str | None
    groups: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are there."""
        return tuple(name for name in self if name is not None)


def find_roles(
    reader: Reader, preds: str | None, target: str | None, weights: str | None, groups: str | None = None
) -> Roles:
    """Find predictions, targets and weights in a file, by the names given or, where None, by those people use.

    Groups are found by the name given alone.
    """
    found_preds = _find(reader, "--preds", preds, (*_LOGITS, *_PROBS, *_NEUTRAL))
    found_target = _find(reader, "--target", target, _TARGETS)
    if reader.format == "npy" and len(reader.arrays) == 2:
        # File names often say nothing; one floating and one whole-number array can only be meant in one way.
        found_preds = found_preds or _only(reader, FLOATS)
        found_target = found_target or _only(reader, WHOLE)
    if found_preds is None or found_target is None:
        what, known = (
            ("predictions", "logits, probs, preds") if found_preds is None else ("targets", "targets, labels, y")
        )
        raise InputError(
            f"`{reader.label}` must hold {what} under a known name ({known} ...), got {_held(reader)}. "
            "Pass --preds NAME --target NAME."
        )
    found_weights, found_groups = _find(reader, "--weights", weights, _WEIGHTS), _find(reader, "--groups", groups, ())
    roles = Roles(found_preds, found_target, found_weights, found_groups)
    if len(set(roles.names)) < len(roles.names):
        raise InputError(
            f"`{reader.label}` must hold predictions, targets, weights and groups apart, got {quoted(roles.names)}. "
            "Pass --preds NAME --target NAME."
        )
    return roles


def holds_logits(array: Array) -> bool | None:
    """Tell whether the array's name says logits (True), probabilities (False) or neither (None)."""
    stem = stem_of(array)
    return True if stem in _LOGITS else False if stem in _PROBS else None


def stem_of(array: Array) -> str:
    """Return the array's name without a number at its end."""
    numbered = NUMBERED.fullmatch(array.key)
    return numbered[1] if numbered else array.key


def _find(reader: Reader, option: str, given: str | None, known: tuple[str, ...]) -> str | None:
    if given in reader.arrays:
        return given
    keys = known if given is None else (given.strip().lower().removesuffix(".npy"),)
    found = [name for key in keys for name, array in reader.arrays.items() if array.key == key]
    if given is not None and not found:
        raise InputError(
            f"{option} must name what is in `{reader.label}`, got `{given}` beside {_held(reader)}. Choose one."
        )
    if len(found) > 1:
        raise InputError(
            f"`{reader.label}` must hold one array for {option}, got {quoted(found)}. Choose with {option} NAME."
        )
    return found[0] if found else None


def _only(reader: Reader, dtypes: frozenset[str]) -> str | None:
    fitting = [name for name, array in reader.arrays.items() if array.dtype in dtypes]
    return fitting[0] if len(fitting) == 1 else None


def _held(reader: Reader) -> str:
    members = {name for array in reader.arrays.values() if len(array.columns) > 1 for name in array.columns}
    return quoted(name for name in reader.arrays if name not in members)
