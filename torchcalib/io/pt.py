"""What `torch.save` wrote (`.pt`, `.pth`): tensors, and nothing else is unpickled."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

from torchcalib.io.reader import Array, InputError, Reader, single, slices
from torchcalib.io.tensors import load_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


class Pt(Reader):
    """A dict of tensors, or a tuple or list (preds, target[, weights])."""

    format = "pt"

    def inspect(self) -> dict[str, Array]:
        """List the tensors, mapped for a moment."""
        return {name: _described(name, value) for name, value in self._load().items()}

    def rows(self, names: Sequence[str], count: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield slices of the mapped tensors."""
        held = self._load()
        return slices([held[name].detach() for name in names], count)

    def _load(self) -> dict[str, Any]:
        path = self.paths[0]
        try:
            held = load_tensors(path, mmap=True)
        except pickle.UnpicklingError as error:
            raise InputError(
                f"`{path}` must hold tensors and nothing else, got other Python objects, and nothing untrusted is "
                "unpickled. Save a dict of tensors: torch.save({'logits': logits, 'targets': targets}, ...)."
            ) from error
        if isinstance(held, dict):
            return {str(name): value for name, value in held.items()}
        if isinstance(held, (tuple, list)) and len(held) in (2, 3):
            return dict(zip(("preds", "target", "weights"), held, strict=False))
        raise InputError(
            f"`{path}` must hold a dict of tensors or (preds, target[, weights]), got a {type(held).__name__}"
            f"{f' of {len(held)}' if isinstance(held, (tuple, list)) else ''}. Save a dict of tensors."
        )


def _described(name: str, value: Any) -> Array:
    if not isinstance(value, torch.Tensor):
        found = type(value).__name__
    elif value.is_nested or value.layout is not torch.strided or value.device.type != "cpu":
        found = f"{'nested' if value.is_nested else value.layout} tensor on {value.device}"
    elif value.numel() * value.element_size() > value.untyped_storage().nbytes():
        found = "tensor of more numbers than the file holds (expanded; .clone() it first)"
    else:
        return single(name, str(value.dtype).removeprefix("torch."), value.shape)
    return single(name, found, (), f"must be a plain, dense tensor, got a {found}. Save a dict of such tensors.")
