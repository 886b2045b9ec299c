"""Faults while building and converting: killed, full, read-only, at the same time.

After every fault the next run completes, and what was interrupted is never taken for whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_cuda
import pytest
import torch
from safetensors.torch import save_file

import marlin_cutlass as mc
from generator import compile as compiling
from marlin_cutlass import dispatch
from marlin_cutlass.checkpoint import (
    ConversionReport,
    _write_folder,
    new_folder,
    plan_conversion,
)
from marlin_cutlass.errors import TableError
from marlin_cutlass.formats.bits import pack_nibbles
from marlin_cutlass.locking import folder_lock
from marlin_cutlass.quantize.resume import ResumeFolder

ROOT = Path(__file__).resolve().parent.parent
NAMES = [f"w4a16_ampere_f16_g{g}_m16_n128k128_w2x2_p4_striped_c1" for g in (128, 64, "col")]
ONLY = [word for name in NAMES for word in ("--only", name)]

# A compiler that does what the file `mode` beside it says for the kernel named in it.
NVCC = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.88")
    sys.exit(0)
source, target = sys.argv[-1], sys.argv[sys.argv.index("-o") + 1]
mode = pathlib.Path(__file__).with_name("mode")
what, name = mode.read_text().split() if mode.exists() else ("", "-")
print("ptxas info    : Used 96 registers, used 1 barriers")
if name in source:
    open(target, "w").write("half a cub")
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "nothing":
        os.unlink(target)
        sys.exit(0)
    if what == "empty":
        open(target, "w").close()
        sys.exit(0)
    if what == "hangs":
        pathlib.Path(__file__).with_name("hanging").write_text(str(os.getpid()))
        time.sleep(60)
    if what == "other":
        open(source, "a").write("// another build")
open(target, "w").write("cubin of " + pathlib.Path(source).name)
"""


