"""The walk of latents through the stages, in chunks that stay in cache, and its gradient.

Shapes: S rows, Dq code width, M stages, K codes, k soft codes.

Everything here only reads. One chunk of rows passes through all M stages before the next is touched, so memory beyond
the results does not grow with S. The gradient of the commitment is analytic and attached in one autograd function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bridle.quantize.nearest import Searcher, chunk_rows, chunks, half_norms
from bridle.quantize.rules import (
    PLAIN,
    Rule,
    Step,
    enter,
    enter_gradient,
    enter_into,
    leave,
    norms,
    pull_back,
    see,
    sliced,
)

SoftWeights = Literal["even", "softmax"]


class Plan(NamedTuple):
    """What a walk needs to know of a quantizer: its codes as they are now, and its choices."""

    codes: tuple[Tensor, ...]  # M tensors (K_m, D)
    rule: Rule
    soft: int
    soft_weights: SoftWeights
    soft_temperature: float = 1.0
    soft_q: bool = True

    @property
    def stages(self) -> int:
        return len(self.codes)

    @property
    def blends(self) -> bool:
        """Are q and the residual made of several codes a stage?"""
        return self.soft > 1 and self.soft_q


class Choice(NamedTuple):
    """The codes one stage took for some rows."""

    pick: Tensor  # (S,) the nearest
    vector: Tensor  # (S, D); the weighted mean where the plan blends
    soft_pick: Tensor | None  # (S, k)
    soft_weight: Tensor | None  # (S, k)


class Walked(NamedTuple):
    """Everything one pass over the rows yields."""

    codes: Tensor  # (S, M) int64
    q: Tensor  # (S, Dq)
    soft_codes: Tensor | None  # (S, M, k)
    soft_weights: Tensor | None  # (S, M, k)
    errors: Tensor  # (M,) float64: Σ over valid rows of ‖v_m − c_m‖²
    energy: Tensor  # () float64: Σ over valid rows of ‖v_1‖²
    pull: Tensor | None  # (S, Dq): half the gradient of Σ_m ‖v_m − sg c_m‖² with respect to e₁, zero on padding

    def write(self, stage: int, choice: Choice, plan: Plan) -> None:
        """Put one stage's codes in place and its vectors into q."""
        self.codes[:, stage] = choice.pick
        if self.soft_codes is not None and choice.soft_pick is not None:
            self.soft_codes[:, stage] = choice.soft_pick
        if self.soft_weights is not None and choice.soft_weight is not None:
            self.soft_weights[:, stage] = choice.soft_weight
        if plan.rule == "independent":
            sliced(self.q, plan.stages)[:, stage] = choice.vector
        else:
            add_or_start(self.q, choice.vector, stage)


def add_or_start(total: Tensor, x: Tensor, stage: int) -> None:
    """total ← x in the first stage, total + x in the others: no pass to fill it with zeros before."""
    if stage == 0:
        total.copy_(x)
    else:
        total.add_(x)


