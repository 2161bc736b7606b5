"""The quantizer beside a bare matrix product and other libraries, interleaved in one process on one thread.

Shapes: S vectors of width 256, M = 4 codebooks of K = 256 codes.

`×GEMM` is the CPU time of a piece of work divided by that of a bare float32 `torch.mm` of the same multiply-adds, timed
right before it; the median over alternations. Libraries that are not installed are left out.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.quantize import ResidualQuantizer
from bridle.quantize.kmeans import lloyd

WIDTH, STAGES, CODES, ITERATIONS = 256, 4, 256, 10
BUDGETS = {"assign": 2.2, "train step": 4.5, "k-means": 2.1}  # ×GEMM
LIBRARIES = ("vector-quantize-pytorch", "faiss-cpu", "scikit-learn")

Call = Callable[[], object]


class Work(NamedTuple):
    """One kind of work: the bare product it is measured against, and who does it."""

    name: str
    gemm: Call
    calls: dict[str, Call]


class BenchRow(NamedTuple):
    """One competitor at one piece of work."""

    work: str
    size: int
    who: str
    ratio: float  # ×GEMM
    milliseconds: float  # CPU time, median
    extra_mb: float | None  # peak resident memory beyond what was there; None where it cannot be measured


@dataclass(frozen=True)
class BenchTable:
    """Rows in the order measured, and what they were measured on."""

    rows: tuple[BenchRow, ...]
    machine: str

    def ratio(self, work: str, size: int, who: str = "bridle") -> float:
        """×GEMM of one competitor."""
        return next(row.ratio for row in self.rows if (row.work, row.size, row.who) == (work, size, who))

    def over_budget(self) -> list[BenchRow]:
        """bridle's rows that take longer than their budget allows."""
        return [row for row in self.rows if row.who == "bridle" and row.ratio > BUDGETS[row.work]]

    def to_markdown(self) -> str:
        lines = [
            "| work | vectors | who | ×GEMM | CPU ms | extra MB | budget |",
            "|---|---:|---|---:|---:|---:|---|",
        ]
        for row in self.rows:
            extra = "–" if row.extra_mb is None else f"{row.extra_mb:.1f}"
            budget = ""
            if row.who == "bridle":
                met = "met" if row.ratio <= BUDGETS[row.work] else "missed"
                budget = f"≤ {BUDGETS[row.work]}: {met}"
            cells = (row.work, f"{row.size:,}", row.who, f"{row.ratio:.2f}", f"{row.milliseconds:.1f}", extra, budget)
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join([*lines, "", self.machine, ""])


def run(
    sizes: Sequence[int] = (8192, 65536), repeats: int = 7, *, tell: Callable[[str], None] = lambda text: None
) -> BenchTable:
    """Measure all work at all sizes; about five minutes with every library installed. `tell` hears what is next."""
    rows: list[BenchRow] = []
    with one_thread():
        for size in sizes:
            for work in (assign_work(size), train_work(size), kmeans_work(size)):
                tell(f"{work.name}, {size:,} vectors: {', '.join(work.calls)}, {repeats} rounds")
                rows.extend(measure(work, size, repeats))
    return BenchTable(tuple(rows), describe_machine())


def measure(work: Work, size: int, repeats: int) -> Iterator[BenchRow]:
    """Alternate between all competitors `repeats` times; each is compared with a bare product timed just before it."""
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


def cpu_seconds(call: Call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


# --- the work ------------------------------------------------------------------------------------------------------


class Fixture(NamedTuple):
    """Vectors and a quantizer started on some of them."""

    x: Tensor  # (S, 256)
    rq: ResidualQuantizer
    codes: list[Tensor]  # M tensors (256, 256)


def fixture(size: int) -> Fixture:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, WIDTH, generator=generator)
    rq = ResidualQuantizer(codebooks=STAGES, codes=CODES, width=WIDTH)
    rq.start_codebooks(x[: 32 * CODES], generator=generator)
    return Fixture(x, rq, rq.code_vectors())


def bare_products(x: Tensor, codes: list[Tensor], times: int) -> Call:
    """`times` products (S, 256) × (256, 256) into one buffer."""
    turned, out = codes[0].t().contiguous(), torch.empty(len(x), CODES)

    def products() -> None:
        for _ in range(times):
            torch.mm(x, turned, out=out)

    return products


def assign_work(size: int) -> Work:
    x, rq, codes = fixture(size)

    def naive() -> None:
        residual = x
        for code in codes:
            residual = residual - code[torch.cdist(residual, code).argmin(1)]

    calls: dict[str, Call] = {"bridle": lambda: rq.assign(x), "naive cdist": naive}
    if find_spec("vector_quantize_pytorch"):
        calls["vector-quantize-pytorch"] = vqp_forward(x, codes)
    if find_spec("faiss"):
        calls["faiss, beam 1"] = faiss_assign(x, codes)
    return Work("assign", bare_products(x, codes, STAGES), calls)


