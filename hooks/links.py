"""Links to the earlier articles of the series, written `[文字](series:gpu-sop#anchor)`.

The addresses live in one place, `extra.series` in mkdocs.yml:

    series:
      base: https://example.org/posts/
      slugs:
        gpu-sop: training-inference-acceleration-troubleshooting-sop
"""

import re

# A line that opens or closes a fence: indentation or quote marks, then three or
# more backticks or tildes.
_FENCE = re.compile(r"^[\s>]*(`{3,}|~{3,})")
# Inline code, or the target of a link. Code comes first, so that a target
# inside it is left alone.
_TOKEN = re.compile(
    r"(?P<code>(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`))"
    r"|\]\(series:(?P<key>[^)#\s]*)(?P<anchor>#[^)\s]*)?(?P<rest>[^)]*)\)"
)


class SeriesError(ValueError):
    """A series link that cannot be resolved; the text names page, line and remedy."""


def expand(markdown, src_uri, series_config):
    """Return `markdown` with every `series:` link target replaced by its address.

    markdown: source text of one page. Fenced and inline code stay untouched.
    src_uri: the page's path below docs/, used in messages only.
    series_config: {"base": address ending in "/", "slugs": {key: slug}}.
    Raises SeriesError for an unknown key or an incomplete configuration.
    """
    base, slugs = _checked(series_config)
    fence = None
    lines = markdown.split("\n")
    for number, line in enumerate(lines, 1):
        mark = _FENCE.match(line)
        if mark:
            run = mark.group(1)
            if fence is None:
                fence = run
            elif run[0] == fence[0] and len(run) >= len(fence) and not line[mark.end():].strip():
                fence = None
            continue
        if fence is None and "series:" in line:
            lines[number - 1] = _TOKEN.sub(
                lambda match: _replace(match, base, slugs, f"docs/{src_uri}, line {number}"), line
            )
    return "\n".join(lines)


def _replace(match, base, slugs, where):
    if match["code"] is not None:
        return match[0]
    key = match["key"]
    if key not in slugs:
        raise SeriesError(
            f"{where}: unknown series article {key!r}. "
            f"Remedy: use one of {', '.join(sorted(slugs))}, or add it to extra.series.slugs in mkdocs.yml"
        )
    return f"]({base}{slugs[key]}/{match['anchor'] or ''}{match['rest']})"


def _checked(config):
    if not isinstance(config, dict) or not config.get("base") or not config.get("slugs"):
        raise SeriesError("mkdocs.yml: extra.series needs both 'base' (an address) and 'slugs' (key: slug)")
    base = config["base"]
    return (base if base.endswith("/") else base + "/"), config["slugs"]
