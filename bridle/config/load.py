"""From a recipe name or file and `k=v` overrides to a checked Config, and back to YAML.

Layers, lowest first: size preset, recipes along `extends`, the file itself, overrides. `quantizer=vq|rq|beats` is
shorthand for the keys of that preset, `paper=literal` for the switches that make a recipe what the paper's text says.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from bridle.config.data_schema import SOURCES
from bridle.config.schema import Config, QuantizerConfig
from bridle.config.section import with_tuples
from bridle.config.strict_yaml import Entry, Path, Table, merge, nest, read_document, read_value
from bridle.errors import ConfigError, UsageError, quoted

SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"encoder": 128, "depth": 4, "heads": 4, "decoder": 128, "blocks": 1, "decoder_heads": 4},
    "small": {"encoder": 384, "depth": 12, "heads": 6, "decoder": 256, "blocks": 8, "decoder_heads": 8},
    "base": {"encoder": 768, "depth": 12, "heads": 12, "decoder": 512, "blocks": 16, "decoder_heads": 16},
    "large": {"encoder": 1024, "depth": 24, "heads": 16, "decoder": 512, "blocks": 16, "decoder_heads": 16},
}
PRESET_DEFAULTS: Mapping[str, Any] = {
    key: QuantizerConfig.model_fields[key].default for key in ("start", "reset_below", "reset_every")
}
QUANTIZERS: Mapping[str, Mapping[str, Any]] = {  # each sets the same keys, so that a later one leaves nothing behind
    "vq": {"codebooks": 1, "codes": 1024, **PRESET_DEFAULTS},
    "rq": {"codebooks": 4, "codes": 256, **PRESET_DEFAULTS},
    "beats": {"codebooks": 1, "codes": 1024, "start": "uniform", "reset_below": 0, "reset_every": 0},
}
# paper=literal: the switches in which bridle's defaults differ from the paper's text (docs/deviations.md).
LITERAL: Mapping[Path, Any] = {
    ("quantizer", "residual"): "perstage",  # §5: normalised "at the beginning of every codebook layer"
    ("quantizer", "reset_every"): 0,  # §3.3: "applied only in the first batch"
    ("loss", "commitment"): "sum",  # Eq. cb:loss: between z̃ and the summed q
    ("loss", "cosine"): "ratio",  # Eq. cos:loss: one ratio of sums
    ("loss", "centre_teacher"): "none",  # Eq. cos:loss: z as it is
    ("tokenizer", "position"): True,  # the text is silent; the released code adds positions before the projection
    ("tokenizer", "whiten"): None,  # §4.1: a random projection alone
    ("tokenizer", "components"): None,
    ("tokenizer", "standardise"): "dataset",  # §4.1: of patches as they are
    ("tokenizer", "item_axes"): None,
    ("tokenizer", "first"): "projection",
    ("tokenizer", "later"): "vit",  # Algorithm 1, line 5: a tokenizer of its own, trained
    ("quantizer", "restart"): False,  # Algorithm 1, line 6: started once
    ("encoder", "whiten"): None,  # §3: patches go to the encoder as they are
    ("encoder", "stem"): None,
    ("schedule", "iterations"): 2,  # Algorithm 1: R = 2
}


RENAMED: Mapping[str, str] = {}  # old key -> new key, both dotted


class Removed(NamedTuple):
    """A key that is gone."""

    why: str
    value: Any = None  # the only one that it can still have in the config of a run made before; it changes nothing


REMOVED: Mapping[str, Removed] = {
    "decoder.heads_see": Removed("it changed nothing", "features"),
    "encoder_phase.codes": Removed("encoder_phase.masks saves the same work", "live"),
    "finetune.weight_ema": Removed("no recipe averages weights", 0.0),
    "loss.patches": Removed("patches are always standardised", "standardised"),
    "loss.stage_weights": Removed("other weights than equal ones made no difference"),
}


def recipe_names() -> list[str]:
    """The recipes shipped with bridle."""
    return shipped_names("recipes")


def shipped_names(folder: str) -> list[str]:
    """The files in a folder of bridle/config, without their endings."""
    names = [item.name for item in (resources.files("bridle.config") / folder).iterdir()]
    return sorted(name.partition(".")[0] for name in names if name.endswith((".yaml", ".json")))


def is_data(recipe: str | FilePath) -> bool:
    """Is this a user's data, a folder or a list of files, and not a recipe?"""
    path = FilePath(recipe)
    return str(recipe) not in recipe_names() and (
        path.is_dir() or (path.is_file() and path.suffix not in (".yaml", ".yml"))
    )


