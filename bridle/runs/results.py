"""Results of a run as typed records, and the JSON files that hold them.

    results.json                      what the run measured itself, after every encoder phase
    probe.json, knn.json, curve.json  frozen features, measured later; probe-3f9c21.json holds another protocol
    finetune.json                     fine-tuned models
    codebooks.json                    codebook health in detail

All of them are a `Results`: a header with the protocol, the baselines, and one `Evaluation` per model.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_serializer, model_validator
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from bridle.config import Config
from bridle.config.section import with_tuples
from bridle.config.training_schema import FinetuneConfig, ProbeConfig
from bridle.data.modality import modality_of
from bridle.errors import CheckpointError
from bridle.runs.checkpoint import write_json
from bridle.runs.folder import RunFolder
from bridle.seeding import mix

# What every score stands beside, by its key in the files, in the order of the tables.
BASELINES = {
    "raw": "raw input",
    "untrained": "untrained encoder",
    "classical": "classical",
    "stem": "its stem alone",  # of an encoder with a stem, where its blocks are read beside it
}


class Interval(NamedTuple):
    """The middle 95 % of a bootstrap, or Student's interval."""

    low: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite_ends(value: object) -> object:
    ends = value if isinstance(value, list | tuple) else ()
    return None if any(_finite(end) is None for end in ends) else value


# JSON has no infinity: what is not finite is stored as null.
Number = Annotated[float | None, BeforeValidator(_finite)]
MaybeInterval = Annotated[Interval | None, BeforeValidator(_finite_ends)]


