"""Coverage-guided fuzzer of a file format: `python fuzz_files.py FORMAT FOLDER [options of libFuzzer]`.

Every input is read as a file of the format. It must give rows or an `InputError`. Other errors, crashes, and inputs
that need more than 10 seconds are findings, which are written to the folder. `make fuzz` runs all formats.
"""

import contextlib
import gzip
import io
import itertools
import os
import random
import sys
import warnings
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris
import numpy as np

with atheris.instrument_imports(include=["torchcalib", "zipfile", "pickletools"], enable_loader_override=False):
    import torchcalib.io.opening
    import torchcalib.io.tables
from helpers.prediction_files import HITS, LABELS, LOGITS, PROBS, WRITERS

from torchcalib.calibration import TemperatureScaling, save_calibrator
from torchcalib.calibration.saving import load_calibrator
from torchcalib.core.saved import _CHECKSUM, _checksum
from torchcalib.io.errors import InputError
from torchcalib.reporting.building import ReportBuilder

SITES = np.array(["a", "b", "a", "c", "", "b", "a"])
OPTIONS = (
    {},
    {"task": "binary", "from_logits": False},
    {"groups": "site", "clusters": "site"},
    {"target": "site", "nan_policy": "drop"},
    {"weights": "w", "normalize": True},
)


def read_predictions(path):
    """Read the rows of a file with several sets of options."""
    for options in OPTIONS:
        try:
            paths = [path, path.with_name("target.npy")] if path.suffix == ".npy" else [path]
            files = torchcalib.io.opening.open_predictions(paths, **options)
            for _ in itertools.islice(files.chunks(2**20), 64):
                pass
        except InputError as error:
            message = str(error)
            if len(message) > 500:
                raise AssertionError(f"the message has {len(message):,} characters") from error


def read_state(path):
    """Load the state of a report."""
    with contextlib.suppress(InputError, OSError):
        ReportBuilder.load(path)


def read_calibrator(path):
    """Load a calibrator."""
    with contextlib.suppress(ValueError):
        load_calibrator(path)


def mutate_member(content, max_size, seed):
    """Change the content of a member of an archive, and write the archive with correct sizes and checksums."""
    random.seed(seed)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {info: archive.read(info) for info in archive.infolist()}
    except Exception:  # damaged by an earlier mutation
        members = {}
    if not members or random.random() < 0.3:
        return atheris.Mutate(content, max_size)
    chosen = random.choice(list(members))
    members[chosen] = atheris.Mutate(members[chosen], max_size)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for info, data in members.items():
            archive.writestr(info.filename, data, info.compress_type)
    return buffer.getvalue() if buffer.tell() <= max_size else atheris.Mutate(content, max_size)


def mutate_form(content, max_size, _):
    """Change the content of a saved form, and correct its checksum."""
    changed, at = atheris.Mutate(content, max_size), _CHECKSUM
    return changed[: at.start] + _checksum(changed) + changed[at.stop :] if len(changed) > at.stop else changed


def write_seeds(suffix, folder):
    """Write valid files as the first inputs."""
    tables = [{"probs": PROBS, "target": HITS}, {"logits": LOGITS, "target": LABELS, "w": PROBS}]
    tables += [{**tables[0], "site": SITES}] if suffix not in ("pt", "safetensors") else []
    for k, arrays in enumerate(tables):
        if suffix == "jsonl.gz":
            WRITERS["jsonl"](folder / f"{k}", arrays)
            (folder / f"{k}").write_bytes(gzip.compress((folder / f"{k}").read_bytes()))
        elif suffix == "npy":
            np.save(folder / f"{k}.npy", next(iter(arrays.values())))
        elif suffix == "state":
            builder = ReportBuilder(task="binary")
            builder.update(PROBS, HITS)
            builder.save(folder / f"{k}")
        elif suffix == "calibrator":
            save_calibrator(TemperatureScaling().fit(PROBS, HITS), folder / f"{k}")
        else:
            place = folder / (f"{k}.npz" if suffix == "npz" else f"{k}")  # numpy appends the suffix
            WRITERS[suffix](place, arrays)


def main():
    suffix, folder, *options = sys.argv[1:]
    findings = Path(folder)
    corpus = findings / f"corpus-{suffix}"
    corpus.mkdir(parents=True, exist_ok=True)
    write_seeds(suffix, corpus)
    read = {"state": read_state, "calibrator": read_calibrator}.get(suffix, read_predictions)
    warnings.simplefilter("ignore")
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as temporary:
        path = Path(temporary) / f"a.{suffix}"
        np.save(Path(temporary) / "target.npy", HITS)

        def run(content):
            path.write_bytes(content)
            read(path)

        limits = [f"-artifact_prefix={findings}/{suffix}-", "-rss_limit_mb=8192", "-timeout=10", "-max_len=20000"]
        is_archive = suffix in ("npz", "pt")
        mutator = {"custom_mutator": mutate_member} if is_archive else {}
        if suffix in ("state", "calibrator"):
            mutator = {"custom_mutator": mutate_form}
        atheris.Setup([sys.argv[0], str(corpus), *limits, *options], run, **mutator)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
