"""Compare several logs of the same questions, with the answers paired by question."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import torch

from torchcalib.core.arguments import Task
from torchcalib.io.errors import InputError, quoted
from torchcalib.io.text import hashes_of
from torchcalib.reporting.audit_builder import AuditBuilder, EventRows
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.results.audit import CONFIDENCES, AuditComparison


def compared_audits(builders: Sequence[AuditBuilder], names: Sequence[str] | None) -> AuditComparison:
    """Return the comparison of logs that were read with `keep`."""
    paths = [builder.log.path for builder in builders]
    by_name = dict(zip(_names_of(paths) if names is None else _checked(names, len(paths)), builders, strict=True))
    kept = [builder.kept or {} for builder in builders]
    shared = [key for key in kept[0] if all(key in each for each in kept)]
    if not shared:
        found = " and ".join(quoted({source for source, _ in each}) for each in kept)
        raise InputError(f"Logs must have a confidence in common, got {found}. Audit them separately.")
    width = max(builder.layout.width for builder in builders)
    comparisons, n_paired, notes = {}, {}, []
    for source, event in sorted(shared, key=lambda key: list(CONFIDENCES).index(key[0])):
        rows = [EventRows.joined(each[source, event], width) for each in kept]
        paired, n_differing = _in_pairs(rows, event == "chosen")
        n = len(paired[0].documents)
        name = CONFIDENCES[source].name
        left_out = [f"{len(each.documents) - n:,} of `{system}`" for each, system in zip(rows, by_name, strict=True)]
        if n_differing:
            notes.append(f"{name}: {n_differing:,} questions have different right options, and are left out.")
        if any(len(each.documents) > n for each in rows):
            notes.append(f"{name}: answers that are not in all logs are left out: {', '.join(left_out)}.")
        if n:
            n_paired[source] = n
            names = tuple(by_name)
            documents = paired[0].documents
            task: Task = "multiclass" if event == "chosen" else "confidence"
            from_logits = {name: rows.from_logits for name, rows in zip(names, paired, strict=True)}
            comparison = ComparisonBuilder(names, task=task, from_logits=from_logits, n_bins=builders[0].options.n_bins)
            clusters = hashes_of(documents) if len(set(documents)) < len(documents) else None
            preds = {name: rows.preds for name, rows in zip(names, paired, strict=True)}
            targets = {name: rows.target for name, rows in zip(names, paired, strict=True)}
            comparison.update(preds, paired[0].target if event == "chosen" else targets, clusters=clusters)
            comparisons[source] = comparison.comparison()
    if not comparisons:
        raise InputError("Logs must have questions in common, got none. Check that they have the same identifiers.")
    return AuditComparison(
        audits={name: builder.audit() for name, builder in by_name.items()},
        comparisons=comparisons,
        n_paired=n_paired,
        notes=tuple(notes),
    )


def _in_pairs(rows: Sequence[EventRows], has_shared_target: bool) -> tuple[list[EventRows], int]:
    """Return the rows that all logs contain, in the order of the first, and the number of different targets."""
    places = [each.places() for each in rows]
    common = [key for key in places[0] if all(key in each for each in places)]
    chosen = [torch.tensor([each[key] for key in common], dtype=torch.long, device="cpu") for each in places]
    targets = [each.target[index] for each, index in zip(rows, chosen, strict=True)]
    kept = torch.ones(len(common), dtype=torch.bool, device="cpu")
    for other in targets[1:] if has_shared_target else ():
        kept &= targets[0] == other
    documents = [document for (document, _), keep in zip(common, kept.tolist(), strict=True) if keep]
    return [
        each._replace(documents=documents, preds=each.preds[index[kept]], target=each.target[index[kept]])
        for each, index in zip(rows, chosen, strict=True)
    ], len(common) - len(documents)


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
