"""Rate and distortion of a run: one row per number of stages, known codecs beside it, and the inversion alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import bridle
from run_folders import write_run

from bridle.config import Config
from bridle.data.audio.logmel import LogMel
from bridle.data.embedded.sets import sounds
from bridle.errors import UsageError
from bridle.evaluate.codebooks.command import reconstruct_run
from bridle.infer.detokenizer_command import detokenizer_run
from bridle.report.page import write_report
from bridle.report.reconstruction import rate_view, shown_range
from bridle.report.runs import read_run
from bridle.report.token_maps import gallery_of
from bridle.runs.reconstruction import AnchorPoint, RateDistortion, RatePoint, cheapest
from bridle.runs.results import read_record

Small = Callable[..., Config]


def rates_of(folder: Path) -> RateDistortion:
    return read_record(RateDistortion, folder / "detokenizer/iter1/rate.json")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A digits run with a detokenizer of 80 steps and its rates on 20 test items."""
    from conftest import SMALL

    from bridle.config import load_config

    folder = write_run(tmp_path_factory.mktemp("rate") / "run", load_config("digits-tiny", list(SMALL)))
    detokenizer_run(folder, ["detokenizer.steps=80", "detokenizer.items=40", "max_steps=null"])
    reconstruct_run(folder, items=20)
    return folder


def test_every_stage_adds_detail_at_a_higher_rate(pictures: Path) -> None:
    found = rates_of(pictures)
    assert (found.unit, found.items, found.held_out) == ("bits per pixel", 20, "test")
    assert [point.rate for point in found.by_stages] == [0.25, 0.5, 0.75, 1.0]  # 4 bits and 16 tokens on 256 pixels
    losses = [point.psnr or 0 for point in found.by_stages]
    assert losses == sorted(losses)
    assert {point.codec for point in found.anchors} == {"JPEG"}
    assert found.inversion is None


def test_the_page_shows_rates_reconstructions_and_single_codes(pictures: Path, tmp_path: Path) -> None:
    gallery = gallery_of(pictures)
    assert [version.caption for version in gallery.decoded[0].versions] == [
        *("original", "1 stage", "2 stages", "3 stages", "4 stages"),
    ]
    assert all(strip.alone is not None and strip.where for stage in gallery.codes for strip in stage)
    assert all("\N{NO-BREAK SPACE}%" in strip.labels for stage in gallery.codes for strip in stage)
    page = write_report([read_run(pictures)._replace(gallery=gallery)], tmp_path / "report.html").read_text()
    for text in ("Rate and distortion", "JPEG needs", "Decoded from codes", "Dictionary of codes"):
        assert text in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_sounds_have_players_anchors_and_the_loss_of_the_inversion(small: Small, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", small(recipe="sounds-tiny"))
    detokenizer_run(folder, ["detokenizer.steps=10", "detokenizer.items=8", "max_steps=null"])
    reconstruct_run(folder, items=2)
    found = rates_of(folder)
    assert found.unit == "bits per second"
    assert found.by_stages[-1].rate == pytest.approx(4 * 4 * 96 / 0.96)  # 96 tokens in 96 frames of 10 ms
    assert {point.codec for point in found.anchors} == {"Opus", "MP3"}
    assert all(point.si_sdr is None for point in found.by_stages)  # phases are guessed
    assert all(point.si_sdr is not None for point in found.anchors)
    assert found.inversion is not None and found.inversion.feature_distance == 0.0
    assert 0 < (found.inversion.log_spectral_distance or 0) < 3
    versions = gallery_of(folder).decoded[0].versions
    assert [version.caption for version in versions[:3]] == ["original", "mel inversion, no codes", "1 stage"]
    assert all(version.sound.startswith("data:audio/wav;base64,") for version in versions)


def test_embedded_sounds_can_be_heard() -> None:
    source = sounds().test
    wave, rate = source.listen(13)
    torch.testing.assert_close(LogMel(sample_rate=rate, mels=64)(wave), source.x[13, 0])


def test_a_run_without_a_detokenizer_names_the_command(small: Small, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", small())
    with pytest.raises(UsageError, match="train one with `bridle detokenizer"):
        reconstruct_run(folder)
    done = bridle("codebooks", folder, "--reconstruct")
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1


def test_a_codec_that_loses_nothing_does_not_flatten_the_curve_of_the_codes() -> None:
    assert shown_range([19.0, 22.0], (5.0, 120.0)) == (5.0, 37.0)


def test_an_anchor_is_the_cheapest_that_is_as_good() -> None:
    anchors = tuple(
        AnchorPoint(codec="JPEG", setting=f"quality {q}", rate=rate, psnr=psnr)
        for q, rate, psnr in ((1, 0.1, 20.0), (5, 0.3, 25.0), (9, 0.6, 30.0))
    )
    rows = [RatePoint(stages=m, bits_per_token=8.0 * m, rate=m, psnr=p) for m, p in ((1, 19.0), (2, 24.0), (3, 33.0))]
    assert cheapest(anchors, "JPEG", rows[1]) == anchors[1]
    assert cheapest(anchors, "JPEG", rows[2]) is None
    found = RateDistortion(
        iteration=1, items=2, held_out="test", unit="bits per pixel", by_stages=tuple(rows), anchors=anchors
    )
    texts = [row.anchors[0] for row in rate_view([("RQ,", found)]).rows]
    assert texts == ["≤ 0.1 (quality 1)", "0.3 (quality 5)", "> 0.6"]
