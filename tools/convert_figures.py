"""Time and memory of packing and of converting a 7B-shaped GPTQ checkpoint made on the spot.

    python tools/convert_figures.py [--layers 32] [--folder DIR] [--workers 2]

Prints one JSON object. Memory is the process's peak resident set, so the conversion runs in a
process of its own. The checkpoint has Llama-2-7B's shapes, group 128, random codes, 2 shards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from marlin_cutlass.checkpoint_plan import INDEX_NAME
from marlin_cutlass.safetensors_stream import StreamWriter

SHAPES = {  # (K, N) of Llama-2-7B
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 4096),
    "self_attn.v_proj": (4096, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 11008),
    "mlp.up_proj": (4096, 11008),
    "mlp.down_proj": (11008, 4096),
}
QUANT = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
SHARDS = 2


def write_layer(writer: StreamWriter, name: str, k: int, n: int, gen: torch.Generator) -> None:
    """One GPTQ layer with random codes and symmetric zero points."""
    words = torch.randint(-(2**31), 2**31, (k // 8, n), generator=gen, dtype=torch.int64).int()
    writer.add(f"{name}.qweight", words)
    writer.add(f"{name}.qzeros", torch.full((k // 128, n // 8), 0x77777777, dtype=torch.int32))
    writer.add(f"{name}.scales", (torch.rand(k // 128, n, generator=gen) * 0.02 + 0.001).half())
    writer.add(f"{name}.g_idx", (torch.arange(k) // 128).int())


def make_checkpoint(folder: Path, layers: int) -> None:
    """A Hugging Face folder of `layers` blocks plus embedding and head in fp16."""
    gen = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        with StreamWriter(folder / name, 40 * layers, 4096 * layers, 4096) as writer:
            for block in range(shard, layers, SHARDS):
                for part, (k, n) in SHAPES.items():
                    write_layer(writer, f"model.layers.{block}.{part}", k, n, gen)
            if shard == 0:
                writer.add("model.embed_tokens.weight", torch.randn(32000, 4096).half())
                writer.add("lm_head.weight", torch.randn(32000, 4096).half())
            writer.close({"format": "pt"})
            weight_map |= dict.fromkeys(writer.entries, name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": QUANT}))


CONVERT = """
import resource, sys, json
from marlin_cutlass.checkpoint import convert_checkpoint
r = convert_checkpoint(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]))
usage = resource.getrusage(resource.RUSAGE_SELF)
peak = usage.ru_maxrss * 1024
print(json.dumps({"seconds": r.seconds, "read": r.bytes_in, "written": r.bytes_out,
                  "peak_bytes": peak, "layers": len(r.layers),
                  "user_seconds": usage.ru_utime, "system_seconds": usage.ru_stime}))
"""


def disk_rate(source: Path, folder: Path) -> float:
    """Bytes per second of copying the first shard, the same read-and-write work without packing."""
    shard = next(source.glob("*.safetensors"))
    start = time.perf_counter()
    with open(shard, "rb") as a, open(folder / "copy", "wb") as b:
        shutil.copyfileobj(a, b, 16 << 20)
        b.flush()
        os.fsync(b.fileno())
    seconds = time.perf_counter() - start
    (folder / "copy").unlink()
    return shard.stat().st_size / seconds


PACK = """
import json, threading, time, torch, marlin_cutlass as mc
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
q = torch.randint(0, 16, (4096, 4096), dtype=torch.uint8)
s = (torch.rand(32, 4096) * 0.02).half()
times, peak, first, done = [], 0, 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)
mc.pack(q[:256, :256].contiguous(), s[:2, :256].contiguous(), group_size=128)  # code pages
before = resident()
thread = threading.Thread(target=watch)
thread.start()
for _ in range(5):
    start = time.perf_counter()
    w = mc.pack(q, s, group_size=128)
    times.append(time.perf_counter() - start)
    del w
    first = first or peak
done = True
thread.join()
print(json.dumps({"seconds": min(times), "extra_bytes": first - before,
                  "extra_bytes_after_5": peak - before}))
"""


def pack_figures() -> dict:
    """Seconds (best of 5) and peak extra resident memory, result included, of `pack` for a
    4096 x 4096 weight with group 128."""
    command = [sys.executable, "-c", PACK]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(out.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        make_checkpoint(folder / "in", args.layers)
        rate = disk_rate(folder / "in", folder)
        command = [sys.executable, "-c", CONVERT, folder / "in", folder / "out", str(args.workers)]
        out = subprocess.run(command, check=True, capture_output=True, text=True)
        convert = json.loads(out.stdout)
    convert["bytes_per_second"] = convert["read"] / convert["seconds"]
    print(
        json.dumps(
            {
                "pack_4096": pack_figures(),
                "convert": convert,
                "copy_bytes_per_second": rate,
                "threads": torch.get_num_threads(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
