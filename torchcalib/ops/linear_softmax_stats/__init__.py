"""Statistics of the softmax of a linear layer, from hidden states and weight, without a tensor of all logits.

The logits are computed in blocks of rows and classes. `softmax_stats.sums` reduces a block to a few sums per row, and
sums over different classes are merged. Ranks of a process group that hold different classes merge their sums likewise.

The gradient in hidden states and head computes the logits of every block again.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.bin_sums import event_bins
from torchcalib.ops.logs import wide_dtype, xmul
from torchcalib.ops.operation import fused
from torchcalib.ops.softmax_stats import Detail, RowStatistics, sums
from torchcalib.ops.softmax_stats.formula import row_formula
from torchcalib.ops.softmax_stats.logit_sums import LogitSums, gradient_terms, joined, merge, scores_of
from torchcalib.ops.softmax_stats.plain import first_largest

T = TypeVar("T")

_ROWS = 512  # largest number of rows per block
_ENTRIES = 2**22  # largest number of entries of all buffers: 16 MB of float32. More would not stay in the cache.
_ROWS_OFF_CPU = 2**10  # the same on other devices, whose products need larger blocks
_ENTRIES_OFF_CPU = 2**23


class Head(NamedTuple):
    """Linear layer from hidden states h `(..., H)` to logits `(..., V)`, and the elementwise functions that follow it.

    With y = logit_scale * (W h + bias), the logits are softcap * tanh(y / softcap) / temperature. None omits a step.
    """

    weight: Tensor  # W, (V, H)
    bias: Tensor | None = None  # (V,); -inf masks a class
    logit_scale: float | Tensor | None = None
    softcap: float | None = None  # positive
    temperature: float | Tensor | None = None  # positive and finite; `(K,)` for K temperatures in the same pass

    def detach(self) -> "Head":
        """Return the head without gradient."""
        parts: Any = (x.detach() if isinstance(x, Tensor) else x for x in self)
        return Head(*parts)

    def alphas(self) -> Tensor:
        """Return the factors of logits 1 / temperature, `(K,)` in `wide_dtype`; 1 without a temperature."""
        dtype, device = wide_dtype(self.weight.device), self.weight.device
        temperature = 1.0 if self.temperature is None else self.temperature
        return torch.as_tensor(temperature, dtype=dtype, device=device).detach().reciprocal().reshape(-1)

    def axes(self) -> tuple[int, ...]:
        """Return the leading axes of results: `(K,)` for a tensor of K temperatures, and otherwise none."""
        return tuple(self.temperature.shape) if isinstance(self.temperature, Tensor) else ()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits `(..., V)`, or `(K, ..., V)`, in `wide_dtype` by differentiable operations."""
        dtype = _logit_dtype(hidden, self.weight)
        x = hidden.to(dtype) @ self.weight.to(dtype).mT
        x = x if self.bias is None else x + self.bias
        x = x if self.logit_scale is None else x * self.logit_scale
        x = x if self.softcap is None else self.softcap * (x / self.softcap).tanh()
        x = x.to(wide_dtype(x.device))
        if isinstance(self.temperature, Tensor):
            return x / self.temperature.view(*self.axes(), *(1 for _ in x.shape))
        return x if self.temperature is None else x / self.temperature


