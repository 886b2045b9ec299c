"""Decoder models of Llama and Qwen3 shape for `llm.py`: weights made on the spot, in FP16 or INT4.

The architecture is Transformers' (its configurations are read, and tests hold the logits against
LlamaForCausalLM and Qwen3ForCausalLM); q, k, v and gate, up are one product each, as engines fuse
them; of INT4 weights the kernel of the latter also applies SwiGLU. With several GPUs each rank
makes its own part: columns of qkv and gate_up, rows of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import llm_kernels as kernels
from benchmarks.llm_attention import attention
from marlin_cutlass import PackedWeight, QuantLinear, gemm
from marlin_cutlass.layout import (
    BLOCK_COLUMNS,
    CODE_BYTES,
    SLACK_BLOCKS,
    block_bytes,
    ceil_div,
    packed_bytes,
)
from marlin_cutlass.pack import COLUMN_SCALE, HIGH_SHIFT, LOW_SHIFT

# Random weights of about this rms keep activations of random models in range: 1 / sqrt(hidden).
CODE_RMS = math.sqrt(sum((q - 8) ** 2 for q in range(1, 16)) / 16)  # see without_minus_eight
GROUP_SIZE = 128


class Reduce(Protocol):
    """Adds a [M, H] tensor over ranks, or hands all ranks' tensors to the kernel behind.

    `buffer` is where it would like that tensor written. `choose`: from logits [B, part of the
    vocabulary] of every rank, the first of token `first` here, the largest's token to ids [B, 1],
    and start += tokens; between two calls lies a sum.
    """

    def __call__(self, x: Tensor) -> Tensor | kernels.Pending: ...

    def buffer(self, m: int, width: int) -> Tensor | None: ...

    def choose(
        self, logits: Tensor, first: int, ids: Tensor, start: Tensor, tokens: int
    ) -> None: ...


@dataclass(frozen=True)
class Shard:
    """This process' part of a tensor-parallel model."""

    rank: int = 0
    world: int = 1
    reduce: Reduce | None = None


def without_minus_eight(codes: Tensor) -> Tensor:
    """Packed symmetric codes, uint8 [..., 4 i], with 0 in place of each -8: code 8 for code 0."""
    words = codes.contiguous().view(torch.int32)
    words = (words << 30) | ((words >> 2) & 0x3FFFFFFF)  # codes to bits 0, 4, ... 28
    used = words | (words >> 1) | (words >> 2) | (words >> 3)
    words = words | ((~used & 0x11111111) << 3)
    words = (words << 2) | ((words >> 30) & 3)
    return words.view(torch.uint8).view(codes.shape)


def random_packed(
    k: int, n: int, device, generator: torch.Generator, group_size: int = GROUP_SIZE
) -> PackedWeight:
    """Random symmetric INT4 weight of rms about 1 / sqrt(k), written straight into the layout.

    Every byte pattern is a valid code, so the codes are random bytes: a 70B model takes seconds.
    Without -8, so that weights have mean 0: a mean of -0.5 codes adds up over K to an offset that
    the next layer multiplies, and overflows float16 some twenty layers on.
    """
    if group_size != 128 and group_size != -1:
        raise ValueError(f"group_size={group_size}: random weights have 128 or -1")
    width = block_bytes(group_size, False)
    total = packed_bytes(k, n, group_size, False)
    options = {"device": device, "generator": generator}
    packed = torch.randint(0, 256, (total,), dtype=torch.uint8, **options)
    blocks = packed.view(-1, width)
    blocks[:, :CODE_BYTES] = without_minus_eight(blocks[:, :CODE_BYTES])
    if group_size == 128:  # entries [atom][row] of (sA, sB) after the codes
        # Normalised scales lie in [2^-7, 2^-6), also once rounded: 2^-6 would be infinite here.
        scales = (1 + 0.99 * torch.rand(blocks.shape[0], 32, 2, **options)) * COLUMN_SCALE
        factor = torch.tensor([2.0**LOW_SHIFT, 2.0**HIGH_SHIFT], device=device)
        entries = (scales.half().float() * factor).half().view(torch.uint8)
        blocks[:, CODE_BYTES:] = entries.view(blocks.shape[0], -1)
    blocks[-SLACK_BLOCKS:] = 0
    mean = COLUMN_SCALE * (1.5 if group_size == 128 else 1)
    exponent = round(math.log2(1 / (math.sqrt(k) * CODE_RMS * mean)))
    columns = ceil_div(n, BLOCK_COLUMNS) * BLOCK_COLUMNS
    col_scale = torch.zeros(columns, device=device)
    col_scale[:n] = 2.0**exponent
    return PackedWeight(packed, col_scale, None, n, k, group_size, False)


