"""Log reports and sequential tests to MLflow, Weights & Biases and TensorBoard, or to the loggers of Lightning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from types import ModuleType
from typing import Any

from torchcalib.functional.sequential import SequentialEvidence
from torchcalib.io.errors import shown
from torchcalib.results.report import Report

_PAGE = "report.html"


@dataclass(frozen=True)
class _Content:
    """Values and files of a report. Without `values`, only the files and the verdict are logged."""

    verdict: str  # in a few words
    sentence: str
    values: Mapping[str, float]
    folder: Path | None  # the page, `report.json`, and every diagram as PNG and SVG; None for a sequential test
    prefix: str
    step: int | None

    @property
    def pictures(self) -> dict[str, Path]:
        """Diagrams by name, such as `"calibration/reliability"`."""
        files = () if self.folder is None else sorted(self.folder.glob("*.png"))
        return {f"{self.prefix}/{path.stem}": path for path in files}


def log_report(
    report: Report | SequentialEvidence,
    run: Any,
    *,
    step: int | None = None,
    prefix: str = "calibration",
    run_id: str | None = None,
) -> None:
    """Log the values, the diagrams and the page of a report to a run of an experiment tracker.

    The type of `run` determines how:

    - MLflow: the module `mlflow` for its active run, a run, or an `MlflowClient` with `run_id`. Values are metrics,
      with a point before `noise_floor`, `p_value`, `low` and `high`. The verdict is the tag `PREFIX.verdict`. Page and
      diagrams are artefacts in the folder `PREFIX`, which a later report replaces.
    - Weights & Biases: the module `wandb` for its active run, or a run. Values and pictures are logged, and the verdict
      is in the summary. The page is a panel, and a file of the artifact `PREFIX-report-ID` of the run.
    - TensorBoard: a `SummaryWriter`. Values are scalars, diagrams images and the verdict text. The page is written to
      the folder of the writer.
    - Lightning: a logger of `lightning` or `pytorch_lightning`, for one of the above; other loggers get the values.
      Processes other than the first log nothing.

    Args:
        report: the report; or the result of a sequential test, of which the values and the verdict are logged.
        run: where to log.
        step: number of the step or epoch. None lets the tracker choose.
        prefix: first part of all names, as in `"calibration/ece/top_label"`.
        run_id: identifier of the run of an `MlflowClient`.

    Raises:
        ImportError: if the extra `report` is not installed, which draws the diagrams and the page.
        TypeError: if `report` is no report and no result of a sequential test, or the tracker is unknown.
        ValueError: if `run` is a module without an active run, or a client without `run_id`.

    Example:
        >>> import tempfile, torchcalib
        >>> from torch.utils.tensorboard import SummaryWriter
        >>> r = torchcalib.report([0.2, 0.7, 0.9], [0, 1, 1], with_intervals=False, with_calibration=False)
        >>> with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        ...     log_report(r, writer, step=1)
        ...     [path.name for path in Path(folder).glob("*.html")]
        ['calibration_report_1.html']
    """
    if not isinstance(report, Report | SequentialEvidence):
        raise TypeError(
            f"`report` must be a torchcalib.Report or SequentialEvidence, got {type(report).__name__}. Pass "
            "torchcalib.report(preds, target), or the result() of a SequentialTest."
        )
    log, target = _tracker_of(run, run_id)
    values = {f"{prefix}/{key}": float(value) for key, value in report.flat().items()}
    if isinstance(report, SequentialEvidence):
        log(target, _Content(str(report), str(report), values, None, prefix, step))
        return
    with TemporaryDirectory() as folder:
        report.save(folder, diagrams=True)
        log(target, _Content(report.decision.verdict, report.sentence, values, Path(folder), prefix, step))


def _tracker_of(run: Any, run_id: str | None) -> tuple[Callable[[Any, _Content], None], Any]:
    """Return the function that logs to a run, and its target. Only packages are imported that `run` belongs to."""
    modules = {run.__name__} if isinstance(run, ModuleType) else {each.__module__ for each in type(run).__mro__}
    packages = {name.partition(".")[0] for name in modules}
    if packages & {"lightning", "pytorch_lightning"}:
        return _log_by_lightning, run
    if "mlflow" in packages:
        return _log_to_mlflow, _mlflow_run(run, run_id)
    if "wandb" in packages:
        target = run.run if isinstance(run, ModuleType) else run
        if target is None:
            raise ValueError("`run` must be an active run, got the module wandb without one. Call wandb.init() first.")
        return _log_to_wandb, target
    if "tensorboardX" in packages or any(name.startswith("torch.utils.tensorboard") for name in modules):
        return _log_to_tensorboard, run
    raise TypeError(
        f"`run` must belong to MLflow, Weights & Biases, TensorBoard or Lightning, got {shown(run)}. "
        "Log `report.flat()`, and the files that `report.save(folder)` writes."
    )


def _mlflow_run(run: Any, run_id: str | None) -> tuple[Any, str]:
    import mlflow

    if isinstance(run, ModuleType):
        active = run.active_run()
        if active is None:
            raise ValueError("`run` must be an active run, got the module mlflow without one. Use mlflow.start_run().")
        return mlflow.MlflowClient(), active.info.run_id
    if hasattr(run, "info"):
        return mlflow.MlflowClient(), run.info.run_id
    if run_id is None:
        raise ValueError(f"`run_id` must be the identifier of a run for {shown(run)}, got None. Pass run.info.run_id.")
    return run, run_id


def _log_to_mlflow(target: tuple[Any, str], content: _Content) -> None:
    from mlflow.entities import Metric

    client, run_id = target
    now, step = round(time() * 1000), content.step or 0
    metrics = []
    for key, value in content.values.items():
        parent, _, name = key.rpartition("/")  # stores in files use the parent key as a file name
        metrics.append(Metric(f"{parent}.{name}" if parent in content.values else key, value, now, step))
    for start in range(0, len(metrics), _MOST_METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + _MOST_METRICS])
    client.set_tag(run_id, f"{content.prefix}.verdict", content.verdict)
    if content.folder is not None:
        client.log_artifacts(run_id, str(content.folder), artifact_path=content.prefix)


_MOST_METRICS = 1000  # limit of MLflow for one call


def _log_to_wandb(run: Any, content: _Content) -> None:
    import wandb

    pictures: dict[str, Any] = {name: wandb.Image(str(path)) for name, path in content.pictures.items()}
    if content.folder is not None:
        pictures[f"{content.prefix}/report"] = wandb.Html((content.folder / _PAGE).read_text(encoding="utf-8"))
    run.log({**content.values, **pictures}, step=content.step)
    run.summary[f"{content.prefix}/verdict"] = content.verdict
    if content.folder is None:
        return
    artifact = wandb.Artifact(f"{content.prefix.replace('/', '-')}-report-{run.id}", type="calibration-report")
    artifact.add_dir(str(content.folder))
    run.log_artifact(artifact)


def _log_to_tensorboard(writer: Any, content: _Content) -> None:
    for key, value in content.values.items():
        writer.add_scalar(key, value, content.step)
    for name, path in content.pictures.items():
        from matplotlib.image import imread

        writer.add_image(name, imread(path)[..., :3], content.step, dataformats="HWC")
    writer.add_text(f"{content.prefix}/verdict", content.sentence, content.step)
    if content.folder is None:
        return
    step = "" if content.step is None else f"_{content.step}"
    name = f"{content.prefix.replace('/', '_')}_report{step}.html"
    # `log_dir` is an attribute of the writer of torch, but not of that of tensorboardX
    (Path(writer.file_writer.get_logdir()) / name).write_bytes((content.folder / _PAGE).read_bytes())


def _log_by_lightning(logger: Any, content: _Content) -> None:
    experiment = getattr(logger, "experiment", None)
    if type(experiment).__name__ == "_DummyExperiment":  # of Lightning, in all processes but the first
        return
    try:
        log, target = _tracker_of(experiment, getattr(logger, "run_id", None))
    except TypeError:  # for example a logger to CSV, which stores values only
        logger.log_metrics(dict(content.values), step=content.step)
        return
    if log is _log_to_wandb:  # its steps count calls, and the logger stores the step of the training as a value
        logger.log_metrics(dict(content.values), step=content.step)
        content = replace(content, values={}, step=None)
    log(target, content)
