"""The site of `make docs`, built as it is there: whole and searchable without a server, readable without the source."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def pages(site: Path) -> dict[str, str]:
    return {page.name: page.read_text(encoding="utf-8") for page in site.glob("*.html") if page.name != "404.html"}


def test_it_is_searched_without_a_server(site: Path) -> None:
    start, index = (site / "search/search_index.js").read_text(encoding="utf-8").split("=", 1)
    assert start.strip() == "var __index"
    assert {entry["location"].partition("#")[0] for entry in json.loads(index)["docs"]} == pages(site).keys()
    for name, html in pages(site).items():
        scripts = re.findall(r'<script[^>]* src="([^"]*)"', html)
        styles = re.findall(r'<link rel="stylesheet" href="([^"]*)"', html)
        assert any("iframe-worker" in script for script in scripts), name
        assert all((site / file).is_file() for file in scripts + styles), (name, scripts, styles)


def test_pages_are_called_by_their_titles(site: Path) -> None:
    for name, html in pages(site).items():
        assert not re.findall(r"<a [^>]*>[\w/]+\.md</a>", html), name
    assert any('<a href="moe.html">The MoE layer</a>' in html for html in pages(site).values())


def test_columns_have_headings(site: Path) -> None:
    for name, html in pages(site).items():
        for head in re.findall(r"<thead>(.*?)</thead>", html, re.DOTALL):
            columns = [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<th.*?</th>", head, re.DOTALL)]
            assert all(columns[1:]), f"{name}: {columns}"  # the corner over the names of rows may be empty


def test_names_break_between_words_and_options_not_at_all(site: Path) -> None:
    html = pages(site)["config.html"]
    assert "<td><code>global_<wbr>batch_<wbr>size</code></td>" in html
    assert '<code><span class="option">--print-config</span></code>' in html  # in a sentence
    assert '</span><span class="option">--print-config</span>' in html  # in a block
