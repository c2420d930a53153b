"""Which array, column or field has which role: one table of rules for files, frames and logs, and the search in it."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from torchcalib.io import names

Kind = Literal["any", "single", "label", "score", "outcome", "verdict", "text", "list", "scores", "labelled scores"]
"""Kind of the values of a field. Tables check labels and scores by the dtype, and logs all kinds by the first rows."""


class RoleRule(NamedTuple):
    """Common names of a role, in order of preference. The first rule of a role for which there is a field counts."""

    role: str
    names: tuple[str, ...]
    kind: Kind = "any"
    source: Literal["", "table", "log"] = ""  # tables, which are files of predictions and frames, or logs; else both


RULES = (
    RoleRule("weights", names.WEIGHTS, source="table"),
    RoleRule("correct", names.CORRECT, "outcome"),
    RoleRule("correct", names.VERDICTS, "verdict", "log"),
    RoleRule("target", ("correct",), "single", "log"),  # which may be a letter
    RoleRule("target", names.TARGET_TIERS[0], "single"),
    RoleRule("target", names.TARGET_TIERS[1], "single"),
    RoleRule("target", names.TARGET_TIERS[2], "single", "table"),
    RoleRule("target", ("answer_index", "answer_idx", "answer"), "single", "log"),
    RoleRule("id", names.IDS, source="log"),
    RoleRule("preds", (*names.LOGITS, *names.PROBS, *names.NEUTRAL), "score", "table"),
    RoleRule("probs", names.NEUTRAL, "labelled scores", "log"),
    RoleRule("pred", names.PREDICTED, "label"),
    RoleRule("pred", ("choice", "decision", "chosen", "selected", "guess", "answer"), "label", "log"),
    RoleRule("probs", names.OF_OPTIONS, "scores", "log"),
    RoleRule("confidence", names.OF_PREDICTED, source="table"),  # if there are no other predictions
    RoleRule("confidence", (*names.CONFIDENCES, *names.OF_PREDICTED, *names.OF_ANSWERS), "single", "log"),
    RoleRule("response", names.RESPONSES, "text", "log"),
    RoleRule("content", names.QUESTIONS, "single", "log"),
    RoleRule("choices", ("options", "choices"), "list", "log"),
)


def find(
    keys: Mapping[str, str],
    source: Literal["table", "log"],
    given: Mapping[str, Sequence[str]],
    taken: Collection[str],
    fits: Callable[[str, Kind], bool],
) -> dict[str, list[str]]:
    """Return the fields for each role that is given or found. The first field of a role has no further role.

    Args:
        keys: the `key_of` each field, by name.
        source: kind of the fields.
        given: fields of roles that are not searched for.
        taken: other fields without a role in `RULES`.
        fits: function that returns whether a field has values of a kind.
    """
    found = {role: list(fields) for role, fields in given.items()}
    by_key = defaultdict(list)
    for name, key in keys.items():
        by_key[key].append(name)
    for rule in RULES:
        if rule.role in found or rule.source not in ("", source):
            continue
        used = {*taken, *(fields[0] for fields in found.values())}
        fields = [x for key in rule.names for x in by_key[key] if x not in used and fits(x, rule.kind)]
        if fields:
            found[rule.role] = fields
    return found
