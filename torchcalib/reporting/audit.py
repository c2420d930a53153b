"""Audit logs of language models: read them, and add their answers to a report for each definition of the confidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, Unpack, overload

from torchcalib.core.arguments import check_choice
from torchcalib.io.columns import check_gold
from torchcalib.io.errors import InputError, quoted, shown
from torchcalib.io.logs import Log, golds_of, named_fields, open_log
from torchcalib.io.logs.fields import MOST_SYSTEMS
from torchcalib.io.logs.stated import SCALES, ScaleName
from torchcalib.reporting.audit_builder import AuditBuilder, AuditOptions, Layout
from torchcalib.reporting.published import BENCHMARKS
from torchcalib.results.audit import Audit, AuditComparison, AuditGroups

_BLOCK = 2**15  # answers that are added at once


class AuditArguments(TypedDict, total=False):
    """Arguments of `audit` by name."""

    confidence: str | None
    correct: str | None
    target: str | None
    pred: str | None
    id: str | None
    gold: Any
    select: str | None
    scale: ScaleName | None
    words: Mapping[str, float] | None
    same: Callable[[str, str], bool] | None
    as_published: str | None
    n_bins: int
    with_intervals: bool
    with_calibration: bool
    names: Sequence[str] | None


@overload
def audit(log: Any, *, by: str, **arguments: Unpack[AuditArguments]) -> AuditGroups: ...


@overload
def audit(log: Any, *, by: None = None, **arguments: Unpack[AuditArguments]) -> Audit: ...


@overload
def audit(log: Any, other: Any, /, *others: Any, **arguments: Unpack[AuditArguments]) -> AuditComparison: ...


def audit(
    log: Any,
    *others: Any,
    confidence: str | None = None,
    correct: str | None = None,
    target: str | None = None,
    pred: str | None = None,
    id: str | None = None,  # noqa: A002
    by: str | None = None,
    gold: Any = None,
    select: str | None = None,
    scale: ScaleName | None = None,
    words: Mapping[str, float] | None = None,
    same: Callable[[str, str], bool] | None = None,
    as_published: str | None = None,
    n_bins: int = 15,
    with_intervals: bool = True,
    with_calibration: bool = True,
    names: Sequence[str] | None = None,
) -> Audit | AuditGroups | AuditComparison:
    r"""Measure the calibration of a language model under each definition of the confidence that a log contains.

    Recognised by content: samples of lm-eval, logs of Inspect, runs of HELM and HLE, predictions of OLMES, details of
    LightEval, responses of chat interfaces with log-probabilities, and lines or tables of answers with confidences or
    probabilities by option. Several answers to a question, such as epochs, are clusters: only different questions are
    independent. The frequency of the most frequent answer is then a further confidence.

    With several logs, the answers to the same questions are compared in pairs; see `torchcalib.compare`.

    Args:
        log: file (`.jsonl`, `.jsonl.gz`, `.eval`, `.json`, `.csv`, `.tsv`, `.parquet`), DataFrame, or list of dicts.
            A folder, a pattern such as `"samples_mmlu_*.jsonl"` or a list of files with one task each is pooled, with a
            table by task.
        *others: further logs of the same questions.
        confidence: field with the confidence, or the key of the definition that the sentence names, such as
            `"choices_per_byte"`. None for this and the next fields searches for common names.
        correct: field with whether the answer is right.
        target: field with the right answer: the text, the letter or the index (from 0) of an option.
        pred: field with the answer of the model.
        id: field with the identifier of the question.
        by: field whose values are reported apart, such as a model or a prompt. None pools them, with a remark.
        gold: file, DataFrame or list of dicts with the right answer by question, or a dict from questions to answers.
        select: filter (lm-eval) or scorer (Inspect) whose answers are read; None for the first. The answers of
            different filters are never mixed.
        scale: `"percent"` or `"fraction"`, for stated confidences without a percent sign. None infers it from all of
            them. If it is ambiguous, these confidences have no report.
        words: confidences in [0, 1] for words, such as `{"high": 0.9}`.
        same: function that returns True for two answers with the same meaning. None compares their texts.
        as_published: `"hle"`, `"browsecomp"` or `"browsecomp_plus"` adds the calibration error of stated confidences
            that this benchmark publishes. It stores 16 bytes for each answer.
        n_bins: number of equal-width bins, and of equal-mass bins for the adaptive calibration error.
        with_intervals: compute 95% intervals, and the p-values and noise floors of rank-based errors.
        with_calibration: compute the cross-validated gains of calibrators. Calibrators of all options of a question are
            in the report on the chosen one.
        names: names of several logs; None for the names of their files.

    Returns:
        The audit, a mapping from definitions such as `"choices"` to their reports. Print it, or use `to_pandas`. With
        `by`, an `AuditGroups`, a mapping from the values of the field to audits. For several logs, an
        `AuditComparison`, a mapping from definitions to comparisons.

    Raises:
        InputError: if the file is not such a log, is damaged, or contains impossible values.
        ValueError: for invalid options.

    Example:
        >>> import json, tempfile, torchcalib
        >>> from pathlib import Path
        >>> p = [0.4, 0.8] * 15
        >>> lines = [{"item_id": k, "gold": "yes", "probs": {"yes": p[k], "no": 1 - p[k]}} for k in range(30)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "answers.jsonl")
        ...     _ = path.write_text("\n".join(map(json.dumps, lines)))
        ...     found = torchcalib.audit(path, with_calibration=False)
        >>> list(found), round(found["probabilities"].value("ece"), 3)
        (['probabilities', 'probabilities/each'], 0.4)
    """
    check_choice("scale", scale, (None, *SCALES))
    check_choice("as_published", as_published, (None, *BENCHMARKS))
    for word, p in (words or {}).items():
        if not 0 <= p <= 1:
            raise ValueError(f"`words` must contain confidences in [0, 1], got {shown(p)} for {shown(word)}.")
    if others and by is not None:
        raise InputError("`by` must be None for several logs, got a field. Audit each log, or omit it to compare them.")
    named = named_fields(confidence=confidence, correct=correct, target=target, pred=pred, id=id)
    definition = "reported" if "confidence" in named else confidence
    options = AuditOptions(
        n_bins, with_intervals, with_calibration, same or have_equal_text, as_published, definition, scale
    )
    how: dict[str, Any] = {"fields": named, "by": by, "gold": None if gold is None else golds_of(gold, named)}
    logs = [
        read_log(partial(open_log, each, select, words, **how), options, keep=bool(others)) for each in (log, *others)
    ]
    if others:
        from torchcalib.reporting.audit_pairs import compared_audits  # and with it comparisons

        return compared_audits([each[None] for each in logs], names)
    parts = {part: builder.audit() for part, builder in logs[0].items() if part is not None}
    if by is not None:
        return AuditGroups(by=by, audits=parts)
    return replace(logs[0][None].audit(), tasks=AuditGroups(by="task", audits=parts) if parts else None)


def have_equal_text(a: str, b: str) -> bool:
    """Return True for equal texts, except for case and surrounding white space."""
    return a.strip().casefold() == b.strip().casefold()


def read_log(opened: Callable[[], Log], options: AuditOptions, keep: bool) -> dict[str | None, AuditBuilder]:
    """Return the sums of all answers of a log, under None, and of each part; of the parts only if `by` is given.

    A log is read as often as its layout needs: once, unless a later block contradicts the first ones.

    Args:
        opened: function that opens the log.
        options: options of `audit`.
        keep: keep the rows of each definition, for a comparison.
    """
    layouts: dict[str | None, Layout] = {}
    while True:
        log = opened()
        builders = _builders_of(log, layouts, options, keep)
        if not any(builder.is_contradicted for builder in builders.values()):
            break
        layouts = {part: builder.layout for part, builder in builders.items()}
    if not builders or not any(builder.n_answers for builder in builders.values()):
        raise InputError(_no_answers(log))
    _check_target(log, [builders[None]] if None in builders else list(builders.values()))
    for builder in builders.values():
        builder.finish()
    return builders


def _builders_of(
    log: Log, layouts: Mapping[str | None, Layout], options: AuditOptions, keep: bool
) -> dict[str | None, AuditBuilder]:
    """Return the sums of one pass; see `read_log`."""
    by = log.options.by
    builders: dict[str | None, AuditBuilder] = {}
    with_texts = any(layout.has_repeated_names for layout in layouts.values())
    for block in log.blocks(_BLOCK, with_texts=with_texts):
        parts = [block.part] if by is not None else [None, block.part] if log.has_tasks else [None]
        for part in parts:
            if part not in builders:
                is_whole = part is None or by is not None
                builders[part] = AuditBuilder(log, part, layouts.get(part, Layout()), options, keep, is_whole)
        if by is not None and len(builders) > MOST_SYSTEMS:
            raise InputError(
                f"`by` must have at most {MOST_SYSTEMS} values, got more in `{by}`. Name a field of systems, such as a "
                "model."
            )
        fit = [builders[part].fits(block) for part in parts]
        if all(fit) and not any(builder.is_contradicted for builder in builders.values()):
            for part in parts:
                builders[part].add(block)
    return builders


def _check_target(log: Log, whole: Sequence[AuditBuilder]) -> None:
    """Raise if no right answer is an option, or if the right answers are those of the model; see `check_gold`."""
    is_empty = not any(builder.definitions or builder.problems for builder in whole)
    if log.options.gold is not None and log.unmatched and is_empty:
        raise InputError(
            f"`gold` must have the ids of `{log.path}`, got no right answer for the first id {shown(log.unmatched)}, "
            f"and the ids {quoted(log.options.gold, 3)}. Write the ids in the same way, or pass id='NAME'."
        )
    if log.unnamed is not None and is_empty:
        gold, options = log.unnamed
        n = sum(each.n_answers for each in whole)
        raise InputError(
            f"`{log.path}` must have right answers with a probability, got none in {n:,} rows: the first is "
            f"{shown(gold)}, and its options are {quoted(options)}. Write the text, the letter or the index (from 0) "
            "of an option."
        )
    for source, event, choice in (
        ("probabilities", "chosen", "the most probable option"),
        ("reported", "answer", "the answer of the model"),
    ):
        found = [each.definitions[source, event].main_bins for each in whole if (source, event) in each.definitions]
        if log.target and not (source == "reported" and log.has_outcomes):
            n, n_right = sum(int(bins.n.sum()) for bins in found), sum(int(bins.outcomes.sum()) for bins in found)
            check_gold(log.target, str(log.path), n, n_right, choice)


def _no_answers(log: Log) -> str:
    names = quoted(log.alternatives)
    if log.chosen is not None and log.chosen not in log.alternatives:
        return f"`select` must be one of {names}, got {log.chosen!r}. Omit it to read the first."
    counts = sum(log.counts_of.values(), Counter())
    found = "; ".join(f"{reason}: {n}" for reason, n in counts.items()) or "none"
    return f"`{log.path}` must contain at least one answer, got {found}. Check that the evaluation is complete."
