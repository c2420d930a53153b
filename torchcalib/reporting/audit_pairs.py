"""Compare several logs of the same questions, with the answers paired by question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.core.arguments import Task
from torchcalib.io.errors import InputError, quoted
from torchcalib.io.text import hashes_of
from torchcalib.reporting.audit_builder import AuditBuilder, ConfidenceColumn
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.results.audit import CONFIDENCES, AuditComparison


def compared_audits(builders: Sequence[AuditBuilder], names: Sequence[str] | None) -> AuditComparison:
    """Return the comparison of logs that were read with `keep`."""
    paths = [builder.log.path for builder in builders]
    by_name = dict(zip(_names_of(paths) if names is None else _checked(names, len(paths)), builders, strict=True))
    shared = [key for key in builders[0].columns if all(key in each.columns for each in builders)]
    keys = [_numbered(builder.questions) for builder in builders]
    if not shared:
        found = " and ".join(quoted({source for source, _ in each.columns}) for each in builders)
        raise InputError(f"Logs must have a confidence in common, got {found}. Audit them separately.")
    width = max(builder.layout.width for builder in builders)
    comparisons, n_paired, notes = {}, {}, []
    for source, event in sorted(shared, key=lambda key: list(CONFIDENCES).index(key[0])):
        columns = [
            _joined(each.columns[source, event], of_log, width) for each, of_log in zip(builders, keys, strict=True)
        ]
        questions, places, n_differing = _in_pairs(columns, event == "chosen")
        n, name = len(questions), CONFIDENCES[source].name
        left_out = [f"{len(each.places) - n:,} of `{system}`" for each, system in zip(columns, by_name, strict=True)]
        if n_differing:
            notes.append(f"{name}: {n_differing:,} questions have different right options, and are left out.")
        if any(len(each.places) > n for each in columns):
            notes.append(f"{name}: answers that are not in all logs are left out: {', '.join(left_out)}.")
        if n:
            n_paired[source] = n
            task: Task = "multiclass" if event == "chosen" else "confidence"
            from_logits = {name: each.columns[source, event][0].from_logits for name, each in by_name.items()}
            n_bins = builders[0].options.n_bins
            comparison = ComparisonBuilder(tuple(by_name), task=task, from_logits=from_logits, n_bins=n_bins)
            clusters = hashes_of(questions) if len(set(questions)) < n else None
            preds, targets = {}, {}
            for system, each, rows in zip(by_name, columns, places, strict=True):
                preds[system], targets[system] = each.preds[rows], each.target[rows]
            target = next(iter(targets.values())) if event == "chosen" else targets
            comparison.update(preds, target, clusters=clusters)
            comparisons[source] = comparison.comparison()
    if not comparisons:
        raise InputError("Logs must have questions in common, got none. Check that they have the same identifiers.")
    return AuditComparison(
        audits={name: builder.audit() for name, builder in by_name.items()},
        comparisons=comparisons,
        n_paired=n_paired,
        notes=tuple(notes),
    )


class _LogRows(NamedTuple):
    """Confidences of a definition in a log; see `ConfidenceColumn`."""

    places: dict[tuple[str, int], int]  # by the question, and the number of the answer to it
    preds: Tensor
    target: Tensor


def _joined(parts: Sequence[ConfidenceColumn], keys: Sequence[tuple[str, int]], width: int) -> _LogRows:
    """Return the rows of all parts. Rows with fewer options than `width` get options with probability 0."""
    missing = -torch.inf if parts[0].from_logits else 0.0
    padded = [
        pad(part.preds, (0, width - part.preds.shape[-1]), value=missing) if part.preds.ndim > 1 else part.preds
        for part in parts
    ]
    rows = (row for part in parts for row in part.rows.tolist())
    return _LogRows(
        {keys[row]: place for place, row in enumerate(rows)},
        torch.cat(padded),
        torch.cat([part.target for part in parts]),
    )


def _numbered(questions: Sequence[str]) -> list[tuple[str, int]]:
    """Return the question of each answer, and the number of the answer among those to it, in the order of the log."""
    seen: Counter[str] = Counter()
    keys = []
    for question in questions:
        keys.append((question, seen[question]))
        seen[question] += 1
    return keys


def _in_pairs(columns: Sequence[_LogRows], has_shared_target: bool) -> tuple[list[str], list[Tensor], int]:
    """Return the questions of the answers that all logs have, their places, and the number of different targets."""
    common = [key for key in columns[0].places if all(key in each.places for each in columns)]
    places = [torch.tensor([each.places[key] for key in common], dtype=torch.long, device="cpu") for each in columns]
    targets = [each.target[index] for each, index in zip(columns, places, strict=True)]
    kept = torch.ones(len(common), dtype=torch.bool, device="cpu")
    for other in targets[1:] if has_shared_target else ():
        kept &= targets[0] == other
    questions = [question for (question, _), keep in zip(common, kept.tolist(), strict=True) if keep]
    return questions, [index[kept] for index in places], len(common) - len(questions)


def _names_of(paths: Sequence[Path]) -> list[str]:
    """Return the names of files, with their folders if names are equal, and numbered as a last resort."""
    for name_of in (lambda path: path.name, lambda path: "/".join(path.parts[-2:])):
        names = [str(name_of(path)) for path in paths]
        if all(a != b for a, b in combinations(names, 2)):
            return names
    return [f"{path.name} {k}" for k, path in enumerate(paths, 1)]


def _checked(names: Sequence[str], n: int) -> Sequence[str]:
    if len(names) != n or len(set(names)) < n:
        raise ValueError(
            f"`names` must contain {n} different names, one for each log, got {quoted(names)}. Rename them."
        )
    return names
