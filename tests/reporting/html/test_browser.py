"""Pages in a browser: layout on a screen, a phone and paper, keyboard, contrast and structure.

The tests need Playwright's Python package, and Chromium or Chrome on the PATH.
"""

import csv
import math
import re
import shutil
from contextlib import contextmanager

import pytest
from helpers.pages import PAGES

api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
if EXECUTABLE is None:
    pytest.skip("neither Chromium nor Chrome is on the PATH", allow_module_level=True)
pytestmark = pytest.mark.extended
SCREEN, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
COMPARISONS = tuple(name for name in PAGES if "systems" in name)
OPEN_FOLDS = "document.querySelectorAll('details').forEach(each => { each.open = true; })"


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Return the addresses of all pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    for number, render in enumerate(PAGES.values()):
        (folder / f"{number}.html").write_text(render(), encoding="utf-8")
    return {name: (folder / f"{number}.html").as_uri() for number, name in enumerate(PAGES)}


@pytest.fixture
def opened(browser, addresses):
    """Return a context manager that opens a page, and asserts that it writes no messages and loads nothing."""

    @contextmanager
    def open_page(name, viewport=SCREEN, **options):
        with browser.new_context(viewport=viewport, **options) as context:
            page, events = context.new_page(), []
            page.on("console", lambda message: events.append(message.text))
            page.on("pageerror", lambda error: events.append(str(error)))
            page.on("request", lambda request: events.append(request.url))
            page.goto(addresses[name])
            yield page
            assert {event.partition("#")[0] for event in events} == {addresses[name]}

    return open_page


@pytest.mark.parametrize("name", PAGES)
def test_first_screen_contains_verdict_action_numbers_and_diagram(name, opened):
    parts = ["#verdict", "#key-numbers", *["#cause", "#action"] * (name not in COMPARISONS)]
    with opened(name) as page:
        for part in (*parts, "#diagram svg:visible"):
            box = page.locator(part).bounding_box()
            assert box["x"] >= 0, part
            assert box["y"] >= 0, part
            assert box["x"] + box["width"] <= SCREEN["width"], part
            assert box["y"] + box["height"] <= SCREEN["height"], part
        # A calibrated model also has the error that would be found.
        n_numbers = {"calibrated": 6, "two systems": 2, "four systems": 4}.get(name, 5)
        assert page.locator("#key-numbers dt").count() == n_numbers
    with opened(name, PHONE) as page:
        box = page.locator("#diagram svg:visible").bounding_box()
        # With the longest texts, only the upper part of the diagram is on the first screen.
        height = box["height"] if name in ("over-confident", "audit", "two systems") else box["height"] / 3
        assert box["y"] + height <= PHONE["height"]


@pytest.mark.parametrize("name", PAGES)
def test_on_a_phone_only_tables_scroll_sideways_and_show_it(name, opened):
    with opened(name, PHONE) as page:
        page.evaluate(OPEN_FOLDS)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        wide = """() => [...document.querySelectorAll('body *')].filter(
            each => each.getBoundingClientRect().right > innerWidth && !each.closest('.scroll table, svg')
        ).map(each => each.outerHTML.slice(0, 80))"""
        assert page.evaluate(wide) == []
        hidden = """() => [...document.querySelectorAll('.scroll')].filter(
            each => each.scrollWidth > each.clientWidth
                && !getComputedStyle(each).backgroundAttachment.includes('local')
        ).length"""
        assert page.evaluate(hidden) == 0
        # The row headings stay visible while the last column is shown.
        region = page.locator(".scroll").first
        region.evaluate("each => { each.scrollLeft = each.scrollWidth; }")
        left = region.locator("tbody th[scope=row]").first.evaluate("each => each.getBoundingClientRect().left")
        assert 0 <= left < PHONE["width"] / 4


LOW_CONTRAST = """() => {
  const rgb = text => {
    const [r, g, b, alpha = 1] = text.match(/[\\d.]+/g).map(Number);
    return {channels: [r, g, b], alpha};
  };
  const luminance = channels => {
    const [r, g, b] = channels.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const background = element => {
    for (let each = element; each; each = each.parentElement) {
      const {channels, alpha} = rgb(getComputedStyle(each).backgroundColor);
      if (alpha) return channels;
    }
    return [255, 255, 255];
  };
  const found = new Set();
  const require = (color, element, least, what) => {
    const ratio = contrast(rgb(color).channels, background(element));
    if (ratio < least) found.add(`${what}: ${color} has contrast ${ratio.toFixed(2)}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const color = element.closest('svg') ? style.fill : style.color;
    require(color, element, large ? 3 : 4.5, walker.currentNode.data.trim());
  }
  const root = getComputedStyle(document.documentElement);
  const ignored = ['--paper', '--rule'].map(name => {  // grid lines are not marks
    const probe = document.createElement('i');
    probe.style.color = root.getPropertyValue(name);
    return probe.style.color;
  });
  for (const mark of document.querySelectorAll('svg [style]:not(clipPath *, text)')) {
    if (!mark.closest('svg').checkVisibility()) continue;
    for (const [color, opacity] of [['fill', 'fillOpacity'], ['stroke', 'strokeOpacity']]) {
      const faint = [mark.style.opacity, mark.style[opacity]].some(x => x !== '' && Number(x) < 1);  // shaded areas
      if (!mark.style[color].startsWith('rgb') || faint || ignored.includes(mark.style[color])) continue;
      require(mark.style[color], mark, 3, `mark in ${mark.closest('svg').getAttribute('aria-label')}`);
    }
  }
  return [...found];
}"""
"""Texts with a contrast below 4.5 (large text: 3), and marks with a contrast below 3.

The formulas are those of WCAG 2.2, "relative luminance" and "contrast ratio"; the limits those of success criteria
1.4.3 and 1.4.11.
"""


