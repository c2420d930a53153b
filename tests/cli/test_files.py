"""Class names, several systems in one file, confidences, missing values, warnings and progress of the commands."""

import io
import json

import numpy as np
import pytest
import torch
from helpers.prediction_files import write_csv, write_parquet
from helpers.reports import QUICK, QUICK_COMMAND, SELECTIVE, assert_values, realistic
from scipy.stats import binomtest

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.cli import main
from torchcalib.cli.messages import computing, working
from torchcalib.display.progress import listening, part
from torchcalib.io.opening import open_predictions
from torchcalib.reporting.render.contents import key_numbers

RNG = np.random.default_rng(0)
N = 200
PROBS = RNG.dirichlet(np.ones(3), N)
LABELS = np.array([RNG.choice(3, p=row) for row in PROBS])
P = RNG.random(N)
Y = (RNG.random(N) < P).astype(np.int64)
ANIMALS = np.array(["cat", "dog", "eel"])
BY_ANIMAL = {f"p_{name}": PROBS[:, k] for k, name in enumerate(ANIMALS)}
MISSING = np.arange(N) % 20 == 3


def reported(folder, columns, *options, suffix="csv"):
    """Run `torchcalib report` on a table, and return the saved report."""
    path, state = folder / f"a.{suffix}", folder / "state.pt"
    (write_csv if suffix == "csv" else write_parquet)(path, columns)
    assert main(["report", str(path), *options, *QUICK_COMMAND, "--save-state", str(state)]) == 0
    return tc.ReportBuilder.load(state).report()


def test_class_names_are_taken_from_columns_labels_or_an_option(tmp_path):
    path = tmp_path / "a.parquet"
    numbered = {f"prob_{k}": PROBS[:, k] for k in range(3)}
    plain = {name: PROBS[:, k] for k, name in enumerate(ANIMALS)}
    one_hot = {f"label_{name}": k == LABELS for k, name in enumerate(ANIMALS)}
    import pyarrow as pa

    categories = pa.array(ANIMALS[LABELS]).dictionary_encode()
    for columns, options, expected in (
        ({**BY_ANIMAL, "y": LABELS}, {}, tuple(ANIMALS)),
        ({**BY_ANIMAL, "y": categories}, {}, tuple(ANIMALS)),
        ({**BY_ANIMAL, "y": categories.cast(pa.dictionary(pa.int8(), pa.large_string()))}, {}, tuple(ANIMALS)),
        ({**BY_ANIMAL, **one_hot}, {"task": "multiclass"}, tuple(ANIMALS)),
        ({**numbered, "y": categories}, {}, tuple(ANIMALS)),
        ({**numbered, "y": LABELS}, {"class_names": "xyz"}, ("x", "y", "z")),
        ({**plain, "y": ANIMALS[LABELS]}, {"from_logits": False}, tuple(ANIMALS)),
        ({**{f"{a}_prob": v for a, v in plain.items()}, "y": LABELS}, {"preds": "*_prob"}, tuple(ANIMALS)),
        ({**numbered, "y": LABELS}, {}, ()),
        ({"prob": P, "y": np.array(["no", "yes"])[Y]}, {}, ("no", "yes")),
    ):
        write_parquet(path, columns)
        files = open_predictions([path], **options)
        assert files.source.class_names == expected
        rows = next(files.chunks())
        target = rows.target.argmax(-1) if rows.target.dim() > 1 else rows.target
        assert target.tolist() == (Y if rows.preds.dim() == 1 else LABELS).tolist()
        assert torch.equal(rows.preds, torch.from_numpy(P if rows.preds.dim() == 1 else PROBS))


def test_class_names_are_shown_and_saved_and_must_agree(tmp_path, capsys):
    write_csv(tmp_path / "a.csv", {**BY_ANIMAL, "y": ANIMALS[LABELS]})
    assert main(["report", str(tmp_path / "a.csv"), "--all", *QUICK_COMMAND]) == 0
    assert "classes      cat, dog, eel" in capsys.readouterr().out
    expected = tc.report(PROBS, LABELS, task="multiclass", class_names=ANIMALS.tolist(), **QUICK)
    found = tc.Report.from_files(tmp_path / "a.csv", **QUICK)
    assert found.class_names == expected.class_names == tuple(ANIMALS)
    assert str(found.classes) == str(expected.classes)
    builders = []
    for k, names in enumerate(("cat,dog,eel", "cat,dog,\x1b[31meel")):
        state = tmp_path / f"{k}.pt"
        write_csv(tmp_path / f"{k}.csv", {**{f"prob_{k}": PROBS[:, k] for k in range(3)}, "y": LABELS})
        options = ["--class-names", names, "--save-state", str(state)]
        assert main(["report", str(tmp_path / f"{k}.csv"), *options, *QUICK_COMMAND]) == 0
        builders.append(tc.ReportBuilder.load(state))
    assert builders[0].source.class_names == tuple(ANIMALS)
    assert builders[1].report().source["classes"][2] == "?[31meel"
    with pytest.raises(ValueError, match="got class_names="):
        builders[0].merge(builders[1])


