"""Parts of the pages of plans: headings, lists and tables as HTML that loads nothing. Pictures are in pictures.py."""

import re
from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
body { font: 15px/1.5 sans-serif; color: #222; background: white; }
body { max-width: 1160px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 24px; margin-bottom: 4px; } h2 { font-size: 18px; margin: 32px 0 4px; } p { margin: 4px 0 10px; }
h3 { font-size: 15px; margin: 16px 0 4px; } pre { margin: 4px 0 10px; font-size: 13px; overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; } td, th { padding: 3px 12px 3px 0; text-align: right; }
td:first-child, th:first-child, td.word, th.word { text-align: left; } th { border-bottom: 1px solid #999; }
tr + tr td { border-top: 1px solid #eee; } .scroll { overflow-x: auto; }
.notice { padding: 8px 12px; margin: 12px 0 16px; border-left: 5px solid; overflow-wrap: anywhere; }
.notice span { white-space: nowrap; }
.good { color: #14532d; background: #e7f6ec; border-color: #2e9e4f; }
.bad { color: #7f1d1d; background: #fdeaea; border-color: #cf3a3a; }
"""


def html_page(title: str, parts: Iterable[str]) -> str:
    """A page of these parts, empty ones left out; title: plain text."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(part for part in parts if part)}</body></html>\n"
    )


def section(title: str, body: str) -> str:
    """A heading over HTML; nothing without a body."""
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def notice(line: str, *, is_good: bool) -> str:
    """A plain line that is read before anything else, in green or red."""
    # Browsers would break lines at the hyphens of flags, which are there to be copied.
    words = re.sub(r"--[\w-]+", r"<span>\g<0></span>", escape(line))
    return f'<p class="notice {"good" if is_good else "bad"}">{words}</p>'


def html_list(lines: Sequence[str]) -> str:
    """Plain lines as a list; nothing for none."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Plain texts in cells. words: how many columns are text; a head without any word is left out."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=word' if column < words else ''}>{escape(cell)}</{tag}>" for column, cell in enumerate(row)
        )

    lines = [f"<tr>{cells('th', head)}</tr>"] if any(head) else []
    lines += [f"<tr>{cells('td', row)}</tr>" for row in rows]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'
