"""hooks/plots.py: spec, SVG and figure."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from urllib.parse import unquote

import pytest

import hooks
from hooks import plots, render
from hooks.render import RenderError

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).resolve().parents[2]
SWEEP = [{"rows": 2**k, "ms": 2.0**k / 900 + i, "impl": n} for i, n in enumerate(("ours", "eager <x>")) for k in range(6, 13)]


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    hooks.use_root(tmp_path)
    yield tmp_path
    hooks.use_root(before)


def image(html):
    return ET.fromstring(re.search(r'<svg xmlns.*?</svg>(?=</div>)', html, re.DOTALL).group(0))


def figure(**changes):
    base = {"uid": "u", "x": "rows", "y": "ms", "color": "impl", "units": {"rows": "行", "ms": "ms"}, "labels": {"ms": "耗时"}}
    return plots.figure(SWEEP, **(base | changes))


def test_the_svg_is_well_formed_named_and_coloured_by_variables():
    html = figure(title="标题 & <t>", subtitle="NVIDIA H200 · 2026-11-30")
    svg = image(html)
    assert svg.get("role") == "img" and svg.get("aria-labelledby") == "u-title u-desc"
    assert svg.find(f"{SVG}title").text == "标题 & <t>"
    said = svg.find(f"{SVG}desc").text
    assert "耗时（ms）" in said and "NVIDIA H200 · 2026-11-30" in said and "eager <x>" in said
    strokes = {e.get("stroke") for e in svg.iter()} - {None}
    assert {"var(--hf-compute-stroke)", "var(--hf-fail-stroke)"} <= strokes
    # No colour of its own may survive, or the dark scheme would glare; no background either.
    painted = {e.get(a) for e in svg.iter() for a in ("fill", "stroke")} - {None, "none", "transparent"}
    assert {c for c in painted if not c.startswith("var(")} == set()
    assert "<x>" not in html.replace("&lt;x&gt;", "")


def test_every_point_tells_its_value_on_hover():
    titles = [t.text for e in image(figure()).iter(f"{SVG}path") for t in e.findall(f"{SVG}title")]
    assert len(titles) == len(SWEEP)
    assert "ours · rows 64 行 · 耗时 0.07111 ms" in titles


def test_axis_titles_carry_units():
    texts = ["".join(e.itertext()) for e in image(figure()).iter(f"{SVG}text")]
    assert "耗时（ms）" in texts and "rows（行）" in texts


def test_ids_are_prefixed_and_equal_inputs_give_equal_bytes():
    one, two = figure(uid="a"), figure(uid="b")
    ids = [re.findall(r'\bid="([^"]+)"', h) for h in (one, two)]
    assert all(i.startswith("a") for i in ids[0]) and len(set(ids[0])) == len(ids[0])
    assert not set(ids[0]) & set(ids[1])
    assert one == figure(uid="a")


def test_ids_inside_the_converters_svg_are_prefixed_with_their_references():
    raw = '<svg width="10" height="10" viewBox="0 0 10 10"><clipPath id="c1"/><g clip-path="url(#c1)"/><use href="#c1"/></svg>'
    out = plots.finish(raw, "u", "t", "d")
    assert 'id="u-c1"' in out and "url(#u-c1)" in out and 'href="#u-c1"' in out


def test_bars_are_horizontal_grouped_and_labelled():
    rows = [{"k": k, "i": i, "v": v} for k, i, v in [("a", "x", 10.0), ("a", "y", 30.0), ("b", "x", 20.0), ("b", "y", 40.0)]]
    html = plots.figure(rows, uid="u", kind="bar", x="v", y="k", color="i", fmt=".1f", rules=[{"x": 35, "label": "界线"}])
    svg = image(html)
    texts = ["".join(e.itertext()) for e in svg.iter(f"{SVG}text")]
    assert {"10.0", "30.0", "20.0", "40.0", "界线"} <= set(texts)
    bars = [e for e in svg.iter(f"{SVG}path") if e.find(f"{SVG}title") is not None]
    assert len(bars) == 4
    widths = [float(re.search(r"[hH](-?[\d.]+)", b.get("d")).group(1)) for b in bars]
    assert widths[1] / widths[0] == pytest.approx(3, rel=0.02)  # bars start at zero
    assert 'class="hf-legend"' in html


def test_a_bar_without_a_value_keeps_its_place():
    rows = [{"k": "a", "i": "x", "v": 5.0}, {"k": "a", "i": "y", "v": None}, {"k": "b", "i": "x", "v": None}]
    svg = image(plots.figure(rows, uid="u", kind="bar", x="v", y="k", color="i"))
    texts = ["".join(e.itertext()) for e in svg.iter(f"{SVG}text")]
    assert texts.count("—") == 2 and {"a", "b", "5"} <= set(texts)


def test_band_and_reference_line_are_drawn():
    rows = [{"s": i, "v": 1.0 + i % 3, "lo": 0.5, "hi": 4.5} for i in range(30)]
    bare = plots.figure(rows, uid="u", x="s", y="v")
    full = plots.figure(rows, uid="u", x="s", y="v", y_low="lo", y_high="hi", rules=[{"y": 2, "label": "门槛"}])
    assert "var(--hf-compute-fill)" in full and "门槛" in full and "门槛" not in bare and "色带" in full
    assert len([e for e in image(full).iter(f"{SVG}line") if e.get("stroke") == "var(--hf-ink)"]) == 1


def test_thinning_keeps_every_spike_and_says_so():
    rows = [{"s": i, "v": 1.0} for i in range(5000)]
    rows[1237]["v"], rows[4001]["v"] = 99.0, -99.0
    kept = plots.thin(rows, ["v"])
    assert len(kept) <= plots.MAX_POINTS and rows[1237] in kept and rows[4001] in kept
    assert kept[0] is rows[0] and kept[-1] is rows[-1]
    assert "5,000 点太密" in plots.figure(rows, uid="u", x="s", y="v")
    assert "太密" not in plots.figure(rows[:400], uid="u", x="s", y="v")


def test_the_csv_gives_the_rows_back_and_the_table_is_there_for_short_data():
    html = figure()
    text = unquote(re.search(r'href="data:text/csv;charset=utf-8,([^"]*)"', html).group(1))
    lines = text.lstrip("\ufeff").splitlines()
    assert lines[0] == "rows,ms,impl" and len(lines) == len(SWEEP) + 1 and lines[1].startswith("64,0.0711")
    assert "<details" in html and "hf-results" in html


def test_the_data_of_a_frontier_say_yes_or_no_and_leave_the_labels_to_the_plot():
    rows = [{"a": 1.0, "b": 2.0, "front": True, "word": "first"}, {"a": 2.0, "b": 3.0, "front": False, "word": ""}]
    html = plots.figure(rows, uid="u", kind="point", x="a", y="b", text="word", joined="front", labels={"word": "标注", "front": "在前沿"})
    table = html[html.index("<details") :]
    assert "是</span>" in table and "否</span>" in table and "通过" not in table and "标注" not in table


def test_a_long_curve_stays_light():
    rows = [{"step": i, "loss": 3 + (i * 7919 % 1000) / 999, "v": v} for v in "abc" for i in range(1000)]
    html = plots.figure(rows, uid="u", x="step", y="loss", color="v")
    assert len(html) < 100_000 and "hf-results" not in html


def test_log_axes_refuse_what_they_cannot_show():
    rows = [{"a": 1, "b": 0.0}, {"a": 2, "b": 1.0}]
    with pytest.raises(RenderError, match="log axis"):
        plots.figure(rows, uid="u", x="a", y="b", log="y")
    assert "x 轴、y 轴为对数" in figure(log="xy")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"y": "m"}, "y='m' is no column; there are: rows, ms, impl"),
        ({"kind": "pie"}, "there are: line, bar, point"),
        ({"log": "z"}, "log='z'"),
        ({"y_low": "ms"}, "both y_low= and y_high="),
        ({"y": "impl", "color": None}, "must hold numbers"),
        ({"rules": [{"z": 1}]}, "reference line"),
        ({"kind": "bar", "x": "ms", "y": "impl", "rules": [{"y": 1}]}, "bars lie along x"),
        ({"color": "rows", "x": "ms"}, None),
    ],
)
def test_mistakes_name_the_remedy(changes, says):
    if says is None:
        assert figure(**changes)  # seven series are the most that can be told apart
        return
    with pytest.raises(RenderError) as caught:
        figure(**changes)
    assert says in str(caught.value)


def test_too_many_series_are_refused():
    rows = [{"x": 1, "y": 1, "c": str(i)} for i in range(8)]
    with pytest.raises(RenderError, match="8 series"):
        plots.figure(rows, uid="u", x="x", y="y", color="c")


# (kernel, recipe, GiB, ms): crowded at the lower left, as such plots are.
PARETO = [
    ("HF", "不开", 38.2, 742), ("HF", "整层 full", 6.1, 968), ("HF", "selective", 14.5, 850), ("HF", "每 2 层", 21.0, 860),
    ("HF", "offload", 5.4, 1420), ("Liger", "不开", 27.5, 690), ("Liger", "整层 full", 5.2, 905), ("Liger", "每 2 层", 16.2, 797),
    ("Liger", "selective", 11.9, 790), ("本文", "ours 不开", 19.8, 655), ("本文", "ours 9 GiB", 9.1, 668), ("本文", "ours 6 GiB", 6.2, 690),
    ("本文", "ours 4 GiB", 4.3, 735), ("本文", "ours 2.8 GiB", 2.9, 840), ("本文", "ours 12 GiB", 12.1, 660),
]  # fmt: skip


def pareto(**changes):
    rows = [{"who": w, "name": n, "gib": g, "ms": m, "front": w == "本文"} for w, n, g, m in PARETO]
    base = {"kind": "point", "x": "gib", "y": "ms", "color": "who", "text": "name", "joined": "front", "labels": {"front": "前沿"}}
    return plots.figure(changes.pop("rows", rows), uid="u", **(base | changes))


def at(element):
    return tuple(map(float, re.match(r"translate\(([-\d.]+),([-\d.]+)\)", element.get("transform")).groups()))


def texts_and_points(html):
    """The texts at points as (words, box), and the points' places, as they are drawn."""
    svg, texts = image(html), []
    for e in svg.iter(f"{SVG}text"):
        if e.get("stroke"):  # its halo; other texts have none
            (x, y), words = at(e), "".join(e.itertext())
            wide = 6 * render.width(words)  # at 12 px
            left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[e.get("text-anchor")]
            texts.append((words, (left, y - 10, left + wide, y + 2)))  # y is the baseline
    return texts, [at(e) for e in svg.iter(f"{SVG}path") if e.find(f"{SVG}title") is not None]


