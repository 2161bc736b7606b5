"""Starting codebooks from data and redrawing rare codes: the same on every rank and for every world size.

Shapes: N rows of all ranks, Dq code width, M stages, K codes, D the width one stage sees.

Rows are gathered in rank order, rank 0 solves one stage after the other, and every stage's codes are broadcast.
The draws come from a seed taken once from the caller's generator, so generators stay in step on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bridle import distributed, seeding
from bridle.errors import DataError, NonFiniteError
from bridle.quantize.kmeans import kmeans
from bridle.quantize.nearest import full_precision, nearest
from bridle.quantize.rules import Rule, stage_inputs

Start = Literal["kmeans", "uniform", "uniform-raw"]
MOST_ROWS = 131_072  # more rows than this are subsampled: k-means does not get better, only slower


class StartReport(NamedTuple):
    """What a start did, stage by stage."""

    rows: int  # rows of all ranks that were used
    distinct: tuple[int, ...]  # different seeds found by k-means (K_m where the data sufficed)
    redrawn: tuple[int, ...]  # codes redrawn because fewer than reset_below rows chose them


class Rows(NamedTuple):
    """All ranks' rows, and the seed of all draws from them."""

    x: Tensor  # (N, Dq) float32
    seed: int


class Solved(NamedTuple):
    code: Tensor  # (K, D)
    distinct: int
    redrawn: Tensor  # (K,) bool


def gather(x: Tensor, valid: Tensor | None, generator: torch.Generator) -> Rows:
    """Valid rows of all ranks in rank order; refuses on all ranks together if there are none or one is not finite."""
    x = x.detach().reshape(-1, x.shape[-1]).float()
    if valid is not None:
        x = x[valid.reshape(-1)]
    # Drawn on every rank, so that the callers' generators advance alike; only rank 0, which solves, uses its draw.
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
    x = distributed.gather_rows(x)
    if not len(x):
        raise DataError("codebooks cannot be started or reset from no valid tokens; check the data and its padding.")
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).any(1).sum())
        raise NonFiniteError(
            f"{bad} of {len(x)} latent vectors are not finite; the codebooks are left as they were. "
            "Check the inputs and the network that made the latents."
        )
    if len(x) > MOST_ROWS:
        draws = seeding.generator(seed, "rows")
        x = x[permutation(len(x), draws)[:MOST_ROWS].sort().values.to(x.device)]
    return Rows(x, seed)


def permutation(length: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(length, generator=generator, device=generator.device)


def start_stage(
    v: Tensor, codes: int, *, start: Start, iterations: int, below: float, generator: torch.Generator, name: str
) -> Solved:
    """The first codes of one stage from its inputs (N, D), rare ones already redrawn; `name` is for warnings."""
    distinct = codes
    if start == "kmeans":
        solved = kmeans(v, codes, iterations=iterations, generator=generator, name=name)
        code, distinct = solved.centres, solved.distinct
    else:
        drawn = torch.rand(codes, v.shape[1], generator=generator, device=generator.device, dtype=torch.float64)
        unit = 2 * drawn.to(v.device) - 1
        if start == "uniform":  # as wide as the data: uniform on ±√3·σ has standard deviation σ
            wide = v.double()
            mean, deviation = wide.mean(0), wide.std(0, correction=0)
            code = (mean + 3**0.5 * deviation * unit).float()
        else:
            code = unit.float()
    if distinct < codes:  # every point already is a code: a redraw would only copy one again
        return Solved(code, distinct, torch.zeros(codes, dtype=torch.bool, device=v.device))
    code, redrawn = redraw_rare(v, code, below=below, generator=generator)
    return Solved(code, distinct, redrawn)


def redraw_rare(v: Tensor, code: Tensor, *, below: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replace codes that fewer than `below` rows choose by rows drawn at random; returns codes and which changed."""
    rare = torch.bincount(nearest(v, code).pick, minlength=len(code)) < below
    return redraw(v, code, rare, generator=generator), rare


def redraw(v: Tensor, code: Tensor, which: Tensor, *, generator: torch.Generator) -> Tensor:
    """The codes (K, D), those marked in `which` (K,) replaced by rows of v drawn at random."""
    count = int(which.sum())
    if not count:
        return code
    order = permutation(len(v), generator).to(v.device)
    rows = order[torch.arange(count, device=v.device) % len(order)]
    return code.index_copy(0, which.nonzero().squeeze(1), v[rows])


def solve_stages(
    rows: Rows,
    shapes: Sequence[torch.Size],
    solve: Callable[[int, Tensor, torch.Generator], Solved],
    *,
    rule: Rule,
    poll: Callable[[], None] | None,
) -> list[Solved]:
    """Solve stage after stage on rank 0, each on what the stages before it leave; every rank gets the result.

    `poll` is called on every rank after every stage and may raise to stop: nothing has been written yet.
    """
    solved: list[Solved] = []

    def chosen(stage: int, v: Tensor) -> Tensor:
        code = solved[stage].code
        return code.index_select(0, nearest(v, code).pick)

    first = distributed.rank() == 0
    inputs = stage_inputs(rows.x, chosen, rule, len(shapes)) if first else None
    for stage, shape in enumerate(shapes):
        with full_precision(rows.x.device):
            if inputs is not None:
                here = solve(stage, next(inputs), seeding.generator(rows.seed, "stage", stage))
            else:
                blank = torch.zeros(shape, device=rows.x.device)
                here = Solved(blank, 0, torch.zeros(len(blank), dtype=torch.bool, device=blank.device))
        solved.append(_from_first_rank(here))
        if poll is not None:
            poll()
    return solved


def _from_first_rank(here: Solved) -> Solved:
    if not distributed.is_active():
        return here
    distinct = torch.tensor([here.distinct], device=here.code.device)
    redrawn = distributed.from_first_rank(here.redrawn.to(torch.uint8))
    return Solved(
        distributed.from_first_rank(here.code), int(distributed.from_first_rank(distinct)), redrawn.to(torch.bool)
    )
