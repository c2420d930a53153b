"""Convert text labels, groups and clusters to numbers, and find the names of classes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from numpy import format_float_positional
from torch import Tensor

from torchcalib.io.columns import MATCH_NAMES, ignored, positions, split
from torchcalib.io.errors import FILL_IN, InputError, quoted
from torchcalib.io.names import outcome_names
from torchcalib.io.reader import Reader, Text

_BYTES_AT_ONCE = 2**20
_CODES_PER_ROW = 16  # whole numbers in a range of this size are counted, others sorted


def first_row(wrong: Tensor) -> int | None:
    """Return the index of the first row that contains True, or None."""
    rows = wrong.reshape(len(wrong), -1).any(1)
    return int(rows.int().argmax()) if bool(rows.any()) else None


def decimals_of(values: Tensor, most: int, tolerance: float) -> int | None:
    """Return the smallest number of decimals to which all values are rounded; None if it exceeds `most`."""
    wide = values.double()
    rounded = ((k, (wide * 10**k).round() / 10**k) for k in range(most + 1))
    return next((k for k, near in rounded if bool((near - wide).abs().le(tolerance).all())), None)


def hashes_of(texts: Sequence[str]) -> Tensor:
    """Return a 64-bit hash of each text, int64 `(N,)`, which is equal in all files and processes."""
    digests = {text: blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest() for text in set(texts)}
    return torch.tensor([int.from_bytes(digests[text], signed=True) for text in texts], dtype=torch.int64, device="cpu")


def cluster_hashes(clusters: Text, label: str, start: int) -> Tensor:
    """Return a hash of the cluster of each row. `start` rows precede the first row."""
    row = first_row(torch.tensor([not name for name in clusters.names], dtype=torch.bool, device="cpu")[clusters.codes])
    if row is not None:
        raise InputError(
            f"{label} must contain the cluster of each row, got an empty text in row {start + row + 1}. "
            "Give rows without a cluster distinct names."
        )
    return hashes_of(clusters.names)[clusters.codes]


def group_numbers(groups: Text) -> tuple[Tensor, list[str]]:
    """Return the number of the group of each row, -1 for an empty text, and the sorted names of the groups."""
    names = sorted(set(groups.names) - {""})
    numbers = {"": -1, **{name: k for k, name in enumerate(names)}}
    return torch.tensor([numbers[name] for name in groups.names], dtype=torch.int64, device="cpu")[groups.codes], names


def whole_groups(numbers: Tensor) -> Tensor:
    """Return the numbers of groups as integers, -1 for NaN. Numbers that are not whole are unchanged, for the error."""
    if not numbers.is_floating_point():
        return numbers
    filled = numbers.nan_to_num(-1)
    return filled.long() if torch.equal(filled, filled.round()) else numbers


_SEPARATOR = "\x1f"  # of the columns in the text of a group; the unit separator of ASCII


def numbered_levels(values: Tensor) -> tuple[Tensor, list[str]]:
    """Return the position of each number of a column in its sorted distinct values, and the texts of these.

    Missing numbers are -1: NaN, and -1 in a column of integers.
    """
    numbers, distinct = distinct_numbers(values)
    return numbers, texts_of_numbers(distinct)


def texts_of_numbers(values: Tensor) -> list[str]:
    """Return the shortest texts of distinct numbers."""
    if not values.is_floating_point():
        return list(map(str, values.tolist()))
    wide = values.cpu().to(torch.promote_types(values.dtype, torch.float32)).numpy()
    return [format_float_positional(x, trim="-") for x in wide]


def distinct_numbers(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each number in the sorted distinct values, -1 if it is missing, and these values."""
    is_missing = values.isnan() if values.is_floating_point() else values.eq(-1)
    is_complete = not bool(is_missing.any())
    present = values if is_complete else values[~is_missing]
    if values.is_floating_point() or values.dtype == torch.bool or not present.numel():
        distinct, places = torch.unique(present, return_inverse=True)
    else:
        low, high = map(int, present.aminmax())
        places, distinct = _numbered(present.long(), low, high - low + 1)
    if not is_complete:
        places = torch.full(values.shape, -1, device=values.device).masked_scatter(~is_missing, places)
    return places, distinct


def _numbered(codes: Tensor, first: int, n_codes: int) -> tuple[Tensor, Tensor]:
    """Return the position of each of `n_codes` whole numbers from `first` in the sorted distinct ones, and these."""
    if n_codes > _CODES_PER_ROW * codes.numel():
        found: tuple[Tensor, Tensor] = torch.unique(codes, return_inverse=True)
        return found[1], found[0]
    codes = codes - first if first else codes
    is_present = torch.bincount(codes.flatten(), minlength=n_codes) > 0
    numbers = codes if bool(is_present.all()) else (is_present.cumsum(0) - 1)[codes]
    return numbers, is_present.nonzero().squeeze(-1) + first


