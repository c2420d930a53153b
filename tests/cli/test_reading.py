"""The commands give the numbers of `report()` and `compare()`, for every kind of targets and file format."""

import numpy as np
import pytest
import torch
from helpers.prediction_files import WRITERS, write_npz
from helpers.refusals import check_each
from helpers.reports import QUICK, QUICK_COMMAND, assert_values

import torchcalib as tc
from torchcalib.cli import main
from torchcalib.reporting.building import ReportBuilder

RNG = np.random.default_rng(0)
N = 17
PROBS = RNG.dirichlet(np.ones(3), N)
LABELS = RNG.integers(0, 3, N)
ONE_HOT = np.eye(3, dtype=np.int64)[LABELS]
RATES, MAPS = RNG.random(N), RNG.random((N, 2, 3))
PIXELS = RNG.dirichlet(np.ones(3), (N, 2))
TARGETS = {  # task, predictions and targets
    "annotator counts of classes": ("multiclass", PROBS, RNG.multinomial(5, np.ones(3) / 3, N)),
    "one-hot labels": ("multiclass", PROBS, ONE_HOT),
    "shares of classes": ("multiclass", PROBS, RNG.dirichlet(np.ones(3), N)),
    "annotator counts for no and yes": ("binary", RATES, RNG.multinomial(4, [0.5, 0.5], N)),
    "shares of yes": ("binary", RATES, RNG.random(N)),
    "0 or 1 for each label": ("multilabel", PROBS, (RNG.random((N, 3)) < PROBS).astype(np.int64)),
}
TENSORS = {  # more than two axes, which tables cannot represent
    "annotator counts for each label": ("multilabel", PROBS, RNG.multinomial(4, [0.5, 0.5], (N, 3))),
    "annotator counts of classes for each pixel": ("multiclass", PIXELS, RNG.multinomial(3, np.ones(3) / 3, (N, 2))),
    "binary maps": ("binary", MAPS, (RNG.random((N, 2, 3)) < MAPS).astype(np.int64)),
    "annotator counts of binary maps": ("binary", MAPS, RNG.multinomial(3, [0.5, 0.5], (N, 2, 3))),
    "a column": ("binary", RATES[:, None], (RNG.random((N, 1)) < 0.5).astype(np.int64)),
    "a column of annotator counts": ("binary", RATES[:, None], RNG.multinomial(4, [0.5, 0.5], (N, 1))),
}
FORMATS = [(suffix, name) for suffix in WRITERS for name in TARGETS]
FORMATS += [(suffix, name) for suffix in ("npz", "pt", "safetensors") for name in TENSORS]


@pytest.fixture(autouse=True)
def pieces_of_few_rows(monkeypatch):
    monkeypatch.setattr("torchcalib.cli.report.PIECE_BYTES", 100)


def agrees_with_report(folder, suffix, task, preds, target, **weights):
    """Check that the texts are equal, and numbers to 1e-12, because pieces are summed in another order."""
    pytest.importorskip({"safetensors": "safetensors"}.get(suffix, "pyarrow" if "npz" != suffix != "pt" else "numpy"))
    WRITERS[suffix](folder / f"a.{suffix}", {"probs": preds, "targets": target, **weights})
    saved = folder / "state.pt"
    options = ["--task", task, *QUICK_COMMAND, "--save-state", str(saved)]
    assert main(["report", str(folder / f"a.{suffix}"), *options]) == 0
    found = ReportBuilder.load(saved).report()
    given = {name: torch.from_numpy(values) for name, values in weights.items()}
    given |= {"task": task, "class_axis": -1}  # files have their classes in the last axis
    expected = tc.report(torch.from_numpy(preds), torch.from_numpy(target), **QUICK, **given)
    assert_values(found, expected)
    assert found.n == pytest.approx(expected.n, rel=1e-12)
    assert (set(found), found.task, found.notes) == (set(expected), expected.task, expected.notes)


@pytest.mark.parametrize(("suffix", "name"), FORMATS)
def test_the_command_gives_the_report_of_the_function_for_every_target_and_format(tmp_path, suffix, name):
    agrees_with_report(tmp_path, suffix, *{**TARGETS, **TENSORS}[name])


def test_the_command_gives_the_report_of_the_function_for_every_dtype(tmp_path):
    def check(dtype):
        weights = (np.arange(N) % 3).astype(dtype)
        agrees_with_report(tmp_path, "npz", "multiclass", PROBS, LABELS, weights=weights)
        if np.dtype(dtype).kind in "iu":
            agrees_with_report(
                tmp_path, "npz", "multiclass", PROBS, TARGETS["annotator counts of classes"][2].astype(dtype)
            )

    check_each(["uint8", "int8", "int32", "int64", "uint16", "uint32", "bool", "float16", "float64"], check)
    column = (LABELS > 0).astype(np.int64)[:, None]
    agrees_with_report(tmp_path, "npz", "binary", RATES[:, None], column, weights=RNG.random((N, 1)))


@pytest.mark.parametrize("name", ["annotator counts of classes", "one-hot labels", "annotator counts for no and yes"])
def test_the_command_gives_the_comparison_of_the_function_for_votes(tmp_path, name, monkeypatch):
    monkeypatch.setattr("torchcalib.reporting.comparison.system.RANKED_REPLICATES", 39)  # fewer replicates are faster
    compared = []
    monkeypatch.setattr("torchcalib.results.base.Results.save", lambda one, folder: compared.append(one) or ())
    task, preds, annotator_counts = TARGETS[name]
    systems = {"a": preds, "b": np.roll(preds, 1, 0)}
    files = [str(tmp_path / f"{system}.npz") for system in systems]
    for file, values in zip(files, systems.values(), strict=True):
        write_npz(file, {"probs": values, "targets": annotator_counts})
    assert main(["compare", *files, "--task", task, "--out", str(tmp_path / "out")]) == 0
    given = {system: torch.from_numpy(values) for system, values in systems.items()}
    expected = tc.compare(given, torch.from_numpy(annotator_counts), task=task)
    for line in compared[0].lines:
        assert dict(line.values) == pytest.approx(dict(expected[line.key].values), rel=1e-12, abs=1e-12), line.key