@pytest.mark.parametrize("options", [{}, {"log": "x"}, {"log": "xy"}, {"zero": True}, {"rules": [{"x": 24, "label": "24 GB 卡"}]}, {"height": 360}])
def test_texts_at_points_overlap_neither_each_other_nor_points_and_stay_inside(options):
    texts, points = texts_and_points(pareto(**options))
    assert sorted(t for t, _ in texts) == sorted(n for _, n, _, _ in PARETO) and len(points) == len(PARETO)
    for i, (words, box) in enumerate(texts):
        assert not [t for t, b in texts[:i] if plots._overlap(box, b)], words
        assert not [p for p in points if plots._overlap(box, (p[0] - 4, p[1] - 4, p[0] + 4, p[1] + 4))], words
        assert box[0] >= -1 and box[1] >= -1 and box[2] <= plots.WIDTH + 1 and box[3] <= options.get("height", plots.HEIGHT) + 1, words
    # Texts are drawn in the order of the rows, so each belongs to the point of the same number.
    for (words, box), (x, y) in zip(texts, points, strict=True):
        away = max(box[0] - x, x - box[2], 0) + max(box[1] - y, y - box[3], 0)
        assert away < 80, words


def test_a_text_takes_the_free_side():
    def side(*spots, taken=()):
        return plots.place(spots, taken, 440, 280)[0]

    assert side((200, 140, "ours")) == plots.SIDES[0] == (9, 0, "left")
    assert side((430, 140, "ours"))[2] == "right"
    assert side((200, 140, "ours"), (226, 140, ""), (174, 140, ""))[:2] == (0, -15)  # points without text are in the way
    assert side((200, 140, "ours"), taken=[(150, 100, 250, 150)])[1] > 0
    far = side((200, 140, "ours"), taken=[(160, 120, 240, 160)])
    assert max(abs(far[0]), abs(far[1])) >= plots.FAR
    assert plots.place([], (), 440, 280) == []


