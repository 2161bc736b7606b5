"""What holds for every quantizer: any sizes, rules and data."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridle.quantize import ResidualQuantizer
from bridle.quantize.kmeans import lloyd
from bridle.quantize.usage import effective_usage, perplexity, usage_entropy, usage_rate

torch.set_num_threads(1)
# Duplicates are drawn on purpose; that they are warned about is tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore::bridle.quantize.CodebookWarning")


class Case(NamedTuple):
    rq: ResidualQuantizer
    x: Tensor


@st.composite
def cases(draw: st.DrawFn, rules: tuple[str, ...] = ("once", "perstage", "released", "none", "independent")) -> Case:
    """A started quantizer and other latents: sizes, scale, rule, softness and duplicates all drawn."""
    M, codes = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    width, rows = M * draw(st.integers(1, 6)), draw(st.integers(1, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rq = ResidualQuantizer(
        codebooks=M,
        codes=codes,
        width=width,
        residual=draw(st.sampled_from(rules)),
        soft=draw(st.integers(1, min(3, codes))),
        start=draw(st.sampled_from(["kmeans", "uniform", "uniform-raw"])),
        kmeans_iterations=draw(st.integers(0, 4)),
    )
    scale = 10.0 ** draw(st.integers(-3, 3))
    data = scale * torch.randn(rows, width, generator=generator)
    data = data[torch.randint(rows, (rows,), generator=generator)]  # with duplicates
    rq.start_codebooks(data, generator=generator)
    return Case(rq, scale * torch.randn(draw(st.integers(1, 40)), width, generator=generator))


common = settings(max_examples=60, deadline=None, derandomize=True)


@common
@given(cases())
def test_codes_are_in_range_and_everything_is_finite(case: Case) -> None:
    found = case.rq(case.x)
    assert found.codes.amin() >= 0
    assert all(found.codes[:, m].max() < K for m, K in enumerate(case.rq.codes))
    assert found.q.isfinite().all()
    assert found.commitment.isfinite()
    assert found.energy.isfinite().all()


@common
@given(cases())
def test_assign_and_forward_agree(case: Case) -> None:
    assert torch.equal(case.rq.assign(case.x), case.rq(case.x).codes)


@common
@given(cases(rules=("none",)))
def test_the_code_of_every_stage_is_the_nearest_to_what_is_left(case: Case) -> None:
    found, residual = case.rq(case.x), case.x.double()
    for m, book in enumerate(case.rq.code_vectors()):
        distance = torch.cdist(residual, book.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
        taken = distance.gather(1, found.codes[:, m : m + 1]).squeeze(1)
        size = residual.square().sum(1) + book.double().square().sum(1).max()
        assert (taken - distance.amin(1) <= 1e-5 * size + 1e-12).all()
        index = found.codes[:, m : m + 1] if found.soft_codes is None else found.soft_codes[:, m]
        residual = residual - book.double()[index].mean(1)


@common
@given(cases(), st.integers(0, 2**32))
def test_the_order_of_tokens_does_not_matter(case: Case, seed: int) -> None:
    order = torch.randperm(len(case.x), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(case.rq.assign(case.x[order]), case.rq.assign(case.x)[order])


@common
@given(cases(), st.integers(0, 40))
def test_statistics_of_two_parts_add_up_to_the_whole(case: Case, cut: int) -> None:
    whole = case.rq(case.x).statistics()
    parts = case.rq(case.x[:cut]).statistics() + case.rq(case.x[cut:]).statistics()
    for m in range(case.rq.codebooks):
        torch.testing.assert_close(parts.n[m], whole.n[m], rtol=0, atol=1e-9)
        torch.testing.assert_close(parts.l_sum[m], whole.l_sum[m], rtol=1e-12, atol=1e-9)
        torch.testing.assert_close(whole.n[m].sum(), torch.tensor(float(len(case.x))).double(), rtol=1e-6, atol=0)


@common
@given(cases(rules=("once", "none")))
def test_energy_of_the_data_a_codebook_was_made_from_never_rises(case: Case) -> None:
    rq = case.rq
    if rq.soft > 1:
        rq = ResidualQuantizer(codebooks=rq.codebooks, codes=rq.codes, width=rq.width, residual=rq.residual)
    rq.start, rq.kmeans_iterations = "kmeans", 10
    rq.start_codebooks(case.x, generator=torch.Generator().manual_seed(0))
    energy = rq(case.x).energy
    assert (energy[1:] <= energy[:-1] * (1 + 1e-5) + 1e-9).all()


@common
@given(cases())
def test_an_update_leaves_finite_codes_and_moves_only_used_ones(case: Case) -> None:
    found, before = case.rq(case.x), [code.clone() for code in case.rq.code_vectors()]
    case.rq.ema_update(found)
    for old, new, n in zip(before, case.rq.code_vectors(), found.statistics().n, strict=True):
        assert new.isfinite().all()
        assert torch.equal(new[n == 0], old[n == 0])


@common
@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**32))
def test_lloyd_never_raises_inertia(rows: int, codes: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points, centres = torch.randn(rows, width, generator=generator), torch.randn(codes, width, generator=generator)
    last = float("inf")
    for _ in range(4):
        inertia = float(torch.cdist(points.double(), centres.double()).amin(1).square().sum())
        assert inertia <= last * (1 + 1e-6) + 1e-9
        last, (centres, _) = inertia, lloyd(points, centres, iterations=1)


@common
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=40))
def test_usage_numbers_stay_in_their_ranges(counts: list[int]) -> None:
    table = torch.tensor(counts)
    assert 0 <= usage_rate(table) <= 1
    assert -1e-12 <= usage_entropy(table) <= torch.tensor(float(len(counts))).log() + 1e-6
    assert -1e-12 <= effective_usage(table) <= 1 + 1e-9
    assert 1 - 1e-9 <= perplexity(table) <= len(counts) + 1e-6
