"""Wrong and unusual files: following the advice of each error message must never give a wrong report.

Each case ends with a correct report, or with a one-line error without advice that the test can apply. The expected
values are those of `torchcalib.report` for the arrays in the file. For names of columns see test_layouts.py.
"""

import gzip
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import check_each
from helpers.reports import QUICK, QUICK_COMMAND

import torchcalib as tc
from torchcalib.cli import main

RNG = np.random.default_rng(0)
N = 400
CLASSES = ["World", "Sports", "Business", "Tech"]
PROBS = RNG.dirichlet(np.full(4, 0.7), N)
LOGITS = np.log(PROBS)
LABELS = np.array([RNG.choice(4, p=row) for row in PROBS])
P = RNG.random(N)
LOGIT = np.log(P / (1 - P))
Y = (RNG.random(N) < P).astype(np.int64)
RARE = RNG.random(N) < 0.03
OFTEN = RNG.random(N) < 0.4
NAMES = np.array(CLASSES)[LABELS]
IN_ORDER = np.argsort(CLASSES)
RANK = np.argsort(IN_ORDER)


@dataclass(frozen=True)
class Case:
    """A file as arrays by name, its format, and the true predictions and targets."""

    columns: dict[str, Any]
    preds: Any = None
    target: Any = None
    file: str = "a.csv"
    separator: str = ""
    options: tuple[str, ...] = ()
    rows: Any = ...  # rows of the true predictions to compare with
    ends: str = "right"  # "right": correct report; "error": error after the advice; "at once": error without advice
    says: str = ""  # text in the first message
    truth: dict[str, Any] = field(default_factory=dict)


def by_number(stem, values, first=0):
    return {f"{stem}{k + first}": column for k, column in enumerate(values.T)}


def by_class(pattern, values, classes=CLASSES):
    return dict(zip(map(pattern.format, classes), values.T, strict=True))


def gaps(values, empty=""):
    """Return a column whose every 40th cell is empty."""
    return [empty if k % 40 == 7 else value for k, value in enumerate(values)]


FILLED = np.arange(N) % 40 != 7
ROUNDED = PROBS.round(2)
SINGLE = ROUNDED.astype(np.float32)
PROB = by_number("prob_", PROBS)
ONE_HOT = np.eye(4, dtype=np.int64)[LABELS]
ALL, LIST = ("--preds", "*_prob"), ("--preds", ",".join(CLASSES))
LOST = by_number("prob_", PROBS[:, :3])
LOST_AND_ROUNDED = by_number("prob_", ROUNDED[:, :3])


def multi(columns, **more):
    return Case(columns, PROBS, LABELS, **more)


def binary(columns, **more):
    return Case(columns, P, Y, **more)


def fails(columns, says, **more):
    return Case(columns, PROBS, LABELS, ends="error", says=says, **more)


