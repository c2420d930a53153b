"""Malformed and misleading logs give the right number, a remark on it, or a clear error."""

import json
import math

import pytest
from helpers.logs import helm_request, inspect_sample, lm_eval_row, response_row, write_eval, write_lines
from helpers.logs import read as read_log

import torchcalib as tc
from torchcalib.functional.binned import ece_from_bins
from torchcalib.io.errors import InputError
from torchcalib.reporting import audit_builder

P = [0.15, 0.35, 0.55, 0.75, 0.95, 0.9]
Y = [0, 1, 0, 1, 1, 0]
# Each confidence has a bin of its own, so that ECE is the mean of all gaps.
GAP = sum(abs(p - y) for p, y in zip(P[:5], Y[:5], strict=True)) / 5


def rows(values=P[:5], outcomes=Y[:5], key="confidence", **changes):
    return [{"id": k, key: p, "correct": y, **changes} for k, (p, y) in enumerate(zip(values, outcomes, strict=True))]


def read(log, **options):
    """Return the numbers of answers and ECE by definition, the reasons for refusals, and the counts."""
    builder = read_log(log, options)
    bins = {key: each.main_bins for key, each in builder.definitions.items()}
    values = {key: (float(each.n.sum()), float(ece_from_bins(each))) for key, each in bins.items()}
    refusals = {(source, "answer"): problem for source, problem in builder.problems.items()}
    for key, each in builder.definitions.items():
        refusals[key] = audit_builder.degeneracy(key[0], each.accumulated())
    return values, refusals, builder.counts


REPORTED, STATED = ("reported", "answer"), ("stated", "answer")
PROBS = ("probabilities", "chosen")


def probs(**changes):
    return [{"item_id": k, "gold": "ab"[k % 2], "probs": {"a": p, "b": 1 - p}, **changes} for k, p in enumerate(P[:5])]


def tokens(log_probs, **changes):
    logged = [(str(k), p, {}) for k, p in enumerate(log_probs)]
    return [response_row(k, "x", logged, correct=y, **changes) for k, y in enumerate(Y)]


@pytest.mark.parametrize(
    ("log", "key", "n"),
    [
        (rows([100 * p for p in P[:5]]), REPORTED, 5),
        (rows([f"{100 * p:.0f}%" for p in P[:5]]), REPORTED, 5),
        (rows([f"{100 * p:.0f} percent" for p in P[:5]]), REPORTED, 5),
        (rows([str(p) for p in P[:5]]), REPORTED, 5),
        (rows([f"Confidence: {100 * p:.0f}%" for p in P[:5]]), REPORTED, 5),
        (rows([f"{100 * p:.0f}%" if k % 2 else p for k, p in enumerate(P[:5])]), REPORTED, 5),
        (rows(outcomes=["no", "yes", "No", "YES", "yes"]), REPORTED, 5),
        (rows(outcomes=["I", "C", "I", "C", "C"]), REPORTED, 5),
        (rows(outcomes=["False", "true", "FALSE", "TRUE", "True"]), REPORTED, 5),
        # Missing confidences and outcomes are left out, and not replaced.
        ([*rows(), {"id": 9, "correct": 1}], REPORTED, 5),
        ([*rows(), {"id": 9, "confidence": None, "correct": 1}], REPORTED, 5),
        ([*rows(), {"id": 9, "confidence": "", "correct": 1}], REPORTED, 5),
        ([*rows(), {"id": 9, "confidence": "n/a", "correct": 1}], REPORTED, 5),
        ([*rows(), {"id": 9, "confidence": 0.9, "correct": None}], REPORTED, 5),
        ([*rows(), {"id": 9, "confidence": 0.9, "correct": 0.5}], REPORTED, 5),
        ([*rows(), {"id": 9, "confidence": 0.9, "correct": 1, "valid": False}], REPORTED, 5),
        (rows([f"I think so. Confidence: {100 * p:.0f}%" for p in P[:5]], key="response"), STATED, 5),
        ([*rows([f"Confidence: {p}" for p in P[:5]], key="response"), {"response": "?", "correct": 1}], STATED, 5),
        # Duplicates are clusters, and keep their weight.
        (rows() + rows(), REPORTED, 10),
    ],
)
def test_misleading_rows_have_the_right_error(tmp_path, log, key, n):
    for source in (log, write_lines(tmp_path / "a.jsonl", log)):
        values, refusals, _ = read(source)
        assert (values[key], refusals[key]) == ((n, pytest.approx(GAP, rel=1e-9)), "")


