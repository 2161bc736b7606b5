"""A run's files are named, read and written in one place."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from run_folders import write_run

import bridle
from bridle import files
from bridle.config import load_config
from bridle.data.loading.loader import BadSample
from bridle.errors import UsageError
from bridle.runs import checkpoint
from bridle.runs.checkpoint import CheckpointName
from bridle.runs.folder import RunFolder

PACKAGE = Path(bridle.__file__).parent
NAMES = re.compile(
    r"""["'](config\.yaml|environment\.json|metrics\.jsonl|costs\.jsonl|encoder_start\.json|checkpoints)["']"""
)
ALLOWED = {
    "runs/folder.py": None,
    "export/folder.py": {"config.yaml"},  # a file of an exported folder
    "report/runs.py": {"metrics.jsonl", "environment.json"},  # reads foreign and damaged runs line by line
}


def test_no_other_module_names_the_files_of_a_run() -> None:
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        allowed = ALLOWED.get(name, set())
        found = set(NAMES.findall(re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)))
        assert allowed is None or found <= allowed, (name, found)


def test_no_other_module_reads_checkpoint_names() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path != PACKAGE / "runs" / "checkpoint.py":
            assert not re.search(r'-iter\{|"-end"|"-tokenizer-"|name\.split\("-"\)', path.read_text()), path


def test_a_checkpoint_name_says_where_it_was_made() -> None:
    name = CheckpointName(phase_index=3, iteration=2, phase="encoder", step=500, is_end=True)
    assert str(name) == "p0003-iter2-encoder-00000500-end"
    assert CheckpointName.parse(str(name)) == name
    assert CheckpointName.parse("p0003-iter2-encoder-500") is None
    assert CheckpointName.parse("my backup") is None


def test_quarantined_samples_come_back_without_rows_of_other_forms(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.add_quarantined(BadSample(4, "a.wav", "too short"), phase="iter1-encoder")
    files.append_line(run.quarantine, {"index": "5", "path": "b.wav", "reason": "?"})
    run.add_quarantined(BadSample(6, "c.wav", "silent"), phase="iter1-encoder")
    assert [sample.index for sample in run.quarantined()] == [4, 6]


def test_a_folder_without_a_config_is_no_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert not run.exists()
    assert run.config_text() == ""
    assert run.environment() == {}
    with pytest.raises(UsageError, match=r"not a run directory \(no config\.yaml\)"):
        run.config()
    with pytest.raises(UsageError, match="no finished encoder phase of iteration 2 yet"):
        run.encoder_ends(2)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    ends = ((1, "encoder"), (2, "tokenizer"), (2, "encoder"))
    return RunFolder(write_run(tmp_path / "run", load_config("digits-tiny"), ends=ends))


def test_the_ends_of_phases_are_found_by_iteration(run: RunFolder) -> None:
    first, _, last = run.checkpoint_paths()
    assert run.encoder_ends() == [first, last]
    assert run.encoder_ends(1) == [first]
    assert run.last_ends() == {1: first, 2: last}


def test_a_run_is_trained_when_its_last_iteration_has_a_whole_end(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "load_file", lambda path: pytest.fail("tensors were read"))
    assert run.is_trained(2)
    assert not run.is_trained(3)
    model = run.checkpoint_paths()[-1] / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    assert not run.is_trained(2)


def test_loading_a_model_reads_neither_logs_nor_results(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    original = io.open

    def record(file: object, *arguments: object, **options: object) -> object:
        opened.append(Path(str(file)).name)
        return original(file, *arguments, **options)  # type: ignore[call-overload]

    run.add_metrics({"step": 1})
    run.write_json("results.json", {"evaluations": []})
    monkeypatch.setattr(io, "open", record)
    model = bridle.load(run.path, device="cpu")
    assert "config.yaml" in opened
    assert not {"metrics.jsonl", "results.json", "environment.json", "costs.jsonl"} & set(opened)
    assert model.trained().facts.made_with.keys() == {"bridle", "torch"}  # read when it is exported
