"""Mistakes in input of valid shapes and values: each message names the remedy, which gives the right result.

Valid input never causes a message, even if it is unusual.
"""

import inspect
import warnings

import pytest
import torch
from cases import OWN
from helpers.refusals import check_each
from helpers.reports import QUICK

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.calibration import BiasCorrection
from torchcalib.inference import calibration_test
from torchcalib.reporting.comparison.building import ComparisonBuilder

N, C = 240, 4
G = torch.Generator().manual_seed(0)
P = (3 * torch.randn(N, generator=G, dtype=torch.float64)).sigmoid()
Y = (torch.rand(N, generator=G, dtype=torch.float64) < P).long()
LOGITS = torch.randn(N, C, generator=G, dtype=torch.float64)
Q, H = LOGITS.softmax(-1), torch.multinomial(LOGITS.softmax(-1), 1, generator=G).squeeze(-1)
M, L = torch.rand(N, C, generator=G), (torch.rand(N, C, generator=G) < 0.4).long()
MANY = torch.arange(N) % 3 == 0
FEW, MOST = torch.arange(N) % 20 == 7, torch.arange(N) % 20 != 7
ONE_HOT = torch.nn.functional.one_hot(Q.argmax(-1), C)
BINARY, MULTI, LABELS = {"task": "binary"}, {"task": "multiclass"}, {"task": "multilabel"}
SWAPPED, DECISIONS = "Pass the predictions first, then the targets", "Pass probabilities: predict_proba(X)"
IGNORE = "Pass ignore_index=-100"

# name: preds, target, options, text of the error, and the arguments that follow from the advice; None if data are lost
ERRORS = {
    "swapped labels": (Y, P, BINARY, SWAPPED, (P, Y, BINARY)),
    "swapped bool labels": (Y.bool(), P, BINARY, SWAPPED, (P, Y, BINARY)),
    "swapped floating labels": (Y.double(), P, BINARY, SWAPPED, (P, Y, BINARY)),
    "swapped columns": (Y[:, None].float(), P[:, None].float(), BINARY, SWAPPED, (P, Y, BINARY)),
    "swapped labels with logits": (Y.double(), P, BINARY | {"from_logits": True}, SWAPPED, (P, Y, BINARY)),
    "swapped multi-label": (L, M, LABELS, SWAPPED, (M, L, LABELS)),
    "swapped floating multi-label": (L.float(), M, LABELS, SWAPPED, (M, L, LABELS)),
    "swapped class indices": (H, Q, MULTI, SWAPPED, (Q, H, MULTI)),
    "swapped labels and logits": (Y, P.logit(), BINARY, SWAPPED, (P.logit(), Y, BINARY | {"from_logits": True})),
    "swapped floating labels and logits": (Y.float(), P.logit(), BINARY, SWAPPED,
                                           (P.logit(), Y, BINARY | {"from_logits": True})),
    "swapped floating class indices": (H.float(), Q, MULTI, SWAPPED, (Q, H, MULTI)),
    "swapped one-hot labels": (ONE_HOT.double(), Q, MULTI, SWAPPED, (Q, Q.argmax(-1), MULTI)),
    "decisions": ((P > 0.5).long(), Y, BINARY, DECISIONS, None),
    "bool decisions": (P > 0.5, Y, BINARY, DECISIONS, None),
    "decisions with floating labels": ((P > 0.5).long(), Y.float(), BINARY, DECISIONS, None),
    "predicted classes": (Q.argmax(-1), H, MULTI, DECISIONS, None),
    "one-hot decisions": (ONE_HOT, H, MULTI, DECISIONS, None),
    "multi-label decisions": ((M > 0.5).int(), L, LABELS, DECISIONS, None),
    "whole percentages": ((100 * P).long(), Y, BINARY, "pass preds / 100", ((100 * P).long() / 100, Y, BINARY)),
    "whole logits": ((9 * LOGITS).long(), H, MULTI, "preds.float()",
                     ((9 * LOGITS).long().float(), H, MULTI | {"from_logits": True})),
    "percentages": (100 * P, Y, BINARY, "Divide percentages by 100", (P, Y, BINARY)),
    "percentages of classes": (100 * Q, H, MULTI, "Divide them by 100", (Q, H, MULTI)),
    "percentages of labels": (100 * M, L, LABELS, "Divide percentages by 100", (M, L, LABELS)),
    "logits": (LOGITS, H, MULTI, "Pass from_logits=True", (LOGITS, H, MULTI | {"from_logits": True})),
    "binary logits": (P.logit(), Y, BINARY, "Pass from_logits=True", (P.logit(), Y, BINARY | {"from_logits": True})),
    "multi-label logits": (M.logit(), L, LABELS, "Pass from_logits=True",
                           (M.logit(), L, LABELS | {"from_logits": True})),
    "classes first": (Q.T, H, MULTI, "Pass class_axis=0", (Q.T, H, MULTI | {"class_axis": 0})),
    "class indices as floats": (H.double(), Y, BINARY, "class indices or ratings", None),
    "positive logits": (9 * P, Y, BINARY, "Pass from_logits=True only for the input of a sigmoid",
                        (9 * P, Y, BINARY | {"from_logits": True})),
    "many labels of 255": (Q, H.masked_fill(MANY, 255), MULTI, "Pass ignore_index=255 if",
                           (Q[~MANY], H[~MANY], MULTI)),
    "labels from 1 beside ignored ones": (Q, (H + 1).masked_fill(MANY, 255), MULTI | {"ignore_index": 255},
                                          "count from 1. Subtract 1 from all labels that are not ignored",
                                          (Q[~MANY], H[~MANY], MULTI)),
    "few labels of -100": (Q, H.masked_fill(FEW, -100), MULTI, IGNORE, (Q[~FEW], H[~FEW], MULTI)),
    "most labels of -100": (Q, H.masked_fill(MOST, -100), MULTI, IGNORE, (Q[~MOST], H[~MOST], MULTI)),
    "binary labels of -100": (P, Y.masked_fill(MOST, -100), BINARY, IGNORE, (P[~MOST], Y[~MOST], BINARY)),
    "floating labels of -100": (P, Y.double().masked_fill(FEW, -100), BINARY, IGNORE, (P[~FEW], Y[~FEW], BINARY)),
}  # fmt: skip


