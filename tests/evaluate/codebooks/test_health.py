from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from bridle.config import Config, load_config
from bridle.errors import DataError
from bridle.evaluate.codebooks.diagnosis import verdicts
from bridle.evaluate.codebooks.health import (
    CodeBatch,
    code_agreement,
    codebook_health,
    health_of_codes,
)
from bridle.geometry import Geometry
from bridle.models.encoder import Encoder
from bridle.models.tokenizer import ColdStartTokenizer, Tokenizer, VitTokenizer
from bridle.nn.transformer import initialise
from bridle.quantize import ResidualQuantizer
from bridle.runs.results import StageHealth, Verdict


class FakeBatch(NamedTuple):
    x: Tensor
    valid: Tensor | None = None
    label: Tensor | None = None


def codes_of(*, samples: int, tokens: int, codes: int, seed: int = 0) -> Tensor:
    """(B, T, 1) codes drawn evenly."""
    return torch.randint(codes, (samples, tokens, 1), generator=torch.Generator().manual_seed(seed))


def counted(
    codes: Tensor, *, energy: float = 0.0, valid: Tensor | None = None, label: Tensor | None = None
) -> CodeBatch:
    return CodeBatch(codes, torch.full((codes.shape[2],), energy), valid, label)


def health(
    batches: Sequence[CodeBatch], sizes: list[int], books: list[Tensor] | None = None, classes: int | None = None
) -> list[StageHealth]:
    positions = batches[0].codes.shape[1] if batches else 1
    return health_of_codes(
        batches, sizes, books or [torch.ones(K, 2) for K in sizes], positions=positions, classes=classes
    )


def settings(*overrides: str) -> Config:
    """With everything done that advice may propose."""
    done = ("quantizer.start=kmeans", "loss.centre_teacher=position", "quantizer.residual=once")
    return load_config("digits-tiny", [*done, "quantizer.reset_below=1", "quantizer.reset_every=20", *overrides])


def levels(codes: Tensor, size: int) -> list[tuple[str, str]]:
    found = verdicts(health([counted(codes)], [size]), settings("loss.centre_teacher=none"), is_trained=True)
    return [(verdict.level, verdict.text) for verdict in found]


def test_the_numbers_of_a_hand_worked_pass() -> None:
    first, second = torch.tensor([[[0], [1]], [[0], [1]]]), torch.tensor([[[0], [0]]])  # code 0 four times, 1 twice
    books = [torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [2.0, 0.0]])]
    stage = health([counted(first), counted(second)], [4], books)[0]
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert (stage.stage, stage.codes, stage.tokens) == (1, 4, 6)
    assert stage.usage_rate == 0.5
    assert stage.entropy == pytest.approx(entropy)
    assert stage.effective_usage == pytest.approx(0.5 * entropy / math.log(4))
    assert stage.perplexity == pytest.approx(math.exp(entropy))
    assert stage.top_share == pytest.approx(2 / 3)
    assert stage.norms == (5.0, 1.0, 0.0, 2.0)


def test_padding_is_not_counted() -> None:
    codes = torch.tensor([[[0], [1], [2]]])
    stage = health([counted(codes, valid=torch.tensor([[True, True, False]]))], [4])[0]
    assert (stage.tokens, stage.usage_rate) == (2, 0.5)


def test_energy_is_averaged_over_tokens() -> None:
    small, large = torch.zeros(1, 2, 1, dtype=torch.long), torch.zeros(3, 2, 1, dtype=torch.long)
    batches = [counted(small, energy=0.8), counted(large, energy=0.4)]
    assert health(batches, [2])[0].energy == pytest.approx(0.5)


def test_no_tokens_at_all_are_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        health([], [4])


def test_a_stage_survives_json() -> None:
    stage = health([counted(codes_of(samples=4, tokens=4, codes=4))], [4])[0]
    assert StageHealth.model_validate_json(json.dumps(stage.model_dump(mode="json"))) == stage


def test_even_use_of_all_codes_is_healthy() -> None:
    assert [level for level, _ in levels(codes_of(samples=400, tokens=8, codes=16), 16)] == ["ok"]


def test_a_collapsed_codebook_is_bad_and_the_verdict_says_what_to_try() -> None:
    found = levels(codes_of(samples=400, tokens=8, codes=6), 64)
    assert [level for level, _ in found] == ["bad"]
    assert "collapsed: 9 % of 64 codes in use" in found[0][1] and "centre_teacher" in found[0][1]


