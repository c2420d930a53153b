"""Open zip archives (`.npz`, `.pt`) after checks of their directory, and load the tensors of `.pt` files.

Python, torch and other programs may find different directories in the same damaged file. An attacker could show an
uncompressed archive to one of them, and a compressed one to another. Only the form that numpy and torch write is
accepted. The end record directly follows the directory, and ends the file.
"""

import sys
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from torchcalib.io.errors import quoted
from torchcalib.io.limits import MAX_HEADER

_MAX_DIRECTORY = 12 * 2**20  # largest size of the directory in bytes; an entry takes 50 to 100
_END, _END_BYTES = b"PK\x05\x06", 22
_LOCATOR, _LOCATOR_BYTES = b"PK\x06\x07", 20  # precedes the end record in archives of more than 4 GiB or 65,535 members
_LONG_END, _LONG_END_BYTES = b"PK\x06\x06", 56


@contextmanager
def open_archive(content: Path | bytes, methods: Collection[int]) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive whose members have one of the given compression methods, such as `zipfile.ZIP_STORED`."""
    with BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        size = file.seek(0, 2)
        _check_directory(file, size)
        with zipfile.ZipFile(file) as archive:
            _check_members(archive.infolist(), methods, size)
            yield archive


def load_tensors(content: Path | bytes) -> Any:
    """Load the tensors of a `torch.save` file, which are mapped into memory, or of the bytes of such a file.

    The archive and its pickle are checked before torch loads them; see `pickles`. Other Python objects raise
    `UnpicklingError`, and a damaged file raises a ValueError.
    """
    import torch  # after checks of headers, which are fast without it

    from torchcalib.io.pickles import check_pickle

    with open_archive(content, {zipfile.ZIP_STORED}) as archive:
        members = {info.filename: info for info in archive.infolist()}
        if len({name.lower() for name in members}) < len(members):  # torch ignores the case of names
            raise ValueError("the archive must have names that differ in more than case, got equal ones")
        pickles = [info for name, info in members.items() if name.lower().endswith(".pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_HEADER:
            raise ValueError(
                f"the archive must have one pickle of at most {MAX_HEADER:,} bytes, got {len(pickles)} pickles of "
                f"{sum(info.file_size for info in pickles):,} bytes"
            )
        root = pickles[0].filename.rpartition("/")[0]
        order = archive.read(members[f"{root}/byteorder"]) if f"{root}/byteorder" in members else b""
        if order not in (b"", sys.byteorder.encode()):  # torch would copy and convert all values
            raise ValueError(f"the archive must have the byte order of this machine, {sys.byteorder}, got another one")
        start = f"{root}/data/"
        records = {name.removeprefix(start): info.file_size for name, info in members.items() if name.startswith(start)}
        check_pickle(archive.read(pickles[0]), records)
    if isinstance(content, bytes):
        return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    return torch.load(content, map_location="cpu", weights_only=True, mmap=True)


def _check_members(members: Sequence[zipfile.ZipInfo], methods: Collection[int], size: int) -> None:
    """Raise if members are repeated, overlap, or have another compression."""
    packed = [info.filename for info in members if info.compress_type not in methods]
    if packed:
        kind = "uncompressed" if set(methods) == {zipfile.ZIP_STORED} else "uncompressed or deflated"
        raise ValueError(f"the archive must be {kind}, got the compressed member {packed[0]}")
    repeated = [name for name, times in Counter(info.filename for info in members).items() if times > 1]
    if repeated:
        raise ValueError(f"the archive must have unique array names, got {quoted(repeated)} twice")
    for info in members:
        # Later versions of Python replace names by those of an extra field. torch uses the original name.
        if info.filename != info.orig_filename:
            raise ValueError(f"names in the archive must be plain text, got {quoted([info.filename])}")
        if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
            raise ValueError(f"{quoted([info.filename])} must be stored completely, got other sizes in the directory")
    stored = sum(info.compress_size for info in members)
    if stored > size:
        raise ValueError(f"the members must not overlap, got {stored:,} bytes in a file of {size:,}")


def _check_directory(file: IO[bytes], size: int) -> None:
    """Raise unless the directory is at the end of the file, directly before its end record, and small."""
    file.seek(max(0, size - _LONG_END_BYTES - _LOCATOR_BYTES - _END_BYTES))
    tail = file.read()
    end, locator = tail[-_END_BYTES:], tail[-_END_BYTES - _LOCATOR_BYTES : -_END_BYTES]
    if end[:4] != _END or end[-2:] != b"\0\0":
        raise ValueError("the file must be a complete zip archive without a comment, got other content at its end")
    last = size - _END_BYTES  # position of the record that follows the directory
    length, start = int.from_bytes(end[12:16], "little"), int.from_bytes(end[16:20], "little")
    if locator[:4] == _LOCATOR:
        last -= _LOCATOR_BYTES + _LONG_END_BYTES
        long_end = tail[:_LONG_END_BYTES]
        if long_end[:4] != _LONG_END or int.from_bytes(locator[8:16], "little") != last:
            raise ValueError("the end records of the archive must be consecutive, got other content between them")
        length, start = int.from_bytes(long_end[40:48], "little"), int.from_bytes(long_end[48:56], "little")
    if length > _MAX_DIRECTORY:
        raise ValueError(f"the directory must have at most {_MAX_DIRECTORY:,} bytes, got {length:,}")
    if start + length != last:
        raise ValueError("the directory must be directly before the end record, got other content between them")
