"""The pages of docs/extending.md run as they stand, from the command line, with the user's file outside the package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from forked import bridle

from bridle.errors import ConfigError, UsageError
from bridle.infer.read import read_codes
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


def test_the_scorer_of_the_page_stands_in_results_table_and_report(tmp_path: Path) -> None:
    (tmp_path / "class_means.py").write_text(block("A new scorer", "python"))
    pretrain, probe, report = block("A new scorer", "bash").splitlines()
    short = (*SHORT, "schedule.iterations=1", "--max-steps", "3")
    done = bridle(*pretrain.split()[1:], *short, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "nearest mean %" in done.out
    done = bridle(*probe.split()[1:], cwd=tmp_path)
    assert done.code == 0, done.err
    for name in ("results.json", "probe.json"):
        found = json.loads((tmp_path / "runs" / "means" / name).read_text())
        for scores in (*found["baselines"].values(), found["evaluations"][0]["probe"]):
            assert 0.1 < scores["further"]["nearest mean"]["value"] <= 1
    done = bridle(*report.split()[1:], cwd=tmp_path)
    assert done.code == 0, done.err
    assert "nearest mean" in (tmp_path / "means.html").read_text()
    refused = bridle("probe", "runs/means", cwd=tmp_path)
    assert refused.code == 2
    assert "there is no scorer 'class_means'; known are few_shot, knn, retrieval" in refused.err
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


def write_ecgs(folder: Path, *, seed: int = 0) -> None:
    """Two classes, two leads at 250 Hz: regular and irregular beats; the files are 1 to 2.2 seconds long."""
    random = np.random.default_rng(seed)
    for split, count in (("train", 8), ("test", 4)):
        for name in ("normal", "irregular"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                time = np.arange(250 + 50 * (number % 7)) / 250
                phase = 2 * np.pi * 1.3 * time + (np.sin(9 * time) if name == "irregular" else 0)
                beats = np.exp(8 * (np.cos(phase + random.uniform(0, 6)) - 1))
                leads = np.stack([beats, -0.5 * beats], axis=1) + 0.02 * random.standard_normal((len(time), 2))
                lines = "\n".join(" ".join(f"{value:.4f}" for value in row) for row in leads)
                (folder / split / name / f"{number}.ecg").write_text(f"# rate 250\n{lines}\n")


@pytest.fixture(scope="module")
def ecg_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ecg.py, files in ecgs/, and what the commands of the page wrote."""
    folder = tmp_path_factory.mktemp("ecg")
    (folder / "ecg.py").write_text(block("A new modality", "python"))
    write_ecgs(folder / "ecgs")
    for line in block("A new modality", "bash").splitlines():
        short = (*SHORT, "--max-steps", "3") if " pretrain " in line else ()
        done = bridle(*line.split()[1:], *short, cwd=folder)
        assert done.code == 0, (line, done.err)
        (folder / f"{line.split()[3]}.out").write_text(done.out)
    return folder


def test_the_modality_of_the_page_goes_through_every_command(ecg_run: Path) -> None:
    assert "files     24 (24 ecg)" in (ecg_run / "data.out").read_text()
    assert "250 Hz 24×" in (ecg_run / "data.out").read_text()
    assert json.loads((ecg_run / "runs/ecg/results.json").read_text())["name"] == "signal"
    found = read_codes(ecg_run / "codes.npz")
    _, first = next(iter(found))
    assert first.times is not None and first.times[1] == 16 / 250
    assert "<img" in (ecg_run / "ecg.html").read_text()
    assert (ecg_run / "hits.html").read_text().count("<img") >= 5


def test_without_the_plugin_the_run_is_refused_with_the_remedy(ecg_run: Path) -> None:
    refused = bridle("probe", "runs/ecg", cwd=ecg_run)
    assert refused.code == 2
    assert "data.source: 'ecg' is not a known source" in refused.err
    assert "--plugin" in refused.err


def test_files_of_a_new_modality_can_be_counted_and_sharded(ecg_run: Path) -> None:
    shape = ("geometry.channels=2", "geometry.input=[256]")
    done = bridle("--plugin", "ecg.py", "data", "stats", "ecgs", *shape, cwd=ecg_run)
    assert done.code == 0, done.err
    assert "lengths   1.00 to 2.20 s" in done.out
    assert "bridle pretrain signal data.source=ecg" in done.out
    done = bridle("--plugin", "ecg.py", "data", "shard", "ecgs", "--out", "shards", cwd=ecg_run)
    assert done.code == 0, done.err
    done = bridle("--plugin", "ecg.py", "probe", "runs/ecg", "data.root=shards", cwd=ecg_run)
    assert done.code == 0, done.err


def test_a_bad_file_of_a_new_modality_is_a_finding_and_costs_nothing_else(ecg_run: Path) -> None:
    (ecg_run / "bad").mkdir()
    (ecg_run / "bad" / "a.ecg").write_text("# rate 250\n0.1 0.2\nnot a number\n")
    (ecg_run / "bad" / "b.ecg").write_text("# rate 500\n" + "0.1 0.2\n0.2 0.1\n" * 300)
    (ecg_run / "bad" / "c.ecg").write_text("# rate 250\n" + "0.1 0.2\n0.2 0.1\n" * 300)
    checked = bridle("--plugin", "ecg.py", "data", "check", "bad", "--rate", "250", cwd=ecg_run)
    assert checked.code == 0, checked.err
    assert "undecodable" in checked.out and "wrong rate" in checked.out
    done = bridle("--plugin", "ecg.py", "tokenize", "runs/ecg", "bad", "--out", "some.npz", cwd=ecg_run)
    assert "2 of 3 files could not be read" in done.err
    assert [Path(name).name for name, _ in read_codes(ecg_run / "some.npz")] == ["c.ecg"]
