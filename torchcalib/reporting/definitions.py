"""Definition cards of a report, from the declarations of its metrics and from its settings."""

from typing import Any

from torchcalib.core.events import NamedMode
from torchcalib.core.ranked import ExactSample
from torchcalib.reporting.catalogue import GROUPS, Member, catalogue_of
from torchcalib.results.definitions import Definition
from torchcalib.results.report import Report

_NORMALISATIONS = {None: None, "prior": "value for the class frequencies", "classes": "number of classes"}


def definitions_of(report: Report) -> dict[str, Definition]:
    """Return the definition of each line of a report, by key."""
    given = report.settings
    are_confidences = given.get("kind") == "confidence"
    catalogue = catalogue_of(report.task, given["n_bins"], given["right"], are_confidences=are_confidences)
    members = {member.key: member for member in catalogue.members}
    return {line.key: _definition(report, members[line.key]) for line in report.lines}


def _definition(report: Report, member: Member) -> Definition:
    given, estimator, options = report.settings, member.estimator, member.settings
    binning: Any = getattr(estimator, "binning", None)
    is_ranked = isinstance(estimator.accumulator, ExactSample)
    edges = None
    if binning is not None and binning.bins == "equal_width":
        edges = "(a, b], first bin closed" if binning.right else "[a, b), last bin closed"
    return Definition(
        confidence=_source(report),
        event=_event(report, member),
        average=None if not estimator.averages else "classes" if report.task == "multiclass" else "labels",
        normalisation=_NORMALISATIONS[options.get("normalize")],
        bins=None if binning is None else binning.bins,
        n_bins=None if binning is None or binning.is_isotonic else binning.n_bins,
        edges=edges,
        ties=None if not is_ranked else "pool" if binning is None else binning.ties,
        norm=options.get("norm", member.declaration.norm),
        debiased=options.get("debiased", False),
        sample=given["order_based"] if is_ranked else None,
        n=report.n,
        clusters=given.get("clusters"),
        n_dropped=report.n_dropped,
        ignore_index=given["ignore_index"],
    )


def _source(report: Report) -> str:
    given = report.settings
    if given.get("kind") == "confidence":
        return "sigmoid of stated log-odds" if given["from_logits"] else "stated"
    if not given["from_logits"]:
        return "probabilities"
    is_multiclass = report.task == "multiclass" or "positive_classes" in given
    return "softmax of logits" if is_multiclass else "sigmoid of logits"


def _event(report: Report, member: Member) -> str:
    given = report.settings
    if given.get("kind") == "confidence":
        return "prediction is correct"
    if member.is_selective:
        return "predicted class is correct"
    mode: NamedMode | None = member.mode
    if mode == "top_label":
        return f"{GROUPS[mode]} (first class on ties)"
    if report.task == "multilabel":
        return "each label"
    if mode is None:
        return "true class"
    if mode == "classwise":
        return "each class against the rest"
    positive = given.get("positive_classes")
    return f"{GROUPS[mode]} ({'y = 1' if positive is None else 'one of ' + ', '.join(map(str, positive))})"
