"""Metrics for Lightning and Hugging Face, which are optional dependencies, and functions for data loops.

`distinct_rows` is for samplers, and `linear_logits` for models whose logits would need too much memory.
"""

from torchcalib._lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
