"""Python runs this before anything else, where its folder is on the path: torchcalib is then imported in half the time.

Of what is installed torchmetrics imports transformers and scipy, for metrics of its own, which takes seconds in every
process. Here it finds neither; torchcalib does not read what it finds.
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
