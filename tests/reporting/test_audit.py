"""An audit has the values of slow loops over a log, for each definition of the confidence."""

import json
import math
import re
import tracemalloc

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.html import Parsed
from helpers.logs import inspect_sample, lm_eval_row, questions, read, with_lines_only, write_eval, write_lines

import torchcalib
from torchcalib import ECE, audit
from torchcalib.functional.binned import ece_from_bins
from torchcalib.reporting import audit as module
from torchcalib.reporting import audit_builder
from torchcalib.reporting.audit_builder import detectable_ece

FAST = {"with_calibration": False, "with_intervals": False}


@pytest.fixture(autouse=True)
def few_replicates(monkeypatch):
    """Use few replicates, which are enough to compare values."""
    monkeypatch.setattr("torchcalib.reporting.comparison.system.RANKED_REPLICATES", 39)


def normalised(scores):
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def loop_ece(confidences, correct, n_bins=15):
    """Naeini et al. (AAAI 2015), with bins [a, b) and the last one closed."""
    bins = [[] for _ in range(n_bins)]
    for confidence, outcome in zip(confidences, correct, strict=True):
        bins[min(int(confidence * n_bins), n_bins - 1)].append((confidence, outcome))
    total = sum(map(len, bins))
    return sum(abs(sum(y for _, y in each) - sum(c for c, _ in each)) for each in bins) / total


def loop_values(asked, scores_of):
    """Return accuracy, NLL, Brier score and ECE of the chosen options."""
    probs = [normalised(scores_of(texts, scores)) for texts, scores, _ in asked]
    right = [index for _, _, index in asked]
    confidences = [max(p) for p in probs]
    correct = [int(p.index(max(p)) == index) for p, index in zip(probs, right, strict=True)]
    brier = [sum((q - (k == r)) ** 2 for k, q in enumerate(p)) for p, r in zip(probs, right, strict=True)]
    return {
        "accuracy": np.mean(correct),
        "nll": np.mean([-math.log(p[index]) for p, index in zip(probs, right, strict=True)]),
        "brier": np.mean(brier),
        "ece": loop_ece(confidences, correct),
    }


def of_all_options(asked, scores_of):
    """Return the ECE of the probabilities of all options."""
    probs = [normalised(scores_of(texts, scores)) for texts, scores, _ in asked]
    pairs = [(q, k == right) for p, (_, _, right) in zip(probs, asked, strict=True) for k, q in enumerate(p)]
    return loop_ece(*zip(*pairs, strict=True))


SOURCES = {
    "choices": lambda _, scores: scores,
    "choices_per_character": lambda texts, scores: [s / len(t) for s, t in zip(scores, texts, strict=True)],
    "choices_per_byte": lambda texts, scores: [s / len(t.encode()) for s, t in zip(scores, texts, strict=True)],
}


@pytest.mark.parametrize("block", [7, 2**13])
@pytest.mark.parametrize("n_ascii", [0, 20])  # questions for which confidences by byte and by character are equal
def test_ragged_options_have_the_values_of_loops(tmp_path, monkeypatch, block, n_ascii):
    monkeypatch.setattr(module, "_BLOCK", block)  # later blocks may have more options than the first one
    monkeypatch.setattr(audit_builder, "_MAX_SCORES", 5 * block)  # answers in a part of a block, if they have 5 options
    with_lines_only(monkeypatch)
    asked = questions(60)
    for k, (texts, *rest) in enumerate(asked[:n_ascii]):
        asked[k] = ([text.replace("é", "e") for text in texts], *rest)
    found = audit(write_lines(tmp_path / "a.jsonl", (lm_eval_row(k, *each) for k, each in enumerate(asked))), **FAST)
    assert (found.n_answers, found.n_documents, found.n_options) == (60, 60, (2, 5))
    assert list(found) == [f"{source}{each}" for source in SOURCES for each in ("", "/each")]
    assert not found.counts
    for source, scores_of in SOURCES.items():
        expected = loop_values(asked, scores_of)
        assert {key: found[source].value(key) for key in expected} == pytest.approx(expected, rel=1e-9)
        assert found[f"{source}/each"].value("ece") == pytest.approx(of_all_options(asked, scores_of), rel=1e-9)


