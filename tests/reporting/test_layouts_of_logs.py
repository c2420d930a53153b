"""The same answers have the same numbers in each layout of a log, or an error with a cause and a remedy.

Small logs that the programs themselves wrote contain what is known about them.
"""

import json
import math
import random

import pandas as pd
import pytest
from conftest import data_folder
from helpers.logs import with_lines_only

from torchcalib import audit
from torchcalib.io.errors import InputError

QUICK = {"with_calibration": False, "with_intervals": False}
N, LETTERS, TEXTS, MISSING = 60, "ABCD", ("red", "blue", "green", "pink"), ("None", "NA", "null", "mild")
_rng = random.Random(3)
PROBS, RIGHT = [], []
for _ in range(N):
    _weights = [_rng.random() ** 2 + 0.05 for _ in LETTERS]
    PROBS.append([each / math.fsum(_weights) for each in _weights])
    RIGHT.append(_rng.choices(range(4), PROBS[-1])[0])
CHOSEN = [p.index(max(p)) for p in PROBS]
ACCURACY = sum(c == y for c, y in zip(CHOSEN, RIGHT, strict=True)) / N
NLL = -math.fsum(math.log(p[y]) for p, y in zip(PROBS, RIGHT, strict=True)) / N
NLL_OF_CHOSEN = -math.fsum(
    math.log(max(p) if c == y else 1 - max(p)) for p, c, y in zip(PROBS, CHOSEN, RIGHT, strict=True)
) / N  # fmt: skip


def rows(of, **more):
    return [{"item_id": k, **of(PROBS[k], RIGHT[k], CHOSEN[k]), **more} for k in range(N)]


def by_probability(names, p):
    """Return probabilities by option, sorted as candidates for a token are."""
    return dict(sorted(zip(names, p, strict=True), key=lambda pair: -pair[1]))


def columns(p, names=LETTERS):
    return dict(zip(names, p, strict=True))