@pytest.mark.parametrize(
    ("log", "key", "reason"),
    [
        (rows([8, 10, 3, 5, 6]), REPORTED, "scale may be 0 to 10, which must be divided by 10 first, or 0 to 100"),
        (rows([0.5, 85, 90, 20, 0.3]), REPORTED, "Some confidences lie between 0 and 1"),
        (rows([1, 0, 1, 1, 0]), REPORTED, "may be 100% or 1%"),
        (rows([90] * 5), REPORTED, "Degenerate: every confidence is 0.9"),
        (tokens([0.0, 0.0]), ("raw", "answer"), "sampling at temperature 0"),
        (tokens([-0.0, 1e-9]), ("raw", "answer"), "sampling at temperature 0"),
        ([{**row, "probs": {"a": 1, "b": 0}} for row in probs()], PROBS, "every confidence is 1"),
    ],
)
def test_degenerate_and_ambiguous_confidences_have_no_report(log, key, reason):
    assert reason in read(log)[1][key]


def test_the_rule_of_an_ambiguous_scale_says_so():
    found = tc.audit(rows([8, 10, 3, 5, 6]), with_calibration=False, with_intervals=False)
    assert found["reported"].scale.startswith("The scale of confidences without a percent sign is ambiguous. The lar")


def test_advice_on_pooled_systems_is_quoted_for_a_shell():
    log = [{**row, "Model Name": "ab"[k % 2]} for k, row in enumerate(rows())]
    assert "(--by 'Model Name')" in tc.audit(log, with_calibration=False, with_intervals=False).notes[0]


def test_the_first_row_determines_the_order_of_options_and_so_the_choice_of_equal_ones():
    orders = [
        {"cat": 0.5, "dog": 0.3, "eel": 0.2},
        {"eel": 0.2, "dog": 0.4, "cat": 0.4},
        {"dog": 0.4, "eel": 0.2, "cat": 0.4},
    ]
    log = [{"id": k, "probs": orders[k % 3], "gold": ["cat", "dog"][k % 5 > 2]} for k in range(30)]
    found = tc.audit(log, with_calibration=False, with_intervals=False)["probabilities"]
    assert found.value("accuracy") == sum(row["gold"] == "cat" for row in log) / 30  # the choice is "cat" in every row


ROW = lm_eval_row(0, ["a", "b"], [-1.0, -2.0], 0)
GENERATED = {**ROW, "arguments": {"gen_args_0": {"arg_0": "q", "arg_1": {"until": []}}}, "resps": [["x"]]}


def csv(text):
    return "a.csv", text.encode()


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (rows([-0.5] * 5), "got -0.5 in the confidence of row 1"),
        (rows([850] * 5), "got 850 in the confidence of row 1"),
        (rows([[0.5]] * 5), r"got \[0.5\] in the confidence of row 1"),
        (rows([1, 0, 1, 1, 0], [0.3, 0.5, 0.2, 0.8, 0.9]), "columns of confidence and outcome are swapped"),
        (rows(key="score"), "got an object with the keys"),
        ([], "must be a log of one of these kinds"),
        ([1, 2], "row 1 must be a dict, got int"),
        (probs(probs={"a": 60, "b": 40}), "got 60 in row 1. Divide percentages by 100"),
        (probs(probs={"a": -0.1, "b": 1.1}), "got -0.1 in row 1"),
        (probs(probs={"a": 0, "b": 0}), "positive probability in each answer, got none for document '0'"),
        (probs(probs={f"option {k}": 0.1 for k in range(1025)}), "at most 1,024 options in each answer, got 1,025 for"),
        ([{**ROW, "filtered_resps": [["0.9", "True"], ["0.1", "False"]]}], "log-probabilities, which are at most 0"),
        ([{**ROW, "filtered_resps": [["-inf", "True"], ["-inf", "True"]]}], "positive probability in each answer"),
        ([{**ROW, "resps": [], "filtered_resps": []}], "response for each request, got 0 of 2"),
        (tokens([0.75]), "log-probabilities, which are at most 0, got 0.75"),
        (
            csv("id,confidence,correct\n1,0.5,1\n2,0.7\n"),
            "must have 3 cells in every row, .* got 2 in row 3",
        ),
        (csv("id,correct,correct\n1,0.5,1\n"), "must have unique array names, got `correct` twice"),
        (csv('id,confidence,correct\n1,"0.5,1\n'), "must have 3 cells in every row, .* got 2 in row 2"),
        (("a.jsonl", b'{"id": 1, "confidence": 0.5, "correct": 1}\n{"id": 2, "conf'), "complete, readable log file"),
        (("a.jsonl", b'{"id": 1, "confidence": NaN, "correct": 1}\n'), "got nan in the confidence of line 1"),
        (("a.jsonl.gz", b"\x1f\x8b\x08\x00"), "complete, readable log file"),
        (("a.json", b'{"q1": {"judge_response": {"correct": "yes", "confidence": -3}}}'), "got -3 in the confidence"),
        (("a.json", b"{"), "complete, readable log file"),
        (("a.eval", b"PK\x03\x04"), "complete, readable|zip"),
        (("a.parquet", b"PAR1"), "complete, readable"),
    ],
)
def test_malformed_logs_raise_clear_errors(tmp_path, log, error):
    if isinstance(log, tuple):
        name, content = log
        log = tmp_path / name
        log.write_bytes(content)
    with pytest.raises(InputError, match=error):
        read(log)


