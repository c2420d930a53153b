"""Files of others: nothing in them runs, none takes all memory or for ever, and what they name does no harm."""

import ast
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import quick_environment

import torchcalib as tc
from torchcalib import terminal
from torchcalib.cli import main
from torchcalib.files import InputError, load_tensors, open_predictions, write_whole
from torchcalib.html.page import filled
from torchcalib.report import ReportBuilder
from torchcalib.subgroups import GroupTable

PACKAGE = Path(tc.__file__).parent
HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "{% raw %}", "../../../outside",
    "/tmp/outside", "\x1b[31mred\x1b]0;title\x07", "[red]markup[/red][/]", "right\u202eleft", "a\r\nb", "$x_{", "-->",
)  # fmt: skip


# what runs


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def write_pickles(folder, evil):
    """Files of every format that a pickle can hide in."""
    objects = np.empty(2, dtype=object)
    objects[:] = evil
    torch.save({"logits": torch.zeros(2), "targets": torch.zeros(2).long(), "more": evil}, folder / "dict.pt")
    torch.save(evil, folder / "whole.pth")
    torch.save({"logits": evil}, folder / "old.pt", _use_new_zipfile_serialization=False)
    (folder / "bare.pt").write_bytes(pickle.dumps(evil))
    np.savez(folder / "array.npz", logits=objects, targets=np.zeros(2, np.int64))
    with zipfile.ZipFile(folder / "member.npz", "w") as archive:
        archive.writestr("logits.npy", pickle.dumps(evil))
    np.save(folder / "objects.npy", objects, allow_pickle=True)
    np.save(folder / "targets.npy", np.zeros(2, np.int64))
    return [[folder / name] for name in ("dict.pt", "whole.pth", "old.pt", "bare.pt", "array.npz", "member.npz")] + [
        [folder / "objects.npy", folder / "targets.npy"]
    ]


def test_no_pickle_in_any_format_runs(tmp_path):
    made = tmp_path / "made"
    evil = Runs(made)
    for paths in write_pickles(tmp_path, evil):
        with pytest.raises(InputError):
            list(open_predictions(paths, from_logits=True).chunks())
        assert not made.exists(), paths
        if paths[0].suffix in (".pt", ".pth"):
            with pytest.raises(ValueError, match="must be a file that `save_calibrator` wrote"):
                tc.load_calibrator(paths[0])
        assert not made.exists(), paths
    pickle.loads((tmp_path / "bare.pt").read_bytes())
    assert made.exists(), "the detector can fail: what was not run does run"


ALLOWED = {"load": {"torch": ("weights_only", True), "np": ("allow_pickle", False), "numpy": ("allow_pickle", False)}}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_MODULES = {"marshal", "shelve", "joblib", "dill", "cloudpickle", "yaml", "subprocess"}
FORBIDDEN_ATTRIBUTES = {
    ("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler"), ("os", "system"), ("os", "popen"),
    ("pd", "read_pickle"), ("pandas", "read_pickle"), ("jit", "load"),
}  # fmt: skip


def unsafe(source):
    """Lines of a module that could run what others wrote."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [node.lineno for name in names if name.partition(".")[0] in FORBIDDEN_MODULES]
            if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "torch", "numpy"):
                found += [node.lineno for alias in node.names if alias.name in ("load", "loads", "Unpickler")]
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            found += [node.lineno] * ((owner, node.attr) in FORBIDDEN_ATTRIBUTES)
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(node.lineno)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            keyword, value = ALLOWED["load"].get(getattr(node.func.value, "id", ""), (None, None))
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            found += [node.lineno] * (keyword is not None and given.get(keyword) is not value)
    return found


def test_no_line_of_the_package_could_unpickle_or_run_what_others_wrote():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    assert {str(path): lines for path in files if (lines := unsafe(path.read_text()))} == {}


@pytest.mark.parametrize("line", [
    "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)", "np.load(f, allow_pickle=True)",
    "pickle.loads(b)", "eval(x)", "import joblib", "from pickle import load", "os.system(x)", "torch.jit.load(f)",
])  # fmt: skip
def test_the_scan_can_fail(line):
    assert unsafe(line) == [1]


# what is too large

CHILD = """
import os, resource, signal, sys, json
import pyarrow.csv, pyarrow.parquet, safetensors, torch
import torchcalib.html, torchcalib.terminal, torchcalib.files.tables, torchcalib.files.npy
from torchcalib.cli import main
torch.set_num_threads(1)
for arguments in json.loads(sys.stdin.read()):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 3 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        os.dup2(1, 2)
        os._exit(main(["report", *arguments, "--no-intervals", "--no-calibration"]))
    status = os.waitpid(pid, 0)[1]
    print("STATUS", status, flush=True)
