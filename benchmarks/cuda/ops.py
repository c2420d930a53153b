"""Outputs and gradients of `torchcalib.ops` against float64 tensor operations, by dtype and shape.

The reference shares no formula with the kernels: it uses softmax and autograd on whole tensors, and a sum per bin.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.cuda.check import Check, elementwise_error, guarded, label_of
from torchcalib.ops.bin_sums import class_bins, event_bins
from torchcalib.ops.dispatch import Backend
from torchcalib.ops.softmax_stats import Rows, rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
N_BINS = 15
# Arithmetic within a row is at least float32, so that scores and sums have its rounding for any input: 2e-6 for logits
# up to 20 below the largest, and proportionally more beyond. Sums over events are float64.
SCORE_TOLERANCE = {torch.float64: 1e-11}
SCORE_FLOOR = {torch.float64: 1e-4}  # the reference is float64, too
SUM_TOLERANCE = {torch.float64: 1e-11}
EVENT_TOLERANCE = 1e-11
# A gradient has the dtype of the input. Its error is relative to the largest entry of its row, or to the resolution.
GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
GRADIENT_FLOOR = {torch.float64: 1e-5, torch.float32: 1e-6, torch.float16: 2**-14, torch.bfloat16: 1e-6}
_NEAR = 1e-5  # an entry this close to an edge may be rounded into the next bin


_ENTRIES = 2**26  # the reference holds about twenty float64 tensors of this size
ROWS = tuple(
    (n, c)
    for c in (2, 10, 1000, 1001, 32_000, 128_256)
    for n in sorted({min(n, _ENTRIES // c) for n in (1, 1000, 10**6)})
)
"""Shapes `(N, C)`: all numbers of classes with all numbers of rows that fit into memory."""


@dataclass(frozen=True)
class Sizes:
    """Shapes `(N, C)` of rows, shapes of rows for sums by class, and numbers of events."""

    rows: tuple[tuple[int, int], ...]
    by_class: tuple[tuple[int, int], ...]
    events: tuple[int, ...]


ON_GPU = Sizes(ROWS, ROWS, (1, 1000, 10**6 + 1))


def ops(device: torch.device, sizes: Sizes, backend: Backend = "auto") -> Iterator[Check]:
    """Check every op, dtype and shape."""
    for dtype in DTYPES:
        label = label_of(dtype)
        for from_logits in (True, False):
            kind = "logits" if from_logits else "probs"
            shapes = [("rows", check_rows, shape) for shape in sizes.rows]
            shapes += [("class bins", check_class_bins, shape) for shape in sizes.by_class]
            for what, check, (n, c) in shapes:
                name = f"{what} {n} x {c} {kind}"
                yield from guarded(name, label, partial(check, name, device, dtype, n, c, from_logits, backend))
        for n in sizes.events:
            name = f"event bins {n}"
            yield from guarded(name, label, partial(check_event_bins, name, device, dtype, n, backend))


def predictions(
    device: torch.device, dtype: torch.dtype, n: int, c: int, from_logits: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return `n` rows, 7 in 16 of them edge cases, and their labels, half of which are the top class."""
    generator = torch.Generator(device).manual_seed(seed)
    values = 3 * torch.randn(n, c, generator=generator, device=device)
    if n == 1 and c > 2:
        values[0, [1, c - 1]] = 20.0
    values[1::16] = 0.25  # all equal
    values[2::16, [0, c - 1]] = 20.0  # a tie of the first and the last class
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


