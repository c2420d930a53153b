"""A real `transformers.Trainer` with tiny models. Two processes run huggingface_rank.py."""

import json

import pytest
import torch
from processes import SCRIPTS, environments_of_ranks, run_together

import torchcalib as tc
import torchcalib.functional as F

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from processes.huggingface_rank import GPT2, Rows, bert, outputs, sentences, trainer, words  # noqa: E402

from torchcalib.integrations.huggingface import CalibrationMetrics  # noqa: E402

MULTICLASS = {"task": "multiclass", "from_logits": True}
FUNCTIONS = {"nll": F.nll, "brier": F.brier_score, "ecd": F.ecd, "ece": F.ece, "accuracy": F.accuracy}
# A row alone and the same row in a padded batch use different matrix products. A rounding error of 1e-16 may grow by
# the weight scale of 30 in each of four layers: 1e-16 * 30^4 is 1e-10.
ROUNDING = 1e-10


def close(a, b, tolerance=ROUNDING):
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (a, b))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_all(values, logits, labels, tolerance=ROUNDING, task="multiclass", prefix="eval_"):
    """Compare with the functions of all logits at once."""
    options = {"task": task, "from_logits": True, "ignore_index": -100}
    for name, function in FUNCTIONS.items():
        assert type(values[prefix + name]) is float
        close(values[prefix + name], function(logits, labels, **options), tolerance)


@pytest.fixture(scope="module")
def classified():
    """Return a sentence classifier, 13 sentences with labels, and their logits and labels."""
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
def test_evaluation_gives_the_functions_of_all_logits(classified, arguments, tmp_path):
    model, rows, logits, labels = classified
    calibration = CalibrationMetrics(task="multiclass", num_classes=3)
    evaluated = trainer(model, calibration, tmp_path, **arguments)
    for _ in range(2):
        assert_all(evaluated.evaluate(rows), logits, labels)
    assert not any(metric.update_count for metric in calibration.metrics.values()), "the metrics must be reset"


@pytest.mark.extended
def test_trainer_stores_one_number_per_row_and_logits_of_unlabelled_rows(classified, tmp_path):
    model, rows, logits, labels = classified
    calibration = CalibrationMetrics(task="multiclass")
    predicted = trainer(model, calibration, tmp_path).predict(rows)
    assert predicted.predictions.shape == (13,)
    assert_all(predicted.metrics, logits, labels, prefix="test_")
    unlabelled = trainer(model, calibration, tmp_path).predict(Rows([{**row, "labels": None} for row in rows]))
    close(unlabelled.predictions, logits)
    assert "test_nll" not in unlabelled.metrics
    values = trainer(model, calibration, tmp_path, prediction_loss_only=True).evaluate(rows)
    assert "eval_loss" in values
    assert "eval_nll" not in values


class Stop(transformers.TrainerCallback):
    def on_prediction_step(self, *args, **kwargs):
        raise KeyboardInterrupt


@pytest.mark.extended
def test_interrupted_evaluation_does_not_affect_the_next(classified, tmp_path):
    model, rows, logits, labels = classified
    calibration = CalibrationMetrics(task="multiclass")
    evaluated = trainer(model, calibration, tmp_path)
    for _ in range(2):
        with pytest.raises((KeyError, ValueError)):
            evaluated.evaluate(Rows([*rows[:9], {"labels": 0}]))
        assert any(metric.update_count for metric in calibration.metrics.values()), (
            "the failed evaluation must leave rows"
        )
        assert_all(evaluated.evaluate(rows), logits, labels)
    kept = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}  # one loader, whose workers are reused
    for arguments in ({}, kept):
        evaluated = trainer(model, calibration, tmp_path, eval_dataset=rows, **arguments)
        evaluated.add_callback(Stop)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                evaluated.evaluate()
        evaluated.remove_callback(Stop)
        for _ in range(2):
            assert_all(evaluated.evaluate(), logits, labels)


@pytest.mark.extended
def test_two_evaluation_sets_during_training_have_separate_values(tmp_path):
    model, one, other = bert("SequenceClassification"), sentences(13), sentences(7, seed=1)
    trained = trainer(
        model, CalibrationMetrics(task="multiclass"), tmp_path, train_dataset=one, max_steps=2, learning_rate=1e-2,
        eval_dataset={"one": one, "other": other}, eval_strategy="steps", eval_steps=1, per_device_train_batch_size=4,
    )  # fmt: skip
    trained.train()
    logged = [entry["eval_one_nll"] for entry in trained.state.log_history if "eval_one_nll" in entry]
    assert len(set(logged)) == 2
    last = {name: value for entry in trained.state.log_history for name, value in entry.items()}
    for name, rows in (("one", one), ("other", other)):
        assert_all(last, *outputs(model, rows), prefix=f"eval_{name}_")


@pytest.mark.extended
def test_hidden_states_unlabelled_tokens_and_last_tokens_do_not_count(tmp_path):
    hidden = bert("SequenceClassification", output_hidden_states=True, output_attentions=True)
    for model, rows in ((hidden, sentences(13)), (bert("TokenClassification"), words(13))):
        evaluated = trainer(model, CalibrationMetrics(task="multiclass"), tmp_path, words=model is not hidden)
        assert_all(evaluated.evaluate(rows), *outputs(model, rows))
    model, rows = GPT2(), words(9, own=True)
    evaluated = trainer(model, CalibrationMetrics(task="multiclass", shift=True), tmp_path, words=True)
    following = [(logits[:-1], labels[1:]) for logits, labels in (outputs(model, [row]) for row in rows)]
    assert_all(evaluated.evaluate(rows), *(torch.cat(part) for part in zip(*following, strict=True)))


