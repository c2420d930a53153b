"""Logs of language models are read as their programs write them, and damaged ones raise errors."""

import gzip
import json
import math
import random
import zipfile
from functools import reduce

import pytest
from helpers.logs import (
    helm_request,
    inspect_sample,
    lm_eval_row,
    questions,
    response_row,
    write_eval,
    write_lines,
)

from torchcalib.io.errors import InputError
from torchcalib.io.logs import open_log
from torchcalib.io.logs.answers import correctness, option_index
from torchcalib.io.logs.blocks import only
from torchcalib.io.logs.objects import lines_of
from torchcalib.io.logs.stated import Scale, stated_by, stated_in


def answers_of(path, chosen=None):
    return list(open_log(path, chosen).answers())


@pytest.mark.parametrize("value", [b"[],", b"{},", b"0,", b'{"a":1},'])
def test_objects_that_need_much_memory_are_refused_before_they_are_parsed(tmp_path, value, monkeypatch):
    monkeypatch.setattr("torchcalib.io.logs.objects._MAX_MEMORY", 2**20)
    monkeypatch.setattr("torchcalib.io.logs.objects.loads", lambda _: pytest.fail("must not be parsed"))
    text = b"[" + value * (2**20 // len(value)) + b"0]"
    (tmp_path / "a.json").write_bytes(text)
    with zipfile.ZipFile(tmp_path / "a.eval", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", text)
    for name, label in (("a.json", "a.json"), ("a.eval", "a.eval/header.json")):
        with pytest.raises(InputError, match=rf"{label}` must need at most 5,242,8\d\d bytes of memory, for 1,048"):
            open_log(tmp_path / name)


def test_blank_lines_are_skipped_and_counted(tmp_path):
    """The second line ends a read, and the last lines follow a mebibyte of blank ones."""
    row = b'{"id": "%d", "confidence": 0.5, "correct": 1}'
    content = b"\n \n" + row % 0 + b"\n" * 2**20 + b" " + row % 1 + b"\r\n\n" + row % 2 + b"\n" + b'{"id": 7,\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    groups = list(lines_of(tmp_path / "a.jsonl.gz", 9))
    assert [place for group in groups for place in group.places] == [3, 2**20 + 3, 2**20 + 5, 2**20 + 6]
    assert [number for group in groups for number in group.numbers] == [1, 2, 3, 4]
    assert b"".join(line for group in groups for line in group.content).count(b'"id"') == 4


# lm-eval


@pytest.mark.parametrize("packed", [False, True])
def test_options_of_lm_eval_have_the_lengths_of_their_texts(tmp_path, packed):
    asked = questions(20)
    path = write_lines(tmp_path / "samples_a.jsonl", (lm_eval_row(k, *each) for k, each in enumerate(asked)))
    if packed:
        (tmp_path / "samples_a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = tmp_path / "samples_a.jsonl.gz"
    for answer, (texts, scores, right) in zip(answers_of(path), asked, strict=True):
        assert answer.right == (right,)
        assert answer.log_probs["choices"] == scores
        characters = [score / len(text) for score, text in zip(scores, texts, strict=True)]
        assert answer.log_probs["choices_per_character"] == characters
        assert answer.log_probs["choices_per_byte"] == [s / len(t.encode()) for s, t in zip(scores, texts, strict=True)]


@pytest.mark.parametrize(
    ("texts", "target", "acc", "right"),
    [
        (["yes", "no"], "1", 0.0, (1,)),
        (["yes", "no"], "no", 0.0, (1,)),
        (["red", "blue", "green"], "C", 0.0, (2,)),
        (["A", "B", "C"], "B", 0.0, (1,)),
        (["red", "blue"], "['blue', 'red']", 1.0, (1, 0)),
        (["red", "blue"], "[0, 1]", 1.0, (0, 1)),
        (["it's", "blue"], '["it\'s"]', 1.0, (0,)),
        # The option 0 has the greatest likelihood, and the target is an index, or the text of another option.
        (["3", "0", "1"], "0", 1.0, (0,)),
        (["3", "0", "1"], "0", 0.0, (1,)),
        (["red", "blue"], "7", math.nan, ()),
    ],
)
def test_targets_of_lm_eval_are_indices_texts_letters_or_lists(tmp_path, texts, target, acc, right):
    row = lm_eval_row(0, texts, [-1.0, *[-2.0] * (len(texts) - 1)], 0, target=target, acc=acc)
    (answer,) = answers_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert answer.right == right


def test_each_filter_of_lm_eval_is_read_alone(tmp_path):
    asked = questions(3)
    rows = [lm_eval_row(k, *each, filter=name) for k, each in enumerate(asked) for name in ("strict", "flexible")]
    path = write_lines(tmp_path / "a.jsonl", rows)
    log = open_log(path)
    assert len(list(log.answers())) == 3
    assert list(log.alternatives) == ["strict", "flexible"]
    assert len(answers_of(path, "flexible")) == 3


def test_requests_without_a_question_are_left_out(tmp_path):
    texts, scores, right = questions(1)[0]
    row = lm_eval_row(0, [*texts, *texts], [*scores, *[-0.1] * len(texts)], right)
    for k in range(len(texts), 2 * len(texts)):
        row["arguments"][f"gen_args_{k}"]["arg_0"] = ""
    (answer,) = answers_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert answer.log_probs["choices"] == scores


def test_a_single_continuation_has_the_likelihood_of_the_truth_only(tmp_path):
    row = lm_eval_row(0, ["word"], [-2.5], 0)
    (answer,) = answers_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert (answer.truth, answer.log_probs) == (-2.5, {})


def test_generations_may_state_a_confidence(tmp_path):
    changes = {"arguments": {"gen_args_0": {"arg_0": "q", "arg_1": {"until": []}}}, "exact_match": 1.0}
    rows = [lm_eval_row(0, ["x"], [0.0], 0, resps=[["The answer is 4. Confidence: 85%"]], **changes)]
    rows.append(lm_eval_row(1, ["x"], [0.0], 0, resps=[[["four", "-0.5"]]], **changes))
    first, second = answers_of(write_lines(tmp_path / "a.jsonl", rows))
    assert (first.correct, first.stated) == (1.0, {"stated": (85, True)})
    assert second.confidences == {"raw": math.exp(-0.5)}


# Inspect


@pytest.mark.parametrize("zstd", [False, True])
def test_samples_of_inspect_with_epochs_and_confidences(tmp_path, zstd):
    samples = [
        inspect_sample("q1", 1, "C", {"confidence": 0.7}),
        inspect_sample("q1", 2, "I", {"confidence": 0.6}),
        inspect_sample("q2", 1, "P", {"option_probs": {"A": 0.25, "B": 0.75}}),
        inspect_sample("q3", 1, scores={}),
    ]
    log = open_log(write_eval(tmp_path / "log.eval", samples, zstd))
    found = list(log.answers())
    assert [(a.document, a.sample, a.stated) for a in found[:2]] == [
        ("q1", 1, {"reported": (0.7, False)}),
        ("q1", 2, {"reported": (0.6, False)}),
    ]
    assert [a.correct for a in found[:2]] == [1.0, 0.0]
    assert math.isnan(found[2].correct)
    assert (found[2].probs, found[2].right) == ({"probabilities": [0.25, 0.75]}, (0,))
    assert log.counts["sample without a score"] == 1


def test_letters_of_inspect_are_read_from_the_candidates_of_the_first_token(tmp_path):
    candidates = [{"token": t, "logprob": math.log(p)} for t, p in (("A", 0.5), (" A", 0.1), ("B", 0.3), ("x", 0.1))]
    tokens = [{"token": "A", "logprob": math.log(0.5), "top_logprobs": candidates}, {"token": "\n", "logprob": -0.25}]
    output = {"choices": [{"message": {"content": [{"text": "A"}]}, "logprobs": {"content": tokens}}]}
    sample = inspect_sample("q", 1, output=output, choices=["red", "blue"], target=["A"])
    (answer,) = answers_of(write_eval(tmp_path / "log.eval", [sample]))
    assert answer.probs["option_letters"] == pytest.approx([2 / 3, 1 / 3], rel=1e-12)
    expected = {"raw": 0.5 * math.exp(-0.25), "per_token": math.sqrt(0.5 * math.exp(-0.25)), "first_token": 0.5}
    assert answer.confidences == pytest.approx(expected, rel=1e-12)
    assert (answer.right, answer.text) == ((0,), "A")


def test_a_json_log_of_inspect_has_the_same_answers(tmp_path):
    samples = [inspect_sample("q1", 1, "C", {"risk_score": 0.7})]
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"version": 2, "status": "success", "eval": {}, "samples": samples}))
    assert answers_of(path) == answers_of(write_eval(tmp_path / "log.eval", samples))


