"""Sequential tests of calibrated and miscalibrated streams: `python -m benchmarks.sequential`.

A run is a stream of 100,000 rows. A false alarm is evidence of at least 1 / level at any look. The delay is the number
of rows until an alarm.
"""

import math
import time
from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from benchmarks.laws import LAWS, Draw, normal, normal_log_odds, random
from benchmarks.peers import rows_until_alarm
from benchmarks.study import Cell, Found, Part, Row, Study, main, percent
from torchcalib import SequentialTest
from torchcalib.inference.sequential import after_looks, log_evidence, log_ratios

ROWS, LEVELS = 100_000, (0.01, 0.05)
LOOKS = {"every row": 1, "100 rows": 100, "10,000 rows": 10_000}
STREAMS: dict[str, Draw] = {
    "normal log-odds": LAWS["normal log-odds"],
    "rare: about 1 of 1,000": lambda n, g: normal_log_odds(-7.5, 1.0, n, g),
    "extreme: log-odds of deviation 8": lambda n, g: normal_log_odds(0.0, 8.0, n, g),
    "60% exactly 0 or 1": LAWS["60% exactly 0 or 1"],
}


def evidence(p: Tensor, y: Tensor, size: int, restart: bool = False) -> Tensor:
    """Return the logarithm of the evidence after each look at `size` rows, `(..., looks)`, for rows `(..., N)`."""
    ratios = log_ratios(p.logit(), y.double()).unflatten(-1, (-1, size)).sum(-1)
    columns = torch.cat((torch.ones_like(ratios[..., :1, :]), ratios), -2)
    before = torch.full_like(ratios[..., :1], -math.inf if restart else 0.0)
    return log_evidence(after_looks(before, columns, restart).transpose(-1, -2), averages=False)


def false_alarms(law: str, n_sets: int) -> list[list[str]]:
    """Return the share of runs with an alarm, for each number of rows of a look, at each level."""
    g, largest = Generator().manual_seed(3), []
    for _ in range(n_sets):
        p = STREAMS[law](ROWS, g)
        path = evidence(p, random(ROWS, g=g) < p, 1)
        largest.append([float(path[size - 1 :: size].max()) for size in LOOKS.values()])
    found = torch.tensor(largest, dtype=torch.float64)
    return [[percent(found[:, k] >= -math.log(level), 2) for level in LEVELS] for k in range(len(LOOKS))]


def table_of_alarms(found: dict[Cell, Found]) -> Iterator[list[Row]]:
    yield [(*cell, looks, *row) for cell, of in found.items() for looks, row in zip(LOOKS, of.values, strict=True)]


MOST_LOOKS = 5_000


def run_lengths(law: str, size: int, level: float, n_sets: int) -> list[str]:
    """Return the mean number of looks until a false alarm of a detector of changes, at most 5,000 for each run."""
    g, lengths = Generator().manual_seed(4), []
    for _ in range(n_sets):
        p = STREAMS[law](MOST_LOOKS * size, g)
        is_above = evidence(p, random(len(p), g=g) < p, size, restart=True) >= -math.log(level)
        lengths.append(int(is_above.byte().argmax()) + 1 if bool(is_above.any()) else MOST_LOOKS)
    return [f"{1 / level:,.0f}", f"{sum(lengths) / len(lengths):,.0f}"]


LOOK = 50  # rows of a look in the comparison with probcal
FAULTS = {"temperature 1.5": (1 / 1.5, 0.0), "temperature 1.2": (1 / 1.2, 0.0), "shift 0.3": (1.0, 0.3)}
MOST_ROWS = {"temperature 1.5": 3_000, "temperature 1.2": 10_000, "shift 0.3": 6_000}


def delays(fault: str, n_sets: int) -> list[str]:
    """Return the median number of rows until an alarm at 5%, of `SequentialTest` and of the monitor of probcal."""
    g = Generator().manual_seed(5)
    slope, shift = FAULTS[fault]
    z = 1.5 * normal(n_sets, MOST_ROWS[fault], g=g)
    p, y = z.sigmoid(), (random(*z.shape, g=g) < (slope * z + shift).sigmoid()).double()
    is_above = evidence(p, y, LOOK) >= -math.log(0.05)
    ours = torch.where(is_above.any(-1), LOOK * (is_above.byte().argmax(-1) + 1), MOST_ROWS[fault])
    theirs = torch.tensor([rows_until_alarm(*run, LOOK) for run in zip(p, y, strict=True)])
    return [f"{int(found.median()):,}" for found in (ours, theirs)]


def costs(n_updates: int, n_sets: int) -> list[str]:  # noqa: ARG001 - one stream
    """Return the time of an update of 1,000 rows, in milliseconds, and the size of the state after other updates."""
    g = Generator().manual_seed(6)
    p = normal_log_odds(0.0, 1.5, 1_000, g)
    y = (random(1_000, g=g) < p).long()
    test = SequentialTest(task="binary")
    for _ in range(n_updates):
        test.update(p[:1], y[:1])
    for _ in range(20):
        test.update(p, y)
    times = []
    for _ in range(40):
        start = time.process_time()
        for _ in range(10):
            test.update(p, y)
        times.append((time.process_time() - start) / 10)
    return [f"{1e3 * sorted(times)[20]:.2f}", f"{len(test.state_bytes()):,}"]


def differences(shards: int, n_sets: int) -> list[str]:
    """Return the largest relative difference of the evidence of merged shards from that of one stream."""
    g, worst = Generator().manual_seed(7), 0.0
    for _ in range(min(n_sets, 100)):
        p = normal_log_odds(0.0, 1.5, 20_000, g)
        y = (random(20_000, g=g) < (0.8 * p.logit()).sigmoid()).long()
        one, whole = SequentialTest(task="binary"), SequentialTest(task="binary")
        for rows in torch.arange(20_000).split(500):
            one.update(p[rows], y[rows])
        for k in range(shards):
            shard = SequentialTest(task="binary")
            shard.update(p[k::shards], y[k::shards])
            whole.merge_state(shard)
        worst = max(worst, float((whole.compute() - one.compute()).abs() / one.compute().abs()))
    return [f"{worst:.0e}"]


STUDY = Study(
    "sequential",
    1_000,
    [
        Part([(law,) for law in STREAMS], false_alarms, table_of_alarms),
        Part([("normal log-odds", 10, 0.01), ("normal log-odds", 100, 0.002)], run_lengths, share=lambda _: 0.3),
        Part([(fault,) for fault in FAULTS], delays, share=lambda _: 0.1),
        Part([(1,), (100_000,)], costs, name="updates"),
        Part([(2,), (16,)], differences, name="shards"),
    ],
)

if __name__ == "__main__":
    main(STUDY)
