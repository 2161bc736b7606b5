"""The demo: what it prints, and the lines of runs side by side."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bridle.cli.train import demo
from bridle.console import json_output
from bridle.errors import UsageError
from bridle.grid import demo as module
from bridle.grid.run_lines import RunLines, shortened
from bridle.runs.folder import RunFolder

SHORT = ["max_steps=4", "probe.items=200", "probe.draws=6", "encoder.width=24", "log=none"]


SCRATCH = ["finetune.from_scratch=true", "finetune.shots=[5,10]", "finetune.shot_steps=2", "finetune.steps=2"]


def shorter(arguments: Callable[..., dict[str, list[str]]]) -> Callable[..., dict[str, list[str]]]:
    return lambda *given, **named: {method: [*own, *SHORT] for method, own in arguments(*given, **named).items()}


def test_the_demo_tells_one_modality_on_one_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(module, "demo_arguments", shorter(module.demo_arguments))
    monkeypatch.setattr(json_output, "stream", printed := io.StringIO())  # as with --json
    monkeypatch.setattr(module, "FROM_SCRATCH", SCRATCH)
    demo(modality="image", seed=1, out=tmp_path / "demo")
    found = [json.loads(line) for line in printed.getvalue().splitlines()]
    assert [(one["command"], one["path"].rpartition("/demo/")[2]) for one in found] == [
        *(("demo", f"image-{method}/results.json") for method in ("vq", "rq")),
        ("finetune", "image-scratch/finetune.json"),
        ("report", "report.html"),
    ]
    assert found[1]["evaluations"] == json.loads(Path(found[1]["path"]).read_text())["evaluations"]
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert len(lines) <= 30  # a screen
    for name in ("raw input", "untrained encoder", "VQ iter1", "RQ iter1"):
        (row,) = [line for line in lines if line.startswith(name)]
        assert len(re.findall(r"\d+\.\d ±\d+\.\d", row)) == 4  # 1, 5, 10 labels a class, and all
    (row,) = [line for line in lines if line.startswith("from scratch")]
    assert len(re.findall(r"\d+\.\d ±\d+\.\d", row)) == 3  # all but one label a class
    assert "training from scratch" in " ".join(shown.split())
    assert re.search(r"What the codes keep: (-?\d+ / ){3}-?\d+ %", shown)
    assert re.search(r"^RQ with 5 labels per class (beats|loses to|is not clearly)", shown, re.MULTILINE)
    assert "Left out: video, audio" in shown
    assert (tmp_path / "demo" / "report.html").stat().st_size > 50_000
    for method, codes in (("vq", [256]), ("rq", [64] * 4)):
        results = json.loads((tmp_path / "demo" / f"image-{method}" / "results.json").read_text())
        assert [stage["codes"] for stage in results["evaluations"][0]["codebooks"]] == codes
        log = (tmp_path / "demo" / f"image-{method}.log").read_text()
        assert log.startswith("$ bridle pretrain patterns-tiny seed=1")
        assert "linear probe: accuracy" in log
    report = (tmp_path / "demo" / "report.html").read_text()
    assert "from scratch" in report


def test_the_quick_demo_leaves_out_vq(tmp_path: Path) -> None:
    rq, scratch, decoding = module.stages_of("image", {"rq": module.demo_arguments("image", seed=1)["rq"]}, tmp_path)
    assert [rq.folder.name, scratch.folder.name] == ["image-rq", "image-scratch"]
    assert decoding.after == rq.name
    assert "finetune.pool=mean" in scratch.arguments
    assert RunFolder(scratch.folder).config().seed == 1


def test_quick_takes_no_other_modality(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--quick runs image alone"):
        demo(modality="audio", quick=True, out=tmp_path)


def test_a_file_gets_one_line_per_run_and_the_log_every_line(tmp_path: Path) -> None:
    screen = io.StringIO()
    logs = {name: tmp_path / "logs" / f"{name}.log" for name in ("one", "two")}
    with RunLines(Console(file=screen, width=200), logs) as lines:
        for step in range(30):
            lines.tell("one", f"iter 1/1 encoder {step}/30 · loss 3.5 · accuracy .1 · ETA 0:0{step % 10}")
        lines.tell("one", "linear probe: [0.5]")
        lines.spent("one", 2.0)
        lines.tell("two", "failed")
    assert " ".join(screen.getvalue().split()) == f"one 0:00 ended · log {logs['one']}"
    assert len(logs["one"].read_text().splitlines()) == 31
    assert logs["two"].read_text() == "failed\n"


def test_a_terminal_shows_the_last_line_of_each_run_and_the_time_to_go(tmp_path: Path) -> None:
    lines = RunLines(Console(file=io.StringIO(), force_terminal=True, width=70), {"one": tmp_path / "one.log"})
    lines.tell("one", "iter 1/1 encoder 20/30 · loss 3.5 · accuracy .1/.2 · codes used 1.0 · ETA 0:07")
    with lines.console.capture() as shown:
        lines.console.print(lines.table())
    assert shown.get().split("0:00")[1].strip() == "iter 1/1 encoder 20/30 · loss 3.5 · ETA 0:07"
    assert shortened("few words · two") == "few words · two"
