"""`torchcalib metric`: the value of the function, from chunks of files."""

import json

import numpy as np
import pytest
import torch
from helpers.reports import realistic

import torchcalib as tc
from torchcalib.cli import main

CALLS = [  # name, options of the command, options of the function
    ("ece", [], {}),
    ("ECE", ["--n-bins", "7", "--right"], {"n_bins": 7, "right": True}),
    ("ece", ["--mode", "classwise", "--option", "average=None"], {"mode": "classwise", "average": None}),
    ("ece", ["--mode", "top2"], {"mode": tc.TopK(2)}),
    ("ece", ["--mode", "top_k=2"], {"mode": tc.TopK(2)}),
    ("nll", ["--option", "normalize=prior"], {"normalize": "prior"}),
    ("BrierScore", [], {}),
    ("smece", [], {}),
    ("accuracy_at_coverage", ["--option", "coverage=0.5"], {"coverage": 0.5}),
    ("bayes_risk", ["--option", "cost=[[0, 1, 1], [5, 0, 1], [1, 1, 0]]"], {"cost": [[0, 1, 1], [5, 0, 1], [1, 1, 0]]}),
]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Write multi-class predictions with weights, and return the arguments of the function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcalib.cli.files.PIECE_BYTES", 1200)
    logits, target = realistic("multiclass")
    logits, target, weights = logits[:, :3], target % 3, torch.arange(300) % 3
    np.savez("a.npz", logits=logits.numpy(), targets=target.numpy(), weights=weights.numpy())
    return {"preds": logits, "target": target, "weights": weights, "from_logits": True}


@pytest.mark.parametrize(("name", "options", "given"), CALLS)
def test_metric_is_the_value_of_the_function(name, options, given, data, capsys):
    function = {"ECE": "ece", "BrierScore": "brier_score"}.get(name, name)
    expected = getattr(tc, function)(**data, **given)
    assert main(["metric", name, "a.npz", *options]) == 0
    # float64 sums of chunks differ by rounding; six digits are printed
    assert [float(line) for line in capsys.readouterr().out.split()] == pytest.approx(
        expected.flatten().tolist(), rel=1e-5
    )
    assert main(["metric", name, "a.npz", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["metric"], found["rows"]) == (function, 300)
    assert found["value"] == pytest.approx(expected.tolist(), rel=1e-9)


def test_metrics_of_confidences_are_those_of_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    confidence = generator.uniform(size=200)
    np.savez("a.npz", confidence=confidence, correct=generator.uniform(size=200) < confidence**2)
    report = tc.Report.from_files("a.npz", with_calibration=False, with_intervals=False)
    for name in ("accuracy", "ece", "aurc", "eaurc", "correctness_auroc", "nll"):
        assert main(["metric", name, "a.npz"]) == 0
        assert float(capsys.readouterr().out) == pytest.approx(report[name], rel=1e-5), name
