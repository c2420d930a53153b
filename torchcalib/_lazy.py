"""Public names that are imported when they are first used, so that importing the package costs little."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def names_of_stub(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package from the imports in its stub file, `__init__.pyi`.

    The stub is the one list of public names: type checkers and editors read it, too.

    Args:
        package: name of the package.
        file: its `__file__`.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    module_of = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names = sorted(module_of)

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        return import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)

    return names, find, lambda: names