def test_a_text_that_stands_away_from_its_point_is_led_to():
    rows = [{"who": "a", "name": f"recipe {i}", "gib": 5.0 + i / 100, "ms": 700.0 + i, "front": False} for i in range(9)]
    rows += [{"who": "a", "name": None, "gib": g, "ms": m, "front": False} for g, m in ((1, 500), (20, 1500))]
    leads = [e for e in image(pareto(rows=rows)).iter(f"{SVG}line") if e.get("stroke") == "var(--hf-line)"]
    assert leads and not [e for e in image(pareto(rows=rows[8:])).iter(f"{SVG}line") if e.get("stroke") == "var(--hf-line)"]


def test_empty_texts_write_nothing_and_hover_and_csv_stay():
    rows = [{"who": "a", "name": n, "gib": float(i), "ms": 2.0 * i, "front": None} for i, n in enumerate(("x & <y>", "", None), 1)]
    html = pareto(rows=rows)
    texts, points = texts_and_points(html)
    assert [t for t, _ in texts] == ["x & <y>"] and len(points) == 3
    assert "<title>a · gib 1 · ms 2</title>" in html
    text = unquote(re.search(r'href="data:text/csv;charset=utf-8,([^"]*)"', html).group(1))
    assert text.lstrip("\ufeff").splitlines()[:2] == ["who,name,gib,ms,front", "a,x & <y>,1,2,"] and "hf-results" in html


