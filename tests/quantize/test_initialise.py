"""Starting codebooks and redrawing rare codes, in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from bridle.errors import DataError, NonFiniteError, UsageError
from bridle.quantize import CodebookWarning, ResidualQuantizer, initialise
from bridle.quantize.rules import Rule

torch.set_num_threads(1)
RULES: list[Rule] = ["once", "perstage", "released", "none", "independent"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latents(rows: int = 400, *, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, 12, generator=seeded(seed)) + 1


def quantizer(**options: object) -> ResidualQuantizer:
    return ResidualQuantizer(**{"codebooks": 3, "codes": 8, "width": 12, **options})  # type: ignore[arg-type]


def snapshot(rq: ResidualQuantizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in rq.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("rule", ["once", "none"])
def test_residual_energy_never_rises_from_stage_to_stage(rule: Rule) -> None:
    rq, x = quantizer(residual=rule, codebooks=6), latents()
    rq.start_codebooks(x, generator=seeded())
    energy = rq(x).energy
    assert (energy[1:] < energy[:-1]).all()


@pytest.mark.parametrize("rule", RULES)
def test_every_code_is_used_after_a_start(rule: Rule) -> None:
    rq, x = quantizer(residual=rule), latents()
    report = rq.start_codebooks(x, generator=seeded())
    assert report.rows == 400
    assert report.distinct == (8, 8, 8)
    assert all((n > 0).all() for n in rq(x).statistics().n)


def test_a_start_can_be_repeated_and_depends_on_the_generator_alone() -> None:
    first, second, other = quantizer(), quantizer(), quantizer()
    x = latents()
    first.start_codebooks(x, generator=seeded(5))
    second.start_codebooks(latents(seed=3), generator=seeded(9))  # what was there before must not matter
    second.start_codebooks(x.view(20, 20, 12), generator=seeded(5))
    other.start_codebooks(x, generator=seeded(6))
    assert same(snapshot(first), snapshot(second))
    assert not same(snapshot(first), snapshot(other))


def test_a_start_takes_one_draw_from_the_generator_whatever_it_does() -> None:
    states = []
    for options in ({}, {"start": "uniform"}, {"codebooks": 1, "codes": 4}):
        generator = seeded(5)
        quantizer(**options).start_codebooks(latents(), generator=generator)
        states.append(generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_padding_takes_no_part_in_a_start() -> None:
    x, valid = latents(), torch.arange(400) % 3 > 0
    dirty = torch.where(valid[:, None], x, float("nan"))
    clean, padded = quantizer(), quantizer()
    clean.start_codebooks(x[valid], generator=seeded())
    report = padded.start_codebooks(dirty.view(4, 100, 12), valid=valid.view(4, 100), generator=seeded())
    assert report.rows == int(valid.sum())
    assert same(snapshot(clean), snapshot(padded))


def test_a_uniform_start_is_as_wide_as_the_data() -> None:
    rq = quantizer(start="uniform", residual="none", codebooks=1, codes=4000, reset_below=0)
    spread = torch.linspace(0.1, 3, 12)
    rq.start_codebooks(latents(5000) * spread, generator=seeded())
    code = rq.code_vectors()[0]
    torch.testing.assert_close(code.std(0) / spread, torch.full((12,), 2.0), rtol=0.1, atol=0)
    torch.testing.assert_close(code.mean(0) / spread, torch.ones(12), rtol=0.2, atol=0)
    assert ((code / spread - 1).abs() <= 2.2 * 3**0.5).all()


def test_a_raw_uniform_start_fills_the_unit_cube() -> None:
    rq = quantizer(start="uniform-raw", codebooks=1, codes=2000, reset_below=0)
    rq.start_codebooks(latents(), generator=seeded())
    code = rq.code_vectors()[0]
    assert (code.abs() <= 1).all()
    torch.testing.assert_close(code.std(), torch.tensor(3**-0.5), rtol=0.02, atol=0)


def test_codes_nobody_chooses_are_redrawn_from_the_inputs_of_their_stage() -> None:
    rq, x = quantizer(start="uniform-raw", residual="none", codebooks=1, codes=64), 0.01 * latents() + 5
    report = rq.start_codebooks(x, generator=seeded())  # all data lie in one corner of the cube
    assert report.redrawn[0] >= 60
    from_data = (rq.code_vectors()[0][:, None] == x[None]).all(-1).any(1)
    assert int(from_data.sum()) == report.redrawn[0]


def test_a_threshold_of_zero_redraws_nothing() -> None:
    rq = quantizer(start="uniform-raw", residual="none", codebooks=1, codes=64, reset_below=0)
    assert rq.start_codebooks(0.01 * latents() + 5, generator=seeded()).redrawn == (0,)


def test_reset_moves_rare_codes_only_and_restarts_their_statistics() -> None:
    rq, x = quantizer(residual="none", codebooks=1, codes=4), latents()
    rq.start_codebooks(x, generator=seeded())
    rq.ema_update(rq(x))
    far = rq.code_vectors()[0].clone()
    far[2] = 1000
    book = rq.books[0]
    usage, sums = book.usage.clone(), book.code_sum.clone()
    book.code.copy_(far)
    assert rq.reset_rare(x, generator=seeded(1)) == 1
    others = torch.tensor([0, 1, 3])
    assert torch.equal(book.code[others], far[others])
    assert torch.equal(book.usage[others], usage[others])
    assert torch.equal(book.code_sum[others], sums[others])
    assert (x == book.code[2]).all(1).any()
    assert book.usage[2] == 1
    assert torch.equal(book.code_sum[2].float(), book.code[2])


def test_reset_below_a_count_redraws_every_code_with_fewer_tokens() -> None:
    rq, x = quantizer(residual="none", codebooks=1), latents()
    rq.start_codebooks(x, generator=seeded())
    n = rq(x).statistics().n[0]
    middle = float(n.sort().values[3])
    assert rq.reset_rare(x, generator=seeded(1), below=middle) == int((n < middle).sum())


def test_a_reset_that_finds_no_rare_code_changes_nothing() -> None:
    rq, x = quantizer(), latents()
    rq.start_codebooks(x, generator=seeded())
    before = snapshot(rq)
    assert rq.reset_rare(x, generator=seeded(1)) == 0
    assert same(snapshot(rq), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_are_refused_and_nothing_changes(value: float) -> None:
    rq, x = quantizer(), latents()
    rq.start_codebooks(x, generator=seeded())
    before = snapshot(rq)
    x[7, 3] = value
    for call in (rq.start_codebooks, rq.reset_rare):
        with pytest.raises(NonFiniteError, match="1 of 400 latent vectors are not finite"):
            call(x, generator=seeded(1))
        assert same(snapshot(rq), before)


def test_a_refused_start_leaves_the_quantizer_unstarted() -> None:
    rq = quantizer()
    with pytest.raises(NonFiniteError):
        rq.start_codebooks(torch.full((20, 12), float("nan")), generator=seeded())
    assert not rq.is_started


def test_a_start_from_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="no valid tokens"):
        quantizer().start_codebooks(latents(3), valid=torch.zeros(3, dtype=torch.bool), generator=seeded())


def test_a_start_stopped_between_stages_writes_nothing() -> None:
    rq, polls = quantizer(), []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 2:
            raise KeyboardInterrupt

    before = snapshot(rq)
    with pytest.raises(KeyboardInterrupt):
        rq.start_codebooks(latents(), generator=seeded(), poll=poll)
    assert same(snapshot(rq), before)
    assert not rq.is_started


@pytest.mark.parametrize("rule", RULES)
def test_constant_latents_start_with_a_warning_and_finite_codes(rule: Rule) -> None:
    rq, x = quantizer(residual=rule), torch.full((30, 12), 0.7)
    with pytest.warns(CodebookWarning, match="only 1 distinct"):
        report = rq.start_codebooks(x, generator=seeded())
    assert report.distinct == (1, 1, 1)
    found = rq(x)
    assert found.q.isfinite().all()
    rq.ema_update(found)
    assert all(code.isfinite().all() for code in rq.code_vectors())


def test_fewer_points_than_codes_become_codes_themselves() -> None:
    rq, x = quantizer(codes=16, residual="none", codebooks=1), latents(5)
    with pytest.warns(CodebookWarning, match="stage 1: only 5 distinct points for 16 codes"):
        report = rq.start_codebooks(x, generator=seeded())
    torch.testing.assert_close(rq(x).q, x)
    assert report.redrawn == (0,)
    assert len(torch.unique(rq.code_vectors()[0], dim=0)) == 16  # jittered copies are not redrawn into true copies


def test_more_rows_than_needed_are_subsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialise, "MOST_ROWS", 100)
    rq = quantizer()
    assert rq.start_codebooks(latents(), generator=seeded()).rows == 100


def test_a_reset_before_the_start_is_refused() -> None:
    with pytest.raises(UsageError, match="have not been started"):
        quantizer().reset_rare(latents(), generator=seeded())


def test_ordinary_data_start_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rq = quantizer()
        rq.start_codebooks(latents(), generator=seeded())
    assert rq.is_started


def test_marked_codes_are_redrawn_from_their_stage_and_the_others_stay_bit_identical() -> None:
    rq, x = quantizer(), latents()
    rq.start_codebooks(x, generator=seeded())
    before = [{name: tensor.clone() for name, tensor in book.state_dict().items()} for book in rq.books]
    which = [torch.zeros(K, dtype=torch.bool) for K in rq.codes]
    which[0][2] = which[1][0] = True
    assert rq.reset_codes(x, which, generator=seeded(3)) == 2
    unit = x.reshape(-1, x.shape[-1])
    unit = unit / unit.norm(dim=1, keepdim=True)
    assert (unit - rq.books[0].code[2]).abs().amax(1).min() < 1e-6  # one of the stage's inputs
    for book, old, marked in zip(rq.books, before, which, strict=True):
        for name, tensor in book.state_dict().items():
            assert torch.equal(tensor[~marked], old[name][~marked])
        assert torch.all(book.usage[marked] == 1)
        torch.testing.assert_close(book.code_sum[marked].float(), book.code[marked])
