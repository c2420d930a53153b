"""Merged builders give the report of the whole data: addition, files, `torchcalib merge`, and ranks."""

import json
import signal
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.refusals import check_each
from helpers.reports import QUICK, QUICK_COMMAND
from helpers.shards import add_to, assert_same, cut, data_set, shards
from processes import SCRIPTS, environments_of_ranks, free_ports, gathering_ranks, run_together

import torchcalib as tc
from torchcalib.calibration import load_calibrator
from torchcalib.cli import main
from torchcalib.core import sample_or_sketch
from torchcalib.core.saved import content_of, saved_bytes
from torchcalib.reporting import buffer, testing
from torchcalib.reporting.building import ReportBuilder


@pytest.fixture(autouse=True)
def few_replicates(monkeypatch):
    """Few replicates are enough to compare results, and fast."""
    monkeypatch.setattr(testing, "_REPLICATES", (39,) * 4)


def builder_of(arrays, task, **settings):
    builder = ReportBuilder(task=task, from_logits=True, **settings)
    if len(arrays["targets"]):
        add_to(builder, arrays)
    return builder


def saved_and_loaded(builder, folder):
    builder.save(folder / "state.pt")
    return ReportBuilder.load(folder / "state.pt")


def parts_of(arrays, task, folder, *ends, **settings):
    return [saved_and_loaded(builder_of(piece, task, **settings), folder) for piece in cut(arrays, *ends)]


def test_addition_does_not_change_its_parts_and_repeated_parts_raise_errors(tmp_path):
    """Merging a part, a copy of it, or a sum with it again raises an error. Parts with equal data are distinct."""
    arrays = data_set("binary", n=20)
    parts = parts_of(arrays, "binary", tmp_path, 10, **QUICK)
    before = [part.report().to_dict() for part in parts]
    add_to(parts[0] + parts[1], data_set("binary", seed=1))
    assert [part.report().to_dict() for part in parts] == before
    whole = parts[0] + parts[1]
    before = whole.report().to_dict()
    for other in (parts[0], saved_and_loaded(parts[0], tmp_path), saved_and_loaded(whole, tmp_path), whole):
        with pytest.raises(ValueError, match="a part that was merged before"):
            whole.merge(other)
    assert whole.report().to_dict() == before
    alike = [builder_of(arrays, "binary", **QUICK) for _ in range(2)]
    assert (alike[0] + alike[1]).report().n == 40
    empty = [saved_and_loaded(builder_of(cut(arrays, 0)[0], "binary", **QUICK), tmp_path)] * 2
    assert (empty[0] + empty[1] + alike[0]).report().n == 20


def test_builders_with_other_options_raise_an_error_and_change_nothing():
    mine = builder_of(data_set("multiclass", n=60), "multiclass", **QUICK)
    before = mine.report().to_dict()

    def check(name):
        others = {"task": "multilabel", "n_bins": 10, "ignore_index": -100, "safe_threshold": 0.1}
        value = others.get(name, name != "from_logits")
        changes = {} if name == "classes" else {name: value}
        other = ReportBuilder(**{"task": "multiclass", "from_logits": True, **QUICK, **changes})
        width = 3 if name == "classes" else 4
        labels = torch.zeros(3, 4, dtype=torch.int64) if name == "task" else torch.arange(3)
        other.update(torch.full((3, width), 1 / width), labels)
        found = "classes=3 instead of classes=4" if name == "classes" else f"{name}={value!r} instead of {name}="
        with pytest.raises(ValueError, match=f"must have the same arguments, got {found}"):
            mine.merge(other)

    names = ["task", "n_bins", "right", "safe_threshold", "from_logits", "ignore_index", "with_intervals", "classes"]
    check_each(names, check)
    assert mine.report().to_dict() == before


# Hostile files in the form of states


@cache
def saved(task):
    if task in ("groups", "clusters"):
        builder = tc.ReportBuilder(task="binary")
        builder.update(torch.linspace(0, 1, 12), torch.arange(12) % 2, **{task: torch.arange(12) % 4})
        return builder.state_bytes()
    return builder_of(data_set(task, n=12, weights="counts"), task).state_bytes()


def changed(*keys, to, task="multiclass"):
    """Return a writer of a state with one change at the path `keys`: a value, or a function of the old value."""

    def write(path):
        state = holder = content_of(saved(task), ReportBuilder.KIND)
        for folder in keys[:-1]:
            holder = holder[folder]
        holder[keys[-1]] = to(holder[keys[-1]]) if callable(to) else to
        path.write_bytes(saved_bytes(ReportBuilder.KIND, state))

    return write