def test_joined_rows_are_connected_by_series_in_the_order_of_x_below_the_points():
    rows = [{"who": w, "name": "", "gib": g, "ms": 1000 / g + (w == "b"), "front": f} for w in "ab" for g, f in ((4.0, True), (1.0, True), (3.0, False), (2.0, True))]
    html = pareto(rows=rows)
    paths = list(image(html).iter(f"{SVG}path"))
    lines = [p for p in paths if p.get("stroke-width") == "1"]
    assert [p.get("stroke") for p in lines] == ["var(--hf-compute-stroke)", "var(--hf-fail-stroke)"]
    for line in lines:
        along = [float(x) for x in re.findall(r"[ML]([-\d.]+)", line.get("d"))]
        assert len(along) == 3 and along == sorted(along)
    assert paths.index(lines[-1]) < min(i for i, p in enumerate(paths) if p.find(f"{SVG}title") is not None)
    assert "细线：前沿" in html and "细线" not in pareto(rows=rows, joined=None)
    # Without texts the axes are as ever.
    assert len(list(image(pareto(rows=rows, text=None)).iter(f"{SVG}path"))) == len(paths)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text": "label"}, "text='label' is no column; there are: who, name, gib, ms, front"),
        ({"joined": "frnt"}, "joined='frnt' is no column"),
        ({"kind": "line"}, 'are for kind="point", not \'line\''),
        ({"kind": "bar", "x": "ms", "y": "name", "text": None}, 'are for kind="point"'),
        ({"joined": "gib"}, "joined='gib' must hold true or false but holds 38.2"),
        ({"x": "name"}, "'name' must hold numbers too but holds '不开'"),
        ({"log": "x", "rules": [{"x": 0}]}, "no place on a log axis"),
    ],
)
def test_mistakes_with_texts_and_joined_points_name_the_remedy(changes, says):
    with pytest.raises(RenderError) as caught:
        pareto(**changes)
    assert says in str(caught.value)


