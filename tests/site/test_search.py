"""Search in the browser: Material's page, its worker and the built index answer what readers type."""

import re

import pytest
import yaml

from tests.site import browser as tools

QUERIES = {
    str(query): address
    for group in yaml.safe_load((tools.ROOT / "tests/site/queries.yml").read_text()).values()
    for query, address in group.items()
}
# Keeps every worker that the page starts, so that the answers can be read as the page gets them.
TAP = """
const Real = window.Worker;
window.answers = [];
window.Worker = class extends Real {
  constructor(...args) {
    super(...args);
    this.addEventListener("message", event => {
      if (event.data.type === 1) window.searcher = this;
      if (event.data.type === 3) window.answers.push(event.data.data);
    });
  }
};
"""
ASK = """async queries => {
  const found = {};
  for (const query of queries) {
    const before = window.answers.length;
    window.searcher.postMessage({ type: 2, data: query });
    while (window.answers.length === before) await new Promise(done => setTimeout(done, 2));
    const groups = window.answers.at(-1).items;
    found[query] = {
      first: groups[0]?.[0].location ?? null,
      three: groups.flat().sort((a, b) => b.score - a.score).slice(0, 3).map(item => item.location),
      excerpts: groups.flat().filter(item => item.score > 0).map(item => item.text),
    };
  }
  return found;
}"""


@pytest.fixture(scope="module")
def found(chromium, origin):
    page = chromium.new_page()
    page.add_init_script(TAP)
    page.goto(f"{origin}/")
    page.wait_for_function("window.searcher")
    yield page.evaluate(ASK, list(QUERIES))
    page.close()


@pytest.mark.parametrize("query", QUERIES)
def test_the_section_that_is_meant_comes_first(found, query):
    result = found[query]
    assert result["first"] == QUERIES[query], f"{query!r} should find {QUERIES[query]} first; found {result['three']}"


def test_no_excerpt_is_source_of_a_diagram_or_a_table(found):
    texts = {re.sub(r"<[^>]+>|\u200b", "", text) for result in found.values() for text in result["excerpts"]}
    assert texts
    bad = [text[:80] for text in texts if re.search(r"accTitle|flowchart|sequenceDiagram|-->|\|\s*---|<svg|viewBox", text)]
    assert not bad, bad


def test_a_linked_query_is_answered_with_highlights_that_the_result_page_shows_too(visit):
    it = visit()
    it.page.goto(f"{it.origin}/?q=选择性重算")
    result = it.page.locator(".md-search-result__item a").first
    result.wait_for()
    it.page.wait_for_function("document.querySelector('.md-search-result__item mark')")
    marked = it.page.locator(".md-search-result__item mark").all_inner_texts()
    assert {"选择性", "重算"} <= {text.strip("\u200b ") for text in marked}
    links = it.page.locator(".md-search-result__item a").evaluate_all("links => links.map(link => link.href)")
    assert any("gradient-checkpointing/" in link and "h=" in link and link.endswith("#selective") for link in links)
