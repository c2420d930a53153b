"""The same rows have the same words and numbers through every entrance: arrays, tables, files and partitions."""

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.pages import words_without_pictures
from helpers.prediction_files import write_csv, write_npz, write_parquet

import torchcalib as tc
from torchcalib.reporting.render import terminal

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")
Partitions = import_module("torchcalib.integrations.partitions").Partitions

N = 240


def rows_of(task, dtype=np.float64):
    """Return over-confident predictions of 3 classes or labels, targets, weights, groups and clusters."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=N if task == "binary" else (N, 3)) * 1.5
    if task == "multiclass":
        target = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
        probs = np.exp(2 * logits) / np.exp(2 * logits).sum(-1, keepdims=True)
    else:
        target = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.int64)
        probs = 1 / (1 + np.exp(-2 * logits))
    return {
        "probs": probs.astype(dtype),
        "targets": target,
        "weights": rng.exponential(size=N),
        "site": np.array(["north", "south", "west"])[rng.integers(3, size=N)],
        "patient": np.arange(N) // 3,
    }


ROLES = {"weights": "weights", "groups": "site", "clusters": "patient"}
CASES = {
    **{(task, ""): () for task in ("binary", "multiclass", "multilabel")},
    ("binary", "groups"): ("groups",),
    ("binary", "clusters"): ("clusters",),
    ("binary", "weights"): ("weights",),
    ("multiclass", "groups and clusters"): ("groups", "clusters"),
}


def columns_of(arrays):
    """Return a dict of columns: classes and labels are numbered."""
    columns = {}
    for name, values in arrays.items():
        columns |= {name: values} if values.ndim == 1 else {f"{name}_{k}": x for k, x in enumerate(values.T)}
    return columns


def of_arrays(arrays, roles, options, _, convert=lambda x: x):
    given = {role: arrays[name] if name == "site" else convert(arrays[name]) for role, name in roles.items()}
    return tc.report(convert(arrays["probs"]), convert(arrays["targets"]), **given, **options)


def of_tensors(arrays, roles, options, folder):
    return of_arrays(arrays, roles, options, folder, torch.from_numpy)


def of_pandas(arrays, roles, options, _):
    return tc.report(pd.DataFrame(columns_of(arrays)), **roles, **options)


def of_polars(arrays, roles, options, _):
    pl = pytest.importorskip("polars")
    return tc.report(pl.DataFrame(columns_of(arrays)), **roles, **options)


def of_file(write, name):
    def report(arrays, roles, options, folder):
        write(folder / name, arrays)
        return tc.Report.from_files(folder / name, **roles, **options)

    return report


def of_partitions(arrays, roles, options, _):
    """Return the report of three partitions, which a Dask, Ray or Spark engine merges in this way."""
    table = pa.table(columns_of(arrays))
    partitions = Partitions.of_report(**roles, **options)
    pieces = enumerate(pairwise((0, N // 4, N // 4, N // 2, N)))
    states = [partitions.state(k, [table.slice(a, b - a)]) for k, (a, b) in pieces]
    return partitions.report([partitions.merged(states[:2]), partitions.merged(states[2:])])


LANES = {
    "tensors": of_tensors,
    "pandas": of_pandas,
    "polars": of_polars,
    "csv": of_file(write_csv, "p.csv"),
    "parquet": of_file(lambda path, arrays: write_parquet(path, columns_of(arrays)), "p.parquet"),
    "npz": of_file(write_npz, "p.npz"),
    "partitions": of_partitions,
}


def without_names(report):
    """Return the report without file names, and without the sentence on the inferred task."""
    return replace(report, source={}, task_is_inferred=False)


def texts_of(report):
    """Return the words of the terminal, of `str` and of the page, and the JSON values."""
    with redirect_stdout(io.StringIO()) as shown:
        terminal.show(report, everything=True)
    page = [word.strip() for word in words_without_pictures(report)]
    return [shown.getvalue(), str(report), page], json.loads(report.to_json())


def assert_equal(found, expected, where=""):
    """Compare JSON values: text exactly, numbers to 1e-9."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
    if isinstance(expected, dict | list):
        assert len(found) == len(expected), where
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_equal(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9), where
    else:
        assert found == expected, where


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request):
    task, _ = request.param
    roles = {role: ROLES[role] for role in CASES[request.param]}
    arrays = {name: x for name, x in rows_of(task).items() if name in ("probs", "targets", *roles.values())}
    options = {"task": task, "n_bins": 10, "with_calibration": request.param == ("binary", "")}
    return arrays, roles, options, texts_of(without_names(of_arrays(arrays, roles, options, None)))


@pytest.mark.parametrize("lane", LANES)
def test_same_rows_have_the_same_words_and_numbers(case, lane, tmp_path):
    arrays, roles, options, (texts, values) = case
    found, numbers = texts_of(without_names(LANES[lane](arrays, roles, options, tmp_path)))
    assert_equal(numbers, values)
    assert found == texts


def test_rounded_text_has_the_words_of_the_exact_numbers(tmp_path, capsys):
    """A float32 column in Parquet, and its shortest decimals in CSV, differ in the 8th digit, and not in any word."""
    arrays = {name: x for name, x in rows_of("binary", np.float32).items() if name in ("probs", "targets")}
    frame = pd.DataFrame(arrays)
    frame.to_csv(tmp_path / "p.csv", index=False)
    frame.to_parquet(tmp_path / "p.parquet")
    shown = []
    for name in ("p.csv", "p.parquet"):
        report = without_names(tc.Report.from_files(tmp_path / name))
        terminal.show(report, everything=True)
        words = re.sub(r"[\d.,+-]+", "", capsys.readouterr().out).split()  # last digits may be rounded differently
        shown.append([report.decision.sentence, report.decision.action, words])
    assert shown[0] == shown[1]
