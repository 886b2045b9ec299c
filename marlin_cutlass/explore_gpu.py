"""The timer of explore and tune on a real GPU: weights made on the device, cold-L2 graphs."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from marlin_cutlass import collective, library, pack, pack_sparse
from marlin_cutlass.bench import copies_for, dense_weight, make_weight, pruned, relative_error
from marlin_cutlass.explore_measure import DeviceInfo, Format
from marlin_cutlass.report import environment

TORCH_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class _Graph:
    graph: Any
    calls: int
    m: int


class GpuTimer:
    """Times kernels of the loaded table by name (see explore_measure.Timer)."""

    def __init__(self, place: str = "cuda") -> None:
        self.place = place
        self.launcher = library.load()
        env = environment()
        capability = torch.cuda.get_device_capability()
        self.device = DeviceInfo(
            env["gpu"],
            env["sms"],
            capability,
            env["l2_bytes"],
            env.get("driver_version", ""),
            torch.__version__,
        )
        self._stream = torch.cuda.Stream()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(64)]
        self._last_burst = 0.0
        self.weights: list[Any] = []
        self.repacked: list[Any] = []  # copies for kernels of the family collective, when asked for

    def open(self, n: int, k: int, fmt: Format, max_m: int) -> int:
        """Random weight, activations [max_m, k] and their fp32 product without TF32."""
        self.close()
        self.fmt, self.n, self.k = fmt, n, k
        dtype = TORCH_DTYPES[fmt.dtype]
        q, scales = make_weight(n, k, group_size=fmt.group_size, dtype=dtype, device=self.place)
        zeros = torch.randint_like(scales, 0, 17).to(torch.uint8) if fmt.zeros else None
        if fmt.sparse:
            q = pruned(q)
            packed = pack_sparse(q, scales, group_size=fmt.group_size)
        else:
            packed = pack(q, scales, zeros, group_size=fmt.group_size)
        count = copies_for(packed.packed.numel(), self.device.l2_bytes)
        self.weights = [packed] + [packed.clone() for _ in range(count - 1)]
        gen = torch.Generator(device=self.place).manual_seed(max_m)
        a = torch.randn(max_m, k, device=self.place, generator=gen) * 0.5
        self.a = a.to(dtype)
        self.reference = self._product(q, scales, zeros)
        self.out = torch.empty(max_m, n, device=self.place, dtype=dtype)
        torch.cuda.synchronize()
        return count

    def _product(self, q, scales, zeros) -> torch.Tensor:
        """a @ w in fp32: [max_m, n]."""
        previous = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            a = self.a.float()
            product = a @ dense_weight(q, scales).t()
            if zeros is not None:  # (q - z) s = (q - 8) s + (8 - z) s
                groups = scales.shape[0]
                sums = a.view(a.shape[0], groups, -1).sum(-1)
                product += sums @ ((8.0 - zeros.float()) * scales.float())
            return product
        finally:
            torch.backends.cuda.matmul.allow_tf32 = previous

    def close(self) -> None:
        self.weights, self.repacked = [], []
        self.a = self.reference = self.out = None

    def _call(self, index: int, m: int, copy: int) -> None:
        w = self.weights[copy]
        torch.ops.marlin_cutlass.gemm_out.default(
            self.a[:m],
            w.packed,
            w.col_scale,
            None,
            None,
            w.n,
            w.k,
            w.group_size,
            w.has_zeros,
            self.out[:m],
            index,
        )

    def _calls(self, kernel: str) -> Callable[[int, int], object]:
        """call(m, copy): one launch of a kernel."""
        if collective.is_collective(kernel):
            return self._collective_calls(kernel)
        index = self._index(kernel)
        return lambda m, copy: self._call(index, m, copy)

    def _collective_calls(self, kernel: str) -> Callable[[int, int], object]:
        unit = collective.find(kernel, self.fmt.dtype, collective.built())
        if not self.repacked:
            first = collective.repack(self.weights[0], self.a.dtype)
            self.repacked = [first] + [first.clone() for _ in self.weights[1:]]
        weights, a, out = self.repacked, self.a, self.out
        return lambda m, copy: collective.run(unit, a[:m], weights[copy], out[:m])

    def _index(self, kernel: str) -> int:
        f = self.fmt
        capability = self.device.capability
        return library.forced_index(kernel, capability, f.dtype, f.zeros, f.group_size, f.sparse)

    def _error(self, m: int) -> float:
        return relative_error(self.out[:m], self.reference[:m])

    def call(self, kernel: str, m: int, copy: int) -> None:
        """One call on one copy of the weight, finished when this returns."""
        self._calls(kernel)(m, copy)
        torch.cuda.synchronize()

    def check(self, kernel: str, m: int) -> float:
        self.out[:m].fill_(float("nan"))
        self.call(kernel, m, 0)
        return self._error(m)

    def capture(self, kernel: str, m: int, pdl: bool, calls: int, warm: bool = False) -> _Graph:
        call, copies = self._calls(kernel), 1 if warm else len(self.weights)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        self.launcher.set_option("pdl", pdl)
        try:
            # NOTE: not torch.cuda.graph, which collects garbage and empties the cache each time.
            with torch.cuda.stream(self._stream):
                graph.capture_begin()
                try:
                    for i in range(calls):
                        call(m, i % copies)
                finally:
                    graph.capture_end()
        finally:
            self.launcher.set_option("pdl", os.environ.get("MARLIN_CUTLASS_PDL", "1") != "0")
        return _Graph(graph, calls, m)

    def burst(self, graph: _Graph, replays: int) -> list[float]:
        """Replays enqueued back to back: the host's time to start one hides behind the last."""
        self.out[: graph.m].fill_(float("nan"))
        events = self._events[: replays + 1]
        events[0].record()
        for event in events[1:]:
            graph.graph.replay()
            event.record()
        events[-1].synchronize()
        self._last_burst = time.perf_counter()
        pairs = itertools.pairwise(events[1:])
        return [start.elapsed_time(end) * 1e3 / graph.calls for start, end in pairs]

    def chain_error(self, graph: _Graph) -> float:
        return self._error(graph.m)

    def rest(self, seconds: float) -> None:
        left = self._last_burst + seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
