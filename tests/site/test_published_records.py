"""The built site's records: every result leads to its record's file."""

import re
import urllib.request
from urllib.parse import urljoin

from tests.site.browser import ROOT, pages


def fetch(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read()


def test_every_result_leads_to_its_record_byte_for_byte(origin):
    found = {}
    for address in pages().values():
        url = f"{origin}/{address}"
        lines = re.findall(r'<p class="hf-prov".*?</p>', fetch(url).decode())
        links = [re.search(r'href="([^"]+)">记录</a>', line) for line in lines]
        assert all(links), f"{url}: a result without a link to its record"
        found |= {urljoin(url, link[1]): url for link in links}
    assert found
    for file, page in found.items():
        path = ROOT / file.removeprefix(f"{origin}/")
        assert path.parent.parent == ROOT / "records", f"{page}: {file}"
        assert fetch(file) == path.read_bytes(), f"{page}: {file}"
