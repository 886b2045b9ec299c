"""Hopper primitives: mbarriers, bulk and tensor copies, wgmma, clusters, programmatic dependent
launch."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_kernels import run_kernel
from emulator_packing import round_to
from test_emulator_rules import raises

from emulator import EmulationError
from generator import legality

BULK = """
  const smem_addr_t bar = base + 4096;
  if (thread == 0) {{
    mbarrier_init(bar, {arrivals});
    {fence}
  }}
  {sync}
  if (thread == 0) {{
    mbarrier_arrive_expect(bar, {bytes});
    bulk_load(base, p.a, 256, bar, evict_first_policy());
    bulk_load(base + 256, static_cast<const uint8_t*>(p.a) + 256, 256, bar, evict_first_policy());
  }}
  {wait}
  store(p, thread, ld_shared_u32(base + 8 * thread));
"""
GOOD = {
    "arrivals": 1,
    "fence": "mbarrier_init_fence();",
    "sync": "block_sync();",
    "bytes": 512,
    "wait": "mbarrier_wait(bar, 0);",
}
DATA = np.arange(128, dtype=np.uint32)
SHAPE = {"threads": 64, "shared_bytes": 8192, "out_words": 64}


@pytest.mark.parametrize("seed", range(6))
def test_bulk_copies_complete_on_their_barrier(seed: int) -> None:
    c, statistics = run_kernel(BULK.format(**GOOD), DATA, seed=seed, **SHAPE)
    assert np.array_equal(c, 2 * np.arange(64))
    assert statistics["bulk_bytes"] == 512
    polling = GOOD | {"wait": "while (!mbarrier_try_wait(bar, 0)) {}"}
    c, _ = run_kernel(BULK.format(**polling), DATA, seed=seed, **SHAPE)
    assert np.array_equal(c, 2 * np.arange(64))


@pytest.mark.parametrize(
    "kind, text, change",
    [
        ("race", "", {"wait": ""}),
        ("race", "", {"wait": "if (warp == 0) mbarrier_wait(bar, 0);"}),
        (
            "deadlock",
            "mbarrier_wait at shared 0x1400 parity 1",
            {"wait": "mbarrier_wait(bar, 0); mbarrier_wait(bar, 1);"},
        ),
        ("deadlock", "0 of 1 arrivals missing, -16 bytes", {"bytes": 496}),
        ("deadlock", "16 bytes outstanding", {"bytes": 528}),
        ("deadlock", "1 of 2 arrivals missing", {"arrivals": 2}),
        ("mbarrier", "without mbarrier_init_fence", {"fence": ""}),
        (
            "race",
            "initialisation of mbarrier",
            {"sync": "if (warp == 1) for (int i = 0; i < 9; ++i) ld_acquire(p.flags);"},
        ),
        (
            "mbarrier",
            "more arrivals in one phase",
            {"wait": "if (thread == 0) mbarrier_arrive(bar); mbarrier_wait(bar, 0);"},
        ),
        ("mbarrier", "initialised a second time", {"fence": "mbarrier_init(bar, 1);"}),
        ("bounds", "holds an mbarrier", {"wait": "mbarrier_wait(bar, 0); st_shared_u32(bar, 1u);"}),
    ],
)
def test_barrier_faults(kind: str, text: str, change: dict) -> None:
    raises(kind, text, BULK.format(**(GOOD | change)), a=DATA, **SHAPE)


def test_overwriting_a_stage_that_is_being_read() -> None:
    """Two rounds through one stage: the second copy must wait until the first round has been
    read."""
    body = """
  const smem_addr_t full = base + 4096, empty = base + 4104;
  if (thread == 0) {{ mbarrier_init(full, 1); mbarrier_init(empty, 1); mbarrier_init_fence(); }}
  block_sync();
  uint32_t sum = 0;
  for (int round = 0; round < 2; ++round) {{
    if (warp == 1) {{
      if (lane == 0) {{
        if (round > 0) {{ {wait} }}
        mbarrier_arrive_expect(full, 256);
        bulk_load(base, static_cast<const uint8_t*>(p.a) + 256 * round, 256, full, 0);
      }}
    }} else {{
      mbarrier_wait(full, round);
      sum += ld_shared_u32(base + 4 * lane);
      {sync}
      if (lane == 0) mbarrier_arrive(empty);
    }}
  }}
  if (warp == 0) store(p, lane, sum);
