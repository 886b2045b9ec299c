"""Write tests/fixtures/*.safetensors with the real packers, each from its own environment.

    python tools/make_fixtures.py gptq     # needs gptqmodel
    python tools/make_fixtures.py awq      # needs autoawq (also writes the MARLIN fixtures)
    python tools/make_fixtures.py ct       # needs compressed-tensors
    python tools/make_fixtures.py ct-actorder  # needs compressed-tensors 0.11 (later: no g_idx)
    python tools/make_fixtures.py ct-24    # needs compressed-tensors 0.12 (0.15: no marlin-24)
    python tools/make_fixtures.py torchao  # needs torchao 0.9 (later: no Sparse-Marlin packer)
    python tools/make_fixtures.py sparse-marlin --checkout DIR  # a checkout of Sparse-Marlin
    python tools/make_fixtures.py hqq      # needs hqq

Each file holds the packer's tensors under "file.*" and what went in under "want.*": q uint8 [K, N],
zeros int [G, N], scales [G, N], g_idx [K]. Metadata records the packer, its version and the
settings. Inputs come from numpy seeds, so a rerun with the same versions writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"


def problem(
    seed: int, k: int = 256, n: int = 128, g: int = 64, zeros: str = "sym", act_order: bool = False
) -> dict[str, torch.Tensor]:
    """Codes, scales, zeros and row groups whose float weight a packer rounds back exactly."""
    rng = np.random.default_rng(seed)
    groups = 1 if g == -1 else k // g
    q = rng.integers(0, 16, (k, n))
    low = {"sym": 8, "positive": 1, "any": 0}[zeros]
    z = np.full((groups, n), 8) if zeros == "sym" else rng.integers(low, 16, (groups, n))
    s = rng.uniform(0.004, 0.06, (groups, n)).astype(np.float16)
    g_idx = np.arange(k) // (k // groups)
    if act_order:
        g_idx = g_idx[rng.permutation(k)]
    w = (q - z[g_idx]).astype(np.float32) * s.astype(np.float32)[g_idx]
    return {
        "q": torch.from_numpy(q.astype(np.uint8)),
        "zeros": torch.from_numpy(z.astype(np.int32)),
        "scales": torch.from_numpy(s),
        "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
        "w": torch.from_numpy(w),
    }


def pruned(want: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A symmetric problem with two of each four codes along K set to 8, at random places."""
    q = want["q"]
    rng = np.random.default_rng(seed)
    order = rng.random((q.shape[0] // 4, 4, q.shape[1])).argsort(1).reshape(tuple(q.shape))
    q = torch.where(torch.from_numpy(order < 2), q, torch.full_like(q, 8))
    w = (q.float() - 8) * want["scales"].float()[want["g_idx"].long()]
    return {**want, "q": q, "w": w}


def linear_of(w: torch.Tensor) -> torch.nn.Linear:
    """`nn.Linear` without bias whose weight is w.T, w float32 [K, N]."""
    layer = torch.nn.Linear(w.shape[0], w.shape[1], bias=False)
    layer.weight.data = w.t().contiguous()
    return layer


def write(
    name: str, packer: str, want: dict, file: dict, release: str | None = None, **settings
) -> None:
    """One fixture: packer's tensors, what was packed, and settings in the metadata. release: of a
    packer that is no installed package."""
    tensors = {f"want.{key}": value.contiguous().clone() for key, value in want.items()}
    tensors.pop("want.w", None)
    tensors |= {
        f"file.{key}": torch.as_tensor(value).contiguous().clone() for key, value in file.items()
    }
    metadata = {"packer": packer, "packer_version": release or version(packer)}
    metadata["torch"] = torch.__version__
    metadata["settings"] = json.dumps(settings, sort_keys=True)
    FIXTURES.mkdir(parents=True, exist_ok=True)
    save_file(tensors, FIXTURES / f"{name}.safetensors", metadata)
    print("wrote", name)


def make_gptq() -> None:
    """GPTQModel: symmetric, asymmetric, act-order, per column; versions 1 and 2."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    cases = [
        ("gptq_sym_g64", 1, "sym", 64, False, "gptq"),
        ("gptq_sym_g128", 2, "sym", 128, False, "gptq"),
        ("gptq_sym_gcol", 3, "sym", -1, False, "gptq"),
        ("gptq_sym_g64_actorder", 4, "sym", 64, True, "gptq"),
        ("gptq_asym_g64", 5, "positive", 64, False, "gptq"),
        ("gptq_asym_g64_zero0", 6, "any", 64, False, "gptq"),
        ("gptq_v2_asym_g64", 7, "any", 64, False, "gptq_v2"),
        ("gptq_v2_asym_g32_actorder", 8, "any", 32, True, "gptq_v2"),
    ]
    for name, seed, zeros, g, act_order, fmt in cases:
        want = problem(seed, g=g, zeros=zeros, act_order=act_order)
        k, n = want["w"].shape
        module = TorchLinear(
            bits=4,
            group_size=g,
            sym=zeros == "sym",
            desc_act=act_order,
            in_features=k,
            out_features=n,
            bias=False,
            pack_dtype=torch.int32,
            register_buffers=True,
        )
        module.pack_original(
            linear_of(want["w"]),
            want["scales"].float().t().contiguous(),
            want["zeros"].float().t().contiguous(),
            want["g_idx"],
        )
        if fmt == "gptq":
            _to_v1(module)
        file = {key: getattr(module, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
        write(
            name,
            "gptqmodel",
            want,
            file,
            group_size=g,
            checkpoint_format=fmt,
            sym=zeros == "sym",
            desc_act=act_order,
        )


def _to_v1(module) -> None:
    from types import SimpleNamespace

    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    settings = SimpleNamespace(bits=4, pack_dtype=torch.int32)
    convert_gptq_v2_to_v1_format_module(module, settings)


def make_awq() -> None:
    """AutoAWQ's GEMM version, and its copy of MARLIN's packer (tensors renamed to B and s)."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.marlin import WQLinear_Marlin

    for name, seed, g in (("awq_g64", 11, 64), ("awq_g128", 12, 128)):
        want = problem(seed, g=g, zeros="any")
        module = WQLinear_GEMM.from_linear(
            linear_of(want["w"]),
            4,
            g,
            False,
            scales=want["scales"].float(),
            zeros=want["zeros"].float(),
        )
        file = {key: getattr(module, key) for key in ("qweight", "qzeros", "scales")}
        write(name, "autoawq", want, file, group_size=g, version="gemm")
    for name, seed, g in (
        ("marlin_g64", 13, 64),
        ("marlin_g128", 14, 128),
        ("marlin_gcol", 15, -1),
    ):
        want = problem(seed, g=g)
        module = WQLinear_Marlin.from_linear(
            linear_of(want["w"]).half(),
            4,
            256 if g == -1 else g,
            False,
            scales=want["scales"].t().contiguous(),
        )
        file = {"B": module.qweight, "s": module.scales}
        write(name, "autoawq", want, file, group_size=g)


def make_ct() -> None:
    """compressed-tensors: group and channel, symmetric and not, an odd depth, stacked experts."""
    cases = [
        ("ct_sym_g64", 21, "sym", 64, 256),
        ("ct_asym_g64", 22, "any", 64, 256),
        ("ct_sym_channel", 23, "sym", -1, 256),
        ("ct_asym_channel_k36", 24, "any", -1, 36),
    ]
    for name, seed, zeros, g, k in cases:
        want = problem(seed, k=k, n=16 if k == 36 else 128, g=g, zeros=zeros)
        write(
            name,
            "compressed-tensors",
            want,
            _ct_file(want, g),
            group_size=g,
            symmetric=zeros == "sym",
            actorder=None,
        )
    experts = [problem(seed, k=128, n=64, g=64, zeros="any") for seed in (26, 27, 28)]
    files = [_ct_file(expert, 64) for expert in experts]
    stack = {key: torch.stack([e[key] for e in experts]) for key in experts[0]}
    write(
        "ct_experts_asym_g64",
        "compressed-tensors",
        stack,
        {key: torch.stack([f[key] for f in files]) for key in files[0]},
        group_size=64,
        symmetric=False,
        actorder=None,
    )


def _ct_file(want: dict, g: int) -> dict:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    symmetric = bool((want["zeros"] == 8).all())
    strategy = {"strategy": "channel"} if g == -1 else {"strategy": "group", "group_size": g}
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **strategy)
    state = {
        "weight": want["w"].t().contiguous(),
        "weight_scale": want["scales"].float().t().contiguous(),
        "weight_zero_point": (want["zeros"].t() - 8).to(torch.int8).contiguous(),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    out = PackedQuantizationCompressor.compress(state, scheme)
    return {key: out[key] for key in out if key.startswith("weight")}


def make_ct_act_order() -> None:
    """actorder="group", which only releases up to 0.11 or so can write."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs

    want = problem(25, act_order=True)
    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=64, actorder="group"
    )
    scale = want["scales"].float().t().contiguous()
    zero = torch.zeros_like(scale, dtype=torch.int8)
    file = PackedQuantizationCompressor().compress_weight(
        want["w"].t().contiguous(), scale, args, zero, want["g_idx"]
    )
    file |= {"weight_scale": scale, "weight_g_idx": want["g_idx"]}
    write(
        "ct_sym_g64_actorder",
        "compressed-tensors",
        want,
        file,
        group_size=64,
        symmetric=True,
        actorder="group",
    )


MARLIN_24 = (  # name, seed, K, N, group size
    ("g128", 41, 512, 64, 128),
    ("g128_k256", 42, 256, 128, 128),  # two groups: what compressed-tensors takes for one
    ("gcol", 43, 256, 64, -1),
)


def make_ct_24() -> None:
    """compressed-tensors "marlin-24": 2:4-sparse weights, which releases up to 0.14 write."""
    from compressed_tensors.compressors import Marlin24Compressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    for name, seed, k, n, g in MARLIN_24:
        want = pruned(problem(seed, k, n, g), seed)
        strategy = {"strategy": "channel"} if g == -1 else {"strategy": "group", "group_size": g}
        args = QuantizationArgs(num_bits=4, type="int", symmetric=True, **strategy)
        scale = want["scales"].t().contiguous()
        state = {"x.weight": want["w"].t().contiguous(), "x.weight_scale": scale}
        state["x.weight_zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        out = Marlin24Compressor().compress(state, {"x": scheme})
        file = {role: out[f"x.{role}"] for role in ("weight_packed", "scale_packed", "meta")}
        write(f"ct_marlin24_{name}", "compressed-tensors", want, file, group_size=g)


def make_torchao() -> None:
    """Sparse-Marlin's format by torchao's copy of its packer."""
    from torchao.sparsity.marlin import pack_to_marlin_24

    for name, seed, k, n, g in (*MARLIN_24, ("g64", 44, 256, 64, 64)):
        want = pruned(problem(seed, k, n, g), seed)
        B, s, meta = pack_to_marlin_24(want["q"].int(), want["scales"], 4, g)
        file = {"B": B, "s": s, "meta": meta}
        write(f"torchao_{name}", "torchao", want, file, group_size=g)


def make_sparse_marlin(checkout: Path) -> None:
    """Sparse-Marlin's own `Layer_2_4.pack`, without its CUDA module and on the CPU.

    It prunes by itself, the two smallest of four unsigned codes, so that is what is wanted. Code 0
    is left out: it would keep a code 0 beside three others at a place of its own.
    """
    import sys
    from types import ModuleType

    sys.path.insert(0, str(checkout))
    sys.modules["marlin_cuda"] = ModuleType("marlin_cuda")
    torch.Tensor.cuda = lambda self: self
    from marlin import Layer_2_4, mask_creator

    for name, seed, k, n, g in MARLIN_24:
        want = problem(seed, k, n, g)
        q = want["q"].clamp(min=1)
        q[::7] = 8  # zeros among the kept ones, too
        w = (q.float() - 8) * want["scales"].float()[want["g_idx"].long()]
        mask = mask_creator(q.int().T).bool().T
        want["q"] = torch.where(mask, q, torch.full_like(q, 8))
        layer = Layer_2_4.__new__(Layer_2_4)  # its constructor needs a GPU
        torch.nn.Module.__init__(layer)
        layer.k, layer.n, layer.groupsize = k, n, k if g == -1 else g
        layer.B = torch.empty((k // 32, 2 * n), dtype=torch.int32)
        layer.meta = torch.empty((n, k // 16), dtype=torch.int16)
        layer.s = torch.empty_like(want["scales"])
        linear = torch.nn.Linear(k, n)
        linear.weight.data = w.half()  # [K, N], as its tests pass it
        layer.pack(linear, want["scales"], 4, trans=True)
        file = {"B": layer.B, "s": layer.s, "meta": layer.meta}
        write(f"sparse-marlin_{name}", "Sparse-Marlin", want, file, "cdd680f", group_size=g)


def make_hqq() -> None:
    """HQQ with its own optimiser (fractional zeros); `want.w_hat` is its own dequantisation."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    want = problem(31)
    layer = linear_of(want["w"] + 0.01)
    module = HQQLinear(
        layer,
        BaseQuantizeConfig(nbits=4, group_size=64, axis=1),
        compute_dtype=torch.float16,
        device="cpu",
    )
    file = {"W_q": module.W_q.data, "scale": module.meta["scale"], "zero": module.meta["zero"]}
    write(
        "hqq_g64",
        "hqq",
        {"w_hat": module.dequantize()},
        file,
        group_size=64,
        shape=[128, 256],
        axis=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    makers = {
        "gptq": make_gptq,
        "awq": make_awq,
        "ct": make_ct,
        "hqq": make_hqq,
        "ct-actorder": make_ct_act_order,
        "ct-24": make_ct_24,
        "torchao": make_torchao,
    }
    parser.add_argument("packer", choices=[*makers, "sparse-marlin"])
    parser.add_argument("--checkout", type=Path, help="sparse-marlin: folder of the repository")
    options = parser.parse_args()
    if options.packer == "sparse-marlin":
        if options.checkout is None:
            parser.error("sparse-marlin needs --checkout")
        return make_sparse_marlin(options.checkout)
    makers[options.packer]()


if __name__ == "__main__":
    main()
