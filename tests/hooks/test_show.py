"""hooks/show.py: the functions that the pages call."""

import re
from html import unescape

import markdown
import pytest
from fake_results import SPEED, project, record
from pymdownx.superfences import fence_code_format

import hooks
from hooks import experiments, inline, records, reproduce, show
from hooks.render import RenderError


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    hooks.use_root(project(tmp_path))
    yield tmp_path
    hooks.use_root(before)


def bench(*records):
    return show.Experiment(experiments.find("kernels.bench"), {r.device["slug"]: r for r in records})


H100 = {"slug": "nvidia-h100", "name": "NVIDIA H100"}
CPU = {"slug": "cpu", "name": "CPU (x)"}


def test_a_table_has_units_provenance_command_and_link():
    html = bench(record()).table("speed", where={"impl": "ours"}, columns={"kernel": "算子", "gbps": ("带宽", ".0f")})
    assert "GB/s" in html and "3911" in html and "1204" not in html
    assert "torch 2.11.0" in html and "python -m snippets.kernels.bench" in html
    assert 'href="../reproduce/#kernels.bench"' in html


def test_links_follow_the_page():
    token = show.page.set("index.md")
    try:
        assert 'href="reproduce/#kernels.bench"' in bench(record()).table("log")
    finally:
        show.page.reset(token)
    assert show.reproduce_link("a.b", "x/y.md") == "../../reproduce/#a.b"
    assert show.reproduce_link("a.b", "x/index.md") == "../reproduce/#a.b"
    assert show.reproduce_link("a.b", "reproduce.md") == "#a.b"


@pytest.mark.parametrize(
    "make",
    [
        lambda e: e.table("speed"),
        lambda e: e.plot("speed", x="rows", y="gbps", color="impl"),
        lambda e: e.output("log", column="text"),
        lambda e: e.diagram(lambda r: 1 / 0),
        lambda e: e.show(show.table(e.rows("speed"), {"kernel": "算子"})),
        lambda e: e.show(lambda r: 1 / 0),
    ],
)
def test_without_a_record_every_result_is_the_box_with_the_command(make):
    html = make(bench())
    assert "未测量" in html and "python -m snippets.kernels.bench" in re.sub("<[^>]*>", "", html) and "算子带宽 &lt;A&gt;" in html
    assert "reproduce/#kernels.bench" in html


def test_devices_become_tabs_in_a_fixed_order_each_with_its_own_numbers():
    other = record(**H100)
    other.tables["speed"][0]["gbps"] = 2800.0
    e = bench(record(), record(**CPU), other)
    html = e.table("speed", columns={"kernel": "算子", "gbps": ("带宽", ".0f")})
    assert re.findall(r"<label[^>]*>([^<]+)<", html) == ["NVIDIA H100", "NVIDIA H200", "CPU (x)"]
    blocks = html.split('<div class="tabbed-block">')[1:]
    assert "2800" in blocks[0] and "3911" in blocks[1] and "NVIDIA H100 ·" in blocks[0]
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == 3 == len(set(ids))
    assert e.rows("speed", impl="ours", kernel="rms_norm")[0]["gbps"] == 2800.0  # rows() means the first tab


def test_a_smoke_record_hides_behind_a_full_one_and_shows_its_badge_alone():
    smoke = record(mode="smoke", **CPU)
    assert "tabbed" not in bench(record(), smoke).table("log")
    assert "冒烟" in bench(smoke).table("log")


def test_two_plots_of_one_page_share_no_id():
    e = bench(record(), record(**H100))
    html = e.plot("speed", x="rows", y="gbps", color="impl", kind="point") + e.plot("speed", x="rows", y="ratio", color="impl", kind="point")
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) and "NVIDIA H200 · 2026-11-30" in html


def test_ids_begin_with_the_id_of_the_markdown_exec_block():
    out = []
    code = "out.append(e.plot('speed', x='rows', y='gbps', kind='point'))"
    exec(compile(code, "<code block: id kernels-speed>", "exec"), {"e": bench(record()), "out": out})
    assert 'id="kernels-speed-' in out[0]


def sequence(r):
    first = r.rows("speed")[0]
    return f"""
        sequenceDiagram
            accTitle: 一步的时间线
            accDescr: 主机先行，GPU 用 {show.format_value(first["ratio"], ".2f")} s
            H->>G: launch {first["kernel"]} & <go>

            G-->>H: {first["gbps"]:.0f}
        """


def test_a_diagram_is_the_element_of_a_fence_with_provenance_under_it():
    html = bench(record()).diagram(sequence)
    drawn, below = html.split("</pre>")
    assert "hf-prov" in below and "python -m snippets.kernels.bench" in below
    source = unescape(re.fullmatch(r'<pre class="mermaid" data-search-exclude><code>(.*)</code>', drawn, re.DOTALL)[1])
    assert source.startswith("sequenceDiagram\n    accTitle: ") and "用 0.94 s" in source and source.endswith("\n\n    G-->>H: 3911")
    # What Material and diagrams.js get to see is what they get from a fence.
    fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    fenced = markdown.markdown(f"```mermaid\n{source}\n```", extensions=["pymdownx.superfences"],
                               extension_configs={"pymdownx.superfences": {"custom_fences": [fence]}})  # fmt: skip
    assert unescape(html.split("</pre>")[0]).replace(" data-search-exclude", "") + "</pre>" == unescape(fenced)
    assert "\n\n" not in html and "<go>" not in html


