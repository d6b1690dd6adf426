"""`unspool inspect attention` from the command line: the shipped model and another, pages, and mistakes."""

import base64
import json
import re
import struct
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from factory import build_model, save_folder
from unspool.cli.main import build_app
from unspool.data.facts import word_list

# tests/inspect has no __init__.py, because a package of that name would hide Python's own `inspect`.
sys.path.insert(0, str(Path(__file__).parents[1] / "inspection"))

from inspection_factory import pieced_row, save_rows, save_run

NASTY = "<script>alert(1)</script>&.txt".replace("/", "∕")


def look(*args: object) -> str:
    done = CliRunner().invoke(build_app(), ["inspect", "attention", *map(str, args)])
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*args: object) -> str:
    done = CliRunner().invoke(build_app(), ["inspect", "attention", *map(str, args)])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files, one of which has a name that is markup."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    paths = []
    for name in (NASTY, "plain.txt"):
        (folder / name).write_text(" ".join(rng.choice(word_list(), size=400)))
        paths.append(folder / name)
    return paths


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape and one tokenizer, and a third of another shape."""
    folder = tmp_path_factory.mktemp("models")
    changes = {"base": {"seed": 1}, "long": {"seed": 2}, "other": {"num_hidden_layers": 3}}
    return [
        save_folder(folder / name, build_model(**{"max_position_embeddings": 128} | change))
        for name, change in changes.items()
    ]


def text_args(texts: list[Path]) -> list[object]:
    return [part for path in texts for part in ("--text", path)]


@pytest.fixture(scope="module")
def compared(models, texts, tmp_path_factory) -> tuple[dict, str, str]:
    """JSON, page and figure of two models."""
    out = tmp_path_factory.mktemp("out")
    shown = look(
        *models[:2], *text_args(texts), "--length", 300, "--pieces", 2, "--beyond", 100, "--heads", 2,
        "--name", "<b>A</b>", "--name", "second",
        "--html", out / "new" / "maps.html", "--svg", out / "maps.svg", "--json",
    )  # fmt: skip
    return json.loads(shown), (out / "new" / "maps.html").read_text(), (out / "maps.svg").read_text()


def test_json_has_all_heads_of_both_models_and_says_what_was_looked_at(compared):
    values, _, _ = compared
    assert (values["tokens"], values["beyond"], values["block"], values["cell"]) == (300, 100, 16, 16)
    assert [model["name"] for model in values["models"]] == ["<b>A</b>", "second"]
    assert all(np.array(model["far"]).shape == (2, 4) for model in values["models"])
    second = np.array(values["models"][1]["far"])
    best = sorted((-second[layer, head], layer, head) for layer in range(2) for head in range(4))[:2]
    assert [(head["layer"], head["head"]) for head in values["heads"]] == [(layer, head) for _, layer, head in best]
    assert sum(piece["tokens"] for piece in values["pieces"]) == 300
    assert {piece["document"] for piece in values["pieces"]} == {0, 1}
    assert any("longer than the context" in note for note in values["notes"])


def pixels(address: str) -> np.ndarray:
    """The palette's entries of a PNG, read by hand; checks its sums."""
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        name, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + content)
        chunks[name] = content
        at += 12 + size
    width, height, depth, kind = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, kind, len(chunks[b"PLTE"]), chunks[b"tRNS"]) == (8, 3, 3 * 256, b"\0")
    return np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, width + 1)[:, 1:]


def test_the_page_needs_nothing_else_and_every_name_is_text(compared):
    _, page, _ = compared
    assert "<b>A</b>" not in page
    assert "&lt;b&gt;A&lt;/b&gt;" in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert addresses and all(address.startswith("data:") for address in addresses)
    assert 'lang="en"' in page and "prefers-color-scheme: dark" in page


def test_the_page_draws_both_models_and_the_difference_of_each_head(compared):
    _, page, _ = compared
    maps = re.findall(r'<svg class="chart map( difference)?"[^>]*aria-label="([^"]+)"><image href="([^"]+)"', page)
    assert [bool(kind) for kind, _, _ in maps] == [False, False, True] * 2
    for kind, about, address in maps:
        found = pixels(address)
        assert found.shape == (19, 19)
        assert (found[np.triu_indices(19, 1)] == 0).all(), "something is drawn above the diagonal"
        assert (found[np.tril_indices(19)] > 0).all()
        assert ("minus" if kind else "of attention goes more than 100 tokens back") in about
    assert page.count('class="border"') >= 6, "borders of documents are missing"


