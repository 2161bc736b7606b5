"""Tables that read every iteration: which commands they run, and what they make of the results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bridle.errors import ConfigError, UsageError
from bridle.grid import ablation, every_iteration
from bridle.grid.cells import cells
from bridle.grid.comparison import write_tables
from bridle.grid.every_iteration import Other, fill_every_iteration, score_text
from bridle.grid.table_file import Grid, read_grid
from bridle.quantize.usage import released_effective_usage
from bridle.runs.results import Evaluation, Interval, Results, Scores

ACCURACY = {"VQ": (0.40, 0.44), "RQ": (0.50, 0.58)}  # after iterations 1 and 2


def grid(**more: Any) -> Grid:
    rows = {"VQ": ("quantizer=beats",), "RQ": ("quantizer=rq",)}
    return Grid("test", "A test", 2, ("probe", "finetune"), rows, every_iteration=True, **more)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands in place of processes: they write results as the real ones would, and are listed."""
    ran: list[str] = []

    def run(commands: dict[str, list[str]], **given: Any) -> None:
        for name, command in commands.items():
            ran.append(" ".join(command))
            pretend(command)
            given["spent"](name, 30.0)

    monkeypatch.setattr(ablation, "run_beside", run)
    monkeypatch.setattr(every_iteration, "run_beside", run)
    return ran


def pretend(command: list[str]) -> None:
    kind = command[0]
    if kind == "pretrain":
        folder = Path(command[-1])
        folder.mkdir(parents=True)
        (folder / "row").write_text("VQ" if "quantizer=beats" in command else "RQ")
        return
    folder = Path(command[1])
    values = ACCURACY[(folder / "row").read_text()]
    end = f"-{command[command.index('--on') + 1]}" if "--on" in command else ""
    if kind == "codebooks":
        stage = {
            "usage_rate": 0.21,
            "entropy": 3.0,
            "effective_usage": 0.1,
            "codes": 1024,
            "stage": 1,
            "perplexity": 20.0,
            "top_share": 0.1,
        }
        stage |= {"code_dimension": 3.5, "norms": [1.0, 2.0], "norms_start": [1.0, 1.5]}
        entries = [{"iteration": r, "codebooks": [stage]} for r in (1, 2)]
        (folder / "codebooks.json").write_text(json.dumps({"evaluations": entries}))
        return
    scores = [
        {"accuracy": v, "top5": v + 0.3, "mean_average_precision": v - 0.1, "interval": [v - 0.05, v + 0.05]}
        for v in values
    ]
    entries = [{"iteration": r, kind: score} for r, score in enumerate(scores, start=1)]
    (folder / f"{kind}{end}.json").write_text(json.dumps({"evaluations": entries}))


def test_every_iteration_of_a_row_is_a_line_with_its_interval(tmp_path: Path, commands: list[str]) -> None:
    text = fill_every_iteration("digits-tiny", [], grid(), seeds=[0], out=tmp_path).read_text()
    lines = text.splitlines()
    assert lines[2] == "| row | iteration | LP top-1 | LP top-5 | FT top-1 | FT top-5 |"
    assert lines[4] == "| VQ | iter1 | 40.0 [35.0, 45.0] | 70.0 | 40.0 [35.0, 45.0] | 70.0 |"
    assert lines[7] == "| RQ | iter2 | 58.0 [53.0, 63.0] | 88.0 | 58.0 [53.0, 63.0] | 88.0 |"
    assert [command.split()[0] for command in commands] == ["pretrain"] * 2 + ["probe"] * 2 + ["finetune"] * 4
    assert [command.split()[-1] for command in commands if command.startswith("finetune")] == ["1", "1", "2", "2"]
    before = len(commands)
    fill_every_iteration("digits-tiny", [], grid(), seeds=[0], out=tmp_path)
    assert len(commands) == before  # everything is kept


def test_rows_that_share_a_run_are_measured_one_after_the_other(tmp_path: Path, commands: list[str]) -> None:
    rows = {"VQ": ("quantizer=beats",), "CE": ("quantizer=beats", "finetune.loss=ce")}
    table = grid()._replace(rows=rows)
    text = fill_every_iteration("digits-tiny", [], table, seeds=[0], out=tmp_path).read_text()
    kinds = [command.split()[0] for command in commands]
    assert kinds == ["pretrain", "probe", "finetune", "finetune", "finetune", "finetune"]  # one run, one probe
    assert ["finetune.loss=ce" in command for command in commands[2:]] == [False, False, True, True]
    assert "| CE | iter2 |" in text


def test_effects_add_up_and_are_told_for_every_iteration(tmp_path: Path, commands: list[str]) -> None:
    table = grid(effects={"quantizer": ("VQ", "RQ")})._replace(measures=("probe",))
    text = fill_every_iteration("digits-tiny", [], table, seeds=[0, 1], out=tmp_path).read_text()
    assert "| VQ | iter2 | 44.0 ±0.0 | 74.0 ±0.0 |" in text
    assert "| quantizer | VQ → RQ | iter1 | +10.0 ±0.0 |" in text
    assert "| quantizer | VQ → RQ | iter2 | +14.0 ±0.0 |" in text


