"""Laws of simulated data sets of a binary task: confidences, true probabilities and outcomes, by name."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Generator, Tensor

import torchcalib as tc
from benchmarks.study import batches
from torchcalib.core.sums import BinStats

AT_ONCE = 2**22  # samples
LARGE = 2**18  # samples for expected values

Draw = Callable[[int, Generator], Tensor]
"""Function of a number of samples that draws confidences."""


def random(*shape: int, g: Generator) -> Tensor:
    return torch.rand(*shape, generator=g, dtype=torch.float64)


def normal(*shape: int, g: Generator) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def beta(a: float, b: float, n: int, g: Generator) -> Tensor:
    """Draw from beta(a, b): x / (x + y) for gamma variables."""
    x, y = (torch._standard_gamma(torch.full((n,), k, dtype=torch.float64), generator=g) for k in (a, b))
    return x / (x + y)


def power(a: float, b: float, n: int, g: Generator) -> Tensor:
    """Draw from beta(a, 1) or beta(1, b), by inversion."""
    u = random(n, g=g)
    return u ** (1 / a) if b == 1 else 1 - u ** (1 / b)


def two_values(n: int, g: Generator) -> Tensor:
    return torch.where(torch.rand(n, generator=g) < 0.5, 0.2, 0.9).double()


def many_certain(n: int, g: Generator) -> Tensor:
    kind, p = random(2, n, g=g)
    return torch.where(kind < 0.3, 0.0, torch.where(kind < 0.6, 1.0, p))


def mixture(n: int, g: Generator) -> Tensor:
    """Draw from beta(2, 8) or beta(8, 2) with equal probability: order statistics of 9 uniform numbers."""
    ranks = random(n, 9, g=g).sort(-1).values
    return torch.where(torch.rand(n, generator=g) < 0.5, ranks[:, 1], ranks[:, 7])


def rare(n: int, g: Generator) -> Tensor:
    """Draw from beta(0.5, 20): x / (x + y) for gamma variables x with shape 0.5 and y with shape 20."""
    x = normal(n, g=g).square() / 2
    return x / (x - random(n, 20, g=g).log().sum(-1))


def normal_log_odds(mean: float, deviation: float, n: int, g: Generator) -> Tensor:
    return (mean + deviation * normal(n, g=g)).sigmoid()


LAWS: dict[str, Draw] = {
    "uniform": partial(power, 1, 1),
    "near 0: beta(1, 12)": partial(power, 1, 12),
    "near 1: beta(8, 1)": partial(power, 8, 1),
    "two values": two_values,
    "60% exactly 0 or 1": many_certain,
    "beta mixture": mixture,
    "normal log-odds": partial(normal_log_odds, 0.0, 1.5),
    "rare: beta(0.5, 20)": rare,
}
CLASSES = {"top label of 10 classes": 10, "top label of 100 classes": 100, "one of 3 classes": 3}
"""Number of classes of further laws: confidences of the top class, or of the first one, of normal logits."""


def moved(scale: float, shift: float, p: Tensor) -> Tensor:
    return (scale * p.logit() + shift).sigmoid()


TRUTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "calibrated": lambda p: p,
    **{f"log-odds times {scale}": partial(moved, scale, 0.0) for scale in (0.7, 1.3, 1.5)},
    **{f"log-odds plus {shift}": partial(moved, 1.0, shift) for shift in (0.3, 0.4)},
    "from 0.02 to 0.98": lambda p: p.clamp(0.02, 0.98),
    "0.3 lower in (0.55, 0.8)": lambda p: torch.where((p > 0.55) & (p < 0.8), p - 0.3, p),
}


def drawn(law: str, truth: str, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    """Draw confidences and the true probabilities of their events."""
    if law not in CLASSES:
        p = LAWS[law](n, g)
        return p, TRUTHS[truth](p)
    logits = 2 * torch.randn(n, CLASSES[law], generator=g).double()
    q = logits.softmax(-1)
    index = q.argmax(-1, keepdim=True) if law.startswith("top") else torch.zeros(n, 1, dtype=torch.int64)
    p = q.gather(-1, index).squeeze(-1)
    if truth.startswith("log-odds times"):
        return p, (float(truth.split()[-1]) * logits).softmax(-1).gather(-1, index).squeeze(-1)
    return p, TRUTHS[truth](p)


def expected(law: str, truth: str, n: int = LARGE) -> tuple[Tensor, Tensor]:
    """Draw many confidences and true probabilities, for expected values."""
    return drawn(law, truth, n, torch.Generator().manual_seed(2))


def data_sets(law: str, truth: str, n: int, n_sets: int, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield confidences and outcomes of data sets `(d, N)`, in batches."""
    g = torch.Generator().manual_seed(seed)
    for d in batches(n_sets, AT_ONCE // n):
        p, true = (x.reshape(d, n) for x in drawn(law, truth, d * n, g))
        yield p, (random(*p.shape, g=g) < true).long()


def updated(cls: type[tc.ECE], p: Tensor, target: Tensor, weights: Tensor | None = None) -> tc.ECE:
    """Return a metric of the data sets `(D, N)`."""
    metric = cls(task="binary", batch_shape=(len(p),))
    metric.update(p, target, weights=weights)
    return metric


def bins_of(p: Tensor, target: Tensor, weights: Tensor | None = None) -> BinStats:
    """Return the bins of data sets `(D, N)`, or of one `(N,)`."""
    return updated(tc.ECE, *(x if x.dim() > 1 else x.unsqueeze(0) for x in (p, target)), weights).statistic()
