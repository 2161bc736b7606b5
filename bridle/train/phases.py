"""The phases of Algorithm 1 as steps: encoder and tokenizer in turns. Each reads like the paper's pseudo-code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bridle import distributed, failpoints
from bridle.config import Config
from bridle.config.training_schema import PhaseConfig
from bridle.data.loading.loader import Batch
from bridle.models.build import BUILT_IN_TOKENIZERS, Nets
from bridle.models.cost import step_costs
from bridle.models.estimator import Estimator
from bridle.models.losses import (
    CodeTargets,
    Hidden,
    codebook_loss,
    cosine_loss,
    encoder_loss,
    patch_loss,
    patch_target,
    token_accuracy,
)
from bridle.models.measure import measure_inputs
from bridle.models.tokenizer import tokenizer_kind
from bridle.nn.patch import patchify
from bridle.nn.whiten import PositionMeans
from bridle.quantize import CodebookWarning, Quantized
from bridle.quantize.usage import CodeAge
from bridle.seeding import generator
from bridle.train.draws import Draws
from bridle.train.engine import Phase, StepResult, move
from bridle.train.parallel import share_bad
from bridle.train.run import Run

MOST_START_TOKENS = 131_072
START_TOKENS_PER_CODE = 64
MEASURED_TOKENS = 65_536  # for second moments
NOTHING_YET = "nothing of this phase is done yet; the phase before is saved."


def encoder_phase(run: Run[Nets], *, index: int, iteration: int) -> Phase:
    """Train E and D to predict the frozen tokenizer's codes at masked positions (Algorithm 1, lines 16-20)."""
    nets, settings = run.nets, run.config.encoder_phase
    phase = make_phase(run, settings, index=index, iteration=iteration, name="encoder")
    trained = {"encoder": nets.encoder, "decoder": nets.decoder, "heads": nets.heads}
    phase = replace(phase, trained=trained, repeats=settings.masks)

    def whiten() -> None:
        if iteration == 1:  # later networks take over what was measured
            fit_embedding(run, phase.key, settings)

    if run.config.loss.target == "patches":
        regress = partial(predict_patches, run)
        return replace(phase, step=regress, start=whiten, has_codes=False)
    kept = KeptTargets(nets, steps=settings.masks)

    def start() -> None:
        whiten()
        # With quantizer.restart also those of a trained tokenizer, on its final latents.
        restart = run.config.quantizer.restart and run.nets.tokenizer.is_trained
        if iteration == 1 or begins_untrained_tokenizer(run.config, iteration) or restart:
            start_codebooks(run, phase.key, settings)

    def step(batch: Batch, draws: Draws) -> StepResult:
        return predict_codes(run, batch, draws, kept.of(batch, draws.step))

    return replace(phase, step=step, start=start)


def begins_untrained_tokenizer(config: Config, iteration: int) -> bool:
    """Does this encoder phase begin with a new tokenizer that no tokenizer phase has trained?"""
    return iteration > 1 and renews_tokenizer(config) and not trains_tokenizer(config)


def renews_tokenizer(config: Config) -> bool:
    """Does every iteration after the first have a new tokenizer? Otherwise it is another encoder phase, same target."""
    return config.loss.target == "codes" and config.schedule.tokenizer == "renew"


def trains_tokenizer(config: Config) -> bool:
    """Is the tokenizer of later iterations trained in a phase of its own?"""
    return tokenizer_kind(config.tokenizer.later, key="tokenizer.later").is_trained


def tokenizer_phase(run: Run[Nets], *, index: int, iteration: int) -> Phase:
    """Teach tokenizer and estimator to explain the frozen encoder (Algorithm 1, lines 4-12)."""
    nets = run.nets
    assert nets.estimator is not None  # built together with the tokenizer
    phase = make_phase(run, run.config.tokenizer_phase, index=index, iteration=iteration, name="tokenizer")

    def start() -> None:
        start_codebooks(run, phase.key, run.config.tokenizer_phase)
        centre_teacher(run, phase.key, run.config.tokenizer_phase)

    def step(batch: Batch, draws: Draws) -> StepResult:
        return explain_encoder(run, batch, draws)

    def after_codes(done: int, batches: Sequence[Batch], ages: CodeAge) -> None:
        redraw_unused(run, phase, done, batches, ages)

    trained = {"tokenizer": nets.tokenizer, "estimator": nets.estimator}
    update = partial(nets.tokenizer.quantizer.ema_update, summed=True)
    return replace(phase, trained=trained, step=step, start=start, after_update=update, after_codes=after_codes)


