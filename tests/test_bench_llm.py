"""The decoder that benchmarks/llm.py times: against Transformers, and its pieces."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import llm, llm_kernels, llm_tables
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
        gate, up = dense(layer.gate_up).chunk(2)
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
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape))


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


@pytest.fixture
def interpreted():
    """The Triton kernels on the CPU, by Triton's interpreter (TRITON_INTERPRET=1 before import)."""
    triton = pytest.importorskip("triton", reason="needs triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    llm_kernels.FORCE_TRITON = True
    yield
    llm_kernels.FORCE_TRITON = False


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_triton_kernels_do_what_the_plain_ones_do(interpreted, family):
    config = tiny(family, num_attention_heads=8, num_key_value_heads=2, hidden_size=256)
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
        mine.gate_up = columns(full.gate_up, [full.gate_up.out_features // 2] * 2)
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
    assert torch.equal(out[0], out[1])
    return out[0]


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
