"""All texts of a report agree: verdict, cause, action, recommendation, tables, terminal, page and JSON."""

import json
import math
import re
from functools import cache, partial

import numpy as np
import pytest
import torch
from helpers.html import Parsed
from helpers.pages import words_without_pictures
from helpers.reports import QUICK_COMMAND, relabelled

import torchcalib as tc
from torchcalib.calibration import AffineScaling, BiasCorrection, HistogramBinning, TemperatureScaling, recommendation
from torchcalib.cli import main
from torchcalib.display.words import gain, significant
from torchcalib.reporting.decision import with_safety
from torchcalib.reporting.findings import BAD, SLIGHT
from torchcalib.reporting.render import terminal
from torchcalib.reporting.render.contents import key_numbers
from torchcalib.results.decision import Decision
from torchcalib.results.lines import Line, LineInterval

SIZE_IN_WORDS = re.compile(
    r"(Class-wise )?RMSCE, debiased: ([\d.e-]+?)(?: \(95% interval ([\d.e-]+) to ([\d.e-]+)\))?\."
)
N = 400
CALIBRATORS = (TemperatureScaling, BiasCorrection, AffineScaling, HistogramBinning)  # few, because they take most time
NAMES = [calibrator().name for calibrator in recommendation.CALIBRATORS]
SHAPES = {"binary": (N,), "multiclass": (N, 4), "multilabel": (N, 3)}


def data(task, seed=0, n=N, scale=2.0, centre=0.0):
    """Return log-odds or logits, and targets from their probabilities."""
    g = torch.Generator().manual_seed(seed)
    logits = centre + scale * torch.randn((n, *SHAPES[task][1:]), generator=g, dtype=torch.float64)
    if task == "multiclass":
        return logits, torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)
    return logits, torch.bernoulli(logits.sigmoid(), generator=g).long()


def changed(task, change, **given):
    """Return arguments of a report on changed logits."""
    logits, target = data(task)
    return {"preds": change(logits), "target": target, "task": task, "from_logits": True, **given}


def swapped(z):
    """Swap the logits of classes 2 and 3 where neither is the top class."""
    return torch.where((z.argmax(-1) < 2).unsqueeze(-1), z[:, [0, 1, 3, 2]], z)


def leaking(z):
    """Set the logit of the class after the label to -inf."""
    z = z.clone()
    z[torch.arange(N), (data("multiclass")[1] + 1) % 4] = -torch.inf
    return z


