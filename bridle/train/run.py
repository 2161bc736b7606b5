"""What all phases of a run share: folder, config, machine, data, networks; and checks that ranks agree on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from bridle import distributed
from bridle.config import Config
from bridle.config.training_schema import RuntimeConfig
from bridle.console import ProgressLine
from bridle.data.loading.balance import WeightedOrder
from bridle.data.loading.loader import BadSample, Loader
from bridle.data.sources import Source
from bridle.errors import DataError
from bridle.machine import Machine, StopRequest
from bridle.models.build import Networks
from bridle.runs.callbacks import Callback
from bridle.runs.folder import RunFolder

Networks_co = TypeVar("Networks_co", bound=Networks, covariant=True)


@dataclass
class Run(Generic[Networks_co]):
    """Everything that is the same in all phases of a run."""

    folder: RunFolder
    config: Config
    machine: Machine
    source: Source
    nets: Networks_co
    stop: StopRequest
    progress: ProgressLine
    callbacks: Sequence[Callback] = ()
    resumed_from: int | None = None  # step of the checkpoint this process continued from
    bad: dict[int, BadSample] = field(default_factory=dict)
    weights: Sequence[float] | None = None  # how often each sample is drawn, relatively; None: once an epoch

    def __post_init__(self) -> None:
        self.bad = {sample.index: sample for sample in self.folder.quarantined()}

    def made_with(self) -> dict[str, str | int]:
        """What bit-exactness depends on beside the config; saved with every checkpoint."""
        return {
            "torch": torch.__version__,
            "device": self.machine.device.type,
            "precision": self.machine.precision,
            "threads": torch.get_num_threads(),
            "world_size": distributed.world_size(),
            "samples": len(self.source),
        }

    def loader(
        self, *, phase: str, batch: int, micro_batch: int | None, repeats: int = 1, whole: bool = False
    ) -> Loader:
        """The batches of a phase, in an order that only seed and phase decide: this rank's rows, or `whole` ones."""
        data = self.config.data
        mean, std = data.statistics
        seed, weights = self.config.seed, self.weights
        return Loader(
            source=self.source,
            seed=seed,
            phase=phase,
            order=None if weights is None else WeightedOrder(weights=weights, seed=seed, phase=phase),
            batch=batch,
            micro_batch=micro_batch,
            repeats=repeats,
            mean=mean,
            std=std,
            workers=data.workers,
            augment=self.config.augment.enabled,
            pin_memory=self.machine.device.type == "cuda",
            rank=0 if whole else distributed.rank(),
            world_size=1 if whole else distributed.world_size(),
        )

    def quarantine(self, found: Sequence[BadSample], *, phase: str) -> None:
        """List samples that could not be used; too many of them end the run."""
        for sample in found:
            if sample.index in self.bad:
                continue
            self.bad[sample.index] = sample
            if distributed.rank() == 0:
                self.folder.add_quarantined(sample, phase=phase)
            self.progress.note(f"bad sample put aside: {sample.reason}")
        share, limit = len(self.bad) / len(self.source), self.config.data.bad_share
        if share > limit:
            raise DataError(
                f"{len(self.bad)} of {len(self.source)} samples cannot be used, more than data.bad_share={limit}; they "
                f"are listed in {self.folder.quarantine}. Mend or remove them, or raise data.bad_share."
            )

    def leave(self, saved: str) -> None:
        """Raise Interrupted on all ranks together if any was asked to stop; `saved` says what is safe (collective)."""
        if distributed.is_active():
            asked = next(filter(None, distributed.gather_json(self.stop.received)), None)
            if asked is None:
                return  # a signal that came meanwhile is for the next look, where all ranks know of it
            self.stop.received = asked
        self.stop.leave(saved)


def open_machine(runtime: RuntimeConfig, *, precision: str | None = None) -> Machine:
    """The machine that a config's runtime section asks for, in another precision where one is given."""
    wanted = {key: getattr(runtime, key) for key in ("device", "threads", "deterministic")}
    return Machine(precision=precision or runtime.precision, **wanted)


def locked_by_first(folder: RunFolder) -> AbstractContextManager[None]:
    """The lock on a run directory, taken once for all ranks."""
    return folder.lock() if distributed.rank() == 0 else nullcontext()


def require_same_data(source: Source) -> None:
    """Refuse to train where ranks find different data: they would not see the same samples (collective)."""
    lengths = distributed.gather_json(len(source), patient=True)
    for rank, length in enumerate(lengths):
        if length != lengths[0]:
            raise DataError(
                f"rank {rank} finds {length} samples where rank 0 finds {lengths[0]}; "
                "all machines must see the same data under the same path."
            )
