"""Dead links of the built documentation are found."""

import pytest

from docs.check_links import dead_links, main

PAGE = "<html><head><link rel='canonical' href='http://a'/></head><body>{}</body></html>"


@pytest.fixture
def site(tmp_path):
    """Write a page with the given content beside other files, and return the folder."""

    def write(content):
        (tmp_path / "sub").mkdir(exist_ok=True)
        (tmp_path / "a b.png").touch()
        (tmp_path / "sub" / "index.html").write_text(PAGE.format("<h1 id='top-of-sub'>Sub</h1>"))
        (tmp_path / "index.html").write_text(PAGE.format(content))
        return tmp_path

    return write


def test_living_links_are_accepted(site, capsys):
    good = ["#", "#here", "sub/", "sub/index.html#top-of-sub", "https://example.org/#x", "mailto:a@b", "data:,", "?q=1"]
    links = "".join(f"<a href='{link}'></a>" for link in good)
    folder = site(links + "<p id='here'/><img src='a%20b.png' srcset='a%20b.png, a%20b.png 2x'>")
    assert dead_links(folder) == (len(good) + 3, [])
    assert main(folder) == 0
    assert "of which 0 are dead" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("element", "why"),
    [
        ("<a href='none.html'>", "no such file"),
        ("<a href='/index.html'>", "no such file"),
        ("<a href='#none'>", "no such anchor"),
        ("<a href='sub/#none'>", "no such anchor"),
        ("<img src='none.png'>", "no such file"),
        ("<img srcset='a%20b.png, none.png 2x'>", "no such file"),
        ("<script src='none.js'></script>", "no such file"),
        ("<link rel='stylesheet' href='none.css'>", "no such file"),
        ("<a href='http://example.org'>", "not https"),
        ("<script src='//example.org/x.js'></script>", "not https"),
    ],
)
def test_dead_links_are_found(site, capsys, element, why):
    folder = site(f"<p>\n{element}")
    assert main(folder) == 1
    assert capsys.readouterr().out.startswith("index.html:2: ")
    assert dead_links(folder)[1][0].endswith(why)


def test_a_folder_without_pages_fails(tmp_path):
    assert main(tmp_path) == 1
