"""`mask.predict` and the cross decoder in training: which tokens are predicted, and that nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bridle import api
from bridle.config import Config, load_config, with_statistics
from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.data.loading.loader import Batch
from bridle.data.sources import Sample
from bridle.errors import ConfigError
from bridle.machine import StopRequest
from bridle.models.build import Nets, build_nets
from bridle.models.losses import CodeTargets
from bridle.nn.masking import choose_predicted
from bridle.runs.folder import RunFolder
from bridle.train import phases
from bridle.train.algorithm1 import Turn, build_phase
from bridle.train.draws import Draws
from bridle.train.engine import fit
from bridle.train.run import Run, open_machine

Small = Callable[..., Config]


class Padded:
    """Eight samples of 64 tokens, of which sample i has 8·(i + 1) valid ones."""

    classes = labels = None

    def __len__(self) -> int:
        return 8

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        valid = torch.arange(64) < 8 * (index + 1)
        return Sample(torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(index)), None, valid)

    def describe(self, index: int) -> str:
        return f"sample {index}"


def a_run(config: Config, folder: Path, *, padded: bool = False) -> Run[Nets]:
    config = with_statistics(config, [0.3], [0.35])
    place = RunFolder(folder)
    place.prepare(config)
    place.write_settings(config, command="test")
    source: Any = Padded() if padded else open_data(config).train
    return Run(place, config, open_machine(config.runtime), source, build_nets(config), StopRequest(), ProgressLine())


def first_step(run: Run[Nets], step: int = 0) -> tuple[list[Batch], Draws]:
    """The micro-batches of a step and its draws."""
    phase = build_phase(run, 0, Turn(1, "encoder"))
    settings = run.config.encoder_phase
    loader = run.loader(phase=phase.key, batch=settings.batch, micro_batch=settings.micro_batch)
    batches = next(iter(loader.steps(step, step + 1)))
    return batches, Draws(run, phase, step, batches)


def marked(run: Run[Nets], step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden and predicted tokens (B, T) of the global batch, put together from micro-batches."""
    hidden, predicted = [], []
    batches, draws = first_step(run, step)
    for batch in batches:
        mask = draws.mask(batch)
        chosen = draws.predicted(batch, mask)
        hidden.append(mask.masked)
        predicted.append(torch.zeros_like(mask.masked).scatter(1, chosen.at, chosen.counted))
        assert int(chosen.counted.sum()) == int(predicted[-1].sum())  # no position twice
        slots = max(1, round(run.config.mask.predict * (64 - mask.visible.shape[1])))
        assert chosen.at.shape == (len(batch.x), slots)  # heads and loss run at no others
    return torch.cat(hidden), torch.cat(predicted)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 1.0])
def test_of_each_samples_hidden_tokens_exactly_the_share_is_predicted(
    small: Small, tmp_path: Path, padded: bool, share: float
) -> None:
    hidden, predicted = marked(a_run(small(f"mask.predict={share}"), tmp_path, padded=padded))
    assert not (predicted & ~hidden).any()
    counts = [max(1, round(share * n)) for n in hidden.sum(1).tolist()]
    assert predicted.sum(1).tolist() == counts
    if padded:
        assert len(set(counts)) > 1 or share == 0.01


@pytest.mark.parametrize("padded", [False, True])
def test_micro_batches_predict_the_tokens_of_the_whole_batch_and_steps_differ(
    small: Small, tmp_path: Path, padded: bool
) -> None:
    found = [
        marked(a_run(small("mask.predict=0.5", f"encoder_phase.micro_batch={micro}"), tmp_path / micro, padded=padded))
        for micro in ("null", "4", "1")
    ]
    for hidden, predicted in found[1:]:
        assert torch.equal(hidden, found[0][0])
        assert torch.equal(predicted, found[0][1])
    later = marked(a_run(small("mask.predict=0.5"), tmp_path / "later", padded=padded), step=1)
    assert not torch.equal(later[1], found[0][1])
    whole = marked(a_run(small(), tmp_path / "all", padded=padded))
    assert torch.equal(whole[0], found[0][0])  # the mask itself is the same whatever is predicted of it
    assert torch.equal(whole[0], whole[1])


