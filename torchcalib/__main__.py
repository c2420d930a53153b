"""`python -m torchcalib` is the command `torchcalib`."""

import sys

from torchcalib.cli import main

if __name__ == "__main__":
    sys.exit(main())
