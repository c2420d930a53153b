"""What a report says of a calibration stage, and the calibrator that the command saves."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from report.test_report import TASKS, predictions

import torchcalib as tc
from torchcalib.calibrators import AffineTransform
from torchcalib.cli import main
from torchcalib.html import render
from torchcalib.report import ReportBuilder, kept
from torchcalib.report import calibration as module

CALIBRATORS = {
    "temperature scaling": tc.Temperature(),
    "DP calibration": tc.DPCalibration(),
    "histogram binning": tc.HistogramBinning(),
    "isotonic calibration": tc.Isotonic(),
}
SCORES = {"NLL": "nll", "Brier score": "brier"}
AFFINE = ("temperature scaling", "DP calibration")


def realistic(task, n=300, scale=2.5, seed=0):
    """Logits that are `scale` times too large."""
    logits, _ = predictions(task, n, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    if task == "multiclass":
        target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    else:
        target = torch.bernoulli(logits.sigmoid(), generator=generator).long()
    return scale * logits, target


def check_against_functions(report, preds, target, names=CALIBRATORS, **given):
    stage = report.calibration
    assert [(gain.score, gain.calibrator) for gain in stage.gains] == [(s, c) for s in SCORES for c in names]
    for score, name in SCORES.items():
        assert stage.raw[score] == pytest.approx(report[name], rel=1e-12, nan_ok=True)
    for gain in stage.gains:
        expected = tc.rcl(preds, target, score=SCORES[gain.score], calibrator=CALIBRATORS[gain.calibrator], **given)
        assert gain.rcl == pytest.approx(expected.item(), abs=1e-8), gain
        if math.isfinite(gain.value):
            assert gain.rcl == pytest.approx(100 * (1 - gain.value / stage.raw[gain.score]), abs=1e-10)
    tried = [CALIBRATORS[name] for name in names]
    assert report.recommendation.text == tc.recommend(preds, target, calibrators=tried, **given).text


# --------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_every_gain_is_that_of_its_function(task, from_logits):
    preds, target = realistic(task)
    if not from_logits:
        preds = preds.softmax(-1) if task == "multiclass" else preds.sigmoid()
    given = {"task": task, "from_logits": from_logits}
    report = tc.report(preds, target, **given)
    check_against_functions(report, preds, target, AFFINE if task == "multiclass" else tuple(CALIBRATORS), **given)
    assert (report.calibration.n_folds, report.calibration.seed) == (5, 0)
    assert report.notes == ()


# rcl_ce_txv, rcl_ce_dxv, rcl_bs_txv, rcl_bs_dxv of the authors' code, whose folds are others.
RECORDED = {
    "cifar100_resnet20": ((8.4129, 8.5645, 4.3016, 4.5013), "temperature scaling"),
    "sst2_gpt2": ((6.4943, 46.0147, 9.5369, 53.4770), "DP calibration"),
}


@pytest.mark.parametrize("system", RECORDED)
def test_recorded_gains_but_for_the_deal_of_the_folds(recorded, system):
    data = recorded(f"{system}.npz")
    report = tc.report(data.get("logits", data.get("log_probs")), data["targets"], task="multiclass", from_logits=True)
    gains, best = RECORDED[system]
    assert [gain.rcl for gain in report.calibration.gains] == pytest.approx(gains, abs=0.15)
    assert report.recommendation.best == report.calibration.name == best


@pytest.mark.parametrize("task", TASKS)
def test_in_pieces_is_one_call_though_callers_reuse_their_buffers(task):
    preds, target = realistic(task)
    builder = ReportBuilder(task=task, from_logits=True)
    x, y = torch.empty_like(preds[:100]), torch.empty_like(target[:100])
    for start in (0, 100, 200):
        builder.update(x.copy_(preds[start : start + 100]), y.copy_(target[start : start + 100]))
        x.fill_(torch.nan)
    assert builder.report().calibration == tc.report(preds, target, task=task, from_logits=True).calibration
    assert builder.report().calibration == builder.report().calibration


def test_a_bad_piece_is_not_kept():
    preds, target = realistic("binary")
    builder = ReportBuilder(task="binary", from_logits=True)
    builder.update(preds, target)
    with pytest.raises(ValueError, match="NaN"):
        builder.update(preds * torch.nan, target)
    assert builder.report().calibration == tc.report(preds, target, task="binary", from_logits=True).calibration


def test_axes_classes_and_rows_are_read_as_everywhere():
    preds, target = realistic("multiclass")
    expected = tc.report(preds, target, task="multiclass", from_logits=True).calibration
    images, labels = preds.reshape(3, 100, 5).movedim(-1, 1), target.reshape(3, 100)
    assert tc.report(images, labels, task="multiclass", from_logits=True, class_axis=1).calibration == expected
    one_hot = torch.nn.functional.one_hot(target, 5).double()
    assert tc.report(preds, one_hot, task="multiclass", from_logits=True).calibration == expected
    ignored = torch.cat((target, torch.full((7,), -100)))
    padded = torch.cat((preds, torch.full((7, 5), torch.nan)))
    given = {"task": "multiclass", "from_logits": True, "ignore_index": -100}
    found = tc.report(padded, ignored, **given)
    assert found.calibration.raw == pytest.approx(expected.raw)
    check_against_functions(found, padded, ignored, AFFINE, **given)


def test_a_set_of_classes_is_a_binary_task():
    preds, target = realistic("multiclass")
    given = {"task": "multiclass", "from_logits": True, "positive_classes": [1, 3]}
    check_against_functions(tc.report(preds, target, **given), preds, target, **given)


def test_weights_of_every_kind():
    preds, target = realistic("binary")
    counts = torch.arange(300) % 3
    given = {"task": "binary", "from_logits": True}
    report = tc.report(preds, target, weights=counts, **given)
    check_against_functions(report, preds, target, weights=counts, **given)
    weights = counts + 0.5
    report = tc.report(preds, target, weights=weights, **given)
    check_against_functions(report, preds, target, tuple(CALIBRATORS)[:3], weights=weights, **given)
    (note,) = report.calibration.notes
    assert note == "Isotonic calibration is not tried: it counts copies of a sample, and weights are no counts."
    builder = ReportBuilder(**given)
    builder.update(preds[:100], target[:100])
    builder.update(preds[100:], target[100:], weights=weights[100:])
    mixed = torch.cat((torch.ones(100), weights[100:]))
    assert builder.report().calibration == tc.report(preds, target, weights=mixed, **given).calibration


def test_labels_that_are_floating_are_labels_and_absent_rows_are_not_looked_at():
    preds, target = realistic("binary")
    whole = tc.report(preds, target, task="binary", from_logits=True)
    floating = tc.report(preds, target.double(), task="binary", from_logits=True)
    same_lines(floating, whole)
    expected = whole.calibration
    assert floating.calibration == expected
    weights = torch.ones(302).masked_fill(torch.arange(302) >= 300, 0)
    absent = torch.tensor([torch.nan, 0.5])
    report = tc.report(
        torch.cat((preds, absent)), torch.cat((target, absent)), task="binary", from_logits=True, weights=weights
    )
    assert report.calibration.raw == pytest.approx(expected.raw)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pieces_are_kept_as_they_came(dtype):
    preds, target = realistic("multiclass")
    builder = ReportBuilder(task="multiclass", from_logits=True)
    builder.update(preds.to(dtype), target.to(torch.uint8))
    assert [x.dtype for x in builder._kept.given()[:2]] == [dtype, torch.uint8]
    assert builder.report().calibration is not None


# --------------------------------------------------------------------------------------------------------------------
# Words


def test_remarks_of_fits_are_notes_of_the_section():
    preds, target = realistic("multiclass")
    wider = torch.cat((preds, torch.zeros(300, 1)), -1)
    (note,) = tc.report(wider, target, task="multiclass", from_logits=True).calibration.notes
    assert note.startswith("DP calibration: target has no samples of class 5: calibrated predictions give it")
    separable = tc.report(preds.abs() * (2 * (target > 1) - 1).unsqueeze(-1), (target > 1).long().unsqueeze(-1).expand(
        -1, 5), task="multilabel", from_logits=True)  # fmt: skip
    (note,) = separable.calibration.notes
    assert note.startswith("Temperature scaling and DP calibration: alpha of 5 of 5 fits: no finite scale is best")
    assert "`" not in note


LEFT_OUT = [
    ("soft targets", "binary", [0.1, 0.6, 0.3, 0.9], [0.1, 0.5, 0.2, 1.0], "targets are shares"),
    ("a class with one sample", "binary", [0.1, 0.6, 0.3, 0.9], [0, 1, 0, 0], "and there is one of class 1."),
    ("one class", "binary", [0.1, 0.6, 0.3, 0.9], [1, 1, 1, 1], "all samples are of one class"),
    ("one sample", "binary", [0.1], [1], "there is one of class 1"),
    ("classes with one sample", "multiclass", [[0.1, 0.6, 0.3]] * 4, [0, 1, 0, 2], "there is one of class 1, 2."),
    ("soft classes", "multiclass", [[0.1, 0.6, 0.3]] * 2, [[0.1, 0.6, 0.3]] * 2, "targets are shares"),
    ("a label without 0s", "multilabel", [[0.1, 0.6]] * 4, [[1, 1], [0, 1], [1, 1], [0, 1]], "label 1 has fewer"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "preds", "target", "words"), [case[1:] for case in LEFT_OUT],
                         ids=[case[0] for case in LEFT_OUT])  # fmt: skip
def test_it_is_left_out_with_a_note(task, preds, target, words):
    report = tc.report(torch.tensor(preds), torch.tensor(target), task=task)
    assert report.calibration is report.recommendation is None
    assert report.notes[-1].startswith("What a calibration stage would gain is left out: ")
    assert words in report.notes[-1]
    assert math.isfinite(report["nll"])
    assert json.loads(report.to_json())["calibration"] is None


@pytest.mark.parametrize("limit", ["MOST_SAMPLES", "MOST_VALUES"])
def test_too_many_samples_are_dropped_and_a_note_says_what_to_do(limit, monkeypatch):
    monkeypatch.setattr(kept, limit, 250 if limit == "MOST_SAMPLES" else 1250)
    preds, target = realistic("multiclass")
    builder = ReportBuilder(task="multiclass", from_logits=True)
    builder.update(preds[:250], target[:250])
    assert builder.report().calibration is not None
    builder.update(preds[250:], target[250:])
    assert builder._kept._pieces == []
    report = builder.report()
    assert report.calibration is None
    assert "Call torchcalib.recommend or torchcalib.bootstrap on a part of them." in report.notes[-1]
    assert report["nll"] == tc.report(preds, target, task="multiclass", from_logits=True)["nll"]
    with pytest.raises(ValueError, match="must have been added and kept to fit a calibrator"):
        builder.fit(tc.DPCalibration())


def test_labels_count_as_samples(monkeypatch):
    monkeypatch.setattr(kept, "MOST_SAMPLES", 1499)
    preds, target = realistic("multilabel")
    assert tc.report(preds, target, task="multilabel", from_logits=True).calibration is None


def test_dp_calibration_of_very_many_classes_is_not_tried(monkeypatch):
    monkeypatch.setattr(module, "MOST_PRODUCTS", 300 * 5**2 - 1)
    preds, target = realistic("multiclass", scale=1)
    stage = tc.report(preds, target, task="multiclass", from_logits=True).calibration
    assert {gain.calibrator for gain in stage.gains} == {"temperature scaling"}
    assert stage.notes[0].startswith("DP calibration is not tried: with 5 classes it takes long.")
    assert stage.recommendation.best is None
    assert stage.calibrator == tc.Temperature()


def test_without_memory_there_is_still_a_report(monkeypatch):
    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: not enough memory.\nC++ trace")

    monkeypatch.setattr(module, "out_of_fold", fail)
    report = tc.report(*realistic("binary"), task="binary", from_logits=True)
    assert report.calibration is None
    assert report.notes[-1].endswith("failed with RuntimeError: DefaultCPUAllocator: not enough memory.")


def test_it_is_not_tried_if_not_asked_for():
    builder = ReportBuilder(task="binary", from_logits=True, with_calibration=False)
    builder.update(*realistic("binary"))
    report = builder.report()
    assert report.calibration is None
    assert report.notes == ()
    with pytest.raises(ValueError, match="with_calibration is False"):
        builder.fit(tc.DPCalibration())
    with pytest.raises(TypeError, match="`with_calibration` must be True or False"):
        ReportBuilder(task="binary", with_calibration=1)


def test_the_report_prints_and_keeps_the_recommendation():
    report = tc.report(*realistic("binary"), task="binary", from_logits=True)
    assert report.recommendation.text in str(report)
    content = json.loads(report.to_json())["calibration"]
    assert content["recommendation"]["text"] == report.recommendation.text
    assert content["calibrator"] == "Temperature()"
    assert content["raw"].keys() == SCORES.keys()
    assert [gain["rcl"] for gain in content["gains"]] == [
        gain.rcl if math.isfinite(gain.rcl) else str(gain.rcl) for gain in report.calibration.gains
    ]


def test_infinite_scores_have_words_for_their_gain():
    p, y = torch.rand(300, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 2
    p[1] = 0
    report = tc.report(p, y, task="binary")
    assert report.recommendation.text == (
        "Calibration would cut NLL by 100.0 %: add histogram binning; temperature scaling leaves it infinite; "
        "DP calibration leaves it infinite; isotonic calibration gains 100.0 %."
    )
    few = tc.recommend(p, y, task="binary")
    assert few.best is None
    assert few.text == (
        "No calibrator lowers NLL (temperature scaling leaves it infinite): leave the predictions as they are."
    )
    certain = tc.report(y.double(), y, task="binary")
    assert certain.recommendation.text == "NLL is 0: there is nothing to gain by calibration."
    assert "makes it infinite" in tc.recommend(
        *realistic("binary"), task="binary", from_logits=True, calibrators=list(CALIBRATORS.values())
    ).text  # fmt: skip
    p[2] = torch.nan
    unknown = tc.report(p, y, task="binary", validate_args=False)
    assert unknown.recommendation.text == "NLL is undefined, and with it what calibration would gain."
    for each in (report, certain, unknown):
        assert "undefined" in render(replace(each, tables={}, tests={}))


# --------------------------------------------------------------------------------------------------------------------
# The calibrator itself


@pytest.mark.parametrize("task", TASKS)
def test_builder_and_calibrator_fit_the_same(task):
    preds, target = realistic(task)
    builder = ReportBuilder(task=task, from_logits=True)
    builder.update(preds[:100], target[:100])
    builder.update(preds[100:], target[100:])
    calibrator = builder.report().calibration.calibrator
    expected = calibrator.fit(preds, target, task=task, from_logits=True)
    assert torch.equal(builder.fit(calibrator)(preds), expected(preds))


def test_a_fit_takes_the_shape_that_the_builder_was_given():
    preds, target = realistic("multiclass")
    images, labels = preds.reshape(3, 100, 5).movedim(-1, 1), target.reshape(3, 100)
    builder = ReportBuilder(task="multiclass", from_logits=True, class_axis=1)
    builder.update(images, labels)
    expected = tc.DPCalibration().fit(preds, target, task="multiclass", from_logits=True)(preds)
    found = builder.fit(tc.DPCalibration())(images)
    assert torch.equal(found.movedim(1, -1).reshape(300, 5), expected)


def test_nothing_to_fit():
    with pytest.raises(ValueError, match="got none: nothing was added"):
        ReportBuilder(task="binary").fit(tc.DPCalibration())


@pytest.mark.parametrize(("name", "task"), [(c, task) for c in CALIBRATORS for task in CALIBRATORS[c].tasks])
def test_saved_is_loaded_without_knowing_what_it_is(name, task, tmp_path):
    calibrator = CALIBRATORS[name]
    preds, target = realistic(task)
    transform = calibrator.fit(preds, target, task=task, from_logits=True)
    tc.save_calibrator(transform, tmp_path / "cal.pt")
    loaded = tc.load_calibrator(str(tmp_path / "cal.pt"))
    assert type(loaded) is type(transform)
    assert (loaded.task, loaded.from_logits, loaded.class_axis) == (task, True, -1)
    assert torch.equal(loaded(preds), transform(preds))
    plain = type(transform)()
    plain.load_state_dict(torch.load(tmp_path / "cal.pt", weights_only=True))
    assert torch.equal(plain(preds), transform(preds))
    assert [path.name for path in tmp_path.iterdir()] == ["cal.pt"]


def test_bins_on_the_right_and_the_axis_of_classes_are_saved(tmp_path):
    p, y = torch.tensor([0.25, 0.5, 0.75, 1.0]), torch.tensor([0, 1, 0, 1])
    transform = tc.HistogramBinning(4, right=True).fit(p, y, task="binary")
    tc.save_calibrator(transform, tmp_path / "cal.pt")
    assert torch.equal(tc.load_calibrator(tmp_path / "cal.pt")(p), y.float())
    transform = AffineTransform("multiclass", class_axis=1)
    tc.save_calibrator(transform, tmp_path / "cal.pt")
    assert tc.load_calibrator(tmp_path / "cal.pt").class_axis == 1


def test_only_transforms_are_saved_and_only_their_files_are_loaded(tmp_path):
    with pytest.raises(TypeError, match="`transform` must be a fitted calibrator, got DPCalibration"):
        tc.save_calibrator(tc.DPCalibration(), tmp_path / "cal.pt")
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "other.pt"
    good = AffineTransform().state_dict()
    unknown = {**good, "_extra_state": {**good["_extra_state"], "kind": "Transform"}}
    short = {name: value for name, value in good.items() if name != "alpha"}
    for content in ({"weight": torch.ones(2)}, torch.ones(2), torch.nn.Identity(), unknown, short):
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"`path` must be a file that `save_calibrator` wrote, got '.*other\.pt'"):
            tc.load_calibrator(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="`path` must be a file that `save_calibrator` wrote"):
        tc.load_calibrator(path)
    with pytest.raises(FileNotFoundError):
        tc.load_calibrator(tmp_path / "missing.pt")


def test_a_file_sets_nothing_but_what_a_transform_saves():
    state = AffineTransform().state_dict()
    state["_extra_state"] |= {"forward": 1, "from_logits": True}
    transform = AffineTransform()
    transform.load_state_dict(state)
    assert "forward" not in vars(transform)
    assert transform.from_logits


# --------------------------------------------------------------------------------------------------------------------
# The command


def written(folder, task, **given):
    preds, target = realistic(task, **given)
    path = folder / "predictions.npz"
    np.savez(path, logits=preds.numpy(), targets=target.numpy())
    return path, preds, target


@pytest.mark.parametrize("task", TASKS)
def test_command_saves_the_recommended_calibrator(task, tmp_path, capsys):
    path, preds, target = written(tmp_path, task)
    assert main(["report", str(path), "--save-calibrator", str(tmp_path / "cal [1].pt")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    report = tc.report(preds, target, task=task, from_logits=True)
    assert report.recommendation.text in said
    assert f"saved {report.recommendation.best}, as recommended: {tmp_path}/cal [1].pt" in said
    assert "load_calibrator(" in said
    assert "takes logits and returns calibrated logits" in said
    expected = report.calibration.calibrator.fit(preds, target, task=task, from_logits=True)
    loaded = tc.load_calibrator(tmp_path / "cal [1].pt")
    assert torch.equal(loaded(preds), expected(preds))


def test_command_saves_dp_calibration_where_none_is_worthwhile(tmp_path, capsys):
    path, *_ = written(tmp_path, "multiclass", scale=1, n=1000)
    assert main(["report", str(path), "--save-calibrator", str(tmp_path / "cal.pt")]) == 0
    assert "saved DP calibration, though no calibrator is worth its trouble here" in capsys.readouterr().out
    assert isinstance(tc.load_calibrator(tmp_path / "cal.pt"), AffineTransform)


def test_command_saves_what_fits_left_alone_without_a_warning(tmp_path):
    np.savez(tmp_path / "a.npz", probs=np.array([0.1, 0.2, 0.7, 0.9]), targets=np.array([0, 0, 1, 1]))
    assert main(["report", str(tmp_path / "a.npz"), "--save-calibrator", str(tmp_path / "cal.pt")]) == 0


def test_command_tries_no_calibrators_if_told_so(tmp_path, capsys, monkeypatch):
    path, *_ = written(tmp_path, "binary")
    monkeypatch.setattr(module, "out_of_fold", lambda *_: pytest.fail("it tried one"))
    assert main(["report", str(path), "--no-calibration"]) == 0
    assert "calibration stage" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["report", str(path), "--no-calibration", "--save-calibrator", str(tmp_path / "cal.pt")])
    assert left.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def failing(arguments, capsys):
    """What a failing command says, which is one line."""
    assert main(["report", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line.removeprefix("torchcalib: error: ")


def test_command_refuses_places_that_no_file_can_be_written_to(tmp_path, capsys, monkeypatch):
    path, *_ = written(tmp_path, "binary")
    before = path.read_bytes()
    out = tmp_path / "out"
    for place, words in (
        (tmp_path, "must be a file, got the folder"),
        ("", "must be a file, got the folder"),
        (tmp_path / "no" / "cal.pt", "must be in a folder that exists"),
        (path / "cal.pt", "must be in a folder that exists"),
        (path, "must not be a file that is read"),
    ):
        said = failing([path, "--out", out, "--save-calibrator", place], capsys)
        assert said.startswith(f"`--save-calibrator` {words}"), said
    both = tmp_path / "both.pt"
    said = failing([path, "--out", out, "--save-calibrator", both, "--save-state", out / ".." / "both.pt"], capsys)
    assert said.startswith("`--save-state` must not be the file of `--save-calibrator`"), said
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "can be written to" in failing([path, "--save-calibrator", tmp_path / "cal.pt"], capsys)
    assert list(out.iterdir()) == []
    assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"predictions.npz", "out"}


def test_command_leaves_nothing_half_written(tmp_path, capsys, monkeypatch):
    path, *_ = written(tmp_path, "binary")
    (tmp_path / "cal.pt").write_bytes(b"old")

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    said = failing([path, "--out", tmp_path / "out", "--save-calibrator", tmp_path / "cal.pt"], capsys)
    assert said == "[Errno 28] No space left on device"
    assert (tmp_path / "cal.pt").read_bytes() == b"old"
    assert {each.name for each in tmp_path.iterdir()} == {"predictions.npz", "cal.pt", "out"}
    assert list((tmp_path / "out").iterdir()) == []


def test_command_refuses_data_that_are_too_many_before_it_has_read_all(tmp_path, capsys, monkeypatch):
    path, *_ = written(tmp_path, "binary")
    monkeypatch.setattr(kept, "MOST_SAMPLES", 100)
    monkeypatch.setattr("torchcalib.cli.report.PIECE_BYTES", 400)
    monkeypatch.setattr(ReportBuilder, "report", lambda *_, **__: pytest.fail("it went on"))
    said = failing([path, "--save-calibrator", tmp_path / "cal.pt"], capsys)
    assert said.startswith(
        "`--save-calibrator` must be given data that a calibrator can be tried on, got others: there"
    )
    assert "are more than 100 samples" in said
    assert not (tmp_path / "cal.pt").exists()


def test_command_refuses_data_without_folds(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", probs=np.array([0.2, 0.9, 0.5]), targets=np.array([0, 1, 1]))
    said = failing([tmp_path / "a.npz", "--out", tmp_path / "out", "--save-calibrator", tmp_path / "cal.pt"], capsys)
    assert said.endswith("there is one of class 0.")
    assert not (tmp_path / "cal.pt").exists()
    assert list((tmp_path / "out").iterdir()) == []


# --------------------------------------------------------------------------------------------------------------------
# Predictions that are kept, for calibrators and intervals


def by_chance(line):
    """What there is of noise floor, p-value and interval, by its name."""
    ends = () if line.interval is None else (line.interval.low, line.interval.high)
    named = {"noise_floor": line.noise_floor, "p_value": line.p_value, **dict(zip(("low", "high"), ends, strict=False))}
    return {name: value for name, value in named.items() if value is not None}


def same_lines(report, expected, of_errors=True):
    """Values, and what chance has to do with them; `of_errors` False looks at that of scores alone."""
    assert report.notes == expected.notes
    for line, other in zip(report.lines, expected.lines, strict=True):
        assert (line.key, line.value) == (other.key, pytest.approx(other.value, rel=1e-6))
        if of_errors or line.group == "scores":
            assert by_chance(line) == pytest.approx(by_chance(other), rel=1e-9, abs=1e-12, nan_ok=True), line


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
    scores = [[line.interval for line in x.lines if line.group == "scores"] for x in (certain, whole)]
    assert scores[0] == scores[1]
    same_lines(of_pieces((preds[:20], votes[:20]), (preds[20:23], labels[:3]), (preds[23:], labels[3:])), certain)


def test_pieces_may_have_labels_of_any_dtype():
    preds, target = realistic("binary")
    builder = ReportBuilder(task="binary", from_logits=True)
    kinds = (torch.uint16, torch.int64, torch.bool, torch.float16, torch.uint8)
    for piece, labels, dtype in zip(preds.split(60), target.split(60), kinds, strict=True):
        builder.update(piece, labels.to(dtype))
    report, whole = builder.report(), tc.report(preds, target, task="binary", from_logits=True)
    assert report.recommendation == whole.recommendation
    same_lines(report, whole)
    assert all(line.interval is not None for line in report.lines)


def test_a_report_is_finished_where_intervals_fail():
    """Five copies of a sample of weight 2^51 are more than float64 counts, and in some replicate there are five."""
    preds, target = realistic("binary")
    weights = torch.ones(300, dtype=torch.int64).index_fill(0, torch.tensor([3]), 2**51)
    report = tc.report(preds, target, task="binary", from_logits=True, weights=weights, with_calibration=False)
    assert report.lines[0].interval is None
    said = "Bootstrap intervals are left out: computing them failed with ValueError: `weights` must"
    assert report.notes[-1].startswith(said)