@pytest.mark.extended
@pytest.mark.parametrize("labels", [1, 4])
def test_multilabel_heads_give_the_functions_of_all_logits(labels, tmp_path):
    model = bert("SequenceClassification", num_labels=labels, problem_type="multi_label_classification")
    rows = sentences(13)
    for i, row in enumerate(rows):
        row["labels"] = [float((i >> k) & 1) for k in range(labels)]
    logits, target = (values.squeeze(-1) for values in outputs(model, rows))
    of = {"task": "binary"} if labels == 1 else {"task": "multilabel", "num_labels": labels}
    assert_all(trainer(model, CalibrationMetrics(**of), tmp_path).evaluate(rows), logits, target, task=of["task"])
    options = {**of, "from_logits": True, "ignore_index": -100}
    each = {"average": None} if labels > 1 else {}
    members = tc.CalibrationCollection({"tce": tc.TCE(**options, **each)})
    values = trainer(model, CalibrationMetrics(members), tmp_path).evaluate(rows)
    found = [value for name, value in values.items() if name.startswith("eval_tce")]
    expected = F.tce(logits, target.long(), task=of["task"], from_logits=True, **each)
    close(found, expected.reshape(-1))


def test_single_logit_per_row_is_binary():
    calibration = CalibrationMetrics(task="binary")
    logits, labels = torch.tensor([[0.5], [-1.0], [2.0]]), torch.tensor([1, 0, 1])
    kept = calibration.preprocess_logits_for_metrics(logits, labels)
    values = calibration.compute_metrics(transformers.EvalPrediction(kept.numpy(), labels.numpy()))
    close(values["nll"], F.nll(logits[:, 0].double(), labels, task="binary", from_logits=True))


@pytest.mark.extended
def test_one_hook_without_the_other_raises_an_error(classified, tmp_path):
    model, rows, *_ = classified
    alone = trainer(model, CalibrationMetrics(task="multiclass"), tmp_path)
    for hook, message in (
        (None, "Pass both hooks of one CalibrationMetrics"),
        (CalibrationMetrics(task="multiclass").preprocess_logits_for_metrics, "must contain all .* rows .* got 13"),
    ):
        alone.preprocess_logits_for_metrics = hook
        with pytest.raises(RuntimeError, match=message):
            alone.evaluate(rows)


def test_wrong_arguments_raise_errors():
    ready, x, y = tc.CalibrationCollection([tc.NLL(**MULTICLASS)]), torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(TypeError, match="`metrics` must be a CalibrationCollection or None, got NLL"):
        CalibrationMetrics(tc.NLL(**MULTICLASS))
    with pytest.raises(TypeError, match="`num_classes` must not be given together with `metrics`"):
        CalibrationMetrics(ready, num_classes=3)
    with pytest.raises(ValueError, match="`ignore_index` must be the same number in all metrics with shift=True"):
        CalibrationMetrics(ready, shift=True)
    with pytest.raises(TypeError, match=r"`labels` must be a tensor, got tuple\. Pass one name"):
        CalibrationMetrics(task="multiclass").preprocess_logits_for_metrics(x, (y, y))
    with pytest.raises(ValueError, match=r"`labels` must be \(B, T\) with shift=True, got shape \(2,\)"):
        CalibrationMetrics(task="multiclass", shift=True).preprocess_logits_for_metrics(x, y)


@pytest.mark.extended
def test_two_processes_give_the_values_of_one(tmp_path):
    """Test sets whose last batches repeat rows, also with fewer rows than processes."""
    codes, output = run_together([[SCRIPTS / "huggingface_rank.py", tmp_path]] * 2, environments_of_ranks(2))
    assert codes == [0, 0], output
    found, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert found == other
    assert len(found) >= 8
    for name, values in found.items():
        kind, n = name.split()[:2]
        model = bert("TokenClassification" if kind == "words" else "SequenceClassification")
        assert_all(values, *outputs(model, words(int(n)) if kind == "words" else sentences(int(n))))


def test_token_logits_have_classes_last_even_if_the_sequence_is_as_long_as_the_number_of_classes():
    calibration = CalibrationMetrics(task="multiclass")
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(2, length, 5, generator=generator), torch.randint(0, 5, (2, length), generator=generator))
        for length in (5, 4, 5, 7)
    ]
    for logits, labels in batches:
        calibration.preprocess_logits_for_metrics(logits, labels)
    logits = torch.cat([logits.flatten(0, 1) for logits, _ in batches])
    labels = torch.cat([labels.flatten() for _, labels in batches])
    for name, value in calibration.metrics.compute().items():
        close(value, FUNCTIONS[name](logits.double(), labels, **MULTICLASS), 1e-6)  # float32 logits
    images = torch.randn(2, 5, 5, 5), torch.randint(0, 5, (2, 5, 5))
    with pytest.raises(ValueError, match="`class_axis` must be given"):
        CalibrationMetrics(task="multiclass").preprocess_logits_for_metrics(*images)