class Build:
    """build.py in a folder of its own, with the compiler above."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out" / "sm_86"
        self.nvcc = folder / "nvcc"
        self.nvcc.write_text(NVCC)
        self.nvcc.chmod(0o755)
        self.command = [sys.executable, str(ROOT / "build.py"), "--arch", "sm_86", "--jobs", "2"]
        self.command += ["--out", str(folder / "out"), *ONLY]
        environment = {**os.environ, "NVCC": str(self.nvcc), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("CXX", None)
        self.options = {"cwd": folder, "env": environment, "text": True}
        self.pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def mode(self, what: str, name: str = NAMES[1]) -> None:
        self.nvcc.with_name("mode").write_text(f"{what} {name}")

    def heal(self) -> None:
        self.nvcc.with_name("mode").unlink(missing_ok=True)

    def run(self, **options) -> subprocess.CompletedProcess:
        done = subprocess.run(self.command, **self.options, **self.pipes, **options)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def start(self) -> subprocess.Popen:
        options = {**self.options, **self.pipes, "start_new_session": True}

        def heed_interrupts() -> None:  # a suite in the background of a shell ignores them
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        return subprocess.Popen(self.command, preexec_fn=heed_interrupts, **options)

    def whole(self) -> list[str]:
        """Names in the manifest, each with a cubin that it describes; nothing half written."""
        table = dispatch.load_table(self.out)
        for kernel in table.kernels:
            data = (self.out / kernel.file).read_bytes()
            assert data == f"cubin of {kernel.name}.cu".encode()
            assert hashlib.sha256(data).hexdigest() == kernel.sha256
        return sorted(kernel.name for kernel in table.kernels)

    def completes(self) -> None:
        """The next run leaves the whole table and nothing else."""
        self.heal()
        done = self.run()
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.whole() == sorted(NAMES)


@pytest.fixture
def build(tmp_path) -> Build:
    return Build(tmp_path)


# ---- building ----


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("killed", "nvcc was killed by a signal (-9)"),
        ("nothing", "nvcc wrote no cubin"),
        ("empty", "nvcc wrote no cubin"),
        ("other", "was changed by another build"),
    ],
)
def test_a_compiler_that_fails_in_its_own_way(build, what, text):
    """The other kernels are built and listed; the failed one is named and leaves nothing."""
    build.mode(what)
    done = build.run()
    assert done.returncode == 1 and text in done.stderr and NAMES[1] in done.stderr
    assert build.whole() == sorted([NAMES[0], NAMES[2]])
    assert not (build.out / f"{NAMES[1]}.cubin").exists()
    build.completes()


def test_a_failure_takes_an_older_cubin_of_that_kernel_out_of_the_table(build):
    build.completes()
    (build.out / f"{NAMES[1]}.cubin").write_text("damaged on disk")
    build.mode("killed")
    assert build.run().returncode == 1
    assert build.whole() == sorted([NAMES[0], NAMES[2]])
    build.completes()


def kill_while_compiling(build: Build, number: int) -> None:
    """Starts a build whose second kernel hangs, and kills its process group."""
    build.mode("hangs")
    hanging = build.nvcc.with_name("hanging")
    process = build.start()
    deadline = time.monotonic() + 30
    while not hanging.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert hanging.exists(), process.communicate()
    os.killpg(process.pid, number)
    process.communicate()
    hanging.unlink()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_build_is_completed_by_the_next(build, number):
    kill_while_compiling(build, number)
    assert not (build.out / f"{NAMES[1]}.cubin").exists()
    assert not (build.out / "manifest.json").exists()
    build.completes()


def test_a_killed_rebuild_leaves_no_table_that_lies(build):
    """What the old manifest says and the launcher loads is compared by hash."""
    build.completes()
    for name in NAMES:
        (build.out / f"{name}.cubin").write_text("of another compiler")
    kill_while_compiling(build, signal.SIGKILL)
    table = dispatch.load_table(build.out)
    for kernel in table.kernels:
        data = (build.out / kernel.file).read_bytes()
        same = hashlib.sha256(data).hexdigest() == kernel.sha256
        assert same == (data == f"cubin of {kernel.name}.cu".encode())
    build.completes()


def test_what_killed_builds_left_is_removed_a_day_later(build):
    kill_while_compiling(build, signal.SIGKILL)
    left = list(build.out.glob(".building-*"))
    assert left
    build.completes()
    assert all(path.exists() for path in left)  # another build may be using them
    yesterday = time.time() - compiling.ABANDONED_SECONDS - 60
    for path in left:
        os.utime(path, (yesterday, yesterday))
    (build.out / f"{NAMES[0]}.cubin").unlink()
    build.completes()
    assert not list(build.out.glob(".building-*"))


def test_two_builds_at_once(build):
    first, second = build.start(), build.start()
    outputs = [process.communicate() for process in (first, second)]
    assert first.returncode == second.returncode == 0, outputs
    assert build.whole() == sorted(NAMES)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; skipped where it cannot be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting needs privileges")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("left", [0, 8192, 20480])
def test_a_full_disk_while_building(small_disk, tmp_path, left):
    """Wherever it runs out, the message says so, and with room again the build completes."""
    build = Build(tmp_path)
    build.command[build.command.index(str(tmp_path / "out"))] = str(small_disk)
    build.out = small_disk / "sm_86"
    ballast = small_disk / "ballast"
    with open(ballast, "wb") as file:
        size = os.statvfs(small_disk)
        file.write(b"\1" * max(1, size.f_bavail * size.f_frsize - left))
    done = build.run()
    assert done.returncode in (1, 2) and "No space left on device" in done.stdout + done.stderr
    if (build.out / "manifest.json").exists():
        build.whole()
    ballast.unlink()
    build.completes()


def test_files_that_may_not_grow(build):
    """A quota: writing fails in the middle of a file."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    done = build.run(preexec_fn=limit)
    assert done.returncode in (1, 2), done.stdout
    assert not (build.out / "manifest.json").exists()
    build.completes()


def test_damaged_outputs_are_built_again(build):
    """Bytes that are no text, nothing, half a file, another content: in any file, by turns."""
    build.completes()
    files = ["manifest.json", f"records/{NAMES[0]}.json", f"src/{NAMES[0]}.cu", f"{NAMES[0]}.cubin"]
    damages = [b"\xff\xfe\0", b"", b"[1, 2", b'{"variants": [{"name": 5}]}']
    for turn in range(4):
        for i, file in enumerate(files):
            (build.out / file).write_bytes(damages[(i + turn) % 4])
        build.completes()


