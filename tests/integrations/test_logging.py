"""`log_report` writes to real runs of TensorBoard, MLflow and Weights & Biases, and by the loggers of Lightning."""

import importlib
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import matplotlib.image
import pytest
import torch

import torchcalib as tc
from torchcalib.integrations import log_report
from torchcalib.results.report import Report

# TensorBoard, MLflow and Weights & Biases call deprecated code of their dependencies.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def report():
    g = torch.Generator().manual_seed(0)
    preds = torch.rand(200, generator=g, dtype=torch.float64)
    target = (torch.rand(200, generator=g) < preds**2).long()
    return tc.report(preds, target, with_intervals=False, with_calibration=False)


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    report.save(folder, diagrams=True)
    return folder


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch, written):
    """Run in a temporary folder. Files of the report are written once, because drawing takes seconds."""
    monkeypatch.chdir(tmp_path)

    def copied(self, path, *, diagrams):
        assert diagrams, "loggers need the image files"
        return shutil.copytree(written, path, dirs_exist_ok=True)

    monkeypatch.setattr(Report, "save", copied)


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    found = pytest.importorskip("mlflow")
    yield found
    found.end_run()


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = pytest.importorskip("wandb")
    yield found
    found.teardown()


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def assert_on_tensorboard(folder, report, written, prefix="calibration", step=3):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(folder), size_guidance={"images": 0})
    found.Reload()
    tags = set(found.Tags()["scalars"]) - {"epoch"}
    assert tags == {f"{prefix}/{key}" for key in report.flat()}
    for key, value in report.flat().items():
        (event,) = found.Scalars(f"{prefix}/{key}")
        assert event.step == step
        assert event.value == pytest.approx(value, rel=1e-6) or math.isnan(value)
    for path in written.glob("*.png"):
        (event,) = found.Images(f"{prefix}/{path.stem}")
        assert (event.height, event.width) == matplotlib.image.imread(path).shape[:2]
    (page,) = folder.glob(f"{prefix}_report_{step}.html")
    assert "reliability" in page.read_text(encoding="utf-8")
    return found


def test_tensorboard_has_values_pictures_verdict_and_page(report, written, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path / "run") as writer:
        log_report(report, writer, step=3)
    found = assert_on_tensorboard(tmp_path / "run", report, written)
    (text,) = found.Tensors("calibration/verdict/text_summary")
    assert text.tensor_proto.string_val == [report.sentence.encode()]


@pytest.mark.parametrize("given", ["module", "run", "client"])
def test_mlflow_has_values_verdict_and_files(report, written, mlflow, given):
    with mlflow.start_run() as run:
        if given == "module":
            log_report(report, mlflow, step=3, prefix="a/b")
    client, run_id = mlflow.MlflowClient(), run.info.run_id
    if given == "run":
        log_report(report, run, step=3, prefix="a/b")
    elif given == "client":
        log_report(report, client, step=3, prefix="a/b", run_id=run_id)
    data = client.get_run(run_id).data
    assert len(data.metrics) == len(report.flat())
    for key, value in report.flat().items():
        head, _, last = key.rpartition("/")
        name = f"a/b/{head}.{last}" if head in report.flat() else f"a/b/{key}"
        (metric,) = client.get_metric_history(run_id, name)
        assert metric.step == 3
        assert metric.value == pytest.approx(value, nan_ok=True)
    assert "a/b/ece/positive.p_value" in data.metrics
    assert data.tags["a/b.verdict"] == report.decision.verdict
    assert {entry.path.removeprefix("a/b/") for entry in client.list_artifacts(run_id, "a/b")} == names_in(written)


def test_more_values_than_mlflow_accepts_in_one_call(report, mlflow):
    line = report.lines[0]
    many = replace(report, lines=tuple(replace(line, key=f"value {k}") for k in range(1100)))
    with mlflow.start_run() as run:
        log_report(many, run)
    assert len(mlflow.get_run(run.info.run_id).data.metrics) == len(many.flat()) > 1100


@pytest.mark.extended
def test_weights_and_biases_has_values_pictures_verdict_and_page(report, written, wandb, tmp_path):
    with wandb.init(project="test", dir=str(tmp_path)) as run:
        log_report(report, wandb, step=3)
        log_report(report, run, prefix="other")
        summary = dict(run.summary)
        folder = run.dir
    for prefix in ("calibration", "other"):
        for key, value in report.flat().items():
            assert summary[f"{prefix}/{key}"] == pytest.approx(value, nan_ok=True)
        assert summary[f"{prefix}/verdict"] == report.decision.verdict
    assert {"calibration/reliability", "calibration/report"} <= summary.keys()
    media = [path.name for path in Path(folder).rglob("*.*")]
    assert sum(name.endswith(".png") for name in media) == 2 * len(list(written.glob("*.png")))
    assert sum(name.endswith(".html") for name in media) == 2


