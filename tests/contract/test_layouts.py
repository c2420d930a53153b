"""Layouts of tables: every entrance gives the same value, computed here by a loop, or the same error."""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from contract.surfaces import QUICK, printed
from helpers.systems import FEW
from torchmetrics import MetricCollection

import torchcalib as tc

pd, pl, pa = (pytest.importorskip(name) for name in ("pandas", "polars", "pyarrow"))
N = 30
RNG = np.random.default_rng(11)


@dataclass(frozen=True, eq=False)
class Layout:
    """A table, and what is right for it.

    Attributes:
        columns: the table.
        right: probability of the outcome of each row, or part of the message of the error.
        classes: columns of classes, for functions of predictions and targets; empty if there are none.
        target: column of the targets, for these functions.
        given: names of columns and options, if they must be given.
    """

    name: str
    columns: dict[str, list[Any]]
    right: list[float] | str
    classes: tuple[str, ...] = ()
    target: str = "label"
    given: dict[str, Any] = field(default_factory=dict)
    from_logits: bool = False
    weights: list[float] | None = None

    @property
    def value(self):
        """Negative log-likelihood by a loop."""
        weights = self.weights or [1.0] * len(self.right)
        total = sum(w * math.log(p) for w, p in zip(weights, self.right, strict=True) if w)
        return -total / sum(weights)

    def __str__(self):
        return self.name


LOGITS = RNG.normal(size=(N, 12)) * 2
INDEX = RNG.integers(0, 12, N)


def softmax(logits):
    odds = np.exp(logits)
    return odds / odds.sum(1, keepdims=True)


def drawn(n_classes, last_occurs=True):
    """Return probabilities of classes, rounded as in a text file, and the index of the label of each row."""
    probs = softmax(LOGITS[:, :n_classes]).round(6)
    probs[:, -1] = 1 - probs[:, :-1].sum(1)
    return probs, [int(k) for k in INDEX % (n_classes if last_occurs else n_classes - 1)]


def of_label(probs, index):
    return [float(row[k]) for row, k in zip(probs, index, strict=True)]


def classes(name, columns, labels, *, order=None, more=None, target="label", last_occurs=True, right=None, **options):
    """Return a layout with a column of probabilities for each class. `order` permutes the columns."""
    probs, index = drawn(len(columns), last_occurs)
    order = range(len(columns)) if order is None else order
    table = {columns[k]: probs[:, k].tolist() for k in order}
    table = {**table, **(more or {}), target: [labels[k] for k in index]}
    names = tuple(columns[k] for k in order)
    return Layout(name, table, right or of_label(probs, index), names, target, **options)


def numbered(name, columns, order, **options):
    """Return a layout with a column of logits for each class, which is numbered."""
    table = {columns[k]: LOGITS[:, k].tolist() for k in order}
    names = tuple(columns[k] for k in order)
    right = of_label(softmax(LOGITS), INDEX)
    return Layout(name, {**table, "label": INDEX.tolist()}, right, names, from_logits=True, **options)


def named_columns(stem, names):
    return [f"{stem}{name}" for name in names]


TEXT_ORDER = sorted(range(12), key=str)
ANIMALS = ["cat", "dog", "owl", "yak"]
PROBS, LABELS = drawn(4)
P, Y = RNG.random(N).round(4), RNG.integers(0, 2, N)
OUTCOMES = [float(p if y else 1 - p) for p, y in zip(P, Y, strict=True)]
TOP = [float(p) for p in PROBS.max(1)]
CHOICE = [int(k) for k in PROBS.argmax(1)]
RIGHT = [p if k == y else 1 - p for p, k, y in zip(TOP, CHOICE, LABELS, strict=True)]
WHOLE = RNG.integers(1, 100, N).tolist()


def single(name, columns, right=OUTCOMES, **options):
    return Layout(name, columns, right, **options)


def by_class(rows):
    return [dict(zip(ANIMALS, row, strict=True)) for row in PROBS[rows].tolist()]


