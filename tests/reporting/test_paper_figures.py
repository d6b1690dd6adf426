"""Figures that papers draw: lengths by tokens, distances before and after tangling, scores by tokens, attention."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from unspool.core.artifacts import publish
from unspool.core.errors import DataError
from unspool.data.distances import doublings
from unspool.data.packing.row import Row
from unspool.data.packing.store import RowWriter
from unspool.reporting.gather import gather
from unspool.reporting.page import lines_together, render
from unspool.reporting.run_results import RunResults
from unspool.reporting.score_curves import curve_figures, curves_together
from unspool.reporting.sections import sections

from .fake_run import NUM_STEPS, fake_scores, write_fake_run, write_scores

# Lengths (UtK, Figure 4)


def test_lengths_of_all_sources_together_are_drawn_by_tokens(fake_run: Path):
    page = render([gather(fake_run)])
    _, _, after = page.partition("<b>all sources</b>")
    # Two corpora: 1,403,221 and 524,310 tokens, 40,000 of each in documents of 2K and more.
    assert "2K to 4K tokens: 24 documents, 80,000 tokens" in after
    assert "1K to 2K tokens: 618 documents, 1,847,531 tokens" in after


# Distances (UtK, Figure 3)


def write_rows(run: Path, chunk_lens: list[int], chunk_ids: list[int], **settings) -> None:
    lens, ids = np.array(chunk_lens, dtype=np.int32), np.array(chunk_ids, dtype=np.int32)
    row_len = int(lens.sum())
    row = Row(
        tokens=np.zeros(row_len, dtype=np.uint32), doc_lens=lens, loss_mask=None, source="books", attention="full",
        chunk_ids=ids,
    )  # fmt: skip
    dataset = {"from": "books", "seq_len": row_len, **settings}
    with (
        publish(run / "datasets" / "utk", kind="dataset", inputs={}, settings={"dataset": dataset}) as draft,
        RowWriter(draft.folder, row_len=row_len, masked=False, pieced=True) as writer,
    ):
        for _ in range(3):
            writer.append(row)


def brute_force(docs: np.ndarray, edges: list[int]) -> list[int]:
    found = [b - a for a, b in combinations(range(len(docs)), 2) if docs[a] == docs[b]]
    return np.histogram(found, bins=[*edges, len(docs)])[0].tolist()


def test_distances_before_and_after_tangling_are_counted_and_drawn(fake_run: Path):
    lens, ids = [5, 30, 9, 20, 14, 50], [0, 1, 0, 2, 1, 2]
    write_rows(fake_run, lens, ids, utk={"probability": 0.8})
    results = gather(fake_run)

    found, edges = results.distances["utk"], doublings(128)
    tangled = np.repeat(ids, lens)
    assert found.edges == edges and (found.counted, found.rows, found.row_len) == (3, 3, 128)
    assert found.after == [3 * count for count in brute_force(tangled, edges)]
    assert found.before == [3 * count for count in brute_force(np.sort(tangled), edges)]
    assert found.after[-1] > found.before[-1] == brute_force(np.sort(tangled), edges)[-1] * 3
    page = render([results])
    assert "<b>distances in utk</b>" in page and "before chunks were moved" in page
    assert re.search(r"64 to 128 tokens apart: \S+ of pairs before, \S+ after", page)


@pytest.mark.parametrize("settings", [{}, {"upsample": {"above": "1K", "times": 5}}])
def test_rows_whose_chunks_stay_in_place_have_no_such_figure(fake_run: Path, settings):
    write_rows(fake_run, [64, 64], [0, 1], **settings)
    assert gather(fake_run).distances == {}


def test_damaged_rows_are_named(fake_run: Path):
    write_rows(fake_run, [64, 64], [0, 0], utk={})
    (fake_run / "datasets/utk/rows-00000.arrow").write_bytes(b"not Arrow")
    with pytest.raises(DataError, match=r"utk/rows-00000.arrow: not a complete Arrow file"):
        gather(fake_run)


# Scores by tokens trained (ProLong, Figure 4; UtK, Figure 6)


def curve_of(results: RunResults, label: str) -> list[str]:
    """Tooltips of the points of one line in the first figure."""
    (figure, *_) = curve_figures(results, {name: at for at, name in enumerate(results.model_names)})
    return re.findall(rf"<title>{label}, (\S+) tokens", str(figure.drawing))


def add_curve(run: Path, stage: str, *steps: int) -> None:
    for step in steps:
        write_scores(run, stage, *fake_scores("abf"))
        (run / "curves" / stage).mkdir(parents=True, exist_ok=True)
        (run / "scores" / stage).rename(run / "curves" / stage / f"step-{step:06d}")
    write_scores(run, stage, *fake_scores(stage))


def test_a_stage_that_continues_another_continues_its_curve(fake_run: Path):
    recipe = fake_run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("{name: utk, init: base", "{name: utk, init: abf"))
    add_curve(fake_run, "abf", 20, 40)
    add_curve(fake_run, "utk", 30)
    results = gather(fake_run)

    assert curve_of(results, "abf") == ["0", "328K", "655K", "983K"]
    assert curve_of(results, "utk") == ["983K", "1.47M", "1.97M"], "from where the first stage ended"


def test_runs_of_different_budgets_share_a_figure_by_tokens(fake_run: Path):
    other = write_fake_run(fake_run.with_name("other"))
    short = other / "stages/utk/metrics.jsonl"
    short.write_text("".join(short.read_text().splitlines(keepends=True)[: NUM_STEPS // 3]))
    runs = [gather(fake_run), gather(other)]
    figures = curves_together(runs, lines_together(runs))

    assert [figure.title for figure in figures] == [
        "Needle recall by tokens trained",
        "Key-value recall by tokens trained",
    ]
    points = re.findall(r"<title>(\S+ \(\w+\) · \w+), (\S+) tokens: ", str(figures[0].drawing))
    ends = {label: tokens for label, tokens in points if tokens != "0"}
    assert ends == {
        "tiny (tiny) · abf": "983K", "tiny (tiny) · utk": "983K", "tiny (other) · abf": "983K",
        "tiny (other) · utk": "328K",
    }  # fmt: skip
    assert "Needle recall by tokens trained" in render(runs)


def test_runs_of_one_budget_have_no_figure_by_tokens(fake_run: Path):
    runs = [gather(fake_run), gather(write_fake_run(fake_run.with_name("other")))]
    assert curves_together(runs, lines_together(runs)) == []


# Attention maps (UtK, Figure 8)


def test_attention_maps_in_the_runs_folder_are_in_the_report_as_pictures(fake_run: Path):
    assert "Attention" not in [section.title for section in sections_of(fake_run)]
    (fake_run / "attention").mkdir()
    (fake_run / "attention/base & utk.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg"><script>x</script></svg>'
    )
    page = render([gather(fake_run)])

    assert '<img class="picture" alt="Attention maps: base &amp; utk" src="data:image/svg+xml;base64,' in page
    assert "<script>x</script>" not in page


def sections_of(run: Path):
    results = gather(run)
    return sections(results, {name: at for at, name in enumerate(results.model_names)}, "run")
