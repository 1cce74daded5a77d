"""The guard around markdown-exec: no executable block fails in silence.

Left alone, markdown-exec and SuperFences show a raising block as a traceback in a green build,
end a build as a success on `sys.exit(0)`, and turn a block with a bad option into inline code
without a word. Here every page is read before Markdown sees it. What is wrong there (options, ids,
includes) and what goes wrong while a block runs is collected as a Fault that names the file and
line, the block and the remedy, and a box takes its place on the page. `mkdocs build` then fails
with all faults at once before it writes a page; `mkdocs serve` shows the boxes and lives on.

An executable block is

    ```python exec="1" html="1" id="unique-on-the-site"

and its output is HTML. Options besides these three: title and source.
"""

from __future__ import annotations

import builtins
import collections
import io
import linecache
import os
import re
import sys
import traceback
import types
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import markdown_exec
from pymdownx.snippets import SnippetPreprocessor, makeExtension
from pymdownx.superfences import RE_NESTED_FENCE_START, RE_OPTIONS

from hooks import listings, runner
from hooks.experiments import ExperimentError
from hooks.records import RecordError
from hooks.runner import RunError

_FAULT_LANGUAGE = "hf-fault"  # the fence that stands in for a faulty one
_EXEC_OPTIONS = {"exec", "html", "id", "title", "source"}
_SOURCE_VALUES = {"above", "below", "material-block", "tabbed-left", "tabbed-right"}
_PLAIN_OPTIONS = {"title", "hl_lines", "linenums", "title_mode"}
_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_PREFIX = re.compile(r"[> \t]*")
_FENCE = re.compile(r"`{3,}|~{3,}")
_INCLUDE = re.compile(r"(?<![;-])-+8<-+(?!.*\[[ \t]*(start|end)[ \t]*:)")
_CODE = re.compile(r"(`+).+?\1")
_HTML_ID = re.compile(r"<[A-Za-z][^<>]*?\sid=\"([^\"<>]+)\"")
_FORM = 'write ```python exec="1" html="1" id="..." with every value in double quotes'


@dataclass(frozen=True)
class Fault:
    """One thing that makes the build fail.

    Attributes:
        message: what is wrong. remedy: what to do ("" where the message says it).
        page: source file below docs/, "" where no page is to blame. line: from 1, 0 unknown.
        block: the executable block's id, or "".
    """

    message: str
    remedy: str = ""
    page: str = ""
    line: int = 0
    block: str = ""

    @property
    def where(self) -> str:
        """``docs/page.md:12 [block-id]``, as far as known."""
        place = f"docs/{self.page}" + (f":{self.line}" if self.line else "") if self.page else ""
        return f"{place} [{self.block}]".strip() if self.block else place

    def __str__(self) -> str:
        return "\n    ".join(
            [f"{self.where}: {self.message}".removeprefix(": ")] + ([f"Remedy: {self.remedy}"] if self.remedy else [])
        )

    def html(self) -> str:
        """The box that a reader of `mkdocs serve` sees."""
        head = f"构建错误{'：' if self.where else ''}{escape(self.where)}"
        remedy = f"<p><strong>处理：</strong>{escape(self.remedy)}</p>" if self.remedy else ""
        return (
            f'<div class="admonition failure hf-error" role="alert"><p class="admonition-title">{head}</p>'
            f"<pre><code>{escape(self.message)}</code></pre>{remedy}</div>"
        )


@dataclass
class _Block:
    line: int
    ran: bool = False


@dataclass
class _Page:
    src_uri: str = ""
    blocks: dict[str, _Block] = field(default_factory=dict)


_faults: list[Fault] = []
_ids: dict[str, str] = {}  # block id → where it stands, over the whole site
_page = _Page()


def reset() -> None:
    """Forget the last build."""
    global _page
    _faults.clear()
    _ids.clear()
    _page = _Page()


def report(message: str, remedy: str = "", *, line: int = 0, block: str = "", page: str | None = None) -> Fault:
    """Collect a fault; `page` defaults to the page that is being read."""
    fault = Fault(message, remedy, _page.src_uri if page is None else page, line, block)
    _faults.append(fault)
    return fault


def faults() -> list[Fault]:
    """What this build has collected so far."""
    return list(_faults)


def summary() -> str:
    """All faults as one message."""
    lines = "\n  ".join(str(fault) for fault in _faults)
    return f"{len(_faults)} error{'s' if len(_faults) != 1 else ''} in the pages; nothing was written.\n  {lines}"


# ------------------------------------------------------------------------- reading a page


