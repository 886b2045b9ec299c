"""Planted faults: changes of the kernel headers, and the check that must catch each.

`python tests/emulator_mutations.py` prints the table of docs/emulation.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.variant import Variant

AMPERE = "w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1"
AMPERE_G32 = "w4a16_ampere_f16_g32_m16_n128k128_w2x2_p4_striped_c1"
AMPERE_ZEROS = "w4a16_ampere_f16z_g128_m16_n128k128_w2x2_p4_striped_c1"
AMPERE_BF16 = "w4a16_ampere_bf16_g128_m16_n128k128_w2x2_p4_striped_c1"
AMPERE_WIDE = "w4a16_ampere_f16_g128_m16_n64k256_w1x4_p4_striped_c1"
HOPPER = "w4a16_hopper_f16_g128_m16_n256k128_w2x1_p4_dp_c2"
HOPPER_STREAM = "w4a16_hopper_f16_g128_m16_n256k256_w4x1_p5_streamk_c1"
HOPPER_STREAM_GROUPS = "w4a16_hopper_f16_g128_m32_n128k256_w2x2_p4_streamk_c1"
HOPPER_STREAM_MULTICAST = "w4a16_hopper_f16_g128_m16_n128k128_w2x1_p4_streamk_c1_mc2"
HOPPER_SPLIT = "w4a16_hopper_f16_g128_m16_n64k256_w1x4_p8_split2_c1"
HOPPER_HYBRID = "w4a16_hopper_f16_g128_m16_n256k128_w4x1_p4_hybrid_c1"
HOPPER_MULTICAST = "w4a16_hopper_f16_g128_m16_n128k128_w2x1_p4_dp_c1_mc2"
HOPPER_GROUPS = "w4a16_hopper_f16_g128_m16_n64k256_w1x4_p8_dp_c1"
HOPPER_PAIRS = "w4a16_hopper_f16_g128_m16_n64k128_w1x2_p4_dp_c1"
HOPPER_SUMS = "w4a16_hopper_f16_g128_m16_n256k256_w4x1_p4_dp_c1"
HOPPER_SUMS_ZEROS = "w4a16_hopper_f16z_g128_m8_n128k256_w2x2_p8_streamk_c1"
HOPPER_SUMS_BF16 = "w4a16_hopper_bf16_g64_m8_n256k256_w4x1_p5_hybrid_c1"
SPARSE = "w4a16_sparse_f16_g128_m16_n128k256_w2x2_p3_striped_c1"
HOPPER_SPARSE = "w4a16_hopper_sparse_f16_g128_m16_n128k256_w2x1_p4_dp_c1"
HOPPER_SPARSE_G64 = "w4a16_hopper_sparse_f16_g64_m16_n128k256_w2x1_p4_dp_c1"
HOPPER_SPARSE_ODD = "w4a16_hopper_sparse_f16_g128_m16_n128k128_w2x1_p4_dp_c1"


@dataclass(frozen=True)
class Edit:
    """Replaces the first occurrence of `old` in a header of templates/include/marlin_cutlass."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """A fault. caught_by: kinds of EmulationError, "values" (wrong result) or "conflicts"."""

    name: str
    edits: tuple[Edit, ...]
    variant: str
    caught_by: tuple[str, ...]
    shape: tuple[int, int, int] = (19, 300, 1536)
    ldc: int | None = None


def _one(name: str, file: str, old: str, new: str, variant: str, *caught: str, **more) -> Mutation:
    return Mutation(name, (Edit(file, old, new),), variant, caught, **more)


KERNEL, LOADS, LOOP = "ampere_kernel.cuh", "ampere_loads.cuh", "ampere_mainloop.cuh"
REDUCE, DEQUANT, STORE = "ampere_reduce.cuh", "dequant.cuh", "epilogue.cuh"
TAIL_ROWS = "row >= p.m || "
WAIT_AND_SYNC = "cp_async_wait<C::kStages - 2>();\n          block_sync();"

AMPERE_MUTATIONS = (
    _one(
        "cp.async waited for one stage late",
        *(KERNEL, "cp_async_wait<C::kStages - 2>()", "cp_async_wait<C::kStages - 1>()"),
        *(AMPERE, "race"),
    ),
    _one(
        "barrier of the main loop missing",
        *(KERNEL, WAIT_AND_SYNC, "cp_async_wait<C::kStages - 2>();"),
        *(AMPERE, "race"),
    ),
    _one(
        "slot refilled while warps still reduce in it",
        *(KERNEL, "if constexpr (C::kWarpsK > 1) block_sync();", ""),
        *(AMPERE, "race"),
    ),
    _one(
        "barrier between the halves of the warp reduction missing",
        *(REDUCE, "block_sync();  // one per chunk", "// one per chunk"),
        *(AMPERE, "race"),
    ),
    _one(
        "ring does not wrap",
        *(KERNEL, "slot + C::kStageBytes == ring_end ? ring : ", ""),
        *(AMPERE, "bounds"),
    ),
    _one(
        "copies go on after the last stage",
        *(LOADS, "if (steps_left_ > 0) {", "{"),
        *(AMPERE, "bounds", "race", "values"),
    ),
    _one(
        "swizzle of the writer differs from the reader's",
        *(LOADS, "(chunk ^ (row & 7)) * 16", "(chunk ^ (row & 3)) * 16"),
        *(AMPERE, "values", "race"),
    ),
    Mutation(
        "no swizzle on either side",
        (
            Edit(LOADS, "(chunk ^ (row & 7)) * 16", "chunk * 16"),
            Edit(LOADS, "dst ^ ((i & 7) * 16)", "dst"),
            Edit(LOOP, "(chunk ^ (row & 7)) * 16", "chunk * 16"),
            Edit(LOOP, "^ (chunk % 8 * 16)", "+ (chunk % 8 * 16)"),
        ),
        AMPERE,
        ("conflicts",),
    ),
    _one(
        "rows past m are read",
        *(LOADS, "i < rows ? 16 : 0", "16"),
        *(AMPERE, "bounds"),
    ),
    _one(
        "depth past k is read",
        *(LOADS, "depth_left_ > 0 ? rows_left_ : 0", "rows_left_"),
        *(AMPERE_WIDE, "bounds"),
        shape=(19, 72, 640),
    ),
    _one(
        "last column block not clamped",
        *(LOADS, ": p_.n_blocks - 1;", ": p_.n_blocks;"),
        *(AMPERE, "bounds"),
    ),
    _one(
        "second k64 half reads the first half's codes",
        *(LOOP, "unit % 2 * (kBlockCodeBytes / 2) + atom", "atom"),
        *(AMPERE, "values"),
    ),
    _one(
        "scale of the wrong group",
        *(LOOP, "group_of(step % 8 * 16) * Dequant::kGroupBytes", "0"),
        *(AMPERE_G32, "values"),
    ),
    _one(
        "wrong nibble",
        *(
            DEQUANT,
            "const uint32_t t = rotate_right(w, 8);\n    a[0] = convert",
            "const uint32_t t = rotate_right(w, 4);\n    a[0] = convert",
        ),
        *(AMPERE, "values"),
    ),
    _one(
        "code bias of 4 instead of 8",
        *(DEQUANT, "0x80208020u);  // * -2^-19", "0x80108010u);"),
        *(AMPERE, "values"),
    ),
    _one(
        "zero point of the other fragment row",
        *(DEQUANT, "s.bias[1] = broadcast_high(e.zeros);", "s.bias[1] = broadcast_low(e.zeros);"),
        *(AMPERE_ZEROS, "values"),
    ),
    _one(
        "wrong nibble, bf16",
        *(DEQUANT, "convert(rotate_right(w, 12)", "convert(rotate_right(w, 8)"),
        *(AMPERE_BF16, "values"),
    ),
    _one(
        "matrices of ldmatrix in the wrong order",
        *(LOOP, "lane / 8 % 2;", "lane / 16 % 2;"),
        *(AMPERE, "values"),
    ),
    _one(
        "missing tail predicate on rows",
        *(STORE, TAIL_ROWS, ""),
        *(AMPERE, "bounds"),
    ),
    _one(
        "missing tail predicate on rows of several atoms",
        *(STORE, "st_global_u32x2_if(row < rows,", "st_global_u32x2_if(rows > 0,"),
        *(HOPPER, "bounds"),
        shape=(5, 300, 1536),
    ),
    _one(
        "missing tail predicate on columns",
        *(STORE, "if (column + i < p.n)", "if (true)"),
        *(AMPERE, "bounds"),
        shape=(5, 73, 256),
        ldc=80,
    ),
    _one(
        "column permutation of the epilogue wrong",
        *(STORE, "2 * row - (row & 1)", "row"),
        *(AMPERE, "values"),
    ),
    _one(
        "partial sums announced before all are written",
        *(
            REDUCE,
            "block_sync();\n    if (thread_index() == 0) st_release",
            "if (thread_index() == 0) st_release",
        ),
        *(AMPERE, "race"),
    ),
    _one(
        "flag lost",
        *(REDUCE, "if (thread_index() == 0) st_release(p_.flags + block_index(), 1u);", ""),
        *(AMPERE, "deadlock"),
    ),
    _one(
        "flag not waited for",
        *(REDUCE, "if (contributes(c)) wait_flag(p_.flags + c, 1u);", "{}"),
        *(AMPERE, "race"),
    ),
    _one(
        "flags left set",
        *(REDUCE, "if (contributes(c)) st_release(p_.flags + c, 0u);", "{}"),
        *(AMPERE, "output"),
    ),
)

CONFIG, HKERNEL, PRODUCER = "hopper_config.cuh", "hopper_kernel.cuh", "hopper_producer.cuh"
HLOOP, HREDUCE = "hopper_mainloop.cuh", "hopper_reduce.cuh"

ONE_CTA_BEFORE = "add_release(partials_counter(p, owner ? owner - 1 : 0), 1u);"
FROM_THE_SECOND = "for (int w = worker + 2; w < last; ++w) {"
NOT_OF_CLUSTER = "wait_for_stage<C>(base, ring);\n      mbarrier_arrive"
NO_WHOLE_TILES = "tile_end = (tile + 1) * units"
OWNER = "first > 0 ? first + owner_steps : 0"
WHOLE_TILES = (19, 1600, 1024)
ODD_STEPS = (19, 600, 1152)  # tiles of nine stages, several for each CTA
LONG_TILES = (16, 740, 2560)  # their owners have more k steps than their share

HOPPER_MUTATIONS = (
    _one(
        "fragments overwritten under a wgmma in flight",
        *(HLOOP, "wgmma_wait<C::kParts>();", ""),
        *(HOPPER, "race"),
    ),
    _one("wgmma_fence missing", *(HLOOP, "wgmma_fence();", ""), *(HOPPER, "wgmma")),
    Mutation(
        "stage released before its wgmma have finished",
        (
            Edit(HLOOP, "held_ = current;", "release(current);"),
            Edit(HLOOP, "      release(held_);\n", ""),
        ),
        HOPPER,
        ("race", "mbarrier", "deadlock"),
    ),
    _one(
        "stage read without waiting for it",
        *(HLOOP, "mbarrier_wait(there, ring_.phase);", ""),
        *(HOPPER, "race"),
    ),
    _one(
        "second half of the first stage read without waiting for it",
        *(HLOOP, "mbarrier_wait(C::full(base_, ring_.stage), ring_.phase);", ""),
        *(HOPPER_GROUPS, "race"),
    ),
    _one(
        "halves expected of a first stage that comes whole",
        *(HLOOP, "first_half_ = 0;  // this group", "// this group"),
        *(HOPPER_GROUPS, "race", "deadlock"),
        shape=(19, 1600, 512),
    ),
    _one(
        "expected bytes of one block of the first halves forgotten",
        *(
            PRODUCER,
            "(there, C::kColumnBlocks * kBytes)",
            "(there, (C::kColumnBlocks - 1) * kBytes)",
        ),
        *(HOPPER, "deadlock", "mbarrier", "race"),
    ),
    _one(
        "second half of the weights from where the first half lies",
        *(PRODUCER, "s * C::kBlockRowBytes + kOffset, kBytes", "s * C::kBlockRowBytes, kBytes"),
        *(HOPPER_GROUPS, "values"),
    ),
    _one(
        "second half of the activations not reported",
        *(PRODUCER, "return mbarrier_arrive(full);", "return;"),
        *(HOPPER_GROUPS, "deadlock"),
    ),
    _one(
        "fewer rows than the tile has: first half of the activations twice",
        *(PRODUCER, "a, kPanels / 2, kPanels, full", "a, 0, kPanels / 2, full"),
        *(HOPPER_GROUPS, "race", "values"),
        shape=(5, 300, 1536),
    ),
    _one(
        "weights asked for early asked for again",
        *(PRODUCER, "from.advance(early);", ""),
        *(HOPPER, "values"),
    ),
    _one(
        "activations in a ring whose barriers are not known to exist",
        *(PRODUCER, "mbarrier_wait(C::ready(base, first), 0);", ""),
        *(HOPPER, "race", "mbarrier"),
    ),
    _one(
        "ring known to exist by the barrier of another producer",
        *(
            PRODUCER,
            "mbarrier_wait(C::ready(base, first), 0);",
            "mbarrier_wait(C::ready(base, 0), 0);",
        ),
        *(HOPPER_PAIRS, "race", "mbarrier"),
    ),
    _one(
        "stage reported as read by a warpgroup that has read none",
        *(HLOOP, "b == 0 && held_ >= 0) release(held_);", "b == 0) release(held_);"),
        *(HOPPER, "race", "mbarrier", "deadlock"),
    ),
    _one(
        "wrong k16 step in the descriptor",
        *(HLOOP, "descriptor + 2 * step, accumulate", "descriptor + step, accumulate"),
        *(HOPPER, "values"),
    ),
    _one(
        "stage overwritten before it is free",
        *(PRODUCER, "mbarrier_wait(C::empty(base, ring.stage), ring.phase ^ 1);", ""),
        *(HOPPER, "race", "mbarrier"),
    ),
    _one(
        "wrong parity",
        *(PRODUCER, "ring.phase ^ 1", "ring.phase"),
        *(HOPPER, "deadlock"),
    ),
    _one(
        "expected bytes of one block forgotten",
        *(
            PRODUCER,
            "mbarrier_arrive_expect(full, C::kColumnBlocks *",
            "mbarrier_arrive_expect(full, (C::kColumnBlocks - 1) *",
        ),
        *(HOPPER, "deadlock", "mbarrier", "race"),
    ),
    _one(
        "row coordinate of the activations off by one",
        *(
            PRODUCER,
            "a{C::first_row(p, tile_index(p, s.tile).m),",
            "a{C::first_row(p, tile_index(p, s.tile).m) + 1,",
        ),
        *(HOPPER, "values"),
    ),
    _one(
        "last row tile stored where it does not reach back",
        *(HKERNEL, "atoms(p, C::first_row(p, m),", "atoms(p, m * C::kMTile,"),
        *(HOPPER, "values"),
    ),
    _one(
        "rows of the row tile before stored twice",
        *(HKERNEL, "C::first_row(p, m), m * C::kMTile,", "C::first_row(p, m), 0,"),
        *(HOPPER, "race"),
    ),
    _one(
        "weight column past the edge",
        *(PRODUCER, ": p.n_blocks - 1;", ": first + i;"),
        *(HOPPER, "bounds"),
    ),
    _one(
        "activations read before the previous kernel has ended",
        *(
            PRODUCER,
            "wait_for_previous_grid();\n  const int early",
            "const int early",
        ),
        *(HOPPER, "race"),
    ),
    _one(
        "second of two producers begins every tile with its second stage",
        *(PRODUCER, "ahead = C::kProducers > 1 ? -left : 0;", "ahead = 0;"),
        *(HOPPER_PAIRS, "deadlock", "mbarrier", "race"),
        shape=ODD_STEPS,
    ),
    _one(
        "weights of every tile's first stage for the second of two producers",
        *(PRODUCER, "from.find(p, s, ahead);", "from.find(p, s, 0);"),
        *(HOPPER_PAIRS, "values"),
        shape=ODD_STEPS,
    ),
    _one(
        "activations of the next stage for the second of two producers",
        *(PRODUCER, "a.step = s.k_begin + ahead;", "a.step = s.k_begin;"),
        *(HOPPER_PAIRS, "values", "deadlock", "mbarrier", "race"),
        shape=ODD_STEPS,
    ),
    _one(
        "one producer where the ring has stages for two",
        *(HKERNEL, "i < C::kProducers; ++i) {\n    if (warp ==", "i < 1; ++i) {\n    if (warp =="),
        *(HOPPER_PAIRS, "deadlock", "mbarrier", "race"),
        shape=ODD_STEPS,
    ),
    _one(
        "activations summed before they are there",
        *(PRODUCER, "mbarrier_wait(C::activations(base_, ring_.stage), ring_.phase);", ""),
        *(HOPPER_SUMS, "race"),
    ),
    _one(
        "stage full before all lanes have stored its sums",
        *(PRODUCER, "warp_sync();\n      if (kReleaseLanes", "if (kReleaseLanes"),
        *(HOPPER_SUMS, "race"),
    ),
    _one(
        "stage full with the sums of one warp",
        *(HKERNEL, "1 + 2 * kReleaseLanes", "1 + kReleaseLanes"),
        *(HOPPER_SUMS, "race", "mbarrier", "values", "deadlock"),
    ),
    _one(
        "sums of the first group for all of a stage",
        *(HLOOP, "+ kGroup * C::kGroupSumBytes", "+ 0 * kGroup * C::kGroupSumBytes"),
        *(HOPPER_SUMS, "values"),
    ),
    _one(
        "sums for rows r + 8 in the unit of rows r",
        *(HLOOP, "high * C::kMTile * 4", "0 * high * C::kMTile * 4"),
        *(HOPPER_SUMS, "values"),
    ),
    _one(
        "a part of the activations not summed",
        *(PRODUCER, "i < kChains; ++i) low", "i < kChains - 1; ++i) low"),
        *(HOPPER_SUMS, "values"),
    ),
    _one(
        "activations of the wrong unit summed twice",
        *(PRODUCER, "(offset ^ (unit % 8 << 4))", "(offset ^ (unit % 4 << 4))"),
        *(HOPPER_SUMS, "values"),
    ),
    _one(
        "zero point of rows r for rows r + 8",
        *(HLOOP, "{-offset.row[high] *", "{-offset.row[0] *"),
        *(HOPPER_SUMS_ZEROS, "values"),
    ),
    _one(
        "8 rows: the second half of a unit's depth left out",
        *(PRODUCER, "kEight ? low + high", "kEight ? low"),
        *(HOPPER_SUMS_ZEROS, "values"),
    ),
    _one(
        "bf16: codes and 16, not 32, subtracted",
        *(DEQUANT, "? 32.f : 0.f", "? 16.f : 0.f"),
        *(HOPPER_SUMS_BF16, "values"),
    ),
    _one(
        "hybrid: sums for all of k where a CTA has a share alone",
        *("tile_order.cuh", "p.whole_blocks > 0 || p.left_over == 0", "true"),
        *(HOPPER_SUMS_BF16, "deadlock"),
        shape=(8, 200, 1536),
    ),
    _one(
        "first barriers used before their initialisation is published",
        *(HKERNEL, "mbarrier_init_fence();\n}", "}"),
        *(HOPPER, "mbarrier"),
    ),
    _one(
        "barriers used before their initialisation is published",
        *(
            HKERNEL,
            "mbarrier_init_fence();\n  if constexpr (C::kCluster)",
            "if constexpr (C::kCluster)",
        ),
        *(HOPPER, "mbarrier"),
    ),
    _one(
        "one arrival too many expected",
        *(HKERNEL, "C::kReleases * C::kWarpgroupsN)", "C::kReleases * C::kWarpgroupsN + 1)"),
        *(HOPPER, "deadlock"),
    ),
    _one(
        "k groups: sums read before they are stored",
        *(HREDUCE, "named_barrier_sync(kBarrierStored, C::kConsumerThreads);", ""),
        *(HOPPER_GROUPS, "race"),
    ),
    _one(
        "k groups: buffer of the tile before overwritten",
        *(HREDUCE, "if (reused) named_barrier_sync", "if (false) named_barrier_sync"),
        *(HOPPER_GROUPS, "race"),
    ),
    _one(
        "stream-K: partial sum reported before all warps have stored",
        *(HREDUCE, "mbarrier_wait(C::handed_over(base), 0);", ""),
        *(HOPPER_STREAM, "race"),
    ),
    _one(
        "stream-K: report lost",
        *(HREDUCE, "add_release(partials_counter(p, owner), 1u);", ""),
        *(HOPPER_STREAM, "deadlock"),
    ),
    _one(
        "stream-K: partial sum reported to the CTA before",
        *(HREDUCE, "add_release(partials_counter(p, owner), 1u);", ONE_CTA_BEFORE),
        *(HOPPER_STREAM, "deadlock", "race"),
    ),
    _one(
        "stream-K: partial sums fetched before they are reported",
        *(PRODUCER, "wait_flag(counter, last - worker - 1);", ""),
        *(HOPPER_STREAM, "race"),
    ),
    _one(
        "stream-K: ordinary stores read by a bulk copy without the fence",
        *(PRODUCER, "fence_proxy_async_global();  // ordinary", "// ordinary"),
        *(HOPPER_STREAM, "race"),
    ),
    _one(
        "stream-K: counter not cleared for the next launch",
        *(PRODUCER, "st_relaxed(counter, 0u);", ""),
        *(HOPPER_STREAM, "output"),
    ),
    _one(
        "stream-K: one contributor forgotten",
        *(PRODUCER, "for (int w = worker + 1; w < last; ++w) {", FROM_THE_SECOND),
        *(HOPPER_STREAM, "deadlock"),
    ),
    _one(
        "stream-K: a partial sum read before it is there",
        *(HLOOP, "mbarrier_wait(C::full(base_, at.stage), at.phase);", ""),
        *(HOPPER_STREAM, "race", "deadlock"),
    ),
    _one(
        "stream-K: stages of partial sums not summed, nor passed on",
        *(HKERNEL, "sums.pass(partial_stages<C>(p, s));", ""),
        *(HOPPER_STREAM, "deadlock", "race"),
    ),
    _one(
        "stream-K: stages of partial sums not counted by k group",
        *(HKERNEL, "first = (first + stages) % C::kWarpgroupsK;", ""),
        *(HOPPER_STREAM_GROUPS, "race", "mbarrier", "values", "deadlock"),
        shape=(19, 1400, 1280),
    ),
    _one(
        "stream-K: stage of a partial sum not known to be free in the cluster",
        *(PRODUCER, "wait_for_free_stage<C>(base, ring);\n      mbarrier_arrive", NOT_OF_CLUSTER),
        *(HOPPER_STREAM_MULTICAST, "deadlock", "mbarrier", "race"),
        shape=(5, 1270, 1536),
    ),
    _one(
        "stream-K: partial sum of the other CTA of the cluster",
        *(PRODUCER, "w * C::kMulticast + block_index() % C::kMulticast;", "w * C::kMulticast;"),
        *(HOPPER_STREAM_MULTICAST, "race", "values"),
        shape=(5, 1270, 1536),
    ),
    _one(
        "stream-K: whole tiles left out",
        *("tile_order.cuh", "end_ + (kWholeTiles ? p_.whole_passes : 0)", "end_"),
        *(HOPPER_STREAM, "output"),
        shape=WHOLE_TILES,
    ),
    _one(
        "stream-K: every CTA takes the first whole tile",
        *("tile_order.cuh", "behind = block_index() / kMulticast + (", "behind = ("),
        *(HOPPER_STREAM, "race", "output"),
        shape=WHOLE_TILES,
    ),
    _one(
        "stream-K: ranges begin at the first tile",
        *("tile_order.cuh", "tile + p_.whole_passes * workers, whole ? 0", "tile, whole ? 0"),
        *(HOPPER_STREAM, "bounds"),
        shape=WHOLE_TILES,
    ),
    _one(
        "stream-K: sharers sought as if there were no whole tiles",
        *("tile_order.cuh", "tile_end = (tile - whole + 1) * units", NO_WHOLE_TILES),
        *(HOPPER_STREAM, "deadlock", "values"),
        shape=WHOLE_TILES,
    ),
    _one(
        "stream-K: first k steps of a tile left out",
        *("tile_order.cuh", OWNER, "first + owner_steps"),
        *(HOPPER_STREAM, "values", "deadlock", "output"),
        shape=LONG_TILES,
    ),
    _one(
        "stream-K: last k step of a range done twice",
        *("tile_order.cuh", OWNER, "first > 0 ? first + owner_steps - 1 : 0"),
        *(HOPPER_STREAM, "values"),
        shape=LONG_TILES,
    ),
    _one(
        "cluster: sums sent before the peer has its barriers",
        *(HREDUCE, "cluster_wait_unaligned();  // every CTA", "// every CTA"),
        *(HOPPER_SPLIT, "race", "mbarrier"),
    ),
    _one(
        "cluster: received sums read without waiting",
        *(HREDUCE, "mbarrier_wait_cluster(C::received(base, group_n), 0);", ""),
        *(HOPPER_SPLIT, "race", "bounds"),
    ),
    _one(
        "cluster: bytes of the peer miscounted",
        *(
            HREDUCE,
            "* owned_chunks<C>(rank) * kChunkBytes;",
            "* owned_chunks<C>(rank) * kChunkBytes + 16;",
        ),
        *(HOPPER_SPLIT, "deadlock"),
    ),
    _one(
        "hybrid: idle slot runs ahead of the ring by a phase",
        *(HKERNEL, "named_barrier_sync(4, C::kConsumerThreads);", ";"),
        *(HOPPER_HYBRID, "race", "mbarrier"),
        shape=(40, 740, 1536),
    ),
    _one(
        "hybrid: absent blocks not accounted for",
        *(
            PRODUCER,
            "mbarrier_arrive_many(empty, C::kReleases * (C::kColumnBlocks - blocks));",
            ";",
        ),
        *(HOPPER_HYBRID, "deadlock"),
        shape=(40, 740, 1536),
    ),
    _one(
        "multicast: stage of the peer not known to be free",
        *(
            PRODUCER,
            "mbarrier_wait(free, C::kFreeAtFirst ? ring.phase ^ 1 : ring.phase);",
            "",
        ),
        *(HOPPER_MULTICAST, "race", "mbarrier"),
    ),
    _one(
        "multicast: phases of a stage counted from its first use, which nobody reports",
        *(PRODUCER, "C::kFreeAtFirst ? ring.phase ^ 1 : ring.phase", "ring.phase"),
        *(HOPPER_MULTICAST, "race", "mbarrier", "deadlock"),
    ),
    _one(
        "multicast: peer's barriers not known to exist",
        *(PRODUCER, "if constexpr (C::kMulticast > 1) cluster_wait_unaligned();", ""),
        *(HOPPER_MULTICAST, "race", "mbarrier", "divergence"),
    ),
)

SPARSE_LOOP = "sparse_mainloop.cuh"

SPARSE_MUTATIONS = (
    _one(
        "sparse: places of the other atom, mma.sp",
        *(
            SPARSE_LOOP,
            "mma_sparse_m16n8k32<typename C::Element, 0>",
            "mma_sparse_m16n8k32<typename C::Element, 1>",
        ),
        *(SPARSE, "values"),
    ),
    _one(
        "sparse: places of the other atom, wgmma.sp",
        *(HLOOP, "(lane ^ warp % 2 * 2) * 16", "lane * 16"),
        *(HOPPER_SPARSE, "values"),
    ),
    _one(
        "sparse: places of the first block of the stage only",
        *(
            HLOOP,
            "ld_shared_u32x4(places_at_ + kSparseCodeBytes + kBlock)",
            "ld_shared_u32x4(places_at_ + kSparseCodeBytes + C::kWeightOffset)",
        ),
        *(HOPPER_SPARSE, "values"),
    ),
    _one(
        "sparse: k32 step advances the descriptor by k16",
        *(HLOOP, "step % 2 * 4", "step % 2 * 2"),
        *(HOPPER_SPARSE, "values"),
    ),
    _one(
        "sparse: second 64 of the depth multiplied with the first",
        *(HLOOP, "step / 2 * kSliceUnits + ", ""),
        *(HOPPER_SPARSE, "values"),
    ),
    _one(
        "sparse: first scale of a block for all of it",
        *(HLOOP, "(2 * At::kHalf + 1) * D::kGroupBytes", "(2 * At::kHalf) * D::kGroupBytes"),
        *(HOPPER_SPARSE_G64, "values"),
    ),
    _one(
        "sparse: scales read where places lie",
        *(
            CONFIG,
            "kSparseCodeBytes + kSparseMetaBytes : kCodeBytes",
            "kSparseCodeBytes : kCodeBytes",
        ),
        *(HOPPER_SPARSE, "values"),
    ),
    _one(
        "sparse: one set of fragments for every stage of one batch",
        *(CONFIG, "kFewRegisters || kOddQuads", "kFewRegisters"),
        *(HOPPER_SPARSE_ODD, "race"),
    ),
)

MUTATIONS = AMPERE_MUTATIONS + HOPPER_MUTATIONS + SPARSE_MUTATIONS


def table() -> str:
    """Markdown rows: fault, kernel, what catches it."""
    rows = ["| planted fault | kernel | caught by |", "|---|---|---|"]
    for mutation in MUTATIONS:
        family = Variant.parse(mutation.variant).family
        dp = mutation.variant.split("_")[-2]
        rows.append(f"| {mutation.name} | {family} {dp} | {' or '.join(mutation.caught_by)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
