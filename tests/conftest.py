"""Shared by all tests: one torch thread, and small configs that train in a second."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle.config import Config, load_config

torch.set_num_threads(1)

SMALL = (
    "encoder.width=16",
    "encoder.depth=2",
    "encoder.heads=2",
    "decoder.width=16",
    "decoder.heads=2",
    "estimator.width=16",
    "estimator.heads=2",
    "estimator.depth=1",
    "quantizer.codes=16",
    "quantizer.width=8",
    "encoder_phase.batch=8",
    "tokenizer_phase.batch=8",
    "encoder_phase.warmup_steps=2",
    "tokenizer_phase.warmup_steps=2",
    "runtime.log_every=1",
    "runtime.threads=1",
    "probe.items=60",
    "probe.layer=null",
    "probe.deviation=false",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: what two workers share at the end is then short."""
    items.sort(key=lambda item: "e2e" not in item.path.parts)


@pytest.fixture(scope="session")
def benchmark_script() -> Callable[[str], Any]:
    """benchmark_script("name"): benchmarks/name.py as a module."""

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"benchmarks/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(params=["fork", "spawn"])
def start_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Data workers start this way during the test, which runs once for each."""
    monkeypatch.setenv("BRIDLE_START_METHOD", request.param)
    return str(request.param)


@pytest.fixture
def small() -> Callable[..., Config]:
    """small("key=value", …, recipe=…): a config of the embedded digits that trains in about a second."""

    def build(*overrides: str, recipe: str = "digits-tiny", steps: int = 4) -> Config:
        grid = ["geometry.patch=[2, 2]"] if recipe == "digits-tiny" else []  # 8 x 8 = 64 tokens
        return load_config(recipe, [*SMALL, *grid, f"max_steps={steps}", *overrides])

    return build


@pytest.fixture
def state_of() -> Callable[[Any], dict[str, torch.Tensor]]:
    """A copy of every tensor of some modules, by name."""

    def copy(modules: Any) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{key}": value.detach().clone()
            for name, module in modules.items()
            for key, value in module.state_dict().items()
        }

    return copy
