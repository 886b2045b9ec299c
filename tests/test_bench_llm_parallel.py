"""Two ranks of benchmarks/llm.py whose kernels meet in symmetric memory.

python -m pytest tests/test_bench_llm_parallel.py -m gpu -q              # two GPUs
TRITON_INTERPRET=1 python -m pytest tests/test_bench_llm_parallel.py -q  # two CPU processes
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_bench_llm import interpreted, tiny  # noqa: F401
from torch.distributed import _symmetric_memory as symmetric

from benchmarks import llm_attention, llm_kernels, llm_parallel
from benchmarks.llm_model import Decoder, Model, Shard, record


def fail():
    raise AssertionError("a barrier of its own")


def test_pending_parts_are_added_behind_their_barrier():
    parts = tuple(torch.randn(3, 64).half() for _ in range(2))
    residual, weight = torch.randn(3, 64).half(), torch.rand(64).half()
    want, total = llm_kernels.add_norm(parts, residual, weight, 1e-5)
    calls = []
    for pair in (None, (parts, parts)):  # plain torch waits for nobody by itself
        pending = llm_kernels.Pending(parts, lambda: calls.append("barrier"), pair)
        got, sums = llm_kernels.add_norm(pending, residual, weight, 1e-5)
        assert torch.equal(got, want) and torch.equal(sums, total)
        (alone,) = llm_kernels.added(pending)
        assert torch.equal(alone, sum(parts))
    assert len(calls) == 4


@pytest.mark.parametrize("with_residual", [False, True])
def test_the_norm_signals_its_peer_and_clears_its_own_flags(interpreted, with_residual):  # noqa: F811
    parts = tuple(torch.randn(3, 96).half() for _ in range(2))
    flags = torch.tensor([1, 1, 1, 7], dtype=torch.int32), torch.tensor([0, 0, 0, 9]).int()
    residual, weight = torch.randn(3, 96).half() if with_residual else None, torch.rand(96).half()
    exact = sum(x.float() for x in (*parts, residual) if x is not None)
    pending = llm_kernels.Pending(parts, fail, (parts, flags))
    norm, total = llm_kernels.add_norm(pending, residual, weight, 1e-5)
    torch.testing.assert_close(total.float(), exact, rtol=2e-3, atol=2e-3)
    wanted = llm_kernels.rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(norm, wanted, rtol=2e-3, atol=2e-3)
    assert flags[0].tolist() == [0, 0, 0, 7] and flags[1].tolist() == [1, 1, 1, 9]


def test_a_rank_whose_peer_does_not_come_gives_up(interpreted, monkeypatch):  # noqa: F811
    monkeypatch.setattr(llm_kernels, "MOST_TRIES", 3)
    parts = tuple(torch.randn(1, 32).half() for _ in range(2))
    other = torch.zeros(1).int()
    pending = llm_kernels.Pending(parts, fail, (parts, (torch.zeros(1).int(), other)))
    with pytest.raises(Exception, match="inline_asm"):  # the trap, which the interpreter has not
        llm_kernels.add_norm(pending, None, torch.ones(32).half(), 1e-5)
    assert other.item() == 1


def key_of(value, token):
    """What a rank sends for its best logit."""
    bits = torch.tensor(value, dtype=torch.float32).view(torch.int32).item()
    return ((bits if bits >= 0 else bits ^ 0x7FFFFFFF) << 32) + 0x7FFFFFFF - token


@pytest.mark.parametrize(
    "mine, theirs, wins",
    [
        ((1.5, 40), (1.25, 3), 40),
        ((1.25, 40), (1.5, 3), 3),
        ((2.0, 40), (2.0, 3), 3),
        ((2.0, 40), (2.0, 41), 40),
        ((-2.0, 40), (-1.0, 41), 41),
        ((-1.0, 40), (-2.0, 3), 40),
        ((-0.0, 40), (0.0, 41), 40),
        ((-0.0, 40), (0.0, 3), 3),
        ((0.0, 40), (-3.0, 3), 40),
        ((-math.inf, 30), (-3.0, 128255), 128255),
    ],
)
def test_the_larger_logit_of_two_ranks_wins(interpreted, mine, theirs, wins):  # noqa: F811
    value, token = mine
    logits, first = torch.full((2, 97), -math.inf).half(), 30
    logits[:, token - first] = value
    ids, start = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([7])
    keys = torch.full((3,), key_of(*theirs)), torch.zeros(3, dtype=torch.int64)
    llm_kernels.next_token(logits, ids, start, 5, first, keys)
    assert ids[:, 0].tolist() == [wins] * 2 and start.item() == 12
    assert keys[0].tolist() == [0, 0, key_of(*theirs)]
    assert keys[1].tolist() == [key_of(value + 0.0, token)] * 2 + [0]


class SharedFiles:
    """Stands for symmetric memory among processes of one host: a file per rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def empty(self, size, dtype, device):
        paths = [str(self.folder / f"rank{r}") for r in range(dist.get_world_size())]
        self.memory = [torch.from_file(p, shared=True, size=size, dtype=dtype) for p in paths]
        return self.memory[dist.get_rank()]

    def rendezvous(self, memory, group):
        dist.barrier()
        return self

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        part = self.memory[rank].view(dtype)[storage_offset : storage_offset + math.prod(sizes)]
        return part.view(sizes)

    def barrier(self, channel=0):
        dist.barrier()


