"""`torchmetrics.Metric`, where it would lose something: after an error, under `.to(dtype)`, or of a value's axes."""

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from torchcalib.metrics.rollback import unchanged_on_error, unsynced_on_error
from torchcalib.ops.logs import wide_dtype


class CarefulMetric(Metric):
    """A metric that an error leaves as it was, whose states keep their dtype and are replaced, never written into."""

    _shared: dict[Hashable, Any] | None = None
    """What members of a collection have in common in an update that is under way."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hide properties and annotated attributes from TorchScript, which would try to compile them."""
        super().__init_subclass__(**kwargs)
        bases = [vars(base) for base in cls.__mro__]
        properties = {name for base in bases for name, member in base.items() if isinstance(member, property)}
        annotated = {name for base in bases for name in base.get("__annotations__", {})}
        cls.__jit_unused_properties__ = sorted(properties)
        cls.__jit_ignored_attributes__ = sorted({*Metric.__jit_ignored_attributes__, *annotated})

    def _copy_state_dict(self) -> dict[str, Tensor | list[Any]]:
        """Torchmetrics copies every tensor, all samples so far in each `forward`; states are never written into."""
        return {name: list(part) if isinstance(part := getattr(self, name), list) else part for name in self._defaults}

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Torchmetrics counts an update before it runs; one that fails must leave no trace."""
        wrapped = super()._wrap_update(update)

        @functools.wraps(update)
        def atomic(*args: Any, **kwargs: Any) -> None:
            before = vars(self).copy()
            try:
                wrapped(*args, **kwargs)
            except BaseException:
                vars(self).clear()
                vars(self).update(before)
                raise

        return atomic

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Torchmetrics takes the axes from a value that is a single number, as of one series of a batch."""
        shapes: list[torch.Size] = []

        @functools.wraps(compute)
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            value: Tensor = compute(*args, **kwargs)
            shapes.append(value.shape)
            return value

        wrapped = super()._wrap_compute(noted)

        @functools.wraps(compute)
        def whole(*args: Any, **kwargs: Any) -> Any:
            shapes.clear()
            value = wrapped(*args, **kwargs)
            if shapes and value.shape != shapes[-1]:  # there is none if the value was there already
                value = value.reshape(shapes[-1])
                self._computed = None if self._computed is None else value
            return value

        return whole

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Torchmetrics keeps a copy of the state if a rank does not answer, or if the metric is synced already."""
        with unchanged_on_error(self):
            super().sync(*args, **kwargs)

    @contextmanager
    def sync_context(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Torchmetrics leaves a metric synced if the body raises, as `compute` may."""
        with unsynced_on_error(self), super().sync_context(*args, **kwargs):
            yield

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Torchmetrics lets `.to(dtype)` cast the state; sums follow the module's device and keep their dtype."""

        def moved(tensor: Tensor) -> Tensor:
            device = fn(tensor.new_empty(0, dtype=torch.float32)).device
            stays = tensor.dtype == torch.float64 and wide_dtype(device) != torch.float64
            return tensor.cpu() if stays else tensor.to(device)

        return super()._apply(moved, *args, **kwargs)