def test_filters_are_not_mixed(tmp_path):
    log = [{**GENERATED, "doc_id": k, "acc": y, "filter": name} for k, y in enumerate(Y[:5]) for name in ("a", "b")]
    for row, p in zip(log, [p for p in P[:5] for _ in "ab"], strict=True):
        row["resps"] = [[f"Confidence: {p if row['filter'] == 'a' else 0.5}"]]
    assert read(write_lines(tmp_path / "a.jsonl", log))[0][STATED] == (5, pytest.approx(GAP, rel=1e-9))
    assert read(tmp_path / "a.jsonl", chosen="b")[0][STATED][1] == pytest.approx(abs(0.5 - sum(Y[:5]) / 5))
    with pytest.raises(InputError, match="`select` must be one of `a`, `b`, got 'strict'"):
        read(tmp_path / "a.jsonl", chosen="strict")


def test_judged_answers_without_a_confidence_are_not_certain(tmp_path):
    judged = {
        f"q{k}": {"judge_response": {"correct": ["no", "yes"][y], "confidence": 100 * p}}
        for k, (p, y) in enumerate(zip(P[:5], Y[:5], strict=True))
    }
    judged |= {"q8": {"judge_response": {"correct": "yes", "confidence": None}}, "q9": {"judge_response": None}}
    (tmp_path / "a.json").write_text(json.dumps(judged))
    values, _, counts = read(tmp_path / "a.json")
    assert values[REPORTED] == (5, pytest.approx(GAP, rel=1e-9))
    assert counts == {"answer without a reported confidence": 1, "answer without a verdict": 1}


def test_perturbed_and_unscored_samples_are_left_out_and_scores_may_contain_the_confidence(tmp_path):
    helm = [helm_request(str(k), " AB"[1 + y], math.log(p)) for k, (p, y) in enumerate(zip(P[:5], Y[:5], strict=True))]
    helm.append({**helm[0], "instance": {**helm[0]["instance"], "perturbation": {"name": "typos"}}})
    (tmp_path / "scenario_state.json").write_text(json.dumps({"adapter_spec": {}, "request_states": helm}))
    assert read(tmp_path)[0]["raw", "answer"] == (5, pytest.approx(GAP, rel=1e-9))
    answers = list(enumerate(zip(P[:5], Y[:5], strict=True)))
    samples = [inspect_sample(f"q{k}", 1, "IC"[y], {"confidence": p}) for k, (p, y) in answers]
    samples += [inspect_sample("q8", 1, "P", {"confidence": 0.9}), inspect_sample("q9", 1, scores={})]
    scores = [inspect_sample(f"q{k}", 1, {"score": "IC"[y], "confidence": 100 * p}) for k, (p, y) in answers]
    for log in (samples, scores):
        assert read(write_eval(tmp_path / "a.eval", log))[0][REPORTED] == (5, pytest.approx(GAP, rel=1e-9))
    with pytest.raises(InputError, match="sample without a score: 1"):
        read(write_eval(tmp_path / "a.eval", samples[-1:]))


def test_right_answers_may_differ_in_case_from_options():
    log = [{"id": k, "prob_Cat": p, "prob_Dog": 1 - p, "target": ["dog", "cat"][k % 2]} for k, p in enumerate(P[:5])]
    same_case = [{**row, "target": row["target"].title()} for row in log]
    values, _, counts = read(log)
    assert values == read(same_case)[0]
    assert values[PROBS][0] == 5
    assert not counts["right option without a probability"]
