"""hooks/render.py: HTML as a function of data."""

import re
from html import unescape
from html.parser import HTMLParser

import pytest
from fake_results import SPEED, record

from hooks import render
from hooks.render import RenderError


class Cells(HTMLParser):
    """Collects (tag, attributes, text) of table cells, and fails on tags closed out of order."""

    VOID = {"br", "input", "rect", "path", "circle", "line"}

    def __init__(self, html):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag in ("th", "td", "caption"):
            self.cells.append([tag, dict(attrs), ""])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if {"th", "td", "caption"} & set(self.open):
            self.cells[-1][2] += data


def body(html):
    return [c for c in Cells(html).cells if c[0] == "td" or c[1].get("scope") == "row"]


def test_units_stand_in_the_head_and_numbers_are_marked_for_alignment():
    html = render.table(SPEED, {"kernel": "算子", "gbps": ("带宽", ".0f"), "ratio": "比值"}, units={"gbps": "GB/s", "ratio": "1"})
    heads = [c for c in Cells(html).cells if c[1].get("scope") == "col"]
    assert [h[2].strip() for h in heads] == ["算子", "带宽 GB/s", "比值"]
    assert [h[1].get("class") for h in heads] == [None, "hf-num", "hf-num"]
    first = body(html)[:3]
    assert [c[2] for c in first] == ["rms_norm", "3911", "0.942"]
    assert first[0][0] == "th" and first[1][1]["class"] == "hf-num"


def test_text_from_data_is_escaped_everywhere():
    evil = '<script>alert("1")</script>'
    html = render.table([{evil: evil}], units={evil: evil}, caption=evil) + render.output([evil])
    assert "<script" not in html and html.count("&lt;script&gt;") == 6


def test_verdicts_are_badges_with_word_and_sign():
    rows = [{"g": "pass", "b": True, "c": True}, {"g": "不适用", "b": False, "c": False}, {"g": "passing", "b": None, "c": None}]
    html = render.table(rows, {"g": "关", "b": "判", "c": ("相等", "相同/不同")})
    assert [c[2] for c in body(html)] == ["✓ 通过", "✓ 通过", "相同", "– 不适用", "✗ 拒绝", "– 不同", "passing", "—", "—"]
    assert "hf-fail" in html and "hf-pass" in html


def marked(html):
    return [c[2].removesuffix("（最优）") for c in body(html) if "hf-best" in c[1].get("class", "")]


@pytest.mark.parametrize(
    ("how", "by", "want"),
    [("max", (), ["4,001"]), ("min", (), ["1,204"]), ("max", "kernel", ["3,911"]), ("max", ("kernel", "impl"), [])],
)
def test_best_is_marked_within_its_group_and_never_in_a_group_of_one(how, by, want):
    html = render.table(SPEED, {"kernel": "算子", "gbps": ("带宽", ",.0f")}, best={"gbps": how}, best_by=by)
    assert marked(html) == want


def test_ties_are_all_marked():
    rows = [{"k": "a", "v": 2}, {"k": "b", "v": 2}, {"k": "c", "v": 1}]
    assert marked(render.table(rows, best={"v": "max"})) == ["2", "2"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: render.table(SPEED, {"gpbs": "带宽"}), "no column 'gpbs'; there are: kernel, impl, rows, gbps"),
        (lambda: render.table(SPEED, {"gbps": ("带宽", ".0q")}), "'.0q' does not fit"),
        (lambda: render.table(SPEED, {"gbps": ("带", ".0f", "GB/s", "x")}), "write label"),
        (lambda: render.table(SPEED, ["gbps"]), "must be a dict"),
        (lambda: render.table(SPEED, best={"gbps": "most"}), "'max' or 'min'"),
        (lambda: render.table(SPEED, best={"x": "max"}), "best: no column 'x'"),
        (lambda: render.table([{"a": 1}, {"b": 1}]), "row 2 lacks column 'a'"),
        (lambda: render.select(SPEED, {"knl": 1}, "t"), "no column 'knl'"),
        (lambda: render.select(SPEED, {"kernel": "rope"}, "t"), "'rms_norm', 'swiglu'"),
        (lambda: render.format_value("x", ".1f"), "is for numbers"),
        (lambda: render.format_value([1]), "of type list"),
    ],
)
def test_mistakes_name_what_exists(call, says):
    with pytest.raises(RenderError) as caught:
        call()
    assert says in str(caught.value)


def test_select_takes_alternatives_and_does_not_confuse_one_with_true():
    assert len(render.select(SPEED, {"impl": ["ours", "eager"], "kernel": "swiglu"}, "t")) == 2
    with pytest.raises(RenderError):
        render.select(SPEED, {"ok": 1}, "t")
    rows = render.select(SPEED, {}, "t")
    rows[0]["gbps"] = 0
    assert SPEED[0]["gbps"] == 3911.26  # copies: a block may reshape them


@pytest.mark.parametrize(
    ("value", "spec", "want"),
    [(4096, None, "4,096"), (0.123456, None, "0.1235"), (1.234, ".2f×", "1.23×"), (0.5, ".1%", "50.0%"), (None, ".0f", "—"), (True, None, "是")],
)
def test_format_value(value, spec, want):
    assert render.format_value(value, spec) == want


def test_output_survives_markdown():
    html = render.output(["a <b>", "", "c"])
    assert "\n\n" not in html and "&#10;" in html and "a &lt;b&gt;" in html


def test_provenance_says_device_versions_date_commit_time_command():
    html = render.provenance(record(), "../reproduce/#kernels.bench", "../records/nvidia-h200/kernels.bench.json")
    for part in ("NVIDIA H200", "torch 2.11.0", "triton 3.6.0", "transformers 5.17.0", "liger 0.8.5", "2026-11-30",
                 "提交 012345678", "1 min 15 s", "python -m snippets.kernels.bench", 'href="../reproduce/#kernels.bench"',
                 'href="../records/nvidia-h200/kernels.bench.json"'):  # fmt: skip
        assert part in html
    assert "hf-badge" not in html
    flagged = render.provenance(record(stale=True, mode="smoke", dirty=True), "#", "#")
    assert [w for w in ("过期", "冒烟", "含未提交改动") if w in flagged] == ["过期", "冒烟", "含未提交改动"]


def test_tabs_have_materials_structure_and_unique_ids():
    html = render.tabs([("H200 <x>", "<p>1</p>"), ("H100", "<p>2</p>")], "u")
    Cells(html)
    assert html.count("checked") == 2 and html.count("<input") == 2 and html.count('class="tabbed-block"') == 2
    assert 'id="u_1" name="u"' in html and 'for="u_2">H100' in html and "H200 &lt;x&gt;" in html
    assert render.tabs([("only", "<p>1</p>")], "u") == "<p>1</p>"


def test_a_text_table_is_aligned_also_with_chinese_and_escaped():
    html = render.text_table([{"名": "算子<", "v": 5, "t": "x"}, {"名": "ab", "v": 12345, "t": None}], {"v": "行"})
    lines = unescape(re.search(r"<code>(.*)</code>", html, re.DOTALL).group(1)).split("\n")
    assert lines == ["名     v (行)  t", "算子<       5  x", "ab     12,345  —"]
    assert "算子&lt;" in html
