from __future__ import annotations

import json
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bridle.errors import DataError
from bridle.evaluate.codebooks import CodeBatch, StageHealth, codebook_health, health_of_codes, verdicts
from bridle.geometry import Geometry
from bridle.models.tokenizer import ColdStartTokenizer
from bridle.quantize import ResidualQuantizer


class FakeBatch(NamedTuple):
    x: Tensor
    valid: Tensor | None = None


def codes_of(*, samples: int, tokens: int, codes: int, seed: int = 0) -> Tensor:
    """(B, T, 1) codes drawn evenly."""
    return torch.randint(codes, (samples, tokens, 1), generator=torch.Generator().manual_seed(seed))


def levels(codes: Tensor, size: int) -> list[tuple[str, str]]:
    found = verdicts(health_of_codes([CodeBatch(codes)], [size]))
    return [(verdict.level, verdict.text) for verdict in found]


def test_the_numbers_of_a_hand_worked_pass() -> None:
    first, second = torch.tensor([[[0], [1]], [[0], [1]]]), torch.tensor([[[0], [0]]])  # code 0 four times, 1 twice
    books = [torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [2.0, 0.0]])]
    stage = health_of_codes([CodeBatch(first), CodeBatch(second)], [4], books)[0]
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert (stage.stage, stage.codes, stage.tokens) == (1, 4, 6)
    assert stage.usage_rate == 0.5
    assert stage.entropy == pytest.approx(entropy)
    assert stage.effective_usage == pytest.approx(0.5 * entropy / math.log(4))
    assert stage.perplexity == pytest.approx(math.exp(entropy))
    assert stage.top_share == pytest.approx(2 / 3)
    assert stage.norms == [5.0, 1.0, 0.0, 2.0]


def test_padding_is_not_counted() -> None:
    codes = torch.tensor([[[0], [1], [2]]])
    stage = health_of_codes([CodeBatch(codes, torch.tensor([[True, True, False]]))], [4])[0]
    assert (stage.tokens, stage.usage_rate) == (2, 0.5)


def test_energy_is_averaged_over_tokens_and_absent_where_it_was_not_measured() -> None:
    small, large = torch.zeros(1, 2, 1, dtype=torch.long), torch.zeros(3, 2, 1, dtype=torch.long)
    batches = [CodeBatch(small, energy=torch.tensor([0.8])), CodeBatch(large, energy=torch.tensor([0.4]))]
    assert health_of_codes(batches, [2])[0].energy == pytest.approx(0.5)
    assert health_of_codes([CodeBatch(small)], [2])[0].energy is None


def test_no_tokens_at_all_are_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        health_of_codes([], [4])


def test_a_stage_survives_json() -> None:
    stage = health_of_codes([CodeBatch(codes_of(samples=4, tokens=4, codes=4))], [4], [torch.ones(4, 2)])[0]
    assert StageHealth(**json.loads(json.dumps(stage._asdict()))) == stage


def test_even_use_of_all_codes_is_healthy() -> None:
    assert [level for level, _ in levels(codes_of(samples=400, tokens=8, codes=16), 16)] == ["ok"]


def test_a_collapsed_codebook_is_bad_and_the_verdict_says_what_to_try() -> None:
    found = levels(codes_of(samples=400, tokens=8, codes=6), 64)
    assert [level for level, _ in found] == ["bad"]
    assert "collapsed: 9 % of 64 codes in use" in found[0][1] and "centre_teacher" in found[0][1]


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
