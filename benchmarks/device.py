"""Jobs for a GPU: `python -m benchmarks.run device --device cuda`. Goals are for a Hopper GPU.

Operations are limited by memory. Their alternative is a copy that moves as many bytes as they must: every input is read
once, and every output written once. A CUDA graph is replayed, so that times exclude the host, except for jobs with
"eager" in their names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import by_hand, peers
from benchmarks.job import Job, alternative
from benchmarks.one_pass import GIVEN, eight_metrics
from torchcalib.ops.bin_sums import class_bins, event_bins
from torchcalib.ops.softmax_stats import rows

SHAPES = ((50_000, 1_000), (8_192, 128_256))
DTYPES = (torch.float32, torch.bfloat16)
BINS = {"n_bins": 15}
SUMS_BYTES = 3 * 15 * 8
"""Bin sums of a class."""
ROWS_GOAL, CLASSES_GOAL, COLLECTION_GOAL = 1 / 0.85, 1 / 0.60, 1.3

Given = tuple[Any, ...]


def random_rows(n: int, num_classes: int, dtype: torch.dtype, gradient: bool = False) -> Given:
    """Return logits, labels and statistics of the rows, made on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    values = (3 * torch.randn(n, num_classes, generator=generator, device=device)).to(dtype)
    target = torch.randint(num_classes, (n,), generator=generator, device=device)
    return values.requires_grad_(gradient), target, rows(values.detach(), target, from_logits=True)


def random_events(n: int = 10**7, weighted: bool = False) -> Given:
    generator = torch.Generator().manual_seed(0)
    confidence, share = torch.rand(2, n, generator=generator)
    return confidence, share < confidence, *([torch.rand(n, generator=generator).double()] if weighted else [])


def with_collection(classwise: bool, **sizes: Any) -> Given:
    """Return logits, labels and a collection."""
    values, target, _ = random_rows(**sizes)
    members = eight_metrics(values.shape[-1])
    if classwise:
        members["classwise_ECE"] = tc.ECE(num_classes=values.shape[-1], mode="classwise", **GIVEN)
    return values, target, tc.CalibrationCollection(members).to(values.device)


def with_buffers(data: Callable[..., Given], n_bytes: Callable[..., int], **sizes: Any) -> Given:
    """Return data, and two buffers of half as many bytes as an operation moves."""
    given = data(**sizes)
    return *given, given[0].detach().new_empty(2, n_bytes(*given) // 2, dtype=torch.uint8)


def rows_only(**sizes: Any) -> Given:
    return random_rows(**sizes)[:2]


def update(values: Tensor, target: Tensor, metrics: tc.CalibrationCollection) -> None:
    metrics.update(values, target)


def bins_of_events(*given: Tensor) -> Tensor:
    return event_bins(*given[:-1], **BINS)


@alternative(title="copying as many bytes")
def copy(*given: Any) -> Tensor:
    return given[-1][0].copy_(given[-1][1])


@alternative(title="row op")
def row_op(values: Tensor, target: Tensor, *_: Any) -> Given:
    return rows(values, target, from_logits=True)


def gradient_of_rows(values: Tensor, target: Tensor, *_: Any) -> object:
    found = row_op(values, target)[:4]
    return torch.autograd.grad([*found], values, [torch.ones_like(x) for x in found])


def bins_of(values: Tensor, target: Tensor, found: Any, *_: Any) -> Tensor:
    return class_bins(values, target, None, found, from_logits=True, **BINS)


def gradient_of_bins(values: Tensor, target: Tensor, found: Any, *_: Any) -> object:
    sums = bins_of(values, target, found)
    return torch.autograd.grad(sums, values, torch.ones_like(sums))


@alternative(title="eager torch: scores, top and bins")
def scores_and_bins(values: Tensor, target: Tensor) -> list[Tensor]:
    log_q = values.float().log_softmax(-1)
    q = log_q.exp()
    confidence, top = q.max(-1)
    of_label = log_q.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    squared_error = q.square().sum(-1) - 2 * of_label.exp() + 1
    index = (confidence * 15).long().clamp(max=14)
    hit = (top == target).float()
    sums = [confidence.new_zeros(15).index_add(0, index, x) for x in (torch.ones_like(hit), confidence, hit)]
    return [of_label, squared_error, (q * log_q).sum(-1), *sums]


def nbytes(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


def bytes_of_rows(values: Tensor, target: Tensor, found: Any) -> int:
    return nbytes(values, target, *found)


def bytes_with_gradient(values: Tensor, target: Tensor, found: Any) -> int:
    """Count bytes: the backward pass reads row, scores and their gradients again, and writes the gradient."""
    return 3 * values.nbytes + 2 * nbytes(target, *found) + nbytes(*found[:4])


def bytes_of_bins(values: Tensor, target: Tensor, found: Any, with_gradient: bool = False) -> int:
    once = nbytes(values, target, found.top, found.confidence) + SUMS_BYTES * values.shape[-1]
    return once if not with_gradient else 2 * once + values.nbytes + SUMS_BYTES * values.shape[-1]


def jobs_of(shape: tuple[int, int], dtype: torch.dtype) -> list[Job]:
    """Return the jobs of one shape and dtype."""
    size = f"{shape[0]:,} x {shape[1]:,}, {str(dtype).removeprefix('torch.')}"
    sizes: dict[str, Any] = {"n": shape[0], "num_classes": shape[1], "dtype": dtype}
    ece = partial(F.ece, validate_args=False, **BINS, **GIVEN)
    bins_bytes = partial(bytes_of_bins, with_gradient=True)
    return [
        *(
            timed(f"{name}, {size}", partial(with_buffers, partial(data, **sizes), n_bytes), call, {copy: goal})
            for name, call, data, n_bytes, goal in (
                ("row op", row_op, random_rows, bytes_of_rows, ROWS_GOAL),
                ("row op, forward and backward", gradient_of_rows, leaves, bytes_with_gradient, None),
                ("class bins", bins_of, random_rows, bytes_of_bins, CLASSES_GOAL),
                ("class bins, forward and backward", gradient_of_bins, leaves, bins_bytes, None),
            )
        ),
        *(
            timed(f"{name}, {size}", partial(with_collection, classwise, **sizes), update, {row_op: goal}, graph=False)
            for name, classwise, goal in (
                ("update of eight metrics, eager", False, COLLECTION_GOAL),
                ("update of eight metrics and class-wise ECE, eager", True, None),
            )
        ),
        timed(f"scores of rows, {size}", partial(rows_only, **sizes), row_op, {by_hand.torch_cross_entropy: None}),
        timed(f"ECE, eager, {size}", partial(rows_only, **sizes), ece, EAGER_ALTERNATIVES, graph=False),
    ]


timed = partial(Job, on_device=True, rounds=30, graph=True)
leaves = partial(random_rows, gradient=True)
EAGER_ALTERNATIVES = {scores_and_bins: None, partial(peers.torchmetrics_ece, validate_args=False): None}
JOBS = [
    *(each for shape in SHAPES for dtype in DTYPES for each in jobs_of(shape, dtype)),
    *(
        timed(f"event bins{how}, 10 million", partial(with_buffers, data, nbytes), bins_of_events, {copy: None})
        for how, data in (("", random_events), (", weighted", partial(random_events, weighted=True)))
    ),
]
