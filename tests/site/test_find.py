"""reproduce.md: any number of the site leads to its experiment and back; the filter, and the page without it."""

from tests.site.browser import VIEWPORTS, pages


def shown(page):
    return page.locator(".hf-exp:visible").evaluate_all("all => all.map(e => e.id)")


def test_every_number_leads_to_its_experiment_and_back(visit):
    it = visit()
    sources = {}
    for address in pages().values():
        if address == "reproduce/":
            continue
        it.open(address)
        links = it.page.locator("a.num, a.unmeasured, .hf-prov a[href*='reproduce/#'], .hf-box-missing a[href*='reproduce/#']")
        sources[address] = set(links.evaluate_all("all => all.map(a => a.hash.slice(1))"))
    it.open("reproduce/")
    known = set(shown(it.page))
    assert sum(map(len, sources.values())) > 10
    back = {}
    for heading in it.page.locator(".hf-exp").all():
        uses = heading.evaluate("e => { while (!(e = e.nextElementSibling).matches('ul.hf-uses, h2')); return [...e.querySelectorAll(':scope > li > a')].map(a => a.href); }")
        back[heading.get_attribute("id")] = uses
    for address, ids in sources.items():
        for id in ids:
            assert id in known, f"{address}: #{id} is no experiment of reproduce.md"
            assert any(use.split("#")[0] == f"{it.origin}/{address}" for use in back[id]), f"reproduce.md#{id} does not name {address}"
    for uses in back.values():
        for url in uses:
            it.open(url.removeprefix(f"{it.origin}/"))
            assert it.page.evaluate("!!document.getElementById(location.hash.slice(1))"), url


def test_filter_by_keyboard_keeps_its_state_in_the_address(visit):
    it = visit()
    it.open("reproduce/")
    page = it.page
    everything = shown(page)
    page.locator("#hf-find").focus()
    page.keyboard.type("precision.rounding")
    some = shown(page)
    assert "precision.rounding" in some and len(some) < len(everything) and "find=precision.rounding" in page.url
    status = page.locator(".hf-find output")
    assert status.get_attribute("aria-live") == "polite" and f"显示 {len(some)} / {len(everything)}" in status.inner_text()
    it.open(page.url.removeprefix(f"{it.origin}/"))
    assert shown(page) == some
    page.locator(".hf-find button").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("!location.search")
    assert shown(page) == everything


def test_filter_by_status(visit):
    it = visit()
    for value, word in {"fails": "不成立", "unmeasured": "未测"}.items():
        it.open(f"reproduce/?status={value}")
        assert it.page.locator(f"[name=status][value={value}]").is_checked()
        found = it.page.locator(".hf-exp:visible").evaluate_all("all => all.map(e => e.dataset.status)")
        assert all(value in states.split() for states in found)
        claims = it.page.locator("#claims + .hf-table tbody tr:visible").all_inner_texts()
        assert all(word in text for text in claims)
        assert found or claims


def test_an_anchor_ends_a_filter_that_hides_it(visit):
    it = visit()
    it.open("reproduce/?find=zzqqxx")
    assert shown(it.page) == []
    it.open("reproduce/?find=zzqqxx#precision.rounding")
    it.page.wait_for_function("document.getElementById('precision.rounding').checkVisibility()")
    assert it.page.locator("#hf-find").input_value() == ""


def test_without_a_script_everything_is_there(chromium, origin):
    context = chromium.new_context(viewport=VIEWPORTS["phone"], java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{origin}/reproduce/?find=zzqqxx&status=fails#precision.rounding")
    assert page.locator(".hf-exp").count() == page.locator(".hf-exp:visible").count() > 10
    assert page.locator("form.hf-find").count() == 1 and not page.locator("form.hf-find").is_visible()
    assert page.locator("#claims + .hf-table tbody tr").count() > 0
    context.close()
