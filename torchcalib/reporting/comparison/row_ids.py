"""Rows of the systems of a comparison by id: the number of common rows, repeated ids, and different targets.

`RowIds` stores a hash of the id of each row of a system. Above 100,000 rows, it stores only those with the smallest
hashes (bottom-k sketch). They are a random sample of the ids, with the same ids in all systems. It also stores a hash
of their target and cluster, which must be equal in all systems.

Reference:
    Cohen, Kaplan: Summarizing data using bottom-k sketches (ACM Symposium on Principles of Distributed Computing,
    2007).
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.saved import saved_count, saved_tensor
from torchcalib.io.errors import shown
from torchcalib.ops.counter_rng import random_words

MAX_ROWS = 100_000
"""Largest number of stored rows of a system. Above it, those with the smallest hashes are stored."""


@dataclass(frozen=True, eq=False)
class RowIds:
    """Hashes of the ids of the rows of a system, and of the columns that common rows share, on the CPU."""

    n: int  # number of all rows
    hashes: Tensor  # the smallest hashes of ids, ascending, int64 (k,)
    contents: Tensor  # hash of the target and cluster of each stored row, int64 (k,)

    @classmethod
    def of(cls, hashes: Tensor, contents: Tensor) -> Self:
        """Return the rows with these hashes `(n,)`, which must be distinct."""
        order = hashes.argsort()[:MAX_ROWS]
        return cls(len(hashes), hashes[order], contents[order])

    def __add__(self, other: "RowIds") -> "RowIds":
        """Return the rows of both, which must be different rows."""
        both = self.of(torch.cat((self.hashes, other.hashes)), torch.cat((self.contents, other.contents)))
        return RowIds(self.n + other.n, both.hashes, both.contents)

    @property
    def are_all_stored(self) -> bool:
        """Whether no rows were left out."""
        return len(self.hashes) == self.n

    def place_of(self, hashes: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether rows with these hashes are stored, bool `(n,)`, and their places among the stored rows."""
        if not len(self.hashes):
            return torch.zeros_like(hashes, dtype=torch.bool), torch.zeros_like(hashes)
        place = torch.searchsorted(self.hashes, hashes).clamp(max=len(self.hashes) - 1)
        return self.hashes[place] == hashes, place

    def contains(self, hashes: Tensor) -> Tensor:
        """Return whether rows with these hashes are stored, bool `(n,)`."""
        return self.place_of(hashes)[0]

    def differs_from(self, hashes: Tensor, contents: Tensor) -> Tensor:
        """Return whether rows with these hashes are stored with other contents, bool `(n,)`."""
        is_stored, place = self.place_of(hashes)
        return is_stored & (self.contents[place] != contents) if len(self.hashes) else is_stored

    def n_common(self, other: "RowIds") -> int:
        """Return the number of rows of both systems, an estimate unless all rows are stored.

        Both systems store all rows up to the smaller one of their largest hashes. The share of common rows among them
        estimates that among all rows. The number of common rows, divided by that of distinct rows, has a standard error
        of at most 0.2%.
        """
        last = [each.hashes[-1] for each in (self, other) if not each.are_all_stored]
        mine, theirs = (each.hashes[each.hashes <= min(last)] if last else each.hashes for each in (self, other))
        n_known = len(mine) + len(theirs)
        common = int(torch.isin(mine, theirs, assume_unique=True).sum())
        return round(common * (self.n + other.n) / n_known) if n_known else 0

    def state(self) -> dict[str, Any]:
        """Return the rows as a dict of tensors and Python values, from which `of_state` restores them."""
        return {"n": self.n, "hashes": self.hashes, "contents": self.contents}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the rows of a saved state, after a check."""
        n, hashes = saved_count(state, "n"), saved_tensor(state, "hashes", torch.int64, (None,))
        contents = saved_tensor(state, "contents", torch.int64, tuple(hashes.shape))
        if len(hashes) != min(n, MAX_ROWS) or not bool((hashes[1:] > hashes[:-1]).all()):
            raise ValueError(
                f"`hashes` must be {min(n, MAX_ROWS):,} ascending numbers, got {len(hashes):,} numbers. The file is "
                "corrupt. Save the comparison again."
            )
        return cls(n, hashes, contents)


NO_ROWS = RowIds(0, *torch.zeros(2, 0, dtype=torch.int64, device="cpu"))


def hashes_of_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return two hashes of each id `(n,)`. The first identifies rows, in [0, 2^63). The second is its last 31 bits."""
    first, second = random_words(0, torch.arange(2, device=ids.device), ids)
    return (first << 31) | (second >> 1), second >> 1


