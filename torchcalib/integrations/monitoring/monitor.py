"""`Monitor`: evaluate the calibration of a model after each epoch of a training run."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, task_of
from torchcalib.core.bins import BinTable
from torchcalib.core.gathering import rank_and_size
from torchcalib.core.sums import BinStats
from torchcalib.display.words import capitalised
from torchcalib.integrations.monitoring.over_confidence import OverConfidenceWarning, crossings, warning_text
from torchcalib.io.errors import shown
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.collection import CalibrationCollection
from torchcalib.metrics.errors import ECE, ESCE, MCE
from torchcalib.metrics.scores import ECD, NLL, Accuracy, BrierScore
from torchcalib.ops.segments import equal_width_edges
from torchcalib.results.history import History, HistoryRow


def usual_metrics(
    *, task: Task, n_bins: int = 15, **options: Unpack[InputOptions]
) -> dict[str, CalibrationMetric[Any]]:
    """Return the default metrics of a `Monitor` by name: scores, and errors over equal-width bins.

    All metrics use constant memory. A multi-class task needs `num_classes`, and a multi-label task `num_labels`.

    Example:
        >>> import torchcalib
        >>> metrics = {**usual_metrics(task="binary"), "rmsce": torchcalib.RMSCE(task="binary")}
        >>> list(metrics)
        ['accuracy', 'nll', 'nce', 'brier', 'ecd', 'ece', 'esce', 'mce', 'rmsce']
    """
    given: dict[str, Any] = {"task": task, **options}
    return {
        "accuracy": Accuracy(**given),
        "nll": NLL(**given),
        "nce": NLL(**given, normalize="prior"),  # divided by the NLL of predicting the class frequencies
        "brier": BrierScore(**given),
        "ecd": ECD(**given),
        "ece": ECE(**given, n_bins=n_bins),
        "esce": ESCE(**given, n_bins=n_bins),
        "mce": MCE(**given, n_bins=n_bins),
    }


class _SumsOfBins(ECE):
    """Metric whose value is the sums over bins, which ranks synchronise together with the other metrics."""

    def _value(self, statistic: Any) -> Tensor:
        return statistic.sums  # type: ignore[no-any-return]


_BINS = "bins of the table"
"""Reserved name of the metric that computes the sums over bins; it contains spaces to avoid conflicts."""


class Monitor:
    """Evaluate the calibration of a model in each validation, and warn if over-confidence grows.

    A training loop updates the monitor with each batch of the validation, and ends each epoch::

        monitor = torchcalib.Monitor(task="multiclass", num_classes=10, from_logits=True)
        for epoch in range(1, 31):
            train(model)
            for x, y in validation:
                monitor.update(model(x), y)
            values = monitor.end_epoch(epoch)  # {"val/nll": 0.31, "val/ece": 0.04, ...}

    `end_epoch` returns a dict of floats, for logging and early stopping. Lower `val/nll` and `val/ece` are better. If
    `torch.distributed` is initialized, `end_epoch` synchronises all ranks in two collectives. Every rank must call it,
    including ranks without data.

    The values of every epoch are looks at the same validation data. p-values hold for one look at the data: test the
    selected model once, on other data.

    Over-confidence is max(ECD, 0), where ECD is the entropic calibration difference. A warning is issued if it exceeds
    its lowest value so far by more than a threshold; see
    `torchcalib.integrations.monitoring.over_confidence.crossings`. Under-confidence causes no warning, because models
    are under-confident early in training.

    Args:
        metrics: metrics by name; None uses `usual_metrics`. Warnings need a metric `ecd`, and the best epoch needs a
            metric `nll`.
        prefix: prefix of the names of all returned values.
        postfix: suffix of these names.
        threshold: growth of over-confidence that causes a warning, in nats; `math.inf` disables warnings.
        **options: see `torchcalib.functional.InputOptions`, without `weights` and `batch_dims`. `num_classes` is
            required for a multi-class task, because a rank without data cannot infer it, and `num_labels` for a
            multi-label task. `nan_policy="drop"` returns the number of ignored rows as the value `n_dropped`.

    Attributes:
        input_format: task and options of the input.
        history: values of all validations so far.
        bin_table: bins of the last validation over all ranks, for a reliability diagram; None before the first one.

    Raises:
        TypeError, ValueError: for invalid arguments.

    Example:
        >>> monitor = Monitor(task="binary", metrics={"nll": NLL(task="binary")})
        >>> monitor.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> {name: round(value, 4) for name, value in monitor.end_epoch(1).items()}
        {'val/nll': 0.2284}
        >>> len(monitor.history)
        1
    """

    def __init__(
        self,
        *,
        task: Task | None = None,
        n_bins: int = 15,
        metrics: Mapping[str, CalibrationMetric[Any]] | None = None,
        prefix: str = "val/",
        postfix: str = "",
        threshold: float = 0.1,
        **options: Unpack[InputOptions],
    ) -> None:
        task = task_of(task, options.get("num_classes"), options.get("num_labels"))
        for needing, name in (("multiclass", "num_classes"), ("multilabel", "num_labels")):
            if task == needing and options.get(name) is None:
                raise ValueError(
                    f"`{name}` must be given for task={task!r}, got None. Pass it, because a rank without data cannot "
                    "infer it."
                )
        if not threshold >= 0:
            raise ValueError(f"`threshold` must be at least 0, got {shown(threshold)}. Pass a number of nats.")
        if metrics is not None and not isinstance(metrics, Mapping):
            raise TypeError(
                f"`metrics` must be a dict of metrics by name, got {type(metrics).__name__}. "
                "Pass a dict such as {'ece': torchcalib.ECE(...)}."
            )
        given: dict[str, Any] = {"task": task, "n_bins": n_bins, **options}
        bins = _SumsOfBins(**given)
        members = usual_metrics(**given) if metrics is None else {name: m.clone() for name, m in metrics.items()}
        self._metrics = CalibrationCollection({**members, _BINS: bins})
        self._names = tuple(members)  # `CalibrationCollection` does not preserve the order
        self.input_format, self._n_bins = bins.input_format, n_bins
        self.prefix, self.postfix, self.threshold = prefix, postfix, threshold
        self.history = History()
        self.bin_table: BinTable | None = None

    def update(
        self, preds: Tensor, target: Tensor, weights: Tensor | None = None, *, sample_weight: Tensor | None = None
    ) -> None:
        """Add a batch, and move the metrics to its device."""
        if isinstance(preds, Tensor):
            self.to(preds.device)
        self._metrics.update(preds, target, weights, sample_weight=sample_weight)

    def end_epoch(self, epoch: int | None = None, *, step: int | None = None) -> dict[str, float]:
        """Compute all values, append them to `history`, and reset the metrics.

        Args:
            epoch: number of the epoch; None uses the last number plus 1.
            step: training progress, to distinguish several validations in one epoch; None uses `epoch`.

        Returns:
            The metric values, by name with prefix and postfix. Values are NaN if there were no samples.

        Warns:
            OverConfidenceWarning: on rank 0, if over-confidence has grown by more than the threshold.
        """
        last = self.history.rows[-1].epoch if self.history.rows else 0
        epoch = last + 1 if epoch is None else epoch
        values = self._compute()
        self.reset()
        row = HistoryRow(epoch, epoch if step is None else step, values)
        self.history = self.history.with_row(row)
        if crossings(self.history.column("ecd"), self.threshold)[-1]:
            warning = warning_text(self.history, f"{self.prefix}ecd{self.postfix}")
            self.history = self.history.with_row(replace(row, warning=warning))
            if rank_and_size()[0] == 0:
                warnings.warn(capitalised(warning), OverConfidenceWarning, stacklevel=2)
        return self._named(values)

    def compute(self) -> dict[str, float]:
        """Return the values that `end_epoch` would return. The history and the metrics are unchanged."""
        return self._named(self._compute())

    def reset(self) -> None:
        """Discard the batches since the last `end_epoch`. The history is unchanged."""
        self._metrics.reset()

    def to(self, device: torch.device | str) -> None:
        """Move the metrics to a device. With NCCL, every rank without data must call it with its GPU."""
        if self._metrics[_BINS].device != torch.device(device):
            self._metrics.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain Python values. Batches since the last `end_epoch` are not included."""
        return self.history.to_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replace the history by a saved one.

        Args:
            saved: result of `state_dict()`.

        Raises:
            ValueError: if the version of the format differs.
        """
        self.history = History.from_dict(saved)

    def _compute(self) -> dict[str, float]:
        with warnings.catch_warnings():
            # torchmetrics warns about `compute` before `update`, but a rank may have no data.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric")
            values = self._metrics.compute()
        sums = values[_BINS]
        table = BinStats(sums.sum(0) if self.input_format.read_as == "multilabel" else sums, has_noise=True)
        self.bin_table = BinTable.from_bins(table, equal_width_edges(self._n_bins, table.n))
        named = {name: float(values[name]) for name in self._names}
        if self.input_format.read_as == "multiclass" and "accuracy" in named:
            named["confidence"] = float(self.bin_table.mean("confidence"))
        if self.input_format.nan_policy == "drop":
            named["n_dropped"] = float(self._metrics[_BINS].n_dropped())
        return named

    def _named(self, values: Mapping[str, float]) -> dict[str, float]:
        return {f"{self.prefix}{name}{self.postfix}": value for name, value in values.items()}
