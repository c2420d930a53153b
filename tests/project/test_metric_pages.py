"""Pages of the metrics and of the API reference: contents that a build of the documentation needs."""

import importlib
import re

import pytest
import torch
from processes import ROOT

import torchcalib

SENTENCE = re.compile(r"(?<=[.]) +(?=[A-Z`$])")
FIELDS = {
    *(
        "title",
        "label",
        "family",
        "formula",
        "symbols",
        "range",
        "use",
        "avoid",
        "related",
        "data",
        "options",
        "result",
    ),
    *("figure", "band", "best", "also", "caption", "origin", "question", "unit", "source"),
}
"""Fields of an entry of `metrics.toml`, with those that follow from the class."""


@pytest.fixture(scope="module")
def metric_pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/_ext"))
        yield importlib.import_module("metric_pages")


@pytest.fixture(scope="module")
def metric_figures(metric_pages):
    pytest.importorskip("matplotlib")
    return importlib.import_module("metric_figures")


@pytest.fixture(scope="module")
def pages(metric_pages):
    return metric_pages.pages()


def test_every_public_metric_class_has_a_page(pages):
    of_pages = {page.cls for page in pages.values()} - {None}
    public = [getattr(torchcalib, name) for name in torchcalib.__all__]
    assert of_pages == {cls for cls in public if hasattr(cls, "function")}
    assert len(of_pages) >= 31


def test_every_entry_has_all_fields_and_no_others(metric_pages, pages):
    families = metric_pages.contents()["families"]
    for name, page in pages.items():
        assert set(page.entry) == FIELDS, name
        assert page.entry["family"] in families, name
        assert callable(page.function), name
        assert set(page.entry["related"]) <= set(pages) - {name}, name


def test_advice_consists_of_a_few_short_sentences(metric_pages, pages):
    texts = {(name, field): page.entry[field] for name, page in pages.items() for field in ("use", "avoid", "symbols")}
    for where, text in texts.items():
        sentences = SENTENCE.split(text)
        assert len(sentences) <= 7, where
        assert all(2 <= len(sentence.split()) <= 20 for sentence in sentences), where
    introductions = [family["introduction"] for family in metric_pages.contents()["families"].values()]
    assert not [s for text in introductions for s in SENTENCE.split(text) if len(s.split()) > 20]


def test_every_source_has_a_doi_an_arxiv_number_or_a_reason(metric_pages, pages):
    reasons = metric_pages.contents()["without_identifier"]
    sources = [part.strip() for page in pages.values() for part in page.entry["source"].split(";")]
    without = {source for source in sources if "](https://" not in metric_pages.linked(source)}
    assert without == set(reasons)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("doi 10.1609/aaai.v29i1.9602", "https://doi.org/10.1609/aaai.v29i1.9602"),
        ("arXiv 2306.14343, eq. 7", "https://arxiv.org/abs/2306.14343"),
        ("(NeurIPS 2017, arXiv:1705.08500).", "https://arxiv.org/abs/1705.08500"),
    ],
)
def test_link_of_an_identifier(metric_pages, text, link):
    assert f"]({link})" in metric_pages.linked(text)


def test_formulas_are_valid_latex(pages):
    tex2mathml = pytest.importorskip("docutils.utils.math.latex2mathml").tex2mathml
    for page in pages.values():
        assert "<math" in tex2mathml(page.entry["formula"], as_block=True), page.name
        for formula in re.findall(r"\$([^$]+)\$", page.entry["symbols"]):
            assert "<math" in tex2mathml(formula), page.name


def test_example_of_every_metric_runs_and_classes_agree_with_functions(pages):
    for page in pages.values():
        names, outputs = page.executed
        assert all(outputs), page.name
        assert page.blocks[0].count("\n") + 1 <= 6, page.name  # visible without scrolling
        if page.cls is not None:
            printed = [float(re.search(r"tensor\((.*?)[,)]", output)[1]) for output in outputs]
            # Different sums of float32 probabilities; blocks of SKCE end with each batch.
            tolerance = 0.05 if page.name == "skce" else 1e-3
            assert printed[0] == pytest.approx(printed[1], rel=tolerance), page.name
            assert names["metric"].compute().isfinite().all(), page.name


