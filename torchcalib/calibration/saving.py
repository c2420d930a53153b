"""Save fitted calibrators to files, and load them. The file contains the class name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.recommendation import CALIBRATORS, ON_REQUEST
from torchcalib.core.saved import check_is_file, content_of, loading, saved_bytes
from torchcalib.io.archives import load_tensors
from torchcalib.io.errors import shown
from torchcalib.io.writing import write_whole

CHECKPOINT_KEY = "torchcalib_calibrator"
"""Key of the `state_dict` of a calibrator in a training checkpoint."""

_KIND = "calibrator"  # of the saved form

CLASSES: dict[str, type[Calibrator]] = {kind.__name__: kind for kind in (*CALIBRATORS, *ON_REQUEST)}
"""Calibrators that can be saved, by the name of their class."""


def save_calibrator(calibrator: Calibrator, path: str | Path) -> None:
    """Write a fitted calibrator to a file, atomically; see `torchcalib.core.saved`.

    `load_calibrator` loads the file.

    Args:
        calibrator: a fitted calibrator. `load_calibrator` supports the classes of this package; for your own subclass
            use `load_state_dict`.
        path: path of the file. An existing file is replaced.

    Raises:
        TypeError, ValueError: `calibrator` is not a calibrator, or not fitted.
        OSError: the file cannot be written.

    Example:
        >>> from torchcalib.calibration import TemperatureScaling
        >>> calibrator = TemperatureScaling().fit([0.9, 0.99, 0.01, 0.8, 0.05], [1, 0, 0, 1, 0])
        >>> save_calibrator(calibrator, "temperature.safetensors")  # doctest: +SKIP
    """
    if not isinstance(calibrator, Calibrator):
        raise TypeError(f"`calibrator` must be a fitted calibrator, got {type(calibrator).__name__}.")
    if calibrator.task is None:
        raise ValueError(f"`calibrator` must be fitted, got {shown(calibrator)}. Call fit(preds, target) first.")
    state = calibrator.state_dict()
    described = state.pop("_extra_state")
    write_whole(Path(path), saved_bytes(_KIND, {"described": described, "parameters": dict(state)}))


def load_calibrator(path: str | Path) -> Calibrator:
    """Load a fitted calibrator from a file of `save_calibrator` or `torchcalib report --save-calibrator`.

    Lightning checkpoints of a training with `torchcalib.integrations.CalibrationMonitor(calibrate=...)` are also
    supported if their other values are tensors and plain Python values.

    Args:
        path: path of the file. No code in the file is executed.

    Returns:
        The calibrator, on the CPU.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not contain a calibrator.

    Example:
        >>> import tempfile
        >>> from torchcalib.calibration import AffineScaling
        >>> preds = torch.tensor([0.9, 0.99, 0.3, 0.8, 0.6])
        >>> calibrator = AffineScaling().fit(preds, torch.tensor([1, 1, 0, 0, 1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_calibrator(calibrator, f"{folder}/cal.safetensors")
        ...     loaded = load_calibrator(f"{folder}/cal.safetensors")
        >>> bool((loaded(preds) == calibrator(preds)).all())
        True
    """
    place = Path(path)
    with loading(_KIND, str(path), "`save_calibrator`"):
        check_is_file(place)
        if is_zipfile(place):  # a checkpoint of torch
            checkpoint = load_tensors(place)
            if not isinstance(checkpoint, dict) or CHECKPOINT_KEY not in checkpoint:
                raise ValueError("a checkpoint must contain a calibrator, got none. Versions before 0.1.0 wrote others")
            return calibrator_from(checkpoint[CHECKPOINT_KEY])
        saved = content_of(place, _KIND)
        described = {name: tuple(x) if isinstance(x, list) else x for name, x in saved["described"].items()}
        return calibrator_from({"_extra_state": described, **saved["parameters"]})


def calibrator_from(state: Mapping[str, Any]) -> Calibrator:
    """Create a fitted calibrator from its `state_dict`."""
    calibrator = CLASSES[state["_extra_state"]["kind"]]()
    owned = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"`{name}` must be stored completely, got fewer values in the file")
        owned[name] = value.clone() if isinstance(value, torch.Tensor) else value
    calibrator.load_state_dict(owned)
    return calibrator