"""
    good = {"wait": "mbarrier_wait(empty, 0);", "sync": "warp_sync();"}
    for seed in range(6):
        c, _ = run_kernel(body.format(**good), DATA, threads=64, shared_bytes=8192, seed=seed)
        assert np.array_equal(c, 2 * np.arange(32) + 64)
        with pytest.raises(EmulationError, match=r"under way|is not ordered before|more arrivals"):
            run_kernel(
                body.format(**(good | {"wait": ""})), DATA, threads=64, shared_bytes=8192, seed=seed
            )
    # Without the warp_sync lane 0 may release the stage before lane 31 has read it: some schedule
    # shows it.
    early = body.format(**(good | {"sync": ""}))
    outcomes = []
    for seed in range(12):
        try:
            run_kernel(early, DATA, threads=64, shared_bytes=8192, seed=seed)
        except EmulationError as error:
            outcomes.append(error.kind)
    assert "race" in outcomes


TENSOR = """
  const smem_addr_t bar = base + 8192;
  if (thread == 0) {{ mbarrier_init(bar, 1); mbarrier_init_fence(); }}
  block_sync();
  if (thread == 0) {{
    tensor_map_prefetch(&map_a);
    mbarrier_arrive_expect(bar, {bytes});
    tensor_load_3d(base, &map_a, {x}, {y}, {z}, bar);
  }}
  mbarrier_wait(bar, 0);
  for (int i = thread; i < {bytes} / 4; i += {threads}) store(p, i, ld_shared_u32(base + 4 * i));
"""


def unswizzle(words: np.ndarray) -> np.ndarray:
    """Elements of 128-byte lines in logical order; the first line is at a multiple of 1024
    bytes."""
    lines = words.view(np.uint16).reshape(-1, 8, 8)  # line, 16-byte chunk, element
    return np.stack([line[np.arange(8) ^ (i % 8)].ravel() for i, line in enumerate(lines)])


@pytest.mark.parametrize("x, y, z", [(0, 0, 0), (0, 3, 1), (0, 9, 2), (0, -2, 0), (32, 0, 1)])
def test_tensor_copy_swizzles_and_fills_with_zeros(x: int, y: int, z: int) -> None:
    tensor = np.arange(3 * 11 * 64, dtype=np.uint16).reshape(3, 11, 64)
    box = (64, 8, 2)
    body = TENSOR.format(bytes=2048, x=x, y=y, z=z, threads=32)
    c, _ = run_kernel(body, tensor, box=box, shared_bytes=16384, out_words=512)
    expected = np.zeros((2, 8, 64), np.uint16)
    for k, j, i in np.ndindex(2, 8, 64):
        if 0 <= z + k < 3 and 0 <= y + j < 11 and 0 <= x + i < 64:
            expected[k, j, i] = tensor[z + k, y + j, x + i]
    assert np.array_equal(unswizzle(c).reshape(2, 8, 64), expected)


def fragment(a: np.ndarray) -> np.ndarray:
    """A [64, 16] as the registers of a warpgroup: uint32 [128 threads][4]."""
    thread, register = np.meshgrid(np.arange(128), np.arange(4), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register & 1)
    column = 2 * (thread % 4) + 8 * (register >> 1)
    return a[row, column].astype(np.uint32) | a[row, column + 1].astype(np.uint32) << 16


WGMMA = """
  const smem_addr_t bar = base + 65536;
  const int n = N;
  if (thread == 0) { mbarrier_init(bar, 1); mbarrier_init_fence(); }
  block_sync();
  if (thread == 0) {
    mbarrier_arrive_expect(bar, n * 128);
    tensor_load_3d(base, &map_a, 0, 0, 0, bar);
  }
  uint32_t a[16];  // A of four k16 steps follows B in memory
  const uint8_t* fragments = static_cast<const uint8_t*>(p.a) + n * 128;
  for (int i = 0; i < 16; ++i) a[i] = load(fragments, i / 4 * 512 + thread * 4 + i % 4);
  float d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = 1.f;
  const uint32_t low = descriptor_low(base + SHIFT);
  WAIT
  FENCE
  for (int s = 0; s < 4; ++s) wgmma_m64k16<ELEMENT, N>(d, a + 4 * s, make_descriptor(low + 2 * s));
  wgmma_commit();
  AFTER
  for (int i = 0; i < N / 2; ++i) {
    const int row = warp % 4 * 16 + lane / 4 + 8 * (i / 2 % 2);
    store(p, row * N + i / 4 * 8 + lane % 4 * 2 + i % 2, d[i]);
  }
