import re

import pytest

from hooks import glossary, prose

PAGE = """# x
| a | b |
## 术语 { #glossary }

| 术语 | 含义 | 详见 |
| --- | --- | --- |
| <span id="activation">激活值（activation）</span> | 前向产生、`反向`要用的**张量**。 | [一](a.md#b) |
| <span id="order">归约顺序（reduction order, RO）</span> | 求和的"先后"。 | [二](series:map) |
| <span id="reduction">归约</span> | 求和。 | |
| <span id="gate">关卡（Gate）</span> | 见[上](#x)。 | |
| <span id="graph">CUDA Graph</span> | 录成一张图。 | |
## 后面
| <span id="not">不算</span> | x |
"""
TERMS = glossary.read(PAGE)


def marked(html):
    """The marked words of a page, each with its term's id, after a check that nothing else changed."""
    out = glossary.mark(html, TERMS, lambda term: f"to/{term.id}")
    assert re.sub(r'<a class="hf-term"[^>]*>(.*?)</a>', r"\1", out) == html
    return re.findall(r'<a class="hf-term" href="to/([a-z]+)" title="[^"]+">([^<]*)</a>', out)


def test_entries():
    assert [(t.id, t.names, t.target) for t in TERMS] == [
        ("activation", ("激活值", "activation"), "a.md#b"), ("order", ("归约顺序", "reduction order", "RO"), "series:map"),
        ("reduction", ("归约",), ""), ("gate", ("关卡", "Gate"), ""), ("graph", ("CUDA Graph",), ""),
    ]  # fmt: skip
    assert TERMS[0].meaning == "前向产生、反向要用的张量。" and TERMS[3].meaning == "见上。"


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ("<p>每层的激活值都要存</p>", [("activation", "激活值")]),
        ("<p>激活值</p><p>激活值和 activation</p>", [("activation", "激活值")]),
        ("<p>换归约顺序，归约不变</p>", [("order", "归约顺序"), ("reduction", "归约")]),
        ("<p><strong>录成CUDA Graph。</strong>再过Gate 1</p>", [("graph", "CUDA Graph"), ("gate", "Gate")]),
        ("<p>an Activation map</p>", [("activation", "Activation")]),
        ("<p>activations, reactivation, Gates, gate, ROPE</p>", []),
        ("<p>a &lt; b 的激活值 &amp; 其他</p>", [("activation", "激活值")]),
        ('<p title="激活值">前</p><!-- 激活值 --><img alt="激活值">', []),
        ("<h2>激活值</h2><pre><code>激活值</code></pre><p><code>激活值</code><a href='x'>看<em>激活值</em></a></p>"
         "<table><tr><td>激活值</td></tr></table><svg><text>激活值</text></svg><p>后文的激活值</p>", [("activation", "激活值")]),
        ('<p class="hf-prov">激活值</p><details><summary>激活值</summary><p>里面的激活值</p></details>', [("activation", "激活值")]),
    ],
)  # fmt: skip
def test_first_use(html, found):
    assert marked(html) == found
    assert len(re.findall('class="hf-term"', glossary.mark(html, TERMS, lambda term: "x"))) == len(found)


def test_the_mark_that_stays_is_outside_of_code():
    out = glossary.mark("<pre>激活值</pre><p>激活值</p>", TERMS, lambda term: "x")
    assert out == '<pre>激活值</pre><p><a class="hf-term" href="x" title="前向产生、反向要用的张量。">激活值</a></p>'


def test_a_link_by_the_author_is_the_first_use():
    out = glossary.mark('<p><a href="../series/#activation">激活</a>，激活值</p>', TERMS, lambda term: "x")
    assert out == '<p><a class="hf-term" href="../series/#activation" title="前向产生、反向要用的张量。">激活</a>，激活值</p>'


def test_quotes_in_a_meaning_stay_in_the_attribute():
    assert 'title="求和的&quot;先后&quot;。"' in glossary.mark("<p>归约顺序</p>", TERMS, lambda term: "x")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("| <span id=\"reduction\">归约</span>", "| 归约"), "line 9: not a glossary entry"),
        (("id=\"reduction\">归约", "id=\"reduction\">激活值"), "line 9: '激活值' is a name of 'activation' too"),
        (("id=\"reduction\"", "id=\"order\""), "line 9: a second entry 'order'"),
        (("#glossary", "#terms"), "no glossary entries"),
    ],
)  # fmt: skip
def test_faults_name_the_line(change, says):
    with pytest.raises(glossary.GlossaryError, match=says) as error:
        glossary.read(PAGE.replace(*change))
    assert "docs/series.md" in str(error.value) and "Remedy: " in str(error.value)


@pytest.mark.parametrize(
    "html",
    ["", "text", "<p>a<br>b</p>", "<p data-x='a>b' title=\"1 > 0\">a < b</p>", "<svg viewBox='0 0 1 1'><path d=''/></svg>x", "<b>unclosed", "x</b>y"],
)
def test_split_keeps_every_byte(html):
    for tags in ((), {"p", "svg", "b"}):
        assert "".join(prose.split(html, tags=tags)[0]) == html


def test_split_leaves_out_elements_with_all_they_hold():
    html = '<p>a<code>b<i>c</i></code>d</p><div class="x y">e<div>f</div>g</div>h<br>i'
    pieces, wanted = prose.split(html, tags={"code"}, classes={"y"})
    assert [pieces[i] for i in wanted] == ["a", "d", "h", "i"]
