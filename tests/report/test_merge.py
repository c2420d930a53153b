"""A report of parts is the report of the whole: builders that add, their files, and `torchcalib merge`."""

import importlib
import io
import json
import zipfile
from functools import cache, reduce
from operator import add
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.each import check_each
from helpers.shards import TASKS, add_to, assert_same, cut, data_set

import torchcalib as tc
from torchcalib.cli import main
from torchcalib.report import ReportBuilder
from torchcalib.report.saving import state_bytes

kept = importlib.import_module("torchcalib.report.kept")  # by its name alone it would be the function `report`'s
QUICK = {"with_calibration": False, "with_intervals": False}


def builder_of(arrays, task, **settings):
    builder = ReportBuilder(task=task, from_logits=True, **settings)
    if len(arrays["targets"]):
        add_to(builder, arrays)
    return builder


def through_a_file(builder, folder):
    tc.save_report_state(builder, folder / "state.pt")
    return tc.load_report_state(folder / "state.pt")


def parts_of(arrays, task, folder, *ends, **settings):
    return [through_a_file(builder_of(piece, task, **settings), folder) for piece in cut(arrays, *ends)]


@pytest.mark.parametrize("task", TASKS)
def test_law_parts_through_files_are_the_whole(task, tmp_path):
    """With calibrators and intervals, which depend on the order of rows; the first part has none."""
    arrays = data_set(task)
    whole = builder_of(arrays, task).report().to_dict()
    parts = parts_of(arrays, task, tmp_path, 0, 31, 200)
    assert_same(reduce(add, parts).report().to_dict(), whole)
    merged = through_a_file(parts[0] + parts[1], tmp_path) + (parts[2] + parts[3])
    assert_same(merged.report().to_dict(), whole)
    assert whole["calibration"] is not None
    assert all(line["interval"] for line in whole["lines"] if line["key"] != "esce/classwise")


@pytest.mark.parametrize(
    ("task", "weights", "soft"),
    [
        ("binary", "counts", True),
        ("binary", "real", False),
        ("multiclass", "counts", False),
        ("multiclass", "real", True),
        ("multilabel", "counts", True),
        ("multilabel", "real", False),
    ],
)
def test_law_parts_are_the_whole_for_weights_and_soft_targets(task, weights, soft, tmp_path):
    arrays = data_set(task, weights=weights, soft=soft)
    settings = {**QUICK, "n_bins": 7, "right": True}
    whole = builder_of(arrays, task, **settings).report().to_dict()
    parts = parts_of(arrays, task, tmp_path, 31, 100, **settings)
    assert_same(reduce(add, parts).report().to_dict(), whole)


def test_parts_whose_weights_are_counts_and_not_counts_have_no_order():
    arrays = data_set("binary", weights="counts")
    arrays["weights"] = arrays["weights"].astype(float)
    arrays["weights"][200] = 0.5
    whole = builder_of(arrays, "binary").report().to_dict()
    for ends in ((150,), (210,)):
        parts = [builder_of(piece, "binary") for piece in cut(arrays, *ends)]
        assert_same((parts[0] + parts[1]).report().to_dict(), whole)
    assert whole["settings"]["order_based"] == "left out"


