"""Damaged or ambiguous files, and files with incompatible arrays, give an error."""

import io
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers.prediction_files import HITS, LABELS, LOGITS, PROBS, write_parquet
from safetensors.torch import save_file

from torchcalib.io.errors import InputError
from torchcalib.io.opening import open_predictions


def file(name, write):
    """Return a function that writes one file to a folder, and returns its name in a list."""

    def written(folder):
        write(folder / name)
        return [name]

    return written


def text(name, content):
    return file(name, lambda path: path.write_bytes(content))


def npz(*shards, **arrays):
    parts = zip("ab", shards or [arrays], strict=False)
    return all_of(*(file(f"{name}.npz", lambda path, held=held: np.savez(path, **held)) for name, held in parts))


def npys(**arrays):
    return all_of(*(file(f"{name}.npy", partial(np.save, arr=values)) for name, values in arrays.items()))


def pt(content):
    return file("a.pt", lambda path: torch.save(content, path))


def parquet(**columns):
    return file("a.parquet", lambda path: write_parquet(path, columns))


def safetensors(**tensors):
    return file("a.safetensors", lambda path: save_file(tensors, path))


def member(content):
    """Return a writer of a valid archive with a member of arbitrary content."""

    def write(path):
        with ZipFile(path, "w") as archive:
            archive.writestr("logits.npy", content)

    return file("a.npz", write)


def all_of(*writers):
    return lambda folder: [name for write in writers for name in write(folder)]


