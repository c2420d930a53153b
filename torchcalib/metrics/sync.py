"""Synchronise metric states across ranks in two collective operations.

The first one compares the configurations, see `core.gathering`. The second one adds sums, or gathers sums and samples.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchcalib.core.gathering import Gather, all_gathered, exchanged, waiting
from torchcalib.core.saved import FORM
from torchcalib.core.state import SampleState, SumState

_SYNC = "sync the same metrics"


class Synced(Protocol):
    """Attributes of a metric that a sync uses."""

    kind: SumState[Any] | SampleState
    settings: dict[str, Any]

    @property
    def state(self) -> Any:
        """State on this rank."""

    def _configuration(self) -> dict[str, object]: ...


def synced_states(metrics: Sequence[Synced], process_group: Any, gather: Gather | None = None) -> list[Any]:
    """Return the state of every metric over all ranks. The order of metrics is the same on all ranks.

    `gather` is a user-defined `dist_sync_fn`. The length of its result defines the number of ranks, because
    `torch.distributed` may not be running.
    """
    kinds = [metric.kind for metric in metrics]
    parts: list[Tensor] = []
    payload, problem = torch.zeros(0, dtype=torch.uint8), None
    try:
        parts = [kind.announce(metric.state) for kind, metric in zip(kinds, metrics, strict=True)]
        payload = torch.cat([kind.payload(metric.state) for kind, metric in zip(kinds, metrics, strict=True)])
    except Exception as error:  # for example too little memory; without an answer, other ranks would wait
        problem = error
    sizes = _compared("sync", metrics, len(payload), process_group, gather, problem)
    announced, lengths = torch.cat(parts), [len(part) for part in parts]
    of_ranks: list[tuple[Sequence[Tensor], Sequence[Tensor]]]
    if gather is None and not any(kind.has_payload for kind in kinds):
        with waiting(_SYNC):
            torch.distributed.all_reduce(announced, group=process_group)
        of_ranks = [(torch.split(announced, lengths), [payload] * len(kinds))]
    else:
        message = torch.cat((announced.view(torch.uint8), payload, payload.new_zeros(max(sizes) - len(payload))))
        received = gather(message, group=process_group) if gather else all_gathered(message, process_group, _SYNC)
        of_ranks = [_unpacked(theirs, kinds, lengths) for theirs in received]
    return [
        kind.merged([parts[k] for parts, _ in of_ranks], [payloads[k] for _, payloads in of_ranks])
        for k, kind in enumerate(kinds)
    ]


def dropped_over_ranks(metrics: Sequence[Synced], process_group: Any, gather: Gather | None = None) -> list[int]:
    """Return the number of dropped rows per metric, summed over all ranks; see `synced_states`."""
    counts = torch.cat([metric.kind.n_ignored(metric.state)[1:].detach() for metric in metrics])
    _compared("n_dropped", metrics, 0, process_group, gather)
    gathered = gather(counts, group=process_group) if gather else all_gathered(counts, process_group, _SYNC)
    return [int(count) for count in torch.stack(list(gathered)).sum(0)]


def _compared(
    method: str,
    metrics: Sequence[Synced],
    size: int,
    process_group: Any,
    gather: Gather | None,
    problem: Exception | None = None,
) -> list[int]:
    """Compare the configurations of all ranks, and return their sizes."""
    names = [type(metric).__name__ for metric in metrics]
    settings: dict[str, object] = {"the method": method, "the metrics": ", ".join(names), "the form": FORM}
    for k, (name, metric) in enumerate(zip(names, metrics, strict=True), 1):
        place = f"{name}, metric {k}" if names.count(name) > 1 else name
        # Options such as the bins of ranked samples determine the value, but not the state.
        options = {**metric.settings, **metric._configuration()}
        settings |= {f"`{name}` of {place}": getattr(x, "__qualname__", x) for name, x in options.items()}
    device = metrics[0].kind.n_ignored(metrics[0].state).device
    numbers = exchanged(_SYNC, (size,), process_group, settings=settings, problem=problem, device=device, gather=gather)
    return [theirs for (theirs,) in numbers]


def _unpacked(
    message: Tensor, kinds: Sequence[SumState[Any] | SampleState], lengths: Sequence[int]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Split the message of a rank into what each kind announced, and its payload."""
    start = 8 * sum(lengths)
    # Clone, because a view with another dtype must be aligned to its item size.
    announced = message[:start].clone().view(torch.float64)
    on_cpu = torch.split(announced.cpu(), list(lengths))  # one transfer, because sizes are read as Python numbers
    sizes = [kind.payload_size(part) for kind, part in zip(kinds, on_cpu, strict=True)]
    return torch.split(announced, list(lengths)), torch.split(message[start : start + sum(sizes)], sizes)
