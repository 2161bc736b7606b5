from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import write_run

from bridle.config import Config
from bridle.errors import CheckpointError, ConfigError, UsageError
from bridle.evaluate.codebooks.command import ended_iterations, examine_run
from bridle.models.build import Nets

Small = Callable[..., Config]


def examined(folder: Path, *overrides: str, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(examine_run(folder, overrides, **options).read_text())["evaluations"]
    return found


def test_every_iteration_is_examined_and_written_down(tmp_path: Path, small: Small) -> None:
    run = write_run(tmp_path / "run", small(), ends=((1, "encoder"), (2, "tokenizer"), (2, "encoder")))
    first, second = examined(run, items=300)
    assert (first["iteration"], second["iteration"]) == (1, 2)
    assert second["checkpoint"].startswith("p0002-iter2-encoder")
    stage = first["codebooks"][0]
    assert stage["tokens"] == 300 * 64 and stage["codes"] == 16
    assert stage["usage_rate"] > 0.9 and 0 < stage["label_information"] < stage["entropy"]
    assert set(stage["agreement"]) == {"noise 1 %", "noise 5 %", "shift by 1"}
    assert stage["norms"] == pytest.approx(stage["norms_start"])
    assert {verdict["stage"] for verdict in first["verdicts"]} == {1, 2, 3, 4}


def test_asking_twice_gives_the_same_file(tmp_path: Path, small: Small) -> None:
    run = write_run(tmp_path / "run", small())
    one, two = (examine_run(run, items=100).read_bytes() for _ in range(2))
    assert one == two


def test_one_iteration_can_be_chosen_and_a_missing_one_is_named(tmp_path: Path, small: Small) -> None:
    run = write_run(tmp_path / "run", small(), ends=((1, "encoder"), (2, "tokenizer")))
    assert [entry["iteration"] for entry in examined(run, iteration=2, items=50)] == [2]
    with pytest.raises(UsageError, match=r"--iteration 3: .* it has iteration 1, 2"):
        examine_run(run, iteration=3)


def test_a_collapsed_book_gets_its_verdict(tmp_path: Path, small: Small) -> None:
    def collapse(nets: Nets) -> None:
        with torch.no_grad():
            nets.tokenizer.quantizer.books[0].code[1:] = 100.0

    (entry,) = examined(write_run(tmp_path / "run", small(), spoil=collapse), items=200)
    first = entry["verdicts"][0]
    assert (first["stage"], first["level"]) == (1, "bad") and "collapsed: 6 % of 16 codes" in first["text"]
    assert any("one code takes 100 %" in verdict["text"] for verdict in entry["verdicts"])


def test_the_last_phase_of_an_iteration_counts(tmp_path: Path, small: Small) -> None:
    run = write_run(tmp_path / "run", small(), ends=((1, "encoder"), (2, "tokenizer")))
    (run / "checkpoints" / "p0002-iter2-encoder-00000002").mkdir()  # inside a phase: not its end
    assert [path.name for path in ended_iterations(run).values()] == [
        "p0000-iter1-encoder-00000004-end",
        "p0001-iter2-tokenizer-00000004-end",
    ]


def test_a_damaged_checkpoint_is_left_out_and_none_left_is_an_error(tmp_path: Path, small: Small) -> None:
    run = write_run(tmp_path / "run", small(), ends=((1, "encoder"), (2, "encoder")))
    (run / "checkpoints" / "p0001-iter2-encoder-00000004-end" / "model.safetensors").write_bytes(b"no")
    assert [entry["iteration"] for entry in examined(run, items=50)] == [1]
    with pytest.raises(CheckpointError, match="none of the finished phases can be read"):
        examine_run(run, iteration=2)


def test_what_was_trained_cannot_be_changed_and_what_is_no_run_is_refused(tmp_path: Path, small: Small) -> None:
    run = write_run(tmp_path / "run", small())
    with pytest.raises(ConfigError, match="cannot be changed here"):
        examine_run(run, ["quantizer.codes=8"])
    with pytest.raises(UsageError, match=r"no config\.yaml"):
        examine_run(tmp_path)
    with pytest.raises(UsageError, match="no finished phase yet"):
        examine_run(write_run(tmp_path / "new", small(), ends=()))
