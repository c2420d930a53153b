"""Engines on this machine, with two workers each. They start once for all tests."""

import os
import shutil
import sys
import warnings

import pytest
from processes import ROOT, TESTS


@pytest.fixture(scope="session")
def ray_engine():
    """Start a local Ray, whose workers import this checkout and the tests."""
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS, ROOT)))
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False, runtime_env=None)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray
        ray.shutdown()


@pytest.fixture(scope="session")
def spark_engine():
    """Start a local Spark, which repeats a failed task twice."""
    pyspark = pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, which is not installed")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS, ROOT)))
    builder = pyspark.sql.SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.default.parallelism", 5).config("spark.sql.shuffle.partitions", 2)
    builder = builder.config("spark.python.daemon.module", "helpers.spark_daemon")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        yield spark
        spark.stop()


@pytest.fixture(scope="session")
def dask_engine():
    """Start two worker processes of Dask, which are started again when they end."""
    distributed = pytest.importorskip("distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
        with cluster, distributed.Client(cluster) as client:
            yield client