OPTIONS = {
    "objects": rows(lambda p, y, _: {"gold": LETTERS[y], "probs": columns(p)}),
    "sorted objects": rows(lambda p, y, _: {"gold": LETTERS[y], "probs": by_probability(LETTERS, p)}),
    "index of a letter": rows(lambda p, y, _: {"answer": y, "probs": by_probability(LETTERS, p)}),
    "columns": rows(lambda p, y, _: {"target": LETTERS[y], **columns(p)}),
    "permuted columns": rows(lambda p, y, _: {**columns(p[::-1], LETTERS[::-1]), "gold": LETTERS[y]}),
    "answer of the model": rows(lambda p, y, c: {"answer": LETTERS[c], "correct_answer": LETTERS[y], **columns(p)}),
    "misleading prefixes": rows(
        lambda p, y, _: {"prob_id": 7, "p_value": 0.3, "gold": LETTERS[y]} | columns(p, [f"prob_{x}" for x in LETTERS])
    ),
    "MMLU": rows(
        lambda p, y, _: (
            columns(["10", "20", "30", "40"])
            | {"answer": LETTERS[y]}
            | columns(p, [f"gpt_choice{x}_probs" for x in LETTERS])
        )
    ),
    "names of options": rows(lambda p, y, _: {"label": TEXTS[y], **columns(p, TEXTS)}),
    "numbers as names": rows(lambda p, y, _: {"label": y + 3, **columns(p, [f"prob_{k + 3}" for k in range(4)])}),
    "numbers in names": rows(lambda p, y, _: {"label": y + 1, **columns(p, [f"prob_class_{k + 1}" for k in range(4)])}),
    "negative numbers": rows(lambda p, y, _: {"label": y - 2, **columns(p, [f"prob_{k - 2}" for k in range(4)])}),
    "derived columns": rows(
        lambda p, y, _: {"label": TEXTS[y], "prob_max": max(p), **columns(p, [f"prob_{x}" for x in TEXTS])}
    ),
    "log-probabilities": rows(lambda p, y, _: {"gold": LETTERS[y], "logprobs": columns([math.log(q) for q in p])}),
    "lists": rows(lambda p, y, _: {"gold": TEXTS[y], "choices": list(TEXTS), "probs": p}),
    "text after the options": rows(lambda p, y, _: {"label": TEXTS[y], **columns(p, [f"{x}_prob" for x in TEXTS])}),
    "words for missing values": rows(
        lambda p, y, _: {"label": MISSING[y], **columns(p, [f"prob_{x}" for x in MISSING])}
    ),
    "lists of objects": rows(
        lambda p, y, _: {"gold": TEXTS[y], "probs": [{"label": x, "prob": q} for x, q in zip(TEXTS, p, strict=True)]}
    ),
    "text": rows(lambda p, y, _: {"gold": LETTERS[y], "probs": json.dumps(p)}),
    "camel case": rows(lambda p, y, _: {"correctAnswer": LETTERS[y], "probs": columns(p)}),
    "capitals and spaces": rows(lambda p, y, _: {"True Label": LETTERS[y], "label": "A", "probs": columns(p)}),
    "pipelines of Hugging Face": rows(
        lambda p, y, _: {
            "label": TEXTS[y],
            "scores": [{"label": x, "score": q} for x, q in by_probability(TEXTS, p).items()],
        }
    ),
    "pipelines as text": rows(
        lambda p, y, _: {
            "label": TEXTS[y],
            "prediction": str([{"label": x, "score": q} for x, q in by_probability(TEXTS, p).items()]),
        }
    ),
}
CONFIDENCES = {
    "outcomes": rows(lambda p, y, c: {"confidence": max(p), "correct": c == y}),
    "texts": rows(lambda p, y, c: {"confidence": str(max(p)), "is_correct": "yes" if c == y else "no"}),
    "percent": rows(lambda p, y, c: {"confidence": f"{100 * max(p)}%", "correct": int(c == y)}),
    "two answers": rows(lambda p, y, c: {"answer": TEXTS[y], "predicted_answer": TEXTS[c], "confidence": max(p)}),
    "letter and index": rows(lambda p, y, c: {"gold": y, "prediction": LETTERS[c], "confidence": max(p)}),
    "a letter as correct": rows(lambda p, y, c: {"correct": LETTERS[y], "answer": LETTERS[c], "confidence": max(p)}),
    "verbalised": rows(lambda p, y, c: {"verbalized_confidence": max(p), "grade": "C" if c == y else "I"}),
    "number of a problem": rows(lambda p, y, c: {"prob_id": 3, "confidence": max(p), "correct": c == y}),
    "abstentions": rows(
        lambda p, y, c: {"gold": TEXTS[y], "pred": TEXTS[c] if c == y else "I don't know", "confidence": max(p)}
    ),
}


def entrances(found, folder):
    """Yield the same rows in memory and in files."""
    yield found
    yield pd.DataFrame(found)
    for name, content in (("a.json", found), ("b.json", {"results": found})):
        (folder / name).write_text(json.dumps(content))
        yield folder / name
    pd.DataFrame(found).to_json(folder / "c.json", double_precision=15)
    yield folder / "c.json"
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    yield folder / "a.jsonl"
    if not any(isinstance(value, list | dict) for value in found[0].values()):
        pd.DataFrame(found).to_csv(folder / "a.csv", index=False)
        yield folder / "a.csv"
        text = pd.DataFrame(found).to_csv(index=False, sep=";", decimal=",")
        (folder / "b.csv").write_text(f"# model: small, seed: 1\n{text}")
        yield folder / "b.csv"
        pd.DataFrame(found).to_parquet(folder / "a.parquet")
        yield folder / "a.parquet"


LAYOUTS = [("probabilities", NLL, each) for each in OPTIONS.values()]
LAYOUTS += [("reported", NLL_OF_CHOSEN, each) for each in CONFIDENCES.values()]


@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.extended)], ids=["half", "all"])
@pytest.mark.parametrize("k", range(len(LAYOUTS)), ids=[*OPTIONS, *CONFIDENCES])
def test_each_layout_has_the_same_numbers_through_each_entrance(k, step, tmp_path, monkeypatch):
    """The normal run has half of the entrances, which differ between layouts."""
    with_lines_only(monkeypatch)
    key, nll, layout = LAYOUTS[k]
    for log in [*entrances(layout, tmp_path)][k % step :: step]:
        found = audit(log, **QUICK)
        assert (found.n_answers, found.n_documents) == (N, N)
        assert found[key].value("nll") == pytest.approx(nll, rel=1e-9)
        assert found[key].frequency == pytest.approx(ACCURACY, rel=1e-12)


