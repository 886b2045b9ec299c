"""Mistyped and hostile arguments: every one is refused with a message that names it, on every way
into the library, and none of them reaches a launch.

The launcher's own checks are exercised through the recorded driver (fake_cuda.py): after a refusal
it must not have seen a launch.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import marlin_cutlass as mc
from marlin_cutlass import dispatch, jit, layout, library
from marlin_cutlass import settings as settings_module

REPO = Path(__file__).resolve().parent.parent
K, N = 256, 96
UINT8, INT32 = torch.uint8, torch.int32


def weight(k=K, n=N, group_size=128, zeros=False):
    q = torch.randint(0, 16, (k, n), dtype=UINT8)
    rows = 1 if group_size < 0 else k // group_size
    z = torch.randint(0, 17, (rows, n)) if zeros else None
    return mc.pack(q, torch.rand(rows, n).half() * 0.1, z, group_size=group_size)


W = weight()
Q = torch.zeros(K, N, dtype=UINT8)
A = torch.randn(4, K).half()
COMPLEX = torch.view_as_complex(torch.randn(4, K, 2).half())


def pack(q=Q, group_size=128):
    return mc.pack(q, torch.ones(K // 128, N).half(), group_size=group_size)


# ---- the function ----

WRONG = {
    "a array": (lambda: mc.gemm(A.numpy(), W), TypeError, "a must be a torch.Tensor, not ndarray"),
    "a None": (lambda: mc.gemm(None, W), TypeError, "a must be a torch.Tensor, not NoneType"),
    "a 0-d": (lambda: mc.gemm(A[0, 0], W), ValueError, r"a has shape \(\)"),
    "a integer": (lambda: mc.gemm(A.int(), W), TypeError, "a has dtype int32"),
    "a complex": (lambda: mc.gemm(COMPLEX, W), TypeError, "a has dtype complex32"),
    "a fp8": (lambda: mc.gemm(A.to(torch.float8_e5m2), W), TypeError, "a has dtype float8_e5m2"),
    "a sparse": (lambda: mc.gemm(A.to_sparse(), W), TypeError, "an operand is torch.sparse_coo"),
    "a meta": (lambda: mc.gemm(A.to("meta"), W), ValueError, "a is on meta"),
    "a transposed": (lambda: mc.gemm(A.t(), W), ValueError, "the last dimension must be K=256"),
    "w tensor": (lambda: mc.gemm(A, W.packed), TypeError, "w must be a PackedWeight"),
    "bias list": (lambda: mc.gemm(A, W, [0.0] * N), TypeError, "bias must be a torch.Tensor"),
    "bias 0-d": (lambda: mc.gemm(A, W, torch.tensor(1.0)), ValueError, r"bias has shape \(\)"),
    "bias integer": (lambda: mc.gemm(A, W, torch.zeros(N).int()), TypeError, "bias has dtype"),
    "bias complex": (lambda: mc.gemm(A, W, torch.zeros(N) + 0j), TypeError, "bias has dtype"),
    "out array": (lambda: mc.gemm(A, W, out=np.zeros((4, N))), TypeError, "out must be a torch"),
    "out 0-d": (lambda: mc.gemm(A, W, out=A[0, 0]), ValueError, r"out has shape \(\)"),
    "out meta": (
        lambda: mc.gemm(A, W, out=torch.empty(4, N, device="meta").half()),
        ValueError,
        "out is on meta",
    ),
    "out transposed": (
        lambda: mc.gemm(A, W, out=torch.empty(N, 4).half().t()),
        ValueError,
        "its rows must be contiguous",
    ),
    "kernel number": (lambda: mc.gemm(A, W, kernel=5), TypeError, "kernel=5 must be the name"),
    "group text": (lambda: pack(group_size="128"), TypeError, "'128' must be a whole number"),
    "group fraction": (lambda: pack(group_size=128.0), TypeError, "must be a whole number"),
    "group truth": (lambda: pack(group_size=True), TypeError, "True must be a whole number"),
    "group None": (lambda: pack(group_size=None), TypeError, "None must be a whole number"),
    "codes on meta": (lambda: pack(Q.to("meta")), TypeError, "q is on meta"),
    "codes sparse": (lambda: pack(Q.to_sparse()), TypeError, "q is torch.sparse_coo"),
    "no rows": (lambda: pack(Q[:0]), ValueError, "K and N must be at least 1"),
    "layer of a tensor": (lambda: mc.QuantLinear.from_packed(Q), TypeError, "not Tensor"),
    "layer of texts": (lambda: mc.QuantLinear("a", 5), TypeError, "'a' must be a whole number"),
    "arch of one": (lambda: mc.explain(1, 8, 256, arch=(9,)), ValueError, "is malformed"),
    "rows text": (lambda: mc.explain("x", 8, 256, arch=90), TypeError, "m='x' must be an int"),
    "a folder": (lambda: mc.load("/"), FileNotFoundError, "is not a regular file"),
    "kernel empty": (lambda: mc.gemm(A, W, kernel=""), ValueError, "kernel='' is a CUDA kernel"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()


def test_lazy_views_of_complex_numbers_are_read_right():
    """A view with torch's negative bit shares memory that holds the opposite sign."""
    view = torch.imag(COMPLEX.conj())
    assert view.is_neg()
    assert torch.equal(mc.gemm(view, W), mc.gemm(view.resolve_neg().clone(), W))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"n": 95}, ValueError, None),  # the same number of blocks: bytes and sizes still fit
        ({"n": 192}, ValueError, "needs"),
        ({"k": 128}, ValueError, "must be K=128|needs"),
        ({"group_size": 64}, ValueError, "needs"),
        ({"group_size": 100}, ValueError, "group_size=100"),
        ({"has_zeros": True}, ValueError, "needs"),
        ({"n": -96}, ValueError, "at least 1"),
        ({"n": 2**62}, ValueError, r"below 2\^31"),
        ({"n": 2**30}, ValueError, "needs"),
        ({"n": 96.0}, RuntimeError, "'n'"),
        ({"k": "256"}, RuntimeError, "'k'"),
        ({"packed": W.packed[:-1]}, ValueError, "packed has shape"),
        ({"packed": W.packed.view(torch.int8)}, TypeError, "packed has dtype int8"),
        ({"packed": torch.stack([W.packed, W.packed], 1)[:, 0]}, ValueError, "not contiguous"),
        ({"col_scale": W.col_scale.double()}, TypeError, "col_scale has dtype"),
        ({"perm": torch.arange(K)}, TypeError, "perm has dtype int64"),
        ({"perm": torch.arange(K - 1, dtype=INT32)}, ValueError, "perm has shape"),
    ],
)
def test_a_weight_that_was_tampered_with(change, error, text):
    w = W.clone()
    for name, value in change.items():
        setattr(w, name, value)
    if text is None:  # nothing is inconsistent: one padded column less
        assert torch.equal(mc.gemm(A, w), mc.gemm(A, W)[:, :95])
        return
    with pytest.raises(error, match=text):
        mc.gemm(A, w)


