"""The report as data, as pages and from the command line."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from processes import quick_environment

import torchcalib as tc
from torchcalib.cli import main
from torchcalib.report import ReportBuilder


def predictions(task, n=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((n,) if task == "binary" else (n, 5), generator=generator, dtype=torch.float64)
    target = torch.randint(
        0, 5 if task == "multiclass" else 2, (n, 5) if task == "multilabel" else (n,), generator=generator
    )
    return logits, target


TASKS = ("binary", "multiclass", "multilabel")
MAIN = {"binary": "positive_class", "multiclass": "top_label", "multilabel": "classwise"}


@pytest.mark.parametrize("task", TASKS)
def test_every_number_is_that_of_its_function(task):
    logits, target = predictions(task)
    given = {"task": task, "from_logits": True}
    report = tc.report(logits, target, **given)
    assert report["nll"] == pytest.approx(tc.nll(logits, target, **given).item(), abs=1e-14)
    assert report["nce"] == pytest.approx(tc.nll(logits, target, **given, normalize="prior").item(), abs=1e-14)
    assert report["brier"] == pytest.approx(tc.brier_score(logits, target, **given).item(), abs=1e-14)
    assert report["nbs"] == pytest.approx(tc.brier_score(logits, target, **given, normalize="prior").item(), abs=1e-14)
    assert report["ecd"] == pytest.approx(tc.ecd(logits, target, **given).item(), abs=1e-14)
    reductions = {"binary": ("positive_class", "top_label"), "multiclass": ("top_label", "classwise")}
    for reduction in reductions.get(task, ("classwise",)):
        for name in ("ece", "esce", "mce", "rmsce"):
            expected = getattr(tc, name)(logits, target, **given, reduction=reduction).item()
            assert report[f"{name}/{reduction}"] == pytest.approx(expected, abs=1e-14)
        expected = tc.rmsce(logits, target, **given, reduction=reduction, debiased=True).item()
        assert report[f"rmsce_debiased/{reduction}"] == pytest.approx(expected, abs=1e-14)
    guess = logits.argmax(-1) if task == "multiclass" else (logits > 0).long()
    assert report["accuracy"] == pytest.approx((guess == target).double().mean().item(), abs=1e-14)


@pytest.mark.parametrize("task", TASKS)
def test_naive_is_what_predicting_the_class_shares_gets(task):
    logits, target = predictions(task)
    report = tc.report(logits, target, task=task, from_logits=True)
    if task == "multiclass":
        shares = torch.bincount(target).double() / len(target)
        constant = shares.expand(len(target), -1)
    else:
        shares = target.double().mean(0)
        constant = shares.expand(target.shape)
    assert report.priors == pytest.approx(
        [1 - shares.item(), shares.item()] if task == "binary" else shares.tolist(), abs=1e-15
    )
    naive = tc.report(constant.contiguous(), target, task=task)
    for line in report.lines:
        assert line.naive == pytest.approx(naive[line.key], abs=1e-12), line.key


@pytest.mark.parametrize("task", TASKS)
def test_perfect_is_what_a_right_and_sure_predictor_gets(task):
    _, target = predictions(task)
    certain = torch.nn.functional.one_hot(target, 5).double() if task == "multiclass" else target.double()
    report = tc.report(certain, target, task=task)
    for line in report.lines:
        assert line.value == line.perfect, line.key


@pytest.mark.parametrize("task", TASKS)
def test_in_pieces_is_one_call_and_bad_pieces_change_nothing(task):
    logits, target = predictions(task)
    whole = tc.report(logits, target, task=task, from_logits=True)
    builder = ReportBuilder(task=task, from_logits=True)
    for piece in (slice(0, 50), slice(50, 50), slice(50, 200)):
        builder.update(logits[piece], target[piece])
        with pytest.raises(ValueError, match="NaN"):
            builder.update(logits[:2] * torch.nan, target[:2])
    pieces = builder.report()
    for line in whole.lines:
        assert pieces[line.key] == pytest.approx(line.value, rel=1e-12, abs=1e-12)
    assert pieces.n == whole.n == (1000 if task == "multilabel" else 200)


def test_a_piece_of_another_width_is_refused():
    builder = ReportBuilder(task="multiclass")
    builder.update(torch.full((2, 2), 0.5), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="must have 2 entries on its class axis"):
        builder.update(torch.full((2, 4), 0.25), torch.tensor([0, 1]))


def test_weights_and_ignored_rows():
    logits, target = predictions("multiclass")
    times = torch.arange(200) % 3
    marked = torch.where(torch.arange(200) % 7 == 0, -100, target)
    report = tc.report(logits, marked, task="multiclass", from_logits=True, weights=times, ignore_index=-100)
    keep = marked != -100
    repeated = [x[keep].repeat_interleave(times[keep], 0) for x in (logits, target)]
    expected = tc.report(*repeated, task="multiclass", from_logits=True)
    assert report.n == expected.n
    for line in expected.lines:
        assert report[line.key] == pytest.approx(line.value, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("preds", "target", "words"),
    [
        ([0.9] * 100, [1] * 60 + [0] * 40, ["badly too high", "90.0%", "60.0%"]),
        ([0.6] * 1000, [1] * 650 + [0] * 350, ["clearly too low", "60.0%", "65.0%"]),
        ([0.6] * 10, [1] * 6 + [0] * 4, ["too small to tell"]),
        (
            [0.6] * 1000,
            [1] * 600 + [0] * 400,
            ["As far as this sample can tell", "a calibrated model of this size shows"],
        ),
        ([0.2] * 500 + [0.8] * 500, [1] * 200 + [0] * 300 + [1] * 300 + [0] * 200, ["too high in some ranges"]),
        ([0.0, 0.5], [1, 0], ["NLL is infinite"]),
    ],
)
def test_the_sentence_says_what_the_numbers_say(preds, target, words):
    report = tc.report(torch.tensor(preds), torch.tensor(target), task="binary")
    for word in words:
        assert word in report.sentence, report.sentence


def test_the_sentence_of_classes_names_over_and_under_confidence():
    target = torch.arange(400) % 4
    wrong = torch.where(torch.arange(400) < 200, target, (target + 1) % 4)
    for confidence, word in ((0.9, "badly over-confident"), (0.3, "badly under-confident")):
        rows = torch.full((400, 4), (1 - confidence) / 3, dtype=torch.float64)
        rows.scatter_(1, wrong.unsqueeze(1), confidence)
        assert word in tc.report(rows, target, task="multiclass").sentence


@pytest.mark.parametrize("draw", [
    lambda g: torch.full((500,), 0.7), lambda g: torch.rand(500, generator=g), lambda g: torch.full((1,), 0.7),
    lambda g: torch.rand(30, generator=g) ** 4,
])  # fmt: skip
def test_law_the_sentence_rarely_accuses_a_calibrated_model(draw):
    """Of 40 calibrated samples some 5 % have p < 0.05: 3 standard deviations more are 6."""
    generator, accused = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        p = draw(generator)
        target = torch.bernoulli(p, generator=generator).long()
        report = tc.report(p, target, task="binary", with_calibration=False, with_intervals=False)
        accused += "can be trusted" not in report.sentence
        assert ("can be trusted" in report.sentence) == (report.main_line.p_value >= 0.05)
    assert accused <= 6


def test_a_report_is_a_mapping_that_compares_and_prints():
    preds, target = torch.tensor([0.2, 0.9]), torch.tensor([0, 1])
    report, again = (tc.report(preds, target, task="binary") for _ in range(2))
    assert report == again
    assert "nll" in report
    assert "loss" not in report
    assert dict(report)["nll"] == report["nll"]
    assert len(list(report)) == len(report) == len(report.lines)
    assert repr(report) == str(report)
    assert report.main_table != again.main_table, "tables compare by identity"


def test_json_is_strict_and_complete():
    report = tc.report(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1, 0, 1]), task="binary", n_bins=3)
    content = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    lines = {line["key"]: line for line in content["lines"]}
    assert lines["nll"]["value"] == "inf"
    assert lines["brier"]["value"] == pytest.approx((1 + 0.25 + 0) / 3)
    assert set(lines["ece/top_label"]) == {
        "key", "name", "group", "value", "unit", "perfect", "naive", "question", "source", "interval",
        "noise_floor", "p_value",
    }  # fmt: skip
    assert content["tables"]["positive_class"]["n"] == [1, 1, 1]
    assert content["tables"]["positive_class"]["upper"] == [1 / 3, 2 / 3, 1]
    assert math.isinf(report["nll"])
    assert str(report).startswith(report.sentence)


def test_command_on_a_recorded_system(recorded, tmp_path, capsys):
    from conftest import data_folder

    recorded("cifar100_resnet20.npz")
    assert main(["report", str(data_folder() / "cifar100_resnet20.npz"), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for part in ("1.225255", "0.445252", "0.103393", "0.688300", "multiclass, n = 10,000, 100 classes"):
        assert part in said
    values = {line["key"]: line["value"] for line in json.loads((tmp_path / "report.json").read_text())["lines"]}
    assert values["nll"] == pytest.approx(1.2252552509307861, abs=2.5e-6)
    assert main(["report", str(data_folder() / "imagenet_dogs_alexnet.npz"), "--n-bins", "10"]) == 0
    assert "-0.010900" in capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
def test_command_in_many_small_pieces_is_one_call(task, tmp_path, monkeypatch):
    logits, target = predictions(task)
    files = []
    for k, piece in enumerate((slice(0, 90), slice(90, 200))):
        files.append(str(tmp_path / f"part {k} [red].npz"))
        np.savez_compressed(files[-1], logits=logits[piece].numpy(), targets=target[piece].numpy())
    monkeypatch.setattr("torchcalib.cli.report.PIECE_BYTES", 600)
    out = tmp_path / "out"
    assert main(["report", *files, "--task", task, "--out", str(out)]) == 0
    content = json.loads((out / "report.json").read_text())
    expected = tc.report(logits, target, task=task, from_logits=True)
    for line in content["lines"]:
        assert line["value"] == pytest.approx(expected[line["key"]], rel=1e-12, abs=1e-12)
    assert content["source"]["files"] == files
    assert content["task"] == task


def test_command_prints_names_as_they_are(tmp_path, capsys):
    path = tmp_path / "a [bold] name.npz"
    np.savez(path, probs=np.array([0.2, 0.9]), targets=np.array([0, 1]))
    assert main(["report", str(path)]) == 0
    assert "a [bold] name.npz" in capsys.readouterr().out


def test_command_stops_quietly_when_its_reader_does(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, probs=np.array([0.2, 0.9]), targets=np.array([0, 1]))
    command = f"{sys.executable} -m torchcalib report {path} | head -1"
    done = subprocess.run(["bash", "-c", command], env=quick_environment(), capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_demo_shows_over_confidence_grow(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--epochs", "25"]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.split()[:1] and line.split()[0].isdigit()][:25]
    assert [int(row[0]) for row in rows] == list(range(1, 26))
    accuracy, ecd = [float(row[2]) for row in rows], [float(row[6]) for row in rows]
    assert accuracy[-1] > 0.85
    assert ecd[-1] > 0.1 > -0.1 > min(ecd), "it starts under-confident and ends over-confident"
    written = {path.name for path in tmp_path.iterdir()}
    assert {"report.html", "report.json", "predictions.npz", "training.png", "training.svg"} <= written
    assert main(["report", str(tmp_path / "predictions.npz")]) == 0
    again = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    value = next(line["value"] for line in report["lines"] if line["key"] == "ecd")
    assert f"{value:.6f}" in again
    history = report["history"]["rows"]
    assert history[-1]["values"]["ecd"] == pytest.approx(value, abs=1e-12), "the curve ends where the report is"
    (warning,) = [row["warning"] for row in history if row["warning"]]
    assert warning in said
    assert "How training came here" in (tmp_path / "report.html").read_text()


def test_command_writes_its_files_whatever_becomes_of_its_output(tmp_path):
    path, out = tmp_path / "a \x1b[31m.npz", tmp_path / "out"
    np.savez(path, probs=np.array([0.2, 0.9]), targets=np.array([0, 1]), **{"\x1b]0;owned\x07": np.zeros(2)})
    for ending in ("| head -c 1", ">&-", "> /dev/full"):
        command = (
            f"{sys.executable} -m torchcalib report '{path}' --out '{out}' --no-intervals --no-calibration {ending}"
        )
        done = subprocess.run(
            ["bash", "-c", command], env=quick_environment(), capture_output=True, text=True, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert (out / "report.html").is_file(), ending
        (out / "report.html").unlink()


def test_command_says_in_which_rows_a_bad_value_is(tmp_path, capsys, monkeypatch):
    probs = np.full(50, 0.5)
    probs[37] = 1.5
    np.savez(tmp_path / "a.npz", probs=probs, targets=np.zeros(50, np.int64))
    monkeypatch.setattr("torchcalib.cli.report.PIECE_BYTES", 80)
    assert main(["report", str(tmp_path / "a.npz")]) == 2
    assert "in rows 31 to 40: `preds` must be probabilities in [0, 1], got 1.5" in capsys.readouterr().err


def test_the_sentence_does_not_take_importance_weights_for_samples():
    p, y = torch.full((10_000,), 0.9), (torch.arange(10_000) % 10 < 7).long()
    for scale in (1e-4, 1.0, 1e4):
        said = tc.report(p, y, task="binary", weights=torch.full((10_000,), scale)).sentence
        assert "badly too high" in said
        assert "noise floor 0.0024" in said
    counts = tc.report(p[:10], y[:10], task="binary", weights=torch.full((10,), 1000)).sentence
    assert "noise floor 0.0024" in counts


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"torchcalib {tc.__version__}\n"