@pytest.mark.parametrize(
    ("task", "ends"),
    [
        ("binary", (10, 20, 200)),
        *(
            pytest.param(*more, marks=pytest.mark.extended)
            for more in (("binary", (100,)), ("multilabel", (10, 20, 200)))
        ),
    ],
)
def test_what_is_too_much_only_together_is_let_go_of_as_in_one(task, ends, tmp_path, monkeypatch):
    """The samples become a sketch, and are not kept for calibrators: in each part, in some of them, in none."""
    n_events = 240 if task == "binary" else 960
    for limit in (n_events - 1, n_events // 2, n_events // 40):
        monkeypatch.setattr("torchcalib.bounded.MOST_SAMPLES", limit)
        monkeypatch.setattr(kept, "MOST_SAMPLES", limit)
        arrays = data_set(task, weights="counts")
        arrays["weights"] += 1  # samples of weight 0 would not be among those that are too many
        whole = builder_of(arrays, task, with_intervals=False).report().to_dict()
        parts = parts_of(arrays, task, tmp_path, *ends, with_intervals=False)
        assert_same(reduce(add, parts).report().to_dict(), whole)
        assert whole["settings"]["order_based"].startswith("sketch")
        assert len(whole["notes"]) == 2  # on the sketch, on calibrators and intervals
    monkeypatch.setattr("torchcalib.bounded.MOST_SAMPLES", n_events)
    monkeypatch.setattr(kept, "MOST_SAMPLES", n_events)
    exact = reduce(add, parts_of(arrays, task, tmp_path, *ends, with_intervals=False)).report()
    assert exact.settings["order_based"] == "exact"
    assert exact.calibration is not None


def test_a_sum_leaves_what_was_added_as_it_is():
    arrays = data_set("multiclass")
    parts = [builder_of(piece, "multiclass", **QUICK) for piece in cut(arrays, 100)]
    before = [part.report().to_dict() for part in parts]
    whole = parts[0] + parts[1]
    add_to(whole, data_set("multiclass", seed=1))
    assert [part.report().to_dict() for part in parts] == before
    add_to(parts[0], cut(arrays, 100)[1])
    assert_same(parts[0].report().to_dict(), builder_of(arrays, "multiclass", **QUICK).report().to_dict())


def test_nothing_is_counted_twice(tmp_path):
    """A part again, a copy of it, or one beside a sum that has it in; but parts of equal content are two."""
    arrays = data_set("binary", n=20)
    parts = parts_of(arrays, "binary", tmp_path, 10, **QUICK)
    again = through_a_file(parts[0], tmp_path)
    whole = parts[0] + parts[1]
    before = whole.report().to_dict()
    for other in (parts[0], again, through_a_file(whole, tmp_path), whole):
        with pytest.raises(ValueError, match="that are here already"):
            whole.merge(other)
    assert whole.report().to_dict() == before
    alike = [builder_of(arrays, "binary", **QUICK) for _ in range(2)]
    assert (alike[0] + alike[1]).report().n == 40
    empty = [through_a_file(builder_of(cut(arrays, 0)[0], "binary", **QUICK), tmp_path)] * 2
    assert (empty[0] + empty[1] + alike[0]).report().n == 20


def test_fit_and_axes_are_those_of_the_whole(tmp_path):
    arrays = data_set("multiclass", n=60)
    maps, labels = (
        torch.from_numpy(arrays["logits"]).reshape(2, 30, 4).movedim(-1, 1),
        torch.from_numpy(arrays["targets"]).reshape(2, 30),
    )
    given = {"task": "multiclass", "from_logits": True, "class_axis": 1, "with_intervals": False}
    whole = ReportBuilder(**given)
    whole.update(maps, labels)
    parts = []
    for k in range(2):
        part = ReportBuilder(**given)
        part.update(maps[k : k + 1], labels[k : k + 1])
        parts.append(through_a_file(part, tmp_path))
    fits = [builder.fit(tc.DPCalibration()) for builder in (whole, parts[0] + parts[1])]
    torch.testing.assert_close(fits[0](maps), fits[1](maps), rtol=1e-12, atol=1e-12)


DIFFERENT = [
    ({"task": "multilabel"}, 4, "task='multilabel' beside task='multiclass'"),
    ({"n_bins": 10}, 4, "n_bins=10 beside n_bins=15"),
    ({"right": True}, 4, "right=True beside right=False"),
    ({"from_logits": False}, 4, "from_logits=False beside from_logits=True"),
    ({"ignore_index": -100}, 4, "ignore_index=-100 beside ignore_index=None"),
    ({"with_intervals": False}, 4, "with_intervals=False beside with_intervals=True"),
    ({}, 3, "classes=3 beside classes=4"),
]


def test_builders_that_differ_are_refused_and_nothing_is_added():
    mine = builder_of(data_set("multiclass", n=60), "multiclass")
    before = mine.report().to_dict()

    def check(different):
        settings, classes, words = different
        other = ReportBuilder(**{"task": "multiclass", "from_logits": True, **settings})
        labels = torch.zeros(3, 4, dtype=torch.int64) if other.settings["task"] == "multilabel" else torch.arange(3)
        other.update(torch.full((3, classes), 1 / classes), labels)
        with pytest.raises(ValueError, match="must be made with the same arguments") as raised:
            mine.merge(other)
        assert words in str(raised.value)

    check_each(DIFFERENT, check)
    assert mine.report().to_dict() == before


# Files that say they are states.


@cache
def saved(task):
    if task == "probabilities":
        builder = tc.ReportBuilder(task="binary")
        builder.update(torch.linspace(0, 1, 12), torch.arange(12) % 2)
        return state_bytes(builder)
    return state_bytes(builder_of(data_set(task, n=12, weights="counts"), task))


def content_of(task="multiclass"):
    return torch.load(io.BytesIO(saved(task)), weights_only=True)


def changed(change, task="multiclass"):
    """A state of which one thing is another."""

    def write(path):
        state = content_of(task)
        change(state)
        torch.save(state, path)

    return write


def set_at(*keys, value):
    def change(state):
        for key in keys[:-1]:
            state = state[key]
        assert isinstance(state, list) or keys[-1] in state
        state[keys[-1]] = value

    return change


def piece(k, value):
    def change(state):
        (held,) = state["kept"]["pieces"]
        state["kept"]["pieces"] = [tuple(value if i == k else part for i, part in enumerate(held))]

    return change


def first_sums(change):
    """Change the sums, or a list of chunks, whose name has a word in it."""

    def changing(word):
        def change_it(state):
            name = next(name for name in state["metrics"] if word in name)
            state["metrics"][name] = change(state["metrics"][name])

        return change_it

    return changing


def with_cells(**parts):
    """A state of a sketch."""

    def change(state):
        sketch = {"cells": torch.ones(3, 2, dtype=torch.float64), "places": torch.tensor([5, 9]), "has_labels": True}
        state["samples"]["positive_class"] = {**sketch, **parts}

    return change


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil"),))


def deflated(path):
    """What unpacks to a thousand times its size."""
    state = content_of()
    state["kept"]["pieces"] = [(torch.zeros(10**6, 4), torch.zeros(10**6, dtype=torch.int64), None)]
    torch.save(state, path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value, value]
    return value


def truncated(path):
    torch.save(content_of(), path)
    path.write_bytes(path.read_bytes()[:-300])


HOSTILE = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"hello" * 99),
    "truncated": truncated,
    "objects": lambda path: torch.save({"format": Evil()}, path),
    "old format": lambda path: torch.save(content_of(), path, _use_new_zipfile_serialization=False),
    "something else": lambda path: torch.save({"logits": torch.ones(3)}, path),
    "a tensor": lambda path: torch.save(torch.ones(3), path),
    "other format": changed(set_at("format", value="other")),
    "compressed": deflated,
    "10^9 classes": changed(set_at("num_classes", value=10**9)),
    "classes of another kind": changed(set_at("num_classes", value=4.0)),
    "other classes": changed(set_at("num_classes", value=3)),
    "expanded": changed(piece(0, torch.ones(1, 1).expand(10**9, 4))),
    "laughs": changed(set_at("samples", value={"top_label": nested(40)})),
    "sparse": changed(piece(0, torch.ones(12, 4).to_sparse())),
    "settings": changed(set_at("settings", value={"task": "multiclass", "nonsense": 1})),
    "bins": changed(set_at("settings", "n_bins", value=10**9)),
    "a bin more": changed(set_at("settings", "n_bins", value=16)),
    "task": changed(set_at("settings", "task", value="regression")),
    "no metrics": changed(set_at("metrics", value=3)),
    "no sums": changed(set_at("metrics", value={})),
    "sums": changed(first_sums(lambda sums: sums[:-1])("NLL")),
    "sums of another kind": changed(first_sums(lambda sums: [1, 2])("NLL")),
    "chunks": changed(first_sums(lambda chunks: chunks * 2)("scores")),
    "probabilities": changed(first_sums(lambda chunks: [chunk + 2 for chunk in chunks])("scores"), "probabilities"),
    "outcomes": changed(first_sums(lambda chunks: [chunk + 200 for chunk in chunks])("outcomes")),
    "counts": changed(first_sums(lambda chunks: [chunk - 9 for chunk in chunks])("sample of top_label.weights")),
    "labels out of range": changed(piece(1, torch.full((12,), 2**40))),
    "labels missing": changed(piece(1, torch.zeros(5, dtype=torch.int64))),
    "kept NaN": changed(piece(0, torch.full((12, 4), torch.nan))),
    "kept of other classes": changed(piece(0, torch.zeros(12, 5))),
    "kept too few": changed(piece(0, torch.zeros(0, 4))),
    "kept no tensors": changed(piece(0, "text")),
    "kept of one axis more": changed(lambda state: set_at("kept", "pieces", value=[
        (torch.zeros(1, 12, 4), torch.zeros(1, 12, dtype=torch.int64), None)])(state)),
    "pieces": changed(set_at("kept", "pieces", value=7)),
    "kept nothing": changed(set_at("kept", value=None)),
    "flag": changed(set_at("kept", "has_shares", value=torch.tensor(True))),
    "source": changed(set_at("source", value={"files": 3})),
    "cells elsewhere": changed(with_cells(places=torch.tensor([5, 10**9])), "binary"),
    "cells twice": changed(with_cells(places=torch.tensor([5, 5])), "binary"),
    "cells of another shape": changed(with_cells(cells=torch.ones(2, 2, dtype=torch.float64)), "binary"),
    "cells below 0": changed(with_cells(cells=-torch.ones(3, 2, dtype=torch.float64)), "binary"),
    "cells of NaN": changed(with_cells(cells=torch.full((3, 2), torch.nan, dtype=torch.float64)), "binary"),
}  # fmt: skip


