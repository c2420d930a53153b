"""Frequency of right decisions of reports in simulations: `python -m benchmarks.diagnosis`, in several hours."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchcalib as tc
from benchmarks import study
from benchmarks.laws import normal, random
from benchmarks.study import Found, Part, Row, Study
from torchcalib.core.arguments import Task
from torchcalib.results.decision import Decision

SIZES = (300, 1000, 5000)
NULL_SIZES = (100, 1000, 5000, 20_000)


class Data(NamedTuple):
    """Log-odds or logits, labels, and groups or None."""

    logits: Tensor
    labels: Tensor
    groups: Tensor | None = None


Simulation = Callable[[torch.Generator, int], Data]


def decided(task: Task, data: Data) -> Decision:
    """Return the decision of a report without intervals, which do not change the cause."""
    options: dict[str, Any] = {"task": task, "from_logits": True, "with_intervals": False, "with_classes": False}
    return tc.report(data.logits, data.labels, groups=data.groups, **options).decision


def _outcomes(g: torch.Generator, log_odds: Tensor) -> Tensor:
    return torch.bernoulli(log_odds.sigmoid(), generator=g).long()


def _labels(g: torch.Generator, logits: Tensor) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)


def _law(
    change: Callable[..., Tensor] = lambda z: z,
    n_classes: int = 2,
    *,
    n_labels: int = 0,
    centre: float = 0.0,
    n_groups: int = 0,
    noise: float = 0.0,
    flipped: bool = False,
) -> Simulation:
    """Return a simulation of logits with standard deviation 2.

    `change` is applied to logits, and group numbers if there are groups, after the labels were drawn. A fraction
    `noise` of the labels is random, or the other label of a binary task if `flipped`.
    """

    def simulate(g: torch.Generator, n: int) -> Data:
        is_binary = n_classes == 2 and not n_labels
        z = centre + 2 * (normal(n, g=g) if is_binary else normal(n, n_labels or n_classes, g=g))
        groups = torch.randint(n_groups, (n,), generator=g) if n_groups else None
        labels = _outcomes(g, z) if is_binary or n_labels else _labels(g, z)
        if noise:
            drawn = 1 - labels if flipped else torch.randint(n_classes, (n,), generator=g)
            labels = torch.where(random(n, g=g) < noise, drawn, labels)
        of_rows = () if groups is None else (groups if is_binary else groups[:, None],)
        return Data(change(z, *of_rows), labels, groups)

    return simulate


def _noisy_logits(g: torch.Generator, n: int) -> Data:
    z = 2 * normal(n, g=g)
    return Data(z + 1.5 * normal(n, g=g), _outcomes(g, z))


def _half(g: torch.Generator, n: int) -> Data:
    z = 2 * normal(n, g=g)
    return Data(torch.where(random(n, g=g) < 0.5, 2 * z, z / 2), _outcomes(g, z))


def _constant(g: torch.Generator, n: int) -> Data:
    return Data(torch.full((n,), -1.0, dtype=torch.float64), _outcomes(g, torch.full((n,), -1.0)))


def _confused(g: torch.Generator, n: int) -> Data:
    """Replace 30% of labels by class 2 where class 0 is predicted."""
    z = 2 * normal(n, 10, g=g)
    is_changed = (z.argmax(-1) == 0) & (random(n, g=g) < 0.3)
    return Data(z, torch.where(is_changed, 2, _labels(g, z)))


def _similar(g: torch.Generator, n: int) -> Tensor:
    """Return logits of 5 classes, of which classes 0 and 1 as well as 2 and 3 are similar."""
    common = 2 * normal(n, 3, g=g)
    return common[:, [0, 0, 1, 1, 2]] + normal(n, 5, g=g)


def _uniform_tail_of_similar(g: torch.Generator, n: int) -> Data:
    z = _similar(g, n)
    return Data(_uniform_tail(z), _labels(g, z))


def _clipped(z: Tensor, smallest: float = 0.01) -> Tensor:
    return z.sigmoid().clamp(smallest, 1 - smallest).logit()


def _rounded(z: Tensor) -> Tensor:
    return (z.sigmoid() * 200).round().clamp(1, 199).div(200).logit()


def _swapped(z: Tensor) -> Tensor:
    """Swap the logits of classes 3 and 4 where none of them is the top class."""
    is_below = (z.argmax(-1) != 3) & (z.argmax(-1) != 4)
    return torch.where(is_below.unsqueeze(-1), z[:, [0, 1, 2, 4, 3]], z)


def _ranks_swapped(z: Tensor) -> Tensor:
    """Swap the second and third largest logit of each row."""
    values, order = z.sort(-1, descending=True)
    values = torch.cat((values[:, :1], values[:, 2:3], values[:, 1:2], values[:, 3:]), -1)
    return torch.zeros_like(z).scatter(-1, order, values)


def _tail(z: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change the probabilities of the classes below the top label, and keep their sum."""
    q = z.softmax(-1)
    top = torch.nn.functional.one_hot(q.argmax(-1), q.shape[-1]).bool()
    rest = q.masked_fill(top, 0).sum(-1, keepdim=True)
    changed = change(z.masked_fill(top, -math.inf)).softmax(-1) * rest
    return torch.where(top, q, changed).log()


