"""`octavo docs`: opens the documentation site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PACKAGE = Path(__file__).resolve().parents[1]
BUILT = Path("build") / "site" / "index.html"


def docs(
    *,
    path: Annotated[
        bool, typer.Option("--path", help="Print the path of the first page instead")
    ] = False,
) -> None:
    """Open the documentation in a browser."""
    page = find_site()
    print(page)
    if not path:
        import webbrowser

        webbrowser.open(page.as_uri())


def find_site() -> Path:
    """Returns the first page of the site: from the wheel, from the package's source tree, or from
    the current directory.
    """
    from octavo.api.errors import SetupError

    trees = [tree for tree in (PACKAGE.parent, Path.cwd()) if (tree / "mkdocs.yml").is_file()]
    for page in (PACKAGE / "site" / "index.html", *(tree / BUILT for tree in trees)):
        if page.is_file():
            return page
    raise SetupError(
        "the documentation is not built: no site in the package or the source tree",
        hint="run `make docs` in the source tree, or read the pages in the docs directory",
    )
