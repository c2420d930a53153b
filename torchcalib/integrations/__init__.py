"""Metrics for Lightning and Hugging Face, which are optional dependencies, and `distinct_rows` for samplers."""

from torchcalib._lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