CASES = {
    # column names used with pandas and scikit-learn
    "y_proba": binary({"y_true": Y, "y_proba": P}, ends="at once"),
    "proba_k, y_test": multi({**by_number("proba_", PROBS), "y_test": LABELS}, ends="at once"),
    "target, prediction": binary({"target": Y, "prediction": P}, ends="at once"),
    "y_score of logits": binary({"y_true": Y, "y_score": LOGIT}, ends="at once"),
    "decisions beside": binary({"": np.arange(N), "y": Y, "y_prob": P, "y_pred": (P > 0.5) * 1}, ends="at once"),
    "classes in names of logits": multi({**by_class("logit_{}", LOGITS), "label": LABELS}, says="--class-names World,"),
    "classes as names and numbers": multi({"id": range(N), **by_class("{}", PROBS), "y": LABELS}, ends="at once"),
    "numbers as names": multi({**by_number("", PROBS), "label": LABELS}, ends="at once"),
    "a pattern": multi({**by_class("{}_prob", PROBS), "y": LABELS, "x": P}, options=ALL, ends="at once"),
    "a list": multi({**by_class("{}", PROBS), "y": LABELS}, options=LIST, ends="at once"),
    "a range": multi({**by_number("x", PROBS), "y": LABELS}, options=("--preds", "x0..3"), ends="at once"),
    "a longer range": fails({**PROB, "y": LABELS}, "--preds` must name", options=("--preds", "prob_0..prob_4")),
    "an unknown pattern": fails({**PROB, "y": LABELS}, "--preds` must name", options=("--preds", "q_*")),
    "a rounded score": multi({**by_number("score_", ROUNDED), "y": LABELS}, says="--normalize",
                             truth={"preds": ROUNDED / ROUNDED.sum(1, keepdims=True)}),
    "two systems": fails({"prob_a": P, "prob_b": P**2, "y": Y}, "must sum to 1"),
    "two systems of logits": fails({"a_logit": LOGIT, "b_logit": 2 * LOGIT, "y": Y}, "under a known name"),
    "two predictions": fails({"prob": P, "logit": LOGIT, "y": Y}, "or compare them: torchcalib compare"),
    "one class in a name": binary({"prob_dog": P, "y": Y}, ends="at once"),
    "a p-value": fails({"p_value": P, "y": Y}, "under a known name"),
    # text labels
    "True and False": binary({"prob": P, "label": Y == 1}, ends="at once"),
    "dog and other": binary({"prob": P, "label": np.array(["other", "dog"])[Y]}, says="--class-names other,dog"),
    "sorted names": multi({**by_number("prob_", PROBS[:, IN_ORDER]), "y": NAMES}, ends="at once",
                          truth={"preds": PROBS[:, IN_ORDER], "target": RANK[LABELS]}),
    "unsorted names": multi({**PROB, "y": NAMES}, says=f"--class-names {','.join(CLASSES)}"),
    "lower case": fails({**by_class("p_{}", PROBS), "y": np.char.lower(NAMES)}, "labels among the classes `World`"),
    "a class that never occurs": fails({**PROB, "y": np.where(LABELS == 3, "World", NAMES)}, "names of all 4"),
    "three names for two classes": fails({"prob": P, "y": NAMES}, "names of all 2 classes"),
    "too few names": fails({**PROB, "y": LABELS}, "--class-names` must be 4 different names in the class order of",
                           options=("--class-names", "a,b")),
    # file formats
    "tabs and gzip": multi({**PROB, "y": NAMES}, file="a.tsv.gz", says="--class-names"),
    "JSON lines with gzip": multi({**by_class("prob_{}", PROBS), "label": NAMES}, file="a.jsonl.gz", ends="at once"),
    "a pickle": fails({"probs": PROBS, "label": LABELS}, "never loaded", file="a.pkl"),
    "vertical bars": multi({**PROB, "y": LABELS}, separator="|", ends="at once"),
    "decimal commas": binary({"y": Y, "prob": [str(p).replace(".", ",") for p in P]}, separator=";", ends="at once"),
    "commas in .tsv": multi({**PROB, "y": LABELS}, file="a.tsv", separator=",", ends="at once"),
    "no header": fails({str(v): [v] for v in (0.25, 1)}, "must begin with a line of column names"),
    "a column of classes": multi({"probs": PROBS, "y": LABELS[:, None]}, file="a.npz", ends="at once"),
    "a column of each": binary({"probs": P[:, None], "y": Y[:, None]}, file="a.npz", ends="at once"),
    # missing values
    "empty predictions": binary({"prob": gaps(P), "y": Y}, rows=FILLED, says="--nan-policy drop"),
    "empty labels": multi({**PROB, "y": gaps(LABELS)}, rows=FILLED, says="--nan-policy drop"),
    "labels as floats, with gaps": multi({**PROB, "y": gaps(LABELS * 1.0)}, rows=FILLED, says="--nan-policy drop"),
    "NaN in labels": multi({"probs": PROBS, "y": np.where(FILLED, LABELS, np.nan)}, file="a.npz", rows=FILLED,
                           says="--nan-policy drop"),
    "NaN in predictions": multi({"probs": np.where(FILLED[:, None], PROBS, np.nan), "y": LABELS}, file="a.npz",
                                rows=FILLED, says="--nan-policy drop"),
    "empty names": multi({**by_class("p_{}", PROBS), "y": gaps(NAMES)}, rows=FILLED, says="--nan-policy drop"),
    "null in JSON": multi({"probs": gaps(PROBS.tolist(), None), "y": LABELS}, file="a.jsonl", rows=FILLED,
                          says="--nan-policy drop"),
    "labels as floats": multi({**PROB, "y": LABELS * 1.0}, ends="at once"),
    "a half label": fails({**PROB, "y": LABELS + 0.5}, "whole numbers, got"),
    # labels
    "labels from 1": multi({**PROB, "y": LABELS + 1}, says="count from 1. Subtract 1"),
    "labels from 1, of 2 classes": binary({"prob": P, "y": Y + 1}, says="count from 1. Subtract 1"),
    "labels from 1, most of the last class": multi({**PROB, "y": np.where(OFTEN, 4, LABELS + 1)}, says="count from 1",
                                                   truth={"target": np.where(OFTEN, 3, LABELS)}),
    "labels from 1, few of the last class": multi({**PROB, "y": np.where(RARE, 4, LABELS % 3 + 1)}, says="count from 1",
                                                  truth={"target": np.where(RARE, 3, LABELS % 3)}),
    "labels -1 and 1": binary({"prob": P, "y": 2 * Y - 1}, says="-1 and 1. Replace -1 by 0"),
    "labels -1.0 and 1.0": binary({"prob": P, "y": 2.0 * Y - 1}, says="-1 and 1. Replace -1 by 0"),
    "few labels of -1 and many of 1": binary({"prob": P, "y": np.where(RARE, -1, 1)}, says="-1 and 1. Replace -1 by 0",
                                             truth={"target": np.where(RARE, 0, 1)}),
    "masks of 0 and 255": fails({"prob": P, "y": 255 * Y}, "of rows: number the classes from 0 to 1"),
    "labels of 2 and 4 (benign, malignant)": fails({"prob": P, "y": 2 + 2 * Y}, "[0, 1]"),
    "labels from 10": fails({**PROB, "y": LABELS + 10}, "Check that every class has a prediction"),
    "percentages as labels": fails({"prob": P, "y": 100 * Y}, "of rows: number the classes from 0 to 1"),
    "void pixels of 255": multi({**PROB, "y": np.where(RARE, 255, LABELS)}, rows=~RARE, says="--ignore-index 255"),
    "many void pixels of 255": multi({**PROB, "y": np.where(OFTEN, 255, LABELS)}, rows=~OFTEN,
                                     says="--ignore-index 255 if that value marks rows to drop. Otherwise number"),
    "labels from 1 beside -100": fails({**PROB, "y": np.where(OFTEN, -100, LABELS + 1)},
                                       "count from 1. Subtract 1 from all labels that are not ignored",
                                       options=("--ignore-index", "-100")),
    "ratings": fails({"prob": 1 + LABELS, "y": Y}, "predict_proba"),
    "transposed one-hot labels": fails({"p": PROBS.T.copy(), "y": ONE_HOT.T * 1.0}, "arrays with shape (N, C)",
                                       file="a.npz", options=("--task", "multiclass")),
    "maps with a channel": fails({"p": P.reshape(4, 1, 10, 10), "y": Y.reshape(4, 10, 10)}, "preds.squeeze(1)",
                                 file="a.npz"),
    "a few -1": multi({**PROB, "y": np.where(RARE, -1, LABELS)}, rows=~RARE, says="--ignore-index -1"),
    "many of -100": multi({**PROB, "y": np.where(OFTEN, -100, LABELS)}, rows=~OFTEN, says="--ignore-index -100"),
    "most of -100": multi({**PROB, "y": np.where(RARE, LABELS, -100)}, rows=RARE, says="--ignore-index -100"),
    "many of -100.0, binary": binary({"prob": P, "y": np.where(OFTEN, -100.0, Y)}, rows=~OFTEN,
                                     says="--ignore-index -100"),
    "-100 beside 255": fails({**PROB, "y": np.where(RARE, 255, np.where(OFTEN, -100, LABELS))}, "--ignore-index -100"),
    "two marks": fails({**PROB, "y": np.where(RARE, 255, np.where(OFTEN, -1, LABELS))}, "Number the classes"),
    "swapped columns": fails({"prob": Y, "y": P}, "decisions, labels or ratings"),
    "swapped columns of floats": fails({"prob": Y * 1.0, "y": P}, "seem to be swapped"),
    "swapped columns of named labels": fails({"y_prob": Y.astype(bool), "y_true": P}, "predict_proba"),
    "decisions": fails({"prob": (P > 0.5) * 1, "y": Y}, "Store probabilities (predict_proba"),
    "predicted classes": fails({"pred": PROBS.argmax(1), "y": LABELS}, "predict_proba"),
    "constant labels": binary({"prob": P, "y": 0 * Y}, ends="at once", truth={"target": 0 * Y}),
    "floating labels": binary({"prob": P, "y": Y * 1.0}, file="a.npz", ends="at once"),
    # values of predictions
    "percentages": multi({**by_number("prob_", 100 * PROBS), "y": LABELS}, says="percentages. Divide them by 100"),
    "rounded percentages": multi({**by_number("prob_", 100.0 * ROUNDED), "y": LABELS}, says="Divide them by 100",
                                 truth={"preds": ROUNDED / ROUNDED.sum(1, keepdims=True)}),
    "percentages of yes": binary({"prob": 100 * P, "y": Y}, says="Divide percentages by 100"),
    # a warning, which is an error in tests
    "whole percentages": fails({"prob": (100 * P).astype(int), "y": Y}, "which are divided by 100"),
    "whole percentages of classes": fails({**by_number("prob_", (100 * PROBS).round().astype(int)), "y": LABELS},
                                          "divide percentages by 100"),
    "small percentages of yes": binary({"prob": 9 * P, "y": Y}, says="Divide percentages by 100",
                                       truth={"preds": 0.09 * P}),
    "per mille": multi({**by_number("prob_", 1000 * PROBS), "y": LABELS}, says="sum to 1000. Divide them by their sum"),
    "logits as probabilities": multi({**by_number("prob_", LOGITS), "y": LABELS}, says="Pass --from-logits"),
    "logits of yes as probabilities": binary({"prob": LOGIT, "y": Y}, says="Pass --from-logits"),
    "probabilities as logits": multi({**by_number("logits_", PROBS), "y": LABELS}, says="Pass --from-probs"),
    "probabilities as log-probabilities": multi({**by_number("log_prob_", PROBS), "y": LABELS}, says="--from-probs"),
    "probabilities of yes as logits": binary({"logit": P, "y": Y}, says="look like probabilities. Pass --from-probs"),
    "2 decimals": multi({**by_number("prob_", ROUNDED), "y": LABELS}, says="rounded to 2 decimals. Pass --normalize",
                        truth={"preds": ROUNDED / ROUNDED.sum(1, keepdims=True)}),
    "2 decimals in float32": multi({"probs": SINGLE, "y": LABELS}, file="a.npz", says="--normalize",
                                   truth={"preds": (SINGLE / SINGLE.sum(1, dtype="f8", keepdims=True)).astype("f4")}),
    "1 decimal": fails({**by_number("prob_", PROBS.round(1)), "y": LABELS}, "too coarse"),
    "just above 1": binary({"prob": np.where(RARE, 1 + 1e-6, P), "y": Y}, says="Clip the probabilities to [0, 1]",
                           truth={"preds": np.where(RARE, 1, P)}),
    "a lost class": fails({**LOST, "y": LABELS}, "Check that every class"),
    "a lost class, whose labels are gone": fails({**LOST, "y": LABELS % 3}, "may be missing"),
    "a lost class, rounded": fails({**LOST_AND_ROUNDED, "y": LABELS % 3}, "may be missing"),
    "a lost class, normalised": fails({**LOST_AND_ROUNDED, "y": LABELS % 3}, "which corrects rounding only",
                                      options=("--normalize",)),
    "a lost column of logits": fails({**by_number("logit_", LOGITS[:, :3]), "y": LABELS}, "at least 4 classes"),
    "a gap in the columns": fails({"prob_0": P, "prob_2": 1 - P, "y": Y}, "of which `1` is no class"),
    "normalised yes": fails({"prob": P, "y": Y}, "--normalize` must be used with", options=("--normalize",)),
    "class-first": fails({"probs": PROBS.T, "y": LABELS}, "one row per sample", file="a.npz"),
    # one-hot labels
    "one-hot columns": multi({**PROB, **by_number("target_", ONE_HOT)}, says="--task multiclass", ends="either"),
    "one-hot columns by name": multi({**PROB, **by_class("y_true_{}", ONE_HOT)}, says="--task multi", ends="either"),
    "dummies": multi({**PROB, **by_class("label_{}", ONE_HOT == 1)}, says="--task multiclass", ends="either"),
    "two labels at once": multi({**PROB, **by_number("y_", ONE_HOT + ONE_HOT[::-1] > 0)}, says="true for one class",
                                options=("--task", "multiclass"), ends="either"),
    # confidences
    "confidence of yes": binary({"y": Y, "confidence": P}, says="pass --task binary"),
    "probabilities of classes, correct": fails({**PROB, "correct": Y}, "Confidences must be one number"),
}  # fmt: skip


