"""Metrics and reports as metrics of PyTorch-Ignite."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torchmetrics.collections import MetricCollection
from torchmetrics.metric import Metric as StreamingMetric

try:
    from ignite import distributed as idist
    from ignite.metrics import Metric
except ImportError as error:
    raise ImportError(
        "`IgniteMetric` needs PyTorch-Ignite, which is not installed. Install it: pip install 'torchcalib[ignite]'."
    ) from error

from torchcalib.core.gathering import exchanged, waiting
from torchcalib.io.errors import shown
from torchcalib.reporting.building import ReportBuilder
from torchcalib.results.report import Report

_REPORT = "compute a report"


class IgniteMetric(Metric):
    """Metric, collection or report as an `ignite.metrics.Metric`, to attach to an `Engine`.

    The output of the engine is `(y_pred, y)`, `(y_pred, y, weights)`, or a mapping with `y_pred` and `y`. A mapping as
    third element contains further arguments of `update` by name, such as `{"clusters": patient}`.

    `compute` covers the data of all processes. `state_dict` contains the state of every process, so that a checkpoint
    of the engine can contain the metric.

    Args:
        metric: a metric such as `torchcalib.ECE(...)`, a `torchcalib.CalibrationCollection`, or a
            `torchcalib.ReportBuilder`. Its state is reset, and afterwards belongs to this object.
        output_transform: function from the output of the engine to the output above.
        device: device of the state. Batches are moved there.
        **options: other arguments of `ignite.metrics.Metric`, such as `skip_unrolling`.

    Raises:
        TypeError: if `metric` is something else.

    Example:
        >>> import torch
        >>> from ignite.engine import Engine
        >>> from torchcalib import ECE
        >>> evaluator = Engine(lambda engine, batch: batch)
        >>> IgniteMetric(ECE(task="binary")).attach(evaluator, "ece")
        >>> batches = [(torch.tensor([0.2, 0.7]), torch.tensor([0, 1])), (torch.tensor([0.9]), torch.tensor([1]))]
        >>> round(evaluator.run(batches).metrics["ece"], 4)
        0.2
    """

    def __init__(
        self,
        metric: StreamingMetric | MetricCollection | ReportBuilder,
        output_transform: Callable[[Any], Any] = lambda output: output,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> None:
        if not isinstance(metric, StreamingMetric | MetricCollection | ReportBuilder):
            raise TypeError(
                f"`metric` must be a torchcalib metric, CalibrationCollection or ReportBuilder, got {shown(metric)}."
            )
        self.metric = metric
        if isinstance(metric, torch.nn.Module):
            metric.to(device)
            metric.persistent(True)  # `state_dict` then contains the state
        super().__init__(output_transform, torch.device(device), **options)

    def reset(self) -> None:
        """Remove all data."""
        if isinstance(self.metric, ReportBuilder):
            self.metric = ReportBuilder(**self.metric.settings, source=self.metric.source)
        else:
            self.metric.reset()

    def update(self, output: Any) -> None:
        """Add a batch.

        Args:
            output: `(y_pred, y)`, `(y_pred, y, weights)` or `(y_pred, y, mapping)` with further arguments of `update`.

        Raises:
            TypeError, ValueError: for invalid input. The state is then unchanged.
        """
        if not isinstance(output, tuple | list) or len(output) not in (2, 3):
            raise ValueError(
                f"`output` must be (y_pred, y) or (y_pred, y, weights), got {shown(output)}. Pass `output_transform`."
            )
        preds, target, *more = output
        named = more[0] if more and isinstance(more[0], Mapping) else {"weights": more[0]} if more else {}
        given = {name: self._moved(value) for name, value in named.items() if value is not None}
        self.metric.update(self._moved(preds), self._moved(target), **given)

    def _moved(self, value: Any) -> Any:
        return value.detach().to(self._device) if isinstance(value, Tensor) else value

    def compute(self) -> Any:
        """Return the result for the data of all processes, on every process.

        Returns:
            A float for a metric with one value, else a tensor; for a collection a dict of them; for a builder a
            `torchcalib.Report`, a mapping whose values ignite stores under their keys, such as `"nll"`.

        Raises:
            RuntimeError: if processes communicate by another library than `torch.distributed`.
            ValueError: if a report has no data.
        """
        if idist.get_world_size() > 1 and not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                f"`idist` must use torch.distributed, got {idist.backend()}. Start it with the backend gloo or nccl."
            )
        if isinstance(self.metric, ReportBuilder):
            if idist.get_world_size() == 1:
                return self.metric.report()
            whole, problem = self.metric.gather(), None
            result: list[Report | None] = [None]
            try:
                result[0] = None if whole is None else whole.report()
            except Exception as error:  # other ranks wait for the result, and raise the same error
                problem = error
            exchanged(_REPORT, (), problem=problem)
            with waiting(_REPORT):
                distributed.broadcast_object_list(result, src=0)
            return result[0]
        value = self.metric.compute()
        if isinstance(value, Mapping):
            return {name: _number(one) for name, one in value.items()}
        return _number(value)

    def _state_dict_per_rank(self) -> OrderedDict[str, Any]:
        """Return the state of this process. `state_dict` of ignite gathers those of all processes."""
        if isinstance(self.metric, ReportBuilder):
            return OrderedDict(self.metric.state())
        return OrderedDict(self.metric.state_dict())

    def _load_state_dict_per_rank(self, state_dict: Mapping[str, Any]) -> None:
        if isinstance(self.metric, ReportBuilder):
            self.metric = ReportBuilder.of_state(state_dict)
        else:
            self.metric.load_state_dict(dict(state_dict))


def _number(value: Tensor) -> float | Tensor:
    return value.item() if not value.dim() else value.cpu()
