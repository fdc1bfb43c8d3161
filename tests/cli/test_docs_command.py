"""`octavo docs` finds the site that `make docs` has built."""

from octavo.cli import docs
from octavo.cli.app import run_command


def test_the_site_of_the_current_source_tree_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "PACKAGE", tmp_path / "octavo")
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "build" / "site" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text("")
    assert run_command(["docs", "--path"]) == 2
    assert "make docs" in capsys.readouterr().err, "a page of another project is not opened"
    (tmp_path / "mkdocs.yml").write_text("")
    assert run_command(["docs", "--path"]) == 0
    assert capsys.readouterr().out.strip() == str(page)


def test_the_site_of_the_wheel_goes_first(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(docs, "PACKAGE", tmp_path)
    monkeypatch.setattr("webbrowser.open", opened.append)
    page = tmp_path / "site" / "index.html"
    page.parent.mkdir()
    page.write_text("")
    assert run_command(["docs"]) == 0
    assert opened == [page.as_uri()]
