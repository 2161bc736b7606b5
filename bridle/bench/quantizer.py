"""The quantizer beside bare matrix products, interleaved in one process on one thread.

Shapes: S vectors of width 256, M = 4 codebooks of K = 256 codes.

`×GEMM` is the CPU time of a piece of work divided by that of a bare float32 `torch.mm` of the same multiply-adds, timed
right before it; the median over alternations. `benchmarks/quantizer_libraries.py` in the repository adds other
libraries.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.bench.timing import Call, Tell, cpu_seconds, describe_machine, extra_memory, markdown_table, one_thread
from bridle.quantize import ResidualQuantizer
from bridle.quantize.kmeans import lloyd

WIDTH, STAGES, CODES, ITERATIONS = 256, 4, 256, 10
BUDGETS = {"assign": 2.2, "train step": 4.5, "k-means": 2.1}  # ×GEMM


class Fixture(NamedTuple):
    """Vectors and a quantizer started on some of them."""

    x: Tensor  # (S, 256)
    rq: ResidualQuantizer
    codes: list[Tensor]  # M tensors (256, 256)


class Work(NamedTuple):
    """One kind of work: the bare product it is measured against, and who does it."""

    name: str
    gemm: Call
    calls: dict[str, Call]


MoreCalls = Callable[[str, Fixture], dict[str, Call]]  # kind of work, its data -> other implementations by name


class BenchRow(NamedTuple):
    """One implementation of one kind of work."""

    work: str
    size: int
    who: str
    ratio: float  # ×GEMM
    milliseconds: float  # CPU time, median
    extra_mb: float | None  # peak resident memory beyond what was there; None where it cannot be measured

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        extra = "–" if self.extra_mb is None else f"{self.extra_mb:.1f}"
        met = "met" if self.ratio <= BUDGETS[self.work] else "missed"
        budget = f"≤ {BUDGETS[self.work]}: {met}" if self.who == "bridle" else ""
        return self.work, self.who, f"{self.size:,}", f"{self.ratio:.2f}", f"{self.milliseconds:.1f}", extra, budget


class BenchTable(NamedTuple):
    """Rows in the order measured, and what they were measured on."""

    rows: tuple[BenchRow, ...]
    machine: str

    def to_markdown(self) -> str:
        head = ("work", "who", "vectors", "×GEMM", "CPU ms", "extra MB", "budget")
        return f"{markdown_table(head, (row.cells() for row in self.rows), words=2)}\n{self.machine}\n"


def run(
    sizes: Sequence[int] = (8192, 65536),
    repeats: int = 7,
    *,
    tell: Tell = lambda text: None,
    others: MoreCalls = lambda work, data: {},
    libraries: Sequence[str] = (),
) -> BenchTable:
    """Measure all work at all sizes; `others` adds implementations to compare with."""
    rows: list[BenchRow] = []
    with one_thread():
        for size in sizes:
            for build in (assign_work, train_work, kmeans_work):
                data = fixture(size)
                work = build(data)
                work.calls.update(others(work.name, data))
                tell(f"{work.name}, {size:,} vectors: {', '.join(work.calls)}, {repeats} rounds")
                rows.extend(measure(work, size, repeats))
        return BenchTable(tuple(rows), describe_machine(libraries))


def measure(work: Work, size: int, repeats: int) -> Iterator[BenchRow]:
    """Alternate between all implementations `repeats` times, each compared with a bare product timed just before it."""
    extra = {who: extra_memory(call) for who, call in work.calls.items()}  # also the warm-up
    work.gemm()
    ratios: dict[str, list[float]] = {who: [] for who in work.calls}
    times: dict[str, list[float]] = {who: [] for who in work.calls}
    for _ in range(repeats):
        for who, call in work.calls.items():
            bare = cpu_seconds(work.gemm)
            times[who].append(cpu_seconds(call))
            ratios[who].append(times[who][-1] / bare)
    for who in work.calls:
        milliseconds = 1000 * statistics.median(times[who])
        yield BenchRow(work.name, size, who, statistics.median(ratios[who]), milliseconds, extra[who])


def fixture(size: int) -> Fixture:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, WIDTH, generator=generator)
    rq = ResidualQuantizer(codebooks=STAGES, codes=CODES, width=WIDTH)
    rq.start_codebooks(x[: 32 * CODES], generator=generator)
    return Fixture(x, rq, rq.code_vectors())


def bare_products(data: Fixture, times: int) -> Call:
    """`times` products (S, 256) × (256, 256) into one buffer."""
    turned, out = data.codes[0].t().contiguous(), torch.empty(len(data.x), CODES)

    def products() -> None:
        for _ in range(times):
            torch.mm(data.x, turned, out=out)

    return products


def assign_work(data: Fixture) -> Work:
    def naive() -> None:
        residual = data.x
        for code in data.codes:
            residual = residual - code[torch.cdist(residual, code).argmin(1)]

    return Work("assign", bare_products(data, STAGES), {"bridle": lambda: data.rq.assign(data.x), "naive cdist": naive})


def train_work(data: Fixture) -> Work:
    x = data.x.clone().requires_grad_()

    def step() -> None:
        found = data.rq(x)
        data.rq.ema_update(found)
        (0.25 * found.commitment).backward()
        x.grad = None

    return Work("train step", bare_products(data, STAGES), {"bridle": step})


def kmeans_work(data: Fixture) -> Work:
    seeds = data.x[:CODES].clone()
    calls: dict[str, Call] = {"bridle": lambda: lloyd(data.x, seeds, iterations=ITERATIONS)}
    return Work("k-means", bare_products(data, ITERATIONS), calls)
