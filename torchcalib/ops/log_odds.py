"""Log-odds of events over classes, from logits: log P(event) - log P(the other classes), without cancellation.

A probability near 1 has no digits left for 1 - p. The two logarithms keep them: each is a log-sum-exp of logits,
relative to the largest logit of its own classes. All arithmetic is in the dtype of sums.

Events of equal rows must tie, wherever the rows stand in a batch. Softmax ensures this, because it runs row by row.
Elementwise functions do not: the vectorised and the scalar code of exp and log1p differ in the last digit, and the
scalar code computes the end of a tensor. So they run over padded blocks that no thread splits (`_elementwise`).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.logs import spread_infinite_logits, wide_dtype
from torchcalib.ops.operation import is_plain, operation
from torchcalib.ops.softmax_stats import matrices

_BLOCK = 2**15  # numbers; torch splits larger tensors among threads
_BLOCK_ELSEWHERE = 2**24  # on other devices, where the launch of a kernel costs more than its arithmetic
_LANES = 64  # at least the vector width of any processor


def log_odds(values: Tensor, members: Tensor | None = None) -> Tensor:
    """Return the log-odds of one event for each row, or of every class against the others.

    Args:
        values: logits `(..., N, C)` of any floating dtype and with any strides. A row that holds +inf spreads its
            probability over these entries.
        members: classes of the event of each row `(..., N, k)`, int64; None for every class on its own.

    Returns:
        `(..., N)`, or `(..., N, C)` for every class, in the dtype of sums. +inf where the other classes have
        probability 0, -inf where the event has probability 0. NaN in a row that has a NaN or no logit above -inf.

    Gradient:
        In `values`, in reverse and in forward mode, of any order. It is 0 in a row that has +inf or infinite log-odds.
        Rows whose incoming gradients are all 0 get 0, whatever their values.
    """
    # torch.compile supports the operation, but no autograd.Function with a forward mode.
    function = _log_odds.direct if torch.compiler.is_compiling() or is_plain(values) else _LogOdds.apply
    found: Tensor = function(values, members)
    return found


def log_ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return log-sum-exp of `above` minus that of `below`, each `(..., C)` in the dtype of sums and without +inf.

    The largest entries and the remainders are subtracted separately, so that equal rows give exactly 0.
    """
    (top, beyond), (other_top, other_beyond) = _log_total(above), _log_total(below)
    return (top - other_top) + (beyond - other_beyond)


