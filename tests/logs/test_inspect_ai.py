"""Logs that Inspect writes are read back, and its metrics are those of loops over the samples."""

import math
import random
import zipfile

import pytest
from reporting.test_audit import loop_ece

from torchcalib import audit

pytest.importorskip("inspect_ai")

import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import read_eval_log, write_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.model._model_output import Logprob, Logprobs, TopLogprob
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import generate, multiple_choice

from torchcalib.integrations.inspect_ai import calibration, with_stated_confidence

FAST = {"with_calibration": False, "with_intervals": False}


def run(task, outputs, tmp_path, **options):
    for output in outputs:
        output.usage = ModelUsage()  # counting tokens would need a network
    model = get_model("mockllm/model", custom_outputs=outputs)
    (log,) = inspect_ai.eval(
        task, model=model, log_dir=str(tmp_path / "logs"), display="none", max_samples=1, **options
    )
    assert log.status == "success", log.error
    return log, log.location


def spoken(n, epochs=1):
    """Return answers that state a confidence; more confident ones are right more often."""
    rng = random.Random(0)
    found = []
    for _ in range(n * epochs):
        p = rng.randint(5, 99)
        found.append((p / 100, int(rng.random() * 100 < p)))
    texts = [f"{'Paris' if y else 'Rome'}\nConfidence: {round(100 * p)}%" for p, y in found]
    return found, [ModelOutput.from_content("mockllm/model", text) for text in texts]


def numbers_of(path):
    """Return the confidence and outcome of each sample, from the raw log."""
    return [
        (float(sample.output.completion.split(": ")[1][:-1]) / 100, int("Paris" in sample.output.completion))
        for sample in read_eval_log(path).samples
    ]


def test_stated_confidences_have_the_values_of_loops(tmp_path):
    expected, outputs = spoken(40)
    dataset = MemoryDataset([Sample(id=k, input="Capital?", target="Paris") for k in range(40)])
    task = Task(dataset=dataset, solver=generate(), scorer=with_stated_confidence(includes()))
    log, path = run(task, outputs, tmp_path)
    assert sorted(numbers_of(path)) == sorted(expected)
    metrics = log.results.scores[0].metrics
    ece = loop_ece(*zip(*numbers_of(path), strict=True))
    assert metrics["ece"].value == pytest.approx(ece, rel=1e-9)
    brier = sum((p - y) ** 2 for p, y in expected) / 40
    assert metrics["correctness_brier"].value == pytest.approx(brier, rel=1e-9)
    assert 0 < metrics["ece_if_calibrated"].value < 0.5
    found = audit(path, **FAST)
    assert found["stated"].value("ece") == pytest.approx(ece, rel=1e-9)
    assert found["reported"].value("ece") == pytest.approx(ece, rel=1e-9)
    write_eval_log(log, str(tmp_path / "log.json"), format="json")
    assert audit(tmp_path / "log.json", **FAST)["stated"].value("ece") == found["stated"].value("ece")
    with pytest.raises(ValueError, match="`name` must be one of ece"):
        calibration("mce")


def test_epochs_are_clusters_and_members_are_compressed_by_zstd(tmp_path):
    _, outputs = spoken(20, 3)
    dataset = MemoryDataset([Sample(id=f"q{k}", input="Capital?", target="Paris") for k in range(20)])
    _, path = run(Task(dataset=dataset, solver=generate(), scorer=includes()), outputs, tmp_path, epochs=3)
    with zipfile.ZipFile(path) as archive:
        assert {info.compress_type for info in archive.infolist() if info.filename.startswith("samples/")} == {93}
    same = lambda a, b: a.split("\n")[0] == b.split("\n")[0]  # noqa: E731
    found = audit(path, same=same, **FAST)
    assert (found.n_answers, found.n_documents, found.clustered) == (60, 20, True)
    assert found["stated"].value("ece") == pytest.approx(loop_ece(*zip(*numbers_of(path), strict=True)), rel=1e-9)
    by_question = {}
    for sample in read_eval_log(path).samples:
        by_question.setdefault(sample.id, []).append(int("Paris" in sample.output.completion))
    frequencies = [max(sum(y), 3 - sum(y)) / 3 for y in by_question.values()]
    correct = [int(sum(y) >= 2) for y in by_question.values()]
    assert found["frequency"].value("ece") == pytest.approx(loop_ece(frequencies, correct), rel=1e-9)


def test_letters_of_options_are_read_from_the_candidates_of_the_first_token(tmp_path):
    rng, outputs, expected, samples = random.Random(1), [], [], []
    for k in range(30):
        n = rng.randint(2, 4)
        weights = [rng.random() for _ in range(n)]
        probs = [0.9 * w / sum(weights) for w in weights]
        letters, right = "ABCD"[:n], rng.randrange(n)
        candidates = [TopLogprob(token=c, logprob=math.log(p)) for c, p in zip(letters, probs, strict=True)]
        best = max(range(n), key=probs.__getitem__)
        token = Logprob(token=letters[best], logprob=math.log(probs[best]), top_logprobs=candidates)
        output = ModelOutput.from_content("mockllm/model", f"ANSWER: {letters[best]}")
        output.choices[0].logprobs = Logprobs(content=[token])
        outputs.append(output)
        samples.append(Sample(id=k, input="Which?", choices=[f"option {c}" for c in letters], target=letters[right]))
        expected.append((probs[best] / 0.9, int(best == right)))
    task = Task(dataset=MemoryDataset(samples), solver=multiple_choice(), scorer=choice())
    _, path = run(task, outputs, tmp_path)
    found = audit(path, **FAST)
    assert found["option_letters"].value("ece") == pytest.approx(loop_ece(*zip(*expected, strict=True)), rel=1e-9)
    assert found["option_letters"].value("accuracy") == pytest.approx(sum(y for _, y in expected) / 30)
