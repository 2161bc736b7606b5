from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from probing import linear_probe
from torch import Tensor

from bridle.errors import DataError, NonFiniteError
from bridle.evaluate import features as features_module
from bridle.evaluate.features import Features, collect_features, raw_features, split_features
from bridle.evaluate.heads import logistic
from bridle.nn.pooling import axis_pool, deviation_pool, mean_pool


class FakeBatch(NamedTuple):
    x: Tensor
    label: Tensor | None
    valid: Tensor | None = None


def blobs(items: int, classes: int, width: int, *, apart: float = 1.0, seed: int = 0) -> Features:
    rng = np.random.default_rng(seed)
    centres = apart * np.random.default_rng(99).normal(size=(classes, width))
    y = np.arange(items) % classes
    return Features((centres[y] + rng.normal(size=(items, width))).astype(np.float32), y.astype(np.int64))


# collecting


def test_features_are_joined_in_the_order_of_the_batches() -> None:
    batches = [FakeBatch(torch.full((2, 1, 3), float(i)), torch.tensor([i, i + 10])) for i in range(3)]
    found = collect_features(batches, lambda x, valid: x.flatten(1))
    assert found.x[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert found.y.tolist() == [0, 10, 1, 11, 2, 12]
    assert (found.x.dtype, found.y.dtype) == (np.float32, np.int64)


def test_features_are_collected_without_gradients() -> None:
    layer = torch.nn.Linear(3, 2)
    seen: list[bool] = []

    def features(x: Tensor, valid: Tensor | None) -> Tensor:
        z: Tensor = layer(x)
        seen.append(z.requires_grad)
        return z

    collect_features([FakeBatch(torch.ones(2, 3), torch.tensor([0, 1]))], features)
    assert seen == [False]


def test_features_that_are_not_finite_are_refused_with_their_number() -> None:
    x = torch.tensor([[1.0], [float("nan")], [float("inf")]])
    with pytest.raises(NonFiniteError, match="2 of 3 items in batch 0"):
        collect_features([FakeBatch(x, torch.tensor([0, 1, 0]))], lambda x, valid: x)


@pytest.mark.parametrize("label", [None, torch.tensor([0, -1])])
def test_a_batch_without_labels_is_refused_and_the_message_says_what_to_do(label: Tensor | None) -> None:
    with pytest.raises(DataError, match="one folder per class"):
        collect_features([FakeBatch(torch.ones(2, 3), label)], lambda x, valid: x)


def test_no_batches_at_all_are_refused() -> None:
    with pytest.raises(DataError, match="at least one batch"):
        collect_features([], lambda x, valid: x)


# pooling


def test_the_mean_pool_leaves_padding_out_even_where_it_is_not_finite() -> None:
    tokens = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [float("nan"), 100.0]]])
    assert mean_pool(tokens, torch.tensor([[True, True, False]])).tolist() == [[2.0, 3.0]]


def test_the_mean_pool_without_padding_is_the_mean() -> None:
    tokens = torch.arange(12.0).reshape(2, 3, 2)
    assert torch.equal(mean_pool(tokens), tokens.mean(dim=1))


def test_a_sample_of_padding_only_pools_to_zeros() -> None:
    assert mean_pool(torch.ones(1, 2, 3), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_the_deviation_is_numpys_over_the_real_tokens_of_each_place(axis: int | None) -> None:
    grid, g = (3, 2, 4), torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 24, 5, generator=g) + 100  # a difference of squares would lose it
    valid = torch.rand(2, 24, generator=g) < 0.8
    found = deviation_pool(tokens, grid, axis, valid)
    places = np.indices(grid)[axis].reshape(-1) if axis is not None else np.zeros(24, dtype=int)
    for b in range(2):
        for k in range(grid[axis] if axis is not None else 1):
            rows = tokens[b].double().numpy()[(places == k) & valid[b].numpy()]
            np.testing.assert_allclose(found[b, 5 * k : 5 * k + 5].numpy(), rows.std(axis=0), atol=1e-5)


def test_the_axis_pool_keeps_one_mean_per_band() -> None:
    tokens = torch.arange(6.0).reshape(1, 6, 1)  # a (time 2, band 3) grid: rows 0 1 2 and 3 4 5
    assert axis_pool(tokens, (2, 3), 1).tolist() == [[1.5, 2.5, 3.5]]
    assert axis_pool(tokens, (2, 3), -1).tolist() == [[1.5, 2.5, 3.5]]
    assert axis_pool(tokens, (2, 3), 0).tolist() == [[1.0, 4.0]]


def test_the_axis_pool_leaves_padding_out() -> None:
    tokens = torch.arange(6.0).reshape(1, 6, 1)
    valid = torch.tensor([[True, True, True, False, False, True]])
    assert axis_pool(tokens, (2, 3), 1, valid).tolist() == [[0.0, 1.0, 3.5]]