@pytest.mark.parametrize("name", ["nll", "ece", "nees", "spiegelhalter", "total_variation"])
def test_figure_shows_that_the_calibrated_model_is_compatible_with_calibration(metric_figures, pages, name):
    page = pages[name]
    data = metric_figures.simulated(page.entry["figure"], page.entry["data"], 500, 50)
    found = metric_figures.values(page, data.preds, data.target).mean(-1)
    null = metric_figures.values(page, data.preds, data.calibrated)
    middle = len(data.x) // 2
    assert data.x[middle] == pytest.approx(1)
    # The means of 50 data sets differ by the standard error of their difference, times a quantile.
    assert abs(found[middle] - null[middle].mean()) < 4 * null[middle].std() * (2 / 50) ** 0.5
    if name == "nll":
        assert found.argmin() == middle
    else:
        assert abs(found[-1] - null[-1].mean()) > 3 * null[-1].std()


def test_dark_figure_has_no_colour_of_the_light_one(metric_figures, pages):
    with metric_figures.settings():
        files = metric_figures.svg_files(metric_figures.response(pages["nees"]))
    style = torchcalib.plots.LIGHT
    assert style.above in files["light"]
    assert not {style.above, style.ink, style.paper, style.grid} & set(re.findall("#[0-9a-f]{6}", files["dark"]))


def test_every_public_name_is_in_exactly_one_table_of_the_api_reference(metric_pages):
    generated = {
        "torchcalib.md": metric_pages.api_page("torchcalib"),
        "functional.md": metric_pages.api_page("torchcalib.functional"),
    }
    written = [path for path in (ROOT / "docs/api").glob("*.md") if path.name not in generated]
    listed = []
    for text in (*generated.values(), *(path.read_text(encoding="utf-8") for path in written)):
        for module, names in re.findall(
            r"currentmodule:: (\S+)\n\n\.\. autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", text
        ):
            listed += [f"{module}.{name}" for name in names.split()]
    spaces = (
        "",
        "functional",
        "calibration",
        "inference",
        "losses",
        "plots",
        "results",
        "special",
        "testing",
        "integrations",
        "sklearn",
        "torchmetrics",
    )
    public, flat = [], set()
    for space in reversed(spaces):
        module = importlib.import_module(".".join(filter(None, ("torchcalib", space))))
        names = set(module.__all__) - {*spaces, "io", "metrics", "__version__"}
        public += [f"{module.__name__}.{name}" for name in names - (set() if space else flat)]
        flat |= names
    assert len(set(listed)) == len(listed)
    others = {name for name in listed if name.count(".") > 2}  # objects of modules, such as base classes
    assert set(listed) - others == set(public)


def test_state_of_a_metric_is_that_of_its_example(pages):
    names, _ = pages["ece"].executed
    assert pages["ece"].state[0] == f"{names['metric'].state.nbytes} bytes"
    names, _ = pages["ks"].executed
    assert "5 bytes" in pages["ks"].state[1]
    assert names["logits"].dtype == torch.float32


def test_page_contains_everything_that_its_entry_states(metric_pages, pages, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("ece", "nees", "calibration_curve", "aurc", "cox"):  # with and without class, figure and diagram
        page, entry = pages[name], pages[name].entry
        text = metric_pages.metric_page(page, tmp_path)
        stated = {"title", "formula", "symbols", "range", "use", "avoid", "best", "unit", "caption"}
        assert all(entry[field] in text for field in stated), name
        assert all(block in text for block in (*page.blocks, *page.executed[1])), name
        assert all(pages[other].entry["title"] in text for other in entry["related"]), name
        figures = {path.name for path in tmp_path.glob(f"{name}_*.svg")}
        assert figures == set(re.findall(r"figures/(\S+)", text)), name
        assert len(figures) == {"ece": 4, "nees": 2, "calibration_curve": 2, "aurc": 4, "cox": 2}[name]
