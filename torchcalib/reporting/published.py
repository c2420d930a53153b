"""Calibration errors of stated confidences as benchmarks publish them, with their deviations from the definition.

HLE and BrowseComp-Plus use the code of Hendrycks et al. (arXiv 1812.04606) for the root mean squared calibration error:
bins of 100 answers in the order of their confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchcalib.results.audit import Published

Array = np.ndarray[Any, np.dtype[np.float64]]

_SIZE = 100  # answers in a bin of HLE
_N_BINS = 10  # of BrowseComp in Inspect Evals


def _hendrycks(confidence: Array, correct: Array, has_last: bool = False) -> float:
    """Return the root mean squared error over bins of 100 answers, of which the last one has up to 199 and is left out.

    `argsort` is not stable, so that the order of equal confidences, and the value, depend on it as in the benchmarks.
    """
    n = len(confidence)
    order = np.argsort(confidence)
    starts = np.arange(max(1, n // _SIZE)) * _SIZE
    sizes = np.diff([*starts, n])
    gaps = np.add.reduceat((correct - confidence)[order], starts) / sizes
    kept = slice(None) if has_last else slice(-1)
    return math.sqrt(float((sizes * gaps**2)[kept].sum()) / n)


def _equal_width(confidence: Array, correct: Array) -> float:
    """Return the expected calibration error over 10 bins (a, b]. The first one contains 0."""
    edges = np.linspace(0.0, 1.0, _N_BINS + 1)
    index = np.clip(np.digitize(confidence, edges, right=True) - 1, 0, _N_BINS - 1)
    return float(np.abs(np.bincount(index, correct - confidence, _N_BINS)).sum()) / len(confidence)


class _Benchmark(NamedTuple):
    name: str
    compute: Callable[[Array, Array], float]
    complete: Callable[[Array, Array], float]  # without the deviations
    missing: float | None  # confidence of answers without one; None leaves them out
    decimals: int | None  # of the published percentage
    deviations: tuple[str, ...]


_LAST = "The bin of the most confident answers, with 100 to 199 of them, is left out."
_MISSING = "An answer without a confidence counts as 100%."

BENCHMARKS = {
    "hle": _Benchmark(
        "HLE", _hendrycks, lambda c, y: _hendrycks(c, y, True), 1.0, 0, (_LAST, _MISSING, "Rounded to whole percent.")
    ),
    "browsecomp": _Benchmark("BrowseComp (Inspect Evals)", _equal_width, _equal_width, 1.0, None, (_MISSING,)),
    "browsecomp_plus": _Benchmark(
        "BrowseComp-Plus", _hendrycks, lambda c, y: _hendrycks(c, y, True), None, 2, (_LAST, "0 below 100 answers.")
    ),
}
"""Benchmarks by the argument `as_published` of `torchcalib.audit`."""


def published(benchmark: str, confidences: Sequence[float], outcomes: Sequence[float]) -> Published:
    """Return the number that a benchmark publishes for confidences, NaN if missing, and outcomes 0 or 1."""
    kind = BENCHMARKS[benchmark]
    confidence, correct = np.asarray(confidences, np.float64), np.asarray(outcomes, np.float64)
    is_missing = np.isnan(confidence)
    given, right = confidence[~is_missing], correct[~is_missing]
    if kind.missing is not None:
        confidence = np.where(is_missing, kind.missing, confidence)
    else:
        confidence, correct = given, right
    value = 100 * kind.compute(confidence, correct) if len(confidence) else math.nan
    return Published(
        benchmark=kind.name,
        value=value if kind.decimals is None else round(value, kind.decimals) if value == value else value,
        complete=100 * kind.complete(given, right) if len(given) else math.nan,
        n=len(confidence),
        n_missing=int(is_missing.sum()),
        deviations=kind.deviations,
    )