CELLS = torch.ones(3, 2, dtype=torch.float64)


def sketch(**parts):
    """Return a writer of a state with sketch cells instead of samples."""

    def with_cells(state):
        flags = {"has_labels": torch.tensor(True), "n_rows": torch.tensor(2)}
        cells = {"places": torch.tensor([5, 9]), "cells": CELLS, **flags, **parts}
        return [[], [], [], state[3], *cells.values()]

    return changed("states", "sample of positive", to=with_cells, task="binary")


def buffered(*keys, to):
    return changed("predictions", *keys, to=to)


def sums(to):
    return changed("states", "nll", to=to)


def groups(place, to):
    """Return a writer of a state with changed names (0), sums (1) or noise flags (2) of groups."""
    return changed("states", "groups", place, to=to, task="groups")


BY_CLUSTER = "bins of positive by cluster"


def stored_clusters(to):
    return changed("predictions", "pieces", 0, "groups", to=to, task="clusters")


ONE_AXIS_MORE = {"input_preds": torch.zeros(1, 12, 4), "input_target": torch.zeros(1, 12, dtype=torch.int64)}
ONE_AXIS_MORE |= {"weights": None, "complement": None}
HOSTILE = {  # values that only a report contains; for those of metrics see test_saved_form.py
    "10^9 classes": changed("num_classes", to=10**9),
    "classes of another kind": changed("num_classes", to=4.0),
    "another axis": changed("likely_axis", to=True),
    "other classes": changed("num_classes", to=3),
    "settings": changed("settings", to={"task": "multiclass", "nonsense": 1}),
    "bins": changed("settings", "n_bins", to=10**9),
    "a bin more": changed("settings", "n_bins", to=16),
    "task": changed("settings", "task", to="regression"),
    "no states": changed("states", to=3),
    "no sums": changed("states", to=lambda states: {**states, "nll": {}}),
    "a sum less": sums(lambda parts: [parts[0][:-1]]),
    "chunks": changed("states", "sample of top_label", 0, to=lambda chunks: chunks * 2),
    "parts": changed("parts", to={"a": 3}),
    "a negative number": buffered("n_samples", to=-1),
    "outcomes": changed("states", "sample of top_label", 1, to=lambda chunks: [chunk + 200 for chunk in chunks]),
    "labels out of range": buffered("pieces", 0, "input_target", to=torch.full((12,), 2**40)),
    "labels missing": buffered("pieces", 0, "input_target", to=torch.zeros(5, dtype=torch.int64)),
    "kept NaN": buffered("pieces", 0, "input_preds", to=torch.full((12, 4), torch.nan)),
    "kept of other classes": buffered("pieces", 0, "input_preds", to=torch.zeros(12, 5)),
    "kept too few": buffered("pieces", to=[]),
    "kept no tensors": buffered("pieces", 0, "input_preds", to="text"),
    "kept of one axis more": buffered("pieces", 0, to=ONE_AXIS_MORE),
    "pieces": buffered("pieces", to=8),
    "kept nothing": changed("predictions", to=None),
    "number": buffered("n_values", to=torch.tensor(48)),
    "source": changed("source", to={"files": 3}),
    "cells elsewhere": sketch(places=torch.tensor([5, 10**9])),
    "cells twice": sketch(places=torch.tensor([5, 5])),
    "cells of another shape": sketch(cells=CELLS[1:]),
    "cells of half a sample": sketch(cells=CELLS / 2),
    "cells below 0": sketch(cells=-CELLS),
    "cells of NaN": sketch(cells=CELLS * torch.nan),
    "cells without labels": sketch(has_labels=3),
    "cells of -1 rows": sketch(n_rows=torch.tensor(-1)),
    "negative sums of groups": groups(1, lambda x: -x),
    "negative noise flags": groups(2, lambda x: x - 1),
    "sums of a group less": groups(1, lambda x: x[1:]),
    "float32 sums of groups": groups(1, lambda x: x.float()),
    "noise flag of a group less": groups(2, lambda x: x[1:]),
    "float32 noise flags": groups(2, lambda x: x.float()),
    "equal names of groups": groups(0, lambda names: [names[0], *names[:-1]]),
    "a number as the name of a group": groups(0, lambda names: [*names[:-1], 7]),
    "a long name of a group": groups(0, lambda names: [*names[:-1], "x" * 1001]),
    "no noise flags": changed("states", "groups", to=lambda parts: parts[:-1], task="groups"),
    "clusters of another kind": changed("states", BY_CLUSTER, 1, to=3, task="clusters"),
    "no sums of clusters": changed(
        "states", to=lambda x: {name: x[name] for name in x if name != BY_CLUSTER}, task="clusters"
    ),
    "stored clusters of a row less": stored_clusters(lambda x: x[1:]),
    "floating stored clusters": stored_clusters(lambda x: x.double()),
}