def _uniform_tail(z: Tensor) -> Tensor:
    return _tail(z, lambda rest: torch.where(rest.isinf(), rest, 0))


RANGES = ("uneven", "spread")
NONE = ("calibrated", "too little data")
FAULTS: dict[str, tuple[Task, Simulation, tuple[str, ...]]] = {
    "logits times 1.6": ("binary", _law(lambda z: 1.6 * z), ("over-confidence",)),
    "logits times 0.6": ("binary", _law(lambda z: 0.6 * z), ("under-confidence",)),
    "log-odds plus 0.6": ("binary", _law(lambda z: z + 0.6), ("class bias",)),
    "rare class, log-odds plus 1": ("binary", _law(lambda z: z + 1, centre=-3), ("class bias",)),
    "10% random labels": ("binary", _law(noise=0.1), ("label noise",)),
    "5% flipped labels": ("binary", _law(noise=0.05, flipped=True), ("label noise",)),
    "one group of 10: log-odds plus 2": ("binary", _law(lambda z, k: z + 2 * (k == 3), n_groups=10), ("bad group",)),
    "one group of 6: logits times 2.5": (
        "binary", _law(lambda z, k: z * (1 + 1.5 * (k == 3)), n_groups=6), ("bad group",),
    ),
    "gaps of 10 groups": ("binary", _law(lambda z, k: z + 0.25 * (k - 4.5), n_groups=10), ("bad group",)),
    "half times 2, half times 0.5": ("binary", _half, RANGES),
    "sine: z + sin 2z": ("binary", _law(lambda z: z + (2 * z).sin()), (*RANGES, "over-confidence")),
    "logits above 0.8 times 2": (
        "binary", _law(lambda z: torch.where(z > 1.386, 2 * z, z)), (*RANGES, "over-confidence", "class bias"),
    ),
    "times 3, clipped at 1% and 99%": ("binary", _law(lambda z: _clipped(3 * z)), ("over-confidence",)),
    "times 1.5, plus 0.6": ("binary", _law(lambda z: 1.5 * z + 0.6), ("over-confidence", "class bias")),
    "noise in log-odds": ("binary", _noisy_logits, ("over-confidence",)),
    "reversed": ("binary", _law(lambda z: -z), ("over-confidence",)),
    "constant prediction": ("binary", _constant, NONE),
    "rounded to 0.5%": ("binary", _law(_rounded), NONE),
    "clipped at 1% and 99%": ("binary", _law(_clipped), NONE),
    "logits times 1.5": ("multiclass", _law(lambda z: 1.5 * z, 10), ("over-confidence",)),
    "logits times 0.67": ("multiclass", _law(lambda z: 0.67 * z, 10), ("under-confidence",)),
    "logit of class 3 plus 1": ("multiclass", _law(lambda z: z + (torch.arange(10) == 3), 10), ("class bias",)),
    "10% random labels, 10 classes": ("multiclass", _law(n_classes=10, noise=0.1), ("label noise",)),
    "times 3 where class 3 is predicted": (
        "multiclass",
        _law(lambda z: torch.where((z.argmax(-1) == 3)[:, None], 3 * z, z), 10),
        ("bad class",),
    ),
    "30% of predicted class 0 are class 2": ("multiclass", _confused, ("confusion", "bad class")),
    "two classes swapped below the top": ("multiclass", _law(_swapped, 5), ("swapped classes",)),
    "2nd and 3rd class swapped": ("multiclass", _law(_ranks_swapped, 5), ("other classes",)),
    "two classes swapped": (
        "multiclass", _law(lambda z: z[:, [0, 1, 2, 4, 3]], 5), ("swapped classes",),
    ),
    "rest of the mass uniform": ("multiclass", _law(_uniform_tail, 5), NONE),
    "rest uniform, similar classes": ("multiclass", _uniform_tail_of_similar, ("confusion",)),
    "rest of the mass sharpened": (
        "multiclass", _law(lambda z: _tail(z, lambda rest: 2 * rest), 5), ("other classes",),
    ),
    "one group of 6: times 2.5, 5 classes": (
        "multiclass", _law(lambda z, k: z * (1 + 1.5 * (k == 3)), 5, n_groups=6), ("bad group",),
    ),
    "5 labels times 1.6": ("multilabel", _law(lambda z: 1.6 * z, n_labels=5), ("over-confidence",)),
    "one of 5 labels times 2.5": (
        "multilabel", _law(lambda z: z * (1 + 1.5 * (torch.arange(5) == 3)), n_labels=5), ("bad label",),
    ),
    "one of 5 labels plus 1": (
        "multilabel", _law(lambda z: z + (torch.arange(5) == 3), n_labels=5), ("bad label", "class bias"),
    ),
}  # fmt: skip
"""Faults: task, simulation, and the decisions that are right."""

