"""Tables, plots and command lines of the benchmarks, from recorded figures."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import peers, shapes, splitk, splitk_tables, tables
from benchmarks.candidates import PEERS, parse_peers
from marlin_cutlass.bench import Report, Result

# us on an H200, 2026-11-29 (docs/performance.md gives the method)
TIMES = {
    (4096, 4096, 1): {"ours": 5.6, "ours PDL": 4.7, "cuBLAS fp16": 13.5, "humming": 8.6},
    (4096, 4096, 16): {"ours": 6.2, "ours PDL": 5.3, "cuBLAS fp16": 14.2, "humming": 9.5},
    (28672, 4096, 64): {"ours": 29.5, "ours PDL": 28.3, "cuBLAS fp16": 64.6, "humming": 41.1},
}


def make_report():
    results = []
    for (n, k, m), row in TIMES.items():
        for name, us in row.items():
            pdl = {"ours": False, "ours PDL": True}.get(name)
            results.append(
                Result(name, m, n, k, 128, "float16", pdl=pdl, us=us, limit_us=4.1, note="w4a16_v")
            )
    results.append(
        Result("gemlite", 1, 4096, 4096, 128, "float16", status="failed: no config", limit_us=4.1)
    )
    return Report(
        "peers", {"gpu": "NVIDIA H200", "date": "2026-11-29"}, results, {"triton": "absent"}
    )


def text_of(renderable) -> str:
    console = Console(width=250, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_best_peer_and_ratio():
    cell = tables.cells(make_report().results)[(4096, 4096, 1)]
    assert tables.best_peer(cell).candidate == "humming"
    assert tables.ratio_to_best(cell) == pytest.approx(5.6 / 8.6)
    assert tables.ratio_to_best(cell, "ours PDL") == pytest.approx(4.7 / 8.6)
    assert tables.ratio_to_best({"ours": cell["ours"]}) is None
    assert tables.ratio_to_best({"humming": cell["humming"]}) is None


def test_geometric_mean():
    assert tables.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert tables.geometric_mean([]) is None


def test_peers_table_shows_times_percentages_and_failures():
    text = text_of(tables.peers_table(make_report()))
    row = next(line for line in text.splitlines() if "4096 x 4096" in line and " 1 " in line)
    assert all(part in row for part in ("4.1", "5.6", "73", "4.7", "87", "13.5", "8.6", "humming"))
    assert "failed" in row and "0.65" in row and " v " in row
    assert "NVIDIA H200" in text and "2026-11-29" in text


def test_summary_names_means_skipped_and_failed():
    lines = "\n".join(tables.summary(make_report()))
    mean = (5.6 / 8.6 * 6.2 / 9.5 * 29.5 / 41.1) ** (1 / 3)
    assert f"ours / best peer: geometric mean {mean:.3f}, worst 0.72, over 3 cells" in lines
    assert "skipped triton: absent" in lines
    assert "gemlite at 4096 x 4096, M = 1: failed: no config" in lines


def test_unfinished_run_says_so():
    report = make_report()
    report.finished = False
    assert "budget" in tables.caption(report)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_is_drawn_from_a_record(tmp_path, suffix):
    path = tables.plot_peers(make_report(), tmp_path / f"plot.{suffix}")
    head = path.read_bytes()[:60]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"xml" in head
    assert path.stat().st_size > 5000
    with pytest.raises(ValueError, match="nothing to plot"):
        tables.plot_peers(Report("empty", {}), tmp_path / "x.png")


# SplitK grid: chosen, two forced variants of ours, the Triton kernels
GRID = {
    (4096, 1): (5.7, {"dp": 8.0, "split2": 5.6}, 19.0, 25.7),
    (4096, 16): (6.6, {"dp": 8.1, "split2": 6.0}, 16.6, 23.3),
    (512, 1): (3.0, {"dp": 3.0}, 6.0, 7.5),
}


def make_grid():
    results = []
    for (n, m), (chosen, forced, triton, dp) in GRID.items():
        row = {"ours": chosen, "Triton SplitK 4": triton, "Triton data-parallel": dp}
        results += [Result(name, m, n, n, 128, "float16", us=us) for name, us in row.items()]
        results += [
            Result(f"w4a16_x_{tag}", m, n, n, 128, "float16", us=us, note=tag)
            for tag, us in forced.items()
        ]
    return Report("SplitK grid", {"gpu": "NVIDIA H200"}, results)


def test_splitk_measures():
    cell = tables.cells(make_grid().results)[(4096, 4096, 16)]
    assert splitk_tables.gain_over_dp(cell) == pytest.approx(8.1 / 6.6 - 1)
    assert splitk_tables.chosen_over_best(cell) == pytest.approx(1.1)
    assert splitk_tables.over_triton(cell) == pytest.approx(16.6 / 6.6)
    assert splitk_tables.gain_over_dp({"ours": cell["ours"]}) is None


def test_splitk_averages_stand_beside_the_papers():
    lines = "\n".join(splitk_tables.averages(make_grid()))
    gains = [8.0 / 5.7 - 1, 8.1 / 6.6 - 1, 0.0]
    assert f"{100 * sum(gains) / 3:+.0f} % on average" in lines and "+124 % on H100" in lines
    assert "within 3 % of the best on 2 of 3 cells" in lines
    assert "off at n = k = 4096, m = 16: 1.10" in lines
    fast = [19.0 / 5.7, 16.6 / 6.6, 2.0]
    assert f"{sum(fast) / 3:.2f}x as fast on average, 2.00x at the worst cell" in lines


def test_splitk_table_and_plot(tmp_path):
    text = text_of(splitk_tables.splitk_table(make_grid()))
    row = next(line for line in text.splitlines() if "4096" in line and "16.6" in line)
    assert all(part in row for part in ("6.6", "8.1", "6.0", "23.3", "+23 %", "1.10"))
    path = splitk_tables.plot_splitk(make_grid(), tmp_path / "grid.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def variant(**changes):
    row = {
        "name": "v",
        "family": "hopper",
        "dtype": "f16",
        "zeros": False,
        "group_size": 128,
        "m_tile": 16,
        "n_sm": 64,
        "decomposition": "split_k",
        "split": 2,
    }
    return row | changes


def test_forced_variants_are_those_that_fit_the_cell():
    built = [
        variant(name="a"),
        variant(name="b", split=4),
        variant(name="dp8", m_tile=8, decomposition="data_parallel", split=1),
        variant(name="dp16", decomposition="data_parallel", split=1),
        variant(name="wide", n_sm=256),
        variant(name="bf", dtype="bf16"),
        variant(name="z", zeros=True),
        variant(name="g", group_size=32),
    ]
    assert splitk.forced_variants(built, 1, 128) == [
        ("split2", "a"),
        ("split4", "b"),
        ("dp", "dp8"),
    ]
    assert ("dp", "dp16") in splitk.forced_variants(built, 16, 4096)
    assert ("split2", "wide") in splitk.forced_variants(built, 16, 4096)
    assert splitk.forced_variants(built, 17, 4096) == []


def test_shapes_and_batch_sizes_are_parsed():
    assert shapes.parse_shapes("4096x4096, default")[:2] == [(4096, 4096), (28672, 4096)]
    assert len(shapes.parse_shapes("llama3-8b,llama3-8b")) == 4
    assert shapes.parse_ms("1,8, 16") == [1, 8, 16]
    for bad in ("4096", "axb", "0x5", "", "llama9"):
        with pytest.raises(ValueError, match="shape"):
            shapes.parse_shapes(bad)
    for bad in ("", "0", "1,x", "-1"):
        with pytest.raises(ValueError, match="ms="):
            shapes.parse_ms(bad)


def test_peers_are_parsed():
    assert parse_peers("all") == list(PEERS)
    assert parse_peers("none") == []
    assert parse_peers("humming, cublas") == ["humming", "cublas"]
    with pytest.raises(ValueError, match="machete"):
        parse_peers("machete")


@pytest.mark.parametrize(
    ("module", "report", "words"),
    [(peers, make_report(), "geometric mean"), (splitk, make_grid(), "on average")],
)
def test_recorded_run_is_shown_again_without_a_gpu(tmp_path, module, report, words):
    import typer

    app = typer.Typer()
    app.command()(module.main)
    record = report.save(tmp_path / "run.json")
    plot = tmp_path / "run.png"
    done = CliRunner().invoke(app, ["--replot", str(record), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert words in done.output and plot.is_file()


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (peers, ["--shapes", "12"], "shape '12'"),
        (peers, ["--ms", "x"], "ms='x'"),
        (peers, ["--peers", "machete"], "machete"),
        (peers, ["--dtype", "fp8"], "dtype='fp8'"),
        (peers, ["--budget", "-1"], "budget=-1"),
        (splitk, ["--sizes", "500"], "multiple of 128"),
    ],
)
def test_bad_arguments_are_named(module, arguments, words):
    import typer

    app = typer.Typer(rich_markup_mode=None)
    app.command()(module.main)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())
