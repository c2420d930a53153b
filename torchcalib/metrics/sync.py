"""Synchronise metric states across ranks: sums in one collective operation, stored samples in a second one."""

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchcalib.metrics.base import CalibrationMetric


def fingerprint(metrics: "Sequence[CalibrationMetric[Any]]") -> int:
    """Return a 20-bit checksum of the configurations of all metrics, equal on all ranks.

    With 20 bits, the sum of squared checksums over thousands of ranks is exact in float64.
    """
    settings = [{name: value for name, value in m._configuration().items() if name != "class"} for m in metrics]
    return zlib.crc32(repr(settings).encode()) & 0xFFFFF


def synced_states(metrics: "Sequence[CalibrationMetric[Any]]", process_group: Any) -> list[Any]:
    """Return the state of every metric over all ranks. Sums require one collective, stored samples a second one."""
    n_ranks, rank = torch.distributed.get_world_size(process_group), torch.distributed.get_rank(process_group)
    announced = [metric.kind.announce(metric.state, rank, n_ranks) for metric in metrics]
    announced = _summed(announced, metrics, process_group)
    sizes = [metric.kind.payload_sizes(part, n_ranks) for metric, part in zip(metrics, announced, strict=True)]
    payloads = _gathered([metric.kind.payload(metric.state) for metric in metrics], sizes, process_group)
    return [
        metric.kind.merge_gathered(part, payload)
        for metric, part, payload in zip(metrics, announced, payloads, strict=True)
    ]


def synced_state_by(metric: "CalibrationMetric[Any]", gather: Callable[..., list[Tensor]], process_group: Any) -> Any:
    """Return the state of a metric over all ranks, gathered with a user-defined `dist_sync_fn`.

    `gather(tensor, group=process_group)` returns a list with the tensor from each rank, all of the same shape. The
    length of the list defines the number of ranks, because `torch.distributed` may not be running.
    """
    kind, state = metric.kind, metric.state
    mine = kind.announce(state, 0, 1)
    tagged = gather(torch.cat((mine, mine.new_tensor([float(fingerprint([metric]))]))), group=process_group)
    if any(theirs.shape != tagged[0].shape or theirs[-1] != tagged[0][-1] for theirs in tagged):
        raise _rank_mismatch([metric])
    announced = kind.announced_by_all([theirs[:-1] for theirs in tagged])
    sizes = kind.payload_sizes(announced, len(tagged))
    payload, longest = kind.payload(state), max(sizes)
    if not longest:
        return kind.merge_gathered(announced, [payload] * len(tagged))
    gathered = gather(torch.cat((payload, payload.new_zeros(longest - len(payload)))), group=process_group)
    return kind.merge_gathered(announced, [theirs[:size] for theirs, size in zip(gathered, sizes, strict=True)])


def dropped_over_ranks(metrics: "Sequence[CalibrationMetric[Any]]", process_group: Any) -> list[int]:
    """Return the number of dropped rows per metric, summed over all ranks in one collective."""
    counts = [metric.kind.n_ignored(metric.state)[1:].detach().clone() for metric in metrics]
    return [int(count) for count in _summed(counts, metrics, process_group)]


def _summed(parts: Sequence[Tensor], metrics: "Sequence[CalibrationMetric[Any]]", process_group: Any) -> list[Tensor]:
    """Return the tensor for each metric, summed over all ranks.

    The checksum of the configurations and its square are also summed. They detect ranks that sync different metrics,
    for example because one rank calls `compute` more often. Without this check, unrelated tensors would be added.
    """
    n_ranks = torch.distributed.get_world_size(process_group)
    checksum = float(fingerprint(metrics))
    packed = torch.cat([*parts, parts[0].new_tensor([checksum, checksum**2])])
    torch.distributed.all_reduce(packed, group=process_group)
    if packed[-2:].tolist() != [n_ranks * checksum, n_ranks * checksum**2]:
        raise _rank_mismatch(metrics)
    return list(torch.split(packed[:-2], [part.numel() for part in parts]))


def _rank_mismatch(metrics: "Sequence[CalibrationMetric[Any]]") -> RuntimeError:
    names = ", ".join(type(metric).__name__ for metric in metrics)
    return RuntimeError(
        f"all ranks must sync the same metrics at the same time, got {names} on this rank and different metrics on "
        "another rank. Call compute, plot, bin_table and n_dropped on every rank."
    )


def _gathered(payloads: Sequence[Tensor], sizes: Sequence[Sequence[int]], process_group: Any) -> list[list[Tensor]]:
    """Gather payloads from all ranks in one collective, and return them as `[metric][rank]`.

    `sizes[metric][rank]` is the length of each payload. If all lengths are 0, no collective is called.
    """
    by_rank = list(zip(*sizes, strict=True))
    longest = max(sum(row) for row in by_rank)
    mine = torch.cat(list(payloads))
    if not longest:
        return [[mine] * len(by_rank) for _ in payloads]
    padded = torch.cat((mine, mine.new_zeros(longest - mine.numel())))
    gathered = [torch.empty_like(padded) for _ in by_rank]
    torch.distributed.all_gather(gathered, padded, group=process_group)
    split = [torch.split(theirs[: sum(row)], list(row)) for theirs, row in zip(gathered, by_rank, strict=True)]
    return [list(ranks) for ranks in zip(*split, strict=True)]
