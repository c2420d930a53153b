"""`torchcalib watch`: new rows of growing files and of folders, states, exit codes and output."""

import json

import numpy as np
import pytest
import torch

import torchcalib as tc
from torchcalib.cli import main, watch

STATE = "state.safetensors"


def rows(n, seed=0, temperature=1.0):
    g = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, generator=g, dtype=torch.float64)
    return z.sigmoid(), torch.bernoulli((z / temperature).sigmoid(), generator=g).long()


def lines(p, y):
    return "".join(f"{a!r},{b}\n" for a, b in zip(p.tolist(), y.tolist(), strict=True))


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """Return a function that runs the command, and returns the exit code, JSON lines and errors."""

    def call(*words):
        code = main(["watch", *map(str, words), "--json"])
        found = capsys.readouterr()
        return code, [json.loads(line) for line in found.out.splitlines()], found.err

    return call


def test_runs_read_new_lines_only_and_have_the_evidence_of_one_stream(run, tmp_path):
    p, y = rows(2500, temperature=1.4)
    path, text = tmp_path / "p.csv", lines(p, y)
    test, position = tc.SequentialTest(task="binary"), 0
    for end in (0, 900, 905, 2500):
        whole = "prob,label\n" + "".join(text.splitlines(keepends=True)[:end])
        path.write_text(whole + "0.5,")  # a line that is not complete
        code, found, errors = run("p.csv", "--state", STATE, "--batch", 500)
        assert errors == ""
        for start in range(position, end, 500):
            test.update(p[start : min(start + 500, end)], y[start : min(start + 500, end)])
        position = end
        if not end:
            assert (code, found) == (0, [{"file": None, "alarm": False}])
            continue
        (line,) = found
        assert (line["file"], line["n"], line["since"]) == ("p.csv", end, int(test.since))
        assert line["log_e"] == pytest.approx(float(test.compute()), rel=1e-12)
        assert (code, line["alarm"]) == (int(test.alarm()), bool(test.alarm()))
    assert code == 1
    assert run("p.csv", "--state", STATE)[:2] == (1, [{**line, "file": None}]), "an alarm stays"


def test_a_folder_is_read_in_the_order_of_names_each_file_once(run, tmp_path):
    folder = tmp_path / "batches"
    folder.mkdir()
    g = np.random.default_rng(0)
    logits = g.standard_normal((3, 200, 4))
    labels = g.integers(0, 4, (3, 200))
    for k in (1, 0):
        np.savez(folder / f"{k}.npz", logits=logits[k], labels=labels[k])
    (folder / "notes.txt").write_text("not predictions")
    place = ("--state", folder / STATE)
    code, found, _ = run(folder, *place)
    assert [line["file"][-5:] for line in found] == ["0.npz", "1.npz"]
    np.savez(folder / "2.npz", logits=logits[2], labels=labels[2])
    code, (line,), _ = run(folder, *place)
    test = tc.SequentialTest(num_classes=4, from_logits=True)
    for batch in zip(torch.tensor(logits), torch.tensor(labels), strict=True):
        test.update(*batch)
    assert line["log_e"] == pytest.approx(float(test.compute()), rel=1e-12)
    np.savez(folder / "2.npz", logits=logits[2, :9], labels=labels[2, :9])
    code, found, errors = run(folder, *place)
    assert code == 2
    assert "2.npz` must only grow" in errors or "must not change after it has been read" in errors


def test_follow_waits_for_rows_until_an_alarm(run, tmp_path, monkeypatch):
    path = tmp_path / "p.csv"
    path.write_text("prob,label\n" + lines(*rows(100)))
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        with path.open("a") as file:
            file.write(lines(*rows(600, seed=len(waits), temperature=3)))

    monkeypatch.setattr(watch.time, "sleep", sleep)
    code, found, _ = run("p.csv", "--follow", "--interval", 7, "--prometheus", "p.prom")
    assert code == 1
    assert waits == [7] * (len(found) - 1)
    assert [line["alarm"] for line in found] == [False] * (len(found) - 1) + [True]
    assert "torchcalib_alarm 1.0\n" in (tmp_path / "p.prom").read_text()


def test_text_output(tmp_path, capsys):
    (tmp_path / "p.csv").write_text("prob,label\n" + lines(*rows(500, temperature=3)))
    assert main(["watch", "p.csv"]) == 1
    assert capsys.readouterr().out.startswith("p.csv: over-confident: log e ")


