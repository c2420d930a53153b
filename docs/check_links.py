"""Check that the links of the built documentation resolve, without a network: `python docs/check_links.py`.

Links between pages, anchors, images, scripts and style sheets must exist. Links to other sites must use https.
"""

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

BUILT = Path(__file__).parent / "_build" / "html"
SHOWN = 20  # number of dead links that are printed


@dataclass
class Page(HTMLParser):
    """The links of one page, with their lines, and the anchors that other links can lead to."""

    links: list[tuple[int, str]] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Initialise the parser."""
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the anchors and links of an element."""
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        found = [values[name] for name in ("href", "src", "data-src", "poster") if name in values]
        found += [part.split()[0] for part in values.get("srcset", "").split(",") if part.strip()]
        if not (tag == "link" and values.get("rel") == "canonical"):
            self.links += [(self.getpos()[0], link.strip()) for link in found]


def read(path: Path) -> Page:
    """Return the links and anchors of a page."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def reason(link: str, path: Path, pages: dict[Path, Page]) -> str:
    """Return why a link of the page at `path` is dead, or an empty text."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return "" if parts.scheme in ("https", "mailto", "data") else "not https"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if parts.path.startswith("/") or not target.is_file():
        return "no such file"
    anchor = unquote(parts.fragment)
    # Browsers interpret an empty anchor and `top` as the top of the page.
    if anchor not in ("", "top") and target in pages and anchor not in pages[target].anchors:
        return "no such anchor"
    return ""


def dead_links(folder: Path) -> tuple[int, list[str]]:
    """Return the number of links of all pages in a folder, and a line of text for each dead one."""
    folder = folder.resolve()
    pages = {path: read(path) for path in sorted(folder.rglob("*.html"))}
    dead, count = [], 0
    for path, page in pages.items():
        count += len(page.links)
        for line, link in page.links:
            if why := reason(link, path, pages):
                dead.append(f"{path.relative_to(folder)}:{line}: {link}: {why}")
    return count, dead


def main(folder: str | Path = BUILT) -> int:
    """Print the first dead links, and return 1 if there are any or if there are no links."""
    count, dead = dead_links(Path(folder))
    print(*dead[:SHOWN], sep="\n", end="\n" if dead else "")
    print(f"{count} links in {folder}, of which {len(dead)} are dead")
    return int(bool(dead) or not count)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
