"""State of a streaming metric: adding batches, merging, saving and syncing, as a `torchmetrics.Metric`.

Private members of torchmetrics in this package, none of which has a documented equivalent:

- `_update_count`, `_computed`, `_forward_cache`, `_enable_grad`: results of calls, which an error restores.
- `_is_synced`, `_to_sync`, `_cache`, `_sync_dist`, `_copy_state_dict`: a sync in two collectives, undone on errors.
- `_wrap_update`, `_wrap_compute`, `_move_list_states_to_cpu`: faster updates, and values of unchanged shape.
- `_reduce_states`: addition of states in `forward` and `merge_state`, with few chunks of samples.
- `_defaults`, `_persistent`: names of states, and whether `state_dict` contains them.
- `_plot`, `_set_name`: plots of values, and names of a collection with prefix and postfix.

In torch, `_apply`, `_load_from_state_dict` and `_modules` are hooks and the registry of `nn.Module`.
"""

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torchmetrics.metric import Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from torchcalib.core.inputs import InputFormat
from torchcalib.core.linear_logits import linear_logits
from torchcalib.core.mistakes import Evidence
from torchcalib.core.saved import DESCRIPTION, Description, contains_state, content_of, loading, read_state, saved_bytes
from torchcalib.core.state import SampleState, SumState
from torchcalib.metrics.sync import dropped_over_ranks, synced_states
from torchcalib.ops.host_values import is_captured
from torchcalib.ops.logs import wide_dtype

S = TypeVar("S")

KIND = "metric state"
"""Kind of the saved form."""


@contextmanager
def unchanged_on_error(*metrics: Metric) -> Iterator[None]:
    """Restore the metrics if the `with` block raises. Tensors are not copied, because updates are not in place."""
    before = [{**metric.__dict__, **metric._copy_state_dict()} for metric in metrics]
    try:
        yield
    except BaseException:
        for metric, attributes in zip(metrics, before, strict=True):
            metric.__dict__.clear()
            metric.__dict__.update(attributes)
        raise


def refuse_if_synced(metric: Metric, method: str) -> None:
    """Raise TorchMetricsUserError if the metric is synced, because `unsync` would discard the changes by `method`."""
    if metric._is_synced:
        raise TorchMetricsUserError(
            f"`{method}` must be called before `sync` or after `unsync`, got a synced {type(metric).__name__}. "
            "Call unsync() first."
        )


def refuse_if_captured(metric: Metric, preds: Tensor) -> None:
    """Raise RuntimeError while a CUDA graph is captured, which would repeat one update on the same state."""
    if not is_compiling() and is_captured(preds):
        raise RuntimeError(
            f"`{type(metric).__name__}` must be updated outside the capture of a CUDA graph, got a call within it. "
            "Let the graph write predictions, and call `update` with them after each replay."
        )


@contextmanager
def unsynced_on_error(metric: Metric) -> Iterator[None]:
    """Unsync the metric if the `with` block syncs it and then raises."""
    was_synced = metric._is_synced
    try:
        yield
    except BaseException:
        if metric._is_synced and not was_synced:
            metric.unsync()
        raise


