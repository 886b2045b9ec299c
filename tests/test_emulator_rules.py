"""What the emulator objects to: each rule with a small kernel that breaks it, and its correct
sibling."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernels import run_kernel

from emulator import EmulationError


def raises(kind: str, text: str, body: str, **arguments: object) -> str:
    with pytest.raises(EmulationError) as caught:
        run_kernel(body, **arguments)
    assert caught.value.kind == kind, caught.value
    assert text in caught.value.text, caught.value
    return caught.value.text


NEIGHBOUR = """
  st_shared_u32(base + 4 * thread, thread);
  {sync}
  store(p, thread, ld_shared_u32(base + 4 * ((thread + {distance}) % 64)));
"""


@pytest.mark.parametrize("seed", range(5))
def test_shared_memory_needs_a_barrier(seed: int) -> None:
    body = NEIGHBOUR.format(sync="block_sync();", distance=32)
    c, _ = run_kernel(body, threads=64, out_words=64, seed=seed)
    assert np.array_equal(c, (np.arange(64) + 32) % 64)
    text = "is not ordered before"
    raises(
        "race",
        text,
        NEIGHBOUR.format(sync="warp_sync();", distance=32),
        threads=64,
        out_words=64,
        seed=seed,
    )
    raises("race", text, NEIGHBOUR.format(sync="", distance=1), threads=64, out_words=64, seed=seed)


def test_write_after_read_needs_a_barrier() -> None:
    body = """
  st_shared_u32(base + 4 * thread, thread);
  block_sync();
  const uint32_t v = ld_shared_u32(base + 4 * (63 - thread));
  {sync}
  st_shared_u32(base + 4 * thread, v);
  store(p, thread, v);
"""
    run_kernel(body.format(sync="block_sync();"), threads=64, out_words=64)
    raises("race", "is not ordered before", body.format(sync=""), threads=64, out_words=64)


def test_named_barriers() -> None:
    body = """
  st_shared_u32(base + 4 * thread, thread);
  if (warp < 2) {{
    named_barrier_sync({id}, {threads});
    store(p, thread, ld_shared_u32(base + 4 * (63 - thread)));
  }} else {{
    {other}
  }}
"""
    run_kernel(body.format(id=3, threads=64, other=""), threads=96, out_words=64)
    hang = raises(
        "deadlock",
        "64 of 96 threads arrived",
        body.format(id=3, threads=96, other=""),
        threads=96,
        out_words=64,
    )
    assert "named_barrier_sync id 3 among 96 threads" in hang
    raises(
        "bounds", "not in 0..15", body.format(id=16, threads=64, other=""), threads=96, out_words=64
    )
    mixed = body.format(id=3, threads=96, other="named_barrier_sync(3, 64);")
    raises("divergence", "with 64 threads here", mixed, threads=96, out_words=64)


COPY = """
  cp_async16_zfill(base + 16 * thread, static_cast<const uint8_t*>(p.a) + 16 * thread, {bytes});
  cp_async_commit();
  {wait}
  store(p, thread, ld_shared_u32(base + 16 * (({reader}) % 32) + 4));
"""


def test_cp_async_lands_at_its_wait() -> None:
    a = np.arange(128, dtype=np.uint32)
    whole = "cp_async_wait<0>();\n  warp_sync();"
    c, _ = run_kernel(COPY.format(bytes=16, wait=whole, reader="thread + 1"), a)
    assert np.array_equal(c, (np.arange(32) + 1) % 32 * 4 + 1)
    c, _ = run_kernel(COPY.format(bytes="thread % 2 ? 16 : 0", wait=whole, reader="thread"), a)
    assert np.array_equal(c, np.where(np.arange(32) % 2, np.arange(32) * 4 + 1, 0))
    raises(
        "race", "has a copy into it under way", COPY.format(bytes=16, wait="", reader="thread"), a=a
    )
    late = "cp_async_wait<1>();\n  warp_sync();"
    raises(
        "race",
        "has a copy into it under way",
        COPY.format(bytes=16, wait=late, reader="thread"),
        a=a,
    )
    alone = "cp_async_wait<0>();"
    raises(
        "race", "is not ordered before", COPY.format(bytes=16, wait=alone, reader="thread + 1"), a=a
    )


def test_copy_into_memory_that_others_still_read() -> None:
    body = """
  st_shared_u32(base + 4 * thread, thread);
  block_sync();
  if (warp == 1) store(p, lane, ld_shared_u32(base + 4 * lane));
  {sync}
  const uint8_t* src = static_cast<const uint8_t*>(p.a);
  if (warp == 0 && lane < 8) cp_async16_stream(base + 16 * lane, src + 16 * lane);
