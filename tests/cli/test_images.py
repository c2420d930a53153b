"""`torchcalib report --per-image`: folders of predictions and labels, as nnU-Net writes them."""

import json

import numpy as np
import pytest
import torch

import torchcalib as tc
from torchcalib.cli import main

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(5, 3, 2, 6, 7, generator=GENERATOR)
LABELS = torch.multinomial(
    LOGITS.softmax(1).movedim(1, -1).reshape(-1, 3), 1, generator=GENERATOR
).view(5, 2, 6, 7)  # fmt: skip
OPTIONS = ("--no-calibration", "--no-intervals", "--json")


def write(folder, preds, target, name="probabilities"):
    """Write a file for each image: archives of predictions with a further array, and labels."""
    for kind in ("preds", "labels"):
        (folder / kind).mkdir()
    for k, (one, labels) in enumerate(zip(preds, target, strict=True)):
        np.savez_compressed(folder / f"preds/scan_{k}.npz", **{name: one.numpy(), "other": np.zeros(3)})
        np.save(folder / f"labels/scan_{k}.npy", labels.numpy().astype(np.float32 if k % 2 else np.uint8))
    return str(folder / "preds"), str(folder / "labels")


@pytest.mark.parametrize("name", ["probabilities", "softmax"])
def test_report_is_that_of_python(tmp_path, capsys, name):
    probs = (2 * LOGITS).softmax(1)
    assert main(["report", "--per-image", *write(tmp_path, probs, LABELS, name), *OPTIONS]) == 0
    found = json.loads(capsys.readouterr().out)
    groups = torch.arange(5)[:, None, None, None].expand(LABELS.shape)
    names = [f"scan_{k}" for k in range(5)]
    builder = tc.ReportBuilder(task="multiclass", class_axis=1, with_calibration=False, with_intervals=False)
    builder.update(probs, LABELS, groups=groups, group_names=names, clusters=torch.arange(5))
    expected = builder.report()
    for line in expected.lines:
        theirs = next(each for each in found["lines"] if each["key"] == line.key)
        assert theirs["value"] == pytest.approx(line.value, rel=1e-9, abs=1e-12), line.key
    assert found["groups"]["group"] == list(expected.groups.group)
    assert set(expected.groups.group) <= set(names)


def test_binary_images(tmp_path, capsys):
    folders = write(tmp_path, LOGITS[:, 0].sigmoid(), (LABELS == 0).long())
    assert main(["report", "--per-image", *folders, "--task", "binary", *OPTIONS]) == 0
    found = {line["key"]: line["value"] for line in json.loads(capsys.readouterr().out)["lines"]}
    expected = tc.ece(LOGITS[:, 0].sigmoid(), (LABELS == 0).long(), "binary")
    assert found["ece/positive"] == pytest.approx(float(expected), abs=1e-6)


def test_errors_name_the_folders_and_the_image(tmp_path, capsys):
    preds, labels = write(tmp_path, LOGITS.softmax(1), LABELS)
    np.save(tmp_path / "labels/scan_2.npy", np.full((2, 6, 7), 7))
    wrong = {
        (preds,): "must be a folder of predictions and a folder of labels",
        (labels, preds, "--groups", "a"): "must be used without --groups",
        (preds, labels): "in image `scan_2`: `target` must",
    }
    for given, text in wrong.items():
        assert main(["report", "--per-image", *given, *OPTIONS]) == 2
        assert text in capsys.readouterr().err
    (tmp_path / "labels/scan_4.npy").unlink()
    assert main(["report", "--per-image", preds, labels]) == 2
    assert "got no labels of `scan_4`" in capsys.readouterr().err
    np.savez(tmp_path / "preds/scan_0.npz", a=np.zeros(2), b=np.zeros(2))
    np.save(tmp_path / "labels/scan_4.npy", LABELS[4].numpy())
    assert main(["report", "--per-image", preds, labels]) == 2
    assert "must contain one array, or one named" in capsys.readouterr().err
