"""Callbacks for training loops of other packages, which they need, and rows of a distributed sampler."""

from torchcalib._lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
