"""What test_ranks.py runs under torchrun: every scenario once, in one start of two processes.

ranks_worker.py OUT                        all scenarios
ranks_worker.py FAULT COMMAND...           a bridle command whose rank 1 meets a fault of bridle/failpoints.py
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SMALL = [
    *("encoder.width=32", "encoder.depth=2", "encoder.heads=2", "decoder.width=32", "decoder.heads=2"),
    *("estimator.width=32", "estimator.heads=2", "quantizer.codes=16", "quantizer.width=16", "data.workers=0"),
    *("encoder_phase.batch=16", "tokenizer_phase.batch=16", "encoder_phase.micro_batch=4", "quantizer.reset_every=5"),
    *("runtime.log_every=1", "runtime.compare_every=5", "probe.items=200", "max_steps=20"),
    *("encoder.whiten=0.1", "encoder.stem=12", "tokenizer.whiten=0.5"),
]
SHORT = [*SMALL, "probe.enabled=false", "schedule.iterations=1", "max_steps=6"]
JOINT = [*SHORT, "schedule.mode=joint", "schedule.joint_every=3", "decoder.kind=cross", "mask.predict=0.5"]
TURNS = [*SMALL, "probe.enabled=false", "max_steps=6", "quantizer.update=gradient"]  # code vectors as parameters
NO_PROBE = [*SMALL, "probe.enabled=false"]
FINETUNE = ["finetune.steps=4", "finetune.warmup_steps=0", "finetune.batch=16", "finetune.items=60"]
STOP_AT = ("iter1-encoder", 7)


def nothing(run: Any, phase: Any, progress: Any) -> None:
    """Leave a step alone."""


class Recorder:
    """Notes which samples every step showed, and keeps the networks as this rank holds them at the end."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Any] = []

    @contextmanager
    def listening(self, meddle: Callable[[Any, Any, Any], None] = nothing) -> Iterator[None]:
        """`meddle(run, phase, progress)` is called before every step."""
        from safetensors.torch import save_file

        from bridle import api
        from bridle.train import engine

        step, interleave = engine.take_step, api.interleave

        @functools.wraps(step)
        def noted(run: Any, phase: Any, replicas: Any, progress: Any, *rest: Any) -> Any:
            meddle(run, phase, progress)
            batches = next(item for item in rest if isinstance(item, list))
            self.rows.append([phase.key, progress.step, [i for batch in batches for i in batch.index.tolist()]])
            return step(run, phase, replicas, progress, *rest)

        def ended(run: Any, *rest: Any) -> None:
            interleave(run, *rest)
            tensors = {key: value.contiguous() for key, value in run.nets.state().items()}
            save_file(tensors, self.folder / f"rank{self.rank}.safetensors")

        engine.take_step, api.interleave = noted, ended
        try:
            yield
        finally:
            engine.take_step, api.interleave = step, interleave
            (self.folder / f"samples{self.rank}.json").write_text(json.dumps(self.rows))


def stop_once(run: Any, phase: Any, progress: Any) -> None:
    """As if a signal had come in the middle of the first phase."""
    if (phase.key, progress.step) == STOP_AT and run.resumed_from is None:
        run.stop.received = signal.SIGTERM


def stop_tokenizer_once(run: Any, phase: Any, progress: Any) -> None:
    if (phase.key, progress.step) == ("iter2-tokenizer", 3):
        run.stop.received = signal.SIGTERM


def spoilt(run: Any, phase: Any, progress: Any) -> None:
    """One number of a codebook changes on this rank alone."""
    if progress.step == 2:
        run.nets.tokenizer.quantizer.books[1].code.data[3, 0] += 1e-3


class Holes:
    """A data set of which some items cannot be read."""

    def __len__(self) -> int:
        return 256  # of which the codebook start shows 64, and the steps 32 more

    def __getitem__(self, index: int) -> Any:
        import torch

        if index % 9 == 4:
            raise ValueError(f"item {index} is broken")
        return torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index))


def pretrain_holes(out: Path) -> None:
    from bridle import api

    broken = ["data.bad_share=0.3", "data.mean=[0.0]", "data.std=[1.0]"]
    api.pretrain("digits-tiny", out=out, dataset=Holes(), overrides=[*SHORT, *broken])


def forget_last_evaluation(folder: Path) -> None:
    """As if a run had been stopped when all was trained and not all judged."""
    path = folder / "results.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "evaluations": told["evaluations"][:-1]}))


def run_all(out: Path) -> None:
    """All scenarios; each leaves a folder under `out`."""
    from bridle import api, distributed, failpoints
    from bridle.errors import Interrupted, RankError
    from bridle.evaluate.finetune import finetune_run
    from bridle.evaluate.probe_command import knn_run

    with distributed.process_group(device="cpu", timeout_minutes=3):
        rank = distributed.rank()

        def listen(name: str) -> Recorder:
            return Recorder(out / name, rank)

        with listen("turns").listening():
            api.pretrain("digits-tiny", out=out / "turns", overrides=SMALL)
        knn_run(out / "turns", [])
        finetune_run(out / "turns", FINETUNE)
        api.pretrain("digits-tiny", out=out / "turns", overrides=SMALL)  # finished: nothing to do
        distributed.done_once(lambda: forget_last_evaluation(out / "turns"))
        again = api.pretrain("digits-tiny", out=out / "turns", overrides=SMALL)
        (out / f"again{rank}.json").write_text(again.results.model_dump_json())
        with listen("joint").listening():
            api.pretrain("digits-tiny", out=out / "joint", overrides=JOINT)
        with listen("sharded-joint").listening():
            api.pretrain("digits-tiny", out=out / "sharded-joint", overrides=[*JOINT, "runtime.shard=full"])
        with suppress(Interrupted), listen("sharded").listening(stop_tokenizer_once):
            api.pretrain("digits-tiny", out=out / "sharded", overrides=[*TURNS, "runtime.shard=full"])
        with listen("sharded").listening():
            api.pretrain("digits-tiny", out=out / "sharded", overrides=[*TURNS, "runtime.shard=full"])
        with listen("from-one").listening():
            api.pretrain("digits-tiny", out=out / "from-one", overrides=NO_PROBE)
        try:
            with listen("to-one").listening(stop_once if rank == 1 else nothing):
                api.pretrain("digits-tiny", out=out / "to-one", overrides=NO_PROBE)
        except Interrupted as stopped:
            (out / f"stopped{rank}.txt").write_text(f"{stopped.exit_code} {stopped}")
        try:
            with listen("spoilt").listening(spoilt if rank == 1 else nothing):
                api.pretrain("digits-tiny", out=out / "spoilt", overrides=[*SHORT, "runtime.compare_every=1"])
        except RankError as error:
            (out / f"spoilt{rank}.txt").write_text(str(error))
        pretrain_holes(out / "holes")
        if rank == 1:
            failpoints.arm("step.loss@3=nan;step.input@7=nan;step.gradient@5=nan")  # in steps 2, 4 and 5
        with listen("nan").listening():
            api.pretrain("digits-tiny", out=out / "nan", overrides=SHORT)


def run_command(fault: str, words: list[str]) -> None:
    if os.environ["RANK"] == "1":
        os.environ["BRIDLE_FAILPOINTS"] = fault
    sys.argv = ["bridle", *words]
    from bridle.cli import main

    main()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        run_all(Path(sys.argv[1]))
    else:
        run_command(sys.argv[1], sys.argv[2:])
