"""Calibration in Lightning: a callback that watches a model's validation while it trains."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler

from torchcalib.calibration.calibrator import Calibrator, Transform
from torchcalib.calibration.saving import CHECKPOINT_KEY, transform_of
from torchcalib.core.arguments import Task, check_count
from torchcalib.integrations.fitting import SharedSamples
from torchcalib.integrations.images import log_picture
from torchcalib.integrations.outputs import Get, found_by
from torchcalib.metrics.base import StreamingMetric
from torchcalib.metrics.distributed_sampler import distinct_rows
from torchcalib.ops.logs import wide_dtype
from torchcalib.plots.reliability import reliability_diagram
from torchcalib.reporting.monitoring.history import History
from torchcalib.reporting.monitoring.monitor import Monitor


def _callback_classes() -> tuple[type, ...]:
    """The `Callback` of `lightning` and that of `pytorch_lightning`, as far as they are installed.

    They are one code under two names: a Trainer takes instances of its own, and no others.
    """
    found, errors = [], []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(import_module(package).Callback)
        except Exception as error:  # a package that cannot be loaded is not the one whose Trainer is used
            errors.append(error)
    if not found:
        raise ImportError(
            "`CalibrationMonitor` must have Lightning to be a callback of, got none. "
            "Install it: pip install 'torchcalib[lightning]'."
        ) from errors[0]
    return tuple(found)


_Callback: Any = type("_Callback", _callback_classes(), {})


class CalibrationMonitor(_Callback):  # type: ignore[misc]  # of which packages it is made shows when it is loaded
    """Watches calibration in the validation of a `Trainer`, of `lightning` or of `pytorch_lightning`.

        monitor = CalibrationMonitor(task="multiclass", num_classes=10, from_logits=True)
        Trainer(callbacks=[monitor, EarlyStopping("val/nll"), ModelCheckpoint(monitor="val/nll")])

    After every validation it logs accuracy, NLL, NCE, Brier score, ECD, ECE, ESCE and MCE (see `torchcalib.Monitor`),
    in time for early stopping, checkpoints and schedulers; gives the reliability diagram to loggers that take pictures;
    and warns when over-confidence grows. With several validation loaders each is watched for itself, its names end in
    `/dataloader_idx_0` and so on. The sanity check before the training is not recorded.

    On many ranks values are of all of them. Rows that a `DistributedSampler` repeats, so that all ranks have equally
    many, count once: values do not depend on how many ranks there are. What the model computes in half precision is
    read as it is, and summed in float64.

    The history is part of every checkpoint, and a training that is resumed goes on with it. So is the calibrator, if
    there is one: `torchcalib.load_calibrator("last.ckpt")`.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_classes: C of a multi-class task; needed.
        num_labels: L of a multi-label task; needed.
        from_logits: whether predictions are logits.
        n_bins: of all that is read from bins.
        get: `get(outputs, batch)` returns (preds, target) or (preds, target, weights), from what `validation_step`
            returned and its batch. By default they are found by their usual names; see
            `torchcalib.integrations.outputs.found_by`.
        metrics: what to measure, by name, in place of `torchcalib.reporting.monitoring.monitor.usual_metrics`.
        prefix: put before every name that is logged.
        threshold: by how much over-confidence must have grown to be warned of, in nats; see `torchcalib.Monitor`.
        diagrams_every: give a diagram to the loggers at the first and then every so many validations; 0 for none.
        calibrate: fitted to the samples of each validation (of the first loader), such as `torchcalib.Temperature()`.
            They are kept in CPU memory until then, up to 2^20 samples and 2^26 values over all ranks; no calibrator is
            fitted to more, and a warning says so.
        **options: other arguments that all metrics take: `ignore_index`, `class_axis` ...

    Attributes:
        monitors: one `torchcalib.Monitor` for each validation loader that there has been.
        transform: the calibrator that was fitted last, on the CPU; None before.

    Raises:
        ImportError: if neither package is installed.
        TypeError, ValueError: for arguments that do not fit the task, and in validation for outputs in which
            predictions and targets cannot be found.

    Warns:
        OverConfidenceWarning: see `torchcalib.Monitor`.
        UserWarning: what there is to say against the fit of the calibrator; repeated rows that cannot be told apart.
    """

    def __init__(
        self,
        *,
        task: Task,
        num_classes: int | None = None,
        num_labels: int | None = None,
        from_logits: bool = False,
        n_bins: int = 15,
        get: Get | None = None,
        metrics: Mapping[str, StreamingMetric[Any]] | None = None,
        prefix: str = "val/",
        threshold: float = 0.1,
        diagrams_every: int = 1,
        calibrate: Calibrator[Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_count("diagrams_every", diagrams_every, at_least=0)
        self._new_monitor = partial(
            Monitor,
            task=task,
            num_classes=num_classes,
            num_labels=num_labels,
            from_logits=from_logits,
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
        if calibrate is not None and self._format.read_as not in calibrate.tasks:
            raise ValueError(
                f"`calibrate` must be a calibrator for task={self._format.read_as!r}, got {type(calibrate).__name__}. "
                "Pass torchcalib.Temperature() or torchcalib.DPCalibration()."
            )
        self.transform: Transform | None = None
        self._samples: SharedSamples | None = None
        self._distinct: list[Sequence[Tensor] | None] = []
        self._said: set[str] = set()

    @property
    def history(self) -> History:
        """What was measured so far; with several validation loaders that of the first."""
        return self.monitors[0].history

    @property
    def state_key(self) -> str:
        """Under which checkpoints hold the history; of two monitors with different prefixes each has its own."""
        return str(self._generate_state_key(prefix=self.prefix))

    # Hooks, in the order in which a Trainer calls them ------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Make sure that a checkpoint has room for the calibrator."""
        calibrating = [c for c in trainer.callbacks if isinstance(c, CalibrationMonitor) and c._calibrate is not None]
        if len(calibrating) > 1:
            raise ValueError(
                f"`calibrate` must be given to one CalibrationMonitor at most, got {len(calibrating)} in `callbacks`."
            )

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin anew, with a monitor for each loader."""
        loaders = _loaders(trainer)
        self.monitors += [self._new_monitor() for _ in range(len(self.monitors), len(loaders))]
        self._n_loaders = max(1, len(loaders))  # a history stays, also where `validate` has fewer loaders than `fit`
        for index, monitor in enumerate(self.monitors[: self._n_loaders]):
            monitor.postfix = f"/dataloader_idx_{index}" if self._n_loaders > 1 else ""
            monitor.reset()
            monitor.to(pl_module.device)
        self._distinct = [self._distinct_of(loader) for loader in loaders]
        self._samples = None if self._calibrate is None else SharedSamples(self._format)

    def on_validation_batch_end(
        self,
        trainer: Any,  # noqa: ARG002
        pl_module: Any,  # noqa: ARG002
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch."""
        preds, target, weights = found_by(self._get, outputs, batch, self._format.from_logits)
        distinct = self._distinct[dataloader_idx]
        if distinct is not None and not bool(distinct[batch_idx].all()):
            weights = self._without_repeats(preds, weights, distinct[batch_idx])
        self.monitors[dataloader_idx].update(preds, target, weights=weights)
        if self._samples is not None and dataloader_idx == 0:
            self._samples.add(preds, target, weights)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log what the batches amount to: before `on_validation_end`, in which callbacks decide by it."""
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
                # All ranks have the same values: their maximum is these, to the last digit. Not to sync is warned of.
                pl_module.log(name, tensor, sync_dist=True, reduce_fx="max", add_dataloader_idx=False)
            is_due = bool(self.diagrams_every) and (len(monitor.history) - 1) % self.diagrams_every == 0
            if trainer.is_global_zero and (is_due if training else self.diagrams_every):
                self._draw(trainer, monitor)
        if self._calibrate is not None and self._samples is not None:
            self.transform, remarks = self._samples.fit(self._calibrate)
            self._samples = None  # nor does their memory stay
            for remark in remarks if trainer.is_global_zero else ():
                self._warn(remark)

    def state_dict(self) -> dict[str, Any]:
        """Return the histories, as plain Python values."""
        return {"histories": [monitor.state_dict() for monitor in self.monitors]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from saved histories."""
        histories = state_dict["histories"]
        self.monitors = [self._new_monitor() for _ in histories]
        for monitor, history in zip(self.monitors, histories, strict=True):
            monitor.load_state_dict(history)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Put the calibrator where `torchcalib.load_calibrator` finds it."""
        if self.transform is not None:
            checkpoint[CHECKPOINT_KEY] = self.transform.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Take the calibrator from there."""
        if CHECKPOINT_KEY in checkpoint:
            self.transform = transform_of(checkpoint[CHECKPOINT_KEY])

    # What they are made of ----------------------------------------------------------------------------------------

    def _distinct_of(self, loader: Any) -> Sequence[Tensor] | None:
        """For every batch of a loader a 1 for each row, and a 0 for one that the sampler repeats; None if none is."""
        batches = getattr(loader, "batch_sampler", None)
        sampler = getattr(loader if batches is None else batches, "sampler", None)
        if not isinstance(sampler, DistributedSampler) or bool((distinct := distinct_rows(sampler)).all()):
            return None
        if batches is not None and type(batches) is not BatchSampler:  # whose batches may be of any rows
            self._warn(
                f"the sampler repeats {int((distinct == 0).sum())} rows, so that all ranks have equally many, and in "
                f"batches of {type(batches).__name__} they cannot be told apart: they count twice. Make the number of "
                "rows divisible by that of ranks."
            )
            return None
        return torch.split(distinct, 1 if batches is None else batches.batch_size)

    def _without_repeats(self, preds: Tensor, weights: Tensor | None, distinct: Tensor) -> Tensor | None:
        """Give repeated rows of a batch no weight."""
        if len(distinct) > 1 and preds.shape[:1] != distinct.shape:
            self._warn(
                f"the sampler repeats {int((distinct == 0).sum())} rows of a batch of {len(distinct)}, so that all "
                f"ranks have equally many, and in predictions of shape {tuple(preds.shape)} they cannot be told apart: "
                "they count twice. Return predictions with one entry for each row in front."
            )
            return weights
        axis = self._format.class_axis
        shape = preds.shape if self._format.task == "binary" else preds.movedim(axis, -1).shape[:-1]
        once = distinct.to(preds.device).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        return once if weights is None else torch.where(once == 0, 0, weights)

    def _draw(self, trainer: Any, monitor: Monitor) -> None:
        """Give the reliability diagram to the loggers that take pictures."""
        table = monitor.bin_table
        if table is None or not trainer.loggers:
            return
        ax = reliability_diagram(table, title=f"step {trainer.global_step:,}")
        for logger in trainer.loggers:
            log_picture(logger, f"{monitor.prefix}reliability{monitor.postfix}", ax, trainer.global_step)

    def _warn(self, words: str) -> None:
        """Warn once of the same."""
        if words not in self._said:
            self._said.add(words)
            warnings.warn(words[:1].upper() + words[1:], UserWarning, stacklevel=3)


def _loaders(trainer: Any) -> list[Any]:
    """The validation loaders, by `dataloader_idx`; None for those that are read together, in batches of batches."""
    loop = trainer.validate_loop if trainer.state.fn == "validate" else trainer.fit_loop.epoch_loop.val_loop
    # `trainer.val_dataloaders` has them nested as they were given, and in `validate` may have those of `fit`.
    return list(loop._combined_loader.flattened) if loop._is_sequential else [None]
