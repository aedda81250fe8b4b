"""The look of a run report: style sheet, tables, and a rollout as readable HTML.

In: text and records. Out: HTML fragments, every value from the run escaped.

Source: row X3.
Choice: one light theme in plain CSS, no script: a rollout opens and closes by `<details>`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from composer2.inspect_run import call_text, changed_lines, numbered

CSS = """
:root{--ink:#1f2328;--soft:#5a6068;--line:#e2e5e9;--wash:#f6f7f9;--blue:#2456a6;--green:#1f7a44;--red:#b3372f}
*{box-sizing:border-box}
body{margin:0;background:#fff;color:var(--ink);
font:16px/1.6 Charter,"Bitstream Charter","Iowan Old Style",Georgia,serif}
main{max-width:62rem;margin:0 auto;padding:2.5rem 1.25rem 5rem}
h1,h2,nav,th,td,summary,figcaption,.tag,.missing,.key{
font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .3rem;letter-spacing:-.01em}
h2{font-size:1.25rem;margin:3.2rem 0 .4rem;padding-top:.8rem;border-top:1px solid var(--line)}
p{max-width:44rem;margin:.4rem 0 1rem}.lead{color:var(--soft)}
nav{font-size:.85rem;line-height:1.9;margin:1.2rem 0 0}nav a{color:var(--blue);text-decoration:none;margin-right:.9rem}
.keys{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;margin:1.6rem 0}
.key{background:var(--wash);border-radius:.5rem;padding:.7rem .9rem}
.key b{display:block;font-size:1.35rem;font-weight:600;font-variant-numeric:tabular-nums}
.key span{font-size:.78rem;color:var(--soft);line-height:1.35;display:block}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1.4rem 2rem}
figure{margin:0}figure svg{width:100%;height:auto;max-width:38rem;display:block}
figcaption{font-size:.82rem;line-height:1.45;color:var(--soft);margin-top:.3rem;max-width:36rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.86rem;margin:.6rem 0 1rem;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--soft);font-weight:500;border-bottom:1px solid #c9ced4}
th,td{padding:.32rem 1.1rem .32rem 0;vertical-align:top;white-space:nowrap}td{border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right}
.missing{color:var(--soft);font-size:.9rem;background:var(--wash);padding:.6rem .9rem;border-radius:.4rem}
details{border:1px solid var(--line);border-radius:.5rem;margin:.7rem 0;padding:0 1rem}
summary{cursor:pointer;padding:.65rem 0;font-size:.9rem}details[open]{padding-bottom:1rem}
pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--wash);border-radius:.4rem;
padding:.7rem .9rem;overflow-x:auto;margin:.4rem 0}
.turn{border-left:3px solid var(--line);padding:.05rem 0 .05rem .9rem;margin:.8rem 0}
.turn.assistant{border-color:var(--blue)}
.who{font:600 .75rem system-ui,sans-serif;text-transform:uppercase;
letter-spacing:.05em;color:var(--soft)}
.call{color:var(--blue)}.good,.add{color:var(--green)}.bad,.del{color:var(--red)}
.tag{font-size:.75rem;padding:.1rem .5rem;border-radius:1rem;background:var(--wash);margin-right:.4rem;
white-space:nowrap}
@media(max-width:40rem){main{padding:1.5rem 1rem 4rem}h1{font-size:1.5rem}}
@media print{details{break-inside:avoid}nav{display:none}}
"""


def escape(value: Any) -> str:
    """Text for HTML."""
    return html.escape(str(value))


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(anchor: str, title: str, lead: str, *parts: str | None) -> str:
    """A section; when all its parts are missing it says so instead."""
    present = [part for part in parts if part]
    body = "\n".join(present) if present else '<p class="missing">Not in this run.</p>'
    return f'<section id="{anchor}">\n<h2>{escape(title)}</h2>\n<p class="lead">{escape(lead)}</p>\n{body}\n</section>'


def figures(*pairs: tuple[str | None, str]) -> str | None:
    """Figures (SVG, caption) side by side where the screen is wide enough; missing ones are left out."""
    drawn = [
        f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in pairs if svg is not None
    ]
    return f'<div class="figures">{"".join(drawn)}</div>' if drawn else None


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str | None:
    """A table; the first `text_columns` columns are text, the others numbers. No rows: None."""
    if not rows:
        return None

    number = ' class="n"'

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{number if i >= text_columns else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def key_numbers(items: Sequence[tuple[str, str]]) -> str | None:
    """Large figures (value, what it is)."""
    cells = "".join(
        f'<div class="key"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in items
    )
    return f'<div class="keys">{cells}</div>' if items else None


def rollout_html(record: Mapping[str, Any], *, is_open: bool = False) -> str:
    """One rollout turn by turn: the task, every message with calls and results, the change, the reward terms."""
    passed = bool(record.get("passed"))
    stats = record.get("stats", {})
    facts = [
        f"{record.get('split', '')} step {record.get('step', 0)}".strip(),
        record.get("kind") or record.get("category", ""),
        f"{stats.get('num_turns', 0)} turns",
        f"{stats.get('sampled_tokens', 0)} tokens",
        f"{stats['num_summaries']} summaries" if stats.get("num_summaries") else "",
        f"reward {record.get('reward', 0.0):.3f}",
        record.get("status", ""),
    ]
    tags = "".join(f'<span class="tag">{escape(fact)}</span>' for fact in facts if fact)
    verdict = f'<b class="{"good" if passed else "bad"}">{"passed" if passed else "not passed"}</b>'
    parts = []
    if record.get("instruction"):
        parts.append(f"<p>{escape(record['instruction'])}</p>")
    for path, text in record.get("files", {}).items():
        parts.append(f'<div class="who">{escape(path)}</div><pre>{escape(numbered(text))}</pre>')
    turn = 0
    for message in record.get("messages", []):
        turn += message["role"] == "assistant"
        parts.append(_message_html(message, turn))
    parts.append(_outcome_html(record))
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{verdict} &nbsp;{tags}</summary>\n{''.join(parts)}\n</details>"


def _message_html(message: Mapping[str, Any], turn: int) -> str:
    role = str(message["role"])
    who = f"turn {turn} · {role}" if role == "assistant" else role
    lines = [f'<span class="call">→ {escape(call_text(call))}</span>' for call in message.get("tool_calls", [])]
    for result in message.get("tool_results", []):
        mark = "bad" if result.get("is_error") or str(result["content"]).startswith(("fail", "error")) else "good"
        lines.append(f'<span class="{mark}">← {escape(result["content"])}</span>')
    text = f"<p>{escape(message['content'])}</p>" if message.get("content") else ""
    block = "<pre>" + "\n".join(lines) + "</pre>" if lines else ""
    return f'<div class="turn {escape(role)}"><div class="who">{escape(who)}</div>{text}{block}</div>'


def _outcome_html(record: Mapping[str, Any]) -> str:
    lines = []
    for line in changed_lines(record):
        mark = {"+": "add", "-": "del"}.get(line[0], "")
        lines.append(f'<span class="{mark}">{escape(line)}</span>')
    parts = ['<div class="who">change left behind</div><pre>' + "\n".join(lines) + "</pre>"] if lines else []
    components = record.get("reward_components", {})
    rows = [[name, f"{value:+.4f}"] for name, value in components.items()]
    rows += [[f"event: {name}", str(count)] for name, count in record.get("events", {}).items()]
    parts.append(table(["reward term or event", "value"], rows) or "")
    if record.get("error"):
        parts.append(f'<p class="bad">{escape(record["error"])}</p>')
    return "".join(parts)