def test_options_name_fields_that_no_list_knows():
    layout = [{f"field {k}": value for k, value in enumerate(row.values())} for row in CONFIDENCES["two answers"]]
    with pytest.raises(InputError, match=r"target='NAME'.* got an object with the keys `field 0`, `field 1`"):
        audit(layout)
    found = audit(layout, target="field 1", pred="field 2", confidence="field 3", id="field 0", **QUICK)
    assert found["reported"].value("accuracy") == pytest.approx(ACCURACY, rel=1e-12)
    assert "(field `field 3`)" in found.sentence
    assert found.fields["right answer"] == "`field 1`"


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        (rows(lambda p, _, c: {"answer": LETTERS[c], **columns(p)}), "`answer` in .* got the most probable option in"),
        (
            rows(lambda p, y, _: {"answer": y, "probs": by_probability(TEXTS, p)}),
            "options in another order than before",
        ),
        (rows(lambda p, y, _: {"answer": y + 1, "probs": columns(p)}), r"from 0 to 3 \(0 for A\), got 4 in row"),
        (rows(lambda p, *_: {"probs": columns(p)}), "right answer .*target='NAME'"),
        (
            rows(lambda p, _, c: {"gold": LETTERS[c], "probs": columns(p)}),
            "`gold` in .* got the most probable option in",
        ),
        (
            rows(lambda p, _, c: {"gold": TEXTS[c], "pred": TEXTS[c], "confidence": max(p)}),
            "`gold` in .* got the answer of the model in all 60 rows",
        ),
        (
            rows(lambda p, *_: {"gold": "violet", "probs": columns(p, TEXTS)}),
            "none in 60 rows: the first is 'violet', and its options are `red`, `blue`, `green`, `pink`",
        ),
    ],
)
def test_misleading_layouts_raise_errors(layout, error):
    with pytest.raises(InputError, match=error):
        audit(layout, **QUICK)


def test_numbers_are_outcomes_of_columns_and_indices_of_choices(monkeypatch):
    with_lines_only(monkeypatch)
    layout = rows(lambda p, y, _: {"gold": int(y > 1), "prob_yes": p[0], "prob_no": 1 - p[0]})
    listed = [
        {"gold": 1 - row["gold"], "choices": ["yes", "no"], "probs": [row["prob_yes"], row["prob_no"]]}
        for row in layout
    ]
    nll = -math.fsum(math.log(row["prob_yes"] if row["gold"] else row["prob_no"]) for row in layout) / N
    for log in (layout, listed):
        assert audit(log, **QUICK)["probabilities"].value("nll") == pytest.approx(nll, rel=1e-9)


def test_a_letter_without_a_probability_does_not_change_the_others():
    layout = rows(lambda p, y, _: {"gold": y, "probs": {x: q for x, q in zip("ABCD", p, strict=True) if x != "B"}})
    found = audit(layout, **QUICK)
    assert found.counts["right option without a probability"] == RIGHT.count(1)
    kept = [(p, y) for p, y in zip(PROBS, RIGHT, strict=True) if y != 1]
    nll = -math.fsum(math.log(p[y] / (1 - p[1])) for p, y in kept) / len(kept)
    assert found["probabilities"].value("nll") == pytest.approx(nll, rel=1e-9)