def predict_codes(run: Run[Nets], batch: Batch, draws: Draws, found: CodeTargets) -> StepResult:
    """One masked-prediction step on a micro-batch; `found` are the codes (B, T, M) of all its tokens."""
    features, hidden = guess_hidden(run, batch, draws)
    wanted, weights = found.at(hidden), run.config.loss
    logits = run.nets.heads(features)  # M x (B, H, K_m), at predicted positions only
    loss = encoder_loss(logits, wanted, hidden.counted, kind=weights.codes)
    if not draws.shown:
        return StepResult(loss, found.codes, {})
    with torch.no_grad():
        accuracy = token_accuracy(logits, wanted.codes, hidden.counted) * draws.predicted_share(batch, hidden.counted)
    return StepResult(loss, found.codes, {"token_accuracy": accuracy})


def predict_patches(run: Run[Nets], batch: Batch, draws: Draws) -> StepResult:
    """One step with the patches themselves as targets: no tokenizer, no codes."""
    features, hidden = guess_hidden(run, batch, draws)
    guess = run.nets.heads(features)  # (B, H, F)
    patches = hidden.take(patchify(batch.x, run.nets.encoder.geometry.patch))  # (B, T, F) -> (B, H, F)
    return StepResult(patch_loss(guess, patch_target(patches), hidden.counted), None, {})


def guess_hidden(run: Run[Nets], batch: Batch, draws: Draws) -> tuple[Tensor, Hidden]:
    """The decoder's features (B, H, Dd) of the positions to predict, and which these are."""
    mask = draws.mask(batch)
    z = run.nets.encoder(batch.x, mask=mask, drop=draws.drop_path(batch)).z  # (B, V, D)
    hidden = draws.predicted(batch, mask)
    return run.nets.decoder(z, mask=mask, valid=batch.valid, only=hidden.at), hidden


class KeptTargets:
    """The codes of the current batches, kept while these are used for `steps` steps: the tokenizer is frozen.

    Nothing of it is saved: after a restart between two such steps the same batch gets the same codes.
    """

    def __init__(self, nets: Nets, *, steps: int) -> None:
        self.nets, self.steps = nets, steps
        self.turn = -1
        self.found: dict[int, CodeTargets] = {}  # by the first row of the micro-batch

    def of(self, batch: Batch, step: int) -> CodeTargets:
        if step // self.steps != self.turn:
            self.turn, self.found = step // self.steps, {}
        first = batch.rows.start
        if first not in self.found:
            self.found[first] = targets(self.nets, batch.x, batch.valid)
        return self.found[first]


def explain_encoder(run: Run[Nets], batch: Batch, draws: Draws, *, z: Tensor | None = None) -> StepResult:
    """One tokenizer step on a micro-batch: quantize, estimate the teacher's features `z` (B, T, D), compare."""
    nets, x, weights = run.nets, batch.x, run.config.loss
    assert nets.estimator is not None
    z_tilde = nets.tokenizer.encode(x, valid=batch.valid)  # (B, T, Dq)
    found = nets.tokenizer.quantizer(z_tilde, valid=batch.valid)  # q (B, T, Dq), codes (B, T, M)
    if z is None:
        z = teach(run, x, batch.valid)  # (B, T, D), no gradient
    z_hat = nets.estimator(found.straight_through, valid=batch.valid)  # (B, T, D)
    cosine = cosine_loss(z_hat, nets.estimator.target(z), valid=batch.valid, kind=weights.cosine)
    pull = codebook_loss(found, commitment_weight=weights.commitment_weight, commitment=weights.commitment)
    statistics = found.statistics() if run.config.quantizer.update == "ema" else None
    # Means over tokens: a micro-batch with much padding counts for less than one with none.
    share = draws.token_share(batch)
    if weights.cosine == "mean":
        cosine = cosine * share
    pull = pull * share
    figures = {"commitment": found.commitment.detach() * share, "energy": found.energy.detach() * share}
    values = {"cosine": cosine.detach(), **figures}
    return StepResult(pull + weights.cosine_weight * cosine, found.codes, values, statistics)


