"""One self-contained HTML page of an exploration: data, styles and drawing code in one file."""

from __future__ import annotations

import html
import json
from pathlib import Path

from marlin_cutlass.explore_rows import Exploration

TEMPLATE = Path(__file__).with_name("explore_page.html")


def page(found: Exploration) -> str:
    """The page's text. It loads nothing from anywhere."""
    p = found.problem
    data = json.dumps(found.to_json(), allow_nan=False).replace("</", "<\\/")  # no end of script
    title = html.escape(f"{p.m}x{p.n}x{p.k} on {found.measured_on or found.gpu}")
    return TEMPLATE.read_text().replace("@TITLE@", title).replace("@DATA@", data)


def save_page(found: Exploration, path: Path) -> None:
    """Writes the page aside and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(page(found))
    aside.replace(path)