@pytest.mark.parametrize("name", PAGES)
def test_texts_and_marks_have_enough_contrast_in_light_and_dark(name, opened):
    for scheme in ("light", "dark"):
        with opened(name, color_scheme=scheme) as page:
            page.evaluate(OPEN_FOLDS)
            page.locator("abbr").first.focus()  # shows the tooltip
            assert page.evaluate(LOW_CONTRAST) == [], scheme


DEFECTS = """() => {
  const all = selector => [...document.querySelectorAll(selector)];
  const named = each => each.getAttribute('aria-label')
    || document.getElementById(each.getAttribute('aria-labelledby'))?.textContent || each.textContent.trim();
  const levels = all('h1, h2, h3, h4, h5, h6').map(each => Number(each.tagName[1]));
  const ids = all('[id]').map(each => each.id);
  const references = all('[href^="#"]').map(each => each.getAttribute('href').slice(1));
  const labels = all('[aria-labelledby], [aria-describedby]').flatMap(
    each => [each.getAttribute('aria-labelledby'), each.getAttribute('aria-describedby')].filter(x => x));
  const checks = {
    language: document.documentElement.lang === 'en',
    title: document.title.length > 10,
    landmarks: all('main').length === 1 && all('footer').length === 1,
    headings: levels.filter(x => x === 1).length === 1 && levels[0] === 1
      && levels.every((x, k) => k === 0 || x <= levels[k - 1] + 1),
    ids: new Set(ids).size === ids.length,
    references: [...references, ...labels].every(id => ids.includes(id)),
    images: all('svg').every(each => each.matches('[role=img]') && each.getAttribute('aria-label').length > 20),
    tables: all('table').every(each => each.querySelector('thead th[scope=col]')
      && [...each.tBodies].every(body => [...body.rows].every(row => row.cells[0].matches('th[scope^=row]')))),
    regions: all('.scroll').every(each => each.tabIndex === 0 && each.getAttribute('role') === 'region'
      && (each.getAttribute('aria-label') || each.hasAttribute('aria-labelledby'))),
    names: all('button, a, summary, [role=region], [tabindex]').every(each => named(each)),
    definitions: all('dl > div').every(each => each.firstElementChild.matches('dt') && each.querySelector('dd')),
  };
  return Object.keys(checks).filter(name => !checks[name]);
}"""
"""Names of rules that a page violates, among the rules of axe-core for headings, ids, names, tables and lists."""


def test_pages_have_names_headings_and_table_headers(opened):
    for name in PAGES:
        with opened(name) as page:
            assert page.evaluate(DEFECTS) == [], name


def test_folds_open_and_close_by_keyboard_and_focus_is_always_visible(opened):
    with opened("multi-label") as page:
        n_folds, toggled = page.locator("details").count(), []
        while len(toggled) < n_folds:
            page.keyboard.press("Tab")
            focused = page.locator(":focus")
            assert focused.evaluate("each => getComputedStyle(each).outlineStyle") != "none"
            if not focused.evaluate("each => each.matches('summary')"):
                continue
            toggled.append(focused.inner_text())
            states = []
            for key in ("Enter", "Space"):
                page.keyboard.press(key)
                states.append(focused.evaluate("each => each.parentElement.open"))
            assert states == [True, False], toggled
        assert len(set(toggled)) == n_folds
        # with all folds open: table headers, explanations and links
        page.evaluate(OPEN_FOLDS)
        page.evaluate("document.activeElement.blur()")
        invisible = """() => [...document.querySelectorAll('button, a, abbr, summary, .scroll')].filter(each => {
            each.focus({focusVisible: true});
            return document.activeElement !== each || getComputedStyle(each).outlineStyle === 'none';
        }).map(each => each.outerHTML.slice(0, 80))"""
        assert page.evaluate(invisible) == []


def sections_of(page, k):
    """Return heading and numbers in column `k` of each section of the first table; NaN for cells without a number."""
    script = """(table, k) => [...table.tBodies].map(body => [body.rows[0].textContent, [...body.rows].slice(1).map(
        row => row.cells[k].querySelector('data')?.value ?? 'nan')])"""
    found = page.locator("table").first.evaluate(script, k)
    return [(heading, [float(number) for number in numbers]) for heading, numbers in found]