def check_page(markdown: str, src_uri: str, snippets: dict[str, Any], placed: list[Fault] = ()) -> str:
    """Check a page's fences and includes before Markdown sees them.

    Args:
        markdown: the page from the file's first line on, so that line numbers are the file's.
        src_uri: its path below docs/.
        snippets: the configuration of pymdownx.snippets.
        placed: faults found elsewhere, to be shown after their line's paragraph.

    Returns:
        The page with a box in place of everything faulty.
    """
    global _page
    _page = _Page(src_uri)
    lines = markdown.split("\n")
    include = _Includes(snippets)
    boxes: list[tuple[int, int, str, Fault]] = []  # first line, line after the last, prefix, fault
    closed = [True] * len(lines)  # outside every fence
    at = 0
    while at < len(lines):
        prefix = _PREFIX.match(lines[at]).group()
        info = lines[at][len(prefix) :]
        if not (mark := _FENCE.match(info)) or mark.group()[0] == "`" and "`" in info[len(mark.group()) :].split('"')[0]:
            # In prose the mark stands for an include wherever it is; in code only at a line's start.
            if _INCLUDE.search(_CODE.sub("", lines[at])) and (fault := include.check(lines[at], at + 1)):
                boxes.append((at, at + 1, prefix, fault))
            at += 1
            continue
        end = _end(lines, at, mark.group())
        last = len(lines) if end is None else end + 1
        closed[at:last] = [False] * (last - at)
        fault, id = _fence_fault(info, at + 1, end)
        includes = [i for i in range(at + 1, last) if _INCLUDE.match(_PREFIX.sub("", lines[i], count=1))]
        for i in includes:
            fault = fault or include.check(lines[i], i + 1, id)
        if includes and not fault and not id:
            fault, lines[at] = _listing(prefix, info, lines[at + 1 : end], at + 1)
        if fault:
            _page.blocks.pop(id, None)
            boxes.append((at, last, prefix, fault))
        at = last
    top = next((i for i, line in enumerate(lines) if line.strip()), len(lines))  # front matter stands here as blank lines
    for fault in placed:
        at = min(max(fault.line, top), len(lines))  # line numbers start at 1: this is the line after
        while at < len(lines) and (lines[at].strip() or not closed[at]):
            at += 1
        boxes.append((at, at, "\n", fault))
    for first, last, prefix, fault in sorted(boxes, key=lambda box: box[0], reverse=True):
        lines[first:last] = _stand_in(fault, prefix)
    return "\n".join(lines)


def _listing(prefix: str, info: str, inside: list[str], line: int) -> tuple[Fault | None, str]:
    """(what is wrong with a fence that shows a file, its first line with the file's name as title)."""
    if len(inside) != 1:
        return report("a fence with an include holds other lines too, so it cannot name its file and lines",
                      "leave the include alone in its fence, and give each include a fence of its own", line=line), ""  # fmt: skip
    said, problem = listings.named(info, _target(inside[0]), _page.src_uri)
    if problem:
        return report(problem, line=line), ""
    return None, prefix + said


def _target(include: str) -> str:
    return SnippetPreprocessor.RE_ALL_SNIPPETS.match(include.strip()).group("snippet")[1:-1].strip()


def _stand_in(fault: Fault, prefix: str) -> list[str]:
    blank, prefix = ([""], "") if prefix == "\n" else ([], prefix)
    fence = [f"```{_FAULT_LANGUAGE}", str(_faults.index(fault)), "```"]
    return blank + [prefix + line for line in fence] + blank


def _end(lines: list[str], start: int, mark: str) -> int | None:
    """The line that closes the fence: the same run of marks and nothing else."""
    for i in range(start + 1, len(lines)):
        if _PREFIX.sub("", lines[i], count=1).rstrip() == mark:
            return i
    return None


def _fence_fault(info: str, line: int, end: int | None) -> tuple[Fault | None, str]:
    """(what is wrong with a fence's first line, the id of an executable block or "")."""
    match = RE_NESTED_FENCE_START.match(info)
    mentions_exec = re.search(r"(?<![\w\"'-])exec\b", info) is not None
    if end is None:
        return report("the fence that opens here is never closed", f"close it with a line {_FENCE.match(info).group()}",
                      line=line), ""  # fmt: skip
    if match is None or match.group("unrecognized"):
        if match is None and not mentions_exec:
            return None, ""  # not a fence to Markdown either
        return report(
            f"the options of this fence are not understood: {info.strip()}",
            _FORM if mentions_exec else 'write every option as name="value", with the value in double quotes',
            line=line,
        ), ""
    language = match.group("lang") or ""
    if match.group("attrs") is not None:
        if re.search(r"\bexec\b", match.group("attrs")):
            return report("an executable block does not use the { ... } form", _FORM, line=line), ""
        return None, ""
    options = {m["key"]: m["value"] for m in RE_OPTIONS.finditer(match.group("options") or "")}
    if language == _FAULT_LANGUAGE:
        return report(f"{_FAULT_LANGUAGE} is no language for pages", "remove the fence", line=line), ""
    if "exec" not in options:
        if unknown := sorted(set(options) - _PLAIN_OPTIONS):
            return report(
                f"unknown option {', '.join(unknown)}: the fence would be shown as inline code",
                f"a fence that is only shown takes {', '.join(sorted(_PLAIN_OPTIONS))}; to execute it, {_FORM}",
                line=line,
            ), ""
        return None, ""
    id = options.get("id") or ""
    problem = _option_problem(language, options)
    if problem is None and id in _ids:
        problem = f"the id {id!r} is taken by the block at {_ids[id]}", "give every block on the site an id of its own"
    if problem:
        return report(*problem, line=line, block=id), ""
    _ids[id] = f"docs/{_page.src_uri}:{line}"
    _page.blocks[id] = _Block(line)
    return None, id


