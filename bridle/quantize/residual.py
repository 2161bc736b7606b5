"""The residual quantizer: M codebooks in a row, each on what the ones before it left over.

Shapes: B batch, T tokens, S = B·T, Dq code width, M codebooks, K_m codes, k soft codes.

    i*(m) = argmin_i ‖v_m − c_i‖²        q = Σ_m c_{i*(m)}        VQ is M = 1.

`forward` only reads. `start_codebooks`, `ema_update` and `reset_rare` are the calls that write; they are collective:
under torch.distributed every rank makes them, with its own rows, and all ranks end with the same codebooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from bridle import distributed
from bridle.errors import ConfigError, NonFiniteError, UsageError
from bridle.quantize import walk
from bridle.quantize.codebook import Codebook, Update
from bridle.quantize.initialise import (
    Solved,
    Start,
    StartReport,
    gather,
    redraw,
    redraw_rare,
    solve_stages,
    start_stage,
)
from bridle.quantize.nearest import full_precision
from bridle.quantize.result import Quantized, Statistics
from bridle.quantize.rules import Rule
from bridle.quantize.walk import Plan, SoftWeights


class ResidualQuantizer(nn.Module):
    """Quantizes vectors of width Dq with M codebooks; see `bridle.quantize.rules` for the residual rules.

    Buffers:
        stages.<m>.code (K_m, D) float32: the codes; a parameter under `update="gradient"`.
        stages.<m>.usage (K_m,) float64: N of the EMA, 1 after a start or reset; absent under `update="gradient"`.
        stages.<m>.code_sum (K_m, D) float64: m of the EMA, equal to the code after a start or reset; likewise.
        started () bool: have the codebooks been started?
    """

    started: Tensor

    def __init__(
        self,
        *,
        codebooks: int = 4,
        codes: int | Sequence[int] = 256,
        width: int = 256,
        start: Start = "kmeans",
        residual: Rule = "once",
        update: Update = "ema",
        decay: float = 0.99,
        eps: float = 1e-5,
        reset_below: float = 1,
        soft: int = 1,
        soft_weights: SoftWeights = "even",
        soft_temperature: float = 0.1,
        soft_q: bool = True,
        kmeans_iterations: int = 10,
    ) -> None:
        super().__init__()
        self.codebooks, self.width = codebooks, width
        self.codes = (codes,) * codebooks if isinstance(codes, int) else tuple(codes)
        self.start, self.residual, self.update = start, residual, update
        self.decay, self.eps, self.reset_below = decay, eps, reset_below
        self.soft, self.soft_weights, self.kmeans_iterations = soft, soft_weights, kmeans_iterations
        self.soft_temperature, self.soft_q = soft_temperature, soft_q
        self._check()
        stage_width = width // codebooks if residual == "independent" else width
        self.stages = nn.ModuleList(Codebook(codes=K, width=stage_width, update=update) for K in self.codes)
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))
        self._known_started = False  # the flag on the host, so that forward does not wait for a device

    def _check(self) -> None:
        choices = {"start": Start, "residual": Rule, "update": Update, "soft_weights": SoftWeights}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(
                    f"quantizer.{name} is {getattr(self, name)!r}; choose from {list(get_args(allowed))}."
                )
        if self.codebooks < 1 or len(self.codes) != self.codebooks or min(self.codes) < 1:
            raise ConfigError(
                f"quantizer.codes {list(self.codes)} must give a positive size for each of {self.codebooks} codebooks."
            )
        if not 1 <= self.soft <= min(self.codes):
            raise ConfigError(f"quantizer.soft is {self.soft}; expected 1 to {min(self.codes)}, the smallest codebook.")
        if not self.soft_temperature > 0:
            raise ConfigError(f"quantizer.soft_temperature is {self.soft_temperature}; expected a number above 0.")
        if not 0 < self.decay < 1 or self.eps < 0 or self.reset_below < 0 or self.kmeans_iterations < 0:
            raise ConfigError(
                f"quantizer.decay {self.decay} must lie between 0 and 1; eps {self.eps}, "
                f"reset_below {self.reset_below} and kmeans_iterations {self.kmeans_iterations} must not be negative."
            )
        if self.width < 1 or (self.residual == "independent" and self.width % self.codebooks):
            raise ConfigError(
                f"quantizer.width is {self.width}; expected a positive number"
                + (f" divisible by {self.codebooks} codebooks for residual 'independent'." if self.width > 0 else ".")
            )

    # --- reading ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *, valid: Tensor | None = None) -> Quantized:
        """Quantize latents (B, T, Dq) or (S, Dq); tokens where `valid` (B, T) or (S,) is false do not count."""
        self._require_started()
        rows, valid = self._rows(x), self._valid_rows(x, valid)
        # A copy of the codes makes the result a value: updates between forward and statistics cannot mix into it.
        plan = self._plan(tuple(book.code.detach().clone() for book in self.books))
        with full_precision(x.device):
            walked = walk.walk(rows.detach(), plan, valid=valid, pull=torch.is_grad_enabled() and x.requires_grad)
            tokens = torch.full((), len(rows), device=x.device) if valid is None else valid.sum()
            share = 1 / (tokens.clamp_min(1).double() * self.codebooks)
            straight, commitment = walked.q, (walked.errors.sum() * share).float()
            if walked.pull is not None:
                straight, commitment = walk.attach(rows, walked, commitment, share.float(), plan)
            energy = torch.cat([torch.ones_like(walked.errors[:1]), walked.errors / walked.energy.clamp_min(1e-30)])

        def shaped(rows: Tensor) -> Tensor:
            return rows.view(*x.shape[:-1], *rows.shape[1:])  # (S, …) -> (B, T, …)

        found = Quantized(
            codes=shaped(walked.codes),
            q=shaped(walked.q),
            straight_through=shaped(straight),
            commitment=commitment,
            codebook_term=torch.zeros_like(commitment),
            soft_codes=None if walked.soft_codes is None else shaped(walked.soft_codes),
            soft_weights=None if walked.soft_weights is None else shaped(walked.soft_weights),
            energy=energy,
            _x=rows,
            _valid=valid,
            _plan=plan,
        )
        if self.update == "ema":
            return found
        # Built here and not on demand, so that DistributedDataParallel sees the codes take part in the forward.
        return replace(found, codebook_term=found.codebook_distance([book.code for book in self.books]))

    def assign(self, x: Tensor, *, stages: int | None = None) -> Tensor:
        """Codes (…, stages) of latents (…, Dq) and nothing else: the fast way through a corpus."""
        self._require_started()
        plan, rows = self._plan(tuple(book.code.detach() for book in self.books)), self._rows(x)
        with full_precision(x.device):
            codes = walk.assign(rows.detach(), plan, stages=self._stages(stages))
        return codes.view(*x.shape[:-1], codes.shape[-1])

    def decode(self, codes: Tensor, *, stages: int | None = None) -> Tensor:
        """The sum of the code vectors of codes (…, j), j ≤ M, or of their first `stages`: (…, Dq).

        Under `independent` the slices of stages left out are zero.
        """
        self._require_started()
        if codes.dtype.is_floating_point or codes.dtype == torch.bool or not 1 <= codes.shape[-1] <= self.codebooks:
            raise UsageError(
                f"decode expects integer codes (…, 1 to {self.codebooks}); got {codes.dtype} {list(codes.shape)}."
            )
        stages = min(self._stages(stages), codes.shape[-1])
        index = codes.reshape(-1, codes.shape[-1]).long()
        vectors = [book.code.index_select(0, index[:, m]) for m, book in enumerate(self.books[:stages])]
        q = walk.combine(vectors, self.residual)
        q = nn.functional.pad(q, (0, self.width - q.shape[1]))
        return q.view(*codes.shape[:-1], self.width)

    @property
    def books(self) -> list[Codebook]:
        """The M codebooks."""
        return [book for book in self.stages if isinstance(book, Codebook)]

    def code_vectors(self) -> list[Tensor]:
        """The codes of every stage, M tensors (K_m, D), detached."""
        return [book.code.detach() for book in self.books]

    @property
    def is_started(self) -> bool:
        """Have the codebooks been started, or loaded from a quantizer that was?"""
        if not self._known_started and not self.started.is_meta:
            self._known_started = bool(self.started)  # written by something other than load_state_dict
        return self._known_started

    # --- writing ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start_codebooks(
        self,
        x: Tensor,
        *,
        generator: torch.Generator,
        valid: Tensor | None = None,
        poll: Callable[[], None] | None = None,
    ) -> StartReport:
        """Make all codebooks from this rank's latents (collective), and redraw codes that hardly any of them choose.

        `poll` is called on every rank between stages and may raise to stop; nothing is written before the end.
        """
        rows = gather(self._rows(x), self._valid_rows(x, valid), generator)

        def solve(stage: int, v: Tensor, draws: torch.Generator) -> Solved:
            return start_stage(
                v,
                self.codes[stage],
                start=self.start,
                iterations=self.kmeans_iterations,
                below=self.reset_below,
                generator=draws,
                name=f"stage {stage + 1}",
            )

        solved = solve_stages(rows, [book.code.shape for book in self.books], solve, rule=self.residual, poll=poll)
        for book, new in zip(self.books, solved, strict=True):
            book.restart(new.code)
        self._mark_started()
        redrawn = tuple(int(new.redrawn.sum()) for new in solved)
        return StartReport(len(rows.x), tuple(new.distinct for new in solved), redrawn)

    @torch.no_grad()
    def reset_rare(
        self, x: Tensor, *, generator: torch.Generator, below: float | None = None, valid: Tensor | None = None
    ) -> int:
        """Redraw from the latents every code that fewer than `below` of them choose (collective); returns how many."""
        limit = self.reset_below if below is None else below

        def solve(stage: int, v: Tensor, draws: torch.Generator) -> Solved:
            code, rare = redraw_rare(v, self.books[stage].code, below=limit, generator=draws)
            return Solved(code, len(code), rare)

        return self._redraw(x, valid, generator, solve)

    @torch.no_grad()
    def reset_codes(
        self, x: Tensor, which: Sequence[Tensor], *, generator: torch.Generator, valid: Tensor | None = None
    ) -> int:
        """Redraw from the latents the codes marked in `which`, M masks (K_m,) (collective); returns how many."""

        def solve(stage: int, v: Tensor, draws: torch.Generator) -> Solved:
            code, marked = self.books[stage].code, which[stage].to(v.device)
            return Solved(redraw(v, code, marked, generator=draws), len(code), marked)

        return self._redraw(x, valid, generator, solve)

    def _redraw(
        self,
        x: Tensor,
        valid: Tensor | None,
        generator: torch.Generator,
        solve: Callable[[int, Tensor, torch.Generator], Solved],
    ) -> int:
        self._require_started()
        rows = gather(self._rows(x), self._valid_rows(x, valid), generator)
        solved = solve_stages(rows, [book.code.shape for book in self.books], solve, rule=self.residual, poll=None)
        for book, new in zip(self.books, solved, strict=True):
            book.restart(new.code, new.redrawn)
        return sum(int(new.redrawn.sum()) for new in solved)

    @torch.no_grad()
    def ema_update(self, found: Quantized | Statistics, *, summed: bool = False) -> None:
        """Move the codes by EMA 2–5 with the statistics of one optimizer step, summed over ranks (collective).

        `summed`: they are those of all ranks already, and nothing is exchanged.
        """
        if self.update != "ema":
            raise UsageError("ema_update needs update='ema'; with update='gradient' the optimizer moves the codes.")
        self._require_started()
        statistics = found.statistics() if isinstance(found, Quantized) else found
        shapes = [tuple(l_sum.shape) for l_sum in statistics.l_sum]
        if shapes != [tuple(book.code.shape) for book in self.books]:
            raise UsageError(f"these statistics {shapes} belong to a quantizer with other stages, codes or width.")
        total = statistics.flatten()
        if not summed:
            total = distributed.sum_over_ranks(total)
        # The reduced numbers are the same everywhere, so all ranks refuse together.
        if not bool(torch.isfinite(total).all()):
            raise NonFiniteError(
                "the code statistics of this step are not finite; the codebooks are left as they were."
            )
        statistics = statistics.unflatten(total)
        for book, n, l_sum in zip(self.books, statistics.n, statistics.l_sum, strict=True):
            book.ema_step(n, l_sum, decay=self.decay, eps=self.eps)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _plan(self, codes: tuple[Tensor, ...]) -> Plan:
        return Plan(codes, self.residual, self.soft, self.soft_weights, self.soft_temperature, self.soft_q)

    def _rows(self, x: Tensor) -> Tensor:
        if x.dim() not in (2, 3) or x.shape[-1] != self.width or not x.is_floating_point():
            raise UsageError(
                f"expected floating-point latents (B, T, {self.width}) or (S, {self.width}); "
                f"got {x.dtype} {list(x.shape)}."
            )
        return x.reshape(-1, self.width)

    def _valid_rows(self, x: Tensor, valid: Tensor | None) -> Tensor | None:
        if valid is None:
            return None
        if valid.dtype != torch.bool or valid.shape != x.shape[:-1]:
            raise UsageError(f"expected valid as bool {list(x.shape[:-1])}; got {valid.dtype} {list(valid.shape)}.")
        return valid.reshape(-1)

    def _stages(self, stages: int | None) -> int:
        if stages is None:
            return self.codebooks
        if not 1 <= stages <= self.codebooks:
            raise UsageError(f"stages is {stages}; this quantizer has 1 to {self.codebooks}.")
        return stages

    def _require_started(self) -> None:
        if not self.is_started:
            raise UsageError(
                "the codebooks have not been started; call start_codebooks(x, generator=…) or load a checkpoint first."
            )

    def _mark_started(self) -> None:
        self.started.fill_(True)
        self._known_started = True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        flag = state_dict.get(prefix + "started")
        if isinstance(flag, Tensor) and not flag.is_meta:
            self._known_started = bool(flag)

    def extra_repr(self) -> str:
        return (
            f"codebooks={self.codebooks}, codes={self.codes}, width={self.width}, residual={self.residual!r}, "
            f"start={self.start!r}, update={self.update!r}, soft={self.soft}, started={self._known_started}"
        )