class DenseLinear(nn.Module):
    """FP16 weight [N, K] without a bias."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def multiply_into(layer: nn.Module, x: Tensor, out: Tensor) -> Tensor:
    """layer(x) for a layer without a bias, written to `out`."""
    if isinstance(layer, DenseLinear):
        return torch.mm(x, layer.weight.t(), out=out)
    return gemm(x, layer.weight_packed, out=out)


def random_dense(k: int, n: int, device, generator, dtype=torch.float16) -> Tensor:
    """Random weight [N, K] of rms 1 / sqrt(k)."""
    weight = torch.empty(n, k, device=device, dtype=dtype)
    return weight.normal_(0, 1 / math.sqrt(k), generator=generator)


def linear(kind: str, k: int, n: int, device, generator) -> nn.Module:
    """A linear layer of `kind` "fp16" or "int4" with random weights."""
    if kind == "fp16":
        return DenseLinear(random_dense(k, n, device, generator))
    if kind == "int4":
        return QuantLinear.from_packed(random_packed(k, n, device, generator))
    raise ValueError(f"kind={kind!r}: 'fp16' or 'int4' is required")


def swiglu(gate_up: nn.Module, x: Tensor) -> Tensor:
    """silu(gate) * up. Of an INT4 layer, whose weights are random, the columns count as
    interleaved (`fuse_gate_up`), and its kernel stores that."""
    if isinstance(gate_up, DenseLinear):
        return kernels.silu_mul(gate_up(x))
    return gate_up(x, swiglu=True)


class Layer(nn.Module):
    """One decoder layer; `heads` and `kv_heads` are this rank's."""

    def __init__(self, config: Any, kind: str, shard: Shard, device, generator) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, head_dim(config)
        self.kv_heads = config.num_key_value_heads // shard.world
        self.heads = config.num_attention_heads // shard.world
        width = config.intermediate_size // shard.world
        make = {"device": device, "generator": generator}
        self.qkv = linear(kind, hidden, (self.heads + 2 * self.kv_heads) * dim, **make)
        self.o = linear(kind, self.heads * dim, hidden, **make)
        self.gate_up = linear(kind, hidden, 2 * width, **make)
        self.down = linear(kind, width, hidden, **make)
        ones = {"dtype": torch.float16, "device": device}
        self.register_buffer("norm_1", torch.ones(hidden, **ones))
        self.register_buffer("norm_2", torch.ones(hidden, **ones))
        for name in ("q_norm", "k_norm"):
            norm = torch.ones(dim, **ones) if "qwen3" in config.model_type else None
            self.register_buffer(name, norm)


def head_dim(config: Any) -> int:
    """Size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_theta(config: Any) -> float:
    """Base of the rotation, where Transformers 5 keeps it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", 10000.0))


