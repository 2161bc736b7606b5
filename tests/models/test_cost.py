"""Operations and activations that are counted without computing, against formulas and against real tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bridle.config import Config
from bridle.models.build import build_nets
from bridle.models.cost import Cost, encoder_step, quantizer_operations, tokenizer_step, visible_tokens
from bridle.models.losses import Hidden
from bridle.nn.masking import draw_mask

Small = Callable[..., Config]


def blocks(*, tokens: int, width: int, depth: int, attended: int | None = None, unasked: int = 0) -> int:
    """Forward operations of ViT blocks: qkv, projection and MLP on each token, attention over `attended` tokens.

    Of so many tokens nobody asks for the last block's MLP.
    """
    linear = 2 * tokens * (3 + 1 + 4 + 4) * width * width
    attention = 2 * 2 * tokens * (attended or tokens) * width
    return depth * (linear + attention) - 2 * unasked * (4 + 4) * width * width


def test_operations_of_an_encoder_step_follow_the_formula(small: Small) -> None:
    config = small("decoder.kind=plain", "mask.ratio=0.75")  # T = 64, V = 16, F = 4, D = Dd = 16
    parts = encoder_step(config, rows=3).parts
    T, V, F, D = 64, 16, 4, 16
    embed, trunk = 2 * V * F * D, blocks(tokens=V, width=D, depth=2)
    assert parts["encoder"].forward == 3 * (embed + trunk)
    # The backward pass costs twice the forward, but nothing asks for the gradient of the input.
    assert parts["encoder"].backward == 3 * (embed + 2 * trunk)
    decoder = 2 * V * D * D + blocks(tokens=T, width=D, depth=1, unasked=V)
    assert parts["decoder"].forward == 3 * decoder
    assert parts["decoder"].backward == 2 * 3 * decoder
    heads = 2 * (T - V) * D * 4 * 16
    assert parts["heads, loss"][:2] == (3 * heads, 2 * 3 * heads)
    tokenizer = 2 * T * F * D + blocks(tokens=T, width=D, depth=2) + 2 * T * D * 8
    assert parts["tokenizer"] == Cost(3 * tokenizer, 0, 0)
    assert parts["codes"].forward == 3 * quantizer_operations(config) == 3 * 2 * T * 4 * 16 * 8


def test_operations_of_a_cross_decoder_follow_the_formula(small: Small) -> None:
    config = small("decoder.kind=cross", "decoder.depth=2", "mask.ratio=0.75", "mask.predict=0.25")
    parts = encoder_step(config, rows=3).parts
    V, H, D = 16, 12, 16  # of 48 hidden tokens a quarter is predicted
    block = 2 * H * (1 + 1 + 4 + 4) * D * D + 2 * V * 2 * D * D + 2 * 2 * H * V * D
    decoder = 2 * V * D * D + 2 * block
    assert parts["decoder"].forward == 3 * decoder
    assert parts["decoder"].backward == 2 * 3 * decoder
    assert parts["heads, loss"].forward == 3 * 2 * H * D * 4 * 16


def test_fewer_predictions_cost_existing_decoders_less(small: Small) -> None:
    every, some = (encoder_step(small("decoder.kind=plain", f"mask.predict={share}")).parts for share in (1.0, 0.5))
    spared = 16 * 2 * (4 + 4) * 16 * 16  # the last MLP at 16 of 32 hidden tokens
    assert every["decoder"].forward - some["decoder"].forward == spared
    assert some["heads, loss"].forward * 2 == every["heads, loss"].forward
    assert some["encoder"] == every["encoder"]


def test_operations_of_a_tokenizer_step_follow_the_formula(small: Small) -> None:
    parts = tokenizer_step(small()).parts
    T, F, D, Dq = 64, 4, 16, 8
    embed, trunk = 2 * T * F * D, blocks(tokens=T, width=D, depth=2)
    assert parts["teacher"] == Cost(embed + trunk, 0, 0)
    assert parts["tokenizer"].forward == embed + trunk + 2 * T * D * Dq
    assert parts["estimator"].forward == 2 * T * Dq * D + blocks(tokens=T, width=D, depth=1) + 2 * T * D * D


def test_windows_attend_to_a_window_only(small: Small) -> None:
    parts = encoder_step(small("decoder.window=[4, 4]")).parts
    V = visible_tokens(small())
    decoder = blocks(tokens=64, width=16, depth=1, attended=16, unasked=V)
    assert parts["decoder"].forward == 2 * V * 16 * 16 + decoder


def test_counting_agrees_with_really_running_it(small: Small) -> None:
    config = small("decoder.kind=plain")
    counted = encoder_step(config, rows=2)
    nets = build_nets(config, iteration=2, later_tokenizer=True)
    mask = draw_mask("random", grid=(8, 8), ratio=0.5, batch=2, generator=torch.Generator(), device="cpu")
    weights = {p.data_ptr() for module in nets.modules().values() for p in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(2, 1, 16, 16)
    with FlopCounterMode(display=False) as flops, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        z = nets.encoder(x, mask=mask).z
        features = nets.decoder(z, mask=mask, only=Hidden.of(mask.masked, 32).at)
    bare = flops.get_total_flops()  # torch does not count attention on CPUs
    attention = 4 * 2 * 16 * (2 * 32 * 32 + 64 * 64)
    assert features.shape == (2, 32, 16)
    assert counted.parts["encoder"].forward + counted.parts["decoder"].forward == bare + attention
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert counted.parts["encoder"].kept + counted.parts["decoder"].kept == pytest.approx(real, rel=0.02)


def test_recomputing_keeps_less_and_computes_more(small: Small) -> None:
    plain = encoder_step(small())
    recomputed = encoder_step(small("runtime.checkpoint_activations=true"))
    assert recomputed.parts["encoder"].kept < plain.parts["encoder"].kept / 3
    assert recomputed.parts["encoder"].backward > plain.parts["encoder"].backward


def test_patches_need_no_tokenizer(small: Small) -> None:
    parts = encoder_step(small("loss.target=patches")).parts
    assert list(parts) == ["encoder", "decoder", "heads, loss"]
    assert parts["heads, loss"].forward == 2 * 32 * 16 * 4
