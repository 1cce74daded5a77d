from dataclasses import dataclass, field

import pytest
from playwright.sync_api import sync_playwright

from tests.site import browser as tools

# Material renders diagrams into closed shadow roots; the tests look inside.
OPEN_SHADOWS = """
const attach = Element.prototype.attachShadow;
Element.prototype.attachShadow = function (options) { return attach.call(this, { ...options, mode: "open" }); };
"""


@dataclass
class Visit:
    """One page open in a browser, with everything that went wrong since it was opened."""

    page: object
    origin: str
    faults: list = field(default_factory=list)

    def open(self, address):
        self.page.goto(f"{self.origin}/{address}", wait_until="load")
        self.settle()

    def settle(self):
        """Wait until scripts have run and every diagram is drawn."""
        self.page.wait_for_function("document.querySelectorAll('pre.mermaid').length === 0", timeout=20_000)
        self.page.wait_for_function(
            "[...document.querySelectorAll('div.mermaid')].every(d => d.shadowRoot?.querySelector('svg'))", timeout=20_000
        )
        self.page.wait_for_load_state("networkidle")


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """(folder, origin) of the built site."""
    directory = tmp_path_factory.mktemp("site")
    with tools.serving(directory) as origin:
        tools.build(directory, origin)
        yield directory, origin


@pytest.fixture(scope="session")
def site(published):
    return published[0]


@pytest.fixture(scope="session")
def origin(published):
    return published[1]


@pytest.fixture(scope="session")
def chromium():
    with sync_playwright() as playwright:
        browser = tools.launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, origin):
    """visit(width="desktop", scheme="light") → Visit in a fresh profile; the test fails on any fault."""
    visits = []

    def start(width="desktop", scheme="light"):
        context = chromium.new_context(viewport=tools.VIEWPORTS[width], color_scheme=scheme, locale="zh-CN")
        context.add_init_script(OPEN_SHADOWS)
        it = Visit(context.new_page(), origin)
        visits.append((context, it))

        def guard(route):
            it.faults.append(f"external request: {route.request.url}")
            route.abort()

        context.route(lambda url: not url.startswith((f"{origin}/", "data:", "blob:", "about:")), guard)
        it.page.on("console", lambda m: m.type in ("error", "warning") and it.faults.append(f"console {m.type}: {m.text}"))
        it.page.on("pageerror", lambda error: it.faults.append(f"script error: {error}"))
        it.page.on("response", lambda r: r.status >= 400 and it.faults.append(f"{r.status}: {r.url}"))
        return it

    yield start
    faults = [fault for _, it in visits for fault in it.faults]
    for context, _ in visits:
        context.close()
    assert not faults, "\n".join(faults)
