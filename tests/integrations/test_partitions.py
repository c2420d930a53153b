"""States of partitions: counted once, merged in any tree, and read from Arrow datasets."""

from importlib import import_module

import numpy as np
import pytest
from helpers.engines import QUICK, assert_equal, pieces, report_of, table_of

pa = pytest.importorskip("pyarrow")
dataset = pytest.importorskip("pyarrow.dataset")
parquet = pytest.importorskip("pyarrow.parquet")
partitions_module = import_module("torchcalib.integrations.partitions")
Partitions = partitions_module.Partitions


def states_of(partitions, table):
    return [partitions.state(number, [piece]) for number, piece in enumerate(pieces(table))]


def test_a_partition_is_counted_once_and_must_not_change():
    table, partitions = table_of("binary"), Partitions.of_report(groups="site", **QUICK)
    states = states_of(partitions, table)
    # The state of a partition that is computed again, from other batches of the same rows
    again = partitions.state(3, pieces(pieces(table)[3], (5, 20)))
    assert_equal(partitions.report([*states, again, states[1]]), report_of(table, groups="site", **QUICK))
    merged = partitions.merged(states[:5])
    assert_equal(partitions.report([merged, again, states[5]]), report_of(table, groups="site", **QUICK))
    other = partitions.state(3, [pieces(table)[3].slice(1)])
    with pytest.raises(ValueError, match="Part '3' must have the same rows in all states"):
        partitions.report([*states, other])
    with pytest.raises(ValueError, match="a part that was merged before"):
        partitions.report([merged, partitions.merged(states[3:])])


def test_rows_of_states_are_merged_in_the_order_of_their_numbers():
    table, partitions = table_of("binary"), Partitions.of_report()
    rows = [partitions.row(number, [piece]) for number, piece in enumerate(pieces(table))]
    merged = partitions.merged_row(pa.concat_tables(rows[::-1]))
    assert merged.schema == partitions_module.SCHEMA
    assert merged["partition"].to_pylist() == [1]
    assert_equal(partitions.report(merged["state"].to_pylist()), report_of(table))


def test_sketches_are_small_if_the_number_of_rows_is_known():
    table = table_of("binary", 20_000, "none").select(["prob", "target"])
    exact, sketch = (Partitions.of_report(n_rows=n, **QUICK) for n in (20_000, 2**24 + 1))
    states = [partitions.state(0, [table]) for partitions in (exact, sketch)]
    found = sketch.report(states[1:])
    assert found.settings["order_based"].startswith("sketch")
    assert found["ks"] == pytest.approx(exact.report(states[:1])["ks"], abs=1e-3)


def test_tables_of_other_kinds_and_extension_types():
    table, partitions = table_of("multiclass", 60, "counts", True), Partitions.of_report(preds="probs", **QUICK)
    expected = report_of(table, preds="probs", **QUICK)
    flat = np.array(table["probs"].combine_chunks().flatten())
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(flat.reshape(-1, 4))
    others = table.set_column(table.column_names.index("probs"), "probs", tensors)
    batches = table.to_batches(max_chunksize=7)
    for tables in ([others], batches, [table.to_pandas()]):
        assert_equal(partitions.report([partitions.state(0, tables)]), expected)
    doubles = table_of("binary", 60)
    of_binary = Partitions.of_report(**QUICK)
    assert_equal(of_binary.report([of_binary.state(0, [doubles.to_pylist()])]), report_of(doubles, **QUICK))


def test_invalid_partitions_raise_errors():
    table = table_of("binary")
    partitions = Partitions.of_report()
    text = pa.table({"prob": [0.2, 0.7], "target": ["no", "yes"]})
    with pytest.raises(ValueError, match="`class_names` must be given for text targets"):
        partitions.state(0, [text])
    other = table.set_column(0, "prob", table["prob"].cast(pa.float32()))
    states = [partitions.state(0, [table.slice(0, 50)]), partitions.state(1, [other.slice(50)])]
    with pytest.raises(ValueError, match="the same dtype of predictions, got 'float32' and 'float64'"):
        partitions.report(states)


def test_arrow_datasets_have_row_groups_and_files_as_partitions(tmp_path):
    arrow = import_module("torchcalib.integrations.arrow")
    table, expected = table_of("binary"), report_of(table_of("binary"), **QUICK)
    for number, piece in enumerate(pieces(table)):
        parquet.write_table(piece, tmp_path / f"{number}.parquet", row_group_size=50)
    assert_equal(arrow.report(dataset.dataset(tmp_path, format="parquet"), **QUICK), expected)
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    of_ipc = dataset.dataset(tmp_path / "a.arrow", format="ipc")
    assert_equal(arrow.report(of_ipc, n_threads=1, **QUICK), expected)
    with pytest.raises(ValueError, match="`n_threads` must be at least 1"):
        arrow.report(of_ipc, n_threads=0)
