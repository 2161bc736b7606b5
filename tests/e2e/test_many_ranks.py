"""Four or eight gloo processes against one: the same codebooks and weights, however the optimizer is shared."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bridle import api, distributed

ROOT = Path(__file__).parents[2]
WORLDS = [int(world) for world in os.environ.get("TEST_RANKS", "").split(",") if world]
pytestmark = pytest.mark.skipif(
    not WORLDS, reason="more processes than cores take a minute and a half: `make soak` runs them, or TEST_RANKS=4"
)
SMALL = [
    *("encoder.width=32", "encoder.depth=2", "encoder.heads=2", "decoder.width=32", "decoder.heads=2"),
    *("estimator.width=32", "estimator.heads=2", "quantizer.codes=16", "quantizer.width=16", "data.workers=0"),
    *("encoder_phase.batch=16", "tokenizer_phase.batch=16", "encoder_phase.micro_batch=1", "quantizer.reset_every=2"),
    *("runtime.log_every=1", "runtime.compare_every=2", "probe.enabled=false", "max_steps=4"),
    *("schedule.mode=joint", "schedule.joint_every=2", "schedule.iterations=1", "runtime.checkpoint_every=2"),
    "runtime.keep_finished=true",
]
SHARED = {
    "none": [],
    "optimizer": ["runtime.shard=optimizer"],
    "groups": ["runtime.shard=full", "runtime.shard_groups=2"],
}


def train(out: Path, settings: list[str]) -> None:
    api.pretrain("digits-tiny", out=out, overrides=[*SMALL, *settings])


def work(out: Path) -> None:
    """What every process does."""
    torch.set_num_threads(1)
    with distributed.process_group(device="cpu", timeout_minutes=3):
        for name, settings in SHARED.items():
            train(out / name, settings)
        again = out / "groups"
        if distributed.rank() == 0:
            shutil.rmtree(end_of(again))
        distributed.barrier()
        train(again, SHARED["groups"])  # goes on inside the phase


def end_of(run: Path) -> Path:
    """The last checkpoint."""
    (end,) = (run / "checkpoints").glob("p*-end")
    return end


def final(run: Path) -> dict[str, Tensor]:
    """The weights and codebooks at a run's end."""
    return load_file(end_of(run) / "model.safetensors")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    run = tmp_path_factory.mktemp("one") / "run"
    train(run, [])
    return final(run)


@pytest.fixture(scope="module", params=WORLDS)
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs by several processes, more than there are cores."""
    out: Path = tmp_path_factory.mktemp(f"ranks{request.param}")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param), __file__, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("name", SHARED)
def test_many_processes_train_what_one_trains(one: dict[str, Tensor], many: Path, name: str) -> None:
    found = final(many / name)
    assert {key: value.shape for key, value in one.items()} == {key: value.shape for key, value in found.items()}
    for key, value in one.items():
        # Softmax takes no notice of the biases of keys, whose gradients are rounding errors.
        if value.is_floating_point() and ".qkv.bias" not in key:
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6 if "quantizer" in key else 1e-3)


def test_a_run_in_groups_goes_on_inside_a_phase(many: Path) -> None:
    lines = (many / "groups" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if row["resumed_from"] == 2] == [3, 4]
    assert {row["world_size"] for row in rows} <= set(WORLDS)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
