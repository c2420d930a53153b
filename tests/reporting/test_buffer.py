"""Buffer of predictions for calibrators and intervals: batches of any dtype equal one call."""

import pytest
import torch
from helpers.reports import assert_equal_stages, realistic

import torchcalib as tc
from torchcalib.calibration import AffineScaling
from torchcalib.reporting.building import ReportBuilder


def report_of_batches(*pieces, **given):
    builder = ReportBuilder(**given)
    for piece in pieces:
        builder.update(*piece)
    return builder.report()


def assert_same_lines(report, expected, of_errors=True):
    """Compare values, noise floors, p-values and intervals: of all lines, or with `of_errors=False` of scores."""
    assert report.notes == expected.notes
    for line, other in zip(report.lines, expected.lines, strict=True):
        assert (line.key, line.value) == (other.key, pytest.approx(other.value, rel=1e-6))
        if of_errors or line.group == "scores":
            numbers, ends = (
                [[part or 0 for part in parts(each)] for each in (line, other)] for parts in (evidence_of, ends_of)
            )
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-9, abs=1e-12, nan_ok=True), line
            # The bias that is subtracted from an interval depends on the value.
            assert ends[0] == pytest.approx(ends[1], rel=1e-6, abs=1e-9, nan_ok=True), line


def evidence_of(line):
    return line.noise_floor, line.p_value


def ends_of(line):
    return tuple(vars(line.interval).values()) if line.interval else ()


def test_batches_with_soft_and_one_hot_targets_equal_one_call():
    preds = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    soft, labels, given = preds.roll(1, 0), torch.arange(10) % 3, {"task": "multiclass"}
    unanimous = torch.nn.functional.one_hot(labels, 3).to(soft)
    whole = tc.report(preds, torch.cat((soft[:20], unanimous)), **given)
    empty, most = (preds[:0], soft[:0]), (preds[:20], soft[:20])
    assert_same_lines(report_of_batches(most, (preds[20:], unanimous), empty, **given), whole)
    rest = preds[5:], torch.cat((soft[5:20], unanimous))
    assert_same_lines(report_of_batches((preds[:5], soft[:5]), empty, rest, **given), whole)
    # Rows with integer labels reduce the noise in any order of batches. Scores are the same.
    certain = report_of_batches(most, (preds[20:], labels), empty, **given)
    assert_same_lines(certain, whole, of_errors=False)
    assert_same_lines(report_of_batches(most, (preds[20:23], labels[:3]), (preds[23:], labels[3:]), **given), certain)


def test_batches_may_have_labels_of_different_dtypes():
    preds, target = realistic("binary", 60)
    given = {"task": "binary", "from_logits": True}
    kinds = (torch.uint16, torch.int64, torch.bool, torch.float16, torch.uint8)
    pieces = zip(preds.split(12), target.split(12), kinds, strict=True)
    report = report_of_batches(*((piece, labels.to(dtype)) for piece, labels, dtype in pieces), **given)
    whole = tc.report(preds, target, **given)
    assert_equal_stages(report.calibration, whole.calibration)
    assert_same_lines(report, whole)
    names = {line.key.split("/")[0] for line in report.lines if line.interval is None}
    assert names == {"atb", "ece_debiased", "ks", "mcb", "mce", "tce"}


def test_calibrator_fitted_to_merged_builders_keeps_the_class_axis():
    preds, target = realistic("multiclass")
    given = {"task": "multiclass", "from_logits": True}
    expected = AffineScaling().fit(preds, target, **given)(preds)
    preds, target = preds.reshape(3, 100, 5).movedim(-1, 1), target.reshape(3, 100)
    for inferred in ({}, {"class_axis": 1}):
        parts = [ReportBuilder(**given, **inferred), ReportBuilder(**given, **inferred)]
        for part, rows in zip(parts, (slice(0, 1), slice(1, None)), strict=True):
            part.update(preds[rows], target[rows])
        found = (parts[0] + parts[1]).fit(AffineScaling())(preds)
        torch.testing.assert_close(found.movedim(1, -1).flatten(0, 1), expected, rtol=1e-9, atol=1e-9)
