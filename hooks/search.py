"""MkDocs hook: the search index holds what is worth finding, in words that a query is cut into as well.

Three things are changed in Material's search:

- What enters the index. Record tables, plots, provenance and listings of files stay out; of the
  listings, the names are kept in a field ``keywords`` that is searched and never shown, together with
  the title of the page, the words of hooks/keywords.yml (synonyms) and spellings such as gate2 and
  1x4096. A table's row is a paragraph, so that a result quotes the row and not the whole table.
- Chinese words. Only those of jieba's dictionary that the site can contain are read (a fifth of the
  time of reading it all), and compounds are cut into their parts, which a reader may search alone.
- How a query is cut. Material's worker never looks at the last character of a Chinese query, and
  finds nothing when the first one begins no indexed word; hooks/segment.js takes its place.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import yaml
from material.plugins.search import plugin as material
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority

HERE = Path(__file__).parent
HAN = re.compile(r"[\u3400-\u9fff]+")
JOINT = "\u200b"  # what Material joins words with; the separator in mkdocs.yml has it
HIDDEN = {"hf-prov", "hf-table", "hf-facts", "hf-data", "hf-canvas", "hf-legend", "hf-badge", "hf-sr", "tabbed-labels", "filename", "hf-box"}
LISTINGS = {"highlight"}
GAPS = {"td", "th", "dt", "dd", "summary", "div", "figcaption", "label", "br"}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+|[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+")
SEGMENT = re.compile(r"function (\w+)\((\w+),(\w+)\)\{let \w+=new Set,\w+=new Uint16Array\(.*?new Set\(\[\2\]\):\w+\}", re.DOTALL)
# By address: Material multiplies a whole page's score by up to five; home and records repeat the articles' words.
WEIGHTS = (("(#|$)", 0.1), ("reproduce/#(?!rerun|claims|pipeline|gpu_tests)", 0.25), (".*#", 1), ("", 0.22))
LONGEST = 8  # characters of a dictionary word that is looked for


class Parser(material.Parser):
    """Material's division of a page into sections, without what only adds noise."""

    def __init__(self):
        super().__init__()
        self.hidden: list[str] = []  # open elements from the hidden one on
        self.listing = False
        self.names: dict[int, dict[str, None]] = {}  # by section

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        classes = set((values.get("class") or "").split())
        if self.hidden or "data-search-exclude" in values or classes & HIDDEN or classes & LISTINGS:
            self.listing = bool(self.hidden and self.listing or classes & LISTINGS)
            if tag not in material.void:
                self.hidden.append(tag)
            return
        if tag in GAPS and self.section:
            self.handle_data(" ")
        super().handle_starttag("p" if tag == "tr" else tag, attrs)

    def handle_endtag(self, tag):
        if self.hidden:
            if self.hidden[-1] == tag:
                self.hidden.pop()
            return
        super().handle_endtag("p" if tag == "tr" else tag)

    def handle_data(self, data):
        if not self.hidden:
            super().handle_data(data)
        elif self.listing and self.section:
            self.names.setdefault(id(self.section), {}).update(dict.fromkeys(NAME.findall(data)))


