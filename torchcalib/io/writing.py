"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> Path:
    """Write beside the target, then rename, so that nobody ever sees half a file.

    A link at the place of the target is replaced, and never followed.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        with part.open("xb") as file:  # x: nor is one that turns up at this moment
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