def whole_rows(values: Tensor, target: Tensor, from_logits: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, scores `(4, N)` and top classes, differentiable, from float64 tensors."""
    x = values.double()
    q = limit(x).softmax(-1) if from_logits else x
    if from_logits:
        log_q = limit(x).log_softmax(-1)
    else:
        log_q = torch.where(q == 0, -torch.inf, torch.where(q == 0, 1.0, q).log())
    top = values.argmax(-1, keepdim=True)
    hit = torch.nn.functional.one_hot(target, values.shape[-1])
    scores = (
        log_q.gather(-1, target.unsqueeze(-1)).squeeze(-1),
        (q - hit).square().sum(-1),
        (q * log_q.masked_fill(q == 0, 0)).sum(-1),
        q.gather(-1, top).squeeze(-1),
    )
    return q, torch.stack(scores), top.squeeze(-1)


def check_rows(
    name: str, device: torch.device, dtype: torch.dtype, n: int, c: int, from_logits: bool, backend: Backend = "auto"
) -> Iterator[Check]:
    """Scores, top class and gradient of the row op."""
    values, target = predictions(device, dtype, n, c, from_logits)
    upstream = torch.randn(4, n, dtype=torch.float64, device=device, generator=torch.Generator(device).manual_seed(1))
    leaf, reference = (values.clone().requires_grad_() for _ in range(2))
    found = rows(leaf, target, from_logits=from_logits, backend=backend)
    _, expected, top = whole_rows(reference, target, from_logits)
    label = label_of(dtype)
    # The relative error of e^-d in float32 grows with d.
    tolerance, floor = SCORE_TOLERANCE.get(dtype, 4e-6), SCORE_FLOOR.get(dtype, 1e-10)
    for field, got, wanted in zip(Rows._fields, found, expected, strict=False):
        yield Check(name, label, field, elementwise_error(got, wanted, floor=floor), tolerance)
    yield Check(name, label, "top", float((found.top != top).sum()), 0)
    (gradient,) = torch.autograd.grad([*found[:4]], leaf, [*upstream])
    (wanted,) = torch.autograd.grad(expected, reference, upstream)
    yield Check(name, label, "gradient", gradient_error(gradient, wanted), GRADIENT_TOLERANCE[dtype])


def gradient_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest of each row."""
    size = expected.detach().double().abs().amax(-1, keepdim=True)
    return elementwise_error(found, expected, size, max(floor, GRADIENT_FLOOR[found.dtype]))


def check_event_bins(
    name: str, device: torch.device, dtype: torch.dtype, n: int, backend: Backend = "auto"
) -> Iterator[Check]:
    """Sums and gradients of events, with and without weights and ECD, for both edge rules."""
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.rand, n, generator=generator, device=device, dtype=torch.float64)
    confidence = random().to(dtype)
    confidence[: 2 * N_BINS] = (torch.arange(2 * N_BINS, device=device).double() / (2 * N_BINS)).to(dtype)[:n]
    confidence[-1:] = 1.0
    outcome, weights, ecd = random() < confidence, random(), random() - 0.5
    weights[::5] = 0
    for right in (False, True):
        for columns in ((outcome,), (outcome, weights), (outcome.double(), weights, ecd)):
            given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in (confidence, *columns)]
            repeated = [x.clone().requires_grad_() if x.is_floating_point() else x for x in (confidence, *columns)]
            found = event_bins(*given, n_bins=N_BINS, right=right, backend=backend)
            expected = whole_event_bins(*repeated, right=right)
            what = f"{len(columns)} columns{', right' if right else ''}"
            yield Check(name, label_of(dtype), what, elementwise_error(found, expected, floor=1e-9), EVENT_TOLERANCE)
            upstream = torch.rand(found.shape, generator=generator, device=device, dtype=torch.float64)
            pairs = zip(
                torch.autograd.grad(found, [x for x in given if x.requires_grad], upstream),
                torch.autograd.grad(expected, [x for x in repeated if x.requires_grad], upstream),
                strict=True,
            )
            error = max(elementwise_error(a, b, floor=1e-6) for a, b in pairs)
            yield Check(name, label_of(dtype), f"gradients of {what}", error, GRADIENT_TOLERANCE[dtype])


