"""Isotonic regression by the pool adjacent violators algorithm (PAVA), and PAVA with block constraints (PAVA-BC).

Both algorithms divide a sequence, sorted by score, into blocks of consecutive elements, and fit each block by its mean.
They differ in the rule for merging two neighbouring blocks. `formula` has the loops in Python. `numba` compiles them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.dispatch import Backend, choose, implementation
from torchcalib.ops.host_values import largest, value_if_available
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import operation

MANY = 128
"""Number of rows from which PAVA-BC in Python processes all rows at once, which takes as long as a loop over these."""
_MAX_STEPS = 2**15  # longest row that is processed this way
_AT_ONCE = 2**21  # number of elements that are processed at a time, which limits the memory


def block_ends(
    op: Literal["pava", "pava_bc"],
    begins: Tensor,
    positives: Tensor,
    n: Tensor,
    *,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Literal["code", "paper"] = "code",
    backend: Backend = "auto",
) -> Tensor:
    """Divide a sorted sample into the blocks of PAVA or PAVA-BC, and return the end of each block, int64 `(..., B)`.

    Block b consists of the elements from `ends[b - 1]` (0 for b = 0) to `ends[b] - 1`. Rows with fewer blocks are
    padded with empty blocks at the end.

    "pava" is isotonic least squares. Neighbouring blocks of equal mean are merged, so block means strictly increase.
    Means of counts are compared exactly.

    "pava_bc" bounds the block size ([TCE] Algorithms 2 and 3). Samples are processed in the order of their scores. The
    last two blocks are merged if they contain at most `n_min` samples together. They are also merged if they contain at
    most `n_max` samples and their means do not increase. The last `n_min` samples form the final block. It is merged
    with the previous block if they contain at most `n_max` samples together. The variants differ in this last step:

    - "code" (the authors' code, used for the tables of the paper) assumes that the previous block has `n_min` samples.
      Neighbouring blocks of equal mean stay separate.
    - "paper" uses the size of the previous block, and then merges neighbouring blocks of equal mean (Algorithm 3).

    Elements with equal scores form a tied group, which is never divided. Before merging, the final block consists of
    the fewest groups with at least `n_min` samples. A block contains `n_min` to `n_max` samples, with these exceptions:

    - With "code", the final block can exceed `n_max` by up to `n_min`.
    - With "paper", blocks of equal mean can exceed `n_max` after merging.
    - If `2 * n_min > n_max`, the block before the final one can be smaller than `n_min`.
    - A tied group larger than `n_max` is a block or part of the final block. In the final block, it can increase the
      excess over `n_max`.
    - A block stays below `n_min` if adding the next group would exceed `n_max`. It also stays below `n_min` if adding
      the group would exceed `n_min` and the group has a higher mean.

    `begins` is True at the first element of each tied group. `positives` and `n` are bool or integer `(..., M)`; for
    "pava" also floating-point, as sums of weights. Elements with 0 samples belong to the previous block. By default,
    `n_min` is max(1, N // 20) in a row of N samples, and `n_max` is max(1, N // 5). ValueError if `n_min` exceeds
    `n_max` in a row, or a row has no more than the given `n_min` samples. All backends give the same blocks; those
    requested explicitly, except "python", are limited to 3e9 samples.

    Sources: [TCE] Matsubara et al.: TCE: A test-based approach to measuring calibration error (UAI 2023), Algorithms 2,
    3; Ayer et al.: An empirical distribution function for sampling with incomplete information (1955).
    """
    low, high = _bounds(n.sum(-1), n_min, n_max) if op == "pava_bc" else (None, None)
    starts = block_starts(op, n, positives, backend, low, high, variant == "paper", begins)
    n_begun = starts.cumsum(-1, dtype=torch.int32)
    n_blocks = max(1, largest(n_begun[..., -1:], bound=n_begun.shape[-1]))  # an empty batch gets one block
    numbers = torch.ones_like(n_begun[..., :n_blocks]).cumsum(-1, dtype=torch.int32)
    return torch.searchsorted(n_begun, numbers, right=True)


@operation(
    "block_starts(str op, Tensor weight, Tensor values, str backend, Tensor? low=None, Tensor? high=None, "
    "bool paper=False, Tensor? begins=None) -> Tensor",
    fake=lambda op, weight, *_: torch.empty_like(weight, dtype=torch.bool),  # noqa: ARG005
)
def block_starts(
    op: Literal["pava", "pava_bc"],
    weight: Tensor,
    values: Tensor,
    backend: Backend,
    low: Tensor | None = None,
    high: Tensor | None = None,
    paper: bool = False,
    begins: Tensor | None = None,
) -> Tensor:
    """Return True at the first element of each block, bool `(..., M)`; the sizes `low` and `high` are one per row.

    `weight` and `values` are the numbers of samples and positives in the order of the scores. `begins` is None if no
    scores are equal.
    """
    n_rows, length = weight.shape[:-1].numel(), weight.shape[-1]
    are_many = op == "pava_bc" and n_rows >= MANY and length <= _MAX_STEPS
    # Many rows take about as long as `MANY` of them without compiled code.
    chosen = choose(op, weight.device.type, length * MANY if are_many else weight.numel(), backend)
    if not weight.numel():
        return torch.empty_like(weight, dtype=torch.bool)
    if _may_overflow(weight, values):
        chosen, are_many = "python" if backend == "auto" else chosen, False  # arbitrary precision
    columns = [column.detach().reshape(n_rows, length) for column in (weight, values)]
    given = [] if low is None or high is None else [low.flatten(), high.flatten()]
    tied = None if begins is None else begins.reshape(n_rows, length)
    if tied is not None and tied.device.type == "cpu" and bool(tied.all()):  # such as the runs of a simulation
        tied = None
    if chosen == "rounds" or (are_many and chosen == "python"):
        kind = weight.dtype if weight.is_floating_point() else torch.int64
        if tied is None:
            columns = [column.to(kind) for column in columns]
        else:  # sum tied groups first, so that each group is one element
            group = tied.cumsum(-1) - 1
            n_groups = largest(group[..., -1:] + 1, bound=length)
            zeros = torch.zeros((n_rows, n_groups), dtype=kind, device=group.device)
            columns = [zeros.scatter_add(-1, group, column.to(kind)) for column in columns]
        if chosen == "rounds":
            starts = _pava_rounds(*columns)
        else:
            of_rows = implementation(op, chosen).pava_bc_starts
            parts = zip(*(torch.split(x.long(), max(1, _AT_ONCE // length)) for x in (*columns, *given)), strict=True)
            starts = torch.cat([torch.from_numpy(of_rows(*_arrays(*part), paper)) for part in parts])
            starts = starts.to(weight.device, non_blocking=True)
        return (starts if tied is None else starts.gather(-1, group) & tied).view(weight.shape)
    # Other backends loop over the rows on the CPU.
    first = np.zeros((n_rows, length), dtype=np.bool_)
    arrays = _arrays(*columns, *given, *([] if tied is None else [tied]))
    arguments = [*arrays[:2], None if tied is None else arrays[-1], *(arrays[2:4] if given else [None, None]), paper]
    # The third and the last buffer, `start` and `ends`, contain indices.
    loop = implementation(op, chosen).starts_of_rows
    _call_loop(loop, chosen, arguments, [first], (True, True, False, True, True, False))
    return torch.from_numpy(first).to(weight.device, non_blocking=True).view(weight.shape)


def augmented_means(
    score: Tensor, begins: Tensor, positives: Tensor, n: Tensor, size: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the isotonic mean at a test sample that is added with label 0 or 1, as a function of its score.

    Return `knots` `(..., K)`, and the means `lower` and `upper`, float64 `(..., K + 1)`. Knots are the ascending scores
    where one of the means has a step. Let r be the number of knots at most the test score, and l the number of knots
    below it. Then the mean with label 0 is `lower[r]`, and the mean with label 1 is `upper[l]`. Rows with fewer knots
    are padded with +inf, and repeat their last mean. A row without samples has the means 0 and 1.

    Columns `(..., M)` are in the order of the scores, with samples (positive `n`) in the first `size` elements. Counts
    may be sums of weights; the test sample has weight 1. `begins` is True at the first element of each tied group. The
    loops run on the CPU, which synchronises other devices.

    Source: Vovk, Petej, Fedorova: Large-scale probabilistic predictors with and without guarantees of validity (2015),
    Algorithms 1 to 4.
    """
    lower, upper = augmented_fits(begins, positives, n, size, backend)
    has_step = (lower.diff() != 0) | (upper.diff() != 0)
    n_begun = has_step.cumsum(-1)
    n_knots = largest(n_begun[..., -1:], bound=n_begun.shape[-1])
    numbers = torch.ones_like(n_begun[..., :n_knots]).cumsum(-1)
    places = torch.searchsorted(n_begun, numbers)
    knots = pad(score, (0, 1), value=torch.inf).gather(-1, places)
    after = (places + 1).clamp(max=score.shape[-1])
    lower, upper = (torch.cat((x[..., :1], x.gather(-1, after)), -1) for x in (lower, upper))
    return knots.to(lower.dtype), lower, upper


@operation(
    "augmented_fits(Tensor begins, Tensor positives, Tensor n, Tensor size, str backend) -> (Tensor, Tensor)",
    fake=lambda begins, positives, n, size, backend: tuple(  # noqa: ARG005
        n.new_empty((*n.shape[:-1], n.shape[-1] + 1), dtype=wide_dtype(n.device)) for _ in range(2)
    ),
)
def augmented_fits(
    begins: Tensor, positives: Tensor, n: Tensor, size: Tensor, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Return the isotonic means at a test sample with label 0 and with label 1, each `(..., M + 1)`.

    Element i + 1 of the first result is the mean for scores from element i up to below the next score. Element i + 1 of
    the second result is the mean for scores above element i up to the next score.
    """
    chosen = choose("augmented", n.device.type, n.numel(), backend)
    if backend == "auto" and _may_overflow(n, n):
        chosen = "python"  # arbitrary precision
    if n.is_floating_point():  # in a sum that is not exact, the test sample of weight 1 would be lost
        total = n.sum(-1, keepdim=True)
        factor = torch.where(total > 2.0**53, 2.0**40 / total, 1)
        positives, n = positives * factor, n * factor
    rows, length = size.numel(), n.shape[-1]
    columns = _arrays(*(x.detach().reshape(rows, length) for x in (begins, positives, n)), size.flatten())
    lower, upper = np.zeros((rows, length + 1)), np.ones((rows, length + 1))
    # 1. Sums over groups of equal scores. Elements after the samples have no samples.
    is_given = np.arange(length) < columns[3][:, np.newaxis]
    starts = np.flatnonzero(columns[0] & is_given)
    if len(starts):
        weight, values = (np.add.reduceat(x.reshape(-1), starts) for x in (columns[2], columns[1]))
        ends = np.searchsorted(starts, np.arange(1, rows + 1) * length)
        # 2. Fits with label 1, and with label 0, which is label 1 after the order and all labels are reversed
        if_1, run, rise = np.ones(len(starts) + 1), *_augmented(weight, values, ends, chosen)
        if_1[:-1] = rise / run
        reversed_ends = len(starts) - np.concatenate((ends[-2::-1], [0]))
        run, rise = (x[::-1] for x in _augmented(weight[::-1], (weight - values)[::-1], reversed_ends, chosen))
        # 3. The fits of groups at their elements. Above a group, the fit with label 1 is that of the next group.
        is_last = np.zeros(len(starts), np.bool_)
        is_last[ends[ends > 0] - 1] = True
        group = (columns[0] & is_given).reshape(-1).cumsum()[is_given.reshape(-1)] - 1
        lower[:, 1:][is_given] = ((run - rise) / run)[group]
        upper[:, 1:][is_given] = np.where(is_last, 1, if_1[1:])[group]
        has_samples = columns[3] > 0
        upper[has_samples, 0] = if_1[:-1][(np.concatenate(([0], ends[:-1])))[has_samples]]
        lower[:, 1:][~is_given] = np.repeat(lower[np.arange(rows), columns[3]], length - columns[3])
    shape, wide = (*size.shape, length + 1), wide_dtype(n.device)
    low, high = (torch.from_numpy(x).to(n.device, wide, non_blocking=True).view(shape) for x in (lower, upper))
    return low.clamp(0, 1), high.clamp(0, 1)  # sums of fractional weights are rounded


def _augmented(weight: Any, values: Any, ends: Any, backend: Backend) -> list[Any]:
    """Return `run` and `rise` of `formula.augmented` for rows of groups; see `formula.augmented_of_rows`."""
    given = [np.ascontiguousarray(weight), np.ascontiguousarray(values), ends]
    results = [np.empty(len(weight), weight.dtype) for _ in range(2)]
    _call_loop(implementation("augmented", backend).augmented_of_rows, backend, given, results, (True,) * 4)
    return results


def _arrays(*counts: Tensor) -> list[Any]:
    """Copy tensors to arrays on the CPU, int64, float64 or bool."""
    arrays: list[Any] = []
    if counts[0].device.type != "cpu":  # copy them at once, because each copy waits for the device
        wide = next((x.dtype for x in counts if x.is_floating_point()), torch.int64)
        flat = torch.cat([x.reshape(-1).to(wide) for x in counts]).cpu()
        parts = torch.split(flat, [x.numel() for x in counts])
        counts = tuple([part.to(x.dtype).reshape(x.shape) for part, x in zip(parts, counts, strict=True)])
    for x in counts:
        kind = torch.float64 if x.is_floating_point() else torch.bool if x.dtype == torch.bool else torch.int64
        arrays.append(x.to(kind).contiguous().numpy())
    return arrays


def _call_loop(
    loop: Callable[..., None], backend: Backend, given: list[Any], results: list[Any], are_sums: Sequence[bool]
) -> None:
    """Call a loop of `formula` over rows with buffers. The Python backend gets lists instead of arrays.

    A buffer contains sums, which are floating-point if the weights (the first array) are, or indices.
    """
    length = results[0].shape[-1] + 2
    if backend == "numba":
        of_sums = np.float64 if given[0].dtype == np.float64 else np.int64
        loop(*given, *results, tuple([np.empty(length, of_sums if is_sum else np.int64) for is_sum in are_sums]))
        return
    filled = [x.tolist() for x in results]
    lists = [x.tolist() if isinstance(x, np.ndarray) else x for x in given]
    loop(*lists, *filled, [[0] * length for _ in are_sums])
    for into, rows in zip(results, filled, strict=True):
        into[:] = rows


def _pava_rounds(weight: Tensor, values: Tensor) -> Tensor:
    """Return the first elements of blocks, bool `(R, G)`, by pooling all violators at once in each round.

    A sequence of blocks with non-increasing means is part of one block of the solution, so it is pooled as a whole. A
    million labels require about 15 rounds of decreasing length. Real-valued targets can require one round per block,
    for instance if only the last value is too low. So the loop is preferred for such targets, and on the CPU. Every
    round synchronises the device. `values` are weight times target.
    """
    # Blocks of all rows in one sequence: first element, weight w, sum s and row. Initially each element is a block.
    start = (weight > 0).flatten().nonzero().squeeze(-1)
    w, s = weight.flatten()[start], values.flatten()[start]
    row = start // max(weight.shape[-1], 1)
    while True:
        # A block violates the order if its mean is at least that of the next block in its row. Pool runs of violators.
        violates = (s[:-1] * w[1:] >= s[1:] * w[:-1]) & (row[:-1] == row[1:])
        is_start = torch.cat([torch.ones_like(row[:1], dtype=torch.bool), ~violates])
        kept = is_start.nonzero().squeeze(-1)  # the only operation of a round that synchronises the device
        if len(kept) == len(start):
            break
        block = is_start.cumsum(0) - 1
        start, row = start[kept], row[kept]
        w = w.new_zeros(start.shape).index_add_(0, block, w)
        s = s.new_zeros(start.shape).index_add_(0, block, s)
    # The first block of each row starts at its first element, even if this has weight 0.
    leads = torch.ones_like(row, dtype=torch.bool)
    leads[1:] = row[1:] != row[:-1]
    first = torch.zeros_like(weight, dtype=torch.bool)
    first.view(-1)[start] = ~leads
    first[:, :1] = True
    return first


def _may_overflow(weight: Tensor, values: Tensor) -> bool:
    """Return True if products of counts can overflow int64, which requires about 3e9 samples."""
    if not weight.numel() or weight.dtype == torch.bool or weight.is_floating_point():  # no sum, or no overflow
        return False
    sums = weight.sum(-1, dtype=torch.float64) * values.sum(-1, dtype=torch.float64)
    return bool(sums.max() >= 2.0**62)


def _bounds(total: Tensor, n_min: int | None, n_max: int | None) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest block size of every row, int64 `(...)`, and raise if they are invalid."""
    low = (total // 20).clamp(min=1) if n_min is None else torch.full_like(total, n_min)
    high = (total // 5).clamp(min=1) if n_max is None else torch.full_like(total, n_max)
    invalid = (total > 0) & (low > high)
    if value_if_available(invalid.any()):
        raise ValueError(
            f"`n_min` must be at most `n_max`, got {_first(low, invalid)} and {_first(high, invalid)} for "
            f"{_first(total, invalid)} samples. Lower `n_min` or raise `n_max`."
        )
    invalid = (total > 0) & (total <= low)
    if n_min is not None and value_if_available(invalid.any()):
        raise ValueError(
            f"`n_min` must be below the number of samples, got {n_min} for {_first(total, invalid)} samples. "
            "Lower `n_min` or add samples."
        )
    return low, high


def _first(values: Tensor, where: Tensor) -> int:
    return int(values[where][0])
