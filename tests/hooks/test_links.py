"""hooks/links.py: addresses of the earlier articles come from one mapping."""

from pathlib import Path

import pytest
import yaml

from hooks.links import SeriesError, expand

SERIES = {"base": "https://example.org/posts/", "slugs": {"gpu-sop": "gpu-troubleshooting", "map": "the-map"}}


def test_key_becomes_address():
    assert expand("见[排查](series:gpu-sop)。", "a.md", SERIES) == "见[排查](https://example.org/posts/gpu-troubleshooting/)。"


def test_anchor_title_and_several_links_on_a_line():
    text = 'x [a](series:gpu-sop#roofline "标题") y [b](series:map) z'
    assert expand(text, "a.md", SERIES) == (
        'x [a](https://example.org/posts/gpu-troubleshooting/#roofline "标题") y '
        "[b](https://example.org/posts/the-map/) z"
    )


def test_base_without_slash():
    assert expand("[a](series:map)", "a.md", SERIES | {"base": "https://example.org/p"}) == "[a](https://example.org/p/the-map/)"


def test_unknown_key_names_page_line_and_remedy():
    with pytest.raises(SeriesError, match=r"docs/b\.md, line 3: unknown series article 'gpu_sop'.*gpu-sop, map"):
        expand("\n\n[a](series:gpu_sop)", "b.md", SERIES)


@pytest.mark.parametrize(
    "code",
    [
        "写作 `[a](series:nowhere)` 即可",
        "写作 ``[`a`](series:nowhere)`` 即可",
        "```text\n[a](series:nowhere)\n```",
        "    ```text\n    [a](series:nowhere)\n    ```",
        "~~~~\n```\n[a](series:nowhere)\n~~~~",
    ],
)
def test_code_is_left_alone(code):
    assert expand(code, "a.md", SERIES) == code


def test_link_after_a_fence_and_beside_code_is_replaced():
    text = "```python\nx\n```\n`code` [a](series:map) `code`"
    assert expand(text, "a.md", SERIES).endswith("`code` [a](https://example.org/posts/the-map/) `code`")


@pytest.mark.parametrize("config", [None, {}, {"base": "https://example.org/"}, {"slugs": {"a": "b"}}])
def test_incomplete_configuration(config):
    with pytest.raises(SeriesError, match="extra.series"):
        expand("text", "a.md", config)


def test_pages_use_only_known_keys():
    class Loader(yaml.SafeLoader):
        pass

    # mkdocs.yml holds tags such as !ENV that only MkDocs knows.
    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    root = Path(__file__).parents[2]
    series = yaml.load((root / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["extra"]["series"]
    pages = list((root / "docs").rglob("*.md"))
    assert pages
    for page in pages:
        expand(page.read_text(encoding="utf-8"), page.name, series)  # raises on an unknown key
