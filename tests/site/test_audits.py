"""The built pages before the auditors of package.json: axe, html-validate and vnu find nothing."""

import json
import re
import subprocess

import pytest

from tests.site.browser import ROOT, pages

MODULES = ROOT / "node_modules"


def tool(path):
    """A file of an installed auditor; the failure says how to install it."""
    assert (MODULES / path).exists(), f"node_modules/{path} is missing. Remedy: make test, or npm ci"
    return MODULES / path


@pytest.fixture(scope="module")
def built(site):
    files = sorted(site.rglob("*.html"))
    assert len(files) >= len(pages()) + 1, files  # and 404.html
    return files


def axe(page):
    """What axe finds wrong with the page as it is now, a line each."""
    page.evaluate(tool("axe-core/axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({ resultTypes: ['violations'] }).then(result => result.violations)")
    return [f"{rule['id']}: {node['html'][:200]} {node['failureSummary'][:200]}" for rule in found for node in rule["nodes"]]


# Only colours depend on the scheme and only layout on the width, so two of the four views see both.
@pytest.mark.parametrize(("width", "scheme"), [("desktop", "light"), ("phone", "dark")])
@pytest.mark.parametrize("name", [*pages(), "404", "code"])
def test_axe_finds_nothing(visit, site, name, width, scheme):
    it = visit(width, scheme)
    listing = next((site / "code").rglob("index.html")).relative_to(site)
    it.open((pages() | {"404": "404.html", "code": listing})[name])
    assert axe(it.page) == []


@pytest.mark.parametrize(("toggle", "width"), [("打开导航", "phone"), ("打开搜索", "phone")])
def test_axe_finds_nothing_where_something_is_open(visit, toggle, width):
    it = visit(width)
    it.open("precision-alignment/")
    it.page.get_by_role("button", name=toggle).click()
    it.page.wait_for_timeout(500)  # it slides in
    assert axe(it.page) == []


@pytest.mark.parametrize(
    ("fault", "rule"),
    [("<img src='data:,'>", "image-alt"), ("<p style='color: #999; background: #aaa'>pale</p>", "color-contrast")],
)
def test_axe_does_look(visit, fault, rule):
    it = visit()
    it.open("404.html")
    it.page.evaluate("html => document.querySelector('article').insertAdjacentHTML('beforeend', html)", fault)
    assert [line.split(":")[0] for line in axe(it.page)] == [rule]


def html_validate(folder, *files):
    report = folder / "html-validate.json"  # it ends before a pipe has taken a long report
    command = ["node", tool("html-validate/bin/html-validate.mjs"), "--config", ROOT / ".htmlvalidate.json", "--formatter", f"json={report}", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return [
        f"{file['filePath']}:{fault['line']}:{fault['column']}: {fault['ruleId']}: {fault['message']}"
        for file in json.loads(report.read_text(encoding="utf-8"))
        for fault in file["messages"]
    ]


def vnu(folder, *files):
    # Without --no-langdetect it takes a page full of code for English.
    command = ["java", "-jar", tool("vnu-jar/build/dist/vnu.jar"), "--no-langdetect", "--exit-zero-always", "--format", "json", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [
        f"{fault['url']}:{fault.get('lastLine')}: {fault['message']}"
        for fault in json.loads(done.stderr)["messages"]
        # The rest are remarks, such as on the slash that Markdown puts in <br />.
        if fault["type"] != "info" or fault.get("subType") == "warning"
    ]


@pytest.mark.parametrize("validator", [html_validate, vnu])
def test_html_is_valid(built, validator, tmp_path):
    assert validator(tmp_path, *built) == []


@pytest.mark.parametrize("validator", [html_validate, vnu])
def test_validators_do_look(built, validator, tmp_path):
    page = next(file for file in built if file.name == "404.html").read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(page.replace("</article>", '<p><p align="left" id="x"><a id="x" href="">x</b></article>'), encoding="utf-8")
    assert len(validator(tmp_path, broken)) >= 2


def test_lock_names_no_host():
    """A lock written behind a mirror must not send everyone there."""
    hosts = set(re.findall(r'"resolved": "https?://([^/"]+)', (ROOT / "package-lock.json").read_text(encoding="utf-8")))
    assert hosts <= {"registry.npmjs.org"}


def test_versions_are_exact():
    package = json.loads((ROOT / "package.json").read_text(encoding="utf-8"))
    assert package["devDependencies"] and all(re.fullmatch(r"[\d.]+", v) for v in package["devDependencies"].values())
