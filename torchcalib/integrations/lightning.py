"""Lightning callbacks: calibration metrics in the validation, and sequential tests."""

import io
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Unpack

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.utils.data import BatchSampler, DistributedSampler

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.saving import CHECKPOINT_KEY, calibrator_from
from torchcalib.core.arguments import StreamOptions, Task, check_count
from torchcalib.core.gathering import gathered_bytes, rank_and_size, waiting
from torchcalib.display.words import capitalised
from torchcalib.integrations.monitoring.monitor import Monitor
from torchcalib.integrations.outputs import Get, found_by
from torchcalib.io.errors import shown
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.distributed_sampler import distinct_rows
from torchcalib.metrics.sequential import SequentialTest
from torchcalib.ops.logs import wide_dtype
from torchcalib.plots.reliability import reliability_diagram
from torchcalib.reporting.buffer import PredictionBuffer
from torchcalib.reporting.calibration import fitted
from torchcalib.results.history import History


def _callback_classes() -> tuple[type, ...]:
    """Return the installed `Callback` classes: a Trainer accepts only callbacks from its own package."""
    found, errors = [], []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(import_module(package).Callback)
        except Exception as error:  # not installed, or broken and therefore not in use
            errors.append(error)
    if not found:
        raise ImportError(
            "`CalibrationMonitor` needs Lightning, which is not installed. "
            "Install it: pip install 'torchcalib[lightning]'."
        ) from errors[0]
    return tuple(found)


_Callback: Any = type("_Callback", _callback_classes(), {})
_FIT = "fit a calibrator"
_DPI = 120

Fitted = tuple[Calibrator | None, tuple[str, ...]]
"""Fitted calibrator, or None if the fit is impossible, and texts of warnings."""