def _option_problem(language: str, options: dict[str, str | None]) -> tuple[str, str] | None:
    """(what is wrong with an executable block's options, the remedy)."""
    if language != "python":
        return f"exec of {language or 'no language'!r}: only python blocks are executed", f"{_FORM}, or drop exec"
    if unknown := sorted(set(options) - _EXEC_OPTIONS):
        return f"unknown option {', '.join(unknown)}", f"an executable block takes {', '.join(sorted(_EXEC_OPTIONS))}"
    for name in ("exec", "html"):
        if options.get(name) != "1":
            given = "is missing" if name not in options else f"is {options[name]!r}"
            return f'{name}="1" {given}', _FORM
    if not options.get("id"):
        return "the block has no id", 'add id="..."; messages and anchors name the block by it'
    if not _ID.fullmatch(options["id"]):
        return f"the id {options['id']!r} is not usable", "use letters, digits, - and _, and begin with a letter"
    if "source" in options and options["source"] not in _SOURCE_VALUES:
        return f"source={options['source']!r} does not exist", f"use one of {', '.join(sorted(_SOURCE_VALUES))}"
    return None


class _Includes:
    """Lines `--8<-- "file:section"`, tried with the very code that will expand them."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        config = makeExtension(**configuration).getConfigs() | {"check_paths": True, "auto_append": []}
        self._config, self._processor = config, None

    def check(self, line: str, number: int, block: str = "") -> Fault | None:
        bare = line.strip()
        match = SnippetPreprocessor.RE_ALL_SNIPPETS.match(bare)
        if match is None or match.group("block_marker"):
            return report(f"include not understood: {bare}", 'write --8<-- "path" or --8<-- "path:section", alone on its line',
                          line=number, block=block)  # fmt: skip
        target = match.group("snippet")[1:-1]
        if self._processor is None:
            self._processor = SnippetPreprocessor(self._config, types.SimpleNamespace(tab_length=4))
        try:
            text = self._processor.run([bare])
        except Exception as error:  # missing file or section, undecodable file, in whatever it includes itself
            return report(f"include {target!r}: {error}", "correct the path (from the project's root) or the section",
                          line=number, block=block)  # fmt: skip
        if not "".join(text).strip():
            return report(f"include {target!r} is empty", "name a file or section that has lines",
                          line=number, block=block)  # fmt: skip
        path, _, section = target.rpartition(":")
        if path and re.fullmatch(r"[A-Za-z][\w-]*", section) and not self._has_end(path, section):
            return report(
                f"include {target!r}: the section has no end, so the rest of the file would be shown",
                f"add the line # --8<-- [end:{section}] to {path}", line=number, block=block,
            )  # fmt: skip
        return None

    def _has_end(self, path: str, section: str) -> bool:
        found = self._processor.get_snippet_path(path.strip())
        text = Path(found).read_text(encoding="utf-8", errors="replace") if found else ""
        return re.search(rf"8<-+[ \t]+\[[ \t]*end[ \t]*:[ \t]*{re.escape(section)}[ \t]*\]", text) is not None


def finish_page(html: str) -> str:
    """After conversion: every executable block of the page must have run."""
    boxes = ""
    for id, block in _page.blocks.items():
        if not block.ran:
            boxes += report(
                "Markdown did not take this as a fence, so the block never ran",
                "check its indentation, and that a blank line precedes it", line=block.line, block=id,
            ).html()  # fmt: skip
    ids = collections.Counter(_HTML_ID.findall(html))
    if twice := sorted(id for id, n in ids.items() if n > 1):
        boxes += report(
            f"the page has more than one element with the id {', '.join(map(repr, twice))}: links reach the first only",
            "give each heading, figure and block an id of its own",
        ).html()  # fmt: skip
    return boxes + html


# ------------------------------------------------------------------------ running a block


def guard(config: Any) -> None:
    """Put the guard in place of markdown-exec's own fences in a MkDocs configuration.

    Only python stays executable: for other languages markdown-exec cannot tell a failure.
    """
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences[:] = [
        fence for fence in fences
        if fence.get("name") != _FAULT_LANGUAGE
        and not (fence.get("format") is markdown_exec.formatter and fence["name"] != "python")
    ]  # fmt: skip
    for fence in fences:
        if fence.get("format") is markdown_exec.formatter:
            fence["validator"], fence["format"] = _validator, _formatter
    fences.append({"name": _FAULT_LANGUAGE, "class": _FAULT_LANGUAGE, "format": _fault_formatter})
    markdown_exec.formatters["python"] = _run_block


def _fault_formatter(source: str, *args: Any, **kwargs: Any) -> str:
    at = int(source.strip()) if source.strip().isdecimal() else -1
    if 0 <= at < len(_faults):
        return _faults[at].html()
    return report(f"{_FAULT_LANGUAGE} is no language for pages", "remove the fence").html()


def _validator(language: str, inputs: dict[str, str], options: dict[str, Any], attrs: dict, md: Any) -> bool:
    if "exec" not in inputs:  # MARKDOWN_EXEC_AUTO would execute code that is only to be shown
        return False
    problem = _option_problem(language, inputs)
    if problem:  # only in an included file: check_page has seen the page's own fences
        options["problem"] = problem
        return True
    return markdown_exec.validator(language, inputs, options, attrs, md)


def _formatter(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    if "problem" in options:
        return report(*options["problem"]).html()
    id = options["id"]
    block = _page.blocks.get(id)
    if block is None:
        return report(
            "an executable block that does not stand in the page itself", "move it from the included file into the page",
            block=id,
        ).html()  # fmt: skip
    block.ran = True
    return markdown_exec.formatter(source, language, css_class, options, md, **kwargs)


def _run_block(**options: Any) -> str:
    """markdown-exec's formatter of python blocks: as its own, but every failure is a Fault."""
    id = options["id"]
    line = _page.blocks[id].line
    runner.weak_read.clear()
    try:
        html = markdown_exec.base_format(language="python", run=_execute, **options)
        if not html.strip():
            return report("the block printed nothing", "print its result", line=line, block=id).html()
        return html
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        fault = report(f"the block called sys.exit({error.code!r})", "let the block run to its end",
                       line=_line(error, id, line), block=id)  # fmt: skip
    except (ExperimentError, RecordError, RunError) as error:  # these say file and remedy themselves
        fault = report(str(error), line=_line(error, id, line), block=id)
    except BaseException as error:
        text = "".join(traceback.format_exception(error.with_traceback(_own_frames(error, id))))
        fault = report(text.strip(), "correct the block; it is run again at the next build" + weak_hint(),
                       line=_line(error, id, line), block=id)  # fmt: skip
    return fault.html()


