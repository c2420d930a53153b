"""JSON Schema of `report.json`, a file of the package."""

from pathlib import Path

from torchcalib.results.base import SCHEMA_VERSION as SCHEMA_VERSION

PATH = Path(__file__).with_name("report.schema.json")
