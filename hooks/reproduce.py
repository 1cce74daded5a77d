"""The generated part of reproduce.md: every experiment with its records, then the claims.

Pure: ``body`` turns experiments, records and claims into Markdown (headings, so that the table of
contents has them) with HTML for the rest. Each section's id is the experiment's id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from hooks import claims as ledger
from hooks import experiments, inline, render, show

PAGE = "reproduce.md"
MARK = "<!-- records -->"  # where reproduce.md takes the generated part
STALE = "过期"
STATUS = {ledger.HOLDS: "holds", ledger.FAILS: "fails", ledger.UNMEASURED: "unmeasured", STALE: "stale"}  # as in the query of a filtered view
ROWS = 40  # of each table at most; a longer one names the record file that holds the rest


def body(load: Callable[[str], dict[str, Any]] | None = None) -> str:
    """Markdown of all experiments and claims of the project.

    Args:
        load: experiment id → {slug: Record}; default hooks.records.load.

    Raises:
        What reading an experiment, a record or the ledger raises.
    """
    if load is None:
        from hooks import records

        load = records.load
    found = experiments.all()
    loaded = {id: load(id) for id in found}
    states = [state for claim in ledger.load() for state in ledger.states(claim, loaded.__getitem__)]
    over = {id: [s for s in states if id in inline.experiments_in(s.claim.expr)] for id in found}
    parts = [form(), overview(found, loaded, over)]
    parts += [section(exp, loaded[id], over[id]) for id, exp in found.items()]
    parts += ["## 论断 { #claims }", claims(states)]
    # Settings and data may hold "[[", which hooks.inline would take for an expression.
    return "\n\n".join(parts).replace("[[", "&#91;[") + "\n"


def expand(markdown: str, load: Callable[[str], dict[str, Any]] | None = None) -> str:
    """A page with the generated part in place of MARK; a page without it comes back as it is."""
    return markdown.replace(MARK, body(load)) if MARK in markdown else markdown


def form() -> str:
    """The filter. records.js shows it and makes it work; without a script the whole page is there to read."""
    chips = "".join(
        f'<label><input type="checkbox" name="status" value="{value}"> {word}</label>' for word, value in STATUS.items()
    )
    return (
        '<form class="hf-find" role="search" aria-label="筛选实验与论断" hidden data-search-exclude>'
        '<label for="hf-find">筛选</label><input id="hf-find" type="search" name="find" autocomplete="off" '
        'placeholder="数字、实验、表、设备或论断">'
        f"<fieldset><legend>状态</legend>{chips}</fieldset>"
        '<button type="reset">清除</button><output for="hf-find" aria-live="polite"></output></form>'
    )


def status(records: Mapping[str, Any], states: Sequence[ledger.State]) -> str:
    """An experiment's states as the filter's values, separated by spaces."""
    words = {s.state for s in states} | ({ledger.UNMEASURED} if not any(r.mode == "full" for r in records.values()) else set())
    words |= {STALE} if any(r.stale for r in records.values()) else set()
    return " ".join(value for word, value in STATUS.items() if word in words)


def overview(found: Mapping[str, Any], loaded: Mapping[str, Mapping[str, Any]], over: Mapping[str, Sequence[ledger.State]]) -> str:
    """One line per experiment: needs, cost, and the state of its records."""
    rows = []
    for id, exp in found.items():
        records = list(loaded[id].values())
        full = [r for r in records if r.mode == "full"]
        state = (
            "未测量" if not records else "只有冒烟记录" if not full
            else "过期" if any(r.stale for r in full) else "最新"
        )  # fmt: skip
        names = "、".join(r.device["name"] for r in show.ordered(loaded[id])) if records else "—"
        rows.append({"id": id, "title": exp.title, "needs": f"{exp.needs}, {exp.memory_gib:g} GiB", "min": exp.minutes,
                     "device": names, "state": state, "claims": _counts(over[id]) or "—"})  # fmt: skip
    if not rows:
        return "还没有实验。"
    columns = {"id": "实验", "title": "内容", "needs": "需要", "min": ("约", "g", "分钟"), "device": "记录", "state": "状态",
               "claims": "论断"}  # fmt: skip
    html = render.table(rows, columns, caption="全部实验")
    for row in rows:  # the id leads to its section
        cell = f'<th scope="row">{escape(row["id"])}</th>'
        html = html.replace(cell, f'<th scope="row"><a href="#{escape(row["id"])}"><code>{escape(row["id"])}</code></a></th>')
    return html


def _counts(states: Sequence[ledger.State]) -> str:
    count = {w: sum(s.state == w for s in states) for w in (ledger.HOLDS, ledger.FAILS, ledger.UNMEASURED)}
    return "，".join(f"{word} {n}" for word, n in count.items() if n)


def section(exp: Any, records: Mapping[str, Any], states: Sequence[ledger.State] = ()) -> str:
    """One experiment: what it is, how to run it, and each device's record, folded."""
    needs = "CUDA GPU" if exp.needs == "cuda" else "CPU"
    out = [
        f'## {_plain(exp.title)} {{ #{exp.id} .hf-exp data-status="{status(records, states)}" }}',
        _facts({
            "实验": f"<code>{escape(exp.id)}</code>",
            "需要": f"{needs}，{exp.memory_gib:g} GiB",
            "时长": f"约 {exp.minutes:g} 分钟",
            "完整设置": _settings(exp.full),
        }),
        render.code(render.command(exp.id), "bash"),  # one to a block: whoever copies wants one of the two
        render.code(f"make refresh ONLY={exp.id}", "bash"),
    ]  # fmt: skip
    if not records:
        out.append(f'<p>{render.badge("未测量", "warning")} 还没有任何设备的记录。</p>')
    for record in sorted(records.values(), key=lambda r: (r.device["slug"] == "cpu", r.device["slug"])):
        out.append(_record(exp, record))
    if states:
        lines = "".join(
            f"<li>{render.badge(s.state, render.VERDICTS[s.state][0])} {escape(s.claim.text)}：{_value(s)}（接受 {escape(s.claim.band)}"
            f"{'，' + escape(s.device) if s.device else ''}）</li>" for s in states
        )
        out.append(f"<p><strong>论断</strong></p><ul>{lines}</ul>")
    out.append(f'<p><strong>用在</strong></p>\n<ul data-uses="{exp.id}"></ul>')
    return "\n\n".join(out)


