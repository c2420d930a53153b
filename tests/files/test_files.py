import io
import pickle
import sys
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from torchcalib.files import InputError, PredictionFiles, open_predictions, tables

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(7, 3)).astype(np.float32)
PROBS = RNG.uniform(size=7)
LABELS = np.array([0, 2, 1, 1, 0, 2, 2])
HITS = LABELS % 2
LINES = "".join(f"{p},{y}\n" for p, y in zip(PROBS, HITS, strict=True))
WEIGHTS = np.array([1, 0, 2, 1, 3, 1, 1])


def write_csv(path, columns):
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")


def write_parquet(path, columns, **options):
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), path, **options)


def numbered(stem, values):
    return {f"{stem}{i}": column for i, column in enumerate(values.T)}


def lists(values, dtype):
    return pa.array(values.tolist(), type=dtype)


def whole(files: PredictionFiles, max_bytes=64 * 2**20):
    preds, target, weights = zip(*files.chunks(max_bytes), strict=True)
    return torch.cat(preds), torch.cat(target), None if weights[0] is None else torch.cat(weights)


def same(tensor, expected):
    """Equal in dtype too."""
    torch.testing.assert_close(tensor, torch.as_tensor(expected), rtol=0, atol=0)


# What is written is read back.

MULTICLASS = {
    "a.npz": lambda path: np.savez(path, logits=LOGITS, targets=LABELS, weights=WEIGHTS),
    "compressed.npz": lambda path: np.savez_compressed(path, logits=LOGITS, targets=LABELS, weights=WEIGHTS),
    "by_columns.npz": lambda path: np.savez_compressed(
        path, logits=np.asfortranarray(LOGITS), targets=LABELS.astype(np.int8), weights=WEIGHTS.astype(np.uint16)
    ),
    "big_endian.npz": lambda path: np.savez(
        path, logits=LOGITS.astype(">f4"), targets=LABELS.astype(">i2"), weights=WEIGHTS.astype(">u4")
    ),
    "a.pt": lambda path: torch.save(
        {"logits": torch.tensor(LOGITS), "labels": torch.tensor(LABELS), "weight": torch.tensor(WEIGHTS), "epoch": 3},
        path,
    ),
    "old.pth": lambda path: torch.save(
        {"Logits": torch.tensor(LOGITS), "Y": torch.tensor(LABELS), "weight": torch.tensor(WEIGHTS)},
        path,
        _use_new_zipfile_serialization=False,
    ),
    "a.safetensors": lambda path: save_file(
        {"logits": torch.tensor(LOGITS), "gt": torch.tensor(LABELS).short(), "weights": torch.tensor(WEIGHTS)}, path
    ),
    "columns.parquet": lambda path: write_parquet(
        path, numbered("logit.", LOGITS) | {"target": LABELS, "weights": WEIGHTS, "id": LABELS}, row_group_size=3
    ),
    "lists.parquet": lambda path: write_parquet(
        path, {"logits": lists(LOGITS, pa.list_(pa.float32())), "label": LABELS, "weights": WEIGHTS}, row_group_size=4
    ),
    "fixed_lists.parquet": lambda path: write_parquet(
        path, {"logits": lists(LOGITS, pa.list_(pa.float32(), 3)), "label": LABELS, "weights": WEIGHTS}
    ),
}