# HELM


def test_a_run_of_helm_with_and_without_statistics(tmp_path):
    requests = [
        helm_request("id1", " B", -0.5),
        helm_request("id2", " A", -0.25),
        helm_request("id3", " A", -0.25, instance={"id": "id3", "references": [], "perturbation": {"name": "typos"}}),
    ]
    (tmp_path / "scenario_state.json").write_text(json.dumps({"adapter_spec": {}, "request_states": requests}))
    log = open_log(tmp_path)
    found = list(log.answers())
    assert [(a.document, a.correct, a.confidences["raw"]) for a in found] == [
        ("id1", 1.0, math.exp(-0.5)),
        ("id2", 0.0, math.exp(-0.25)),
    ]
    assert log.counts["instance with a perturbation"] == 1
    stats = [{"instance_id": "id2", "train_trial_index": 0, "stats": [{"name": {"name": "exact_match"}, "mean": 1.0}]}]
    (tmp_path / "per_instance_stats.json").write_text(json.dumps(stats))
    assert [a.correct for a in answers_of(tmp_path / "scenario_state.json")] == [1.0, 1.0]


def test_options_of_helm_may_be_separate_requests(tmp_path):
    requests = [
        helm_request("id1", "", p, reference_index=k, request_mode="original") for k, p in ((1, -2.0), (0, -1.0))
    ]
    (tmp_path / "scenario_state.json").write_text(json.dumps({"adapter_spec": {}, "request_states": requests}))
    (answer,) = answers_of(tmp_path)
    assert (answer.log_probs["choices"], answer.right) == ([-1.0, -2.0], (1,))


