"""Write files atomically, and only where a file may be."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file completely or not at all. A symbolic link at `path` is replaced, never followed."""
    return write_all(path.parent, {path.name: content})[0]


def write_all(folder: Path, contents: Mapping[str, bytes]) -> tuple[Path, ...]:
    """Write files into an existing folder, and return their paths. If the disk is full, the folder is unchanged."""
    paths = {name: folder / name for name in contents}
    for path in paths.values():
        check_writable(path)
    with _named(next(iter(paths.values()))):
        temporary_folder = TemporaryDirectory(prefix=".torchcalib-", dir=folder)
    with temporary_folder as temporary:
        for name, content in contents.items():
            with _named(paths[name]):
                Path(temporary, name).write_bytes(content)
        for name, path in paths.items():
            with _named(path):
                Path(temporary, name).replace(path)
    return tuple(paths.values())


def check_writable(path: Path) -> None:
    """Raise OSError if the path is a folder, or a device, pipe or socket, also behind a link: replacing it would harm.

    Links to files and folders are replaced.
    """
    is_replaced = path.is_file() or (path.is_symlink() and (path.is_dir() or not path.exists()))
    if path.exists() and not is_replaced:
        kind = "a folder" if path.is_dir() else "a device, pipe or socket"
        raise OSError(f"`{path}` must be a file, got {kind}. Choose another name.")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name `path` in errors of the operating system: that of a full disk has no name, others a temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
