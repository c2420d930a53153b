"""Run the code snippets of a Markdown file. The text of a snippet determines how it is run.

- Python is executed. One whose first line is `# name.py: torchrun ...` is a script: it is written to `name.py` and run
  by that command.
- In a shell snippet `torchcalib`, `torchrun` and `python -m` are run, on generated files of predictions. The extras of
  `pip install` and the targets of `make` must exist. Any other line is an error, because no test would cover it.
"""

import re
import shlex
import subprocess
import sys
import tomllib
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from processes import quick_environment

from torchcalib.cli import main

ROOT = Path(__file__).resolve().parents[2]
FILES = (".npz", ".npy", ".pt", ".safetensors", ".csv", ".parquet")
OUTPUTS = ("--out", "--save")  # options that begin like this name what a command writes
N_ROWS, N_CLASSES = 60, 3


@dataclass(frozen=True)
class Snippet:
    """A fenced block."""

    language: str
    text: str

    @property
    def script(self):
        """Name of the script and the command that runs it; None for a snippet that is executed directly."""
        found = re.match(r"# (\w+\.py): (torchrun .+)\n", self.text)
        return found and (found[1], found[2])

    def __str__(self):
        return f"{self.language}-{zlib.crc32(self.text.encode()):x}"


def snippets(path):
    """Return all fenced blocks of a file that name a language."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [Snippet(*block) for block in found]


def run_shell(snippet, folder, scripts=()):
    """Run every line of a shell snippet in a folder, which is the working directory."""
    for script in scripts:
        (folder / script.script[0]).write_text(script.text)
    for line in snippet.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            run_line(words, shlex.split(line, comments=True, posix=False), folder)


def run_line(words, as_written, folder):
    """Run one command, or check the names in it."""
    command, *arguments = words
    if command == "pip":
        assert arguments[0] == "install", words
        check_extras(arguments[1:])
    elif command == "make":
        check_targets(arguments)
    elif command in ("torchcalib", "torchrun") or words[:2] == ["python", "-m"]:
        make_inputs(arguments, folder)
        quoted = [word[0] in "'\"" for word in as_written[1:]]
        arguments = [
            one for word, is_quoted in zip(arguments, quoted, strict=True) for one in expanded(word, is_quoted, folder)
        ]
        run_command(command, arguments, folder)
        check_outputs(arguments, folder)
    else:
        raise AssertionError(f"no test knows how to run `{shlex.join(words)}`: see tests/helpers/snippets.py")


def check_extras(names):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in names:
        found = re.fullmatch(r"(?:\.|torchcalib)(?:\[([\w,-]+)\])?", name)
        assert found, f"{name} is not this package"
        unknown = set(filter(None, (found[1] or "").split(","))) - set(extras)
        assert not unknown, f"no extra {unknown}"


def check_targets(names):
    targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(names) <= set(targets), f"no target {set(names) - set(targets)}"


def make_inputs(arguments, folder):
    """Make the named files of predictions that do not exist; two files for a pattern."""
    for before, word in zip(("", *arguments), arguments, strict=False):
        word = word.rpartition("=")[2]  # of NAME=FILE
        if word.endswith(FILES) and not before.startswith(OUTPUTS) and not list(folder.glob(word)):
            for name in [word.replace("*", digit) for digit in "01"] if "*" in word else [word]:
                make_predictions(folder / name)


def make_predictions(path):
    """Write a few predictions: logits depend on the name of the file, targets do not."""
    generator = torch.Generator().manual_seed(zlib.crc32(path.name.encode()))
    logits = torch.randn(N_ROWS, N_CLASSES, generator=generator)
    targets = torch.randint(0, N_CLASSES, (N_ROWS,), generator=torch.Generator().manual_seed(0))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, logits=logits.numpy(), targets=targets.numpy())
    elif path.suffix == ".npy":
        np.save(path, (targets if re.search("target|label", path.name) else logits).numpy())
    elif path.suffix == ".pt":
        torch.save({"logits": logits, "targets": targets}, path)
    elif path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file({"logits": logits, "targets": targets}, path)
    else:
        import pyarrow
        from pyarrow import csv, parquet

        columns = {f"prob_{k}": logits.softmax(-1)[:, k].numpy() for k in range(N_CLASSES)}
        table = pyarrow.table({**columns, "target": targets.numpy()})
        (csv.write_csv if path.suffix == ".csv" else parquet.write_table)(table, path)


def expanded(word, is_quoted, folder):
    """Expand a pattern as a shell does: return the files that match."""
    if is_quoted or "*" not in word:
        return [word]
    return sorted(str(path.relative_to(folder)) for path in folder.glob(word)) or [word]


def run_command(command, arguments, folder):
    if command == "torchcalib":
        assert main(arguments) == 0, arguments
        return
    if command == "torchrun":  # with a free port
        arguments = ["-m", "torch.distributed.run", "--standalone", *arguments]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=quick_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def check_outputs(arguments, folder):
    for option, name in pairwise(arguments):
        if option.startswith(OUTPUTS):
            written = folder / name
            assert list(written.iterdir()) if written.is_dir() else written.stat().st_size, f"nothing in {name}"