def write(folder, case):
    path = folder / case.file
    columns = case.columns
    if case.file.endswith("npz"):
        np.savez(path, **{name: np.asarray(values) for name, values in columns.items()})
        return path
    rows = list(zip(*(v.tolist() if isinstance(v, np.ndarray) else v for v in columns.values()), strict=True))
    if ".json" in case.file:
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
    else:
        mark = case.separator or ("\t" if ".tsv" in case.file else ",")
        lines = [mark.join(columns), *(mark.join(map(str, row)) for row in rows)]
    content = "\n".join([*lines, ""]).encode()
    path.write_bytes(gzip.compress(content) if case.file.endswith("gz") else content)
    return path


def changed(case, name, change):
    """Return a case with changed columns of one kind."""
    columns = {key: change(np.asarray(v)) if key.startswith(name) else v for key, v in case.columns.items()}
    return replace(case, columns=columns)


def divided(case):
    stem = next(key for key in case.columns if key != "y")
    total = sum(values for key, values in case.columns.items() if key != "y")
    return changed(case, stem.rstrip("0123456789"), lambda values: values / total)


PREDS, TARGET = "p", "y"
EDITS = {  # advice that changes the file
    "Subtract 1 from all of them": lambda case: changed(case, TARGET, lambda y: y - 1),
    "Replace -1 by 0": lambda case: changed(case, TARGET, lambda y: np.where(y == -1, 0, y)),
    "Divide them by 100": lambda case: changed(case, PREDS, lambda p: p / 100),
    "Divide percentages by 100": lambda case: changed(case, PREDS, lambda p: p / 100),
    "Divide them by their sum": divided,
    "Clip the probabilities to [0, 1]": lambda case: changed(case, PREDS, lambda p: p.clip(0, 1)),
}
FLAG, WITH_VALUE = (
    r"--(?:from-logits|from-probs|normalize)\b(?! only)",
    r"--(?:task|nan-policy|ignore-index|class-names) [^\s`]*\w",
)
OPTION = re.compile(f"{FLAG}|{WITH_VALUE}")