"""
    a = np.zeros(32, np.uint32)
    for seed in range(4):
        run_kernel(body.format(sync="block_sync();"), a, threads=64, seed=seed)
        raises("race", "shared 0x", body.format(sync=""), a=a, threads=64, seed=seed)


@pytest.mark.parametrize(
    "kind, text, body",
    [
        ("bounds", "outside the block's", "st_shared_u32(base + 4096, 1u);"),
        ("bounds", "outside the block's", "ld_shared_u32x4(base + 4088 + 8);"),
        ("bounds", "outside the block's", "st_shared_u32(0, 1u);"),
        ("alignment", "not a multiple of 16", "ld_shared_u32x4(base + 8);"),
        ("bounds", "a +128 of 128", "store(p, lane, load(p.a, 32));"),
        ("bounds", "a must not be written", "st_global_u32(const_cast<void*>(p.a), 1u);"),
        ("bounds", "c must not be read", "store(p, lane, load(p.c, lane));"),
        ("bounds", "is in no buffer", "ld_global_f32(reinterpret_cast<const float*>(64));"),
        ("bounds", "must not be used as a flag", "st_release(static_cast<uint32_t*>(p.c), 1u);"),
        (
            "alignment",
            "c + 4 is not a multiple of 8",
            "if (lane == 0) st_global_u32x2(static_cast<uint32_t*>(p.c) + 1, {1u, 2u});",
        ),
        ("race", "stored a second time", "store(p, lane / 2, lane + 0u);"),
        ("trap", "the kernel trapped", "if (lane == 3) trap();"),
        (
            "divergence",
            "different warp instructions",
            "if (lane < 16) uniform(1u); else warp_sync();",
        ),
        ("deadlock", "31 lanes (mask fffffffe) at warp_sync", "if (lane > 0) warp_sync();"),
        ("deadlock", "at block_sync", "if (warp == 0) block_sync();"),
    ],
)
def test_objections(kind: str, text: str, body: str) -> None:
    raises(
        kind,
        text,
        body,
        a=np.zeros(32, np.uint32),
        threads=64 if "warp" in body else 32,
        out_words=64,
    )


def test_messages_name_the_place_in_the_kernel() -> None:
    text = raises(
        "bounds",
        "block 1 warp 0 lane 5, st_shared",
        "if (block == 1 && lane == 5) st_shared_u32(8, 1u);",
        grid=2,
    )
    assert ".cu:" in text


FLAGS = """
  float* slot = p.partials;
  if (block == 0) {{
    st_global_cg_f32x4(slot + 4 * thread, F32x4{{1.f * thread, 2.f, 3.f, 4.f}});
    {produce}
  }} else {{
    {consume}
    store(p, thread, ld_global_cg_f32x4(slot + 4 * (63 - thread)).x);
  }}
