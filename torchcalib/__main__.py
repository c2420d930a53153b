"""Command line interface as a module: `python -m torchcalib`."""

import sys

from torchcalib.cli import main

if __name__ == "__main__":
    sys.exit(main())