# Lines with one answer each


def test_responses_of_both_interfaces_agree(tmp_path):
    tokens = [("yes", -0.5, {"yes": -0.5, "no": -1.5}), (".", -0.1, {})]
    newer = response_row(1, "yes.", tokens, gold="yes", options=["yes", "no"])
    logged = {"token_logprobs": [-0.5, -0.1], "top_logprobs": [{"yes": -0.5, "no": -1.5}, None]}
    older = {"id": "request-1", "gold": "yes", "options": ["yes", "no"]}
    older["choices"] = [{"text": "yes.", "logprobs": logged}]
    found = [answers_of(write_lines(tmp_path / f"{k}.jsonl", [row])) for k, row in enumerate((newer, older))]
    assert found[0] == found[1]
    (answer,) = found[0]
    share = 1 / (1 + math.exp(-1))
    assert answer.probs["first_token_options"] == pytest.approx([share, 1 - share], rel=1e-12)
    assert (answer.correct, answer.right) == (1.0, (0,))


def test_probabilities_by_option_are_mappings_or_lists(tmp_path):
    mapping = {"item_id": 1, "gold": "no", "pred": "yes", "probs": {"yes": 0.75, "no": 0.25}, "confidence": 0.7}
    listed = {**mapping, "probs": [{"value": "yes", "probability": 0.75}, {"value": "no", "probability": 0.25}]}
    found = [answers_of(write_lines(tmp_path / f"{k}.jsonl", [row])) for k, row in enumerate((mapping, listed))]
    assert found[0] == found[1]
    (answer,) = found[0]
    assert (answer.probs, answer.right) == ({"probabilities": [0.75, 0.25]}, (1,))
    assert (answer.correct, answer.stated) == (0.0, {"reported": (0.7, False)})