@pytest.mark.parametrize("max_bytes", [1, 24, 10**6])
@pytest.mark.parametrize("name", MULTICLASS)
def test_round_trip_multiclass_in_chunks_of_any_size(tmp_path, name, max_bytes):
    MULTICLASS[name](tmp_path / name)
    files = open_predictions([tmp_path / name])
    assert (files.task, files.shape, files.n_rows) == ("multiclass", (7, 3), 7)
    assert (files.from_logits, files.dtype, files.format) == (True, "float32", name.split(".")[1].replace("pth", "pt"))
    preds, target, weights = whole(files, max_bytes)
    same(preds, LOGITS)
    same(target, LABELS)
    same(weights, WEIGHTS)
    rows = max(1, max_bytes // 12)  # three float32
    assert all(len(piece) <= rows for piece, _, _ in files.chunks(max_bytes))


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


@pytest.mark.parametrize("max_bytes", [1, 24, 10**6])
@pytest.mark.parametrize("name", BINARY)
def test_round_trip_binary_in_chunks_of_any_size(tmp_path, name, max_bytes):
    BINARY[name](tmp_path / name)
    files = open_predictions([tmp_path / name])
    assert (files.task, files.shape, files.from_logits, files.dtype) == ("binary", (7,), False, "float64")
    preds, target, weights = whole(files, max_bytes)
    same(preds, PROBS)
    same(target, HITS)
    assert weights is None


def test_round_trip_csv_of_numbered_columns_in_any_order(tmp_path):
    values = RNG.normal(size=(5, 11))
    values[:, 4] = np.arange(5)
    columns = dict(reversed(numbered("log_prob_", values).items())) | {"target": np.arange(5), "id": np.arange(5)}
    columns["log_prob_4"] = np.arange(5)  # text without a point, beside columns with one
    write_csv(tmp_path / "a.csv", columns)
    files = open_predictions([tmp_path / "a.csv"])
    assert files.preds_name == "log_prob_0..log_prob_10"
    assert (files.shape, files.from_logits, files.ignored) == ((5, 11), True, ("id",))
    same(whole(files, 8 * 11 * 2)[0], values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_round_trip_keeps_floating_dtypes(tmp_path, name, dtype):
    tensors = {"probs": torch.tensor(PROBS).to(dtype), "targets": torch.tensor(HITS).to(torch.uint8)}
    torch.save(tensors, tmp_path / name) if name == "a.pt" else save_file(tensors, tmp_path / name)
    files = open_predictions([tmp_path / name])
    assert files.dtype == str(dtype).removeprefix("torch.")
    preds, target, _ = whole(files, 5)
    same(preds, tensors["probs"])
    same(target, HITS)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ">f4", ">f8"])
def test_round_trip_npy_pair_and_half_parquet(tmp_path, dtype):
    preds, native = LOGITS.astype(dtype), LOGITS.astype(np.dtype(dtype).newbyteorder("="))
    np.save(tmp_path / "logits.npy", np.asfortranarray(preds))
    np.save(tmp_path / "labels.npy", LABELS.astype(np.uint8))
    write_parquet(tmp_path / "a.parquet", {"labels": LABELS} | numbered("logits", native))
    pair = open_predictions([tmp_path / "labels.npy", tmp_path / "logits.npy"])
    assert (pair.preds_name, pair.target_name, pair.from_logits) == ("logits", "labels", True)
    for files in (pair, open_predictions([tmp_path / "a.parquet"])):
        read, target, _ = whole(files, 2 * native[0].nbytes)
        same(read, native)
        same(target, LABELS)


def test_npy_roles_come_from_dtypes_where_names_say_nothing(tmp_path):
    np.save(tmp_path / "a.npy", LABELS)
    np.save(tmp_path / "b.npy", LOGITS)
    files = open_predictions([tmp_path / "a.npy", tmp_path / "b.npy"], from_logits=True)
    assert (files.preds_name, files.target_name) == ("b", "a")


def test_npy_triple_with_named_roles(tmp_path):
    for name, values in {"a": PROBS, "b": PROBS, "c": WEIGHTS}.items():
        np.save(tmp_path / f"{name}.npy", values)
    paths = [tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "c.npy"]
    files = open_predictions(paths, preds="a.npy", target="b", weights="c", from_logits=False)
    preds, target, weights = whole(files)
    same(preds, PROBS)
    same(target, PROBS)  # soft binary targets stay floating
    same(weights, WEIGHTS)


def test_pt_tuple_has_no_names_and_so_needs_from_logits(tmp_path):
    torch.save((torch.tensor(LOGITS), torch.tensor(LABELS), torch.ones(7)), tmp_path / "a.pt")
    files = open_predictions([tmp_path / "a.pt"], from_logits=False)
    assert (files.from_logits, files.weights_name) == (False, "weights")
    same(whole(files)[2], torch.ones(7))