class Record(BaseModel):
    """Base of all stored records: frozen; keys that a later version may add are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    ALWAYS: ClassVar[tuple[str, ...]] = ()  # keys that are written even with their default value

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            key: value
            for key, value in handler(self).items()
            if key in self.ALWAYS or getattr(self, key) != fields[key].default
        }


class Hits(Record):
    """Which test items were answered correctly, in the order they were tested, one bit each."""

    items: int
    sizes: tuple[int, ...]  # items of each fold, one after the other; a single number without folds
    truth: str  # digest of the labels: hits of other items are not compared
    bits: str  # base64

    @model_validator(mode="after")
    def _check(self) -> Self:
        if min(self.sizes, default=0) < 1 or sum(self.sizes) != self.items:
            raise ValueError("sizes do not add up to items")
        try:
            raw = base64.b64decode(self.bits, validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from error
        if len(raw) != (self.items + 7) // 8:
            raise ValueError(f"{len(raw)} bytes of bits for {self.items} items")
        return self

    @classmethod
    def pack(cls, right: NDArray[np.bool_], *, sizes: Sequence[int], truth: str) -> Hits:
        bits = base64.b64encode(np.packbits(right).tobytes()).decode()
        return cls(items=len(right), sizes=tuple(sizes), truth=truth, bits=bits)

    @property
    def right(self) -> NDArray[np.bool_]:
        """(N,)."""
        raw = np.frombuffer(base64.b64decode(self.bits), dtype=np.uint8)
        return np.unpackbits(raw, count=self.items).astype(bool)


class Score(Record):
    """One named number that a scorer returns; a share of 1 unless `unit` is empty."""

    value: Number  # the score
    interval: MaybeInterval = None  # its 95 % interval
    chance: Number = None  # the score of guessing
    unit: Literal["%", ""] = "%"  # "%": the value is a share, shown in percent; "": shown as it is
    shots: int | None = None  # labels per class of a few-shot score
    draws: tuple[float, ...] = ()  # a few-shot score of each draw
    items: int = 0  # training items of a draw; queries of a retrieval
    short: int = 0  # classes with fewer items than shots; queries without anything to find


class Scores(Record):
    """What a classifier is worth on items it never saw; with folds, means over them.

    Where every item has one label the main score is `accuracy`, else `mean_average_precision`; `interval` is its own.
    """

    accuracy: Number = None  # top-1 on the test items
    interval: MaybeInterval = None  # 95 % bootstrap over the test items
    top5: Number = None  # None with five classes or fewer, where it says nothing
    balanced_accuracy: Number = None
    mean_average_precision: Number = None  # over the classes that occur in the test items
    mean_average_precision_interval: MaybeInterval = None
    mean_auc: Number = None  # this and the next two where items may have several labels
    mean_auc_interval: MaybeInterval = None
    d_prime: Number = None
    d_prime_interval: tuple[Number, Number] | None = None
    chance: Number = None  # accuracy of always answering the commonest class; mAP of scores that ignore the input
    classes: int = 0
    classes_present: int | None = None  # classes that some test item has, where items may have several labels
    train_items: int = 0  # with folds, of the smallest training part
    test_items: int = 0
    setting: dict[str, bool | int | float] = {}  # chosen on validation items; with folds the median, or whether all
    seconds: float = 0.0
    fold: int | None = None  # which one these are of, and
    folds: tuple[Scores, ...] = ()  # the scores of each
    sd: Number = None  # of the main score over folds
    hits: Hits | None = None
    further: dict[str, Score] = {}  # of other scorers, by name
    left_out: tuple[str, ...] = ()  # items that cannot be read and are not scored

    def __repr__(self) -> str:
        score = "no score" if self.main is None else f"{self.name} {self.main:.3f}"
        spread = "" if self.interval is None else f" [{self.interval.low:.3f}, {self.interval.high:.3f}]"
        further = "".join(f", {name} {one.value:.3f}" for name, one in self.further.items() if one.value is not None)
        return f"Scores({score}{spread}{further}, {self.test_items} test items, {self.classes} classes)"

    @property
    def main(self) -> float | None:
        return self.mean_average_precision if self.accuracy is None else self.accuracy

    @property
    def name(self) -> Literal["accuracy", "mAP"]:
        """What the main score is."""
        return "mAP" if self.accuracy is None and self.mean_average_precision is not None else "accuracy"

    @property
    def values(self) -> list[float]:
        """The main score of every fold, or the only one."""
        every = [fold.main for fold in self.folds] or [self.main]
        return [value for value in every if value is not None]

    @property
    def few_shot(self) -> dict[int, Score]:
        """Few-shot scores by labels per class."""
        return {score.shots: score for score in self.further.values() if score.shots is not None}

    def joined(self, found: Scores | Mapping[str, Score | float]) -> Scores:
        """These and what another scorer found; a name that is taken is refused."""
        given = found.further if isinstance(found, Scores) else found
        named = {key: one if isinstance(one, Score) else Score(value=one) for key, one in given.items()}
        if taken := sorted(self.further.keys() & named.keys()):
            raise ValueError(f"two scorers return a score named {taken[0]!r}")
        further = {**self.further, **named}
        merged = found if isinstance(found, Scores) else self
        return merged.model_copy(update={"further": further, "left_out": self.left_out})


class StageHealth(Record):
    """How one codebook is used."""

    stage: int  # from 1
    codes: int  # K
    tokens: int = 0  # counted
    usage_rate: float  # CUR
    entropy: float  # UE, nats
    effective_usage: float  # ECU
    perplexity: float
    top_share: float  # of all tokens in the most used code
    energy: Number = None  # what is left of the latents after this stage; None if it was not measured
    position_information: Number = None  # MI(code; position), nats; None with too few tokens to trust it
    norms: tuple[float, ...] = ()  # lengths of the code vectors
    norms_start: tuple[float, ...] = ()  # the same right after the codebook's start
    label_information: Number = None  # MI(code; label), nats; None without labels or with too few tokens
    dead: int = 0  # codes that never occurred
    agreement: dict[str, float] = {}  # share of codes that stay, for each small change of the input
    directions: int | None = None  # in which the stage's inputs can vary
    latent_dimension: Number = None  # effective, of the stage's inputs; see `quantize.dimension`
    latent_first: Number = None  # share of the first principal component
    code_dimension: Number = None  # the same of the codes, weighed by their use
    code_first: Number = None


class Verdict(Record):
    """What a codebook's numbers mean."""

    stage: int
    level: Literal["ok", "warn", "bad"]
    text: str


