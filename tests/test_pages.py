"""What README and docs/ point at exists: files, headings, tests, functions. Cheap, unlike the pages' own commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from bridle.cli import app
from bridle.config import load_config, recipe_names

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
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


def shown_commands(page: Path) -> list[list[str]]:
    """The words of every `bridle` command in the shell blocks of a page."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = (line.split("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [shlex.split(line)[1:] for line in lines if line.startswith("bridle ") and "…" not in line]


def require_command(words: list[str]) -> None:
    """Parse a command as the command line would, up to running it; its settings must be keys of the config."""
    command, has_plugin = get_command(app), words[0] == "--plugin"
    words = words[2:] if has_plugin else words
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    given = command.make_context(name, words).params
    if name == "launch":
        require_command(given["command"])
    if given.get("recipe") in recipe_names() and not has_plugin:
        load_config(given["recipe"], given["overrides"] or [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_commands_options_and_settings_exist(page: Path) -> None:
    assert [problem for words in shown_commands(page) if (problem := problem_of(words))] == []


def problem_of(words: list[str]) -> str | None:
    """Why a shown command would be refused; None if it would not."""
    try:
        require_command([word for word in words if word not in ("--json", "--quiet")])  # `main` takes them out
    except Exception as error:
        return f"bridle {shlex.join(words)}: {error}"
    return None


def test_a_page_per_task_is_short_and_begins_with_commands() -> None:
    pages = [page for page in DOCS if page.parent.name == "tasks"]
    assert len(pages) == 4
    for page in pages:
        lines = page.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 60, page.name
        assert lines.index("```bash") <= 8, page.name


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        text = [(page, page.read_text(encoding="utf-8")) for page in new]
        linked = {(page.parent / name).resolve() for page, t in text for name in re.findall(r"\]\(([\w/.-]+\.md)", t)}
        new = linked - reached
    assert set(DOCS) <= reached


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
