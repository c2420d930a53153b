"""Pages of simulated predictions, which differ in verdict, task, sections and length of names."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from helpers.html import Parsed
from helpers.logs import lm_eval_row, write_lines
from markupsafe import Markup

import torchcalib as tc
from torchcalib.reporting.render import html
from torchcalib.reporting.render.html import render
from torchcalib.results.history import History, HistoryRow

LONG = "a long name without much meaning that describes a part of the data, number {}"
UNBROKEN = "file_with_a_very_long_name_and_without_a_single_space_in_it_number_{}"


def _simulated(shape, seed=0):
    """Return logits, and targets with the probabilities that these logits have."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(shape, generator=g, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)


def _multiclass(scale, **options):
    logits, target = _simulated((2000, 12))
    return tc.report(scale * logits, target, task="multiclass", from_logits=True, **options)


def _multilabel():
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1000, 3, generator=g, dtype=torch.float64)
    target = torch.bernoulli(logits.sigmoid(), generator=g).long()
    names = [LONG.format(1), UNBROKEN.format(2), "short"]
    groups = torch.arange(1000) % 4
    of_groups = {"groups": groups, "group_names": [*map(LONG.format, range(3)), UNBROKEN.format(3)]}
    found = tc.report(3 * logits, target, task="multilabel", from_logits=True, class_names=names, **of_groups)
    rows = [
        HistoryRow(k, k, {"nll": 1 / k + 0.1 * k, "ecd": 0.1 * k - 0.3, "accuracy": 0.5, "confidence": 0.4 + 0.1 * k})
        for k in range(1, 6)
    ]
    rows[-1] = replace(rows[-1], warning="over-confidence grows since epoch 3")
    return replace(found, history=History(tuple(rows)), source={"file": f"{UNBROKEN.format(1)}.npz"})


def _binary():
    logits, target = _simulated((1500, 2))
    return tc.report(logits[:, 1] - logits[:, 0] + 1, target, task="binary", from_logits=True)


def _comparison(names):
    logits, target = _simulated((400, 4))
    systems = {name: scale * logits for name, scale in zip(names, (1.0, 3.0, 0.3, 1.1), strict=False)}
    return tc.compare(systems, target, task="multiclass", from_logits=True, n_replicates=99)


def _audit():
    """Return the audit of options whose confidences per character and per byte are equal."""
    logits, target = _simulated((200, 4))
    names = ["a dog in the park", "green", "one more option", "none of these"]
    with TemporaryDirectory() as folder:
        pairs = zip(logits.log_softmax(-1).tolist(), target.tolist(), strict=True)
        rows = (lm_eval_row(k, names, *each) for k, each in enumerate(pairs))
        found = tc.audit(write_lines(Path(folder, "samples.jsonl"), rows), with_calibration=False)
    return render(found)


PAGES = {
    "over-confident": lambda: render(_multiclass(2.5)),
    "calibrated": lambda: render(_multiclass(1)),
    "multi-label": lambda: render(_multilabel()),
    "binary": lambda: render(_binary()),
    "audit": _audit,
    "two systems": lambda: render(_comparison(("baseline", "over-confident"))),
    "four systems": lambda: render(_comparison((LONG.format(1), UNBROKEN.format(2), UNBROKEN.format(3), "short"))),
}
"""Functions that return a page, by name. The first four are reports, the last two comparisons."""


def words_without_pictures(report):
    """Return the words of a page whose pictures are left out, because they take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_square_diagram", "tce_diagram", "to_svg"):
            patch.setattr(html, name, lambda *_, **__: "")
        patch.setattr(html, "both_themes", lambda *_: Markup(""))
        return Parsed(html._page(report, defaultdict(str))).words
