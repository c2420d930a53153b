"""
ECE prefers the worst calibrator
================================
"""

import torchcalib

print(torchcalib.__version__)