def test_the_right_option_may_be_an_index(tmp_path):
    rows = [{"gold": gold, "probs": {"red": 0.75, "blue": 0.25}} for gold in (1, "blue", "pink")]
    found = answers_of(write_lines(tmp_path / "a.jsonl", rows))
    assert [answer.right for answer in found] == [(1,), (1,), ()]


# Values


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("Answer: 4\nConfidence: 85%", (85, True)),
        ("confidence = 0.7", (0.7, False)),
        ("My confidence is 90 percent", (90, True)),
        ("I am 60% sure", (60, True)),
        ("Confidence: 20%. No, confidence: 95%", (95, True)),
        ("Confidence: 100", (100, False)),
        ("Confidence: .5", (0.5, False)),
        ("Confidence (0-100): 85", (85, False)),
        ("**Probability:** 0.7", (0.7, False)),
        ("The probability of 12 heads is 0.3", None),
        ("A 95% confidence interval: 95% of samples", None),
        ("Confidence: 0,85", None),
        ("Confidence: 80-90%", None),
        ("1" * 2**20, None),
        ("Confidence: 8/10", None),
        ("Confidence: 8 out of 10", None),
        ("Confidence: 250%", None),
        ("Confidence: high", None),
        ("The confidence interval of 2019 data", None),
        ("The answer is 42", None),
    ],
)
def test_stated_confidences(text, stated):
    assert stated_in(text) == stated


@pytest.mark.parametrize(
    ("texts", "chosen", "expected"),
    [
        (["85", "0", "100"], None, [0.85, 0, 1]),
        (["85", "1", "90%"], None, [0.85, 0.01, 0.9]),
        (["0.85", "1", "0"], None, [0.85, 1, 0]),
        (["0.85", "85%"], None, [0.85, 0.85]),
        (["85%", "0%"], None, [0.85, 0]),
        (["8", "10", "3"], None, "scale may be 0 to 10"),
        (["8", "10", "3"], "percent", [0.08, 0.1, 0.03]),
        (["1", "0", "1"], None, "may be 100% or 1%"),
        (["1", "0", "1"], "fraction", [1, 0, 1]),
        (["90%", "1"], None, "may be 100% or 1%"),
        (["0.5", "85"], None, "others are as large as 85"),
        (["0.5", "85"], "percent", [0.005, 0.85]),
        (["85"], "fraction", "contains the confidence 85"),
    ],
)
def test_the_scale_of_numbers_follows_from_all_of_them(texts, chosen, expected):
    stated = [stated_by(text, {}) for text in texts]
    scale = reduce(Scale.including, stated, Scale(chosen))
    assert reduce(Scale.including, reversed(stated), Scale(chosen)) == scale
    if isinstance(expected, str):
        assert (scale.name, expected in scale.problem) == (None, True)
    else:
        assert not scale.problem
        assert [scale.fraction(each) for each in stated] == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("C", 1), ("I", 0), ("N", 0), (True, 1), (0, 0), ("1.0", 1), ("P", None), (0.5, None)],
)
def test_correctness(value, expected):
    found = correctness(value)
    assert math.isnan(found) if expected is None else found == expected


def test_an_option_is_named_by_its_text_before_its_letter():
    assert option_index("B", ["B", "A"]) == 0
    assert option_index("B", ["red", "blue"]) == 1
    assert option_index("green", ["red", "blue"]) is None
    assert option_index("ß", ["red", "blue"]) is None  # two letters in upper case


# Columns of many answers