# ---- the launcher: sizes that do not belong together never reach a launch ----


@pytest.fixture
def launcher(fake, tmp_path):
    """The recorded driver with kernels of every format."""
    entries = [fake_cuda.kernel(**form) for form in fake_cuda.formats()]
    folder = fake_cuda.write_table(tmp_path, entries, [fake_cuda.row(entries[0])])
    fake.launcher.add_table(dispatch.load_table(folder), 9, 0)
    return fake


OPERATOR = torch.ops.marlin_cutlass_host
NUMBERS = st.one_of(
    st.sampled_from(
        [0, -1, 1, 32, 63, 64, 65, 96, 127, 128, 129, 255, 256, 2**31 - 1, 2**31, 2**62, -(2**63)]
    ),
    st.integers(-(2**63), 2**63 - 1),
)


def form(**change):
    values = {
        "a": A,
        "packed": W.packed,
        "col_scale": W.col_scale,
        "bias": None,
        "perm": None,
        "n": N,
        "k": K,
        "group_size": 128,
        "has_zeros": False,
        "variant": -1,
    }
    return list({**values, **change}.values())


def test_the_right_call_launches(launcher):
    torch.testing.assert_close(OPERATOR.gemm(*form()), mc.gemm(A, W), rtol=2e-3, atol=2e-3)
    assert launcher.record.launches == 1
    out = OPERATOR.gemm_compact(A, W.packed, W.col_scale, W.form)
    assert torch.equal(out, OPERATOR.gemm(*form())) and launcher.record.launches == 3


