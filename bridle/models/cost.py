"""What the parts of a step cost, counted without computing anything: floating-point operations and kept activations.

The networks run on tensors that have shapes and no contents, so a ViT-L is counted as fast as a tiny model. A
multiply-add counts as two operations; what is not a matrix product or attention (norms, activations) is left out, as
usual. Attention's backward counts twice its forward: that some kernels compute the forward again is their business.

Shapes: B samples of T tokens, V visible, H of the T − V hidden ones predicted. By hand, for a block of width D and MLP
ratio r on n tokens:

    forward = 2·n·(4 + 2r)·D² + 4·n²·D        backward = 2 · forward

and for a block of a cross decoder: forward = 2·H·(2 + 2r)·D² + 2·V·2·D² + 4·H·V·D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from bridle.config import Config
from bridle.models.build import build_nets
from bridle.models.losses import CodeTargets, Hidden, cosine_loss, encoder_loss, patch_loss, patch_target
from bridle.nn.masking import Mask, draw_mask, predicted_count
from bridle.nn.patch import patchify
from bridle.seeding import generator

CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Cost(NamedTuple):
    """One part of a step on some rows."""

    forward: int  # floating-point operations
    backward: int
    kept: int  # bytes that the backward pass needs and the forward pass leaves behind

    def __add__(self, other: object) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def operations(self) -> int:
        return self.forward + self.backward


class StepCosts(NamedTuple):
    """The parts of one step by name, for B rows."""

    parts: dict[str, Cost]

    @property
    def total(self) -> Cost:
        return sum(self.parts.values(), Cost(0, 0, 0))


def visible_tokens(config: Config) -> int:
    """V, the tokens the encoder sees of a sample under the run's mask."""
    mask = draw_mask(
        config.mask.kind, grid=config.geometry.build().grid, ratio=config.mask.ratio, batch=1,
        generator=generator("shape"), device="cpu",
    )  # fmt: skip
    return int(mask.visible.shape[1])


def quantizer_operations(config: Config) -> int:
    """Products of T latents with all codes: 2·T·Σ_m K_m·(width a stage sees)."""
    c = config.quantizer
    width = c.width // c.codebooks if c.residual == "independent" else c.width
    return 2 * config.geometry.build().tokens * sum(c.sizes) * width


def encoder_step(config: Config, *, rows: int = 1, later_tokenizer: bool = True, precision: str = "fp32") -> StepCosts:
    """Costs of an encoder-phase step: targets without gradient, then encoder, decoder, heads and loss with."""
    V, geometry = visible_tokens(config), config.geometry.build()
    T = geometry.tokens
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        nets, count = build_nets(config, later_tokenizer=later_tokenizer), Counter()
        x = torch.zeros(rows, *geometry.shape)
        visible = torch.zeros(rows, V, dtype=torch.int64)
        mask = Mask(visible, None, torch.zeros(rows, T, dtype=torch.bool))
        hidden = Hidden.of(mask.masked, predicted_count(T - V, config.mask.predict))
        parts: dict[str, Cost] = {}
        if nets.own_tokenizer is not None:
            with torch.no_grad():
                _, parts["tokenizer"] = count(lambda: nets.tokenizer.encode(x))
            parts["codes"] = Cost(rows * quantizer_operations(config), 0, 0)
        z, parts["encoder"] = count(lambda: nets.encoder(x, mask=mask).z, nets.encoder.parameters())
        features, parts["decoder"] = count(
            lambda: nets.decoder(z, mask=mask, only=hidden.at), nets.decoder.parameters()
        )

        def loss() -> Tensor:
            codes = torch.zeros(rows, T, config.quantizer.codebooks, dtype=torch.int64)
            wanted = CodeTargets(codes).at(hidden)
            if nets.own_tokenizer is None:
                guess = nets.heads(features)
                target = patch_target(hidden.take(patchify(x, geometry.patch)))
                return patch_loss(guess, target, hidden.counted)
            return encoder_loss(nets.heads(features), wanted, hidden.counted)

        _, parts["heads, loss"] = count(loss, nets.heads.parameters())
    return StepCosts(parts)


def tokenizer_step(config: Config, *, rows: int = 1, precision: str = "fp32") -> StepCosts:
    """Costs of a tokenizer-phase step: the teacher without gradient, tokenizer and estimator with."""
    geometry = config.geometry.build()
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        nets, count = build_nets(config, later_tokenizer=True), Counter()
        assert nets.estimator is not None
        tokenizer, estimator = nets.tokenizer, nets.estimator
        x = torch.zeros(rows, *geometry.shape)
        parts: dict[str, Cost] = {}
        z_tilde, parts["tokenizer"] = count(lambda: tokenizer.encode(x), tokenizer.parameters())
        # The straight-through value and the statistics keep another copy of the latents each.
        parts["codes"] = Cost(rows * quantizer_operations(config), 0, 2 * z_tilde.nbytes)
        with torch.no_grad():
            z, parts["teacher"] = count(lambda: nets.encoder(x).z)
        z_hat, parts["estimator"] = count(lambda: estimator(z_tilde), estimator.parameters())
        _, parts["loss"] = count(lambda: cosine_loss(z_hat, estimator.target(z)))
    return StepCosts(parts)


Costs = Callable[[str, bool, int], StepCosts]  # phase, whether it has a later tokenizer, rows


def step_costs(config: Config, precision: str) -> Costs:
    """A function that counts a step of each kind of phase once; of joint training its fullest step."""

    @cache
    def count(phase: str, later: bool, rows: int) -> StepCosts:
        if phase == "tokenizer":
            return tokenizer_step(config, rows=rows, precision=precision)
        costs = encoder_step(config, rows=rows, later_tokenizer=later, precision=precision)
        if phase == "encoder":
            return costs
        taught = count("tokenizer", later, rows)
        return StepCosts(costs.parts | {f"taught {part}": cost for part, cost in taught.parts.items()})

    return count


class Counter:
    """Counts one part after the other; storage that an earlier part has kept already is not counted again."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []  # alive as long as the counter, so that no storage is mistaken for another
        self.known: set[int] = set()

    def __call__(self, call: Callable[[], Tensor], parameters: Iterable[nn.Parameter] = ()) -> tuple[Tensor, Cost]:
        """The result of a part, cut off from the graph before it, and what it cost."""
        self.known |= {p.untyped_storage()._cdata for p in parameters}
        kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.kept.append(tensor)
                kept += storage.nbytes()
            return tensor

        with _operations() as forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = call()
        backward = 0
        if out.requires_grad:
            with _operations() as second:
                out.backward(torch.ones_like(out))
            backward = second.get_total_flops()
        # Every later part sends a gradient here, as in a real step.
        return out.detach().requires_grad_(out.requires_grad), Cost(forward.get_total_flops(), backward, kept)


def _operations() -> FlopCounterMode:
    aten = torch.ops.aten
    mapping = {
        getattr(aten, CPU_ATTENTION): _attention_forward,
        getattr(aten, f"{CPU_ATTENTION}_backward"): _attention_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=mapping)


def _attention_forward(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    return 2 * int(sdpa_flop_count(query, key, value))