def ece(**options):
    return tc.ECE(**options, **OWN[options["task"]])


def streamed(preds, target, **options):
    metric = ece(**options)
    metric.update(preds, target)
    return metric.compute()


def by_test(preds, target, **options):
    return calibration_test(ece(**options), preds, target, n_replicates=39).statistic


def reported(preds, target, **options):
    report = tc.report(preds, target, **options, **QUICK)
    return report["ece/classwise" if options["task"] == "multilabel" else "ece"]


def compared(preds, target, **options):
    lines = tc.compare({"a": preds, "b": preds}, target, n_replicates=99, **options).lines
    return next(line for line in lines if line.key.startswith("ece")).values["a"]


def fitted(preds, target, **options):
    calibrator = BiasCorrection().fit(preds, target, **options)
    return calibrator.beta


USUAL = (F.ece, streamed, by_test, reported, pytest.param(compared, marks=pytest.mark.extended))


@pytest.mark.parametrize("way", [*USUAL, fitted])
@pytest.mark.filterwarnings("ignore:.*(has no samples of class|gives probability 0)")
def test_the_advice_of_each_error_gives_the_result_of_the_right_input(way):
    def check(name):
        preds, target, options, advice, remedy = ERRORS[name]
        if way is fitted and advice == "Pass from_logits=True":  # calibrators infer it
            return
        with pytest.raises((TypeError, ValueError)) as raised:
            way(preds, target, **options)
        message = str(raised.value)
        assert advice in message
        assert ("must" in message, "got" in message, len(message) <= 500) == (True, True, True), message
        if remedy is None:
            return
        *right, how = remedy
        expected = way(*right, **how)
        if advice == IGNORE:  # the remedy above leaves the rows out instead
            found = way(preds, target, **options, ignore_index=-100)
            torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected))
        assert not torch.as_tensor(expected).isnan().any()

    check_each(ERRORS, check)


WARNINGS = {  # name: preds, target, options, and text of the warning
    "probabilities as logits": (Q, H, MULTI, "Omit from_logits=True"),
    "few probabilities as logits": (Q[:20], H[:20], MULTI, "Omit from_logits=True"),
    "bfloat16 probabilities as logits": (Q.bfloat16(), H, MULTI, "Omit from_logits=True"),
    "maps of probabilities as logits": (Q.reshape(4, 60, C).movedim(-1, 1), H.reshape(4, 60), MULTI, "Omit"),
    "binary probabilities as logits": (P, Y, BINARY, "Omit from_logits=True"),
    "multi-label probabilities as logits": (M, L, LABELS, "Omit from_logits=True"),
    "floating decisions": ((P > 0.5).double(), Y, BINARY, DECISIONS),
    "floating decisions as logits": ((P > 0.5).double(), Y, BINARY, DECISIONS),
    "floating one-hot decisions": (ONE_HOT.float(), H, MULTI, DECISIONS),
    "floating multi-label decisions": ((M > 0.5).float(), L, LABELS, DECISIONS),
}