def whole_event_bins(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None = None,
    ecd: Tensor | None = None,
    *,
    right: bool,
) -> Tensor:
    """Return sums over the events of each bin, one bin after another."""
    index = bins_by_search(confidence.detach().double(), right)
    columns = [torch.ones_like(confidence), confidence, outcome, *(() if ecd is None else (ecd,))]
    w = torch.ones_like(confidence, dtype=torch.float64) if weights is None else weights
    weighed = [torch.where(w == 0, 0.0, w * x.double()) for x in columns]
    return torch.stack([torch.stack([x[index == b].sum() for b in range(N_BINS)]) for x in weighed])


def bins_by_search(values: Tensor, right: bool) -> Tensor:
    """Return the bin of float64 values by a search among the edges."""
    edges = torch.arange(1, N_BINS, dtype=torch.float64, device=values.device) / N_BINS
    return torch.bucketize(values, edges, right=not right)


def check_class_bins(
    name: str, device: torch.device, dtype: torch.dtype, n: int, c: int, from_logits: bool, backend: Backend = "auto"
) -> Iterator[Check]:
    """Sums of all classes and their gradient.

    Rows with an entry so close to a bin edge that float32 may round it across have weight 0, or are left out.
    """
    values, target = predictions(device, dtype, n, c, from_logits, seed=2)
    weights = torch.rand(n, generator=torch.Generator(device).manual_seed(3), device=device, dtype=torch.float64)
    near = ((q := whole_rows(values, target, from_logits)[0]) * N_BINS).round()
    safe = (((q * N_BINS - near).abs() > _NEAR * near) | (near == 0) | (near == N_BINS)).all(-1)
    del q, near
    weights[~safe] = 0
    options = {"from_logits": from_logits, "backend": backend}
    for what, held, w in (("weighted", slice(None), weights), ("plain", safe, None)):
        leaf, reference, labels = values[held].clone().requires_grad_(), values[held].requires_grad_(), target[held]
        with torch.no_grad():
            of_rows = rows(leaf, labels, **options)  # type: ignore[arg-type]
        found = class_bins(leaf, labels, w, of_rows, n_bins=N_BINS, **options)  # type: ignore[arg-type]
        upstream = torch.rand(c, N_BINS, device=device, dtype=torch.float64)
        expected, product = whole_class_bins(reference, labels, w, from_logits, upstream)
        tolerance = SUM_TOLERANCE.get(dtype, 4e-6)
        for column, part in enumerate(("weight", "confidence", "outcome")):
            # Errors are relative to the sum over bins, because some bins are nearly empty.
            size = expected[:, column].abs().sum(-1, keepdim=True)
            error = elementwise_error(found[:, column], expected[:, column], size, floor=1e-9)
            yield Check(name, label_of(dtype), f"{part}, {what}", error, tolerance)
        if len(labels):
            (gradient,) = torch.autograd.grad(found[:, 1], leaf, upstream)
            (wanted,) = torch.autograd.grad(product, reference)
            # A gradient is a difference of numbers of size 1, like `upstream`.
            error = gradient_error(gradient, wanted, floor=1e-2)
            yield Check(name, label_of(dtype), f"gradient, {what}", error, GRADIENT_TOLERANCE[dtype])


def whole_class_bins(
    values: Tensor, target: Tensor, weights: Tensor | None, from_logits: bool, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """Return sums `(C, 3, B)`, bin by bin, and the product of those of confidence with `upstream`, differentiable."""
    q, _, _ = whole_rows(values, target, from_logits)
    w = torch.ones(len(q), 1, dtype=q.dtype, device=q.device) if weights is None else weights.unsqueeze(-1)
    index = bins_by_search(q.detach(), False)
    hit = torch.nn.functional.one_hot(target, q.shape[-1])
    with torch.no_grad():
        columns: list[Callable[[], Tensor]] = [lambda: w.expand_as(q), lambda: w * q, lambda: w * hit]
        sums = [[torch.where(index == b, column(), 0.0).sum(0) for b in range(N_BINS)] for column in columns]
    slope = upstream.flatten()[index + N_BINS * torch.arange(q.shape[-1], device=q.device)]
    return torch.stack([torch.stack(part, -1) for part in sums], 1), (w * q * slope).sum()