class Model(nn.Module):
    """A decoder with a static cache. config: LlamaConfig or Qwen3Config; kind: "fp16" or "int4".

    Embedding, norms and output head are FP16 in both. Of the head each rank has the rows of its
    part of the vocabulary.
    """

    def __init__(
        self, config: Any, kind: str, device="cpu", shard: Shard | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.config, self.shard = config, shard or Shard()
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(config, name) % self.shard.world:
                size = getattr(config, name)
                raise ValueError(f"{name}={size} is not a multiple of {self.shard.world} GPUs")
        same = torch.Generator(device).manual_seed(seed)  # equal on every rank
        own = torch.Generator(device).manual_seed(seed + 1 + self.shard.rank)
        shape = (config.hidden_size, config.vocab_size)
        self.register_buffer("embedding", random_dense(*shape, device, same) * 4)
        part = ceil_div(config.vocab_size, self.shard.world)
        self.first_token = self.shard.rank * part
        head = random_dense(*shape, device, same)[self.first_token : self.first_token + part]
        self.register_buffer("head", head.clone())
        self.register_buffer(
            "norm", torch.ones(config.hidden_size, dtype=torch.float16, device=device)
        )
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([Layer(config, kind, self.shard, device, own) for _ in layers])
        self.eps, self.dim = config.rms_norm_eps, head_dim(config)
        self.start = torch.zeros(1, dtype=torch.int64, device=device)

    def linear_bytes(self) -> int:
        """Bytes of the weights of all linear layers on this rank, without the output head."""
        names = ("qkv", "o", "gate_up", "down")
        parts = [getattr(layer, name) for layer in self.layers for name in names]
        return sum(b.nbytes for part in parts for b in part.buffers())

    def weight_bytes(self) -> int:
        """Bytes of all weights on this rank."""
        return self.linear_bytes() + self.embedding.nbytes + self.head.nbytes

    def allocate(self, batch: int, length: int) -> None:
        """A cache for `batch` sequences of up to `length` tokens, at position 0."""
        device, dim = self.start.device, self.dim
        shape = (batch, self.layers[0].kv_heads, length, dim)
        zeros = {"dtype": torch.float16, "device": device}
        self.cache = [
            (torch.zeros(shape, **zeros), torch.zeros(shape, **zeros)) for _ in self.layers
        ]
        power = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        angle = (
            torch.arange(length, device=device).float()[:, None] / rope_theta(self.config) ** power
        )
        self.cos, self.sin = angle.cos(), angle.sin()
        self.start.zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [B, T] at the current position (T > 1 only from 0) -> logits of the last token,
        [B, this rank's part of the vocabulary]. The position advances by T, on the device."""
        logits = self.logits(ids)
        self.start += ids.shape[1]
        return logits

    def logits(self, ids: Tensor) -> Tensor:
        """`forward` without advancing the position."""
        tokens = ids.shape[1]
        x = functional.embedding(ids.reshape(-1), self.embedding)
        residual = None
        for layer, (keys, values) in zip(self.layers, self.cache):
            x, residual = self._layer(layer, x, residual, keys, values, tokens)
        if tokens > 1:
            last = slice(tokens - 1, None, tokens)
            (x,) = kernels.added(x)
            x, residual = x[last].contiguous(), residual[last].contiguous()
        x, _ = kernels.add_norm(x, residual, self.norm, self.eps)
        return functional.linear(x, self.head)

    def _layer(self, layer: Layer, x, residual, keys, values, tokens: int):
        x, residual = kernels.add_norm(x, residual, layer.norm_1, self.eps)
        norms = None if layer.q_norm is None else (layer.q_norm, layer.k_norm)
        place = (self.start, tokens, self.cos, self.sin, norms, self.eps, keys, values)
        x = self._row(layer.o, attention(layer.qkv(x), *place))
        x, residual = kernels.add_norm(x, residual, layer.norm_2, self.eps)
        return self._row(layer.down, swiglu(layer.gate_up, x)), residual

    def _row(self, layer: nn.Module, x: Tensor) -> Tensor | kernels.Pending:
        """A row-parallel layer: the ranks' partial sums, added or for `add_norm` to add."""
        reduce = self.shard.reduce
        if reduce is None:
            return layer(x)
        out = reduce.buffer(x.shape[0], self.config.hidden_size)
        return reduce(layer(x) if out is None else multiply_into(layer, x, out))


class Decoder:
    """Greedy decoding: a prefill, then one step after the other; each may be a CUDA graph."""

    def __init__(self, model: Model, batch: int, length: int) -> None:
        self.model, self.graph, self.prefill_graph = model, None, None
        model.allocate(batch, length)
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.start.device)

    def _advance(self, ids: Tensor) -> None:
        """The token that follows `ids` [B, T] into self.ids, and the position T further."""
        model, tokens = self.model, ids.shape[1]
        logits, reduce = model.logits(ids), model.shard.reduce
        if reduce is None:
            kernels.next_token(logits, self.ids, model.start, tokens)
        else:
            reduce.choose(logits, model.first_token, self.ids, model.start, tokens)

    def step(self) -> None:
        """Next token of every sequence into `ids`, in place."""
        self._advance(self.ids)

    def _prefill(self, prompt: Tensor) -> None:
        self.model.start.zero_()
        self._advance(prompt)

    def capture(self, prompt: Tensor | None = None) -> None:
        """Record `step`, and the prefill of prompts of the shape of `prompt` if one is given."""
        self.graph = record(self.step)
        if prompt is not None:
            self.prompt = prompt.clone()
            pool = self.graph.pool()
            self.prefill_graph = record(lambda: self._prefill(self.prompt), pool, warm_up=1)
        self.model.start.zero_()

    def prefill(self, prompt: Tensor) -> None:
        """prompt [B, T] from position 0; leaves the first new token in `ids`."""
        if self.prefill_graph is None or prompt.shape != self.prompt.shape:
            self._prefill(prompt)
        else:
            self.prompt.copy_(prompt)
            self.prefill_graph.replay()

    def decode(self, steps: int) -> None:
        """`steps` more tokens."""
        for _ in range(steps):
            self.step() if self.graph is None else self.graph.replay()


def record(
    function: Callable[[], None], pool: Any = None, warm_up: int = 3
) -> torch.cuda.CUDAGraph:
    """function() as a CUDA graph, called before that: kernels load and compile at their first call.

    pool: that of a graph which never runs at the same time.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread may make calls that a capture of all threads forbids.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph
