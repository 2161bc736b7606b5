"""Code usage: the paper's numbers from counts, streaming counters, code ages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bridle.errors import UsageError
from bridle.quantize.usage import (
    NEVER,
    CodeAge,
    CollapseWatch,
    UsageCounter,
    effective_usage,
    mutual_information,
    perplexity,
    top_share,
    usage_entropy,
    usage_rate,
)

torch.set_num_threads(1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_numbers_worked_by_hand() -> None:
    counts = torch.tensor([2, 1, 1, 0])
    entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert usage_rate(counts) == 0.75
    assert float(usage_entropy(counts)) == pytest.approx(entropy)
    assert float(effective_usage(counts)) == pytest.approx(0.75 * entropy / math.log(4))
    assert float(perplexity(counts)) == pytest.approx(math.exp(entropy))
    assert top_share(counts) == 0.5


def test_uniform_counts_give_an_effective_usage_of_one() -> None:
    assert float(effective_usage(torch.full((256,), 7))) == pytest.approx(1)
    assert float(perplexity(torch.full((256,), 7))) == pytest.approx(256)


def test_a_single_used_code_gives_an_effective_usage_of_zero() -> None:
    counts = torch.zeros(256)
    counts[3] = 1000
    assert effective_usage(counts) == 0
    assert perplexity(counts) == 1
    assert top_share(counts) == 1


def test_nothing_counted_is_no_usage() -> None:
    counts = torch.zeros(8)
    assert usage_rate(counts) == usage_entropy(counts) == effective_usage(counts) == top_share(counts) == 0


def test_the_papers_table_by_the_papers_formula() -> None:
    # Its ECU column holds CUR/(UE in bits · ln K). Undo that, then apply ECU = CUR·UE/ln K as its text defines it.
    def by_the_formula(cur: float, printed: float, codes: int) -> float:
        nats = cur / (printed * math.log(codes)) * math.log(2)
        return cur * nats / math.log(codes)

    assert by_the_formula(1.00, 0.0146, 1024) == pytest.approx(0.988, abs=2e-3)
    assert by_the_formula(0.21, 0.0041, 1024) == pytest.approx(0.155, abs=2e-3)
    assert by_the_formula(1.00, 0.0228, 256) == pytest.approx(0.989, abs=2e-3)


def test_position_that_fixes_the_code_tells_all_of_it() -> None:
    found = mutual_information(100 * torch.eye(8))
    assert found.plug_in == pytest.approx(math.log(8))
    assert found.nats == pytest.approx(math.log(8), abs=0.01)
    assert found.code_entropy == pytest.approx(math.log(8), abs=0.01)
    assert found.trusted
    assert str(found) == "2.084 nats of 2.084"  # ln 8 + 7/1600, both


def test_the_miller_madow_correction_worked_by_hand() -> None:
    joint = torch.tensor([[3, 1], [1, 3]])
    p = [3 / 8, 1 / 8]
    plug_in = 2 * math.log(2) + 2 * sum(x * math.log(x) for x in p)
    found = mutual_information(joint)
    assert found.plug_in == pytest.approx(plug_in)
    assert found.nats == pytest.approx(max(0.0, plug_in + (1 + 1 - 3) / 16))
    assert found.tokens == 8


def test_independent_codes_tell_nothing_once_corrected() -> None:
    draws = seeded()
    joint = torch.zeros(32, 16)
    codes, places = torch.randint(32, (20_000,), generator=draws), torch.randint(16, (20_000,), generator=draws)
    joint.index_put_((codes, places), torch.ones(20_000), accumulate=True)
    found = mutual_information(joint)
    assert found.plug_in > 0.01
    assert found.nats < 0.003
    assert found.trusted


@pytest.mark.parametrize("per_cell", [0.25, 0.5, 1])
def test_too_few_tokens_are_called_so(per_cell: float) -> None:
    draws, tokens = seeded(), int(per_cell * 64 * 64)
    joint = torch.zeros(64, 64)
    codes, places = torch.randint(64, (tokens,), generator=draws), torch.randint(64, (tokens,), generator=draws)
    joint.index_put_((codes, places), torch.ones(tokens), accumulate=True)
    found = mutual_information(joint)
    assert not found.trusted
    assert str(found) == "too few tokens"


def test_what_is_trusted_is_right_to_a_fiftieth_of_a_nat() -> None:
    draws = seeded(1)
    tokens = 4 * 64 * 64 + 64  # just enough
    joint = torch.zeros(64, 64)
    codes, places = torch.randint(64, (tokens,), generator=draws), torch.randint(64, (tokens,), generator=draws)
    joint.index_put_((codes, places), torch.ones(tokens), accumulate=True)
    found = mutual_information(joint)
    assert found.trusted
    assert found.nats < 0.02 < found.plug_in


def test_a_counter_fed_in_pieces_counts_like_one_fed_at_once() -> None:
    codes = torch.randint(5, (12, 4, 2), generator=seeded())
    whole, pieces = UsageCounter((5, 5), positions=4), UsageCounter((5, 5), positions=4)
    whole.update(codes)
    for part in codes.split(5):
        pieces.update(part)
    for m in range(2):
        expected = torch.zeros(5, 4, dtype=torch.int64)
        for place in range(4):
            expected[:, place] = torch.bincount(codes[:, place, m], minlength=5)
        assert torch.equal(pieces.joint[m], expected)
        assert torch.equal(whole.joint[m], expected)
        assert torch.equal(pieces.counts[m], expected.sum(1))
    assert pieces.tokens == 48


def test_padding_is_not_counted() -> None:
    counter = UsageCounter((3,), positions=2)
    counter.update(torch.tensor([[[0], [1]], [[2], [2]]]), valid=torch.tensor([[True, False], [True, True]]))
    assert counter.counts[0].tolist() == [1, 0, 2]
    assert counter.joint[0].tolist() == [[1, 0], [0, 0], [1, 1]]


def test_positions_may_be_given() -> None:
    counter = UsageCounter((3,), positions=4)
    counter.update(torch.tensor([[0], [2]]), positions=torch.tensor([3, 1]))
    assert counter.joint[0].nonzero().tolist() == [[0, 3], [2, 1]]


def test_a_counter_without_positions_knows_no_information() -> None:
    counter = UsageCounter((3,))
    counter.update(torch.tensor([[0], [2]]))
    with pytest.raises(UsageError, match="without positions"):
        counter.information()


@pytest.mark.parametrize("codes", [torch.zeros(2, 9, 1).long(), torch.zeros(2, 4, 3).long()])
def test_codes_of_another_shape_are_refused(codes: Tensor) -> None:
    with pytest.raises(UsageError, match="expected codes"):
        UsageCounter((3,), positions=4).update(codes)


def test_age_is_the_number_of_steps_since_a_code_was_used() -> None:
    ages = CodeAge((3, 2))
    ages.update(ages.count(torch.tensor([[0, 1], [2, 1]])))
    ages.update(ages.count(torch.tensor([[[0, 0], [1, 0]]])))
    assert [age.tolist() for age in ages.ages] == [[0, 0, 1], [0, 1]]
    assert ages.used_within(1).tolist() == [2 / 3, 0.5]
    assert ages.used_within(2).tolist() == [1, 1]


def test_a_code_that_was_never_used_is_not_young() -> None:
    ages = CodeAge((2,))
    ages.update(ages.count(torch.tensor([[0]])))
    assert ages.ages[0].tolist() == [0, NEVER + 1]
    assert ages.used_within(10).tolist() == [0.5]


def test_ages_are_saved_and_loaded() -> None:
    ages, other = CodeAge((3, 2)), CodeAge((3, 2))
    ages.update(ages.count(torch.tensor([[0, 1]])))
    saved = ages.state()
    ages.update(ages.count(torch.tensor([[0, 1]])))  # what was saved does not change any more
    other.load_state(saved)
    assert [age.tolist() for age in other.ages] == [[0, NEVER + 1, NEVER + 1], [NEVER + 1, 0]]
    with pytest.raises(UsageError, match=r"do not fit codebooks of \[3\]"):
        CodeAge((3,)).load_state(saved)


def test_a_collapse_is_announced_once_and_again_only_after_a_recovery() -> None:
    watch = CollapseWatch([64, 64], window=50)
    said = [
        len(watch.look(step=step, usage=[0.9, usage], top=[0.1, 0.1]))
        for step, usage in ((50, 0.8), (60, 0.49), (70, 0.51), (80, 0.45), (90, 0.7), (100, 0.3))
    ]
    assert said == [0, 1, 0, 0, 0, 1]


def test_a_collapse_warning_names_stage_and_share() -> None:
    (text,) = CollapseWatch([64, 64], window=50).look(step=50, usage=[0.9, 0.25], top=[0.1, 0.1])
    assert "stage 2 is collapsing: 25 % of its 64 codes" in text


def test_usage_is_not_judged_before_its_window_is_full() -> None:
    watch = CollapseWatch([64], window=50)
    assert watch.look(step=49, usage=[0.1], top=[1.0]) == []
    assert len(watch.look(step=50, usage=[0.1], top=[1.0])) == 2


def test_a_code_that_takes_over_is_announced_but_not_where_there_are_only_two() -> None:
    (text,) = CollapseWatch([64, 2], window=1).look(step=1, usage=[1.0, 1.0], top=[0.41, 0.9])
    assert text.startswith("stage 1: one code takes 41 % of the tokens")


def test_codes_unused_for_some_steps_are_marked_until_they_are_renewed() -> None:
    ages = CodeAge([3])
    for code in (0, 1, 1):
        ages.update(ages.count(torch.tensor([[code]])))
    assert ages.unused_for(2)[0].tolist() == [True, False, True]  # code 0 was last seen two steps ago, code 2 never
    ages.renew(ages.unused_for(2))
    assert ages.unused_for(2)[0].tolist() == [False, False, False]
    ages.update(ages.count(torch.tensor([[1]])))
    ages.update(ages.count(torch.tensor([[1]])))
    assert ages.unused_for(2)[0].tolist() == [True, False, True]
