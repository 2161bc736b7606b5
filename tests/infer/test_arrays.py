"""Arrays given to a model: any real numbers, any number of them, and complaints that name both shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import Plane, plane_model, signal_model

import bridle
from bridle.errors import DataError, UsageError
from bridle.infer.model import Model
from bridle.models.tokenizer import VitTokenizer
from bridle.seeding import generator


@pytest.fixture(scope="module")
def model() -> Model:
    return signal_model()


def inputs(count: int) -> torch.Tensor:
    return torch.randn(count, 2, 12, generator=generator("x"))


def test_numpy_and_torch_give_the_same(model: Model) -> None:
    x = inputs(3)
    for same in (x.numpy(), x.double(), x.numpy().astype(np.float64), np.asfortranarray(x.numpy())):
        assert torch.equal(model.encode(same), model.encode(x))
        assert torch.equal(model.tokenize(same), model.tokenize(x))
    assert torch.equal(model.encode(x[0]), model.encode(x[:1]))


@pytest.mark.parametrize("batch", [1, 2, 7, 100])
def test_batches_do_not_change_codes_or_features(model: Model, batch: int) -> None:
    x = inputs(7)
    valid = torch.rand(7, 4, generator=generator("valid")) < 0.7
    valid[:, 0] = True
    assert torch.equal(model.tokenize(x, valid=valid, batch=batch), model.tokenize(x, valid=valid))
    several = model.encode(x, valid=valid.numpy(), layers=[1, 3], pool="mean", batch=batch)
    for one, other in zip(several, model.encode(x, valid=valid, layers=[1, 3], pool="mean"), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert model.encode(x[:0], batch=batch).shape == (0, 4, 8)


def test_bytes_are_pictures_only_where_the_model_saw_pictures(model: Model) -> None:
    pictures = plane_model(Plane([]))  # of the recipe for images
    levels = torch.randint(0, 256, (2, 1, 4, 6), generator=generator("levels"), dtype=torch.uint8)
    assert torch.equal(pictures.encode(levels), pictures.encode(levels.float() / 255))
    assert torch.equal(pictures.encode(levels.numpy()), pictures.encode(levels))
    digits = bridle.load("digits-tiny")
    drawn = torch.randint(0, 256, (2, 1, 16, 16), generator=generator("drawn"), dtype=torch.uint8)
    assert torch.equal(digits.tokenize(drawn), digits.tokenize(drawn.float() / 255))
    numbers = torch.randint(0, 256, (2, 2, 12), generator=generator("levels"), dtype=torch.uint8)
    assert torch.equal(model.encode(numbers), model.encode(numbers.float()))


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((1, 4, 8), r"expected an input of shape \(B, 1, 4, 6\) or \(1, 4, 6\), got \(1, 4, 8\); crop, pad or resize"),
        ((2, 4, 6), r"got \(2, 4, 6\); the axis of channels is missing: add it, x\.unsqueeze\(-3\)"),
        ((4, 6), r"got \(4, 6\); the axis of channels is missing"),
        ((5, 2, 4, 6), r"it has 2 channels and the model 1: average them"),
        ((5, 4, 6, 1), r"channels come last here: move them, x\.movedim\(-1, -3\)"),
        ((1, 6, 4), r"its axes are in another order: swap the last two"),
        ((), r"got \(\)"),
    ],
)
def test_a_wrong_shape_is_told_with_the_likely_mistake(shape: tuple[int, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told) as error:
        plane_model(Plane([])).encode(torch.zeros(shape))
    assert "\n" not in str(error.value)


def test_the_advice_is_good() -> None:
    model, x = plane_model(Plane([])), torch.randn(5, 1, 4, 6)
    assert torch.equal(model.encode(x.movedim(1, -1).movedim(-1, -3)), model.encode(x))
    assert torch.equal(model.encode(x[:, 0].unsqueeze(-3)), model.encode(x))


def test_what_is_no_input_is_told(model: Model) -> None:
    for wrong in ([[0.0]], "a.wav", np.zeros((2, 12), complex), np.full((2, 12), "a"), torch.zeros(2, 12) * 1j):
        with pytest.raises(UsageError, match="expected"):
            model.tokenize(wrong)  # type: ignore[arg-type]
    for wrong_number in (np.nan, np.inf, 1e300):
        with pytest.raises(DataError, match="not finite"):
            model.encode(np.full((2, 12), wrong_number))
    with pytest.raises(UsageError, match=r"valid has shape \(1, 5\); expected \(3, 4\)"):
        model.encode(inputs(3), valid=torch.ones(5))
    with pytest.raises(UsageError, match="batch is 0"):
        model.encode(inputs(3), batch=0)


def test_every_token_has_a_place_and_a_beginning(model: Model) -> None:
    plane = plane_model(Plane([]))  # (4, 6) in patches of (2, 3)
    assert plane.token_positions.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert plane.token_starts.tolist() == [[0, 0], [0, 3], [2, 0], [2, 3]]
    assert plane.token_times is not None
    assert plane.token_times.tolist() == [0.0, 0.0, 1.0, 1.0]  # half a second a frame
    assert model.token_times is None  # the rate of these signals is not known
    assert model.token_starts.tolist() == [[0], [3], [6], [9]]


def test_half_precision_encoders_keep_the_quantizer_in_float32() -> None:
    full = signal_model()
    x = inputs(20)
    z, codes = full.encode(x), full.tokenize(x)
    trained = full.trained()
    half = Model(trained, full.config, device=torch.device("cpu"), dtype=torch.float16)
    assert half.encode(x).dtype == torch.float32
    assert {p.dtype for p in half.encoder.parameters()} == {torch.float16}
    assert isinstance(half.tokenizer, VitTokenizer)
    assert {vectors.dtype for vectors in half.tokenizer.quantizer.code_vectors()} == {torch.float32}
    torch.testing.assert_close(half.encode(x), z, atol=2e-2, rtol=2e-2)
    assert (half.tokenize(x) == codes).float().mean() > 0.9
    with pytest.raises(UsageError, match=r"dtype is torch\.int8; expected one of torch\.float32"):
        Model(trained, full.config, device=torch.device("cpu"), dtype=torch.int8)
