"""Predictions that are kept, for calibrators and intervals: pieces of any dtype are those of one call."""

import pytest
import torch
from helpers.reports import TASKS, calibrated, realistic, stages_are_equal

import torchcalib as tc
from torchcalib.report import ReportBuilder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pieces_are_kept_as_they_came(dtype):
    preds, target = realistic("multiclass")
    builder = ReportBuilder(task="multiclass", from_logits=True, with_intervals=False)
    builder.update(preds.to(dtype), target.to(torch.uint8))
    assert [x.dtype for x in builder._kept.given()[:2]] == [dtype, torch.uint8]
    assert builder.report().calibration is not None


def same_lines(report, expected, of_errors=True):
    """Values, and what chance has to do with them; `of_errors` False looks at that of scores alone."""
    assert report.notes == expected.notes
    for line, other in zip(report.lines, expected.lines, strict=True):
        assert (line.key, line.value) == (other.key, pytest.approx(other.value, rel=1e-6))
        if of_errors or line.group == "scores":
            numbers = [
                [each.noise_floor or 0, each.p_value or 0, *(vars(each.interval).values() if each.interval else ())]
                for each in (line, other)
            ]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-9, abs=1e-12, nan_ok=True), line


def test_pieces_of_shares_may_be_unanimous_or_empty_and_labels_among_shares_are_shares():
    preds = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    votes, labels = preds.roll(1, 0), torch.arange(10) % 3
    unanimous = torch.nn.functional.one_hot(labels, 3).to(votes)
    whole = tc.report(preds, torch.cat((votes[:20], unanimous)), task="multiclass")

    def of_pieces(*pieces):
        builder = ReportBuilder(task="multiclass")
        for piece, target in pieces:
            builder.update(piece, target)
        return builder.report()

    empty = preds[:0], votes[:0]
    same_lines(of_pieces((preds[:20], votes[:20]), (preds[20:], unanimous), empty), whole)
    same_lines(of_pieces((preds[:5], votes[:5]), empty, (preds[5:], torch.cat((votes[5:20], unanimous)))), whole)
    # That some rows are labels for certain says more of chance, whatever comes first; to scores they are the same.
    certain = of_pieces((preds[:20], votes[:20]), (preds[20:], labels), empty)
    same_lines(certain, whole, of_errors=False)
    same_lines(of_pieces((preds[:20], votes[:20]), (preds[20:23], labels[:3]), (preds[23:], labels[3:])), certain)


def test_pieces_may_have_labels_of_any_dtype():
    preds, target = realistic("binary", 60)
    builder = ReportBuilder(task="binary", from_logits=True)
    kinds = (torch.uint16, torch.int64, torch.bool, torch.float16, torch.uint8)
    for piece, labels, dtype in zip(preds.split(12), target.split(12), kinds, strict=True):
        builder.update(piece, labels.to(dtype))
    report, whole = builder.report(), tc.report(preds, target, task="binary", from_logits=True)
    stages_are_equal(report.calibration, whole.calibration)
    same_lines(report, whole)
    assert all(line.interval is not None for line in report.lines)


def test_a_report_is_finished_where_intervals_fail():
    """Five copies of a sample of weight 2^51 are more than float64 counts, and in some replicate there are five."""
    preds, target = realistic("binary", 60)
    weights = torch.ones(60, dtype=torch.int64).index_fill(0, torch.tensor([3]), 2**51)
    report = tc.report(preds, target, task="binary", from_logits=True, weights=weights, with_calibration=False)
    assert report.lines[0].interval is None
    said = "Bootstrap intervals are left out: computing them failed with ValueError: `weights` must"
    assert report.notes[-1].startswith(said)


@pytest.mark.parametrize("task", TASKS)
def test_the_fit_of_parts_is_that_of_the_calibrator_in_the_shape_that_they_had(task):
    preds, target = realistic(task)
    calibrator = calibrated(task).calibration.calibrator
    expected = calibrator.fit(preds, target, task=task, from_logits=True)(preds)
    given = {"task": task, "from_logits": True}
    if task == "multiclass":
        preds, target, given["class_axis"] = preds.reshape(3, 100, 5).movedim(-1, 1), target.reshape(3, 100), 1
    parts = [ReportBuilder(**given), ReportBuilder(**given)]
    for part, rows in zip(parts, (slice(0, 1), slice(1, None)), strict=True):
        part.update(preds[rows], target[rows])
    found = (parts[0] + parts[1]).fit(calibrator)(preds)
    found = found.movedim(1, -1).flatten(0, 1) if task == "multiclass" else found
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
