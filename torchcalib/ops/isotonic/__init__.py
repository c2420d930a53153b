"""Isotonic regression: PAVA, PAVA-BC and the fit of real targets.

All three divide a sequence that is sorted by score into blocks of neighbours and fit a block by its mean. They differ
in the rule that merges two neighbours. `reference` has the algorithms; `numba` and `triton` run the same loops.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, Op, choose, implementation
from torchcalib.ops.host_values import largest, look
from torchcalib.ops.isotonic import reference
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import operation

Ties = Literal["pool", "split"]
Variant = Literal["code", "paper"]


def block_ends(
    op: Literal["pava", "pava_bc"],
    begins: Tensor,
    positives: Tensor,
    n: Tensor,
    *,
    n_min: int | None = None,
    n_max: int | None = None,
    variant: Variant = "code",
    backend: Backend = "auto",
) -> Tensor:
    """Divide a sorted sample into blocks and return the end of each block.

    "pava" is isotonic least squares: neighbours of equal mean are merged, so the block means strictly rise. Means of
    counts are compared exactly.

    "pava_bc" is PAVA with bounds on the block size ([TCE] Algorithms 2 and 3). The samples are processed in the order
    of their scores. The top two blocks are merged if together they hold at most `n_min` samples, or at most `n_max`
    while the mean of the earlier one is at least that of the later one. The last `n_min` samples are the final block.
    It is joined to the block before it if the two fit into `n_max`. The variants differ in the last step:

    - "code" (the authors' code, which made the tables of the paper) joins the final block if `n_min` plus its own
      size is at most `n_max`, whatever the size of the block before it. Neighbours of equal mean stay apart.
    - "paper" uses the size of the block before it, and then merges neighbours of equal mean (Algorithm 3).

    A tied group is never divided. With tied groups the final block is the fewest groups that hold `n_min` samples.
    A block holds `n_min` to `n_max` samples, with these exceptions:

    - The final block exceeds `n_max`, by at most `n_min`, where "code" joins it to a block that is too large.
    - Merged neighbours of equal mean can exceed `n_max` under "paper".
    - If `2 * n_min > n_max`, the block before the final one can hold fewer than `n_min` samples: it was not full when
      the samples ended, and it does not fit into the final block.
    - A tied group larger than `n_max` is a block of its own or part of the final block. A large first group can make
      the final block larger than `n_min`, and so let it exceed `n_max` by more. A block stays below `n_min` if the
      next group would exceed `n_max`, or exceed `n_min` and has the higher mean.

    Args:
        op: which algorithm.
        begins: whether a tied group begins at the element, bool `(..., M)`.
        positives: samples of outcome 1 of each element `(..., M)`, bool or an integer dtype.
        n: samples of each element, as `positives`. An element of 0 samples joins the block before it.
        n_min: smallest block of "pava_bc", at least 1. Default: N // 20 of each row, at least 1.
        n_max: largest block of "pava_bc", at least `n_min`. Default: N // 5 of each row, at least 1.
        variant: variant of "pava_bc".
        backend: see `dispatch`. All give the same blocks. A forced one other than "python" counts up to 3e9 samples.

    Returns:
        int64 `(..., B)`: block b is the elements `ends[b - 1]` (0 for the first) up to before `ends[b]`. Rows with
        fewer blocks than others end in empty blocks.

    Raises:
        ValueError: the bounds of a row are in the wrong order, or it has at most the `n_min` samples given.

    Gradient: none.

    Source:
        [TCE] Matsubara et al.: TCE: A test-based approach to measuring calibration error (UAI 2023), Algorithms 2, 3;
        Ayer et al.: An empirical distribution function for sampling with incomplete information (1955).
    """
    low, high = _bounds(n.sum(-1), n_min, n_max) if op == "pava_bc" else (None, None)
    starts = block_starts(op, n, positives, backend, low, high, variant == "paper", begins)
    begun = starts.cumsum(-1, dtype=torch.int32)
    n_blocks = max(1, largest(begun[..., -1:], bound=begun.shape[-1]))  # a batch without series has blocks, too
    numbers = torch.ones_like(begun[..., :n_blocks]).cumsum(-1, dtype=torch.int32)
    return torch.searchsorted(begun, numbers, right=True)


def isotonic_regression(y: Tensor, weights: Tensor | None = None, *, backend: Backend = "auto") -> Tensor:
    """Weighted isotonic least squares: the rising sequence nearest to `y`.

    Args:
        y: targets `(..., N)` in the order of their scores.
        weights: real and not negative, `(..., N)`. A target of weight 0 is ignored. It gets the value of the block
            before it, or of the first block if there is none.
        backend: see `dispatch`. All give the same values up to rounding.

    Returns:
        `(..., N)`, computed in float64; floating `y` keeps its dtype. A row without weight is NaN.

    Gradient: with the blocks held constant, of any order. In `y` it is the mean of the gradient over the block,
    weighted by `weights`; in positive `weights` that mean times the residual.

    Source:
        Best, Chakravarti: Active set algorithms for isotonic regression (1990); Ayer et al. (1955).
    """
    wide = wide_dtype(y.device)
    w = torch.ones_like(y, dtype=wide) if weights is None else weights.to(wide).expand_as(y)
    total = w * y.to(wide).masked_fill(w == 0, 0)
    with torch.no_grad():
        first = block_starts("isotonic_regression", w, total, backend)
    block = first.cumsum(-1) - 1
    # The blocks are constants. The gradient flows through their means.
    zeros = torch.zeros_like(total)
    mean = zeros.scatter_add(-1, block, total) / zeros.scatter_add(-1, block, w)
    return mean.gather(-1, block).to(y.dtype if y.is_floating_point() else wide)


@operation(
    "block_starts(str op, Tensor weight, Tensor values, str backend, Tensor? low=None, Tensor? high=None, "
    "bool paper=False, Tensor? begins=None) -> Tensor",
    fake=lambda op, weight, *_: torch.empty_like(weight, dtype=torch.bool),  # noqa: ARG005
)
def block_starts(
    op: Op,
    weight: Tensor,
    values: Tensor,
    backend: Backend,
    low: Tensor | None = None,
    high: Tensor | None = None,
    paper: bool = False,
    begins: Tensor | None = None,
) -> Tensor:
    """Return where a block begins: bool, in the shape of `weight`.

    The loops are not tensor operations: `torch.compile` and `vmap` see one operation.

    Args:
        op: which algorithm.
        weight: weight of each element in the order of the scores `(..., M)`.
        values: weight times target `(..., M)`.
        backend: see `dispatch`.
        low: smallest block of "pava_bc" in each row, int64 `(...)`.
        high: largest block, as `low`.
        paper: whether "pava_bc" ends as in the paper.
        begins: where groups begin that are pooled first `(..., M)`; None if each element is a group.
    """
    chosen = choose(op, weight.device, backend)
    if not weight.numel():
        return torch.empty_like(weight, dtype=torch.bool)
    if backend == "auto" and op != "isotonic_regression" and _may_overflow(weight, values):
        chosen = "python"  # its integers have no limit
    if begins is not None and chosen in ("rounds", "triton"):
        group = begins.cumsum(-1) - 1
        n_groups = largest(group[..., -1:] + 1, bound=group.shape[-1])
        zeros = torch.zeros((*group.shape[:-1], n_groups), dtype=torch.int64, device=group.device)
        pooled = (zeros.scatter_add(-1, group, column.long()) for column in (weight, values))
        starts = block_starts(op, *pooled, backend, low, high, paper)
        return starts.gather(-1, group) & begins  # type: ignore[no-any-return]
    columns = [column.detach().reshape(weight.shape[:-1].numel(), -1) for column in (weight, values)]
    bounds = [] if low is None or high is None else [low.flatten(), high.flatten()]
    if chosen == "rounds":
        return reference.pava_rounds(*columns).view(weight.shape)
    source = implementation(op, chosen)
    loop = source.pava_bc if op == "pava_bc" else source.pava
    if chosen == "triton":  # all rows at once, with buffers of its own
        found: Tensor = loop(*columns, *bounds, paper) if bounds else loop(*columns)
        return found.view(weight.shape)
    first = np.zeros(columns[0].shape, dtype=np.bool_)
    first[:, :1] = True
    limits = [bound.tolist() for bound in bounds]
    arrays = [column.cpu().contiguous().numpy() for column in columns]
    opens = None if begins is None else [np.flatnonzero(row) for row in begins.reshape(first.shape).cpu().numpy()]
    for row, (w, v) in enumerate(zip(*(arrays if opens is None else _pooled(arrays, opens)), strict=True)):
        own = [*(limit[row] for limit in limits), paper] if limits else []
        if chosen == "numba":
            buffers = [np.empty_like(w), np.empty_like(v), np.empty(len(w), dtype=np.int64)]
        else:
            w, v = w.tolist(), v.tolist()
            buffers = [[0] * len(w) for _ in range(3)]
        count = loop(w, v, *own, *buffers)
        ends = buffers[2][: max(count - 1, 0)]
        first[row, ends if opens is None else opens[row][ends]] = True
    return torch.from_numpy(first).to(weight.device).view(weight.shape)


def _pooled(columns: list[np.ndarray], opens: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Sum integer columns `(R, N)` over the groups that begin at `opens`; return one array per column and row."""
    length = columns[0].shape[-1]
    if all(len(places) == length for places in opens):
        return [list(column.astype(np.int64)) for column in columns]
    sizes = np.cumsum([len(places) for places in opens])[:-1]
    begins = np.concatenate([row * length + places for row, places in enumerate(opens)])
    return [np.split(np.add.reduceat(column.ravel(), begins, dtype=np.int64), sizes) for column in columns]


def _may_overflow(weight: Tensor, values: Tensor) -> bool:
    """Return whether the products that compare two means can exceed 2^63: from about 3e9 samples on."""
    if not weight.numel() or weight.dtype == torch.bool:  # one sample per element: memory ends before
        return False
    sums = weight.sum(-1, dtype=torch.float64) * values.sum(-1, dtype=torch.float64)
    return bool(sums.max() >= 2.0**62)


def _bounds(total: Tensor, n_min: int | None, n_max: int | None) -> tuple[Tensor, Tensor]:
    """Return the checked bounds of every row on the size of a block."""
    low = (total // 20).clamp(min=1) if n_min is None else torch.full_like(total, n_min)
    high = (total // 5).clamp(min=1) if n_max is None else torch.full_like(total, n_max)
    wrong = (total > 0) & (low > high)
    if look(wrong.any()):
        raise ValueError(
            f"`n_min` must be at most `n_max`, got {_first(low, wrong)} and {_first(high, wrong)} for "
            f"{_first(total, wrong)} samples. Lower `n_min` or raise `n_max`."
        )
    wrong = (total > 0) & (total <= low)
    if n_min is not None and look(wrong.any()):
        raise ValueError(
            f"`n_min` must be below the number of samples, got {n_min} for {_first(total, wrong)} samples. "
            "Lower `n_min` or add samples."
        )
    return low, high


def _first(values: Tensor, where: Tensor) -> int:
    return int(values[where][0])