def blend(code: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean of k codes per row."""
    return torch.einsum("skd,sk->sd", torch.nn.functional.embedding(index, code), weight)


def soften(score: Tensor, code: Tensor, plan: Plan) -> Choice:
    """The k codes with the largest scores, their weights, and their weighted mean or the nearest of them."""
    top = torch.topk(score, plan.soft, dim=1)
    # ‖v‖² is the same for all codes of a row, so softmax(−d²/τ) is softmax(2·score/τ).
    even = torch.full_like(top.values, 1 / plan.soft)
    weight = even if plan.soft_weights == "even" else torch.softmax(2 / plan.soft_temperature * top.values, 1)
    pick = top.indices[:, 0]
    vector = blend(code, top.indices, weight) if plan.soft_q else code.index_select(0, pick)
    return Choice(pick, vector, top.indices, weight)


def choose(v: Tensor, stage: int, plan: Plan, searcher: Searcher) -> Choice:
    """The nearest code of each row, or the k nearest; the vectors are overwritten by the next search."""
    if plan.soft > 1:
        return soften(searcher.scores(v, stage), plan.codes[stage], plan)
    pick = searcher.nearest(v, stage).pick
    return Choice(pick, searcher.vectors(pick, stage), None, None)


def squared(x: Tensor, valid: Tensor | None) -> Tensor:
    """Σ x² over valid rows, as float64."""
    if valid is None:
        flat = x.reshape(-1)
        return torch.dot(flat, flat).double()
    return x.square().sum(1).masked_fill(~valid, 0.0).double().sum()


@torch.no_grad()
def assign(x: Tensor, plan: Plan, *, stages: int) -> Tensor:
    """Codes (S, stages) of raw latents (S, Dq), and nothing else."""
    if torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export():
        return _assign_traced(x, plan, stages)
    if not plan.blends:
        plan = plan._replace(soft=1)  # labels alone are soft: codes do not depend on them
    rows = _rows(x, plan)
    searcher = Searcher(plan.codes[:stages], rows=rows, width=x.shape[1])
    codes = torch.empty(len(x), stages, dtype=torch.int64, device=x.device)
    for part in chunks(len(x), rows):
        few = x[part]
        e = enter_into(searcher.residual(*few.shape), few, plan.rule, plan.stages)
        first_length = norms(e) if plan.rule == "perstage" else None
        for stage in range(stages):
            v = see(e, first_length, plan.rule, stage, plan.stages)
            if not plan.blends and stage + 1 == stages:
                codes[part, stage] = searcher.nearest(v, stage).pick
                break
            choice = choose(v, stage, plan, searcher)
            codes[part, stage] = choice.pick
            e = e.sub_(choice.vector) if plan.rule in PLAIN else leave(e, v, choice.vector, plan.rule)
    return codes


def _assign_traced(x: Tensor, plan: Plan, stages: int) -> Tensor:
    """The same as a graph for any number of rows: one pass, no loop over chunks, no branch on values."""
    e = enter(x, plan.rule, plan.stages)
    first_length, picked = norms(e) if plan.rule == "perstage" else None, []
    for stage, code in enumerate(plan.codes[:stages]):
        v = see(e, first_length, plan.rule, stage, plan.stages)
        score = torch.addmm(half_norms(code), v, code.t())
        if plan.blends:
            choice = soften(score, code, plan)
        else:
            pick = torch.argmax(score, 1)
            choice = Choice(pick, code.index_select(0, pick), None, None)
        picked.append(choice.pick)
        e = leave(e, v, choice.vector, plan.rule)
    return torch.stack(picked, -1)


@torch.no_grad()
def walk(x: Tensor, plan: Plan, *, valid: Tensor | None, pull: bool) -> Walked:
    """Quantize raw latents (S, Dq); rows where `valid` (S,) is false get codes but no share in sums and gradient."""
    S, M, soft, device = x.shape[0], plan.stages, plan.soft > 1, x.device
    found = Walked(
        codes=torch.empty(S, M, dtype=torch.int64, device=device),
        q=torch.empty(x.shape, dtype=torch.float32, device=device),
        soft_codes=torch.empty(S, M, plan.soft, dtype=torch.int64, device=device) if soft else None,
        soft_weights=torch.empty(S, M, plan.soft, dtype=torch.float32, device=device) if soft else None,
        errors=torch.zeros(M, dtype=torch.float64, device=device),
        energy=torch.zeros((), dtype=torch.float64, device=device),
        pull=torch.empty(x.shape, dtype=torch.float32, device=device) if pull else None,
    )
    rows = _rows(x, plan)
    searcher = Searcher(plan.codes, rows=rows, width=x.shape[1])
    for part in chunks(S, rows):
        _walk_chunk(x[part], plan, searcher, None if valid is None else valid[part], _part_of(found, part))
    return found


def _part_of(found: Walked, part: slice) -> Walked:
    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[part]

    return found._replace(
        codes=found.codes[part],
        q=found.q[part],
        soft_codes=cut(found.soft_codes),
        soft_weights=cut(found.soft_weights),
        pull=cut(found.pull),
    )


def _walk_chunk(x: Tensor, plan: Plan, searcher: Searcher, valid: Tensor | None, into: Walked) -> None:
    e, steps = enter_into(searcher.residual(*x.shape), x, plan.rule, plan.stages), list[Step]()
    first_length = norms(e) if plan.rule == "perstage" else None
    for stage in range(plan.stages):
        v = see(e, first_length, plan.rule, stage, plan.stages)
        choice = choose(v, stage, plan, searcher)
        if stage == 0:
            into.energy.add_(squared(v, valid))
        if plan.rule in PLAIN:
            e = error = e.sub_(choice.vector)  # what is left is the error and the next input, in place
            if into.pull is not None:
                add_or_start(into.pull, e, stage)
        else:
            error = v - choice.vector
            steps.append(Step(e, error))
            e = leave(e, v, choice.vector, plan.rule)
        into.errors[stage].add_(squared(error, valid))
        into.write(stage, choice, plan)
    if into.pull is None:
        return
    if plan.rule not in PLAIN:
        into.pull.copy_(pull_back(steps, plan.rule))
    if valid is not None:
        into.pull.masked_fill_(~valid[:, None], 0.0)


def combine(vectors: Sequence[Tensor], rule: Rule) -> Tensor:
    """q from the stages' code vectors: their sum in stage order, or their concatenation under `independent`."""
    if rule == "independent":
        return torch.cat(list(vectors), -1)
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def _rows(x: Tensor, plan: Plan) -> int:
    return chunk_rows(max(x.shape[1], *(len(code) for code in plan.codes)), x.device)


def attach(x: Tensor, walked: Walked, commitment: Tensor, share: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(straight-through q, commitment) with their gradients to x; `share` is 1 / (valid tokens · M)."""
    straight, loss = Attach.apply(x, walked.q, walked.pull, commitment, share, plan)  # type: ignore[no-untyped-call]
    return straight, loss


class Attach(torch.autograd.Function):
    """Give q the gradient of e₁ (straight-through) and the commitment its analytic gradient, in one backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, q: Tensor, pull: Tensor, commitment: Tensor, scale: Tensor, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, pull, scale)
        ctx.rule, ctx.stages, ctx.rows = plan.rule, plan.stages, _rows(x, plan)
        ctx.set_materialize_grads(False)
        return q.view_as(q), commitment.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_straight: Tensor | None, g_commitment: Tensor | None) -> tuple[Tensor | None, ...]:
        x, pull, scale = ctx.saved_tensors
        if g_straight is None and g_commitment is None:
            return (None,) * 6
        gradient = torch.empty_like(x)
        factor = None if g_commitment is None else 2 * scale * g_commitment.float()
        for part in chunks(len(x), ctx.rows):
            if factor is None:
                assert g_straight is not None
                g = g_straight[part].float()
            else:
                g = pull[part] * factor
                if g_straight is not None:
                    g += g_straight[part]
            gradient[part] = enter_gradient(x[part], g, ctx.rule, ctx.stages)
        return gradient, None, None, None, None, None
