"""What README and docs/ point at exists: files, headings, tests, functions. Cheap, unlike the pages' own commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = re.compile(r"`((?:tests/)?[\w/*]*test_[\w*]+\.py)(?:::(\w+))?")
CODE = re.compile(r"`([\w/]+\.py)(?:: ([\w, .]+))?`")


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for name, function in TESTS.findall(page.read_text(encoding="utf-8")):
        found = list((ROOT / "tests").glob(name.removeprefix("tests/")))
        assert found, f"{page.name}: {name}"
        assert not function or f"def {function}(" in found[0].read_text(encoding="utf-8"), f"{page.name}: {function}"


@pytest.mark.parametrize("page", ["paper-map.md", "deviations.md", "design.md"])
def test_functions_that_are_named_exist(page: str) -> None:
    for name, functions in CODE.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if "test_" in name or name.startswith("benchmarks/"):
            continue
        module = ROOT / "bridle" / name.removeprefix("bridle/")
        assert module.is_file(), f"{page}: {name}"
        for function in filter(None, re.split(r", ?", functions)):
            last = function.split(".")[-1]
            defined = re.search(
                rf"^\s*(?:def|class) {last}\b|^{last}\b.* = ", module.read_text(encoding="utf-8"), re.MULTILINE
            )
            assert defined, f"{page}: {name}: {function}"


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_rooms_of_the_design_page_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = page.split("```\nbridle/\n")[1].split("```")[0]
    named, folder = set(), ""
    for line in block.splitlines():
        room, modules = re.match(r"  (?:([\w/]+)/)?\s*(.*)", line).groups()  # type: ignore[union-attr]
        folder = room or folder
        named |= {room} - {None}
        if " · " in modules:
            missing = [name for name in modules.split(" · ") if not (ROOT / "bridle" / folder / f"{name}.py").is_file()]
            assert missing == [], f"{folder}: {missing}"
    folders = {path.parent.relative_to(ROOT / "bridle").as_posix() for path in (ROOT / "bridle").rglob("__init__.py")}
    assert named == folders - {"."}