def test_files_with_other_content_raise_an_error_that_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = r"^`bad\.pt` must be a complete report state, got"

    def check(case):
        HOSTILE[case](tmp_path / "bad.pt")
        with pytest.raises(ValueError, match=words) as e:
            ReportBuilder.load("bad.pt")
        assert str(e.value).endswith("`ReportBuilder.save`.")
        assert str(e.value).isprintable()
        with pytest.raises(ValueError, match="`content` must be a complete report state, got"):
            ReportBuilder.from_bytes(Path("bad.pt").read_bytes())

    check_each(HOSTILE, check)


def test_states_before_the_hostile_changes_are_valid(tmp_path):
    for task in ("multiclass", "binary", "groups", "clusters", "sketch"):
        write = sketch() if task == "sketch" else changed("likely_axis", to=None, task=task)
        write(tmp_path / "good.pt")
        builder = ReportBuilder.load(tmp_path / "good.pt")
        assert ReportBuilder.from_bytes((tmp_path / "good.pt").read_bytes()).state_bytes() == builder.state_bytes()
        report = builder.report()
        weighted = task in ("multiclass", "binary", "sketch")
        assert report.n == (data_set(report.task, 12, "counts")["weights"].sum() if weighted else 12)


# Command line


def run(capsys, *arguments):
    """Run a command, and return exit code, output and errors."""
    code = main([*arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.extended
def test_merge_command_gives_the_report_of_one_run(folder, capsys):
    arrays = data_set("multiclass", 1200)
    shards(folder, arrays, 0, 400, 450)
    options = ["--no-intervals", "--out"]
    code, one, _ = run(capsys, "report", "whole.npz", *options, "one", "--save-calibrator", "one.cal", "--all")
    assert code == 0
    for k, names in enumerate((["shard-0.npz", "shard-1.npz"], ["shard-2.npz"], ["shard-3.npz"])):
        code, said, _ = run(capsys, "report", *names, "--no-intervals", "--save-state", f"part{k}.pt")
        assert code == 0
        assert "ECE" not in said, "no report is printed with --save-state alone"
    saved = ["--save-calibrator", "merged.cal", "--save-state", "all.pt"]
    code, merged, _ = run(capsys, "merge", "part*.pt", "--out", "merged", "--all", *saved)
    assert code == 0
    names = ", ".join(f"shard-{k}.npz" for k in range(4))
    expected = (
        one.replace("whole.npz, 2026", "shard-0.npz and 3 more, 2026")
        .replace("whole.npz", names)
        .replace("one/", "merged/")
        .replace("one.cal", "merged.cal")
    )
    assert merged.startswith(expected)
    reports = [json.loads(Path(name, "report.json").read_text()) for name in ("merged", "one")]
    assert_same(*reports)
    assert reports[0]["source"]["files"] == names.split(", ")
    preds = torch.from_numpy(arrays["logits"])
    cals = [load_calibrator(name)(preds) for name in ("merged.cal", "one.cal")]
    torch.testing.assert_close(*cals, rtol=1e-12, atol=1e-12)
    code, again, _ = run(capsys, "merge", "all.pt", "--save-state", "again.pt")
    assert code == 0
    assert "saved the state of 1,200 rows: again.pt" in again
    assert not list(folder.glob(".*")), "no incomplete file is left"


def test_merge_command_raises_errors_for_incompatible_parts(folder, capsys):
    arrays = data_set("binary", n=20)
    shards(folder, arrays, 10)
    np.savez("double.npz", **{**arrays, "logits": arrays["logits"].astype(float)})
    np.savez("annotator_counts.npz", **{**arrays, "targets": arrays["targets"] * 0.5})
    for name in ("shard-0", "shard-1", "double", "annotator_counts"):
        assert run(capsys, "report", f"{name}.npz", *QUICK_COMMAND, "--save-state", f"{name}.pt")[0] == 0
    assert run(capsys, "report", "shard-1.npz", *QUICK_COMMAND, "--n-bins", "10", "--save-state", "bins.pt")[0] == 0
    Path("copy.pt").write_bytes(Path("shard-0.pt").read_bytes())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def check(case):
        code, out, err = run(capsys, "merge", "shard-0.pt", *case[:-1])
        assert (code, out) == (2, "")
        assert case[-1] in err
        assert err.count("\n") == 1

    check_each(
        [
            ("bins.pt", "`bins.pt` cannot be merged with `shard-0.pt`: every part must have the same arguments"),
            ("double.pt", "`double.npz` must have the same dtype as `shard-0.npz`, got 'float64' and 'float32'."),
            (
                "annotator_counts.pt",
                "`annotator_counts.npz` must have the same rows as `shard-0.npz`, got ('float32 ()', 'float64 ()')",
            ),
            ("shard-0.pt", "Every part must be named once"),
            ("copy.pt", "`copy.pt` cannot be merged with `shard-0.pt`: every part must contain no predictions"),
            ("none*.pt", "`none*.pt` must match at least one file, got none."),
            ("none.pt", "No such file"),
            ("shard-1.npz", "`shard-1.npz` must be a complete report state"),
            ("shard-1.pt", "--save-state", "shard-0.pt", "`--save-state` must not be an input file"),
            ("shard-1.pt", "--save-state", "nowhere/a.pt", "`--save-state` must be in a folder that exists"),
            ("shard-1.pt", "--save-calibrator", "cal.pt", "with_calibration is False."),
        ],
        check,
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_merge_command_expands_patterns_in_alphabetical_order(folder, capsys):
    shards(folder, data_set("binary", n=40), 10, 20)
    Path("shard-[1].npz").write_bytes(Path("shard-0.npz").read_bytes())
    Path("deep/er").mkdir(parents=True)
    Path("shard-2.npz").rename("deep/er/shard-10.npz")
    for patterns, expected, words in (
        (["**/shard-1*.npz", "shard-0.npz"], 0, "files        deep/er/shard-10.npz, shard-1.npz, shard-0.npz\n"),
        (["shard-[1].npz"], 0, "files        shard-[1].npz\n"),
        (["shard-[0-1].npz"], 0, "files        shard-0.npz, shard-1.npz\n"),
        ([str(folder / "who*")], 0, f"files        {folder / 'whole.npz'}\n"),
        (["who*", "none-*.npz"], 2, "`none-*.npz` must match at least one file, got none. Check the pattern"),
        (["who*.npz", "whole.npz"], 2, "Every file must be named once"),
    ):
        code, *printed = run(capsys, "report", *patterns, "--all", *QUICK_COMMAND)
        assert code == expected
        assert words in printed[code > 0]


# Ranks


def launched(n_ranks, folder, *more):
    """Start ranks, and return the exit codes and the outputs of those that ended normally."""
    environments = environments_of_ranks(n_ranks, free_ports(1)[0], PYTHONWARNINGS="error")
    codes, printed = run_together([[SCRIPTS / "gathering_ranks.py", folder, *more]] * n_ranks, environments)
    assert codes == [0] * (n_ranks - len(more)) + [-signal.SIGKILL] * len(more), printed
    return [json.loads((folder / f"output-{k}.json").read_text()) for k in range(n_ranks - len(more))]


@pytest.mark.extended
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_gathered_reports_equal_that_of_one_process(n_ranks, tmp_path, monkeypatch):
    outputs = launched(n_ranks, tmp_path)
    for k, case in enumerate(gathering_ranks.CASES):
        with monkeypatch.context() as patch:
            for module in (sample_or_sketch, buffer):
                patch.setattr(module, "MAX_SAMPLES", case[-1] or module.MAX_SAMPLES)
            whole, arrays = gathering_ranks.builder_of(case)
            add_to(whole, arrays)
            found = ReportBuilder.load(tmp_path / f"gathered-{k}")
            assert_same(found.report().to_dict(), whole.report().to_dict(), str(case))
    for *calls, error in outputs:
        assert {*map(tuple, map(sorted, calls))} == {(*["all_gather"] * 3, "all_to_all_single")}
        assert len(calls) == len(gathering_ranks.CASES)
        assert error == outputs[0][-1]
        assert "must have the same arguments, got n_bins=11 instead of n_bins=10" in error


@pytest.mark.extended
def test_a_killed_rank_is_an_error_on_the_others(tmp_path):
    for message in launched(3, tmp_path, "kills"):
        assert "all ranks must gather a report, got no answer from another rank" in message
