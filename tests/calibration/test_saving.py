"""Saving and loading of calibrators. A file can only set what a calibrator saves."""

import pytest
import torch

from torchcalib.calibration import (
    AffineScaling,
    HistogramBinning,
    TemperatureScaling,
    load_calibrator,
    save_calibrator,
)
from torchcalib.core.saved import content_of, saved_bytes

P, Y = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
FITTED = AffineScaling().fit([0.9, 0.99, 0.3, 0.8, 0.6], [1, 1, 0, 0, 1])


def test_loading_other_files_raises_errors(tmp_path):
    path = tmp_path / "other.pt"
    save_calibrator(HistogramBinning(4).fit(P, Y), path)
    saved = content_of(path, "calibrator")
    described, parameters = saved["described"], saved["parameters"]
    refused = [
        {"described": {**described, name: value}, "parameters": parameters}
        for name, value in {
            "kind": "Calibrator", "task": "regression", "class_axis": "x", "from_logits": 1, "n_bins": -3,
            "positive_classes": "ab",
        }.items()
    ]  # fmt: skip
    changes = (
        {"rate": parameters["rate"] + 1},
        {"rate": parameters["rate"] > 0},
        {"rate": 3},
        {"grad_norm": -torch.ones((), dtype=torch.float64)},
        {"converged": torch.tensor(1.0)},
        {"more": torch.ones(2)},
    )
    refused += [{"described": described, "parameters": {**parameters, **change}} for change in changes]
    refused.append({"described": described, "parameters": {"rate": parameters["rate"]}})
    for content in ({"weight": torch.ones(2)}, *refused):
        path.write_bytes(saved_bytes("calibrator", content))
        with pytest.raises(ValueError, match=r"other\.pt` must be a complete calibrator, got"):
            load_calibrator(path)


def test_checkpoints_of_torch_contain_a_calibrator_or_raise_an_error(tmp_path):
    path, state = tmp_path / "checkpoint.ckpt", FITTED.state_dict()
    torch.save({"epoch": 3, "torchcalib_calibrator": state}, path)
    assert torch.equal(load_calibrator(path)(P), FITTED(P))
    # a tensor that declares more values than the file has
    expanded = {**state, "beta": torch.zeros(1, dtype=torch.float64).expand(30_000_000)}
    for content in (state, torch.ones(2), torch.nn.Identity(), {"torchcalib_calibrator": expanded}):
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"checkpoint\.ckpt` must be a complete calibrator, got"):
            load_calibrator(path)
    with pytest.raises(FileNotFoundError):
        load_calibrator(tmp_path / "missing.pt")


def test_loading_sets_only_saved_attributes_and_a_state_of_another_class_raises(tmp_path):
    p, y = torch.tensor([0.25, 0.5, 0.75, 1.0]), torch.tensor([0, 1, 0, 1])
    save_calibrator(HistogramBinning(4, right=True).fit(p, y, task="binary"), tmp_path / "cal.pt")
    assert torch.equal(load_calibrator(tmp_path / "cal.pt")(p), y.float())
    state = FITTED.state_dict()
    state["_extra_state"] |= {"forward": 1, "from_logits": True}
    loaded = AffineScaling()
    loaded.load_state_dict(state)
    assert "forward" not in vars(loaded)
    assert (loaded.task, loaded.from_logits, loaded.class_axis) == ("binary", True, -1)
    other = TemperatureScaling().fit(P, Y)
    before = other(P)
    with pytest.raises(ValueError, match="`state_dict` must be of TemperatureScaling, got one of AffineScaling"):
        other.load_state_dict(state)
    assert other(P).equal(before)
