"""Round trips of every format, in pieces of any size, and from shards."""

import pickle
import re
import sys
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from helpers import hostile_files
from helpers.prediction_files import (
    HITS,
    LABELS,
    LOGITS,
    PROBS,
    RNG,
    WEIGHTS,
    WRITERS,
    numbered,
    write_csv,
    write_parquet,
)
from processes import ROOT
from safetensors.torch import save_file

from torchcalib.io.errors import InputError
from torchcalib.io.opening import PredictionFiles, open_predictions
from torchcalib.io.paths import FORMATS

LINES = "".join(f"{p},{y}\n" for p, y in zip(PROBS, HITS, strict=True))


def whole(files: PredictionFiles, max_bytes=64 * 2**20):
    pieces = list(files.chunks(max_bytes))
    weights = [rows.weights for rows in pieces]
    preds, target = (torch.cat([getattr(rows, role) for rows in pieces]) for role in ("preds", "target"))
    return preds, target, None if weights[0] is None else torch.cat(weights)


def same(tensor, expected):
    torch.testing.assert_close(tensor, torch.as_tensor(expected), rtol=0, atol=0)


def named(preds, target, weights="weights"):
    return {preds: LOGITS, target: LABELS, weights: WEIGHTS}


def tensors(*names):
    return {name: torch.from_numpy(values) for name, values in named(*names).items()}


def small(kinds):
    """Return the same values in other dtypes."""
    columns = named("logits", "targets").items()
    return {name: values.astype(kind) for kind, (name, values) in zip(kinds, columns, strict=True)}


MULTICLASS = {
    "a.npz": lambda path: np.savez(path, **named("logits", "targets")),
    "by_columns.npz": lambda path: np.savez_compressed(
        path, **small(("f4", "i1", "u2")) | {"logits": np.asfortranarray(LOGITS)}
    ),
    "big_endian.npz": lambda path: np.savez(path, **small((">f4", ">i2", ">u4"))),
    "a.pt": lambda path: torch.save({**tensors("logits", "labels", "weight"), "epoch": 3}, path),
    "tuple.pt": lambda path: torch.save(tuple(tensors("logits", "labels").values()), path),
    "a.pth": lambda path: torch.save(tensors("Logits", "Y", "weight"), path),
    "a.safetensors": lambda path: save_file({**tensors("logits", "gt"), "gt": torch.tensor(LABELS).short()}, path),
    "columns.parquet": lambda path: write_parquet(
        path, numbered("logit.", LOGITS) | {"target": LABELS, "weights": WEIGHTS, "id": LABELS}, row_group_size=3
    ),
    "lists.parquet": lambda path: write_parquet(path, named("logits", "label"), row_group_size=4),
    "fixed_lists.parquet": lambda path: write_parquet(
        path, named("logits", "label") | {"logits": pa.array(LOGITS.tolist(), type=pa.list_(pa.float32(), 3))}
    ),
}
BINARY = {
    "a.npz": lambda path: np.savez(path, probs=PROBS, y=HITS),
    "column.npz": lambda path: np.savez(path, probs=PROBS[:, None], y=HITS),
    "columns.npz": lambda path: np.savez(path, probs=PROBS[:, None], y=HITS[:, None] == 1),
    "a.csv": lambda path: write_csv(path, {"p": PROBS, "y": HITS}),
    "spaces.csv": lambda path: path.write_text("Prob, Target\n" + LINES.replace(",", ", ")),
    "windows.csv": lambda path: path.write_bytes(b"\xef\xbb\xbfprob,y\r\n" + LINES.replace("\n", "\r\n").encode()),
    "index.csv": lambda path: path.write_text(",prob,y\n" + LINES.replace("0.", "9,0.")),
    "bool.csv": lambda path: write_csv(path, {"name": np.array(list("abcdefg")), "p": PROBS, "y": HITS == 1}),
    "a.parquet": lambda path: write_parquet(path, {"y_prob": PROBS, "y_true": HITS == 1}),
}