@torch.no_grad()
def _two_processes(rank, world, folder):
    files, cpu = SharedFiles(Path(folder)), torch.device("cpu")
    symmetric.empty, symmetric.rendezvous = files.empty, files.rendezvous
    torch.cuda.synchronize = lambda device: None
    llm_kernels.FORCE_TRITON, llm_attention.use_triton = True, lambda x: False
    llm_parallel.SYMMETRIC_ROWS = 4
    reduce = llm_parallel.Symmetric(cpu)
    assert reduce.name == "symmetric (in the norm up to 4 rows, then barriers)"
    for m, width in ((1, 96), (4, 512), (5, 64)):  # the last by barriers
        assert llm_parallel._agrees(reduce, cpu, m, width), (m, width)
    kinds = {"symmetric": reduce, "gloo": llm_parallel.Nccl()}
    logits, ids = {}, torch.randint(0, 97, (2, 5), generator=torch.Generator().manual_seed(1))
    for kind, how in kinds.items():
        model = Model(tiny(num_key_value_heads=4), "fp16", shard=Shard(rank, 2, how))
        decoder = Decoder(model, 2, 16)
        decoder.prefill(ids)  # 10 rows
        decoder.decode(3)
        assert int(model.start) == 8
        first = decoder.ids.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, decoder.ids)
        model.allocate(2, 16)
        model(ids[:, :4])
        logits[kind] = model(ids[:, 4:])
    torch.testing.assert_close(*logits.values(), rtol=2e-2, atol=2e-2)
    dist.barrier()
    assert not any(bool(words.any()) for words in (*reduce.flags, *reduce.keys))


def test_two_processes_meet_in_shared_memory(interpreted, tmp_path):  # noqa: F811
    llm_parallel.launch(_two_processes, 2, str(tmp_path))


def _two_gpus(rank, world, mode):
    """Captured steps, replayed while now one rank lags, now the other: every bit must be right."""
    device = torch.device("cuda", rank)
    llm_kernels.set_pdl(mode)
    reduce = llm_parallel.Symmetric(device)
    for m, width in ((1, 8192), (5, 512), (128, 8192), (129, 4096)):
        assert llm_parallel._agrees(reduce, device, m, width), (m, width)
    m, width = 4, 8192
    own = torch.Generator(device).manual_seed(rank)
    mine = torch.randn(4, m, width, device=device, generator=own).half()
    both = mine.new_empty(world, *mine.shape)
    dist.all_gather_into_tensor(both, mine)
    logits, weight = mine[0].clone(), torch.ones(width, device=device).half()
    tokens = llm_parallel.best_token(logits, rank * width)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    ids, wrong = torch.empty_like(tokens), torch.zeros_like(start)

    def step():
        shift = (start % 8).half()
        for i in range(4):
            out = reduce.buffer(m, width)
            torch.add(mine[i], shift, out=out)
            _, total = llm_kernels.add_norm(reduce(out), None, weight, 1e-5)
            wanted = (both[:, i] + shift).float().sum(0).half()
            wrong.add_((total != wanted).sum())
        reduce.choose(logits, rank * width, ids, start, 1)
        wrong.add_((ids != tokens).sum())

    graph = record(step)
    for i in range(300):
        if i % 2 == rank:
            torch.cuda._sleep(20_000 * (i % 5))
        graph.replay()
    torch.cuda.synchronize()
    assert int(wrong) == 0 and int(start) == 303
    dist.barrier()
    assert not any(bool(words.any()) for words in (reduce.flags[0], reduce.keys[0]))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", llm_kernels.PDL_MODES)
def test_two_gpus_meet_in_every_replay(mode):
    llm_parallel.launch(_two_gpus, 2, mode)
