"""Metrics as functions of predictions and targets, and the types of the tables and curves that they return."""

from torchcalib._lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
