"""From codes back to inputs: trained on a run without touching it, decoded from any number of stages and any length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from forked import bridle
from PIL import Image

from bridle import api
from bridle.config import Config
from bridle.data.audio.inversion import invert_logmel
from bridle.data.audio.logmel import LogMel
from bridle.errors import ConfigError, UsageError
from bridle.evaluate.reconstruction.media import blocks
from bridle.geometry import Geometry
from bridle.infer import detokenize_files
from bridle.infer.detokenize_files import decoded_pieces, output_names
from bridle.infer.detokenizer_command import detokenizer_run
from bridle.infer.model import load
from bridle.models.detokenizer import halve, prefix_vectors, reconstruction_loss
from bridle.quantize import ResidualQuantizer
from bridle.runs.reconstruction import Reconstruction
from bridle.runs.results import read_record
from bridle.seeding import generator

Small = Callable[..., Config]
STEPS = ["detokenizer.steps=120", "detokenizer.items=100", "max_steps=null"]
GEOMETRY = Geometry(1, (8, 4), (2, 2))  # a grid of 4 × 2


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "detokenizer" not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.name != "run.lock"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digits run with a detokenizer of 120 steps."""
    from bridle.config import load_config

    folder = tmp_path_factory.mktemp("detokenizer") / "run"
    words = ["encoder.width=32", "encoder.heads=2", "encoder.depth=1", "decoder.width=16", "decoder.heads=2"]
    more = ["schedule.iterations=1", "max_steps=2", "probe.enabled=false", "runtime.threads=1"]
    api.pretrain(load_config("digits-tiny", [*words, *more]), out=folder)
    before = digests(folder)
    detokenizer_run(folder, STEPS)
    assert digests(folder) == before
    return folder


def test_every_stage_adds_detail_on_held_out_items(run: Path) -> None:
    found = read_record(Reconstruction, run / "detokenizer/iter1/result.json")
    explained = [row.explained for row in found.by_stages]
    assert explained == sorted(explained)
    assert explained[0] > 0.5
    assert [row.bits_per_token for row in found.by_stages] == [6.0, 12.0, 18.0, 24.0]
    assert found.held_out == "test"
    assert all(row.psnr is not None and row.log_spectral_distance is None for row in found.by_stages)


def test_the_same_command_finds_its_work_and_other_settings_are_refused(run: Path) -> None:
    checkpoints = digests(run)
    again = json.loads(bridle("detokenizer", run, *STEPS, "--json").out)
    assert again["path"].endswith("result.json") and len(again["by_stages"]) == 4
    detokenizer_run(run, [])  # whatever its settings are
    assert digests(run) == checkpoints
    with pytest.raises(UsageError, match="other settings"):
        detokenizer_run(run, ["detokenizer.steps=121", "max_steps=null"])
    with pytest.raises(ConfigError, match=r"quantizer\.codes.*cannot change this"):
        detokenizer_run(run, ["quantizer.codes=8"])


def test_codes_come_back_as_inputs_of_the_data_s_range_whatever_the_batch(run: Path) -> None:
    model = load(run)
    x = torch.rand(5, 1, 16, 16, generator=generator("pictures"))
    codes = model.tokenize(x)
    whole, single = model.decode_to_input(codes), model.decode_to_input(codes, batch=1)
    assert whole.shape == x.shape
    torch.testing.assert_close(whole, single, atol=1e-5, rtol=0)
    assert float(whole.min()) > -0.5 and float(whole.max()) < 1.5


