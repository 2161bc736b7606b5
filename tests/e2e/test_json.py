"""`--json` of every command: one object per line, nothing else, and the keys that docs/with.md names."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image

from bridle.cli.app import app, main
from bridle.config import recipe_names

SMALL = ("max_steps=1", "schedule.iterations=1", "probe.items=40", "data.workers=0", "log=none")
# What is typed, and the `command` of every object that is printed. In order: later commands read what earlier wrote.
TYPED = {
    "recipes": ["recipes"] * len(recipe_names()),
    "show digits-tiny seed=7": ["show"],
    "plan digits-tiny encoder.depth=1 schedule.iterations=1 --device cpu": ["plan"],
    "schema": ["schema"],
    "schema --out schema.json": ["schema"],
    "doctor": ["doctor"],
    "launch --dry-run --devices 2 -- pretrain digits-tiny": ["launch"],
    "init photos --out photos.yaml": ["init"],
    "data check photos --workers 0": ["data check"],
    "data stats photos --workers 0": ["data stats"],
    "data shard photos --out shards --workers 0": ["data shard"],
    "data check shards --workers 0": ["data check"],
    "tokenize digits-tiny photos --out codes.npz --workers 0": ["tokenize"],
    "embed digits-tiny photos --out features.npz --workers 0": ["embed"],
    "codes diff codes.npz codes.npz": ["codes diff"],
    "sequences codes.npz --out sequences": ["sequences"],
    "index digits-tiny photos --out index --workers 0": ["index"],
    "search index photos/a/0.png photos/b/1.png -k 2": ["search"] * 2,
    "search index --evaluate": ["search --evaluate"] * 2,
    "export digits-tiny --out exported": ["export"],
    "convert weights.pth --out weights.safetensors": ["convert"],
    "import weights.safetensors --out imported": ["import"],
    f"pretrain digits-tiny {' '.join(SMALL)} --out run": ["pretrain"],
    "probe run probe.items=40": ["probe"],
    "knn run probe.items=40": ["knn"],
    "finetune run finetune.epochs=1 finetune.warmup_epochs=0 finetune.items=40": ["finetune"],
    "codebooks run --items 40": ["codebooks"],
    "detokenizer run detokenizer.steps=2 detokenizer.warmup_steps=1": ["detokenizer"],
    "codebooks run --reconstruct --items 40": ["codebooks --reconstruct"],
    "tokenize run photos/a --out own.npz --workers 0": ["tokenize"],
    "detokenize run own.npz --out decoded": ["detokenize"],
    "report run --no-samples": ["report"],
}
ELSEWHERE = {
    "ablate",
    "demo",
    "bench",
}  # below, test_demo.py, test_bench_quantizer.py: they take long


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to work in, with pictures and a checkpoint of a ViT."""
    folder = tmp_path_factory.mktemp("json")
    random = np.random.default_rng(0)
    for name in "ab":
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(4):
            pixels = random.integers(0, 256, (16, 16)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{i}.png")
    vit = {"patch_embed.proj.weight": torch.zeros(64, 3, 16, 16), "pos_embed": torch.zeros(1, 5, 64)}
    vit |= {"patch_embed.proj.bias": torch.zeros(64), "cls_token": torch.zeros(1, 1, 64)}
    for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm"):
        vit |= {f"{norm}.weight": torch.ones(64), f"{norm}.bias": torch.zeros(64)}
    for name, shape in {
        "attn.qkv": (192, 64),
        "attn.proj": (64, 64),
        "mlp.fc1": (256, 64),
        "mlp.fc2": (64, 256),
    }.items():
        vit |= {f"blocks.0.{name}.weight": torch.zeros(shape), f"blocks.0.{name}.bias": torch.zeros(shape[0])}
    torch.save(vit, folder / "weights.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def keys_in_the_guide() -> dict[str, set[str] | None]:
    """The keys of every command in docs/with.md; None where a command prints those of another document."""
    section = (Path(__file__).parents[2] / "docs" / "with.md").read_text().partition("\n## JSON\n")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
    named = [(re.findall("`(.*?)`", commands), set(re.findall("`(\\w+)`", keys))) for commands, keys in rows]
    return {one: None if one in ("show", "schema", "doctor") else keys for commands, keys in named for one in commands}


@pytest.mark.parametrize("typed", TYPED)
def test_a_command_prints_objects_of_the_keys_in_the_guide_and_nothing_else(
    typed: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bridle", "--json", *typed.split()])
    if typed == "doctor":
        monkeypatch.setattr("bridle.machine.make_bf16_safe", lambda: "not tried")  # starts a process
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr()
    assert ended.value.code in (0, None), said.err
    found = [json.loads(line) for line in said.out.splitlines()]
    assert [one.pop("command") for one in found] == TYPED[typed]
    known = keys_in_the_guide()[TYPED[typed][0]]
    assert all(one and (known is None or one.keys() <= known) for one in found)


def test_every_command_of_the_command_line_is_tried_here() -> None:
    def names(command: Any, before: str = "") -> set[str]:
        below = getattr(command, "commands", {})
        return {found for name, one in below.items() for found in names(one, f"{before} {name}")} or {before.strip()}

    tried = {one.partition(" --")[0] for printed in TYPED.values() for one in printed}
    assert (
        names(typer.main.get_command(app))
        == tried | ELSEWHERE
        == {one.partition(" --")[0] for one in keys_in_the_guide()}
    )


def test_ablate_prints_where_its_table_is(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bridle.grid.ablation.run_grid", lambda *given, out, **more: out / "table.md")
    monkeypatch.setattr(
        sys, "argv", ["bridle", "ablate", "digits-tiny", "--table", "losses", "--out", "there", "--json"]
    )
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capfd.readouterr().out) == {"command": "ablate", "path": str(Path("there", "table.md"))}
