"""Gradients of the quantizer: straight-through, commitment of every stage, and the gradient update of the codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bridle.errors import UsageError
from bridle.quantize import ResidualQuantizer
from bridle.quantize.rules import Rule

torch.set_num_threads(1)
RULES: list[Rule] = ["once", "perstage", "released", "none", "independent"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latents(rows: int = 200, *, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, 12, generator=seeded(seed)) + 1


def started(rule: Rule = "once", **options: object) -> ResidualQuantizer:
    rq = ResidualQuantizer(codebooks=3, codes=8, width=12, residual=rule, **options)  # type: ignore[arg-type]
    rq.start_codebooks(latents(), generator=seeded(1))
    return rq


def gradient_of(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x, retain_graph=True)[0]


def e1(x: Tensor, rule: Rule) -> Tensor:
    if rule in ("none", "released"):
        return x
    if rule == "independent":
        return torch.cat([part / part.norm(dim=-1, keepdim=True) for part in x.chunk(3, -1)], -1)
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("rule", RULES)
def test_the_straight_through_derivative_is_the_identity_with_respect_to_e1(rule: Rule) -> None:
    rq, x = started(rule), latents(50, seed=2).requires_grad_()
    pull = torch.randn(50, 12, generator=seeded(3))
    expected = gradient_of((e1(x, rule) * pull).sum(), x)
    torch.testing.assert_close(gradient_of((rq(x).straight_through * pull).sum(), x), expected, rtol=1e-4, atol=1e-6)


def test_without_normalisation_the_straight_through_gradient_arrives_unchanged() -> None:
    rq, x = started("none"), latents(50, seed=2).requires_grad_()
    pull = torch.randn(50, 12, generator=seeded(3))
    assert torch.equal(gradient_of((rq(x).straight_through * pull).sum(), x), pull)


@pytest.mark.parametrize("soft", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_commitment_gradient_is_the_derivative_of_the_commitment(rule: Rule, soft: int) -> None:
    # Central differences in float64 of the loss with the chosen codes held fixed.
    rq, x = started(rule, soft=soft), latents(6, seed=2)
    found = rq(x.requires_grad_())
    gradient = gradient_of(found.commitment, x)
    chosen = chosen_vectors(rq, found.codes, found.soft_codes)
    with torch.no_grad():
        for row, column in [(0, 0), (3, 7), (5, 11)]:
            step = torch.zeros(x.shape, dtype=torch.float64)
            step[row, column] = 1e-5
            up, down = (commitment_in_float64(x.double() + sign * step, chosen, rule) for sign in (1, -1))
            assert gradient[row, column].item() == pytest.approx(float((up - down) / 2e-5), rel=1e-3, abs=1e-6)


def chosen_vectors(rq: ResidualQuantizer, codes: Tensor, soft_codes: Tensor | None) -> list[Tensor]:
    if soft_codes is None:
        return [book.double()[codes[:, m]] for m, book in enumerate(rq.code_vectors())]
    return [book.double()[soft_codes[:, m]].mean(1) for m, book in enumerate(rq.code_vectors())]


def commitment_in_float64(x: Tensor, chosen: list[Tensor], rule: Rule) -> Tensor:
    e, total = e1(x, rule), torch.zeros((), dtype=torch.float64)
    for m, c in enumerate(chosen):
        v = e.chunk(3, -1)[m] if rule == "independent" else e
        if rule in ("perstage", "released"):
            v = e / e.norm(dim=-1, keepdim=True)
        total = total + (v - c).square().sum(-1).mean() / len(chosen)
        e = e if rule == "independent" else (v - c if rule == "perstage" else e - c)
    return total


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_the_commitment_of_each_stage_alone_reaches_the_latents(rule: Rule, stage: int) -> None:
    rq, x = started(rule), latents(50, seed=2).requires_grad_()
    alone = gradient_of(rq(x).commitment_by_stage[stage], x)
    assert (alone.norm(dim=1) > 1e-6).all()


@pytest.mark.parametrize("rule", RULES)
def test_the_commitment_is_the_mean_of_its_stages_also_in_its_gradient(rule: Rule) -> None:
    rq, x = started(rule), latents(700, seed=2).requires_grad_()  # more than one chunk
    found = rq(x)
    expected = gradient_of(found.commitment_by_stage.mean(), x)
    torch.testing.assert_close(gradient_of(found.commitment, x), expected, rtol=1e-3, atol=1e-6)


def test_straight_through_and_commitment_add_their_gradients() -> None:
    rq, x = started(), latents(50, seed=2).requires_grad_()
    found = rq(x)
    both = gradient_of(found.straight_through.sum() + 2 * found.commitment, x)
    apart = gradient_of(found.straight_through.sum(), x) + 2 * gradient_of(found.commitment, x)
    torch.testing.assert_close(both, apart)


def test_the_commitment_on_the_sum_pulls_towards_q() -> None:
    rq, x = started("none"), latents(50, seed=2).requires_grad_()
    found = rq(x)
    torch.testing.assert_close(gradient_of(found.commitment_on_sum, x), 2 * (x - found.q) / 50)


def test_the_gradient_has_the_dtype_of_the_latents() -> None:
    rq, x = started(), latents(50, seed=2).bfloat16().requires_grad_()
    found = rq(x)
    assert gradient_of(found.commitment + found.straight_through.sum(), x).dtype == torch.bfloat16


def test_padding_has_no_share_in_losses_and_gradient() -> None:
    rq, x = started(), latents(60, seed=2)
    valid = torch.arange(60) % 3 > 0
    dirty = torch.where(valid[:, None], x, float("nan")).requires_grad_()
    clean = x[valid].requires_grad_()
    found, wanted = rq(dirty, valid=valid), rq(clean)
    torch.testing.assert_close(found.commitment, wanted.commitment)
    torch.testing.assert_close(found.energy, wanted.energy)
    torch.testing.assert_close(found.commitment_by_stage, wanted.commitment_by_stage)
    torch.testing.assert_close(gradient_of(found.commitment, dirty)[valid], gradient_of(wanted.commitment, clean))


@pytest.mark.parametrize("rule", RULES)
def test_the_commitment_sends_no_gradient_to_padding(rule: Rule) -> None:
    rq, x, valid = started(rule), latents(60, seed=2).requires_grad_(), torch.arange(60) % 3 > 0
    gradient = gradient_of(rq(x, valid=valid).commitment, x)
    assert not gradient[~valid].any()
    assert gradient[valid].any(1).all()


def test_q_carries_no_gradient() -> None:
    found = started()(latents(5).requires_grad_())
    assert not found.q.requires_grad
    assert found.straight_through.requires_grad


def test_under_ema_there_is_no_codebook_term() -> None:
    rq = started()
    assert rq(latents(5)).codebook_term == 0
    assert not list(rq.parameters())


@pytest.mark.parametrize("soft", [1, 3])
def test_the_codebook_term_pulls_every_code_towards_its_inputs(soft: int) -> None:
    rq, x = started("none", update="gradient", soft=soft), latents(700, seed=2)
    found = rq(x)
    books = [book.detach().double().requires_grad_() for book in rq.code_vectors()]
    residual, total = x.double(), torch.zeros((), dtype=torch.float64)
    for m, book in enumerate(books):
        index = found.codes[:, m : m + 1] if found.soft_codes is None else found.soft_codes[:, m]
        total = total + (residual - book[index].mean(1)).square().sum(1).mean() / 3
        residual = (residual - book[index].mean(1)).detach()
    torch.testing.assert_close(found.codebook_term.double(), total.detach(), rtol=1e-5, atol=0)
    found.codebook_term.backward()
    for stage, book, expected in zip(rq.books, books, torch.autograd.grad(total, books), strict=True):
        assert stage.code.grad is not None, book
        torch.testing.assert_close(stage.code.grad.double(), expected, rtol=1e-4, atol=1e-6)


def test_one_small_step_down_the_codebook_term_lowers_the_distance() -> None:
    rq, x = started(update="gradient", start="uniform"), latents(300, seed=2)
    before = rq(x)
    before.codebook_term.backward()
    with torch.no_grad():
        for parameter in rq.parameters():
            parameter.add_(parameter.grad, alpha=-0.05)
    assert rq(x).commitment < before.commitment


def test_the_codebook_term_has_its_value_without_gradients_too() -> None:
    rq, x = started(update="gradient"), latents(30, seed=2)
    with torch.no_grad():
        silent = rq(x).codebook_term
    assert silent == rq(x).codebook_term == rq(x).commitment


def test_the_codebook_term_sends_nothing_to_the_latents() -> None:
    rq, x = started(update="gradient"), latents(5).requires_grad_()
    assert torch.autograd.grad(rq(x).codebook_term, x, allow_unused=True)[0] is None


def test_codes_that_learn_by_gradient_refuse_ema() -> None:
    rq = started(update="gradient")
    with pytest.raises(UsageError, match="update='ema'"):
        rq.ema_update(rq(latents(5)))
    assert [name for name, _ in rq.named_parameters()] == ["stages.0.code", "stages.1.code", "stages.2.code"]
