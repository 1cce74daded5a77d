"""Pictures of every page for a person to look at: `make screenshots`.

Writes screenshots/<page>-<width>-<scheme>.png from site/, and renews the README's
picture, docs/assets/images/home.png, and that of shared links, card.png beside it.
"""

import sys

from playwright.sync_api import sync_playwright

from tests.site.browser import ROOT, SCHEMES, VIEWPORTS, launch, pages, serving


def main():
    site, out, home = ROOT / "site", ROOT / "screenshots", ROOT / "docs/assets/images/home.png"
    if not (site / "index.html").exists():
        sys.exit("site/index.html is missing. Remedy: make site")
    out.mkdir(exist_ok=True)
    with serving(site) as origin, sync_playwright() as playwright:
        browser = launch(playwright)
        for scheme in SCHEMES:
            for width, viewport in VIEWPORTS.items():
                context = browser.new_context(viewport=viewport, color_scheme=scheme, locale="zh-CN")
                page = context.new_page()
                for name, address in pages().items():
                    page.goto(f"{origin}/{address}", wait_until="load")
                    page.wait_for_function("!document.querySelector('pre.mermaid')", timeout=20_000)
                    page.wait_for_load_state("networkidle")
                    page.wait_for_timeout(300)  # transitions of the theme
                    file = out / f"{name.replace('/', '-')}-{width}-{scheme}.png"
                    page.screenshot(path=file, full_page=True)
                    print(file.relative_to(ROOT))
                    if (name, width, scheme) == ("index", "desktop", "light"):
                        home.parent.mkdir(parents=True, exist_ok=True)
                        page.screenshot(path=home)
                context.close()
        page = browser.new_page(viewport={"width": 1200, "height": 630})
        page.goto((ROOT / "tests/site/card.html").as_uri())
        page.screenshot(path=home.with_name("card.png"))
        browser.close()


if __name__ == "__main__":
    main()
