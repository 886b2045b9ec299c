"""Generate with one model over several GPUs (or CPU processes): plain torch and Transformers.

    torchrun --nproc-per-node 2 examples/serve_tensor_parallel.py /models/Llama-3-70B-mc "Once upon"

Every process reads the folder, keeps its part of each layer, and generates the same tokens.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer

from marlin_cutlass import hf
from marlin_cutlass.integrations.tensor_parallel import tensor_parallel


def load(folder: str, device: torch.device) -> torch.nn.Module:
    """This process' part of the model on its device; the whole is only ever on the CPU."""
    model = hf.from_pretrained(folder, dtype=torch.float16).eval()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return tensor_parallel(model, mesh).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a converted, GPTQ, AWQ or compressed-tensors folder")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = load(args.folder, device)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        print(tokenizer.decode(out[0], skip_special_tokens=True))
        print(f"{args.tokens / seconds:.1f} tokens/s on {dist.get_world_size()} x {device.type}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