QUICK = settings(
    max_examples=200,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@QUICK
@given(n=NUMBERS, k=NUMBERS, group_size=NUMBERS, zeros=st.booleans(), variant=NUMBERS)
def test_no_mixture_of_numbers_reaches_a_launch(launcher, n, k, group_size, zeros, variant):
    """Numbers that describe another buffer than the one given are refused; equal ones are right."""
    launcher.reset()
    change = {"n": n, "k": k, "group_size": group_size, "has_zeros": zeros, "variant": variant}
    fits = k == K and (n + 63) // 64 == 2 and group_size in (128, 256) and not zeros
    try:
        out = OPERATOR.gemm(*form(**change))
    except (ValueError, RuntimeError):
        assert launcher.record.launches == 0
        return
    assert fits and launcher.record.launches == 1 and tuple(out.shape) == (4, n)


@QUICK
@given(
    n=NUMBERS.map(lambda n: n % 2**30) | st.just(N),
    k=NUMBERS.map(lambda k: k % 2**30) | st.just(K),
    group=st.sampled_from([32, 64, 128, -1]),
    zeros=st.booleans(),
    bits=st.just(0) | st.integers(-(1 << 63), (1 << 63) - 1),
    variant=NUMBERS,
)
def test_no_form_of_other_sizes_reaches_a_launch(launcher, n, k, group, zeros, bits, variant):
    """A form is refused unless its buffers have the sizes of those given."""
    launcher.reset()
    code = bits or layout.form_of(k, n, group, zeros) or 0
    fits = False
    if code >= 0:
        k, n, group, zeros = layout.sizes_of(code)
        size = layout.packed_bytes(k, n, group, zeros)
        fits = k == K and (n + 63) // 64 == 2 and size == W.packed.numel()
    try:
        out = OPERATOR.gemm_compact(A, W.packed, W.col_scale, code, None, None, variant)
    except (ValueError, RuntimeError):
        assert launcher.record.launches == 0
        return
    assert fits and launcher.record.launches == 1 and tuple(out.shape) == (4, n)


SHAPES = st.lists(st.integers(0, 5) | st.sampled_from([64, K, N, 128]), max_size=4)
KINDS = st.sampled_from(
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, UINT8, torch.int8, INT32]
)


@st.composite
def tensors(draw):
    """Small tensors of any shape, type, stride and offset."""
    shape, kind = draw(SHAPES), draw(KINDS)
    while math.prod(2 * size + 1 for size in shape) > 1 << 22:
        shape.pop()
    base = torch.zeros([2 * size + 1 for size in shape], dtype=kind)
    steps = tuple(slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 2))) for _ in shape)
    view = base[steps]
    for axis, size in enumerate(shape):
        view = view.narrow(axis, 0, min(size, view.shape[axis]))
    return view.transpose(0, -1) if view.dim() > 1 and draw(st.booleans()) else view


@QUICK
@given(
    role=st.sampled_from(["a", "packed", "col_scale", "bias", "perm", "out"]),
    tensor=tensors(),
    compact=st.booleans(),
)
def test_no_strange_tensor_reaches_a_launch(launcher, role, tensor, compact):
    """One operand replaced by any tensor: refused, or it fits and the product has its shape."""
    launcher.reset()
    values = form() if role == "out" else form(**{role: tensor})
    try:
        if role == "out":
            OPERATOR.gemm_out(*values[:-1], tensor, -1)
            out = tensor
        elif compact:
            a, packed, scale, bias, perm = values[:5]
            out = OPERATOR.gemm_compact(a, packed, scale, W.form, bias, perm)
        else:
            out = OPERATOR.gemm(*values)
    except (ValueError, RuntimeError, NotImplementedError):
        assert launcher.record.launches == 0
        return
    a = tensor if role == "a" else A
    rows = a.numel() // K
    assert a.shape[-1] == K and tuple(out.shape) == (*a.shape[:-1], N)
    assert launcher.record.launches == (rows > 0)


def test_more_rows_than_a_launch_can_have(launcher):
    """2^31 rows are refused by name, before a byte of them is touched."""
    w, rows = weight(K, 1), torch.zeros(1, K).half().expand(2**31, K)
    out = torch.empty(2**31, 1, dtype=torch.float16)  # 4 GB of addresses, no memory
    arguments = form(a=rows, packed=w.packed, col_scale=w.col_scale, n=1)[:-1]
    with pytest.raises(ValueError, match=r"M=2147483648 must be below 2\^31"):
        OPERATOR.gemm_out(*arguments, out, -1)
    assert launcher.record.launches == 0


