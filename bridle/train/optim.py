"""AdamW with sensible groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import cos, pi

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from bridle.config.training_schema import PhaseConfig
from bridle.errors import quoted

KEPT = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


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


def same_rate(name: str) -> float:
    """Every parameter learns at the phase's rate."""
    return 1.0


def build_optimizer(
    modules: Mapping[str, nn.Module], config: PhaseConfig, rate_scale: Callable[[str], float] = same_rate
) -> torch.optim.AdamW:
    """AdamW in its fused form where the device has one; `rate_scale` of a parameter's name multiplies its rate."""
    parameters = named_parameters(modules)
    groups = [
        {
            "params": [
                p
                for n, p in parameters.items()
                if (rate_scale(n), decays(n, p), isinstance(p, DTensor)) == (scale, decaying, sharded)
            ],
            "weight_decay": config.weight_decay if decaying else 0.0,
            "rate_scale": scale,
        }
        for sharded in sorted({isinstance(p, DTensor) for p in parameters.values()})  # torch cannot mix them in a group
        for scale in sorted({rate_scale(name) for name in parameters})
        for decaying in (True, False)
    ]
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters.values())
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group its share of the phase's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate_scale"]


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, final: float) -> float:
    """Linear warm-up over the first `warmup` steps, then half a cosine towards `final`, reached after the last step.

    With `final` 0 the last step would otherwise compute a gradient and throw it away.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
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
    """Put saved state back; moments go to their parameter's device, step counters where AdamW keeps them.

    ValueError if it is not of these parameters.
    """
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("|")
        parameter = names.get(name)
        others = {f"{name}|{other}" for other in KEPT}
        if parameter is None or key not in KEPT or not others <= tensors.keys():
            raise ValueError(f"the optimizer's {quoted(full)} is not of this run's networks, or not all of it is there")
        if tensor.shape != (() if key == "step" else parameter.shape):
            raise ValueError(f"the optimizer's {quoted(full)} has the shape {list(tensor.shape)}")
        fused = optimizer.param_groups[0]["fused"]
        device = parameter.device if key != "step" or fused else torch.device("cpu")
        value = tensor.to(device=device).clone()
        if isinstance(parameter, DTensor) and key != "step":
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        optimizer.state[parameter][key] = value
