"""Algorithm 1: encoder and tokenizer teach each other in turns, for R iterations, resumable at every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import nn

from bridle import distributed, failpoints
from bridle.config import Config
from bridle.data.loading.loader import require_even_shares
from bridle.errors import CheckpointError, UsageError
from bridle.models.build import (
    Nets,
    Networks,
    build_decoder,
    build_encoder,
    build_estimator,
    build_first_tokenizer,
    build_heads,
    build_later_tokenizer,
    build_nets,
)
from bridle.models.encoder import Encoder
from bridle.models.tokenizer import Tokenizer
from bridle.models.vit_weights import load_vit
from bridle.runs.checkpoint import Loaded, load_latest, require_space_for_run, size_of, write_json
from bridle.runs.checkpoint import load as load_checkpoint
from bridle.runs.results import Evaluation
from bridle.runs.results_file import ResultsFile
from bridle.train.engine import Phase, Progress, fit
from bridle.train.joint import joint_phase
from bridle.train.phases import (
    begins_untrained_tokenizer,
    encoder_phase,
    renews_tokenizer,
    tokenizer_phase,
    trains_tokenizer,
)
from bridle.train.run import Run

Evaluate = Callable[[Nets, int, str], Evaluation]  # networks, iteration, phase


class Turn(NamedTuple):
    """One entry of the schedule."""

    iteration: int
    name: str


def schedule(config: Config) -> list[Turn]:
    """The phases of a run in order."""
    turns: list[Turn] = []
    for r in range(1, config.schedule.iterations + 1):
        if config.schedule.mode == "joint":
            turns.append(Turn(r, "joint"))
            continue
        if r > 1 and renews_tokenizer(config) and trains_tokenizer(config):
            turns.append(Turn(r, "tokenizer"))
        turns.append(Turn(r, "encoder"))
    return turns


def require_shares(config: Config) -> None:
    """UsageError if the processes cannot share the batch of a phase, or form the groups that share weights.

    Asked before there is anything of a run.
    """
    groups, world = config.runtime.shard_groups, distributed.world_size()
    if world > 1 and world % groups:
        raise UsageError(f"runtime.shard_groups={groups}: {world} processes do not form {groups} groups of one size.")
    for section in dict.fromkeys("tokenizer" if turn.name == "tokenizer" else "encoder" for turn in schedule(config)):
        batch = getattr(config, f"{section}_phase").batch
        require_even_shares(batch, distributed.world_size(), key=f"{section}_phase.batch")


def has_later_tokenizer(config: Config, turn: Turn) -> bool:
    """Does this phase work with a later iteration's tokenizer, not with the first one?"""
    return config.schedule.mode == "joint" or (turn.iteration > 1 and renews_tokenizer(config))


def restore_nets(config: Config, loaded: Loaded) -> Nets:
    """The networks exactly as a checkpoint holds them."""
    turn = Turn(int(loaded.state["iteration"]), str(loaded.state["phase"]))
    nets = build_nets(config, iteration=turn.iteration, later_tokenizer=has_later_tokenizer(config, turn))
    parts = loaded.state.get("parts")  # an exported folder holds only some; the others stay untrained
    load_modules({k: module for k, module in nets.modules().items() if parts is None or k in parts}, loaded)
    if parts is not None and "tokenizer" not in parts:
        nets.own_tokenizer = None  # an encoder from elsewhere, whose codebooks nobody started
    nets.norms_start = loaded.state["norms_start"]
    return nets


def restore_frozen(config: Config, loaded: Loaded) -> tuple[Encoder, Tokenizer | None]:
    """Encoder and tokenizer as a checkpoint or an exported folder holds them; nothing else is built."""
    turn = Turn(int(loaded.state["iteration"]), str(loaded.state["phase"]))
    has_tokenizer = any(name.startswith("tokenizer.") for name in loaded.group("model"))
    encoder, tokenizer = build_frozen(config, turn, tokenizer=has_tokenizer)
    load_modules({"encoder": encoder} if tokenizer is None else {"encoder": encoder, "tokenizer": tokenizer}, loaded)
    return encoder, tokenizer


def build_frozen(config: Config, turn: Turn, *, tokenizer: bool) -> tuple[Encoder, Tokenizer | None]:
    """A new encoder and, if asked for, the kind of tokenizer that a run has at this turn."""
    if not tokenizer:
        return build_encoder(config), None
    later = has_later_tokenizer(config, turn)
    built = build_later_tokenizer(config, iteration=turn.iteration) if later else build_first_tokenizer(config)
    return build_encoder(config), built


