"""State one can reason about: forward never writes, checkpoints restore everything, casts do not touch the codes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bridle.errors import UsageError
from bridle.quantize import ResidualQuantizer

torch.set_num_threads(1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latents(rows: int = 200, *, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, 12, generator=seeded(seed)) + 1


def quantizer(**options: object) -> ResidualQuantizer:
    return ResidualQuantizer(**{"codebooks": 2, "codes": 8, "width": 12, **options})  # type: ignore[arg-type]


def started(**options: object) -> ResidualQuantizer:
    rq = quantizer(**options)
    rq.start_codebooks(latents(), generator=seeded())
    rq.eval()
    return rq


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("update", ["ema", "gradient"])
def test_reading_changes_nothing(training: bool, update: str) -> None:
    rq = started(update=update).train(training)
    before = snapshot(rq)
    for seed in range(20):
        x = latents(seed=seed).requires_grad_()
        found = rq(x)
        (found.commitment + found.straight_through.sum()).backward()
        found.statistics()
        rq.decode(rq.assign(x))
        with torch.no_grad():
            rq(x)
    assert same(snapshot(rq), before)


def test_the_buffers_are_those_documented() -> None:
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in quantizer().state_dict().items()}
    assert shapes == {
        "started": ((), torch.bool),
        "stages.0.code": ((8, 12), torch.float32),
        "stages.0.usage": ((8,), torch.float64),
        "stages.0.code_sum": ((8, 12), torch.float64),
        "stages.1.code": ((8, 12), torch.float32),
        "stages.1.usage": ((8,), torch.float64),
        "stages.1.code_sum": ((8, 12), torch.float64),
    }


@pytest.mark.parametrize("call", ["forward", "assign", "decode"])
def test_an_unstarted_quantizer_says_so(call: str) -> None:
    argument = torch.zeros(3, 2, dtype=torch.int64) if call == "decode" else latents(3)
    with pytest.raises(UsageError, match=r"have not been started; call start_codebooks"):
        getattr(quantizer(), call)(argument)


def test_a_loaded_quantizer_goes_on_exactly_where_it_was() -> None:
    first, second = started(), quantizer()
    first.ema_update(first(latents(seed=1)))
    second.load_state_dict(first.state_dict())
    assert second.is_started
    for rq in (first, second):
        rq.ema_update(rq(latents(seed=2)))
    assert same(snapshot(first), snapshot(second))


def test_loading_an_unstarted_state_makes_a_quantizer_unstarted() -> None:
    rq = started()
    rq.load_state_dict(quantizer().state_dict())
    with pytest.raises(UsageError, match="have not been started"):
        rq(latents(3))


def test_a_flag_written_by_others_is_noticed() -> None:
    source, copied = started(), quantizer()
    for mine, theirs in zip(copied.buffers(), source.buffers(), strict=True):
        mine.copy_(theirs)  # as a broadcast of buffers does
    assert torch.equal(copied(latents()).codes, source(latents()).codes)


def test_a_copy_is_independent() -> None:
    rq = started()
    before, twin = snapshot(rq), copy.deepcopy(rq)
    twin.ema_update(twin(latents(seed=1)))
    assert same(snapshot(rq), before)
    assert not same(snapshot(twin), before)


@pytest.mark.parametrize("update", ["ema", "gradient"])
def test_the_state_survives_safetensors(update: str, tmp_path: Path) -> None:
    rq, other = started(update=update), quantizer(update=update)
    save_file(rq.state_dict(), tmp_path / "rq.safetensors")
    other.load_state_dict(load_file(tmp_path / "rq.safetensors"))
    assert same(snapshot(other), snapshot(rq))
    assert torch.equal(other(latents()).codes, rq(latents()).codes)


@pytest.mark.parametrize("update", ["ema", "gradient"])
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casting_a_parent_leaves_the_codebooks_alone(cast: str, update: str) -> None:
    rq = started(update=update)
    before = snapshot(rq)
    parent = nn.ModuleDict({"linear": nn.Linear(12, 12), "rq": rq})
    getattr(parent, cast)()
    assert parent["linear"].weight.dtype != torch.float32
    assert same(snapshot(rq), before)


def test_moving_to_a_device_and_dtype_keeps_the_dtype_only() -> None:
    moved = started().to("meta", torch.float16)
    assert all(buffer.is_meta for buffer in moved.buffers())
    assert moved.books[0].code.dtype == torch.float32
    assert moved.books[0].usage.dtype == torch.float64


def test_the_default_dtype_does_not_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        rq = started()
        assert rq.books[0].code.dtype == torch.float32
        assert rq(latents().float()).q.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("assign", [True, False])
def test_a_quantizer_built_on_the_meta_device_can_be_loaded(assign: bool) -> None:
    rq = started()
    with torch.device("meta"):
        empty = quantizer()
    assert not empty.is_started
    if not assign:
        empty.to_empty(device="cpu")
    empty.load_state_dict(rq.state_dict(), assign=assign)
    assert torch.equal(empty(latents()).codes, rq(latents()).codes)
    empty.ema_update(empty(latents()))


def test_the_description_names_the_choices() -> None:
    assert "codes=(8, 8), width=12, residual='once', start='kmeans', update='ema'" in repr(quantizer())


def test_a_checkpointed_step_recomputes_the_same_codes() -> None:
    rq, x = started(), latents(seed=4).requires_grad_()

    def loss(z: Tensor) -> Tensor:
        found = rq(z)
        return found.commitment + found.straight_through.square().sum()

    plain = torch.autograd.grad(loss(x), x)[0]
    again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False), x)[0]
    assert torch.equal(plain, again)


def test_assign_can_be_exported_with_any_number_of_rows() -> None:
    rq = started()

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rq = rq

        def forward(self, x: Tensor) -> Tensor:
            return self.rq.assign(x)

    rows = torch.export.Dim("rows", min=2, max=10_000)
    program = torch.export.export(Codes(), (latents(30),), dynamic_shapes={"x": {0: rows}})
    x = latents(1234, seed=9)
    assert torch.equal(program.module()(x), rq.assign(x))
