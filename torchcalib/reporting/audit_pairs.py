"""Compare several logs of the same questions, with the answers paired by question."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.io.errors import InputError, quoted
from torchcalib.io.text import hashes_of
from torchcalib.reporting.audit_builder import AuditBuilder, ConfidenceColumn, KeptAnswers
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.results.audit import CONFIDENCES, AuditComparison


def compared_audits(builders: Sequence[AuditBuilder], names: Sequence[str] | None) -> AuditComparison:
    """Return the comparison of logs that were read with `keep`."""
    paths = [builder.log.path for builder in builders]
    by_name = dict(zip(_names_of(paths) if names is None else _checked(names, len(paths)), builders, strict=True))
    kept = [builder.kept or KeptAnswers() for builder in builders]
    shared = [key for key in kept[0].columns if all(key in each.columns for each in kept)]
    if not shared:
        found = " and ".join(quoted({source for source, _ in each.columns}) for each in kept)
        raise InputError(f"Logs must have a confidence in common, got {found}. Audit them separately.")
    width = max(builder.layout.width for builder in builders)
    comparisons, n_paired, notes = {}, {}, []
    for source, event in sorted(shared, key=lambda key: list(CONFIDENCES).index(key[0])):
        columns = [ConfidenceColumn.joined(each.columns[source, event], width) for each in kept]
        places, n_differing = _common_places(columns, [each.keys for each in kept], event == "chosen")
        n, name = len(places[0]), CONFIDENCES[source].name
        left_out = [f"{len(each.rows) - n:,} of `{system}`" for each, system in zip(columns, by_name, strict=True)]
        if n_differing:
            notes.append(f"{name}: {n_differing:,} questions have different right options, and are left out.")
        if any(len(each.rows) > n for each in columns):
            notes.append(f"{name}: answers that are not in all logs are left out: {', '.join(left_out)}.")
        if n:
            n_paired[source] = n
            names = tuple(by_name)
            questions = [kept[0].keys[row][0] for row in columns[0].rows[places[0]]]
            task: Task = "multiclass" if event == "chosen" else "confidence"
            from_logits = {name: each.from_logits for name, each in zip(names, columns, strict=True)}
            comparison = ComparisonBuilder(names, task=task, from_logits=from_logits, n_bins=builders[0].options.n_bins)
            clusters = hashes_of(questions) if len(set(questions)) < n else None
            preds, targets = (
                {name: x[k] for name, x, k in zip(names, of_systems, places, strict=True)}
                for of_systems in ([each.preds for each in columns], [each.target for each in columns])
            )
            target = targets[names[0]] if event == "chosen" else targets
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


def _common_places(
    columns: Sequence[ConfidenceColumn], keys: Sequence[Sequence[tuple[str, int]]], has_shared_target: bool
) -> tuple[list[Tensor], int]:
    """Return the places in each column of the answers that all logs have, and the number of different targets."""
    places = [{of_log[row]: k for k, row in enumerate(each.rows)} for each, of_log in zip(columns, keys, strict=True)]
    common = [key for key in places[0] if all(key in each for each in places)]
    chosen = [torch.tensor([each[key] for key in common], dtype=torch.long, device="cpu") for each in places]
    targets = [each.target[index] for each, index in zip(columns, chosen, strict=True)]
    kept = torch.ones(len(common), dtype=torch.bool, device="cpu")
    for other in targets[1:] if has_shared_target else ():
        kept &= targets[0] == other
    return [index[kept] for index in chosen], int((~kept).sum())


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