def test_multilabel_and_votes_and_pixels(tmp_path):
    votes = RNG.uniform(size=(7, 3))
    np.savez(tmp_path / "a.npz", probs=votes, target=votes > 0.5)
    assert open_predictions([tmp_path / "a.npz"]).task == "multilabel"
    write_csv(tmp_path / "a.csv", numbered("prob_", votes) | numbered("target_", votes))
    for task in ("multiclass", "multilabel"):
        files = open_predictions([tmp_path / "a.csv"], task=task)
        assert files.task == task
        same(whole(files, 1)[1], votes)
    np.savez(tmp_path / "b.npz", probs=votes.reshape(7, 1, 3), target=LABELS.reshape(7, 1), weight=votes[:, :1])
    files = open_predictions([tmp_path / "b.npz"])
    assert (files.task, files.shape) == ("multiclass", (7, 1, 3))
    same(whole(files, 1)[0], votes.reshape(7, 1, 3))


def test_from_logits_given_wins_over_the_name(tmp_path):
    np.savez(tmp_path / "a.npz", probs=PROBS, y=HITS)
    np.savez(tmp_path / "b.npz", log_probs=PROBS, y=HITS)
    assert open_predictions([tmp_path / "a.npz"], from_logits=True).from_logits
    assert open_predictions([tmp_path / "b.npz"], from_logits=True).from_logits


def test_named_arrays_win_over_known_names(tmp_path):
    np.savez(tmp_path / "a.npz", logits=LOGITS, targets=LABELS, p_0=PROBS, y_0=HITS)
    files = open_predictions([str(tmp_path / "a.npz")], preds="p_0", target="Y_0")
    assert (files.preds_name, files.target_name, files.from_logits) == ("p_0", "y_0", False)
    assert files.ignored == ("logits", "targets")


def test_one_numbered_column_can_be_named(tmp_path):
    write_csv(tmp_path / "a.csv", {"prob_0": 1 - PROBS, "prob_1": PROBS, "target": HITS})
    assert open_predictions([tmp_path / "a.csv"]).task == "multiclass"
    files = open_predictions([tmp_path / "a.csv"], preds="prob_1")
    assert (files.task, files.from_logits, files.ignored) == ("binary", False, ("prob_0",))


def test_csv_keeps_infinite_logits(tmp_path):
    (tmp_path / "a.csv").write_text("logit,y\ninf,1\n-inf,0\n")
    same(whole(open_predictions([tmp_path / "a.csv"]))[0], torch.tensor([np.inf, -np.inf], dtype=torch.float64))


# Shards.

SHARDS = {
    "npz": lambda path, rows: np.savez_compressed(path, logits=LOGITS[rows], targets=LABELS[rows]),
    "pt": lambda path, rows: torch.save(
        {"logits": torch.tensor(LOGITS[rows]), "targets": torch.tensor(LABELS[rows])}, path
    ),
    "safetensors": lambda path, rows: save_file(
        {"logits": torch.tensor(LOGITS[rows]), "targets": torch.tensor(LABELS[rows])}, path
    ),
    "csv": lambda path, rows: write_csv(path, numbered("logit_", LOGITS[rows].astype(float)) | {"y": LABELS[rows]}),
    "parquet": lambda path, rows: write_parquet(
        path, {"logits": lists(LOGITS[rows], pa.list_(pa.float32())), "y": LABELS[rows]}
    ),
}


@pytest.mark.parametrize("suffix", SHARDS)
def test_shards_with_an_empty_one_read_as_one_file(tmp_path, suffix):
    paths = [tmp_path / f"{i}.{suffix}" for i in range(4)]
    for path, rows in zip(paths, (slice(0, 0), slice(0, 4), slice(4, 5), slice(5, 7)), strict=True):
        SHARDS[suffix](path, rows)
    files = open_predictions(paths)
    assert (files.n_rows, files.shape, files.paths) == (7, (7, 3), tuple(paths))
    preds, target, _ = whole(files, 24)
    same(preds.float(), LOGITS)
    same(target, LABELS)
    assert [len(piece) for piece, _, _ in files.chunks()] == [4, 1, 2]


