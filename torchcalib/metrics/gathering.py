"""Collective operations of `torch.distributed` that gather integers and bytes from all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks: `(0, 1)` if `torch.distributed` is not running."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gathered_numbers(numbers: tuple[int, ...], process_group: Any = None) -> Tensor:
    """Gather n integers from every rank, and return them as int64 `(n_ranks, n)` on every rank."""
    mine = torch.tensor([numbers], device=_device(process_group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(gathered, mine, group=process_group)
    return torch.cat(gathered).cpu()


def gathered_bytes(content: bytes, process_group: Any = None) -> list[bytes]:
    """Gather bytes from every rank. Return one entry per rank on rank 0, and an empty list on all other ranks.

    `all_to_all_single` sends all bytes to rank 0. Unlike `gather`, it does not require equal lengths.
    """
    sizes = gathered_numbers((len(content),), process_group).flatten().tolist()
    rank, n_ranks = dist.get_rank(process_group), len(sizes)
    mine = torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)[: len(content)].to(_device(process_group))
    gathered = mine.new_empty(sum(sizes) if rank == 0 else 0)
    send_sizes = [len(content), *[0] * (n_ranks - 1)]
    receive_sizes = sizes if rank == 0 else [0] * n_ranks
    dist.all_to_all_single(gathered, mine, receive_sizes, send_sizes, group=process_group)
    return [bytes(part.cpu().numpy()) for part in torch.split(gathered, sizes)] if rank == 0 else []


def _device(process_group: Any) -> torch.device:
    """Return the device for tensors in collectives: the current GPU for the NCCL backend, otherwise the CPU."""
    is_nccl = dist.get_backend(process_group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
