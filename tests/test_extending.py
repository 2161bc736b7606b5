"""The pages of docs/extending.md run as they stand, from the command line, with the user's file outside the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked import bridle

from bridle.errors import ConfigError, UsageError
from bridle.models.tokenizer import tokenizer_kind
from bridle.plugins import VARIABLE, load_plugins, name_plugins

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
SHORT = ("encoder.width=16", "encoder.heads=2", "decoder.width=16", "decoder.heads=2", "probe.items=60")


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found.group(1)


def block(title: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", section(title), re.DOTALL)
    assert found is not None, (title, language)
    return found.group(1)


def test_the_tokenizer_of_the_page_trains_and_is_used_by_every_command(tmp_path: Path) -> None:
    (tmp_path / "dct.py").write_text(block("A new tokenizer", "python"))
    pretrain, probe = block("A new tokenizer", "bash").splitlines()
    done = bridle(*pretrain.split()[1:], *SHORT, "--max-steps", "3", cwd=tmp_path)
    assert done.code == 0, done.err
    for words in (
        probe.split()[1:],
        ("--plugin", "dct.py", "codebooks", "runs/dct"),
        ("--plugin", "dct.py", "report", "runs/dct", "--out", "page.html"),
        ("--plugin", "dct.py", "export", "runs/dct", "--out", "model"),
    ):
        done = bridle(*words, cwd=tmp_path)
        assert done.code == 0, (words, done.err)
    refused = bridle("codebooks", "runs/dct", cwd=tmp_path)
    assert refused.code == 2
    assert "tokenizer.first: unknown tokenizer 'dct'" in refused.err
    assert "--plugin" in refused.err


def test_the_recipe_of_the_page_is_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "small-digits.yaml").write_text(block("A new recipe", "yaml"))
    done = bridle("show", "small-digits.yaml", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "codes: 128" in done.out


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


@pytest.mark.usefixtures("no_plugins")
def test_a_plugin_that_is_not_there_or_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        name_plugins([tmp_path / "none.py"])
    bad = tmp_path / "bad.py"
    bad.write_text("1 / 0")
    name_plugins([bad])
    with pytest.raises(UsageError, match=r"bad\.py.*ZeroDivisionError"):
        load_plugins()


@pytest.mark.usefixtures("no_plugins")
def test_a_plugin_is_imported_once(tmp_path: Path) -> None:
    counting = tmp_path / "counting_plugin.py"
    counting.write_text("import os\nos.environ['COUNTED'] = os.environ.get('COUNTED', '') + 'x'")
    name_plugins([counting, counting])
    load_plugins()
    load_plugins()
    import os

    assert os.environ.pop("COUNTED") == "x"


def test_a_mistyped_tokenizer_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.later: unknown tokenizer 'vitt'; did you mean 'vit'"):
        tokenizer_kind("vitt", key="tokenizer.later")