def test_opened_files_can_be_pickled_and_hold_no_file_open(tmp_path):
    SHARDS["npz"](tmp_path / "a.npz", slice(0, 7))
    files = pickle.loads(pickle.dumps(open_predictions([tmp_path / "a.npz"])))
    (tmp_path / "a.npz").rename(tmp_path / "b.npz")
    with pytest.raises(InputError, match="must be a complete, readable npz file, got FileNotFoundError"):
        next(files.chunks())


# What cannot be read says so.


def npz(**arrays):
    def write(folder):
        np.savez(folder / "a.npz", **arrays)
        return ["a.npz"]

    return write


def text(name, content):
    def write(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return [name]

    return write


def table(**columns):
    def write(folder):
        write_parquet(folder / "a.parquet", columns)
        return ["a.parquet"]

    return write


def saved(content):
    def write(folder):
        torch.save(content, folder / "a.pt")
        return ["a.pt"]

    return write


def npys(**arrays):
    def write(folder):
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)
        return [f"{name}.npy" for name in arrays]

    return write


def shards(*arrays):
    def write(folder):
        for i, held in enumerate(arrays):
            np.savez(folder / f"{i}.npz", **held)
        return [f"{i}.npz" for i in range(len(arrays))]

    return write


def cut(write, keep):
    """The same file without its end."""

    def written(folder):
        (name,) = write(folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])
        return [name]

    return written


def damaged_at_the_end(folder):
    """An archive with a sound directory, whose compressed data breaks off after most of the rows."""
    np.savez_compressed(folder / "a.npz", targets=np.arange(20_000), logits=RNG.normal(size=(20_000, 2)))
    content = bytearray((folder / "a.npz").read_bytes())
    with zipfile.ZipFile(folder / "a.npz") as archive:
        info = archive.getinfo("logits.npy")
        for i in range(20):
            content[info.header_offset + info.compress_size - 2000 + i] ^= 0xFF
    (folder / "a.npz").write_bytes(content)
    return ["a.npz"]


def wrong_checksum(folder):
    np.savez(folder / "a.npz", probs=PROBS, y=HITS)
    content = (folder / "a.npz").read_bytes()
    (folder / "a.npz").write_bytes(content.replace(PROBS[3:4].tobytes(), PROBS[4:5].tobytes()))
    return ["a.npz"]


def header(shape):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return content.getvalue()


def member(content):
    """A sound archive around anything."""

    def write(folder):
        with zipfile.ZipFile(folder / "a.npz", "w") as archive:
            archive.writestr("logits.npy", content)
        return ["a.npz"]

    return write


def twice_the_same_member(folder):
    np.savez(folder / "a.npz", probs=PROBS, y=HITS)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(folder / "a.npz", "a") as archive:
        archive.writestr("y.npy", b"")
    return ["a.npz"]


def a_directory(folder):
    (folder / "a.npz").mkdir()
    return ["a.npz"]


def mixed(folder):
    return npz(probs=PROBS, y=HITS)(folder) + saved({"probs": torch.ones(2), "y": torch.ones(2)})(folder)


def tensors(**values):
    def write(folder):
        save_file(values, folder / "a.safetensors")
        return ["a.safetensors"]

    return write


class Anything:
    """An object that only unpickling could bring back."""


OK = npz(probs=PROBS, y=HITS)
OBJECTS = np.array([None, "a"], dtype=object)
IMAGE = np.zeros((2, 3, 4, 5), np.float32)

