"""The forward pass of every residual rule against a float64 brute force written from the definitions."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bridle.errors import ConfigError, UsageError
from bridle.quantize import ResidualQuantizer
from bridle.quantize.nearest import best, full_precision
from bridle.quantize.rules import Rule

torch.set_num_threads(1)
RULES: list[Rule] = ["once", "perstage", "released", "none", "independent"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(rule: Rule = "once", *, soft: int = 1, rows: int = 400, seed: int = 0, **more: object) -> ResidualQuantizer:
    options = {"codebooks": 3, "codes": 8, "width": 12, **more}
    rq = ResidualQuantizer(residual=rule, soft=soft, **options)  # type: ignore[arg-type]
    rq.start_codebooks(latents(rows, rq.width, seed=seed), generator=seeded(seed))
    return rq


def latents(rows: int, width: int = 12, *, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, width, generator=seeded(seed + 100)) + 1


class Reference(NamedTuple):
    inputs: list[Tensor]  # v_m
    distances: list[Tensor]  # (S, K_m) squared
    vectors: list[Tensor]  # what each stage subtracts


def reference(x: Tensor, codebooks: list[Tensor], rule: Rule, codes: Tensor) -> Reference:
    """Follow the given hard codes through the stages in float64, by the definitions."""
    x, M = x.double(), len(codebooks)
    u = x / x.norm(dim=1, keepdim=True)
    e = u if rule in ("once", "perstage") else x
    inputs, distances, vectors = [], [], []
    for m, book in enumerate(codebooks):
        if rule == "independent":
            part = x.chunk(M, 1)[m]
            v = part / part.norm(dim=1, keepdim=True)
        elif rule in ("perstage", "released"):
            v = e / e.norm(dim=1, keepdim=True)
        else:
            v = e
        c = book.double()[codes[:, m]]
        inputs.append(v)
        distances.append((v[:, None] - book.double()[None]).square().sum(-1))
        vectors.append(c)
        if rule != "independent":
            e = v - c if rule == "perstage" else e - c
    return Reference(inputs, distances, vectors)


@pytest.mark.parametrize("rule", RULES)
def test_every_stage_takes_the_nearest_code(rule: Rule) -> None:
    rq, x = started(rule), latents(300, seed=7)
    codes = rq(x).codes
    for m, distance in enumerate(reference(x, rq.code_vectors(), rule, codes).distances):
        taken = distance.gather(1, codes[:, m : m + 1]).squeeze(1)
        assert torch.all(taken <= distance.amin(1) + 1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_commitment_and_energy_are_those_of_the_definitions(rule: Rule) -> None:
    rq, x = started(rule), latents(300, seed=7)
    found = rq(x)
    known = reference(x, rq.code_vectors(), rule, found.codes)
    errors = torch.stack([(v - c).square().sum(1).mean() for v, c in zip(known.inputs, known.vectors, strict=True)])
    torch.testing.assert_close(found.commitment.double(), errors.mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.commitment_by_stage.double(), errors, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.energy[1:], errors / known.inputs[0].square().sum(1).mean(), rtol=1e-5, atol=0)
    assert found.energy[0] == 1


@pytest.mark.parametrize("rule", RULES)
def test_q_is_the_decoded_codes_bit_for_bit(rule: Rule) -> None:
    rq = started(rule)
    found = rq(latents(300, seed=7))
    assert torch.equal(rq.decode(found.codes), found.q)
    assert torch.equal(found.straight_through, found.q)


@pytest.mark.parametrize("rule", ["once", "none", "released"])
def test_e1_is_q_plus_the_last_residual(rule: Rule) -> None:
    rq, x = started(rule), latents(50, seed=7)
    found = rq(x)
    e1 = x / x.norm(dim=1, keepdim=True) if rule == "once" else x
    residual = e1
    for m, book in enumerate(rq.code_vectors()):
        residual = residual - book[found.codes[:, m]]
    torch.testing.assert_close(found.q + residual, e1)
    torch.testing.assert_close(found.commitment_on_sum, residual.square().sum(1).mean())


@pytest.mark.parametrize("rule", RULES)
def test_assign_gives_the_codes_of_forward(rule: Rule) -> None:
    rq, x = started(rule), latents(1500, seed=7)  # more than one chunk
    assert torch.equal(rq.assign(x), rq(x).codes)
    assert torch.equal(rq.assign(x, stages=2), rq(x).codes[:, :2])


def test_batches_keep_their_shape() -> None:
    rq, x = started(), latents(12, seed=7)
    found, flat = rq(x.view(3, 4, 12)), rq(x)
    assert found.codes.shape == (3, 4, 3)
    assert found.q.shape == (3, 4, 12)
    assert torch.equal(found.codes.view(12, 3), flat.codes)
    assert torch.equal(found.q.view(12, 12), flat.q)


def test_an_empty_batch_has_no_codes_and_no_loss() -> None:
    found = started()(torch.empty(0, 5, 12))
    assert found.codes.shape == (0, 5, 3)
    assert found.commitment == 0
    assert all(n.sum() == 0 for n in found.statistics().n)


def test_a_strided_batch_is_read_right() -> None:
    rq, x = started(), latents(12, seed=7)
    assert torch.equal(rq(x.t().contiguous().t()).codes, rq(x).codes)
    assert torch.equal(rq.assign(x.view(3, 4, 12).transpose(0, 1)), rq.assign(x).view(3, 4, 3).transpose(0, 1))


def test_a_silent_token_stays_finite_under_every_rule() -> None:
    for rule in RULES:
        rq, x = started(rule), latents(20, seed=7)
        x[3] = 0
        x.requires_grad_()
        found = rq(x)
        (found.commitment + found.straight_through.sum()).backward()
        assert found.q.isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_perstage_leaves_a_vanishing_residual_as_it_is() -> None:
    rq = started("perstage", codebooks=2, codes=2, width=2)
    rq.books[0].restart(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    rq.books[1].restart(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    # e₂ = (0, 5e-4) is below a thousandth of e₁: not blown up to (0, 1), so the zero code is the nearest.
    near, apart = torch.tensor([[1.0, 5e-4]]), torch.tensor([[0.8, -0.6]])
    assert rq(near).codes.tolist() == [[0, 0]]
    rq.books[1].restart(torch.tensor([[0.0, 0.0], [-0.3, -0.95]]))
    assert rq(apart).codes.tolist() == [[0, 1]]  # e₂ = (−.2, −.6) is normalised and far from the zero code


def test_codebooks_may_differ_in_size() -> None:
    rq = ResidualQuantizer(codebooks=3, codes=(4, 9, 2), width=6)
    rq.start_codebooks(latents(200, 6), generator=seeded())
    found = rq(latents(100, 6, seed=1))
    assert rq.codes == (4, 9, 2)
    assert [len(n) for n in found.statistics().n] == [4, 9, 2]
    assert (found.codes.amax(0) < torch.tensor([4, 9, 2])).all()


def test_one_codebook_is_plain_vector_quantization() -> None:
    rq = ResidualQuantizer(codebooks=1, codes=3, width=2, residual="none")
    rq.start_codebooks(latents(20, 2), generator=seeded())
    rq.books[0].restart(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]]))
    found = rq(torch.tensor([[1.5, 0.1], [0.2, 0.9], [0.1, 1.9]]))
    assert found.codes.tolist() == [[1], [0], [2]]
    assert found.q.tolist() == [[2, 0], [0, 0], [0, 2]]


def test_the_first_stages_do_not_depend_on_how_many_follow() -> None:
    x = latents(300)
    short, long = (ResidualQuantizer(codebooks=M, codes=8, width=12) for M in (2, 5))
    for rq in (short, long):
        rq.start_codebooks(x, generator=seeded(3))
    assert torch.equal(short(x).codes, long(x).codes[:, :2])
    assert torch.equal(short(x).q, long.decode(long(x).codes, stages=2))
    assert torch.equal(short(x).q, long.decode(long(x).codes[:, :2]))


def test_independent_decodes_left_out_slices_to_zero() -> None:
    rq = started("independent")
    codes = rq.assign(latents(5, seed=7))
    assert torch.equal(rq.decode(codes, stages=2)[:, :8], rq.decode(codes)[:, :8])
    assert not rq.decode(codes, stages=2)[:, 8:].any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_decode_takes_codes_as_they_are_stored(dtype: torch.dtype) -> None:
    rq = started()
    codes = rq.assign(latents(5, seed=7))
    assert torch.equal(rq.decode(codes.to(dtype)), rq.decode(codes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_latents_get_the_codes_of_the_same_numbers_in_float32(rule: Rule, dtype: torch.dtype) -> None:
    rq, x = started(rule), latents(300, seed=7).to(dtype)
    assert torch.equal(rq(x).codes, rq(x.float()).codes)
    assert torch.equal(rq.assign(x), rq(x.float()).codes)
    assert rq(x).q.dtype == torch.float32


@pytest.mark.parametrize("soft", [1, 3])
def test_autocast_changes_nothing(soft: int) -> None:
    rq, x = started(soft=soft), latents(300, seed=7)
    plain = rq(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = rq(x)
        codes = rq.assign(x)
    assert torch.equal(inside.codes, plain.codes)
    assert torch.equal(codes, plain.codes)
    assert torch.equal(inside.q, plain.q)
    assert inside.commitment == plain.commitment


def test_a_lower_matmul_precision_changes_nothing_and_is_left_as_it_was() -> None:
    rq, x = started(), latents(300, seed=7)
    plain = rq(x).q
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(rq(x).q, plain)
        with full_precision(x.device):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("rule", RULES)
def test_soft_codes_are_the_nearest_in_order(rule: Rule) -> None:
    rq, x = started(rule, soft=3, codebooks=1), latents(200, seed=7)
    found = rq(x)
    assert found.soft_codes is not None
    distance = reference(x, rq.code_vectors(), rule, found.codes).distances[0]
    expected = distance.sort(1).values[:, :3]
    torch.testing.assert_close(distance.gather(1, found.soft_codes[:, 0]), expected, rtol=0, atol=1e-5)
    assert torch.equal(found.soft_codes[..., 0], found.codes)


def test_soft_codes_share_evenly_and_q_is_their_mean() -> None:
    rq, x = started(soft=4, codebooks=1), latents(30, seed=7)
    found = rq(x)
    assert found.soft_codes is not None
    assert found.soft_weights is not None
    assert found.soft_codes.shape == found.soft_weights.shape == (30, 1, 4)
    assert (found.soft_weights == 0.25).all()
    mean = rq.code_vectors()[0][found.soft_codes[:, 0]].mean(1)
    torch.testing.assert_close(found.q, mean)


def test_softmax_weights_follow_the_squared_distance() -> None:
    rq, x = started("none", soft=3, soft_weights="softmax", soft_temperature=0.5, codebooks=1), latents(30, seed=7)
    found = rq(x)
    assert found.soft_codes is not None
    assert found.soft_weights is not None
    near = rq.code_vectors()[0][found.soft_codes[:, 0]].double()
    distance = (x.double()[:, None] - near).square().sum(-1)
    torch.testing.assert_close(
        found.soft_weights[:, 0].double(), torch.softmax(-distance / 0.5, 1), rtol=1e-3, atol=1e-5
    )


def test_the_next_stage_sees_what_the_soft_mean_leaves() -> None:
    rq, x = started("none", soft=2, codebooks=2), latents(40, seed=7)
    found = rq(x)
    assert found.soft_codes is not None
    first, second = rq.code_vectors()
    residual = x - first[found.soft_codes[:, 0]].mean(1)
    assert torch.equal(found.codes[:, 1], torch.cdist(residual, second).argmin(1))


def test_hard_codes_have_no_soft_ones() -> None:
    found = started()(latents(3))
    assert found.soft_codes is None
    assert found.soft_weights is None


def test_the_best_score_is_found_despite_ties_and_nan() -> None:
    score = torch.tensor([[1.0, 3.0, 2.0], [1.0, 5.0, 5.0], [0.0, float("nan"), 1.0], [-4.0, -6.0, -5.0]])
    hits, numbers = torch.empty(12), torch.arange(3.0)
    found = best(score, hits, numbers)
    assert found.pick[0] == 1
    assert found.pick[1] in (1, 2)
    assert found.pick[3] == 0
    assert ((found.pick >= 0) & (found.pick < 3)).all()
    # One row without a hit (NaN) and one with two must not pass for two rows with one hit each.
    assert best(score[[2, 1]], hits, numbers).pick[1] in (1, 2)
    assert found.score[[0, 1, 3]].tolist() == [3, 5, -4]


def test_latents_of_another_width_are_refused() -> None:
    with pytest.raises(UsageError, match=r"expected floating-point latents \(B, T, 12\)"):
        started()(torch.zeros(3, 11))


def test_valid_of_another_shape_is_refused() -> None:
    with pytest.raises(UsageError, match="expected valid as bool"):
        started()(latents(3), valid=torch.ones(4, dtype=torch.bool))


def test_codes_that_are_no_integers_are_refused() -> None:
    with pytest.raises(UsageError, match="integer codes"):
        started().decode(torch.zeros(3, 3))


def test_more_stages_than_there_are_are_refused() -> None:
    with pytest.raises(UsageError, match="stages is 4"):
        started().assign(latents(3), stages=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codes": (4, 4)}, "for each of 3 codebooks"),
        ({"codes": 0}, "positive size"),
        ({"soft": 9}, "expected 1 to 8"),
        ({"decay": 1.0}, "between 0 and 1"),
        ({"residual": "independent", "width": 13}, "divisible by 3"),
        ({"residual": "twice"}, "choose from"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ResidualQuantizer(**{"codebooks": 3, "codes": 8, "width": 12, **options})  # type: ignore[arg-type]


def test_a_low_temperature_tells_the_nearest_code_from_the_others_and_a_high_one_does_not() -> None:
    sharp, flat = (
        started(soft=4, soft_weights="softmax", soft_temperature=t)(latents(200, seed=7)).soft_weights
        for t in (0.01, 100.0)
    )
    assert sharp is not None and flat is not None
    assert sharp[..., 0].mean() > 0.9
    assert flat.max() < 0.27
    with pytest.raises(ConfigError, match="soft_temperature is 0"):
        ResidualQuantizer(soft_temperature=0)


@pytest.mark.parametrize("rule", ["once", "perstage", "none", "independent"])
def test_soft_labels_leave_codes_q_and_statistics_as_hard_ones_have_them(rule: str) -> None:
    hard, labels = started(rule), started(rule, soft=3, soft_q=False)
    labels.load_state_dict(hard.state_dict())
    x = latents(200, seed=7)
    a, b = hard(x), labels(x)
    assert torch.equal(a.codes, b.codes) and torch.equal(labels.assign(x), a.codes)
    assert torch.equal(a.q, b.q)
    assert all(torch.equal(m, n) for m, n in zip(a.statistics().n, b.statistics().n, strict=True))
    assert all(torch.equal(m, n) for m, n in zip(a.statistics().l_sum, b.statistics().l_sum, strict=True))
    assert b.soft_codes is not None and torch.equal(b.soft_codes[..., 0], a.codes)


def test_under_the_released_rule_start_and_ema_are_ours_and_codes_are_means_of_directions() -> None:
    rq = started("released", codebooks=1, codes=2)
    lengths = rq.code_vectors()[0].norm(dim=1)
    assert (lengths < 0.99).all()  # the released code would bring them back to length 1
    rq.ema_update(rq(latents(400, seed=3)))
    assert (rq.code_vectors()[0].norm(dim=1) < 0.99).all()