class Blocks:
    """Blocks of logits, before the temperature.

    Products of float16 and bfloat16 numbers are accumulated in float32 and not rounded.
    """

    def __init__(self, hidden: Tensor, head: Head, n_classes: int | None, n_buffers: int = 1) -> None:
        """Allocate buffers for blocks of `n_classes` classes, or of as many as fit into the cache if None."""
        weight, on_cpu = head.weight, hidden.device.type == "cpu"
        self.hidden, self.head = hidden, head
        self.dtype = _logit_dtype(hidden, weight)
        # Tensor cores multiply narrow numbers with float32 results. Other processors multiply float32 faster.
        narrow = hidden.is_cuda and hidden.dtype == weight.dtype and weight.dtype.itemsize == 2
        self.factor_dtype = weight.dtype if narrow else self.dtype
        self.converts = weight.dtype != self.factor_dtype
        self.n_rows = max(1, min(len(hidden), _ROWS if on_cpu else _ROWS_OFF_CPU))
        if n_classes is None:
            per_class = n_buffers * self.n_rows + self.converts * weight.shape[1]
            n_classes = (_ENTRIES if on_cpu else _ENTRIES_OFF_CPU) // per_class
        self.n_classes = max(1, min(n_classes, len(weight)))
        self.buffers = hidden.new_empty(n_buffers, self.n_rows * self.n_classes, dtype=self.dtype)
        self.converted = hidden.new_empty(self.n_classes * self.converts, weight.shape[1], dtype=self.factor_dtype)

    def row_slices(self) -> Iterator[slice]:
        """Yield the rows of blocks: at least one block, which is empty without rows."""
        n = len(self.hidden)
        return (slice(k, min(k + self.n_rows, n)) for k in range(0, max(1, n), self.n_rows))

    def class_slices(self) -> Iterator[slice]:
        """Yield the classes of blocks."""
        n = len(self.head.weight)
        return (slice(k, min(k + self.n_classes, n)) for k in range(0, n, self.n_classes))

    def of_rows(self, part: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield the classes of blocks with the logits of some rows. Each block overwrites the previous one."""
        hidden = self.rows(part)
        return ((classes, self.logits(hidden, self.weight(classes), classes)) for classes in self.class_slices())

    def rows(self, part: slice) -> Tensor:
        """Return hidden states as a factor of the product."""
        return self.hidden[part].to(self.factor_dtype)

    def weight(self, classes: slice) -> Tensor:
        """Return rows of the weight as a factor of the product. The next call can overwrite them."""
        weight = self.head.weight[classes]
        return self.converted[: len(weight)].copy_(weight) if self.converts else weight

    def logits(self, hidden: Tensor, weight: Tensor, classes: slice) -> Tensor:
        """Return logits in the first buffer. The next call overwrites them."""
        out = self.buffers[0, : len(hidden) * len(weight)].view(len(hidden), len(weight))
        if self.factor_dtype == self.dtype:
            x = torch.mm(hidden, weight.T, out=out)
        else:
            x = torch.mm(hidden, weight.T, self.dtype, out=out)
        _, bias, scale, cap, _ = self.head
        if bias is not None:
            x += bias[classes]
        if scale is not None:
            x *= scale
        return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def _logit_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def in_blocks(
    hidden: Tensor, head: Head, block: int | None, work: Callable[[slice, slice, Tensor], T]
) -> list[list[T]]:
    """Return `work(rows, classes, logits)` of all blocks, for each slice of rows in the order of classes.

    The logits, before the temperature, are overwritten by those of the next block.
    """
    blocks = Blocks(hidden.reshape(-1, hidden.shape[-1]), head, block)
    return [[work(part, classes, x) for classes, x in blocks.of_rows(part)] for part in blocks.row_slices()]


def all_sums(hidden: Tensor, target: Tensor, head: Head, first: Tensor, group: Any, block: int | None) -> LogitSums:
    """Return the sums over all classes, `(K, R)` for R rows and K temperatures; `first` is that of `first_class`."""

    def work(part: slice, classes: slice, x: Tensor) -> LogitSums:
        return sums_of_block(x, target.reshape(-1)[part], head, first + classes.start)

    return merge_all(in_blocks(hidden, head, block, work), group)


def sums_of_block(x: Tensor, target: Tensor, head: Head, first: Tensor) -> LogitSums:
    """Return sums over parts of the classes of a block, `(P, K, n)`; `first` is the index of the first class."""
    alphas = [None] if head.temperature is None else head.alphas().unbind()
    found = joined(torch.stack, [sums(x, target - first, alpha) for alpha in alphas], 1)
    return found._replace(top=found.top + first)


def merge_all(parts: list[list[LogitSums]], group: Any) -> LogitSums:
    """Merge the sums of blocks, as returned by `in_blocks`, and then those of the ranks of a group."""
    own = joined(torch.cat, [merge(joined(torch.cat, blocks, 0)) for blocks in parts], -1)
    if group is None:
        return own
    # All ranks merge the sums of all ranks in the same order. Classes are exact in float64.
    ranks = LogitSums(*of_all_ranks(torch.stack([x.to(own.rest.dtype) for x in own]), group).unbind(1))
    return merge(ranks._replace(top=ranks.top.to(own.top.dtype)))


def first_class(n_classes: int, group: Any, device: torch.device) -> Tensor:
    """Return the number of classes of lower ranks, as a tensor, because reading it would synchronise the device."""
    if group is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    sizes = of_all_ranks(torch.full((), n_classes, device=device), group)
    return sizes[: torch.distributed.get_rank(group)].sum()


def of_all_ranks(x: Tensor, group: Any) -> Tensor:
    """Return the tensors `x` of all ranks, which have the same shape, along a new first axis."""
    found = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(found, x.contiguous(), group=group)
    return torch.stack(found)


_LOWEST = -1e30  # replaces differences of -inf, because their product with 0 is NaN


def gradient(
    backend: str,  # noqa: ARG001
    arguments: list[Any],
    results: tuple[Tensor, ...],
    needed: list[int],
    grads: Tensor,
) -> list[Tensor]:
    """Return the gradients in the arguments of `_rows` at the positions `needed`, given that in its first result.

    Gradients in tensors that all ranks of a group have in common are summed over the ranks.
    """
    hidden, target, weight, bias, scale, temperature, cap, detail, group, block = arguments
    head = Head(weight, bias, scale, cap, temperature).detach()
    rows = _BlockRows(head, results, target, grads, detail)
    n_temperatures, device, wide = len(rows.alphas), hidden.device, wide_dtype(hidden.device)
    blocks = Blocks(hidden.detach().reshape(-1, hidden.shape[-1]), head, block, n_buffers=3 + (n_temperatures > 1))
    wants_hidden, wants_weight, wants_bias, wants_scale, wants_temperature = (k in needed for k in (0, 2, 3, 4, 5))
    of_hidden = hidden.new_zeros(blocks.hidden.shape if wants_hidden or wants_scale else (0, 0), dtype=blocks.dtype)
    of_weight = weight.new_empty(weight.shape if wants_weight else (0, 0))
    of_bias = torch.zeros(len(weight), dtype=wide, device=device)
    of_scale, of_alphas = (torch.zeros(n, dtype=wide, device=device) for n in (1, n_temperatures))
    # 1. Gradient in y = W h + bias, but without the factor `logit_scale`; and by y in W, h and bias.
    for classes in blocks.class_slices():
        w = blocks.weight(classes)
        of_rows = hidden.new_zeros(w.shape if wants_weight else (0, 0), dtype=blocks.dtype)
        for part in blocks.row_slices():
            h = blocks.rows(part).masked_fill(rows.is_flat[part].unsqueeze(-1), 0)  # h may be NaN, and so is 0 * NaN
            x = blocks.logits(h, w, classes)
            of_y = rows.fill_gradient(part, classes, x, blocks.buffers[1:], of_alphas if wants_temperature else None)
            if len(of_hidden):
                _add_product(of_hidden[part], of_y, w)
            if wants_weight:
                _add_product(of_rows, of_y.T, h)
            if wants_bias or wants_scale:
                of_bias[classes] += of_y.sum(0)
        if wants_weight:
            of_weight[classes] = of_rows if scale is None else of_rows.mul_(head.logit_scale)
    # 2. The gradient in `logit_scale` is the sum of y times the gradient in it.
    if wants_scale and head.bias is not None:
        of_scale += xmul(of_bias, head.bias).sum()
    if group is not None:
        for x in (of_hidden, of_scale, of_alphas):
            torch.distributed.all_reduce(x, group=group)
    if wants_scale:
        for part in blocks.row_slices():
            h = blocks.rows(part).masked_fill(rows.is_flat[part].unsqueeze(-1), 0)
            of_scale += (h * of_hidden[part]).sum(dtype=wide)
    if head.logit_scale is not None:
        of_hidden *= head.logit_scale
        of_bias *= head.logit_scale
    found = {0: of_hidden, 2: of_weight, 3: of_bias, 4: of_scale, 5: -rows.alphas.square() * of_alphas}
    return [found[k].reshape(arguments[k].shape).to(arguments[k].dtype) for k in needed]


class _BlockRows:
    """Coefficients of the gradient of rows in their logits, for every temperature."""

    def __init__(self, head: Head, results: tuple[Tensor, ...], target: Tensor, grads: Tensor, detail: str) -> None:
        self.alphas, self.softcap = head.alphas(), head.softcap
        n_temperatures = len(self.alphas)
        scores, upstream = (x.detach().movedim(-2, 0).reshape(4, n_temperatures, -1) for x in (results[0], grads))
        if detail != "entropy":  # undefined statistics have no gradient, but 0 times NaN is NaN
            scores = torch.cat((scores[:1], scores[1:3].masked_fill(upstream[1:3] == 0, 0), scores[3:]))
        _, top, self.largest, first = results
        top, label = top.reshape(n_temperatures, -1), target.reshape(-1)
        self.top, self.label = top[0] - first, label - first
        # Rows with +inf, and rows without incoming gradient, have gradient 0.
        flat = (upstream == 0).all(0) | (self.largest == torch.inf)
        a, b, c, for_top, for_label = gradient_terms(scores, upstream, top == label)
        # The gradient in logits has the factor alpha.
        alpha = self.alphas.unsqueeze(-1)
        terms = torch.stack((scores[3], alpha * a, alpha * b, alpha * c, alpha * for_top, alpha * for_label))
        self.terms, self.is_flat = terms.masked_fill(flat, 0), flat.all(0)

    def fill_gradient(
        self, part: slice, classes: slice, x: Tensor, buffers: Tensor, of_alphas: Tensor | None
    ) -> Tensor:
        """Return the gradient in logits `x` of a block, before the soft cap, in one of the `buffers`.

        For d = x - max x it is the sum over temperatures of q (a + b q + c alpha d). `x` is overwritten. The gradients
        in `alphas` are added to `of_alphas`.
        """
        views: list[Tensor] = [y[: x.numel()].view(x.shape) for y in buffers]
        total, q, *more = views
        largest = self.largest[part].to(x.dtype).unsqueeze(-1)
        d = x.sub_(largest).clamp_(min=_LOWEST)
        for k, alpha in enumerate(self.alphas):
            q_top, a, b, c, for_top, for_label = self.terms[:, k, part].to(x.dtype).unsqueeze(-1)
            result = more[0] if k else total
            torch.mul(d, alpha, out=result)
            torch.exp(result, out=q).mul_(q_top)
            result.mul_(c).add_(a).addcmul_(q, b).mul_(q)
            # Replace the entries of the top class and of the label, if they are in this block.
            for index, value in ((self.top, for_top), (self.label, for_label)):
                column = index[part].unsqueeze(-1) - classes.start
                inside = (column >= 0) & (column < result.shape[-1])
                column = column.masked_fill(~inside, 0)
                result.scatter_(-1, column, torch.where(inside, value, result.gather(-1, column)))
            if of_alphas is not None:
                of_alphas[k] += torch.mul(result, d, out=q).sum(dtype=of_alphas.dtype) / alpha
            if k:
                total += result
        if self.softcap is not None:  # the derivative of c tanh(y / c) is 1 - tanh^2
            total.addcmul_(total, torch.add(d, largest, out=q).div_(self.softcap).square_(), value=-1)
        total.masked_fill_(self.is_flat[part].unsqueeze(-1), 0)
        return total


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product to `out`, which has the dtype of `a`. A narrower `b` determines that of the factors."""
    if a.dtype == b.dtype:
        torch.addmm(out, a, b, out=out)
    else:
        out += torch.mm(a.to(b.dtype), b, out.dtype)


class Moments(NamedTuple):
    """Moments of the logits x of a row before the temperature T, under the probabilities q at this temperature.

    In 1 / T, the negative log-likelihood -log q_h has the first derivative `mean - label`, and the second derivative
    `variance`.
    """

    log_prob: Tensor  # log q_h in nats
    label: Tensor  # x_h - max_k x_k, at most 0
    mean: Tensor  # sum_k q_k x_k - max_k x_k, at most 0
    variance: Tensor  # sum_k q_k x_k^2 - (sum_k q_k x_k)^2


def rows(
    hidden: Tensor,
    target: Tensor,
    head: Head,
    *,
    detail: Detail = "entropy",
    vocab_group: Any = None,
    block: int | None = None,
) -> RowStatistics:
    """Return the statistics of `softmax_stats.rows` for the logits of a linear layer.

    `hidden` is `(..., N, H)` and `target` `(..., N)`. Results are `(..., N)`, or `(K, ..., N)` for K temperatures. The
    relative error is that of `softmax_stats.rows`, for float32 logits: products of narrower numbers are accumulated in
    float32, and not rounded. `block` is the number of classes per block. If None, a block fits into the cache.

    `vocab_group` is a process group whose ranks hold consecutive rows of the weight, and of the bias, in the order of
    ranks. All ranks must have the same hidden states and targets, which are classes of the whole layer. All ranks
    return the same results. They are bitwise those of one process with the same blocks, if every rank has one block.

    Gradient: in `hidden`, and in all tensors of `head`. Logits are computed again, in blocks. Forward mode, derivatives
    of higher order, `vmap` and `torch.compile` compute all logits, and do not support `vocab_group`. With it, all ranks
    must compute the same loss. Gradients in hidden states, scale and temperature are then sums over the ranks.
    """
    weight, bias, scale, cap, temperature = head
    scores, top, *_ = _rows(hidden, target, weight, bias, scale, temperature, cap, detail, vocab_group, block)
    log_prob, squared_error, neg_entropy, confidence = scores.unbind(-2)
    return RowStatistics(log_prob, squared_error, neg_entropy, confidence, top)


@torch.no_grad()
def moments(
    hidden: Tensor, target: Tensor, head: Head, *, vocab_group: Any = None, block: int | None = None
) -> Moments:
    """Return the moments of logits that a fit of the temperature requires, for all temperatures in one pass.

    Results are `(..., N)`, or `(K, ..., N)` for K temperatures, without gradient. For other arguments see `rows`.
    """
    first = first_class(len(head.weight), vocab_group, hidden.device)
    found = all_sums(hidden, target, head, first, vocab_group, block)
    total, alpha = 1 + found.rest, head.alphas().unsqueeze(-1)
    log_prob, *_ = scores_of(found, found.top == target.reshape(-1))
    label = (found.label - found.largest).masked_fill(found.label == found.largest, 0)
    mean = found.product / total
    variance = found.spread / total - mean * mean
    columns = log_prob, label / alpha, mean / alpha, variance / (alpha * alpha)
    return Moments(*(x.reshape(*head.axes(), *target.shape) for x in columns))


@torch.no_grad()
def largest(
    hidden: Tensor, head: Head, k: int, *, vocab_group: Any = None, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest probabilities of every row in descending order, and their classes, in one pass.

    Both are `(..., N, k)`, or `(K, ..., N, k)` for K temperatures, without gradient. Tied classes are in ascending
    order. The classes of probabilities of 0, and of rows with NaN, are undefined. For other arguments see `rows`.
    """
    first = first_class(len(head.weight), vocab_group, hidden.device)
    no_label = torch.full(hidden.shape[:-1], -1, device=hidden.device).reshape(-1)

    def work(part: slice, classes: slice, x: Tensor) -> tuple[LogitSums, Tensor, Tensor]:
        found = sums_of_block(x, no_label[part], head, first + classes.start)
        logits, index = _k_largest(x, min(k, x.shape[-1]))  # overwrites the block
        return found, logits, index + (first + classes.start)

    parts = in_blocks(hidden, head, block, work)
    found = merge_all([[x for x, _, _ in blocks] for blocks in parts], vocab_group)
    logits = torch.cat([torch.cat([x for _, x, _ in blocks], -1) for blocks in parts])
    classes = torch.cat([torch.cat([index for _, _, index in blocks], -1) for blocks in parts])
    if vocab_group is not None:  # with the same number of candidates from every rank
        logits, index = _k_largest(pad(logits, (0, k), value=-torch.inf), k)
        classes = pad(classes, (0, k)).gather(-1, index)
        logits, classes = (of_all_ranks(x, vocab_group).movedim(0, 1).flatten(1) for x in (logits, classes))
    logits, index = _k_largest(logits, k)
    alpha, largest_logit = head.alphas().view(-1, 1, 1), found.largest.unsqueeze(-1)
    y = logits.to(found.rest.dtype) * alpha
    q = (y - largest_logit).masked_fill(y == largest_logit, 0).exp() / (1 + found.rest).unsqueeze(-1)
    shape = *head.axes(), *hidden.shape[:-1], k
    return q.view(shape), classes.gather(-1, index).expand(q.shape).reshape(shape)


def _k_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of every row with their indices, the first ones if tied. `x` is overwritten."""
    entries, indices = [], []
    for _ in range(k):
        index = first_largest(x).unsqueeze(-1)
        entries.append(x.gather(-1, index))
        indices.append(index)
        x.scatter_(-1, index, -torch.inf)
    return torch.cat(entries, -1), torch.cat(indices, -1)


@torch.no_grad()
def all_bins(
    hidden: Tensor,
    target: Tensor,
    head: Head,
    *,
    n_bins: int,
    right: bool = False,
    vocab_group: Any = None,
    block: int | None = None,
) -> Tensor:
    """Return the sums of `bin_sums.event_bins` over the one-vs-rest events of all classes, separately for every row.

    Results are `(..., N, 3, B)`, or `(K, ..., N, 3, B)` for K temperatures: number, sum of probabilities and number of
    labels in B bins of the probability, as for Full-ECE. The first pass computes the normalisation of probabilities,
    the second one the probabilities. Results have no gradient. For other arguments see `rows`.
    """
    first = first_class(len(head.weight), vocab_group, hidden.device)
    found = all_sums(hidden, target, head, first, vocab_group, block)
    alphas, labels = head.alphas(), target.reshape(-1, 1) - first
    confidence, largest_logit = 1 / (1 + found.rest), found.largest[0] / alphas[0]

    def work(part: slice, classes: slice, x: Tensor) -> Tensor:
        outcome = torch.arange(classes.start, classes.stop, device=x.device) == labels[part]
        top = largest_logit[part].to(x.dtype).unsqueeze(-1)
        shifted = torch.where(x == top, 0, x - top)
        of_alphas = []
        for k, alpha in enumerate(alphas):
            q = (shifted * alpha).exp_().mul_(confidence[k, part].to(x.dtype).unsqueeze(-1))
            of_alphas.append(event_bins(q, outcome, n_bins=n_bins, right=right))
        return torch.stack(of_alphas)

    parts = in_blocks(hidden, head, block, work)
    sums = torch.cat([torch.stack(blocks).sum(0) for blocks in parts], 1)
    if vocab_group is not None:
        sums = of_all_ranks(sums, vocab_group).sum(0)
    return sums.view(*head.axes(), *target.shape, 3, n_bins)


def _forward(
    backend: str,  # noqa: ARG001
    hidden: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float | Tensor | None,
    temperature: float | Tensor | None,
    cap: float | None,
    detail: Detail,  # noqa: ARG001
    group: Any,
    block: int | None,
) -> tuple[Tensor, ...]:
    """Return scores `(..., 4, N)` and top classes `(..., N)`; for `gradient` also largest logits and first class."""
    head = Head(weight, bias, scale, cap, temperature).detach()
    first = first_class(len(weight), group, hidden.device)
    found = all_sums(hidden.detach(), target, head, first, group, block)
    shape = *head.axes(), *target.shape
    scores = scores_of(found, found.top == target.reshape(-1)).view(4, *shape)
    return scores.movedim(0, -2), found.top.view(shape), found.largest[0] / head.alphas()[0], first


def _formula(
    hidden: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float | Tensor | None,
    temperature: float | Tensor | None,
    cap: float | None,
    detail: Detail,
    group: Any,
    block: int | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """Return scores and top classes by differentiable operations, from a tensor of all logits."""
    if group is not None:
        raise ValueError("`vocab_group` must be None under torch.compile, vmap, and for second derivatives. Omit it.")
    x = Head(weight, bias, scale, cap, temperature).logits(hidden)
    return row_formula(x, target.expand(x.shape[:-1]), True, detail=detail)


_rows = fused(_forward, _formula, gradient)
