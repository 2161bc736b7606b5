"""Known codecs as anchors: finer settings cost more and lose less, and what is not content is not counted."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from bridle.data.embedded.sets import digits, moving_digits
from bridle.data.image.pixels import as_bytes
from bridle.evaluate.reconstruction import anchors
from bridle.evaluate.reconstruction.distortion import psnr, si_sdr


def test_jpeg_counts_the_scan_alone() -> None:
    x = digits().test.x[0]
    file = io.BytesIO()
    Image.fromarray(as_bytes(x)).save(file, "JPEG", quality=50)
    data = file.getvalue()
    begin = data.rindex(b"\xff\xda")  # start of scan; its header has 2 + 8 bytes with one component
    coded = anchors.jpeg(x, 50)
    assert coded.bits == 8 * (len(data) - begin - 10 - 2)
    assert coded.decoded.shape == x.shape


def test_finer_settings_cost_more_and_lose_less() -> None:
    picture, clip = digits().test.x[1], moving_digits().test.x[1]
    colour = picture.expand(3, -1, -1)
    for code, x, settings in (
        (anchors.jpeg, picture, (5, 90)),
        (anchors.jpeg, colour, (5, 90)),
        (anchors.jpeg_frames, clip, (5, 90)),
        (anchors.h264, clip, (45, 20)),
    ):
        coarse, fine = (code(x, setting) for setting in settings)
        assert coarse.decoded.shape == fine.decoded.shape == x.shape
        assert 0 < coarse.bits < fine.bits
        assert psnr(coarse.decoded, x) < psnr(fine.decoded, x)


def test_the_remarks_of_an_encoder_are_not_counted() -> None:
    remark, settings, picture = b"\x06" + b"x" * 600, b"\x67abc", b"\x65" + b"p" * 9
    start = b"\x00\x00\x01"
    assert anchors.slice_bytes(start.join([b"", remark, settings, picture])) == 3 + 10


@pytest.mark.parametrize("codec", ["libopus", "libmp3lame"])
@pytest.mark.parametrize("rate", [16_000, 22_050])
def test_sounds_come_back_in_place_and_at_their_length(codec: str, rate: int) -> None:
    time = torch.arange(rate) / rate
    wave = 0.3 * torch.sin(2 * torch.pi * (300 + 400 * time) * time)
    coarse, fine = (anchors.sound(wave, rate, codec, kbits) for kbits in (8, 64))
    assert len(coarse.decoded) == len(wave)
    assert coarse.bits < fine.bits
    assert si_sdr(fine.decoded, wave) > 15


def test_a_late_copy_is_moved_back() -> None:
    wave = torch.from_numpy(np.random.default_rng(0).standard_normal(2000)).float()
    late, early = torch.cat([torch.zeros(700), wave]), wave[300:]
    assert torch.equal(anchors.aligned(late, wave), wave)
    assert torch.equal(anchors.aligned(early, wave)[300:], wave[300:])


def test_a_codec_that_is_missing_is_named() -> None:
    anchors.NAMES["no_such_codec"] = "Nothing"
    try:
        assert anchors.available(["no_such_codec", "libopus"]) == (
            ["libopus"],
            ["Nothing: this build of PyAV has no no_such_codec."],
        )
    finally:
        del anchors.NAMES["no_such_codec"]
