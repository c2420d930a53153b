"""Paths of prediction files: patterns and checks. No file is opened."""

from collections.abc import Iterable, Sequence
from glob import glob
from pathlib import Path

from torchcalib.io.errors import InputError, quoted, reading

FORMATS = {
    ".npz": "npz",
    ".npy": "npy",
    ".pt": "pt",
    ".pth": "pt",
    ".safetensors": "safetensors",
    ".csv": "csv",
    ".csv.gz": "csv",
    ".tsv": "tsv",
    ".tsv.gz": "tsv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
}
"""File format by suffix, in lower case."""

TABLES = ("csv", "tsv", "json", "jsonl", "parquet")
"""Formats with columns. The others contain arrays."""

_ADVICE = {
    ".eval": "Read logs of language models with torchcalib audit.",
    ".pkl": "Pickles are never loaded. Write df.to_parquet(path) or numpy.savez(path, probs=..., targets=...).",
    ".xlsx": "Save the sheet as .csv.",
}
"""Advice for other formats, by suffix."""


def format_of(path: Path) -> str | None:
    """Return the file format by suffix, or None for an unknown suffix."""
    name = path.name.lower()
    return next((kind for suffix, kind in FORMATS.items() if name.endswith(suffix)), None)


def expanded(names: Iterable[str]) -> tuple[Path, ...]:
    """Expand names and patterns to file paths, in the given order; `**` matches folders of any depth.

    Matches are sorted by name, character by character: `part-10` precedes `part-9`.
    """
    found: list[Path] = []
    for name in names:
        if not any(letter in name for letter in "*?[") or Path(name).exists():
            found.append(Path(name))
            continue
        matched = sorted(glob(name, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not matched:
            raise InputError(f"`{name}` must match at least one file, got none. Check the pattern and the folder.")
        found += map(Path, matched)
    return tuple(found)


def check_paths(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Check that all paths are different, existing files of one known format, and return them."""
    files = tuple(Path(path) for path in ([paths] if isinstance(paths, str) else paths))
    if not files:
        raise InputError("`paths` must contain at least one file, got none. Name one or more files.")
    for path in files:
        with reading(str(path), format_of(path) or "known"):
            if not path.is_file():  # opening a pipe may block, and a device may be endless
                found = "a path that does not exist. Check the path."
                if str(path) == "-":
                    found = "standard input, which is not read. Save it in a file, such as rows.csv."
                if path.exists():
                    found = "a pipe or device. Save its content in a file."
                if path.is_dir():
                    found = "a directory. Name the files in it."
                raise InputError(f"`{path}` must be a file, got {found}")
        if format_of(path) is None:
            advice = _ADVICE.get(path.suffix.lower(), "Save it in one of these formats.")
            raise InputError(f"`{path}` must end in one of {', '.join(FORMATS)}, got `{path.suffix}`. {advice}")
        if format_of(path) != format_of(files[0]):
            raise InputError(
                f"`{files[0]}` and `{path}` must have the same format, got two formats. Read the files separately, "
                "or convert one."
            )
    if len({path.resolve() for path in files}) < len(files):
        raise InputError(f"Every file must be named once, got a repeated file in {quoted(files)}. Remove it.")
    return files
