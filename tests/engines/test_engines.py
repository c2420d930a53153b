"""Reports of Ray, Spark and Dask equal those of one process, whatever happens to their workers."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from helpers.engines import CASES, QUICK, SYSTEMS, assert_equal, comparison_of, pieces, report_of, table_of
from processes import ROOT

ENGINES = ("ray", "spark", "dask")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the engines


class Ray:
    def __init__(self, request):
        self.ray = request.getfixturevalue("ray_engine")

    def dataset(self, table, change=None):
        dataset = self.ray.data.from_arrow(pieces(table))
        return dataset if change is None else dataset.map_batches(change, batch_size=None, batch_format="pyarrow")


class Spark:
    def __init__(self, request):
        self.spark = request.getfixturevalue("spark_engine")

    def dataset(self, table, change=None):
        rows = self.spark.createDataFrame(table)
        rows = rows.filter("row < 0").union(rows)  # five empty partitions first
        if change is None:
            return rows

        def changed(batches):
            for batch in batches:
                yield from change(pa.Table.from_batches([batch])).to_batches()

        return rows.mapInArrow(changed, rows.schema)


class Dask:
    def __init__(self, request):
        request.getfixturevalue("dask_engine")

    def dataset(self, table, change=None):
        import dask.dataframe

        def rows(part):
            return (part if change is None else change(part)).to_pandas()

        with dask.config.set({"dataframe.convert-string": False}):  # it would convert lists to text
            return dask.dataframe.from_map(rows, pieces(table), meta=pieces(table)[0].to_pandas())


@pytest.fixture(params=ENGINES)
def engine(request):
    kind = {"ray": Ray, "spark": Spark, "dask": Dask}[request.param](request)
    kind.module = import_module(f"torchcalib.integrations.{request.param}")
    return kind


@pytest.mark.parametrize("case", ["groups", "clusters", "lists", "text targets", "multilabel"])
def test_reports_of_engines_equal_those_of_one_process(engine, case):
    arguments, options = CASES[case]
    table = table_of(*arguments)
    found = engine.module.report(engine.dataset(table), **options, **QUICK)
    expected = report_of(table, **options, **QUICK)
    assert_equal(found, expected)
    line = found.main_line
    assert line.noise_floor is not None
    assert line.p_value == pytest.approx(expected.main_line.p_value, abs=1e-12)


def test_calibrators_intervals_and_comparisons_of_engines_equal_those_of_one_process(engine):
    table = table_of("binary")
    assert_equal(engine.module.report(engine.dataset(table)), report_of(table))  # these depend on the order of rows
    found = engine.module.compare(engine.dataset(table), SYSTEMS, clusters="row", n_replicates=99)
    assert_equal(found, comparison_of(table, clusters=np.array(table.column("row")), n_replicates=99))


def test_sketches_of_engines_equal_those_of_one_process(engine):
    """With the number of rows, every partition is a sketch from the beginning; without it, the merged state is."""
    table = table_of("binary", weights="none")
    found = engine.module.report(engine.dataset(table), n_rows=2**24 + 1, with_intervals=False)
    assert found.settings["order_based"].startswith("sketch")
    assert found.calibration is None
    exact = report_of(table, **QUICK)
    assert found["ks"] == pytest.approx(exact["ks"], abs=1e-3)
    assert found["ece"] == pytest.approx(exact["ece"], abs=1e-12)


class Once:
    """Function of a partition that fails in one of them the first time: its worker is killed, or it raises."""

    def __init__(self, mark, kill):
        self.mark, self.kill = str(mark), kill

    def __call__(self, table):
        if table.num_rows and table["row"][0].as_py() == 0:
            try:
                Path(self.mark).touch(exist_ok=False)
            except FileExistsError:
                return table
            if self.kill:
                os._exit(1)
            raise OSError("the first time")
        return table


def test_a_killed_worker_changes_nothing(engine, tmp_path):
    table = table_of("binary")
    # Spark starts a Python worker again, and repeats the task. Dask and Ray do so for the whole worker.
    fails = Once(tmp_path / "mark", kill=True)
    found = engine.module.report(engine.dataset(table, fails), groups="site", **QUICK)
    assert (tmp_path / "mark").exists()
    assert_equal(found, report_of(table, groups="site", **QUICK))


def test_a_task_that_fails_once_changes_nothing(request, tmp_path):
    engine, table = Spark(request), table_of("binary")
    spark = import_module("torchcalib.integrations.spark")
    found = spark.report(engine.dataset(table, Once(tmp_path / "mark", kill=False)), clusters="patient", **QUICK)
    assert (tmp_path / "mark").exists()
    assert_equal(found, report_of(table, clusters="patient", **QUICK))


def test_errors_of_partitions_reach_the_caller(engine):
    table = table_of("multiclass", 240, "none", False, True)
    numbered = {f"prob_{name}": f"prob_{k}" for k, name in enumerate("abcd")}
    table = table.rename_columns([numbered.get(name, name) for name in table.column_names])
    # The first partition may show that its classes are in another order.
    with pytest.raises(Exception, match=r"`class_names` must be given for text targets|Pass class_names="):
        engine.module.report(engine.dataset(table), preds="prob")
    with pytest.raises(Exception, match="must name an array"):
        engine.module.report(engine.dataset(table), preds="none")
    with pytest.raises(ValueError, match="must contain at least one sample"):
        engine.module.report(engine.dataset(table_of("binary").slice(0, 0)))


def test_many_partitions_are_merged_in_a_tree(engine, monkeypatch):
    table = table_of("binary")
    monkeypatch.setattr(f"{engine.module.__name__}.SPLIT_EVERY", 2, raising=False)
    found = engine.module.report(engine.dataset(table), groups="site", **QUICK)
    assert_equal(found, report_of(table, groups="site", **QUICK))


def test_dask_bags(request):
    bag, table = pytest.importorskip("dask.bag"), table_of("binary")
    request.getfixturevalue("dask_engine")
    dask = import_module("torchcalib.integrations.dask")
    found = dask.report(bag.from_sequence(table.to_pylist(), npartitions=5), **QUICK)
    assert_equal(found, report_of(table, **QUICK))


_SCRIPT = """
import numpy as np
import pandas as pd
import dask
import dask.dataframe as dd
import torchcalib.integrations.dask as td