def test_tables_sort_numbers_within_sections_by_mouse_and_keyboard(opened):
    def ordered(sections, sign):
        return [(h, sorted(x, key=lambda v: (math.isnan(v), sign * v if v == v else 0))) for h, x in sections]

    with opened("over-confident") as page:
        page.locator("summary").first.click()
        heads = page.locator("table >> nth=0").locator("thead th")
        headers = heads.all_inner_texts()
        for name, first in (("value", "descending"), ("p-value", "ascending")):
            k = headers.index(name)
            before = sections_of(page, k)
            assert len(before) > 2
            for turn, how in enumerate(("click", "Enter", "Space")):
                button = heads.nth(k).get_by_role("button", name=name)
                if how == "click":
                    button.click()
                else:
                    button.focus()
                    page.keyboard.press(how)
                falls = (first == "descending") == (turn != 1)
                assert str(sections_of(page, k)) == str(ordered(before, -1 if falls else 1)), (name, how)
                states = heads.evaluate_all("each => each.map(head => head.getAttribute('aria-sort'))")
                assert states == [None] * k + [("ascending", "descending")[falls]] + [None] * (len(headers) - k - 1)


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_tables_are_copied_as_csv_with_exact_numbers_and_as_markdown(has_clipboard, opened):
    with opened("four systems", permissions=["clipboard-read"]) as page:
        if not has_clipboard:  # as in a page that is not trusted
            page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('denied')); }")
        formula = page.locator("table").first.locator("tbody tr").first.locator("th, td").first
        formula.evaluate("cell => { cell.textContent = '=1+1'; }")  # the name of a system may be any text
        copied = {}
        for label in ("Copy as CSV", "Copy as Markdown"):
            button = page.get_by_role("button", name=label).first
            button.click()
            page.get_by_role("button", name="Copied").first.wait_for()
            copied[label] = page.evaluate("navigator.clipboard.readText()")
            page.get_by_role("button", name=label).first.wait_for()  # the label returns
        table = page.locator("table").first
        exact = table.locator("tbody tr").nth(1).locator("data").evaluate_all("all => all.map(each => each.value)")
        header, *rows = csv.reader(copied["Copy as CSV"].splitlines())
        assert header == table.locator("thead th").all_inner_texts()
        assert [len(row) for row in rows] == [len(header)] * 4
        assert rows[1][2:] == exact
        assert rows[0][0] == "'=1+1"
        lines = copied["Copy as Markdown"].splitlines()
        assert lines[:2] == [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
        assert len(lines) == 6
        assert {line.count("|") for line in lines} == {len(header) + 1}


def test_explanations_are_shown_by_pointer_and_focus_inside_the_window(opened):
    for viewport in (SCREEN, PHONE):
        with opened("multi-label", viewport) as page:
            page.locator("summary").first.click()
            terms, tip = page.locator("abbr:visible"), page.get_by_role("tooltip")
            for act in ("hover", "focus"):
                for term in (terms.first, terms.last):
                    getattr(term, act)()
                    assert tip.inner_text() == term.get_attribute("data-tip")
                    assert term.get_attribute("aria-describedby") == tip.get_attribute("id")
                    box = tip.bounding_box()
                    assert 0 <= box["x"] <= viewport["width"] - box["width"]
                    assert 0 <= box["y"] <= viewport["height"] - box["height"]
                page.keyboard.press("Escape")
                assert tip.is_hidden()
                page.mouse.move(0, 0)


def test_links_to_sources_open_the_fold_each_time(opened):
    with opened("multi-label") as page:
        page.locator("summary").first.click()
        link = page.locator("table a").last
        target = page.locator(link.get_attribute("href"))
        for _ in range(2):
            assert not target.is_visible()
            link.click()
            assert target.is_visible()
            top = target.bounding_box()["y"]
            assert 0 <= top < SCREEN["height"]
            page.locator("summary", has=page.locator("#sources")).click()


def test_print_opens_all_folds_on_white_pages(opened):
    for name in ("multi-label", "four systems"):
        with opened(name, color_scheme="dark") as page:
            on_first = len(re.findall(rb"/Type\s*/Page\b", page.pdf(page_ranges="1")))
            assert len(re.findall(rb"/Type\s*/Page\b", page.pdf())) > on_first == 1
            page.emulate_media(media="print")
            assert page.locator("details[open]").count() == 0
            contents = "details > :not(summary, .tools)"
            assert page.locator(f"{contents}:visible").count() == page.locator(contents).count() > 0
            paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert paper == "rgb(255, 255, 255)"
            assert page.locator(".tools:visible, svg.dark:visible").count() == 0


def test_page_without_javascript_has_every_number_and_explanation(opened):
    for name in PAGES:
        with opened(name, java_script_enabled=False) as page:
            for summary in page.locator("summary").all():
                summary.click()
            assert page.locator("details:not([open])").count() == 0
            assert page.locator("data:visible").count() == page.locator("data").count() > 0
            assert page.locator("svg:visible").count() == page.locator("svg").count() / 2, "light or dark"
            assert page.locator("abbr[title]").count() == page.locator("abbr").count() > 0
            assert page.locator("button").count() == 0