def test_other_data_sets_have_columns_of_their_own(tmp_path: Path, commands: list[str]) -> None:
    other = "esc50 data.root=/somewhere"
    table = grid()._replace(measures=("probe",))
    text = fill_every_iteration("digits-tiny", [], table, seeds=[0], out=tmp_path, on=[other]).read_text()
    assert "| row | iteration | LP top-1 | LP top-5 | LP on esc50 top-1 | LP on esc50 top-5 |" in text
    assert any(command.endswith("--on esc50 data.root=/somewhere") for command in commands)
    with pytest.raises(ConfigError, match=r"data\.rot"):
        Other.read("esc50 data.rot=/somewhere")


def test_the_codebook_table_has_both_forms_of_ecu_and_figures(tmp_path: Path, commands: list[str]) -> None:
    text = fill_every_iteration("digits-tiny", [], grid()._replace(measures=("codebooks",)), seeds=[0], out=tmp_path)
    released = 0.21 / (3.0 / math.log(2) * math.log(1024))
    assert f"| VQ | iter2 | 1 | 0.21 | 3.00 | 0.100 | {released:.4f} | 3.5 |" in text.read_text()
    assert (tmp_path / "figures" / "row1" / "code-norms-iteration2.png").is_file()


def test_the_released_form_gives_the_papers_table() -> None:
    assert released_effective_usage(0.99, 7.63 * math.log(2), 256) == pytest.approx(0.0234, abs=1e-4)
    assert released_effective_usage(0.01, 0.0, 256) == math.inf  # a collapsed book


def test_labels_decide_what_is_shown() -> None:
    several = Scores(mean_average_precision=0.25, interval=Interval(0.2, 0.3))
    assert every_iteration.metrics_of(several) == ["mean_average_precision"]
    assert score_text([several], "mean_average_precision") == "25.0 [20.0, 30.0]"
    folds = Scores(accuracy=0.9, top5=0.99, mean_average_precision=0.95, folds=(Scores(fold=1),))
    assert every_iteration.metrics_of(folds) == ["accuracy", "top5", "mean_average_precision"]


def test_a_row_that_needs_weights_says_so_and_gets_those_of_the_command(tmp_path: Path, commands: list[str]) -> None:
    rows = {"plain": (), "VQ": ("quantizer=beats",), "weights": ("encoder.weights=FILE",)}
    table = grid()._replace(rows=rows, measures=("probe",))
    text = fill_every_iteration("digits-tiny", [], table, seeds=[0], out=tmp_path).read_text()
    assert "| weights |  | needs weights (encoder.weights=FILE) |  |" in text
    given = list(cells("digits-tiny", ["encoder.weights=vit.safetensors"], table, seeds=[0], out=tmp_path))
    with_weights = {cell.row: "encoder.weights=vit.safetensors" in cell.pretrain for cell in given}
    assert with_weights == {"plain": False, "VQ": False, "weights": True}


def test_in_a_table_of_changes_too_a_row_without_weights_is_not_left_out(tmp_path: Path) -> None:
    table = Grid("t", "T", 1, ("probe",), {"a": (), "b": ("encoder.weights=FILE",)})
    (cell,) = cells("digits-tiny", [], table, seeds=[0], out=tmp_path)
    scores = {cell: {"probe": Scores(accuracy=0.5)}}
    text = write_tables(
        table, scores, "digits-tiny", [], tmp_path, ablation.costs_of(table, scores, tmp_path, wall_minutes=0.0)
    ).read_text()
    assert "| b | needs weights (encoder.weights=FILE) |  | 0.0 |" in text


def test_the_papers_tables_have_its_rows_at_both_iterations() -> None:
    for name in ("table1", "table2", "table3", "codebooks"):
        found = read_grid(name)
        assert (found.every_iteration, found.iterations, len(found.rows)) == (True, 2, 4)
        assert next(iter(found.rows.values())) == ("quantizer=beats",)
    effects = read_grid("attribution").effects
    (before, middle), (again, after) = effects["quantizer"], effects["start"]
    assert (before, after) == effects["total"] and middle == again  # quantizer + start = total


def test_wrong_effects_and_measures_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for text, message in (
        ("rows: {a: [], b: []}\neffects: {x: [a, c]}", "effects.x names 'c', which is no row"),
        ("rows: {a: [], b: []}\nmeasures: [codebooks]", "needs every_iteration: true"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_grid(str(file))


def test_without_labels_the_table_says_what_it_needs() -> None:
    with pytest.raises(UsageError, match="needs labelled data"):
        every_iteration.result_of(Results(evaluations=(Evaluation(iteration=1),)), 1)