class CalibrationMonitor(_Callback):  # type: ignore[misc]  # the base classes are known at run time only
    """Monitor calibration in the validation of a `Trainer` from `lightning` or `pytorch_lightning`.

        monitor = CalibrationMonitor(task="multiclass", num_classes=10, from_logits=True)
        Trainer(callbacks=[monitor, EarlyStopping("val/nll"), ModelCheckpoint(monitor="val/nll")])

    After every validation, the callback logs the metrics of `torchcalib.Monitor`. Scores are `accuracy`, `brier`, the
    negative log-likelihood `nll`, its normalised form `nce` and the entropic calibration difference `ecd`. Calibration
    errors are `ece` (expected), `esce` (expected signed) and `mce` (maximum). Early stopping, checkpoints and
    schedulers can use these values. Loggers that accept images receive the reliability diagram. An increase of
    over-confidence causes a warning. p-values hold for one look at the data: test the selected model once, on other
    data.

    Each validation loader has its own monitor. With several loaders, the names end in `/dataloader_idx_0` and so on.
    The sanity check before training is not recorded.

    Values are computed over all ranks. A `DistributedSampler` repeats rows to give all ranks equally many. Repeated
    rows count once. Half-precision outputs are summed in float64.

    Checkpoints contain the history, which a resumed training continues, and the fitted calibrator:
    `torchcalib.calibration.load_calibrator("last.ckpt")`.

    Args:
        num_classes: number of classes, required for a multi-class task.
        num_labels: number of labels, required for a multi-label task.
        get: function `get(outputs, batch)` of the return value of `validation_step` and its batch, which returns
            `(preds, target)` or `(preds, target, weights)`. None finds tensors by their usual names; see
            `torchcalib.integrations.outputs.found_by`.
        metrics: metrics by name. None uses `torchcalib.integrations.monitoring.monitor.usual_metrics`.
        prefix: prefix of every logged name.
        threshold: increase of over-confidence, in nats, that causes a warning; see `torchcalib.Monitor`.
        diagrams_every: number of validations per logged diagram; 0 logs none.
        calibrate: calibrator, such as `torchcalib.calibration.TemperatureScaling()`, to fit to the samples of the first
            loader in each validation. The samples are stored on the CPU: at most 2^20 samples and 2^26 values over all
            ranks. With more samples, no calibrator is fitted, and a warning is issued.
        **options: `positive_classes`, `class_axis`, `validate_args` and `nan_policy` of all metrics; see
            `torchcalib.functional.InputOptions`.

    Attributes:
        monitors: one `torchcalib.Monitor` per validation loader.
        calibrator: a copy of `calibrate` fitted in the last validation, on the CPU, or None.

    Raises:
        ImportError: if neither `lightning` nor `pytorch_lightning` is installed.
        TypeError, ValueError: if arguments do not fit the task, or if a validation output lacks predictions or targets.

    Warns:
        OverConfidenceWarning: see `torchcalib.Monitor`.
        UserWarning: if the calibrator cannot be fitted, or if repeated rows cannot be identified.

    Example:
        >>> from torchcalib.integrations import CalibrationMonitor
        >>> monitor = CalibrationMonitor(task="binary", from_logits=True)
        >>> monitor.prefix, len(monitor.history.rows)
        ('val/', 0)
    """

    def __init__(
        self,
        *,
        task: Task | None = None,
        num_classes: int | None = None,
        num_labels: int | None = None,
        from_logits: bool = False,
        ignore_index: int | None = None,
        n_bins: int = 15,
        get: Get | None = None,
        metrics: Mapping[str, CalibrationMetric[Any]] | None = None,
        prefix: str = "val/",
        threshold: float = 0.1,
        diagrams_every: int = 1,
        calibrate: Calibrator | None = None,
        **options: Unpack[StreamOptions],
    ) -> None:
        super().__init__()
        check_count("diagrams_every", diagrams_every, at_least=0)
        self._new_monitor = partial(
            Monitor,
            task=task,
            num_classes=num_classes,
            num_labels=num_labels,
            from_logits=from_logits,
            ignore_index=ignore_index,
            n_bins=n_bins,
            metrics=metrics,
            prefix=prefix,
            threshold=threshold,
            **options,
        )
        self._get, self._calibrate = get, calibrate
        self.prefix, self.diagrams_every = prefix, diagrams_every
        self.monitors = [self._new_monitor()]
        self._n_loaders = 1
        self._format = self.monitors[0].input_format
        if not isinstance(calibrate, Calibrator | None):
            raise TypeError(f"`calibrate` must be a calibrator, got {shown(calibrate)}. Pass TemperatureScaling().")
        if calibrate is not None and self._format.read_as not in calibrate.tasks:
            raise ValueError(
                f"`calibrate` must be a calibrator for task={self._format.read_as!r}, got {type(calibrate).__name__}. "
                "Pass torchcalib.calibration.TemperatureScaling() or torchcalib.calibration.AffineScaling()."
            )
        self.calibrator: Calibrator | None = None
        self._buffer: PredictionBuffer | None = None
        self._axis = -1
        self._distinct: list[Sequence[Tensor] | None] = []
        self._warned: set[str] = set()

    @property
    def history(self) -> History:
        """Recorded validations of the first validation loader."""
        return self.monitors[0].history

    @property
    def state_key(self) -> str:
        """Key of the history in checkpoints. It contains the prefix, because a Trainer may have several monitors."""
        return str(self._generate_state_key(prefix=self.prefix))

    # Hooks, in the order of the calls by a Trainer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Check that at most one monitor writes a calibrator to checkpoints."""
        calibrating = [c for c in trainer.callbacks if isinstance(c, CalibrationMonitor) and c._calibrate is not None]
        if len(calibrating) > 1:
            raise ValueError(
                f"`calibrate` must be given to one CalibrationMonitor at most, got {len(calibrating)} in `callbacks`. "
                "A checkpoint stores one calibrator."
            )

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Reset the monitor of each loader."""
        loop = trainer.validate_loop if trainer.state.fn == "validate" else trainer.fit_loop.epoch_loop.val_loop
        loaders = list(loop._combined_loader.flattened) if loop._is_sequential else [None]
        self.monitors += [self._new_monitor() for _ in range(len(self.monitors), len(loaders))]
        self._n_loaders = max(1, len(loaders))  # `validate` can have fewer loaders than `fit`, whose histories remain
        for index, monitor in enumerate(self.monitors[: self._n_loaders]):
            monitor.postfix = f"/dataloader_idx_{index}" if self._n_loaders > 1 else ""
            monitor.reset()
            monitor.to(pl_module.device)
        self._distinct = [self._distinct_of(loader) for loader in loaders]
        self._buffer = None if self._calibrate is None else PredictionBuffer(self._format, rank_and_size()[1])

    def on_validation_batch_end(
        self,
        trainer: Any,  # noqa: ARG002
        pl_module: Any,  # noqa: ARG002
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Update the monitor of a validation loader with the predictions for a batch."""
        preds, target, weights = found_by(self._get, outputs, batch, self._format.from_logits)
        distinct = self._distinct[dataloader_idx]
        if distinct is not None and not bool(distinct[batch_idx].all()):
            weights = self._without_repeats(preds, target, weights, distinct[batch_idx])
        self.monitors[dataloader_idx].update(preds, target, weights=weights)
        if self._buffer is not None and dataloader_idx == 0:
            on_cpu = (None if x is None else x.detach().cpu() for x in (preds, target, weights))
            self._axis = self._format.resolved(preds, target).axis
            self._buffer += self._buffer.from_predictions(self._format.read(*on_cpu, batch_shape=()))  # type: ignore[arg-type]
        self._format = self._format.following(preds, target)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log all values before other callbacks use them in `on_validation_end`, and fit the calibrator."""
        if trainer.sanity_checking:
            return
        training = trainer.state.fn == "fit"
        dtype = wide_dtype(pl_module.device)
        for monitor in self.monitors[: self._n_loaders]:
            if training:
                values = monitor.end_epoch(trainer.current_epoch, step=trainer.global_step)
            else:
                values = monitor.compute()
            for name, value in values.items():
                tensor = torch.tensor(value, dtype=dtype, device=pl_module.device)
                # Without sync_dist, Lightning warns. All ranks have the same value, and unlike a mean, max is exact.
                pl_module.log(name, tensor, sync_dist=True, reduce_fx="max", add_dataloader_idx=False)
            is_due = bool(self.diagrams_every) and (len(monitor.history) - 1) % self.diagrams_every == 0
            is_shown = trainer.is_global_zero and trainer.loggers and (is_due if training else self.diagrams_every)
            if is_shown and monitor.bin_table is not None:
                ax = reliability_diagram(monitor.bin_table, title=f"step {trainer.global_step:,}")
                for logger in trainer.loggers:
                    log_picture(logger, f"{monitor.prefix}reliability{monitor.postfix}", ax, trainer.global_step)
        if self._calibrate is not None and self._buffer is not None:
            self.calibrator, remarks = fit_on_all_ranks(self._calibrate, self._buffer, self._axis)
            self._buffer = None  # frees memory
            for remark in remarks if trainer.is_global_zero else ():
                self._warn(remark)

    def state_dict(self) -> dict[str, Any]:
        """Return the histories of all monitors as plain Python values."""
        return {"histories": [monitor.state_dict() for monitor in self.monitors]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the histories of all monitors from the result of `state_dict()`."""
        histories = state_dict["histories"]
        self.monitors = [self._new_monitor() for _ in histories]
        for monitor, history in zip(self.monitors, histories, strict=True):
            monitor.load_state_dict(history)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Save the fitted calibrator for `torchcalib.calibration.load_calibrator`."""
        if self.calibrator is not None:
            checkpoint[CHECKPOINT_KEY] = self.calibrator.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Load the fitted calibrator from a checkpoint."""
        if CHECKPOINT_KEY in checkpoint:
            self.calibrator = calibrator_from(checkpoint[CHECKPOINT_KEY])

    def _distinct_of(self, loader: Any) -> Sequence[Tensor] | None:
        """Return one tensor per batch, with 1 for distinct and 0 for repeated rows; None if no row is repeated."""
        batches = getattr(loader, "batch_sampler", None)
        sampler = getattr(loader if batches is None else batches, "sampler", None)
        if not isinstance(sampler, DistributedSampler) or bool((distinct := distinct_rows(sampler)).all()):
            return None
        if batches is not None and type(batches) is not BatchSampler:  # its batches can contain rows in any order
            self._warn(
                f"the sampler repeats {int((distinct == 0).sum())} rows to give all ranks equally many rows. In "
                f"batches of {type(batches).__name__} they cannot be identified, and count twice. Make the number of "
                "rows divisible by the number of ranks."
            )
            return None
        return torch.split(distinct, 1 if batches is None else batches.batch_size)

    def _without_repeats(
        self, preds: Tensor, target: Tensor, weights: Tensor | None, distinct: Tensor
    ) -> Tensor | None:
        """Return the weights of a batch, with 0 in place of the weights of repeated rows (0 in `distinct`)."""
        if len(distinct) > 1 and preds.shape[:1] != distinct.shape:
            self._warn(
                f"the sampler repeats {int((distinct == 0).sum())} rows of a batch of {len(distinct)} to give all "
                f"ranks equally many rows. In predictions of shape {tuple(preds.shape)} they cannot be identified, and "
                "count twice. Return predictions whose first axis is the batch."
            )
            return weights
        axis = self._format.resolved(preds, target).axis
        shape = preds.shape if self._format.task == "binary" else preds.movedim(axis, -1).shape[:-1]
        once = distinct.to(preds.device).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        return once if weights is None else torch.where(once == 0, 0, weights)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(capitalised(message), UserWarning, stacklevel=3)


