"""Videos as a modality."""

from __future__ import annotations

from functools import partial

from bridle.config import Config
from bridle.data.file_source import open_splits
from bridle.data.image.modality import IMAGENET_MEAN, IMAGENET_STD
from bridle.data.inspect.findings import CheckOptions, Facts
from bridle.data.listing.table import DataListing
from bridle.data.loading.watchdog import reason, renew
from bridle.data.modality import Modality, VitInput
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Reader, Splits
from bridle.data.video.source import EXTENSIONS, Decoding, VideoReader, Videos, address_of
from bridle.errors import needs

SHORTFALL = 0.97  # headers of videos are often a little wrong; less than this share of the frames is a cut file


def decoding_of(config: Config) -> Decoding:
    """How a config says that videos are decoded."""
    video = config.video
    return Decoding(config.geometry.build(), video.stride, video.short_side, video.timeout)


def open_files(config: Config, found: DataListing) -> Splits:
    """The listed videos as train and test."""
    videos = partial(Videos, decoding=decoding_of(config), augment=config.augment)
    return open_splits(
        found, partial(videos, clips=config.data.views, crops=config.video.crops), cache_mb=config.data.cache_mb
    )


def open_reader(config: Config) -> Reader:
    """Single videos as windows."""
    return VideoReader(decoding_of(config))


def check_video(path: Location, options: CheckOptions) -> Facts:
    """The first video track, its first `options.frames` frames decoded."""
    with needs("video"):
        import av

    from bridle.data.video.decode import opened

    count, height, width, trouble = 0, 0, 0, ""
    with opened(address_of(path)) as (container, stream):
        try:
            for frame in container.decode(stream):
                renew()
                count, height, width = count + 1, frame.height, frame.width
                if count == options.frames:
                    break
        except av.FFmpegError as error:
            trouble = f": {reason(error)}"
        rate, promised = float(stream.average_rate or 0), stream.frames
    if count == 0:
        return Facts("video").found("empty", f"no frame can be decoded{trouble}")
    whole = max(count, promised) if count == options.frames else count  # frames not decoded are taken on trust
    seconds, shape = whole / rate if rate else None, (3, whole, height, width)
    facts = Facts("video", seconds=seconds, size=f"{width}×{height}", shape=shape)
    if trouble:
        facts = facts.found("cut short", f"decoding stops after {count} frames{trouble}")
    elif count < min(options.frames, SHORTFALL * promised):
        facts = facts.found("cut short", f"{count} of {promised} frames are there")
    return facts


MODALITIES = (
    Modality(
        name="video",
        kind="video",
        items="videos",
        extensions=EXTENSIONS,
        open_files=open_files,
        open_reader=open_reader,
        check_file=check_video,
        can_be_padded=True,
        is_unit_range=True,
        vit_input=VitInput(axes=3, channels=None, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    ),
)