def test_damaged_and_hostile_files_are_an_error_that_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = r"^`bad\.pt` must be a report state that torchcalib wrote to its end, got"

    def check(case):
        HOSTILE[case](tmp_path / "bad.pt")
        with pytest.raises(ValueError, match=words) as e:
            tc.load_report_state("bad.pt")
        assert str(e.value).endswith("`save_report_state`.")
        assert str(e.value).isprintable()
        assert not Path("evil").exists()

    check_each(HOSTILE, check)


def test_the_states_that_hostile_ones_are_made_of_are_sound(tmp_path):
    for task in ("binary", "multiclass"):
        changed(lambda state: None, task)(tmp_path / "good.pt")
        assert tc.load_report_state(tmp_path / "good.pt").report().n == data_set(task, 12, "counts")["weights"].sum()
    changed(with_cells(), "binary")(tmp_path / "good.pt")
    tc.load_report_state(tmp_path / "good.pt")


def test_another_version_is_refused_by_its_number(tmp_path):
    changed(set_at("version", value=6))(tmp_path / "new.pt")
    with pytest.raises(ValueError, match="`version` of a report state must be 5 for this torchcalib, got 6"):
        tc.load_report_state(tmp_path / "new.pt")
    with pytest.raises(FileNotFoundError):
        tc.load_report_state(tmp_path / "none.pt")


