"""Builds the documentation site with MkDocs.

    python docs/build_site.py

Copies all pages, and the files that they link to, into `build/site-pages` with the repository's
layout, then runs `mkdocs build --strict`: dead links, missing anchors and pages that the navigation
in `mkdocs.yml` does not list are errors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "site-pages"
FOLDERS = ("docs", "benchmarks", "deploy", "examples")
LINK = re.compile(r"\]\(([^)#\s]+)")


def find_pages() -> list[Path]:
    """Returns the Markdown files of the site."""
    pages = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *pages])


def find_linked_files(page: Path) -> set[Path]:
    """Returns the files of the repository that a page links to."""
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    targets = {(page.parent / link).resolve() for link in links}
    return {path for path in targets if path.is_file() and path.is_relative_to(ROOT)}


def copy_pages() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = find_pages()
    for path in {*pages, *(file for page in pages for file in find_linked_files(page))}:
        target = PAGES / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def main() -> int:
    copy_pages()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
