"""The quantizer beside bare matrix products, interleaved in one process on one thread.

Shapes: S vectors of width 256, M = 4 codebooks of K = 256 codes.

`×GEMM` is the CPU time of a piece of work divided by that of a bare float32 `torch.mm` of the same multiply-adds, timed
right before it; the median over alternations. `benchmarks/quantizer_libraries.py` in the repository adds other
libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from bench.timing import Call, Tell, alternate, describe_machine, extra_memory, markdown_table, one_thread
from bridle.quantize import ResidualQuantizer
from bridle.quantize.kmeans import lloyd

WIDTH, STAGES, CODES, ITERATIONS = 256, 4, 256, 10
BUDGETS = {"assign": 2.2, "train step": 4.5, "k-means": 2.1}  # ×GEMM, by kind of work
HEAD = ("work", "who", "vectors", "×GEMM", "CPU ms", "extra MB", "budget")


class Fixture(NamedTuple):
    """Vectors and a quantizer started on some of them."""

    x: Tensor  # (S, 256)
    rq: ResidualQuantizer
    codes: list[Tensor]  # M tensors (256, 256)


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


def run(
    sizes: Sequence[int] = (8192, 65536),
    repeats: int = 7,
    *,
    tell: Tell = lambda text: None,
    others: MoreCalls = lambda work, data: {},
    libraries: Sequence[str] = (),
) -> str:
    """Measure all work at all sizes and return a Markdown table; `others` adds implementations to compare with."""
    with one_thread():
        rows = [row for size in sizes for work in BUDGETS for row in measure(work, size, repeats, tell, others)]
        return f"{markdown_table(HEAD, (row.cells() for row in rows), words=2)}\n{describe_machine(libraries)}\n"


def measure(work: str, size: int, repeats: int, tell: Tell, others: MoreCalls) -> Iterator[BenchRow]:
    """All implementations of one kind of work, alternating."""
    data = fixture(size)
    calls = own_calls(work, data) | others(work, data)
    tell(f"{work}, {size:,} vectors: {', '.join(calls)}, {repeats} rounds")
    gemm = bare_products(data, ITERATIONS if work == "k-means" else STAGES)
    extra = {who: extra_memory(call) for who, call in calls.items()}  # also the warm-up
    gemm()
    for who, times in alternate(calls, gemm, repeats).items():
        ratio, milliseconds = median(a / b for a, b in times), 1000 * median(a for a, _ in times)
        yield BenchRow(work, size, who, ratio, milliseconds, extra[who])


def fixture(size: int) -> Fixture:
    """The vectors and codebooks that every implementation gets."""
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


def own_calls(work: str, data: Fixture) -> dict[str, Call]:
    """bridle's implementation of a kind of work; of the assignment also a naive one."""
    x, seeds = data.x.clone().requires_grad_(work == "train step"), data.x[:CODES].clone()

    def naive() -> None:
        residual = data.x
        for code in data.codes:
            residual = residual - code[torch.cdist(residual, code).argmin(1)]

    def step() -> None:
        found = data.rq(x)
        data.rq.ema_update(found)
        (0.25 * found.commitment).backward()
        x.grad = None

    if work == "assign":
        return {"bridle": lambda: data.rq.assign(data.x), "naive cdist": naive}
    return {"bridle": step if work == "train step" else lambda: lloyd(data.x, seeds, iterations=ITERATIONS)}