"""
PRODUCE = "block_sync(); if (thread == 0) st_release(p.flags, 1u);"
CONSUME = "if (thread == 0) { wait_flag(p.flags, 1u); st_release(p.flags, 0u); } block_sync();"


@pytest.mark.parametrize("seed", range(6))
def test_flags_between_blocks(seed: int) -> None:
    shape = {"grid": 2, "threads": 64, "out_words": 64, "seed": seed}
    c, _ = run_kernel(FLAGS.format(produce=PRODUCE, consume=CONSUME), **shape)
    assert np.array_equal(c.view(np.float32), 63 - np.arange(64))
    polling = "if (thread == 0) while (ld_acquire(p.flags) != 1u) {} block_sync();"
    run_kernel(FLAGS.format(produce=PRODUCE, consume=polling), **shape)
    no_barrier = "if (thread == 0) st_release(p.flags, 1u);"
    raises("race", "partials", FLAGS.format(produce=no_barrier, consume=CONSUME), **shape)
    raises("race", "partials", FLAGS.format(produce=PRODUCE, consume="block_sync();"), **shape)
    lost = raises(
        "deadlock",
        "wait_flag at flags + 0 for 1",
        FLAGS.format(produce="", consume=CONSUME),
        **shape,
    )
    assert "block 1 barrier 0: 32 of 64 threads arrived" in lost
    raises(
        "deadlock", "poll and nothing changes", FLAGS.format(produce="", consume=polling), **shape
    )


def test_blocks_wait_for_a_place_in_order() -> None:
    """A later block may wait for an earlier one, not the other way round, when only one runs."""
    body = """
  if (block != {first}) wait_flag(p.flags + block {step}, 1u);
  st_release(p.flags + block, 1u);
  store(p, 32 * block + lane, 1u);
"""
    for resident in (1, 2, 0):
        c, _ = run_kernel(
            body.format(first=0, step="- 1"), grid=4, resident=resident, out_words=128
        )
        assert (c == 1).all()
    backwards = body.format(first=3, step="+ 1")
    run_kernel(backwards, grid=4, out_words=128)
    text = raises("deadlock", "at wait_flag", backwards, grid=4, resident=3, out_words=128)
    assert "1 clusters of blocks have not started" in text


@pytest.mark.parametrize("stride, waves", [(1, 1), (2, 2), (8, 8), (32, 32), (33, 1)])
def test_bank_conflicts_are_counted(stride: int, waves: int) -> None:
    body = f"  st_shared_u32(base + 4 * {stride} * lane, 1u);\n  store(p, lane, 1u);"
    _, statistics = run_kernel(body, shared_bytes=8192)
    assert statistics["shared_store_count"] == 1
    assert (statistics["shared_store_waves"], statistics["shared_store_ideal"]) == (waves, 1)


def test_ldmatrix_conflicts() -> None:
    body = """
  for (int i = lane; i < 1024; i += 32) st_shared_u32(base + 4 * i, 0u);
  warp_sync();
  uint32_t r[4];
  ldmatrix_x4(r, base + lane % 8 * {pitch} + lane / 8 * 16);
  store(p, lane, r[0]);
"""
    for pitch, waves in ((128, 32), (144, 4), (32, 8)):
        _, statistics = run_kernel(body.format(pitch=pitch))
        assert (statistics["ldmatrix_access_waves"], statistics["ldmatrix_access_ideal"]) == (
            waves,
            4,
        ), pitch


def test_fresh_shared_memory_is_nan() -> None:
    c, _ = run_kernel("  store(p, lane, ld_shared_u32(base + 4 * lane));")
    assert np.isnan(c.view(np.float32)).all() and np.isnan(c.view(np.float16)).all()


def test_seeds_change_the_interleaving_and_nothing_else() -> None:
    """Polls that succeed late cost switches: one seed always gives one count, seeds differ."""
    body = """
  if (lane == 0) {
    while (ld_acquire(p.flags) != 0u) {}
    store(p, block, static_cast<uint32_t>(block));
  }
  warp_sync();
"""
    counts = [
        [run_kernel(body, grid=4, seed=seed)[1]["switches"] for seed in range(8)] for _ in range(2)
    ]
    assert counts[0] == counts[1]
    assert len(set(counts[0])) > 1
