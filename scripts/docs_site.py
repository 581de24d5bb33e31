"""Hooks of mkdocs for the docs site.

They add README.md and every file that a page links to, name links by the titles of their pages, and let names in code
break only between words.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Path on the site of pages outside docs/."""
NAMED = re.compile(r"\[[\w/]+\.md\](?=\(([\w./]+\.md)(?:#[\w-]+)?\))")
"""Matches the text of a link that is the page's path."""
LINK = re.compile(r"\]\((?!\w+://|#|mailto:)([^)#\s]+)([^)\s]*)\)")


def source(page: str) -> str:
    """Return the path in the repository of a page's file, given its path in the site's sources, such as "launch.md"."""
    return next((name for name, path in PAGES.items() if path == page), f"docs/{page}")


def site_path(name: str) -> str:
    """Return the path of a file among the site's sources, given its path in the repository.

    "docs/launch.md" is "launch.md" and "README.md" is "index.md"; other files outside docs/ keep their path.
    """
    return PAGES.get(name) or name.removeprefix("docs/")


def target(link: str, page: str) -> str:
    """Return the path in the repository to which `link`, without its anchor, leads on the page `page` of the site."""
    return normpath(str(PurePosixPath(source(page)).parent / link))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add to the site pages outside docs/ and the files that pages link to. A hook of mkdocs."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for page in [file for file in files if file.is_documentation_page()]:
        for link, _ in LINK.findall((ROOT / source(page.src_uri)).read_text(encoding="utf-8")):
            name = target(link, page.src_uri)
            if (ROOT / name).is_file() and files.get_file_from_path(site_path(name)) is None:
                files.append(File.generated(config, site_path(name), abs_src_path=str(ROOT / name)))
    return files


def title(name: str) -> str:
    """Return the first heading of a page, given its file's path in the repository."""
    return re.search(r"^# (.*)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[1]


def on_page_markdown(markdown: str, page, **_: object) -> str:
    """Return a page's Markdown with links that lead to the site, and linked pages named by their titles.

    A hook of mkdocs.
    """
    here = page.file.src_uri
    folder = str(PurePosixPath(here).parent)
    markdown = NAMED.sub(lambda m: f"[{title(target(m[1], here))}]", markdown)
    return LINK.sub(lambda m: f"]({relpath(site_path(target(m[1], here)), folder)}{m[2]})", markdown)


OPTION = r'<span class="option">\g<0></span>'


def breakable(code: re.Match[str]) -> str:
    """Return <code> around a match's first group, its HTML, able to break after _, . and / but not at options' "-"."""
    text = re.sub(r"(?<![\w-])--?\w+(?:-\w+)*", OPTION, code[1])
    return f"<code>{re.sub(r'(?<=[a-z0-9][_./])(?=[a-z0-9])', '<wbr>', text)}</code>"


def on_page_content(html: str, **_: object) -> str:
    """Return a page's HTML with marks where inline code may break, and options unbroken also in blocks of code.

    A hook of mkdocs.
    """
    html = re.sub(r"(?<=</span>)--?\w+(?:-\w+)*", OPTION, html)  # in blocks
    return re.sub(r"(?<!</span>)<code>([^<]+)</code>", breakable, html)
