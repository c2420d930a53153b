"""Dead links of the built documentation are found."""

from docs.check_links import dead_links, main

PAGE = "<html><head><link rel='canonical' href='http://a'/></head><body>{}</body></html>"
LIVING = ("#", "#here", "sub/", "sub/index.html#top-of-sub", "https://example.org/#x", "mailto:a@b", "data:,", "?q=1")
PICTURE = "<p id='here'/><img src='a%20b.png' srcset='a%20b.png, a%20b.png 2x'>"
DEAD = {
    "<a href='none.html'>": "no such file",
    "<a href='/index.html'>": "no such file",
    "<a href='#none'>": "no such anchor",
    "<a href='sub/#none'>": "no such anchor",
    "<img src='none.png'>": "no such file",
    "<img srcset='a%20b.png, none.png 2x'>": "no such file",
    "<script src='none.js'></script>": "no such file",
    "<link rel='stylesheet' href='none.css'>": "no such file",
    "<a href='http://example.org'>": "not https",
    "<script src='//example.org/x.js'></script>": "not https",
}


def test_dead_links_are_found_and_living_ones_accepted(tmp_path, capsys):
    assert main(tmp_path) == 1, "a folder without pages"
    (tmp_path / "sub").mkdir()
    (tmp_path / "a b.png").touch()
    (tmp_path / "sub" / "index.html").write_text(PAGE.format("<h1 id='top-of-sub'>Sub</h1>"))
    page = tmp_path / "index.html"
    page.write_text(PAGE.format("".join(f"<a href='{link}'></a>" for link in LIVING) + PICTURE))
    assert dead_links(tmp_path) == (len(LIVING) + 3, [])
    assert main(tmp_path) == 0
    assert "of which 0 are dead" in capsys.readouterr().out
    for element, why in DEAD.items():
        page.write_text(PAGE.format(f"<p>\n{element}"))
        assert main(tmp_path) == 1, element
        assert capsys.readouterr().out.startswith("index.html:2: "), element
        assert dead_links(tmp_path)[1][0].endswith(why), element