def test_a_partial_build_beside_a_damaged_manifest(build):
    build.completes()
    manifest = json.loads((build.out / "manifest.json").read_text())
    manifest["variants"] += [{"name": "../../x"}, {"name": NAMES[0] + "_c1"}, {"name": "w4a16"}]
    (build.out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(TableError):
        dispatch.load_table(build.out)
    build.completes()


def read_only(folder: Path):
    """Mounts `folder` read-only over itself; false where that needs privileges."""
    for options in (["--bind"], ["-o", "remount,bind,ro"]):
        done = subprocess.run(["mount", *options, str(folder), str(folder)], capture_output=True)
        if done.returncode:
            return False
    return True


def test_a_read_only_output(build):
    build.out.mkdir(parents=True)
    if not read_only(build.folder / "out"):
        pytest.skip("mounting needs privileges")
    try:
        done = build.run()
        assert done.returncode == 2 and "Read-only file system" in done.stderr
    finally:
        subprocess.run(["umount", str(build.folder / "out")], check=True)
    build.completes()


# ---- the launcher and kernels at run time ----


def test_damage_between_build_and_use(fake, tmp_path):
    """A cubin cut short, replaced, emptied or gone after the table was read: refused by hash."""
    entry = fake_cuda.kernel()
    folder = fake_cuda.write_table(tmp_path, [entry], [fake_cuda.row(entry)])
    q = torch.randint(0, 16, (128, 64), dtype=torch.uint8)
    w = mc.pack(q, torch.ones(1, 64).half(), group_size=128)
    a = torch.randn(1, 128).half()
    form = (w.packed, w.col_scale, None, None, w.n, w.k, w.group_size, w.has_zeros, -1)
    cubin = folder / entry["file"]
    for damage in (b"", cubin.read_bytes()[:-1], b"x" * 100, None):
        fake.reset()
        fake.launcher.add_table(dispatch.load_table(folder), 9, 0)
        cubin.unlink() if damage is None else cubin.write_bytes(damage)
        with pytest.raises(RuntimeError, match=r"sha256|cannot read") as caught:
            torch.ops.marlin_cutlass_host.gemm(a, *form)
        assert entry["name"] in str(caught.value) and "run build.py again" in str(caught.value)
        assert fake.record.launches == fake.record.function_count == 0
    cubin.write_text(entry["name"])
    torch.ops.marlin_cutlass_host.gemm(a, *form)  # and whole again, it is used
    assert fake.record.launches == 1


# ---- converting ----


def checkpoint(folder: Path, layers: int = 12, k: int = 256, n: int = 256) -> Path:
    folder.mkdir()
    tensors = {}
    for i in range(layers):
        q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
        tensors[f"l{i}.qweight"] = pack_nibbles(q, 0)
        tensors[f"l{i}.qzeros"] = pack_nibbles(torch.full((k // 64, n), 7, dtype=torch.uint8), 1)
        tensors[f"l{i}.scales"] = torch.rand(k // 64, n).half()
    save_file(tensors, folder / "model.safetensors")
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quant}))
    return folder


# Converts, and stops itself with signal 9 at the given place.
CONVERT = """
import os, signal, sys, torch
torch.set_num_threads(1)
from marlin_cutlass import checkpoint
src, dst, place = sys.argv[1:4]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if place.isdigit():
    count = int(place)
    add = checkpoint.StreamWriter.add
    def counted(self, name, tensor):
        global count
        add(self, name, tensor)
        count -= 1
        if count == 0:
            self.file.flush()
            die()
    checkpoint.StreamWriter.add = counted
elif place == "header":
    checkpoint.StreamWriter.close = die
elif place == "config":
    checkpoint._new_config = die
elif place == "exchange":
    checkpoint._exchange = die
elif place == "between":
    replace, calls = os.replace, []
    def second(a, b):
        if calls:
            die()
        calls.append(a)
        replace(a, b)
    checkpoint.os.replace = second
checkpoint.convert_checkpoint(src, dst, workers=1, overwrite=True)
"""


def convert(src: Path, dst: Path, place: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", CONVERT, str(src), str(dst), place]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "env": environment, **options}
    return subprocess.run(command, **options)


def assert_whole(dst: Path, layers: int = 12) -> None:
    found = mc.load(dst / "model.safetensors")
    assert len(found) == layers and all(isinstance(w, mc.PackedWeight) for w in found.values())
    assert sorted(p.name for p in dst.parent.iterdir()) == ["dst", "src"]  # nothing is left over


@pytest.mark.parametrize("place", ["13", "header", "config", "exchange"])
def test_kill_9_while_converting(tmp_path, place):
    src, dst = checkpoint(tmp_path / "src"), tmp_path / "dst"
    assert convert(src, dst, place).returncode == -signal.SIGKILL
    assert not dst.exists()
    mc.convert_checkpoint(src, dst)
    assert_whole(dst)


def test_kill_9_between_the_two_renames_of_an_overwrite(tmp_path):
    """The old folder is brought back by the next run, even by one that fails."""
    src, dst = checkpoint(tmp_path / "src"), tmp_path / "dst"
    mc.convert_checkpoint(src, dst)
    assert convert(src, dst, "between").returncode == -signal.SIGKILL
    assert not dst.exists()
    with pytest.raises(RuntimeError, match="fails"), new_folder(dst):
        raise RuntimeError("fails")
    assert_whole(dst)
    assert convert(src, dst, "between").returncode == -signal.SIGKILL
    mc.convert_checkpoint(src, dst, overwrite=True)
    assert_whole(dst)


def test_a_failed_exchange_brings_the_old_folder_back(tmp_path, monkeypatch):
    src, dst = checkpoint(tmp_path / "src"), tmp_path / "dst"
    mc.convert_checkpoint(src, dst)
    replace = os.replace

    def failing(a, b):
        if str(a).endswith(".tmp"):
            raise OSError(28, "No space left on device")
        replace(a, b)

    monkeypatch.setattr("marlin_cutlass.checkpoint.os.replace", failing)
    with pytest.raises(OSError, match="No space left"):
        mc.convert_checkpoint(src, dst, overwrite=True)
    monkeypatch.undo()
    assert_whole(dst)


def test_two_conversions_at_once(tmp_path):
    """The second is told at once; the first completes."""
    src, dst = checkpoint(tmp_path / "src"), tmp_path / "dst"
    with new_folder(dst) as folder:
        with pytest.raises(FileExistsError, match="is being written by another process"):
            mc.convert_checkpoint(src, dst)
        (folder / "model.safetensors").write_bytes(b"of the first")
    assert (dst / "model.safetensors").read_bytes() == b"of the first"
    mc.convert_checkpoint(src, dst, overwrite=True)
    assert_whole(dst)


def test_the_lock_ends_with_its_holder(tmp_path):
    code = (
        "import os, sys, signal; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from marlin_cutlass.locking import folder_lock\n"
        "with folder_lock(Path(sys.argv[2])):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder = tmp_path / "x"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT), str(folder)])
    assert done.returncode == -signal.SIGKILL and list(tmp_path.iterdir())
    with folder_lock(folder):
        with pytest.raises(FileExistsError), folder_lock(folder):
            pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_converting(tmp_path):
    src, dst = checkpoint(tmp_path / "src"), tmp_path / "dst"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    done = convert(src, dst, "", preexec_fn=limit)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]
    mc.convert_checkpoint(src, dst)
    assert_whole(dst)


def test_a_disk_that_fills_up_while_converting(small_disk, tmp_path):
    src = checkpoint(tmp_path / "src", layers=2, k=64, n=64)
    (small_disk / "dst").mkdir()
    (small_disk / "ballast").write_bytes(b"\1" * 40_000)
    done = convert(src, small_disk / "dst", "")
    assert done.returncode == 1 and "No space left on device" in done.stderr
    (small_disk / "ballast").unlink()
    assert convert(src, small_disk / "dst", "").returncode == 0
    assert len(mc.load(small_disk / "dst" / "model.safetensors")) == 2
    assert [p.name for p in small_disk.iterdir()] == ["dst"]


def test_an_interrupted_resume_folder_is_named(tmp_path):
    """Settings are written whole or not at all; what is no JSON says which file it is."""
    ResumeFolder(tmp_path / "r", {"a": 1})
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["state.json"]
    (tmp_path / "r" / "state.json").write_text('{"a":')
    with pytest.raises(ValueError, match=r"state\.json is not valid JSON"):
        ResumeFolder(tmp_path / "r", {"a": 1})


def test_a_source_that_shrinks_while_it_is_read(tmp_path):
    """Another program rewrites the shard between the plan and the read."""
    src = checkpoint(tmp_path / "src", layers=2)
    plan = plan_conversion(src)
    size = (src / "model.safetensors").stat().st_size
    os.truncate(src / "model.safetensors", size - 1000)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="is cut short"):
        _write_folder(plan, tmp_path / "out", ConversionReport("gptq"), 1, lambda name: None)
