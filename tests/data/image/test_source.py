"""Images of every kind as samples in [0, 1]."""

from __future__ import annotations

import os
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from bridle.config.data_schema import AugmentConfig
from bridle.data.file_source import open_splits
from bridle.data.image.source import EXTENSIONS, ImageReader, Images, centre_box, random_box
from bridle.data.listing.layouts import find_data
from bridle.data.listing.table import DataListing, Listing
from bridle.errors import ConfigError, DataError
from bridle.geometry import Geometry


def ramp(height: int = 24, width: int = 32) -> np.ndarray:
    """Red grows to the right, green downwards, blue is constant."""
    picture = np.full((height, width, 3), 128, dtype=np.uint8)
    picture[..., 0] = np.linspace(0, 255, width).astype(np.uint8)
    picture[..., 1] = np.linspace(0, 255, height).astype(np.uint8)[:, None]
    return picture


def folder(
    *paths: Path, channels: int = 3, size: tuple[int, int] = (8, 8), cache_mb: int = 0, **augment: object
) -> Images:
    wanted = AugmentConfig(**augment)  # type: ignore[arg-type]
    geometry = Geometry(channels, size, (1, 1))
    return Images(Listing(paths), None, geometry=geometry, augment=wanted, cache_mb=cache_mb)


def found(root: Path) -> DataListing:
    return find_data(root=str(root), manifest=None, layout="auto", extensions=EXTENSIONS)


def read(path: Path, channels: int = 3, size: tuple[int, int] = (24, 32)) -> Tensor:
    (window,) = ImageReader(geometry=Geometry(channels, size, (1, 1))).windows(path)
    x = window.x
    assert x.shape == (channels, *size)
    assert x.dtype == torch.float32
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    return x


def as_tensor(picture: np.ndarray) -> Tensor:
    return torch.tensor(picture).permute(2, 0, 1) / 255


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("a.png", {}, 0),
        ("a.bmp", {}, 0),
        ("a.webp", {"lossless": True}, 0),
        ("a.jpg", {"quality": 98}, 0.05),
        ("a.jpeg", {"quality": 98, "progressive": True}, 0.05),
    ],
)
def test_a_picture_of_its_own_size_is_read_as_it_is(
    tmp_path: Path, name: str, options: dict[str, int], tolerance: float
) -> None:
    Image.fromarray(ramp()).save(tmp_path / name, **options)
    assert (read(tmp_path / name) - as_tensor(ramp())).abs().max() <= tolerance


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grey_picture_is_the_same_in_every_channel(tmp_path: Path, channels: int) -> None:
    Image.fromarray(ramp()[..., 0]).save(tmp_path / "grey.png")
    x = read(tmp_path / "grey.png", channels)
    assert torch.equal(x, as_tensor(ramp())[:1].expand(channels, -1, -1))


def test_a_colour_picture_becomes_grey_by_brightness(tmp_path: Path) -> None:
    Image.new("RGB", (32, 24), (255, 0, 0)).save(tmp_path / "red.png")
    assert read(tmp_path / "red.png", 1).mean() == pytest.approx(0.299, abs=0.003)


def test_a_palette_picture_shows_its_colours(tmp_path: Path) -> None:
    Image.new("RGB", (32, 24), (10, 200, 30)).quantize(4).save(tmp_path / "palette.png")
    assert read(tmp_path / "palette.png")[:, 0, 0].tolist() == pytest.approx([10 / 255, 200 / 255, 30 / 255], abs=0.01)


def test_a_cmyk_jpeg_shows_its_colours(tmp_path: Path) -> None:
    Image.new("RGB", (32, 24), (250, 20, 20)).convert("CMYK").save(tmp_path / "cmyk.jpg", quality=98)
    assert read(tmp_path / "cmyk.jpg")[:, 5, 5].tolist() == pytest.approx([250 / 255, 20 / 255, 20 / 255], abs=0.03)


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_keep_their_scale(tmp_path: Path, channels: int) -> None:
    values = np.linspace(0, 65535, 24 * 32).astype(np.uint16).reshape(24, 32)
    Image.fromarray(values).save(tmp_path / "deep.png")
    x = read(tmp_path / "deep.png", channels)
    assert (x - torch.from_numpy(values / 65535)).abs().max() < 1e-4