def train_work(size: int) -> Work:
    x, rq, codes = fixture(size)
    x = x.clone().requires_grad_()

    def step() -> None:
        found = rq(x)
        rq.ema_update(found)
        (0.25 * found.commitment).backward()
        x.grad = None

    calls: dict[str, Call] = {"bridle": step}
    if find_spec("vector_quantize_pytorch"):
        calls["vector-quantize-pytorch"] = vqp_step(x, codes)
    return Work("train step", bare_products(x.detach(), codes, STAGES), calls)


def kmeans_work(size: int) -> Work:
    x, _, codes = fixture(size)
    seeds = x[:CODES].clone()
    calls: dict[str, Call] = {"bridle": lambda: lloyd(x, seeds, iterations=ITERATIONS)}
    if find_spec("vector_quantize_pytorch"):
        from vector_quantize_pytorch.vector_quantize_pytorch import kmeans

        calls["vector-quantize-pytorch"] = lambda: kmeans(
            x[None], CODES, ITERATIONS, sample_fn=lambda samples, count: samples[:, :count]
        )
    if find_spec("faiss"):
        calls["faiss"] = faiss_kmeans(x, seeds)
    if find_spec("sklearn"):
        from sklearn.cluster import KMeans

        solver = KMeans(CODES, init=seeds.numpy(), n_init=1, max_iter=ITERATIONS, tol=0, algorithm="lloyd")
        points = x.numpy()
        calls["scikit-learn"] = lambda: solver.fit(points)
    return Work("k-means", bare_products(x, codes, ITERATIONS), calls)


# --- other libraries -----------------------------------------------------------------------------------------------


def vqp_forward(x: Tensor, codes: list[Tensor]) -> Call:
    quantizer = vqp_quantizer(codes).eval()

    def forward() -> None:
        with torch.no_grad():
            quantizer(x[None])

    return forward


def vqp_step(x: Tensor, codes: list[Tensor]) -> Call:
    quantizer = vqp_quantizer(codes).train()

    def step() -> None:
        _, _, loss = quantizer(x[None])
        loss.sum().backward()
        x.grad = None

    return step


def vqp_quantizer(codes: list[Tensor]) -> torch.nn.Module:
    from vector_quantize_pytorch import ResidualVQ

    quantizer: torch.nn.Module = ResidualVQ(
        dim=WIDTH, codebook_size=CODES, num_quantizers=STAGES, decay=0.99, commitment_weight=0.25
    )
    for layer, code in zip(quantizer.layers, codes, strict=True):  # type: ignore[arg-type]
        layer._codebook.embed.data.copy_(code[None])
        layer._codebook.embed_avg.data.copy_(code[None])
    return quantizer


def faiss_assign(x: Tensor, codes: list[Tensor]) -> Call:
    import faiss

    quantizer = faiss.ResidualQuantizer(WIDTH, STAGES, CODES.bit_length() - 1)
    quantizer.max_beam_size = 1
    faiss.copy_array_to_vector(torch.stack(codes).numpy().ravel(), quantizer.codebooks)
    quantizer.is_trained = True
    points = x.numpy()
    return lambda: quantizer.compute_codes(points)


def faiss_kmeans(x: Tensor, seeds: Tensor) -> Call:
    import faiss

    points = x.numpy()

    def solve() -> None:
        solver = faiss.Kmeans(
            WIDTH, CODES, niter=ITERATIONS, min_points_per_centroid=1, max_points_per_centroid=len(points), seed=0
        )
        solver.train(points, init_centroids=seeds.numpy())

    return solve


# --- the machine ---------------------------------------------------------------------------------------------------


@contextmanager
def one_thread() -> Iterator[None]:
    """torch and the libraries that have their own threads on one thread each, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if find_spec("faiss"):
        import faiss

        faiss.omp_set_num_threads(1)
    limits = None
    if find_spec("threadpoolctl"):
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        limits = threadpool_limits(1)
    try:
        yield
    finally:
        if limits is not None:
            limits.restore_original_limits()
        torch.set_num_threads(before)


def extra_memory(call: Call) -> float | None:
    """Peak resident memory in MB that a call adds to what the process holds; None where /proc does not tell."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what earlier calls left free, or it would hide the peak
        reset.write_text("5")  # the peak starts again from here
    except OSError:
        return None
    before = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - before) / 1024


def resident(field: str) -> int:
    """A field of /proc/self/status in kB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def describe_machine() -> str:
    """One line: processor, cores, and the versions of everything that took part."""
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for library in LIBRARIES:
        try:
            versions.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{library} not installed")
    return f"{processor()}, {os.cpu_count()} cores, 1 thread used; {', '.join(versions)}."


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
