"""The EMA update: Eqs. EMA 1–5 by hand, its statistics, and the convergence result as an executable check."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bridle.errors import NonFiniteError, UsageError
from bridle.quantize import Codebook, ResidualQuantizer, Statistics
from bridle.quantize.rules import Rule

torch.set_num_threads(1)
RULES: list[Rule] = ["once", "perstage", "released", "none", "independent"]
DECAY, EPS = 0.9, 1e-3  # coarse, so that ε can be seen


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latents(rows: int = 200, *, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, 12, generator=seeded(seed)) + 1


def started(rule: Rule = "once", **options: object) -> ResidualQuantizer:
    rq = ResidualQuantizer(**{"codebooks": 3, "codes": 8, "width": 12, "residual": rule, **options})  # type: ignore[arg-type]
    rq.start_codebooks(latents(), generator=seeded(1))
    return rq


def snapshot(rq: ResidualQuantizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in rq.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def book(vectors: list[list[float]]) -> Codebook:
    codebook = Codebook(codes=len(vectors), width=len(vectors[0]))
    codebook.restart(torch.tensor(vectors))
    return codebook


def test_one_step_worked_by_hand() -> None:
    b = book([[1.0, 0.0], [0.0, 2.0]])
    n, l_sum = torch.tensor([3.0, 1.0]).double(), torch.tensor([[6.0, 3.0], [1.0, 1.0]]).double()
    b.ema_step(n, l_sum, decay=0.9, eps=0.1)
    # N = (.9 + .3, .9 + .1) = (1.2, 1), ΣN = 2.2, N̂ = (1.3, 1.1)·2.2/2.4, m = ((.9 + .6, .3), (.1, 1.8 + .1))
    torch.testing.assert_close(b.usage, torch.tensor([1.2, 1.0]).double())
    torch.testing.assert_close(b.code_sum, torch.tensor([[1.5, 0.3], [0.1, 1.9]]).double())
    scale = 2.4 / 2.2
    expected = torch.tensor([[1.5 / 1.3, 0.3 / 1.3], [0.1 / 1.1, 1.9 / 1.1]]) * scale
    torch.testing.assert_close(b.code, expected)


def test_a_start_is_consistent_so_the_first_step_moves_gently() -> None:
    rq, x = started(), latents()
    before = [code.clone() for code in rq.code_vectors()]
    assert all((b.usage == 1).all() and torch.equal(b.code_sum.float(), b.code) for b in rq.books)
    rq.ema_update(rq(x))
    for old, new in zip(before, rq.code_vectors(), strict=True):
        assert (new - old).norm(dim=1).max() < 0.1 * old.norm(dim=1).max()


def test_an_unused_code_keeps_its_vector_bit_for_bit_over_a_hundred_thousand_steps() -> None:
    b = book([[0.1, 0.7], [0.3, -0.2]])
    before = b.code.clone()
    n, l_sum = torch.tensor([5.0, 0.0]).double(), torch.tensor([[2.0, 1.0], [0.0, 0.0]]).double()
    for _ in range(100_000):
        b.ema_step(n, l_sum, decay=0.99, eps=1e-5)
    assert torch.equal(b.code[1], before[1])
    torch.testing.assert_close(b.code[0], torch.tensor([0.4, 0.2]), rtol=1e-4, atol=0)
    b.ema_step(torch.tensor([0.0, 4.0]).double(), torch.tensor([[0.0, 0.0], [4.0, 8.0]]).double(), decay=0.99, eps=1e-5)
    torch.testing.assert_close(b.code[1], torch.tensor([1.0, 2.0]), rtol=1e-3, atol=0)  # found again, it is its mean


@pytest.mark.parametrize("rule", RULES)
def test_statistics_count_and_sum_the_inputs_of_each_stage(rule: Rule) -> None:
    rq, x = started(rule), latents(700, seed=4)  # more than one chunk
    found = rq(x)
    statistics = found.statistics()
    for m, (n, l_sum) in enumerate(zip(statistics.n, statistics.l_sum, strict=True)):
        assert n.dtype == l_sum.dtype == torch.float64
        assert torch.equal(n, torch.bincount(found.codes[:, m], minlength=8).double())
        assert l_sum.shape == rq.code_vectors()[m].shape
    v = x.double() / x.double().norm(dim=1, keepdim=True) if rule in ("once", "perstage", "released") else x.double()
    v = torch.nn.functional.normalize(v[:, :4], dim=1) if rule == "independent" else v
    expected = torch.zeros(8, v.shape[1], dtype=torch.float64).index_add_(0, found.codes[:, 0], v)
    torch.testing.assert_close(statistics.l_sum[0], expected, rtol=1e-5, atol=1e-4)


def test_the_second_stage_sums_what_the_first_left() -> None:
    rq, x = started("none"), latents(100, seed=4)
    found = rq(x)
    left = (x - rq.code_vectors()[0][found.codes[:, 0]]).double()
    expected = torch.zeros(8, 12, dtype=torch.float64).index_add_(0, found.codes[:, 1], left)
    torch.testing.assert_close(found.statistics().l_sum[1], expected, rtol=0, atol=0)


def test_micro_batches_summed_give_the_update_of_the_whole_batch() -> None:
    x = latents(64, seed=5)
    whole, parts = started(), started()
    whole.ema_update(whole(x))
    parts.ema_update(sum(parts(part).statistics() for part in x.split([10, 30, 24])))  # type: ignore[arg-type]
    for a, b in zip(whole.code_vectors(), parts.code_vectors(), strict=True):
        assert torch.equal(a, b)


def test_statistics_belong_to_the_codes_of_their_forward() -> None:
    rq, x = started(), latents(64, seed=5)
    found, again = rq(x), rq(x)
    expected = found.statistics()
    rq.ema_update(found)
    late = again.statistics()
    assert all(torch.equal(a, b) for a, b in zip(expected.l_sum, late.l_sum, strict=True))


def test_padding_is_not_counted_even_if_it_is_not_finite() -> None:
    rq, x = started(), latents(60, seed=5)
    valid = torch.arange(60) % 4 > 0
    dirty = torch.where(valid[:, None], x, float("nan"))
    expected, found = rq(x[valid]).statistics(), rq(dirty.view(3, 20, 12), valid=valid.view(3, 20)).statistics()
    for m in range(3):
        assert torch.equal(found.n[m], expected.n[m])
        torch.testing.assert_close(found.l_sum[m], expected.l_sum[m], rtol=0, atol=1e-12)


def test_soft_codes_count_their_weights() -> None:
    rq, x = started("none", soft=2, codebooks=1), latents(50, seed=5)
    found = rq(x)
    assert found.soft_codes is not None
    statistics = found.statistics()
    share = torch.zeros(50, 8, dtype=torch.float64).scatter_(1, found.soft_codes[:, 0], 0.5)
    torch.testing.assert_close(statistics.n[0], share.sum(0))
    torch.testing.assert_close(statistics.l_sum[0], share.t() @ x.double())


def test_statistics_that_are_not_finite_are_refused_and_nothing_changes() -> None:
    rq, x = started(), latents(20, seed=5)
    before = snapshot(rq)
    x[3, 2] = float("inf")
    with pytest.raises(NonFiniteError, match="left as they were"):
        rq.ema_update(rq(x))
    assert same(snapshot(rq), before)


def test_statistics_of_another_quantizer_are_refused() -> None:
    rq, other = started(), started(codes=4)
    with pytest.raises(UsageError, match="other stages, codes or width"):
        rq.ema_update(other(latents(9)))
    with pytest.raises(UsageError, match="cannot be added"):
        rq(latents(9)).statistics() + other(latents(9)).statistics()


def test_ema_before_the_start_is_refused() -> None:
    empty = Statistics((torch.zeros(8).double(),), (torch.zeros(8, 12).double(),))
    with pytest.raises(UsageError, match="have not been started"):
        ResidualQuantizer(codebooks=1, codes=8, width=12).ema_update(empty)


# --- convergence (Appendix D) --------------------------------------------------------------------------------------


def limit(n: Tensor, l_sum: Tensor, eps: float) -> Tensor:
    """c∞ = ℓ/(n+ε) · (Σn+Kε)/Σn"""
    return l_sum / (n + eps)[:, None] * (n.sum() + len(n) * eps) / n.sum()


def code_in_float64(b: Codebook, eps: float) -> Tensor:
    """EMA 5 before it is rounded to float32."""
    total = b.usage.sum()
    return b.code_sum / ((b.usage + eps) * total / (total + len(b.usage) * eps))[:, None]


def fixed_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Latents z (S, D), their codes, and c₀: six points for three codes."""
    z = torch.randn(6, 4, generator=seeded(8), dtype=torch.float64)
    return z, torch.tensor([0, 0, 0, 1, 1, 2]), torch.randn(3, 4, generator=seeded(9))


