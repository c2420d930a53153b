"""Compare several logs of the same questions, with the answers paired by question."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.core.arguments import Task
from torchcalib.io.errors import InputError, quoted
from torchcalib.reporting.audit_builder import AuditBuilder, ConfidenceColumn
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.results.audit import CONFIDENCES, AuditComparison

_STEP = 0x1E3779B97F4A7C15  # odd, so that the keys of answers to a question are distinct modulo 2^64


def compared_audits(builders: Sequence[AuditBuilder], names: Sequence[str] | None) -> AuditComparison:
    """Return the comparison of logs that were read with `keep`."""
    paths = [builder.log.path for builder in builders]
    by_name = dict(zip(_names_of(paths) if names is None else _checked(names, len(paths)), builders, strict=True))
    audits = {name: builder.audit() for name, builder in by_name.items()}
    audited = [{(each.source, each.event) for each in audit.confidences} for audit in audits.values()]
    shared = [key for key in builders[0].columns if all(key in keys for keys in audited)]
    questions = [torch.cat(builder.questions) for builder in builders]
    keys = list(map(_keys_of, questions))
    if not shared:
        found = " and ".join(quoted({source for source, _ in each.columns}) for each in builders)
        raise InputError(f"Logs must have a confidence in common, got {found}. Audit them separately.")
    width = max(builder.layout.width for builder in builders)
    comparisons, n_paired, notes = {}, {}, []
    for source, event in sorted(shared, key=lambda key: list(CONFIDENCES).index(key[0])):
        logs = [_joined(each.columns[source, event], width) for each in builders]
        own_keys = [of_log[each.rows] for each, of_log in zip(logs, keys, strict=True)]
        places, n_differing = _in_pairs(logs, own_keys, event == "chosen")
        n, name = len(places[0]), CONFIDENCES[source].name
        left_out = [f"{len(each.rows) - n:,} of `{system}`" for each, system in zip(logs, by_name, strict=True)]
        if n_differing:
            notes.append(f"{name}: {n_differing:,} questions have different right options, and are left out.")
        if any(len(each.rows) > n for each in logs):
            notes.append(f"{name}: answers that are not in all logs are left out: {', '.join(left_out)}.")
        if n:
            n_paired[source] = n
            task: Task = "multiclass" if event == "chosen" else "confidence"
            from_logits = {name: each.from_logits for name, each in zip(by_name, logs, strict=True)}
            n_bins = builders[0].options.n_bins
            comparison = ComparisonBuilder(tuple(by_name), task=task, from_logits=from_logits, n_bins=n_bins)
            clusters = questions[0][logs[0].rows][places[0]]
            preds, targets = {}, {}
            for system, each, rows in zip(by_name, logs, places, strict=True):
                preds[system], targets[system] = each.preds[rows], each.target[rows]
            target = next(iter(targets.values())) if event == "chosen" else targets
            is_clustered = len(torch.unique(clusters)) < n
            comparison.update(preds, target, clusters=clusters if is_clustered else None)
            comparisons[source] = comparison.comparison()
    if not comparisons:
        raise InputError("Logs must have questions in common, got none. Check that they have the same identifiers.")
    return AuditComparison(
        audits=audits,
        comparisons=comparisons,
        n_paired=n_paired,
        notes=tuple(notes),
    )


def _joined(parts: Sequence[ConfidenceColumn], width: int) -> ConfidenceColumn:
    """Return the rows of all parts. Rows with fewer options than `width` get options with probability 0."""
    missing = -torch.inf if parts[0].from_logits else 0.0
    padded = [
        pad(part.preds, (0, width - part.preds.shape[-1]), value=missing) if part.preds.ndim > 1 else part.preds
        for part in parts
    ]
    rows = np.concatenate([part.rows for part in parts])
    return parts[0]._replace(rows=rows, preds=torch.cat(padded), target=torch.cat([part.target for part in parts]))


def _keys_of(questions: Tensor) -> Tensor:
    """Return a key of each answer: the hash of its question and the number of earlier answers to it."""
    order = questions.argsort(stable=True)
    ordered = questions[order]
    number = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
    return questions + _STEP * torch.empty_like(order).index_copy(0, order, number)


def _in_pairs(
    logs: Sequence[ConfidenceColumn], own_keys: Sequence[Tensor], has_shared_target: bool
) -> tuple[list[Tensor], int]:
    """Return the places of the answers that all logs have, in the order of the first, and the number of other targets.

    `own_keys` are `_keys_of` the answers. Answers with different targets are left out if logs must share them.
    """
    keys = torch.cat(list(own_keys))
    numbers = torch.unique(keys, return_inverse=True)[1].split(list(map(len, own_keys)))
    place = keys.new_full((len(keys), len(logs)), -1)  # of each key in each log
    for k, of_log in enumerate(numbers):
        place[of_log, k] = torch.arange(len(of_log), device=keys.device)
    places = place[numbers[0]]
    places = places[(places >= 0).all(-1)]
    targets = torch.stack([each.target[index] for each, index in zip(logs, places.T, strict=True)])
    is_kept = (targets == targets[0]).all(0) | (not has_shared_target)
    return list(places[is_kept].T), int((~is_kept).sum())


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