def contents_of(columns: Tensor) -> Tensor:
    """Return a hash of each row of int64 columns `(n, m)`."""
    factors = 2 * random_words(1, columns.new_zeros(1), torch.arange(columns.shape[-1], device=columns.device))[0] + 1
    return (columns * factors).sum(-1)  # modulo 2^64


def with_rows(
    known: Mapping[str, RowIds], name: str, hashes: Tensor, contents: Tensor, counts: Tensor, ids: Any
) -> dict[str, RowIds]:
    """Return the rows of all systems with a batch of the system `name`. `ids` are as given, for errors.

    Rows for which `counts` `(n,)` is False are omitted.

    Raises:
        ValueError: For repeated ids, and for common rows with different contents.
    """

    def check(wrong: Tensor, rule: str, found: str, remedy: str) -> None:
        wrong = wrong & counts
        if bool(wrong.any()):
            given = ids.cpu() if isinstance(ids, Tensor) else np.asarray(ids)
            first = given.reshape(-1).tolist()[int(wrong.int().argmax())]
            raise ValueError(f"`ids` must {rule}, got {shown(first)} {found}. {remedy}")

    remedy = "For several answers to a question, pass an id for each answer, and the questions as `clusters`."
    check(_repeated(hashes, counts) | known[name].contains(hashes), "be distinct in a system", "twice", remedy)
    for other, rows in known.items():
        rule, found = "belong to the same target and cluster in all systems", f"with another one in {shown(other)}"
        check(rows.differs_from(hashes, contents), rule, found, "Check that equal ids are equal rows.")
    return {**known, name: known[name] + RowIds.of(hashes[counts], contents[counts])}


def merged_rows(mine: Mapping[str, RowIds], theirs: Mapping[str, RowIds]) -> dict[str, RowIds]:
    """Return the rows of two parts of the data; raise ValueError as `with_rows` does."""
    for name, rows in theirs.items():
        if n := int(mine[name].contains(rows.hashes).sum()):
            raise ValueError(
                f"`other` must have other rows than this builder, got {n:,} ids of system {shown(name)} in both. Add "
                "each row once."
            )
        for other, common in mine.items():
            if n := int(common.differs_from(rows.hashes, rows.contents).sum()):
                raise ValueError(
                    f"`other` must have the same target and cluster for the same id, got {n:,} ids with different ones "
                    f"in {shown(other)} and {shown(name)}. Check that equal ids are equal rows."
                )
    return {name: mine[name] + rows for name, rows in theirs.items()}


def check_type_of_ids(are_texts: Set[bool]) -> None:
    """Raise TypeError if some ids are text, and others integers."""
    if len(are_texts) > 1:
        raise TypeError(
            "`ids` must be text in all systems and batches, or integers in all, got both. Convert integers with str()."
        )


def _repeated(hashes: Tensor, counts: Tensor) -> Tensor:
    """Return whether rows that count have the hash of an earlier one, bool `(n,)`."""
    places = counts.nonzero().squeeze(-1)
    order = places[hashes[places].argsort(stable=True)]
    found = torch.zeros_like(counts)
    found[order[1:]] = hashes[order[1:]] == hashes[order[:-1]]
    return found