def test_nothing_is_proposed_that_is_done_already() -> None:
    collapsed = health([counted(codes_of(samples=400, tokens=8, codes=6))], [64])
    lonely = health([counted(codes_of(samples=400, tokens=8, codes=50))], [64])
    (text,) = [verdict.text for verdict in verdicts(collapsed, settings(), is_trained=True)]
    assert text.endswith(
        "Try this: train the tokenizer longer (tokenizer_phase.steps), or use fewer codes (quantizer.codes)."
    )
    (text,) = [verdict.text for verdict in verdicts(lonely, settings(), is_trained=True)]
    assert text.endswith("Try this: use fewer codes (quantizer.codes).")
    uniform = settings("quantizer.start=uniform")
    (text,) = [verdict.text for verdict in verdicts(collapsed, uniform, is_trained=False)]
    assert "quantizer.start=kmeans" in text and "tokenizer_phase" not in text  # a cold start is never trained
    never = settings("quantizer.reset_below=0", "quantizer.reset_every=0")
    (text,) = [verdict.text for verdict in verdicts(lonely, never, is_trained=True)]
    assert "quantizer.reset_below=1" in text and "quantizer.reset_every=20" in text


def test_a_codebook_is_collapsed_if_a_few_codes_take_nearly_everything() -> None:
    codes = torch.zeros(400, 8, 1, dtype=torch.long)
    codes.view(-1)[:16] = torch.arange(16)  # every code occurs, so CUR is 1
    found = levels(codes, 16)
    assert found[0][0] == "bad" and "100 % of 16 codes in use" in found[0][1]
    assert "one code takes 100 % of all tokens" in found[1][1]


def test_a_dominant_code_is_watched() -> None:
    codes = codes_of(samples=400, tokens=8, codes=63)
    codes[:, :3] = 63  # three of eight positions, and nowhere else
    found = levels(codes, 64)
    assert [level for level, _ in found] == ["warn"]
    assert "one code takes 38 % of all tokens" in found[0][1]


def test_dead_codes_are_watched() -> None:
    found = levels(codes_of(samples=400, tokens=8, codes=12), 16)
    assert [level for level, _ in found] == ["warn"]
    assert "4 of 16 codes are never used" in found[0][1]


def test_a_tokenizer_that_only_tells_positions_is_watched() -> None:
    codes = torch.arange(16).expand(400, 16)[..., None]
    found = levels(codes, 16)
    assert [level for level, _ in found] == ["warn"]
    assert "position alone tells 2.7" in found[0][1]  # ln 16 = 2.77 nats


def test_too_few_tokens_give_no_judgement() -> None:
    found = levels(codes_of(samples=1, tokens=8, codes=64), 64)
    assert [level for level, _ in found] == ["warn"]
    assert "8 tokens are too few for 64 codes" in found[0][1]


def test_a_tokenizer_is_judged_stage_by_stage_and_left_as_it_was() -> None:
    g = torch.Generator().manual_seed(0)
    geometry = Geometry(channels=1, input=(8, 8), patch=(2, 2))
    tokenizer = ColdStartTokenizer(geometry=geometry, quantizer=ResidualQuantizer(codebooks=2, codes=8, width=4))
    tokenizer.draw_projection(g)
    x = torch.randn(32, 1, 8, 8, generator=g)
    tokenizer.quantizer.start_codebooks(tokenizer.encode(x), generator=g)
    tokenizer.train()
    before = {name: value.clone() for name, value in tokenizer.state_dict().items()}

    stages = codebook_health(tokenizer, [FakeBatch(x[:20]), FakeBatch(x[20:])])

    expected = tokenizer.tokenize(x)
    for m, stage in enumerate(stages):
        assert stage.usage_rate == len(expected[..., m].unique()) / 8
        assert stage.tokens == 32 * 16
        torch.testing.assert_close(torch.tensor(stage.norms), tokenizer.quantizer.code_vectors()[m].norm(dim=1))
    energy = tokenizer.quantizer(tokenizer.encode(x)).energy
    assert [stage.energy for stage in stages] == pytest.approx(energy[1:].tolist(), rel=1e-5)
    assert tokenizer.training
    assert all(torch.equal(before[name], value) for name, value in tokenizer.state_dict().items())