PIPELINES = [
    sorted(({"label": name, "score": p} for name, p in zip(ANIMALS, row, strict=True)), key=lambda each: -each["score"])
    for row in PROBS.tolist()
]
LAYOUTS = [
    # columns named after classes
    classes("names", named_columns("prob_", ANIMALS), ANIMALS),
    classes("permuted names", named_columns("prob_", ANIMALS), ANIMALS, order=[2, 0, 3, 1]),
    classes("other separators", named_columns("proba.", ANIMALS), ANIMALS, order=[1, 0, 3, 2]),
    classes("only labels as names", ANIMALS, ANIMALS, order=[3, 1, 0, 2]),
    classes("only labels, and another column", ANIMALS, ANIMALS, more={"age": P.tolist()}),
    classes("names with spaces", [f"prob_a {name}" for name in ANIMALS], [f"a {name}" for name in ANIMALS]),
    classes("positions of names", named_columns("prob_", ANIMALS), range(4)),
    classes("a class called max", named_columns("prob_", ["max", "min", "mid"]), ["max", "min", "mid"]),
    # numbers
    classes("counted from 0", named_columns("prob_", range(4)), range(4)),
    classes("reversed", named_columns("prob_", range(4)), range(4), order=[3, 2, 1, 0]),
    classes("counted from 1", named_columns("prob_", range(1, 6)), range(1, 6)),
    classes("counted from 1, last absent", named_columns("prob_", range(1, 6)), range(1, 6), last_occurs=False),
    classes("gaps", named_columns("prob_", [0, 2, 3]), [0, 2, 3]),
    classes("gaps, last absent", named_columns("prob_", [0, 2, 3]), [0, 2, 3], last_occurs=False),
    classes("only numbers, also of the target", named_columns("", range(4)), range(4), target="4",
            more={"name": ["x"] * N}, given={"target": "4", "from_logits": False}),
    classes("from 3 to 9", named_columns("prob_", range(3, 10)), range(3, 10), order=[6, 0, 1, 2, 3, 4, 5]),
    classes("numbers as text", named_columns("prob_", range(1, 5)), named_columns("", range(1, 5))),
    classes("numbers as floats", named_columns("prob_", range(1, 5)), [1.0, 2.0, 3.0, 4.0], last_occurs=False),
    classes("numbers in brackets", [f"P({k})" for k in range(1, 6)], range(1, 6), last_occurs=False),
    classes("numbers of stars", [f"prob_{k} star{'s' * (k > 1)}" for k in range(1, 6)], range(1, 6), last_occurs=False),
    classes("negative numbers", named_columns("prob_", range(-2, 3)), range(-2, 3), order=[4, 0, 1, 2, 3]),
    classes("decimals", named_columns("prob_", [1.0, 2.0, 3.0]), [1, 2, 3], last_occurs=False),
    classes("letters and positions", named_columns("prob_", "ABCD"), range(4), order=[2, 0, 3, 1]),
    classes("two truth values", named_columns("prob_", [True, False]), [True, False]),
    numbered("text order", named_columns("logit_", range(12)), TEXT_ORDER),
    numbered("text order without separator", named_columns("logit", range(12)), TEXT_ORDER),
    numbered("random order", named_columns("logits.", range(12)), RNG.permutation(12).tolist()),
    numbered("a neutral name", named_columns("score_", range(12)), TEXT_ORDER),
    classes("names that end in digits", named_columns("prob_type", range(1, 5)), named_columns("type", range(1, 5))),
    classes("labels of transformers", named_columns("prob_LABEL_", range(4)), named_columns("LABEL_", range(4))),
    classes("synsets", named_columns("prob_n0208", [5620, 5782, 5936]), named_columns("n0208", [5620, 5782, 5936])),
    # names of classes within other texts
    classes("text after the names", [f"{name}_prob" for name in ANIMALS], ANIMALS, order=[1, 0, 3, 2]),
    classes("names in brackets", [f"P({name})" for name in ANIMALS], ANIMALS, order=[1, 0, 3, 2]),
    classes("numbers before a text", [f"{k}_prob" for k in range(4)], range(4), order=[1, 0, 3, 2]),
    classes("ranks as names", named_columns("prob_", ["p1", "p2", "p3"]), ["p1", "p2", "p3"]),
    classes("names for missing values", named_columns("prob_", ["None", "NA", "mild"]), ["None", "NA", "mild"]),
    # misleading columns
    classes("a maximum", named_columns("prob_", ANIMALS), ANIMALS, more={"prob_max": TOP}),
    classes("a mean and a gap", named_columns("prob_", ANIMALS), ANIMALS, more={"prob_mean": TOP, "prob_gap": TOP}),
    single("a positive class and a gap",
           {"prob_spam": P.tolist(), "prob_gap": np.abs(2 * P - 1).tolist(), "label": Y.tolist()}),
    single("a positive class and an identifier",
           {"prob_spam": P.tolist(), "prob_id": P[::-1].tolist(), "label": [("ham", "spam")[y] for y in Y]}),
    classes("given names of derived columns", named_columns("prob_", ["max", "min", "mid"]), range(3),
            given={"class_names": ["max", "min", "mid"]}),
    classes("a maximum beside numbers", named_columns("prob_", range(4)), range(4), more={"prob_max": TOP}),
    classes("a number of a problem", named_columns("prob_", ANIMALS), ANIMALS, more={"prob_id": list(range(N))}),
    classes(
        "predicted labels", ANIMALS, ANIMALS, more={"predictions": [ANIMALS[k] for k in CHOICE]}, target="truth",
        given={"from_logits": False},
    ),
    classes(
        "the answer of the model", list("ABCD"), "ABCD", more={"answer": ["ABCD"[k] for k in CHOICE]},
        target="correct_answer", given={"from_logits": False},
    ),
    classes("capitals and spaces", named_columns("prob_", ANIMALS), ANIMALS, more={"label": ["cat"] * N},
            target="True Label"),
    classes("camel case", named_columns("predProba ", ANIMALS), ANIMALS, more={"label": ["cat"] * N},
            target="trueLabel"),
    classes("letters after the stem", [f"prob{letter}" for letter in "ABCD"], "ABCD", target="correctAnswer"),
    classes("two targets", named_columns("prob_", ANIMALS), ANIMALS, more={"label": ["cat"] * N}, target="y_true"),
    classes(
        "given names select", named_columns("prob_", ANIMALS), ANIMALS, more={"prob_fox": TOP},
        given={"class_names": ANIMALS},
    ),
    # values in one cell
    single("vectors", {"probs": PROBS.tolist(), "label": LABELS}, of_label(PROBS, LABELS)),
    single("vectors as text", {"probs": list(map(str, PROBS.tolist())), "label": LABELS}, of_label(PROBS, LABELS)),
    single(
        "tensors as text", {"probs": [f"tensor({row})" for row in PROBS.tolist()], "label": LABELS},
        of_label(PROBS, LABELS),
    ),
    single("vectors of numpy",
           {"probs": [f"[{', '.join(map(repr, row))}]" for row in PROBS], "label": LABELS}, of_label(PROBS, LABELS)),
    single("vectors without brackets, and a confidence",
           {"probs": [" ".join(map(str, row)) for row in PROBS.tolist()], "confidence": TOP, "label": LABELS},
           of_label(PROBS, LABELS)),
    single(
        "objects", {"probs": by_class(slice(None)), "label": [ANIMALS[k] for k in LABELS]}, of_label(PROBS, LABELS)
    ),
    single(
        "objects as text", {"probs": list(map(json.dumps, by_class(slice(None)))), "label": LABELS},
        of_label(PROBS, LABELS),
    ),
    single(
        "objects in other orders",
        {
            "probs": [dict(sorted(zip("ABCD", row, strict=True), key=lambda p: p[1])) for row in PROBS.tolist()],
            "label": LABELS,
        },
        of_label(PROBS, LABELS),
    ),
    single(
        "pipelines of Hugging Face", {"scores": PIPELINES, "label": [ANIMALS[k] for k in LABELS]},
        of_label(PROBS, LABELS),
    ),
    single(
        "pipelines as text", {"predictions": list(map(str, PIPELINES)), "label": [ANIMALS[k] for k in LABELS]},
        of_label(PROBS, LABELS),
    ),
    # one probability
    single("binary", {"prob": P.tolist(), "label": Y.tolist()}),
    single("words", {"prob": P.tolist(), "label": [("no", "yes")[y] for y in Y]}),
    single("the positive class", {"prob_spam": P.tolist(), "label": [("ham", "spam")[y] for y in Y]}),
    single("a p-value", {"p_value": P[::-1].tolist(), "prob": P.tolist(), "label": Y.tolist()}),
    single("forecasts", {"forecast": P.tolist(), "resolved": [("no", "yes")[y] for y in Y]}),
    single("confidences", {"confidence": P.tolist(), "correct": Y.tolist()}),
    single("capitals of confidences", {"Model Confidence": P.tolist(), "isCorrect": Y.tolist()}),
    single("a row number", {"id": list(range(N)), "confidence": P.tolist(), "correct": (Y == 1).tolist()}),
    single("predicted labels and their probabilities",
           {"true_label": [ANIMALS[k] for k in LABELS], "pred_label": [ANIMALS[k] for k in CHOICE], "pred_prob": TOP},
           RIGHT),
    single("predicted numbers", {"label": LABELS, "prediction": CHOICE, "confidence": TOP}, RIGHT),
    single("numbers of labels and predictions", {"true_label": LABELS, "pred_label": CHOICE, "pred_prob": TOP}, RIGHT),
    single("predictions under given names", {"gold_one": LABELS, "chosen": CHOICE, "how_sure": TOP}, RIGHT,
           given={"preds": "how_sure", "target": "gold_one", "pred": "chosen"}),
    single("percentages", {"confidence": WHOLE, "correct": Y.tolist()},
           [p / 100 if y else 1 - p / 100 for p, y in zip(WHOLE, Y, strict=True)]),
    single("percent signs", {"confidence": [f"{p}%" for p in WHOLE], "correct": Y.tolist()},
           [p / 100 if y else 1 - p / 100 for p, y in zip(WHOLE, Y, strict=True)]),
    single("the probability of no", {"prob_no": (1 - P).tolist(), "label": [("no", "yes")[y] for y in Y]}),
    single("predicted numbers as floats",
           {"label": LABELS, "prediction": [float(k) for k in CHOICE], "confidence": TOP}, RIGHT,
           given={"pred": "prediction", "preds": "confidence"}),
    single("vectors of logical labels", {"probs": [[float(1 - p), float(p)] for p in P], "label": (Y == 1).tolist()}),
    single("weights", {"prob": P.tolist(), "label": Y.tolist(), "weight": (WHOLE)}, weights=WHOLE),
    # errors
    classes("a label without a column", named_columns("prob_", ANIMALS), ["cat", "dog", "owl", "fox"],
            right="`fox` (is no class|in row)"),
    classes("a number without a column", named_columns("prob_", range(4)), [0, 1, 2, 9],
            right="among the classes|class index in"),
    classes("numbers without columns", named_columns("prob_", [1, 2, 4]), [0, 1, 2], right="among the classes"),
    single("only the answer of the model",
           {**dict(zip("ABCD", PROBS.T.tolist(), strict=True)), "answer": ["ABCD"[k] for k in CHOICE]},
           "must be the right answer, got the class with the largest prediction in all 30 rows",
           given={"from_logits": False}),
    single("only the predictions of the model",
           {**dict(zip(named_columns("prob_", ANIMALS), PROBS.T.tolist(), strict=True)), "label": CHOICE},
           "`label` in .* must be the right answer, got the class with the largest prediction"),
    single("predictions as targets", {"label": CHOICE, "pred_label": CHOICE, "pred_prob": TOP},
           "`label` in .* must be the right answer, got the predicted label `pred_label` in all 30 rows"),
    single("the probability of 0", {"prob_0": P.tolist(), "label": Y.tolist()}, "the probability that `label` is 1"),
    single("predicted labels in capitals",
           {"label": [ANIMALS[k] for k in LABELS], "pred_label": [ANIMALS[k].upper() for k in CHOICE], "score": TOP},
           "must have the labels of the targets"),
    single("predicted names of numbers",
           {"label": LABELS, "pred_label": [f"LABEL_{k}" for k in CHOICE], "score": TOP},
           "must have the labels of the targets"),
    single("columns of two systems",
           {**{f"{x}_choice{k}_prob": TOP for x in "ab" for k in "ABCD"}, "label": ["ABCD"[k] for k in LABELS]},
           "must contain one set of columns of predictions"),
    single("words as probabilities", {"prob_cat": ["high"] * N, "prob_dog": ["low"] * N, "label": ["cat"] * N},
           "`prob_cat` in .* must be floating-point predictions, got the text 'high'"),
    single("no predictions", {"age": P.tolist(), "label": Y.tolist()}, "must contain predictions under a known name"),
    single("no targets", {"prob": P.tolist(), "age": Y.tolist()}, "must contain targets under a known name"),
    single("two predictions", {"prob": P.tolist(), "score": P.tolist(), "label": Y.tolist()},
           "must contain one array of predictions"),
    single("no outcomes", {"confidence": P.tolist(), "label": Y.tolist()}, "must have a target column"),
    single("vectors of different lengths",
           {"probs": [str(row[: 4 - k % 2]) for k, row in enumerate(PROBS.tolist())], "label": LABELS},
           "4 numbers in every cell"),
]  # fmt: skip


