"""How a run is trained and evaluated: phases, schedule, machine, probe and fine-tuning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bridle.config.data_schema import AugmentConfig
from bridle.config.section import Above0, Count, Natural, NonNegative, Positive, Section, Share


class HidingConfig(Section):
    """Which tokens the encoder does not see. ρ = ratio; for `axes` one ratio per axis is allowed."""

    kind: Literal["random", "axes", "tube"] = "random"
    ratio: Share | tuple[Share, ...] = 0.8


class MaskConfig(HidingConfig):
    """The mask of pretraining, and which share of the hidden tokens is predicted in a step."""

    predict: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0


class PhaseConfig(Section):
    """Length and optimizer of one training phase."""

    steps: Positive | None = None
    epochs: Above0 | None = None
    warmup_steps: Natural | None = None
    warmup_epochs: NonNegative | None = None
    batch: Positive = 64  # global
    micro_batch: Positive | None = None  # rows per device that go through the network at once
    learning_rate: Above0
    final_learning_rate: NonNegative = 0.0
    weight_decay: NonNegative = 1e-4
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip: Above0 | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_defaults(cls, values: Any) -> Any:
        """A length given in steps replaces a default in epochs, and the other way round."""
        if isinstance(values, dict):
            for one, other in (("steps", "epochs"), ("warmup_steps", "warmup_epochs")):
                for given, default in ((one, other), (other, one)):
                    if values.get(given) is not None and default not in values:
                        values = {**values, default: None}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("steps: give exactly one of steps and epochs (set the other to null)")
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError("warmup_steps: give at most one of warmup_steps and warmup_epochs")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ValueError(f"micro_batch: {self.micro_batch} does not divide batch {self.batch}")
        return self

    def step_count(self, samples: int) -> int:
        """Optimizer steps of this phase for a data set of `samples`."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # exactly one is set, see _check
        return max(1, round(self.epochs * samples / self.batch))

    def warmup_count(self, samples: int) -> int:
        """Optimizer steps over which the learning rate rises."""
        if self.warmup_epochs is not None:
            return round(self.warmup_epochs * samples / self.batch)
        return self.warmup_steps or 0


class EncoderPhaseConfig(PhaseConfig):
    """The encoder's phase; with `masks` n every batch is tokenized once and stays for n steps with n masks."""

    masks: Positive = 1


class ScheduleConfig(Section):
    """Algorithm 1: R iterations, in turns or jointly."""

    mode: Literal["interleaved", "joint"] = "interleaved"
    iterations: Count = 2  # R
    encoder_restart: Literal["continue", "fresh"] = "continue"
    tokenizer: Literal["renew", "keep"] = "renew"  # keep: the first tokenizer stays for all iterations
    joint_weight: NonNegative = 0.5  # α
    joint_every: Positive = 5  # a tokenizer step every n encoder steps


class RuntimeConfig(Section):
    """How a run is executed; none of these changes what is computed beyond floating-point detail."""

    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on GPUs that have it, fp32 elsewhere
    threads: Natural = 0  # CPU threads of torch; 0 leaves torch's choice
    deterministic: bool = False
    checkpoint_activations: bool = False
    checkpoint_every: Positive = 500  # steps
    keep: Positive = 2  # checkpoints inside a phase; ends of phases are always kept
    keep_finished: bool = False  # keep those inside finished phases too, for `bridle probe --curve`
    log_every: Positive = 10  # steps between rows of metrics.jsonl
    stop_after_skips: Positive = 5  # non-finite steps in a row that end the run
    timeout_minutes: Above0 = 30.0  # how long a process waits for the others in a step
    compare_every: Positive = 100  # steps between checks that all processes hold the same numbers
    # Each process holds a share. optimizer: of gradients and optimizer (ZeRO); full: of the trained weights too (FSDP).
    shard: Literal["none", "optimizer", "full"] = "none"
    shard_groups: Positive = 1  # with shard: every group of processes holds all shards (HSDP), say one group a machine
    compile: bool = False  # torch.compile of the trained blocks; worth it on GPUs

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shard_groups > 1 and self.shard == "none":
            raise ValueError(f"shard_groups: {self.shard_groups} groups need shard 'optimizer' or 'full'")
        return self


