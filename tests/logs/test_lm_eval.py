"""Logs that lm-eval writes are read back, and its metrics are those of loops over the raw log."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
from reporting.test_audit import loop_ece, loop_values, normalised

from torchcalib import audit

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402, F401
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.loggers import EvaluationTracker  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

FAST = {"with_calibration": False, "with_intervals": False}

CHOICE = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
{more}
"""

METRICS = """
process_results: !function utils.process_results
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: ece, aggregation: !function utils.ece, higher_is_better: false}
  - {metric: ece_if_calibrated, aggregation: !function utils.ece_if_calibrated, higher_is_better: false}
  - {metric: correctness_brier, aggregation: !function utils.correctness_brier, higher_is_better: false}
"""

GENERATION = """
task: spoken
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
repeats: {repeats}
generation_kwargs: {{until: ["\\n\\n"], do_sample: true}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
filter_list:
  - name: first
    filter: [{{function: regex, regex_pattern: "Answer: (\\\\d)"}}, {{function: take_first}}]
  - name: vote
    filter:
      - {{function: regex, regex_pattern: "Answer: (\\\\d)"}}
      - {{function: majority_vote}}
      - {{function: take_first}}
"""


class Random(LM):
    """Model with random log-probabilities, and random answers that state a confidence."""

    def __init__(self):
        super().__init__()
        self._random = random.Random(0)

    def loglikelihood(self, requests):
        return [(-self._random.expovariate(0.3), False) for _ in requests]

    def loglikelihood_rolling(self, requests):
        return [-1.0 for _ in requests]

    def generate_until(self, requests):
        return [f"Answer: {self._random.randrange(4)}\nConfidence: {self._random.randint(5, 95)}%" for _ in requests]


def run(folder, task, text, model=None):
    """Write the YAML file of a task, run it, and return the results and the paths of the samples."""
    (folder / f"{task}.yaml").write_text(text)
    tracker = EvaluationTracker(output_path=str(folder / "out"))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model or Random(), tasks=[task], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)
    return found["results"][task], sorted((folder / "out").rglob("samples_*.jsonl"))


def raw_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked_of(path):
    """Return texts, log-probabilities and the right option of each line."""
    return [
        (
            [pair["arg_1"].removeprefix(" ") for pair in row["arguments"].values()],
            [float(response[0][0]) for response in row["resps"]],
            int(row["target"]),
        )
        for row in raw_rows(path)
    ]


def test_ragged_options_have_the_values_of_loops_over_the_log(tmp_path, documents):
    results, (path,) = run(tmp_path, "colours", CHOICE.format(task="colours", data=tmp_path / "data.jsonl", more=""))
    asked = asked_of(path)
    assert [(texts, right) for texts, _, right in asked] == [(row["choices"], row["answer"]) for row in documents]
    found = audit(path, **FAST)
    assert (found.n_answers, found.n_options, dict(found.counts)) == (40, (3, 5), {})
    for source, size in (
        ("choices", lambda text: 1),
        ("choices_per_character", len),
        ("choices_per_byte", lambda text: len(text.encode())),
    ):
        expected = loop_values(
            asked, lambda texts, scores, size=size: [s / size(t) for s, t in zip(scores, texts, strict=True)]
        )
        assert {key: found[source].value(key) for key in expected} == pytest.approx(expected, rel=1e-9)
    assert found["choices"].value("accuracy") == pytest.approx(results["acc,none"])
    assert found["choices_per_character"].value("accuracy") == pytest.approx(results["acc_norm,none"])
    assert audit(path.parent, **FAST)["choices"].value("ece") == found["choices"].value("ece")


def test_metrics_of_a_yaml_file_have_the_values_of_loops(tmp_path, documents):
    names = "choice_results, correctness_brier, ece, ece_if_calibrated"
    lines = [
        f"from torchcalib.integrations.lm_eval import {names}",
        'process_results = choice_results(lambda doc: doc["answer"])',
    ]
    (tmp_path / "utils.py").write_text("\n".join(lines))
    results, (path,) = run(
        tmp_path, "colours", CHOICE.format(task="colours", data=tmp_path / "data.jsonl", more=METRICS)
    )
    probs = [(normalised(scores), right) for _, scores, right in asked_of(path)]
    confidences, correct = [max(p) for p, _ in probs], [int(p.index(max(p)) == right) for p, right in probs]
    assert results["acc,none"] == pytest.approx(np.mean(correct))
    assert results["ece,none"] == pytest.approx(loop_ece(confidences, correct), rel=1e-9)
    brier = np.mean([(c - y) ** 2 for c, y in zip(confidences, correct, strict=True)])
    assert results["correctness_brier,none"] == pytest.approx(brier, rel=1e-9)
    assert 0 < results["ece_if_calibrated,none"] < 0.5
    assert audit(path, **FAST)["choices"].value("ece") == pytest.approx(results["ece,none"], rel=1e-9)


@pytest.mark.parametrize("repeats", [1, 5])
def test_filters_and_repetitions_of_generations(tmp_path, documents, repeats):
    _, (path,) = run(tmp_path, "spoken", GENERATION.format(data=tmp_path / "data.jsonl", repeats=repeats))
    rows = raw_rows(path)
    assert len(rows) == 80
    found = audit(
        path, select="vote", same=lambda a, b: a[:9].replace("Answer: ", "") == b[:9].replace("Answer: ", ""), **FAST
    )
    assert (found.n_answers, found.chosen, found.others) == (40 * repeats, "vote", ("first",))
    kept = [row for row in rows if row["filter"] == "vote"]
    if repeats == 1:
        stated = [float(row["resps"][0][0].split("Confidence: ")[1][:-1]) / 100 for row in kept]
        correct = [row["exact_match"] for row in kept]
        assert found["stated"].value("ece") == pytest.approx(loop_ece(stated, correct), rel=1e-9)
        return
    expected = []
    for row in kept:
        ((letter, n),) = Counter(text[8] for text in row["resps"][0]).most_common(1)
        assert row["filtered_resps"] == [letter]
        expected.append((n / repeats, row["exact_match"]))
    assert found["frequency"].value("ece") == pytest.approx(loop_ece(*zip(*expected, strict=True)), rel=1e-9)


def test_the_dummy_model_gives_a_log_that_is_audited(tmp_path, documents):
    _, (path,) = run(tmp_path, "colours", CHOICE.format(task="colours", data=tmp_path / "data.jsonl", more=""), "dummy")
    found = audit(path, **FAST)
    assert math.isfinite(found["choices"].value("nll"))
    assert found["choices"].value("ece") == pytest.approx(loop_values(asked_of(path), lambda _, s: s)["ece"], rel=1e-9)
