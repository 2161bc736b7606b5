"""The quantizer benchmark: what it measures, how it judges, and its table."""

from __future__ import annotations

import io
import json

import pytest
import torch
from bench.commands import bench_quantizer
from bench.quantizer import BenchRow, Fixture, run
from bench.timing import Call, extra_memory

from bridle.console import json_output
from bridle.quantize import ResidualQuantizer

torch.set_num_threads(1)


def test_a_row_shows_the_ratio_and_whether_the_budget_is_met() -> None:
    own = BenchRow("assign", 8192, "bridle", 1.5, 12.3, 1.0)
    assert own.cells() == ("assign", "bridle", "8,192", "1.50", "12.3", "1.0", "≤ 2.2: met")
    assert own._replace(work="train step", ratio=5.0).cells()[-1] == "≤ 4.5: missed"
    assert own._replace(who="naive cdist", extra_mb=None).cells()[-2:] == ("–", "")


def test_a_table_is_an_object_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_output, "stream", printed := io.StringIO())
    monkeypatch.setattr("bench.quantizer.run", lambda **options: "| a |\n")
    bench_quantizer(quick=True)
    assert json.loads(printed.getvalue()) == {"command": "bench", "table": "| a |\n"}


def test_a_small_run_measures_every_kind_of_work_on_one_thread_and_names_versions() -> None:
    asked: list[tuple[str, int]] = []

    def others(work: str, data: Fixture) -> dict[str, Call]:
        asked.append((work, len(data.x)))
        return {}

    table = run(sizes=(2048,), repeats=1, others=others).splitlines()
    assert asked == [("assign", 2048), ("train step", 2048), ("k-means", 2048)]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:6]]
    who = [(row[0], row[1]) for row in rows]
    assert who == [("assign", "bridle"), ("assign", "naive cdist"), ("train step", "bridle"), ("k-means", "bridle")]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)
    assert f"torch {torch.__version__}" in table[-1]
    assert torch.get_num_threads() == 1


def test_assigning_needs_less_than_ten_megabytes_beyond_the_codes_however_many_vectors() -> None:
    rq, generator = ResidualQuantizer(), torch.Generator().manual_seed(0)
    x = torch.randn(65_536, 256, generator=generator)
    rq.start_codebooks(x[:2048], generator=generator)
    rq.assign(x[:2048])  # what the matrix library sets up once does not count
    returned = 65_536 * 4 * 8 / 2**20
    extra = extra_memory(lambda: rq.assign(x))  # distances of all pairs would be 64 MiB a stage
    assert extra is None or extra < 10 + returned


def test_extra_memory_sees_what_a_call_needs() -> None:
    kept: list[torch.Tensor] = []
    extra = extra_memory(lambda: kept.append(torch.ones(8 * 2**20)))  # 32 MiB
    assert extra is None or 31 < extra < 40
