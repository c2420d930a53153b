"""Names of all declared metrics in `torchcalib/functional.py`, and all flat names in `torchcalib/__init__.pyi`.

`python tests/public_names.py` adds the functions and classes that modules of `torchcalib/metrics` declare, and to the
stub also the names of the namespaces in `FLAT`. Editors read both files, and `import torchcalib` reads the stub instead
of importing these modules. Other names stand in the files only.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "torchcalib"
FUNCTIONAL, STUB = PACKAGE / "functional.py", PACKAGE / "__init__.pyi"
FLAT = "functional.py", "calibration/__init__.py", "inference/__init__.pyi", "plots/__init__.pyi"
"""Files of the namespaces whose functions, calibrators and diagrams can be imported from `torchcalib`. If two have a
name in common, the first one counts."""


def declared():
    """Return the names of functions, and of classes, by the name of the module in `torchcalib.metrics`."""
    functions, classes = defaultdict(set), defaultdict(set)
    for path in (PACKAGE / "metrics").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any(keyword.arg == "function" for keyword in node.keywords):
                classes[path.stem].add(node.name)
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
                if decorators & {"metric_function", "tuple_function"}:
                    functions[path.stem].add(node.name)
    return functions, classes


def functional_text():
    """Return `functional.py` with all declared functions."""
    text = FUNCTIONAL.read_text(encoding="utf-8")
    imported = r"from torchcalib\.metrics\.([\w.]+) import (?:\(([^)]*)\)|(.*))\n"
    names = defaultdict(set, {m[1]: set(re.findall(r"\w+", m[2] or m[3])) for m in re.finditer(imported, text)})
    for module, functions in declared()[0].items():
        names[module] |= functions
    lines = [import_line(f"torchcalib.metrics.{module}", found) for module, found in sorted(names.items())]
    start = re.search(imported, text).start()
    rest = re.sub(imported, "", text[start:])
    public = sorted({*set().union(*names.values()), *re.findall(r'^    "(\w+)",', text, re.MULTILINE)})
    listed = "".join(f'    "{name}",\n' for name in public)
    rest = re.sub(r"__all__ = \[\n.*?\]\n", f"__all__ = [\n{listed}]\n", rest, flags=re.DOTALL)
    return text[:start] + "".join(lines) + rest


def by_case(name):
    """Return the key that sorts classes before functions, as ruff does."""
    return not name[0].isupper(), name


def import_line(module, names):
    names = sorted(names, key=by_case)
    line = f"from {module} import {', '.join(names)}\n"
    listed = "".join(f"    {name},\n" for name in names)
    return line if len(line) <= 121 else f"from {module} import (\n{listed})\n"


def flat_names():
    """Return the module of each function of the namespaces in `FLAT`, and of each calibrator, by its name."""
    module_of = {}
    for file in FLAT:
        for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ImportFrom) or node.module.partition(".")[2] in ("_lazy", "core.arguments"):
                continue
            for name in (alias.name for alias in node.names):
                if name.islower() or ".calibration." in node.module:
                    module_of.setdefault(name, node.module)
    return module_of


def stub_text():
    """Return the stub with all declared classes and all flat names."""
    lines = STUB.read_text(encoding="utf-8").splitlines()
    module_of = {name: f"torchcalib.metrics.{module}" for module, names in declared()[1].items() for name in names}
    module_of |= flat_names()
    lines = [line for line in lines if line.split()[3] not in module_of]  # a name may have moved to another module
    added = {f"from {module} import {name} as {name}" for name, module in module_of.items()}
    plain = [line for line in lines if line.startswith("from torchcalib import")]
    others = {*lines, *added} - set(plain)
    return "\n".join([*plain, *sorted(others, key=lambda line: (line.split()[1], screaming(line.split()[3])))]) + "\n"


def screaming(name):
    """Return the key that sorts constants before classes before functions, as ruff does."""
    return not name.isupper(), *by_case(name)


if __name__ == "__main__":
    FUNCTIONAL.write_text(functional_text(), encoding="utf-8")
    STUB.write_text(stub_text(), encoding="utf-8")