def decision_row(number, rng):
    """Return an answer with 2 to 5 options. One of 15 rows has another form than most."""
    names = rng.choice([list("ABCDE"), [f"{rng.choice(['red', 'blue', '7'])} {k}" for k in range(5)]])
    names = names[: rng.randint(2, 5)]
    drawn = [rng.random() + 0.1 for _ in names]
    probs = {name: p / sum(drawn) for name, p in zip(names, drawn, strict=True)}
    gold = rng.choice([*names, "B", 1, True, "unknown"])
    row = {
        "item_id": number,
        "gold": gold,
        "pred": max(probs, key=probs.get),
        "probs": probs,
        "confidence": drawn[0] / 2,
    }
    unusual = [{"confidence": "85%"}, {"confidence": None}, {"gold": None}, {"probs": None}, {"correct": 0.5}]
    unusual += [{"valid": False}, {"text": "Confidence: 70"}, {"item_id": None}, {"probs": {**probs, "z": "0.0"}}]
    unusual += [{"probs": [{"value": name, "probability": p} for name, p in probs.items()], "confidence": 1}]
    return row | (rng.choice(unusual) if rng.random() < 1 / 15 else {})


def choice_row(number, rng):
    """Return a sample of lm-eval with 2 to 5 options. One of 15 rows has another form than most."""
    ((texts, scores, right),) = questions(1, number)
    row = lm_eval_row(number, texts, scores, right, filter="ab"[rng.random() < 0.1])
    unusual = [{"target": "C"}, {"target": texts[0]}, {"target": "9"}, {"target": [0, 1]}, {"acc": 0.5}, {"acc": None}]
    unusual += [{"filtered_resps": [["-1.5", "False"]] * len(texts)}, {"filtered_resps": None}]
    unusual += [{"filtered_resps": [["-inf", "False"], *row["filtered_resps"][1:]]}]
    unusual += [{"arguments": [["q", f"  {text} "] for text in texts]}, {"acc": 1 - row["acc"]}]
    return row | (rng.choice(unusual) if rng.random() < 1 / 15 else {})


def numbers_of(answer):
    scores = {
        **answer.log_probs,
        **answer.probs,
        **{name: tuple(map(float, each)) for name, each in answer.stated.items()},
    }
    found = {f"{name} {k}": value for name, each in scores.items() for k, value in enumerate(each)}
    return found | {"correct": answer.correct, "right": int(only(answer.right))}


def numbers_in(block):
    """Return the numbers of each answer of a block, with the names of `numbers_of`."""
    found = [{"correct": correct, "right": right} for correct, right in zip(block.correct, block.right, strict=True)]
    for name, scores in block.scores.items():
        values = iter(scores.values)
        for row, size in zip(scores.rows, scores.sizes, strict=True):
            found[row] |= {f"{name} {k}": next(values) for k in range(size)}
    for name, stated in block.stated.items():
        for row, value, sign in zip(*stated, strict=True):
            found[row] |= {f"{name} 0": value, f"{name} 1": sign}
    return found


@pytest.mark.parametrize("row_of", [decision_row, choice_row])
def test_columns_of_many_rows_have_the_answers_of_single_rows(tmp_path, monkeypatch, row_of):
    rng = random.Random(0)
    path = write_lines(tmp_path / "a.jsonl", [row_of(k, rng) for k in range(400)])
    path.write_text(f"\n{path.read_text()}")  # blank lines have a number, too
    log = open_log(path)
    expected, counts = list(log.answers()), dict(log.counts)
    single, answers_of = [], type(log).answers_of
    monkeypatch.setattr(type(log), "answers_of", lambda log, *row: single.append(row) or answers_of(log, *row))
    blocks = list(log.blocks(8, with_texts=True))
    assert log.counts == counts
    assert [name for block in blocks for name in block.documents] == [answer.document for answer in expected]
    for found, answer in zip((each for block in blocks for each in numbers_in(block)), expected, strict=True):
        assert found == pytest.approx(numbers_of(answer), rel=1e-12, nan_ok=True)
    texts = [block.texts.get(k) for block in blocks for k in range(len(block))]
    assert texts == [answer.text if answer.short is None else answer.short for answer in expected]
    assert all(place == f"line {number + 1}" for _, number, place in single)
    assert 40 <= len(single) < 300  # groups of 8 rows, of which some have the most frequent form
    assert len(counts) >= 2


