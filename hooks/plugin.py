"""The MkDocs hook: events only; the work is done by the modules that it calls.

The order on a page: inline numbers, series links, checks of fences and includes, generated
records. All see the page from the file's first line on, so their line numbers are the file's.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.plugins import CombinedEvent, event_priority

_PARENT = Path(__file__).resolve().parent.parent
if str(_PARENT) not in sys.path:
    sys.path.insert(0, str(_PARENT))

import hooks  # noqa: E402 - needs the line above

_WATCHED = ("snippets", "records", "diagrams", "hooks", "claims.yml")
_serving = False
_stamp: float | None = None
_claims_shown = False


def on_startup(*, command, dirty):
    global _serving
    from hooks import runner

    _serving = command == "serve"
    if _serving and runner.request()[1]:
        # Every save would measure again, and every new record trigger the next build.
        raise PluginError("REFRESH is for builds, not for mkdocs serve; unset it, or run: make refresh")


@event_priority(100)
def _before_plugins(config):
    """What other plugins would answer with a download or in silence."""
    hooks.use_root(Path(config.config_file_path).parent)
    mermaid = config.plugins.get("mermaid2")
    if mermaid is not None:
        events = config.plugins.events["post_page"]
        events[:] = [_sparing(e) if getattr(e, "__self__", None) is mermaid else e for e in events]
        script = mermaid.config.get("javascript")
        if not script or not (Path(config.docs_dir) / script).is_file():
            raise PluginError(
                f"mermaid2: the local script {script or '(none)'} is not in {Path(config.docs_dir).name}/. Without it"
                " pages would load mermaid from a foreign host. Remedy: restore it (git checkout), and name it in"
                " mkdocs.yml as `javascript: assets/javascripts/mermaid.min.js`"
            )
    return config


def _sparing(rewrite):
    """mermaid2's rewriting of a page, only where it finds a diagram to rewrite.

    It parses and writes anew every page that has the word in it: a third of the time of a reload.
    The diagrams of this site are <pre class="mermaid">, which it leaves as they are.
    """

    def on_post_page(output, **values):
        wanted = re.search(r"<(div|code)\b[^>]*\bclass=[^>]*\bmermaid\b", output)
        return rewrite(output, **values) if wanted else output

    return on_post_page


@event_priority(-100)
def _after_plugins(config):
    """Start a build: fresh state, guarded blocks, watched folders."""
    global _claims_shown
    _claims_shown = False
    _reload_edited()
    from hooks import blocks, diagrams, experiments, listings, runner

    blocks.reset()
    diagrams.reset()
    listings.reset()
    runner.reset()
    experiments.notice_files()
    blocks.guard(config)
    watched = {str(Path(p).resolve()) for p in config.watch}
    for name in _WATCHED:
        path = hooks.root() / name
        if path.exists() and str(path) not in watched:
            config.watch.append(str(path))
    try:
        runner.check_request()
    except (runner.RunError, experiments.ExperimentError) as error:
        raise PluginError(str(error)) from error
    return config


on_config = CombinedEvent(_before_plugins, _after_plugins)


def _reload_edited():
    """Under serve, import the modules of this package anew when one was edited since the last build."""
    global _stamp
    stamp = max(path.stat().st_mtime for path in Path(__file__).parent.glob("*.py"))
    if _stamp is not None and stamp != _stamp:
        for name in [n for n in sys.modules if n.startswith("hooks.")]:
            vars(hooks).pop(name.partition(".")[2], None)
            del sys.modules[name]
    _stamp = stamp


def on_page_markdown(markdown, *, page, config, files):
    from hooks import blocks, inline, links, reproduce, runner, show

    src_uri = page.file.src_uri
    show.page.set(src_uri)
    # MkDocs has cut the front matter off; as many blank lines keep the numbering.
    cut = page.file.content_string.replace("\r\n", "\n").count("\n") - markdown.count("\n")
    markdown = "\n" * cut + markdown
    placed = []
    runner.weak_read.clear()

    def attempt(transform, *values):
        try:
            return transform(*values)
        except Exception as error:  # whatever is wrong with one page must not hide the other pages' faults
            known = type(error).__module__.startswith("hooks.")
            line = re.search(r"\bline (\d+)", str(error))
            message = str(error) if known else f"{type(error).__name__}: {error}"
            message = re.sub(rf"^docs/{re.escape(src_uri)}, line \d+: ", "", message)  # the fault says it itself
            remedy = blocks.weak_hint(message).removeprefix("; or, ")
            placed.append(blocks.report(message, remedy, line=int(line[1]) if line and known else 0, page=src_uri))
            return None

    # A refresh must not quote what it is about to replace, hence ensure and not load.
    numbered = attempt(inline.expand, markdown, src_uri, runner.ensure)
    markdown = markdown if numbered is None else numbered
    if "series:" in markdown:
        linked = attempt(links.expand, markdown, src_uri, config.extra.get("series", {}))
        markdown = markdown if linked is None else linked
    body = ""
    if reproduce.MARK in markdown:
        global _claims_shown
        _claims_shown = True
        body = attempt(reproduce.body, runner.ensure) or ""
    markdown = blocks.check_page(markdown, src_uri, dict(config.mdx_configs.get("pymdownx.snippets", {})), placed)
    return markdown[cut:].replace(reproduce.MARK, body)


def on_page_content(html, *, page, config, files):
    from hooks import blocks, diagrams

    return blocks.finish_page(diagrams.place(html, page.file.src_uri, page.file.content_string))


@event_priority(100)  # before any plugin writes an asset into the site
def on_env(env, *, config, files):
    from hooks import blocks

    said = "\n".join(str(fault) for fault in blocks.faults())
    general = []
    for complaint in _damaged():
        if complaint not in said:
            general.append(blocks.report(complaint, page=""))
    _fill_uses(files)
    if not blocks.faults():
        return env
    if not _serving:
        raise PluginError(blocks.summary())
    boxes = "".join(fault.html() for fault in general)
    for file in files.documentation_pages():
        if file.page is not None and file.page.content is not None:
            file.page.content = boxes + file.page.content
    print(f"\nERROR: {blocks.summary()}\n", file=sys.stderr, flush=True)
    return env


def _fill_uses(files):
    """All pages stand now: reproduce.md can say where each experiment's results are shown."""
    from hooks import reproduce, uses

    pages = [file.page for file in files.documentation_pages() if file.page is not None and file.page.content is not None]
    for page in pages:
        if page.file.src_uri == reproduce.PAGE:
            others = [(p.file.src_uri, str(p.title), p.content) for p in pages if p is not page]
            page.content = uses.fill(page.content, uses.find(others))


def on_post_build(*, config):
    from hooks import publish

    publish.publish(config.site_dir)


def _damaged():
    """Complaints about experiments, records and claims, whether a page shows them or not.

    Whatever a refresh asks for and no page has shown is measured here: it must not be left out in silence.
    """
    from hooks import claims, experiments, records, runner

    try:
        known = experiments.all()
    except experiments.ExperimentError as error:
        yield from str(error).split("\n")
        return
    yield from records.strays()
    sound = True
    for id, experiment in known.items():
        try:
            experiment.digest  # noqa: B018 - reads every file that the experiment is made of
            runner.ensure(id)
        except (records.RecordError, experiments.ExperimentError, runner.RunError) as error:
            sound = False
            yield str(error)
    try:
        for claim in () if _claims_shown else claims.load():  # that page has complained itself
            if sound:
                claims.states(claim, runner.ensure)
    except claims.ClaimError as error:
        yield str(error)