def followed(case, message):
    """Return the cases that follow from the advice of a message, one for each alternative."""
    edits = [edit for words, edit in EDITS.items() if words in message]
    if edits:
        return [edits[0](case)]
    advice = message.partition("got ")[2] or message
    options = [found for found in OPTION.findall(advice) if not set(found.split()) <= set(case.options)]
    if " or " not in advice:
        options = [" ".join(options)] if options else []
    return [replace(case, options=(*case.options, *option.split())) for option in options]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs `report` on the file of a case, and returns the report or the error message."""
    shown = []
    monkeypatch.setattr("torchcalib.reporting.render.terminal.show", lambda report, everything: shown.append(report))

    def run(case):
        shown.clear()
        code = main(["report", str(write(tmp_path, case)), *case.options, *QUICK_COMMAND])
        error = capsys.readouterr().err
        if code == 0:
            return shown[0]
        assert (code, error.count("\n")) == (2, 1), error
        assert error.startswith("torchcalib: error: "), error
        return error

    return run


def is_right(case, found):
    """Compare a report with that of the true predictions."""
    true = {"preds": case.preds, "target": case.target, **case.truth}
    preds, target = (torch.from_numpy(np.asarray(true[name])[case.rows]) for name in ("preds", "target"))
    expected = tc.report(preds, target, task=found.task, **QUICK)
    assert found.n == expected.n
    for key, value in expected.items():
        # text has 17 digits, and the logarithm of a probability, up to 40, has a relative error of 1e-16
        assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), key


@pytest.mark.extended
def test_following_the_advice_of_a_message_never_gives_a_wrong_report(run):
    def check(name):
        case = CASES[name]
        found = run(case)
        if case.says:
            assert isinstance(found, str), "there was no error"
            assert case.says in found
            assert len(found) <= 500 + len("torchcalib: error: ")
        if case.ends == "at once":
            assert not isinstance(found, str), found
        pending, right = [(case, found)], 0
        for _ in range(20):
            if not pending:
                break
            now, result = pending.pop()
            if not isinstance(result, str):
                if case.ends == "either" and result.task == "multilabel":
                    columns = [np.asarray(v) for name, v in case.columns.items() if not name.startswith("prob_")]
                    is_right(replace(case, target=np.stack(columns, 1).astype(np.int64)), result)
                else:
                    is_right(case, result)
                right += 1
                assert case.ends != "error", f"a report after {now.options}"
                continue
            pending += [(other, run(other)) for other in followed(now, result)]
        assert not pending, "following the advice does not end"
        assert right > 0 or case.ends == "error", found

    check_each(CASES, check)
