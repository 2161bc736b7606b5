"""`make docs`: the documentation builds as a site that is whole and needs no network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bridle

ROOT = Path(__file__).parents[1]
pytest.importorskip("mkdocs", reason='mkdocs is not installed: pip install -c constraints.txt -e ".[docs]"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. mkdocs.yml says `strict`: a broken link or a page outside the menu ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    silent = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=silent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built_and_can_be_searched(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {entry["location"].split("#")[0] for entry in found} == pages
    assert (site / "search" / "search_index.js").is_file()  # read where a page is opened from disk


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?([^\" >]+)", page.read_text("utf-8"))
        assert [address for address in loaded if address.startswith(("http", "//"))] == [], page.name


def test_tables_and_lists_are_not_left_as_text(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text("utf-8"), flags=re.DOTALL)
        assert "|---" not in text, page.name
        assert not re.search(r"<p>[^<]*\n- ", text), page.name


def test_the_api_page_describes_exactly_the_public_names(site: Path) -> None:
    page = (site / "api.html").read_text("utf-8")
    described = set(re.findall(r'<h3 id="bridle\.(\w+)"', page))
    assert described == set(dir(bridle)) - {"__version__"}
    assert "the smallest unsigned type" in page  # the comment of a field
