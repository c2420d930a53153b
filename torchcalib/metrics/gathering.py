"""Which of the ranks this is, and numbers and bytes of all of them; nothing here knows of metrics."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_size() -> tuple[int, int]:
    """Return the number of this process, and of all that work together: 0 and 1 without `torch.distributed`."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gathered_numbers(numbers: tuple[int, ...], process_group: Any = None) -> Tensor:
    """Return the numbers of every rank, int64 `(n_ranks, n)`, on every rank."""
    mine = torch.tensor([numbers], device=_device(process_group))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(everyone, mine, group=process_group)
    return torch.cat(everyone).cpu()


def gathered_bytes(content: bytes, process_group: Any = None) -> list[bytes]:
    """Return what every rank has to send, of any length, on the first rank; nothing on the others.

    It is one collective: each rank sends all to the first and nothing to the others, so that nothing is padded.
    """
    sizes = gathered_numbers((len(content),), process_group).flatten().tolist()
    rank, n_ranks = dist.get_rank(process_group), len(sizes)
    mine = torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)[: len(content)].to(_device(process_group))
    everyone = mine.new_empty(sum(sizes) if rank == 0 else 0)
    to_the_first = [len(content), *[0] * (n_ranks - 1)]
    from_each = sizes if rank == 0 else [0] * n_ranks
    dist.all_to_all_single(everyone, mine, from_each, to_the_first, group=process_group)
    return [bytes(part.cpu().numpy()) for part in torch.split(everyone, sizes)] if rank == 0 else []


def _device(process_group: Any) -> torch.device:
    """Where the group takes tensors from."""
    on_gpu = dist.get_backend(process_group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