"""
WGMMA_GOOD = {
    "WAIT": "mbarrier_wait(bar, 0);",
    "FENCE": "wgmma_fence();",
    "AFTER": "wgmma_wait<0>();",
    "SHIFT": "0",
}


def run_wgmma(n: int, dtype: str, **changes: str) -> tuple[np.ndarray, np.ndarray]:
    """(sums, expected) of 1 + A [64, 64] B [64, n]."""
    rng = np.random.default_rng(n)
    a, b = (
        round_to(rng.standard_normal((64, 64)), dtype),
        round_to(rng.standard_normal((n, 64)), dtype),
    )

    def bits(x: np.ndarray) -> np.ndarray:
        return (
            x.astype(np.float16).view(np.uint16)
            if dtype == "f16"
            else (x.view(np.uint32) >> 16).astype(np.uint16)
        )

    registers = np.stack([fragment(bits(a[:, 16 * s : 16 * s + 16])) for s in range(4)])
    memory = np.concatenate([bits(b).ravel(), registers.ravel().view(np.uint16)]).reshape(
        1, n + 64, 64
    )
    body = WGMMA
    for key, text in (WGMMA_GOOD | changes).items():
        body = body.replace(key, text)
    body = body.replace("ELEMENT", dtype.upper()).replace("N", str(n))
    c, _ = run_kernel(
        body, memory, box=(64, n, 1), threads=128, shared_bytes=65536 + 64, out_words=64 * n
    )
    return c.view(np.float32).reshape(64, n), 1 + a @ b.T


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("n", legality.M_TILES["hopper"])
def test_wgmma(n: int, dtype: str) -> None:
    got, expected = run_wgmma(n, dtype)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_accumulators_are_not_there_before_the_wait() -> None:
    got, _ = run_wgmma(16, "f16", AFTER="float early = d[3]; wgmma_wait<0>(); d[3] = early;")
    assert np.isnan(
        got.reshape(4, 2, 8, 16)[:, 1, :, 1:8:2]
    ).all()  # d[3]: rows 8 to 15 of a warp, odd columns below 8
    assert np.isfinite(got[:, 8:]).all()


_SECOND = "wgmma_wait<0>(); a[1] = 0; wgmma_fence();"
_AGAIN = "wgmma_m64k16<ELEMENT, N>(d, a, make_descriptor(low)); wgmma_commit(); wgmma_wait<0>();"


def test_registers_may_change_before_the_fence() -> None:
    got, expected = run_wgmma(16, "f16", AFTER=f"{_SECOND} {_AGAIN}")
    assert np.isfinite(got).all() and not np.allclose(got, expected)


@pytest.mark.parametrize(
    "kind, text, changes",
    [
        ("wgmma", "no wgmma_fence", {"FENCE": ""}),
        ("race", "", {"WAIT": ""}),
        ("race", "changed A registers", {"AFTER": "a[5] ^= 1; wgmma_wait<0>();"}),
        ("race", "changed accumulators", {"AFTER": "d[1] = 0.f; wgmma_wait<0>();"}),
        ("wgmma", "returned with wgmma in flight", {"AFTER": ""}),
        ("wgmma", "wrote A registers between", {"AFTER": f"{_SECOND} a[0] = 0; {_AGAIN}"}),
        ("wgmma", "wrote accumulators between", {"AFTER": f"{_SECOND} d[0] = 0.f; {_AGAIN}"}),
        ("wgmma", "multiple of 1024 bytes", {"SHIFT": "128"}),
        (
            "race",
            "without fence_proxy_async",
            {"WAIT": "mbarrier_wait(bar, 0); st_shared_u32(base + 4 * thread, 0u); block_sync();"},
        ),
        ("wgmma", "issued", {"FENCE": "wgmma_fence(); if (warp == 0)"}),
    ],
)
def test_wgmma_faults(kind: str, text: str, changes: dict) -> None:
    with pytest.raises(EmulationError) as caught:
        run_wgmma(16, "f16", **changes)
    assert caught.value.kind == kind and text in caught.value.text, caught.value


def test_stores_reach_wgmma_through_the_proxy_fence() -> None:
    store = "st_shared_u32(base + 4 * thread, 0u);"
    wait = f"mbarrier_wait(bar, 0); block_sync(); {store} fence_proxy_async(); block_sync();"
    got, expected = run_wgmma(16, "f16", WAIT=wait)
    assert (got[:, :4] == 1).all()  # the first 512 bytes are rows 0 to 3 of B
    np.testing.assert_allclose(got[:, 4:], expected[:, 4:], rtol=2e-5, atol=2e-5)


CLUSTER = """
  const smem_addr_t bar = base + 2048;
  const uint32_t rank = cluster_rank(), peer = rank ^ 1;
  if (thread == 0) {{
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(bar, 512);
  }}
  {before}
  const F32x4 mine = {{block * 100.f + lane, 0.f, 0.f, 0.f}};
  st_async_f32x4(map_to_rank(base + 16 * lane, peer), mine, map_to_rank(bar, peer));
  {wait}