@torch.no_grad()
def targets(nets: Nets, x: Tensor, valid: Tensor | None) -> CodeTargets:
    """The tokenizer's codes (B, T, M); it sees every patch, masked or not.

    Without autocast: a bf16 encoder moves latents across the borders of codes, and the targets should be what
    `bridle tokenize` writes.
    """
    quantizer = nets.tokenizer.quantizer
    with torch.autocast(x.device.type, enabled=False):
        z_tilde = nets.tokenizer.encode(x, valid=valid)  # (B, T, Dq)
        if quantizer.soft == 1:
            return CodeTargets(quantizer.assign(z_tilde))  # without what only its training needs
        found: Quantized = quantizer(z_tilde, valid=valid)
    return CodeTargets(found.codes, found.soft_codes, found.soft_weights)


@torch.no_grad()
def teach(run: Run[Nets], x: Tensor, valid: Tensor | None) -> Tensor:
    """The encoder's features (B, T, D) of the unmasked input, of the block that teaches."""
    return run.nets.encoder.features_of(x, block=run.config.loss.teacher_block, valid=valid)


@torch.no_grad()
def fit_embedding(run: Run[Nets], key: str, settings: PhaseConfig) -> None:
    """Fit whitening and stem of the encoder to patches, also of a tokenizer with an encoder (collective)."""
    embed = run.nets.encoder.embed
    if embed.ridge is None and embed.stem is None:
        return
    run.progress.note(f"{key}: measuring patches")
    seen = ((batch.x, batch.valid) for batch in measured_batches(run, key, settings))
    with noting_warnings(run, key):
        measure_inputs(embed, seen, generator(run.config.seed, key, "stem"))
    if run.nets.own_tokenizer is not None:
        run.nets.own_tokenizer.take_from(run.nets.encoder)


@contextmanager
def noting_warnings(run: Run[Nets], key: str) -> Iterator[None]:
    """Warnings of k-means become lines of the log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CodebookWarning)
        yield
    for warning in caught:
        run.progress.note(f"{key}: {warning.message}")


def measured_batches(run: Run[Nets], key: str, settings: PhaseConfig) -> Iterator[Batch]:
    """Un-augmented samples of enough tokens for second moments."""
    samples = -(-MEASURED_TOKENS // run.config.geometry.build().tokens)
    return first_batches(run, key, settings, samples=min(samples, len(run.source)))


def start_codebooks(run: Run[Nets], key: str, settings: PhaseConfig) -> None:
    """Start the codebooks from the first un-augmented tokens of the phase's order, then reset rare codes."""
    quantizer = run.nets.tokenizer.quantizer
    if run.nets.tokenizer.measures:
        seen = ((batch.x, batch.valid) for batch in measured_batches(run, key, settings))
        run.nets.tokenizer.measure(seen, generator(run.config.seed, key, "measure"))
    run.progress.note(f"{key}: starting {quantizer.codebooks} codebook(s) ({run.config.quantizer.start})")
    T, tokens, device = run.config.geometry.build().tokens, start_tokens(run, settings), run.machine.device
    latents = [torch.zeros(0, quantizer.width, device=device)]  # a rank may be left without a batch
    valid = [torch.zeros(0, dtype=torch.bool, device=device)]
    with torch.no_grad():
        for batch in first_batches(run, key, settings):
            latents.append(run.nets.tokenizer.encode(batch.x, valid=batch.valid).flatten(0, 1))  # (S, Dq)
            wanted = torch.arange(batch.rows.start * T, batch.rows.stop * T, device=device) < tokens
            valid.append(wanted if batch.valid is None else batch.valid.flatten() & wanted)
        flat, counted = torch.cat(latents), torch.cat(valid)
        random = generator(run.config.seed, key, "codebooks")

        def poll() -> None:
            failpoints.hit("kmeans.iteration")
            run.leave(NOTHING_YET)

        with noting_warnings(run, key):
            quantizer.start_codebooks(flat, generator=random, valid=counted, poll=poll)
    run.nets.norms_start = [code.norm(dim=-1).tolist() for code in quantizer.code_vectors()]


