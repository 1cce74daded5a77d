"""hooks/reproduce.py: the generated page."""

import re
from html import unescape

import markdown
import pytest
import yaml
from fake_results import SPEED, project, record
from test_claims import GOOD

import hooks
from hooks import reproduce


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    hooks.use_root(project(tmp_path))
    yield tmp_path
    hooks.use_root(before)


def page(*records):
    return reproduce.body(lambda id: {r.device["slug"]: r for r in records})


def test_every_experiment_has_a_section_with_its_id(root):
    html = markdown.markdown(page(record()), extensions=["attr_list", "toc"])
    heading = re.search(r'<h2 class="hf-exp" data-status="" id="kernels.bench">(.*?)</h2>', html).group(1)
    assert "<" not in heading and unescape(heading) == "算子带宽 <A>"
    assert '<a href="#kernels.bench">' in html  # the overview leads there
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_a_section_tells_all_that_a_rerun_needs(root):
    html = page(record())
    for part in ("python -m snippets.kernels.bench", "make refresh ONLY=kernels.bench", "CUDA GPU，8 GiB", "约 2 分钟", "[4096]",
                 "NVIDIA H200（139.8 GiB，计算能力 9.0，132 个 SM，驱动 570.1）", "torch 2.11.0", "cuda 12.9", "0123456789abcdef",
                 "2026-11-30 08:00 UTC", "1 min 15 s", "与当前代码一致", "records/nvidia-h200/kernels.bench.json", "3,911"):  # fmt: skip
        assert part in re.sub("<[^>]*>", "", html), part


def test_states_are_shown(root):
    assert "未测量" in page()
    assert "与当前代码不符" in page(record(stale=True)) and "过期" in page(record(stale=True))
    assert "只有冒烟记录" in page(record(mode="smoke"))
    assert "最新" in page(record()) and "最新" not in page(record(stale=True))


def test_long_tables_are_cut_and_say_where_the_rest_is(root):
    html = page(record(tables={"speed": SPEED * 30, "log": []}))
    assert "共 120 行，这里是前 40 行" in html and html.count("  eager  ") == 20


def test_claims_are_listed_with_their_state(root):
    (root / "claims.yml").write_text(yaml.safe_dump([GOOD, GOOD | {"id": "b", "accept": [None, 0.5], "source": "https://e.org/?a=1&b=2"}]))
    html = page(record())
    assert "✓</span> 成立" in html and "✗</span> 不成立" in html and "0.942" in html and "≥ 0.9" in html
    assert 'href="../precision-alignment/"' in html and 'href="https://e.org/?a=1&amp;b=2"' in html
    assert "未测 1" not in html and "成立 1，不成立 1，未测 0" in html
    assert page().count("!</span> 未测<") == 4  # two claims: in the ledger and in the experiment's section


def test_the_page_survives_markdown_unchanged(root):
    text = page(record())
    html = markdown.markdown(text, extensions=["attr_list", "toc", "tables"])
    # Raw HTML blocks come through byte for byte; Markdown must have touched headings only.
    for block in re.findall(r"<section.*?</section>|<dl.*?</dl>", text, re.DOTALL):
        assert block in html


def test_data_never_looks_like_an_inline_number(root):
    from hooks import inline

    text = page(record(settings={"shapes": [[1, 2], [3, 4]]}))
    assert "[1, 2], [3, 4]]" in text and inline.expand(text, "reproduce.md", lambda id: {}) == text


def test_the_mark_is_replaced_and_other_pages_are_left_alone(root):
    load = lambda id: {}  # noqa: E731
    assert reproduce.expand(f"a\n\n{reproduce.MARK}\n", load) == f"a\n\n{reproduce.body(load)}\n"
    assert reproduce.expand("a\n", load) == "a\n"


def test_the_filter_s_states_of_an_experiment(root):
    assert 'data-status="unmeasured"' in page() and 'data-status="stale"' in page(record(stale=True))
    assert 'data-status="unmeasured"' in page(record(mode="smoke"))
    (root / "claims.yml").write_text(yaml.safe_dump([GOOD, GOOD | {"id": "b", "accept": [None, 0.5]}]))
    assert 'data-status="holds fails"' in page(record())
