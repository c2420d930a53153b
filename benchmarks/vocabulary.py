"""Jobs for hidden states and the head of a language model, whose logits are never written."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.job import Job, Peer, Sides
from torchcalib.ops.linear_softmax_stats import Head, moments, rows
from torchcalib.ops.linear_softmax_stats.blocks import Blocks

PRODUCT_IN_BLOCKS = "the matrix product alone, in the same blocks"
WHOLE_PRODUCT = "matrix product, then softmax"
LINEAR_CROSS_ENTROPY = "torch linear_cross_entropy"
CROSS_ENTROPY_BY_CHUNKS = "cross entropy of chunks of 256 rows"
CHUNK = 256  # rows

SIZES = ((512, 1_024, 128_256), (2_048, 4_096, 32_000), (256, 4_096, 151_936))
"""Rows, hidden size and classes."""
GOALS = {(torch.float32, 1_024): 1.05, (torch.float32, 4_096): 1.02, (torch.bfloat16, 1_024): 1.10}
EXTRA_BYTES = 40_000_000


def product_in_blocks(hidden: Tensor, head: Head) -> None:
    blocks = Blocks(hidden, head, None)
    for part in blocks.row_slices():
        for _ in blocks.of_rows(part):
            pass


def cross_entropy_by_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    chunks = zip(hidden.split(CHUNK), target.split(CHUNK), strict=True)
    return torch.stack([F.cross_entropy((h @ weight.T).float(), y, reduction="sum") for h, y in chunks]).sum()


def head_of(hidden_size: int, n_classes: int, dtype: torch.dtype, n: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, hidden_size, generator=generator)
    weight = torch.randn(n_classes, hidden_size, generator=generator).mul_(3 / hidden_size**0.5)
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, n_classes, (n,), generator=generator)


def statistics(
    hidden_size: int, n_classes: int, dtype: torch.dtype = torch.float32, n: int = 512, memory_only: bool = False
) -> Sides:
    """Statistics of rows. The peers compute the loss or the probabilities only."""
    hidden, weight, target = head_of(hidden_size, n_classes, dtype, n)
    peers: dict[str, Callable[[], object]] = {
        PRODUCT_IN_BLOCKS: lambda: product_in_blocks(hidden, Head(weight)),
        WHOLE_PRODUCT: lambda: (hidden @ weight.T).float().softmax(-1),
        LINEAR_CROSS_ENTROPY: lambda: F.linear_cross_entropy(hidden, weight, target),
        CROSS_ENTROPY_BY_CHUNKS: lambda: cross_entropy_by_chunks(hidden, weight, target),
    }
    return Sides(lambda: rows(hidden, target, Head(weight)), {} if memory_only else peers)


def of_temperatures(hidden_size: int, n_classes: int, n: int = 512) -> Sides:
    """Statistics at three temperatures in one pass, for a step of a fit."""
    hidden, weight, target = head_of(hidden_size, n_classes, torch.float32, n)
    head = Head(weight, temperature=torch.tensor([0.8, 1.0, 1.25]))
    product = partial(product_in_blocks, hidden, head)
    return Sides(lambda: moments(hidden, target, head), {PRODUCT_IN_BLOCKS: product})


def gradient(hidden_size: int, n_classes: int, n: int = 512) -> Sides:
    """Negative log-likelihood and Brier score, and their gradient. The peers have no Brier score."""
    hidden, weight, target = head_of(hidden_size, n_classes, torch.float32, n)

    def backward(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        given = hidden.clone().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(loss(*given), given)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        found = rows(h, target, Head(w), detail="squares")
        return (found.squared_error - found.log_prob).mean()

    peers = {
        PRODUCT_IN_BLOCKS: partial(product_in_blocks, hidden, Head(weight)),
        LINEAR_CROSS_ENTROPY: partial(backward, lambda h, w: F.linear_cross_entropy(h, w, target)),
    }
    return Sides(partial(backward, ours), peers, result_bytes=2 * hidden.nbytes + weight.nbytes)


def statistics_job(size: tuple[int, int, int], dtype: torch.dtype) -> Job:
    n, hidden_size, n_classes = size
    narrow = dtype == torch.bfloat16
    peers = (
        Peer(PRODUCT_IN_BLOCKS, GOALS.get((dtype, hidden_size), 1.04)),
        Peer(WHOLE_PRODUCT, None if narrow else 1.0),
        Peer(LINEAR_CROSS_ENTROPY),
        Peer(CROSS_ENTROPY_BY_CHUNKS),
    )
    prepare = partial(statistics, hidden_size, n_classes, dtype, n=n)
    name = f"rows of a head, {n:,} x {hidden_size:,} x {n_classes:,}, {str(dtype).removeprefix('torch.')}"
    return Job(name, prepare, peers, extra_bytes=EXTRA_BYTES, rounds=1 if narrow else 5)


JOBS = [
    *(statistics_job(size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)),
    Job(
        "moments of a head at 3 temperatures, 512 x 1,024 x 128,256",
        partial(of_temperatures, 1_024, 128_256),
        (Peer(PRODUCT_IN_BLOCKS, 1.2),),
        extra_bytes=EXTRA_BYTES,
        rounds=5,
    ),
    Job(
        "gradient of a head, 512 x 1,024 x 128,256",
        partial(gradient, 1_024, 128_256),
        (Peer(PRODUCT_IN_BLOCKS, 4.4), Peer(LINEAR_CROSS_ENTROPY, 1.5)),
        extra_bytes=EXTRA_BYTES,
        rounds=3,
    ),
    Job(
        "rows of a head, 8,192 x 1,024 x 151,936",
        partial(statistics, 1_024, 151_936, n=8_192, memory_only=True),
        extra_bytes=600_000_000,
        rounds=1,
    ),
]