def changed(write, change):
    """Return a writer of the same file with changed bytes."""

    def written(folder):
        (name,) = write(folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return [name]

    return written


def cut(write, share):
    return changed(write, lambda content: content[: int(share * len(content))])


def header(shape):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return content.getvalue()


def damaged_at_the_end(folder):
    """Write an archive with a valid directory, whose compressed data is damaged after most of the rows."""
    values = np.random.default_rng(0).normal(size=(20_000, 2))
    np.savez_compressed(folder / "a.npz", targets=np.arange(20_000), logits=values)
    content = bytearray((folder / "a.npz").read_bytes())
    with ZipFile(folder / "a.npz") as archive:
        info = archive.getinfo("logits.npy")
    for i in range(20):
        content[info.header_offset + info.compress_size - 2000 + i] ^= 0xFF
    (folder / "a.npz").write_bytes(content)
    return ["a.npz"]


def duplicate_member(folder):
    OK(folder)
    with pytest.warns(UserWarning, match="Duplicate name"), ZipFile(folder / "a.npz", "a") as archive:
        archive.writestr("y.npy", b"")
    return ["a.npz"]


class Anything:
    """Class of objects that only unpickling could create."""


OK = npz(probs=PROBS, y=HITS)
IMAGE, PIXELS = np.zeros((2, 3, 4, 5), np.float32), np.zeros((2, 4, 5), int)
NAMES = np.array(list("abcdefg"))
OBJECTS = np.array([None, "a"], dtype=object)
ONES = torch.ones(2)
ROW = {"probs": PROBS, "y": HITS}
MANY = {f"a{k:02}": np.zeros(2) for k in range(20)}
IN_C_ORDER = "`logits` in `a.npz` must be in C order, got 212 bytes in Fortran order"
CSV_ROWS = b"p,y\n" + 50 * b"0.5,1\n"
BAD = [  # writer, part of the error message, options, and changed limits
    # paths
    (lambda folder: [], "`paths` must contain at least one file, got none"),
    (lambda folder: ["b.npz"], "b.npz` must be a file, got a path that does not exist"),
    (lambda folder: ["b" * 5000 + ".npz"], "got OSError"),
    (file("a.npz", Path.mkdir), "got a directory. Name the files in it"),
    (text("predictions", b"x"), "must end in one of .npz, .npy, .pt"),
    (all_of(OK, pt({"probs": ONES, "y": ONES})), "must have the same format, got two"),
    (all_of(OK, OK), "Every file must be named once, got a repeated file"),
    (npz(ROW, {"logits": PROBS, "y": HITS}), "`b.npz` must have the same preds as `a.npz`, got 'logits' and 'probs'"),
    (
        npz(ROW, {**ROW, "probs": PROBS.astype("f4")}),
        "must have the same dtype as `a.npz`, got 'float32' and 'float64'",
    ),
    (all_of(OK, text("b.npz", b"")), "`b.npz` must be a complete"),
    # names of arrays
    (npz(a=PROBS, y=HITS), "predictions under a known name (logits, probs, preds ...), got `a`, `y`"),
    (npz(probs=PROBS), "must contain targets under a known name (targets, labels, y ...), got `probs`"),
    (npz(probs=PROBS, y=HITS, labels=HITS), "got `labels`, `y`. Choose one, such as target='labels'"),
    (npz(**ROW, Probs=PROBS), "got `probs`, `Probs`. Choose"),
    (npz(**{"\x1b[2J": PROBS}), "got `?[2J`"),
    (npz(**MANY), "`a11` and 8 more"),
    (npz(**MANY), "at most 10 arrays or columns, got 20", {}, {"reader.MAX_ARRAYS": 10}),
    (OK, "`preds` must name an array in `a.npz`, got `q`. Name one of `probs`, `y`", {"preds": "q"}),
    (
        OK,
        "must contain predictions, targets, weights, groups, clusters and ids in different",
        {"target": "probs"},
    ),
    (npz(log_probs=PROBS, y=HITS), "must be probabilities or logits for a binary task, got log-probabilities"),
    (npys(probs=PROBS), "must be a pair of .npy files"),
    (npys(a=PROBS, b=PROBS), "got `a`, `b`. Pass preds='NAME' and target='NAME'"),
    # numbers and shapes
    (npz(preds=LABELS, y=HITS), "must be floating-point predictions, got int64", {"from_logits": False}),
    (npz(probs=PROBS + 0j, y=HITS), "got complex128"),
    (npz(probs=PROBS, y=NAMES), "must contain the names of all 2 classes of `probs`, got 7: `a`,"),
    (
        npz(probs=PROBS[:, None], y=HITS, site=NAMES[:, None]),
        "must have one axis if it contains text",
        {"groups": "site"},
    ),
    (npz(probs=PROBS, y=HITS[:5]), "must have one row per sample, got shapes (7,) and (5,)"),
    (npz(**ROW, weights=LOGITS), "must be one weight per sample, got shape (7, 3)"),
    (npz(probs=np.array(0.5), y=np.array(1)), "`probs` in `a.npz` must be an array, got a single number"),
    (npz(probs=LOGITS[:, :0], y=HITS), "got shape (7, 0) of float32"),
    (npz(logits=LOGITS, y=LABELS + 0.5), "must contain class indices, which are whole numbers, got 0.5 in row 1"),
    (npz(logits=LOGITS, y=np.abs(LOGITS)), "float32 targets (7, 3) in `a.npz`. Pass task='multiclass' if every sample"),
    (npz(probs=IMAGE, y=IMAGE > 0), "several labels, or task='binary' if every entry is the probability of its own"),
    (npz(logits=LOGITS, y=LOGITS > 9), "must be true for one class in every row", {"task": "multiclass"}),
    (npz(logits=LOGITS, y=LOGITS > 0), "Shapes must be (N,) or maps (N, H, ...), with", {"task": "binary"}),
    (
        OK,
        "must be one of `binary`, `multiclass`, `multilabel` or `confidence`, got `regression`",
        {"task": "regression"},
    ),
    (npz(logits=IMAGE, y=PIXELS), "Classes must be the last axis in files"),
    # npz and npy
    (cut(OK, 0.5), "must be a complete, readable npz file"),
    (npz(), "got nothing"),
    (member(b"NUMPY" * 9), "got ValueError: the magic string is not correct"),
    (member(header((7,)).replace(b"'<f4'", b"'<f4(")), "got ValueError: Cannot parse header"),
    (member(header((9,)) + bytes(28)), "the data must match the declared float32 array"),
    (member(header((-7, -1)) + bytes(28)), "float32 array of shape (-7, -1)"),
    (damaged_at_the_end, "must be a complete, readable npz file, got"),
    (changed(OK, lambda content: content.replace(PROBS[3].tobytes(), PROBS[4].tobytes())), "BadZipFile: Bad CRC-32"),
    (duplicate_member, "must have unique array names"),
    (npz(probs=OBJECTS, y=HITS[:2]), "got pickled Python objects, which are never loaded"),
    (all_of(cut(npys(probs=PROBS), 0.9), npys(y=HITS)), "the data must match the declared"),
    (npz(logits=np.asfortranarray(LOGITS), targets=LABELS), IN_C_ORDER, {}, {"limits.BUFFER": -2000}),
    # pt
    (
        text("a.pt", b""),
        "must be a complete, readable pt file, got ValueError: the file must be a complete zip archive",
    ),
    (cut(pt({"probs": ONES, "y": ONES}), 0.6), "must be a complete, readable pt"),
    (pt({"probs": Anything()}), "which are never unpickled. Save a dict of tensors"),
    (pt(ONES), "must contain a dict of tensors or (preds, target[, weights]), got a Tensor"),
    (pt([ONES] * 4), "got a list of 4"),
    (pt({"probs": ONES, "y": [0, 1]}), "`y` in `a.pt` must be a dense CPU tensor, got a list"),
    (pt({"probs": torch.eye(2).to_sparse(), "y": ONES}), "got a torch.sparse_coo tensor"),
    (pt({"probs": torch.ones(2, device="meta"), "y": ONES}), "tensor on meta"),
    (pt({"probs": torch.ones(1, 1).expand(2, 10**9), "y": ONES.long()}), "more numbers than the file stores"),
    # safetensors
    (text("a.safetensors", b"hello" * 9), "readable safetensors file, got ValueError: the header must have"),
    (cut(safetensors(probs=torch.ones(9), y=torch.ones(9)), 0.8), "got SafetensorError"),
    (safetensors(probs=ONES.to(torch.float8_e4m3fn), y=ONES), "floating-point predictions, got F8_E4M3"),
    # csv and parquet
    (text("a.csv", b""), "got ArrowInvalid: Empty CSV file"),
    (text("a.csv", b"prob,y\n"), "must contain at least one sample, got none"),
    (text("a.csv", b"0.5,1\n0.25,0\n"), "must begin with a line of column names, got the numbers `0.5`"),
    (text("a.csv", b"p,p,y\n0.5,0.5,1\n"), "got `p` twice"),
    (text("a.csv", b"p,y\n0.5,1\n0.5\n"), "must have 2 cells in every row, as in its header, got 1 in row 3: '0.5'"),
    (text("a.csv", b"# by hand\np,y\n0.5,1\n# end\n0.5,1,0\n"), "got 3 in row 5: '0.5,1,0'. Put cells with"),
    (text("a.csv", b"0,1\n1,0\n0,0\n"), "got `0..1`. Pass preds='NAME' and target='NAME'. If the first line contains"),
    (text("a.json", b"[[0.5,1],[0.7,0]]"), "must contain objects with named values, got an array of lists. Name"),
    (text("a.json", b" [ 0.5, 1]"), "must contain objects with named values, got an array of values. Name"),
    (text("a.csv", b"p,y\n0.5,1\n0.5,\n"), "`y` in `a.csv` must contain a value in every row, got none in row 2"),
    (text("a.csv", b"p,y\n0.5,1\nNone,0\n"), "`p` in `a.csv` must contain a value in every row, got none in row 2"),
    (text("a.csv", b"p,y\nhigh,1\nlow,0\n"), "`p` in `a.csv` must be floating-point predictions, got the text"),
    (text("a.csv", b"p,y\n0,1\n1,1\n"), "Whole numbers are decisions"),
    (text("a.csv", b"p_0,p.0,y\n.5,.5,1\n"), "must be columns of different classes, got"),
    (text("a.csv", CSV_ROWS + b"0.5,0.5\n"), "int64: invalid value '0.5'", {}, {"tables._BLOCK": 64}),
    (
        cut(parquet(p=PROBS, y=HITS), 0.7),
        "must be a complete, readable parquet file, got ValueError: the file must end with",
    ),
    (parquet(probs=[[0.5, 0.5], [1.0]], y=[0, 1]), "got 2 numbers in row 1 and 1 in row 2"),
    (parquet(probs=[[0.5, 0.5], [1.0, None]], y=[0, 1]), "got none in row 2"),
    (parquet(probs=[[[0.5]], [[0.5]]], y=[0, 1]), "floating-point predictions, got list<"),
    (parquet(probs=pa.array([None, []], pa.list_(pa.float64())), y=[0, 1]), "got shape (2, 0) of float64"),
    (parquet(p_0=PROBS, p_1=["a"] * 7, y=HITS), "got float64 and string"),
]


def test_bad_files_give_one_line_input_errors(tmp_path, monkeypatch):
    wrong = []
    for k, (write, words, options, limits) in enumerate((*row, {}, {})[:4] for row in BAD):
        folder = tmp_path / str(k)
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            for name, value in limits.items():
                patch.setattr(f"torchcalib.io.{name}", value)
            try:
                list(open_predictions(write(folder), **options).chunks(max_bytes=4096))
                error = "nothing was raised"
            except InputError as raised:
                error = str(raised)
        names_options = " --" in error.replace("compare FILE --preds A --preds B", "")
        if words not in error or "\n" in error or not error.endswith((".", "...")) or names_options:
            wrong.append((words, error))
    assert not wrong, "\n".join(map(str, wrong))


def test_rows_before_late_damage_are_read(tmp_path):
    damaged_at_the_end(tmp_path)
    chunks = open_predictions([tmp_path / "a.npz"]).chunks(max_bytes=4096)
    assert len(next(chunks)) == 4096 // 16


def test_highly_compressed_lists_give_an_error_before_a_row_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("torchcalib.io.limits.BUFFER", 2**20)

    def opened(values, n_rows=1):
        ends = np.linspace(0, len(values), n_rows + 1).astype(np.int32)
        lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(values))
        write_parquet(tmp_path / "a.parquet", {"probs": lists, "targets": [0] * n_rows})
        return open_predictions([tmp_path / "a.parquet"])

    with pytest.raises(InputError, match=r"`probs` in .* must be less compressed: got 8,[0-9,]+ bytes in a row group"):
        opened(np.zeros(10**6, np.float32))
    values = np.random.default_rng(0).random(2**17, np.float32)
    assert opened(values, n_rows=8).source.shape == (8, 2**14)
