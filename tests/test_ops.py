"""The torch operators: schemas, fake kernels, gradients, torch.compile, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from marlin_cutlass import gemm, ops, pack
from marlin_cutlass.errors import LibraryError
from marlin_cutlass.layout import form_of

REPO = Path(__file__).resolve().parent.parent
gemm_op = torch.ops.marlin_cutlass.gemm.default
compact_op = torch.ops.marlin_cutlass.gemm_compact.default
gemm_autograd_op = torch.ops.marlin_cutlass.gemm_autograd.default
gemm_out_op = torch.ops.marlin_cutlass.gemm_out.default


def weight(k=256, n=96, act_order=False):
    g_idx = (torch.arange(k) // 128)[torch.randperm(k)] if act_order else None
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    return pack(q, torch.rand(k // 128, n).half() * 0.1, group_size=128, g_idx=g_idx)


def form(w, bias=None):
    return w.packed, w.col_scale, bias, w.perm, w.n, w.k, w.group_size, w.has_zeros


@pytest.mark.parametrize("act_order", [False, True])
def test_opcheck(act_order):
    w = weight(act_order=act_order)
    a, bias = torch.randn(8, 256).half(), torch.randn(96)
    torch.library.opcheck(gemm_op, (a, *form(w, bias)))
    torch.library.opcheck(gemm_op, (a.view(2, 4, 256), *form(w)))
    torch.library.opcheck(compact_op, (a, w.packed, w.col_scale, w.form, bias, w.perm))
    torch.library.opcheck(compact_op, (a.view(2, 4, 256), w.packed, w.col_scale, w.form))
    torch.library.opcheck(gemm_out_op, (a, *form(w), torch.empty(8, 96).half()))
    torch.library.opcheck(gemm_autograd_op, (a.requires_grad_(), *form(w)))


def test_the_inference_operators_carry_no_python_autograd():
    # Entering Python would cost more than the launch.
    assert "\nAutograd" not in torch._C._dispatch_dump("marlin_cutlass::gemm")
    assert "\nAutograd" not in torch._C._dispatch_dump("marlin_cutlass::gemm_compact")
    assert "\nAutograd" in torch._C._dispatch_dump("marlin_cutlass::gemm_autograd")


def test_meta_tensors_give_the_shape():
    w = weight().to("meta")
    for dtype in (torch.float16, torch.bfloat16):
        a = torch.empty(2, 8, 256, dtype=dtype, device="meta")
        out = gemm(a, w)
        assert out.shape == (2, 8, 96) and out.dtype == dtype and out.device.type == "meta"


def test_compile_serves_every_number_of_rows_with_two_compilations():
    w = weight(act_order=True)
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(lambda a: gemm(a, w), backend=backend, fullgraph=True, dynamic=True)
    for m in (1, 7, 64):
        a = torch.randn(m, 256).half()
        assert torch.equal(compiled(a), gemm(a, w))
    assert len(compilations) <= 2
    calls = [
        str(n.target)
        for graph in compilations
        for n in graph.graph.nodes
        if n.op == "call_function"
    ]
    assert calls.count("marlin_cutlass.gemm_compact.default") == len(compilations)
    assert not any("clone" in call for call in calls)


def test_compile_with_inductor():
    w = weight()
    compiled = torch.compile(lambda a: gemm(a, w), fullgraph=True, dynamic=True)
    for m in (1, 7):
        a = torch.randn(m, 256).half()
        assert torch.equal(compiled(a), gemm(a, w))


def test_compile_with_gradients():
    w, bias = weight(), torch.randn(96)

    def layer(a):
        return torch.relu(gemm(a, w, bias)) * 2

    a = torch.randn(5, 256).half().requires_grad_()
    layer(a).sum().backward()
    want, a.grad = a.grad, None
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(a)
    out.sum().backward()
    assert torch.equal(out, layer(a)) and torch.equal(a.grad, want)


def test_export():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight()

        def forward(self, a):
            return gemm(a, self.weight)

    layer, a = Layer(), torch.randn(4, 256).half()
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(layer, (a,), dynamic_shapes=({0: rows},))
    a = torch.randn(9, 256).half()
    assert torch.equal(program.module()(a), layer(a))


def test_the_operator_checks_as_strictly_as_the_function():
    w = weight()
    a = torch.randn(4, 256).half()
    good = list(form(w))
    for index, value, text in [
        (0, w.packed[:-1], "packed has shape"),
        (0, w.packed.to(torch.int8), "packed has dtype int8"),
        (1, w.col_scale[:-1], "col_scale has shape"),
        (3, torch.zeros(255, dtype=torch.int32), "perm has shape"),
        (4, 200, "packed has shape"),
        (5, 128, "K=128"),
        (6, 64, "packed has shape"),
        (6, 100, "group_size=100 is not supported"),
        (7, True, "packed has shape"),
    ]:
        bad = list(good)
        bad[index] = value
        with pytest.raises((ValueError, TypeError), match=text):
            gemm_op(a, *bad)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_compact_operator_is_the_same_product(group_size, zeros):
    k, n = 512, 96
    groups = 1 if group_size < 0 else k // group_size
    q, scales = torch.randint(0, 16, (k, n), dtype=torch.uint8), torch.rand(groups, n).half()
    z = torch.randint(0, 17, (groups, n)) if zeros else None
    w, a, bias = pack(q, scales, z, group_size=group_size), torch.randn(3, k).half(), torch.ones(n)
    operands = (a, w.packed, w.col_scale)
    assert torch.equal(compact_op(*operands, w.form, bias), gemm_op(a, *form(w, bias)))
    assert torch.equal(compact_op(*operands, w.form), gemm_op(a, *form(w)))
    other = 64 if group_size in (128, 256) else 128
    with pytest.raises(ValueError, match="packed has shape"):
        compact_op(*operands, form_of(k, n, other, zeros))
    with pytest.raises(ValueError, match="packed has shape"):
        compact_op(*operands, form_of(k, n, group_size, not zeros))
    with pytest.raises(ValueError, match="K=0"):
        compact_op(*operands, 0)
    with pytest.raises(ValueError, match="col_scale has shape"):
        compact_op(a, w.packed, w.col_scale[:-1], w.form)


def test_other_devices_are_refused():
    # The fallback implementation is what an accelerator without kernels reaches.
    with pytest.raises(NotImplementedError, match="runs on CUDA and CPU"):
        ops._first_call("gemm")(torch.empty(1, device="meta"))


def test_the_first_cuda_call_shows_the_original_error(monkeypatch):
    from marlin_cutlass import library

    class OnCuda:
        device = torch.device("cuda:0")

    def load():
        raise LibraryError("libfoo.so: undefined symbol: bar")

    monkeypatch.setattr(library, "load", load)
    with pytest.raises(LibraryError, match="undefined symbol: bar"):
        ops._first_call("gemm")(OnCuda())


# ---- processes of their own ----


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    import os

    environment = {**os.environ, "PYTHONPATH": str(REPO), **env}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/"
    )


def test_import_needs_no_gpu_driver_compiler_or_table(tmp_path):
    done = run(
        "import sys, torch, marlin_cutlass as mc\n"
        "assert not any(name.split('.')[0] in ('generator', 'jinja2') for name in sys.modules)\n"
        "q = torch.zeros(128, 8, dtype=torch.uint8)\n"
        "w = mc.pack(q, torch.ones(1, 8).half(), group_size=128)\n"
        "assert mc.gemm(torch.ones(1, 128).half(), w)[0, 0] == -1024\n"
        "assert not any('/libcuda.so' in line for line in open('/proc/self/maps'))\n"
        "print(mc.build_info()['tables'], mc.explain(1, 8, 128, arch=86).why)",
        PATH="",
        CUDA_VISIBLE_DEVICES="",
        MARLIN_CUTLASS_BUILD=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "built for [nothing], device sm_86; run python build.py --arch sm_86" in done.stdout


def test_a_second_copy_is_refused_and_a_reload_is_not(tmp_path):
    (tmp_path / "copy").symlink_to(REPO / "marlin_cutlass")
    done = run(
        "import importlib, shutil, sys\n"
        "import marlin_cutlass.ops as first\n"
        "importlib.reload(first)\n"
        f"shutil.copytree({str(REPO / 'marlin_cutlass')!r}, {str(tmp_path / 'other' / 'mc2')!r})\n"
        f"sys.path.insert(0, {str(tmp_path / 'other')!r})\n"
        "try:\n"
        "    import mc2\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    assert done.returncode == 0, done.stderr
    assert "is already loaded from" in done.stdout and "mc2" in done.stdout
