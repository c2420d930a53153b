"""Saves fitted calibrators to files, and loads them without knowing their class."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchcalib.calibration.affine import AffineTransform
from torchcalib.calibration.calibrator import Transform
from torchcalib.calibration.histogram import HistogramTransform
from torchcalib.calibration.isotonic import IsotonicTransform
from torchcalib.io.saved import load_tensors, write_whole

CHECKPOINT_KEY = "torchcalib_calibrator"
"""Key of the `state_dict` of a calibrator in a training checkpoint."""

_KINDS: dict[str, type[Transform]] = {
    kind.__name__: kind for kind in (AffineTransform, HistogramTransform, IsotonicTransform)
}


def save_calibrator(transform: Transform, path: str | Path) -> None:
    """Write the `state_dict` of a fitted calibrator to a file, atomically.

    `load_calibrator` reads it; so does `torch.load(path, weights_only=True)`, for `load_state_dict`.

    Args:
        transform: fitted calibrator, as `Calibrator.fit` returns it.
        path: the file; an existing file is replaced.

    Raises:
        TypeError: `transform` is not a fitted calibrator.
        OSError: the file cannot be written.
    """
    if type(transform) not in _KINDS.values():
        raise TypeError(f"`transform` must be a fitted calibrator, got {type(transform).__name__}. Call fit() first.")
    content = io.BytesIO()
    torch.save(transform.state_dict(), content)
    write_whole(Path(path), content.getvalue())


def load_calibrator(path: str | Path) -> Transform:
    """Read a fitted calibrator from a file that `save_calibrator` or `torchcalib report --save-calibrator` wrote.

    It also reads Lightning checkpoints that `torchcalib.integrations.CalibrationMonitor(calibrate=...)` took part in,
    if their other values are tensors and plain Python values.

    Args:
        path: the file. No code in it is executed.

    Returns:
        The `Transform`, on the CPU: a module that maps predictions of the kind used in the fit to calibrated
        predictions of the same kind.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds something else.

    Example:
        >>> import tempfile
        >>> from torchcalib.calibration import AffineScaling
        >>> preds = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6])
        >>> transform = AffineScaling().fit(preds, torch.tensor([1, 1, 0, 0, 1]), task="binary")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_calibrator(transform, f"{folder}/cal.pt")
        ...     loaded = load_calibrator(f"{folder}/cal.pt")
        >>> bool((loaded(preds) == transform(preds)).all())
        True
    """
    with Path(path).open("rb"):  # raises an OSError, which is more precise than the errors below
        pass
    try:
        saved = load_tensors(path)
        return transform_of(saved.get(CHECKPOINT_KEY, saved))
    # Other files fail in many ways: UnpicklingError, KeyError, RuntimeError, EOFError ...
    except Exception as error:
        raise ValueError(
            f"`path` must be a file that `save_calibrator` wrote, got {str(path)!r}, which holds something else "
            f"({type(error).__name__}). Fit and save the calibrator again."
        ) from error


def transform_of(state: Mapping[str, Any]) -> Transform:
    """Return the fitted calibrator of a `state_dict`."""
    transform = _KINDS[state["_extra_state"]["kind"]]()
    transform.load_state_dict(state)
    return transform
