"""`.safetensors` files. Needs the package safetensors, and is imported only to read such a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors import safe_open

from torchcalib.io.reader import Array, Reader, single

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_LONGEST_HEADER = 2**24  # bytes of JSON: some 100,000 tensors
_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


class Safetensors(Reader):
    """Named tensors behind a header, mapped into memory."""

    format = "safetensors"

    def inspect(self) -> dict[str, Array]:
        """List the tensors, from the header."""
        arrays = {}
        with self.paths[0].open("rb") as start:
            length = int.from_bytes(start.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length:,} bytes is too long")
        with safe_open(self.paths[0], framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                held = file.get_slice(name)
                dtype = held.get_dtype()
                arrays[name] = single(name, _DTYPES.get(dtype, dtype), held.get_shape())
        return arrays

    def rows(self, names: Sequence[str], count: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield slices, each read when it is asked for."""
        with safe_open(self.paths[0], framework="pt") as file:
            held = [file.get_slice(name) for name in names]
            for start in range(0, self.arrays[names[0]].shape[0], count):
                yield tuple(array[start : start + count] for array in held)