def test_questions_are_named_by_data_set_and_systems_are_reported_apart(tmp_path):
    base = CONFIDENCES["outcomes"]
    sets = [{**row, "item_id": k % 30, "ds_name": "ab"[k // 30]} for k, row in enumerate(base)]
    found = audit(sets, **QUICK)
    assert (found.n_documents, "frequency" in found) == (N, False)
    systems = [{**row, "item_id": k % 30, "model_id": ("small", "large")[k // 30]} for k, row in enumerate(base)]
    pooled = audit(systems, **QUICK)
    assert (dict(pooled.pooled), "frequency" in pooled) == ({"model_id": 2}, False)
    assert "Pass by='model_id'" in pooled.notes[0]
    apart = audit(systems, by="model_id", **QUICK)
    for name, part in (("small", base[:30]), ("large", base[30:])):
        assert apart[name]["reported"].value("ece") == audit(part, **QUICK)["reported"].value("ece")
    apart.save(tmp_path / "by.html")
    assert "model_id: small" in (tmp_path / "by.html").read_text()
    written = {path.relative_to(tmp_path / "out").as_posix() for path in apart.save(tmp_path / "out")}
    assert {"audit.html", "audit.json", "part_1/audit.html", "part_2/audit.json"} <= written
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert (found["by"], list(found["audits"])) == ("model_id", ["small", "large"])
    assert json.loads((tmp_path / "out" / "part_1" / "audit.json").read_text()) == found["audits"]["small"]
    with pytest.raises(KeyError, match="`key` must be one of `small`, `large`, got 'other'"):
        apart["other"]


def test_right_answers_may_be_in_a_second_file(tmp_path):
    layout = [{"item_id": row["item_id"], "probs": row["probs"]} for row in OPTIONS["objects"]]
    golds = pd.DataFrame({"item_id": range(N), "gold": [LETTERS[y] for y in RIGHT]}).sample(frac=1, random_state=0)
    golds.to_csv(tmp_path / "gold.csv", index=False)
    found = audit(layout, gold=tmp_path / "gold.csv", **QUICK)
    assert found["probabilities"].value("nll") == pytest.approx(NLL, rel=1e-9)
    assert found.fields["right answer"] == "second file, by `item_id`"


CASES = {
    "answer_of_model.csv": (220, 0.55, 1.036433, 0.5644, 0.079247),
    "index_gold.jsonl": (200, 0.515, 1.145625, 0.614437, 0.120891),
    "two_data_sets.csv": (110, 0.736364, 0.588736, 0.191727, 0.120909),
    "prob_id.csv": (90, 0.488889, 0.495726, 0.169429, 0.077233),
    "predicted_answer.csv": (160, 0.70625, 0.531071, 0.179922, 0.088438),
    "array.json": (80, 0.4875, 0.601974, 0.208336, 0.157438),
    "task-000-colours-predictions.jsonl": (90, 0.611111, 0.972937, 0.52658, 0.125516),
    "inspect_letters.json": (24, 0.583333, 0.969113, 0.548004, 0.118759),
    "label_objects.jsonl": (150, 0.68, 0.713584, 0.421466, 0.053088),
    "quoted_lines.csv.gz": (9000, 0.438111, 0.490665, 0.162822, 0.063909),
    "automl_predictions.csv": (180, 0.727778, 0.671751, 0.381376, 0.073041),
    "decimal_comma.csv": (160, 0.70625, 0.65905, 0.388465, 0.094033),
}


@pytest.mark.skipif(not (data_folder() / "cases").is_dir(), reason="recorded cases need TORCHCALIB_DATA")
@pytest.mark.parametrize("name", CASES)
def test_recorded_cases_have_their_values(name):
    found = audit(data_folder() / "cases" / name, **QUICK)
    first = next(iter(found.values()))
    n, *expected = CASES[name]
    assert found.n_documents == n
    assert [first.value(key) for key in ("accuracy", "nll", "brier", "ece")] == pytest.approx(expected, abs=1e-6)


# Small logs that the programs themselves wrote

has_logs = pytest.mark.skipif(not (data_folder() / "logs").is_dir(), reason="recorded logs need TORCHCALIB_DATA")


def of_program(name):
    return audit(data_folder() / "logs" / name, **QUICK)


@has_logs
def test_logs_without_a_confidence_have_their_number_of_answers():
    for name, line in (
        ("lm_eval", "lm-eval samples: 10 answers to 10 questions"),
        ("inspect/data_arc_qwen.json", "Inspect log: 3 answers to 3 questions"),
        ("inspect/data_pubmedqa_gpt4o_mini.json", "Inspect log: 2 answers to 2 questions"),
        ("inspect/log_read_sample.eval", "Inspect log: 1 answers to 1 questions"),
    ):
        found = of_program(name)
        assert (found.input_line, list(found)) == (line, [])
        assert "contains no confidence" in found.notes[0]
    with pytest.raises(InputError, match="sample without a score: 10"):
        of_program("inspect/2025-02-11T15-17-00-05-00_popularity_dPiJifoWeEQBrfWsAopzWr.eval")


@has_logs
def test_log_probabilities_of_0_in_helm_are_degenerate():
    found = of_program("helm")
    assert found.input_line == "HELM run: 10 answers to 10 questions"
    assert list(found) == ["raw", "per_token", "first_token"]
    assert all("every probability is 1" in each.marks[0] and each.report is None for each in found.values())


# Details of LightEval in both layouts, and generated answers of OLMES, as these programs write them

SHIFTS = (-1.0, -2.0, -1.5, -3.0)  # log-probabilities of the options without the question
SHIFTED = [[math.log(q) - shift for q, shift in zip(p, SHIFTS, strict=True)] for p in PROBS]
NLL_OF_SHIFTED = math.fsum(
    math.log(math.fsum(map(math.exp, row))) - row[y] for row, y in zip(SHIFTED, RIGHT, strict=True)
) / N  # fmt: skip


def flat_details(p, y, c):
    scores = [[math.log(q), float(q == max(p))] for q in p]
    return {"example": "?", "predictions": scores, "gold_index": y, "choices": list(TEXTS), "acc": float(c == y)}


def details(p, y, c, k):
    doc = {"id": str(k), "query": "?", "task_name": "colours", "choices": list(TEXTS), "gold_index": [y]}
    response = {"logprobs": [math.log(q) for q in p], "unconditioned_logprobs": list(SHIFTS), "text": []}
    return {"doc": doc, "model_response": response, "metric": {"acc": int(c == y)}}


def generated(p, y, c, k):
    doc = {"id": str(k), "query": "?", "task_name": "colours", "choices": [TEXTS[y]], "gold_index": [0]}
    response = {"text": [f"Answer: {TEXTS[c]}. Confidence: {max(p)!r}"], "logprobs": None}
    return {"doc": doc, "model_response": response, "metric": {"exact_match": int(c == y)}}


def numbered(of):
    return [of(*row, k) for k, row in enumerate(zip(PROBS, RIGHT, CHOSEN, strict=True))]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (rows(flat_details), {"choices": NLL}),
        (numbered(details), {"choices": NLL, "choices_unconditional": NLL_OF_SHIFTED}),
        (numbered(generated), {"stated": NLL_OF_CHOSEN}),
    ],
    ids=["flat", "with documents", "generated"],
)
def test_details_of_lighteval_have_the_same_numbers_as_objects_and_in_parquet(log, expected, tmp_path):
    path = tmp_path / "details_colours.parquet"
    pd.DataFrame(log).to_parquet(path)
    for given in (log, path):
        found = audit(given, **QUICK)
        assert (found.n_answers, found.n_documents) == (N, N)
        assert {key: found[key].value("nll") for key in expected} == pytest.approx(expected, rel=1e-9)
        first = found[next(iter(expected))]
        assert first.frequency == pytest.approx(ACCURACY, rel=1e-12)


def test_generated_answers_of_olmes_have_the_probability_of_their_tokens():
    n_tokens = [2 + k % 3 for k in range(N)]
    log = [
        {
            "doc_id": k,
            "native_id": f"q{k}",
            "model_output": [{"continuation": TEXTS[c], "sum_logits": math.log(max(p)), "num_tokens": n_tokens[k]}],
            "metrics": {"exact_match": float(c == y)},
        }
        for k, (p, y, c) in enumerate(zip(PROBS, RIGHT, CHOSEN, strict=True))
    ]
    found = audit(log, **QUICK)
    assert found["raw"].value("nll") == pytest.approx(NLL_OF_CHOSEN, rel=1e-9)
    by_token = [max(p) ** (1 / n) for p, n in zip(PROBS, n_tokens, strict=True)]
    losses = [-math.log(q if c == y else 1 - q) for q, c, y in zip(by_token, CHOSEN, RIGHT, strict=True)]
    assert found["per_token"].value("nll") == pytest.approx(math.fsum(losses) / N, rel=1e-9)
    assert found["per_token"].frequency == pytest.approx(ACCURACY, rel=1e-12)
