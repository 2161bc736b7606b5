"""Windows: sizes, what mixes with what, padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bridle.errors import ConfigError, UsageError
from bridle.nn.transformer import Transformer, initialise
from bridle.nn.window import WindowBlock, Windows, WindowTransformer, auto_window

torch.set_num_threads(1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def block(grid: tuple[int, ...], window: tuple[int, ...], *, shifted: bool) -> WindowBlock:
    made = WindowBlock(width=8, heads=2, windows=Windows(grid=grid, window=window, shifted=shifted))
    initialise(made, generator=seeded())
    return made


def reached(net: WindowBlock, tokens: int, source: int) -> list[int]:
    """The tokens whose output moves when one input token does."""
    x = randn(1, tokens, 8)
    other = x.clone()
    other[0, source, 0] += 1.0  # not on every feature: the norm would take it away
    moved = ((net(other) - net(x)).abs() > 1e-4).any(dim=-1)[0]
    return moved.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("grid", "window"),
    [
        ((64, 8), (8, 8)),
        ((14, 14), (7, 7)),
        ((13, 5), (7, 5)),
        ((7, 7, 7), (7, 7, 7)),
        ((8, 14, 14), (8, 7, 7)),
        ((10,), (5,)),
        ((12,), (6,)),
        ((9,), (7,)),
        ((22, 3), (7, 3)),
        ((1, 2), (1, 2)),
        ((6, 11), (6, 7)),
    ],
)
def test_auto_takes_a_divisor_from_four_to_eight_or_else_seven(grid: tuple[int, ...], window: tuple[int, ...]) -> None:
    assert auto_window(grid) == window
    assert WindowTransformer(width=4, depth=1, heads=1, grid=grid).window == window


def test_a_token_reaches_its_own_window_only() -> None:
    net = block((4, 6), (2, 3), shifted=False)
    # Row 1, column 4 lies in the window of rows 0-1 and columns 3-5.
    assert reached(net, 24, 1 * 6 + 4) == [3, 4, 5, 9, 10, 11]


def test_a_shifted_window_does_not_wrap_around() -> None:
    net = block((6,), (2,), shifted=True)  # cut before 1, 3 and 5
    assert [reached(net, 6, t) for t in range(6)] == [[0], [1, 2], [1, 2], [3, 4], [3, 4], [5]]


def test_a_shifted_window_at_the_padded_end_holds_real_tokens_only() -> None:
    net = block((5,), (4,), shifted=True)  # padded to 8, cut before 2 and 6
    assert [reached(net, 5, t) for t in range(5)] == [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4], [2, 3, 4]]


def test_padding_is_nobodys_key() -> None:
    """The last window of 5 = 4 + 1 holds one real token, whose attention is then its own value."""
    net = block((5,), (4,), shifted=False)
    x = randn(1, 5, 8)
    value = net.attn.qkv(x[:, 4:])[..., 16:]
    torch.testing.assert_close(net.attend(x, None)[:, 4:], net.attn.proj(value))


def test_an_axis_that_one_window_covers_is_not_shifted() -> None:
    assert Windows(grid=(64, 8), window=(8, 8), shifted=True).shift == (4, 0)
    assert Windows(grid=(14, 13), window=(7, 7), shifted=True).shift == (3, 3)
    assert Windows(grid=(14, 14), window=(7, 7), shifted=False).shift == (0, 0)


def test_odd_blocks_are_shifted_and_even_ones_are_not() -> None:
    net = WindowTransformer(width=4, depth=4, heads=1, grid=(14, 14))
    assert [b.windows.shift for b in net.blocks] == [(0, 0), (3, 3), (0, 0), (3, 3)]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    ("grid", "window"), [((13, 5), (7, 5)), ((64, 8), (8, 8)), ((5, 3, 4), (2, 2, 3)), ((9,), (4,))]
)
def test_join_undoes_split(grid: tuple[int, ...], window: tuple[int, ...], shifted: bool) -> None:
    layout = Windows(grid=grid, window=window, shifted=shifted)
    x = randn(2, int(torch.tensor(grid).prod()), 3)
    assert torch.equal(layout.join(layout.split(x)), x)


@pytest.mark.parametrize("all_padding", [False, True])
@pytest.mark.parametrize(("grid", "window"), [((13, 5), (7, 5)), ((9,), (7,)), ((5,), (4,)), ((5, 3, 9), (5, 3, 7))])
def test_no_row_of_pairs_is_empty(grid: tuple[int, ...], window: tuple[int, ...], all_padding: bool) -> None:
    """Not even that of a padding token: on 5 = 4 + 1 shifted by 2, positions 6 and 7 have no real token beside them."""
    valid = torch.zeros(2, int(torch.tensor(grid).prod()), dtype=torch.bool) if all_padding else None
    for shifted in (False, True):
        allowed = Windows(grid=grid, window=window, shifted=shifted).allowed(2, valid)
        assert allowed is not None and allowed.any(dim=-1).all()


@pytest.mark.parametrize("grid", [(64, 8), (14, 14), (13, 5), (9,), (5, 3, 9)])
def test_padding_tokens_have_no_influence_on_valid_ones(grid: tuple[int, ...]) -> None:
    net = WindowTransformer(width=8, depth=2, heads=2, grid=grid)
    initialise(net, generator=seeded())
    tokens = int(torch.tensor(grid).prod())
    valid = torch.rand(2, tokens, generator=seeded()) > 0.4
    x = randn(2, tokens, 8)
    other = torch.where(valid[..., None], x, 100.0 * randn(2, tokens, 8, seed=2))
    out = net(x, key_valid=valid)
    assert torch.equal(out[valid], net(other, key_valid=valid)[valid])
    assert not torch.allclose(out[valid], net(x)[valid], atol=1e-3)


def test_a_batch_of_nothing_but_padding_stays_finite() -> None:
    net = WindowTransformer(width=8, depth=2, heads=2, grid=(13, 5))
    initialise(net, generator=seeded())
    x = randn(2, 65, 8).requires_grad_()
    out = net(x, key_valid=torch.zeros(2, 65, dtype=torch.bool))
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None and x.grad.isfinite().all()


def test_weights_are_those_of_a_plain_transformer() -> None:
    """Layouts are not saved: a window network and a plain one exchange weights."""
    windowed = WindowTransformer(width=8, depth=2, heads=2, grid=(9, 5))
    plain = Transformer(width=8, depth=2, heads=2)
    assert windowed.state_dict().keys() == plain.state_dict().keys()


def test_recomputed_activations_change_no_bit() -> None:
    gradients = []
    for recompute in (False, True):
        net = WindowTransformer(width=8, depth=2, heads=2, grid=(5, 3), window=(2, 2), checkpoint_activations=recompute)
        initialise(net, generator=seeded())
        net(randn(2, 15, 8)).square().sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ((16, 16), r"window \[16, 16\] is larger than grid \[14, 14\]; use 'auto'"),
        ((7,), "one positive size per axis"),
        ((7, 0), "one positive size per axis"),
    ],
)
def test_a_window_that_does_not_fit_is_refused(window: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WindowTransformer(width=8, depth=1, heads=2, grid=(14, 14), window=window)


def test_a_wrong_number_of_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="got 14 tokens; expected 15"):
        WindowTransformer(width=8, depth=1, heads=2, grid=(5, 3))(randn(1, 14, 8))


@pytest.mark.parametrize("grid", [(64, 8), (13, 5), (9,), (5, 3, 9)])
def test_the_forward_pass_never_looks_at_values(grid: tuple[int, ...]) -> None:
    with torch.device("meta"):
        net = WindowTransformer(width=8, depth=2, heads=2, grid=grid)
        tokens = 1
        for n in grid:
            tokens *= n
        x, valid = torch.empty(3, tokens, 8), torch.empty(3, tokens, dtype=torch.bool)
        assert net(x, key_valid=valid).shape == net(x).shape == x.shape


def test_layouts_built_on_the_meta_device_are_right_after_it() -> None:
    """`to_empty` leaves buffers undefined; a layout is a function of the grid and comes back whole."""
    usual = WindowTransformer(width=8, depth=2, heads=2, grid=(13, 5))
    with torch.device("meta"):
        net = WindowTransformer(width=8, depth=2, heads=2, grid=(13, 5))
    net = net.to_empty(device="cpu")
    net.load_state_dict(usual.state_dict())
    x = randn(2, 65, 8)
    assert torch.equal(net(x), usual(x))
    assert torch.equal(net.blocks[1].windows.pairs, usual.blocks[1].windows.pairs)
