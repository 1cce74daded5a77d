from types import SimpleNamespace

import pytest

from hooks import blocks, pages


@pytest.mark.parametrize(("meta", "faults"), [({"description": "一句话"}, 0), ({}, 1), ({"description": " "}, 1), ({"description": None}, 1)])
def test_a_page_without_description_stops_the_build(meta, faults):
    blocks.reset()
    page = SimpleNamespace(meta=meta, file=SimpleNamespace(src_uri="some/page.md"))
    assert pages.on_page_markdown("# x", page=page, config=None, files=None) == "# x"
    assert len(blocks.faults()) == faults
    for fault in blocks.faults():
        assert "docs/some/page.md" in str(fault) and "description:" in str(fault)
    blocks.reset()
