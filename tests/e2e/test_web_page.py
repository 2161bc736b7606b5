"""The page of `bridle export --web` in a real browser: its codes are those of `bridle tokenize` for the same files.

A second page holds the pages in frames, gives each its files as a user would, and sends what they show to the server.
"""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
from forked import bridle as command
from PIL import Image
from small_models import SIZES, build_model

from bridle.config import load_config
from bridle.export.onnx import export_model
from bridle.infer.model import Model, load

CHROMIUM, NPM = shutil.which("chromium"), shutil.which("npm")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on PATH (Debian: apt install chromium)"),
    pytest.mark.skipif(NPM is None, reason="no `npm` on PATH to install onnxruntime-web (Debian: apt install npm)"),
]
GUIDE = Path(__file__).parents[2] / "docs" / "with.md"

HOLDER = """<!doctype html><meta charset="utf-8"><title>holder</title><script type="module">
const until = (frame, ...states) => new Promise(resolve => {
  const state = () => frame.contentDocument?.documentElement?.dataset.state;
  const look = () => states.includes(state()) ? resolve() : setTimeout(look, 20);
  look();
});
const found = {};
for (const [page, width, files] of JOBS) {
  const frame = Object.assign(document.createElement("iframe"), {src: `${page}/index.html`, width, height: 900});
  document.body.append(frame);
  await until(frame, "ready", "error");
  for (const name of files) {
    const inside = frame.contentDocument, input = inside.querySelector("input"), held = new DataTransfer();
    held.items.add(new File([await (await fetch(name)).blob()], name));
    input.files = held.files;
    input.dispatchEvent(new Event("change"));
    await until(frame, "done", "error");
    const shown = inside.querySelector("#map"), colors = new Set();
    const pixels = shown.getContext("2d").getImageData(0, 0, shown.width, shown.height).data;
    for (let i = 0; i < pixels.length; i += 4) colors.add(pixels.slice(i, i + 3).join());
    found[`${page} ${name}`] = {
      status: inside.querySelector("#status").textContent,
      codes: inside.querySelector("#codes").textContent,
      colors: colors.size,
      fits: inside.documentElement.scrollWidth <= width,
      loaded: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
    };
  }
  frame.remove();
}
await fetch("/done", {method: "POST", body: JSON.stringify(found)});
</script>"""


class Seen(NamedTuple):
    """What the browser saw of a page and a file."""

    status: str
    codes: str  # as the page lists them
    colors: int  # of the token map
    fits: bool
    loaded: list[str]

    def table(self, stages: int) -> np.ndarray[Any, Any]:
        """(T, M)"""
        return np.array([list(map(int, line.split(",")[-stages:])) for line in self.codes.splitlines()[1:]])


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; what is sent to it is put into a queue."""

    def __init__(self, *given: Any, answers: queue.Queue[bytes], **more: Any) -> None:
        self.answers = answers
        super().__init__(*given, **more)

    def do_POST(self) -> None:
        self.answers.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Nothing."""


def browse(folder: Path, jobs: list[tuple[str, int, list[str]]]) -> tuple[dict[str, Seen], list[str]]:
    """Show pages of a folder in frames and give them files: what was seen by "page file", and console lines."""
    assert CHROMIUM is not None
    (folder / "holder.html").write_text(HOLDER.replace("JOBS", json.dumps(jobs)), encoding="utf-8")
    answers: queue.Queue[bytes] = queue.Queue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, answers=answers, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--window-size=1400,1000"]
    address = f"http://127.0.0.1:{server.server_port}/holder.html"
    with (folder / "console.txt").open("w") as said:
        browser = subprocess.Popen([CHROMIUM, *flags, address], stderr=said, stdout=subprocess.DEVNULL)
        try:
            found = json.loads(answers.get(timeout=300))
        except queue.Empty:
            pytest.fail((folder / "console.txt").read_text()[-2000:])
        finally:
            browser.terminate()
            browser.wait(timeout=60)
            server.shutdown()
    console = [
        line
        for line in (folder / "console.txt").read_text().splitlines()
        if "CONSOLE" in line and "holder.html" not in line
    ]
    return {name: Seen(**seen) for name, seen in found.items()}, console


