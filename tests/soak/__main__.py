"""`make soak`: everything the proof table of docs/reliability.md names, at length, and that table in the end.

    python tests/soak [--out soak] [--jobs 2] [--only AREA]        SOAK_SCALE=0.1 tries a tenth of it

What is done is written to OUT/done.jsonl at once; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from soak import exports, grid, media  # noqa: E402 - after the path is set
from soak.disk import fill_disk  # noqa: E402
from soak.fuzz import KINDS, fuzz_apart  # noqa: E402
from soak.leak import measure_growth  # noqa: E402
from soak.suites import run_suite  # noqa: E402
from soak.tally import Case, Ledger, Tally, case, judged  # noqa: E402

SCALE = float(os.environ.get("SOAK_SCALE", "1"))
LIMITED, CONFIGS, LEAK = "disk: file-size limit", "fuzz: configs", "leak: resident memory"
AGREE, RESUME, LOST = "ranks: 2, 4 and 8 processes against 1", "ranks: resume 2→1 and 1→2", "ranks: one dies or hangs"
NAN_RANK, HOSTILE, DECODERS = (
    "NaN: on one rank",
    "hostile: files and names",
    "media: decoders that crash, hang or take too much memory",
)
AREAS = (
    *(grid.KILL, exports.KILLED, grid.THRICE, grid.DAMAGE, grid.SIGNAL, grid.FULL, LIMITED, AGREE, RESUME, LOST),
    *(
        grid.ONE_SKIP,
        grid.FIVE_SKIPS,
        NAN_RANK,
        media.BAD_FILES,
        media.KILLED,
        media.WORKERS,
        DECODERS,
        HOSTILE,
        CONFIGS,
    ),
    *(*(f"fuzz: {kind}" for kind in KINDS), LEAK),
)
RANKS = tuple(f"tests/e2e/test_{name}.py" for name in ("ranks", "quantize_ranks", "export_ranks", "many_ranks"))
HOSTILES = (
    "tests/test_security.py",
    "tests/test_damaged_files.py",
    "tests/export/test_convert.py",
    "tests/report/test_page.py",
)
CONTAINED = ("tests/data/loading/test_containment.py",)
SLOW_KINDS = {"run for a report": 0.1}  # a page takes a hundred times as long as a picture
SETS = 4  # data sets with bad files of each modality


def rank_area(test: str) -> str:
    """Where a test of several processes counts."""
    if "not_finite_on_one_rank" in test:
        return NAN_RANK
    if "another_number_of" in test:
        return RESUME
    return LOST if "hangs" in test or "killed" in test or "dies" in test else AGREE


def suites(out: Path) -> Iterator[Case]:
    """Rows that ordinary tests prove."""
    for file in RANKS:
        go = partial(run_suite, [file], out=out / f"{Path(file).stem}.xml", area_of=rank_area)
        yield Case(file, (AGREE, RESUME, LOST, NAN_RANK) if file == RANKS[0] else (AGREE,), go)
    for name, files, area in (("hostile", HOSTILES, HOSTILE), ("decoders", CONTAINED, DECODERS)):
        go = partial(run_suite, files, out=out / f"{name}.xml", area_of=lambda test, area=area: area)
        yield Case(name, (area,), go)


def all_cases(out: Path, faults: grid.Grid) -> Iterator[Case]:
    yield from suites(out / "suites")
    yield from faults.cases()
    for name, points in exports.POINTS.items():
        for point in points:
            place = out / "exports" / f"{name}-{point}"
            yield case(exports.KILLED, f"{name}, {point}", partial(exports.kill_tokenize, name, point, place))
    for share in (0.01, 0.25, 0.5, 0.99):
        yield case(LIMITED, f"{share:.0%} of a checkpoint", partial(fill_disk, share), scaled=True)
    for kind in media.KINDS:
        for seed in range(SETS):
            go = partial(media.train_on_bad_files, kind, out / "media" / f"{kind}{seed}", seed=seed)
            yield Case(f"media: {kind} {seed}", (media.BAD_FILES, media.WORKERS), go)
            place = out / "media" / f"killed-{kind}{seed}"
            yield case(media.KILLED, f"{kind} {seed}", partial(media.kill_while_listing, kind, place, seed=seed))
    each = max(1, round(1000 * SCALE))
    for part in range(10):
        yield fuzzed(out, CONFIGS, "config" if part % 2 else "override", each, part * each)
    for kind in KINDS:
        count = max(1, round(2000 * SCALE * SLOW_KINDS.get(kind, 1)))
        yield fuzzed(out, f"fuzz: {kind}", kind, count, 0)
    yield case(LEAK, f"{leak_steps()} steps", partial(leak, out / "leak"), scaled=True)


def fuzzed(out: Path, area: str, kind: str, count: int, first: int) -> Case:
    def go() -> Tally:
        found = fuzz_apart(kind, count, first=first, report=out / f"fuzz-{kind.replace(' ', '-')}-{first}.json")
        wrong = {what: number for what, number in found.count.items() if what not in ("used", "refused")}
        return Tally(found.tried, found.held, [f"{kind}: {what} ({number})" for what, number in wrong.items()])

    return case(area, f"{kind} {first}–{first + count}", go, scaled=True)


def leak(folder: Path) -> Tally:
    steps = leak_steps()
    shutil.rmtree(folder, ignore_errors=True)
    found = measure_growth(folder, steps=steps, limit=1800)
    allowed = 1024 if steps >= 3000 else 20_000  # pages come in clusters: few steps cannot show so little
    print(f"     memory: {found.per_step:.0f} bytes a step over {found.steps} steps", flush=True)
    return judged([] if found.per_step <= allowed else [f"{found.per_step:.0f} bytes a step over {found.steps} steps"])


def leak_steps() -> int:
    return max(150, round(3000 * SCALE))


def chosen(cases: list[Case], only: str) -> list[Case]:
    """All of them at full scale; at a smaller one every n-th of those that are not shorter by themselves."""
    if SCALE < 1:
        whole = [one.name for one in cases if not one.scaled][:: max(1, round(1 / SCALE))]
        cases = [one for one in cases if one.scaled or one.name in whole]
    return [one for one in cases if any(area.startswith(only) for area in one.areas)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", metavar="AREA", help="only areas that begin so, such as NaN or fuzz")
    wanted = parser.parse_args()
    out = wanted.out.absolute()
    ledger, faults = Ledger(out, scale=SCALE), grid.Grid(out, scale=SCALE)
    cases = chosen(list(all_cases(out, faults)), wanted.only)
    left = [one for one in cases if one.name not in ledger.finished]
    if any(area in grid.AREAS for one in left for area in one.areas):
        faults.prepare()
    print(f"{len(cases)} cases at scale {SCALE:g}, {len(cases) - len(left)} of them done before.", flush=True)
    with ThreadPoolExecutor(wanted.jobs) as pool:
        list(pool.map(partial(ledger.try_one, names={one.name for one in cases}), left))
    table = ledger.table(AREAS)
    (out / "table.md").write_text(table)
    print(table)
    sys.exit(any(row["held"] < row["tried"] for row in ledger.rows))


if __name__ == "__main__":
    main()