print("started")
p = np.linspace(0.05, 0.95, 40)
rows = pd.DataFrame({"prob": p, "label": (p > 0.4).astype(int)})
parts = [dask.delayed(rows[k : k + 10]) for k in range(0, 40, 10)]
for verify in (True, False):
    table = dd.from_delayed(parts, meta=rows[:0], verify_meta=verify)
    found = td.report(table, with_intervals=False, with_calibration=False)
    print(int(found.n), found["ece"])
"""


def test_dask_works_in_a_script_without_a_main_guard(tmp_path):
    pytest.importorskip("dask")
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, check=True)
    start, *found = run.stdout.splitlines()
    assert start == "started"  # once: the module is not imported by other processes
    p = np.linspace(0.05, 0.95, 40)
    expected = report_of(pa.table({"prob": p, "label": (p > 0.4).astype(int)}), **QUICK)
    assert [line.split()[0] for line in found] == ["40", "40"]
    assert [float(line.split()[1]) for line in found] == pytest.approx([expected["ece"]] * 2, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda part: part[["label", "prob"]], None),
        (lambda part: part.assign(note="a"), None),
        (lambda part: part.astype({"prob": "float32"}), r"same dtype of predictions, got 'float\d\d' and 'float\d\d'"),
        (lambda part: part.astype({"label": "int8"}), r"same dtypes and shapes of columns, got \('float64 \(\)', 'int"),
        (lambda part: part.astype({"prob": str}), "Partition 2: `prob` in .* must be floating-point predictions"),
        (lambda part: part.drop(columns="prob"), "Partition 2: .* must contain predictions under a known name"),
        (lambda part: part.drop(columns="label"), "Partition 2: .* must contain targets under a known name"),
    ],
)
def test_unequal_partitions_of_dask_give_the_right_number_or_an_error(change, error):
    dask = pytest.importorskip("dask")
    frames = import_module("dask.dataframe")
    rng = np.random.default_rng(0)
    whole = pd.DataFrame({"prob": rng.random(80), "label": rng.integers(0, 2, 80)})
    parts = [whole[k : k + 20] for k in range(0, 80, 20)]
    delayed = [dask.delayed(change(part) if k == 2 else part) for k, part in enumerate(parts)]
    table = frames.from_delayed(delayed, meta=whole[:0], verify_meta=False)
    report = import_module("torchcalib.integrations.dask").report
    if error is None:
        assert_equal(report(table, **QUICK), report_of(pa.Table.from_pandas(whole), **QUICK))
        return
    with pytest.raises(ValueError, match=error):
        report(table, **QUICK)
