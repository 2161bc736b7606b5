"""The residual rules: what each stage sees of the latent, and what it hands to the next stage.

Shapes: S rows, Dq code width, M stages; `parts` is M under `independent` and 1 otherwise.
With u = z̃ / max(‖z̃‖, 1e-6):

    once          e₁ = u    v_m = e_m                                             e_{m+1} = e_m − c_m
    perstage      e₁ = u    v_m = e_m/‖e_m‖ if ‖e_m‖ > 1e-3·‖e₁‖, else e_m        e_{m+1} = v_m − c_m
    released      e₁ = z̃    v_m = e_m/max(‖e_m‖, 1e-6)                            e_{m+1} = e_m − c_m
    none          e₁ = z̃    v_m = e_m                                             e_{m+1} = e_m − c_m
    independent   e₁ = u in each of M slices    v_m = the m-th slice of e₁        (no residual)

v_m is the stage's own input: it is matched with the codes, and k-means, EMA, commitment and energy all use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Rule = Literal["once", "perstage", "released", "none", "independent"]
PLAIN: tuple[Rule, ...] = ("once", "none")  # v_m is e_m itself, and what the code leaves of it is e_{m+1}
NORM_FLOOR = 1e-6
SMALLEST_SHARE = 1e-3  # perstage leaves residuals below this share of ‖e₁‖ alone: they are rounding, not signal


class Step(NamedTuple):
    """One stage of a walk: the residual that came in, and what the chosen code left of the stage's input."""

    e: Tensor  # (S, Dq)
    error: Tensor  # v_m − c_m


def norms(x: Tensor) -> Tensor:
    """Length of each row, kept as a column."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length


def sliced(x: Tensor, parts: int) -> Tensor:
    return x.view(*x.shape[:-1], parts, x.shape[-1] // parts)  # (S, Dq) -> (S, parts, Dq/parts)


def enter(x: Tensor, rule: Rule, stages: int) -> Tensor:
    """e₁ of raw latents (S, Dq), in float32."""
    x = x.float()
    if rule in ("none", "released"):
        return x
    parts = sliced(x, stages if rule == "independent" else 1)
    return (parts / norms(parts).clamp_min(NORM_FLOOR)).flatten(-2)


def enter_into(buffer: Tensor, x: Tensor, rule: Rule, stages: int) -> Tensor:
    """`enter` into a float32 buffer (S, Dq) that may then be overwritten; not for gradients."""
    if rule in ("none", "released"):
        return buffer.copy_(x)
    count = stages if rule == "independent" else 1
    parts = sliced(x.float(), count)
    torch.div(parts, norms(parts).clamp_min(NORM_FLOOR), out=sliced(buffer, count))
    return buffer


def enter_gradient(x: Tensor, gradient: Tensor, rule: Rule, stages: int) -> Tensor:
    """The gradient with respect to x of a loss whose gradient with respect to e₁ is given; both (S, Dq)."""
    if rule in ("none", "released"):
        return gradient
    parts = stages if rule == "independent" else 1
    x, gradient = sliced(x.float(), parts), sliced(gradient, parts)
    length = norms(x)
    return unit_gradient(x, gradient, length).flatten(-2)


def unit_gradient(x: Tensor, gradient: Tensor, length: Tensor) -> Tensor:
    """Pull a gradient back through x / max(‖x‖, 1e-6): remove its part along x, divide by the length."""
    safe = length.clamp_min(NORM_FLOOR)
    unit = x / safe
    along = (unit * gradient).sum(-1, keepdim=True) * (length > NORM_FLOOR)
    return torch.addcmul(gradient, unit, along, value=-1).div_(safe)


def see(e: Tensor, first_length: Tensor | None, rule: Rule, stage: int, stages: int) -> Tensor:
    """v_m, what stage m (from 0) is given to quantize."""
    if rule == "independent":
        return sliced(e, stages)[..., stage, :]
    if rule == "released":
        return e / norms(e).clamp_min(NORM_FLOOR)
    if rule == "perstage":
        assert first_length is not None
        length = norms(e)
        return e / torch.where(length > SMALLEST_SHARE * first_length, length, 1.0)
    return e


def leave(e: Tensor, v: Tensor, c: Tensor, rule: Rule) -> Tensor:
    """e_{m+1}, what the stage hands on after taking code vectors c from its input v."""
    if rule == "independent":
        return e
    return v - c if rule == "perstage" else e - c


def stage_inputs(x: Tensor, chosen: Callable[[int, Tensor], Tensor], rule: Rule, stages: int) -> Iterator[Tensor]:
    """Yield v_1 … v_M of raw latents; `chosen(m, v)` returns stage m's code vectors and is called after v_m was used.

    Because the caller acts between the yield and the call, the same walk serves the start (make the codebook, then
    choose from it) and a replay of codes that are known.
    """
    e = enter(x, rule, stages)
    first_length = norms(e) if rule == "perstage" else None
    for stage in range(stages):
        v = see(e, first_length, rule, stage, stages)
        yield v
        if stage + 1 < stages:
            e = leave(e, v, chosen(stage, v), rule)


def pull_back(steps: Sequence[Step], rule: Rule) -> Tensor:
    """½ ∂/∂e₁ of Σ_m ‖v_m − sg c_m‖² from the steps of one walk; every stage contributes.

    For `once` and `none`, where ∂e_m/∂e₁ is the identity, it is the sum of the errors, taken during the walk.
    """
    if rule == "independent":
        return torch.cat([step.error for step in steps], -1)
    gradient = torch.zeros_like(steps[0].e)
    if rule == "released":
        for step in steps:
            gradient += unit_gradient(step.e, step.error, norms(step.e))
    else:
        first_length = norms(steps[0].e)
        for step in reversed(steps):
            gradient, length = gradient + step.error, norms(step.e)
            normalised = length > SMALLEST_SHARE * first_length
            gradient = torch.where(normalised, unit_gradient(step.e, gradient, length), gradient)
    return gradient
