"""Compiling and loading the launcher library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from marlin_cutlass import library
from marlin_cutlass.errors import LibraryError

REPO = Path(__file__).resolve().parent.parent


def test_the_library_needs_no_cuda_and_no_symbol_newer_than_its_target():
    path = library.build()
    needed = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
    assert "libcuda" not in needed and "libpython" not in needed
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(path)], capture_output=True, text=True
    )
    assert symbols.returncode == 0 and "aoti_torch_get_sizes" in symbols.stdout
    assert (
        " _Py" not in symbols.stdout
        and "_ZN2at" not in symbols.stdout
        and "_ZN3c10" not in symbols.stdout
    )


def test_a_second_build_compiles_nothing(monkeypatch):
    path = library.build()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library.build() == path


def test_a_failing_compiler_shows_its_last_lines(tmp_path, monkeypatch):
    tool = tmp_path / "cxx"
    tool.write_text("#!/bin/sh\nfor i in $(seq 50); do echo line $i; done >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", str(tool))
    with pytest.raises(LibraryError, match=r"failed \(3\).*(?s:.*)line 50") as caught:
        library.build(folder=tmp_path / "out")
    assert "line 30\n" not in str(caught.value) and f"command: {tool}" in str(caught.value)
    assert not list((tmp_path / "out").iterdir())
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(LibraryError, match="cannot run the C\\+\\+ compiler /nowhere/g\\+\\+"):
        library.build(folder=tmp_path / "out")


def test_without_a_compiler_the_call_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LibraryError, match="no C\\+\\+ compiler: install g\\+\\+ or set CXX"):
        library.compiler()


def test_folders_that_cannot_be_written(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    writable = tmp_path / "cache"
    monkeypatch.setattr(library, "library_folders", lambda: [blocker / "runtime", writable])
    assert library._writable_folder() == writable
    monkeypatch.setattr(library, "library_folders", lambda: [blocker / "a", blocker / "b"])
    with pytest.raises(LibraryError, match=r"can be written.*file/a.*file/b.*MARLIN_CUTLASS_BUILD"):
        library._writable_folder()


def test_a_library_that_does_not_load_keeps_the_loaders_text(tmp_path):
    path = tmp_path / "libbroken.so"
    path.write_bytes(b"not a library")
    with pytest.raises(
        LibraryError, match=r"libbroken.so does not load: .*(invalid ELF|too short)"
    ):
        library._open(path)


def test_the_command_line_prints_the_path():
    done = subprocess.run(
        [sys.executable, "-m", "marlin_cutlass.library", "build"],
        capture_output=True,
        text=True,
        cwd=REPO,
        env=os.environ,
    )
    assert done.returncode == 0 and done.stdout.strip() == str(library.build())
    assert library.main(["bild"]) == 2


def test_loading_without_a_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(LibraryError, match="no CUDA device is available to torch"):
        library.load()
