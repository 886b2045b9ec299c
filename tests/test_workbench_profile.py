"""profile: the command, reading ncu's output, and what is said where it cannot run."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from marlin_cutlass import profile
from marlin_cutlass.cli import app as whole

NAME = "w4a16_hopper_f16_g128_m16_n128k128_w2x1_p8_dp_c2"
COLUMNS = {
    "ID": ("0", ""),
    "Kernel Name": (NAME, ""),
    "gpu__time_duration.sum": ("5,120", "ns"),
    "dram__bytes_read.sum": ("8650752", "byte"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("62.5", "%"),
    "launch__registers_per_thread": ("96", "register/thread"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("n/a", ""),
}


def csv_text() -> str:
    def line(cells) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    rows = [COLUMNS, (unit for _, unit in COLUMNS.values()), (v for v, _ in COLUMNS.values())]
    return "==PROF== Connected to process 7\n" + "\n".join(map(line, rows)) + "\n"


def make_ncu(folder, monkeypatch, output: str, status: int = 0):
    """A stand-in for ncu that records its arguments."""
    path = folder / "ncu"
    script = f"import json, sys; json.dump(sys.argv[1:], open({str(folder / 'argv')!r}, 'w'))"
    path.write_text(f"#!{sys.executable}\n{script}\nprint({output!r})\nsys.exit({status})\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder / "argv"


def run(*arguments: str):
    return CliRunner().invoke(whole, ["profile", *arguments])


def test_counters_are_explained(tmp_path, monkeypatch):
    argv = make_ncu(tmp_path, monkeypatch, csv_text())
    done = run("16x4096x4096", "--kernel", NAME, "--zeros")
    assert done.exit_code == 0, done.output
    for text in (NAME, "5.12 us", "8.65 MB", "62.5 %", "not on this GPU", "n/a", "96 register"):
        assert text in done.output
    given = json.loads(argv.read_text())
    assert given[given.index("--launch-skip") + 1] == str(profile.WARM_UP)
    inner = given[given.index("marlin_cutlass.profile") + 1 :]
    assert inner[:2] == ["16x4096x4096", "--inside"] and "--zeros" in inner
    assert inner[-2:] == ["--kernel", NAME]


def test_a_mistyped_kernel_is_named_before_anything_runs():
    done = run("16x4096x4096", "--kernel", "m16_n128")
    text = " ".join(done.output.split())
    assert done.exit_code == 2 and "kernel='w4a16_m16_n128' is malformed" in text


def test_json(tmp_path, monkeypatch):
    make_ncu(tmp_path, monkeypatch, csv_text())
    data = json.loads(run("16x4096x4096", "--json").output)
    assert data["dram__bytes_read.sum"] == ["8650752", "byte"]


def test_a_missing_ncu_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run("16x4096x4096")
    assert done.exit_code == 2
    text = " ".join(done.output.split())
    assert "ncu (Nsight Compute) was not found: install it" in text and "Traceback" not in text


@pytest.mark.parametrize(
    "output, status, words",
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", 1, "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== the application returned an error", 9, "ncu failed (9)"),
        ("==WARNING== No kernels were profiled.", 0, "ncu measured no kernel"),
    ],
)
def test_failures_say_why(tmp_path, monkeypatch, output, status, words):
    make_ncu(tmp_path, monkeypatch, output, status)
    done = run("16x4096x4096")
    assert done.exit_code == 2 and words in " ".join(done.output.split())


def test_a_malformed_problem_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "MxNxK" in run("16x4096").output


def test_every_counter_is_asked_for_once():
    metrics = [counter.metric for counter in profile.COUNTERS]
    assert len(metrics) == len(set(metrics))
    argv = profile.command("ncu", ["x"])
    assert argv[argv.index("--metrics") + 1] == ",".join(metrics)