# The command.


def shards(folder, arrays, *ends):
    for k, part in enumerate(cut(arrays, *ends)):
        np.savez(folder / f"shard-{k}.npz", **part)
    np.savez(folder / "whole.npz", **arrays)


def run(capsys, *arguments):
    """Exit code, output, errors."""
    code = main([*arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_command_merges_what_it_saved_into_the_report_of_one_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shards(tmp_path, data_set("multiclass"), 0, 80, 90)
    code, one, _ = run(capsys, "report", "whole.npz", "--out", "one", "--save-calibrator", "one.cal")
    assert code == 0
    for k, names in enumerate((["shard-0.npz", "shard-1.npz"], ["shard-2.npz"], ["shard-3.npz"])):
        code, said, _ = run(capsys, "report", *names, "--save-state", f"part{k}.pt")
        assert code == 0
        assert "saved the state" in said
        assert "ECE" not in said, "without --out nothing is reported"
    code, merged, _ = run(
        capsys, "merge", "part*.pt", "--out", "merged", "--save-calibrator", "merged.cal", "--save-state", "all.pt"
    )
    assert code == 0
    names = ", ".join(f"shard-{k}.npz" for k in range(4))
    expected = one.replace("whole.npz", names).replace("one/", "merged/").replace("one.cal", "merged.cal")
    assert merged.startswith(expected)
    assert "saved the state of 240 rows: all.pt" in merged
    reports = [json.loads(Path(name, "report.json").read_text()) for name in ("merged", "one")]
    assert_same(*reports)
    assert reports[0]["source"]["files"] == names.split(", ")
    preds = torch.from_numpy(data_set("multiclass")["logits"])
    cals = [tc.load_calibrator(name)(preds) for name in ("merged.cal", "one.cal")]
    torch.testing.assert_close(*cals, rtol=1e-12, atol=1e-12)
    code, again, _ = run(capsys, "merge", "all.pt", "--save-state", "again.pt")
    assert code == 0
    assert "saved the state of 240 rows: again.pt" in again
    assert not list(tmp_path.glob(".*")), "nothing is left half-written"


def test_command_refuses_parts_that_do_not_belong_together(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ["--no-calibration", "--no-intervals"]
    arrays = data_set("binary", n=20)
    shards(tmp_path, arrays, 10)
    np.savez("double.npz", **{**arrays, "logits": arrays["logits"].astype(float)})
    np.savez("votes.npz", **{**arrays, "targets": arrays["targets"] * 0.5})
    for name in ("shard-0", "shard-1", "double", "votes"):
        assert run(capsys, "report", f"{name}.npz", *quick, "--save-state", f"{name}.pt")[0] == 0
    assert run(capsys, "report", "shard-1.npz", *quick, "--n-bins", "10", "--save-state", "bins.pt")[0] == 0
    Path("copy.pt").write_bytes(Path("shard-0.pt").read_bytes())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for names, words in (
        (["bins.pt"], "`bins.pt` cannot be merged with `shard-0.pt`: `other` must be made with the same arguments, "
         "got n_bins=10 beside n_bins=15."),
        (["double.pt"], "`double.npz` must be read as `shard-0.npz` is, got dtype='float64' and 'float32'."),
        (["votes.pt"], "`votes.npz` must be read as `shard-0.npz` is, got rows=('float32 ()', 'float64 ()')"),
        (["shard-0.pt"], "every part must be named once"),
        (["copy.pt"], "`copy.pt` cannot be merged with `shard-0.pt`: `other` must hold other predictions"),
        (["none*.pt"], "`none*.pt` must match at least one file, got none."),
        (["none.pt"], "No such file"),
        (["shard-1.npz"], "`shard-1.npz` must be a report state"),
        (["shard-1.pt", "--save-state", "shard-0.pt"], "`--save-state` must not be a file that is read"),
        (["shard-1.pt", "--save-state", "nowhere/a.pt"], "`--save-state` must be in a folder that exists"),
        (["shard-1.pt", "--save-calibrator", "cal.pt"], "data that a calibrator can be tried on, got others: "
         "with_calibration is False."),
    ):  # fmt: skip
        code, out, err = run(capsys, "merge", "shard-0.pt", *names)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_command_that_cannot_write_a_state_leaves_the_old_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shards(tmp_path, data_set("binary", n=20), 10)
    Path("part.pt").write_bytes(b"old")

    class Full(io.FileIO):
        def write(self, content):
            super().write(content[:100])
            raise OSError(28, "No space left on device")

    def opened(self, mode="r", *args, **options):
        return Full(self, mode) if "x" in mode else original(self, mode, *args, **options)

    original = Path.open
    monkeypatch.setattr(Path, "open", opened)
    code, out, err = run(capsys, "report", "whole.npz", "--save-state", "part.pt")
    assert (code, out) == (2, "")
    assert "No space left on device" in err
    assert Path("part.pt").read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


def test_command_expands_patterns_in_the_order_of_names(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shards(tmp_path, data_set("binary", n=40), 10, 20)
    np.savez("shard-[1].npz", **cut(data_set("binary", n=40), 5)[0])
    Path("deep/er").mkdir(parents=True)
    Path("shard-2.npz").rename("deep/er/shard-10.npz")
    quick = ["--no-calibration", "--no-intervals"]
    for patterns, names in (
        (["shard-?.npz"], "shard-0.npz, shard-1.npz"),
        (["**/shard-1*.npz", "shard-0.npz"], "deep/er/shard-10.npz, shard-1.npz, shard-0.npz"),
        (["shard-[1].npz"], "shard-[1].npz"),
        (["shard-[0-1].npz"], "shard-0.npz, shard-1.npz"),
        ([str(tmp_path / "who*")], str(tmp_path / "whole.npz")),
    ):
        code, out, _ = run(capsys, "report", *patterns, *quick)
        assert code == 0
        assert f"files        {names}\n" in out
    for patterns, words in (
        (["who*", "none-*.npz"], "`none-*.npz` must match at least one file, got none. Check the pattern"),
        (["who*.npz", "whole.npz"], "Every file must be named once"),
        (["none.npz"], "got nothing of this name"),
    ):
        code, out, err = run(capsys, "report", *patterns, *quick)
        assert (code, out) == (2, "")
        assert words in err


def test_command_says_in_which_rows_of_which_file_a_bad_value_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = data_set("binary", n=50)
    arrays["logits"][37] = np.nan
    shards(tmp_path, arrays, 30)
    monkeypatch.setattr("torchcalib.cli.report.PIECE_BYTES", 20)
    assert "in rows 6 to 10 of `shard-1.npz`: `preds` must not hold NaN" in run(capsys, "report", "shard-*.npz")[2]
