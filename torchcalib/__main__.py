"""Run the command line interface: `python -m torchcalib`."""

import sys

from torchcalib.cli import main

if __name__ == "__main__":
    sys.exit(main())
