"""A real `transformers.Trainer` with tiny models from their configs; huggingface_rank.py is what two processes run."""

import json

import pytest
import torch
from processes import SCRIPTS, environments_of_ranks, run_together

import torchcalib as tc

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from processes.huggingface_rank import GPT2, Rows, bert, outputs, sentences, trainer, words  # noqa: E402

from torchcalib.integrations.huggingface import CalibrationMetrics  # noqa: E402

MULTICLASS = {"task": "multiclass", "from_logits": True}


# A row alone and in a padded batch goes through other matrix products: double-precision sums of some 8 terms, weights
# scaled by 30 in a few layers. Rounding errors of 1e-16 may grow by 30 in each of four: 1e-16 * 30^4 is 1e-10.
ROUNDING = 1e-10


def close(a, b, tolerance=ROUNDING):
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (a, b))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def usual(logits, labels, **options):
    """What the functions say of all logits at once."""
    functions = {"nll": tc.nll, "brier": tc.brier_score, "ecd": tc.ecd, "ece": tc.ece, "accuracy": tc.accuracy}
    return {
        f"eval_{name}": function(logits, labels, from_logits=True, **options) for name, function in functions.items()
    }


def assert_all(values, expected, tolerance=ROUNDING):
    assert {name for name in values if name.rpartition("_")[2] in ("nll", "brier", "ecd", "ece", "accuracy")} == set(
        expected
    )
    for name, value in expected.items():
        assert type(values[name]) is float
        close(values[name], value, tolerance)


@pytest.fixture(scope="module")
def classified():
    """A classifier of sentences, 13 of them with labels, and its logits."""
    model, rows = bert("SequenceClassification"), sentences(13)
    return model, rows, *outputs(model, rows)


ARGUMENTS = (
    {},
    {"eval_accumulation_steps": 1},
    {"eval_do_concat_batches": False},
    {"batch_eval_metrics": True},
    {"eval_use_gather_object": True},
    {"per_device_eval_batch_size": 13},
    {"per_device_eval_batch_size": 64},
    {"label_smoothing_factor": 0.1},
)


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(given, marks=[pytest.mark.extended] if given else [], id=str(given)) for given in ARGUMENTS],
)
def test_an_evaluation_is_the_functions_of_all_logits(classified, arguments, tmp_path):
    model, rows, logits, labels = classified
    calibration = CalibrationMetrics(task="multiclass", num_classes=3)
    evaluated = trainer(model, calibration, tmp_path, **arguments)
    for _ in range(2):
        assert_all(evaluated.evaluate(rows), usual(logits, labels, task="multiclass"))
    assert not any(metric.update_count for metric in calibration.metrics.values()), "rows are still there"


@pytest.mark.extended
def test_what_the_trainer_keeps_is_one_number_a_row(classified, tmp_path):
    model, rows, logits, labels = classified
    calibration = CalibrationMetrics(task="multiclass")
    predicted = trainer(model, calibration, tmp_path).predict(rows)
    assert predicted.predictions.shape == (13,)
    close(predicted.metrics["test_nll"], tc.nll(logits, labels, **MULTICLASS))
    unlabelled = trainer(model, calibration, tmp_path).predict(Rows([{**row, "labels": None} for row in rows]))
    close(torch.as_tensor(unlabelled.predictions), logits)
    assert "test_nll" not in unlabelled.metrics


@pytest.mark.extended
def test_without_predictions_there_is_nothing_but_the_loss(classified, tmp_path):
    model, rows, *_ = classified
    values = trainer(model, CalibrationMetrics(task="multiclass"), tmp_path, prediction_loss_only=True).evaluate(rows)
    assert "eval_loss" in values
    assert "eval_nll" not in values


@pytest.mark.extended
def test_hidden_states_behind_the_logits_are_not_looked_at(tmp_path):
    model, rows = bert("SequenceClassification", output_hidden_states=True, output_attentions=True), sentences(13)
    values = trainer(model, CalibrationMetrics(task="multiclass"), tmp_path).evaluate(rows)
    assert_all(values, usual(*outputs(model, rows), task="multiclass"))


class Stop(transformers.TrainerCallback):
    """Break an evaluation off behind its first batch."""

    def on_prediction_step(self, *args, **kwargs):
        raise KeyboardInterrupt