@pytest.mark.parametrize("way", USUAL)
def test_probabilities_as_logits_and_decisions_cause_a_warning_at_the_caller(way):
    def check(name):
        preds, target, options, advice = WARNINGS[name]
        given = {"from_logits": True} if "logits" in name else {}
        with pytest.warns(UserWarning, match="`preds` must be") as caught:
            way(preds, target, **options, **given)
        messages = {str(warning.message) for warning in caught}
        assert len(messages) == 1
        assert advice in messages.pop()
        assert {warning.filename for warning in caught} == {__file__}
        if advice != DECISIONS:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert torch.as_tensor(way(preds, target, **options)).isfinite().all()

    check_each(WARNINGS, check)


def test_a_warning_is_shown_once_for_each_call_site():
    metric = tc.ECE(task="multiclass", from_logits=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for start in range(0, N, 30):
            metric.update(Q[start : start + 30], H[start : start + 30])
        line = inspect.currentframe().f_lineno + 1
        metric(Q, H)
    assert len(caught) == 2
    assert caught[1].lineno == line


def updates_of_a_collection(**options):
    return tc.CalibrationCollection([ece(**options), tc.NLL(**options, **OWN[options["task"]])]).update


def updates_of_a_report(**options):
    return tc.ReportBuilder(**options, with_calibration=False, with_intervals=False).update


def updates_of_a_comparison(**options):
    builder = ComparisonBuilder(["a", "b"], **options)
    return lambda preds, target: builder.update({"a": preds, "b": preds}, target)


UPDATES = {
    "update": lambda **options: ece(**options).update,
    "forward": ece,
    "collection": updates_of_a_collection,
    "report": updates_of_a_report,
    "comparison": updates_of_a_comparison,
}
SEEN_IN_STREAMS = ("probabilities as logits", "binary probabilities as logits", "floating decisions",
                   "floating one-hot decisions", "floating multi-label decisions")  # fmt: skip


def in_batches(update, size, *columns):
    for batch in zip(*(column.split(size) for column in columns), strict=True):
        update(*batch)


@pytest.mark.parametrize("kind", UPDATES)
def test_mistakes_in_small_batches_are_recognised_in_the_stream(kind):
    def check(name):
        preds, target, options, advice = WARNINGS[name]
        given = {"from_logits": True} if "logits" in name else {}
        with pytest.warns(UserWarning, match="`preds` must be") as caught:
            in_batches(UPDATES[kind](**options, **given), 4, preds, target)
        assert all(advice in str(warning.message) for warning in caught)
        assert {warning.filename for warning in caught} == {__file__}

    check_each(SEEN_IN_STREAMS, check)
    for size in (1, 16):
        with pytest.raises(ValueError, match=SWAPPED):
            in_batches(UPDATES[kind](**BINARY), size, Y.double(), P)


def test_one_valid_batch_rules_out_mistakes_in_a_stream_until_reset():
    metric = tc.ECE(**BINARY)
    decisions, target = (P > 0.5).double(), Y
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric.update(P[:8], target[:8])
        in_batches(metric.update, 8, decisions, target)
    metric.reset()
    with pytest.warns(UserWarning, match="seem to be decisions"):
        in_batches(metric.update, 8, decisions, target)
    metric.reset()
    with pytest.raises(ValueError, match="pass validate_args=False"):
        metric.update(decisions, P)
    soft = tc.ECE(**BINARY, validate_args=False)
    soft.update(decisions, P)
    assert soft.compute() > 0


def test_unusual_valid_input_causes_no_message():
    """Logits within [0, 1], saturated probabilities, label smoothing, and few rows."""
    generator = torch.Generator().manual_seed(0)
    normal, uniform = torch.randn(300, generator=generator), torch.rand(300, generator=generator)
    target = (uniform < 0.5).long()
    smooth = 0.05 + 0.9 * target.float()
    saturated = (40 * normal).sigmoid().round()
    logits = {"from_logits": True}
    valid = {
        "a weak model": (0.5 + 0.1 * normal.clamp(-3, 3), target, BINARY | logits),
        "logits from 0.05 to 0.95": (0.05 + 0.9 * uniform, target, BINARY | logits),
        "equal logits": (torch.ones(300), target, BINARY | logits),
        "positive logits": (normal.clamp(min=0), target, BINARY | logits),
        "few logits": (uniform[:99], target[:99], BINARY | logits),
        "few rows of logits": (Q[:19], H[:19], MULTI | logits),
        "logits within [0, 1]": (uniform.reshape(-1, 3), target[:100], MULTI | logits),
        "equal rows of logits": (torch.zeros(100, 3), target[:100], MULTI | logits),
        "log-probabilities": (Q.log(), H, MULTI | logits),
        "saturated probabilities and smooth labels": (saturated[:99], smooth[:99], BINARY),
        "few saturated probabilities": (saturated[:99], target[:99], BINARY),
        "few saturated probabilities and soft targets": (saturated[:19], uniform[:19], BINARY),
        "probabilities of 0": (torch.zeros(300), torch.zeros(300), BINARY),
        "certain background": (torch.eye(3)[torch.zeros(300).long()], torch.zeros(300).long(), MULTI),
        "almost all saturated": (torch.cat((saturated, uniform[:1])), torch.cat((smooth, uniform[:1])), BINARY),
        "votes": (saturated[:99], torch.stack((1 + 3 * target, 4 - target), -1)[:99], BINARY),
    }

    def check(name):
        preds, labels, options = valid[name]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            F.ece(preds, labels, **options)

    check_each(valid, check)
    # The scale for which the range of normal logits is most likely to be close to [0, 1]
    worst = 0.5 + 0.17 * torch.randn(1000, 200, generator=generator, dtype=torch.float64)
    assert sum(tc.core.mistakes.look_like_probabilities(row, False) for row in worst) <= 2


def test_a_single_class_in_the_targets_is_named_and_gives_no_calibrator():
    kept = {"with_intervals": False}
    for preds, target, verdict in (
        (P, 0 * Y, "Only y = 0 in the targets"),
        (Q, 0 * H + 2, "Only class 2 in the targets"),
        (M, 0 * L, "Only 0 in the targets of all labels"),
        (M, 0 * L + 1, "Only 1 in the targets of all labels"),
    ):
        task = LABELS if preds is M else {}
        report = tc.report(preds, target, **task, **kept)
        assert report.decision.verdict == verdict
        assert (report.decision.calibrator, report.calibration) == ("", None)
        assert "Check that `target` is the right array" in report.decision.action


def test_a_comparison_with_a_single_class_names_it_instead_of_a_better_system():
    noisy = (P + 0.1).clamp(max=1)
    for a, b, target, only in (
        (P, noisy, 0 * Y, "class 0"),
        (Q, Q.flip(-1), 0 * H + 2, "class 2"),
        (M, 1 - M, 0 * L, "0"),
    ):
        task = LABELS if a is M else {}
        found = tc.compare({"a": a, "b": b}, target, n_replicates=99, **task)
        assert found.sentences["b"] == f"Calibration cannot be compared: all targets are {only}."
        assert f"All targets are {only}. Check that `target` is the right array." in found.notes


def test_constant_labels_of_a_report_are_named():
    for value in (0, 1):
        target = torch.cat((L[:, :3], torch.full((N, 1), value)), 1)
        report = tc.report(M, target, task="multilabel", class_names=list("abcd"), with_intervals=False)
        assert any("All targets are equal for the labels `d`." in note for note in report.notes)


def test_transposed_soft_targets_and_binary_input_with_another_task_are_named():
    soft = Q.flip(0).T
    with pytest.raises(ValueError, match=r"class_axis=0 for \(C, N\)"):
        F.nll(Q.T, soft, task="multiclass")
    with pytest.raises(ValueError, match="Pass class_axis=0 if"):
        streamed(Q.T, soft, **MULTI)
    assert F.nll(Q.T, soft, task="multiclass", class_axis=0) == F.nll(Q, soft.T, task="multiclass")
    for way in (reported, compared):
        with pytest.raises(ValueError, match="Pass task='binary' if each value is P"):
            way(P, Y, **MULTI)


def test_data_without_rows_are_no_missing_update():
    rows = {"no rows": (Q[:0], H[:0], {}), "ignored": (Q, 0 * H, {"ignore_index": 0}),
            "weights of 0": (Q, H, {"weights": torch.zeros(N)})}  # fmt: skip
    for preds, target, options in rows.values():
        for call in (
            lambda p, y, **how: tc.report(p, y, **how),
            lambda p, y, **how: tc.compare({"a": p, "b": p}, y, **how),
        ):
            with pytest.raises(ValueError, match="Check that there are rows, and that `ignore_index`, `weights`"):
                call(preds, target, task="multiclass", **options)


def test_weights_of_a_constructor_and_percentages_of_a_calibrator_get_the_right_advice():
    for name in ("weights", "sample_weight"):
        with pytest.raises(TypeError, match=r"Pass weights=\.\.\. in the call"):
            tc.losses.MMCELoss(task="binary", **{name: P})
    with pytest.raises(ValueError, match="Divide percentages by 100"):
        BiasCorrection().fit(P, Y)(100 * P)