def load_config(recipe: str | FilePath, overrides: Sequence[str] = ()) -> Config:
    """The config of a shipped recipe or a YAML file, with overrides on top."""
    name, text = _read(str(recipe), beside=None)
    table = _expand_presets(_with_parents(name, text, ()))
    return check(_lay(table, _expand_presets(_override_table(overrides))), name)


def read_config(path: FilePath, overrides: Sequence[str] = ()) -> Config:
    """The resolved config of a run directory, with overrides on top."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    table = _expand_presets(_without_removed(read_document(text, path.name)))
    return check(_lay(table, _expand_presets(_override_table(overrides))), path.name)


def _without_removed(table: Table) -> Table:
    """The table without keys that are gone, as long as they have the value that changed nothing."""
    same = {tuple(key.split(".")): removed.value for key, removed in REMOVED.items()}
    return {path: entry for path, entry in table.items() if path not in same or entry.value != same[path]}


def dump_config(config: Config) -> str:
    """The config as YAML with every value written out; `read_config` gives the same config back.

    Settings of registered modalities that the config does not use are left out: it can be read without them.
    """
    foreign = {entry.section for name, entry in SOURCES.items() if not entry.module and name != config.data.source}
    lines = []
    for key, value in config.model_dump(mode="json", exclude={key for key in foreign if key}).items():
        if not isinstance(value, dict):
            lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")  # JSON is YAML 1.2
            continue
        lines.append(f"{key}:")
        lines.extend(f"  {inner}: {json.dumps(item, ensure_ascii=False)}" for inner, item in value.items())
    return "\n".join(lines) + "\n"


def differences(a: Config, b: Config) -> list[str]:
    """Dotted keys in which two configs differ, with both values."""

    def leaves(value: Any, path: Path) -> dict[Path, Any]:
        if not isinstance(value, dict):
            return {path: value}
        return {k: v for key, item in value.items() for k, v in leaves(item, (*path, key)).items()}

    left, right = leaves(a.model_dump(mode="json"), ()), leaves(b.model_dump(mode="json"), ())
    return [
        f"{'.'.join(path)}: {left.get(path)} against {right.get(path)}"
        for path in left | right
        if left.get(path) != right.get(path)
    ]


def with_absolute_paths(config: Config) -> Config:
    """The config with paths that mean the same from any folder."""

    def absolute(section: BaseModel, *keys: str) -> dict[str, str]:
        given = {key: path for key in keys if (path := getattr(section, key)) is not None and "://" not in path}
        return {key: str(FilePath(path).expanduser().absolute()) for key, path in given.items()}

    data = config.data.model_copy(update=absolute(config.data, "root", "manifest"))
    encoder = config.encoder.model_copy(update=absolute(config.encoder, "weights"))
    return config.model_copy(update={"data": data, "encoder": encoder})


def with_statistics(config: Config, mean: Sequence[float], std: Sequence[float]) -> Config:
    """The config with normalisation written in."""
    data = config.data.model_copy(update={"mean": tuple(mean), "std": tuple(std)})
    return config.model_copy(update={"data": data})


def check(table: Table, name: str) -> Config:
    """Validate a table; every problem becomes a ConfigError that names file, line and key."""
    size_entry = table.get(("size",))
    size = size_entry.value if size_entry else "tiny"
    # An unknown size is refused below; with those of a known one no other key is missing.
    table = merge(_size_table(size if isinstance(size, str) and size in SIZES else "tiny"), table)
    try:
        return Config.model_validate(with_tuples(nest(table)))
    except ValidationError as error:
        # Members of a union each report the same key; the first word on a key is enough.
        first = {_known_part(tuple(map(str, p["loc"])), p["type"]): p for p in reversed(error.errors())}
        raise ConfigError("\n".join(_explain(p, table, name) for p in list(first.values())[::-1][:5])) from None


def _size_table(size: str) -> Table:
    s = SIZES[size]
    values = {
        ("encoder", "width"): s["encoder"], ("encoder", "depth"): s["depth"], ("encoder", "heads"): s["heads"],
        ("decoder", "width"): s["decoder"], ("decoder", "depth"): s["blocks"], ("decoder", "heads"): s["decoder_heads"],
        ("estimator", "width"): s["encoder"], ("estimator", "depth"): 3, ("estimator", "heads"): s["heads"],
    }  # fmt: skip
    return {path: Entry(value, f"size '{size}'") for path, value in values.items()}


def _lay(below: Table, above: Table) -> Table:
    """Merge two layers; a length given in steps above replaces one given in epochs below, and the other way round.

    Weights from elsewhere know plain patches: given above, they replace a whitening given below.
    """
    twins = {"steps": "epochs", "epochs": "steps", "warmup_steps": "warmup_epochs", "warmup_epochs": "warmup_steps"}
    replaced = {(*path[:-1], twins[path[-1]]) for path, e in above.items() if path[-1] in twins and e.value is not None}
    weights = above.get(("encoder", "weights"))
    if weights is not None and weights.value is not None:
        replaced.add(("encoder", "whiten"))
    return merge({path: entry for path, entry in below.items() if path not in replaced}, above)


def _read(recipe: str, beside: FilePath | None) -> tuple[str, str]:
    path = FilePath(recipe)
    if recipe.endswith((".yaml", ".yml")):
        path = beside / path if beside is not None else path
        try:
            return str(path), path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UsageError(f"{path}: no such file.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}.") from error
    if recipe in recipe_names():
        file = resources.files("bridle.config") / "recipes" / f"{recipe}.yaml"
        return f"{recipe}.yaml", file.read_text(encoding="utf-8")
    near = difflib.get_close_matches(recipe, recipe_names(), 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"no recipe {quoted(recipe)}.{hint} `bridle recipes` lists them; a file needs the ending .yaml.")


def _with_parents(name: str, text: str, chain: tuple[str, ...]) -> Table:
    if name in chain:
        raise ConfigError(f"{chain[-1]}: 'extends' goes in a circle: {' -> '.join((*chain, name))}.")
    table = read_document(text, name)
    parent = table.pop(("extends",), None)
    if parent is None:
        return table
    if not isinstance(parent.value, str):
        raise ConfigError(f"{parent.where}: 'extends' takes the name of one recipe or file.")
    # A shipped recipe is named like a file without a folder: its parents are shipped recipes too.
    below = _with_parents(*_read(parent.value, beside=FilePath(name).parent), (*chain, name))
    return _lay(_expand_presets(below), _expand_presets(table))


def _override_table(overrides: Sequence[str]) -> Table:
    """The overrides as one table; later ones win, but `paper=literal` gives way to single keys wherever it stands."""
    table: Table = {}
    single: set[Path] = set()  # keys given one by one
    literal: Table = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        where = f"override {quoted(text)}"
        if not equals or not key.strip():
            raise UsageError(f"{where}: expected key=value, for example encoder.depth=6.")
        path = tuple(key.strip().split("."))
        # A path is a path: `2024`, `a #b` and `a: b` are folders that YAML would read as something else.
        found = value if path == ("data", "root") and value != "null" else read_value(value, where)
        given = _expand_presets({path: Entry(found, where)})
        if path == ("paper",):
            literal = given
            continue
        table = merge(table, given)
        single = (single - given.keys()) | ({path} & given.keys())
    if not literal:
        return table
    start = table.get(("quantizer", "start"))
    if start is not None and start.value == "uniform":  # §3.3: uniform on [-1, 1]
        table = merge(table, {("quantizer", "start"): Entry("uniform-raw", start.where)})
    return merge(table, {path: entry for path, entry in literal.items() if path not in single})


def _expand_presets(table: Table) -> Table:
    """Shorthands written out, below the keys that stand beside them."""
    presets: Table = {}
    paper, quantizer = table.get(("paper",)), table.get(("quantizer",))
    if quantizer is not None:
        if not isinstance(quantizer.value, str) or quantizer.value not in QUANTIZERS:
            raise ConfigError(
                f"{quantizer.where}: 'quantizer' is a mapping or one of the presets {', '.join(QUANTIZERS)}; "
                f"got {quoted(quantizer.value)}."
            )
        chosen = QUANTIZERS[quantizer.value]
        presets |= {("quantizer", key): Entry(value, quantizer.where) for key, value in chosen.items()}
    if paper is not None:
        if paper.value != "literal":
            raise ConfigError(f"{paper.where}: 'paper' has one value, literal; got {quoted(paper.value)}.")
        presets |= {path: Entry(value, paper.where) for path, value in LITERAL.items()}
    return presets | {path: entry for path, entry in table.items() if path not in (("quantizer",), ("paper",))}


def _explain(problem: Any, table: Table, name: str) -> str:
    path = tuple(str(part) for part in problem["loc"])
    path = _known_part(path, problem["type"])
    dotted = ".".join(path)
    if problem["type"] == "extra_forbidden":
        whole = next((other for other in table if other[: len(path)] == path), path)  # of an unknown section, its key
        return f"{_place(path, table, name)}: {_unknown_key(whole)}"
    if problem["type"] == "missing":
        return f"{name}: missing key {quoted(dotted)}; add it to the file or give {dotted}=… on the command line."
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
        key, colon, rest = message.partition(": ")
        if colon and " " not in key:
            full = path + tuple(key.split(".")) if path and not key.startswith(path[0] + ".") else tuple(key.split("."))
            return f"{_place(full, table, name)}: {'.'.join(full)}: {rest.rstrip('.')}."
        return f"{name}: {message}"
    got = quoted(problem.get("input"), 60)
    return f"{_place(path, table, name)}: {dotted}: {problem['msg'][0].lower()}{problem['msg'][1:]}; got {got}."


def _known_part(path: Path, kind: str) -> Path:
    """Cut what pydantic adds behind a key (union members, list positions) from an error's location."""
    model: type[BaseModel] = Config
    for depth, key in enumerate(path):
        field = model.model_fields.get(key)
        if field is None:
            return path[: depth + 1] if kind == "extra_forbidden" else path[:depth]
        nested = field.annotation
        if not (isinstance(nested, type) and issubclass(nested, BaseModel)):
            return path[: depth + 1]
        model = nested
    return path


