"""What the benchmarks compare: our gemm and its peers, each behind the same three questions.

    missing()            why it cannot run here, or None
    prepare(weight)      pack one [k, n] weight into as many copies as exceed twice the L2 cache
    candidates(problem)  the calls to time for one batch size

Each peer is used as its own documentation says, on the same codes and scales.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.collective import Collective
from marlin_cutlass.bench import Candidate, Problem, copies_for, pdl_setting

OURS = "ours"


@dataclass(frozen=True)
class Weight:
    """One symmetric INT4 weight: q uint8 [k, n], scales [k/g, n] fp16 or bf16, on the GPU."""

    q: torch.Tensor
    scales: torch.Tensor
    group_size: int
    l2_bytes: int

    @property
    def k(self) -> int:
        return self.q.shape[0]

    @property
    def n(self) -> int:
        return self.q.shape[1]

    def copies(self, bytes_each: int) -> int:
        return copies_for(bytes_each, self.l2_bytes)


def poisoned(problem: Problem, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An output [m, n] full of NaN, so that an element that nobody writes is seen."""
    shape = (problem.m, problem.n)
    return torch.full(shape, float("nan"), device=problem.a.device, dtype=dtype or problem.dtype)


def _clones(count: int, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return [tensors] + [tuple(t.clone() for t in tensors) for _ in range(count - 1)]


def _why_missing(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return None


def peer_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown version"


class Ours:
    """marlin_cutlass.gemm; with PDL each launch of the chain may overlap the one before it."""

    name = OURS
    max_m: int | None = None

    def __init__(self, pdl: Sequence[bool] = (False, True), kernel: str | None = None) -> None:
        self.pdl = tuple(pdl)
        self.kernel = kernel
        self.weights: list[Any] = []

    def missing(self) -> str | None:
        return None

    def prepare(self, weight: Weight) -> None:
        from marlin_cutlass import pack

        packed = pack(weight.q, weight.scales, group_size=weight.group_size)
        count = weight.copies(packed.packed.numel())
        self.weights = [packed] + [packed.clone() for _ in range(count - 1)]

    def release(self) -> None:
        self.weights = []

    def candidates(self, problem: Problem) -> list[Candidate]:
        return [self.candidate(problem, pdl) for pdl in self.pdl]

    def candidate(self, problem: Problem, pdl: bool, kernel: str | None = None) -> Candidate:
        """The calls of one PDL setting; `kernel` forces a variant by name."""
        out = poisoned(problem)
        forced = kernel or self.kernel
        calls = [our_call(problem.a, w, out, pdl, forced) for w in self.weights]
        name = forced or (f"{OURS} PDL" if pdl else OURS)
        return Candidate(name, calls, pdl, note=forced or chosen_variant(problem))


def chosen_variant(problem: Problem) -> str:
    """Name of the variant that the dispatch table gives this call, or why there is none."""
    from marlin_cutlass import explain

    answer = explain(problem.m, problem.n, problem.k, problem.group_size, problem.dtype)
    return answer.kernel or answer.why


def our_call(a: torch.Tensor, weight, out: torch.Tensor, pdl: bool, kernel: str | None):
    from marlin_cutlass import gemm

    def call() -> torch.Tensor:
        with pdl_setting(pdl):
            return gemm(a, weight, out=out, kernel=kernel)

    return call


class Cublas:
    """cuBLAS on the dequantised fp16 weight: what a layer costs without quantisation."""

    name = "cuBLAS fp16"
    max_m: int | None = None

    def missing(self) -> str | None:
        return None

    def prepare(self, weight: Weight) -> None:
        from marlin_cutlass.bench import dense_weight

        dense = dense_weight(weight.q, weight.scales).to(weight.scales.dtype)  # [n, k]
        self.copies = _clones(weight.copies(dense.numel() * 2), dense)

    def release(self) -> None:
        self.copies = []

    def candidates(self, problem: Problem) -> list[Candidate]:
        out = poisoned(problem)

        def call(w: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: torch.mm(problem.a, w.t(), out=out)

        return [Candidate(self.name, [call(w) for (w,) in self.copies])]


class Humming:
    """humming-kernels: its layer, given the codes in GPTQ form; compiles at the first call."""

    name = "humming"
    max_m: int | None = None

    def missing(self) -> str | None:
        return _why_missing("humming")

    def prepare(self, weight: Weight) -> None:
        from humming.layer import HummingLayer

        config = {"quant_method": "gptq", "bits": 4, "group_size": weight.group_size, "sym": True}
        layer = HummingLayer(
            shape_n=weight.n,
            shape_k=weight.k,
            weight_config=config,
            torch_dtype=weight.scales.dtype,
        ).cuda()
        layer.load_from_tensors(gptq_tensors(weight.q, weight.scales, weight.group_size))
        layer.transform()
        count = weight.copies(weight.n * weight.k // 2)
        self.layers = [layer] + [copy.deepcopy(layer) for _ in range(count - 1)]

    def release(self) -> None:
        self.layers = []

    def candidates(self, problem: Problem) -> list[Candidate]:
        out = poisoned(problem)
        calls = [lambda layer=layer: layer(problem.a, outputs=out) for layer in self.layers]
        return [Candidate(self.name, calls, note=peer_version("humming-kernels"))]


def gptq_tensors(q: torch.Tensor, scales: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    """The four tensors of a symmetric GPTQ layer; zero points are stored as 7, meaning 8."""
    from benchmarks.packing import pack_rows

    k, n = q.shape
    zeros = torch.full((k // group_size, n // 8), 0x77777777, dtype=torch.int32, device=q.device)
    g_idx = torch.arange(k, device=q.device, dtype=torch.int32) // group_size
    return {"qweight": pack_rows(q), "scales": scales, "qzeros": zeros, "g_idx": g_idx}


class Gemlite:
    """gemlite: Triton kernels, tuned at the first call of a shape."""

    name = "gemlite"
    max_m: int | None = None

    def missing(self) -> str | None:
        return _why_missing("gemlite")

    def prepare(self, weight: Weight) -> None:
        from gemlite import DType, GemLiteLinear

        kind = DType.FP16 if weight.scales.dtype == torch.float16 else DType.BF16
        layer = GemLiteLinear(
            4,
            group_size=weight.group_size,
            in_features=weight.k,
            out_features=weight.n,
            input_dtype=kind,
            output_dtype=kind,
        )
        scales = weight.scales.t().contiguous()  # [n, groups]
        layer.pack(weight.q.t().contiguous(), scales, torch.full_like(scales, 8.0), None)
        count = weight.copies(weight.n * weight.k // 2)
        self.layers = [layer] + [copy.deepcopy(layer) for _ in range(count - 1)]

    def release(self) -> None:
        self.layers = []

    def candidates(self, problem: Problem) -> list[Candidate]:
        calls = [lambda layer=layer: layer(problem.a) for layer in self.layers]
        return [Candidate(self.name, calls, note=peer_version("gemlite"))]


class TorchInt4:
    """torch's own INT4 matmul (tinygemm, bf16 only)."""

    name = "torch int4"
    max_m: int | None = 256  # slower than everything by far beyond; a cell would take seconds

    def missing(self) -> str | None:
        if not hasattr(torch.ops.aten, "_weight_int4pack_mm"):
            return "this torch has no _weight_int4pack_mm"
        return None

    def prepare(self, weight: Weight) -> None:
        codes = weight.q.t().contiguous()  # [n, k]
        packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        scales = weight.scales.bfloat16()  # w = (code - 8) * scale + zero
        both = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()
        self.group_size = weight.group_size
        self.copies = _clones(weight.copies(weight.n * weight.k // 2), packed, both)

    def release(self) -> None:
        self.copies = []

    def candidates(self, problem: Problem) -> list[Candidate]:
        a = problem.a.bfloat16()
        op = torch.ops.aten._weight_int4pack_mm

        def call(packed: torch.Tensor, scales: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: op(a, packed, self.group_size, scales)

        calls = [call(*tensors) for tensors in self.copies]
        return [Candidate(self.name, calls, note="bf16")]


class TritonKernel:
    """The SplitK paper's tile in Triton (benchmarks/triton_kernels.py)."""

    max_m: int | None = 16  # the range of the paper

    def __init__(self, split: int) -> None:
        self.split = split
        self.name = f"Triton SplitK {split}" if split > 1 else "Triton data-parallel"

    def missing(self) -> str | None:
        return _why_missing("triton")

    def prepare(self, weight: Weight) -> None:
        from benchmarks.packing import pack_rows

        self.group_size = weight.group_size
        count = weight.copies(weight.n * weight.k // 2)
        self.copies = _clones(count, pack_rows(weight.q), weight.scales)

    def release(self) -> None:
        self.copies = []

    def candidates(self, problem: Problem) -> list[Candidate]:
        from benchmarks.triton_kernels import matmul

        out = poisoned(problem)

        def call(words: torch.Tensor, scales: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: matmul(problem.a, words, scales, out, self.group_size, self.split)

        return [Candidate(self.name, [call(*tensors) for tensors in self.copies])]


PEERS: dict[str, Callable[[], Any]] = {
    "cublas": Cublas,
    "humming": Humming,
    "gemlite": Gemlite,
    "torch-int4": TorchInt4,
    "triton-splitk": lambda: TritonKernel(4),
    "triton-dp": lambda: TritonKernel(1),
    "collective": Collective,
}


def parse_peers(text: str) -> list[str]:
    """Peer keys from 'cublas,humming', 'all' or 'none'. Raises ValueError for an unknown one."""
    if text.strip() in ("all", "none"):
        return list(PEERS) if text.strip() == "all" else []
    keys = [p.strip() for p in text.split(",") if p.strip()]
    unknown = [key for key in keys if key not in PEERS]
    if unknown:
        raise ValueError(f"peers={unknown[0]!r} is not one of {', '.join(PEERS)}, all, none")
    return keys
