"""Halve the time to import torchcalib. Python imports this module first if its folder is on the path.

torchmetrics imports transformers and scipy, if they are installed, which takes seconds in every process. Here it finds
neither, because torchcalib does not need them.
"""

import os
import sys

import lightning_utilities.core.imports as found

for package in filter(None, os.environ.get("TORCHCALIB_TEST_WITHOUT", "").split(",")):
    sys.modules[package] = None  # as in tests/conftest.py

_is_there = found.RequirementCache.__bool__
found.RequirementCache.__bool__ = lambda self: (
    not str(getattr(self, "requirement", None)).startswith(("transformers", "scipy")) and _is_there(self)
)
