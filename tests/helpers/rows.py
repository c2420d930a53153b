"""Random rows, gradients and memory layouts for tests of the row operation."""

import torch

from torchcalib.ops.softmax_stats import RowStatistics, rows
from torchcalib.ops.softmax_stats.formula import row_formula


def definition(values, target, from_logits):
    """Compute the readable formula in float64."""
    scores, top = row_formula(values.double(), target, from_logits)
    return RowStatistics(*scores.unbind(-2), top)


def sample(n, n_classes, from_logits, dtype=torch.float32, scale=3.0, seed=0):
    """Return rows, and labels that are the top class in at least half of them."""
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(n, n_classes, generator=generator)
    values = (values if from_logits else values.double().softmax(-1)).to(dtype)
    target = torch.randint(0, n_classes, (n,), generator=generator)
    return values, torch.where(torch.arange(n) % 2 == 0, values.argmax(-1), target)


def close(found, expected, **tolerance):
    for name, a, b in zip(RowStatistics._fields, found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


def equal(found, expected):
    for name, a, b in zip(RowStatistics._fields, found, expected, strict=True):
        assert torch.equal(a, b), name


def with_gradient(values, target, from_logits, backend, of=None):
    """Return scores, and the gradient of their sum. `of` has a weight for each of the four scores."""
    leaf = values.detach().requires_grad_()  # detach() keeps the layout
    found = rows(leaf, target, from_logits=from_logits, backend=backend)
    weights = torch.tensor([0.3, -0.7, 0.5, 0.9] if of is None else of, dtype=torch.float64)
    sum(w * score.sum() for w, score in zip(weights, found[:4], strict=True)).backward()
    return found, leaf.grad


def layouts(values):
    """Yield the same rows in different memory layouts, by name."""
    n, n_classes = values.shape
    yield "class axis first", values.T.contiguous().T
    yield "every other row", torch.stack((values, values), 1)[:, 0]
    yield "every other column", torch.stack((values, values), -1)[..., 0]
    yield "shifted by one number", torch.cat((values.new_zeros(1), values.flatten()))[1:].view(n, n_classes)
    yield "a part of wider rows", torch.cat((values, values[:, :3]), -1)[:, :n_classes]
    yield "in between others", torch.cat((values[:7], values, values[:5]))[7 : 7 + n]


def rows_with_invalid_distributions(n_classes, dtype=torch.float32):
    """Return rows 1 and 2 with wrong sums, rows 3 to 6 with a negative number, a number above 1, NaN, and infinity."""
    q = torch.zeros(8, n_classes, dtype=dtype)
    q[:, 0], q[:, -1] = 0.25, 0.75
    q[1, 0], q[2, 0] = 0.28125, 0.21875
    q[3, 0], q[3, 1] = -0.25, 0.5
    q[4, 0], q[4, -1] = 1.03125, 0
    q[5, 1], q[6, 0] = torch.nan, torch.inf
    return q, torch.zeros(8, dtype=torch.int64)
