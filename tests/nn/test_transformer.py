"""Transformer blocks: padding, drop-path, starting values, recomputation, devices and precision."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from bridle.errors import ConfigError, UsageError
from bridle.nn.transformer import (
    Attention,
    Block,
    Transformer,
    drop_path_scales,
    initialise,
    keys_or_all,
    scale_samples,
)

torch.set_num_threads(1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small(depth: int = 3, **options: bool) -> Transformer:
    net = Transformer(width=8, depth=depth, heads=2, **options)
    initialise(net, generator=seeded())
    return net


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


@pytest.mark.parametrize(("width", "heads"), [(8, 3), (8, 0), (8, 16)])
def test_heads_that_do_not_divide_the_width_are_refused(width: int, heads: int) -> None:
    with pytest.raises(ConfigError, match=f"heads {heads} does not divide width {width}"):
        Attention(width=width, heads=heads)


def test_padding_has_no_influence_on_valid_tokens() -> None:
    net = small()
    valid = torch.tensor([[True, True, True, False, False], [False, True, False, True, True]])
    x = randn(2, 5, 8)
    other = torch.where(valid[..., None], x, 100.0 * randn(2, 5, 8, seed=2))
    assert torch.equal(net(x, key_valid=valid)[valid], net(other, key_valid=valid)[valid])


def test_valid_tokens_beside_padding_come_out_as_if_alone() -> None:
    net = small()
    x = randn(1, 5, 8)
    valid = torch.tensor([[True, False, True, True, False]])
    torch.testing.assert_close(net(x, key_valid=valid)[valid][None], net(x[:, [0, 2, 3]]), atol=1e-5, rtol=1e-5)


def test_valid_tokens_do_influence_each_other() -> None:
    net = small()
    x = randn(1, 4, 8)
    other = x.clone()
    other[0, 3, 0] += 1.0  # not on every feature: the norm would take it away
    assert not torch.allclose(net(x)[0, 0], net(other)[0, 0], atol=1e-4)


def test_a_sample_of_nothing_but_padding_stays_finite() -> None:
    net = small()
    valid = torch.tensor([[True, False], [False, False]])
    x = randn(2, 2, 8).requires_grad_()
    out = net(x, key_valid=valid)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None and x.grad.isfinite().all()


def test_a_sample_without_valid_keys_is_given_all_of_them() -> None:
    """Some fused kernels return NaN for an empty row, so none is ever handed to them."""
    valid = torch.tensor([[True, False], [False, False]])
    assert keys_or_all(valid).tolist() == [[True, False], [True, True]]


def test_drop_path_scales_keep_the_mean_and_follow_the_linear_rule() -> None:
    scales = drop_path_scales(depth=3, rate=0.5, batch=20_000, generator=seeded(), device="cpu")
    assert scales is not None and scales.shape == (3, 2, 20_000)
    assert scales[0].unique().tolist() == [1.0]
    torch.testing.assert_close(scales[1].unique(), torch.tensor([0.0, 1 / 0.75]))
    torch.testing.assert_close(scales[2].unique(), torch.tensor([0.0, 2.0]))
    # Standard error of the mean is at most sqrt(p / (1 - p) / 20000) = .0071; of the share .0035.
    assert (scales.mean(dim=2) - 1.0).abs().max() < 0.03
    dropped = (scales == 0).float().mean(dim=2)
    assert (dropped - torch.tensor([0.0, 0.25, 0.5])[:, None]).abs().max() < 0.015


def test_the_two_branches_of_a_block_are_dropped_independently() -> None:
    scales = drop_path_scales(depth=2, rate=0.5, batch=20_000, generator=seeded(), device="cpu")
    assert scales is not None
    both = ((scales[1, 0] == 0) & (scales[1, 1] == 0)).float().mean()
    assert abs(both - 0.25) < 0.015


def test_the_same_seed_drops_the_same_branches() -> None:
    draws = [drop_path_scales(depth=4, rate=0.3, batch=9, generator=seeded(s), device="cpu") for s in (5, 5, 6)]
    assert draws[0] is not None and draws[1] is not None and draws[2] is not None
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_rate_zero_draws_nothing() -> None:
    generator = seeded()
    assert drop_path_scales(depth=4, rate=0.0, batch=9, generator=generator, device="cpu") is None
    assert torch.equal(generator.get_state(), seeded().get_state())


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_drop_path_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="drop-path rate"):
        drop_path_scales(depth=4, rate=rate, batch=9, generator=seeded(), device="cpu")


def test_zero_scales_leave_a_sample_as_it_was() -> None:
    net = small()
    x = randn(2, 4, 8)
    drop = torch.ones(3, 2, 2)
    drop[:, :, 0] = 0.0
    out = net(x, drop=drop)
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[1], net(x)[1])


def test_the_first_scale_belongs_to_attention_and_the_second_to_the_mlp() -> None:
    block = Block(width=8, heads=2)
    initialise(block, generator=seeded())
    x = randn(1, 4, 8)
    only_mlp = block(x, drop=torch.tensor([[0.0], [2.0]]))
    torch.testing.assert_close(only_mlp, x + 2.0 * block.mlp(block.norm2(x)))
    only_attention = block(x, drop=torch.tensor([[2.0], [0.0]]))
    torch.testing.assert_close(only_attention, x + 2.0 * block.attn(block.norm1(x)))


def test_each_block_has_its_own_scales() -> None:
    net = small()
    x = randn(1, 4, 8)
    drop = torch.ones(3, 2, 1)
    drop[1] = 0.0
    assert torch.equal(net(x, drop=drop), net.blocks[2](net.blocks[0](x)))


def test_scaling_keeps_the_precision_of_the_tokens() -> None:
    assert scale_samples(torch.ones(1, 2, 3, dtype=torch.bfloat16), torch.ones(1)).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(2, 2, 5), (4, 2, 5), (3, 2, 4), (3, 5)])
def test_scales_of_the_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"expected \(3, 2, 5\)"):
        small()(randn(5, 4, 8), drop=torch.ones(shape))


def test_recomputed_activations_change_no_bit() -> None:
    plain, recomputed = small(), small(checkpoint_activations=True)
    valid = torch.tensor([[True, True, False, True], [True, True, True, True]])
    drop = drop_path_scales(depth=3, rate=0.5, batch=2, generator=seeded(), device="cpu")
    gradients = []
    for net in (plain, recomputed):
        x = randn(2, 4, 8).requires_grad_()
        out = net(x, key_valid=valid, drop=drop)
        out.square().sum().backward()
        gradients.append([out.detach(), x.grad, *(p.grad for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_recomputation_runs_each_block_twice() -> None:
    net = small(checkpoint_activations=True)
    calls: list[int] = []
    net.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
    net(randn(2, 4, 8).requires_grad_()).sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        net(randn(2, 4, 8))
    assert len(calls) == 3


def test_depth_is_the_number_of_blocks() -> None:
    net = small(depth=2)
    assert (net.depth, len(net.blocks)) == (2, 2)


class Odd(nn.Module):
    """Layers of every kind `initialise` meets."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 200)
        self.bare = nn.Linear(100, 100, bias=False)
        self.norm = nn.LayerNorm(8)
        self.plain = nn.LayerNorm(8, elementwise_affine=False)
        self.unshifted = nn.LayerNorm(8, bias=False)
        self.token = nn.Parameter(torch.full((8,), 3.0))