def test_the_figure_is_an_svg_of_its_own(compared):
    _, _, figure = compared
    root = ElementTree.fromstring(figure)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall(".//{*}image")) == 2 * 3 + 2
    words = " ".join(text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "<b>A</b>" in words and "difference" in words and "100%" in words
    assert "script" not in {element.tag.rpartition("}")[2] for element in root.iter()}


def test_the_terminal_shows_the_heads_that_look_furthest(texts):
    shown = look("asset:tiny-base", *text_args(texts), "--beyond", 200, "--heads", 2, "--first", 0)
    lines = shown.splitlines()
    assert lines[1] == "asset:tiny-base"
    table = [line for line in lines if line.startswith("layer ")]
    shares = [float(re.findall(r"([\d.]+)%", line)[0]) for line in table]
    assert len(shares) == 10
    assert shares == sorted(shares, reverse=True)
    assert "mean of 32 heads" in shown
    top = re.match(r"layer (\d+), head (\d+)", table[0])
    assert top and f"{top[1]}:{top[2]}" in lines[-1]
    assert "\x1b" not in shown


def test_named_heads_are_drawn_in_their_order(models, texts):
    args = ("--length", 300, "--beyond", 100, "--head", "1:3", "--head", "0:2", "--layers", "0-1")
    values = json.loads(look(models[0], *text_args(texts), *args, "--json"))
    assert [(head["layer"], head["head"]) for head in values["heads"]] == [(1, 3), (0, 2)]


def test_long_texts_are_pooled_to_the_points_asked_for(models, texts):
    values = json.loads(look(models[0], *text_args(texts), "--beyond", 100, "--length", 600, "--pixels", 16, "--json"))
    assert values["cell"] > values["block"]
    assert -(-values["tokens"] // values["cell"]) <= 16


def test_a_row_is_looked_at_as_it_is_trained_on(models, tmp_path):
    folder = save_rows(tmp_path / "rows", [pieced_row([40, 60, 50], [0, 1, 0])], cip={"pieces": 2})
    values = json.loads(look(models[0], "--row", f"{folder}:0", "--beyond", 30, "--json"))
    assert values["attention"] == "full"
    assert values["pieces"] == [
        {"document": 0, "tokens": 40},
        {"document": 1, "tokens": 60},
        {"document": 0, "tokens": 50},
    ]
    masked = json.loads(
        look(models[0], "--row", f"{folder}:0", "--beyond", 30, "--attention", "intra_document", "--json")
    )
    far, same = (np.array(masked["models"][0][name]) for name in ("far", "same"))
    np.testing.assert_allclose(far, same, atol=1e-6)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--head", "9:0"], "has layers 0 to 1"),
        (["--head", "0:9"], "heads 0 to 3"),
        (["--head", "zero"], "such as 22:4"),
        (["--layers", "3-1"], "such as 20-25,29"),
        (["--layers", "7"], "layer 7"),
        (["--length", "1M"], "give more text"),
        (["--length", "many"], "--length many"),
        (["--length", 20], "at least 32"),
        (["--length", 200], "smaller --beyond"),
        (["--attention", "some"], "full or intra_document"),
        (["--by", "size"], "far, same or share"),
        (["--by", "share", "--attention", "intra_document"], "long-range attention that can leave a document"),
        (["--by", "share", "--docs", 1], "long-range attention that can leave a document"),
        (["--row", "rows:0"], "either --text or --row"),
        (["--name", "a", "--name", "b"], "name each or none"),
        (["--device", "tpu"], "--device 'tpu' is not known"),
    ],
)
def test_one_sentence_for_every_mistake(models, texts, args, says):
    assert says in refused(models[0], *text_args(texts), *args)


def test_missing_things_are_named(models, texts, tmp_path):
    missing = tmp_path / "nowhere"
    assert "nowhere" in refused(missing, *text_args(texts))
    assert "plane.txt: no such file" in refused(models[0], "--text", texts[1].with_name("plane.txt"))
    assert "either --text or --row" in refused(models[0])
    assert "give one, or two to compare" in refused(*models, *text_args(texts))
    assert "is a folder" in refused(models[0], *text_args(texts), "--svg", tmp_path)
    assert "is a folder" in refused(models[0], *text_args(texts), "--html", tmp_path)
    (tmp_path / "empty.txt").write_text("  \n")
    assert "no text found" in refused(models[0], "--text", tmp_path / "empty.txt")
    assert not missing.exists()


def test_models_that_cannot_be_compared_are_refused(models, texts):
    assert "cannot be compared" in refused(models[0], models[2], *text_args(texts), "--beyond", 100)
    assert "tokenize this text differently" in refused(models[0], "asset:tiny-base", *text_args(texts))


def test_rows_that_do_not_fit_are_refused(models, tmp_path):
    run_dir = save_run(tmp_path / "run")
    assert "such as datasets/utk:0" in refused(models[0], "--row", run_dir / "datasets" / "short")
    assert "several datasets" in refused(models[0], "--row", f"{run_dir}:0")
    assert "numbered from 0" in refused(models[0], "--row", f"{run_dir / 'datasets' / 'short'}:999")
    assert "--docs, --length" in refused(models[0], "--row", f"{run_dir / 'datasets' / 'short'}:0", "--length", 100)
    skipping = pieced_row([60, 60], [0, 1], positions=np.arange(120, dtype=np.int32) * 2)
    folder = save_rows(tmp_path / "skips", [skipping], pose={})
    assert "without pose" in refused(models[0], "--row", f"{folder}:0")
