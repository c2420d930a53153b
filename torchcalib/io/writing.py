"""Write files atomically, and only where a file may be."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file completely or not at all. A symbolic link at `path` is replaced, never followed."""
    return write_all(path.parent, {path.name: content})[0]


def write_all(folder: Path, contents: Mapping[str, bytes]) -> tuple[Path, ...]:
    """Write files into an existing folder, and return their paths. If the disk is full, the folder is unchanged.

    A name such as `log_1/audit.html` is that of a file in a folder below, which is created. A link in the place of a
    file or of a folder below is replaced.
    """
    paths = {name: folder / name for name in contents}
    below = {path.parent for path in paths.values()} - {folder}
    for place in below:
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(f"`{place}` must be a folder, got a file. Choose another folder.")
    for path in paths.values():
        if not path.parent.is_symlink() or path.parent == folder:
            check_writable(path)
    with _named(next(iter(paths.values()))):
        temporary_folder = TemporaryDirectory(prefix=".torchcalib-", dir=folder)
    with temporary_folder as temporary:
        for name, content in contents.items():
            with _named(paths[name]):
                written = Path(temporary, name)
                written.parent.mkdir(parents=True, exist_ok=True)
                written.write_bytes(content)
        for place in below:
            if place.is_symlink():
                place.unlink()
            place.mkdir(exist_ok=True)
        for name, path in paths.items():
            with _named(path):
                Path(temporary, name).replace(path)
    return tuple(paths.values())


def check_writable(path: Path) -> None:
    """Raise OSError if the path is a folder, or a device, pipe or socket, also behind a link.

    Links to files and folders are replaced, except for those of the system, such as `/dev/stdout`.
    """
    if is_of_system(path):
        raise OSError(f"`{path}` must be a file, got a place of the system. Choose another name.")
    if path.exists() and not path.is_file() and not (path.is_symlink() and path.is_dir()):
        kind = "a folder" if path.is_dir() else "a device, pipe or socket"
        raise OSError(f"`{path}` must be a file, got {kind}. Choose another name.")


def is_of_system(path: Path) -> bool:
    """Return True for a place directly in `/dev`, or in `/proc` or `/sys`. Folders such as `/dev/shm` are for files."""
    folder = path.parent.resolve()
    return folder == Path("/dev") or folder.parts[1:2] in (("proc",), ("sys",))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name `path` in errors of the operating system: that of a full disk has no name, others a temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