def test_probabilities_that_round_to_0_or_1_have_finite_scores(tmp_path, monkeypatch):
    """Options with log-probabilities of long texts differ by thousands, and the most probable one is often wrong."""
    with_lines_only(monkeypatch)
    asked = [(texts, [900 * score for score in scores], right) for texts, scores, right in questions(40)]
    found = audit(write_lines(tmp_path / "a.jsonl", (lm_eval_row(k, *each) for k, each in enumerate(asked))), **FAST)
    of_right, of_each = [], []
    for _, scores, right in asked:
        for k, score in enumerate(scores):
            largest = max(others := [other for j, other in enumerate(scores) if j != k])
            log_odds = score - largest - math.log(sum(math.exp(other - largest) for other in others))
            loss = np.logaddexp(0, -log_odds if k == right else log_odds)
            of_each.append(loss)
            of_right += [loss] if k == right else []
    assert max(of_right) > 745  # the smallest positive float64 is exp(-745)
    assert found["choices"].value("nll") == pytest.approx(np.mean(of_right), rel=1e-9)
    assert found["choices/each"].value("nll") == pytest.approx(np.mean(of_each), rel=1e-9)
    compared = audit(tmp_path / "a.jsonl", tmp_path / "a.jsonl", names=["a", "b"], **FAST)
    assert compared["choices"]["nll"].values == pytest.approx(dict.fromkeys("ab", np.mean(of_right)), rel=1e-9)


def test_epochs_are_clusters(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 4)
    rng = np.random.default_rng(0)
    rows = [(f"q{k}", e, float(rng.uniform(0.2, 0.9)), "CI"[int(rng.integers(2))]) for e in (1, 2) for k in range(40)]
    samples = [inspect_sample(name, epoch, value, {"confidence": c}) for name, epoch, c, value in rows]
    found = audit(write_eval(tmp_path / "log.eval", samples), **FAST)
    assert (found.n_answers, found.n_documents, found.clustered) == (80, 40, True)
    line = found["reported"].report.line("ece")
    clusters = [name for name, *_ in rows]
    confidence, correct = (
        torch.tensor([c for _, _, c, _ in rows], dtype=torch.float64),
        [int(v == "C") for *_, v in rows],
    )
    expected = torchcalib.report(confidence, correct, task="confidence", clusters=clusters, **FAST)
    assert (line.value, line.p_value) == pytest.approx((expected["ece"], expected.line("ece").p_value), rel=1e-9)
    assert "Questions have several answers" in str(found)
    assert math.isnan(found["reported"].detectable)


def test_repeated_documents_are_found_in_later_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 8)
    rows = [
        {**row, "item_id": k % 17, "probs": {"option 0": 0.3 + k / 40, "no": 0.7 - k / 40}}
        for k, row in enumerate(lines_of_probs(20))
    ]
    found = read(write_lines(tmp_path / "a.jsonl", rows))
    assert (found.n_answers, found.documents.n) == (20, 17)
    # Numbers with leading zeros are identifiers.
    monkeypatch.setattr(module, "_BLOCK", 2)
    rows = [
        {**lines_of_probs(1)[0], "item_id": name, "confidence": 0.1 + k / 10, "correct": k % 2}
        for k, name in enumerate(("00", "01", "a", "00"))
    ]
    assert read(write_lines(tmp_path / "a.jsonl", rows)).documents.n == 3


def test_options_without_one_right_option_are_counted(tmp_path):
    rows = [{"item_id": k, "gold": "a", "probs": {"a": 0.6 + k / 100, "b": 0.4 - k / 100}} for k in range(4)]
    rows += [{"item_id": 4, "correct": True, "probs": {"a": 0.6, "b": 0.4}}]
    rows += [{"item_id": 5, "gold": "a", "probs": {"a": 0.6}}]
    found = audit(write_lines(tmp_path / "a.jsonl", rows), **FAST)
    assert found["probabilities"].report.n == 4
    assert "; 4 of 6 answers)" in found.sentence
    reasons = [reason for reason in found.counts if reason.startswith("options without an event")]
    assert [reason.rpartition(": ")[2] for reason in reasons] == ["no right option", "a single option"]


def lines_of_probs(n, probs=(0.7, 0.3), **changes):
    options = {f"option {k}": p for k, p in enumerate(probs)}
    return [{"item_id": k, "gold": "option 0", "probs": options, **changes} for k in range(n)]


