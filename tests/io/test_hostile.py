"""No file runs code, or exhausts memory or time. The package contains no call that could unpickle."""

import ast
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.hostile_files import MB, write_corpus
from processes import SCRIPTS, quick_environment

import torchcalib as tc
from torchcalib.calibration import load_calibrator
from torchcalib.io.archives import load_tensors
from torchcalib.io.errors import InputError
from torchcalib.io.opening import open_predictions
from torchcalib.reporting.building import ReportBuilder


class CreatesFolder:
    """Create a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def write_pickles(folder, evil):
    """Write files of every format that can contain a pickle."""
    objects, targets = np.full(2, evil, dtype=object), np.zeros(2, np.int64)
    torch.save({"logits": torch.zeros(2), "targets": torch.zeros(2).long(), "more": evil}, folder / "dict.pt")
    torch.save(evil, folder / "whole.pth")
    torch.save({"logits": evil}, folder / "old.pt", _use_new_zipfile_serialization=False)
    (folder / "bare.pt").write_bytes(pickle.dumps(evil))
    np.savez(folder / "array.npz", logits=objects, targets=targets)
    with zipfile.ZipFile(folder / "member.npz", "w") as archive:
        archive.writestr("logits.npy", pickle.dumps(evil))
    np.save(folder / "objects.npy", objects, allow_pickle=True)
    np.save(folder / "targets.npy", targets)
    alone = ("dict.pt", "whole.pth", "old.pt", "bare.pt", "array.npz", "member.npz")
    return [*([folder / name] for name in alone), [folder / "objects.npy", folder / "targets.npy"]]


def test_pickles_in_any_format_are_not_run(tmp_path):
    made = tmp_path / "made"
    for paths in write_pickles(tmp_path, CreatesFolder(made)):
        with pytest.raises(InputError):
            list(open_predictions(paths, from_logits=True).chunks())
        if paths[0].suffix in (".pt", ".pth"):
            with pytest.raises(ValueError, match="must be a complete calibrator, got"):
                load_calibrator(paths[0])
        assert not made.exists(), paths
    pickle.loads((tmp_path / "bare.pt").read_bytes())
    assert made.exists(), "the search must find unsafe lines"


SAFE_LOADS = {"torch": ("weights_only", True), "np": ("allow_pickle", False), "numpy": ("allow_pickle", False)}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_MODULES = {"marshal", "shelve", "joblib", "dill", "cloudpickle", "yaml", "subprocess"}
FORBIDDEN_ATTRIBUTES = {
    ("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler"), ("os", "system"), ("os", "popen"),
    ("pd", "read_pickle"), ("pandas", "read_pickle"), ("jit", "load"),
}  # fmt: skip


def unsafe(source):
    """Return the lines of a module that could run code from files."""
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
            keyword, value = SAFE_LOADS.get(getattr(node.func.value, "id", ""), (None, None))
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            found += [node.lineno] * (keyword is not None and given.get(keyword) is not value)
    return found


UNSAFE = [
    "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)", "np.load(f, allow_pickle=True)",
    "pickle.loads(b)", "eval(x)", "import joblib", "from pickle import load", "os.system(x)", "torch.jit.load(f)",
]  # fmt: skip


def test_no_line_of_the_package_could_unpickle_or_run_code_from_files():
    assert [unsafe(line) for line in UNSAFE] == [[1]] * len(UNSAFE)
    files = sorted(Path(tc.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    assert {str(path): lines for path in files if (lines := unsafe(path.read_text()))} == {}


def test_tensors_are_never_larger_in_memory_than_in_their_file(tmp_path):
    torch.save({"a": torch.zeros(10)}, tmp_path / "a.pt")
    assert load_tensors(tmp_path / "a.pt")["a"].shape == (10,)
    with zipfile.ZipFile(tmp_path / "a.pt") as plain:
        members = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_BZIP2) as bomb:
        for name, content in members.items():
            bomb.writestr(name, content)
    with pytest.raises(ValueError, match="must be uncompressed"):
        load_tensors(tmp_path / "b.pt")
    with pytest.raises(ValueError, match="must be uncompressed"):
        load_calibrator(tmp_path / "b.pt")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux")
@pytest.mark.extended
def test_hostile_files_are_read_or_refused_within_4_times_their_size_and_300_mb(tmp_path):
    """Each file is read in a process with limits of memory and time."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("safetensors")
    cases = write_corpus(tmp_path, is_long=True)
    assert len({case.arguments for case in cases}) == len(cases) >= 60
    fast = ("--no-intervals", "--no-calibration")
    commands = [[[*c.arguments, *(fast if c.arguments[0] == "report" else ())], c.size] for c in cases]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "limited.py"], input=json.dumps(commands), text=True,
        env=quick_environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, _, found = done.stdout.partition("READY\n")
    wrong = []
    for case, line in zip(cases, found.splitlines(), strict=True):
        code, output, growth = json.loads(line)
        if case.error is None:
            is_right = code == 0
        else:
            message = output.partition("torchcalib: error: ")[2]
            is_right = code == 2 and case.error in message and message.count("\n") == 1 and len(message) <= 501
        if not is_right or growth > 4 * case.size + 300 * MB:
            wrong.append((case.arguments[1:], code, growth and growth // MB, case.error, output[-600:]))
    assert not wrong, [(*w[:4], w[4][-200:]) for w in wrong]


@pytest.mark.extended
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_ten_million_classes_give_an_error_before_memory_is_allocated(task):
    row = torch.zeros(1, dtype=torch.float16).expand(1, 10**7)  # an expanded tensor of two bytes
    target = torch.zeros(1, dtype=torch.int64)
    target = target if task == "multiclass" else target.expand(1, 10**7)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 10,000,000"):
        ReportBuilder(task=task, from_logits=True).update(row, target)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 10,000,000"):
        tc.compare({"a": row, "b": row}, target, task=task, from_logits=True)
