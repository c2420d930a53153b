"""Definition cards of the lines of reports."""

import json
from dataclasses import asdict

import pytest
import torch
from helpers.reports import QUICK

import torchcalib as tc
from torchcalib.results import Definition

N = 40
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(N, 3, generator=GENERATOR)
PROBS = LOGITS[:, 0].sigmoid()
LABELS = torch.randint(3, (N,), generator=GENERATOR)
SETS = torch.randint(2, (N, 3), generator=GENERATOR)
WITH_NAN = PROBS.clone()
WITH_NAN[:2] = torch.nan

NOTHING = dict.fromkeys(Definition.__dataclass_fields__) | {"debiased": False, "n": N, "n_dropped": 0}
EQUAL_WIDTH = {"bins": "equal_width", "n_bins": 15, "edges": "[a, b), last bin closed"}
RANKED = {"ties": "pool", "sample": "exact"}
ISOTONIC = {"bins": "pava", **RANKED}
RELATIVE = {"normalisation": "value for the class frequencies"}
SCORES = {"accuracy": {}, "nll": {}, "nce": RELATIVE, "brier": {}, "nbs": RELATIVE, "ecd": {}}
BINNED = {
    "ece": {**EQUAL_WIDTH, "norm": "l1"},
    "esce": {**EQUAL_WIDTH, "norm": "mean"},
    "mce": {**EQUAL_WIDTH, "norm": "max"},
    "rmsce": {**EQUAL_WIDTH, "norm": "l2"},
    "ece_debiased": {**EQUAL_WIDTH, "norm": "l1", "debiased": True},
    "rmsce_debiased": {**EQUAL_WIDTH, "norm": "l2", "debiased": True},
}
ERRORS = {
    **BINNED,
    "ace": {"bins": "equal_mass", "n_bins": 15, "norm": "l1", **RANKED},
    "tce": {"bins": "pava_bc", "norm": "l1", **RANKED},
    "ks": {"norm": "max", **RANKED},
    "atb": RANKED,
    "mcb": ISOTONIC,
    "dsc": ISOTONIC,
    "unc": ISOTONIC,
}
SELECTIVE = dict.fromkeys(
    ("aurc", "eaurc", "augrc", "correctness_auroc", "accuracy_at_coverage", "coverage_at_risk"), RANKED
)


def cards(lines, mode="", **common):
    """Return the expected definitions of the lines of a group, by key."""
    return {f"{key}{mode}": {**NOTHING, **own, **common} for key, own in lines.items()}


TOP_LABEL = "top label (first class on ties)"
SELECTED = "predicted class is correct"
BINARY = {
    **cards(SCORES, event="true class"),
    **cards(ERRORS, "/positive", event="positive class (y = 1)"),
    **cards(ERRORS, "/top_label", event=TOP_LABEL),
    **cards(SELECTIVE, event=SELECTED),
}
MULTICLASS = {
    **cards(SCORES, event="true class"),
    **cards(ERRORS, "/top_label", event=TOP_LABEL),
    **cards(BINNED, "/classwise", event="each class against the rest", average="classes"),
    **cards(SELECTIVE, event=SELECTED),
}
del MULTICLASS["esce/classwise"]  # always 0
MULTILABEL = {
    **cards(SCORES, event="each label", average="labels"),
    **cards(ERRORS, "/classwise", event="each label", average="labels"),
    **cards(SELECTIVE, event=SELECTED, average="labels"),
}
CONFIDENCE = {**cards(SCORES), **cards(ERRORS, "/top_label"), **cards(SELECTIVE)}


def with_common(expected, **common):
    return {key: {**card, **common} for key, card in expected.items()}


REPORTS = {
    "binary": ((PROBS, SETS[:, 0]), {}, with_common(BINARY, confidence="probabilities")),
    "logits": (
        (LOGITS, LABELS),
        {"from_logits": True, "ignore_index": -1},
        with_common(MULTICLASS, confidence="softmax of logits", ignore_index=-1),
    ),
    "multi-label": (
        (LOGITS, SETS),
        {"from_logits": True, "task": "multilabel"},
        with_common(MULTILABEL, confidence="sigmoid of logits", n=3 * N),
    ),
    "confidence": (
        (WITH_NAN, SETS[:, 0]),
        {"task": "confidence", "nan_policy": "drop", "clusters": torch.arange(N) // 4},
        with_common(
            CONFIDENCE, confidence="stated", event="prediction is correct", n=N - 2, n_dropped=2, clusters=N // 4
        ),
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_every_line_has_the_expected_definition(name):
    data, options, expected = REPORTS[name]
    report = tc.report(*data, **options, **QUICK)
    found = {key: asdict(card) for key, card in report.definitions.items()}
    assert list(found) == [line.key for line in report.lines]
    assert found == expected
    assert json.loads(report.to_json())["definitions"] == expected


def test_definitions_have_the_options_of_a_report():
    report = tc.report(LOGITS, LABELS, from_logits=True, positive_classes=[0, 2], n_bins=7, right=True, **QUICK)
    ece, ace = report.definitions["ece/positive"], report.definitions["ace/positive"]
    assert (ece.confidence, ece.event) == ("softmax of logits", "positive class (one of 0, 2)")
    assert (ece.n_bins, ece.edges, ace.n_bins) == (7, "(a, b], first bin closed", 7)
    assert "the target" not in ece.of_input
    assert ece.rule_of_bins == "7 equal width, (a, b], first bin closed"
    log_odds = tc.report(LOGITS[:, 0], SETS[:, 0], task="confidence", from_logits=True, **QUICK)
    assert log_odds.definitions["nll"].confidence == "sigmoid of stated log-odds"


@pytest.mark.parametrize("right", [False, True])
def test_edges_belong_to_the_bins_of_the_definition(right):
    report = tc.report(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0, 1, 1]), n_bins=2, right=right, **QUICK)
    counts = {"[a, b), last bin closed": [1, 2], "(a, b], first bin closed": [2, 1]}
    assert report.tables["positive"].n.tolist() == counts[report.definitions["ece/positive"].edges]


def test_the_page_has_the_definitions(tmp_path):
    pytest.importorskip("jinja2")
    data, options, _ = REPORTS["confidence"]
    tc.report(*data, **options, **QUICK).save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    fold = page.partition('id="definitions"')[2].partition("</details>")[0]
    assert "Confidences: stated. n = 38. Clusters of dependent rows: 10. Excluded: 2 for NaN." in fold
    assert fold.count("<tr") == 1 + 3 + len(CONFIDENCE)  # the header, a heading for each group, and the lines
    assert "15 equal width, [a, b), last bin closed" in fold