def frames(layout):
    """Yield the table as every kind of frame. Objects in cells differ between libraries."""
    table = pd.DataFrame(layout.columns)
    yield "pandas", table
    yield "polars", pl.DataFrame(layout.columns)
    yield "arrow", pa.table(layout.columns)
    yield "dict", layout.columns


def files(layout, folder):
    """Yield the paths of the table as a file of every format."""
    table = pd.DataFrame(layout.columns)
    table.to_csv(folder / "t.csv", index=False)
    table.to_csv(folder / "t.tsv", index=False, sep="\t")
    rows = table.to_csv(index=False, sep=";").replace("\n", "\n# a comment, between rows\n", 1)
    (folder / "comments.csv").write_text(f"# written by a program, seed 0\n# two lines\n{rows}")
    table.to_csv(folder / "tabs.csv", index=False, sep="\t")
    table.to_json(folder / "t.jsonl", orient="records", lines=True, double_precision=15)
    table.to_json(folder / "t.json", orient="records", double_precision=15)
    rows = json.loads((folder / "t.json").read_text())
    (folder / "columns.json").write_text(json.dumps({name: [row[name] for row in rows] for name in layout.columns}))
    (folder / "results.json").write_text(json.dumps({"model": "m", "n": [1], "results": rows}))
    beside = {"ids": [str(k) for k in range(len(rows))], "results": rows}  # two lists of equal length
    (folder / "beside.json").write_text(json.dumps(beside))
    for orient in ("columns", "index", "split", "table"):
        table.to_json(folder / f"pandas_{orient}.json", orient=orient, double_precision=15)
    table.to_parquet(folder / "t.parquet")
    yield from sorted(folder.iterdir())