def test_two_stages_of_four_equal_codes_that_have_only_two(run: Path) -> None:
    model = load(run)
    codes = model.tokenize(torch.rand(2, 1, 16, 16, generator=generator("two")))
    torch.testing.assert_close(model.decode_to_input(codes, stages=2), model.decode_to_input(codes[..., :2]))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.full((1, 16, 4), 64), "codebook's size"),
        (torch.full((1, 16, 4), -1), "negative"),
        (torch.zeros(1, 15, 4, dtype=torch.long), "expected \\(B, 16, stages\\)"),
        (torch.zeros(0, 16, 4, dtype=torch.long), "at least one"),
        (torch.full((1, 16, 4), float("nan")), "integer codes"),
    ],
)
def test_codes_that_no_model_made_are_refused(run: Path, codes: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(run).decode_to_input(codes)


def test_a_run_without_a_detokenizer_names_the_command(small: Small, tmp_path: Path) -> None:
    api.pretrain(small("schedule.iterations=1", "probe.enabled=false", steps=1), out=tmp_path / "run")
    model = load(tmp_path / "run")
    with pytest.raises(UsageError, match="train one with `bridle detokenizer"):
        model.decode_to_input(torch.zeros(1, model.geometry.tokens, 4, dtype=torch.long))


@pytest.mark.parametrize("kind", ["tokenizer.later=vit", "tokenizer.later=features", "quantizer=vq"])
def test_every_kind_of_tokenizer_gets_a_detokenizer_in_every_iteration(small: Small, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    api.pretrain(small(kind, "quantizer.codes=16", "probe.enabled=false", steps=2), out=folder)  # two iterations
    before = digests(folder)
    for iteration in (1, 2):
        path = detokenizer_run(folder, ["max_steps=2", "detokenizer.items=8"], iteration=iteration)
        assert path.parent.name == f"iter{iteration}"
    assert digests(folder) == before
    model = load(folder)
    x = torch.rand(2, 1, 16, 16, generator=generator("kinds"))
    assert model.decode_to_input(model.tokenize(x)).shape == x.shape


def test_pictures_go_to_codes_and_back_by_commands(run: Path, tmp_path: Path) -> None:
    for number in range(3):
        pixels = (generator("png", number).initial_seed() >> np.arange(64).reshape(8, 8) % 50 & 255).astype(np.uint8)
        (tmp_path / "in/deep").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / f"in/deep/{number}.png")
    assert bridle("tokenize", run, "in", "--out", "codes.npz", cwd=tmp_path).code == 0
    done = bridle("detokenize", run, "codes.npz", "--out", "back", "--stages", "2", cwd=tmp_path)
    assert done.code == 0, done.err
    pictures = sorted((tmp_path / "back").rglob("*.png"))
    assert [Image.open(path).size for path in pictures] == [(16, 16)] * 3
    refused = bridle("detokenize", run, "codes.npz", "--out", "more", "--stages", "5", cwd=tmp_path)
    assert refused.code == 2
    assert "give 1 to 4" in refused.err
    other = bridle("detokenize", "digits-tiny", "codes.npz", "--out", "more", cwd=tmp_path)
    assert other.code == 2
    assert "come from another model" in other.err
    assert not (tmp_path / "more").exists()


def window_values(codes: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """A stand-in for a detokenizer: every value of a patch is its first code."""
    grid = codes[..., 0].reshape(-1, 4, 2).float()
    return grid.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, None]


def blocks_of(codes: torch.Tensor, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Codes (length, 2, 1) of the grid as stored columns, `rows` rows at a time."""
    places = np.indices(codes.shape[:2]).reshape(2, -1).T
    stored = codes.flatten(0, 1).numpy()
    for row in range(0, len(stored), rows):
        yield {"codes": stored[row : row + rows], "positions": places[row : row + rows]}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9, 40])
def test_pieces_of_any_length_join_to_the_whole_without_seams(length: int) -> None:
    codes = torch.arange(length * 2).reshape(length, 2, 1)
    pieces = list(decoded_pieces(blocks_of(codes, 16), length, GEOMETRY, window_values))
    whole = torch.cat(pieces, dim=1)
    assert whole.shape == (1, 2 * length, 4)
    expected = codes[..., 0].float().repeat_interleave(2, 0).repeat_interleave(2, 1)[None]
    torch.testing.assert_close(whole, expected)


def drifting_values(codes: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Another stand-in, whose windows disagree: a value is its first code plus its place in the window."""
    return window_values(codes, valid) + torch.arange(8.0)[:, None]


@pytest.mark.parametrize(("batch", "rows"), [(1, 3), (2, 16), (16, 100)])
def test_overlapping_windows_are_cross_faded_whatever_the_batch_and_the_blocks_read(
    batch: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detokenize_files, "BATCH", batch)
    length, size = 9, 4  # patches of 2 rows: windows of 8 rows begin at rows 0, 4, 8, 12; the last one ends at 18
    codes = torch.arange(length * 2).reshape(length, 2, 1)
    found = torch.cat(list(decoded_pieces(blocks_of(codes, rows), length, GEOMETRY, drifting_values)), dim=1)[0]
    plain = codes[..., 0].double().repeat_interleave(2, 0).repeat_interleave(2, 1)
    extra = []
    for row in range(2 * length):
        windows = [start for start in range(0, 13, size) if start <= row < start + 8]
        new = windows[-1]
        share = (row - new + 1) / 5 if len(windows) == 2 else 1.0  # 1/5 … 4/5 of the newer window
        extra.append(share * (row - new) + (1 - share) * (row - windows[0]))
    torch.testing.assert_close(found.double(), plain + torch.tensor(extra, dtype=torch.float64)[:, None])


def test_blocks_of_features_overlap_and_lose_no_frame() -> None:
    features = torch.arange(5000.0).reshape(1, 5000, 1)
    cut = list(blocks(iter(features.split(700, dim=1))))
    assert [last for _, last in cut] == [False] * (len(cut) - 1) + [True]
    begins = [int(block[0, 0]) for block, _ in cut]
    assert begins == [960 * n for n in range(len(cut))]  # 1024 frames, 64 of them shared
    assert int(cut[-1][0][-1, 0]) == 4999


def test_names_keep_what_tells_them_apart() -> None:
    assert output_names(["/a/b/x.wav", "/a/b/c/y.wav", "/a/b/x.flac"], ".wav") == [
        Path("x.wav"),
        Path("c/y.wav"),
        Path("x-2.wav"),
    ]
    assert output_names(["a.png", "a.jpg", "a-2.png"], ".png") == [Path("a.png"), Path("a-2.png"), Path("a-2-2.png")]
    parts = ["d/talk.wav#t=0,2", "d/talk.wav#t=2,3.5"]
    assert output_names(parts, ".wav") == [Path("talk#t=0,2.wav"), Path("talk#t=2,3.5.wav")]
    assert output_names(["../../etc/passwd"], ".png") == [Path("passwd.png")]


def test_the_first_stages_are_a_quantizer_of_so_many_stages() -> None:
    whole = ResidualQuantizer(codebooks=4, codes=8, width=6)
    x = torch.randn(128, 6, generator=generator("stages"))
    whole.start_codebooks(x, generator=generator("start"))
    codes = whole.assign(x)
    for m in (1, 2, 3):
        short = ResidualQuantizer(codebooks=m, codes=8, width=6)
        short.load_state_dict({name: whole.state_dict()[name] for name in short.state_dict()})
        assert torch.equal(short.assign(x), codes[:, :m])
        assert torch.equal(short.decode(codes[:, :m]), whole.decode(codes, stages=m))


def test_prefixes_are_sums_of_the_first_code_vectors() -> None:
    rq = ResidualQuantizer(codebooks=3, codes=8, width=4)
    x = torch.randn(64, 4, generator=generator("prefix"))
    rq.start_codebooks(x, generator=generator("start"))
    codes = rq.assign(x).reshape(4, 16, 3)
    q = prefix_vectors(rq, codes, torch.tensor([1, 3, 2, 1]))
    books = rq.code_vectors()
    for row, stages in enumerate([1, 3, 2, 1]):
        expected = sum(books[m][codes[row, :, m]] for m in range(stages))
        torch.testing.assert_close(q[row], expected)


def test_padding_does_not_count_in_the_loss() -> None:
    x = torch.zeros(1, 1, 8, 4)
    guess = x.clone()
    guess[:, :, 4:] = 100.0  # the last two rows of patches are padding
    valid = torch.tensor([[True] * 4 + [False] * 4])
    assert float(reconstruction_loss(guess, x, geometry=GEOMETRY, valid=valid, scales=3)) == 0.0
    guess[:, :, :4] = 1.0
    assert float(reconstruction_loss(guess, x, geometry=GEOMETRY, valid=valid)) == pytest.approx(2.0)


def test_halving_averages_pairs_and_drops_an_odd_end() -> None:
    x = torch.arange(10.0).reshape(1, 1, 5, 2)
    assert halve(x).tolist() == [[[[1.5], [5.5]]]]


def test_a_waveform_made_from_features_has_those_features(tmp_path: Path) -> None:
    front = LogMel(mels=64)
    seconds = torch.arange(16_000) / 16_000
    wave = 0.3 * torch.sin(2 * torch.pi * 440 * seconds) + 0.05 * torch.randn(16_000, generator=generator("noise"))
    features = front(wave)
    back = invert_logmel(features, front)
    assert len(back) == front.window + (len(features) - 1) * front.shift
    decibel = 10 / np.log(10) * (front(back) - features)
    assert float(decibel.square().mean().sqrt()) < 2.5
    soundfile.write(tmp_path / "a.wav", back.numpy(), 16_000)  # finite and in range
    assert float(back.abs().max()) < 1.0