@torch.no_grad()
def redraw_unused(run: Run[Nets], phase: Phase, done: int, batches: Sequence[Batch], ages: CodeAge) -> None:
    """Every n steps redraw the codes that nothing has chosen since from this step's latents.

    The latents of all tokens move together while the tokenizer's encoder learns; codes that are left behind are never
    chosen again by themselves. The last n steps only settle.
    """
    every = run.config.quantizer.reset_every
    if every == 0 or run.config.quantizer.reset_below == 0 or done % every or done > phase.steps - every:
        return
    unused = ages.unused_for(every)
    if not any(bool(marked.any()) for marked in unused):
        return
    latents, valid = [], []
    for batch in (move(batch, run.machine.device) for batch in batches):
        latents.append(run.nets.tokenizer.encode(batch.x, valid=batch.valid))  # (B, T, Dq)
        real = torch.ones(latents[-1].shape[:2], dtype=torch.bool, device=latents[-1].device)
        valid.append(real if batch.valid is None else batch.valid)
    random = generator(run.config.seed, phase.key, done, "redraw")
    run.nets.tokenizer.quantizer.reset_codes(torch.cat(latents), unused, generator=random, valid=torch.cat(valid))
    ages.renew(unused)


def centre_teacher(run: Run[Nets], key: str, settings: PhaseConfig) -> None:
    """Measure the mean of the teacher's features, over all tokens or per position, so that it explains nothing.

    What follows from the position alone needs no code, because the estimator knows positions. Left in, it is most of
    the cosine, and the codebooks may collapse.
    """
    if run.config.loss.centre_teacher == "none":
        return
    assert run.nets.estimator is not None
    means = teacher_means(run.nets.estimator)
    for batch in first_batches(run, key, settings):
        means.add(teach(run, batch.x, batch.valid), batch.valid)
    run.nets.estimator.centre_on(means.mean(overall=run.config.loss.centre_teacher == "mean"))


def teacher_means(estimator: Estimator) -> PositionMeans:
    """Empty sums for the features of a teacher."""
    T, D = estimator.teacher_mean.shape
    return PositionMeans(D, estimator.teacher_mean.device, positions=T)


def start_tokens(run: Run[Nets], settings: PhaseConfig) -> int:
    """max(global batch, 64·K) tokens, at most 131,072, as far as the data set goes."""
    T = run.config.geometry.build().tokens
    wanted = max(settings.batch * T, START_TOKENS_PER_CODE * max(run.config.quantizer.sizes))
    return min(wanted, MOST_START_TOKENS, len(run.source) * T)


def first_batches(run: Run[Nets], key: str, settings: PhaseConfig, *, samples: int | None = None) -> Iterator[Batch]:
    """The first un-augmented samples of the phase's order in fixed-size micro-batches; leaves when asked to stop.

    As many as a codebook start takes, or `samples`.
    Collective: ranks get whole micro-batches, some one more than others, but all make the same number of rounds.
    """
    if samples is None:
        samples = -(-start_tokens(run, settings) // run.config.geometry.build().tokens)
    rows = min(64, samples)
    loader = run.loader(phase=key, batch=settings.batch, micro_batch=settings.micro_batch)
    mine = loader.first(samples, rows=rows)
    for _ in range(-(-samples // (rows * distributed.world_size()))):
        batch = next(mine, None)
        run.leave(NOTHING_YET)
        run.quarantine(share_bad(() if batch is None else batch.bad), phase=key)
        if batch is not None:
            yield move(batch, run.machine.device)


def make_phase(run: Run[Nets], settings: PhaseConfig, *, index: int, iteration: int, name: str) -> Phase:
    """A phase with the length and optimizer of its settings, still without a step."""
    samples, cap = len(run.source), run.config.max_steps
    steps = settings.step_count(samples)
    steps = steps if cap is None else min(steps, cap)

    def unset(batch: Batch, draws: Draws) -> StepResult:
        raise AssertionError("a phase must supply its step")

    warmup = min(settings.warmup_count(samples), steps)
    later = run.config.schedule.mode == "joint" or (iteration > 1 and renews_tokenizer(run.config))

    def operations() -> int:
        return step_costs(run.config, run.machine.precision)(name, later, 1).total.operations

    phase = Phase(index, iteration, name, steps, warmup, settings, trained={}, step=unset)
    # Counting runs a step without numbers, which a tokenizer from elsewhere may not stand.
    own = {run.config.tokenizer.first, run.config.tokenizer.later} <= BUILT_IN_TOKENIZERS
    return replace(phase, operations=operations if own else None)