def options_of_command(layout):
    words = {name: value for name, value in layout.given.items() if name in ("preds", "target", "pred")}
    flags = [f"--{name}={value}" for name, value in words.items()]
    flags += [f"--class-names={','.join(names)}"] if (names := layout.given.get("class_names")) else []
    return [*flags, *(["--from-probs"] if layout.given.get("from_logits") is False else [])]


def by_functions(layout):
    """Yield the value of functions and classes, which are given the columns of classes and the targets."""
    how = {"from_logits": layout.from_logits}
    for library, table in frames(layout):
        names = list(layout.classes)
        preds = {name: table[name] for name in names} if library == "dict" else table[names] \
            if library != "arrow" else table.select(names)  # fmt: skip
        target = table[layout.target]
        if "class_names" not in layout.given and not set(layout.columns) & {"prob_max", "prob_fox"}:
            yield f"nll of {library}", lambda preds=preds, target=target: float(tc.nll(preds, target, **how))
        yield (
            f"report of columns of {library}",
            lambda preds=preds, target=target: tc.report(
                preds, target, from_logits=layout.from_logits, class_names=layout.given.get("class_names"), **QUICK
            )["nll"],
        )
    preds, target = pd.DataFrame(layout.columns)[list(layout.classes)], layout.columns[layout.target]

    def updated(metric):
        metric.update(preds, target)
        found = metric.compute()
        return float(found["NLL"] if isinstance(found, dict) else found)

    yield "class", lambda: updated(tc.NLL("multiclass", **how))
    yield "collection", lambda: updated(MetricCollection([tc.NLL("multiclass", **how)]))
    yield "rows", lambda: float(tc.nll(preds.to_dict("records"), target, **how))
    systems = {"a": preds, "b": preds + 0.0}
    yield "comparison", lambda: tc.compare(systems, target, **how, **FEW)["nll"].values["a"]


