"""One record per modality: what is known of it, how others find it, and how a user adds one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bridle as package
from bridle.config import load_config
from bridle.config.data_schema import SOURCES
from bridle.config.load import dump_config, read_config
from bridle.config.schema import Config
from bridle.config.section import Section
from bridle.data.build import open_data, open_reader
from bridle.data.file_source import FileSource, open_splits
from bridle.data.modality import Modality, file_modalities, find_modality, modality_of_file, register_modality
from bridle.data.sources import Sample, Splits
from bridle.errors import ConfigError, DataError, UsageError

PACKAGE = Path(package.__file__).parent
# Where such a word is not the name of a modality, or the modality itself lives there.
ALLOWED = {
    "config/data_schema.py": "the table of sources",
    "data/audio/check.py": "a part of the modality",
    "data/listing/layouts.py": "a folder of ESC-50, headings of lists",
    "data/arrays/memory.py": "keys of the dicts that data sets give",
}


class SmellConfig(Section):
    """Settings of the modality below."""

    depth: int = 3


def smell(**changes: object) -> Modality:
    def open_nothing() -> Splits:
        raise AssertionError("not opened here")

    return Modality(**{"name": "smell", "kind": "smell", "items": "smells", "open_embedded": open_nothing, **changes})  # type: ignore[arg-type]


@pytest.fixture
def registry() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    from bridle.data import modality

    sources, records, fields = dict(SOURCES), dict(modality._records), dict(Config.model_fields)
    yield
    SOURCES.clear()
    SOURCES.update(sources)
    modality._records.clear()
    modality._records.update(records)
    for name in set(Config.model_fields) - set(fields):
        del Config.model_fields[name]
    Config.model_rebuild(force=True)


def test_every_source_has_a_record_of_its_name() -> None:
    assert {name: find_modality(name).name for name in SOURCES} == {name: name for name in SOURCES}


def test_every_modality_of_files_can_be_opened_read_and_checked() -> None:
    for modality in file_modalities():
        assert modality.extensions
        assert modality.open_reader is not None
        assert modality.check_file is not None
        assert load_config(modality.kind).data.source == modality.name


def test_an_ending_that_two_modalities_read_belongs_to_the_first() -> None:
    assert ".mp4" in find_modality("audio").extensions
    found = modality_of_file("A.MP4")
    assert found is not None and found.name == "video"
    assert modality_of_file("a.txt") is None


def test_an_unknown_source_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"data.source: 'imags' is not a known source; did you mean 'images'\?"):
        load_config("image", ["data.source=imags"])
    with pytest.raises(ConfigError, match=r"expected one of digits, .*signals, dataset.*bridle --plugin FILE"):
        load_config("image", ["data.source=zzz"])


@pytest.mark.usefixtures("registry")
def test_a_registered_modality_is_a_source_with_a_section_of_the_config(tmp_path: Path) -> None:
    register_modality(smell(section=SmellConfig))
    config = load_config("signal", ["data.source=smell", "smell.depth=5"])
    assert config.smell == SmellConfig(depth=5)  # type: ignore[attr-defined]
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "config.yaml") == config
    with pytest.raises(ConfigError, match=r"unknown key 'smell.dept'; did you mean 'smell\.depth'"):
        load_config("signal", ["data.source=smell", "smell.dept=5"])


@pytest.mark.usefixtures("registry")
def test_runs_of_other_modalities_are_written_without_that_section() -> None:
    register_modality(smell(section=SmellConfig))
    assert "smell" not in dump_config(load_config("signal"))
    assert "smell:\n  depth: 3\n" in dump_config(load_config("signal", ["data.source=smell"]))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "audio"}, "'audio' comes with bridle"),
        ({"name": "encoder"}, "'encoder' is a section of every config"),
        ({"name": "My Smell"}, "small letters"),
        ({"extensions": ("sml",)}, "'sml' is not an ending"),
        ({"open_embedded": None}, "give open_files and extensions"),
    ],
)
def test_a_record_that_could_not_work_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        register_modality(smell(**changes))
    assert "smell" not in SOURCES


@pytest.mark.usefixtures("registry")
def test_registering_again_replaces_the_record() -> None:
    register_modality(smell(items="smells"))
    register_modality(smell(items="scents"))
    assert find_modality("smell").items == "scents"


@pytest.mark.usefixtures("registry")
def test_the_modality_of_the_documentation_is_registered_from_python(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    code = page.split("## A new modality")[1].split("```python\n")[1].split("```")[0]
    exec(code, {})
    lines = [f"{frame} {-frame}" for frame in range(30)]
    (tmp_path / "a.ecg").write_text("\n".join(["# rate 250", *lines]))
    (tmp_path / "list.csv").write_text("path,start,end,label\na.ecg,0.04,0.08,x\na.ecg,0,,y\n")
    shape = ("geometry.channels=2", "geometry.input=[16]", "geometry.patch=[4]")
    config = load_config("signal", ["data.source=ecg", f"data.manifest={tmp_path / 'list.csv'}", *shape])
    data = open_data(config).train
    first = data.load(0, None)  # frames 10 to 19, then the last one goes on
    assert first.x[0].tolist() == [*range(10, 20), *[19.0] * 6]
    assert first.valid is not None and first.valid.tolist() == [True, True, True, False]
    signs = {float(data.load(1, torch.Generator().manual_seed(seed)).x[0].sum().sign()) for seed in range(20)}
    assert signs == {-1.0, 1.0}  # its own augmentation
    reader = open_reader(config)
    assert [window.start for window in reader.windows(tmp_path / "a.ecg")] == [0, 16]
    assert reader.frame_seconds == 1 / 250
    with pytest.raises(DataError, match="has 250 samples per second; expected 500"):
        own = ["data.source=ecg", f"data.root={tmp_path}", "ecg.sample_rate=500.0"]
        open_data(load_config("signal", [*own, *shape])).train.load(0, None)


class Grids(FileSource):
    """Rows of digits in text files as samples (1, 4, 4)."""

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        rows = Path(str(self.paths[index])).read_text().split()
        return Sample(torch.tensor([[[float(digit) for digit in row] for row in rows]]), self.label(index))


@pytest.mark.usefixtures("registry")
def test_a_whole_record_needs_a_source_with_load_and_nothing_else(tmp_path: Path) -> None:
    grids = Modality(
        name="grids",
        kind="grid",
        items="grids",
        extensions=(".grid",),
        open_files=lambda config, listing: open_splits(listing, Grids),
    )
    register_modality(grids)
    for name, digit in (("train/a/1", 1), ("train/b/2", 2), ("test/b/3", 3)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.grid").write_text("\n".join([4 * str(digit)] * 4))
    shape = ("geometry.channels=1", "geometry.input=[4,4]", "geometry.patch=[2,2]", "mask.ratio=0.5")
    config = load_config("signal", ["data.source=grids", f"data.root={tmp_path}", *shape])
    splits = open_data(config)
    assert splits.test is not None
    assert splits.train.load(1, None).label == splits.test.load(0, None).label == 1
    assert float(splits.test.load(0, None).x.mean()) == 3.0
    assert grids.drawing_of(config.geometry.build()) == "picture"
    with pytest.raises(UsageError, match="a model trained on 'grids' knows no kind of file"):
        open_reader(config)


def names_of_modalities(tree: ast.AST) -> set[str]:
    """Names and kinds of modalities among the strings of a module; `needs("audio")` names an extra of the package."""
    words = {word for modality in file_modalities() for word in (modality.name, modality.kind)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "needs"]
    extras = {id(argument) for call in calls for argument in call.args}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in extras]
    return {node.value for node in strings if node.value in words}


def test_no_module_names_a_modality_but_its_own() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): names_of_modalities(ast.parse(path.read_text())) for path in files()}
    assert {name: words for name, words in found.items() if words and name not in ALLOWED} == {}


def files() -> Iterator[Path]:
    """All modules but those that hold records."""
    return (path for path in PACKAGE.rglob("*.py") if path.name != "modality.py")


def test_the_search_for_names_sees_a_comparison() -> None:
    assert names_of_modalities(ast.parse("if source == 'audio': pass")) == {"audio"}