def load_modules(modules: Mapping[str, nn.Module], loaded: Loaded) -> None:
    """Give networks the values a checkpoint holds under their names."""
    tensors = loaded.group("model")
    try:
        for name, module in modules.items():
            prefix = f"{name}."
            module.load_state_dict(
                {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            )
    except RuntimeError as error:
        raise CheckpointError(
            f"{loaded.path}: does not fit the run's config: {str(error).splitlines()[-1].strip()}"
        ) from error


def last_checkpoint(run: Run[Networks], *, measured: bool = False) -> Loaded | None:
    """The last checkpoint, or None at the beginning of a run; later rows of the log are removed.

    A run that was `measured` before and has no checkpoint does not begin again: its scores would be taken for the new
    weights'.
    """
    loaded = latest_for_all(run)
    if loaded is None and measured:
        raise UsageError(
            f"{run.folder}: results.json has scores, but there is no checkpoint to go on from; choose another --out, "
            "or delete the folder to train again."
        )
    run.resumed_from = None if loaded is None else step_of(loaded)
    if distributed.rank() == 0:
        index = -1 if loaded is None else int(loaded.state["phase_index"])
        run.folder.rewind_metrics(phase_index=index, step=run.resumed_from or 0)
    if loaded is None:
        return None
    run.progress.note(f"continuing from {loaded.path.name}")
    note_changes(run, loaded)
    return loaded


def fit_only_phase(run: Run[Networks], build_phase: Callable[[], Phase]) -> None:
    """Train a run that has a single phase to its end, from its beginning or from its last checkpoint."""
    loaded = last_checkpoint(run)
    if loaded is not None:
        load_modules(run.nets.modules(), loaded)
    to_device(run)
    if loaded is None or not loaded.state["finished"]:
        fit(run, build_phase(), loaded)


def step_of(loaded: Loaded) -> int:
    """The steps of its phase that a checkpoint has behind it."""
    progress = loaded.state["progress"]
    if not isinstance(progress, dict) or set(progress) != set(vars(Progress())):
        raise CheckpointError(f"{loaded.path}: damaged or made by other software (its progress is no progress).")
    return int(progress["step"])


def latest_for_all(run: Run[Networks]) -> Loaded | None:
    """The newest whole checkpoint as rank 0 finds it; the others read and check the same one."""
    found: list[Loaded | None] = []

    def newest() -> str | None:
        loaded, messages = load_latest(run.folder.checkpoints)
        for message in messages:
            run.progress.note(message)
        found.append(loaded)
        return None if loaded is None else loaded.path.name

    name = distributed.done_once(newest)
    if name is not None and not found:
        found.append(load_checkpoint(run.folder.checkpoints / name))
    return found[0] if found else None


def interleave(run: Run[Nets], results: ResultsFile, evaluate: Evaluate | None) -> None:
    """Run every phase that is not done yet, and the evaluation after each encoder phase."""
    turns = schedule(run.config)
    loaded, first = last_checkpoint(run, measured=bool(results.value.evaluations)), 0
    if loaded is not None:
        first = int(loaded.state["phase_index"])
        if turns[first : first + 1] != [Turn(loaded.state["iteration"], loaded.state["phase"])]:
            raise CheckpointError(f"{loaded.path}: damaged or made by other software (the run has no such phase).")
        run.nets = restore_nets(run.config, loaded)
    to_device(run)
    require_space_for_run(
        run.folder.checkpoints,
        model=size_of({"model": run.nets.state()}),
        ends=len(turns),
        keep=run.config.runtime.keep,
    )
    for index, turn in enumerate(turns[first:], start=first):
        inside = loaded if loaded is not None and index == first else None
        if inside is None:
            failpoints.hit("phase.between")
            renew(run, turn)
        is_finished = inside is not None and inside.state["finished"]
        if not is_finished or index == len(turns) - 1:
            phase = build_phase(run, index, turn)
            if inside is None or not is_finished or step_of(inside) < phase.steps:  # the last one may be lengthened
                fit(run, phase, inside)
        if turn.name != "tokenizer" and evaluate is not None and results.value.at(turn.iteration) is None:
            saved = f"the end of iter{turn.iteration}-{turn.name} is saved."
            with run.stop.leaving_at_once(saved):
                failpoints.hit("evaluation.begin")
                entry = evaluate(run.nets, turn.iteration, turn.name)
                failpoints.hit("evaluation.end")
            run.leave(saved)  # a signal on the last line of an evaluation must not pass for a result
            results.add(entry)
            for callback in run.callbacks:
                callback.on_evaluation(entry.model_dump(mode="json"))
            run.leave("the phase and its evaluation are saved.")


def note_changes(run: Run[Networks], loaded: Loaded) -> None:
    """Say what differs from the machine or data the checkpoint was made with: the run goes on, but not bit for bit."""
    before, now = loaded.state["made_with"], run.made_with()
    changed = [f"{key} {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]
    if changed:
        run.progress.note(f"changed since the checkpoint, so results may differ: {', '.join(changed)}")


def build_phase(run: Run[Nets], index: int, turn: Turn) -> Phase:
    kinds = {"encoder": encoder_phase, "tokenizer": tokenizer_phase, "joint": joint_phase}
    return kinds[turn.name](run, index=index, iteration=turn.iteration)


def renew(run: Run[Nets], turn: Turn) -> None:
    """What is built anew when a phase begins: tokenizer and estimator each iteration, code heads each encoder phase."""
    config, nets, r = run.config, run.nets, turn.iteration
    untrained = turn.name == "encoder" and begins_untrained_tokenizer(config, r)
    if turn.name == "tokenizer" or (turn.name == "joint" and r > 1) or untrained:
        nets.tokenizer = build_later_tokenizer(config, iteration=r)
        nets.tokenizer.take_from(nets.encoder)
        nets.estimator = None if untrained else build_estimator(config, iteration=r)
    fresh = config.schedule.encoder_restart == "fresh"
    if turn.name != "tokenizer" and r > 1:
        if fresh or renews_tokenizer(config):  # heads of the same target go on learning
            nets.heads = build_heads(config, iteration=r)
        if fresh:
            before, nets.encoder = nets.encoder, build_encoder(config, iteration=r)
            nets.encoder.embed.take_measured(before.embed)
            nets.decoder = build_decoder(config, iteration=r)
    anew = r == 1 or fresh
    if config.encoder.weights is not None and turn.name != "tokenizer" and anew:
        started = load_vit(nets.encoder, config.encoder.weights)
        if distributed.rank() == 0:
            write_json(run.folder.encoder_start, started.record())
        run.progress.note(started.describe())
    to_device(run)


def to_device(run: Run[Networks]) -> None:
    for module in run.nets.modules().values():
        module.to(run.machine.device)
