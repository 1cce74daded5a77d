"""hooks/uses.py: which section of which page shows an experiment."""

from fake_results import record

from hooks import render, uses

PROV = render.provenance(record(), "../reproduce/#kernels.bench", "../records/nvidia-h200/kernels.bench.json")
MISSING = render.missing("kernels.bench", "带宽", "cuda", 8, 2, "../reproduce/#kernels.bench")
NUMBER = '<a class="num" href="../reproduce/#precision.gates" title="x">{}</a>'
PAGE = f"""<h1 id="top">题 &lt;A&gt;<a class="headerlink" href="#top">¶</a></h1><p>{NUMBER.format("3.5")}</p>
<h2 id="a">甲</h2><table></table>{PROV}<pre></pre>{PROV}<p>{NUMBER.format("42" + render.badge("过期", "warning"))}，{NUMBER.format("43")}</p>
<h2 class="x" id="b">乙</h2>{MISSING}<p><a href="../reproduce/#kernels.other">正文里的链接</a></p>
<p><a class="unmeasured" href="../reproduce/#kernels.bench">{render.badge("未测", "warning")}</a></p>"""


def test_results_and_numbers_are_found_with_their_section():
    found = uses.find([("article.md", "文", PAGE)])
    assert set(found) == {"kernels.bench", "precision.gates"}  # a link in prose shows no result
    bench = [(u.anchor, u.section, u.results, u.numbers) for u in found["kernels.bench"]]
    assert bench == [("a", "甲", 2, []), ("b", "乙", 1, ["未测"])]
    gates = [(u.anchor, u.section, u.results, u.numbers) for u in found["precision.gates"]]
    assert gates == [("top", "题 &lt;A&gt;", 0, ["3.5"]), ("a", "甲", 0, ["42", "43"])]


def test_the_list_leads_back():
    html = uses.fill('<ul data-uses="kernels.bench"></ul><ul data-uses="kernels.x"></ul>', uses.find([("article.md", "文", PAGE), ("index.md", "家", PAGE)]))
    assert '<a href="../article/#a">文 › 甲</a>：2 个结果' in html and '<a href="../#b">家 › 乙</a>：1 个结果；正文数字 未测' in html
    assert html.count("<ul") == 1 and "没有页面" in html