"""


def npy_header(shape, dtype="<f4", fortran=False):
    text = f"{{'descr': {dtype!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def packed(path, **members):
    """An archive with members of zeros, given their first bytes and how many zeros follow."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (start, zeros) in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(start)
                for begin in range(0, zeros, 2**24):
                    member.write(b"\0" * min(2**24, zeros - begin))
    return [str(path)]


def write(path, content):
    path.write_bytes(content)
    return [str(path)]


def safetensors_of(header, tail=b""):
    return struct.pack("<Q", len(header)) + header + tail


def made_fifo(path):
    os.mkfifo(path)
    return [str(path)]


def linked(path, to):
    path.symlink_to(to)
    return [str(path)]


def too_large(f):
    """Hostile files, and what must be said of each."""
    labels = (npy_header((1,), "<i8"), 8)
    long = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1)
    yield (
        packed(f / "lie.npz", logits=(npy_header((10**13,)), 8), targets=(npy_header((10**13,), "<i8"), 8)),
        "promised",
    )
    yield packed(f / "negative.npz", logits=(npy_header((-4, 2)), 8), targets=labels), "promised"
    yield packed(f / "overflow.npz", logits=(npy_header((2**62, 8)), 0), targets=labels), "promised"
    yield packed(f / "width.npz", logits=(npy_header((1,), "<U900000000"), 0), targets=labels), "must be a complete"
    yield packed(f / "void.npz", logits=(npy_header((1,), "|V8"), 8), targets=labels), "floating-point predictions"
    yield (
        packed(f / "head.npz", logits=(long, 10**7), targets=labels),
        "a header of 4,294,967,295 bytes is too long",
    )
    yield (
        packed(f / "row.npz", logits=(npy_header((1, 2 * 10**7)), 8 * 10**7), targets=labels),
        ("must have at most 2,354,696 classes with 15 bins, got 20,000,000"),
    )
    votes = (npy_header((1, 2 * 10**7), "<i8"), 16 * 10**7)
    labelled = packed(f / "labels.npz", probs=(npy_header((1, 2 * 10**7)), 8 * 10**7), targets=votes)
    yield [*labelled, "--task", "multilabel"], "must have at most"
    yield (
        write(f / "length.safetensors", struct.pack("<Q", 10**18) + b"{}"),
        "header of 1,000,000,000,000,000,000 bytes",
    )
    yield write(f / "json.safetensors", safetensors_of(b'{"a": ' + b" " * 2**25 + b"1}")), "is too long"
    yield write(f / "deep.safetensors", safetensors_of(b'{"a":' + b"[" * 10**6)), "must be a complete"
    shape = json.dumps({"logits": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 8]}}).encode()
    yield write(f / "shape.safetensors", safetensors_of(shape, b"0" * 8)), "must be a complete"
    yield write(f / "line.csv", b"prob,target\n" + b"1" * 2 * 10**7), "must be a complete"
    yield write(f / "head.csv", b"a" * 2 * 10**7 + b"\n1\n"), "must be a complete"
    names, numbers = ",".join(f"p{k}" for k in range(2 * 10**5)), ",".join("0" for _ in range(2 * 10**5))
    yield write(f / "columns.csv", f"{names}\n{numbers}\n".encode()), "at most 131,072 arrays or columns, got 200,000"
    yield made_fifo(f / "pipe.npz"), "must be a file, got a pipe or device"
    yield made_fifo(f / "pipe.csv"), "must be a file, got a pipe or device"
    for suffix in ("npz", "csv", "pt", "parquet", "safetensors"):
        yield linked(f / f"zero.{suffix}", "/dev/zero"), "must be a file, got a pipe or device"
    rows = 10**9
    expanded = {"probs": torch.zeros(1).expand(rows), "targets": torch.zeros(1, dtype=torch.int64).expand(rows)}
    torch.save(expanded, f / "expanded.pt")
    yield [str(f / "expanded.pt")], "more numbers than the file holds"
    torch.save({"probs": torch.zeros(100), "targets": torch.zeros(100).long()}, f / "plain.pt")
    with zipfile.ZipFile(f / "plain.pt") as plain, zipfile.ZipFile(f / "packed.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for info in plain.infolist():
            content = plain.read(info.filename)
            bomb.writestr(info.filename, content + b"\0" * 10**8 if info.filename.endswith("data.pkl") else content)
    yield [str(f / "packed.pt")], "is compressed, which torch.save never does"
    old = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    yield write(f / "old.pt", old + b"\x80\x02" + b"(" * 10**4), "must"
    a = f / "nan.npz"
    np.savez(a, logits=np.array([0x7FC12345, 0x7F812345], np.uint32).view(np.float32), targets=np.array([0, 1]))
    yield [str(a)], "must not hold NaN"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux")
def test_hostile_files_are_errors_before_memory_or_time_is_gone(tmp_path):
    """Every file is read in a process that may take 3 GiB more than it has, and 100 seconds."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("safetensors")
    cases = list(too_large(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps([arguments for arguments, _ in cases]), text=True,
        env=quick_environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("STATUS")
    wrong = {}
    for (arguments, words), before, after in zip(cases, said, said[1:], strict=False):
        line = before.partition("\n")[2] if before[:1] == " " else before
        status = int(after.split()[0])
        if status != 2 << 8 or words not in line or line.count("\n") != 1 or "torchcalib: error: " not in line:
            wrong[Path(arguments[0]).name] = (status, line[:300])
    assert len(said) == len(cases) + 1
    assert wrong == {}


def test_lists_that_a_few_bytes_stand_for_are_refused_before_a_row_is_read(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def table(values):
        lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), pa.array(values))
        parquet.write_table(pa.table({"probs": lists, "targets": [0]}), tmp_path / "a.parquet")

    monkeypatch.setattr("torchcalib.files.tables.MAX_RESIDENT", 2**20)
    table(np.zeros(10**6, np.float32))
    with pytest.raises(InputError, match="1,000,000 numbers of probs in"):
        open_predictions([tmp_path / "a.parquet"])
    table(np.random.default_rng(0).random(10**6, np.float32))
    assert open_predictions([tmp_path / "a.parquet"]).shape == (1, 10**6)


def test_more_arrays_than_can_be_listed_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("torchcalib.files.reader.MOST_ARRAYS", 10)
    arrays = {f"a{k}": np.zeros(2) for k in range(11)}
    np.savez(tmp_path / "many.npz", **arrays)
    with pytest.raises(InputError, match="at most 10 arrays or columns, got 11"):
        open_predictions([tmp_path / "many.npz"])
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table(arrays), tmp_path / "many.parquet")
    with pytest.raises(InputError, match="at most 10 arrays or columns, got 11"):
        open_predictions([tmp_path / "many.parquet"])


@pytest.mark.parametrize(("task", "width"), [("multiclass", 10**9), ("multilabel", 10**9)])
def test_a_report_and_a_comparison_of_a_billion_classes_are_refused_before_sums_are_made(task, width):
    row = torch.zeros(1, dtype=torch.float16).expand(1, width)  # two bytes
    target = torch.zeros(1, dtype=torch.int64) if task == "multiclass" else torch.zeros(1).long().expand(1, width)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 1,000,000,000"):
        ReportBuilder(task=task, from_logits=True).update(row, target)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 1,000,000,000"):
        tc.compare({"a": row, "b": row}, target, task=task, from_logits=True)


def test_tensors_are_never_larger_in_memory_than_in_their_file(tmp_path):
    torch.save({"a": torch.zeros(10)}, tmp_path / "a.pt")
    assert load_tensors(tmp_path / "a.pt")["a"].shape == (10,)
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as plain,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_BZIP2) as bomb,
    ):
        for info in plain.infolist():
            bomb.writestr(info.filename, plain.read(info.filename))
    with pytest.raises(ValueError, match="is compressed"):
        load_tensors(tmp_path / "b.pt")
    with pytest.raises(ValueError, match="must be a file that `save_calibrator` wrote"):
        tc.load_calibrator(tmp_path / "b.pt")


# what is named


@pytest.fixture(scope="module")
def compared():
    """Two systems, with all these names between them."""
    g = torch.Generator().manual_seed(0)
    names = (" ".join(HOSTILE[::2]), " ".join(HOSTILE[1::2]))
    probs = {name: torch.rand(50, generator=g) for name in names}
    return tc.compare(probs, torch.arange(50) % 2, task="binary", n_replicates=39)


def test_names_are_escaped_on_pages_and_in_pictures(compared):
    from torchcalib.html import render_comparison
    from torchcalib.plots import difference_plot, to_svg

    page = render_comparison(compared)
    for name in HOSTILE[:2]:
        assert name not in page
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "{{ 7 * 7 }}" in page, "no name is a template"
    svg = to_svg(difference_plot(compared))
    assert "<script" not in svg
    assert "\x1b" not in svg
    import xml.etree.ElementTree as ElementTree

    ElementTree.fromstring(svg)  # of our own making: it must be well formed


def test_names_neither_steer_a_terminal_nor_are_its_markup(compared, capsys):
    terminal.show_comparison(compared)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "\u202e" not in said
    assert "[red]markup[/red][/]" in said
    terminal.show_paths([Path("/x/\x1b[31m[red].html")])
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "[red].html" in said


def test_names_of_groups_are_text_wherever_they_are_shown(tmp_path, capsys):
    """From a file to a terminal, a page and JSON; two that look alike remain two."""
    names = [
        *HOSTILE,
        "=1+1",
        "@SUM(A1)",
        ":bomb:",
        "🧨👩\u200d🚒",
        "\ud800",
        "a\nb",
        "\u200e",
        "back\\",
        "[/bold]\\",
        "&lt;b&gt;",
    ]
    groups = torch.arange(40 * len(names)) % len(names)
    p = torch.rand(len(groups), generator=torch.Generator().manual_seed(0))
    builder = ReportBuilder(task="binary", with_calibration=False, with_intervals=False)
    builder.update(p, groups % 2, groups=groups, group_names=names)
    tc.save_report_state(builder, tmp_path / "state.pt")
    found = tc.load_report_state(tmp_path / "state.pt").report()
    assert found.groups.n_groups == len(names)
    whole = replace(found, groups=GroupTable.of(names, torch.full((len(names),), 40.0), evidence_of_all(names)))
    terminal.show(whole)
    said = capsys.readouterr().out
    for text in (said, str(whole)):
        assert all(letter.isprintable() or letter == "\n" for letter in text)
        for name in ("=1+1", ":bomb:", "[red]markup[/red][/]", "🧨", "back\\", "[/bold]\\", "&lt;b&gt;", "{{ 7 * 7 }}"):
            assert name in text, name
    page = filled("groups.html.jinja", report=whole, group_words="")
    page.encode()  # of what no file can hold nothing is left
    assert "<script" not in page
    assert "<img" not in page
    for name in ("&lt;script&gt;alert(1)&lt;/script&gt;", "=1+1", ":bomb:", "{{ 7 * 7 }}", "&amp;lt;b&amp;gt;"):
        assert f"<bdi>{name}</bdi>" in page
    assert page.count('<th scope="row" class="name">') == len(names)
    assert json.loads(whole.to_json())["groups"]["group"] == names


def evidence_of_all(names):
    """Of as many groups, all of them alike."""
    x = torch.full((len(names),), 0.1, dtype=torch.float64)
    return tc.Evidence(x, x / 2, x, x / 2, 2 * x, 0.95)


def test_errors_neither_steer_a_terminal_nor_run_over_lines(tmp_path, capsys):
    for name in ("\x1b]0;owned\x07.npz", "a\r\nb.npz", "\u202e.xyz"):
        assert main(["report", str(tmp_path / name)]) == 2
        assert main(["compare", f"a={tmp_path / name}", f"b={tmp_path}/*{name}"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 2
        assert all(letter.isprintable() or letter == "\n" for letter in said)


# what is written


def everything_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_output_stays_in_its_folder_whatever_systems_are_called_and_wherever_links_lead(compared, tmp_path):
    outside, out = tmp_path / "outside", tmp_path / "deep" / "out"
    outside.mkdir()
    out.mkdir(parents=True)
    (outside / "mine").write_text("mine")
    for name in ("compare.json", "compare.svg", "report.json", "report.html", "reliability.png"):
        (out / name).symlink_to(outside / "mine")
    (out / f".compare.html.{os.getpid()}.part").symlink_to(outside / "mine")
    (out / "compare.png").symlink_to(outside / "new")  # which is not there
    written = [*tc.save_comparison(compared, out)]
    report = tc.report(torch.rand(20), torch.arange(20) % 2, task="binary", with_calibration=False)
    written += tc.save_report(report, out)
    assert {path.parent for path in written} == {out}
    assert everything_in(outside) == {outside / "mine": b"mine"}
    assert all(path.is_file() and not path.is_symlink() for path in written)
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} == {out, outside}
    assert not list(out.glob(".*")), "no part is left"


def test_a_folder_that_is_a_link_is_followed_for_it_was_named(compared, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    tc.save_comparison(compared, tmp_path / "link")
    assert (tmp_path / "real" / "compare.html").is_file()


def test_a_file_is_never_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "x").symlink_to(tmp_path / "mine")
    write_whole(tmp_path / "x", b"new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "x").read_bytes() == b"new"