@pytest.mark.parametrize(
    ("rows", "mark"),
    [
        (lines_of_probs(30, (1, 0)), r"Degenerate: every confidence is 1\. Only its difference"),
        (lines_of_probs(30, (0.7, 0.3)), r"Degenerate: every confidence is 0.7\."),
        (lines_of_probs(25, (1, 0)) + lines_of_probs(9, (0.6, 0.4)), "25 of 34 confidences are exactly 1, which may"),
        (lines_of_probs(9, (0.71, 0.29)) + lines_of_probs(3, (0, 1)), "3 outcomes that occurred is exactly 0. Prob"),
        (lines_of_probs(9, (0.71, 0.29)) + lines_of_probs(1, (0, 1)), "1 outcome that occurred is exactly 0. Prob"),
    ],
)
def test_degenerate_confidences_are_marked(tmp_path, rows, mark):
    rows = [{**row, "item_id": k} for k, row in enumerate(rows)]
    each = audit(write_lines(tmp_path / "a.jsonl", rows), target="gold", **FAST)["probabilities"]
    assert any(re.search(mark, text) for text in each.marks)
    assert (each.report is None) == mark.startswith("Degenerate")


def test_probabilities_of_all_ones_from_a_sampler_are_not_reported(tmp_path):
    tokens = {"logprobs": {"content": [{"token": "A", "logprob": 0.0}]}, "message": {"content": "A"}}
    rows = [{"id": k, "correct": k % 2, "choices": [tokens]} for k in range(30)]
    found = audit(write_lines(tmp_path / "a.jsonl", rows))
    assert all(each.report is None for each in found.values())
    assert "sampling at temperature 0" in found["raw"].marks[0]
    assert found.sentence == ""


def test_a_log_without_confidences_says_so(tmp_path):
    found = audit(write_eval(tmp_path / "log.eval", [inspect_sample(f"q{k}", 1) for k in range(3)]))
    assert not found
    assert "contains no confidence" in str(found)


def test_the_detectable_error_is_the_quantile_of_simulated_ones():
    confidence = torch.tensor([0.25, 0.75], dtype=torch.float64).repeat_interleave(40)
    metric = ECE(task="binary")
    metric.update(confidence, torch.tensor([0, 1]).repeat(40))
    rng = np.random.default_rng(0)
    simulated = [
        loop_ece(confidence.tolist(), (rng.uniform(size=80) < confidence.numpy()).tolist()) for _ in range(4000)
    ]
    at_most = [detectable_ece(metric.statistic(), 3999), *np.quantile(simulated, [0.94, 0.96])]
    assert at_most[1] <= at_most[0] <= at_most[2]


def test_exports(tmp_path):
    rng = np.random.default_rng(0)
    rows = [lines_of_probs(1, (p, 1 - p))[0] | {"item_id": k} for k, p in enumerate(rng.uniform(size=30).tolist())]
    found = audit(write_lines(tmp_path / "a.jsonl", rows), **FAST)
    assert "(10 equal-width bins" in audit(tmp_path / "a.jsonl", n_bins=10, **FAST).sentence
    content = json.loads(found.to_json())
    assert content["confidences"]["probabilities"]["report"]["schema_version"] == content["schema_version"]
    alone = found.save(tmp_path / "folder")
    assert {path.name for path in alone} == {"audit.html", "audit.json"}
    assert "probabilities_each.html" not in (tmp_path / "folder/audit.html").read_text()
    written = found.save(tmp_path / "folder", pages=True)
    pages = {"audit.html", "audit.json", "probabilities.html", "probabilities_each.html"}
    assert {path.name for path in written} == pages
    page = (tmp_path / "folder/audit.html").read_text()
    assert found.sentence in page.replace("&#39;", "'")
    assert 'href="probabilities_each.html"' in page
    assert (
        "an option is right; all options of all questions" in (tmp_path / "folder/probabilities_each.html").read_text()
    )
    assert "gain of calibration" not in page
    ids = Parsed(page).values_of("id")
    assert ids[:5] == ["finding", "verdict", "cause", "action", "key-numbers"]
    assert "diagram" in ids[: ids.index("how")]
    (alone,) = found.save(tmp_path / "audit.html")
    assert "probabilities_each.html" not in alone.read_text()
    assert found.to_markdown().count("\n") == 1 + len(found)


# Stated confidences, sampled answers and benchmarks


def stated_rows(n=40, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"id": k, "confidence": int(p), "correct": bool(rng.uniform() * 100 < p)}
        for k, p in enumerate(rng.integers(1, 101, n))
    ]


