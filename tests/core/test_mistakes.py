"""Mistakes in input of valid shapes and values, in streams. Valid input never causes a message, even if it is unusual.

The laws of messages in `tests/contract` have the mistakes in a single call.
"""

import inspect
import warnings

import pytest
import torch
from cases import OWN
from contract.messages import BINARY, LABELS, MULTI, SUSPICIOUS, SWAPPED, H, L, M, N, P, Q, Y
from helpers.refusals import check_each

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.reporting.comparison.building import ComparisonBuilder


def ece(**options):
    return tc.ECE(**options, **OWN[options["task"]])


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
        preds, target, options, advice, _ = SUSPICIOUS[name]
        with pytest.warns(UserWarning, match="`preds` must be") as caught:
            in_batches(UPDATES[kind](**options), 4, preds, target)
        assert all(advice in str(warning.message) for warning in caught)
        assert {warning.filename for warning in caught} == {__file__}

    check_each(SEEN_IN_STREAMS if kind == "update" else SEEN_IN_STREAMS[:1], check)
    for size in (1, 16) if kind == "update" else (16,):
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