def _place(path: Path, table: Table, name: str) -> str:
    """Where the key was written: the entry itself, else the first entry below or above it, else the file."""
    if path in table:
        return table[path].where
    near = [entry.where for other, entry in table.items() if other[: len(path)] == path or path[: len(other)] == other]
    return near[0] if near else name


def _unknown_key(path: Path) -> str:
    dotted = ".".join(path)
    if dotted in RENAMED:
        return f"key {dotted!r} is now {RENAMED[dotted]!r}."
    if dotted in REMOVED:
        return f"key {dotted!r} was removed because {REMOVED[dotted].why}; delete it."
    if near := _near_keys(path):
        return f"unknown key {quoted(dotted)}; did you mean {' or '.join(map(repr, near))}?"
    section = Config.model_fields.get(path[0]) if len(path) > 1 else None
    names = Config.model_fields if section is None else section.annotation.model_fields  # type: ignore[union-attr]
    return f"unknown key {quoted(dotted)}; the keys here are {', '.join(names)}."


def setting_named(word: str) -> str | None:
    """The dotted key that a word ends, that of `runtime` if it is one of several; None if there is no such key."""
    found = [key for key in _all_keys(Config, ()) if key.rpartition(".")[2] == word]
    return next((key for key in found if key.startswith("runtime.")), found[0] if found else None)


def _near_keys(path: Path) -> list[str]:
    """Up to three keys that may be meant: of the same last word in other sections, or else of similar letters."""
    dotted, keys = ".".join(path), _all_keys(Config, ())

    def likeness(key: str) -> float:
        return difflib.SequenceMatcher(None, dotted, key).ratio()

    same = [key for key in keys if key.rpartition(".")[2] == path[-1]]
    if same:
        return sorted(same, key=likeness, reverse=True)[:3] if len(path) > 1 else same[:3]
    best = max(keys, key=likeness)
    if likeness(best) >= 0.7:
        return [best]
    words = difflib.get_close_matches(path[-1], [key.rpartition(".")[2] for key in keys], 1, cutoff=0.75)
    return [key for key in keys if words and key.rpartition(".")[2] == words[0]][:3]


def _all_keys(model: type[BaseModel], above: Path) -> list[str]:
    """Every dotted key of a config, sections too."""
    found = []
    for name, field in model.model_fields.items():
        found.append(".".join((*above, name)))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += _all_keys(field.annotation, (*above, name))
    return found
