"""Definition of the sums over a batch, and of the states that consist of them.

Let w be the weight of a row, 0 for an ignored or invalid row. The sums of a batch are one vector:

- Number of invalid rows, and sum of w.
- Sum of w s for each statistic s in `SCORES`.
- Sums over the events in each bin, for each `BinRule`, of w, w p, w o, w v, w r, w^2 v and w^2.

An event has confidence p and outcome o, v = p (1 - p) and r = (o - p)^2. A number of a state is a sum of terms. A term
is a factor times one of these sums.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.bin_sums.formula import Norm
from torchcalib.ops.host_values import constant

INVALID, WEIGHT, FIRST_SCORE = range(3)
"""Indices of the first sums."""

SCORES = ("log_prob", "squared_error", "neg_entropy", "confidence", "hit")
"""Statistics of a row: the first four `softmax_stats.RowStatistics`, and whether the most probable class is true.

Binary ones are those of two classes, except for the squared error (y - p)^2 of the label y.
"""

N_TOTALS = FIRST_SCORE + len(SCORES)
N_QUANTITIES, FIRST_SQUARE = 7, 5  # number of quantities of each bin, and the first one with w^2
BINS = 16  # largest number of bins that a Triton program sums


class BinRule(NamedTuple):
    """Bins of the events of a batch: `segments.bin_index` of their confidence."""

    n_bins: int  # number of bins B
    right: bool  # whether bins include their right edge
    of_top: bool  # whether the event is that the most probable class is true, instead of y=1


class Columns(NamedTuple):
    """Columns of a batch of N rows with labels."""

    values: Tensor  # probabilities or logits: binary `(N,)`, multi-class `(N, C)`
    target: Tensor  # labels of any integer dtype or bool `(N,)`
    weights: Tensor | None  # weights of any real dtype `(N,)`, or None for 1. Rows with weight 0 are ignored.
    from_logits: bool
    ignore_index: int | None = None  # label of ignored rows
    tolerance: float = math.inf  # largest accepted |1 - sum| of multi-class probabilities


class Demand(NamedTuple):
    """Sums of a batch that the sums `(F, K)` of a metric consist of."""

    rule: BinRule | None  # bins of its events; None for w and a score
    quantities: tuple[int, ...] = ()  # quantities of each bin, in the order of the state
    coefficients: tuple[float, ...] = ()  # factors of the `SCORES`, whose sum is the score


Terms = tuple[tuple[int, float], ...]
"""Indices of sums and their factors, whose products are added."""


class Plan(NamedTuple):
    """Sums that states consist of."""

    rules: tuple[BinRule, ...]
    scores: frozenset[str]  # members of `SCORES` that are needed
    is_squared: bool  # whether the sums of w^2 and w^2 v are needed
    tiles: Tensor  # bins of each Triton program, int64 `(T, 5)`: see `_tiles`
    edges: tuple[Tensor, ...]  # inner edges of the bins of each rule, float64 `(B - 1,)`
    terms: Tensor  # index of the sum of each term, int64 `(K, n)`
    factors: Tensor  # factor of each term, float64 `(K, n)`; 0 for an absent term


class BinnedError(NamedTuple):
    """Norm of the gaps over the bins of the only rule of a `Plan`; see `bin_sums.bin_errors`."""

    norm: Norm
    sums: slice  # place of the sums of the batch `(F, B)` in the states after it, whose first number is INVALID
    drops_invalid: bool  # whether invalid rows are ignored, instead of making the error NaN
    dtype: torch.dtype  # of the error: float32 or float64


class MeanScore(NamedTuple):
    """Weighted mean of a sum of `SCORES` over the valid rows of a batch."""

    coefficients: tuple[float, ...]  # factors of the `SCORES`
    sums: slice  # place of the sums of w and w s in the states after the batch


def term_indices(rules: tuple[BinRule, ...], rule: BinRule, quantity: int) -> range:
    """Return the indices of the sums of a quantity over the bins of a rule."""
    before = sum(each.n_bins for each in rules[: rules.index(rule)])
    start = N_TOTALS + N_QUANTITIES * before + quantity * rule.n_bins
    return range(start, start + rule.n_bins)


def plan(rules: tuple[BinRule, ...], terms: Sequence[Terms], device: torch.device) -> Plan:
    """Return the plan for states with the given terms of each number."""
    used = {index for number in terms for index, _ in number}
    squares = {k for rule in rules for q in range(FIRST_SQUARE, N_QUANTITIES) for k in term_indices(rules, rule, q)}
    n_terms = max(map(len, terms))
    absent = (INVALID, 0.0)  # the number of invalid rows is finite
    full = [(*number, *[absent] * (n_terms - len(number))) for number in terms]
    indices, factors = ([[number[k][part] for number in full] for k in range(n_terms)] for part in (0, 1))
    edges = [[k / rule.n_bins for k in range(1, rule.n_bins)] for rule in rules]
    return Plan(
        rules,
        frozenset(name for k, name in enumerate(SCORES) if FIRST_SCORE + k in used),
        not used.isdisjoint(squares),
        constant(_tiles(rules), torch.int64, device),
        tuple(constant(inner, torch.float64, device) for inner in edges),
        constant(indices, torch.int64, device),
        constant(factors, torch.float64, device),
    )


def _tiles(rules: tuple[BinRule, ...]) -> list[tuple[int, ...]]:
    """Return the work of the Triton programs for a piece of the rows: the totals, then bins of the rules.

    A tile has the numbers n_bins, right and of_top of a rule, and the first bin of the program. The last number is the
    index of the first sum of the rule.
    """
    tiles: list[tuple[int, ...]] = [(1, 0, 0, 0, 0)]
    for rule in rules:
        start = term_indices(rules, rule, 0).start
        tiles += [(*map(int, rule), first, start) for first in range(0, rule.n_bins, BINS)]
    return tiles


def n_sums(rules: tuple[BinRule, ...]) -> int:
    """Return the number of sums of a batch."""
    return N_TOTALS + N_QUANTITIES * sum(rule.n_bins for rule in rules)