def test_every_hidden_token_is_predicted_equally_often() -> None:
    masked = (torch.arange(10) >= 2).expand(4000, 10)
    noise = torch.rand(4000, 10, generator=torch.Generator().manual_seed(0))
    often = choose_predicted(masked, 0.25, noise).float().mean(0)
    assert often[:2].tolist() == [0.0, 0.0]
    assert often[2:].tolist() == pytest.approx([0.25] * 8, abs=0.03)  # four standard errors
    nothing = torch.zeros(1, 10, dtype=torch.bool)
    assert not choose_predicted(nothing, 0.5, noise[:1]).any()


@pytest.mark.parametrize("target", ["codes", "patches"])
@pytest.mark.parametrize("kind", ["window", "plain", "cross"])
def test_the_loss_is_the_mean_of_the_full_loss_over_the_predicted_tokens(
    small: Small, tmp_path: Path, kind: str, target: str
) -> None:
    """Brute force: every sample and token alone, then means by hand."""
    shown = (f"decoder.kind={kind}", f"loss.target={target}", "mask.predict=0.25")
    run = a_run(small(*shown), tmp_path, padded=True)
    (batch,), draws = first_step(run)
    codes = torch.randint(0, 16, (8, 64, 4), generator=torch.Generator().manual_seed(3))
    if target == "codes":
        found = phases.predict_codes(run, batch, draws, CodeTargets(codes)).loss
    else:
        found = phases.predict_patches(run, batch, draws).loss
    mask = draws.mask(batch)
    predicted = draws.predicted(batch, mask)
    nets = run.nets
    features = nets.decoder(nets.encoder(batch.x, mask=mask).z, mask=mask, valid=batch.valid)  # at all T positions
    guesses, samples = nets.heads(features), []
    for b in range(8):
        tokens = predicted.at[b][predicted.counted[b]].tolist()
        losses = []
        for t in tokens:
            if target == "codes":
                stages = [-head[b, t].double().log_softmax(-1)[codes[b, t, m]] for m, head in enumerate(guesses)]
                losses.append(torch.stack(stages).mean())
            else:
                row, column = divmod(t, 8)
                patch = batch.x[b, 0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten().double()
                wanted = (patch - patch.mean()) / (patch.var(correction=0) + 1e-6).sqrt()
                losses.append((guesses[b, t].double() - wanted).square().mean())
        samples.append(torch.stack(losses).mean())
    torch.testing.assert_close(found.double(), torch.stack(samples).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["window", "cross"])
def test_micro_batches_give_the_update_and_accuracy_of_the_whole_batch(small: Small, tmp_path: Path, kind: str) -> None:
    states, accuracies = [], []
    for micro in ("null", "2"):
        shown = (f"decoder.kind={kind}", "mask.predict=0.3", f"encoder_phase.micro_batch={micro}")
        run = a_run(small(*shown, steps=2), tmp_path / micro, padded=True)
        fit(run, build_phase(run, 0, Turn(1, "encoder")), None)
        states.append(run.nets.state())
        rows = (tmp_path / micro / "metrics.jsonl").read_text().splitlines()
        accuracies.append([json.loads(row)["token_accuracy"] for row in rows])
    for one, other in zip(*accuracies, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    for name, whole in states[0].items():
        # The softmax takes no notice of key biases: their gradient is rounding, and Adam scales it up.
        if name.endswith("kv.bias"):
            keys = slice(16, 32) if name.endswith("qkv.bias") else slice(16)
            whole[keys] = states[1][name][keys]
        torch.testing.assert_close(states[1][name], whole, atol=2e-4, rtol=1e-3, msg=name)


def test_a_run_with_a_cross_decoder_learns_and_is_probed(small: Small, tmp_path: Path) -> None:
    config = small("decoder.kind=cross", "decoder.depth=2", "mask.predict=0.25", "schedule.iterations=1", steps=40)
    done = api.pretrain(config, out=tmp_path)
    losses = [json.loads(row)["loss"] for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])
    assert done.results.evaluations[-1].probe is not None


@pytest.mark.parametrize("share", ["0", "1.5", "-0.1"])
def test_a_share_that_makes_no_sense_is_refused(share: str) -> None:
    with pytest.raises(ConfigError, match=r"mask\.predict"):
        load_config("digits-tiny", [f"mask.predict={share}"])


def test_fine_tuning_predicts_nothing_so_its_mask_has_no_share() -> None:
    with pytest.raises(ConfigError, match="predict"):
        load_config("digits-tiny", ["finetune.mask={ratio: 0.2, predict: 0.5}"])
