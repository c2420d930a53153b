"""Parsed HTML of pages and notebooks."""

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Parsed(HTMLParser):
    """Elements, words without scripts and styles, and cells by row. The parser checks that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.open, self.elements, self.words, self.rows = text, [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data):
        self.words += [] if {"script", "style"} & set(self.open) else [data]
        if {"th", "td"} & set(self.open):
            self.rows[-1][-1] += data

    def values_of(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]
