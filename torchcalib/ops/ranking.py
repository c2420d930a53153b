"""A sample in the order of its scores, and sums over runs of it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import operation
from torchcalib.ops.sorting import order_of

_MOST_TIES = 1 / 64  # of the scores of a sample


def sorted_columns(score: Tensor, positives: Tensor, n: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Sort elements by their scores, stably; those without a score (NaN) go to the end and are not counted.

    Args:
        score: floating `(..., M)`, M >= 1.
        positives: `(..., M)`.
        n: `(..., M)` or None.

    Returns:
        The three in ascending order of the score, with +inf where there is none, and how many have one `(...)`.

    Gradient: in all three; the order is a constant.
    """
    order = order_of(score.detach())
    size = score.isnan().logical_not().sum(-1)
    score, positives = score.gather(-1, order), positives.expand_as(order).gather(-1, order)
    n = None if n is None else n.expand_as(order).gather(-1, order)
    return score.masked_fill(score.isnan(), torch.inf), positives, n, size


@operation(
    "sort_labelled(Tensor score, Tensor label) -> (Tensor, Tensor, Tensor)",
    fake=lambda score, label: (
        torch.empty_like(score),
        torch.empty_like(label),
        score.new_empty(score.shape[:-1], dtype=torch.int64),
    ),
)
def sort_labelled(score: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort probabilities and their labels, as `sorted_columns` does but for the order among equal scores.

    A probability is its bits, and they leave the last place of a signed integer free for the label: one sort of plain
    integers, several times as fast as one that carries an index.

    Args:
        score: `(..., M)` float32 or float64 in [0, 1], or NaN for none.
        label: `(..., M)` 0 or 1, uint8.

    Returns:
        Scores, labels (uint8) and how many have a score; a score above 1 stands where there is none.

    Gradient: none.
    """
    keys = _keys(score, label)
    keys.numpy().sort(axis=-1)
    label = keys.bitwise_and(1).to(torch.uint8)
    score = keys.bitwise_right_shift_(1).view(score.dtype)
    ones = torch.ones((*score.shape[:-1], 1), dtype=score.dtype)
    return score, label, torch.searchsorted(score, ones, right=True).squeeze(-1)


@operation(
    "equal_mass_sums(Tensor score, Tensor label, int n_bins) -> (Tensor, Tensor)",
    fake=lambda score, label, n_bins: (  # noqa: ARG005
        score.new_empty((*score.shape[:-1], 3, n_bins), dtype=torch.float64),
        score.new_empty((*score.shape[:-1], n_bins), dtype=torch.int64),
    ),
)
def equal_mass_sums(score: Tensor, label: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """Sum over bins of equal mass without a sort: samples are put on their side of every cut, in no order there.

    Args:
        score: see `sort_labelled`.
        label: see `sort_labelled`.
        n_bins: B. Cut i of N scores is at `i * N // B`, or behind the scores equal to the last one before it.

    Returns:
        Samples, sum of scores and sum of labels `(..., 3, B)`, float64; and where the bins end in ascending order of
        the scores `(..., B)`.

    Gradient: none.
    """
    keys = _keys(score, label)
    certain = int(_keys(torch.ones((), dtype=score.dtype), torch.ones((), dtype=torch.uint8)))
    ends = torch.empty((*score.shape[:-1], n_bins), dtype=torch.int64)
    for row, into in zip(keys.view(-1, keys.shape[-1]).numpy(), ends.view(-1, n_bins), strict=True):
        size = int(np.count_nonzero(row <= certain))
        cuts = [i * size // n_bins for i in range(1, n_bins + 1)]
        into[:] = torch.tensor(_sorted(row, cuts) if _many_ties(row) else _parted(row, cuts))
    n = ends.diff(prepend=torch.zeros_like(ends[..., :1])).double()
    labels = run_sums(keys.bitwise_and(1), ends)
    return torch.stack((n, run_sums(keys.bitwise_right_shift_(1).view(score.dtype), ends), labels), -2), ends


def _keys(score: Tensor, label: Tensor) -> Tensor:
    """Return integers in the order of probabilities, with the label in the last place; see `sort_labelled`."""
    integer, top = (torch.int32, 2**30 - 1) if score.dtype == torch.float32 else (torch.int64, 2**62 - 1)
    keys = score.abs().view(integer).clamp_(max=top)  # abs: of -0, and it makes a new tensor
    return keys.bitwise_left_shift_(1).bitwise_or_(label)


def _many_ties(keys: NDArray[np.integer]) -> bool:
    """Return whether scores are equal so often that a sort is faster than partitions, which then find no pivot."""
    some = np.sort(keys[:: len(keys) // 1024 + 1] >> 1)
    return int(np.count_nonzero(some[1:] == some[:-1])) > _MOST_TIES * len(some)


def _sorted(keys: NDArray[np.integer], cuts: list[int]) -> list[int]:
    """Sort keys in place; return the cuts, each behind the ties that it fell among."""
    keys.sort()
    return [int(np.searchsorted(keys, keys[cut - 1] | 1, side="right")) if cut else 0 for cut in cuts]


def _parted(keys: NDArray[np.integer], cuts: list[int]) -> list[int]:
    """Put keys on their side of every cut, in place; return the same as `_sorted`."""
    if not cuts:
        return []
    begin = end = cuts[len(cuts) // 2]  # of the ties that this cut falls among
    if 0 < end < len(keys):
        below, above = keys[:end], keys[end:]
        keys.partition(end)
        top = below.max() | 1  # the greatest key of this score
        if above[0] <= top:
            begin, above_of_score = int(np.count_nonzero(below < top - 1)), int(np.count_nonzero(above <= top))
            end += above_of_score
            if begin > 0:
                below.partition(begin)
            if above_of_score < len(above):
                above.partition(above_of_score)
    return [
        *_parted(keys[:begin], [cut for cut in cuts if cut < begin]),
        *(begin if cut == begin else end for cut in cuts if begin <= cut <= end),
        *(end + cut for cut in _parted(keys[end:], [cut - end for cut in cuts if cut > end])),
    ]


def end_of_ties(score: Tensor, ends: Tensor) -> Tensor:
    """Move ends of runs `(..., B)` that fall among equal scores of a sorted `(..., M)` behind the last of them."""
    last = score.gather(-1, (ends - 1).clamp(min=0))
    return torch.where(ends > 0, torch.searchsorted(score, last, right=True), 0)


def run_index(ends: Tensor, length: int) -> Tensor:
    """Return the run of every one of `length` elements, from where the runs end `(..., B)`; B behind the last."""
    # A sum and no expansion: searches want memory of their own, and under `vmap` that of the whole batch.
    places = torch.arange(length, device=ends.device) + torch.zeros_like(ends[..., :1])
    return torch.searchsorted(ends, places, right=True)


@operation(
    "run_sums(Tensor x, Tensor ends) -> Tensor",
    fake=lambda x, ends: torch.empty(ends.shape, dtype=wide_dtype(x.device), device=x.device),
)
def _sums_of_runs(x: Tensor, ends: Tensor) -> Tensor:
    wide = wide_dtype(x.device)
    if x.device.type != "cpu":
        # A place of its own for what lies behind the last run; it may hold inf.
        index = run_index(ends, x.shape[-1])
        sums = torch.zeros((*ends.shape[:-1], ends.shape[-1] + 1), dtype=wide, device=x.device)
        return sums.scatter_add_(-1, index, x.to(wide))[..., :-1].contiguous()
    length = x.shape[-1]
    values, stops = x.reshape(-1, length).numpy(), ends.reshape(-1, ends.shape[-1]).numpy()
    places = np.concatenate((np.zeros_like(stops[:, :1]), stops), -1)  # where runs begin, and what lies behind the last
    held = np.diff(places, append=length) > 0
    begins = (places + length * np.arange(len(places))[:, None])[held]
    out = np.zeros(places.shape)
    if begins.size:
        out[held] = np.add.reduceat(values.ravel(), begins, dtype=out.dtype)
    return torch.from_numpy(out[:, :-1].reshape(ends.shape))


def _keep_ends(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    x, ends = inputs
    ctx.save_for_backward(ends)
    ctx.length, ctx.dtype = x.shape[-1], x.dtype


def _spread(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (ends,) = ctx.saved_tensors
    grad = torch.cat((grad, torch.zeros_like(grad[..., :1])), -1)
    return grad.gather(-1, run_index(ends, ctx.length)).to(ctx.dtype), None


torch.library.register_autograd("torchcalib::run_sums", _spread, setup_context=_keep_ends)


class _RunSums(torch.autograd.Function):
    """The operation for `torch.func` and forward mode, which know no derivative of a registered one."""

    generate_vmap_rule = True
    backward = staticmethod(_spread)

    @staticmethod
    def forward(x: Tensor, ends: Tensor) -> Tensor:
        """Return the sums."""
        sums: Tensor = _sums_of_runs(x, ends)
        return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Keep where the runs end."""
        _keep_ends(ctx, inputs, output)
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Return the sums of the tangent."""
        return run_sums(tangent, *ctx.saved_tensors)


def run_sums(x: Tensor, ends: Tensor) -> Tensor:
    """Sum runs of elements: run b is the elements from `ends[b - 1]` (0 for the first) up to before `ends[b]`.

    Args:
        x: `(..., M)` of any real dtype.
        ends: `(..., B)` int64, not falling, at most M. What lies behind the last is not read.

    Returns:
        `(..., B)`, each run summed by itself in the dtype of sums; 0 for an empty run.

    Gradient: that of a sum, in reverse and in forward mode.
    """
    # The compiler takes the operation as it is, and no function that has a forward mode.
    of_runs = _sums_of_runs if torch.compiler.is_compiling() else _RunSums.apply
    sums: Tensor = of_runs(x, ends)
    return sums
