"""`.csv` and `.parquet` files that are damaged, incomplete or of columns that fit no layout."""

import numpy as np
import pyarrow as pa
import pytest
from helpers.refused import HITS, PROBS, assert_refused, cut, table, text
from pyarrow import parquet

from torchcalib.files import InputError, open_predictions, tables

BAD = {  # what is written, what the error says, and options
    "csv: empty": (text("a.csv", ""), "got ArrowInvalid: Empty CSV file"),
    "csv: binary": (text("a.csv", bytes(range(256)) * 9), "must be a complete, readable csv file"),
    "csv: header only": (text("a.csv", "prob,y\n"), "holds no samples"),
    "csv: no header": (
        text("a.csv", "0.5,1\n0.25,0\n"),
        "must begin with a line of column names, got the numbers `0.5`",
    ),
    "csv: repeated column": (text("a.csv", "p,p,y\n0.5,0.5,1\n"), "got `p` twice"),
    "csv: ragged": (text("a.csv", "p,y\n0.5,1\n0.5\n"), "Expected 2 columns, got 1"),
    "csv: missing value": (
        text("a.csv", "p,y\n0.5,1\n0.5,\n"),
        "Column `y` of `a.csv` must hold a number in every row, got none in row 2",
    ),
    "csv: words": (
        text("a.csv", "p,y\nhigh,1\nlow,0\n"),
        "`p` in `a.csv` must be floating-point predictions, got string",
    ),
    "csv: class names": (text("a.csv", "p,y\n0.5,cat\n0.25,dog\n"), "`y` in `a.csv` must hold numbers, got string"),
    "csv: whole predictions": (text("a.csv", "p,y\n0,1\n1,1\n"), "(1.0, not 1)"),
    "csv: gap": (text("a.csv", "p_0,p_2,y\n.5,.5,1\n"), "must be numbered from 0 without gaps, got 0, 2."),
    "csv: from one": (text("a.csv", "p_1,p_2,y\n.5,.5,1\n"), "must be numbered from 0 without gaps, got 1, 2."),
    "csv: number twice": (text("a.csv", "p_0,p.0,y\n.5,.5,1\n"), "must be numbered from 0 without gaps, got 0, 0."),
    "csv: lone prob_0": (
        text("a.csv", "prob_0,y\n.5,1\n"),
        "must hold predictions under a known name (logits, probs, preds ...), got `prob_0`, `y`",
    ),
    "csv: semicolons": (text("a.csv", "prob;y\n.5;1\n"), "got `prob;y`"),
    "parquet: empty": (text("a.parquet", ""), "must be a complete, readable parquet file, got ArrowInvalid"),
    "parquet: truncated": (
        cut(table(p=PROBS, y=HITS), 0.7),
        "must be a complete, readable parquet file, got ArrowInvalid",
    ),
    "parquet: uneven lists": (table(probs=[[0.5, 0.5], [1.0]], y=[0, 1]), "got 2 numbers in row 1 and 1 in row 2"),
    "parquet: null in list": (table(probs=[[0.5, 0.5], [1.0, None]], y=[0, 1]), "got none in row 2"),
    "parquet: null list": (table(probs=[[0.5, 0.5], None], y=[0, 1]), "got none in row 2"),
    "parquet: nested lists": (table(probs=[[[0.5]], [[0.5]]], y=[0, 1]), "floating-point predictions, got list<"),
    "parquet: mixed columns": (table(p_0=PROBS, p_1=["a"] * 7, y=HITS), "got float64 and string"),
}


def test_bad_files_are_input_errors_in_one_line_that_say_what_to_do(tmp_path, monkeypatch):
    assert_refused(BAD, tmp_path, monkeypatch)


def test_csv_types_are_fixed_by_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_BLOCK", 64)
    (tmp_path / "a.csv").write_text("p,y\n" + "0.5,1\n" * 50 + "0.5,0.5\n")
    with pytest.raises(InputError, match=r"CSV conversion error to int64: invalid value '0\.5'"):
        list(open_predictions([tmp_path / "a.csv"]).chunks())
    (tmp_path / "a.csv").write_text("p,y\n" + "0.5,1\n" * 50 + ",1\n")
    with pytest.raises(InputError, match="got none in row 51"):
        list(open_predictions([tmp_path / "a.csv"]).chunks(16))


def test_lists_that_a_few_bytes_stand_for_are_refused_before_a_row_is_read(tmp_path, monkeypatch):
    def written(values):
        lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), pa.array(values))
        parquet.write_table(pa.table({"probs": lists, "targets": [0]}), tmp_path / "a.parquet")

    monkeypatch.setattr("torchcalib.files.tables.MAX_RESIDENT", 2**20)
    written(np.zeros(10**6, np.float32))
    with pytest.raises(InputError, match="1,000,000 numbers of probs in"):
        open_predictions([tmp_path / "a.parquet"])
    written(np.random.default_rng(0).random(10**6, np.float32))
    assert open_predictions([tmp_path / "a.parquet"]).shape == (1, 10**6)
