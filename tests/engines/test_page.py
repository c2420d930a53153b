"""The code of the page on engines runs. It starts the engines in its own folder, so it needs a process of its own."""

import shutil
import sys

import pytest
from project.test_snippets import run_page


@pytest.mark.filterwarnings("ignore")  # of the engines
def test_the_page_on_engines_runs(tmp_path, monkeypatch, capsys):
    ray, pyspark, _ = [pytest.importorskip(package) for package in ("ray", "pyspark", "dask.dataframe")]
    if ray.is_initialized() or pyspark.SparkContext._gateway is not None:
        pytest.skip("other tests have started engines in this process: run this file alone")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, which is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    run_page("docs/guide/engines.md", tmp_path, monkeypatch, capsys)