class StatefulMetric(Metric, Generic[S]):
    """A `torchmetrics.Metric` whose state is one value: sums, or stored samples.

    `kind` adds, saves and syncs states. Unlike torchmetrics, errors leave the state unchanged, `.to(dtype)` does not
    cast it, and values keep axes of length 1.
    """

    input_format: InputFormat
    kind: SumState[S] | SampleState
    """Operations on the state: addition, saving and synchronisation across ranks."""
    state_names: tuple[str, ...]
    """Names of the attributes that store the state."""
    _shared: dict[Hashable, Any] | None = None
    """Cache shared by all metrics in a collection during an update; None outside an update."""
    _in_forward = False
    _evidence: Evidence
    """Evidence of mistakes in the input, from all batches."""
    settings: dict[str, Any]
    """Arguments of the metric, which determine its value."""

    @abstractmethod
    def _configuration(self) -> dict[str, object]:
        """Return a dict of all options that affect the state. States with equal options can be merged."""

    def _restore_axis(self, described: Description | None) -> None:
        if described is not None and described.likely_axis is not None:
            vars(self)["input_format"] = self.input_format.preferring(described.likely_axis)

    def _add(self, preds: Tensor, batch: Any) -> None:
        refuse_if_captured(self, preds)
        self._store(self.kind.add(self.state, batch) if self._shared is None else self.added(batch, self._shared))

    def _is_added(self, *_: Any, **__: Any) -> bool:
        """Add a batch in a faster way than `update` does, if there is one. Return False if the batch is not added."""
        return False

    def reset(self) -> None:
        """Reset the state. Between `sync` and `unsync`, reset both the global and the local state."""
        if self._is_synced:
            self.unsync()
        self._store(self.state)  # new lists: torchmetrics clears lists in place, which wrappers may have stored
        super().reset()
        if not self._in_forward:  # torchmetrics also calls `reset` within `forward`, to compute the batch value
            self._evidence = Evidence()

    @torch.jit.unused
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch to the state and return the differentiable metric value for this batch."""
        with unchanged_on_error(self):
            self._in_forward = True
            value = super().forward(*args, **kwargs)
            self._in_forward = False
            self.state = self.kind.detach(self.state)
        # torchmetrics stores this value for loggers. Its autograd graph would prevent freeing the batch, and `clone`
        # cannot copy it.
        self._forward_cache = value.detach()
        return value

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the state of another metric with the same configuration.

        Args:
            incoming_state: The other metric, its `metric_state`, or its `state_dict`. `nan_policy` may differ.

        Raises:
            ValueError: If the configurations differ, or the dict contains no description of the configuration.
            TorchMetricsUserError: If called between `sync` and `unsync`.
        """
        refuse_if_synced(self, "merge_state")
        if isinstance(incoming_state, StatefulMetric):
            incoming_state = incoming_state.metric_state
        described = None
        if isinstance(incoming_state, dict):
            state, described = self._read_state("incoming_state", incoming_state)
            incoming_state = dict(zip(self.state_names, self.kind.parts(state), strict=True))
        with unchanged_on_error(self):
            super().merge_state(incoming_state)
            self._restore_axis(described)
        self._computed = None
        self._update_count += 1

    def n_dropped(self) -> int:
        """Return the number of rows (multi-label: row-label pairs) dropped by `nan_policy="drop"`.

        If `compute` syncs across ranks, this is the sum over all ranks, and every rank must call this method. The call
        synchronises the device.
        """
        if self._would_sync:
            return dropped_over_ranks([self], self.process_group, self.dist_sync_fn)[0]
        return int(self.kind.n_ignored(self.state)[1])

    @property
    def _would_sync(self) -> bool:
        return bool(self._to_sync and not self._is_synced and self.distributed_available_fn())

    def statistic(self) -> S:
        """Return the accumulated sums or samples on this rank, or on all ranks between `sync` and `unsync`.

        Raises:
            ValueError: If an update contained invalid rows on CUDA.
        """
        self._raise_if_invalid()
        return self.kind.statistic(self.state)

    def _synced_statistic(self) -> S:
        """Return the sums or samples over all ranks. Raise ValueError for invalid rows, as `compute` does."""
        with self._over_ranks():
            return self.statistic()

    @contextmanager
    def _over_ranks(self) -> Iterator[None]:
        """Sync the state for a `with` block as `compute` does, unless it is synced already."""
        if self._is_synced:
            yield
            return
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            yield

    def added(self, batch: Any, shared: dict[Hashable, Any]) -> Any:
        """Return the sum of the state and that of a batch. Metrics with the same samples share it in the cache."""
        state = self.state
        if not isinstance(self.kind, SampleState):
            return self.kind.add(state, batch)
        key = (self.kind, *((t.data_ptr(), t.shape) for t in (*state.scores, *batch.scores)))
        if key not in shared:
            # Also store `state`. If its memory were freed and reused, another state could have the same key.
            shared[key] = (self.kind.add(state, batch), state)
        return shared[key][0]

    def count_update(self, state: Any) -> None:
        """Replace the state by that after one more batch."""
        attributes = vars(self)
        if isinstance(state, Tensor):  # in one step, so that an interrupt leaves no half of a change
            (name,) = self.state_names
            attributes.update({name: state, "_computed": None, "_update_count": attributes["_update_count"] + 1})
            return
        self._store(state)
        attributes["_computed"] = None
        attributes["_update_count"] += 1

    def _raise_if_invalid(self) -> None:
        if invalid := int(self.kind.n_ignored(self.state)[0]):
            raise ValueError(
                f"`update` must get valid rows, got {invalid} with NaN, values out of range or labels out of range. "
                "They were ignored. Call reset() and update the metric on the CPU, where the error names the rows."
            )

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        """Sync the state across ranks in two collectives, or with a user-defined `dist_sync_fn`."""
        gather = None if dist_sync_fn is gather_all_tensors else dist_sync_fn
        (self.state,) = synced_states([self], process_group or self.process_group, gather)

    @property
    def state(self) -> Any:
        """State: a tensor with the numbers of ignored rows and all sums, or a `Samples` tuple."""
        parts = [getattr(self, name) for name in self.state_names]
        return parts[0] if len(parts) == 1 else self.kind.join(parts)

    @state.setter
    def state(self, value: Any) -> None:
        self._store(value)

    def _store(self, state: Any) -> None:
        """Set the state. `vars` is faster than `nn.Module.__setattr__`, which would also call the property."""
        if is_compiling():
            # The compiler would compile again for each number of updates.
            self._computed, self._update_count = None, 1
            for name, part in zip(self.state_names, self.kind.parts(state), strict=True):
                setattr(self, name, part)
            return
        attributes = vars(self)
        for name, part in zip(self.state_names, (state,) if isinstance(state, Tensor) else state, strict=True):
            attributes[name] = list(part) if isinstance(part, list) else part  # `reset` clears lists in place

    @property
    def metric_state(self) -> dict[str, Tensor | list[Tensor]]:
        """State as a dict, with a description of the configuration, for `merge_state`."""
        return {**self._parts(), DESCRIPTION: self._description().encoded()}

    def _parts(self) -> dict[str, Tensor | list[Tensor]]:
        parts = zip(self.kind.names, self.kind.parts(self.state), strict=True)
        return {name: list(part) if isinstance(part, list) else part for name, part in parts}

    def _content(self) -> dict[str, Any]:
        """Return the parts of the state and the description, the content of the saved form."""
        return {DESCRIPTION: self._description().plain(), **self._parts()}

    def state_bytes(self) -> bytes:
        """Return the state, with a description of the configuration, as bytes for `from_bytes`.

        Their size is that of the state and 2 to 4 KB: 8 bytes for each sum, or 5 to 17 bytes for each stored sample.

        Example:
            >>> import torch
            >>> from torchcalib import ECE
            >>> whole, part = ECE(task="binary"), ECE(task="binary")
            >>> part.update(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))
            >>> whole.merge_state(whole.from_bytes(part.state_bytes()))
            >>> bool(whole.compute() == part.compute())
            True
        """
        return saved_bytes(KIND, self._content())

    def from_bytes(self, content: bytes) -> Self:
        """Return a copy of this metric with a state from `state_bytes`. This metric is unchanged.

        The arguments of a metric may be any Python objects. They are therefore taken from this metric and not from the
        bytes, whose configuration must agree. Untrusted bytes are safe: no code is executed, and all values are
        checked.

        Args:
            content: Bytes from `state_bytes` of a metric with the same arguments. `nan_policy` may differ.

        Raises:
            ValueError: If the bytes are damaged, or belong to a different metric or format.
        """
        with loading(KIND, "content", "`state_bytes`"):
            saved = content_of(content, KIND)
        self._read_state("content", saved)
        metric = copy.deepcopy(self)
        metric.reset()
        metric.load_state_dict(saved, strict=False)
        return metric

    def state_dict(  # type: ignore[override]  # as in torchmetrics
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return a dict for checkpoints, which contains the state if the metric is persistent.

        The keys are `description` and the parts of the state: `sums`, or `scores`, `outcomes`, `weights`, `n_ignored`.
        The description is JSON in a uint8 tensor: the format, the version of torchcalib, and the arguments that affect
        the state. `torch.load(weights_only=True)` can load the dict.

        Each rank saves and loads its own state. Between `sync` and `unsync` the dict contains the global state, which
        only one rank may load. `load_state_dict` raises ValueError if the format or any argument except `nan_policy`
        differs, and leaves the metric unchanged. With `strict=True` it also raises for a missing state.
        """
        saved: dict[str, Any] = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.is_persistent:
            for name, own in zip(self.kind.names, self.state_names, strict=True):
                saved[prefix + name] = saved.pop(prefix + own)
            saved[prefix + DESCRIPTION] = self._description().encoded()
        return saved

    @property
    def is_persistent(self) -> bool:
        """Whether `state_dict` contains the state."""
        return all(self._persistent.values())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state saved by `state_dict`. If this raises, the metric is unchanged."""
        with unchanged_on_error(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _read_state(self, argument: str, saved: Mapping[str, Any], prefix: str = "") -> tuple[Any, Description]:
        """Check a saved state of this metric, and return a copy and its description; see `core.saved.read_state`."""
        return read_state(self.kind, self.state, self._configuration(), argument, saved, prefix)

    def _description(self) -> Description:
        return Description(self._configuration(), self._update_count, self.input_format.likely_axis, None)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        """Validate and load a state. Also clear the cached value and report missing keys, unlike torchmetrics."""
        if contains_state(state_dict, prefix):
            refuse_if_synced(self, "load_state_dict")
            state, described = self._read_state("state_dict", state_dict, prefix)
            for name in (*self.kind.names, DESCRIPTION):
                del state_dict[prefix + name]  # torch reports the remaining keys as unexpected
            self.state = state
            self._computed, self._update_count = None, described.n_updates
            self._restore_axis(described)
        elif self.is_persistent:
            missing_keys.extend(prefix + name for name in (*self.kind.names, DESCRIPTION))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        """Add the state to an incoming one. torchmetrics would collect a chunk of samples for every `forward`."""
        parts = [incoming_state[name] for name in self.state_names]
        self.state = self.kind.add(self.kind.join(parts), self.state)

    def _copy_state_dict(self) -> dict[str, Tensor | list[Any]]:
        """Return a shallow copy of the state. Tensors are not copied, because they are not modified in place."""
        return {name: list(part) if isinstance(part := getattr(self, name), list) else part for name in self._defaults}

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Count an update and disable gradients outside `forward`. If it raises, restore all attributes.

        The wrapper of torchmetrics does not restore them, and sets attributes by the slow `nn.Module.__setattr__`.
        """

        @functools.wraps(update)
        def atomic(*args: Any, **kwargs: Any) -> None:
            if is_compiling():
                with torch.no_grad():
                    update(*args, **kwargs)
                return
            if self._is_added(*args, **kwargs):
                return
            attributes = vars(self)
            before = attributes.copy()
            attributes["_computed"] = None
            attributes["_update_count"] += 1
            try:
                with torch.set_grad_enabled(self._enable_grad):
                    update(*args, **kwargs)
                if self.compute_on_cpu:
                    self._move_list_states_to_cpu()
            except BaseException:
                attributes.clear()
                attributes.update(before)
                raise

        atomic.adds_a_batch = True  # type: ignore[attr-defined]  # see `CalibrationCollection`
        return atomic

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Restore the shape of one-element values, which torchmetrics squeezes."""
        shapes: list[torch.Size] = []

        @functools.wraps(compute)
        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            value: Tensor = compute(*args, **kwargs)
            shapes.append(value.shape)
            return value

        wrapped = super()._wrap_compute(recorded)

        @functools.wraps(compute)
        def reshaped(*args: Any, **kwargs: Any) -> Any:
            shapes.clear()
            value = wrapped(*args, **kwargs)
            if shapes and value.shape != shapes[-1]:  # `shapes` is empty if torchmetrics returned its cached value
                value = value.reshape(shapes[-1])
                self._computed = None if self._computed is None else value
            return value

        return reshaped

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Sync the state across ranks. If this raises, restore all attributes, unlike torchmetrics."""
        with unchanged_on_error(self):
            super().sync(*args, **kwargs)

    @contextmanager
    def sync_context(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Sync the state for a `with` block, and unsync it even if the block raises, unlike torchmetrics."""
        with unsynced_on_error(self), super().sync_context(*args, **kwargs):
            yield

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Move the state to another device without changing its dtype, unlike torchmetrics."""

        def on_device(tensor: Tensor) -> Tensor:
            device = fn(tensor.new_empty(0, dtype=torch.float32)).device
            stays = tensor.dtype == torch.float64 and wide_dtype(device) != torch.float64
            return tensor.cpu() if stays else tensor.to(device)

        return super()._apply(on_device, *args, **kwargs)


class UpdatesFromHidden:
    """Base class for objects whose updates accept logits, and therefore also hidden states and a linear head."""

    update: Callable[..., None]

    def update_from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        logit_scale: float | None = None,
        softcap: float | None = None,
        temperature: float | Tensor | None = None,
        vocab_group: Any = None,
        **columns: Any,
    ) -> None:
        """Add a batch of hidden states, the input of a linear head, without writing the logits.

        Metrics must have `from_logits=True`. The state is that after `update` with the logits, up to rounding. A
        collection makes one pass over the blocks of the logits for all metrics.

        Args:
            hidden: Input of the head `(..., N, H)`.
            weight: Weight of the head `(V, H)`.
            target: Labels `(..., N)`.
            bias, logit_scale, softcap, temperature, vocab_group: See `torchcalib.functional.from_hidden`.
            **columns: Further arguments of `update`, such as `weights` or `clusters`.

        Raises:
            TypeError: For an invalid dtype, or if a metric needs all class probabilities: call `update`.
            ValueError: See `update`. Also for an empty weight.
        """
        preds = linear_logits(
            hidden, weight, bias=bias, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
            vocab_group=vocab_group,
        )  # fmt: skip
        self.update(preds, target, **columns)