class Evaluation(Record):
    """What is known of one model: the encoder after an iteration, at a step, or fine-tuned."""

    iteration: int
    phase: str = ""
    step: int = 0  # in curve.json
    cpu_seconds: Number = None  # of training up to that step
    probe: Scores | None = None
    start: str = ""  # in finetune.json: iter2, or scratch
    finetune: Scores | None = None
    data: str | None = None  # digest of the data it was measured on
    codebooks: tuple[StageHealth, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    checkpoint: str = ""  # in codebooks.json, as the next two
    samples: int = 0
    unusable: int = 0

    @property
    def scores(self) -> Scores | None:
        return self.probe if self.finetune is None else self.finetune

    @property
    def key(self) -> tuple[int, int]:
        return self.iteration, self.step


class Protocol(Record):
    """How scores were measured; only scores of one protocol are compared."""

    probe: Annotated[ProbeConfig | None, BeforeValidator(with_tuples)] = None  # without what changes no score
    finetune: Annotated[FinetuneConfig | None, BeforeValidator(with_tuples)] = None
    classifier: int = 0  # version of the classifiers
    root: str | None = None
    manifest: str | None = None
    layout: str = "auto"
    segments: tuple[str, ...] | None = None
    test_fold: int | None = None
    views: int = 1
    trim: bool = False
    crops: int = 1
    seed: int | None = None
    data: str | None = None  # digest of the items
    on: str | None = None  # another data set than the run's own, by its recipe
    inputs: dict[str, Any] = {}  # how that data set's items are seen

    @property
    def digits(self) -> str:
        """Six digits that name the protocol, whatever state the data is in."""
        known = self.model_copy(update={"data": None}).model_dump(mode="json")
        return f"{mix(json.dumps(known, sort_keys=True)) & 0xFFFFFF:06x}"


class Results(Record):
    """The content of a results file."""

    ALWAYS = ("format", "seed", "baselines", "evaluations")

    format: int = 1
    name: str = ""
    title: str = ""  # runs of the same title are compared with each other
    method: str = ""  # RQ, VQ, patches, encoder or imported
    seed: int = 0
    evaluation: str = "probe"  # what the main scores are of
    protocol: Protocol | None = None
    baselines: dict[str, Scores] = {}
    baselines_key: str | None = None  # names all that the baselines depend on
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def named_baselines(self) -> dict[str, Scores]:
        """The baselines by what they are called in words."""
        return {words: self.baselines[key] for key, words in BASELINES.items() if key in self.baselines}

    def __repr__(self) -> str:
        rows = {**self.named_baselines, **{self.model_name(one): one.scores for one in self.evaluations}}
        lines = [f"  {name:<18} {scores!r}" for name, scores in rows.items() if scores is not None]
        return "\n".join([f"Results({self.title!r}, {self.evaluation}, seed {self.seed})", *lines])

    def at(self, iteration: int) -> Evaluation | None:
        """The evaluation of an iteration."""
        return next((entry for entry in self.evaluations if entry.iteration == iteration), None)

    def model_name(self, evaluation: Evaluation) -> str:
        """What one evaluated model is called; one from elsewhere knows no iterations."""
        return "imported" if self.method == "imported" else f"{self.method} iter{evaluation.iteration}"


def results_header(config: Config, folder: Path | None = None) -> Results:
    """Results without scores; `folder` is given where it may hold an exported model."""
    modality, data = modality_of(config), config.data.manifest or config.data.root
    title = config.data.source if modality.open_embedded is not None else config.name
    if data is not None and config.name == modality.own_recipe[0]:  # "image" says nothing of one's own pictures
        title = Path(data).stem or title
    return Results(name=config.name, title=title, method=method_name(config, folder), seed=config.seed)


def method_name(config: Config, folder: Path | None = None) -> str:
    """What a run is called beside others: by its targets, as far as they are known."""
    about = {} if folder is None else RunFolder(folder).export_facts()
    if about.get("imported"):
        return "imported"
    if config.loss.target == "patches":
        return "patches"
    if about and about.get("tokenizer") is None:  # what it learned from is not here, and config.yaml may not say it
        return "encoder"
    return "RQ" if config.quantizer.codebooks > 1 else "VQ"


AnyRecord = TypeVar("AnyRecord", bound=Record)


def read_results(path: Path) -> Results:
    """The results in a file; CheckpointError if it is damaged."""
    return read_record(Results, path)


def read_record(kind: type[AnyRecord], path: Path) -> AnyRecord:
    """A record that a command has written; CheckpointError if it is damaged."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}"
        raise CheckpointError(f"{path}: damaged ({reason}); delete it and run its command again.") from error


def write_record(path: Path, record: Record) -> None:
    """Publish a record as JSON."""
    write_json(path, record.model_dump(mode="json"))
