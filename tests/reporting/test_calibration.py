"""Calibration section of a report: every gain equals that of its function, or a note explains its absence."""

import json
import math
from functools import partial

import pytest
import torch
from helpers.refusals import check_each
from helpers.reports import (
    assert_equal_stages,
    bare,
    calibrated_report,
    full_report,
    miscalibrated_data,
    realistic,
)

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.calibration import (
    AffineScaling,
    HistogramBinning,
    TemperatureScaling,
    cross_val_calibrate,
    recommend,
    relative_calibration_loss,
)
from torchcalib.calibration import recommendation as applicability
from torchcalib.reporting import buffer
from torchcalib.reporting import calibration as module
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.render.html import render

CALIBRATORS = {kind.name: kind() for kind in applicability.CALIBRATORS}


def names_of(task):
    """Return the names of the calibrators that support a task."""
    return tuple(each.name for each in CALIBRATORS.values() if task in each.tasks)


def report_of(preds, target, **given):
    return tc.report(preds, target, with_intervals=False, **given)


def check_against_functions(report, preds, target, names=None, **given):
    names = names_of("binary" if "positive_classes" in given else given["task"]) if names is None else names
    stage, labels = report.calibration, target
    assert [line.calibrator for line in stage.lines] == ["none", *names]
    raw = stage.raw
    assert (raw.gain, raw.interval, raw.parameters) == (None, None, "")
    shown = (raw.accuracy, raw.nll, raw.brier_score, raw.ece)
    assert shown == pytest.approx(tuple(report[key] for key in ("accuracy", "nll", "brier", "ece")), rel=1e-12)
    # Any gain justifies a calibrator unless miscalibration is slight.
    decision = report.decision
    is_faulty = decision.kind not in ("calibrated", "too little data") and "but the gain by" not in decision.cause
    worthwhile = 0.0 if is_faulty and decision.degree != "slightly" else 5.0
    expected = recommend(preds, target, **given, worthwhile=worthwhile)
    assert list(expected.rcl) == list(names)
    assert report.recommendation.text == expected.advised(worthwhile, is_faulty=is_faulty).text
    scored, mode = given, {"mode": "classwise"} if given["task"] == "multilabel" else {}
    if "positive_classes" in given:  # calibrated predictions are probabilities of the set
        target = torch.isin(target, torch.tensor(given["positive_classes"])).long()
        scored = {"task": "binary", "from_logits": given["from_logits"]}
    scores = {"accuracy": F.accuracy, "nll": F.nll, "brier_score": F.brier_score, "ece": F.ece}
    for line in stage.lines[1:]:
        calibrate = partial(cross_val_calibrate, preds, labels, calibrator=CALIBRATORS[line.calibrator], **given)
        splits = [calibrate(seed=seed) for seed in range(stage.n_repeats)]
        for name, score in scores.items():
            if name == "ece":  # of the predictions of all splits
                bins = {"n_bins": report.settings["n_bins"], **mode}
                copies = {key: x.repeat(len(splits)) for key, x in scored.items() if isinstance(x, torch.Tensor)}
                value = score(torch.cat(splits), torch.cat([target] * len(splits)), **{**scored, **copies}, **bins)
            else:
                value = torch.stack([score(after, target, **scored) for after in splits]).mean()
            assert getattr(line, name) == pytest.approx(value.item(), abs=1e-7), (line, name)
        is_preferred = line.calibrator == expected.preferred
        gain = expected.gain if is_preferred else expected.rcl[line.calibrator]
        assert line.gain == pytest.approx(gain, abs=1e-7)
        interval = vars(line.interval).values() if line.interval else (math.nan, math.nan)
        shown = expected.interval if is_preferred else expected.intervals[line.calibrator]
        assert tuple(interval) == pytest.approx(shown, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(("task", "from_logits"), [("binary", False), ("multiclass", True), ("multilabel", False)])
def test_gains_equal_those_of_the_function(task, from_logits):
    report, data = (calibrated_report, realistic) if from_logits else (full_report, miscalibrated_data)
    report = report(task)
    check_against_functions(report, *data(task), task=task, from_logits=from_logits)
    assert (report.calibration.n_folds, report.calibration.seed, report.notes) == (5, 0, ())


# rcl_ce_txv, rcl_ce_dxv, rcl_bs_txv, rcl_bs_dxv of the authors' code, with other folds
RECORDED = {
    "cifar100_resnet20": ((8.4129, 8.5645, 4.3016, 4.5013), "temperature scaling"),
    "sst2_gpt2": ((6.4943, 46.0147, 9.5369, 53.4770), "affine scaling"),
}


@pytest.mark.parametrize("system", [pytest.param("cifar100_resnet20", marks=pytest.mark.extended), "sst2_gpt2"])
def test_gains_equal_recordings_with_other_stratified_folds(recorded, system):
    data = recorded(f"{system}.npz")
    preds = data.get("logits", data.get("log_probs"))
    given = {"task": "multiclass", "from_logits": True}
    gains, best = RECORDED[system]
    found = [
        relative_calibration_loss(preds, data["targets"], score=score, calibrator=kind(), folds="stratified", **given)
        for score in ("nll", "brier")
        for kind in (TemperatureScaling, AffineScaling)
    ]
    assert [value.item() for value in found] == pytest.approx(gains, abs=0.15)
    report = report_of(preds, data["targets"], **given)
    assert report.recommendation.best == report.calibration.name == best


def test_gains_with_positive_classes_and_ignored_rows():
    preds, target = realistic("multiclass")
    given = {"task": "multiclass", "from_logits": True}
    some = {**given, "positive_classes": [1, 3]}
    check_against_functions(report_of(preds, target, **some), preds, target, **some)
    given["ignore_index"] = -100
    ignored, padded = torch.cat((target, torch.full((7,), -100))), torch.cat((preds, torch.full((7, 5), torch.nan)))
    found = report_of(padded, ignored, **given)
    assert found.calibration.raw.nll == pytest.approx(calibrated_report("multiclass").calibration.raw.nll)
    check_against_functions(found, padded, ignored, **given)
    preds, target = realistic("binary")
    weights, absent = torch.ones(302).masked_fill(torch.arange(302) >= 300, 0), torch.tensor([torch.nan, 0.5])
    preds, target = torch.cat((preds, absent)), torch.cat((target, absent))  # floating labels
    found = report_of(preds, target, task="binary", from_logits=True, weights=weights)
    assert found.calibration.raw.nll == pytest.approx(calibrated_report("binary").calibration.raw.nll)


def test_gains_with_counts_and_real_weights():
    preds, target = realistic("binary")
    counts, given = torch.arange(300) % 3, {"task": "binary", "from_logits": True}
    report = report_of(preds, target, weights=counts, **given)
    check_against_functions(report, preds, target, weights=counts, **given)
    weights = counts + 0.5
    report = report_of(preds, target, weights=weights, **given)
    check_against_functions(report, preds, target, names_of("binary"), weights=weights, **given)
    assert report.calibration.notes == ()
    builder = ReportBuilder(**given, with_intervals=False)
    builder.update(preds[:100], target[:100])
    builder.update(preds[100:], target[100:], weights=weights[100:])
    mixed = torch.cat((torch.ones(100), weights[100:]))
    assert_equal_stages(builder.report().calibration, report_of(preds, target, weights=mixed, **given).calibration)


def test_remarks_of_fits_are_notes_of_the_calibration_section():
    preds, target = realistic("multiclass")
    right = (target > 1).unsqueeze(-1).expand(-1, 5)
    separable = torch.where(right, preds.abs(), -preds.abs())
    notes = report_of(separable, right.long(), task="multilabel", from_logits=True).calibration.notes
    alike = "Temperature scaling, ensemble temperature scaling and affine scaling: 5 of 5 fits: no finite scale"
    assert notes[0].startswith(alike)
    assert not [note for note in notes if "`" in note]


LEFT_OUT = [
    ("binary", [0.1, 0.6, 0.3, 0.9], [1, 1, 1, 1], "all samples have the same class"),
    ("binary", [0.1], [1], "all samples have the same class"),
    ("multilabel", [[0.1, 0.6]] * 4, [[1, 0]] * 4, "all samples have the same class"),
]


def test_calibration_section_is_left_out_with_a_note():
    def check(case):
        task, preds, target, words = case
        report = report_of(torch.tensor(preds), torch.tensor(target), task=task)
        assert report.calibration is report.recommendation is json.loads(report.to_json())["calibration"] is None
        (note,) = (note for note in report.notes if note.startswith("Calibration gains are omitted: "))
        assert words in note
        assert math.isfinite(report["nll"])

    check_each(LEFT_OUT, check)


@pytest.mark.parametrize(
    ("task", "limit", "most"),
    [("multiclass", "MAX_SAMPLES", 250), ("multiclass", "MAX_VALUES", 1250), ("multilabel", "MAX_SAMPLES", 1250)],
)
def test_too_many_samples_are_not_stored_for_calibrators(task, limit, most, monkeypatch):
    monkeypatch.setattr(buffer, limit, most)
    preds, target = realistic(task)
    builder = ReportBuilder(task=task, from_logits=True, with_intervals=False)
    builder.update(preds[:250], target[:250])
    assert builder.report().calibration is not None
    builder.update(preds[250:], target[250:])
    assert builder._buffer.pieces == []
    report = builder.report()
    assert report.calibration is None
    remedy = "Call torchcalib.calibration.recommend or torchcalib.inference.bootstrap on a part of the data."
    assert remedy in report.notes[-1]
    with pytest.raises(ValueError, match="`fit` must have buffered predictions with labels"):
        builder.fit(AffineScaling())


def test_calibrators_that_are_too_slow_or_too_large_are_not_tried(monkeypatch):
    for kind in set(applicability.CALIBRATORS) - {TemperatureScaling}:
        monkeypatch.setattr(kind, "largest_fit", (2, 300 * 5**2 - 1))
    stage = report_of(*realistic("multiclass", scale=1), task="multiclass", from_logits=True).calibration
    assert [line.calibrator for line in stage.lines] == ["none", "temperature scaling"]
    omitted = "bias correction, ensemble temperature scaling, affine scaling, "
    assert stage.notes[0].startswith(f"Omitted, because they are slow for 5 classes: {omitted}")
    assert stage.recommendation.best is None
    assert isinstance(stage.calibrator, TemperatureScaling)

    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: not enough memory.\nC++ trace")

    monkeypatch.setattr(module, "folds_of", fail)
    report = report_of(*realistic("binary"), task="binary", from_logits=True)
    assert report.calibration is None
    assert report.notes[-1].endswith("failed with RuntimeError: DefaultCPUAllocator: not enough memory.")


@pytest.mark.filterwarnings("ignore:.*got only 0 and 1")
def test_gains_of_infinite_and_undefined_scores_are_described():
    p, y = torch.rand(300, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 2
    p[1] = 0
    found = report_of(p, y, task="binary").recommendation
    assert found.text.startswith("NLL is infinite, so calibrators are compared by the Brier score. ")
    assert (found.score, math.isfinite(found.gain)) == ("brier", True)
    certain = report_of(y.double(), y, task="binary")
    assert certain.recommendation.text == "NLL is 0: there is nothing to gain by calibration."
    both = [TemperatureScaling(), HistogramBinning()]
    text = recommend(*realistic("binary"), task="binary", from_logits=True, calibrators=both).text
    assert "histogram binning" not in text, "it cannot be recommended"
    p[2] = torch.nan
    unknown = report_of(p, y, task="binary", validate_args=False)
    assert unknown.recommendation.text == "NLL is undefined, and so is the gain of calibration."
    assert "undefined" in render(bare(unknown))