"""
BEFORE = "cluster_arrive(); cluster_wait();"
WAIT = """mbarrier_wait_cluster(bar, 0);
  store(p, block * 32 + lane, ld_shared_f32x4(base + 16 * lane).x);"""


@pytest.mark.parametrize("seed", range(6))
def test_remote_stores(seed: int) -> None:
    shape = {"grid": 4, "cluster": 2, "out_words": 128, "seed": seed}
    c, statistics = run_kernel(CLUSTER.format(before=BEFORE, wait=WAIT), **shape)
    assert np.array_equal(
        c.view(np.float32), (np.arange(128) // 32 ^ 1) * 100 + np.arange(128) % 32
    )
    assert statistics["remote_store"] == 128
    raises(
        "divergence",
        "without cluster_arrive",
        CLUSTER.format(before="cluster_wait();", wait=WAIT),
        **shape,
    )
    # The receiver returns too early: seen when the store is sent or when it lands.
    with pytest.raises(EmulationError, match=r"returned"):
        run_kernel(CLUSTER.format(before=BEFORE, wait=""), **shape)
    # Nobody has said that the peer's barrier is ready.
    with pytest.raises(
        EmulationError, match=r"not an initialised mbarrier|initialisation of mbarrier"
    ):
        run_kernel(CLUSTER.format(before="warp_sync();", wait=WAIT), **shape)


def test_remote_arrival_and_multicast() -> None:
    """Block 0 loads a box into both blocks of the cluster once both have said that they are
    ready."""
    body = """
  const smem_addr_t full = base + 4096, ready = base + 4104;
  if (thread == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(ready, 2);
    mbarrier_init_fence();
    mbarrier_arrive_expect(full, 1024);
  }
  cluster_arrive();
  cluster_wait();
  if (lane == 0) mbarrier_arrive_remote(ready, 0);
  if (block == 0 && lane == 0) {
    mbarrier_wait_cluster(ready, 0);
    tensor_load_3d_multicast(base, &map_a, 0, 0, 0, full, 3);
  }
  mbarrier_wait(full, 0);
  store(p, block * 32 + lane, ld_shared_u32(base + 4 * lane));
  cluster_arrive();
  cluster_wait();
"""
    tensor = np.arange(512, dtype=np.uint16).reshape(1, 8, 64)
    for seed in range(6):
        c, _ = run_kernel(
            body,
            tensor,
            box=(64, 8, 1),
            grid=2,
            cluster=2,
            out_words=64,
            shared_bytes=8192,
            seed=seed,
        )
        assert np.array_equal(c, np.tile(tensor.view(np.uint32).ravel()[:32], 2))


def test_previous_grid_must_be_waited_for() -> None:
    body = "launch_dependents();\n  {wait}\n  store(p, thread, load(p.a, thread));"
    a = np.arange(64, dtype=np.uint32)
    shape = {"threads": 64, "out_words": 64, "programmatic": True}
    run_kernel(body.format(wait="wait_for_previous_grid();"), a, **shape)
    run_kernel(
        body.format(wait="if (warp == 0) wait_for_previous_grid(); block_sync();"), a, **shape
    )
    raises("race", "a is touched before wait_for_previous_grid", body.format(wait=""), a=a, **shape)
    raises(
        "race",
        "before wait_for_previous_grid",
        body.format(wait="if (warp == 0) wait_for_previous_grid();"),
        a=a,
        **shape,
    )


def test_elected_lane_is_the_same_all_along_and_one_of_all() -> None:
    body = (
        "  uint32_t n = 0;\n  for (int i = 0; i < 5; ++i) n += elect_one();\n  store(p, lane, n);"
    )
    leaders = set()
    for seed in range(6):
        c, _ = run_kernel(body, seed=seed)
        assert sorted(c.tolist()) == [0] * 31 + [5]
        leaders.add(int(c.argmax()))
    assert len(leaders) > 1
