"""hooks/inline.py: numbers in prose."""

import pytest
from fake_results import project, record

import hooks
from hooks import inline
from hooks.inline import InlineError

ONE = 'one("kernels.bench", "speed", kernel="rms_norm", impl="ours")'


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    hooks.use_root(project(tmp_path))
    yield tmp_path
    hooks.use_root(before)


def expand(text, *records, page="precision-alignment.md"):
    held = {r.device["slug"]: r for r in (records or (record(),))}
    return inline.expand(text, page, lambda id: held)


def text_of(html):
    import re

    return re.sub(r"<[^>]+>", "", html)


@pytest.mark.parametrize(
    ("expression", "want"),
    [
        (f'{ONE}.gbps | fmt(".0f")', "3911"),
        (f"{ONE}.ratio | pct(1)", "94.2%"),
        (f'({ONE}.gbps / one("kernels.bench", "speed", kernel="rms_norm", impl="eager").gbps) | x(2)', "3.25×"),
        (f"{ONE}.rows", "4,096"),
        (f"{ONE}.impl", "ours"),
        ('all_("kernels.bench", "speed", impl="ours") | map(attribute="gbps") | max | fmt(",.0f")', "4,001"),
        ('len(all_("kernels.bench", "speed"))', "4"),
        (f"min({ONE}.ratio, 0.5)", "0.5"),
        ('device("kernels.bench")', "NVIDIA H200"),
        ('one("kernels.bench", "speed", kernel="rms_norm", impl="ours", on="nvidia-h200").gbps | fmt(".1f")', "3911.3"),
    ],
)
def test_values(expression, want):
    html = expand(f"带宽 [[ {expression} ]] GB/s")
    assert text_of(html) == f"带宽 {want} GB/s"


def test_the_number_links_to_its_record_and_names_the_source():
    html = expand(f"[[ {ONE}.rows ]]")
    assert html.startswith('<a class="num" href="../reproduce/#kernels.bench" title="kernels.bench · NVIDIA H200 · torch 2.11.0')
    assert "2026-11-30" in html
    assert 'href="reproduce/#' in expand(f"[[ {ONE}.rows ]]", page="index.md")


def test_code_stays_untouched():
    text = (
        "`[[ a ]]` 与 ``x ` [[ b ]]``\n\n```python\n[[ c ]]\n~~~\n[[ d ]]\n```\n"
        "    ~~~~ text\n    [[ e ]]\n    ~~~\n    [[ f ]]\n    ~~~~\n> ```\n> [[ g ]]\n> ```\n- ```\n  [[ h ]]\n  ```\n"
    )
    assert expand(text) == text
    assert text_of(expand(text + f"\n[[ {ONE}.rows ]]")) == text + "\n4,096"


def test_a_lone_backtick_hides_nothing():
    html = expand(f"一个 ` 号\n\n[[ {ONE}.rows ]]\n\n又一个 ` 号")
    assert "4,096" in html and "[[" not in html


def test_it_works_in_markdown_tables_and_across_lines():
    html = expand(f"| a | b |\n|---|---|\n| x | [[ {ONE}.rows ]] |\n\n[[ one(\"kernels.bench\", \"speed\",\n  kernel=\"rms_norm\", impl=\"ours\").rows ]]")
    row = html.splitlines()[2]
    assert row.count("|") == 3 and html.count("4,096") == 2


def test_values_from_records_are_escaped():
    r = record()
    r.tables["log"] = [{"text": '<img src=x onerror="1"> | y'}]
    html = expand('[[ one("kernels.bench", "log").text ]]', r)
    assert "<img" not in html and "|" not in html


def test_an_unmeasured_experiment_is_a_badge():
    html = inline.expand(f"a [[ {ONE}.gbps | fmt('.0f') ]] b", "precision-alignment.md", lambda id: {})
    assert "未测" in html and "python -m snippets.kernels.bench" in html and html.startswith("a <a") and html.endswith("</a> b")
    other = expand(f'[[ one("kernels.bench", "speed", kernel="rms_norm", impl="ours", on="nvidia-b200").gbps ]]')
    assert "未测" in other


def test_a_smoke_record_without_the_row_is_unmeasured_and_hides_no_typo():
    assert text_of(expand(f"[[ {ONE.replace('ours', 'nobody')}.gbps ]]", record(mode="smoke"))).endswith("未测")
    for wrong in ("gbits", "gbps | fmtt"):
        with pytest.raises(InlineError):
            expand(f"[[ {ONE}.{wrong} ]]", record(mode="smoke"))


def test_stale_and_smoke_are_visible():
    assert "过期" in expand(f"[[ {ONE}.rows ]]", record(stale=True))
    assert "冒烟" in expand(f"[[ {ONE}.rows ]]", record(mode="smoke"))
    assert "hf-badge" not in expand(f"[[ {ONE}.rows ]]")


ERRORS = [
    ('one("kernels.bnch", "speed").gbps', "unknown experiment 'kernels.bnch'"),
    ('one("kernels.bench", "spd").gbps', "no table 'spd'; there are: speed, log"),
    ('one("kernels.bench", "speed", knl=1).gbps', "no column 'knl'"),
    (f"{ONE}.gpbs", "no column 'gpbs'; there are: kernel, impl, rows, gbps"),
    ("gbps", "names: one, all_"),
    ("nothing(1)", "names: one"),
    (f"{ONE}.gbps | fmtt('.0f')", "fmtt"),
    (f"{ONE}.gbps |", "not an expression"),
    ("one()", "needs experiment and table in quotes"),
    ("one(name, 'speed').gbps", "in quotes"),
    ("1 + 2", "reads no record"),
    ("  ", "empty"),
]


@pytest.mark.parametrize("load", [lambda id: {}, lambda id: {"nvidia-h200": record()}])
@pytest.mark.parametrize(("expression", "says"), ERRORS)
def test_mistakes_are_errors_even_without_a_record(expression, says, load):
    with pytest.raises(InlineError) as caught:
        inline.expand(f"一\n\n二 [[ {expression} ]]", "precision-alignment.md", load)
    message = str(caught.value)
    assert says in message and "docs/precision-alignment.md, line 3" in message and "[[ " in message


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ('one("kernels.bench", "speed", kernel="rms_norm").gbps', "matches 2 rows; narrow it: impl is one of 'ours', 'eager'"),
        ('one("kernels.bench", "speed", kernel="rope").gbps', "kernel is one of 'rms_norm', 'swiglu'"),
        ('one("kernels.bench", "speed", kernel="swiglu", impl="eager").gbps', "None"),
        (ONE, "a row"),
        ('all_("kernels.bench", "speed")', "list"),
        ('all_("kernels.bench", "speed") | map(attribute="gpbs") | max', "no column 'gpbs'"),
        (f"{ONE}.impl | fmt('.0f')", "needs a number"),
        (f"{ONE}.gbps | fmt('.0q')", "does not fit"),
        (f"{ONE}.gbps / 0", "ZeroDivisionError"),
        (f"{ONE}.gbps + 'x'", "TypeError"),
        (f"{ONE}.__class__.__mro__", "no column '__class__'"),
        (f"({ONE}.gbps).__class__.__base__", "names: one"),
    ],
)
def test_mistakes_that_need_the_record(expression, says):
    with pytest.raises(InlineError) as caught:
        expand(f"[[ {expression} ]]")
    assert says in str(caught.value)


def test_line_numbers_count_through_fences():
    with pytest.raises(InlineError, match="line 7:"):
        expand("a\n\n```\n[[ x ]]\n```\nb\nc [[ bad ]]\n")
