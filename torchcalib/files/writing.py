"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> Path:
    """Write beside the target, then rename, so that nobody ever sees half a file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
