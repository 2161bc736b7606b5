"""The quantizer benchmark: what it measures, how it judges, and its table."""

from __future__ import annotations

import torch

from bridle.bench.quantizer import BenchRow, BenchTable, Fixture, run
from bridle.bench.timing import Call, extra_memory
from bridle.quantize import ResidualQuantizer

torch.set_num_threads(1)


def table(*ratios: float) -> BenchTable:
    works = ("assign", "train step", "k-means")
    rows = [BenchRow(work, 8192, "bridle", ratio, 12.3, 1.0) for work, ratio in zip(works, ratios, strict=True)]
    return BenchTable((*rows, BenchRow("assign", 8192, "naive cdist", 5.0, 50.0, None)), "a machine")


def test_the_table_shows_ratios_budgets_and_the_machine() -> None:
    lines = table(1.5, 5.0, 1.5).to_markdown().splitlines()
    assert lines[2] == "| assign | bridle | 8,192 | 1.50 | 12.3 | 1.0 | ≤ 2.2: met |"
    assert lines[3] == "| train step | bridle | 8,192 | 5.00 | 12.3 | 1.0 | ≤ 4.5: missed |"
    assert lines[5] == "| assign | naive cdist | 8,192 | 5.00 | 50.0 | – |  |"
    assert lines[-1] == "a machine"


def test_a_small_run_measures_every_kind_of_work_on_one_thread_and_names_versions() -> None:
    asked: list[tuple[str, int]] = []

    def others(work: str, data: Fixture) -> dict[str, Call]:
        asked.append((work, len(data.x)))
        return {}

    found = run(sizes=(2048,), repeats=1, others=others)
    assert asked == [("assign", 2048), ("train step", 2048), ("k-means", 2048)]
    assert {row.work for row in found.rows if row.who == "bridle"} == {"assign", "train step", "k-means"}
    assert all(row.ratio > 0 and row.milliseconds > 0 for row in found.rows)
    assert "naive cdist" in {row.who for row in found.rows}
    assert f"torch {torch.__version__}" in found.machine
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
