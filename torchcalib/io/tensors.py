"""What `torch.save` wrote, read so that nothing in it runs, and nothing of it is larger in memory than in the file."""

import zipfile
from pathlib import Path
from typing import Any

import torch


def load_tensors(path: str | Path, *, mmap: bool = False) -> Any:
    """Read what `torch.save` wrote onto the CPU: tensors, and plain containers of them.

    Args:
        path: the file.
        mmap: map tensors into memory where the format allows it, torch's own since 1.6.

    Raises:
        pickle.UnpicklingError: there are other Python objects in it. None of them is made.
        ValueError: parts of it are compressed, which torch never does, and could be of any size in memory.
        OSError, RuntimeError: it cannot be read.
    """
    is_zip = zipfile.is_zipfile(path)
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            packed = [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"{packed[0]} is compressed, which torch.save never does")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
