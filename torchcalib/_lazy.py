"""Lazy imports: public names are imported at their first use, which makes `import torchcalib` fast."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def names_of_stub(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for a package whose stub file lists the public names.

    The imports in the stub, `__init__.pyi`, are the only list of public names. Type checkers and editors also use it.

    Args:
        package: name of the package.
        file: `__file__` of the package.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    module_of = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names = sorted(module_of)

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        return import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)

    return names, import_name, lambda: names