def test_two_files_with_equal_targets_get_a_warning_that_suggests_compare(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, preds, target in (
        ("a", P, Y),
        ("b", P**2, Y),
        ("c", P, Y[::-1].copy()),
        ("d", P, 0 * Y),
        ("e", P, 0 * Y),
    ):
        np.savez(f"{name}.npz", probs=preds, y=target)
    assert main(["report", "a.npz", "c.npz", "d.npz", "e.npz", *QUICK_COMMAND]) == 0
    assert capsys.readouterr().err == ""
    assert main(["report", "a.npz", "c.npz", "b.npz", "--out", "out", *QUICK_COMMAND]) == 0
    error = capsys.readouterr().err
    assert "run torchcalib compare a.npz b.npz" in error
    assert error.count("\n") == 1
    assert "run torchcalib compare a.npz b.npz" in json.loads((tmp_path / "out/report.json").read_text())["notes"][-1]


def test_confidences_give_accuracy_and_top_label_errors(tmp_path, capsys):
    """The expected accuracy and ECE are computed by numpy, the interval by scipy."""
    inferred = reported(tmp_path, {"conf": P, "is_correct": Y == 1, "y_true": LABELS})
    options = ("--preds", "p_answer", "--target", "graded", "--task", "confidence")
    found = reported(tmp_path, {"p_answer": P, "graded": Y}, *options)
    assert_values(inferred, found)
    assert found["accuracy"] == pytest.approx(Y.mean())
    bins = (P * 15).astype(int)
    gaps = [abs((P - Y)[bins == k].sum()) / N for k in range(15)]
    assert found["ece/top_label"] == pytest.approx(sum(gaps))
    binary = tc.report(torch.from_numpy(P), torch.from_numpy(Y), task="binary", **QUICK)
    assert_values(found, {key: binary[key] for key in ("nll", "brier", "ecd", "nce", "nbs")})
    assert {key.partition("/")[2] for key in found} == {"", "top_label"}
    given = {"task": "binary", "mode": "positive"}  # ranked by the confidence, not by max(c, 1 - c)
    values = {name: f(torch.from_numpy(P), torch.from_numpy(Y), **given).item() for name, f in SELECTIVE.items()}
    assert_values(found, values)
    naive = {line.key: line.naive for line in found.lines}
    assert naive["aurc"] == pytest.approx(1 - Y.mean())
    assert naive["accuracy_at_coverage"] == pytest.approx(Y.mean())
    assert len(set(found)) == len(list(found))
    assert list(found.tables) == ["top_label"]
    assert found.decision.kind == "too little data"
    assert (key_numbers(found)[1].value, key_numbers(found)[1].detail) == (f"{Y.mean():.1%}", "")
    path = tmp_path / "a.csv"
    assert main(["report", str(path), *options, "--out", str(tmp_path / "out"), "--no-calibration"]) == 0
    shown = capsys.readouterr().out
    assert main(["metric", "accuracy", str(path), *options]) == 0
    assert float(capsys.readouterr().out) == pytest.approx(Y.mean())
    assert "a.csv, 2026-01-01: confidence in predictions, n = 200\n" in shown
    assert "positive" not in shown.replace("(positive class)", "")
    lines = {line["key"]: line for line in json.loads((tmp_path / "out/report.json").read_text())["lines"]}
    expected = binomtest(int(Y.sum()), N).proportion_ci(method="wilson")
    interval = lines["accuracy"]["interval"]
    assert (interval["low"], interval["high"]) == pytest.approx((expected.low, expected.high))


def test_confidences_in_one_file_give_a_comparison_without_accuracy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torchcalib.reporting.comparison.system.RANKED_REPLICATES", 39)
    write_csv(tmp_path / "a.csv", {"conf_a": P, "conf_b": P**3, "correct": Y})
    options = ["--preds", "conf_a", "--preds", "conf_b", "--from-probs", "--out", str(tmp_path)]
    assert main(["compare", str(tmp_path / "a.csv"), *options]) == 0
    lines = {line["key"]: line for line in json.loads((tmp_path / "compare.json").read_text())["lines"]}
    assert "accuracy" not in lines
    assert {key.partition("/")[2] for key in lines} == {"", "top_label"}
    target = torch.from_numpy(Y)
    for name, preds in (("conf_a", P), ("conf_b", P**3)):
        expected = F.ece(torch.from_numpy(preds), target, task="binary").item()
        assert lines["ece/top_label"]["values"][name] == pytest.approx(expected)
        for key, function in SELECTIVE.items():
            expected = function(torch.from_numpy(preds), target, task="binary", mode="positive").item()
            assert lines[key]["values"][name] == pytest.approx(expected), key
            # Both systems have the same order of confidences.
            assert lines[key]["differences"].get(name, {"value": 0})["value"] == pytest.approx(0, abs=1e-12), key
            assert lines[key]["intervals"][name] is not None
    assert "Accuracy" not in capsys.readouterr().out.replace("Accuracy at 80%", "")


def test_rows_with_empty_cells_are_dropped_and_counted(tmp_path):
    """The report equals that of the other rows. Multi-label rows only lose the missing entry."""
    drop, kept = ("--nan-policy", "drop"), torch.from_numpy(~MISSING)
    probs, labels, weights = torch.from_numpy(PROBS), torch.from_numpy(LABELS), torch.arange(N) % 3

    def gaps(values):
        import pyarrow as pa

        return pa.array(values, mask=MISSING)

    def check(columns, expected, *options, suffix="parquet"):
        found = reported(tmp_path, columns, *drop, *options, suffix=suffix)
        assert_values(found, expected)
        assert found.n == expected.n
        return found.n_dropped

    few = tc.report(probs[kept], labels[kept], task="multiclass", **QUICK)
    shares = RNG.dirichlet(np.ones(3), N)
    soft = tc.report(probs[kept], torch.from_numpy(shares)[kept], task="multiclass", **QUICK)
    assert check({**BY_ANIMAL, "y": gaps(LABELS)}, few) == 10
    assert check({**BY_ANIMAL, "p_dog": gaps(PROBS[:, 1]), "y": LABELS}, few) == 10
    assert check({"probs": gaps(PROBS.tolist()), "y": LABELS}, few) == 10
    assert check({**BY_ANIMAL, "y": gaps(LABELS.astype(float))}, few) == 10
    assert check({**BY_ANIMAL, "y": gaps(ANIMALS[LABELS])}, few) == 10
    columns = {f"target_{k}": shares[:, k] for k in range(3)}
    columns["target_1"] = gaps(shares[:, 1])
    assert check({**BY_ANIMAL, **columns}, soft, "--task", "multiclass") == 10
    weighted = tc.report(probs[kept], labels[kept], task="multiclass", weights=weights[kept], **QUICK)
    assert check({**BY_ANIMAL, "y": gaps(LABELS), "weight": weights.numpy()}, weighted) == int(
        (weights[~kept] > 0).sum()
    )
    assert check({**BY_ANIMAL, "y": LABELS, "weight": gaps(weights.numpy())}, weighted) == 10
    grouped = reported(tmp_path, {**BY_ANIMAL, "y": LABELS, "site": gaps(ANIMALS[LABELS])}, *drop, "--groups", "site",
                       suffix="parquet")  # fmt: skip
    assert grouped.n_dropped == 0
    assert sum(row["n"] for row in grouped.groups.rows()) == N - 10
    several = (PROBS > 0.3).astype(np.int64)
    entries = torch.from_numpy(np.where(MISSING[:, None] & (np.arange(3) == 1), -7, several))
    expected = tc.report(probs, entries, task="multilabel", ignore_index=-7, **QUICK)
    columns = {f"target_{k}": several[:, k] for k in range(3)}
    columns["target_1"] = gaps(several[:, 1])
    assert check({**BY_ANIMAL, **columns}, expected, "--task", "multilabel") == 10


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_only_on_a_terminal(monkeypatch):
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        with working("computing values"):
            pass
        assert ("computing values" in stream.getvalue()) == shown


def test_percentages_of_a_report_are_shown(monkeypatch):
    shares, parts = [], []
    with listening(lambda share, name: (shares.append(share), parts.append(name))):
        calibrated = tc.report(*realistic("binary", n=60), from_logits=True).calibration
    assert sum(shares) == pytest.approx(0.9, abs=0.1)  # the rest of the report has no parts
    assert min(shares) >= 0
    assert {"tests", "intervals", "calibrators", *(line.calibrator for line in calibrated.lines[1:])} <= {*parts}
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with computing("computing"), part(0.42, "values"):
        pass
    assert "computing: values" in stream.getvalue()
    assert "42%" in stream.getvalue()