def crossed(columns: Mapping[str, tuple[Tensor, Sequence[str]]], keep_partial: bool = True) -> tuple[Tensor, list[str]]:
    """Return the number of the combination of levels of each row, -1 for no group, and the texts of combinations.

    A column has the level of each row, -1 for a missing value, and the texts of its levels. The text of a group
    has a part "age=old" for each column, separated by a character that `shown_group` replaces. A row without any value
    has no group. With `keep_partial`, the part of a missing value is empty; otherwise such a row has no group.
    """
    numbers, levels = combinations([(found, len(texts)) for found, texts in columns.values()])
    is_kept = (levels >= 0).any(-1) if keep_partial else (levels >= 0).all(-1)
    numbers = (is_kept.cumsum(0) - 1).masked_fill(~is_kept, -1)[numbers]
    values = {name: texts for name, (_, texts) in columns.items()}
    parts_of = parts_of_combinations(levels[is_kept].tolist(), values)
    return numbers, [_SEPARATOR.join(part.replace(_SEPARATOR, " ") for part in parts) for parts in parts_of]


def parts_of_combinations(levels: Iterable[Sequence[int]], columns: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """Return the parts of each combination, such as "age=old", from its levels and the values of each column.

    The part of a missing value, of level -1, is "".
    """
    return [
        [f"{name}={values[k]}" if k >= 0 else "" for k, (name, values) in zip(row, columns.items(), strict=True)]
        for row in levels
    ]


def crossed_text(columns: Mapping[str, Text | Tensor]) -> Text:
    """Return the text of the combination of the values of several columns in each row; see `crossed`."""
    levels: dict[str, tuple[Tensor, Sequence[str]]] = {}
    for name, column in columns.items():
        levels[name] = group_numbers(column) if isinstance(column, Text) else numbered_levels(column)
    numbers, texts = crossed(levels)
    return Text([*texts, ""], numbers.masked_fill(numbers < 0, len(texts)))


def combinations(columns: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return the number of the combination of levels of each row, and the levels of each combination `(G, columns)`.

    A column has levels from -1 to `n` - 1, and `n`. Combinations that occur are numbered in ascending order.
    """
    numbers = torch.zeros_like(columns[0][0])
    levels = numbers.new_zeros(1, 0)
    for found, n in columns:
        numbers, present = _numbered(numbers * (n + 1) + found + 1, 0, len(levels) * (n + 1))
        levels = torch.cat((levels[present // (n + 1)], (present % (n + 1) - 1).unsqueeze(-1)), -1)
    return numbers, levels


def parts_of_group(text: str) -> list[str]:
    """Return the part of each column in the text of a group, such as "age=old", or "" for a missing value."""
    return text.split(_SEPARATOR)


def shown_group(text: str) -> str:
    """Return the name of a group of several columns, such as "age=old, sex=f"; a plain text is unchanged."""
    return text.replace(_SEPARATOR, ", ")


def class_indices(labels: Text, classes: Sequence[str], label: str, start: int, allow_missing: bool = False) -> Tensor:
    """Convert text labels to class indices, int64 with the shape of the codes. `start` rows precede the first label.

    With `allow_missing`, an empty label becomes NaN in a float64 result; otherwise it raises an error.
    """
    names = [text.strip() for text in labels.names]
    if not allow_missing:
        check_present(
            torch.tensor([not name for name in names], dtype=torch.bool, device="cpu")[labels.codes], label, start
        )
    try:
        index = positions([name for name in names if name], classes) or {}
    except ValueError as error:
        row = first_row(
            torch.tensor([name not in ("", *classes) for name in names], dtype=torch.bool, device="cpu")[labels.codes]
        )
        raise InputError(f"{label} must contain {error} (row {start + int(row or 0) + 1}). {MATCH_NAMES}") from None
    found = torch.tensor([float(index.get(name, torch.nan)) for name in names], dtype=torch.float64, device="cpu")[
        labels.codes
    ]
    return found if bool(found.isnan().any()) else found.to(torch.int64)


def class_positions(target: Tensor, classes: Sequence[str], label: str, ignore_index: int | None) -> Tensor:
    """Return the positions of the classes that whole labels name, with NaN for missing ones; see `columns.positions`.

    The label `ignore_index` becomes the value of `columns.ignored`.
    """
    target = target.byte() if target.dtype == torch.bool else target
    distinct = torch.unique(target[~target.isnan()])
    kept = [int(x) for x in distinct.tolist() if x != ignore_index]
    try:
        index = positions(kept, classes)
    except ValueError as error:
        advice = "Pass ignore_index=-100. " * (-100 in kept)
        raise InputError(f"{label} must contain {error}. {advice}{MATCH_NAMES}") from None
    if index is None or not kept:
        return target
    mark = ignored(ignore_index, classes)
    places = torch.tensor(
        [index.get(int(x), mark) for x in distinct.tolist()], dtype=target.dtype, device=target.device
    )
    found = places[torch.searchsorted(distinct, target).clamp(max=len(places) - 1)]
    return torch.where(target.isnan(), target, found)


def check_present(is_missing: Tensor, label: str, start: int) -> None:
    """Raise if a label is missing. `start` rows precede the first one."""
    if (row := first_row(is_missing)) is not None:
        raise InputError(f"{label} must contain a label in every row, got none in row {start + row + 1}. {FILL_IN}")


def labels_in(readers: Sequence[Reader], target: str) -> Counter[str]:
    """Return the number of rows with each text label; "" for missing labels."""
    counts: Counter[str] = Counter()
    for reader in readers:
        for (labels,) in reader.stream([target], _BYTES_AT_ONCE, allow_missing=True):
            for text, n in zip(
                labels.names, torch.bincount(labels.codes, minlength=len(labels.names)).tolist(), strict=True
            ):
                counts[text.strip()] += n
    return counts


def names_of_labels(readers: Sequence[Reader], preds: str, target: str, task: str) -> tuple[str, ...]:
    """Return the distinct text labels in sorted order: names alphabetically, then whole numbers by value.

    Texts such as "no" and "yes" have the order of `outcome_names`. The predictions must agree with any other order: the
    mean prediction of each class must be largest in the rows with its label. If a binary column such as `prob_dog`
    names the positive class, this label is last, without a check. Targets of confidences must have the first order.
    """
    n_classes = 2 if task in ("binary", "confidence") else readers[0].arrays[preds].shape[-1]
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = defaultdict(int)
    for reader in readers:
        for values, labels in reader.stream([preds, target], _BYTES_AT_ONCE, allow_missing=True):
            rows = values.reshape(len(labels), -1).double().nan_to_num(0.0, 30.0, -30.0)
            total = torch.zeros(len(labels.names), rows.shape[1], dtype=torch.float64, device="cpu").index_add_(
                0, labels.codes, rows
            )
            sizes = torch.bincount(labels.codes, minlength=len(labels.names)).tolist()
            for text, part, size in zip(labels.names, total, sizes, strict=True):
                name = text.strip()
                sums[name] = sums[name] + part if name in sums else part
                counts[name] += size
            if len(counts) > n_classes + 1:  # more than the classes and a missing label, which raises an error below
                break
    found = sorted(set(counts) - {""}, key=lambda name: (int(name), "") if name.isdecimal() else (-1, name))
    names = outcome_names(found) if n_classes == 2 else ()
    if task == "confidence" and not names:
        raise InputError(
            f"`{target}` in `{readers[0].label}` must contain outcomes such as `correct` and `incorrect`, got "
            f"{quoted(found)}. Store 1 for correct predictions and 0 for others."
        )
    named = split(preds)
    if names:  # the event is the class that the column names
        return names[::-1] if task == "binary" and named and named[1].lower() == names[0].lower() else names
    if len(found) != n_classes:
        raise InputError(
            f"`{target}` in `{readers[0].label}` must contain the names of all {n_classes} classes of `{preds}`, got "
            f"{len(found)}: {quoted(found)}. Pass all names in the order of `{preds}`: class_names=['A', 'B', ...]."
        )
    if task == "binary" and named and named[1] in found:
        return (next(name for name in found if name != named[1]), named[1])
    means = torch.stack([sums[name] / counts[name] for name in found])
    excess = means - sum(sums[name] for name in found) / sum(counts[name] for name in found)
    excess = torch.cat([-excess, excess], 1) if task == "binary" else excess
    best = excess.argmax(0).tolist()  # for each class, the label whose rows have the largest mean prediction
    if best != list(range(n_classes)):
        likely = [found[k] for k in best] if len(set(best)) == n_classes else found
        last = ", with the positive class last" if task == "binary" else ""
        raise InputError(
            f"`{preds}` in `{readers[0].label}` must agree with the sorted class names {quoted(found)}, got means in "
            f"another order. Pass class_names={likely} if this is the order{last}."
        )
    return tuple(found)
