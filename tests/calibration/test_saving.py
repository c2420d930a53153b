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

P, Y = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6]), torch.tensor([1, 1, 0, 0, 1])
FITTED = AffineScaling().fit([0.9, 0.99, 0.3, 0.8, 0.6], [1, 1, 0, 0, 1])


def test_loading_other_files_raises_errors(tmp_path):
    path = tmp_path / "other.pt"
    good = FITTED.state_dict()
    bins = HistogramBinning(4).fit(P, Y).state_dict()
    hostile = (
        {"kind": "Calibrator"},
        {"task": "regression"},
        {"class_axis": "x"},
        {"from_logits": 1},
        {"positive_classes": "ab"},
        {"n_bins": -3},
    )
    contents = [{**bins, "_extra_state": bins["_extra_state"] | settings} for settings in hostile]
    contents.append({name: value for name, value in good.items() if name != "alpha"})
    # a tensor that declares more values than the file has
    contents.append({**good, "beta": torch.zeros(1, dtype=torch.float64).expand(30_000_000)})
    for content in ({"weight": torch.ones(2)}, torch.ones(2), torch.nn.Identity(), *contents):
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"`path` must be a file that `save_calibrator` wrote, got '.*other\.pt'"):
            load_calibrator(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="`path` must be a file that `save_calibrator` wrote"):
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