# raw features


def test_a_small_input_is_flattened() -> None:
    x = torch.arange(24.0).reshape(2, 3, 2, 2)
    assert torch.equal(raw_features(x), x.reshape(2, 12))


def test_of_a_spectrogram_the_mean_and_spread_over_time_are_kept_per_band() -> None:
    x = torch.randn(2, 1, 100, 64, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([x[:, 0].mean(dim=1), x[:, 0].std(dim=1, correction=0)], dim=1)
    assert raw_features(x).shape == (2, 128)
    torch.testing.assert_close(raw_features(x), expected)


def test_of_a_film_as_many_axes_are_pooled_as_needed() -> None:
    assert raw_features(torch.zeros(1, 3, 4, 64, 48)).shape == (1, 2 * 3 * 48)


def test_padding_is_left_out_of_the_raw_means() -> None:
    x = torch.ones(1, 1, 80, 64)
    x[:, :, 40:] = 7.0
    found = raw_features(x, torch.tensor([[True, False]]), grid=(2, 1))
    assert found.tolist() == [[1.0] * 64 + [0.0] * 64]
    with pytest.raises(ValueError, match="grid"):
        raw_features(x, torch.tensor([[True, False]]))


# splits


def test_a_split_is_stratified_disjoint_and_the_same_each_time() -> None:
    y = np.repeat(np.arange(3), [10, 20, 40])
    items = Features(np.arange(70, dtype=np.float32)[:, None], y)
    train, test = split_features(items, seed=1)
    assert np.bincount(test.y).tolist() == [2, 4, 8]
    assert sorted([*train.x[:, 0], *test.x[:, 0]]) == list(range(70))
    assert np.array_equal(test.x, split_features(items, seed=1)[1].x)
    assert not np.array_equal(test.x, split_features(items, seed=2)[1].x)


def test_a_class_with_one_item_stays_in_training() -> None:
    items = Features(np.zeros((5, 1), np.float32), np.array([0, 1, 1, 1, 1]))
    train, test = split_features(items, seed=0)
    assert 0 in train.y and 0 not in test.y


def test_a_data_set_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(DataError, match="none of the 2 classes has two items"):
        split_features(Features(np.zeros((2, 1), np.float32), np.array([0, 1])), seed=0)


# the probe


def test_the_probe_separates_what_a_line_separates() -> None:
    result = linear_probe(blobs(200, 8, 16, apart=4.0), blobs(80, 8, 16, apart=4.0, seed=1), seed=0)
    assert result.accuracy == 1.0 and result.top5 == 1.0 and result.balanced_accuracy == 1.0
    assert (result.classes, result.train_items, result.test_items, result.chance) == (8, 200, 80, 0.125)
    assert result.setting["converged"]


def test_the_probe_of_noise_is_at_chance() -> None:
    noise = np.random.default_rng(0).normal(size=(1200, 8)).astype(np.float32)
    y = np.arange(1200) % 4
    result = linear_probe(Features(noise[:800], y[:800]), Features(noise[800:], y[800:]), seed=0)
    assert abs(result.accuracy - 0.25) < 0.07
    assert result.interval.low < 0.25 < result.interval.high + 0.05


def test_two_classes_are_probed_like_many() -> None:
    result = linear_probe(blobs(100, 2, 4, apart=3.0), blobs(40, 2, 4, apart=3.0, seed=1), seed=0)
    assert result.accuracy > 0.95
    assert result.top5 is None


def test_the_probe_gives_the_same_numbers_each_time() -> None:
    train, test = blobs(150, 5, 8, apart=0.5), blobs(60, 5, 8, apart=0.5, seed=1)
    first, second = linear_probe(train, test, seed=3), linear_probe(train, test, seed=3)
    assert first.model_copy(update={"seconds": 0}) == second.model_copy(update={"seconds": 0})


def test_the_choice_of_strength_never_sees_the_test_items(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []
    original = logistic._solve

    def counted(problem: Any, *others: Any, **named: Any) -> Any:
        fitted.append(len(problem.x))
        return original(problem, *others, **named)

    monkeypatch.setattr(logistic, "_solve", counted)
    train = blobs(100, 4, 6)
    a = linear_probe(train, blobs(40, 4, 6, seed=1), seed=0)
    b = linear_probe(train, Features(-100 * blobs(40, 4, 6, seed=1).x, np.arange(40) % 4), seed=0)
    assert a.setting == b.setting and a.accuracy != b.accuracy
    assert set(fitted) == {80, 100} and fitted.count(100) == 2


def test_strong_regularisation_wins_where_features_are_mostly_noise() -> None:
    train, test = blobs(120, 4, 100, apart=0.25), blobs(400, 4, 100, apart=0.25, seed=1)
    assert linear_probe(train, test, seed=0).setting["strength"] <= 0.1


def test_features_are_standardised_so_that_their_units_do_not_matter() -> None:
    train, test = blobs(150, 5, 8, apart=0.7), blobs(60, 5, 8, apart=0.7, seed=1)
    scale = np.float32(2.0) ** np.arange(-8, 8, 2)
    plain = linear_probe(train, test, seed=0)
    scaled = linear_probe(train._replace(x=train.x * scale), test._replace(x=test.x * scale), seed=0)
    assert scaled.accuracy == plain.accuracy


def test_a_constant_feature_does_no_harm() -> None:
    train, test = blobs(100, 4, 6, apart=3.0), blobs(40, 4, 6, apart=3.0, seed=1)
    train.x[:, 0], test.x[:, 0] = 5.0, 5.0
    assert linear_probe(train, test, seed=0).accuracy > 0.9


def test_a_test_label_that_training_never_saw_counts_as_wrong() -> None:
    train, test = blobs(160, 8, 12, apart=5.0), blobs(40, 8, 12, apart=5.0, seed=1)
    test.y[:10] = 77
    result = linear_probe(train, test, seed=0)
    assert (result.accuracy, result.top5) == pytest.approx((0.75, 0.75))


def test_a_fit_that_hits_its_limit_says_so_and_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logistic, "MAX_ITERATIONS", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not linear_probe(blobs(100, 4, 6), blobs(40, 4, 6, seed=1), seed=0).setting["converged"]


def test_one_class_only_is_refused() -> None:
    one = Features(np.zeros((4, 2), np.float32), np.zeros(4, np.int64))
    with pytest.raises(DataError, match="at least two classes"):
        linear_probe(one, one, seed=0)


def test_a_probe_of_features_that_are_not_finite_is_refused() -> None:
    train, test = blobs(20, 2, 3), blobs(20, 2, 3)
    test.x[3, 1] = np.nan
    with pytest.raises(NonFiniteError, match="test features"):
        linear_probe(train, test, seed=0)


def test_a_result_survives_json() -> None:
    result = linear_probe(blobs(60, 6, 4), blobs(30, 6, 4, seed=1), seed=0)
    back = json.loads(json.dumps(result.model_dump(mode="json")))
    assert back["accuracy"] == result.accuracy and back["interval"] == list(result.interval)
    assert back["setting"] == result.setting and "folds" not in back


# views and tokens


def test_the_features_of_an_item_are_the_mean_over_its_views() -> None:
    x = torch.tensor([[1.0], [3.0], [10.0], [20.0], [5.0], [5.0]])  # three items of two views
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    found = collect_features([FakeBatch(x[:4], y[:4]), FakeBatch(x[4:], y[4:])], lambda x, valid: x, views=2)
    assert found.x.tolist() == [[2.0], [15.0], [5.0]] and found.y.tolist() == [0, 1, 2]


def test_views_that_are_the_same_go_through_the_network_once() -> None:
    x = torch.tensor([[1.0], [3.0], [1.0], [4.0], [4.0], [4.0], [5.0], [6.0], [6.0]])  # three items of three views
    rows: list[list[float]] = []

    def network(x: Tensor, valid: Tensor | None) -> Tensor:
        rows.append(x.flatten().tolist())
        return 10 * x

    found = collect_features([FakeBatch(x, torch.arange(9) // 3)], network, views=3)
    assert rows == [[1.0, 3.0, 4.0, 5.0, 6.0, 6.0]]  # only copies of the first view are left out
    assert found.x.flatten().tolist() == pytest.approx([50 / 3, 40.0, 170 / 3])


def test_an_item_has_the_tokens_of_all_its_views_and_padding_is_kept_apart() -> None:
    x = torch.arange(8.0).reshape(4, 2, 1)  # two items of two views of two tokens
    x[1, 1] = float("nan")
    valid = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    found = collect_features(
        [FakeBatch(x, torch.tensor([0, 0, 1, 1]), valid)], lambda x, valid: x, views=2, items=2
    )  # fmt: skip
    assert found.x[:, :, 0].tolist() == [[0, 1, 2, 0], [4, 5, 6, 7]]
    assert found.valid is not None and found.valid.tolist() == [[True, True, True, False], [True] * 4]


def test_tokens_that_need_too_much_memory_are_refused_before_they_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(features_module, "TOKEN_LIMIT", 4 * 2 * 3 * 10)  # ten items of 2 x 3 numbers
    seen: list[int] = []

    def batches() -> Iterator[FakeBatch]:
        for n in range(20):
            seen.append(n)
            yield FakeBatch(torch.ones(1, 2, 3), torch.tensor([0]))

    with pytest.raises(DataError, match=r"probe\.items=5 or less"):
        collect_features(batches(), lambda x, valid: x, items=20)
    assert seen == [0]
