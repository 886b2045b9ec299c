"""Transformers on a GPU: repacking, static caches, compiled graphs, CUDA graphs by hand; and the
decoder of benchmarks/llm.py.

    python -m pytest tests/gpu/test_integrations_gpu.py -m gpu -q
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.importorskip("transformers", minversion="5.16", reason="needs transformers")
from integration_models import write_folder

from marlin_cutlass import hf

pytestmark = pytest.mark.gpu
IDS = torch.arange(1, 19).view(2, 9) * 5 % 96
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
FORMATS = [
    ("llama", "gptq", {"zeros": True, "act_order": True}),
    ("qwen2", "awq", {}),
    ("llama", "compressed-tensors", {"group_size": 128}),
    ("mixtral", "gptq", {}),
]


@pytest.mark.parametrize("name,fmt,options", FORMATS)
@torch.no_grad()
def test_repacked_on_the_gpu_bit_for_bit_and_right(tmp_path, name, fmt, options):
    reference = write_folder(tmp_path / "a", name, fmt, **options).cuda()
    on_cpu = hf.from_pretrained(tmp_path / "a").state_dict()
    model = hf.from_pretrained(tmp_path / "a", device="cuda")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), on_cpu[key]), key
    mine, theirs = model(IDS.cuda()).logits.float(), reference(IDS.cuda()).logits.float()
    assert float((mine - theirs).abs().max()) < 1e-2 * float(theirs.abs().max())


@torch.no_grad()
def test_generate_with_static_cache_compiled_and_not(tmp_path):
    write_folder(tmp_path / "a", "llama", "gptq")
    model = hf.from_pretrained(tmp_path / "a", device="cuda").eval()
    ids = IDS.cuda()
    plain = model.generate(ids, **OPTIONS)
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **OPTIONS)
    assert torch.equal(plain, static)
    compiled = model.generate(ids, cache_implementation="static", **OPTIONS)  # and CUDA graphs
    # compiled kernels round elsewhere in another order: the first tokens agree
    assert torch.equal(compiled[:, :11], plain[:, :11])


@torch.no_grad()
def test_a_forward_pass_in_a_cuda_graph(tmp_path):
    write_folder(tmp_path / "a", "llama", "gptq", act_order=True)
    model = hf.from_pretrained(tmp_path / "a", device="cuda").eval()
    x = torch.randn(2, 1, 128, device="cuda").half()
    layer = model.model.layers[0].mlp
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, layer(x))


@pytest.mark.parametrize("kind", ["fp16", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_the_benchmarks_decoder_captured_and_eager(family, kind):
    import transformers

    from benchmarks.llm import check
    from benchmarks.llm_model import Decoder, Model

    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 512,
    }
    name = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[family]
    model = Model(getattr(transformers, name)(**sizes), kind, torch.device("cuda"))
    assert check(model) > 0.99
    prompt = torch.randint(0, 512, (3, 70), device="cuda")
    tokens = []
    for captured in (False, True):
        decoder = Decoder(model, 3, 100)
        if captured:
            decoder.capture()
        decoder.prefill(prompt)
        rows = []
        for _ in range(6):
            rows.append(decoder.ids.clone())
            decoder.decode(1)
        tokens.append(torch.cat(rows, 1))
    assert torch.equal(*tokens)
