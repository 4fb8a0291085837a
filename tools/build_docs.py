"""Build the documentation as a site: `make docs`.

Needs mkdocs-material and mkdocstrings (`pip install -e .[docs]`).

The pages link to files of the repository outside docs/. So the pages are copied to build/docs, such a Markdown file
becomes a page too, any other file a page with numbered lines, and links lead there: the site is complete by itself. The
API page gets the documentation of the names in its tables from the docstrings.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("start", "guides", "extend", "reference", "explain", "reports")
FIRST = ("getting-started", "extending")  # of their sections
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
API_NAME = re.compile(r"^\| `(megacore[\w.]*)` \|", re.MULTILINE)
PAGES_OF_ROOT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")


class Site:
    """The pages of the site, in a directory of their own.

    Args:
        pages: where they are written; emptied first.
    """

    def __init__(self, pages: Path) -> None:
        self.pages = pages
        self._files: set[Path] = set()  # of the repository, which get a page

    def write(self) -> None:
        """Write all pages."""
        shutil.rmtree(self.pages, ignore_errors=True)
        shutil.copytree(ROOT / "docs", self.pages)
        for page in sorted(self.pages.rglob("*.md")):
            self._rewrite(page, ROOT / "docs" / page.relative_to(self.pages))
        for name in PAGES_OF_ROOT:
            page = self.pages / "project" / name
            page.parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, page)
            self._rewrite(page, ROOT / name)
        added: set[Path] = set()
        while new := self._files - added:  # a page that is added links to further files
            added |= new
            for file in sorted(new):
                self._add_file(file)
        api = self.pages / "reference" / "api.md"
        names = API_NAME.findall(api.read_text(encoding="utf-8"))
        with api.open("a", encoding="utf-8") as page_file:
            page_file.write("".join(f"\n::: {name}\n" for name in names))

    def navigation(self) -> list[object]:
        """The menu: the index, then each section with its pages by title, and the examples."""

        def entries(folder: str, *, key: Callable[[Path], Any] = str, pattern: str = "*.md") -> list[dict[str, str]]:
            pages = sorted(self.pages.joinpath(folder).glob(pattern), key=key)
            return [{title(page): str(page.relative_to(self.pages))} for page in pages]

        first: dict[str, Any] = {"key": lambda page: (page.stem not in FIRST, page)}
        examples = entries("examples", key=lambda page: (len(page.parts), page), pattern="**/*.md")
        sections: list[object] = [{section.capitalize(): entries(section, **first)} for section in SECTIONS]
        return ["index.md", *sections, {"Examples": examples}, {"Project": entries("project")}]

    def _rewrite(self, page: Path, source: Path) -> None:
        """Let the links of a page, which has been copied from `source`, lead to pages."""

        def rewritten(match: re.Match[str]) -> str:
            link, anchor = match[2], match[3] or ""
            if not link or re.match(r"[a-z]+:", link):
                return match[0]
            target = Path(os.path.normpath(source.parent / link))
            if not target.exists():
                raise SystemExit(f"{source.relative_to(ROOT)}: {link} does not exist")
            page_of_target = self._page_of(target)
            if page_of_target.parts[0] == "files":
                anchor = re.sub(r"^#L(\d+)$", r"#__codelineno-0-\1", anchor)
            return f"{match[1]}{os.path.relpath(self.pages / page_of_target, page.parent)}{anchor}{match[4]}"

        parts = FENCE.split(page.read_text(encoding="utf-8"))
        text = "".join(part if FENCE.match(part) else LINK.sub(rewritten, part) for part in parts)
        page.write_text(text, encoding="utf-8")

    def _page_of(self, target: Path) -> Path:
        """The page that shows a file or directory of the repository, relative to the site."""
        if target.is_relative_to(ROOT / "docs") and target.is_file():
            return target.relative_to(ROOT / "docs")
        path = target.relative_to(ROOT)
        if str(path) in PAGES_OF_ROOT:
            return Path("project", path)
        self._files.add(path)
        return path if path.suffix == ".md" else Path("files", f"{path}.md")

    def _add_file(self, path: Path) -> None:
        page = self.pages / self._page_of(ROOT / path)
        page.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            shutil.copy(ROOT / path, page)
            return self._rewrite(page, ROOT / path)
        if (ROOT / path).is_dir():
            listed = subprocess.run(["git", "ls-files", path], cwd=ROOT, capture_output=True, text=True, check=False)
            text, language = listed.stdout, "text"
        else:
            text = (ROOT / path).read_text(encoding="utf-8")
            language = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".cpp": "cpp"}.get(path.suffix, "text")
        page.write_text(f'# {path}\n\n````{language} linenums="1"\n{text}````\n', encoding="utf-8")


def title(page: Path) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].replace("`", "") if found else page.stem


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, and let mkdocs make the site; its exit status."""
    site = Site(ROOT / "build" / "docs")
    site.write()
    settings = ROOT / "build" / "mkdocs.yml"  # JSON is YAML
    menu = site.navigation()
    own = {"INHERIT": "../mkdocs.yml", "docs_dir": "docs", "site_dir": "site", "nav": menu, "not_in_nav": "/files/"}
    settings.write_text(json.dumps(own, indent=1))
    words = sys.argv[1:] if argv is None else argv
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(settings), *words]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    status = subprocess.run(command, env=environment, check=False).returncode
    if status == 0:
        print(ROOT / "build" / "site" / "index.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
