"""The report page, in a real headless browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from generator.arch import ARCHS, GPUS
from generator.problem import ProblemShape
from marlin_cutlass.explore import Explorer
from marlin_cutlass.explore_measure import Measured
from marlin_cutlass.explore_page import page, save_page
from marlin_cutlass.explore_rows import Exploration, add_figures, sort_rows

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
browser = pytest.mark.skipif(BROWSER is None, reason="needs a headless Chromium")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Exploration:
    """Ten variants of one problem; half of them measured, one wrong."""
    problem = ProblemShape(16, 4096, 4096)
    folder = tmp_path_factory.mktemp("none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARLIN_CUTLASS_BUILD", str(folder))
        patch.setenv("MARLIN_CUTLASS_JIT_CACHE", str(folder))
        knobs = {"m_tile": (8, 16), "n_sm": (128, 256), "k_sm": (128,), "warps_k": (1,)}
        explorer = Explorer(problem, ARCHS["sm_90a"], GPUS["H200"], knobs, None, 10, 0)
        found = explorer.run()
    for i, row in enumerate(found.rows[:5]):
        measured = Measured(row.name, 9.0 - i, 8.0 - i, 7.0 - i, 3e-4)
        add_figures(row, measured, problem, found.limit_us)
    add_figures(found.rows[5], Measured(found.rows[5].name, refused="wrong: </script>"), problem, 1)
    found.rows[1].choice = True
    found.rows = sort_rows(found.rows)
    found.measured_on = "NVIDIA H200"
    found.notes.append("<b>a note</b>")
    return found


class Page(HTMLParser):
    """Tags with their attributes, and the text of the ranking's cells by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        if self._cell and self.rows:
            self.rows[-1][-1] += data

    def count(self, tag: str, **attributes: str) -> int:
        return sum(
            t == tag and all(a.get(k) == v for k, v in attributes.items()) for t, a in self.tags
        )


def render(path: Path, script: str = "") -> Page:
    """The page's document after its scripts, and `script`, have run."""
    text = path.read_text()
    path = path.with_name("run.html")
    path.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    argv = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert 'data-ready="yes"' in done.stdout, done.stdout[-500:] + done.stderr[-500:]
    return Page(re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S))


@pytest.fixture
def path(found, tmp_path) -> Path:
    save_page(found, tmp_path / "report.html")
    return tmp_path / "report.html"


def test_the_page_loads_nothing(found):
    text = page(found)
    rest = text.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in rest and "src=" not in rest and "@import" not in rest
    assert text.count("</script>") == 2, "data cannot end the script"
    assert "@DATA@" not in text and "@TITLE@" not in text


@browser
def test_every_part_is_drawn(path, found):
    shown = render(path)
    assert len(shown.rows) == 1 + len(found.rows)
    assert shown.count("polyline", id="roof") == 1
    circles = shown.count("circle")
    assert circles >= len(found.rows) - 1 + len(found.sweep)
    drawn = [a.get("data-knob") for t, a in shown.tags if t == "svg" and "data-knob" in a]
    varied = {k for k in found.rows[0].knobs if len({r.knobs[k] for r in found.rows}) > 1}
    assert "m_tile" in drawn and set(drawn) <= varied
    for tag, attributes in shown.tags:
        numbers = " ".join(str(attributes.get(k, "")) for k in ("x", "y", "cx", "cy", "points"))
        assert "NaN" not in numbers and "Infinity" not in numbers, (tag, attributes)


@browser
def test_the_table_sorts_and_filters(path, found):
    def column(shown: Page, title: str) -> list[str]:
        at = shown.rows[0].index(title)
        return [row[at] if len(row) > at else "" for row in shown.rows[1:]]

    click = "document.querySelector('th[data-column=\"predicted us\"] button').click();"
    up = [float(x) for x in column(render(path, click), "predicted us")]
    down = [float(x) for x in column(render(path, click * 2), "predicted us")]
    assert up == sorted(up) and down == sorted(up, reverse=True)
    wanted = found.rows[0].name
    typed = f"const f = document.getElementById('filter'); f.value = '{wanted}';"
    shown = render(path, typed + "f.dispatchEvent(new Event('input'));")
    assert len(shown.rows) == 2


@browser
def test_empty_cells_stay_below_and_wrong_ones_are_marked(path):
    click = "document.querySelector('th[data-column=\"us\"] button').click();"
    shown = render(path, click)
    assert shown.count("tr", **{"class": "refused"}) == 1
    times = [row[2] for row in shown.rows[1:]]
    assert all(times[:5]) and not any(times[5:])
    assert any(row[-1] == "EXCLUDED: wrong: </script>" for row in shown.rows)
    assert shown.count("b") == 0, "notes are text"


@browser
def test_without_measurements(found, tmp_path):
    bare = Exploration(**{**vars(found), "measured_on": None, "sweep": [], "rows": found.rows[6:]})
    save_page(bare, tmp_path / "bare.html")
    assert len(render(tmp_path / "bare.html").rows) == 1 + len(bare.rows)