BAD = {
    # paths
    "no file": (lambda folder: [], {}, "must be a file to read, got none"),
    "missing": (lambda folder: ["b.npz"], {}, "b.npz` must be a file, got nothing of this name"),
    "name too long": (lambda folder: ["b" * 5000 + ".npz"], {}, "got OSError"),
    "directory": (a_directory, {}, "got a directory. Name the files in it"),
    "suffix": (text("a.txt", "x"), {}, "must end in one of .npz, .npy, .pt"),
    "no suffix": (text("predictions", "x"), {}, "must end in one of"),
    "mixed formats": (mixed, {}, "must have one format, got two"),
    "one file twice": (lambda folder: OK(folder) * 2, {}, "got one twice"),
    # damage
    "npz: empty": (text("a.npz", ""), {}, "must be a complete, readable npz file, got BadZipFile"),
    "npz: not a zip": (text("a.npz", "hello"), {}, "must be a complete, readable npz file, got BadZipFile"),
    "npz: truncated": (cut(OK, 0.5), {}, "must be a complete, readable npz file"),
    "npz: no arrays": (npz(), {}, "must hold predictions under a known name (logits, probs, preds ...), got nothing"),
    "npz: wrong magic inside": (member(b"NUMPY" * 9), {}, "got ValueError: the magic string is not correct"),
    "npz: empty member": (member(b""), {}, "got ValueError: EOF"),
    "npz: broken header": (member(header((7,)).replace(b"'<f4'", b"'<f4(")), {}, "got ValueError: Cannot parse header"),
    "npz: shape beyond its bytes": (member(header((9,)) + bytes(28)), {}, "cannot hold the promised float32 array"),
    "npz: negative shape": (member(header((-7, -1)) + bytes(28)), {}, "float32 array of shape (-7, -1)"),
    "npz: 10^9 classes": (
        member(header((10, 10**9)) + bytes(28)),
        {},
        "cannot hold the promised float32 array of shape (10, 1000000000)",
    ),
    "npz: damaged late": (damaged_at_the_end, {}, "must be a complete, readable npz file, got"),
    "npz: wrong checksum": (wrong_checksum, {}, "got BadZipFile: Bad CRC-32"),
    "npz: repeated member": (twice_the_same_member, {}, "must name every array once"),
    "npz: pickled": (npz(probs=OBJECTS, y=HITS[:2]), {}, "got pickled Python objects, which are never loaded"),
    "npy: pickled": (npys(probs=OBJECTS, y=HITS[:2]), {}, "got pickled Python objects, which are never loaded"),
    "npy: single": (npys(probs=PROBS), {}, "must be a pair of .npy files"),
    "npy: four": (npys(a=PROBS, b=PROBS, c=HITS, d=HITS), {}, "got `a`, `b`, `c`, `d`. Pass"),
    "npy: ambiguous": (npys(a=PROBS, b=PROBS), {}, "got `a`, `b`. Pass --preds NAME --target NAME"),
    "npy: kind": (npys(a=PROBS, b=HITS), {}, "Pass --from-logits or --from-probs"),
    "npy: truncated": (lambda folder: cut(npys(probs=PROBS), 0.9)(folder) + npys(y=HITS)(folder), {}, "cannot hold"),
    "pt: empty": (text("a.pt", ""), {}, "must be a complete, readable pt file, got EOFError"),
    "pt: garbage": (text("a.pt", "hello" * 9), {}, "must be a complete, readable pt file"),
    "pt: truncated": (
        cut(saved({"probs": torch.ones(3), "y": torch.ones(3)}), 0.6),
        {},
        "must be a complete, readable pt",
    ),
    "pt: objects": (saved({"probs": Anything()}), {}, "nothing untrusted is unpickled. Save a dict of tensors"),
    "pt: one tensor": (
        saved(torch.ones(3)),
        {},
        "must hold a dict of tensors or (preds, target[, weights]), got a Tensor",
    ),
    "pt: four tensors": (saved([torch.ones(3)] * 4), {}, "got a list of 4"),
    "pt: list as targets": (
        saved({"probs": torch.ones(2), "y": [0, 1]}),
        {},
        "`y` in `a.pt` must be a plain, dense tensor, got a list",
    ),
    "pt: sparse": (saved({"probs": torch.eye(2).to_sparse(), "y": torch.ones(2)}), {}, "got a torch.sparse_coo tensor"),
    "pt: meta": (saved({"probs": torch.ones(2, device="meta"), "y": torch.ones(2)}), {}, "tensor on meta"),
    "pt: 10^9 classes": (
        saved({"probs": torch.ones(1, 1).expand(2, 10**9), "y": torch.ones(2).long()}),
        {},
        "a tensor of more numbers than the file holds",
    ),
    "pt: tuple": (saved((torch.ones(2), torch.ones(2))), {}, "Pass --from-logits or --from-probs"),
    "safetensors: garbage": (
        text("a.safetensors", "hello" * 9),
        {},
        "readable safetensors file, got ValueError: a header of",
    ),
    "safetensors: truncated": (cut(tensors(probs=torch.ones(9), y=torch.ones(9)), 0.8), {}, "got SafetensorError"),
    "safetensors: float8": (
        tensors(probs=torch.ones(3).to(torch.float8_e4m3fn), y=torch.ones(3)),
        {},
        "floating-point predictions, got F8_E4M3",
    ),
    "csv: empty": (text("a.csv", ""), {}, "got ArrowInvalid: Empty CSV file"),
    "csv: binary": (text("a.csv", bytes(range(256)) * 9), {}, "must be a complete, readable csv file"),
    "csv: header only": (text("a.csv", "prob,y\n"), {}, "holds no samples"),
    "csv: no header": (
        text("a.csv", "0.5,1\n0.25,0\n"),
        {},
        "must begin with a line of column names, got the numbers `0.5`",
    ),
    "csv: repeated column": (text("a.csv", "p,p,y\n0.5,0.5,1\n"), {}, "got `p` twice"),
    "csv: ragged": (text("a.csv", "p,y\n0.5,1\n0.5\n"), {}, "Expected 2 columns, got 1"),
    "csv: missing value": (
        text("a.csv", "p,y\n0.5,1\n0.5,\n"),
        {},
        "Column `y` of `a.csv` must hold a number in every row, got none in row 2",
    ),
    "csv: words": (
        text("a.csv", "p,y\nhigh,1\nlow,0\n"),
        {},
        "`p` in `a.csv` must be floating-point predictions, got string",
    ),
    "csv: class names": (text("a.csv", "p,y\n0.5,cat\n0.25,dog\n"), {}, "`y` in `a.csv` must hold numbers, got string"),
    "csv: whole predictions": (text("a.csv", "p,y\n0,1\n1,1\n"), {}, "(1.0, not 1)"),
    "csv: gap": (text("a.csv", "p_0,p_2,y\n.5,.5,1\n"), {}, "must be numbered from 0 without gaps, got 0, 2."),
    "csv: from one": (text("a.csv", "p_1,p_2,y\n.5,.5,1\n"), {}, "must be numbered from 0 without gaps, got 1, 2."),
    "csv: number twice": (text("a.csv", "p_0,p.0,y\n.5,.5,1\n"), {}, "must be numbered from 0 without gaps, got 0, 0."),
    "csv: lone prob_0": (
        text("a.csv", "prob_0,y\n.5,1\n"),
        {},
        "must hold predictions under a known name (logits, probs, preds ...), got `prob_0`, `y`",
    ),
    "csv: semicolons": (text("a.csv", "prob;y\n.5;1\n"), {}, "got `prob;y`"),
    "parquet: empty": (text("a.parquet", ""), {}, "must be a complete, readable parquet file, got ArrowInvalid"),
    "parquet: truncated": (
        cut(table(p=PROBS, y=HITS), 0.7),
        {},
        "must be a complete, readable parquet file, got ArrowInvalid",
    ),
    "parquet: uneven lists": (table(probs=[[0.5, 0.5], [1.0]], y=[0, 1]), {}, "got 2 numbers in row 1 and 1 in row 2"),
    "parquet: null in list": (table(probs=[[0.5, 0.5], [1.0, None]], y=[0, 1]), {}, "got none in row 2"),
    "parquet: null list": (table(probs=[[0.5, 0.5], None], y=[0, 1]), {}, "got none in row 2"),
    "parquet: nested lists": (table(probs=[[[0.5]], [[0.5]]], y=[0, 1]), {}, "floating-point predictions, got list<"),
    "parquet: mixed columns": (table(p_0=PROBS, p_1=["a"] * 7, y=HITS), {}, "got float64 and string"),
    # names
    "no predictions": (
        npz(a=PROBS, y=HITS),
        {},
        "must hold predictions under a known name (logits, probs, preds ...), got `a`, `y`",
    ),
    "no targets": (npz(probs=PROBS), {}, "must hold targets under a known name (targets, labels, y ...), got `probs`"),
    "two predictions": (npz(logits=PROBS, probs=PROBS, y=HITS), {}, "got `logits`, `probs`. Choose with --preds NAME"),
    "two targets": (npz(probs=PROBS, y=HITS, labels=HITS), {}, "got `labels`, `y`. Choose with --target NAME"),
    "two weights": (npz(probs=PROBS, y=HITS, weight=PROBS, weights=PROBS), {}, "Choose with --weights NAME"),
    "case only": (npz(probs=PROBS, Probs=PROBS, y=HITS), {}, "got `probs`, `Probs`. Choose"),
    "names that steer a terminal": (npz(**{"\x1b[2J": PROBS}), {}, "got `?[2J`"),
    "many names": (npz(**{f"a{i}": PROBS for i in range(20)}), {}, "`a11` and 8 more"),
    "preds not there": (OK, {"preds": "q"}, "--preds must name what is in `a.npz`, got `q` beside `probs`, `y`"),
    "target not there": (OK, {"target": "q"}, "--target must name what is in"),
    "weights not there": (OK, {"weights": "q"}, "--weights must name what is in"),
    "one array for both": (OK, {"target": "probs"}, "must hold predictions, targets, weights and groups apart"),
    "neutral name": (
        npz(preds=PROBS, y=HITS),
        {},
        "must be declared as logits or as probabilities, got a name that tells neither. Pass --from-logits or",
    ),
    "unknown name": (npz(a=PROBS, y=HITS), {"preds": "a"}, "Pass --from-logits or --from-probs"),
    "binary log_probs": (
        npz(log_probs=PROBS, y=HITS),
        {},
        "log p is not the logit of p. Store probabilities or logits",
    ),
    "multilabel log_probs": (npz(log_probs=LOGITS, y=LOGITS > 0), {}, "got multilabel predictions (7, 3)"),
    # dtypes and shapes
    "integer predictions": (
        npz(preds=LABELS, y=HITS),
        {"from_logits": False},
        "must be floating-point predictions, got int64",
    ),
    "complex predictions": (npz(probs=PROBS + 0j, y=HITS), {}, "got complex128"),
    "text targets": (npz(probs=PROBS, y=np.array(list("abcdefg"))), {}, "must hold numbers, got str"),
    "text weights": (npz(probs=PROBS, y=HITS, weights=np.array(list("abcdefg"))), {}, "must hold numbers, got str"),
    "row counts": (npz(probs=PROBS, y=HITS[:5]), {}, "must have one row per sample, got shapes (7,) and (5,)"),
    "weight rows": (
        npz(probs=PROBS, y=HITS, weights=WEIGHTS[:5]),
        {},
        "must have one row per sample, got shapes (7,) and (5,)",
    ),
    "weight shape": (npz(probs=PROBS, y=HITS, weights=LOGITS), {}, "must be one weight per sample, got shape (7, 3)"),
    "scalar": (npz(probs=np.array(0.5), y=np.array(1)), {}, "`probs` in `a.npz` must be an array, got a single number"),
    "no samples": (npz(probs=PROBS[:0], y=HITS[:0]), {}, "holds no samples"),
    "no classes": (npz(probs=LOGITS[:, :0], y=HITS), {}, "got shape (7, 0) of float32"),
    "float class indices": (npz(logits=LOGITS, y=LABELS.astype(float)), {}, "must be integer class indices"),
    "votes": (
        npz(logits=LOGITS, y=np.abs(LOGITS)),
        {},
        "Pass --task multilabel, or --task multiclass (votes).",
    ),
    "masks": (npz(probs=IMAGE, y=IMAGE > 0), {}, "Pass --task multilabel, or flatten binary maps"),
    "one-hot integers": (
        npz(logits=LOGITS, y=LOGITS > 0),
        {"task": "multiclass"},
        "Shapes must be (N, ..., C) and whole-number",
    ),
    "binary of two axes": (
        npz(logits=LOGITS, y=LOGITS > 0),
        {"task": "binary"},
        "Shapes must be (N,) and (N,) for a binary task",
    ),
    "other widths": (npz(logits=LOGITS, y=LOGITS[:, :2]), {}, "Check what wrote them, or pass --task"),
    "unknown task": (
        OK,
        {"task": "regression"},
        "must be one of `binary`, `multiclass`, `multilabel`, got `regression`",
    ),
    "channels first": (npz(logits=IMAGE, y=np.zeros((2, 4, 5), int)), {}, "Classes must be the last axis in files"),
    "channels first, told": (
        npz(logits=IMAGE, y=np.zeros((2, 4, 5), int)),
        {"task": "multiclass"},
        "which looks like (N, C, H, W)",
    ),
    # shards
    "shards: names": (
        shards({"probs": PROBS, "y": HITS}, {"logits": PROBS, "y": HITS}),
        {},
        "`1.npz` must name its arrays as `0.npz` does",
    ),
    "shards: weights": (
        shards({"probs": PROBS, "y": HITS}, {"probs": PROBS, "y": HITS, "weight": PROBS}),
        {},
        "got `probs`, `y`, `weight`",
    ),
    "shards: dtype": (
        shards({"probs": PROBS, "y": HITS}, {"probs": PROBS.astype("f4"), "y": HITS}),
        {},
        "`probs` must be alike in all files, got float64 (7,) in `0.npz` and float32 (7,) in `1.npz`",
    ),
    "shards: classes": (
        shards({"probs": LOGITS, "y": HITS}, {"probs": LOGITS[:, :2], "y": HITS}),
        {},
        "float32 (7, 2) in `1.npz`",
    ),
    "shards: all empty": (
        shards({"probs": PROBS[:0], "y": HITS[:0]}, {"probs": PROBS[:0], "y": HITS[:0]}),
        {},
        "holds no samples",
    ),
    "shards: one damaged": (lambda folder: OK(folder) + text("b.npz", "")(folder), {}, "`b.npz` must be a complete"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_input_error_in_two_sentences(tmp_path, monkeypatch, case):
    write, options, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    names = write(tmp_path)
    with pytest.raises(InputError) as raised:
        for _ in open_predictions(names, **options).chunks(max_bytes=4096):
            pass
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith((".", "..."))


def test_rows_before_late_damage_are_read(tmp_path):
    damaged_at_the_end(tmp_path)
    chunks = open_predictions([tmp_path / "a.npz"]).chunks(max_bytes=4096)
    assert len(next(chunks)[0]) == 4096 // 16


def test_csv_types_are_fixed_by_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_BLOCK", 64)
    (tmp_path / "a.csv").write_text("p,y\n" + "0.5,1\n" * 50 + "0.5,0.5\n")
    with pytest.raises(InputError, match=r"CSV conversion error to int64: invalid value '0\.5'"):
        whole(open_predictions([tmp_path / "a.csv"]))
    (tmp_path / "a.csv").write_text("p,y\n" + "0.5,1\n" * 50 + ",1\n")
    with pytest.raises(InputError, match="got none in row 51"):
        whole(open_predictions([tmp_path / "a.csv"]), 16)


@pytest.mark.parametrize(
    ("package", "suffix"), [("pyarrow", "csv"), ("pyarrow", "parquet"), ("safetensors", "safetensors")]
)
def test_missing_package_names_the_extra(tmp_path, monkeypatch, package, suffix):
    SHARDS[suffix](tmp_path / f"a.{suffix}", slice(0, 7))
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("tables", "safetensors"):
        monkeypatch.delitem(sys.modules, f"torchcalib.files.{module}", raising=False)
    with pytest.raises(InputError, match=rf"package {package}, .* Run pip install 'torchcalib\[data\]'\."):
        open_predictions([tmp_path / f"a.{suffix}"])


def test_large_fortran_array_is_refused_where_it_would_be_read_whole(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", logits=np.asfortranarray(LOGITS), targets=LABELS)
    monkeypatch.setattr("torchcalib.files.npy.MAX_RESIDENT", 16)
    with pytest.raises(InputError, match=r"`logits` .* must be in C order to be read in pieces"):
        open_predictions([tmp_path / "a.npz"])
