"""Ablation grids: read strictly, paired by seed, and shared where only fine-tuning differs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bridle.config import load_config
from bridle.errors import BridleError, CheckpointError, ConfigError, Interrupted, UsageError
from bridle.evaluate.significance import make_hits
from bridle.grid import ablation
from bridle.grid.ablation import costs_of, note_cost
from bridle.grid.cells import Cell, cells
from bridle.grid.comparison import change_of, read_scores, write_tables
from bridle.grid.subprocesses import finish, run_beside, start
from bridle.grid.table_file import Grid, read_grid, table_names
from bridle.runs.results import Hits, Scores

PAPER = {"audio-iter1", "audio-iter2", "image-iter1", "image-iter2", "attribution", "losses", "books", "joint"}
PAPER |= {"table1", "table2", "table3", "codebooks"}


def grid(**rows: tuple[str, ...]) -> Grid:
    return Grid("test", "A test", 1, ("probe",), rows)


def tables_of(rows: Grid, scores: Mapping[Cell, Mapping[str, Scores]], out: Path, *, minutes: float) -> Path:
    return write_tables(rows, scores, "digits-tiny", [], out, costs_of(rows, scores, out, wall_minutes=minutes))


def test_the_papers_tables_are_shipped_and_every_row_is_a_config() -> None:
    assert set(table_names()) >= PAPER
    for name in table_names():
        found = read_grid(name)
        for changes in found.rows.values():
            config = load_config("digits-tiny", list(changes))
            assert config.quantizer.codebooks >= 1
    assert next(iter(read_grid("books").rows)) == "4 sets, 256 codes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: {a: [seed=1]}", "at least 2 items"),
        ("rows: {a: [seed=1], b: 3}", "rows.b is .3"),
        ("rows: {a: [], b: []}\nmeasure: [probe]", "measure is .* not permitted"),
        ("rows: {a: [], b: []}\nmeasures: [luck]", "'luck'"),
        ("rows: {a: [], b: []}\nmeasures: 5", "measures.0 is .5"),
        ("rows: {a: [], b: []}\nmeasures: [[probe]]", "measures.0 is"),
        ("rows: {a: [], b: []}\niterations: 0", "iterations"),
        ("rows: {a: [], b: []}\ncurve: many", "curve is 'many'"),
        ("rows: {a: [], b: []}\ncurve: 2\ncurve_rows: [c]", "curve_rows"),
    ],
)
def test_a_wrong_table_is_refused_with_its_reason(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_grid(str(file))


def test_an_unknown_table_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="attribution"):
        read_grid("atribution")


def test_a_typo_in_the_last_row_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="codebook"):
        list(cells("digits-tiny", [], grid(a=(), b=("quantizer.codebook=2",)), seeds=[0], out=tmp_path))


def test_a_seed_in_a_row_is_refused_because_the_table_has_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        list(cells("digits-tiny", [], grid(a=(), b=("seed=3",)), seeds=[0], out=tmp_path))


def test_a_table_with_curves_keeps_all_checkpoints_of_phases_counted_in_steps(tmp_path: Path) -> None:
    wanted = grid(a=(), b=("quantizer=vq",))._replace(curve=4, iterations=2)
    (one, _) = cells("digits-tiny", ["encoder_phase.steps=90"], wanted, seeds=[0], out=tmp_path)
    config = load_config("digits-tiny", list(one.pretrain))
    assert config.runtime.checkpoint_every == 23  # 23, 46, 69, and the end
    assert config.runtime.keep_finished
    (plain, _) = cells("digits-tiny", ["encoder_phase.steps=90"], wanted._replace(curve=0), seeds=[0], out=tmp_path)
    assert plain.folder == one.folder  # a run is the same with and without
    assert config.runtime.keep == 2 * (90 // 23 + config.tokenizer_phase.steps // 23 + 2)  # nothing is rotated away
    (_, without) = cells("digits-tiny", [], wanted._replace(curve_rows=("a",)), seeds=[0], out=tmp_path)
    assert "runtime.keep_finished=true" not in without.pretrain
    (by_epochs, _) = cells("image", ["data.root=x"], wanted, seeds=[0], out=tmp_path)
    assert "runtime.keep_finished=true" not in by_epochs.pretrain  # only the ends of its iterations


def test_one_measure_needs_no_list(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("rows: {a: [], b: []}\nmeasures: finetune")
    assert read_grid(str(file)).measures == ("finetune",)


def test_rows_that_differ_only_in_fine_tuning_share_their_run(tmp_path: Path) -> None:
    rows = grid(a=("finetune.loss=bce",), b=("finetune.loss=ce",), c=("quantizer=vq",))
    found = list(cells("digits-tiny", ["encoder.depth=2"], rows, seeds=[0, 1], out=tmp_path))
    folder = {(cell.row, cell.seed): cell.folder for cell in found}
    assert folder["a", 0] == folder["b", 0]
    assert len(set(folder.values())) == 4  # two seeds of a and b together, and of c
    assert found[0].finetune == ("finetune.loss=bce",)
    assert "finetune.loss=bce" not in found[0].pretrain


def scored(values: Sequence[float], hits: Hits | None = None) -> Scores:
    """Scores of one value, or of one per fold."""
    folds = tuple(Scores(fold=n, accuracy=value) for n, value in enumerate(values)) if len(values) > 1 else ()
    return Scores(accuracy=mean(values), folds=folds, hits=hits)


def test_scores_of_folds_are_taken_one_by_one(tmp_path: Path) -> None:
    cell = Cell("a", 0, tmp_path, (), ())
    folds = [{"fold": 1, "accuracy": 0.5}, {"fold": 2, "accuracy": 0.7}]
    probe = {"accuracy": 0.6, "mean_average_precision": 0.15, "folds": folds}
    (tmp_path / "results.json").write_text(json.dumps({"evaluations": [{"iteration": 1, "probe": probe}]}))
    assert read_scores(cell, grid(a=(), b=()))["probe"].values == [0.5, 0.7]


def test_raw_inputs_and_the_untrained_encoder_stand_above_the_rows(tmp_path: Path) -> None:
    rows = grid(base=(), other=("quantizer=vq",))
    scores = {
        Cell(row, seed, tmp_path / f"{row}{seed}", (), ()): {"probe": scored([value])}
        for row, values in (("base", (0.50, 0.52)), ("other", (0.55, 0.58)))
        for seed, value in enumerate(values)
    }
    for seed, untrained in enumerate((0.40, 0.41)):
        (tmp_path / f"base{seed}").mkdir()
        known = {"raw": {"accuracy": 0.3}, "untrained": {"accuracy": untrained}}
        known = {name: {**one, "mean_average_precision": 0.1} for name, one in known.items()}
        (tmp_path / f"base{seed}" / "results.json").write_text(json.dumps({"baselines": known}))
    lines = tables_of(rows, scores, tmp_path, minutes=1.0).read_text().splitlines()
    half = 12.706 * (0.02 / sqrt(2)) / sqrt(2)  # raw lies 20 and 22 points below
    assert lines[4:6] == [
        f"| raw input | 30.0 ±0.0 | -21.0 ±{100 * half:.1f} * |  |",
        f"| untrained encoder | 40.5 ±0.7 | -10.5 ±{50 * half:.1f} * |  |",  # 10 and 11
    ]
    stored = json.loads((tmp_path / "table.json").read_text())
    assert [line["row"] for line in stored["baselines"]] == ["raw input", "untrained encoder"]
    assert [line["row"] for line in stored["rows"]] == ["base", "other"]


def test_the_table_shows_mean_spread_and_change(tmp_path: Path) -> None:
    rows = grid(base=(), other=("quantizer=vq",))
    scores = {
        Cell(row, seed, tmp_path / row, (), ()): {"probe": scored([value])}
        for row, values in (("base", (0.50, 0.52)), ("other", (0.55, 0.58)))
        for seed, value in enumerate(values)
    }
    path = tables_of(rows, scores, tmp_path, minutes=1.0)
    text = path.read_text()
    assert "| base | 51.0 ±1.4 | 0 | 0.0 |" in text
    half = 12.706 * (0.01 / sqrt(2)) / sqrt(2)  # differences 5 and 6 points
    assert f"| other | 56.5 ±2.1 | +5.5 ±{100 * half:.1f} | 0.0 |" in text
    assert (tmp_path / "table.csv").read_text().splitlines()[0] == "row,probe %,probe change,CPU min"
    assert json.loads((tmp_path / "table.json").read_text())["rows"][1]["changes"]["probe"]["pairs"] == 2


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = grid(**{"[rq] two": (), "one [/vq]": ("quantizer=vq",)})._replace(title="[b] or [/c]")
    scores = {cell: {"probe": scored([0.5])} for cell in cells("digits-tiny", [], rows, seeds=[0], out=tmp_path)}
    tables_of(rows, scores, tmp_path, minutes=0.0)
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("[rq] two", "one [/vq]", "[b] or [/c]"))


def test_files_that_are_not_what_they_should_be_are_told(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"title: caf\xe9\nrows: {a: [], b: []}")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_grid(str(tmp_path / "latin.yaml"))
    (tmp_path / "results.json").write_text('{"evaluations": [')
    with pytest.raises(CheckpointError, match="delete it"):
        ablation.is_measured(Cell("a", 0, tmp_path, (), ()), grid(a=(), b=()))
    with pytest.raises(UsageError, match="not a directory"):
        ablation.run_grid("digits-tiny", [], grid(a=(), b=()), seeds=[0], out=tmp_path / "results.json")


def test_a_curve_whose_checkpoints_are_gone_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = grid(a=(), b=("quantizer=vq",))._replace(curve=2)
    gone, kept = cells("digits-tiny", [], rows, seeds=[0], out=tmp_path)
    for cell in (gone, kept):
        cell.folder.mkdir(parents=True)
        probe = {"accuracy": 0.5, "mean_average_precision": 0.5}
        (cell.folder / "results.json").write_text(json.dumps({"evaluations": [{"iteration": 1, "probe": probe}]}))
    point = {"iteration": 1, "step": 5, "cpu_seconds": 60.0, "probe": {"accuracy": 0.5, "mean_average_precision": 0.5}}
    (kept.folder / "curve.json").write_text(json.dumps({"evaluations": [point], "baselines": {}}))
    monkeypatch.setattr(ablation, "run_beside", lambda commands, **given: None if not commands else pytest.fail("ran"))
    ablation.run_grid("digits-tiny", [], rows, seeds=[0], out=tmp_path)
    assert f"no curve of {gone.folder.name}" in capsys.readouterr().out.replace("\n", " ")
    assert (tmp_path / "curves.csv").read_text().splitlines()[1].startswith("b,0,1,5,")


def test_under_one_seed_rows_are_compared_by_their_items(tmp_path: Path) -> None:
    truth = [np.zeros(100, dtype=np.int64)]
    base, better = np.arange(100) < 50, np.arange(100) < 60  # ten items that only the other row has right
    scores = {
        Cell(row, 0, tmp_path / row, (), ()): {"probe": scored([right.mean()], make_hits(right, truth))}
        for row, right in (("base", base), ("other", better))
    }
    path = tables_of(grid(base=(), other=("quantizer=vq",)), scores, tmp_path, minutes=1.0)
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("| other")]
    assert line.startswith("| other | 60.0 | +10.0 ±") and line.endswith(" * | 0.0 |")
    assert "McNemar" in path.read_text()
    change = json.loads((tmp_path / "table.json").read_text())["rows"][1]["changes"]["probe"]
    assert change["over"] == "items" and change["p"] == pytest.approx(2 * 0.5**10)
    assert change["within_seed"]["0"]["pairs"] == 100


def test_under_two_seeds_the_seeds_decide_and_the_items_are_told(tmp_path: Path) -> None:
    truth = [np.zeros(10, dtype=np.int64)]
    scores = {
        Cell(row, seed, tmp_path / row, (), ()): {"probe": scored([n / 10], make_hits(np.arange(10) < n, truth))}
        for row, counts in (("base", (5, 6)), ("other", (6, 8)))
        for seed, n in enumerate(counts)
    }
    tables_of(grid(base=(), other=("quantizer=vq",)), scores, tmp_path, minutes=1.0)
    change = json.loads((tmp_path / "table.json").read_text())["rows"][1]["changes"]["probe"]
    assert (change["over"], change["pairs"], change["p"]) == ("seeds", 2, None)
    assert {seed: one["change"] for seed, one in change["within_seed"].items()} == pytest.approx({"0": 0.1, "1": 0.2})


def test_five_folds_of_two_seeds_are_two_pairs_and_of_one_seed_five(tmp_path: Path) -> None:
    base, gains = [0.5, 0.6, 0.55, 0.52, 0.58], (0.03, 0.05)
    own = {seed: scored([value + gain for value in base]) for seed, gain in enumerate(gains)}
    change, _ = change_of(own, {0: scored(base), 1: scored(base)})
    assert change.pairs == 2 and change.change == pytest.approx(0.04)
    assert change.half == pytest.approx(12.706 * 0.01, rel=1e-3)  # t · sd/√2, sd = 0.02/√2
    assert not change.is_clear  # two seeds say little, however many folds each has
    one, _ = change_of({0: own[0]}, {0: scored([0.5, 0.5, 0.5, 0.5, 0.5])})
    assert one.pairs == 5


@pytest.mark.parametrize(
    ("how", "code", "words"), [("KILL", 1, "killed by SIGKILL, most often"), ("TERM", 143, "same")]
)
def test_a_command_that_is_killed_is_not_told_by_its_last_words(
    how: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "command"
    program.write_text(f"#!/bin/sh\necho 'all is well' >&2\nkill -{how} $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    started = start("one", [], Console(file=io.StringIO()))
    started.process.wait()
    with pytest.raises((BridleError, Interrupted), match=words) as caught:
        finish("one", started)
    assert vars(caught.value)["exit_code"] == code and "all is well" not in str(caught.value)


def test_bytes_that_are_no_text_do_not_stop_a_command_that_is_listened_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "command"
    program.write_text("#!/bin/sh\nprintf 'caf\\351\\n' >&2\necho last >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    started = start("one", [], Console(file=io.StringIO()))
    started.process.wait()
    finish("one", started)
    assert started.said == ["caf\ufffd", "last"]


def test_the_table_tells_the_cpu_minutes_of_all_starts_and_counts_a_shared_run_once(tmp_path: Path) -> None:
    rows = grid(a=("finetune.loss=bce",), b=("finetune.loss=ce",))._replace(measures=("finetune",))
    found = list(cells("digits-tiny", [], rows, seeds=[0], out=tmp_path))
    shared = found[0].folder.name
    for work, seconds in ((shared, 60.0), (shared, 30.0), ("seed0-ffffff", 999.0)):  # stopped once; another table's
        note_cost(tmp_path, work, seconds)
    for cell, seconds in zip(found, (6.0, 12.0), strict=True):
        note_cost(tmp_path, f"{shared}/{cell.finetuned.stem}", seconds)
    scores = {cell: {"finetune": scored([0.5])} for cell in found}
    text = tables_of(rows, scores, tmp_path, minutes=0.25).read_text()
    assert "1.8 CPU minutes in all, 0.2 wall minutes since it was last started" in text
    stored = json.loads((tmp_path / "table.json").read_text())
    assert stored["cpu_minutes"] == pytest.approx(1.8) and stored["wall_minutes_since_last_start"] == 0.25
    assert [line["cpu_minutes"] for line in stored["rows"]] == pytest.approx([1.6, 1.7])
    assert text.splitlines()[5].endswith("| 1.7 |")


def test_commands_side_by_side_are_charged_each_its_own_cpu_time_with_their_childrens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "command"
    # Its arguments are -m bridle.grid.subprocesses PID WORK; the work is done by a child of it.
    busy = "import time\nwhile time.process_time() < 0.6: pass"
    child = f"{sys.executable} -c '{busy}'"
    program.write_text(f"#!/bin/sh\nif [ $4 = busy ]; then {child}; fi\nif [ $4 = bad ]; then exit 3; fi\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    told: dict[str, float] = {}
    screen = Console(file=io.StringIO())
    run_beside({"one": ["busy"], "two": ["idle"]}, jobs=2, console=screen, spent=told.__setitem__)
    assert told["one"] > 0.5 and told["two"] < 0.3
    with pytest.raises(BridleError):
        run_beside({"three": ["bad"]}, jobs=1, console=screen, spent=told.__setitem__)
    assert "three" in told


def test_a_grid_keeps_what_its_runs_cost_and_does_not_start_those_that_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run(commands: dict[str, list[str]], **given: Any) -> None:
        for name, (_, _, *_, folder) in commands.items():
            Path(folder).mkdir(parents=True, exist_ok=True)
            probe = {"accuracy": 0.5, "mean_average_precision": 0.5}
            result = {"evaluations": [{"iteration": 1, "probe": probe}]}
            (Path(folder) / "results.json").write_text(json.dumps(result))
            started.append(name)
            given["spent"](name, 90.0)

    monkeypatch.setattr(ablation, "run_beside", run)
    rows = grid(a=(), b=("quantizer=vq",))
    for seeds in ([0], [0], [0, 1]):
        ablation.run_grid("digits-tiny", [], rows, seeds=seeds, out=tmp_path)
        stored = json.loads((tmp_path / "table.json").read_text())
        assert stored["cpu_minutes"] == pytest.approx(3.0 * len(seeds))
    assert len(started) == len(set(started)) == 4
    (cell, *_) = cells("digits-tiny", [], rows, seeds=[0], out=tmp_path)
    assert ablation.is_measured(cell, rows)
    assert not ablation.is_measured(cell._replace(pretrain=("schedule.iterations=2",)), rows)  # stopped between the two
    assert not ablation.is_measured(cell, rows._replace(measures=("probe", "finetune")))  # which starts from weights