def test_detectors_of_changes_continue(run, tmp_path):
    p, y = rows(600, temperature=1.5)
    detector = tc.SequentialTest(task="binary", restart=True)
    for k in range(3):
        (tmp_path / "p.csv").write_text("prob,label\n" + lines(p[: 200 * (k + 1)], y[: 200 * (k + 1)]))
        _, (line,), _ = run("p.csv", "--state", STATE, "--restart")
        detector.update(p[200 * k : 200 * (k + 1)], y[200 * k : 200 * (k + 1)])
    assert line["log_e"] == pytest.approx(float(detector.compute()), rel=1e-12)


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        (["--level", "0.02"], None, "`--level` must be that of the state, 0.01, got 0.02"),
        (["--restart"], None, "`--restart` must be that of the state, False, got True"),
        ([], "prob,label\n0.5,1\n", "`p.csv` must only grow"),
        ([], "logit,label\n" + lines(*rows(100)), "`p.csv` must have the preds of earlier rows, 'prob', got 'logit'"),
        (["--batch", "0"], None, "`--batch` must be at least 1"),
        (["--state", "p.csv"], None, "`--state` must not be an input file"),
        (["--state", "other.npz"], None, "`other.npz` must be a complete watch state"),
        (["--level", "0.95"], None, "`level` must be above 0 and at most 0.5, got 0.95"),
    ],
)
def test_errors(run, tmp_path, words, content, message):
    path = tmp_path / "p.csv"
    path.write_text("prob,label\n" + lines(*rows(50)))
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    run("p.csv", "--state", STATE)
    path.write_text(path.read_text() + lines(*rows(5)) if content is None else content)
    place = [] if "--state" in words else ["--state", STATE]
    code, found, errors = run("p.csv", *place, *words)
    assert (code, found) == (2, [])
    assert message in errors


def test_an_invalid_row_is_named_and_changes_nothing(run, tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("prob,label\n" + lines(*rows(50)))
    run("p.csv", "--state", STATE)
    before = (tmp_path / STATE).read_bytes()
    good = path.read_text()
    path.write_text(good + "1.5,1\n")
    code, _, errors = run("p.csv", "--state", STATE)
    assert code == 2
    assert "`p.csv`" in errors or "after" in errors
    assert (tmp_path / STATE).read_bytes() == before
    path.write_text(good + "0.5,1\n")
    assert run("p.csv", "--state", STATE)[1][0]["n"] == 51


QUOTES = {
    "quote within a cell": ("prob,label,text\n", lambda k: '5" disk' if k == 4 else "x"),
    "line breaks within quotes": ("prob,label,text\n", lambda k: f'"a ""{k}"",\n b"'),
    "names with a line break": ('prob,label,"a\nb"\n', lambda k: "1"),
    "comments": ("# made by x\n\nprob,label,text\n", lambda k: "x"),
}


@pytest.mark.parametrize("name", QUOTES)
def test_rows_end_where_readers_of_tables_end_them(name, run, tmp_path):
    header, text = QUOTES[name]
    p, y = rows(20)
    lines = [f"{a!r},{b},{text(k)}\n" for k, (a, b) in enumerate(zip(p.tolist(), y.tolist(), strict=True))]
    for end in (10, 20):
        (tmp_path / "p.csv").write_text(header + "".join(lines[:end]) + '0.5,1,"not the e')
        _, found, errors = run("p.csv", "--state", STATE)
        assert (found[-1]["n"], errors) == (end, "")
    test = tc.SequentialTest(task="binary")
    test.update(p[:10], y[:10])
    test.update(p[10:], y[10:])
    assert found[-1]["log_e"] == pytest.approx(float(test.compute()), rel=1e-12)


def test_quotes_in_lines_of_json_are_no_quotes_of_a_table(run, tmp_path):
    values = [{"prob": 0.5, "label": 1, "text": '5" x' if k == 19 else "x"} for k in range(20)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in values))
    assert run("p.jsonl")[1][-1]["n"] == 20
    (tmp_path / "p.csv").write_bytes(b"prob,label\r0.2,0\r0.9,1\r")
    assert "must have lines that end with LF" in run("p.csv")[2]


@pytest.mark.filterwarnings("ignore:.*contains percentages")
@pytest.mark.parametrize(("first", "more"), [("0.2,0\n0.9,1\n", "1,1\n"), ("20,0\n90,1\n", "1,0\n0,0\n")])
def test_whole_numbers_are_read_as_earlier_predictions(first, more, run, tmp_path):
    (tmp_path / "p.csv").write_text("prob,label\n" + first)
    run("p.csv", "--state", STATE)
    (tmp_path / "p.csv").write_text("prob,label\n" + first + more)
    code, found, errors = run("p.csv", "--state", STATE)
    assert (code, found[-1]["n"]) == (0, 2 + more.count("\n"))
    assert str(tmp_path) not in errors
    test = tc.SequentialTest(task="binary")
    test.update(torch.tensor([0.2, 0.9], dtype=torch.float64), torch.tensor([0, 1]))
    later = torch.tensor([1.0] if "0.2" in first else [0.01, 0.0], dtype=torch.float64)
    test.update(later, torch.tensor([1] if "0.2" in first else [0, 0]))
    assert found[-1]["log_e"] == pytest.approx(float(test.compute()), rel=1e-12)


def test_an_outcome_of_probability_0_has_no_direction():
    test = tc.SequentialTest(task="binary")
    test.update(torch.tensor([1.0]), torch.tensor([0]))
    assert test.result().direction == "none"
    assert "an outcome of probability 0 occurred" in str(test.result())