def weak_hint(message: str | None = None) -> str:
    """What to add to a remedy where code met a record that is older than itself or of a smoke run ("" elsewhere).

    Args:
        message: name only experiments that it mentions.
    """
    ids = sorted(id for id in runner.weak_read if message is None or id in message)
    return f"; or, since the record is older than the code or of a smoke run, measure again: make refresh ONLY={','.join(ids)}" if ids else ""


def _execute(code: str, *, id: str, **_: Any) -> str:
    """Run a block's code; return what it printed."""
    buffer = io.StringIO()

    def echo(*values: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False) -> None:
        builtins.print(*values, sep=sep, end=end, file=buffer if file is None else file, flush=flush)

    # dataclasses and pickle look a class's module up in sys.modules.
    module = types.ModuleType("block_" + re.sub(r"\W", "_", id))
    module.print = echo
    name = _filename(id)
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    sys.modules[module.__name__] = module
    here, end_process = os.getpid(), os._exit

    def leave(status: int) -> None:
        if os.getpid() != here:  # a forked child may end itself
            end_process(status)
        raise RuntimeError(f"os._exit({status!r}) would end the build without a word")

    os._exit = leave
    try:
        exec(compile(code, name, "exec"), module.__dict__)
    finally:
        os._exit = end_process
        del sys.modules[module.__name__]
    return buffer.getvalue()


def _filename(id: str) -> str:
    return f"<code block: id {id}>"  # as markdown-exec names it; hooks.show finds the block's id by it


def _own_frames(error: BaseException, id: str) -> types.TracebackType | None:
    """The traceback from the block on, without the machinery above it."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename != _filename(id):
        tb = tb.tb_next
    return tb


def _line(error: BaseException, id: str, first: int) -> int:
    """The page's line at which the block failed; its fence's line where that is unknown."""
    if isinstance(error, SyntaxError) and error.filename == _filename(id):
        return first + (error.lineno or 0)
    found = [f.lineno or 0 for f in traceback.extract_tb(error.__traceback__) if f.filename == _filename(id)]
    return first + found[-1] if found else first
