"""Names of all declared metrics, and all flat names, in the stubs of `torchcalib.functional` and `torchcalib`.

`python tests/public_names.py` adds the functions that modules of `torchcalib/functional` declare to the first stub. It
adds the classes of `torchcalib/metrics` and the names of the namespaces in `FLAT` to the second one. Editors read both
files, and the packages read them instead of importing these modules. Other names are in the stubs only.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "torchcalib"
FUNCTIONAL, STUB = PACKAGE / "functional/__init__.pyi", PACKAGE / "__init__.pyi"
FLAT = "functional/__init__.pyi", "calibration/__init__.pyi", "inference/__init__.pyi", "plots/__init__.pyi"
"""Files of the namespaces whose functions, calibrators and diagrams can be imported from `torchcalib`. If two have a
name in common, the first one counts."""
DECORATORS = {"metric_function", "tuple_function", "declared"}


def declared(folder):
    """Return the module of each metric function and class in a folder, by its name."""
    module_of = {}
    for path in (PACKAGE / folder).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_class = isinstance(node, ast.ClassDef) and any(keyword.arg == "function" for keyword in node.keywords)
            if is_class or (isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and decorated(node)):
                module_of[node.name] = f"torchcalib.{folder}.{path.stem}"
    return module_of


def decorated(node):
    """Return whether a decorator makes a function a metric."""
    return bool(DECORATORS & {ast.unparse(each).partition("(")[0] for each in node.decorator_list})


def by_case(name):
    """Return the key that sorts classes before functions, as ruff does."""
    return not name[0].isupper(), name


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


def text_of(stub, module_of):
    """Return the text of a stub with all names of `module_of`."""
    lines = stub.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line.split()[3] not in module_of]  # a name may have moved to another module
    added = {f"from {module} import {name} as {name}" for name, module in module_of.items()}
    plain = [line for line in lines if line.startswith("from torchcalib import")]
    others = {*lines, *added} - set(plain)
    return "\n".join([*plain, *sorted(others, key=lambda line: (line.split()[1], screaming(line.split()[3])))]) + "\n"


def functional_text():
    """Return the stub of the functions with all declared ones."""
    return text_of(FUNCTIONAL, declared("functional"))


def stub_text():
    """Return the stub with all declared classes and all flat names."""
    return text_of(STUB, declared("metrics") | flat_names())


def screaming(name):
    """Return the key that sorts constants before classes before functions, as ruff does."""
    return not name.isupper(), *by_case(name)


if __name__ == "__main__":
    FUNCTIONAL.write_text(functional_text(), encoding="utf-8")
    STUB.write_text(stub_text(), encoding="utf-8")
