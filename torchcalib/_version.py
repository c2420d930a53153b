"""Version of the package, in a separate module that packaging tools can import without torch."""

__version__ = "0.1.0"
