"""Lets mkdocs show files outside docs/: README.md as a page, and every file that a page links to. Pages are linked by
their titles, and names in code break between words only."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Their paths on the site."""
NAMED = re.compile(r"\[[\w/]+\.md\](?=\(([\w./]+\.md)(?:#[\w-]+)?\))")
"""The text of a link that is the page's path."""
LINK = re.compile(r"\]\((?!\w+://|#|mailto:)([^)#\s]+)([^)\s]*)\)")


def source(page: str) -> str:
    """The file of the repository that a page of the site is made from."""
    return next((name for name, path in PAGES.items() if path == page), f"docs/{page}")


def site_path(name: str) -> str:
    """The path on the site of a file of the repository."""
    return PAGES.get(name) or name.removeprefix("docs/")


def target(link: str, page: str) -> str:
    """The file of the repository that a link of a page leads to."""
    return normpath(str(PurePosixPath(source(page)).parent / link))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for page in [file for file in files if file.is_documentation_page()]:
        for link, _ in LINK.findall((ROOT / source(page.src_uri)).read_text(encoding="utf-8")):
            name = target(link, page.src_uri)
            if (ROOT / name).is_file() and files.get_file_from_path(site_path(name)) is None:
                files.append(File.generated(config, site_path(name), abs_src_path=str(ROOT / name)))
    return files


def title(name: str) -> str:
    """The first heading of a page."""
    return re.search(r"^# (.*)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[1]


def on_page_markdown(markdown: str, page, **_: object) -> str:
    """Point links to their files on the site, and call pages by their titles."""
    here = page.file.src_uri
    folder = str(PurePosixPath(here).parent)
    markdown = NAMED.sub(lambda m: f"[{title(target(m[1], here))}]", markdown)
    return LINK.sub(lambda m: f"]({relpath(site_path(target(m[1], here)), folder)}{m[2]})", markdown)


OPTION = r'<span class="option">\g<0></span>'


def breakable(code: re.Match[str]) -> str:
    """Code in a line of text: its options stay whole at their hyphens, and a long name may break after _ and dots."""
    text = re.sub(r"(?<![\w-])--?\w+(?:-\w+)*", OPTION, code[1])
    return f"<code>{re.sub(r'(?<=[a-z0-9][_./])(?=[a-z0-9])', '<wbr>', text)}</code>"


def on_page_content(html: str, **_: object) -> str:
    html = re.sub(r"(?<=</span>)--?\w+(?:-\w+)*", OPTION, html)  # in blocks
    return re.sub(r"(?<!</span>)<code>([^<]+)</code>", breakable, html)