def test_none_breaks_the_line_and_draws_no_point():
    rows = [{"x": i, "y": None if i == 3 else float(i)} for i in range(1, 6)]
    paths = list(image(plots.figure(rows, uid="u", x="x", y="y")).iter(f"{SVG}path"))
    assert len([p for p in paths if p.find(f"{SVG}title") is not None]) == 4
    (line,) = [p for p in paths if p.get("stroke-width") == "2"]
    assert line.get("d").count("M") == 2


def test_a_warm_cache_draws_without_the_converter_and_repairs_a_damaged_file(root):
    spec = plots.spec(SWEEP, kind="line", x="rows", y="ms", color="impl")
    first = plots.svg(spec)
    (file,) = (root / ".cache/plots").iterdir()
    code = (
        "import sys, json, hooks; from hooks import plots\n"
        "hooks.use_root(sys.argv[1]); spec = json.load(sys.stdin); out = plots.svg(spec)\n"
        "assert 'vl_convert' not in sys.modules and 'torch' not in sys.modules; sys.stdout.buffer.write(out.encode())"
    )
    import json

    done = subprocess.run([sys.executable, "-c", code, str(root)], input=json.dumps(spec).encode(), capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == first
    file.write_text(first[:100], encoding="utf-8")
    assert plots.svg(spec) == first and file.read_text(encoding="utf-8") == first
    assert plots.svg(plots.spec(SWEEP, kind="point", x="rows", y="ms")) != first
    assert len(list((root / ".cache/plots").iterdir())) == 2


SPANS = [
    {"lane": lane, "from": 10.0 * i, "to": 10.0 * i + w, "who": who}
    for lane, who, w in (("eager 主机", "主机", 8.0), ("eager GPU", "GPU", 2.0)) for i in range(5)
]  # fmt: skip


def spans(rows=SPANS, **changes):
    return plots.figure(rows, **({"uid": "u", "kind": "span", "x": "from", "x_end": "to", "y": "lane", "color": "who", "units": {"from": "µs"}} | changes))


def test_spans_lie_in_their_lanes_with_their_width_and_tell_both_ends():
    svg = image(spans())
    marks = [e for e in svg.iter(f"{SVG}path") if e.find(f"{SVG}title") is not None]
    assert len(marks) == len(SPANS)
    boxes = [re.match(r"M([\d.]+),([\d.]+)h([\d.]+)v", e.get("d")).groups() for e in marks]
    widths = [float(w) for _, _, w in boxes]
    assert widths[0] == pytest.approx(4 * widths[5], rel=0.01) and len({y for _, y, _ in boxes}) == 2
    assert marks[0].findtext(f"{SVG}title") == "主机 · from 0–8 µs · lane eager 主机"
    assert [t.text for t in svg.iter(f"{SVG}text") if t.text and "eager" in t.text] == ["eager 主机", "eager GPU"]


@pytest.mark.parametrize("gap", [{"from": None}, {"lane": None}])
def test_a_row_without_start_or_lane_draws_no_span(gap):
    svg = image(spans([*SPANS, SPANS[0] | gap]))
    assert len([e for e in svg.iter(f"{SVG}path") if e.find(f"{SVG}title") is not None]) == len(SPANS)
    assert "None" not in ET.tostring(svg, encoding="unicode")


@pytest.mark.parametrize(
    ("rows", "changes", "says"),
    [
        (SPANS, {"x_end": None}, "x_end= belongs to"),
        (SPANS, {"kind": "bar"}, "x_end= belongs to"),
        ([SPANS[0] | {"to": -1.0}], {}, "must end at or after its start"),
        ([SPANS[0] | {"to": None}], {}, "must end at or after its start"),
        (SPANS, {"x_end": "nonsense"}, "nonsense"),
        (SPANS, {"rules": [{"y": 3}]}, "spans lie along x"),
    ],
)
def test_mistakes_with_spans_name_the_remedy(rows, changes, says):
    with pytest.raises(RenderError, match=says):
        spans(rows, **changes)
