"""`.npz` archives and `.npy` files that are damaged or hold what is never loaded."""

import io
import zipfile

import numpy as np
import pytest
from helpers.refused import HITS, LABELS, LOGITS, PROBS, assert_refused, cut, npys, npz, text

from torchcalib.files import InputError, open_predictions


def damaged_at_the_end(folder):
    """An archive with a sound directory, whose compressed data breaks off after most of the rows."""
    np.savez_compressed(
        folder / "a.npz", targets=np.arange(20_000), logits=np.random.default_rng(0).normal(size=(20_000, 2))
    )
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


OK = npz(probs=PROBS, y=HITS)
OBJECTS = np.array([None, "a"], dtype=object)
BAD = {  # what is written, what the error says, and options
    "npz: empty": (text("a.npz", ""), "must be a complete, readable npz file, got BadZipFile"),
    "npz: not a zip": (text("a.npz", "hello"), "must be a complete, readable npz file, got BadZipFile"),
    "npz: truncated": (cut(OK, 0.5), "must be a complete, readable npz file"),
    "npz: no arrays": (npz(), "must hold predictions under a known name (logits, probs, preds ...), got nothing"),
    "npz: wrong magic inside": (member(b"NUMPY" * 9), "got ValueError: the magic string is not correct"),
    "npz: empty member": (member(b""), "got ValueError: EOF"),
    "npz: broken header": (member(header((7,)).replace(b"'<f4'", b"'<f4(")), "got ValueError: Cannot parse header"),
    "npz: shape beyond its bytes": (member(header((9,)) + bytes(28)), "cannot hold the promised float32 array"),
    "npz: negative shape": (member(header((-7, -1)) + bytes(28)), "float32 array of shape (-7, -1)"),
    "npz: 10^9 classes": (
        member(header((10, 10**9)) + bytes(28)),
        "cannot hold the promised float32 array of shape (10, 1000000000)",
    ),
    "npz: damaged late": (damaged_at_the_end, "must be a complete, readable npz file, got"),
    "npz: wrong checksum": (wrong_checksum, "got BadZipFile: Bad CRC-32"),
    "npz: repeated member": (twice_the_same_member, "must name every array once"),
    "npz: pickled": (npz(probs=OBJECTS, y=HITS[:2]), "got pickled Python objects, which are never loaded"),
    "npy: pickled": (npys(probs=OBJECTS, y=HITS[:2]), "got pickled Python objects, which are never loaded"),
    "npy: single": (npys(probs=PROBS), "must be a pair of .npy files"),
    "npy: four": (npys(a=PROBS, b=PROBS, c=HITS, d=HITS), "got `a`, `b`, `c`, `d`. Pass"),
    "npy: ambiguous": (npys(a=PROBS, b=PROBS), "got `a`, `b`. Pass --preds NAME --target NAME"),
    "npy: kind": (npys(a=PROBS, b=HITS), "Pass --from-logits or --from-probs"),
    "npy: truncated": (lambda folder: cut(npys(probs=PROBS), 0.9)(folder) + npys(y=HITS)(folder), "cannot hold"),
}


def test_bad_files_are_input_errors_in_one_line_that_say_what_to_do(tmp_path, monkeypatch):
    assert_refused(BAD, tmp_path, monkeypatch)


def test_rows_before_late_damage_are_read(tmp_path):
    damaged_at_the_end(tmp_path)
    chunks = open_predictions([tmp_path / "a.npz"]).chunks(max_bytes=4096)
    assert len(next(chunks)[0]) == 4096 // 16


def test_large_fortran_array_is_refused_where_it_would_be_read_whole(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", logits=np.asfortranarray(LOGITS), targets=LABELS)
    monkeypatch.setattr("torchcalib.files.npy.MAX_RESIDENT", 16)
    with pytest.raises(InputError, match=r"`logits` .* must be in C order to be read in pieces"):
        open_predictions([tmp_path / "a.npz"])


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
