"""Shared fixtures; leaves the GPU tests out where there is no GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

BUILD = Path(__file__).resolve().parent.parent / "build" / "tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def fake_driver():
    """The launcher over host memory (see fake_cuda.py), compiled once and kept in build/tests."""
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("needs a C++ compiler")
    import fake_cuda

    return fake_cuda.build(BUILD)


@pytest.fixture
def fake(fake_driver):
    """The recorded driver with nothing recorded and no kernel table."""
    fake_driver.reset()
    fake_driver.launcher.clear_tables()
    fake_driver.launcher.set_loading(False)
    fake_driver.launcher.set_option("pdl", True)
    fake_driver.launcher.set_option("debug", False)
    return fake_driver


@pytest.fixture
def kernels(fake, tmp_path):
    """A function that registers a table in which one geometry serves everything."""
    import fake_cuda
    from runtime_cases import SHAPES

    from marlin_cutlass import dispatch

    def register(shape: str, **fields):
        shared = {**SHAPES[shape], **fields}
        entries = [fake_cuda.kernel(**shared, **form) for form in fake_cuda.formats()]
        folder = fake_cuda.write_table(tmp_path, entries, [fake_cuda.row(entries[0])])
        table = dispatch.load_table(folder)
        fake.launcher.add_table(table, 9, 0)
        return table

    return register
