"""Exported folders: what is in them, what comes back, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from conftest import SMALL
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import bridle
from bridle.cli import app
from bridle.data.embedded.sets import DigitReader, digits
from bridle.errors import CheckpointError, ConfigError, UsageError
from bridle.evaluate.codebooks.command import examine_run
from bridle.evaluate.finetune import find_start
from bridle.evaluate.probe_command import probe_configs, probe_run
from bridle.export.card import plain
from bridle.export.folder import write_folder
from bridle.export.hub import find_model, folder_to_work_in
from bridle.geometry import Geometry
from bridle.infer.model import Model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A run of two steps per phase, loaded."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    bridle.pretrain("digits-tiny", out=out, overrides=[*SMALL, "encoder.class_token=true"], max_steps=2)
    return bridle.load(out)


@pytest.fixture
def folder(model: Model, tmp_path: Path) -> Path:
    return model.save_pretrained(tmp_path / "exported", data_licence="CC BY 4.0")


def some_digits(count: int = 3) -> torch.Tensor:
    return torch.stack([digits().train.load(i, None).x for i in range(count)])


def test_a_folder_gives_back_the_same_model(model: Model, folder: Path) -> None:
    x, again = some_digits(), Model.from_pretrained(folder)
    assert torch.equal(again.encode(x), model.encode(x))
    assert torch.equal(again.encode(x, pool="class"), model.encode(x, pool="class"))
    assert torch.equal(again.tokenize(x), model.tokenize(x))
    assert again.fingerprint == model.fingerprint
    assert again.geometry == model.geometry
    assert again.facts.iteration == 2


def test_a_folder_holds_the_published_files_and_their_hashes(folder: Path) -> None:
    names = {"model.safetensors", "config.json", "config.yaml", "manifest.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == names
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == names - {"manifest.json", "README.md"}
    for name, entry in listed.items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert {name.split(".")[0] for name in load_file(folder / "model.safetensors")} == {"encoder", "tokenizer"}
    assert json.loads((folder / "config.json").read_text())["format"] == 1


def test_an_export_can_be_exported_again_with_what_was_known(model: Model, folder: Path, tmp_path: Path) -> None:
    again = bridle.load(folder)
    again.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.yaml", "config.json", "README.md"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name
    assert model.trained().facts.evaluation is not None


def test_paths_of_the_machine_stay_at_home(model: Model, tmp_path: Path) -> None:
    data = model.config.data.model_copy(update={"root": "/home/somebody/photos", "manifest": None})
    encoder = model.config.encoder.model_copy(update={"weights": "/home/somebody/vit.safetensors"})
    config = model.config.model_copy(update={"data": data, "encoder": encoder})
    trained = model.trained()._replace(config=config)
    write_folder(tmp_path / "e", trained)
    for path in (tmp_path / "e").iterdir():
        assert b"somebody" not in path.read_bytes(), path.name
    assert '"vit.safetensors"' in (tmp_path / "e" / "config.yaml").read_text()


def test_the_card_tells_scores_health_licence_and_use(model: Model, folder: Path) -> None:
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: bridle\n")
    evaluation = model.trained().facts.evaluation
    assert evaluation is not None
    accuracy = evaluation["probe"]["accuracy"]
    assert f"| this model | {100 * accuracy:.1f} % |" in card
    assert "| raw input |" in card
    assert "| untrained encoder |" in card
    assert "licence of the data: CC BY 4.0" in card
    assert "| 4 | 16 |" in card  # the fourth codebook and its codes
    assert "bridle.load(" in card
    assert plain("a|b\n# <script>") == r"a\|b \# \<script\>"


def test_half_precision_halves_the_size_and_keeps_the_codebooks(model: Model, folder: Path, tmp_path: Path) -> None:
    half = model.save_pretrained(tmp_path / "half", half=True)
    before, after = (load_file(path / "model.safetensors") for path in (folder, half))
    assert after["encoder.norm.weight"].dtype == torch.float16
    assert torch.equal(after["tokenizer.quantizer.stages.0.code"], before["tokenizer.quantizer.stages.0.code"])
    again = bridle.load(half)
    assert again.encoder.norm.weight.dtype == torch.float32
    assert torch.allclose(again.encode(some_digits()), model.encode(some_digits()), atol=2e-2)


def test_nothing_is_replaced_unasked(model: Model, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists; give --overwrite"):
        model.save_pretrained(folder)
    model.save_pretrained(folder, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not an exported model"):
        model.save_pretrained(tmp_path / "other", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "other"]  # no temporary folders


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: flip(f / "model.safetensors"), "SHA-256 is not the one in the manifest"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:999]), "damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "damaged or incomplete"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json"),
        (lambda f: rewrite(f / "manifest.json", files={}), "its manifest names no model.safetensors"),
        (lambda f: (f / "config.json").write_text("no"), "damaged or not written by bridle"),
        (lambda f: rewrite(f / "config.json", format=2, bridle="9.0"), "has format '2'.*'9.0': install"),
        (lambda f: flip(f / "config.yaml"), "config.yaml: damaged"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused_in_one_line(folder: Path, damage: Any, reason: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=reason) as caught:
        bridle.load(folder)
    assert "\n" not in str(caught.value)


def test_a_card_may_be_edited_and_graphs_may_be_left_out(folder: Path) -> None:
    (folder / "README.md").write_text("mine")
    rewrite(folder / "manifest.json", graphs={"encoder.onnx": {"bytes": 1, "sha256": "0"}})
    assert bridle.load(folder).geometry.input == (16, 16)


def test_an_exported_folder_has_one_iteration(folder: Path) -> None:
    assert bridle.load(folder, iteration=2).facts.iteration == 2
    with pytest.raises(UsageError, match="an exported model of iteration 2; it has no iteration 1"):
        bridle.load(folder, iteration=1)


def test_commands_that_judge_a_run_judge_an_export(folder: Path, model: Model) -> None:
    found = json.loads(probe_run(folder, []).read_text())
    evaluation = model.trained().facts.evaluation
    assert evaluation is not None
    assert found["evaluations"][0]["probe"]["accuracy"] == evaluation["probe"]["accuracy"]
    examined = json.loads(examine_run(folder, items=20).read_text())
    assert [entry["iteration"] for entry in examined["evaluations"]] == [2]
    with pytest.raises(UsageError, match="holds an exported model and no run"):
        bridle.pretrain("digits-tiny", out=folder, overrides=SMALL, max_steps=2)


def test_a_probe_of_an_export_does_not_mind_where_its_encoder_began(model: Model, tmp_path: Path) -> None:
    encoder = model.config.encoder.model_copy(update={"weights": str(tmp_path / "gone.safetensors")})
    trained = model.trained()._replace(config=model.config.model_copy(update={"encoder": encoder}))
    write_folder(tmp_path / "e", trained)
    settings, tuned = probe_configs(tmp_path / "e", ["probe.items=20"])
    assert (settings.encoder.weights, tuned.probe.items) == ("gone.safetensors", 20)
    with pytest.raises(ConfigError, match=r"encoder\.weights"):
        probe_configs(tmp_path / "e", ["encoder.weights=other.safetensors"])


def test_weights_that_were_loaded_in_half_precision_are_stored_as_the_card_says(folder: Path, tmp_path: Path) -> None:
    loaded = bridle.load(folder, device="cpu", dtype=torch.float16)
    stored = load_file(loaded.save_pretrained(tmp_path / "again") / "model.safetensors")
    assert {value.dtype for value in stored.values()}.isdisjoint({torch.float16, torch.bfloat16})
    assert "stored as float32" in (tmp_path / "again" / "README.md").read_text()
    half = load_file(loaded.save_pretrained(tmp_path / "half", half=True) / "model.safetensors")
    assert half["encoder.norm.weight"].dtype == torch.float16
    assert loaded.encoder.norm.weight.dtype == torch.float16  # the model at hand is left as it was


def test_settings_of_a_later_version_are_told_with_the_versions(folder: Path) -> None:
    settings, listed = folder / "config.yaml", json.loads((folder / "manifest.json").read_text())
    settings.write_text(settings.read_text() + "\nlater: 3\n")
    content = settings.read_bytes()
    listed["files"]["config.yaml"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(folder / "manifest.json", **listed)
    with pytest.raises(CheckpointError, match=r"was written by bridle .*unknown key 'later'.*or a newer one"):
        bridle.load(folder)


def test_codes_that_no_codebook_holds_are_refused(model: Model) -> None:
    for wrong in (np.full((2, 4), 16), np.full((2, 4), -1), np.full((2, 4), 0.5)):
        with pytest.raises(UsageError, match="code"):
            model.decode_codes(wrong)
    assert torch.equal(model.decode_codes(np.ones((2, 4), np.uint8)), model.decode_codes(torch.ones(2, 4).long()))
    with pytest.raises(UsageError, match="is a single path; give a list"):
        list(model.tokenize_files("a.png"))


def test_an_encoder_of_patches_is_not_said_to_have_predicted_codes(model: Model, tmp_path: Path) -> None:
    trained = model.trained()
    facts = trained.facts._replace(parts=("encoder",))
    write_folder(tmp_path / "e", trained._replace(own_tokenizer=None, facts=facts))
    card = (tmp_path / "e" / "README.md").read_text()
    assert "to predict the patches that it does not see.\nIt has no tokenizer" in card
    assert "residual-quantization" not in card
    found = json.loads(probe_run(tmp_path / "e", ["probe.items=40", "probe.cache_mb=0"]).read_text())
    assert "codebooks" not in found["evaluations"][0]
    assert found["method"] == "encoder"  # whatever its config says of codebooks that are not here
    with pytest.raises(UsageError, match="has no tokenizer, so no codes and no codebooks"):
        examine_run(tmp_path / "e", items=20)


def test_an_encoder_from_elsewhere_is_called_imported(model: Model, tmp_path: Path) -> None:
    trained = model.trained()
    facts = trained.facts._replace(iteration=1, parts=("encoder",), imported={"file": "vit.safetensors", "notes": []})
    write_folder(tmp_path / "e", trained._replace(own_tokenizer=None, facts=facts))
    ended = CliRunner().invoke(app, ["probe", str(tmp_path / "e"), "probe.items=40", "data.views=1"])
    assert ended.exit_code == 0, ended.output
    assert "\n  imported " in ended.output and "iter1" not in ended.output
    # What to run next sees the data that was given, which an exported folder does not know.
    assert f"Next:  bridle knn {tmp_path / 'e'} data.views=1   ·   bridle report {tmp_path / 'e'}" in ended.output
    ended = CliRunner().invoke(app, ["knn", str(tmp_path / "e"), "probe.items=40", "data.views=1"])
    assert f"Next:  bridle probe {tmp_path / 'e'} data.views=1   ·" in ended.output
    assert "RQ" not in ended.output


def test_an_export_starts_an_encoder(folder: Path, model: Model, tmp_path: Path) -> None:
    settings = [*SMALL, f"encoder.weights={folder}", "encoder.class_token=true", "probe.enabled=false"]
    settings += ["schedule.iterations=1", "encoder_phase.learning_rate=1e-30", "encoder_phase.weight_decay=0.0"]
    bridle.pretrain("digits-tiny", out=tmp_path / "run", overrides=settings, max_steps=1)
    again = bridle.load(tmp_path / "run")
    assert torch.allclose(again.encode(some_digits()), model.encode(some_digits()), atol=1e-5)


# Names of models.


def test_a_model_for_recordings_comes_with_the_package(tmp_path: Path) -> None:
    wave = 0.3 * np.sin(2e-5 * np.arange(48_000) ** 2)
    soundfile.write(tmp_path / "rise.wav", wave, 16_000)
    found = bridle.load("scenes-tiny").tokenize_file(tmp_path / "rise.wav")
    assert found.codes.shape == (19 * 4, 4)  # 298 frames make 18 patches and a half
    assert len(np.unique(found.codes[:, 0])) > 5
    card = (find_model("scenes-tiny") / "README.md").read_text()
    assert "MIT" in card
    assert "| untrained encoder | 58.1 % |" in card


def test_a_model_of_digits_comes_with_the_package() -> None:
    model = bridle.load("digits-tiny")
    assert model.facts.evaluation is not None
    assert model.facts.evaluation["probe"]["accuracy"] > 0.9
    assert model.tokenize(some_digits()).shape == (3, 16, 4)


def test_a_picture_of_a_digit_is_read_as_the_data_is(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    points = load_digits().images[7] / 16  # (8, 8)
    grey = np.round(255 * points).astype(np.uint8)
    Image.fromarray(grey).save(tmp_path / "light.png")
    Image.fromarray(255 - grey).resize((160, 160), Image.Resampling.BICUBIC).convert("RGB").save(tmp_path / "ink.png")
    shown = digits()
    samples = [part.load(i, None).x for part in (shown.train, shown.test) if part for i in range(len(part))]
    reader = DigitReader(geometry=Geometry(1, (16, 16), (4, 4)))
    (light,) = reader.windows(tmp_path / "light.png")
    assert min(float((sample - light.x).abs().max()) for sample in samples) < 0.003  # 8 bits per point
    (ink,) = reader.windows(tmp_path / "ink.png")
    assert float((ink.x - light.x).abs().mean()) < 0.05
    found = bridle.load("digits-tiny").tokenize_file(tmp_path / "light.png")
    assert found.codes.shape == (16, 4)
    with pytest.raises(ConfigError, match="embedded digits"):
        DigitReader(geometry=Geometry(1, (8, 8), (4, 4)))


def test_a_mistyped_folder_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace())  # any use of it would fail
    for name in (tmp_path / "none", "nothing-of-the-kind", "/a/b/c", ""):
        with pytest.raises(UsageError, match=r"no such folder; give|not a run directory"):
            bridle.load(name)


def test_an_id_of_the_hub_is_fetched_once_and_only_what_loading_needs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    asked: list[Any] = []

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        shutil.copytree(folder, tmp_path / "cache", ignore=lambda _, names: set(names) - set(allow_patterns))
        return str(tmp_path / "cache")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot))
    assert bridle.load("somebody/digits@v2").fingerprint == model.fingerprint
    assert asked == [("somebody/digits", "v2")]


def test_a_hub_that_does_not_answer_or_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=offline))
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE") as caught:
        bridle.load("somebody/digits")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r'pip install "bridle\[hub\]"'):
        bridle.load("somebody/digits")


def test_a_model_is_pushed_as_the_folder_it_would_be(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class FakeApi:
        def create_repo(self, repo_id: str, **options: Any) -> None:
            calls.append((repo_id, options["private"], options["exist_ok"]))

        def upload_folder(self, *, repo_id: str, folder_path: str, **_: Any) -> str:
            calls.append(sorted(path.name for path in Path(folder_path).iterdir()))
            assert bridle.load(folder_path).fingerprint == model.fingerprint
            return f"hub/{repo_id}"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=FakeApi))
    assert model.push_to_hub("somebody/digits", private=True) == "hub/somebody/digits"
    files = ["README.md", "config.json", "config.yaml", "manifest.json", "model.safetensors"]
    assert calls == [("somebody/digits", True, True), files]
    with pytest.raises(UsageError, match="give owner/name"):
        model.push_to_hub("digits")


def test_results_of_a_model_that_has_only_a_name_go_to_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_to_work_in(folder) == folder
    released = find_model("digits-tiny")
    before = sorted(path.name for path in released.iterdir())
    result = CliRunner().invoke(app, ["codebooks", "digits-tiny", "--items", "20"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "models" / "digits-tiny" / "codebooks.json").is_file()
    assert sorted(path.name for path in released.iterdir()) == before
    assert folder_to_work_in("digits-tiny") == Path("models/digits-tiny")  # the same copy again, with its results
    assert find_model("digits-tiny") == Path("models/digits-tiny")
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["digits-tiny"]
    shutil.rmtree(tmp_path / "models")
    shutil.copytree(folder, tmp_path / "models" / "digits-tiny")
    assert find_model("digits-tiny") == released
    with pytest.raises(UsageError, match="holds something else than 'digits-tiny'"):
        folder_to_work_in("digits-tiny")


def test_fine_tuning_takes_the_iteration_that_an_export_holds(folder: Path) -> None:
    config = bridle.load(folder).config
    assert find_start(folder, config, 2) == find_start(folder, config, None)
    with pytest.raises(UsageError, match="an exported model of iteration 2; it has no iteration 1"):
        find_start(folder, config, 1)
