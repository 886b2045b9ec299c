"""Time from a GPTQ folder on disk to a model that can run, repacking included.

    python benchmarks/llm_load.py --model llama2-7b              # writes 4 GB, and deletes them
    python benchmarks/llm_load.py --model llama2-7b --layers 2   # to try it out

The folder is of the model's shape with random weights. It has just been written, so that the page
cache is warm: the figure is loading and repacking, not the disk.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from safetensors.torch import save_file

from benchmarks.llm import MODELS, configuration
from benchmarks.llm_model import head_dim

GROUP_SIZE = 128
LAYERS_PER_FILE = 8


def gptq_layer(k: int, n: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random symmetric GPTQ tensors of one layer."""
    groups = k // GROUP_SIZE
    low, high = -(2**31), 2**31 - 1
    return {
        "qweight": torch.randint(low, high, (k // 8, n), dtype=torch.int32, generator=generator),
        "qzeros": torch.full((groups, n // 8), 0x77777777, dtype=torch.int32),
        "scales": (torch.rand(groups, n, generator=generator) * 0.004 + 0.002).half(),
        "g_idx": (torch.arange(k) // GROUP_SIZE).int(),
    }


def write_folder(folder: Path, name: str, layers: int | None = None) -> int:
    """A GPTQ folder of the shape of MODELS[name]; returns its bytes."""
    config = configuration(name, layers)
    generator = torch.Generator().manual_seed(0)
    hidden, width, dim = config.hidden_size, config.intermediate_size, head_dim(config)
    heads, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes = {"self_attn.q_proj": (hidden, heads), "self_attn.k_proj": (hidden, kv)}
    shapes |= {"self_attn.v_proj": (hidden, kv), "self_attn.o_proj": (heads, hidden)}
    shapes |= {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width)}
    shapes["mlp.down_proj"] = (width, hidden)
    embedding = torch.randn(config.vocab_size, hidden, generator=generator).half()
    tensors = {"model.embed_tokens.weight": embedding * 0.02, "lm_head.weight": embedding * 0.02}
    tensors["model.norm.weight"] = torch.ones(hidden).half()
    index: dict[str, str] = {}
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        for part, (k, n) in shapes.items():
            made = gptq_layer(k, n, generator)
            tensors |= {f"{at}{part}.{role}": tensor for role, tensor in made.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = torch.ones(hidden).half()
        if "qwen3" in config.model_type:
            for norm in ("q_norm", "k_norm"):
                tensors[f"{at}self_attn.{norm}.weight"] = torch.ones(dim).half()
        if i % LAYERS_PER_FILE == LAYERS_PER_FILE - 1 or i == config.num_hidden_layers - 1:
            file = f"model-{i:03d}.safetensors"
            save_file(tensors, folder / file, {"format": "pt"})
            index |= dict.fromkeys(tensors, file)
            tensors = {}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    config.architectures = [
        "Qwen3ForCausalLM" if "qwen3" in config.model_type else "LlamaForCausalLM"
    ]
    config.dtype = torch.float16
    config.quantization_config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP_SIZE,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    }
    config.save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def timed_load(folder: Path, device: str) -> tuple[float, torch.nn.Module]:
    """Seconds of one load to `device`, and the model."""
    from marlin_cutlass import hf

    start = time.perf_counter()
    model = hf.from_pretrained(folder, dtype=torch.float16, device=device)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start, model


def main(
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "llama2-7b",
    layers: Annotated[int | None, typer.Option(help="fewer layers")] = None,
    folder: Annotated[Path | None, typer.Option(help="where to write (default: temporary)")] = None,
) -> None:
    """Loading a GPTQ folder through Transformers: seconds, bytes."""
    console = Console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        size = write_folder(place, model, layers)
        console.print(f"{model}: {size / 1e9:.2f} GB written", highlight=False)
        if device == "cuda":  # loads the driver, the launcher and the kernels' table
            torch.zeros(1, device="cuda")
        for run in ("first", "second"):
            seconds, loaded = timed_load(place, device)
            console.print(f"{run} load and repack: {seconds:.2f} s to {device}", highlight=False)
            ids = torch.arange(8, device=device)[None]
            with torch.no_grad():
                finite = bool(loaded(ids).logits.isfinite().all())
            console.print(f"finite logits: {finite}", highlight=False)
            del loaded
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    typer.run(main)
