"""`torchcalib calibrate` and `apply`: the calibrator of Python, and copies of files of every format."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.prediction_files import WRITERS
from helpers.reports import realistic

from torchcalib.calibration import AffineScaling, TemperatureScaling, load_calibrator, save_calibrator
from torchcalib.calibration.recommendation import CALIBRATORS, ON_REQUEST
from torchcalib.cli import main
from torchcalib.cli.commands import _named_calibrator, calibrators
from torchcalib.io.opening import open_predictions


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """Write multi-class logits to `a.npz` in a working directory, and return logits and targets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcalib.io.copying._PIECE_BYTES", 2000)
    logits, target = realistic("multiclass")
    np.savez("a.npz", logits=logits.numpy(), targets=target.numpy())
    return logits, target


def test_calibrate_fits_the_named_or_the_recommended_calibrator(data, capsys):
    logits, target = data
    for name in ("TemperatureScaling", "temperature scaling", "temperature-scaling"):
        assert main(["calibrate", "a.npz", "--out", "c.pt", "--calibrator", name]) == 0
        assert "wrote c.pt: temperature scaling (TemperatureScaling), fitted to 300 rows" in capsys.readouterr().out
        expected = TemperatureScaling().fit(logits, target, from_logits=True)
        torch.testing.assert_close(load_calibrator("c.pt")(logits), expected(logits), rtol=1e-9, atol=1e-9)
    assert main(["calibrate", "a.npz", "--out", "d.pt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reason"].startswith("Add ")
    assert type(load_calibrator("d.pt")).__name__ == found["calibrator"]


SUFFIXES = tuple(WRITERS)


@pytest.mark.parametrize(("before", "after"), [*zip(SUFFIXES, SUFFIXES[1:] + SUFFIXES[:1], strict=True)])
def test_apply_copies_files_of_every_format_with_calibrated_predictions(before, after, data):
    logits, target = (each.numpy() for each in data)
    calibrator = AffineScaling().fit(*data, from_logits=True)
    save_calibrator(calibrator, "c.pt")
    for k, rows in enumerate((slice(0, 200), slice(200, 300))):
        WRITERS[before](Path(f"part{k}.{before}"), {"logits": logits[rows], "number": target[rows] % 2})
    assert main(["apply", "c.pt", f"part*.{before}", "--out", f"calibrated.{after}"]) == 0
    files = open_predictions([f"calibrated.{after}"], target="number", task="multiclass")
    (rows,) = files.chunks()
    assert files.source.from_logits
    np.testing.assert_allclose(rows.preds, calibrator(data[0]), rtol=1e-12)
    assert rows.target.tolist() == (target % 2).tolist()


def test_apply_copies_an_array_with_the_name_of_an_argument_of_numpy(data):
    pytest.importorskip("pyarrow")
    probs = data[0].softmax(-1)
    save_calibrator(TemperatureScaling().fit(probs, data[1]), "c.pt")
    rows = [f"{','.join(map(str, row))},{k}\n" for k, row in enumerate(probs[:4].tolist())]
    Path("a.csv").write_text("prob_x,prob_y,prob_z,prob_v,prob_w,file\n" + "".join(rows))
    assert main(["apply", "c.pt", "a.csv", "--out", "a.npz"]) == 0
    assert np.load("a.npz")["file"].tolist() == [0, 1, 2, 3]


def test_calibrators_of_the_command_line_are_those_of_python():
    kinds = (*CALIBRATORS, *ON_REQUEST)
    assert calibrators() == sorted(kind.__name__ for kind in kinds)
    assert [_named_calibrator(kind.name) for kind in kinds] == [kind.__name__ for kind in kinds]


def test_apply_keeps_other_columns_and_their_order_and_needs_no_target(data, capsys):
    probs = data[0].softmax(-1)
    save_calibrator(TemperatureScaling().fit(probs, data[1]), "c.pt")
    header = "name,p_a,prob_x,prob_y,prob_z,prob_v,prob_w,flag,empty"
    lines = [f"n{k},0.1,{','.join(map(str, row))},true,\n" for k, row in enumerate(probs[:4].tolist())]
    Path("new.csv").write_text(f"{header}\n{''.join(lines)}")
    assert main(["apply", "c.pt", "new.csv", "--preds", "prob_*", "--out", "out.tsv"]) == 0
    assert "`empty` cannot be copied" in capsys.readouterr().err
    first, *rest = Path("out.tsv").read_text().splitlines()
    assert first.split("\t") == header.split(",")[:-1]
    cells = [line.split("\t") for line in rest]
    assert [row[:2] + row[-1:] for row in cells] == [[f"n{k}", "0.1", "true"] for k in range(4)]
    expected = load_calibrator("c.pt")(probs[:4])
    np.testing.assert_allclose([list(map(float, row[2:7])) for row in cells], expected, rtol=1e-12)
    for suffix in ("npz", "pt", "jsonl"):
        assert main(["apply", "c.pt", "new.csv", "--preds", "prob_*", "--out", f"out.{suffix}"]) == 0
        assert "`name` cannot" not in capsys.readouterr().err or suffix == "pt"
    with np.load("out.npz") as stored:
        np.testing.assert_allclose(stored["prob"], expected, rtol=1e-12)
        assert stored["name"].tolist() == ["n0", "n1", "n2", "n3"]


def test_apply_accepts_a_single_npy_file(data):
    save_calibrator(TemperatureScaling().fit(*data, from_logits=True), "c.pt")
    np.save("logits.npy", data[0].numpy())
    assert main(["apply", "c.pt", "logits.npy", "--out", "calibrated.npy"]) == 0
    np.testing.assert_allclose(np.load("calibrated.npy"), load_calibrator("c.pt")(data[0]), rtol=1e-12)