def test_the_workspace_of_a_call_is_bounded(fake, tmp_path):
    """Partial sums of a hybrid kernel grow with the row tiles: many rows take several launches of
    the same kernel, equal ones, and the workspace stays within 512 MiB."""
    entry = fake_cuda.kernel("hopper", decomposition="hybrid", n_sm=256)
    small = fake_cuda.kernel("hopper", m_tile=8)
    rows = [fake_cuda.row(small, m=(0, 7000)), fake_cuda.row(entry)]
    folder = fake_cuda.write_table(tmp_path, [entry, small], rows)
    table = dispatch.load_table(folder)
    fake.launcher.add_table(table, 9, 0)
    fake.compute(False)
    tiles = 1200
    whole = dispatch.schedule(table.kernels[0], 16 * tiles, N, K, 132)
    assert whole.partials * 4 > 1 << 30
    OPERATOR.gemm(*form(a=A[:1].expand(16 * tiles, K)))
    assert fake.record.launches == 3 and fake.record.m == 16 * tiles // 3
    assert fake.last_kernel == entry["name"]  # though the table has another for 6400 rows
    assert fake.record.allocated_bytes < 513 << 20


def test_the_output_may_not_lie_over_the_activations(launcher):
    with pytest.raises(ValueError, match="out overlaps a in memory"):
        OPERATOR.gemm_out(*form()[:-1], A.view(-1)[: 4 * N].view(4, N), -1)
    assert launcher.record.launches == 0


def test_threads_call_one_weight(launcher):
    """Plans and tensor maps belong to a thread: eight threads at once give what one gives."""
    want = {m: mc.gemm(A[:1].expand(m, K), W) for m in (1, 3, 17)}
    errors = []

    def work():
        try:
            for _ in range(20):
                for m, expected in want.items():
                    got = OPERATOR.gemm(*form(a=A[:1].expand(m, K).contiguous()))
                    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
        except BaseException as error:  # shown below
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


# ---- settings ----


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")


def test_nonsense_settings_are_named_or_harmless(tmp_path):
    """Import, CPU gemm, explain and build_info with every setting set to nonsense."""
    code = (
        "import torch, marlin_cutlass as mc\n"
        "q = torch.zeros(128, 8, dtype=torch.uint8)\n"
        "w = mc.pack(q, torch.ones(1, 8).half(), group_size=128)\n"
        "print(mc.gemm(torch.ones(1, 128).half(), w)[0, 0].item())\n"
        "print(mc.explain(1, 8, 128, 128, arch=90).why)\n"
        "print(sorted(mc.build_info()['settings']))\n"
    )
    names = ["KERNEL", "EXCLUDE", "JIT", "JIT_CACHE", "PDL", "DEBUG"]
    nonsense = {f"MARLIN_CUTLASS_{name}": "\u00e9[]*?!{" for name in names}
    folder = str(tmp_path / "not" / "there")
    done = run(code, **nonsense, MARLIN_CUTLASS_BUILD=folder, XDG_CACHE_HOME="relative", HOME="")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "-1024.0" and "sm_90 unsupported" in lines[1]
    assert "MARLIN_CUTLASS_KERNEL" in lines[2]


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), ("ON", True), (" yes ", True), ("0", False), ("", False), ("False", False)],
)
def test_switches_say_on_or_off(monkeypatch, value, on):
    monkeypatch.setenv("MARLIN_CUTLASS_DEBUG", value)
    assert settings_module.switch("MARLIN_CUTLASS_DEBUG", not on) is on


def test_a_switch_that_says_neither_is_refused_where_it_takes_effect(monkeypatch):
    class Launcher:
        def set_option(self, name, value):
            pass

    for name in ("MARLIN_CUTLASS_PDL", "MARLIN_CUTLASS_DEBUG"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "banana")
            with pytest.raises(ValueError, match=f"{name}='banana' says neither on nor off"):
                library.configure(Launcher())
    monkeypatch.setenv("MARLIN_CUTLASS_JIT", "maybe")
    with pytest.raises(ValueError, match="MARLIN_CUTLASS_JIT='maybe'"):
        jit.enabled()


def test_a_user_without_a_home_needs_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/folder")
    assert settings_module.cache_folders() == []
    assert library.library_folders() and jit.cache_folders("sm_90a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert library.library_folders()[-1] == Path("/somewhere/marlin_cutlass")