def test_percentages_in_tables_and_texts_have_the_values_of_lines(tmp_path):
    frame = pd.DataFrame(rows := stated_rows())
    frame.to_csv(tmp_path / "a.tsv.gz", index=False, sep="\t")
    with_text = [{**row, "confidence": None, "response": f"Confidence: {row['confidence']}%"} for row in rows]
    expected = loop_ece([row["confidence"] / 100 for row in rows], [row["correct"] for row in rows])
    for log in (tmp_path / "a.tsv.gz", with_text, frame.rename(columns=str.upper)):
        (definition,) = read(log).definitions.values()
        assert float(ece_from_bins(definition.main_bins)) == pytest.approx(expected, rel=1e-12)
    found = audit(frame, **FAST)
    assert found["reported"].value("ece") == pytest.approx(expected, rel=1e-9)
    assert found["reported"].scale == "Confidences without a percent sign are percentages, because the largest is 98."


def test_an_ambiguous_scale_has_a_row_and_no_report(monkeypatch):
    rows = [{"id": k, "confidence": k % 10 + 1, "correct": k % 2} for k in range(40)]
    each = audit(rows, **FAST)["reported"]
    assert (each.report, each.marks[0][:10]) == (None, "Ambiguous:")
    assert audit(rows, scale="percent", **FAST)["reported"].value("ece") == pytest.approx(0.445, rel=1e-9)
    # A later block may change the scale.
    monkeypatch.setattr(module, "_BLOCK", 8)
    rows = [{"id": k, "confidence": 1 + (k > 20) * k, "correct": k % 3 == 0} for k in range(40)]
    expected = loop_ece([row["confidence"] / 100 for row in rows], [row["correct"] for row in rows])
    assert audit(rows, **FAST)["reported"].value("ece") == pytest.approx(expected, rel=1e-9)


def test_words_are_confidences_if_the_caller_defines_them():
    rows = [{"id": k, "confidence": ("High", "low")[k % 2], "correct": k % 3 > 0} for k in range(30)]
    found = audit(rows, words={"high": 0.9, "low": 0.2}, **FAST)["reported"]
    confidences, correct = [(0.9, 0.2)[k % 2] for k in range(30)], [k % 3 > 0 for k in range(30)]
    assert found.value("ece") == pytest.approx(loop_ece(confidences, correct), rel=1e-9)
    without = audit(rows, **FAST)
    assert (list(without), without.counts) == ([], {"confidence in words without a number (see `words`)": 30})