class Index(material.SearchIndex):
    """Material's index; texts are segmented at the end, when all of them are known."""

    def __init__(self, keywords, **config):
        super().__init__(**config)
        self.keywords = keywords

    def add_entry_from_context(self, page):
        if (page.meta.get("search") or {}).get("exclude"):
            return
        parser = Parser()
        parser.feed(re.sub(r"<svg\b.*?</svg>", " ", page.content, flags=re.DOTALL))
        parser.close()
        for section in parser.data:
            if not section.is_excluded():
                self.create_entry_for_section(section, page.toc, page.url, page)
                entry = self.entries[-1]
                entry["text"] = re.sub(r"\s+(?=<)|(?<=>)\s+(?=\S)|(?<=\s)\s+", "", entry["text"])
                entry["names"] = " ".join(parser.names.get(id(section), ()))
                if "#" in entry["location"]:  # so that a section answers "CUDA Graph 陷阱" alone
                    entry["page"] = str(page.title)
                entry["boost"] = next(weight for start, weight in WEIGHTS if re.match(start, entry["location"]))

    def _segment_chinese(self, data):
        return data  # in generate_search_index

    def generate_search_index(self, prev):
        unknown = set(self.keywords) - {entry["location"] for entry in self.entries}
        if unknown and not prev:
            raise PluginError(f"hooks/keywords.yml: no section {', '.join(sorted(unknown))}. Remedy: give each the address it has in the site, such as cuda-graph/#tiers")
        for entry in self.entries:
            mixed = ["".join(found).lower() for found in re.findall(r"\b([A-Za-z]{2,}) (\d+)\b", entry["title"])]
            mixed += [f"{a}x{b}" for a, b in re.findall(r"(\d+) ?× ?(\d+)", entry["title"])]
            entry["keywords"] = " ".join(dict.fromkeys([*str(self.keywords.get(entry["location"]) or "").split(), *mixed]))
        fields = ("title", "text", "keywords", "page")
        cut = segmenter({run for entry in self.entries for field in fields for run in HAN.findall(entry.get(field, ""))})
        for entry in self.entries:
            for field in set(fields) & set(entry):
                entry[field] = HAN.sub(lambda run: JOINT + JOINT.join(cut(run[0])) + JOINT, entry[field]).strip(JOINT)
                entry[field] = re.sub(f"{JOINT}(?=[\\s（）、。，：；！？])|(?<=[\\s（）、。，：；！？]){JOINT}", "", entry[field])
        return super().generate_search_index(prev)


def segmenter(runs):
    """A function that cuts any of these runs of Chinese characters into words."""
    import jieba

    possible = {run[i:j] for run in runs for i in range(len(run)) for j in range(i + 1, min(len(run), i + LONGEST) + 1)}
    total, found = 0, {}
    with jieba.get_dict_file() as lines:
        for line in lines:
            word, number, _ = line.decode().split(" ")
            total += int(number)
            if word in possible:
                found[word] = int(number)
    own = (HERE / "terms.txt").read_text(encoding="utf-8").split()
    found |= {word: max(found.get(word, 0), 20_000) for word in own}
    compounds = {w for w in found if any(w[:k] in found and w[k:] in found for k in range(2, len(w) - 1))}
    cutter = jieba.Tokenizer()
    cutter.FREQ = {word[:end]: 0 for word in found for end in range(1, len(word))}
    cutter.FREQ |= {word: number for word, number in found.items() if word not in compounds}
    cutter.total, cutter.initialized = total, True
    known: dict[str, list[str]] = {}

    def cut(run):
        if run not in known:
            known[run] = cutter.lcut(run, HMM=False)
        return known[run]

    return cut


@event_priority(-50)  # after the search plugin has read its configuration
def on_config(config):
    if find_spec("jieba") is None:
        raise PluginError(
            "jieba is not installed, so Chinese search would find nothing. "
            "Remedy: python -m pip install -r requirements-site.txt"
        )
    search = config.plugins.get("material/search")
    if search is not None:
        keywords = yaml.safe_load((HERE / "keywords.yml").read_text(encoding="utf-8"))
        search.search_index = Index(keywords, **search.config)
    return config


def on_files(files, *, config):
    workers = [f for f in files if re.fullmatch(r"assets/javascripts/workers/search\.\w+\.min\.js", f.src_uri)]
    for file in workers:
        own = (HERE / "segment.js").read_text(encoding="utf-8")
        text, count = SEGMENT.subn(lambda old: own.replace("NAME", old[1]).strip(), file.content_string)
        if count != 1:
            raise PluginError(
                f"{file.src_uri}: the function that cuts a Chinese query is not where it was in mkdocs-material 9.8.2. "
                "Remedy: install the pinned version, or adapt SEGMENT in hooks/search.py"
            )
        file.content_string = text
    return files