def test_initialise_draws_xavier_weights_and_sets_the_rest() -> None:
    net = Odd()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(7.0)
    initialise(net, generator=seeded())
    bound = (6.0 / 264) ** 0.5
    assert net.wide.weight.abs().max() <= bound
    assert net.wide.weight.abs().max() > 0.99 * bound
    assert abs(net.wide.weight.std() - bound / 3**0.5) < 0.02 * bound
    assert abs(net.wide.weight.mean()) < 0.03 * bound
    assert abs(net.bare.weight.std() - (2.0 / 200) ** 0.5) < 0.002
    assert net.wide.bias.eq(0).all() and net.norm.bias.eq(0).all()
    assert net.norm.weight.eq(1).all() and net.unshifted.weight.eq(1).all()
    assert net.token.eq(7).all()  # a bare parameter belongs to its owner


def test_the_same_seed_gives_the_same_start_and_another_seed_another() -> None:
    nets = [small(), small(), small()]
    initialise(nets[2], generator=seeded(1))
    assert torch.equal(nets[0].blocks[1].mlp.fc1.weight, nets[1].blocks[1].mlp.fc1.weight)
    assert not torch.equal(nets[0].blocks[1].mlp.fc1.weight, nets[2].blocks[1].mlp.fc1.weight)
    assert not torch.equal(nets[0].blocks[0].mlp.fc1.weight, nets[0].blocks[1].mlp.fc1.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_precision_does_not_change_the_draw(dtype: torch.dtype) -> None:
    full, other = small(), small().to(dtype)
    initialise(other, generator=seeded())
    assert torch.equal(full.blocks[2].attn.qkv.weight.to(dtype), other.blocks[2].attn.qkv.weight)


def test_initialise_leaves_the_global_generator_alone() -> None:
    net = small()
    before = torch.get_rng_state()
    initialise(net, generator=seeded())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_forward_pass_never_looks_at_values() -> None:
    """The meta device has no values, so a pass that works there cannot wait for the device."""
    with torch.device("meta"):
        net = Transformer(width=8, depth=2, heads=2, checkpoint_activations=True)
        initialise(net, generator=torch.Generator("cpu"))
        drop = drop_path_scales(depth=2, rate=0.5, batch=3, generator=torch.Generator("cpu"), device="meta")
        valid = torch.empty(3, 5, dtype=torch.bool)
        out = net(torch.empty(3, 5, 8), key_valid=valid, drop=drop)
    assert out.shape == (3, 5, 8)
    assert out.device.type == "meta"


AUTOCAST = """
import torch
torch.set_num_threads(1)
from bridle.geometry import Geometry
from bridle.nn.masking import draw_mask, gather_tokens, scatter_tokens
from bridle.nn.patch import PatchEmbed
from bridle.nn.position import sincos_position
from bridle.nn.transformer import Transformer, drop_path_scales, initialise
from bridle.nn.window import WindowTransformer
g = torch.Generator().manual_seed(0)
embed = PatchEmbed(geometry=Geometry(1, (10, 6), (2, 2)), width=16)
sizes = dict(width=16, depth=2, heads=2)
nets = Transformer(**sizes), WindowTransformer(**sizes, grid=(5, 3), window=(2, 2))
for net in (embed, *nets):
    initialise(net, generator=g)
x = torch.randn(3, 1, 10, 6, generator=g)
valid = torch.ones(3, 15, dtype=torch.bool)
valid[1, 9:] = False
drop = drop_path_scales(depth=2, rate=0.5, batch=3, generator=g, device="cpu")
mask = draw_mask("random", grid=(5, 3), ratio=0.5, batch=3, generator=g, device="cpu", valid=valid)
token = torch.nn.Parameter(torch.zeros(16))

def run():
    z = embed(x) + sincos_position((5, 3), 16)
    z = nets[0](gather_tokens(z, mask.visible), key_valid=mask.visible_valid, drop=drop)
    z = scatter_tokens(embed.proj(torch.zeros(3, mask.visible.shape[1], 4)) + z.to(embed.proj.weight.dtype),
                       mask.visible, token, tokens=15, slot_valid=mask.visible_valid)
    low = scatter_tokens(embed.proj(torch.ones(3, mask.visible.shape[1], 4)), mask.visible, token, tokens=15)
    return nets[1](z + low, key_valid=valid, drop=drop)

exact = run()
with torch.autocast("cpu", dtype=torch.bfloat16):
    rough = run()
    assert nets[0].blocks[0].mlp.fc1(x.new_zeros(1, 16)).dtype == torch.bfloat16
rough.float().square().mean().backward()
assert all(p.grad is not None and p.grad.isfinite().all() for net in nets for p in net.parameters())
assert token.grad.isfinite().all() and token.grad.abs().sum() > 0
error = ((rough.float() - exact).norm() / exact.norm()).item()
assert 0 < error < 0.05, error
print("fine")
"""


def test_everything_runs_under_autocast_close_to_full_precision() -> None:
    # In a process of its own: some virtual machines hide half of AMX and die on bf16 products unless told otherwise.
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    done = subprocess.run(
        [sys.executable, "-c", AUTOCAST], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr
