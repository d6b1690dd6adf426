import xml.etree.ElementTree as ET

import pytest

from unspool.core.charts import (
    Frame,
    HeatCell,
    Heatmap,
    Point,
    Series,
    element,
    heat_strength,
    heatmap,
    line_chart,
    marker,
    nice_ticks,
)


def frame(**changes: object) -> Frame:
    plain = {"label": "chart", "x_title": "x", "x_ticks": [(1.0, "1"), (4.0, "4")], "show_y": str, **changes}
    return Frame(**plain)  # type: ignore[arg-type]


def parts(svg: str, name: str) -> list[ET.Element]:
    return list(ET.fromstring(svg).iter(name))


def test_texts_and_attributes_are_escaped():
    drawn = element("text", "<script>", class_='a"b')

    assert drawn == '<text class="a&#34;b">&lt;script&gt;</text>'


def test_labels_from_files_stay_text_in_every_chart():
    evil = "<script>alert(1)</script>"
    series = [Series(label=evil, style=0, points=[Point(x=1, y=1, tooltip=evil), Point(x=4, y=2)])]
    cell = HeatCell(value=0.5, text=evil, tooltip=evil)
    panel = Heatmap(label=evil, columns=[evil], rows=[evil], cells=[[cell]], x_title=evil, y_title=evil)

    for svg in (line_chart(series, frame(label=evil, x_title=evil, mark=(2.0, evil))), heatmap(panel)):
        assert "<script" not in svg
        assert evil in "".join(ET.fromstring(svg).itertext())


def test_a_missing_value_breaks_the_line_and_has_no_marker():
    points = [Point(x=float(x), y=None if x == 3 else 1.0, low=0.5, high=1.5) for x in range(1, 6)]
    svg = line_chart([Series(label="a", style=0, points=points)], frame())

    assert [len(line.attrib["points"].split()) for line in parts(svg, "polyline")] == [2, 2]
    assert len([c for c in parts(svg, "circle") if c.attrib["class"] == "dot"]) == 4


def test_intervals_are_drawn_from_low_to_high():
    point = Point(x=1.0, y=0.5, low=0.25, high=0.75)
    svg = line_chart([Series(label="a", style=0, points=[point])], frame(y_range=(0.0, 1.0)))

    (whisker,) = [line for line in parts(svg, "line") if line.attrib["class"] == "whisker"]
    (dot,) = [circle for circle in parts(svg, "circle") if circle.attrib["class"] == "dot"]
    top, bottom = sorted(float(whisker.attrib[name]) for name in ("y1", "y2"))
    assert (top + bottom) / 2 == pytest.approx(float(dot.attrib["cy"]), abs=0.1)
    assert bottom - top > 10


def test_a_log_axis_spaces_doublings_evenly():
    points = [Point(x=float(x), y=1.0) for x in (1, 2, 4)]
    svg = line_chart([Series(label="a", style=0, points=points)], frame(log_x=True))

    one, two, four = [float(c.attrib["cx"]) for c in parts(svg, "circle") if c.attrib["class"] == "dot"]
    assert two - one == pytest.approx(four - two, abs=0.2)
    assert two - one > 10


def test_everything_drawn_lies_inside_the_view():
    points = [Point(x=x, y=y, low=y - 3, high=y + 3) for x, y in ((256.0, 1.0), (131072.0, 90.0))]
    series = [Series(label=str(style), style=style, points=points) for style in range(8)]
    svg = line_chart(series, frame(x_ticks=[(256.0, "256"), (131072.0, "128K")], log_x=True, mark=(8192.0, "old")))

    _, _, width, height = map(float, ET.fromstring(svg).attrib["viewBox"].split())
    shapes = [element for name in ("line", "text", "circle") for element in parts(svg, name)]
    for shape in shapes:
        for key, value in shape.attrib.items():
            if key in ("x", "x1", "x2", "cx"):
                assert 0 <= float(value) <= width
            if key in ("y", "y1", "y2", "cy"):
                assert 0 <= float(value) <= height


def test_charts_without_spread_or_values_still_draw():
    flat = [Series(label="a", style=0, points=[Point(x=1.0, y=2.0)])]
    empty = [Series(label="a", style=0, points=[Point(x=1.0, y=None)])]

    for series in (flat, empty, []):
        assert "nan" not in line_chart(series, frame(x_ticks=[(1.0, "1")]))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (3.58, 6.27, [3, 4, 5, 6, 7]),
        (0, 983040, [0, 250000, 500000, 750000, 1000000]),
        (2, 2, [1, 1.5, 2, 2.5, 3]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, ticks: list[float]):
    assert nice_ticks(low, high) == ticks


def test_a_heatmap_prints_a_dash_without_colour_where_nothing_was_scored():
    cells = [[HeatCell(value=0.0, text="0", tooltip="t"), HeatCell(value=None, text="–", tooltip="t")]]
    svg = heatmap(Heatmap(label="h", columns=["1K", "2K"], rows=["0%"], cells=cells, x_title="x", y_title="y"))

    coloured = [rect for rect in parts(svg, "rect") if rect.attrib["class"] == "heat"]
    assert len(coloured) == 1
    assert [text.text for text in parts(svg, "text") if text.attrib["class"].startswith("heat")] == ["0", "–"]


def test_narrow_columns_label_every_second_up_to_the_last():
    names = [f"{2**k}K" for k in range(1, 10)]
    cells = [[HeatCell(value=1.0, text="100", tooltip="") for _ in names]]
    svg = heatmap(Heatmap(label="h", columns=names, rows=["0%"], cells=cells, x_title="x", y_title="y"))

    labels = [text.text for text in parts(svg, "text") if text.attrib["class"] == "tick" and text.text != "0%"]
    assert labels[::-1] == ["2K", "8K", "32K", "128K", "512K"]


def test_stronger_colour_means_a_higher_value():
    strengths = [heat_strength(value / 10) for value in range(11)]

    assert strengths == sorted(set(strengths))
    assert strengths[-1] == 1.0


def test_neighbouring_models_have_different_markers():
    shapes = [marker(style, 10.0, 10.0) for style in range(5)]

    assert len(set(shapes)) == 5