@pytest.mark.parametrize(
    "package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.extended)]
)
def test_loggers_of_lightning_for_files(report, written, package, tmp_path):
    loggers = importlib.import_module(f"{pytest.importorskip(package).__name__}.loggers")
    pytest.importorskip("tensorboard")
    logger = loggers.TensorBoardLogger(tmp_path, name="tb")
    log_report(report, logger, step=3, prefix="test")
    logger.finalize("success")
    assert_on_tensorboard(tmp_path / "tb" / "version_0", report, written, "test")
    table = loggers.CSVLogger(tmp_path, name="csv")
    log_report(report, table, step=3)
    table.save()
    header, row = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    values = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(values["calibration/nll"]) == pytest.approx(report["nll"])


def test_the_mlflow_logger_of_lightning(report, written, mlflow):
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import MLFlowLogger

    logger = MLFlowLogger("experiment", tracking_uri=mlflow.get_tracking_uri())
    log_report(report, logger, step=3)
    client = logger.experiment
    assert len(client.get_run(logger.run_id).data.metrics) == len(report.flat())
    assert len(client.list_artifacts(logger.run_id, "calibration")) == len(names_in(written))


@pytest.mark.extended
def test_the_wandb_logger_of_lightning(report, wandb, tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(project="test", save_dir=str(tmp_path), offline=True)
    log_report(report, logger, step=3)
    summary = dict(logger.experiment.summary)
    logger.experiment.finish()
    assert summary["calibration/nll"] == pytest.approx(report["nll"])
    assert summary["trainer/global_step"] == 3
    assert "calibration/reliability" in summary


def test_packages_are_not_imported_unless_the_run_belongs_to_them(report, tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for name in ("mlflow", "wandb", "lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # an import would fail
    with tensorboard.SummaryWriter(tmp_path / "run") as writer:
        log_report(report, writer)


class _DummyExperiment:
    """What loggers of Lightning return as experiment on all ranks but the first."""


@pytest.fixture
def evidence():
    test = tc.SequentialTest(task="binary")
    test.update([0.5] * 200, [0, 0, 0, 1] * 50)
    return test.result()


def test_sequential_tests_are_values_and_a_verdict(evidence, mlflow, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path / "run") as writer:
        log_report(evidence, writer, step=3)
    with mlflow.start_run() as run:
        log_report(evidence, mlflow, step=3)
    data = mlflow.MlflowClient().get_run(run.info.run_id).data
    assert data.tags["calibration.verdict"] == str(evidence)
    expected = {f"calibration/{key}": value for key, value in evidence.flat().items()}
    assert data.metrics == pytest.approx(expected)
    assert expected["calibration/alarm"] == 1
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set(expected)


def test_sequential_tests_have_a_verdict_in_weights_and_biases(evidence):
    logged, run = [], SimpleNamespace(summary={}, log=lambda values, step: logged.append((dict(values), step)))
    module = ModuleType("wandb")
    module.run = run
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", module)
        log_report(evidence, module, step=3)
    assert logged == [({f"calibration/{key}": value for key, value in evidence.flat().items()}, 3)]
    assert run.summary == {"calibration/verdict": str(evidence)}


def test_other_ranks_of_lightning_log_nothing(report):
    class Logger:
        experiment = _DummyExperiment()

    Logger.__module__ = "lightning.pytorch.loggers.x"
    log_report(report, Logger())


def test_wrong_arguments_are_errors(report, mlflow, monkeypatch):
    with pytest.raises(TypeError, match=r"`run` must belong to MLflow, .*, got <object"):
        log_report(report, object())
    with pytest.raises(TypeError, match=r"`report` must be a torchcalib\.Report or SequentialEvidence, got dict"):
        log_report(dict(report), mlflow)
    with pytest.raises(ValueError, match="the module mlflow without one"):
        log_report(report, mlflow)
    with pytest.raises(ValueError, match="`run_id` must be the identifier"):
        log_report(report, mlflow.MlflowClient())
    module = type(sys)("wandb")
    module.run = None
    with pytest.raises(ValueError, match="the module wandb without one"):
        log_report(report, module)
