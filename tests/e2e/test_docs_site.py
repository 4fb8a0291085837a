"""The documentation builds as a site without a warning, and every link and image of the site leads somewhere.

Needs the extra `docs`, which `make docs` installs. Where there is a Chromium, it opens pages.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import CHROMIUM, dom_and_complaints
from tests.e2e.launching import run_cold
from tests.unit.packaging_builds import ROOT, copy_of_tree

NEEDED = ("mkdocs", "material", "mkdocstrings")


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Collect href, src and id."""
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="needs the extra `docs`: run `make docs` first",
    ),
]
OPENED = (
    "index.html", "start/parallelism-on-a-laptop.html", "guides/multi-node.html", "extend/optimizer.html",
    "reference/api.html", "explain/schedules.html", "reports/measured.html", "examples/index.html",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, which `make docs` builds without a warning."""
    tree = copy_of_tree(tmp_path_factory.mktemp("docs") / "tree")
    done = run_cold(sys.executable, "tools/build_docs.py", directory=tree, timeout=120, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert not re.search(r"WARNING|ERROR", done.stderr), done.stderr
    return tree / "build" / "site"


def test_the_site_has_every_page_and_no_dead_link(site: Path) -> None:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    named = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    named |= {path.relative_to(ROOT).with_name("index.html") for path in (ROOT / "examples").rglob("README.md")}
    assert named <= {path.relative_to(site) for path in pages}
    links = [(path, link) for path, page in pages.items() for link in page.links]
    assert [f"{path.relative_to(site)}: {link}" for path, link in links if is_dead(path, link, pages)] == []
    # A browser needs no other site.
    loaded = [link for _, link in links if link.endswith((".js", ".css", ".woff2", ".png", ".svg"))]
    assert [link for link in loaded if re.search(r"https?://", link)] == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: install it, or set CHROMIUM to its path")
@pytest.mark.parametrize("name", OPENED)
def test_a_browser_shows_the_page_and_has_nothing_to_complain_about(name: str, site: Path, tmp_path: Path) -> None:
    document, complaints = dom_and_complaints(site / name, tmp_path)
    assert complaints == []
    assert re.search(r"<h1[^>]*>\s*\S", document)
    assert 'data-md-component="search"' in document
    if name == "reference/api.html":
        assert 'id="megacore.train.engine.PipelineEngine"' in document, "its docstring"


def is_dead(path: Path, link: str, pages: dict[Path, Page]) -> bool:
    """Whether a link of a page leads to no file of the site, or to a section that its page does not have."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or path.name == "404.html":  # whose links are relative to the server's root
        return False
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return True
    return bool(parts.fragment) and target in pages and unquote(parts.fragment) not in pages[target].anchors