def test_answers_without_probabilities_are_counted_in_columns_too(tmp_path):
    rows = [{"item_id": 0, "gold": "a", "probs": {"a": 0.75, "b": 0.25}, "confidence": 0.75}]
    rows += [{"item_id": k, "gold": "a", "probs": None, "confidence": 0.5} for k in range(1, 30)]
    log = open_log(write_lines(tmp_path / "a.jsonl", rows))
    assert sum(map(len, log.blocks(8))) == 30
    assert log.counts["answer without probabilities"] == 29


# Damaged and misleading logs

ROW = lm_eval_row(0, ["a", "b"], [-1.0, -2.0], 0)
RESPONSE = {"gold": "a", "options": ["a", "b"]}
RESPONSE["choices"] = [{"text": "a", "logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"a": 0.75, "b": 0.2}]}}]
PROBS = {"item_id": 1, "gold": "a", "probs": {"a": 0.75, "b": 0.25}}


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([{**ROW, "filtered_resps": [["0.75", "True"], ["0.25", "False"]]}], "log-probabilities, which are at most 0"),
        ([{**ROW, "filtered_resps": [["nan", "True"], ["-1", "False"]]}], "got 'nan' in line 1"),
        ([{**ROW, "filtered_resps": [[None, "True"], ["-1", "False"]]}], "got None in line 1"),
        ([{**ROW, "filtered_resps": [["-1", "True"]]}], "response for each request, got 1 of 2"),
        ([{**ROW, "arguments": {}}], "at least one request, got none"),
        ([ROW, [1, 2]], "line 2 must contain an object, got list"),
        ([{**PROBS, "probs": {"a": 75, "b": 25}}], r"probabilities in \[0, 1\], got 75 in line 1. Divide percentages"),
        ([{**PROBS, "probs": {"a": "high", "b": 0.1}}], "got 'high' in line 1"),
        (
            [{**PROBS, "gold": 1}, {**PROBS, "gold": 2}],
            r"right answers from 0 to 1 \(0 for a\), got 2 in line 2\. Write letters",
        ),
        ([{**PROBS, "gold": -1}], r"right answers from 0 to 1 \(0 for a\), got -1 in line 1"),
        ([{**PROBS, "confidence": 710}], "in \\[0, 1\\] or \\[0, 100\\], got 710 in the confidence of line 1"),
        ([{**PROBS, "confidence": 10**400}], "in the confidence of line 1"),
        ([RESPONSE], "which are at most 0, got 0.75 in line 1"),
        ([{"id": 1, "choices": [{"text": "a", "logprobs": {"token_logprobs": [None, -1]}}]}], "echo=False"),
        ([{"question": "q", "answer": "a"}], "must be a log of one of these kinds"),
        ([], "must be a log of one of these kinds"),
    ],
)
def test_damaged_lines_raise_errors_with_their_place(tmp_path, rows, error):
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError, match=error):
        answers_of(path)


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_truncated_archives_raise_errors(tmp_path, cut):
    path = write_eval(tmp_path / "log.eval", [inspect_sample("q", 1)])
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content))])
    with pytest.raises(InputError, match=r"complete|zip"):
        open_log(path)


def test_a_wrong_checksum_raises_an_error(tmp_path):
    path = write_eval(tmp_path / "log.eval", [inspect_sample("q", 1)], zstd=True)
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02") + 16
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="checksum"):
        answers_of(path)


def test_the_files_of_a_folder_are_tasks_of_one_system(tmp_path):
    with pytest.raises(InputError, match=r"or files `samples_\*\.jsonl`, .*, got nothing"):
        open_log(tmp_path)
    for name in ("samples_b_2026-01-31T10-00-00.123.jsonl", "samples_a.jsonl"):
        write_lines(tmp_path / name, [ROW])
    found = [answer.document for answer in open_log(tmp_path).answers()]
    assert found == [f"a/{ROW['doc_id']}", f"b/{ROW['doc_id']}"]
    write_lines(tmp_path / "samples_a_2026-01-31T10-00-00.123.jsonl", [ROW])
    with pytest.raises(InputError, match="must have one file for each task, got several for `a`"):
        open_log(tmp_path)
