"""AdamW with sensible groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi

import torch
from torch import Tensor, nn

from bridle.config.schema import PhaseConfig


def named_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Trainable parameters of several networks by dotted name."""
    return {
        f"{name}.{key}": parameter
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def decays(name: str, parameter: Tensor) -> bool:
    """Matrices decay; norms, biases, single tokens and code vectors do not."""
    return parameter.dim() > 1 and ".code" not in name


def build_optimizer(modules: Mapping[str, nn.Module], config: PhaseConfig) -> torch.optim.AdamW:
    """AdamW in its fused form where the device has one."""
    parameters = named_parameters(modules)
    groups = [
        {"params": [p for n, p in parameters.items() if decays(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in parameters.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters.values())
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, final: float) -> float:
    """Linear warm-up over the first `warmup` steps, then half a cosine down to `final` at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return final + (peak - final) * 0.5 * (1 + cos(pi * min(1.0, progress)))


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state by parameter name, flat, for safetensors."""
    return {
        f"{name}|{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, parameter in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put saved state back; moments go to their parameter's device, step counters where AdamW keeps them."""
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("|")
        parameter = names[name]
        fused = optimizer.param_groups[0]["fused"]
        device = parameter.device if key != "step" or fused else torch.device("cpu")
        optimizer.state[parameter][key] = tensor.to(device=device).clone()
