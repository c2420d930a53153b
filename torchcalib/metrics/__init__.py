"""Calibration metrics as streaming classes, which are subclasses of `torchmetrics.Metric`; collection and wrappers.

Modules of this package define them. The names are those of `torchcalib`, and can be imported from here too.
"""

from typing import Any

import torchcalib


def __getattr__(name: str) -> Any:
    return getattr(torchcalib, name)
