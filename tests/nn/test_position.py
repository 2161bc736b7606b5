"""Sine-cosine positions against a loop in plain Python floats (float64)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bridle.errors import ConfigError
from bridle.nn.position import sincos_position

torch.set_num_threads(1)


def loop_table(grid: tuple[int, ...], width: int) -> list[list[float]]:
    part = 2 * (width // (2 * len(grid)))
    rows = []
    for position in itertools.product(*(range(n) for n in grid)):  # row-major
        row = [0.0] * width
        for k, p in enumerate(reversed(position)):
            for i in range(part // 2):
                angle = p / 10000 ** (2 * i / part)
                row[k * part + i] = math.sin(angle)
                row[k * part + part // 2 + i] = math.cos(angle)
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("grid", "width"),
    [
        ((9,), 8),
        ((9,), 7),
        ((4, 5), 16),
        ((64, 8), 12),
        ((3, 4), 6),
        ((2, 3, 4), 12),
        ((2, 3, 4), 17),
        ((2, 2, 2, 2), 8),
    ],
)
def test_the_table_equals_a_float64_loop(grid: tuple[int, ...], width: int) -> None:
    table = sincos_position(grid, width)
    assert table.dtype == torch.float32
    assert table.shape == (math.prod(grid), width)
    assert (table.double() - torch.tensor(loop_table(grid, width), dtype=torch.float64)).abs().max() <= 6e-8


def test_on_an_image_the_column_comes_first_then_the_row() -> None:
    """The layout of the published MAE weights, worked by hand for row 1, column 2 of a 2 × 3 grid, width 4."""
    row = sincos_position((2, 3), 4)[1 * 3 + 2]
    expected = torch.tensor([math.sin(2), math.cos(2), math.sin(1), math.cos(1)])
    assert torch.allclose(row, expected, atol=1e-7, rtol=0)


def test_columns_that_do_not_divide_evenly_are_zero() -> None:
    table = sincos_position((3, 4), 7)
    assert (table[:, 4:] == 0).all()
    assert (table[:, :4] != 0).any(dim=0).all()


@pytest.mark.parametrize(("grid", "width"), [((1500,), 2), ((40, 40), 4), ((8, 14, 14), 6), ((8, 14, 14), 384)])
def test_every_position_has_its_own_row(grid: tuple[int, ...], width: int) -> None:
    table = sincos_position(grid, width)
    assert torch.unique(table, dim=0).shape[0] == math.prod(grid)


def test_a_width_without_room_for_every_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 6"):
        sincos_position((2, 2, 2), 5)