class ProbeConfig(Section):
    """Linear probe after every encoder phase and for `bridle probe`."""

    enabled: bool = True
    # test: as the data is split. validation: test items stay unseen while settings are chosen. folds: all labelled
    # items are cross-validated, for sets whose test part is too small to tell anything.
    on: Literal["test", "validation", "folds"] = "test"
    pool: Literal["mean", "axis", "class", "attentive"] = "mean"
    axis: Natural = 0  # with pool: axis, the grid axis that is kept (frequency bands, say)
    deviation: bool = False  # with pool: mean or axis, the tokens' standard deviation beside their mean
    # Output of this block, 1 to the encoder's depth; None: the last, after its norm; stem: of encoder.stem; all: of
    # the stem, the embedding and every block, side by side; attentive pooling then reads the last.
    layer: Positive | Literal["all", "stem"] | None = None
    items: Positive | None = None  # at most so many train and test items, of each class its share; None uses all
    training_items: Positive | None = 20_000  # the same after an encoder phase, while all processes wait for one
    head: Literal["logistic", "sgd", "adamw"] = "logistic"  # logistic: solved to the optimum; else trained in batches
    loss: Literal["auto", "ce", "bce"] = "auto"  # of sgd and adamw; auto: bce where items have several labels, else ce
    # Of sgd and adamw:
    learning_rate: Above0 | None = None  # None: chosen on validation items
    epochs: Positive = 50
    warmup_epochs: NonNegative = 0.0
    batch: Positive = 256
    weight_decay: NonNegative = 0.01  # adamw alone
    betas: tuple[Share, Share] = (0.9, 0.999)  # adamw alone
    sampling: Literal["even", "balanced"] = "even"  # balanced: rare classes are drawn more often
    epoch_items: Positive | None = None  # draws that count as one epoch; None: as many as there are items
    batch_norm: bool = True  # one without weights, before the head
    classical: bool = False  # a third baseline beside raw input and untrained encoder: whitened k-means features
    shots: tuple[Positive, ...] = ()  # labels per class of the few-shot probe, such as [1, 5, 10]
    draws: Annotated[int, Field(ge=2)] = 10  # of the few labels
    scorers: tuple[str, ...] = ()  # further scorers by name: knn, retrieval, or one that a plugin registers
    cache_mb: Natural = 2048  # of features in RUN/cache; 0 keeps none

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pool == "attentive" and (self.head != "logistic" or self.shots):
            given = "probe.shots" if self.shots else "probe.head"
            raise ValueError(f"{given}: needs pooled features; probe.pool 'attentive' learns its own, use 'mean'")
        if self.loss != "auto" and self.head == "logistic":
            raise ValueError(f"probe.loss: '{self.loss}' is for probe.head 'sgd' or 'adamw'; 'logistic' has its own")
        if len(set(self.shots)) < len(self.shots):
            raise ValueError(f"probe.shots: {list(self.shots)} names a number twice")
        return self


class FinetuneConfig(PhaseConfig):
    """`bridle finetune`: the encoder and a linear head learn from labels."""

    epochs: Above0 | None = 30.0
    warmup_epochs: NonNegative | None = 3.0
    learning_rate: Above0 = 1e-3
    weight_decay: NonNegative = 0.05
    betas: tuple[Share, Share] = (0.9, 0.999)
    loss: Literal["auto", "ce", "bce"] = "auto"  # auto: bce where items have several labels, else ce
    label_smoothing: Share = 0.0
    pool: Literal["mean", "axis", "class"] = "mean"
    axis: Natural = 0  # with pool: axis, as for the probe
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.75  # learning rate of each block relative to the next
    drop_path: Share = 0.1
    mask: HidingConfig | None = None  # hide tokens in training (paper: 2-D 0.2 audio, 1-D 0.2 image)
    sampling: Literal["even", "balanced"] = "even"  # balanced: rare classes are drawn more often
    epoch_items: Positive | None = None  # draws that count as one epoch; None: as many as there are items
    deviation: bool = False  # with pool: mean or axis, the tokens' standard deviation beside their mean
    items: Positive | None = None  # at most so many train and test items; None uses all
    from_scratch: bool = False  # start from the untrained encoder: the baseline of what pretraining gives
    shots: tuple[Positive, ...] = ()  # labels per class: also learn from so few, as the few-shot probe does
    draws: Annotated[int, Field(ge=2)] = 3  # of the few labels: the first of the probe's
    shot_steps: Positive = 100  # steps with few labels
    augment: AugmentConfig = AugmentConfig()

    def step_count(self, samples: int) -> int:
        """Optimizer steps for `samples` training items."""
        return super().step_count(self.epoch_items or samples)

    def warmup_count(self, samples: int) -> int:
        """Optimizer steps over which the learning rate rises."""
        return super().warmup_count(self.epoch_items or samples)


class DetokenizerConfig(PhaseConfig):
    """`bridle detokenizer`: a small network learns to turn codes back into inputs."""

    width: Positive | None = None  # None: as the encoder
    depth: Positive = 2
    heads: Positive | None = None  # None: as the encoder
    steps: Positive | None = 600
    warmup_steps: Natural | None = 60
    batch: Positive = 32
    learning_rate: Above0 = 1e-3
    weight_decay: NonNegative = 0.01
    items: Positive = 256  # held-out items on which the reconstruction is measured