def test_one_bit_is_black_and_white(tmp_path: Path) -> None:
    Image.fromarray(np.eye(24, 32, dtype=bool)).save(tmp_path / "bits.png")
    assert torch.equal(read(tmp_path / "bits.png", 1)[0], torch.eye(24, 32))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_shows_white(tmp_path: Path, mode: str) -> None:
    picture = Image.new(mode, (32, 24), (0,) * len(mode))  # black, wholly transparent
    picture.paste((0,) * (len(mode) - 1) + (255,), (0, 0, 16, 24))  # the left half opaque
    picture.save(tmp_path / "alpha.png")
    x = read(tmp_path / "alpha.png")
    assert x[:, :, 0].max() == 0
    assert x[:, :, -1].min() == 1


def test_a_transparent_palette_entry_shows_white(tmp_path: Path) -> None:
    picture = Image.new("P", (32, 24), 0)
    picture.putpalette([9, 9, 9, 200, 0, 0])
    picture.save(tmp_path / "p.png", transparency=0)
    assert read(tmp_path / "p.png").min() == 1


@pytest.mark.parametrize("name", ["turned.jpg", "turned.png", "turned.webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_camera_gives_an_upright_picture(tmp_path: Path, orientation: int, name: str) -> None:
    # By the EXIF standard: which row and column of the upright picture the stored row 0 and column 0 are.
    stored = {
        1: ramp(),
        2: ramp()[:, ::-1],
        3: ramp()[::-1, ::-1],
        4: ramp()[::-1],
        5: ramp().transpose(1, 0, 2),
        6: ramp().transpose(1, 0, 2)[::-1],
        7: ramp().transpose(1, 0, 2)[::-1, ::-1],
        8: ramp().transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / name, exif=exif, quality=98)
    assert (read(tmp_path / name) - as_tensor(ramp())).abs().max() < 0.06


def test_a_large_turned_jpeg_decoded_at_reduced_size_shows_the_same(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = ramp(480, 640)
    Image.fromarray(np.ascontiguousarray(picture.transpose(1, 0, 2)[::-1])).save(
        tmp_path / "a.jpg", exif=exif, quality=95
    )
    whole = Image.fromarray(picture).resize((32, 24), Image.Resampling.BICUBIC)
    assert (read(tmp_path / "a.jpg") - as_tensor(np.asarray(whole))).abs().max() < 0.03
    part = folder(tmp_path / "a.jpg", size=(24, 24)).load(0, None).x  # the middle three quarters of the width
    expected = Image.fromarray(picture[:, 80:560]).resize((24, 24), Image.Resampling.BICUBIC)
    assert (part - as_tensor(np.asarray(expected))).abs().max() < 0.03


@pytest.mark.parametrize(
    "exif",
    [
        b"MM\x00*\xff\xff\xff\xffrubbish",  # a directory beyond the end
        b"II*\x00\x08\x00\x00\x00\x01\x00\x12\x01\x02\x00\x04\x00\x00\x00abc\x00" + bytes(4),  # orientation "abc"
    ],
)
def test_damaged_exif_does_not_spoil_a_good_picture(tmp_path: Path, exif: bytes) -> None:
    Image.fromarray(ramp()).save(tmp_path / "a.jpg", quality=98, exif=b"Exif\x00\x00" + exif)
    assert (read(tmp_path / "a.jpg") - as_tensor(ramp())).abs().max() < 0.06


@pytest.mark.parametrize("name", ["one.png", "one.jpg", "one.webp", "one.bmp"])
def test_a_picture_of_one_pixel_fills_the_sample(tmp_path: Path, name: str) -> None:
    Image.new("RGB", (1, 1), (51, 51, 51)).save(tmp_path / name)
    source = folder(tmp_path / name)
    for generator in (None, torch.Generator().manual_seed(0)):
        assert (source.load(0, generator).x - 0.2).abs().max() < 0.02


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1)])
def test_a_very_long_picture_is_read(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size, (51, 51, 51)).save(tmp_path / "long.png")
    source = folder(tmp_path / "long.png")
    for seed in range(20):
        assert source.load(0, torch.Generator().manual_seed(seed)).x.shape == (3, 8, 8)


def test_evaluation_takes_the_centre(tmp_path: Path) -> None:
    picture = np.zeros((8, 24, 3), dtype=np.uint8)
    picture[:, 8:16] = 255
    Image.fromarray(picture).save(tmp_path / "a.png")
    assert torch.equal(folder(tmp_path / "a.png").load(0, None).x, torch.ones(3, 8, 8))


