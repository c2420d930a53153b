"""Import public names at their first use, which makes `import torchcalib` faster."""

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def names_of_stub(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for a package whose stub file lists the public names.

    The imports in the stub, `__init__.pyi`, are the only list of public names. Type checkers also read this file.

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
            raise unknown_name(package, name, names)
        module = module_of[name]
        found = import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)
        setattr(sys.modules[package], name, found)  # the next access finds it without this function
        return found

    return names, import_name, lambda: names


_NAMESPACES = ("functional", "calibration", "inference", "losses", "plots", "integrations", "sklearn")


def unknown_name(module: str, name: str, known: Sequence[str]) -> AttributeError:
    """Return the error for an unknown attribute of a module, with a suggestion. Call it in the module's `__getattr__`.

    Args:
        module: name of the module.
        name: the unknown attribute.
        known: public names of the module.
    """
    message = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # Python tools look up many private names, and a search would be slow
        return AttributeError(message)
    from torchcalib._bridges import NAMES, SHORTEST, nearest

    found = NAMES.get(name) or next(_locations(name), None)
    if found is None and (close := nearest(name, known, shortest=SHORTEST)):
        found = f"{module}.{close}".removeprefix("torchcalib.")
    if found is None:
        return AttributeError(message)
    return AttributeError(f"{message}. {found if ' ' in found else f'Did you mean `torchcalib.{found}`?'}")


def _locations(name: str) -> Iterator[str]:
    """Yield the qualified names of `name` in all namespaces, such as `functional.ece` for `ece`."""
    for namespace in ("", *_NAMESPACES):
        if name in public_names(namespace):
            yield f"{namespace}.{name}".lstrip(".")


def public_names(namespace: str) -> set[str]:
    """Parse the public names in the source of a namespace, because importing it would take seconds."""
    base = Path(__file__).parent / namespace
    path = next(p for p in (base / "__init__.pyi", base.with_suffix(".py"), base / "__init__.py") if p.is_file())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}