def spread_by_numpy(vectors: Tensor, weights: Tensor) -> tuple[float, float]:
    """Participation ratio and first share of the eigenvalues of the weighted covariance."""
    values = np.linalg.eigvalsh(np.cov(vectors.double().numpy().T, aweights=weights.numpy(), ddof=0))
    return float(values.sum() ** 2 / np.square(values).sum()), float(values[-1] / values.sum())


def test_latents_and_codes_are_told_how_many_directions_they_fill() -> None:
    x = torch.randn(32, 1, 8, 8, generator=seeded())
    tokenizer = cold_start(x)  # 2 x 16 codes of width 8
    stages = codebook_health(tokenizer, [FakeBatch(x[:20]), FakeBatch(x[20:])])
    latents = tokenizer.encode(x).detach().flatten(0, 1)
    codes, books = tokenizer.tokenize(x).flatten(0, 1), tokenizer.quantizer.code_vectors()
    inputs = latents / latents.norm(dim=1, keepdim=True)
    for m, stage in enumerate(stages):
        of_inputs = spread_by_numpy(inputs, torch.ones(len(inputs)))
        of_codes = spread_by_numpy(books[m], torch.bincount(codes[:, m], minlength=16))
        assert (stage.latent_dimension, stage.latent_first) == pytest.approx(of_inputs, rel=1e-3)
        assert (stage.code_dimension, stage.code_first) == pytest.approx(of_codes, rel=1e-3)
        assert stage.directions == 4  # of patches of 2 x 2
        inputs = inputs - books[m][codes[:, m]]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


GEOMETRY = Geometry(channels=1, input=(8, 8), patch=(2, 2))  # 16 tokens


def started(tokenizer: Tokenizer, x: Tensor) -> Tokenizer:
    with torch.no_grad():
        tokenizer.quantizer.start_codebooks(tokenizer.encode(x), generator=seeded())
    return tokenizer


def cold_start(x: Tensor, *, codes: int = 16) -> Tokenizer:
    tokenizer = ColdStartTokenizer(geometry=GEOMETRY, quantizer=ResidualQuantizer(codebooks=2, codes=codes, width=8))
    tokenizer.draw_projection(seeded())
    return started(tokenizer, x)


def judged(tokenizer: Tokenizer, x: Tensor) -> list[Verdict]:
    stages = codebook_health(tokenizer, [FakeBatch(x)])
    steady = code_agreement(tokenizer, [FakeBatch(x)], generator=seeded())
    found = [stage.model_copy(update={"agreement": kept}) for stage, kept in zip(stages, steady, strict=True)]
    return verdicts(found, settings(), is_trained=tokenizer.is_trained)


def test_a_healthy_tokenizer_is_called_healthy() -> None:
    x = torch.randn(400, 1, 8, 8, generator=seeded())
    assert [v.level for v in judged(cold_start(x), x)] == ["ok", "ok"]


def test_a_tokenizer_with_a_collapsed_book_is_called_collapsed() -> None:
    x = torch.randn(400, 1, 8, 8, generator=seeded())
    tokenizer = cold_start(x)
    with torch.no_grad():
        tokenizer.quantizer.books[0].code[2:] = 100.0  # fourteen codes that no unit vector is ever nearest to
    first, *_ = judged(tokenizer, x)
    assert (first.stage, first.level) == (1, "bad") and "collapsed: 12 % of 16 codes in use" in first.text


def test_a_tokenizer_that_sees_only_positions_is_found_out() -> None:
    encoder = Encoder(geometry=GEOMETRY, width=16, depth=1, heads=2)
    tokenizer = VitTokenizer(encoder=encoder, quantizer=ResidualQuantizer(codebooks=1, codes=16, width=8))
    initialise(tokenizer, generator=seeded())
    torch.nn.init.zeros_(encoder.embed.proj.weight)  # blind: what is left is the position table
    x = torch.randn(400, 1, 8, 8, generator=seeded())
    (found,) = judged(started(tokenizer.eval(), x), x)
    assert found.level == "warn" and "position alone tells" in found.text


def test_codes_that_describe_noise_are_called_unsteady() -> None:
    x = 1e-3 * torch.randn(400, 1, 8, 8, generator=seeded(1))  # noise of 1 % of the spread is ten times the signal
    first = judged(cold_start(x), x)[0]
    assert first.level == "warn" and "survive noise 1 %" in first.text


