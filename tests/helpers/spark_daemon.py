"""Parent of Spark's Python workers. They are forked after the import of torchcalib, and therefore start fast."""

from pyspark.daemon import manager

import torchcalib.integrations.partitions  # noqa: F401

if __name__ == "__main__":
    manager()
