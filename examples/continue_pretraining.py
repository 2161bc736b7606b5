"""Continue pretraining on your own data from a model that exists.

    python examples/continue_pretraining.py

The model is saved as a folder; its encoder is where the new run starts (`encoder.weights`). Your data is any torch
Dataset; here the digits turned by a quarter, which the model has never seen. Both runs take the same 40 steps.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import bridle
from bridle.data.embedded.sets import digits


def main() -> tuple[float, float]:
    """Probe accuracy of a run that continues, and of one that starts from nothing."""
    splits = digits()
    train, test = (
        TensorDataset(source.x.rot90(1, (2, 3)), torch.tensor(source.labels)) for source in (splits.train, splits.test)
    )
    with tempfile.TemporaryDirectory() as folder:
        model = bridle.load("digits-tiny")
        model.save_pretrained(Path(folder) / "start")
        changes = {
            "probe.items": 300,
            "schedule.iterations": 1,
            "encoder_phase.steps": 40,
            "encoder_phase.warmup_steps": 5,
            "runtime.log_every": 40,
        }
        accuracy = []
        for name, more in (
            ("continued", {"encoder.weights": Path(folder) / "start" / "model.safetensors"}),
            ("from nothing", {}),
        ):
            run = bridle.pretrain(
                "digits-tiny",
                dataset=train,
                test_dataset=test,
                out=Path(folder) / name.replace(" ", "-"),
                overrides={**changes, **more},
            )
            accuracy.append(float(run.results.evaluations[-1].probe.accuracy))
            print(f"{name}: linear probe {100 * accuracy[-1]:.1f} %")
    return accuracy[0], accuracy[1]


if __name__ == "__main__":
    main()
