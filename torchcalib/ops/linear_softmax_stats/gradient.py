"""Gradient of the statistics in hidden states and head. The logits of every block are computed again."""

from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.linear_softmax_stats.blocks import Blocks, Head
from torchcalib.ops.logs import wide_dtype, xmul
from torchcalib.ops.softmax_stats.logit_sums import gradient_terms

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
    rows = _Rows(head, results, target, grads, detail)
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


class _Rows:
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