CALIBRATED: dict[str, tuple[Task, Simulation]] = {
    "binary": ("binary", _law()),
    "binary, rare (4%)": ("binary", _law(centre=-5)),
    "binary, 8 groups": ("binary", _law(lambda z, _: z, n_groups=8)),
    "5 classes": ("multiclass", _law(n_classes=5)),
    "5 labels": ("multilabel", _law(n_labels=5)),
}


def cell(task: Task, simulate: Simulation, right: tuple[str, ...], n: int, sets: int) -> tuple[float, str]:
    """Return the fraction of right decisions, and the most frequent wrong one."""
    kinds: Counter[str] = Counter()
    for seed in range(sets):
        kinds[decided(task, simulate(torch.Generator().manual_seed(seed), n)).kind] += 1
    wrong = [(kind, k) for kind, k in kinds.most_common() if kind not in right]
    return sum(kinds[kind] for kind in right) / sets, f"{wrong[0][0]} {wrong[0][1] / sets:.1%}" if wrong else ""


def share_of_alarms(name: str, n: int, n_sets: int) -> float:
    task, simulate = CALIBRATED[name]
    return 1 - cell(task, simulate, NONE, n, n_sets)[0]


def part_of_sets(key: study.Cell) -> float:
    """Return a fifth of the data sets where a data set takes much time."""
    (task, _), n = CALIBRATED[key[0]], key[1]
    return 1 if n <= 1000 or (task != "multilabel" and n <= 5000) else 1 / 5


def decisions(name: str, n: int, n_sets: int) -> tuple[float, str]:
    return cell(*FAULTS[name], n, n_sets)


def by_name(found: dict[study.Cell, Found]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each name with the values of all sizes."""
    for name, of_sizes in groupby(found.items(), key=lambda item: item[0][0]):
        yield name, [each.values for _, each in of_sizes]


def alarms(found: dict[study.Cell, Found]) -> Iterator[list[Row]]:
    yield [(name, *(f"{share:.1%}" for share in shares)) for name, shares in by_name(found)]


def right_decisions(found: dict[study.Cell, Found]) -> Iterator[list[Row]]:
    yield [
        (FAULTS[name][0], name, ", ".join(FAULTS[name][2]), *(f"{share:.0%}" for share, _ in of_sizes), of_sizes[-1][1])
        for name, of_sizes in by_name(found)
    ]


STUDY = Study(
    "diagnosis",
    1_000,
    [
        Part(list(product(CALIBRATED, NULL_SIZES)), share_of_alarms, alarms, part_of_sets),
        Part(list(product(FAULTS, SIZES)), decisions, right_decisions, lambda _: 1 / 10),
    ],
)

if __name__ == "__main__":
    study.main(STUDY)
