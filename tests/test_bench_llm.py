"""The decoder that benchmarks/llm.py times: against Transformers, and its pieces."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import llm, llm_attention, llm_kernels, llm_profile, llm_tables
from benchmarks.llm_model import (
    Decoder,
    DenseLinear,
    Model,
    Shard,
    head_dim,
    random_packed,
    rope_theta,
)
from marlin_cutlass import QuantLinear, dequantize, pack
from marlin_cutlass.pack import unpack
from marlin_cutlass.pinning import Pin
from marlin_cutlass.sharding import fuse_columns, slice_columns

transformers = pytest.importorskip("transformers", reason="needs transformers")
ROOT = Path(__file__).resolve().parents[1]


def tiny(kind="llama", **changes):
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "head_dim": 32,
        "max_position_embeddings": 64,
        **changes,
    }
    name = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[kind]
    return getattr(transformers, name)(**sizes)


def twin(model, config):
    """The Transformers model with the weights of ours."""
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    state = {"model.embed_tokens.weight": model.embedding, "lm_head.weight": model.head}
    state["model.norm.weight"] = model.norm
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}."

        def dense(part):
            return part.weight if isinstance(part, DenseLinear) else part.dequantize()

        dim = model.dim
        sizes = [layer.heads * dim, layer.kv_heads * dim, layer.kv_heads * dim]
        for name, weight in zip("qkv", dense(layer.qkv).split(sizes)):
            state[f"{at}self_attn.{name}_proj.weight"] = weight
        both = dense(layer.gate_up)
        if isinstance(layer.gate_up, DenseLinear):
            gate, up = both.chunk(2)
        else:  # two of the gate, the same two of up
            gate, up = (part.flatten(0, 1) for part in both.unflatten(0, (-1, 2, 2)).unbind(1))
        state |= {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up}
        state[f"{at}self_attn.o_proj.weight"] = dense(layer.o)
        state[f"{at}mlp.down_proj.weight"] = dense(layer.down)
        state[f"{at}input_layernorm.weight"] = layer.norm_1
        state[f"{at}post_attention_layernorm.weight"] = layer.norm_2
        if layer.q_norm is not None:
            state[f"{at}self_attn.q_norm.weight"] = layer.q_norm
            state[f"{at}self_attn.k_norm.weight"] = layer.k_norm
    theirs = theirs.to_empty(device="cpu")
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and not [m for m in missing if "inv_freq" not in m]
    theirs.model.rotary_emb.__init__(config)  # to_empty lost its buffer
    return theirs.eval()


def randomise_norms(model):
    for name, buffer in model.named_buffers():
        if "norm" in name:
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, device=buffer.device))


@pytest.mark.parametrize("kind", ["fp16", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_logits_of_prefill_and_decode_are_those_of_transformers(family, kind):
    config = tiny(family)
    model = Model(config, kind)
    randomise_norms(model)
    theirs = twin(model, config)
    ids = torch.randint(0, 97, (3, 9))
    expected = theirs(ids).logits.float()
    model.allocate(3, 16)
    mine = [model(ids[:, :6])] + [model(ids[:, i : i + 1]) for i in range(6, 9)]
    for i, logits in zip(range(5, 9), mine):
        error = float((logits.float() - expected[:, i]).abs().max())
        assert error < 2e-2 * float(expected.abs().max()), (i, error)
    assert int(model.start) == 9


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_norm_adds_the_parts_of_all_ranks(count):
    parts = tuple(torch.randn(3, 64).half() for _ in range(count))
    residual, weight = torch.randn(3, 64).half(), torch.rand(64).half()
    want, total = llm_kernels.add_norm(sum(parts), residual, weight, 1e-5)
    got, sums = llm_kernels.add_norm(parts, residual, weight, 1e-5)
    assert torch.equal(got, want) and torch.equal(sums, total)
    (alone,) = llm_kernels.added(parts)
    assert torch.equal(alone, sum(parts))


@pytest.fixture
def interpreted():
    """The Triton kernels on the CPU, by Triton's interpreter (TRITON_INTERPRET=1 before import)."""
    triton = pytest.importorskip("triton", reason="needs triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    try:
        int(numpy.zeros(1, int))
    except TypeError:
        pytest.skip("Triton 3.6 interprets loops only with NumPy before 2.4")
    llm_kernels.FORCE_TRITON = True
    yield
    llm_kernels.FORCE_TRITON = False


TILES = [
    (8, (128, 4, 1)),
    (8, (16, 1, 1)),
    (8, (16, 2, 2)),
    (8, (128, 4)),
    (2, (128, 4)),
    (2, (32, 2)),
]


@pytest.mark.parametrize("kv_heads, tile", TILES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_triton_kernels_do_what_the_plain_ones_do(interpreted, monkeypatch, family, kv_heads, tile):
    for name in ("TILES_ONE", "TILES_GROUP"):
        monkeypatch.setattr(llm_attention, name, ((math.inf, tile),))
    config = tiny(family, num_attention_heads=8, num_key_value_heads=kv_heads, hidden_size=256)
    model = Model(config, "fp16")
    randomise_norms(model)
    ids = torch.randint(0, 97, (2, 70))
    logits = []
    for forced in (True, False):
        llm_kernels.FORCE_TRITON = forced
        model.allocate(2, 100)
        logits.append([model(ids[:, :66])] + [model(ids[:, i : i + 1]) for i in range(66, 70)])
    for triton_logits, plain in zip(*logits):
        assert float((triton_logits - plain).abs().max()) < 1e-2 * float(plain.abs().max())


@pytest.mark.parametrize("position", [0, 1, 15, 16, 17, 31, 32, 33, 64, 99])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kv_heads, tile", TILES)
def test_decode_attention_sees_the_keys_before_its_token_and_no_other(
    interpreted, monkeypatch, kv_heads, tile, normed, position
):
    for name in ("TILES_ONE", "TILES_GROUP"):
        monkeypatch.setattr(llm_attention, name, ((math.inf, tile),))
    batch, heads, dim, length = 2, 8, 64, 100
    qkv = 3 * torch.randn(batch, (heads + 2 * kv_heads) * dim).half()
    angle, start = torch.rand(length, dim // 2), torch.tensor([position])
    norms = (torch.rand(dim).half() + 0.5, torch.rand(dim).half() + 0.5) if normed else None
    place = (start, 1, angle.cos(), angle.sin(), norms, 1e-6)
    plain = [torch.randn(batch, kv_heads, length, dim).half() for _ in range(2)]
    mine = [part.clone() for part in plain]
    for part in mine:
        part[:, :, position:] = math.nan  # as memory that nothing was written to
    got = llm_attention.attention(qkv, *place, *mine)
    q = llm_attention._rope_cache_torch(qkv, *place, *plain)
    wanted = llm_attention.attend(q, *plain, start, 1)
    torch.testing.assert_close(got, wanted, rtol=4e-3, atol=4e-3)
    for part, other in zip(mine, plain):
        seen = slice(position + 1)
        torch.testing.assert_close(part[:, :, seen], other[:, :, seen], rtol=2e-3, atol=4e-3)
        assert bool(part[:, :, position + 1 :].isnan().all())


@pytest.mark.parametrize("with_residual", [False, True])
def test_the_triton_norm_adds_two_parts_in_one_launch(interpreted, with_residual):
    parts = tuple(torch.randn(3, 96).half() for _ in range(2))
    residual, weight = torch.randn(3, 96).half() if with_residual else None, torch.rand(96).half()
    exact = sum(x.float() for x in (*parts, residual) if x is not None)
    norm, total = llm_kernels.add_norm(parts, residual, weight, 1e-5)
    torch.testing.assert_close(total.float(), exact, rtol=2e-3, atol=2e-3)
    wanted = llm_kernels.rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(norm, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("width", [97, 40000])
def test_the_next_token_is_the_first_of_the_largest_logits(interpreted, width):
    logits = torch.randn(3, width).clamp_(max=2.0).half()
    logits[1] = -torch.rand(width).half() - 1
    ids, start = torch.zeros(3, 1, dtype=torch.int64), torch.tensor([7])
    llm_kernels.next_token(logits, ids, start, 5)
    best = logits.max(1, keepdim=True).values
    assert ids[:, 0].tolist() == [int((row == top).nonzero()[0]) for row, top in zip(logits, best)]
    assert start.item() == 12


HALF, FLOAT, LONG = "*fp16", "*fp32", "*i64"
ATTENTION = dict.fromkeys(("qkv", "q_norm", "k_norm", "keys", "values", "out"), HALF)
ATTENTION |= {"start": LONG, "cos": FLOAT, "sin": FLOAT}
ATTENTION |= {"eps": "fp32", "scale": "fp32", "length": "i32"}
ADD_NORM = dict.fromkeys(("x", "other", "residual", "weight", "out"), HALF)
ADD_NORM |= dict.fromkeys(("flags", "other_flags"), "*i32") | {"eps": "fp32", "width": "i32"}
ADDING = {"has_other": True, "has_residual": True, "limit": 1000, "block": 1024}
ARGMAX = {"best": FLOAT, "where": "*i32", "ids": LONG, "start": LONG, "tokens": "i32"}
ARGMAX |= {"keys": LONG, "other_keys": LONG, "first": "i32"}
KERNELS = {  # types, constants, may load before it waits
    "_add_norm": (ADD_NORM, {**ADDING, "meets": False}, True),
    "_add_norm of two GPUs": (ADD_NORM, {**ADDING, "meets": True}, True),
    "_silu_mul": ({"x": HALF, "out": HALF, "width": "i32"}, {"block": 512}, False),
    "_argmax_part": (
        {"logits": HALF, "best": FLOAT, "where": "*i32", "width": "i32"},
        {"block": 1024},
        False,
    ),
    "_argmax_whole": (ARGMAX, {"parts": 32, "meets": False, "limit": 1000}, False),
    "_argmax_whole of two GPUs": (ARGMAX, {"parts": 32, "meets": True, "limit": 1000}, False),
    "_rope_cache": (
        {**ATTENTION, "q_out": HALF, "tokens": "i32"},
        {"heads": 4, "kv_heads": 2, "dim": 64, "normed": True, "block": 16},
        True,
    ),
    "_decode_one": (
        ATTENTION,
        {"heads": 4, "dim": 64, "normed": False, "block": 32, "tiles": 2, "slots": 16},
        True,
    ),
    "_decode_group": (
        ATTENTION,
        {"kv_heads": 4, "group": 2, "rows": 16, "dim": 64, "normed": True, "block": 32},
        True,
    ),
}


def ptx_of(name, mode):
    """PTX for sm_90 of a kernel in KERNELS."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = name.split()[0]
    kernel = getattr(llm_kernels, function, None) or getattr(llm_attention, function)
    if not isinstance(kernel, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET=1 compiles nothing")
    types, constants, _ = KERNELS[name]
    constants = {**constants, "pdl": llm_kernels.PDL_MODES.index(mode)}
    assert set(kernel.arg_names) <= types.keys() | constants.keys()
    source = ASTSource(
        kernel,
        {argument: types.get(argument, "constexpr") for argument in kernel.arg_names},
        {(kernel.arg_names.index(k),): v for k, v in constants.items()},
    )
    options = {"num_warps": 4, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize("mode", llm_kernels.PDL_MODES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compiled_for_hopper_wait_before_they_store(name, mode):
    text, (_, constants, early_loads) = ptx_of(name, mode), KERNELS[name]
    wait, trigger = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    assert ("atom.global" in text) == constants.get("meets", False)
    if mode == "off":
        assert "griddepcontrol" not in text
        return
    assert text.count(wait) == text.count(trigger) == 1
    before, behind = text.split(wait)
    assert "st.global" not in before and "st.global" in behind and "ld.global" in behind
    assert "atom.global" not in before
    assert ("ld.global" in before) == early_loads
    assert (trigger in before) == (mode == "early")


def model_on_gpu(kind, kv_heads):
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": kv_heads, "head_dim": 64}
    model = Model(tiny(**sizes, vocab_size=512), kind, torch.device("cuda"))
    randomise_norms(model)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 20, 50])  # every size of tile
@pytest.mark.parametrize("kv_heads", [16, 4])
@torch.no_grad()
def test_kernels_on_the_gpu_do_what_the_plain_ones_do(monkeypatch, kv_heads, batch):
    model = model_on_gpu("fp16", kv_heads)
    ids = torch.randint(0, 512, (batch, 140), device="cuda")
    logits = []
    for triton in (True, False):
        for module in (llm_kernels, llm_attention):
            monkeypatch.setattr(module, "use_triton", lambda x, on=triton: on)
        model.allocate(batch, 140)
        logits.append([model(ids[:, :126])] + [model(ids[:, i : i + 1]) for i in range(126, 140)])
    for ours, plain in zip(*logits):
        assert float((ours - plain).abs().max()) < 1e-2 * float(plain.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp16", "int4"])
@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("batch", [1, 20])
@torch.no_grad()
def test_programmatic_launch_changes_no_bits_of_a_captured_generation(kind, kv_heads, batch):
    if llm_kernels.pdl_missing():
        pytest.skip(llm_kernels.pdl_missing())
    model = model_on_gpu(kind, kv_heads)
    prompt = torch.randint(0, 512, (batch, 64), device="cuda")
    results = []
    try:
        for mode in llm_kernels.PDL_MODES:
            llm_kernels.set_pdl(mode)
            decoder = Decoder(model, batch, 140)
            decoder.capture(prompt)
            for _ in range(3):
                decoder.prefill(prompt)
                decoder.decode(70)
            assert int(model.start) == 134
            results.append([decoder.ids.clone(), *(part for pair in model.cache for part in pair)])
    finally:
        llm_kernels.set_pdl("auto")
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_programmatic_launch_is_refused_where_it_cannot_work(monkeypatch):
    monkeypatch.setattr(llm_kernels, "_pdl", "auto")
    monkeypatch.setattr(llm_kernels, "pdl_missing", lambda: "needs another GPU")
    assert llm_kernels.pdl_mode() == "off"
    assert llm_kernels.launch_options(4, 1) == {"pdl": 0, "num_warps": 4}
    with pytest.raises(ValueError, match="pdl='early': needs another GPU"):
        llm_kernels.set_pdl("early")
    with pytest.raises(ValueError, match="pdl='on': one of off, late, early, auto"):
        llm_kernels.set_pdl("on")
    monkeypatch.setattr(llm_kernels, "pdl_missing", lambda: None)
    assert llm_kernels.pdl_mode() == "early"
    assert llm_kernels.pdl_text() == "early, late beyond 32 rows"
    late, early = ({"pdl": level, "num_warps": 4, "launch_pdl": True} for level in (1, 2))
    most = llm_kernels.EARLY_ROWS
    assert llm_kernels.launch_options(4, most) == early
    assert llm_kernels.launch_options(4, most + 1) == late
    llm_kernels.set_pdl("late")
    assert llm_kernels.launch_options(4, 1) == late
    llm_kernels.set_pdl("early")
    assert llm_kernels.launch_options(4, most + 1) == early


def test_a_profile_splits_the_time_line_among_kinds():
    # Two replays: a gemm from 0 to 10, a norm that waits for it from 4 to 12, a gap, a copy.
    events = []
    for start in (0.0, 20.0):
        events += [
            ("_add_norm", start + 4, 8.0),
            ("w4a16_hopper_f16_g128_m8", start, 10.0),
            ("Memcpy DtoD", start + 15, 5.0),
        ]
    rows = llm_profile.shares(events, replays=2)
    assert rows["our gemm"] == {"count": 1, "busy": 10, "alone": 10}
    assert rows["norm"] == {"count": 1, "busy": 8, "alone": 2}
    assert rows["other"] == {"count": 1, "busy": 5, "alone": 5}
    assert rows[llm_profile.GAP]["alone"] == 3
    assert sum(row["alone"] for row in rows.values()) == 20
    kinds = {
        "nvjet_hsh_64x8_64x16_4x1_v_bz_TNT": "cuBLAS",
        "void gemvx::kernel<int, int, __half>": "cuBLAS",
        "ncclDevKernel_AllReduce_Sum_f16_RING_LL": "sum over GPUs",
        "_decode_group": "attention",
        "void at::native::vectorized_gather_kernel<16, long>": "other",
    }
    assert {name: llm_profile.kind_of(name) for name in kinds} == kinds
    table = llm_profile.profile_table("a step", rows)
    assert table.row_count == len(rows) + 1


@torch.no_grad()
def test_decoder_continues_from_its_prompt_and_starts_again():
    model = Model(tiny(), "int4")
    decoder = Decoder(model, 2, 12)
    prompt = torch.randint(0, 97, (2, 4))
    runs = []
    for _ in range(2):
        tokens = []
        decoder.prefill(prompt)
        for _ in range(5):
            tokens.append(decoder.ids.clone())
            decoder.decode(1)
        runs.append(torch.cat(tokens, 1))
    assert torch.equal(*runs)
    model.allocate(2, 12)
    again = model(torch.cat([prompt, runs[0][:, :4]], 1)).argmax(-1)
    assert torch.equal(again, runs[0][:, 4])


@pytest.mark.parametrize("group_size", [128, -1])
def test_random_weights_are_a_legal_packed_weight_of_the_promised_size(group_size):
    k, n = 768, 1000
    generator = torch.Generator().manual_seed(1)
    weight = random_packed(k, n, "cpu", generator, group_size)
    weight.check()
    dense = dequantize(weight, torch.float32)
    assert bool(dense.isfinite().all())
    assert float(dense.square().mean().sqrt()) == pytest.approx(k**-0.5, rel=0.45)
    parts = unpack(weight)
    # no -8: a mean that is not 0 overflows float16 in deep models
    assert parts.codes[:k, :n].unique().tolist() == list(range(1, 16))
    assert abs(float(dense.mean())) < 0.01 * k**-0.5
    # what pack writes for the same codes and scales, except for the padding
    scales = (weight.col_scale * parts.scales.float())[:, :n]
    again = pack(parts.codes[:k, :n].contiguous(), scales, group_size=group_size)
    assert torch.equal(dequantize(again, torch.float32), dense)


def part_of(whole, rank, dim=32):
    """`whole` as rank `rank` of two holds it."""
    part = Model(whole.config, "int4", shard=Shard(rank, 2))
    for mine, full in zip(part.layers, whole.layers):

        def columns(layer, sizes):
            first, pieces = 0, []
            for size in sizes:
                at = first + rank * size // 2
                pieces.append(slice_columns(layer.weight_packed, at, at + size // 2))
                first += size
            return QuantLinear.from_packed(fuse_columns(pieces))

        mine.qkv = columns(full.qkv, [full.heads * dim] + [full.kv_heads * dim] * 2)
        mine.gate_up = full.gate_up.shard(rank, 2, "column")
        mine.o, mine.down = full.o.shard(rank, 2, "row"), full.down.shard(rank, 2, "row")
    return part


@torch.no_grad()
def test_tensor_parallel_parts_add_up():
    config = tiny(hidden_size=256, num_attention_heads=8, num_key_value_heads=2)
    whole = Model(config, "int4")
    ids = torch.randint(0, 97, (2, 5))
    whole.allocate(2, 8)
    expected = whole(ids)
    parts = [part_of(whole, rank) for rank in range(2)]
    for part in parts:
        part.allocate(2, 8)
    error = float((_lockstep(parts, ids) - expected).abs().max())
    assert error < 2e-2 * float(expected.abs().max())


def _lockstep(parts, ids):
    """Both ranks in two threads, adding their partial sums."""
    barrier, shared, out = threading.Barrier(2), [None, None], [None, None]

    class Reduce:
        def __init__(self, rank):
            self.rank = rank

        def buffer(self, m, width):
            return torch.empty(m, width, dtype=torch.float16) if self.rank else None

        def __call__(self, x):
            shared[self.rank] = x
            barrier.wait()
            total = (shared[0].float() + shared[1].float()).half()
            barrier.wait()
            return total

    @torch.no_grad()
    def run(rank):
        parts[rank].shard = Shard(rank, 2, Reduce(rank))
        out[rank] = parts[rank](ids)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    return torch.cat(out, 1)


@pytest.fixture
def small(monkeypatch):
    sizes = tiny(hidden_size=256, num_attention_heads=8).to_dict()
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "head_dim",
    )  # fmt: skip
    monkeypatch.setattr(llm, "MODELS", {"small": {name: sizes[name] for name in names}})


def call(tmp_path, *more):
    arguments = ["--models", "small", "--batches", "1,2", "--tokens-in", "5", "--tokens-out", "4"]
    arguments += ["--repeats", "1", "--layers", "2", "--json", str(tmp_path / "llm.json"), *more]
    app = typer.Typer()
    app.command()(llm.main)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_run_writes_table_json_and_plot_and_can_be_shown_again(small, tmp_path):
    result = call(tmp_path, "--plot", str(tmp_path / "llm.svg"))
    assert result.exit_code == 0, result.output
    report = llm_tables.LlmReport.load(tmp_path / "llm.json")
    assert [(c.kind, c.batch) for c in report.cells] == [
        (kind, batch) for kind in ("fp16", "int4") for batch in (1, 2)
    ]
    assert all(c.status == "ok" and c.cosine > 0.99 for c in report.cells)
    assert report.finished and not report.skipped
    fp16, int4 = report.find("small", "fp16", 1), report.find("small", "int4", 1)
    assert int4.linear_bytes < 0.35 * fp16.linear_bytes
    assert fp16.ms_per_token == pytest.approx(fp16.decode_ms / 3)
    assert fp16.tokens_per_s == pytest.approx(4e3 / fp16.total_ms)
    assert report.speedup("small", 1) == pytest.approx(fp16.total_ms / int4.total_ms)
    assert (tmp_path / "llm.svg").read_text().count("<svg") == 1
    again = call(tmp_path, "--replot", str(tmp_path / "llm.json"))
    assert "small, 5 tokens in / 4 out" in again.output and "2.93" in again.output


def test_kernels_pinned_by_a_step_are_named(small, tmp_path, monkeypatch):
    found = [Pin(64, 128, 2, "w4a16_x", 0.002, 0.003), Pin(64, 64, 2, None, 0.003, 0.003)]
    seen = []

    def pin_kernels(model, rows, measure):
        seen.append((rows, measure()))
        return found

    monkeypatch.setattr(llm, "pin_kernels", pin_kernels)
    model = llm.Model(llm.configuration("small", 2), "int4")
    assert llm.pin(model, 3, (5, 4)) == ["128 x 64: w4a16_x, a step 3.000 -> 2.000 ms"]
    assert seen[0][0] == 3 and 0 < seen[0][1] < 60  # seconds of a step
    result = call(tmp_path, "--pin-step", "--gpus", "2")
    assert result.exit_code == 2 and "--pin-step is for one GPU" in result.output


def test_the_budget_ends_a_run_cleanly_and_a_broken_model_is_reported(small, tmp_path, monkeypatch):
    result = call(tmp_path, "--budget", "0.0001")
    assert result.exit_code == 0 and "ended the run early" in result.output
    monkeypatch.setattr(llm, "MIN_COSINE", 2.0)
    result = call(tmp_path)
    report = llm_tables.LlmReport.load(tmp_path / "llm.json")
    assert not report.cells and "cosine" in report.skipped["small int4"]


def test_configurations_are_those_of_the_published_models():
    config = llm.configuration("llama2-7b")
    assert config.hidden_size == 4096 and rope_theta(config) == 10000.0
    qwen = llm.configuration("qwen3-32b")
    assert qwen.model_type == "qwen3" and head_dim(qwen) == 128 and rope_theta(qwen) == 1e6
    assert rope_theta(llm.configuration("llama3-8b", 2)) == 500000.0
    assert llm.configuration("llama3-8b", 2).num_hidden_layers == 2


def test_ranks_choose_the_token_of_the_largest_logit(tmp_path):
    script = tmp_path / "choose.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch\n"
        "from benchmarks import llm_parallel\n"
        "def run(rank, world, options):\n"
        "    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(1)).half()\n"
        "    logits[0, [3, 60]] = logits[1, 96] = 9\n"
        "    part = logits[:, :49] if rank == 0 else logits[:, 49:]\n"
        "    got = llm_parallel.best_token(part, 49 * rank)\n"
        "    assert torch.equal(got, logits.argmax(-1, keepdim=True)), (rank, got)\n"
        "    assert got[0] == 3 and got[1] == 96 and got.dtype == torch.int64\n"
        "if __name__ == '__main__':\n"
        "    llm_parallel.launch(run, 2, None)\n"
    )
    subprocess.run([sys.executable, script], check=True, timeout=120)


@pytest.mark.slow
def test_two_processes_over_gloo(small, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from benchmarks import llm\n"
        f"SIZES = {llm.MODELS['small']!r}\n"
        "def run(rank, world, options):\n"
        "    llm.MODELS['small'] = SIZES\n"
        "    llm.run(rank, world, options)\n"
        "if __name__ == '__main__':\n"
        "    llm.launch(run, 2, dict(models=['small'], kinds=['int4'], batches=[1],\n"
        "        tokens=(4, 3), budget=None, layers=None, repeats=1, plot=None,\n"
        f"        all_reduce='auto', json={str(tmp_path / 'two.json')!r}))\n"
    )
    subprocess.run([sys.executable, script], check=True, timeout=300)
    report = llm_tables.LlmReport.load(tmp_path / "two.json")
    assert [(c.gpus, c.status) for c in report.cells] == [(2, "ok")], report
    assert report.environment["all_reduce"] == "gloo"