def _record(exp: Any, record: Any) -> str:
    d = record.device
    parts = [f"{d['memory_gib']:g} GiB"]
    parts += [f"计算能力 {d['capability']}"] if d["capability"] else []
    parts += [f"{d['sm_count']} 个 SM"] if d["sm_count"] else []
    parts += [f"驱动 {d['driver']}"] if d["driver"] else []
    versions = "，".join(f"{k} {v}" for k, v in record.versions.items() if v)
    state = "与当前代码不符，待重测" if record.stale else "与当前代码一致"
    path = record.path
    facts = {
        "设备": escape(f"{d['name']}（{'，'.join(parts)}）"),
        "版本": escape(versions),
        "提交": f"<code>{escape(record.commit or '无')}</code>" + ("，含未提交改动" if record.dirty else ""),
        "时间": escape(f"{record.started:%Y-%m-%d %H:%M} UTC，用时 {render.seconds_text(record.seconds)}"),
        "设置": ("冒烟：" if record.mode == "smoke" else "完整：") + _settings(record.settings),
        "摘要": f"<code>{escape(record.digest[:19])}…</code> {state}",
        "文件": f'<a href="{escape(show.site_link(path, PAGE))}"><code>{escape(path)}</code></a>',
    }
    tables = ""
    for name, rows in record.tables.items():
        note = f"<p>共 {len(rows):,} 行，这里是前 {ROWS} 行；全部在 <code>{escape(path)}</code>。</p>" if len(rows) > ROWS else ""
        body = render.text_table(rows[:ROWS], exp.tables.get(name, {}))
        tables += f'<details class="hf-data"><summary>表 {escape(name)}（{len(rows):,} 行）</summary>{body}{note}</details>'
    # The search plugin ends an exclusion at the first closing tag of that name, so an element that
    # holds no other of its kind must carry it.
    return (
        f'<section data-search-exclude><details class="hf-data hf-record"><summary><strong>{escape(d["name"])}</strong> · {escape(str(record.started)[:10])}'
        f"{render.state_badges(record)}</summary>{_facts(facts)}{tables}</details></section>"
    )


def _value(state: ledger.State) -> str:
    return "—" if state.value is None else f"{state.value:.4g}" + (f"（{state.weak}）" if state.weak else "")


def _facts(items: Mapping[str, str]) -> str:
    return '<dl class="hf-facts">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in items.items()) + "</dl>"


def _settings(settings: Mapping[str, Any]) -> str:
    return f"<code>{escape(json.dumps(settings, ensure_ascii=False))}</code>" if settings else "无"


def _plain(text: str) -> str:
    """A title as heading text: characters that Markdown or attr_list would read are escaped."""
    return "".join(f"&#{ord(c)};" if c in "\\`*_{}[]#<>&" else c for c in text)


def claims(states: Sequence[ledger.State]) -> str:
    """The ledger as a table: one line per claim and device."""
    if not states:
        return "账本里还没有论断。"
    rows = []
    for s in states:
        text = s.claim.text + (f"（已知不成立：{s.claim.known}）" if s.claim.known and s.state == ledger.FAILS else "")
        rows.append({"text": text, "page": s.claim.page, "source": s.claim.source, "accept": s.claim.band,
                     "device": s.device or "—", "value": _value(s), "state": s.state})  # fmt: skip
    count = {w: sum(s.state == w for s in states) for w in (ledger.HOLDS, ledger.FAILS, ledger.UNMEASURED)}
    columns = {"text": "论断", "state": "状态", "value": "测得", "accept": "接受范围", "device": "设备", "page": "页面", "source": "出处"}
    html = render.table(rows, columns, caption="论断与测量：" + "，".join(f"{k} {v}" for k, v in count.items()))
    for page in {r["page"] for r in rows}:
        link = "../" if page == "index.md" else f"../{page.removesuffix('.md')}/"
        html = html.replace(f"<td>{escape(page)}</td>", f'<td><a href="{escape(link)}">{escape(page.removesuffix(".md"))}</a></td>')
    for source in {r["source"] for r in rows if r["source"] not in ("spec", "project")}:
        html = html.replace(f"<td>{escape(source)}</td>", f'<td><a href="{escape(source)}">来源</a></td>')
    return html.replace("<td>spec</td>", "<td>选题说明</td>").replace("<td>project</td>", "<td>本项目的目标</td>")