@pytest.mark.parametrize("word", ["", "n/a", "N/A", "NaN", "None", "none", "null", "<NA>"])
def test_words_for_a_missing_confidence_are_counted_as_missing_in_every_format(word, tmp_path):
    rows = [{"id": k, "confidence": word if k % 5 == 0 else 0.5 + k / 100, "correct": k % 3 > 0} for k in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [",".join(map(str, row.values())) for row in (dict(zip(rows[0], rows[0], strict=True)), *rows)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    for log in (rows, tmp_path / "a.jsonl", tmp_path / "a.csv"):
        assert audit(log, **FAST).counts == {"answer without a reported confidence": 6}, log
    if word:
        assert not audit(rows, words={word.lower(): 0.1}, **FAST).counts


SAMPLED = [["a", "A ", "b"], ["c", "d", "d"], ["e", "f", "g"], ["h", "h", "h"], ["i"], ["j", "k", "k"]]


@pytest.mark.parametrize("by_meaning", [False, True])
def test_the_frequency_of_the_most_frequent_answer_is_a_confidence(by_meaning):
    same = (lambda a, b: (a.strip().lower() in "ab" and b.strip().lower() in "ab") or a == b) if by_meaning else None
    rows = [
        {"id": k, "pred": text, "correct": text.strip().lower() in "adh", "confidence": 0.1 + k / 20}
        for k, texts in enumerate(SAMPLED)
        for text in texts
    ]
    found = audit(rows, same=same, **FAST)
    expected = [(2 / 3, 1), (2 / 3, 1), (1 / 3, 0), (1, 1), (2 / 3, 0)]
    if by_meaning:  # "a" and "b" mean the same, but only one of them is called right
        expected = expected[1:]
        assert found.counts["most frequent answer that the log calls neither right nor wrong, or both"] == 1
    each = found["frequency"]
    assert (each.event, each.report.n) == ("most frequent", len(expected))
    assert each.value("ece") == pytest.approx(loop_ece(*zip(*expected, strict=True)), rel=1e-9)
    assert found.counts["question with one answer"] == 1


def test_the_outcome_of_a_vote_is_that_of_the_selected_answer(tmp_path):
    rows = []
    for k, texts in enumerate([["4", "4", "5"], ["6", "7", "7"], ["8", "8", "8"]]):
        changes = {"arguments": {"gen_args_0": {"arg_0": "q", "arg_1": {"until": []}}}, "acc": float(k != 1)}
        voted = max(texts, key=texts.count)
        rows.append(lm_eval_row(k, ["x"], [0.0], 0, resps=[texts], filtered_resps=[voted], **changes))
    each = audit(write_lines(tmp_path / "a.jsonl", rows), **FAST)["frequency"]
    assert each.value("ece") == pytest.approx(loop_ece([2 / 3, 2 / 3, 1], [1, 0, 1]), rel=1e-9)


def loop_hle(confidences, correct, has_last=False):
    """`calib_err` of hle_eval/run_judge_results.py, with bins of 100 answers and without the last one."""
    order = np.argsort(np.asarray(confidences))
    bins = [order[start : start + 100] for start in range(0, len(order) // 100 * 100, 100)]
    bins[-1] = order[(len(bins) - 1) * 100 :]
    squares = [len(b) * (np.mean([confidences[k] - correct[k] for k in b])) ** 2 for b in bins]
    return 100 * math.sqrt(sum(squares if has_last else squares[:-1]) / len(order))


def loop_browsecomp(confidences, correct):
    """`calibration_error` of inspect_evals/browse_comp, with 10 bins (a, b] of the edges of numpy."""
    edges, total = np.linspace(0, 1, 11), 0.0
    for k in range(10):
        inside = [i for i, c in enumerate(confidences) if (edges[k] < c <= edges[k + 1]) or (k == 0 and c == 0)]
        total += abs(sum(confidences[i] - correct[i] for i in inside))
    return 100 * total / len(confidences)


@pytest.mark.parametrize("benchmark", ["hle", "browsecomp", "browsecomp_plus"])
@pytest.mark.parametrize("n", [90, 150, 430])
def test_published_numbers_are_those_of_the_benchmarks(tmp_path, benchmark, n):
    rows = stated_rows(n)
    judged = {str(row["id"]): {"judge_response": {**row, "correct": "yes" if row["correct"] else "no"}} for row in rows}
    missing = list(judged)[::9]
    for name in missing:
        judged[name]["judge_response"].pop("confidence")
    (tmp_path / "judged.json").write_text(json.dumps(judged))
    found = audit_builder.published(benchmark, *read(tmp_path / "judged.json", as_published=benchmark).stated)
    given = [(row["confidence"] / 100, row["correct"]) for row in rows if str(row["id"]) not in missing]
    everything = [(1.0 if str(row["id"]) in missing else row["confidence"] / 100, row["correct"]) for row in rows]
    c, y = map(list, zip(*everything, strict=True))
    complete = loop_hle(*map(list, zip(*given, strict=True)), True) if len(given) >= 100 else None
    if benchmark == "browsecomp":
        assert found.value == pytest.approx(loop_browsecomp(c, y), rel=1e-12)
        complete = loop_browsecomp(*map(list, zip(*given, strict=True)))
    elif benchmark == "hle":
        assert found.value == (round(loop_hle(c, y)) if n >= 100 else 0)
    else:
        of_given = map(list, zip(*given, strict=True))
        assert found.value == (round(loop_hle(*of_given), 2) if len(given) >= 100 else 0)
    assert found.n_missing == len(missing)
    if complete is not None:
        assert found.complete == pytest.approx(complete, rel=1e-9)


def test_published_numbers_are_of_the_confidence_in_the_text_or_in_the_log(tmp_path):
    output = {"completion": "Confidence: 30%"}
    samples = [inspect_sample(f"q{k}", 1, "CI"[k % 2], {"confidence": 0.7}, output=output) for k in range(3)]
    lines = [{"id": k, "response": "Confidence: 30%", "confidence": 0.7, "correct": k % 2 == 0} for k in range(3)]
    for log, expected in ((write_eval(tmp_path / "log.eval", samples), 0.3), (lines, 0.7)):
        assert [list(each) for each in read(log, as_published="hle").stated] == [[expected] * 3, [1, 0, 1]]
    found = audit(stated_rows(230), as_published="hle", **FAST)
    assert found.published.sentence in str(found)
    assert json.loads(found.to_json())["published"]["benchmark"] == "HLE"


# Several logs


def test_several_logs_are_compared_in_pairs(tmp_path):
    asked = [(normalised(scores), right) for _, scores, right in questions(40)]
    other = [(normalised([math.sqrt(p) for p in probs]), right) for probs, right in asked]
    paths = []
    for name, numbers, some in (("a", range(40), asked), ("b", range(39, 1, -1), other)):
        rows = [{"id": k, "gold": some[k][1], "probs": dict(zip("ABCDE", some[k][0], strict=False))} for k in numbers]
        paths.append(write_lines(tmp_path / f"{name}.jsonl", rows))
    found = audit(*paths, **FAST)
    assert dict(found.n_paired) == {"probabilities": 38}
    assert "2 of `a.jsonl`, 0 of `b.jsonl`" in str(found)
    probs = {
        f"{name}.jsonl": torch.tensor([p + [0] * (5 - len(p)) for p, _ in some[2:]], dtype=torch.float64)
        for name, some in (("a", asked), ("b", other))
    }
    target = torch.tensor([right for _, right in asked[2:]])
    expected = torchcalib.compare(probs, target, task="multiclass", n_replicates=39)
    for key in ("nll", "brier", "accuracy", "ece"):
        pair = [each[key].differences["b.jsonl"].value for each in (found["probabilities"], expected)]
        assert pair[0] == pytest.approx(pair[1], rel=1e-9, abs=1e-15)
    written = found.save(tmp_path / "out")
    links = re.findall(r'<a href="([\w/]+\.html)"', (tmp_path / "out/audit.html").read_text())
    assert links == ["compare_probabilities.html", "log_1/audit.html", "log_2/audit.html"]
    assert {tmp_path / "out" / link for link in links} < set(written)


def test_answers_to_the_same_question_are_compared_in_their_order():
    rng = np.random.default_rng(0)
    asked = [k % 25 for k in range(60)], [(7 * k) % 31 for k in range(80)]  # up to three answers to a question
    logs = [
        [{"id": k, "confidence": float(rng.uniform(0.2, 0.9)), "correct": int(rng.integers(2))} for k in numbers]
        for numbers in asked
    ]
    found = audit(*logs, names=["a", "b"], **FAST)
    by_question = [{k: [row for row in rows if row["id"] == k] for k in range(31)} for rows in logs]
    pairs = [pair for k in range(31) for pair in zip(*(each[k] for each in by_question), strict=False)]
    assert found.n_paired["reported"] == len(pairs)
    brier = [np.mean([(row["confidence"] - row["correct"]) ** 2 for row in rows]) for rows in zip(*pairs, strict=True)]
    assert list(found["reported"]["brier"].values.values()) == pytest.approx(brier, rel=1e-12)
    assert found["reported"].settings["clusters"] == len({row["id"] for row, _ in pairs})


def test_answers_of_compared_logs_have_their_own_outcomes():
    first, second = stated_rows(60), stated_rows(60, 1)
    found = audit(first, second, names=["a", "b"], **FAST)
    brier = [np.mean([(row["confidence"] / 100 - row["correct"]) ** 2 for row in rows]) for rows in (first, second)]
    line = found["reported"]["brier"]
    assert [line.values["a"], line.values["b"]] == pytest.approx(brier, rel=1e-12)
    assert line.differences["b"].value == pytest.approx(brier[1] - brier[0], rel=1e-9)
    json.loads(found.to_json())


def test_definition_cards_have_the_items_of_the_checklist(tmp_path):
    found = audit(stated_rows(), **FAST)
    card = found["reported"].card(found.n_answers)
    numbers = ["ECE", "n", "smallest significant ECE", "clusters"]
    assert list(card) == ["confidence", "scored answer", "context", "scale", "event", *numbers]
    assert (card["n"], card["ECE"]) == ("40 of 40 answers", "15 equal-width bins [a, b), last bin closed, norm l1")
    assert json.loads(found.to_json())["confidences"]["reported"]["card"] == card


@pytest.mark.extended
def test_memory_does_not_grow_with_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 2**13)
    peaks = []
    for n in (2**15, 2**15, 2**17):  # 4 and 16 blocks of answers; the first log also imports modules
        rows = ({"id": k, "correct": k % 3 > 0, "confidence": (k % 97) / 97} for k in range(n))
        path = tmp_path / f"{n}.jsonl"
        with path.open("w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
        tracemalloc.start()
        read(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1]