def test_a_diagram_is_drawn_per_device_and_is_the_box_without_a_record():
    assert bench(record(), record(**H100)).diagram(sequence).count('<pre class="mermaid"') == 2
    html = bench().diagram(sequence)
    assert "未测量" in html and "mermaid" not in html


def test_search_does_not_find_a_diagram_s_source():
    from material.plugins.search.plugin import Parser

    parser = Parser()
    parser.feed(f'<h1 id="a">A</h1><p>前文</p>{bench(record()).diagram(sequence)}<p>后文</p>')
    parser.close()
    text = "".join("".join(section.text) for section in parser.data)
    assert "前文" in text and "后文" in text and "accTitle" not in text and "launch" not in text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "diagram() got None; return the Mermaid source as text"),
        ("", "begins with ''; begin it with one of: "),
        ("sequence\naccTitle: a\naccDescr: b", "begins with 'sequence'"),
        ("timeline\naccTitle: a\naccDescr: b", "begins with 'timeline'"),  # Mermaid ignores its accTitle
        ("flowchart LR\n  accDescr: b\n  A --> B", 'no accTitle; write the line "accTitle: ..."'),
        ("flowchart LR\n  accTitle:\n  accDescr: b", "no accTitle"),
        ("flowchart LR\n  accTitle: a\n  A[accDescr: b]", "no accDescr"),
    ],
)
def test_a_diagram_that_the_site_could_not_show_to_everyone_is_an_error(source, says):
    with pytest.raises(show.ShowError) as caught:
        bench(record()).diagram(lambda r: source)
    assert says in str(caught.value) and "kernels.bench" in str(caught.value)


def test_reshaped_rows_are_shown_per_device():
    e = bench(record(), record(**H100))
    html = e.show(lambda r: show.table([{"n": len(r.rows("speed")), "d": r.device}], {"n": "行数", "d": "设备"}))
    assert html.count("hf-prov") == 2 and ">NVIDIA H100</td>" in html


def test_output_is_preformatted_and_inert():
    html = bench(record()).output("log", column="text")
    assert "a &lt;b&gt;" in html and "--8<--" not in html and "\n\n" not in html


@pytest.mark.parametrize("held", [(), (1,)])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda e: e.table("spede"), "no table 'spede'; there are: speed, log"),
        (lambda e: e.rows("speed", knl=1), "no column 'knl'; there are: kernel, impl, rows, gbps, ratio, ok"),
        (lambda e: e.table("speed", columns={"bw": "带宽"}), "no column 'bw'"),
        (lambda e: e.table("speed", best={"bw": "max"}), "no column 'bw'"),
        (lambda e: e.table("speed", best_by="shape"), "no column 'shape'"),
        (lambda e: e.plot("speed", x="rows", y="bw"), "no column 'bw'"),
        (lambda e: e.plot("speed", x="rows", y="gbps", color="c"), "no column 'c'"),
        (lambda e: e.plot("speed", x="rows", y="gbps", kind="point", text="t"), "no column 't'"),
        (lambda e: e.plot("speed", x="rows", y="gbps", kind="point", joined="j"), "no column 'j'"),
        (lambda e: e.output("log", column="txt"), "no column 'txt'; there are: text"),
    ],
)
def test_a_typo_is_an_error_with_and_without_a_record(make, says, held):
    with pytest.raises(RenderError) as caught:
        make(bench(*[record() for _ in held]))
    assert says in str(caught.value) and "kernels.bench" in str(caught.value)


def test_rows_that_do_not_exist_are_an_error_that_lists_values():
    with pytest.raises(RenderError, match="kernel is one of 'rms_norm', 'swiglu'"):
        bench(record()).table("speed", where={"kernel": "rope"})


def test_a_record_older_than_its_table_says_how_to_renew():
    with pytest.raises(RenderError, match="make refresh ONLY=kernels.bench"):
        bench(record(tables={"speed": SPEED})).output("log", column="text")


@pytest.mark.parametrize("fragment", ["", "  \n", None, lambda r: show.table([], {"a": "b"})])
def test_an_empty_fragment_is_an_error_when_there_is_a_record(fragment):
    with pytest.raises(RenderError, match="nothing to show"):
        bench(record()).show(fragment)


def test_an_unknown_experiment_is_an_error():
    with pytest.raises(experiments.UnknownExperiment, match="kernels.bench"):
        show.experiment("kernels.bnch")


def stored(**changes):
    """A record on disk, written the way the recorder writes it."""
    r = record(**changes)
    body = {k: getattr(r, k) for k in ("experiment", "mode", "settings", "device", "versions", "commit", "dirty", "seconds", "tables")}
    found = experiments.find("kernels.bench")
    return records.store({"schema": 1, **body, "started": r.started.isoformat(), "digest": found.digest})


def test_the_real_store_replays_and_turns_stale_when_the_code_changes(root, monkeypatch):
    monkeypatch.delenv("REFRESH", raising=False)
    assert "未测量" in show.experiment("kernels.bench").table("log")
    stored()
    html = show.experiment("kernels.bench").table("speed", columns={"kernel": "算子", "gbps": ("带宽", ".0f")})
    assert "3911" in html and "2026-11-30" in html and "过期" not in html
    source = root / "snippets/kernels/bench.py"
    source.write_text(source.read_text(encoding="utf-8").replace("return {}", "return {1: 2}"), encoding="utf-8")
    assert "过期" in show.experiment("kernels.bench").table("log")
    assert "过期" in inline.expand('[[ one("kernels.bench", "log", text="a <b>").text ]]', "index.md")
    assert "与当前代码不符" in reproduce.body()