def asked(layout, folder):
    """Yield the name of each entrance, and a function that returns its value."""
    given = {name: value for name, value in layout.given.items() if name != "preds"}
    if "preds" not in layout.given:
        for library, table in frames(layout):
            yield library, lambda table=table: tc.report(table, **given, **QUICK)["nll"]
    more = options_of_command(layout)
    for path in files(layout, folder):
        command = ("metric", "nll", path, "--json", *more)
        yield f"metric of {path.name}", lambda command=command: json.loads(printed(*command))["value"]
    yield "from_files", lambda: tc.Report.from_files(folder / "t.csv", **layout.given, **QUICK)["nll"]
    command = ("report", folder / "t.parquet", "--json", "--no-calibration", "--no-intervals", *more)
    yield (
        "report command",
        lambda: next(line["value"] for line in json.loads(printed(*command))["lines"] if line["key"] == "nll"),
    )
    if layout.classes:
        yield from by_functions(layout)


@pytest.mark.filterwarnings("ignore:.*percentages")
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["some", "others"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_entrance_gives_the_same_value_or_the_same_error(layout, others, tmp_path):
    """The normal run has a sixth of the entrances, which differs between layouts. The extended run has the others."""
    wrong = {}
    for k, (entrance, ask) in enumerate(asked(layout, tmp_path)):
        if ((k - LAYOUTS.index(layout)) % 6 > 0) != others:
            continue
        if isinstance(layout.right, str):
            try:
                wrong[entrance] = ask()
            except (TypeError, ValueError) as error:
                if not re.search(layout.right, str(error)):
                    wrong[entrance] = str(error)
            continue
        try:
            value = ask()
        except (TypeError, ValueError) as error:
            wrong[entrance] = str(error)
            continue
        if value != pytest.approx(layout.value, rel=1e-6):
            wrong[entrance] = value
    assert not wrong, layout.right if isinstance(layout.right, str) else layout.value