def test_pretraining_crops_are_functions_of_the_generator(tmp_path: Path) -> None:
    Image.fromarray(ramp()).save(tmp_path / "a.png")
    source = folder(tmp_path / "a.png")
    first, again, other = (source.load(0, torch.Generator().manual_seed(seed)).x for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_half_of_the_pictures_are_mirrored_unless_told_not_to(tmp_path: Path) -> None:
    Image.fromarray(ramp()).save(tmp_path / "a.png")

    def mirrored(source: Images) -> int:
        loaded = [source.load(0, torch.Generator().manual_seed(seed)).x[0] for seed in range(60)]
        return sum(int(red[:, 0].mean() > red[:, -1].mean()) for red in loaded)

    assert 15 < mirrored(folder(tmp_path / "a.png")) < 45
    assert mirrored(folder(tmp_path / "a.png", flip=False)) == 0


def test_random_boxes_lie_inside_and_have_the_area_and_shape_asked_for() -> None:
    areas, shapes = [], []
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        left, top, right, bottom = random_box((100, 80), size=(16, 16), scale=(0.2, 1.0), generator=generator)
        assert 0 <= left < right <= 100
        assert 0 <= top < bottom <= 80
        areas.append((right - left) * (bottom - top) / 8000)
        shapes.append((right - left) / (bottom - top))
    assert 0.2 - 1e-9 <= min(areas) < 0.25
    assert max(areas) > 0.85
    assert min(shapes) >= 3 / 4 - 1e-9
    assert max(shapes) <= 4 / 3 + 1e-9


def test_the_centre_box_has_the_shape_of_the_sample() -> None:
    assert centre_box((100, 50), size=(10, 10)) == (25, 0, 75, 50)
    assert centre_box((100, 50), size=(10, 40)) == (0, 12.5, 100, 37.5)


def truncated(path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def bomb(path: Path) -> None:
    """A PNG of some bytes that says it is 100,000 × 100,000."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = (100_000).to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


BAD = {
    "cut.jpg": (truncated, "truncated"),
    "cut.png": (truncated, "cannot be read as an image"),
    "cut.webp": (truncated, "cannot be read as an image"),
    "cut.bmp": (truncated, "truncated"),
    "bomb.png": (bomb, "DecompressionBombError"),
    "text.png": (lambda path: path.write_text("hello"), "not a JPEG, PNG, WebP or BMP file"),
    "empty.jpg": (lambda path: path.write_bytes(b""), "not a JPEG, PNG, WebP or BMP file"),
    "script.jpg": (lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n"), "not a JPEG, PNG, WebP or BMP file"),
    "gif.jpg": (lambda path: Image.new("L", (9, 9)).save(path, "GIF"), "not a JPEG, PNG, WebP or BMP file"),
    "missing.png": (lambda path: None, "No such file or directory"),
    "folder.png": (lambda path: path.mkdir(), "is not a file"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_a_data_error_with_path_and_reason(tmp_path: Path, name: str) -> None:
    make, reason = BAD[name]
    make(tmp_path / name)
    with pytest.raises(DataError, match=reason) as caught:
        folder(tmp_path / name).load(0, None)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mutated_pictures_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a.jpg", "a.png", "a.webp", "a.bmp"):
        Image.fromarray(ramp()).save(tmp_path / name)
        sound = np.frombuffer((tmp_path / name).read_bytes(), dtype=np.uint8)
        refused = 0
        for _ in range(40):
            broken = sound.copy()
            broken[rng.integers(0, len(broken) if rng.random() < 0.5 else 60, 4)] = rng.integers(0, 256, 4)
            (tmp_path / name).write_bytes(broken.tobytes())
            try:
                read(tmp_path / name)
            except DataError:
                refused += 1
        assert refused > 0


def test_open_images_reads_labels_and_splits(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/2.png", "test/b/3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    splits = open_splits(found(tmp_path), partial(Images, geometry=Geometry(3, (8, 8), (4, 4))))
    assert splits.train.classes == ("a", "b")
    assert [splits.train.load(i, None).label for i in range(2)] == [0, 1]
    assert splits.test is not None
    assert splits.test.load(0, None).label == 1
    assert splits.test.describe(0) == str(tmp_path / "test/b/3.png")


def test_geometries_that_are_no_pictures_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="height, width"):
        open_splits(found(tmp_path), partial(Images, geometry=Geometry(3, (8,), (4,))))
    with pytest.raises(ConfigError, match="1 or 3"):
        folder(channels=2)


@pytest.mark.parametrize("name", ["small.jpg", "large.jpg", "turned.jpg", "deep.png", "palette.png", "grey.webp"])
@pytest.mark.parametrize("channels", [1, 3])
def test_kept_pixels_give_the_same_samples_as_the_file(tmp_path: Path, name: str, channels: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    {
        "small.jpg": lambda path: Image.fromarray(ramp()).save(path),
        "large.jpg": lambda path: Image.fromarray(ramp(64, 80)).save(path),  # would be decoded at half its size
        "turned.jpg": lambda path: Image.fromarray(ramp(20, 31)).save(path, exif=exif),
        "deep.png": lambda path: Image.fromarray(ramp()[..., 0].astype(np.uint16) * 257).save(path),
        "palette.png": lambda path: Image.fromarray(ramp()).quantize(9).save(path),
        "grey.webp": lambda path: Image.fromarray(ramp()[..., 1]).save(path, lossless=True),
    }[name](tmp_path / name)
    plain = folder(tmp_path / name, channels=channels)
    kept = folder(tmp_path / name, channels=channels, cache_mb=1)
    for _ in range(2):  # made, then taken from memory
        assert torch.equal(kept.load(0, None).x, plain.load(0, None).x)
        for seed in range(5):
            first, second = (source.load(0, torch.Generator().manual_seed(seed)).x for source in (plain, kept))
            assert torch.equal(first, second)
    (tmp_path / name).unlink()
    if name == "large.jpg":
        with pytest.raises(DataError, match="No such file"):
            kept.load(0, None)
    else:
        assert kept.load(0, None).x.shape == (channels, 8, 8)


def test_fine_tuning_changes_come_after_crop_and_flip_and_not_in_evaluation(tmp_path: Path) -> None:
    Image.fromarray(ramp()).save(tmp_path / "a.png")
    plain, erased = folder(tmp_path / "a.png"), folder(tmp_path / "a.png", erase=1.0)
    strong = folder(tmp_path / "a.png", randaugment=2, randaugment_magnitude=9.0)
    assert torch.equal(erased.load(0, None).x, plain.load(0, None).x)
    assert torch.equal(strong.load(0, None).x, plain.load(0, None).x)
    before, after = (source.load(0, torch.Generator().manual_seed(3)).x for source in (plain, erased))
    changed = (before != after).any(0)
    assert 0 < changed.float().mean() < 0.5  # a box; the rest is the same crop
    assert torch.equal(before[:, ~changed], after[:, ~changed])
    assert any(
        not torch.equal(*(source.load(0, torch.Generator().manual_seed(seed)).x for source in (plain, strong)))
        for seed in range(5)
    )


def test_several_labels_become_shares(tmp_path: Path) -> None:
    Image.fromarray(ramp()).save(tmp_path / "a.png")
    (tmp_path / "list.csv").write_text("path,labels\na.png,sky;sea\n")
    listed = find_data(root=None, manifest=str(tmp_path / "list.csv"), layout="auto", extensions=EXTENSIONS)
    source = open_splits(listed, partial(Images, geometry=Geometry(3, (8, 8), (4, 4)))).train
    assert source.classes == ("sea", "sky")
    label = source.load(0, None).label
    assert isinstance(label, Tensor)
    assert label.tolist() == [1, 1]


def test_a_picture_of_many_megapixels_is_read_within_bounds(tmp_path: Path) -> None:
    Image.new("RGB", (6000, 4000), (51, 51, 51)).save(tmp_path / "huge.jpg")
    assert (folder(tmp_path / "huge.jpg").load(0, None).x - 0.2).abs().max() < 0.01


def test_an_orientation_that_does_not_exist_is_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    Image.fromarray(ramp()).save(tmp_path / "a.png", exif=exif)
    assert torch.equal(read(tmp_path / "a.png"), as_tensor(ramp()))


def test_a_pipe_named_like_a_picture_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    writer = os.open(tmp_path / "a.png", os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, bytes(4096))  # so that opening it would not wait here
    try:
        with pytest.raises(DataError, match="is not a file"):
            read(tmp_path / "a.png")
    finally:
        os.close(writer)
