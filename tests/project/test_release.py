"""The files for packaging agree with pyproject.toml and the checkout."""

import re
import tomllib

from processes import ROOT

import torchcalib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
RECIPE = (ROOT / "conda" / "recipe" / "recipe.yaml").read_text(encoding="utf-8")
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def requirements(names):
    """Return requirements of pyproject.toml as pairs of name and version range, without extras of this package."""
    found = [re.fullmatch(r"([\w-]+)(>=[\w.]+)", name) for name in names if not name.startswith("torchcalib[")]
    return {(match[1], match[2]) for match in found}


def test_version_is_stated_once():
    version = re.compile(rf"(?<![\d.]){re.escape(torchcalib.__version__)}(?![\d.])")
    files = [
        "pyproject.toml",
        "CITATION.cff",
        "docs/conf.py",
        "conda/recipe/recipe.yaml",
        ".github/workflows/release.yml",
    ]
    assert not [name for name in files if version.search((ROOT / name).read_text(encoding="utf-8"))]
    assert f"## {torchcalib.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_conda_recipe_has_the_requirements_of_the_package_and_of_reports():
    listed = RECIPE.partition("  run:\n")[2].partition("\ntests:")[0]
    expected = requirements(PROJECT["dependencies"] + EXTRAS["plot"] + EXTRAS["report"])
    expected = {(CONDA_NAMES.get(name, name), versions) for name, versions in expected}
    expected |= {("python", PROJECT["requires-python"])}
    assert set(re.findall(r"^    - ([\w-]+) (>=[\w.]+)$", listed, re.MULTILINE)) == expected
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert [f"setuptools {found}" for found in re.findall(r"- setuptools (>=\d+)", RECIPE)] == [
        name.replace(">=", " >=") for name in setuptools
    ]


def test_workflow_tests_the_python_versions_of_the_classifiers():
    classified = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    platforms = workflow.partition("platforms:")[2].partition("newest:")[0]
    assert set(re.findall(r'"(3\.\d+)"', platforms)) == classified
    assert PROJECT["requires-python"] == f">={min(classified, key=lambda name: int(name.split('.')[1]))}"


WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_actions_of_workflows_are_pinned_by_commit_and_have_the_least_permissions():
    assert set(WORKFLOWS) == {"docs.yml", "release.yml", "tests.yml"}
    for name, workflow in WORKFLOWS.items():
        used = re.findall(r"uses: (?!\./)(.+)", workflow)
        assert used
        assert not [
            action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action)
        ]
        assert re.search(r"^permissions:\n  contents: read\n\n", workflow, re.MULTILINE), name
        assert workflow.count("actions/checkout@") == workflow.count("persist-credentials: false")
    granted = {
        line.strip() for text in WORKFLOWS.values() for line in text.splitlines() if re.search(r": write\b", line)
    }
    assert {line.partition("  #")[0] for line in granted} == {
        "id-token: write",
        "attestations: write",
        "contents: write",
    }
    build, _, notebooks = WORKFLOWS["docs.yml"].partition("\n  notebooks:\n")
    assert "write" not in build + WORKFLOWS["tests.yml"]
    # The job that writes runs no code of the repository, and not for pull requests.
    assert "if: github.ref == 'refs/heads/main'" in notebooks
    assert "checkout" not in notebooks


def test_a_release_is_built_with_known_hashes_only_and_attested():
    build = WORKFLOWS["release.yml"].partition("\n  build:\n")[2].partition("\n  publish:\n")[0]
    commands = re.findall(r"run: (python .+)", build)
    assert [line for line in commands if "pip install" in line] == [
        "python -m pip install --require-hashes --requirement constraints-release.txt"
    ]
    assert "PIP_EXTRA_INDEX_URL" not in WORKFLOWS["release.yml"]
    assert build.index("actions/attest-build-provenance@") < build.index("actions/upload-artifact@")
    lines = (ROOT / "constraints-release.txt").read_text(encoding="utf-8").splitlines()[1:]
    hashed = dict(re.fullmatch(r"([\w-]+)==([\w.]+)(?: --hash=sha256:[0-9a-f]{64})+", line).groups() for line in lines)
    assert {"build", "setuptools"} <= set(hashed)
    pinned = dict(
        re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {name: pinned[name] for name in hashed if name in pinned} == {k: v for k, v in hashed.items() if k in pinned}


def test_every_file_of_the_checkout_is_in_the_source_distribution_or_left_out_on_purpose():
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    included = set(re.findall(r"^(?:graft|include) (.+)$", manifest, re.MULTILINE))
    included = {name for line in included for name in line.split()}
    automatic = {"LICENSE", "README.md", "pyproject.toml", "torchcalib", "MANIFEST.in"}
    missing = {name for name in included if not (ROOT / name).exists()}
    assert not missing
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.suffix in {".md", ".txt", ".toml", ".py", ".cff"}:
            assert path.name in included | automatic, path.name