def counts(z: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    n = torch.bincount(codes, minlength=3).double()
    return n, torch.zeros(3, 4, dtype=torch.float64).index_add_(0, codes, z)


def test_with_fixed_assignments_n_and_m_approach_their_limits_at_exactly_gamma_to_the_t() -> None:
    z, codes, c0 = fixed_batch()
    b = book(c0.tolist())
    (n, l_sum), start = counts(z, codes), b.code_sum.clone()
    for t in range(1, 60):
        b.ema_step(n, l_sum, decay=DECAY, eps=EPS)
        torch.testing.assert_close(b.usage - n, DECAY**t * (1 - n), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(b.code_sum - l_sum, DECAY**t * (start - l_sum), rtol=1e-9, atol=1e-12)


def test_with_fixed_assignments_the_codes_reach_the_stated_limit_at_rate_gamma() -> None:
    z, codes, c0 = fixed_batch()
    b = book(c0.tolist())
    n, l_sum = counts(z, codes)
    errors = []
    for _ in range(300):
        b.ema_step(n, l_sum, decay=DECAY, eps=EPS)
        errors.append((code_in_float64(b, EPS) - limit(n, l_sum, EPS)).norm())
    torch.testing.assert_close(b.code.double(), limit(n, l_sum, EPS), rtol=1e-6, atol=1e-6)
    assert float(errors[120] / errors[119]) == pytest.approx(DECAY, rel=1e-3)
    assert float((limit(n, l_sum, EPS) - l_sum / n[:, None]).norm()) > 1e-4  # ε does shift the limit off the mean


def test_with_converging_assignments_the_codes_reach_the_limit_of_the_last_ones() -> None:
    z, codes, c0 = fixed_batch()
    b = book(c0.tolist())
    drift, early = torch.ones_like(z), torch.tensor([2, 2, 0, 1, 0, 2])
    last_n, last_l = counts(z, codes)
    bound, start, eta = [], (b.code_sum - last_l).norm(dim=1), []
    for t in range(400):
        n, l_sum = counts(z + 0.8**t * drift, early if t < 25 else codes)
        b.ema_step(n, l_sum, decay=DECAY, eps=EPS)
        eta.append((1 - DECAY) * (l_sum - last_l).norm(dim=1))
        unrolled = sum(DECAY ** (t - s) * eta[s] for s in range(t + 1))  # Eq. m:unrolled
        bound.append(DECAY ** (t + 1) * start + unrolled)
        assert ((b.code_sum - last_l).norm(dim=1) <= bound[-1] + 1e-9).all()
    torch.testing.assert_close(b.code.double(), limit(last_n, last_l, EPS), rtol=1e-6, atol=1e-6)


def test_the_bounds_of_the_two_lemmas_hold_along_the_way() -> None:
    c0, S = torch.randn(3, 4, generator=seeded(9)), 6
    b = book(c0.tolist())
    draws = seeded(11)
    z = torch.randn(50, S, 4, generator=draws, dtype=torch.float64)
    codes = torch.randint(3, (50, S), generator=draws)
    most_m = c0.norm(dim=1).max() + z.norm(dim=2).amax(0).sum()  # B_m = ‖c₀‖ + Σ_j sup_t ‖z_j‖
    most_n = S + EPS / (1 - DECAY)  # B_N
    for t in range(50):
        b.ema_step(*counts(z[t], codes[t]), decay=DECAY, eps=EPS)
        assert b.code_sum.norm(dim=1).max() <= most_m
        assert b.usage.max() <= most_n


def test_the_rewritten_recursion_of_the_appendix_is_another_process() -> None:
    # It feeds ε back into N at every step, so N tends to n + ε/(1−γ) instead of n, and c to another limit.
    z, codes, _ = fixed_batch()
    n, l_sum = counts(z, codes)
    usage, code_sum, code = torch.zeros(3).double(), torch.zeros(3, 4).double(), torch.zeros(3, 4).double()
    for _ in range(400):
        inner = DECAY * usage + (1 - DECAY) * n
        code_sum = DECAY * code_sum + (1 - DECAY) * l_sum
        code = code_sum / (inner + EPS)[:, None] * (inner.sum() + 3 * EPS) / inner.sum()
        usage = inner + EPS
    torch.testing.assert_close(usage, n + EPS / (1 - DECAY))
    theirs = n + DECAY * EPS / (1 - DECAY)
    torch.testing.assert_close(code, l_sum / (theirs + EPS)[:, None] * (theirs + EPS).sum() / theirs.sum())
    assert float((code - limit(n, l_sum, EPS)).abs().max()) > 1e-4
