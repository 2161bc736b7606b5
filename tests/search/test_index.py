"""An index of pictures: exact hits, updates, resume, damage, and a page that stays inert."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import bridle
from bridle.cli import app
from bridle.errors import BridleError, DataError, Interrupted, UsageError
from bridle.infer.feature_spec import FeatureSpec
from bridle.infer.model import Model
from bridle.infer.write import Options
from bridle.search import index as indexing
from bridle.search.evaluate import evaluate_search
from bridle.search.index import IndexUpdate, update_index
from bridle.search.page import write_page
from bridle.search.query import Index, open_index


@pytest.fixture(scope="module")
def model() -> Model:
    return bridle.load("digits-tiny")


def draw(path: Path, seed: int) -> Path:
    """A grey picture of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 255, (4, 4), dtype=np.uint8)
    Image.fromarray(coarse.repeat(4, 0).repeat(4, 1)).save(path)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two class folders of six pictures."""
    for i in range(12):
        draw(tmp_path / "pictures" / ("cat", "dog")[i % 2] / f"{i:02}.png", i)
    return tmp_path / "pictures"


def indexed(model: Model, corpus: Path, out: Path, **options: bool) -> IndexUpdate:
    return update_index(model, "digits-tiny", [str(corpus)], out, options=Options(**options))


@pytest.fixture
def made(model: Model, corpus: Path, tmp_path: Path) -> Index:
    indexed(model, corpus, tmp_path / "index")
    opened = open_index(tmp_path / "index")
    opened.__dict__["model"] = model  # loaded once for all tests
    return opened


def names(found: object) -> list[str]:
    return [Path(hit.entry.name).name for hit in found.hits]  # type: ignore[attr-defined]


def test_hits_are_those_of_a_float64_brute_force(made: Index, model: Model, corpus: Path, tmp_path: Path) -> None:
    query = draw(tmp_path / "query.png", 99)
    z = np.stack([model.encode_file(entry.item.path, pool="mean").z for entry in made.items]).astype(np.float64)
    asked = model.encode_file(query, pool="mean").z - z.mean(0)
    cosine = (z - z.mean(0)) @ asked / np.linalg.norm(z - z.mean(0), axis=1) / np.linalg.norm(asked)
    found = made.search(query, k=4)
    order = np.argsort(-cosine)[:4]
    assert [hit.entry for hit in found.hits] == [made.items[n] for n in order]
    np.testing.assert_allclose([hit.score for hit in found.hits], cosine[order], atol=1e-5)
    assert found.hits[0].entry.labels in (("cat",), ("dog",))


def test_ties_go_to_the_earlier_file_and_an_oracle_finds_the_same(made: Index) -> None:
    made.vectors = np.array(made.vectors)
    made.vectors[3] = made.vectors[7] = made.vectors[5]  # ties, also at the border
    asked = made.vectors[5]
    assert [n for n, _ in made.nearest(asked, k=2, without={0})] == [3, 5]
    faiss = pytest.importorskip("faiss")
    oracle = faiss.IndexFlatIP(made.vectors.shape[1])
    oracle.add(made.vectors)
    scores, _ = oracle.search(asked[None], 12)
    np.testing.assert_allclose([score for _, score in made.nearest(asked, k=12)], scores[0], atol=1e-6)


@pytest.mark.parametrize("by", ["features", "codes"])
def test_a_query_of_the_collection_is_no_hit_of_its_own(made: Index, corpus: Path, tmp_path: Path, by: str) -> None:
    inside = corpus / "cat" / "00.png"
    found = made.search(inside, by=by, k=20)  # type: ignore[arg-type]
    assert (len(found.hits), found.itself) == (11, 1)
    assert "00.png" not in names(found)
    shutil.copy(inside, tmp_path / "elsewhere.png")  # by content, whatever it is called
    assert made.search(tmp_path / "elsewhere.png", by=by, k=20).itself == 1  # type: ignore[arg-type]


def test_an_index_of_relative_names_is_searched_from_any_folder(
    model: Model, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    indexed(model, Path("pictures"), tmp_path / "index")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    opened = open_index(tmp_path / "index")
    opened.__dict__["model"] = model
    found = opened.search(corpus / "cat" / "00.png", k=3)
    assert found.itself == 1
    assert {hit.entry.item.path for hit in found.hits} < {*corpus.rglob("*.png")}
    assert "cannot be shown" not in write_page(opened, [found], tmp_path / "hits.html").read_text()


def test_a_model_without_a_tokenizer_is_searched_by_features(corpus: Path, tmp_path: Path) -> None:
    model = bridle.load("digits-tiny")
    model.own_tokenizer = None
    assert indexed(model, corpus, tmp_path / "index").files == 12
    assert indexed(model, corpus, tmp_path / "index").added == 0
    opened = open_index(tmp_path / "index")
    opened.__dict__["model"] = model
    assert len(opened.search(corpus / "cat" / "00.png", k=3).hits) == 3
    assert [one.by for one in evaluate_search(opened)] == ["features"]
    with pytest.raises(UsageError, match="has no codes, because its model has no tokenizer"):
        opened.search(corpus / "cat" / "00.png", by="codes")


def test_a_changed_copy_is_the_best_hit_by_codes(made: Index, corpus: Path, tmp_path: Path) -> None:
    pixels = np.array(Image.open(corpus / "dog" / "03.png"))
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(tmp_path / "copy.png")
    best = made.search(tmp_path / "copy.png", by="codes", k=1).hits[0]
    assert Path(best.entry.name).name == "03.png"
    assert best.score > 0.5


def test_an_update_computes_only_what_is_new_or_changed(
    model: Model, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "index"
    assert indexed(model, corpus, out)[1:4] == (12, 12, 0)
    asked: list[int] = []
    embed = indexing.embed_inputs
    monkeypatch.setattr(
        indexing, "embed_inputs", lambda m, i, *a, **k: asked.append(len(i.items)) or embed(m, i, *a, **k)
    )
    assert indexed(model, corpus, out)[1:4] == (12, 0, 0)
    assert asked == []
    draw(corpus / "cat" / "new.png", 50)
    draw(corpus / "cat" / "00.png", 51)  # changed
    (corpus / "dog" / "01.png").unlink()
    assert indexed(model, corpus, out)[1:4] == (12, 2, 2)
    assert asked == [2]
    fresh = tmp_path / "fresh"
    indexed(model, corpus, fresh)
    one, other = open_index(out), open_index(fresh)
    assert {entry.name for entry in one.items} == {entry.name for entry in other.items}
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-6)
    assert len(list(out.glob("generation-*"))) == 1


def test_an_interrupted_index_goes_on(
    model: Model, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Interrupted("stopped", exit_code=143)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(indexing, "tokenize_inputs", stop)
        indexed(model, corpus, tmp_path / "index")
    with pytest.raises(UsageError, match="not an index"):
        open_index(tmp_path / "index")
    before = (tmp_path / "index" / "segment-0000" / "features.npz").stat().st_mtime_ns
    draw(corpus / "cat" / "late.png", 60)  # comes while the first part is not finished
    assert indexed(model, corpus, tmp_path / "index").files == 13
    assert (tmp_path / "index" / "segment-0000" / "features.npz").stat().st_mtime_ns == before


def test_bad_files_are_told_and_do_not_stand_in_the_way(model: Model, corpus: Path, tmp_path: Path) -> None:
    (corpus / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n")
    found = indexed(model, corpus, tmp_path / "index")
    assert found.files == 12
    assert "broken.png" in found.failed[0].read_text()
    (corpus / "cat" / "broken2.png").write_bytes(b"no picture")  # alone in its update
    found = indexed(model, corpus, tmp_path / "index")
    assert (found.files, found.added, len(found.failed)) == (12, 0, 2)
    with pytest.raises(DataError):
        indexed(model, corpus / "cat" / "broken.png", tmp_path / "none")


def test_members_of_a_shard_and_rows_of_a_manifest_are_items(model: Model, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    with tarfile.open(tmp_path / "shards" / "train-0000.tar", "w") as tar:
        for n, path in enumerate(sorted(corpus.rglob("*.png"))):
            tar.add(path, f"{n:04}.png")
            label = tarfile.TarInfo(f"{n:04}.cls")
            label.size = 1
            tar.addfile(label, io.BytesIO(str(n % 2).encode()))
    update_index(model, "digits-tiny", [str(tmp_path / "shards")], tmp_path / "index")
    opened = open_index(tmp_path / "index")
    opened.__dict__["model"] = model
    found = opened.search(corpus / "cat" / "00.png", k=20)
    assert (len(found.hits), found.itself) == (11, 1)  # a member is the query by its content
    assert found.hits[0].entry.labels != ()
    assert "train-0000.tar/" in found.hits[0].entry.name
    assert write_page(opened, [found], tmp_path / "hits.html").read_text().count("<img") == 12
    (tmp_path / "list.csv").write_text("path,label\npictures/cat/00.png,x\npictures/dog/01.png,y\n")
    update_index(model, "digits-tiny", [str(tmp_path / "list.csv")], tmp_path / "listed")
    assert [entry.labels for entry in open_index(tmp_path / "listed").items] == [("x",), ("y",)]


def test_another_model_or_a_folder_of_something_else_is_refused(model: Model, corpus: Path, made: Index) -> None:
    with pytest.raises(UsageError, match=r"another pool.*--overwrite"):
        update_index(model, "digits-tiny", [str(corpus)], made.folder, spec=FeatureSpec(pool="axis", axis=0))
    with pytest.raises(UsageError, match="holds other files"):
        update_index(model, "digits-tiny", [str(corpus)], corpus)
    assert indexed(model, corpus, made.folder, overwrite=True).added == 12


@pytest.mark.parametrize("name", ["vectors.npy", "items.jsonl", "mean.npy", "docs.npy", "terms.npy"])
def test_damage_is_one_line(made: Index, tmp_path: Path, name: str) -> None:
    path = made.generation / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    query = draw(tmp_path / "query.png", 99)
    with pytest.raises(DataError, match=r"damaged, cut short.*--overwrite"):
        broken = open_index(made.folder)
        broken.__dict__["model"] = made.model
        broken.search(query, by="codes")


@pytest.mark.parametrize("name", ["../../etc", "..", "generation-x"])
def test_an_index_cannot_lead_out_of_its_folder(made: Index, name: str) -> None:
    path = made.folder / "index.json"
    path.write_text(path.read_text().replace("generation-0000", name))
    with pytest.raises(DataError, match="leads out of the folder"):
        open_index(made.folder)


def test_quality_of_perfect_labels_is_one(made: Index) -> None:
    twins = np.repeat(np.eye(6, made.vectors.shape[1], dtype=np.float32), 2, axis=0)
    made.vectors = twins
    made.items = [entry._replace(labels=(f"twin {n // 2}",)) for n, entry in enumerate(made.items)]
    features, codes = evaluate_search(made)
    assert (features.by, features.mean_average_precision, features.precision_at_1) == ("features", 1.0, 1.0)
    assert codes.mean_average_precision < 1
    assert features.chance == pytest.approx(np.mean(1 / np.arange(1, 12)))  # one of eleven, at any rank alike
    made.items = [entry._replace(labels=()) for entry in made.items]
    with pytest.raises(UsageError, match="no two files with the same label"):
        evaluate_search(made)


class Tags(HTMLParser):
    """All tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_hostile_names_and_labels_stay_text(model: Model, tmp_path: Path) -> None:
    hostile = '<script>alert(1)<!script>"><img src=x onerror=alert(1)>'
    corpus = tmp_path / "pictures"
    for i in range(3):
        draw(corpus / f"{hostile} label" / f"'{hostile}{i}[bold]\n.png", i)
    indexed(model, corpus, tmp_path / "index")
    opened = open_index(tmp_path / "index")
    opened.__dict__["model"] = model
    query = next(corpus.rglob("*.png"))
    page = write_page(opened, [opened.search(query), opened.search(query, by="codes")], tmp_path / "hits.html")
    text = page.read_text()
    tags = Tags(text).seen
    assert {tag for tag, _ in tags}.isdisjoint({"script", "iframe", "object", "link", "base", "form"})
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    pictures = [attributes["src"] for tag, attributes in tags if tag == "img"]
    assert len(pictures) == 6
    assert all(source and source.startswith("data:image/") for source in pictures)
    assert "default-src 'none'" in text
    assert text.count(hostile) == 0
    result = CliRunner().invoke(app, ["search", str(tmp_path / "index"), str(query), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "[bold]" in result.output  # no markup for the terminal either


def test_a_file_that_is_gone_is_named_on_the_page(made: Index, corpus: Path, tmp_path: Path) -> None:
    found = made.search(corpus / "cat" / "00.png", k=2)
    Path(found.hits[0].entry.item.path).unlink()
    text = write_page(made, [found], tmp_path / "hits.html").read_text()
    assert "cannot be shown" in text
    assert Path(found.hits[0].entry.name).name in text


def test_the_commands_say_what_they_did(corpus: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, [*words])
        if isinstance(result.exception, BridleError):
            return str(result.exception)
        assert result.exit_code in (0, 2), result.output
        return result.output

    index = str(tmp_path / "index")
    made = run("index", "digits-tiny", str(corpus), "--out", index, "--workers", "0")
    assert "12 files, 12 added, 0 removed" in made
    said = run("search", index, "--evaluate")
    assert re.search(r"features +\d+\.\d", said)
    assert re.search(r"codes +\d+\.\d", said)
    assert "12 queries among 12 files" in said
    assert "give a file to search for, or --evaluate" in run("search", index)
    assert "expected features or codes" in run("search", index, str(corpus / "cat" / "00.png"), "--by", "smell")
    assert "is not an index" in run("search", str(corpus), str(corpus / "cat" / "00.png"))
    assert "does not exist" in run("search", index, "nothing.png")
