"""Every example runs as it stands there, within its minute, and shows what it says it shows."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def main(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """The `main` of the example that the test's mark names."""
    found: Callable[[], Any] = runpy.run_path(str(EXAMPLES / f"{request.param}.py"))["main"]
    return found


def example(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("main", [name], indirect=True)


@example("classify_with_few_labels")
def test_features_help_when_labels_are_few(main: Callable[[], dict[int, tuple[float, float]]]) -> None:
    results = main()
    features, pixels = results[1]
    assert features > pixels
    assert results[30][0] > 0.9


@example("find_duplicates")
def test_planted_copies_are_the_closest_pairs(main: Callable[[], float]) -> None:
    assert main() >= 0.8


@example("tokenize_folder")
def test_every_stage_leaves_less_to_the_next(main: Callable[[], list[float]]) -> None:
    left = main()
    assert left == sorted(left, reverse=True)
    assert left[0] < 0.5
    assert left[-1] == 0


@example("continue_pretraining")
def test_a_run_goes_on_from_a_model(main: Callable[[], tuple[float, float]]) -> None:
    continued, _ = main()
    assert continued > 0.8


@example("quantizer_in_another_model")
def test_an_autoencoder_with_our_quantizer_learns(main: Callable[[], list[float]]) -> None:
    errors = main()
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02  # a pixel's variance is 0.06


@example("next_code")
def test_a_next_code_model_beats_the_unigram(main: Callable[[], tuple[float, float]]) -> None:
    bits, unigram = main()
    assert bits < unigram - 0.5


@example("generate")
def test_a_language_model_over_codes_makes_new_digits(main: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = main(tmp_path, ["digits"], steps=40)["digits"]
    assert result.bits < result.unigram
    assert result.copies == 0.0
    assert result.distance > 0.5 * result.held_out_distance
    assert result.pictures.is_file()


def test_the_same_sequences_train_a_model_of_transformers() -> None:
    bits_of = runpy.run_path(str(EXAMPLES / "generate.py"))["transformers_bits"]
    codes = (torch.arange(6)[:, None] + torch.tensor([0, 3])).expand(32, 6, 2) % 8  # (32, T, M), always the same
    assert bits_of(codes, codes[:4], (8, 8), 30) < 0.5  # of 3 bits


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert [path.stem for path in EXAMPLES.glob("*.py") if f'"{path.stem}"' not in tested] == []
