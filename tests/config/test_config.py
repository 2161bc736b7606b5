"""Configs: layers, presets, strictness, and messages that name file, line and the nearest valid key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bridle.config import differences, dump_config, load_config, read_config, recipe_names
from bridle.config.load import LITERAL
from bridle.config.strict_yaml import read_document, read_value
from bridle.errors import ConfigError, UsageError
from bridle.models.build import build_nets


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_loads_and_survives_the_round_trip(recipe: str, tmp_path: Path) -> None:
    config = load_config(recipe)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
def test_every_recipe_builds_on_the_meta_device_in_every_size(recipe: str, size: str) -> None:
    config = load_config(recipe, [f"size={size}"])
    with torch.device("meta"):
        for trained in (False, True):
            nets = build_nets(config, later_tokenizer=trained)
            x = torch.empty(2, *config.geometry.build().shape)
            assert nets.encoder(x).z.shape == (2, config.geometry.build().tokens, config.encoder.width)


def test_scientific_notation_is_a_number() -> None:
    assert load_config("digits-tiny", ["encoder_phase.learning_rate=5e-4"]).encoder_phase.learning_rate == 5e-4
    assert read_document("a: 5e-4\nb: 1_000\nc: 0x10\nd: no", "f")[("a",)].value == 5e-4
    assert read_value("no", "f") == "no"  # YAML 1.2: not a boolean


def test_a_typo_names_file_line_and_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits-tiny\nname: mine\nquantizer:\n  codebook: 3\n")
    said = r"mine\.yaml:4: unknown key 'quantizer\.codebook'; did you mean 'quantizer\.codebooks'\?"
    with pytest.raises(ConfigError, match=said):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("encoder.steps=3", "unknown key 'encoder.steps'; did you mean 'encoder_phase.steps' or"),
        ("learning_rate=1e-3", "did you mean 'encoder_phase.learning_rate' or"),
        ("encodr.depth=3", "unknown key 'encodr.depth'; did you mean 'encoder.depth' or"),
        ("runtime.devise=cpu", "did you mean 'runtime.device'?"),
        ("mask.zzz=1", "the keys here are kind, ratio, predict."),
    ],
)
def test_an_unknown_key_is_looked_for_in_all_sections(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("digits-tiny", [override])
    assert said in str(caught.value)


def test_an_unknown_size_is_the_only_problem_that_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("digits-tiny", ["size=huge"])
    assert str(caught.value).startswith("override 'size=huge': size:") and "\n" not in str(caught.value)


def test_a_duplicate_key_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits-tiny\nname: a\nseed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:4: key 'seed' is given twice"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("encoder.heads=5", "5 heads do not divide width 96; try encoder.heads=4"),
        ("geometry.patch=[5, 5]", r"\[5, 5\] does not divide"),
        ("decoder.window=[16, 16]", r"decoder\.window: \[16, 16\] is larger than grid \[4, 4\]; use 'auto'"),
        ("mask.ratio=0.98", "leaves nothing visible"),
        ("mask.ratio=0.001", "nothing to predict"),
        ("encoder_phase.micro_batch=7", "7 does not divide batch 64"),
        ("quantizer=vqq", "presets vq, rq, beats"),
        ("quantizer.codes=[3, 4]", "2 sizes given for 4 codebooks"),
        ("seed=1.5", "integer"),
        ("encoder.width=.nan", "integer"),
        ("size=huge", "'tiny', 'small', 'base' or 'large'"),
        ("geometry.patch=[16, 16]", "single token"),
    ],
)
def test_impossible_settings_are_refused_with_what_to_do(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("digits-tiny", [override])


def test_axis_ratios_must_match_the_axes() -> None:
    with pytest.raises(ConfigError, match="one ratio for each of 2 axes"):
        load_config("digits-tiny", ["mask.kind=axes", "mask.ratio=[0.5]"])


def test_every_problem_is_told_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("digits-tiny", ["mask.ratio=1.5", "sede=1"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert "did you mean 'seed'" in "".join(lines)


@pytest.mark.parametrize(
    "text", ["a: &x 1\nb: *x", "a: !!python/object:os.system x", "a: [1", "- 1", "a: {b: !t 1}", "? [1]\n: 2", "\x00"]
)
def test_hostile_yaml_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_document(text, "hostile.yaml")


def test_extends_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load_config(tmp_path / "a.yaml")


def test_a_child_overrides_its_parent_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: digits-tiny\nname: a\nencoder: {depth: 7}\n")
    config = load_config(tmp_path / "a.yaml")
    assert (config.encoder.depth, config.encoder.width) == (7, 96)


def test_a_length_in_steps_replaces_one_in_epochs() -> None:
    config = load_config("image", ["encoder_phase.steps=10"])
    assert (config.encoder_phase.steps, config.encoder_phase.epochs) == (10, None)


def test_the_quantizer_presets_differ_only_as_documented() -> None:
    base = load_config("imagenet1k")
    vq = load_config("imagenet1k", ["quantizer=vq"])
    assert [line.split(":")[0] for line in differences(base, vq)] == ["quantizer.codebooks", "quantizer.codes"]
    beats = load_config("imagenet1k", ["quantizer=beats"]).quantizer
    assert (beats.codebooks, beats.codes, beats.start, beats.reset_below) == (1, 1024, "uniform", 0)


def test_a_preset_and_a_single_key_go_together_in_any_order() -> None:
    for overrides in (["quantizer=beats", "quantizer.codes=128"], ["quantizer.width=8", "quantizer=beats"]):
        found = load_config("digits-tiny", overrides).quantizer
        assert (found.codebooks, found.start, found.reset_below) == (1, "uniform", 0)
    assert load_config("digits-tiny", ["quantizer=beats", "quantizer.codes=128"]).quantizer.codes == 128


def test_a_later_preset_leaves_nothing_of_an_earlier_one() -> None:
    for name in ("rq", "vq", "beats"):
        alone = load_config("imagenet1k", [f"quantizer={name}"])
        for before in ("rq", "vq", "beats"):
            assert load_config("imagenet1k", [f"quantizer={before}", f"quantizer={name}"]) == alone


def test_a_preset_replaces_that_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: imagenet1k\nname: a\nquantizer: beats\n")
    found = load_config(tmp_path / "a.yaml", ["quantizer=rq"]).quantizer
    assert found == load_config("imagenet1k").quantizer


def test_paper_literal_sets_every_switch_as_the_papers_text_has_it() -> None:
    ours, literal = load_config("audioset2m"), load_config("audioset2m", ["paper=literal"])
    assert differences(ours, literal) == [
        "tokenizer.position: False against True",
        "quantizer.residual: once against perstage",
        "quantizer.reset_every: 20 against 0",
        "loss.commitment: stages against sum",
        "loss.cosine: mean against ratio",
        "loss.centre_teacher: position against none",
    ]


def test_paper_literal_undoes_every_addition_of_ours() -> None:
    ours = ["encoder.whiten=0.1", "tokenizer.whiten=0.5", "tokenizer.components=4", "quantizer.restart=true"]
    recipe = load_config("image", ["paper=literal"])
    assert recipe.schedule.iterations == 2  # the recipe for one's own data has one
    found = load_config("digits-tiny", ["paper=literal"])
    assert (found.encoder.whiten, found.tokenizer.whiten, found.quantizer.restart) == (None, None, False)
    kept = load_config("digits-tiny", [*ours, "paper=literal"])  # single keys win
    assert (kept.encoder.whiten, kept.tokenizer.components) == (0.1, 4)
    for recipe in recipe_names():  # items at their own level, or patches: ours
        tokenizer = load_config(recipe, ["paper=literal"]).tokenizer
        assert (tokenizer.standardise, tokenizer.item_axes) == ("dataset", None)


def test_every_switch_of_paper_literal_is_listed_with_its_effect() -> None:
    page = (Path(__file__).parents[2] / "docs/deviations.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.partition("| switch |")[2].partition("\n\n")[0].splitlines()[2:]]
    effects = {name: row[4].strip() for row in rows for name in re.findall(r"`([\w.]+)", row[1])}
    assert set(effects) == {*map(".".join, LITERAL), "quantizer.start"}
    assert all(effects.values())


def test_paper_literal_gives_way_to_single_keys_and_not_to_presets() -> None:
    for overrides in (["paper=literal", "quantizer=rq"], ["quantizer=rq", "paper=literal"]):
        found = load_config("audioset2m", [*overrides, "loss.cosine=mean"])
        assert (found.quantizer.reset_every, found.loss.cosine, found.loss.commitment) == (0, "mean", "sum")
    uniform = load_config("audioset2m", ["paper=literal", "quantizer.start=uniform"])
    assert uniform.quantizer.start == "uniform-raw"  # the paper's uniform is on [-1, 1]
    with pytest.raises(ConfigError, match="'paper' has one value, literal; got 'ours'"):
        load_config("audioset2m", ["paper=ours"])


def test_a_file_can_be_literal_too(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: imagenet1k\nname: a\npaper: literal\nloss: {cosine: mean}\n")
    found = load_config(tmp_path / "a.yaml")
    assert (found.quantizer.reset_every, found.loss.cosine, found.loss.commitment) == (0, "mean", "sum")


@pytest.mark.parametrize("second", ["encoder: 3", "encoder: {depth: 3}"])
def test_a_key_written_in_two_ways_is_given_twice(second: str) -> None:
    with pytest.raises(ConfigError, match=r"twice\.yaml:2: key .* is given twice"):
        read_document(f"encoder.depth: 2\n{second}", "twice.yaml")


@pytest.mark.parametrize("key", ["decoder.width", "quantizer.codebooks", "quantizer.codes", "schedule.iterations"])
def test_absurd_sizes_are_refused_at_once(key: str) -> None:
    with pytest.raises(ConfigError, match="less than or equal"):
        load_config("digits-tiny", [f"{key}=99999999999999999999"])


@pytest.mark.parametrize("folder", ["2024", "a #b", "a: b", "true", "[x]"])
def test_a_data_folder_is_taken_as_it_is_written(folder: str) -> None:
    assert load_config("image", [f"data.root={folder}"]).data.root == folder


def test_a_config_does_not_change() -> None:
    config = load_config("digits-tiny")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_an_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'cifar10-tiny'"):
        load_config("cifar10tiny")


def test_a_removed_key_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"'decoder\.heads_see' was removed because it changed nothing; delete it"):
        load_config("digits-tiny", ["decoder.heads_see=codes"])


def test_the_config_of_a_run_may_hold_a_removed_key_that_changed_nothing(tmp_path: Path) -> None:
    config, file = load_config("digits-tiny"), tmp_path / "config.yaml"
    for value in ("standardised", "plain"):
        file.write_text(dump_config(config).replace("loss:\n", f'loss:\n  patches: "{value}"\n'), encoding="utf-8")
        if value == "standardised":
            assert read_config(file) == config
        else:
            with pytest.raises(ConfigError, match=r"'loss\.patches' was removed because patches are always standard"):
                read_config(file)


def test_a_renamed_key_is_refused_with_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.config.load.RENAMED", {"encoder.deep": "encoder.depth"})
    with pytest.raises(ConfigError, match=r"override 'encoder\.deep=6': key 'encoder\.deep' is now 'encoder\.depth'"):
        load_config("digits-tiny", ["encoder.deep=6"])