def few_per_class():
    """Return calibrated predictions of 200 classes for 250 samples."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(250, 200, generator=g)
    target = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)
    return {"preds": logits, "target": target, "task": "multiclass", "from_logits": True}


def impossible(z):
    """Set the first probability of y = 1 to 0, if it occurs."""
    target = data("binary")[1]
    z = 2 * z
    z[(target == 1).nonzero()[0]] = -math.inf
    return z


def noisy(task, scale):
    """Return arguments of a report on labels, a fifth of which is random."""
    logits, target = data(task, n=1500, scale=scale)
    target = relabelled(target, 4 if task == "multiclass" else 2)
    return {"preds": logits, "target": target, "task": task, "from_logits": True}


def repeated(p, frequency, n=500):
    """Return arguments of a report on n samples of each probability, of which exactly a fraction has y = 1."""
    target = (torch.arange(n) < (torch.tensor(frequency).unsqueeze(-1) * n).round()).long().flatten()
    return {"preds": torch.tensor(p, dtype=torch.float64).repeat_interleave(n), "target": target, "task": "binary"}


def off_groups():
    """Return arguments of a report with frequencies that are too high in group b, and as much too low in group d."""
    logits, _ = data("binary", n=1500)
    groups = torch.arange(1500) % 5
    true = logits + 2.0 * (groups == 1) - 1.9 * (groups == 3)
    target = torch.bernoulli(true.sigmoid(), generator=torch.Generator().manual_seed(1)).long()
    names = {"groups": groups, "group_names": list("abcde")}
    return {"preds": logits, "target": target, "task": "binary", "from_logits": True, **names}


def small(task, n):
    logits, target = data(task, n=n)
    return {"preds": logits, "target": target, "task": task, "from_logits": True}


QUICK = {"with_calibration": False}
GROUPS, COPIES = {"groups": torch.arange(N) % 4}, {"clusters": torch.arange(N) // 4}
CHANGES = {  # of the logits, for every task
    "calibrated": lambda z: z,
    "over": lambda z: 3 * z,
    "under": lambda z: z / 2,
    "slightly over": lambda z: 1.25 * z,
    "reversed": lambda z: -z,
    "constant": torch.zeros_like,
}
CASES = {
    **{(task, name): partial(changed, task, change) for name, change in CHANGES.items() for task in SHAPES},
    **{(task, "quick"): partial(changed, task, lambda z: z, **QUICK) for task in SHAPES},
    **{(task, "over, quick"): partial(changed, task, lambda z: 3 * z, **QUICK) for task in SHAPES},
    **{(task, "clusters"): partial(changed, task, lambda z: 2 * z, **COPIES) for task in SHAPES},
    **{(task, "groups"): partial(changed, task, lambda z: z, **GROUPS) for task in SHAPES},
    **{(task, "tiny"): partial(small, task, 8) for task in SHAPES},
    ("binary", "bias"): lambda: changed("binary", lambda z: z + 1),
    ("binary", "bias, quick"): lambda: changed("binary", lambda z: z + 1, **QUICK),
    ("binary", "group"): lambda: changed(
        "binary", lambda z: torch.where(torch.arange(N) % 4 == 2, 4 * z, z), **GROUPS
    ),
    ("binary", "sine"): lambda: changed("binary", lambda z: z + (2 * z).sin()),
    ("binary", "half"): lambda: changed("binary", lambda z: torch.where(torch.arange(N) % 2 == 0, 3 * z, z / 3)),
    ("binary", "infinite"): lambda: changed("binary", impossible),
    ("binary", "one class"): lambda: {"preds": [0.7] * 50, "target": [1] * 50},
    ("binary", "rare"): lambda: dict(
        zip(("preds", "target"), data("binary", n=1000, centre=-5), strict=True), task="binary", from_logits=True
    ),
    ("binary", "soft"): lambda: {
        "preds": data("binary")[0].mul(3).sigmoid(), "target": data("binary")[0].sigmoid(), "task": "binary"
    },
    ("multiclass", "one class"): lambda: {
        "preds": data("multiclass")[0], "target": torch.zeros(N).long(), "task": "multiclass", "from_logits": True
    },
    ("multiclass", "swapped"): lambda: changed("multiclass", swapped),
    ("multiclass", "bias"): lambda: changed("multiclass", lambda z: z + torch.tensor([0, 0, 1.5, 0])),
    ("multiclass", "bad class"): lambda: changed(
        "multiclass", lambda z: torch.where((z.argmax(-1) == 1).unsqueeze(-1), 4 * z, z)
    ),
    ("multiclass", "names"): lambda: changed("multiclass", lambda z: 2 * z, class_names=["cat", "dog", "bee", "cow"]),
    ("multiclass", "noise"): lambda: {
        **changed("multiclass", lambda z: 2 * z),
        "target": torch.where(torch.arange(N) % 4 == 0, torch.arange(N) // 4 % 4, data("multiclass")[0].argmax(-1)),
    },
    ("multilabel", "one label"): lambda: changed("multilabel", lambda z: z * torch.tensor([1, 4.0, 1])),
    ("multilabel", "biases"): lambda: changed("multilabel", lambda z: z + 1),
    ("multilabel", "one bias"): lambda: changed("multilabel", lambda z: z - torch.tensor([0, 2.0, 0])),
    **{(task, "random labels"): partial(noisy, task, 4.5) for task in SHAPES},
    ("binary", "groups b and d"): off_groups,
    # The sums of (frequency - p), (frequency - p) log-odds and of the score of label noise are 0.
    ("binary", "uneven"): lambda: repeated((0.2, 0.4, 0.6, 0.8), (0.3, 0.3, 0.5, 0.9)),
    ("binary", "exact"): lambda: repeated((0.2, 0.4, 0.6, 0.8), (0.2, 0.4, 0.6, 0.8)),
    ("multiclass", "leak"): lambda: changed("multiclass", leaking),
    ("multiclass", "one-hot"): lambda: {
        "preds": torch.eye(3)[torch.arange(60) % 3], "target": torch.arange(60) % 3, "task": "multiclass",
    },
    ("multiclass", "few per class"): few_per_class,
    ("multilabel", "empty label"): lambda: {
        **changed("multilabel", lambda z: z),
        "target": data("multilabel")[1].masked_fill(torch.arange(3) == 1, -1),
        "ignore_index": -1,
    },
    ("binary", "one cluster"): lambda: changed("binary", lambda z: 2 * z, clusters=torch.zeros(N).long()),
    ("binary", "wrong and certain"): lambda: {
        "preds": 1.0 - data("binary")[1], "target": data("binary")[1], "task": "binary",
    },
    ("confidences", "over"): lambda: ([0.9] * 150 + [0.6] * 150, [1] * 90 + [0] * 60 + [1] * 60 + [0] * 90),
    ("confidences", "calibrated"): lambda: ([0.8] * 300 + [0.6] * 300, [1] * 240 + [0] * 60 + [1] * 180 + [0] * 120),
    ("confidences", "all correct"): lambda: ([0.8, 0.9] * 20, [1] * 40),
}  # fmt: skip


FLATTER = "flatter than predicted at high confidence"
CAUSES = {  # kind of diagnosis, part of the verdict, and part of the action
    **{(task, name): ("calibrated", "Calibrated", "") for task in SHAPES for name in ("calibrated", "quick")},
    **{(task, "over"): ("over-confidence", "Badly over-confident", "Add temperature scaling") for task in SHAPES},
    **{(task, "under"): ("under-confidence", "under-confident", "Add temperature scaling") for task in SHAPES},
    ("binary", "exact"): ("calibrated", "Calibrated", ""),
    ("binary", "bias"): ("class bias", "Badly biased towards y = 1", "use the decision threshold 0.7"),
    ("binary", "random labels"): ("label noise", FLATTER, ""),
    ("binary", "groups b and d"): ("bad group", "miscalibrated in group d", "the training data of this group"),
    ("binary", "uneven"): ("uneven", "Clearly miscalibrated in some ranges", ""),
    ("multiclass", "bias"): ("class bias", "Badly biased towards class 2", "Add bias correction"),
    ("multiclass", "random labels"): ("label noise", FLATTER, "check the labels of the most confident errors."),
    ("multiclass", "bad class"): (
        "bad class", "over-confident for class 1", "Check the labels and the training data of class 1.",
    ),
    ("multilabel", "biases"): ("class bias", "Badly too high", "Add bias correction"),
    ("multilabel", "one bias"): ("bad label", "biased against label 1", "Add bias correction"),
    ("multilabel", "random labels"): ("label noise", FLATTER, ""),
}  # fmt: skip
assert CAUSES.keys() <= CASES.keys()


@pytest.fixture(autouse=True)
def few_calibrators(monkeypatch):
    monkeypatch.setattr(recommendation, "CALIBRATORS", CALIBRATORS)


@cache
def reported(case, folder):
    given = CASES[case]()
    if case[0] != "confidences":
        return tc.report(given.pop("preds"), given.pop("target"), **given, with_intervals=False)
    file = folder / f"{case[1]}.csv"
    file.write_text("\n".join(["confidence,correct", *(f"{c},{y}" for c, y in zip(*given, strict=True))]))
    return tc.Report.from_files(file, with_intervals=False)


def texts_of(r, capsys):
    """Return the text, the short and the complete terminal output, the page and the notebook, by name."""
    shown = {"text": str(r)}
    for name, everything in (("terminal", False), ("terminal --all", True)):
        terminal.show(r, everything=everything)
        shown[name] = capsys.readouterr().out
    shown["page"] = " ".join(words_without_pictures(r))
    shown["notebook"] = " ".join(Parsed(r._repr_html_()).words)
    return {name: " ".join(text.split()) for name, text in shown.items()}


FEW = ("groups", "clusters", "tiny", "quick", "over, quick", "constant", "slightly over")  # for one task in each run
SLOW = {(task, name) for task in ("multiclass", "multilabel") for name in FEW} | {("multiclass", "few per class")}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.extended] * (x in SLOW), id=", ".join(x)) for x in CASES]
)
@pytest.mark.filterwarnings("ignore:.*got only 0 and 1")
def test_all_texts_of_a_report_agree(case, tmp_path_factory, capsys):
    r = reported(case, tmp_path_factory.mktemp("files"))
    d, stage, texts = r.decision, r.calibration, texts_of(r, capsys)
    assert r.sentence == f"{d.verdict}. {d.cause}"
    for name, text in texts.items():
        expected = [d.verdict, d.cause, *[d.action] * (name != "notebook")]
        assert all(" ".join(part.split()) in text for part in expected), name
    found = json.loads(r.to_json())["decision"]
    for name in ("kind", "degree", "verdict", "cause", "action", "calibrator"):
        assert found[name] == getattr(d, name)

    # The cause with its values
    if case in CAUSES:
        kind, verdict, action = CAUSES[case]
        assert (d.kind, verdict.lower() in d.verdict.lower(), action in d.action) == (kind, True, True), d
        mean, frequency = float(r.main_table.mean("confidence")), float(r.main_table.mean("frequency"))
        if case[0] == "multiclass" and kind in ("over-confidence", "under-confidence"):
            assert f"mean confidence is {mean:.1%}, accuracy {frequency:.1%} (fitted temperature " in d.cause
        if case[0] == "binary" and kind == "class bias":
            assert f"mean P(y = 1) is {mean:.1%}, its frequency {frequency:.1%}" in d.cause
        if kind == "label noise":
            assert "Label noise is one explanation: random labels for" in d.cause

    # Advice on calibrators
    added = re.compile(rf"\badd ({'|'.join(NAMES)})\b", re.IGNORECASE)
    marked = re.compile(rf"({'|'.join(NAMES)}) \(advised\)", re.IGNORECASE)
    for name, text in texts.items():
        assert {x.lower() for x in added.findall(text)} <= {d.calibrator.lower()}, name
        assert {x.lower() for x in marked.findall(text)} <= {d.calibrator.lower()}, name
        assert not (d.calibrator and "leave the predictions as they are" in text), name
    number = next((each for each in key_numbers(r) if each.name == "Gain by calibration"), None)
    if stage is None:
        assert (d.calibrator, d.gain, d.interval, number) == ("", None, None, None)
        assert r.recommendation is None
        assert not any(added.search(text) for text in texts.values())
    else:
        advice = stage.recommendation
        assert d.calibrator == (advice.best or "")
        assert (d.gain, d.score) == (pytest.approx(advice.gain, nan_ok=True), advice.score_name)
        assert (d.score == "Brier score") == math.isinf(r["nll"])
        assert advice.text in d.action
        assert r.recommendation.text == advice.text
        assert number.value == f"{gain(d.gain)} of {d.score}"
        assert ("not advised" in number.detail) == (not d.calibrator)
        assert ("No calibrator is recommended for this data" in texts["page"]) == (not d.calibrator)
        if d.calibrator:
            assert d.calibrator in advice.text
            assert marked.search(texts["terminal --all"])
            assert marked.search(texts["page"])
        assert not d.calibrator or gain(d.gain) in advice.text

    # Degree and words of a direction
    is_fault = d.kind not in ("calibrated", "too little data", "one class", "clusters")
    assert not d.degree or is_fault
    if d.degree and d.kind != "impossible outcomes":
        assert d.verdict.lower().startswith(d.degree)
    shown = SIZE_IN_WORDS.fullmatch(d.size)
    if shown and "times as frequent" not in d.cause:
        by_class, size, *bounds = shown.groups()
        assert (d.size in d.cause) == bool(by_class), "the first screen has one size of the error: ECE"
        assert d.size in texts["page"]
        lines = [line for line in r.lines if line.name == "RMSCE debiased"]
        line = max(lines, key=lambda each: each.value) if by_class else lines[0]
        assert size == significant(line.value)
        low, high = (float(size) if x is None else float(x) for x in bounds)
        degrees = {"badly": line.value >= BAD and low >= SLIGHT, "clearly": line.value >= SLIGHT and low > 0}
        degrees["slightly"] = line.value < SLIGHT and high < BAD
        assert d.degree == next((name for name, holds in degrees.items() if holds), "")
        assert ("The size of the error is uncertain." in d.cause) == (d.degree == "")
    for words, mean, outcome in re.findall(
        r"too (high|low)(?: in [^:]*)?: mean \D*?is ([\d.]+)%, \D*?([\d.]+)%", d.cause
    ):
        assert (float(mean) > float(outcome)) == (words == "high")
    for mean, outcome in re.findall(r"its mean is ([\d.]+)%, but \D*?([\d.]+)%", d.cause):
        assert float(mean) > float(outcome)
    if d.kind in ("over-confidence", "under-confidence"):
        z = direction_of(case)
        assert z < -1.96 if d.kind == "over-confidence" else z > 1.96
    assert ("over-confident" in d.verdict.lower()) <= (
        d.kind in ("over-confidence", "bad class", "impossible outcomes")
    )
    assert ("under-confident" in d.verdict.lower()) <= (
        d.kind in ("under-confidence", "bad class", "impossible outcomes")
    )


def direction_of(case):
    """Return the mean gap of the predicted outcome in standard errors, row by row."""
    if case[0] == "confidences":
        p, y = (torch.tensor(x, dtype=torch.float64) for x in CASES[case]())
        return float((y - p).sum() / (p * (1 - p)).sum().sqrt())
    given = CASES[case]()
    q = given["preds"]
    q = q if not given.get("from_logits") else q.softmax(-1) if case[0] == "multiclass" else q.sigmoid()
    if case[0] == "multiclass":
        p, top = q.max(-1)
        is_right = (top == given["target"]).double()
    else:
        p = torch.where(q > 0.5, q, 1 - q)
        is_right = torch.where(q > 0.5, given["target"], 1 - given["target"]).double()
    noise = p * (1 - p) if not given["target"].is_floating_point() else (is_right - p).square()
    return float((is_right - p).sum() / noise.sum().sqrt())


def test_useless_models_one_class_and_affected_labels_are_named():
    """A constant prediction of the frequency is calibrated, and its NLL is 100% of that of the class frequencies."""
    constant = tc.report(torch.full((N,), 0.25), (torch.arange(N) % 4 == 0).long(), with_intervals=False, **QUICK)
    assert constant.decision.verdict == "Calibrated, but no better than always predicting the class frequencies"
    assert "NLL is 100% of that of the class frequencies" in constant.decision.cause
    one = reported(("multiclass", "one class"), None).decision
    assert (one.verdict, one.calibrator) == ("Only class 0 in the targets", "")
    label = reported(("multilabel", "one label"), None).decision
    assert label.cause.startswith("1 of 3 labels is significantly miscalibrated: label 1.")


LOW, HIGH = 0.02, 0.05


@pytest.mark.parametrize(
    ("threshold", "interval", "value", "safety"),
    [
        (0.05, (LOW, HIGH), 0.03, "safe"),
        (0.01, (LOW, HIGH), 0.03, "unsafe"),
        (0.04, (LOW, HIGH), 0.03, "cannot be told"),
        (0.1, (-0.3, -0.2), -0.25, "safe"),
        (0.1, None, 0.03, "cannot be told"),
        (0.1, None, math.inf, "unsafe"),
    ],
)
def test_safety_follows_from_the_interval_of_ecd(threshold, interval, value, safety):
    """[ECD] sec. III.B: only over-confidence is unsafe. An infinite ECD remains infinite for more samples."""
    words = dict.fromkeys(("group", "unit", "question", "source"), "")
    found = None if interval is None else LineInterval(*interval)
    ecd = Line(key="ecd", name="ECD", perfect=0.0, value=value, naive=0.0, interval=found, **words)
    decision = with_safety(Decision("calibrated", "", "Calibrated", "No cause.", ""), ecd, threshold)
    assert decision.safety == safety
    assert f"the threshold {threshold:g}" in decision.cause


def test_report_states_safety_only_with_a_threshold(tmp_path, capsys):
    preds, target = data("binary")
    given = {"task": "binary", "from_logits": True, "with_calibration": False}
    plain = tc.report(preds, target, **given)
    assert plain.decision.safety == ""
    high = plain.line("ecd").interval.high
    report = tc.report(preds, target, **given, safe_threshold=high + 0.01)
    assert (report.decision.safety, report.settings["safe_threshold"]) == ("safe", high + 0.01)
    assert report.decision.cause.startswith(plain.decision.cause)
    np.savez(tmp_path / "a.npz", logits=preds, targets=target)
    assert tc.Report.from_files(tmp_path / "a.npz", with_calibration=False, safe_threshold=9).decision.safety == "safe"
    assert main(["report", str(tmp_path / "a.npz"), "--safe-threshold", "9", *QUICK_COMMAND]) == 0
    assert "Whether it is safe cannot be told" in " ".join(capsys.readouterr().out.split())