@pytest.mark.extended
def test_an_evaluation_that_was_broken_off_leaves_nothing(classified, tmp_path):
    model, rows, logits, labels = classified
    calibration = CalibrationMetrics(task="multiclass")
    expected = usual(logits, labels, task="multiclass")
    evaluated = trainer(model, calibration, tmp_path)
    for _ in range(2):
        with pytest.raises((KeyError, ValueError)):
            evaluated.evaluate(Rows([*rows[:9], {"labels": 0}]))
        assert any(metric.update_count for metric in calibration.metrics.values()), "nothing was left to forget"
        assert_all(evaluated.evaluate(rows), expected)
    kept = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}  # one loader, which is read again
    for arguments in ({}, kept):
        evaluated = trainer(model, calibration, tmp_path, eval_dataset=rows, **arguments)
        evaluated.add_callback(Stop)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                evaluated.evaluate()
        evaluated.remove_callback(Stop)
        for _ in range(2):
            assert_all(evaluated.evaluate(), expected)


@pytest.mark.extended
def test_in_training_two_sets_are_measured_apart(tmp_path):
    model, one, other = bert("SequenceClassification"), sentences(13), sentences(7, seed=1)
    calibration = CalibrationMetrics(task="multiclass")
    trained = trainer(
        model, calibration, tmp_path, train_dataset=one, eval_dataset={"one": one, "other": other}, max_steps=2,
        eval_strategy="steps", eval_steps=1, learning_rate=1e-2, per_device_train_batch_size=4,
    )  # fmt: skip
    trained.train()
    logged = [entry for entry in trained.state.log_history if "eval_one_nll" in entry]
    assert len(logged) == 2
    assert logged[0]["eval_one_nll"] != logged[1]["eval_one_nll"]
    last = {name: value for entry in trained.state.log_history for name, value in entry.items()}
    for name, rows in (("one", one), ("other", other)):
        expected = usual(*outputs(model, rows), task="multiclass")
        for metric, value in expected.items():
            close(last[metric.replace("eval", f"eval_{name}")], value)


@pytest.mark.extended
def test_tokens_without_a_label_do_not_count(tmp_path):
    model, rows = bert("TokenClassification"), words(13)
    logits, labels = outputs(model, rows)  # of sentences of several lengths, one after the other
    keep = labels != -100
    assert 0 < keep.sum() < len(keep)
    values = trainer(model, CalibrationMetrics(task="multiclass", num_classes=3), tmp_path, words=True).evaluate(rows)
    assert_all(values, usual(logits[keep], labels[keep], task="multiclass"))


@pytest.mark.extended
def test_a_language_model_is_held_against_the_next_token(tmp_path):
    model = GPT2()
    rows = words(9, own=True)
    calibration = CalibrationMetrics(task="multiclass", shift=True)
    values = trainer(model, calibration, tmp_path, words=True).evaluate(rows)
    following = [(logits[:-1], labels[1:]) for logits, labels in (outputs(model, [row]) for row in rows)]
    logits, labels = (torch.cat(part) for part in zip(*following, strict=True))
    assert_all(values, usual(logits, labels, task="multiclass", ignore_index=-100))
    counted = [(row, n) for row in rows if (n := sum(label != -100 for label in row["labels"][1:]))]
    with torch.no_grad():
        losses = [
            model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.item()
            for row, _ in counted
        ]
    close(
        values["eval_nll"],
        sum(loss * n for loss, (_, n) in zip(losses, counted, strict=True)) / sum(n for _, n in counted),
        tolerance=1e-6,  # transformers takes the loss in float32
    )


@pytest.mark.extended
@pytest.mark.parametrize("labels", [1, 4])
def test_heads_of_labels_that_do_not_exclude_each_other(labels, tmp_path):
    model = bert("SequenceClassification", num_labels=labels, problem_type="multi_label_classification")
    rows = sentences(13)
    for i, row in enumerate(rows):
        row["labels"] = [float((i >> k) & 1) for k in range(labels)]
    logits, target = outputs(model, rows)
    of = {"task": "binary"} if labels == 1 else {"task": "multilabel", "num_labels": labels}
    values = trainer(model, CalibrationMetrics(**of), tmp_path).evaluate(rows)
    assert_all(values, usual(logits.squeeze(-1), target.squeeze(-1), task=of["task"]))
    options = {**of, "from_logits": True, "ignore_index": -100}
    members = {"tce": tc.TCE(**options), "ks": tc.KS(**options)}
    if labels > 1:
        members["each"] = tc.ECE(**options, average=None)
    values = trainer(model, CalibrationMetrics(tc.CalibrationCollection(members)), tmp_path).evaluate(rows)
    close(values["eval_tce"], tc.tce(logits.squeeze(-1), target.squeeze(-1).long(), task=of["task"], from_logits=True))
    if labels > 1:
        each = tc.ece(logits, target, task="multilabel", from_logits=True, average=None)
        close([values[f"eval_each_{k}"] for k in range(labels)], each)


