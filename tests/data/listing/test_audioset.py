"""AudioSet's lists over a folder of clips."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.data.listing.audioset import availability
from bridle.data.listing.layouts import find_data
from bridle.data.listing.table import DataListing
from bridle.errors import ConfigError, DataError

CLASSES = 'index,mid,display_name\n0,/m/09x0r,"Speech"\n1,/m/05zppz,"Male speech, man speaking"\n2,/m/0bt9lr,"Dog"\n'
# As published: comments above, a space after each comma.
BALANCED = """# Segments csv created Sun Mar  5 10:54:31 2017
# num_ytids=4, num_segs=4, num_unique_labels=3, num_positive_labels=6
# YTID, start_seconds, end_seconds, positive_labels
--PJHxphWEs, 30.000, 40.000, "/m/09x0r,/m/05zppz"
a_b_c_d_1_2, 0.000, 10.000, "/m/0bt9lr"
abcdefghi_3, 5.000, 15.000, "/m/0bt9lr,/m/09x0r"
notondiskAA, 5.000, 15.000, "/m/0bt9lr"
"""
# As some copies have it: a header row.
EVAL = """YTID,start_seconds,end_seconds,positive_labels
eval_clip_1,50.000,60.000,"/m/09x0r"
missing_one,0,10,"/m/09x0r"
"""


def audioset(root: Path, *clips: str, balanced: str = BALANCED) -> Path:
    (root / "class_labels_indices.csv").write_text(CLASSES)
    (root / "balanced_train_segments.csv").write_text(balanced)
    (root / "eval_segments.csv").write_text(EVAL)
    for name in clips:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def find(root: Path, segments: tuple[str, ...] | None = None) -> DataListing:
    return find_data(root=str(root), manifest=None, layout="auto", extensions=(".wav", ".flac"), segments=segments)


ON_DISK = ("audio/--PJHxphWEs.wav", "audio/a_b_c_d_1_2.flac", "audio/abcdefghi_3.wav", "other/Yeval_clip_1.wav")


def test_clips_on_disk_get_their_labels(tmp_path: Path) -> None:
    found = find(audioset(tmp_path, *ON_DISK))
    assert found.classes == ("Speech", "Male speech, man speaking", "Dog")
    assert [path.relative_to(tmp_path).as_posix() for path in found.train.paths] == list(ON_DISK[:3])
    assert found.train.labels is not None
    assert list(found.train.labels) == [(0, 1), (2,), (2, 0)]
    assert found.test is not None
    assert found.test.labels is not None
    assert (list(found.test.paths), list(found.test.labels)) == ([tmp_path / ON_DISK[3]], [(0,)])
    assert found.notes[:2] == (
        "balanced_train: 3 of 4 listed clips found (75.0%)",
        "eval: 1 of 2 listed clips found (50.0%)",
    )


@pytest.mark.parametrize(
    "name",
    [
        "--PJHxphWEs.wav",
        "Y--PJHxphWEs.flac",
        "--PJHxphWEs_30.wav",
        "--PJHxphWEs_30.000.wav",
        "--PJHxphWEs_30000.WAV",
        "--PJHxphWEs_30000_40000.wav",
        "Y--PJHxphWEs_30.000_40.000.wav",
        "deep/er/balanced-00012---PJHxphWEs.wav",
    ],
)
def test_clips_are_found_under_the_names_people_give_them(tmp_path: Path, name: str) -> None:
    found = find(audioset(tmp_path, name))
    assert list(found.train.paths) == [tmp_path / name]
    assert found.train.labels is not None
    assert list(found.train.labels) == [(0, 1)]


@pytest.mark.parametrize("name", ["--PJHxphWEs_60.000.wav", "--PJHxphWEs_60000_70000.wav", "--PJHxphWEs.txt"])
def test_another_part_of_the_same_video_is_not_the_clip(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="none of the clips listed"):
        find(audioset(tmp_path, name))


def test_an_id_that_ends_like_a_time_is_found(tmp_path: Path) -> None:
    found = find(audioset(tmp_path, "abcdefghi_3_5.000.wav", "a_b_c_d_1_2_0_10.wav"))
    assert sorted(path.name for path in found.train.paths) == ["a_b_c_d_1_2_0_10.wav", "abcdefghi_3_5.000.wav"]


def test_segments_choose_what_train_is(tmp_path: Path) -> None:
    audioset(tmp_path, *ON_DISK, "x/unbalanced1.wav")
    (tmp_path / "unbalanced_train_segments.csv").write_text('unbalanced1, 0, 10, "/m/0bt9lr"\n')
    assert len(find(tmp_path).train.paths) == 4
    assert len(find(tmp_path, ("unbalanced_train",)).train.paths) == 1
    assert len(find(tmp_path, ("balanced_train", "balanced_train")).train.paths) == 3
    with pytest.raises(ConfigError, match=r"lists balanced_train, eval, unbalanced_train; 'balanced' is not there"):
        find(tmp_path, ("balanced",))


def test_availability_counts_segments_and_classes(tmp_path: Path) -> None:
    there = availability(audioset(tmp_path, *ON_DISK), extensions=(".wav", ".flac"))
    assert [(row.name, row.listed, row.found, row.share) for row in there.segments] == [
        ("balanced_train", 4, 3, 0.75),
        ("eval", 2, 1, 0.5),
    ]
    assert [tuple(row) for row in there.classes] == [
        ("Speech", 4, 3),
        ("Male speech, man speaking", 1, 1),
        ("Dog", 3, 2),
    ]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            '--PJHxphWEs, 30, 40, "/m/09x0r,/m/none"\n',
            r"segments.csv' line 1: label '/m/none' is not in the class file",
        ),
        ("--PJHxphWEs, 30, 40\n", "line 1 has 3 fields; expected 4"),
        ('--PJHxphWEs, x, 40, "/m/09x0r"\n', "line 1: start is 'x'; expected seconds"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        find(audioset(tmp_path, *ON_DISK, balanced=row))


def test_a_class_file_out_of_order_is_refused(tmp_path: Path) -> None:
    audioset(tmp_path, *ON_DISK)
    (tmp_path / "class_labels_indices.csv").write_text("index,mid,display_name\n1,/m/a,A\n0,/m/b,B\n")
    with pytest.raises(DataError, match="expected rows with the indices 0, 1, 2"):
        find(tmp_path)


REAL = Path(__file__).parents[4] / "shared/data/audioset-csv"  # beside the repository


@pytest.mark.skipif(not REAL.is_dir(), reason=f"needs {REAL}")
def test_the_real_lists_are_read() -> None:
    there = availability(REAL, extensions=(".wav",))
    assert len(there.classes) == 527
    assert [tuple(row) for row in there.segments] == [("balanced_train", 500, 0)]
