"""Scorers, an error function, a display and calibrators in the conventions of scikit-learn, an optional dependency."""

from torchcalib._lazy import names_of_stub

try:
    import sklearn as _  # noqa: F401 - the package, not this module
except ImportError as error:
    raise ImportError(
        "`torchcalib.sklearn` needs scikit-learn, which is not installed. "
        "Install it: pip install 'torchcalib[sklearn]'."
    ) from error

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