class SequentialMonitor(_Callback):  # type: ignore[misc]  # the base classes are known at run time only
    """Add the rows of each `trainer.test` to a sequential test of a deployed model, and log its evidence.

    Test the model on the rows of each week::

        monitor = SequentialMonitor(torchcalib.SequentialTest(num_classes=10, from_logits=True))
        trainer = Trainer(callbacks=[monitor])
        for loader in new_data:
            trainer.test(model, loader)  # logs test/log_e, test/p_value, test/alarm and test/since
            if monitor.test.alarm():
                break

    Each batch is a look. Evidence is kept between calls, and is in `state_dict`. The model must stay the same: begin a
    new monitor after a new fit or a recalibration. Over several ranks, results are those of one look at the rows of all
    ranks.

    Args:
        test: the test, which is updated in place.
        get: see `CalibrationMonitor`.
        prefix: prefix of every logged name.

    Raises:
        TypeError: if `test` is no `SequentialTest`.
        ValueError: if a sampler repeats rows, which would count twice, or an output lacks predictions or targets.

    Example:
        >>> from torchcalib import SequentialTest
        >>> monitor = SequentialMonitor(SequentialTest(task="binary", from_logits=True))
        >>> bool(monitor.test.alarm())
        False
    """

    def __init__(self, test: SequentialTest, *, get: Get | None = None, prefix: str = "test/") -> None:
        super().__init__()
        if not isinstance(test, SequentialTest):
            raise TypeError(f"`test` must be a SequentialTest, got {type(test).__name__}. Pass SequentialTest(...).")
        self.test, self._get, self.prefix = test, get, prefix

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Move the test to the device, and refuse repeated rows."""
        self.test.to(pl_module.device)
        for loader in trainer.test_loop._combined_loader.flattened:
            sampler = getattr(loader, "sampler", None)
            if isinstance(sampler, DistributedSampler) and sampler.total_size > len(sampler.dataset):  # type: ignore[arg-type]  # it has a length
                raise ValueError(
                    "`dataloaders` must not repeat rows, got a DistributedSampler that gives all ranks equally many. "
                    "Test on one device, or make the number of rows divisible by the number of ranks."
                )

    def on_test_batch_end(
        self,
        trainer: Any,  # noqa: ARG002
        pl_module: Any,  # noqa: ARG002
        outputs: Any,
        batch: Any,
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Update the test with the predictions for a batch."""
        self.test.update(*found_by(self._get, outputs, batch, self.test.input_format.from_logits))

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Log the evidence after all batches."""
        for name, value in self.test.result().flat().items():
            tensor = torch.tensor(value, dtype=wide_dtype(pl_module.device), device=pl_module.device)
            pl_module.log(f"{self.prefix}{name}", tensor, sync_dist=True, reduce_fx="max", add_dataloader_idx=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the test."""
        return {"test": self.test.state_bytes()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the test from the result of `state_dict()`."""
        self.test = self.test.from_bytes(state_dict["test"])


def fit_on_all_ranks(calibrator: Calibrator, buffer: PredictionBuffer, class_axis: int = -1) -> Fitted:
    """Fit a calibrator to the samples of all ranks, in rank order. All ranks must call it, and get equal results."""
    rank, n_ranks = rank_and_size()
    if n_ranks > 1:
        content = io.BytesIO()
        torch.save(buffer.state(), content)
        empty = PredictionBuffer(buffer.input_format)
        parts = (torch.load(io.BytesIO(part), weights_only=True) for part in gathered_bytes(_FIT, content.getvalue()))
        buffer = sum(map(empty.loaded, parts), start=empty)
    result: list[Any] = [_fitted(calibrator, buffer, class_axis) if rank == 0 else None]
    if n_ranks > 1:
        with waiting(_FIT):
            distributed.broadcast_object_list(result, src=0)
    fit: Fitted = result[0]
    return fit


def _fitted(calibrator: Calibrator, buffer: PredictionBuffer, class_axis: int) -> Fitted:
    """Return the fitted calibrator and its warnings. An error is a warning, with None, so that training continues."""
    why_not = buffer.why_not or ("" if buffer.pieces else "there are no samples")
    if why_not:
        return None, (f"no calibrator is fitted: {why_not}.",)
    try:
        fit = fitted(calibrator, buffer.predictions(), class_axis, buffer.input_format.positive_classes)
    except Exception as error:  # other ranks wait for the result
        is_expected = isinstance(error, RuntimeError | ValueError | TypeError) and str(error)
        cause = str(error) if is_expected else f"{type(error).__name__}: {error}"
        return None, (f"no calibrator is fitted: {cause.splitlines()[0]}",)
    return fit, tuple(f"the calibrator: {remark}" for remark in fit.remarks())


def log_picture(logger: Any, name: str, ax: Axes, step: int) -> bool:
    """Log the figure of `ax` as an image. Return False if the logger does not accept images.

    The first available method of the logger or of its `experiment` is called:

    - `logger.log_image(key, images, step)`: Weights & Biases.
    - `experiment.add_image(tag, array, step, dataformats)`: TensorBoard.
    - `experiment.log_figure(run_id, figure, path)`: MLflow; without a run `(figure_name, figure, step)`: Comet.
    """
    if hasattr(logger, "log_image"):
        logger.log_image(key=name, images=[as_array(ax)], step=step)
        return True
    experiment: Any = getattr(logger, "experiment", None)
    figure = ax.figure.canvas.figure
    if hasattr(experiment, "add_image"):
        experiment.add_image(name, as_array(ax), step, dataformats="HWC")
    elif hasattr(experiment, "log_figure") and hasattr(logger, "run_id"):
        experiment.log_figure(logger.run_id, figure, f"{name}_{step:08d}.png")
    elif hasattr(experiment, "log_figure"):
        experiment.log_figure(figure_name=name, figure=figure, step=step)
    else:
        return False
    return True


def as_array(ax: Axes) -> NDArray[np.uint8]:
    """Render the figure of `ax` as an RGB image, uint8 `(height, width, 3)`, without pyplot."""
    figure = ax.figure.canvas.figure
    figure.set_dpi(_DPI)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
