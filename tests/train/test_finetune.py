"""Fine-tuning as a phase: what learns and how fast, masks, mixing, several labels, running means, exact resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import StopAt
from safetensors.torch import load_file

from bridle.config import Config
from bridle.config.data_schema import AugmentConfig
from bridle.console import ProgressLine
from bridle.data.arrays.memory import TensorSource
from bridle.data.embedded.sets import digits
from bridle.data.loading.loader import Batch
from bridle.data.loading.mixing import Mixed
from bridle.data.sources import Sample, Source, class_shares
from bridle.errors import ConfigError, DataError, Interrupted
from bridle.machine import StopRequest
from bridle.models.build import build_classifier, build_encoder
from bridle.runs.callbacks import Callback
from bridle.runs.folder import RunFolder
from bridle.train.draws import Draws
from bridle.train.engine import Phase
from bridle.train.finetune import Tuned, finetune, finetune_phase, layer_scale
from bridle.train.optim import build_optimizer, set_rate
from bridle.train.run import Run, open_machine
from bridle.train.step_metrics import TIMINGS

Small = Callable[..., Config]
QUICK = ("finetune.batch=8", "finetune.warmup_steps=1", "finetune.learning_rate=1e-3", "finetune.drop_path=0.2")


def tuning(
    config: Config, folder: Path, *, source: Source | None = None, callbacks: Sequence[Callback] = (), classes: int = 10
) -> Run[Tuned]:
    folder.mkdir(exist_ok=True, parents=True)
    config = config.model_copy(update={"data": config.data.model_copy(update={"mean": (0.3,), "std": (0.35,)})})
    classifier = build_classifier(config, build_encoder(config), classes=classes, iteration=1)
    nets = Tuned(classifier)
    source = digits().train if source is None else source
    machine = open_machine(config.runtime)
    return Run(RunFolder(folder), config, machine, source, nets, StopRequest(), ProgressLine(), callbacks)


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]


class Several:
    """Noise whose labels are two of five, as shares: class c shows as a level of column c."""

    def __init__(self, count: int = 40) -> None:
        self.labels = [(i % 5, (i + 1 + i // 5 % 4) % 5) for i in range(count)]
        self.classes = list("abcde")

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        x = 0.1 * torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index))
        for label in self.labels[index]:
            x[:, :, 3 * label : 3 * label + 3] += 1
        return Sample(x, class_shares(self.labels[index], 5))

    def describe(self, index: int) -> str:
        return f"noise {index}"


def test_layers_learn_at_the_rates_worked_by_hand(small: Small, tmp_path: Path) -> None:
    run = tuning(small("finetune.layer_decay=0.5", "encoder.class_token=true", *QUICK), tmp_path)  # depth 2
    phase = finetune_phase(run, iteration=1, loss="ce")
    wanted = {
        "classifier.encoder.embed.": 0.125,
        "classifier.encoder.class_token": 0.125,
        "classifier.encoder.trunk.blocks.0.": 0.25,
        "classifier.encoder.trunk.blocks.1.": 0.5,
        "classifier.encoder.norm.": 1.0,
        "classifier.norm.": 1.0,
        "classifier.head.": 1.0,
    }
    optimizer = build_optimizer(phase.trained, phase.settings, phase.rate_scale)
    set_rate(optimizer, 0.01)
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    named = {f"classifier.{n}": p for n, p in run.nets.classifier.named_parameters()}
    assert len(rates) == len(named)
    for name, parameter in named.items():
        (scale,) = [scale for start, scale in wanted.items() if name.startswith(start)]
        decay = run.config.finetune.weight_decay if parameter.dim() > 1 else 0.0
        assert rates[id(parameter)] == (pytest.approx(0.01 * scale), decay), name


def test_without_layer_decay_every_layer_learns_at_the_same_rate() -> None:
    assert {layer_scale(f"classifier.encoder.trunk.blocks.{i}.x", depth=12, decay=1.0) for i in range(12)} == {1.0}


def test_nothing_is_frozen_and_the_head_is_not_alone(small: Small, tmp_path: Path) -> None:
    run = tuning(small("finetune.steps=3", *QUICK), tmp_path)
    before = {name: p.detach().clone() for name, p in run.nets.classifier.named_parameters()}
    finetune(run, iteration=1, loss="ce")
    same = [name for name, p in run.nets.classifier.named_parameters() if torch.equal(p, before[name])]
    assert same == []
    row = rows(tmp_path)[-1]
    assert (row["phase"], row["step"], row["steps"]) == ("finetune", 3, 3)
    assert "code_usage" not in row
    assert 0 <= row["accuracy"] <= 1


def counting(phase: Phase, run: Run[Tuned]) -> list[int]:
    """How many tokens enter the first block at each call."""
    seen: list[int] = []
    block = run.nets.classifier.encoder.trunk.blocks[0]
    block.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    return seen


def a_batch(run: Run[Tuned], phase: Phase) -> Batch:
    return next(iter(run.loader(phase=phase.key, batch=8, micro_batch=None).steps(0, 1)))[0]


@pytest.mark.parametrize(
    ("mask", "tokens"), [((), 64), (("random", "0.2"), 51), (("axes", "0.25"), 36), (("axes", "[0.5, 0.0]"), 32)]
)
def test_a_mask_hides_tokens_in_training_only(small: Small, tmp_path: Path, mask: tuple[str, ...], tokens: int) -> None:
    hidden = [f"finetune.mask.kind={mask[0]}", f"finetune.mask.ratio={mask[1]}"] if mask else []
    run = tuning(small(*QUICK, *hidden), tmp_path)
    phase = finetune_phase(run, iteration=1, loss="ce")
    seen, batch = counting(phase, run), a_batch(run, phase)
    phase.step(batch, Draws(run, phase, 0))
    run.nets.classifier(batch.x)
    assert seen == [tokens, 64]


def test_a_mask_that_does_not_fit_the_grid_is_refused(small: Small) -> None:
    with pytest.raises(ConfigError, match=r"finetune\.mask\.ratio: a list needs finetune\.mask\.kind 'axes'"):
        small("finetune.mask.kind=random", "finetune.mask.ratio=[0.2, 0.2]")


@pytest.mark.parametrize("mixing", ["mixup", "cutmix"])
def test_micro_batches_of_mixed_samples_change_nothing(small: Small, tmp_path: Path, mixing: str) -> None:
    states, losses = [], []
    for micro in ("null", "2"):
        config = small(
            "finetune.steps=3", f"finetune.micro_batch={micro}", "finetune.label_smoothing=0.1", "finetune.clip=1.0",
            "finetune.mask.kind=random", "finetune.mask.ratio=0.3", *QUICK,
        )  # fmt: skip
        source = Mixed(digits().train, AugmentConfig(**{mixing: 0.8}))
        run = tuning(config, tmp_path / micro, source=source)
        finetune(run, iteration=1, loss="ce")
        states.append(run.nets.state())
        losses.append([row["loss"] for row in rows(tmp_path / micro)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, whole in states[0].items():
        torch.testing.assert_close(states[1][name], whole, atol=1e-4, rtol=1e-3, msg=name)


def test_several_labels_are_learnt(small: Small, tmp_path: Path) -> None:
    quick = (*QUICK, "finetune.learning_rate=5e-3", "runtime.log_every=60", "finetune.pool=axis", "finetune.axis=1")
    config = small("finetune.steps=60", *quick)
    source = Several()
    run = tuning(config, tmp_path, source=source, classes=5)
    model = finetune(run, iteration=1, loss="bce").eval()
    x = torch.stack([source.load(i, None).x for i in range(len(source))])
    chosen = model((x - 0.3) / 0.35).topk(2).indices.sort().values
    assert (chosen == torch.tensor([sorted(labels) for labels in source.labels])).float().mean() > 0.9
    assert "accuracy" not in rows(tmp_path)[-1]


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    (end,) = (folder / "checkpoints").glob("*-end")
    return load_file(end / "model.safetensors")


def test_an_interrupted_fine_tune_ends_as_if_it_had_not_been(small: Small, tmp_path: Path) -> None:
    config = small("finetune.steps=6", "finetune.mask.kind=random", "finetune.mask.ratio=0.2", *QUICK)
    weights = [1.0 + i % 3 for i in range(1437)]
    for place, stops in (("whole", []), ("parts", [2, 4])):
        for stop in [*stops, None]:
            run = tuning(config, tmp_path / place, callbacks=[] if stop is None else [StopAt(("finetune", 1, stop))])
            run.source, run.weights = Mixed(run.source, AugmentConfig(mixup=0.5)), weights
            with run.stop.listening():
                if stop is None:
                    finetune(run, iteration=1, loss="ce")
                    continue
                with pytest.raises(Interrupted, match=f"saved at step {stop} of iter1-finetune"):
                    finetune(run, iteration=1, loss="ce")
    whole, parts = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")


def test_a_sample_without_a_label_is_an_error(small: Small, tmp_path: Path) -> None:
    run = tuning(small("finetune.steps=2", *QUICK), tmp_path, source=TensorSource(x=torch.zeros(4, 1, 16, 16)))
    with pytest.raises(DataError, match="without a label"):
        finetune(run, iteration=1, loss="ce")


def test_a_length_in_steps_replaces_the_default_in_epochs(small: Small) -> None:
    settings = small("finetune.steps=7", "finetune.warmup_steps=2").finetune
    assert (settings.step_count(1000), settings.warmup_count(1000)) == (7, 2)
    assert (settings.epochs, settings.warmup_epochs) == (None, None)
    settings = small("finetune.batch=100").finetune
    assert (settings.step_count(1000), settings.warmup_count(1000)) == (300, 30)
