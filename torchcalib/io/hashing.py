"""Hashes of text that are equal in all files and processes."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


def hashes_of(texts: Sequence[str]) -> Tensor:
    """Return a 64-bit hash of each text, int64 `(N,)`."""
    digests = {text: blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in set(texts)}
    return torch.tensor([int.from_bytes(digests[text], signed=True) for text in texts], dtype=torch.int64)