def _log_total(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest entry `(...)` and log-sum-exp minus it; -inf and a finite value if all are -inf.

    The difference is minus the log-softmax of the largest entry. Softmax runs row by row; see the top of this module.
    """
    top, place = logits.max(-1, keepdim=True)
    log_q = logits.masked_fill(top == -torch.inf, 0).log_softmax(-1)
    return top.squeeze(-1), -log_q.gather(-1, place).squeeze(-1)


@operation(
    "log_odds(Tensor values, Tensor? members) -> Tensor",
    fake=lambda values, members: values.new_empty(
        values.shape if members is None else values.shape[:-1], dtype=wide_dtype(values.device)
    ),
)
def _log_odds(values: Tensor, members: Tensor | None) -> Tensor:
    *lead, n_classes = values.shape
    width = (n_classes,) if members is None else ()
    out = torch.empty((math.prod(lead), *width), dtype=wide_dtype(values.device), device=values.device)
    for rows, logits, own in _chunks(values, members):
        z = spread_infinite_logits(logits)
        out[rows] = _of_each(z) if own is None else _of_event(z, own)
    return out.reshape(*lead, *width)


def _chunks(values: Tensor, members: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield a slice of the rows, their logits in the dtype of sums, and the members of their events."""
    flat = None if members is None else members.reshape(-1, members.shape[-1])
    block = _BLOCK if values.device.type == "cpu" else _BLOCK_ELSEWHERE
    size = max(1, block // max(1, values.shape[-1]))
    for part, matrix in matrices(values.detach()):
        for start in range(0, len(matrix), size):
            some = matrix[start : start + size].to(wide_dtype(values.device)).contiguous()
            rows = slice(part.start + start, part.start + start + len(some))
            yield rows, some, None if flat is None else flat[rows]


def _of_event(z: Tensor, members: Tensor) -> Tensor:
    return log_ratio(z.gather(-1, members), z.scatter(-1, members, -torch.inf))


def _of_each(z: Tensor) -> Tensor:
    """Return the log-odds of every class `(n, C)`.

    With D the log-odds of the top class and r_k the log-softmax among the others, class k has the log-odds
    r_k - log(1 + e^D - e^{r_k}). As r_k <= D nothing cancels, and a class that ties with the top has exactly D.
    """
    top = z.argmax(-1, keepdim=True)
    rest, of_top = _against_rest(z, top)
    scale = of_top.clamp(min=0)
    among = rest.log_softmax(-1) - scale
    ratio = _elementwise(torch.exp, -of_top.abs()) - _elementwise(torch.exp, among)
    return (among - _elementwise(torch.log1p, ratio)).scatter(-1, top, of_top)


def _against_rest(z: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits with -inf for the top class, and the log-odds of the top class `(..., 1)`."""
    rest = z.scatter(-1, top, -torch.inf)
    of_top = log_ratio(z.gather(-1, top), rest).unsqueeze(-1)
    # If all others have probability 0, D = inf, so any finite logits give the same result.
    return rest.masked_fill(rest.amax(-1, keepdim=True) == -torch.inf, 0), of_top


def _elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function to a block, padded so that only vectorised code computes its numbers."""
    padded = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % _LANES))
    return function(padded)[: x.numel()].view(x.shape)


def _gradient(z: Tensor, members: Tensor | None, grads: Tensor) -> Tensor:
    """Return the gradient in logits; itself differentiable in both.

    Args:
        z: logits `(..., C)` in the dtype of sums, possibly infinite or NaN.
        members: see `log_odds`.
        grads: gradients of the log-odds.
    """
    top = z.amax(-1, keepdim=True)
    infinite, bad = top == torch.inf, top.isnan() | (top == -torch.inf)
    z = z.masked_fill(infinite | bad, 0)
    g = grads if members is None else grads.unsqueeze(-1)
    found = _gradient_of_each(z, g) if members is None else g * _slope_of_event(z, members)
    untouched = (g == 0).all(-1, keepdim=True)
    return found.masked_fill(infinite | untouched, 0).masked_fill(bad & ~untouched, torch.nan)


def _slope_of_event(z: Tensor, members: Tensor) -> Tensor:
    """Return softmax among the members minus softmax among the others, each 0 outside its classes."""
    inside = torch.zeros_like(z, dtype=torch.bool).scatter(-1, members, True)
    own, rest = z.masked_fill(~inside, -torch.inf), z.masked_fill(inside, -torch.inf)
    none = (own.amax(-1, keepdim=True) == -torch.inf) | (rest.amax(-1, keepdim=True) == -torch.inf)
    slope = own.masked_fill(none, 0).softmax(-1) - rest.masked_fill(none, 0).softmax(-1)
    return slope.masked_fill(none, 0)


def _gradient_of_each(z: Tensor, g: Tensor) -> Tensor:
    """Return g_j - sum over k != j of g_k q_j / (1 - q_k). 1 - q of the top class is the sum over the others."""
    top, among, of_rest, of_top = _probabilities(z)
    is_top = torch.zeros_like(z, dtype=torch.bool).scatter(-1, top, True)
    q = among * of_rest
    of_others = (g / (1 - q)).masked_fill(is_top, 0)
    total = of_others.sum(-1, keepdim=True)
    below = g - q * (total - of_others) - g.gather(-1, top) * among
    return torch.where(is_top, g - of_top * total, below)


def _tangent_of_each(z: Tensor, tangent: Tensor) -> Tensor:
    """Return t_k - sum over j != k of t_j q_j / (1 - q_k)."""
    top, among, of_rest, of_top = _probabilities(z)
    q = among * of_rest
    at_top = tangent.gather(-1, top)
    total = (q * tangent).sum(-1, keepdim=True) + of_top * at_top
    others = tangent - (total - q * tangent) / (1 - q)
    return others.scatter(-1, top, at_top - (among * tangent).sum(-1, keepdim=True))


def _probabilities(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the top class, softmax among the others, and the probabilities of the others and the top `(..., 1)`."""
    top = z.detach().argmax(-1, keepdim=True)
    rest, of_top = _against_rest(z, top)
    among = rest.softmax(-1).scatter(-1, top, 0)
    return top, among, torch.sigmoid(-of_top), torch.sigmoid(of_top)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
    values, members = ctx.saved_tensors
    if torch.is_grad_enabled():  # a gradient that can be differentiated again
        return _gradient(values.to(grads.dtype), members, grads).to(values.dtype), None
    return _log_odds_backward(values, members, grads), None


@operation(
    "log_odds_backward(Tensor values, Tensor? members, Tensor grads) -> Tensor",
    fake=lambda values, *_: values.new_empty(values.shape),
)
def _log_odds_backward(values: Tensor, members: Tensor | None, grads: Tensor) -> Tensor:
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    flat, upstream = out.view(-1, out.shape[-1]), grads.reshape(-1, *grads.shape[values.dim() - 1 :])
    for rows, z, own in _chunks(values, members):
        flat[rows] = _gradient(z, own, upstream[rows]).to(values.dtype)
    return out


torch.library.register_autograd("torchcalib::log_odds", _backward, setup_context=_keep)


class _LogOdds(torch.autograd.Function):
    """The operation for `torch.func` and forward mode, which ignore the derivative of a registered operation."""

    generate_vmap_rule = True
    backward = staticmethod(_backward)

    @staticmethod
    def forward(values: Tensor, members: Tensor | None) -> Tensor:
        """Return the log-odds."""
        found: Tensor = _log_odds.direct(values, members)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
        """Save the inputs for the derivatives."""
        _keep(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        """Return the product of the Jacobian and the tangent."""
        values, members = ctx.saved_tensors
        wide = wide_dtype(values.device)
        z, t = values.to(wide), tangent.to(wide)
        if members is not None:
            ones = torch.ones_like(z[..., 0])
            return (_gradient(z, members, ones) * t).sum(-1)
        flat = (z.amax(-1, keepdim=True) == torch.inf).expand_as(z)
        return _tangent_of_each(z.masked_fill(flat, 0), t).masked_fill(flat, 0)
