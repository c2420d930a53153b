"""
A reliability diagram
=====================

Predictions of a binary classifier whose log-odds are twice too large.
"""

import torch

import torchcalib

generator = torch.Generator().manual_seed(0)
logits = torch.randn(2_000, generator=generator)
y = (torch.rand(2_000, generator=generator) < logits.sigmoid()).long()
torchcalib.plots.reliability_diagram((2 * logits).sigmoid(), y)