def test_agreement_is_one_where_nothing_depends_on_the_change() -> None:
    x = torch.ones(4, 1, 8, 8) * torch.arange(1, 5)[:, None, None, None]
    tokenizer = ColdStartTokenizer(
        geometry=GEOMETRY, quantizer=ResidualQuantizer(codebooks=1, codes=2, width=4, residual="none")
    )
    tokenizer.projection.fill_(1.0)
    with torch.no_grad():
        tokenizer.quantizer.books[0].code.copy_(torch.tensor([[4.0], [16.0]]).expand(2, 4))
        tokenizer.quantizer.started.fill_(True)
    # Patches of ones sum to 4, 8, 12, 16: two values go to each code, none within noise of the border at 10.
    (kept,) = code_agreement(tokenizer, [FakeBatch(x)], generator=seeded())
    assert kept == {"noise 1 %": 1.0, "noise 5 %": 1.0, "shift by 1": 1.0}


def test_agreement_counts_the_codes_a_shift_changes_and_leaves_padding_out() -> None:
    x = torch.zeros(1, 1, 8, 8)
    x[..., :2] = 1.0  # the left column of patches; shifted by one, half of it and half of the next
    tokenizer = ColdStartTokenizer(
        geometry=GEOMETRY, quantizer=ResidualQuantizer(codebooks=1, codes=2, width=4, residual="none")
    )
    tokenizer.projection.fill_(1.0)
    with torch.no_grad():
        tokenizer.quantizer.books[0].code.copy_(torch.tensor([[0.0], [3.9]]).expand(2, 4))  # the border is at 1.95
        tokenizer.quantizer.started.fill_(True)
    (kept,) = code_agreement(tokenizer, [FakeBatch(x)], generator=seeded())
    assert kept["shift by 1"] == 12 / 16  # the second column of patches becomes 2, which is nearer to 3.9
    valid = torch.ones(1, 4, 4, dtype=torch.bool)
    valid[:, 0] = False
    (kept,) = code_agreement(tokenizer, [FakeBatch(x, valid.flatten(1))], generator=seeded())
    assert kept["shift by 1"] == 9 / 12


def test_codes_that_are_the_label_tell_all_of_it_and_other_codes_nothing() -> None:
    label = torch.randint(4, (800,), generator=seeded())
    own = label[:, None, None].expand(-1, 6, 1)
    other = torch.randint(4, (800, 1, 1), generator=seeded(1)).expand(-1, 6, 1)  # the same in the whole sample
    batches = [
        counted(torch.cat([own, other], -1)[at : at + 100], label=label[at : at + 100]) for at in range(0, 800, 100)
    ]
    first, second = health(batches, [4, 4], classes=4)
    assert first.label_information == pytest.approx(math.log(4), rel=0.02)
    # Six tokens of a sample count as six but say one thing; without foreign labels taken off this would be 0.005 or so.
    assert second.label_information is not None and second.label_information < 0.01


def test_label_information_needs_labels_and_enough_tokens() -> None:
    codes = codes_of(samples=10, tokens=4, codes=8)
    assert health([counted(codes)], [8], classes=4)[0].label_information is None
    label = torch.arange(10) % 4
    assert health([counted(codes, label=label)], [8], classes=4)[0].label_information is None
    assert health([counted(codes, label=label)], [8])[0].label_information is None


def test_unused_codes_by_hand() -> None:
    codes = torch.tensor([[[0, 0], [0, 1], [0, 1], [2, 0]]])
    first, second = health([counted(codes)], [4, 2])
    assert (first.dead, second.dead) == (2, 0)


def test_a_book_whose_codes_all_lie_along_one_direction_is_narrow_however_many_are_used() -> None:
    codes = codes_of(samples=64, tokens=64, codes=16)
    line = torch.arange(16.0)[:, None] * torch.ones(1, 64)
    (stage,) = health([counted(codes)], [16], [line])
    assert (stage.usage_rate, stage.code_dimension) == (1.0, pytest.approx(1.0))
    (verdict,) = verdicts([stage.model_copy(update={"directions": 64})], settings(), is_trained=False)
    assert verdict.level == "warn"
    assert "narrow: its codes fill 1.0 of 64 directions, 100 % of their variance lies along one" in verdict.text
    assert "tokenizer.whiten=0.5" in verdict.text
    round_book = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    (wide,) = health([counted(codes)], [16], [round_book])
    assert verdicts([wide.model_copy(update={"directions": 64})], settings(), is_trained=False)[0].level == "ok"
