"""Outputs and gradients of `torchcalib.ops`, compared with plain torch in float64, by dtype and shape."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda.check import Check, elementwise_error, guarded, label_of
from torchcalib.ops.bin_sums import class_bins, event_bins
from torchcalib.ops.dispatch import Backend
from torchcalib.ops.softmax_stats import Rows, rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
N_BINS = 15
# Row arithmetic is at least float32. Scores and sums have its rounding for any input dtype: 2e-6 for logits up to 20
# below the largest, and proportionally more beyond. Sums over events are float64.
SCORE_TOLERANCE = {torch.float64: 1e-11}
SCORE_FLOOR = {torch.float64: 1e-4}  # the reference is float64, too
SUM_TOLERANCE = {torch.float64: 1e-11}
EVENT_TOLERANCE = 1e-11
# A gradient has the dtype of the input. Its error is relative to the largest entry of its row, or to the resolution.
# A gradient is a sum of terms that can cancel: its error is relative to the size of these terms.
GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
GRADIENT_FLOOR = {torch.float64: 1e-5, torch.float32: 1e-6, torch.float16: 2**-14, torch.bfloat16: 1e-6}
_NEAR = 1e-5  # entries this close to a bin edge may be rounded into the next bin


_ENTRIES = 2**26  # larger inputs do not fit into the memory of a GPU in float64
ROWS = tuple(
    (n, c)
    for c in (2, 10, 1000, 1001, 32_000, 128_256)
    for n in sorted({min(n, _ENTRIES // c) for n in (1, 1000, 10**6)})
)
"""Shapes `(N, C)`: all numbers of classes with all numbers of rows that fit into memory."""


@dataclass(frozen=True)
class Sizes:
    """Shapes `(N, C)` of rows, shapes of rows for class-wise sums, and numbers of events."""

    rows: tuple[tuple[int, int], ...]
    by_class: tuple[tuple[int, int], ...]
    events: tuple[int, ...]


ON_GPU = Sizes(ROWS, ROWS, (1, 1000, 10**6 + 1))


def ops(
    device: torch.device,
    sizes: Sizes = ON_GPU,
    backend: Backend = "auto",
    dtypes: Sequence[torch.dtype] = DTYPES,
    inputs: Sequence[bool] = (True, False),
) -> Iterator[Check]:
    """Check all operations for some dtypes, and for logits (True) or probabilities (False)."""
    for dtype in dtypes:
        label = label_of(dtype)
        for from_logits in inputs:
            kind = "logits" if from_logits else "probs"
            shapes = [("rows", check_rows, shape) for shape in sizes.rows]
            shapes += [("class bins", check_class_bins, shape) for shape in sizes.by_class]
            for what, check, (n, c) in shapes:
                name = f"{what} {n} x {c} {kind}"
                yield from guarded(name, label, partial(check, name, device, dtype, n, c, from_logits, backend))
        for n in sizes.events if False in inputs else ():
            name = f"event bins {n}"
            yield from guarded(name, label, partial(check_event_bins, name, device, dtype, n, backend))


def predictions(
    device: torch.device, dtype: torch.dtype, n: int, c: int, from_logits: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return n rows, 7 in 16 of them edge cases, and labels, half of which are the top class."""
    generator = generator_of(device, seed)
    values = 3 * torch.randn(n, c, generator=generator, device=device)
    if n == 1 and c > 2:
        values[0, [1, c - 1]] = 20.0
    values[1::16] = 0.25  # all entries are equal
    values[2::16, [0, c - 1]] = 20.0  # the first and the last class are tied
    values[3::16, c // 2] = 700.0  # saturated
    values[4::16, : c // 2] = -torch.inf
    values[5::16, c - 1] = torch.inf
    values[6::16, [0, c // 2]] = torch.inf
    values[7::16] = values[7::16] * 0.01 - 50
    if not from_logits:
        values = limit(values.double()).softmax(-1)
    values = values.to(dtype)
    target = torch.randint(c, (n,), generator=generator, device=device)
    return values, torch.where(torch.rand(n, generator=generator, device=device) < 0.5, values.argmax(-1), target)


def limit(logits: Tensor) -> Tensor:
    """Replace rows with +inf by logits whose softmax is the limit: uniform over the infinite entries."""
    infinite = logits == torch.inf
    spread = torch.where(infinite, torch.zeros_like(logits), torch.full_like(logits, -torch.inf))
    return torch.where(infinite.any(-1, keepdim=True), spread, logits)


def generator_of(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def largest_entry(gradient: Tensor) -> Tensor:
    return gradient.detach().double().abs().amax(-1, keepdim=True)


def gradient_error(found: Tensor, expected: Tensor, size: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, relative to `size`. Entries that overflow the dtype must be infinite."""
    expected = torch.where(expected.to(found.dtype).isinf(), expected.to(found.dtype).double(), expected)
    return elementwise_error(found, expected, size, max(floor, GRADIENT_FLOOR[found.dtype]))


def check_rows(
    name: str, device: torch.device, dtype: torch.dtype, n: int, c: int, from_logits: bool, backend: Backend = "auto"
) -> Iterator[Check]:
    """Check scores, top class and gradient of the row operation."""
    values, target = predictions(device, dtype, n, c, from_logits)
    upstream = list(torch.randn(4, n, dtype=torch.float64, device=device, generator=generator_of(device, 1)))
    leaf, exact = values.clone().requires_grad_(), values.double().requires_grad_()
    found = rows(leaf, target, from_logits=from_logits, backend=backend)
    expected = rows(exact, target, from_logits=from_logits, backend="torch")
    label = label_of(dtype)
    # The relative error of e^-d in float32 is proportional to d.
    tolerance, floor = SCORE_TOLERANCE.get(dtype, 4e-6), SCORE_FLOOR.get(dtype, 1e-10)
    for column, got, wanted in zip(Rows._fields[:4], found, expected, strict=False):
        yield Check(name, label, column, elementwise_error(got, wanted, floor=floor), tolerance)
    yield Check(name, label, "top", float((found.top != expected.top).sum()), 0)
    (gradient,) = torch.autograd.grad([*found[:4]], leaf, upstream)
    wanted = torch.zeros_like(exact)
    size = (
        expected.confidence.detach() * sum(x.abs() for x in upstream) if from_logits else torch.zeros_like(upstream[0])
    )
    size = size.unsqueeze(-1).nan_to_num()
    for score, of_score in zip(expected[:4], upstream, strict=True):
        (part,) = torch.autograd.grad(score, exact, of_score, retain_graph=True)
        wanted += part
        size += largest_entry(part)
    yield Check(name, label, "gradient", gradient_error(gradient, wanted, size), GRADIENT_TOLERANCE[dtype])


def check_event_bins(
    name: str, device: torch.device, dtype: torch.dtype, n: int, backend: Backend = "auto"
) -> Iterator[Check]:
    """Check sums and gradients of events, with and without weights and scores, for both edge rules."""
    generator = generator_of(device, 0)
    random = partial(torch.rand, n, generator=generator, device=device, dtype=torch.float64)
    confidence = random().to(dtype)
    edges = torch.arange(2 * N_BINS, device=device).double() / (2 * N_BINS)
    confidence[: 2 * N_BINS] = edges.to(dtype)[:n]
    confidence[-1:] = 1.0
    outcome, weights, ecd = random() < confidence, random(), random() - 0.5
    weights[::5] = 0
    for right in (False, True):
        for columns in ((outcome,), (outcome, weights), (outcome.double(), weights, ecd)):
            given = [confidence, *columns]
            leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in given]
            exact = [x.double().requires_grad_() if x.is_floating_point() else x for x in map(torch.clone, given)]
            found = event_bins(*leaves, n_bins=N_BINS, right=right, backend=backend)
            expected = event_bins(*exact, n_bins=N_BINS, right=right, backend="torch")
            what = f"{len(columns)} columns{', right' if right else ''}"
            yield Check(name, label_of(dtype), what, elementwise_error(found, expected, floor=1e-9), EVENT_TOLERANCE)
            upstream = torch.rand(found.shape, generator=generator, device=device, dtype=torch.float64)
            pairs = zip(
                torch.autograd.grad(found, [x for x in leaves if x.requires_grad], upstream),
                torch.autograd.grad(expected, [x for x in exact if x.requires_grad], upstream),
                strict=True,
            )
            error = max(elementwise_error(a, b, floor=GRADIENT_FLOOR[dtype]) for a, b in pairs)
            yield Check(name, label_of(dtype), f"gradients of {what}", error, GRADIENT_TOLERANCE[dtype])


def check_class_bins(
    name: str, device: torch.device, dtype: torch.dtype, n: int, c: int, from_logits: bool, backend: Backend = "auto"
) -> Iterator[Check]:
    """Check the sums over all classes, and their gradient.

    Rows with an entry that float32 may round across a bin edge have weight 0, or are left out.
    """
    values, target = predictions(device, dtype, n, c, from_logits, seed=2)
    weights = torch.rand(n, generator=generator_of(device, 3), device=device, dtype=torch.float64)
    scaled = N_BINS * (limit(values.double()).softmax(-1) if from_logits else values.double())
    near = scaled.round()
    safe = (((scaled - near).abs() > _NEAR * near) | (near == 0) | (near == N_BINS)).all(-1)
    del scaled, near  # these tensors may need gigabytes
    weights[~safe] = 0
    options: dict[str, Any] = {"from_logits": from_logits}
    label = label_of(dtype)
    for what, held, w in (("weighted", slice(None), weights), ("plain", safe, None)):
        leaf, labels = values[held].clone().requires_grad_(), target[held]
        exact = leaf.detach().double().requires_grad_()
        with torch.no_grad():
            of_rows = rows(leaf, labels, backend=backend, **options)
            of_exact = rows(exact, labels, backend="torch", **options)
        found = class_bins(leaf, labels, w, of_rows, n_bins=N_BINS, backend=backend, **options)
        expected = class_bins(exact, labels, w, of_exact, n_bins=N_BINS, backend="torch", **options)
        for column, part in enumerate(("weight", "confidence", "outcome")):
            # Errors are relative to the sum over bins, because some bins are nearly empty.
            size = expected.detach()[:, column].abs().sum(-1, keepdim=True)
            error = elementwise_error(found[:, column], expected[:, column], size, floor=1e-9)
            yield Check(name, label, f"{part}, {what}", error, SUM_TOLERANCE.get(dtype, 4e-6))
        if len(labels):
            upstream = torch.rand(c, N_BINS, device=device, dtype=torch.float64)
            (gradient,) = torch.autograd.grad(found[:, 1], leaf, upstream)
            (wanted,) = torch.autograd.grad(expected[:, 1], exact, upstream)
            # A gradient is a difference of numbers of size 1, like `upstream`.
            size = of_exact.confidence.unsqueeze(-1).nan_to_num() if from_logits else largest_entry(wanted)
            error = gradient_error(gradient, wanted, size, floor=1e-2)
            yield Check(name, label, f"gradient, {what}", error, GRADIENT_TOLERANCE[dtype])
