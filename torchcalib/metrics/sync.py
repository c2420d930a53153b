"""States of all ranks together: sums in one collective, whole samples in one more."""

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchcalib.metrics.base import CalibrationMetric


def fingerprint(metrics: "Sequence[CalibrationMetric[Any]]") -> int:
    """20 bits that tell metrics of different configurations apart, the same on every rank.

    No more, so that the sum of their squares over thousands of ranks is exact in float64.
    """
    settings = [{name: value for name, value in m._configuration().items() if name != "class"} for m in metrics]
    return zlib.crc32(repr(settings).encode()) & 0xFFFFF


def met_over_ranks(metrics: "Sequence[CalibrationMetric[Any]]", process_group: Any) -> list[Any]:
    """Return the states of all ranks together: sums in one collective, samples in one more."""
    n_ranks, rank = torch.distributed.get_world_size(process_group), torch.distributed.get_rank(process_group)
    announced = [metric.kind.announce(metric.state, rank, n_ranks) for metric in metrics]
    announced = _summed(announced, metrics, process_group)
    sizes = [metric.kind.payload_sizes(part, n_ranks) for metric, part in zip(metrics, announced, strict=True)]
    payloads = _gathered([metric.kind.payload(metric.state) for metric in metrics], sizes, process_group)
    return [metric.kind.meet(part, payload) for metric, part, payload in zip(metrics, announced, payloads, strict=True)]


def met_by_gather(metric: "CalibrationMetric[Any]", gather: Callable[..., list[Tensor]], process_group: Any) -> Any:
    """Return the state of all ranks together, gathered with the `dist_sync_fn` of the caller.

    `gather(tensor, group=process_group)` returns the tensors of all ranks. `torch.distributed` may not be running, so
    the number of ranks is the length of that list. Every gathered tensor has the same shape on all ranks.
    """
    kind, state = metric.kind, metric.state
    mine = kind.announce(state, 0, 1)
    marked = gather(torch.cat((mine, mine.new_tensor([float(fingerprint([metric]))]))), group=process_group)
    if any(theirs.shape != marked[0].shape or theirs[-1] != marked[0][-1] for theirs in marked):
        raise _rank_mismatch([metric])
    announced = kind.announced_by_all([theirs[:-1] for theirs in marked])
    sizes = kind.payload_sizes(announced, len(marked))
    payload, longest = kind.payload(state), max(sizes)
    if not longest:
        return kind.meet(announced, [payload] * len(marked))
    everyone = gather(torch.cat((payload, payload.new_zeros(longest - len(payload)))), group=process_group)
    return kind.meet(announced, [theirs[:size] for theirs, size in zip(everyone, sizes, strict=True)])


def dropped_over_ranks(metrics: "Sequence[CalibrationMetric[Any]]", process_group: Any) -> list[int]:
    """Return how many rows all ranks together have dropped, for every metric, from one collective."""
    counts = [metric.kind.left_out(metric.state)[1:].detach().clone() for metric in metrics]
    return [int(count) for count in _summed(counts, metrics, process_group)]


def _summed(parts: Sequence[Tensor], metrics: "Sequence[CalibrationMetric[Any]]", process_group: Any) -> list[Tensor]:
    """Sum a part of every metric over all ranks.

    With the parts travel a number that stands for what they are and its square: ranks that sync different things, as
    when one of them computes a metric once more than the others, would otherwise add them up unseen.
    """
    n_ranks = torch.distributed.get_world_size(process_group)
    mark = float(fingerprint(metrics))
    packed = torch.cat([*parts, parts[0].new_tensor([mark, mark**2])])
    torch.distributed.all_reduce(packed, group=process_group)
    if packed[-2:].tolist() != [n_ranks * mark, n_ranks * mark**2]:
        raise _rank_mismatch(metrics)
    return list(torch.split(packed[:-2], [part.numel() for part in parts]))


def _rank_mismatch(metrics: "Sequence[CalibrationMetric[Any]]") -> RuntimeError:
    names = ", ".join(type(metric).__name__ for metric in metrics)
    return RuntimeError(
        f"all ranks must sync the same metrics at the same time, got {names} on this rank and others elsewhere. "
        "Call compute, plot, bin_table and n_dropped on every rank."
    )


def _gathered(payloads: Sequence[Tensor], sizes: Sequence[Sequence[int]], process_group: Any) -> list[list[Tensor]]:
    """Return every payload of every rank, `[metric][rank]`, of these sizes, from one gather (none if all are empty)."""
    by_rank = list(zip(*sizes, strict=True))
    longest = max(sum(row) for row in by_rank)
    mine = torch.cat(list(payloads))
    if not longest:
        return [[mine] * len(by_rank) for _ in payloads]
    padded = torch.cat((mine, mine.new_zeros(longest - mine.numel())))
    everyone = [torch.empty_like(padded) for _ in by_rank]
    torch.distributed.all_gather(everyone, padded, group=process_group)
    split = [torch.split(theirs[: sum(row)], list(row)) for theirs, row in zip(everyone, by_rank, strict=True)]
    return [list(ranks) for ranks in zip(*split, strict=True)]