@pytest.mark.parametrize(
    ("task", "name"), [*(("multiclass", name) for name in MULTICLASS), *(("binary", name) for name in BINARY)]
)
def test_files_are_read_back_in_pieces_of_any_size(tmp_path, task, name):
    is_binary = task == "binary"
    (BINARY if is_binary else MULTICLASS)[name](tmp_path / name)
    files = open_predictions([tmp_path / name], from_logits=True if name == "tuple.pt" else None)
    assert (files.task, files.source.shape, files.n_rows) == (task, (7,) if is_binary else (7, 3), 7)
    assert (files.source.from_logits, files.source.dtype) == ((False, "float64") if is_binary else (True, "float32"))
    assert files.source.format == name.split(".")[1].replace("pth", "pt")
    for max_bytes in (1, 24, 10**6):
        preds, target, weights = whole(files, max_bytes)
        same(preds, PROBS if is_binary else LOGITS)
        same(target, HITS if is_binary else LABELS)
        assert weights is None if is_binary else torch.equal(weights, torch.from_numpy(WEIGHTS))
        rows = max(1, max_bytes // (8 if is_binary else 12))
        assert all(len(piece) <= rows for piece in files.chunks(max_bytes))


@pytest.mark.parametrize("stem", ["log_prob_", "log_prob", ""])
def test_round_trip_csv_of_numbered_columns_in_any_order(tmp_path, stem):
    values = RNG.normal(size=(5, 12))
    values[:, 4] = np.arange(5)
    columns = {**numbered(stem, values), "target": np.arange(5), "id": np.arange(5)}
    columns[f"{stem}4"] = np.arange(5)  # integers as text, beside decimal columns
    write_csv(tmp_path / "a.csv", dict(reversed(columns.items())))
    files = open_predictions([tmp_path / "a.csv"], from_logits=None if stem else True)
    assert files.source.preds == f"{stem}0..{stem}11"
    assert (files.source.shape, files.source.from_logits, files.source.ignored) == ((5, 12), True, ("id",))
    same(whole(files, 8 * 12 * 2)[0], values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", ">f4", ">f8"])
def test_round_trip_keeps_floating_dtypes(tmp_path, dtype):
    targets = LABELS.astype(np.uint8)
    if not dtype.startswith(">"):
        logits = torch.from_numpy(LOGITS).to(getattr(torch, dtype))
        tensors = {"logits": logits, "labels": torch.from_numpy(targets)}
        torch.save(tensors, tmp_path / "a.pt")
        save_file(tensors, tmp_path / "a.safetensors")
    if dtype != "bfloat16":
        values = LOGITS.astype(dtype)
        logits = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
        np.save(tmp_path / "logits.npy", np.asfortranarray(values))
        np.save(tmp_path / "labels.npy", targets)
        write_parquet(tmp_path / "a.parquet", {"labels": targets} | numbered("logits", logits.numpy()))
    found = sorted(path for path in tmp_path.iterdir() if path.suffix != ".npy")
    for paths in (*([path] for path in found), sorted(tmp_path.glob("*.npy"))):
        if paths:
            files = open_predictions(paths)
            assert (files.source.dtype, files.source.from_logits) == (str(logits.dtype).removeprefix("torch."), True)
            preds, target, _ = whole(files, 2 * logits[0].nbytes)
            same(preds, logits)
            same(target, LABELS)


NPZ = {"logits": LOGITS, "targets": LABELS, "p_0": PROBS, "y_0": HITS}
CSV = {"prob_0": 1 - PROBS, "prob_1": PROBS, "target": HITS}
NPYS = {"a": PROBS, "b": PROBS, "c": WEIGHTS}


@pytest.mark.parametrize(
    ("suffix", "arrays", "options", "expected"),
    [
        ("npy", {"a": LABELS, "b": LOGITS}, {"from_logits": True}, {"preds": "b", "target": "a"}),
        ("npy", NPYS, {"preds": "a.npy", "target": "b", "weights": "c", "from_logits": False}, {"weights": "c"}),
        ("npz", {"probs": PROBS, "y": HITS}, {"from_logits": True}, {"from_logits": True}),
        ("npz", {"log_probs": PROBS, "y": HITS}, {"from_logits": True}, {"from_logits": True}),
        ("npz", NPZ, {"preds": "p_0", "target": "Y_0"}, {"target": "y_0", "ignored": ("logits", "targets")}),
        ("csv", {"logit": np.array([np.inf, -np.inf]), "y": HITS[:2]}, {}, {"from_logits": True}),
        ("csv", CSV, {}, {"task": "multiclass", "preds": "prob_0..prob_1"}),
        ("csv", CSV, {"preds": "prob_1"}, {"task": "binary", "from_logits": False, "ignored": ("prob_0",)}),
    ],
)
def test_options_names_and_dtypes_determine_the_roles_of_arrays(tmp_path, suffix, arrays, options, expected):
    paths = [tmp_path / f"a.{suffix}"]
    if suffix == "npy":
        paths = [tmp_path / f"{name}.npy" for name in arrays]
        for path in paths:
            np.save(path, arrays[path.stem])
    else:
        WRITERS[suffix](*paths, arrays)
    files = open_predictions(paths, **options)
    assert {name: getattr(files.source, name, files.task) for name in expected} == expected
    preds, target, _ = whole(files)
    assert preds.dim() == 2 or torch.equal(preds, torch.from_numpy(arrays[files.source.preds]))
    same(target, arrays[files.source.target])


def test_the_task_determines_the_meaning_of_targets_with_classes_and_pixels(tmp_path):
    shares = RNG.uniform(size=(7, 3))
    np.savez(tmp_path / "a.npz", probs=shares, target=shares > 0.5)
    assert open_predictions([tmp_path / "a.npz"], task="multilabel").task == "multilabel"
    for target, dtype in ((shares, torch.float64), ((10 * shares).astype(np.int16), torch.int64)):
        write_csv(tmp_path / "a.csv", {"prob": shares, "target": target})
        for task in ("multiclass", "multilabel"):
            files = open_predictions([tmp_path / "a.csv"], task=task)
            assert files.task == task
            same(whole(files, 1)[1], torch.from_numpy(target).to(dtype))
    np.savez(tmp_path / "b.npz", probs=shares.reshape(7, 1, 3), target=LABELS.reshape(7, 1), weight=shares[:, :1])
    files = open_predictions([tmp_path / "b.npz"])
    assert (files.task, files.source.shape) == ("multiclass", (7, 1, 3))
    same(whole(files, 1)[0], shares.reshape(7, 1, 3))


@pytest.mark.parametrize("suffix", WRITERS)
def test_shards_with_an_empty_one_give_the_rows_of_one_file(tmp_path, suffix):
    paths = [tmp_path / f"{i}.{suffix}" for i in range(4)]
    for path, rows in zip(paths, (slice(0, 0), slice(0, 4), slice(4, 5), slice(5, 7)), strict=True):
        # Decimal text is parsed as float64. Conversion to float32 restores the original.
        WRITERS[suffix](path, {"logits": LOGITS[rows], "targets": LABELS[rows]})
    files = open_predictions(paths)
    assert (files.n_rows, files.source.shape, files.source.files) == (7, (7, 3), tuple(map(str, paths)))
    preds, target, _ = whole(files, 24)
    same(preds.float(), LOGITS)
    same(target, LABELS)
    assert [len(rows) for rows in files.chunks()] == [4, 1, 2]


def test_opened_files_can_be_pickled_and_keep_no_file_open(tmp_path):
    np.savez(tmp_path / "a.npz", logits=LOGITS, targets=LABELS)
    files = pickle.loads(pickle.dumps(open_predictions([tmp_path / "a.npz"])))
    (tmp_path / "a.npz").rename(tmp_path / "b.npz")
    with pytest.raises(InputError, match="must be a complete, readable npz file, got FileNotFoundError"):
        next(files.chunks())


def test_missing_package_raises_an_error_that_names_the_extra(tmp_path, monkeypatch):
    for package, suffix in (("pyarrow", "csv"), ("pyarrow", "parquet"), ("safetensors", "safetensors")):
        WRITERS[suffix](tmp_path / f"a.{suffix}", {"logits": LOGITS, "targets": LABELS})
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            patch.delitem(sys.modules, "torchcalib.io.tables", raising=False)
            with pytest.raises(InputError, match=rf"package {package}, .* Run pip install 'torchcalib\[data\]'\."):
                open_predictions([tmp_path / f"a.{suffix}"])


def test_every_format_is_on_pages_and_in_tests_of_surfaces_and_of_hostile_files():
    kinds = set(FORMATS.values())
    fuzzed = re.search(r"^FUZZED := (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    assert kinds - {"npy"} <= set(WRITERS)  # an .npy file has one array
    assert {suffix.removeprefix(".") for suffix in FORMATS} - {"pth", "tsv.gz"} <= set(fuzzed)  # read as pt, csv.gz
    assert kinds - {"tsv"} == {name.removeprefix("add_") for name in dir(hostile_files) if name.startswith("add_")}
    for page in ("docs/guide/layouts.md", "docs/start/files.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [kind for kind in kinds if f"`.{kind}`" not in text] == [], page


# Values that are corrected or left out by a stated rule


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("n_bytes", [64, 2**20], ids=["pieces", "whole"])
def test_other_resolutions_of_forecasts_than_yes_and_no_are_left_out(suffix, n_bytes, tmp_path):
    p, words = [0.9, 0.2, 0.7, 0.4, 0.6, 0.3], ["yes", "no", "ambiguous", "yes", "Annulled", "no"]
    frame = pd.DataFrame({"question": range(6), "probability": p, "resolution": words, "weight": range(1, 7)})
    path = tmp_path / f"forecasts.{suffix}"
    write = {"csv": partial(frame.to_csv, index=False), "parquet": frame.to_parquet}
    write.get(suffix, partial(frame.to_json, orient="records", lines=True))(path)
    with pytest.warns(UserWarning, match=r"has 2 of 6 rows with other resolutions than yes and no \(`Annulled`, `amb"):
        files = open_predictions([path])
    preds, target, weights = whole(files, n_bytes)
    assert (preds.tolist(), target.tolist(), weights.tolist()) == ([0.9, 0.2, 0.4, 0.3], [1, 0, 1, 0], [1, 2, 4, 6])
    assert files.source.shape[0] == 4
    frame["resolution"] = [*words[:5], "No"]
    with pytest.raises(InputError, match="must contain the names of all 2 classes"):
        open_predictions([], frame=frame)


def test_rounded_probabilities_are_divided_by_their_sum(tmp_path):
    probs = np.array([[0.33, 0.33, 0.33], [0.67, 0.22, 0.11], [0.5, 0.3, 0.2]])
    np.savez(tmp_path / "a.npz", probs=probs, targets=np.arange(3))
    files = open_predictions([tmp_path / "a.npz"], normalize=True)
    preds, _, _ = whole(files)
    torch.testing.assert_close(preds, torch.from_numpy(probs / probs.sum(1, keepdims=True)), rtol=1e-15, atol=0)
    probs[2] = 0.5, 0.3, 0.1  # which no rounding explains
    np.savez(tmp_path / "a.npz", probs=probs, targets=np.arange(3))
    with pytest.raises(InputError, match=r"must sum to 1 within 0.016 for normalize=True.* got 0.9 in row 3"):
        whole(open_predictions([tmp_path / "a.npz"], normalize=True))
    np.savez(tmp_path / "a.npz", probs=probs[:, 0], targets=np.arange(3) % 2)
    with pytest.raises(InputError, match="`normalize` must be used with multi-class probabilities, got binary"):
        open_predictions([tmp_path / "a.npz"], normalize=True)
