"""Exchange numbers and bytes between the processes (ranks) of `torch.distributed`.

Every call begins with `exchanged`, which sends the same number of bytes on every rank. Ranks that make different calls,
or that use different settings, therefore all raise the same error. Without it, tensors of different sizes would meet in
a collective operation, which ends the process in gloo and waits forever in NCCL.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Gather = Callable[..., Sequence[Tensor]]
"""Function `gather(tensor, group=process_group)` that returns the tensors of all ranks, which have equal shapes."""

_MOST_NUMBERS = 3
_MOST_SHOWN = 80  # characters of a value in a message


class RanksError(RuntimeError):
    """Error that all ranks raise together."""

    def __init__(self, message: str, problem: str = "") -> None:
        super().__init__(message)
        self.problem = problem  # message of the first rank with an error; empty if ranks made different calls


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks: `(0, 1)` if `torch.distributed` is not running."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def exchanged(
    call: str,
    numbers: Sequence[int] = (),
    process_group: Any = None,
    *,
    settings: Mapping[str, object] | None = None,
    problem: Exception | None = None,
    device: torch.device | None = None,
    gather: Gather | None = None,
) -> list[list[int]]:
    """Return the numbers of every rank, if all ranks make the same call with the same settings and no error.

    Otherwise raise `RanksError`. `call` completes the sentence "all ranks must ...". There are at most 3 `numbers`.
    `settings` are compared as text, by the description of each. `problem` is the error on this rank. Tensors in
    collectives are on `device`; None selects one that `process_group` supports. `gather` replaces
    `torch.distributed.all_gather`. Raise RuntimeError if a rank does not answer, and ValueError outside the process
    group.
    """
    if gather is None and dist.get_rank(process_group) < 0:
        raise ValueError(
            f"`process_group` must contain this process, got a group without rank {dist.get_rank()}. "
            f"Only the ranks of the group may {call}."
        )
    described = {"the call": call, **{name: str(value) for name, value in (settings or {}).items()}}
    texts = _message(problem).encode(errors="replace"), json.dumps(described).encode()
    digest = int.from_bytes(blake2b(texts[1], digest_size=8).digest(), "little", signed=True)
    padding = [0] * (_MOST_NUMBERS - len(numbers))
    header = torch.tensor([digest, *map(len, texts), *numbers, *padding], device="cpu")
    device = device or _device(process_group)

    def from_all(x: Tensor) -> list[Tensor]:
        if gather is None:
            return all_gathered(x, process_group, call)
        return list(gather(x, group=process_group))

    def texts_of_all(which: int) -> list[str]:
        lengths = [header[1 + which] for header in headers]
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        mine[: len(texts[which])] = _bytes_tensor(texts[which])
        gathered = from_all(mine.to(device))
        return [bytes(x[:n].tolist()).decode() for x, n in zip(gathered, lengths, strict=True)]

    headers = torch.stack([x.cpu() for x in from_all(header.view(torch.uint8).to(device))]).view(torch.int64).tolist()
    if any(header[1] for header in headers):
        rank, first = next((rank, text) for rank, text in enumerate(texts_of_all(0)) if text)
        shown = shorten(first, 250, placeholder=" ...").rstrip(".")
        rank = _global_rank(process_group, rank)
        raise RanksError(f"all ranks must {call} without an error, got on rank {rank}: {shown}.", first) from problem
    if len({header[0] for header in headers}) > 1:
        raise _mismatch([json.loads(text) for text in texts_of_all(1)], process_group)
    return [header[3 : 3 + len(numbers)] for header in headers]


def gathered_bytes(
    call: str, content: bytes, process_group: Any = None, *, problem: Exception | None = None
) -> list[bytes]:
    """Gather bytes from every rank. Return one entry per rank on rank 0, and an empty list on all other ranks.

    `all_to_all_single` sends all bytes to rank 0. Unlike `gather`, it does not require equal lengths. For `call`,
    `problem` and errors see `exchanged`.
    """
    sizes = [size for (size,) in exchanged(call, (len(content),), process_group, problem=problem)]
    rank, n_ranks = dist.get_rank(process_group), len(sizes)
    mine = _bytes_tensor(content).to(_device(process_group))
    gathered = mine.new_empty(sum(sizes) if rank == 0 else 0)
    send_sizes = [len(content), *[0] * (n_ranks - 1)]
    receive_sizes = sizes if rank == 0 else [0] * n_ranks
    with waiting(call):
        dist.all_to_all_single(gathered, mine, receive_sizes, send_sizes, group=process_group)
    return [bytes(part.cpu().numpy()) for part in torch.split(gathered, sizes)] if rank == 0 else []


def all_gathered(x: Tensor, process_group: Any, call: str) -> list[Tensor]:
    """Return the tensors of all ranks, which must have equal shapes and dtypes."""
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(process_group))]
    with waiting(call):
        dist.all_gather(gathered, x, group=process_group)
    return gathered


@contextmanager
def waiting(call: str) -> Iterator[None]:
    """Explain errors of collective operations, which the backend raises if another rank fails or does not answer."""
    try:
        yield
    except RuntimeError as error:
        cause = shorten(str(error), 150, placeholder=" ...")
        raise RuntimeError(
            f"all ranks must {call}, got no answer from another rank ({cause}). It probably raised an error, was "
            "killed, or did not make this call. See its output, and restart all ranks."
        ) from error


def _message(error: Exception | None) -> str:
    """Return the message of an error, with its type unless it is a ValueError; empty for None."""
    if error is None:
        return ""
    return str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"


def _global_rank(process_group: Any, rank: int) -> int:
    """Return the rank in the default group, which launchers and logs name, for a rank in a process group."""
    is_subset = isinstance(process_group, dist.ProcessGroup)
    return dist.get_global_rank(process_group, rank) if is_subset else rank


def _mismatch(described: Sequence[Mapping[str, str]], process_group: Any) -> RanksError:
    """Return the error that names the first difference between the first and another rank of a process group."""
    first = described[0]
    rank = next(rank for rank, other in enumerate(described) if other != first)
    other = described[rank]
    name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
    values = [shorten(d.get(name, "none"), _MOST_SHOWN, placeholder=" ...") for d in (first, other)]
    ranks = [_global_rank(process_group, each) for each in (0, rank)]
    return RanksError(
        f"all ranks must {first['the call']}, got {name}: {values[0]} on rank {ranks[0]}, {values[1]} on rank "
        f"{ranks[1]}. "
        "Create the same metrics on every rank, and call their methods on every rank."
    )


def _bytes_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)[: len(content)]


def _device(process_group: Any) -> torch.device:
    """Return the device for tensors in collectives: the current GPU for the NCCL backend, otherwise the CPU."""
    is_nccl = dist.get_backend(process_group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
