"""The state of a metric: where it lies, and in checkpoints."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torchcalib.core.state import SamplesKind, StateKind, SumsKind
from torchcalib.metrics.description import DESCRIPTION, Description, check_alike, read_description
from torchcalib.metrics.rollback import refuse_if_synced, unchanged_on_error
from torchcalib.metrics.transactional import CarefulMetric


class PersistentMetric(CarefulMetric):
    """A metric whose state says what it counts wherever it is saved, and is never taken for that of another one.

    Attributes:
        kind: what the state is.
        state_names: of the parts of the state, as torchmetrics has them.
    """

    kind: StateKind[Any, Any]
    state_names: tuple[str, ...]

    _in_graph = False
    """Whether a CUDA graph adds to the state, unseen by Python."""

    @abstractmethod
    def _configuration(self) -> dict[str, object]:
        """Everything that two states must agree on to be added, by the name of its argument; the task first."""

    @property
    def state(self) -> Any:
        """The whole state: for sums a tensor, how many rows were left out before them; for samples a `Samples`."""
        return self.kind.join([getattr(self, name) for name in self.state_names])

    @state.setter
    def state(self, value: Any) -> None:
        for name, part in zip(self.state_names, self.kind.parts(value), strict=True):
            # Past torch, which looks for parameters in all that is set; a list is copied, for `reset` empties it.
            vars(self)[name] = list(part) if isinstance(part, list) else part

    @contextmanager
    def _in_its_place(self) -> Iterator[None]:
        """Write what the body makes of the state to where a CUDA graph adds to."""
        if not self._in_graph:
            yield
            return
        held, self._in_graph = self.state, False
        try:
            yield
            held = held.copy_(self.state)
        finally:
            self.state, self._in_graph = held, True

    @property
    def metric_state(self) -> dict[str, Tensor | list[Tensor]]:
        """The parts of the state, and a description of what it counts: what `merge_state` takes."""
        parts = {name: list(part) if isinstance(part, list) else part for name, part in self._named(self.state).items()}
        return {**parts, DESCRIPTION: self._description().encoded()}

    def state_dict(  # type: ignore[override]  # torchmetrics has it so
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return a dict for checkpoints; of a persistent metric it holds a copy of the state.

        Beside the parts of the state (`sums`; or `scores`, `outcomes`, `weights`, `left_out`) stands `description`, a
        uint8 tensor of JSON: the format of the state, the version of torchcalib, and the arguments that the state
        depends on. All are tensors or lists of tensors, so that `torch.load(weights_only=True)` reads them, and
        safetensors where the state is sums.

        Each rank's own state is what it saves, and what the same rank is to load. Between `sync` and `unsync` it is the
        sum of all ranks: to be loaded by one process, or by one of the ranks and no other.

        `load_state_dict` takes the state of a metric of the same class that was made with the same arguments
        (`nan_policy` may differ), in this format. Anything else is a ValueError that names what differs, and so is a
        state without a description, which cannot be known to count the same thing; the metric is then as it was. A
        persistent metric that finds no state reports its keys as missing, an error where `strict=True`.
        """
        saved: dict[str, Any] = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.is_persistent:
            for name, own in zip(self.kind.names, self.state_names, strict=True):
                saved[prefix + name] = saved.pop(prefix + own)
            saved[prefix + DESCRIPTION] = self._description().encoded()
        return saved

    @property
    def is_persistent(self) -> bool:
        """Whether `state_dict` carries the state."""
        return all(self._persistent.values())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over a state that was saved; see `state_dict`. If it raises, the metric is as it was."""
        with unchanged_on_error(self):
            return super().load_state_dict(state_dict, strict, assign)

    def holds_state_of(self, saved: Mapping[str, Any], prefix: str) -> bool:
        """Whether a dict holds a state, or part of one, of any kind and format, for the metric at this prefix."""
        named = {prefix + name for name in (*SumsKind.names, *SamplesKind.names, DESCRIPTION)}
        stems = tuple(f"{prefix}{name}_" for name in _NAMES_BEFORE_FORMATS)
        return any(name in named or name.startswith(stems) for name in saved)

    def checked_state(self, argument: str, saved: Mapping[str, Any], prefix: str = "") -> tuple[Any, Description]:
        """Return a copy of the state in a dict of states, on this metric's device, and its description.

        Raises:
            ValueError: for a state of anything else, and for one that is damaged.
        """
        described = read_description(argument, saved, prefix)
        check_alike(argument, described.configuration, self._configuration(), f" at {prefix!r}" if prefix else "")
        names = [prefix + name for name in self.kind.names]
        complete = all(name in saved for name in names)
        state = self.kind.check([saved[name] for name in names], self.state) if complete else None
        if state is None:
            mine = {prefix + name: _shape(part) for name, part in self._named(self.state).items()}
            found = {name: _shape(saved[name]) for name in names if name in saved}
            raise ValueError(
                f"`{argument}` must hold {mine}, got {found}. It is damaged, or was cast: take it as it was saved."
            )
        return state, described

    def _named(self, state: Any) -> dict[str, Any]:
        """The parts of a state by their names in saved ones."""
        return dict(zip(self.kind.names, self.kind.parts(state), strict=True))

    def _description(self) -> Description:
        return Description(self._configuration(), self._update_count, None)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        """Torchmetrics takes whatever is there, keeps the value computed before, and misses nothing."""
        if self.holds_state_of(state_dict, prefix):
            refuse_if_synced(self, "load_state_dict")
            state, described = self.checked_state("state_dict", state_dict, prefix)
            for name in (*self.kind.names, DESCRIPTION):
                del state_dict[prefix + name]  # what is left is reported as unexpected
            with self._in_its_place():
                self.state = state
            self._computed, self._update_count = None, described.n_updates
        elif self.is_persistent:
            missing_keys.extend(prefix + name for name in (*self.kind.names, DESCRIPTION))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)


_NAMES_BEFORE_FORMATS = (*SumsKind.names, *SamplesKind.names[:-1], "invalid")
"""Beginnings of the names that parts had in states that did not describe themselves."""


def _shape(part: Any) -> Any:
    """Describe a part of a state, for an error."""
    if isinstance(part, Tensor):
        return f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"
    return f"{len(part)} chunks" if isinstance(part, list) else part
