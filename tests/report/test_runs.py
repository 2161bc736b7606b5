from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridle.config import dump_config, load_config
from bridle.errors import UsageError
from bridle.report.runs import number, read_run
from bridle.runs.results import Evaluation, Results, Scores


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")
    return folder


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    results = {
        "name": "digits-tiny",
        "title": "digits",
        "method": "RQ",
        "evaluations": [{"iteration": 1}],
        "baselines": {"raw": {"accuracy": 0.9}},
    }
    write(
        tmp_path,
        config_yaml="seed: 0\n",
        metrics_jsonl='{"step": 1}\n{"step": 2}\n',
        results_json=json.dumps(results),
        environment_json='{"torch": "2.13"}',
    )
    run = read_run(tmp_path)
    assert (run.name, run.title, run.method, run.config) == ("digits-tiny", "digits", "RQ", "seed: 0\n")
    assert run.metrics == [{"step": 1}, {"step": 2}]
    assert run.evaluations == (Evaluation(iteration=1),)
    assert run.results.baselines == {"raw": Scores(accuracy=0.9)}
    assert run.environment == {"torch": "2.13"}
    assert run.notes == ()


def test_a_run_that_has_only_begun_is_named_after_its_directory(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, config_yaml="seed: 0\n"))
    assert (run.name, run.title, run.method) == (tmp_path.name, tmp_path.name, "")
    assert (run.metrics, run.results, run.environment) == ([], Results(), {})


def test_a_run_without_scores_is_named_by_its_config(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, config_yaml=dump_config(load_config("digits-tiny", ["quantizer=vq"]))))
    assert (run.name, run.title, run.method, run.results) == ("digits-tiny", "digits", "VQ", Results())


def test_a_line_that_is_still_being_written_is_left_out_without_a_word(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, metrics_jsonl='{"step": 1}\n{"step": 2, "lo'))
    assert (run.metrics, run.notes) == ([{"step": 1}], ())


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, metrics_jsonl='{"step": 1}\n[]\n\x00\n{"step": 4}\n'))
    assert run.metrics == [{"step": 1}, {"step": 4}]
    assert run.notes == ("metrics.jsonl: 2 lines could not be read, the first is line 2.",)


@pytest.mark.parametrize("text", ["{", "[1]", "null", "\ufffd"])
def test_results_that_are_not_an_object_are_left_out_and_named(tmp_path: Path, text: str) -> None:
    run = read_run(write(tmp_path, results_json=text))
    assert run.results == Results() and run.notes == ("results.json could not be read: it is not a JSON object.",)


def test_parts_of_the_wrong_kind_are_as_if_absent(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, results_json='{"evaluations": {"a": 1}, "baselines": [1], "name": null}'))
    assert run.results == Results() and run.name == tmp_path.name
    assert run.notes[0].startswith("results.json: left out what could not be read: ") and "2 more" in run.notes[0]


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run"):
        read_run(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        read_run(tmp_path / "absent")


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), [1.0]])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    assert number(value) is None
    assert number(2) == 2.0


def test_files_put_aside_and_examined_codebooks_are_read(tmp_path: Path) -> None:
    run = read_run(
        write(
            tmp_path,
            config_yaml="seed: 0\n",
            quarantine_jsonl='{"path": "a.wav", "reason": "cut short"}\n[]\n',
            codebooks_json='{"evaluations": []}',
        )
    )
    assert run.quarantine == ({"path": "a.wav", "reason": "cut short"},)
    assert run.examined == Results()
    assert run.notes == ("quarantine.jsonl: 1 lines could not be read, the first is line 2.",)
