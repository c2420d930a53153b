"""Jobs for hidden states and the head of a language model, whose logits are never written."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.job import Job, alternative, gradient
from torchcalib.ops.linear_softmax_stats import Blocks, Head, moments, rows

CHUNK = 256  # rows
SIZES = ((512, 1_024, 128_256), (2_048, 4_096, 32_000), (256, 4_096, 151_936))
"""Rows, hidden size and classes."""
GOALS = {(torch.float32, 1_024): 1.05, (torch.float32, 4_096): 1.02, (torch.bfloat16, 1_024): 1.10}
EXTRA_BYTES = 40_000_000
TEMPERATURES = torch.tensor([0.8, 1.0, 1.25])


def head_of(
    n: int, hidden_size: int, n_classes: int, dtype: torch.dtype = torch.float32, with_gradient: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weights and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, hidden_size, generator=generator)
    weight = torch.randn(n_classes, hidden_size, generator=generator).mul_(3 / hidden_size**0.5)
    target = torch.randint(0, n_classes, (n,), generator=generator)
    return hidden.to(dtype).requires_grad_(with_gradient), weight.to(dtype).requires_grad_(with_gradient), target


def statistics(hidden: Tensor, weight: Tensor, target: Tensor) -> object:
    return rows(hidden, target, Head(weight))


def of_temperatures(hidden: Tensor, weight: Tensor, target: Tensor) -> object:
    """Statistics at three temperatures in one pass, for a step of a fit."""
    return moments(hidden, target, Head(weight, temperature=TEMPERATURES))


def both_scores(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood and Brier score. The peers have no Brier score."""
    found = rows(hidden, target, Head(weight), detail="squares")
    return (found.squared_error - found.log_prob).mean()


@alternative(title="the matrix product alone, in the same blocks")
def product_in_blocks(hidden: Tensor, weight: Tensor, _: Tensor, temperatures: Tensor | None = None) -> None:
    blocks = Blocks(hidden.detach(), Head(weight.detach(), temperature=temperatures), None)
    for part in blocks.row_slices():
        for _block in blocks.of_rows(part):
            pass


@alternative(title="matrix product, then softmax")
def whole_product(hidden: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return (hidden @ weight.T).float().softmax(-1)


@alternative(title="torch linear_cross_entropy")
def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> object:
    given = hidden, weight, target
    return gradient(F.linear_cross_entropy, *given) if hidden.requires_grad else F.linear_cross_entropy(*given)


@alternative(title="cross entropy of chunks of 256 rows")
def cross_entropy_by_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    chunks = zip(hidden.split(CHUNK), target.split(CHUNK), strict=True)
    return torch.stack([F.cross_entropy((h @ weight.T).float(), y, reduction="sum") for h, y in chunks]).sum()


def statistics_job(size: tuple[int, int, int], dtype: torch.dtype) -> Job:
    """The peers compute the loss or the probabilities only."""
    n, hidden_size, n_classes = size
    narrow = dtype == torch.bfloat16
    return Job(
        f"rows of a head, {n:,} x {hidden_size:,} x {n_classes:,}, {str(dtype).removeprefix('torch.')}",
        partial(head_of, n=n, hidden_size=hidden_size, n_classes=n_classes, dtype=dtype),
        statistics,
        {
            product_in_blocks: GOALS.get((dtype, hidden_size), 1.04),
            whole_product: None if narrow else 1.0,
            linear_cross_entropy: None,
            cross_entropy_by_chunks: None,
        },
        extra_bytes=EXTRA_BYTES,
        rounds=1 if narrow else 5,
    )


of_llama = partial(head_of, n=512, hidden_size=1_024, n_classes=128_256)
JOBS = [
    *(statistics_job(size, dtype) for size in SIZES for dtype in (torch.float32, torch.bfloat16)),
    Job(
        "moments of a head at 3 temperatures, 512 x 1,024 x 128,256",
        of_llama,
        of_temperatures,
        {partial(product_in_blocks, temperatures=TEMPERATURES): 1.2},
        extra_bytes=EXTRA_BYTES,
        rounds=5,
    ),
    Job(
        "gradient of a head, 512 x 1,024 x 128,256",
        partial(of_llama, with_gradient=True),
        partial(gradient, both_scores),
        {product_in_blocks: 4.4, linear_cross_entropy: 1.5},
        extra_bytes=EXTRA_BYTES,
        rounds=3,
    ),
    Job(
        "rows of a head, 8,192 x 1,024 x 151,936",
        partial(head_of, n=8_192, hidden_size=1_024, n_classes=151_936),
        statistics,
        extra_bytes=600_000_000,
        rounds=1,
    ),
]