def test_one_logit_a_row_is_read_as_yes_or_no():
    calibration = CalibrationMetrics(task="binary")
    logits, labels = torch.tensor([[0.5], [-1.0], [2.0]]), torch.tensor([1, 0, 1])
    kept = calibration.preprocess_logits_for_metrics(logits, labels)
    values = calibration.compute_metrics(transformers.EvalPrediction(kept.numpy(), labels.numpy()))
    close(values["nll"], tc.nll(logits[:, 0].double(), labels, task="binary", from_logits=True))


@pytest.mark.extended
def test_a_bfloat16_model(tmp_path):
    model, rows = bert("SequenceClassification").bfloat16(), sentences(13)
    values = trainer(model, CalibrationMetrics(task="multiclass"), tmp_path, per_device_eval_batch_size=1).evaluate(
        rows
    )
    logits, labels = outputs(model, rows)
    assert logits.dtype == torch.bfloat16
    assert_all(values, usual(logits.double(), labels, task="multiclass", validate_args=False), tolerance=1e-6)


@pytest.mark.extended
def test_one_hook_without_the_other_is_told(classified, tmp_path):
    model, rows, *_ = classified
    alone = trainer(model, CalibrationMetrics(task="multiclass"), tmp_path)
    alone.preprocess_logits_for_metrics = None
    with pytest.raises(RuntimeError, match="Pass both hooks of one CalibrationMetrics"):
        alone.evaluate(rows)
    mixed = trainer(model, CalibrationMetrics(task="multiclass"), tmp_path)
    mixed.preprocess_logits_for_metrics = CalibrationMetrics(task="multiclass").preprocess_logits_for_metrics
    with pytest.raises(RuntimeError, match="the Trainer must keep the rows that were measured, 0 of process 0, got 13"):
        mixed.evaluate(rows)


def test_wrong_arguments():
    ready = tc.CalibrationCollection([tc.NLL(**MULTICLASS)])
    with pytest.raises(TypeError, match="`metrics` must be a CalibrationCollection or None, got NLL"):
        CalibrationMetrics(tc.NLL(**MULTICLASS))
    with pytest.raises(TypeError, match="`num_classes` must be an option of the metrics"):
        CalibrationMetrics(ready, num_classes=3)
    with pytest.raises(ValueError, match="`ignore_index` must be one and the same of all metrics with shift=True"):
        CalibrationMetrics(ready, shift=True)
    hook = CalibrationMetrics(task="multiclass").preprocess_logits_for_metrics
    with pytest.raises(TypeError, match=r"`labels` must be a tensor, got tuple\. Name one label"):
        hook(torch.zeros(2, 3), (torch.zeros(2), torch.zeros(2)))
    with pytest.raises(ValueError, match=r"`labels` must be \(B, T\) with shift=True, got shape \(2,\)"):
        CalibrationMetrics(task="multiclass", shift=True).preprocess_logits_for_metrics(
            torch.zeros(2, 3), torch.zeros(2)
        )


@pytest.mark.extended
def test_two_processes_are_one(tmp_path):
    """Sets whose last batches are filled up with rows that were read before, up to one of fewer rows than processes."""
    codes, said = run_together([[SCRIPTS / "huggingface_rank.py", tmp_path]] * 2, environments_of_ranks(2))
    assert codes == [0, 0], said
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1]
    for name, values in said[0].items():
        kind, n = name.split()[:2]
        model = bert("TokenClassification" if kind == "words" else "SequenceClassification")
        rows = words(int(n)) if kind == "words" else sentences(int(n))
        logits, labels = outputs(model, rows)
        assert_all(values, usual(logits, labels, task="multiclass", ignore_index=-100))
    assert len(said[0]) >= 8