def guide_commands() -> list[list[str]]:
    """The commands of the guide's section about the browser."""
    section = GUIDE.read_text(encoding="utf-8").partition("\n## The browser\n")[2].partition("\n## ")[0]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return [line.split() for line in block[1].splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the npm package of the guide, pictures and recordings."""
    root = tmp_path_factory.mktemp("web")
    install = guide_commands()[0]
    assert install == ["npm", "install", "onnxruntime-web"]
    options = ["--prefer-offline", "--no-audit", "--no-fund", "--ignore-scripts"]
    try:
        done = subprocess.run([*install, *options], cwd=root, capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("`npm install onnxruntime-web` took longer than 90 s")
    if done.returncode:
        pytest.skip(f"`npm install onnxruntime-web` failed: {done.stderr.strip().splitlines()[-1:]}")
    random = np.random.default_rng(0)
    smooth = random.integers(0, 255, (9, 11, 4), dtype=np.uint8)
    Image.fromarray(smooth).resize((130, 90)).save(root / "see-through.png")
    Image.fromarray(smooth[..., :3]).resize((40, 64)).save(root / "portrait.jpg", quality=95)
    wave = np.sin(2e-5 * np.arange(24_000) ** 2) * 0.3 + 0.02 * random.standard_normal(24_000)
    soundfile.write(root / "own-rate.wav", np.stack([wave, wave[::-1]], 1), 16_000)
    soundfile.write(root / "other-rate.flac", wave, 44_100)
    soundfile.write(root / "blip.wav", wave[:300], 16_000)
    return root


def page_of(kind: str, place: Path) -> Model:
    """A small model with random weights, exported as a page to the folder `kind`."""
    shapes = {
        "image": ("geometry.input=[32, 32]", "geometry.patch=[4, 4]", "data.std=[0.3]"),
        "audio": ("geometry.input=[64, 32]", "geometry.patch=[8, 16]", "data.mean=[-4.0]", "data.std=[8.0]"),
    }
    model = build_model(
        load_config(kind, [*SIZES, "quantizer.codes=16", "encoder.depth=1", *shapes[kind]]), trained=False
    )
    export_model(model.trained(), place / kind, web=True, runtime=place)
    return model


def test_the_pages_show_the_codes_that_bridle_tokenize_writes_and_load_nothing_else(place: Path) -> None:
    _, export, serve = guide_commands()
    done = command(*export[1:], cwd=place)
    assert (done.code, export[:3]) == (0, ["bridle", "export", "digits-tiny"]), done.err
    digits = serve[serve.index("--directory") + 1]
    pictures, sounds = ["see-through.png", "portrait.jpg"], ["own-rate.wav", "other-rate.flac"]
    models = {digits: load(place / digits), "image": page_of("image", place), "audio": page_of("audio", place)}
    jobs = [
        (digits, 1280, pictures[:1]),
        ("image", 1280, [*pictures, "blip.wav"]),
        ("audio", 400, [*sounds, "blip.wav"]),
    ]
    seen, console = browse(place, jobs)
    assert console == []
    for (page, name), one in ((key.split(), seen[key]) for key in seen if "blip" not in key):
        expected = models[page].tokenize_file(place / name).codes
        shown = one.table(expected.shape[1])
        assert shown.shape == expected.shape, (page, name)
        # Resampling is the page's own filter; elsewhere only rounding can differ.
        assert (shown == expected).mean() >= (0.95 if name == "other-rate.flac" else 0.99), (page, name)
        assert len(np.unique(expected)) >= 8, "codes that are all alike would show nothing"
        assert one.colors > 8
        assert one.status == ""
        assert one.fits
    assert seen["image blip.wav"].status == "blip.wav: this browser cannot read it as a picture."
    assert seen["audio blip.wav"].status == "blip.wav: it is too short: 0 frames, but half a patch of 8 needs 4."
    assert "seconds,code_1" in seen["audio own-rate.wav"].codes
    for key, one in seen.items():
        files = {re.sub(r"http://127.0.0.1:\d+/", "", address) for address in one.loaded}
        assert f"{key.split()[0]}/tokenizer.onnx" in files
        assert all(file.startswith(key.split()[0] + "/") or file.startswith("blob:") for file in files), files
