"""Conversion of array-likes, label names, and inference of the task."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.refusals import check_each
from helpers.reports import QUICK
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import make_scorer
from sklearn.model_selection import cross_val_score

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.arrays import as_tensor
from torchcalib.core.tasks import per_sample, prepare

N, C = 6, 3
NAMES = ("cat", "dog", "eel")
PROBS = np.random.default_rng(0).dirichlet([1.0] * C, N)
LABELS = np.array([0, 1, 2, 2, 1, 0])


def zeros(*shape, kind=torch.float32):
    return torch.zeros(shape, dtype=kind)


@pytest.mark.parametrize(
    "function", [F.ece, F.canonical_error, lambda *given, **how: F.calibration_curve(*given, **how).n]
)
def test_functions_infer_the_task_of_a_batch(function):
    scores = torch.rand(2, 30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = (scores > 0.4).long()
    for task, preds, target in (
        ("binary", scores[..., 0], labels[..., 0]),
        ("multiclass", scores.softmax(-1), labels.argmax(-1)),
    ):
        given = preds.tolist(), target.numpy()
        torch.testing.assert_close(function(*given, batch_dims=1), function(*given, task, batch_dims=1))
    with pytest.raises(ValueError, match="`task` must be given"):  # equal shapes are ambiguous for any labels
        function(scores, labels, batch_dims=1)
    for count, task in (({"num_classes": 4}, "multiclass"), ({"num_labels": 4}, "multilabel")):
        preds, target = (scores, labels) if task == "multilabel" else (scores.softmax(-1), labels.argmax(-1))
        torch.testing.assert_close(
            F.ece(preds, target, batch_dims=1, **count), F.ece(preds, target, task, batch_dims=1)
        )


@pytest.mark.parametrize(
    "convert",
    [
        np.asarray,
        lambda x: x.tolist(),
        lambda x: torch.from_numpy(x),
        lambda x: x[::-1][::-1],
        lambda x: x.astype(x.dtype.newbyteorder(">")),
        lambda x: [torch.tensor(row) for row in x],
        lambda x: np.asarray(x).view(type("Sub", (np.ndarray,), {})),
    ],
)
def test_every_kind_of_array_keeps_its_values(convert):
    found = prepare(convert(PROBS), convert(LABELS))
    np.testing.assert_array_equal(found.preds, PROBS)
    np.testing.assert_array_equal(found.target, LABELS)
    assert (found.preds.dtype, found.target.dtype) == (torch.float64, torch.int64)


def test_text_labels_are_converted_to_the_index_of_their_name():
    words = np.array(NAMES)[LABELS]
    for given in (words, words.astype(object), words.tolist()):
        found = prepare(PROBS, given, class_names=NAMES)
        np.testing.assert_array_equal(found.target, LABELS)
        assert found.class_names == NAMES
    binary = prepare([0.1, 0.9], ["ham", "spam"], class_names=np.array(["ham", "spam"]))
    assert (binary.task, binary.target.tolist()) == ("binary", [0, 1])


def test_arrays_of_python_integers_stay_integers():
    """An array of objects becomes floating only if a value is missing."""
    assert as_tensor("target", np.array([0, 1], dtype=object)).dtype == torch.int64
    assert as_tensor("preds", np.array([0.2, None], dtype=object)).isnan().tolist() == [False, True]


def test_pandas_objects_keep_values_and_column_names():
    pd = pytest.importorskip("pandas")
    words = np.array(NAMES)[LABELS]
    frame = pd.DataFrame(PROBS, columns=list(NAMES), index=range(N, 0, -1))
    for given in (pd.Series(words), pd.Series(pd.Categorical(words, categories=NAMES[::-1])), pd.DataFrame(words)):
        found = prepare(frame, given)
        np.testing.assert_array_equal(found.target, LABELS)
        assert found.class_names == NAMES
    plain = prepare(pd.DataFrame(PROBS), pd.Series(LABELS, dtype="Int64"))
    assert (plain.class_names, plain.target.dtype) == ((), torch.int64)
    np.testing.assert_array_equal(per_sample("weights", pd.DataFrame(LABELS), plain.preds), LABELS)


@pytest.mark.parametrize(
    "words", [("incorrect", "correct"), ("No", "Yes"), ("False", "True"), ("neg", "pos"), ("0", "1")]
)
def test_texts_for_outcomes_need_no_class_names(words):
    probs, labels = PROBS[:, 0], (LABELS == 0).astype(int)
    text = np.array(words)[labels]
    for given in (text, text.tolist(), text.astype(object)):
        found = prepare(probs, given)
        shown = () if words == ("0", "1") else words  # numbers of positions are no names
        assert (found.task, found.class_names, found.target.tolist()) == ("binary", shown, labels.tolist())
        assert F.ece(probs, given) == F.ece(probs, labels)
    assert prepare(probs, [words[1]] * N).class_names == (shown and (words[0].lower(), words[1]))


@pytest.mark.parametrize("from_logits", [False, True, None])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_with_different_numbers_of_choices_are_padded_with_a_warning(from_logits, kind):
    rows = [[0.2, -1.0], [2.0, 0.0, 1.0], [-0.3]] if from_logits is not False else [[0.5, 0.5], [0.2, 0.3, 0.5], [1.0]]
    fill = 0.0 if from_logits is False else -torch.inf
    words = "rows of 1 to 3 choices. Missing choices have " + ("logit -inf" if from_logits is not False else "prob")
    with pytest.warns(UserWarning, match=words):
        found = prepare([kind(row) for row in rows], [1, 2, 0], from_logits=from_logits)
    assert found.task == "multiclass"
    expected = torch.tensor([[*row, *[fill] * (3 - len(row))] for row in rows], dtype=found.preds.dtype)
    assert torch.equal(found.preds, expected)
    if from_logits is not None:
        with pytest.warns(UserWarning, match=words):
            value = F.nll([kind(row) for row in rows], [1, 2, 0], from_logits=from_logits)
        log_probs = expected.log_softmax(-1) if from_logits else expected.log()
        torch.testing.assert_close(value, -log_probs[[0, 1, 2], [1, 2, 0]].mean())


@pytest.mark.parametrize("outcomes", [[1, 0, 1], [True, False, True], ["correct", "incorrect", "correct"]])
def test_whole_percentages_of_outcomes_are_divided_by_100_with_a_warning(outcomes):
    for percent in ([90, 5, 100], np.array([90, 5, 100], np.uint8)):
        with pytest.warns(UserWarning, match="contains percentages, which are divided by 100"):
            assert F.brier_score(percent, outcomes) == pytest.approx((0.1**2 + 0.05**2) / 3)


# Lists of batches: arrays or tensors whose first axis has the samples

SIZES = (4, 1, 7)
DRAWN = torch.Generator().manual_seed(1)
OF_BATCHES = {
    "binary": (torch.rand(12, generator=DRAWN), torch.randint(0, 2, (12,), generator=DRAWN)),
    "multiclass": (torch.randn(12, 3, generator=DRAWN).softmax(-1), torch.randint(0, 3, (12,), generator=DRAWN)),
    "multilabel": (torch.rand(12, 3, generator=DRAWN), torch.randint(0, 2, (12, 3), generator=DRAWN)),
}


@pytest.mark.parametrize("kind", [torch.clone, np.asarray])
@pytest.mark.parametrize("task", OF_BATCHES)
def test_lists_of_batches_have_the_value_of_all_rows(task, kind):
    (preds, target), weights = OF_BATCHES[task], torch.arange(1.0, 13)

    def batches(x):
        return [kind(part) for part in x.split(SIZES)]

    expected = F.nll(preds, target, task, weights=weights)
    for labels in (target, batches(target)):
        for of_rows in (weights, batches(weights)):
            assert F.nll(batches(preds), labels, task, weights=of_rows) == expected
    report = tc.report(batches(preds), batches(target), task=task, weights=batches(weights), **QUICK)
    assert report["nll"] == pytest.approx(expected.item(), rel=1e-12 if preds.dtype == torch.float64 else 1e-6)
    clusters = torch.arange(12) // 3
    reports = [tc.report(batches(preds), target, task=task, clusters=c, **QUICK) for c in (clusters, batches(clusters))]
    assert reports[0].to_dict() == reports[1].to_dict()


def test_lists_of_rows_and_of_single_labels_are_no_batches():
    rows, labels = [torch.tensor([0.2, 0.9]), torch.tensor([0.4, 0.3])], torch.tensor([[0, 1], [1, 0]])
    expected = F.nll(torch.stack(rows), labels, "multilabel")
    assert F.nll(rows, list(labels), "multilabel") == expected  # rows with two labels, not two batches
    assert F.nll([0.2, 0.9], [0, 1]) == F.nll(torch.tensor([0.2, 0.9], dtype=torch.float64), torch.tensor([0, 1]))


def test_pandas_indices_in_different_orders_give_a_warning():
    target = pd.Series([0, 1, 1], index=["a", "b", "c"])
    preds = pd.DataFrame({"no": [0.8, 0.3, 0.4], "yes": [0.2, 0.7, 0.6]}, index=["c", "a", "b"])
    with pytest.warns(UserWarning, match="the same index in different orders"):
        F.nll(preds, target)


@pytest.mark.parametrize("convert", [np.array, torch.tensor, list])
def test_predicted_labels_give_a_report_on_confidences(convert):
    pred, target, confidence = [0, 2, 1, 1, 0], [0, 1, 1, 0, 0], [0.9, 0.6, 0.8, 0.7, 0.5]
    found = tc.report(confidence, convert(target), pred=convert(pred), **QUICK)
    outcomes = [1, 0, 1, 0, 1]
    expected = tc.report(confidence, outcomes, task="confidence", **QUICK)
    assert (found.task, found["accuracy"], found.sentence) == ("binary", 0.6, expected.sentence)
    assert found["brier"] == pytest.approx(
        sum((c - y) ** 2 for c, y in zip(confidence, outcomes, strict=True)) / 5, rel=1e-12
    )
    words = [["a", "b", "c"][k] for k in pred], [["a", "b", "c"][k] for k in target]
    assert tc.report(confidence, words[1], pred=words[0], **QUICK)["brier"] == found["brier"]


IMAGES = torch.rand(4, C, 5, 6, generator=torch.Generator().manual_seed(0)).softmax(1)
MASKS = torch.arange(120).reshape(4, 5, 6) % C
Y = torch.tensor([1, 0, 0, 1, 0, 1])
Q = torch.tensor(PROBS)
EQUAL = {  # task, predictions, integer labels, and equal input
    "floating labels": ("binary", Q[:, 0], Y, Q[:, 0], Y.half()),
    "columns of floating labels": ("binary", Q[:, 0], Y, Q[:, :1], Y[:, None].double()),
    "floating multi-label": ("multilabel", Q, torch.stack((Y, 1 - Y, Y), 1), Q, torch.stack((Y, 1 - Y, Y), 1).float()),
    "maps with a channel": ("binary", IMAGES[:, 0], MASKS % 2, IMAGES[:, :1], MASKS % 2),
    "binary masks with a channel": ("binary", IMAGES[:, 0], MASKS % 2, IMAGES[:, 0], MASKS[:, None] % 2),
    "a column of classes": ("multiclass", Q, torch.tensor(LABELS), Q, torch.tensor(LABELS)[:, None]),
    "masks with a channel": ("multiclass", IMAGES, MASKS, IMAGES, MASKS[:, None]),
    "masks with a last channel": ("multiclass", IMAGES.movedim(1, -1), MASKS, IMAGES.movedim(1, -1), MASKS[..., None]),
}


def streamed(cls, preds, target, task):
    outputs = {"multiclass": {"num_classes": C}, "multilabel": {"num_labels": C}}.get(task, {})
    metrics = tc.CalibrationCollection({"one": cls(task, **outputs), "ece": tc.ECE(task, **outputs)})
    metrics.update(preds, target)
    return torch.stack([*metrics.compute().values()])


def reported(preds, target, task):
    return [*tc.report(preds, target, task=task, **QUICK).values()]


def compared(preds, target, task):
    lines = tc.compare({"a": preds, "b": preds}, target, task=task, n_replicates=39).lines
    return [value for line in lines for value in line.values.values()]


def evaluated(preds, target, task):
    given = {"task": task, "from_logits": False, "progress": False}
    return [*tc.evaluate(lambda inputs: inputs, [(preds, target)], **given, **QUICK).values()]


@pytest.mark.parametrize(
    "call",
    [
        F.ece, F.nll, F.ace, F.ks, F.tce, F.aurc, F.corp, F.spiegelhalter, reported, compared,
        pytest.param(evaluated, marks=pytest.mark.extended),
        *(partial(streamed, cls) for cls in (tc.TCE, tc.AURC, tc.EAURC, tc.AUGRC, tc.SmECE)),
        lambda p, t, task: tc.calibration.TemperatureScaling().fit(p, t, task=task).alpha,
        partial(tc.calibration.cross_val_calibrate, calibrator=tc.calibration.BiasCorrection(), n_folds=2),
        lambda p, t, task: tc.inference.bootstrap(F.aurc, p, t, task=task, n_replicates=39).high,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_labels_of_every_shape_and_dtype_mean_the_same(call):
    """A class axis of size 1, and the floating labels of `BCEWithLogitsLoss`."""

    def check(name):
        task, preds, target, other_preds, other_target = EQUAL[name]
        values = call(preds, target, task=task), call(other_preds, other_target, task=task)
        expected, found = (np.asarray(value).ravel() for value in values)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)

    check_each(list(EQUAL)[:: 3 if call in (compared, reported) else 1], check)


def test_weights_and_annotator_counts_may_lack_the_channel_of_maps():
    maps, target, weights = IMAGES[:, 0], MASKS % 2, torch.arange(1.0, 121.0).reshape(4, 5, 6)
    for given in (weights, torch.stack((weights, weights.flip(0)))):  # without and with replicates
        expected = F.ece(maps, target, "binary", weights=given)
        for preds, labels in ((maps[:, None], target), (maps[:, None], target[:, None]), (maps, target[:, None])):
            for shaped in (given, given.unsqueeze(-3)):
                torch.testing.assert_close(F.ece(preds, labels, "binary", weights=shaped), expected)
    counts = torch.stack((3 - target, target), -1)
    assert F.nll(maps[:, None], counts, "binary") == F.nll(maps, counts, "binary")


def test_ignored_and_missing_floating_labels_are_dropped_where_labels_are_required():
    target = torch.tensor([-100.0, 1.0, 0.0, torch.nan, 0.0, 1.0])
    found = F.aurc(Q[:, 0], target, "binary", ignore_index=-100, nan_policy="drop")
    kept = [1, 2, 4, 5]
    assert found == F.aurc(Q[kept, 0], target[kept].long(), "binary")


def test_sample_weight_means_weights_everywhere():
    preds, target, weights = torch.rand(20), torch.randint(0, 2, (20,)), torch.rand(20)
    expected = F.ece(preds, target, "binary", weights=weights)
    metric = tc.ECE("binary")
    metric.update(preds, target, sample_weight=weights)
    collection = tc.CalibrationCollection([tc.ECE("binary")])
    collection.update(preds, target, sample_weight=weights)
    curve = F.calibration_curve(preds, target, "binary", sample_weight=weights)
    found = (
        F.ece(preds, target, "binary", sample_weight=weights),
        metric.compute(),
        collection.compute()["ECE"],
        (curve.share * curve.gap.abs()).nansum(),
        tc.inference.calibration_test(metric, preds, target, sample_weight=weights).statistic,
    )
    torch.testing.assert_close(torch.stack([x.double() for x in found]), expected.double().expand(len(found)))


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        (np.arange(120) // 7 % 2, "The arguments seem to be swapped"),
        ((np.arange(120) // 7 % 2).astype(float), "The arguments seem to be swapped"),
        (np.arange(120) // 7 % 2 == 1, "The arguments seem to be swapped"),
        (np.arange(120) % 3, "The arguments seem to be swapped"),
        (np.array(["no", "yes"])[np.arange(120) // 7 % 2], "If these are labels, pass the predictions first"),
    ],
    ids=["int", "float", "bool", "classes", "text"],
)
def test_scorers_of_functions_name_the_scorers_of_the_package(labels, rule):
    """`make_scorer` passes labels first."""
    features = np.arange(120.0)[:, None] / 60 - 1
    scorer = make_scorer(tc.nll, response_method="predict_proba", greater_is_better=False)
    with pytest.raises((TypeError, ValueError), match=rule) as error:
        cross_val_score(LogisticRegression(), features, labels, scoring=scorer, error_score="raise")
    assert "torchcalib.sklearn.get_scorer" in str(error.value)
