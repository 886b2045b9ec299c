"""2:4 sparsity: pruning, the check, the packed layout against its definition, the CPU product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import marlin_cutlass as mc
from marlin_cutlass import layout
from marlin_cutlass.packed_weight import PackedWeight
from marlin_cutlass.prune import prune_2_4
from marlin_cutlass.sharding import fuse_columns, shard_columns, shard_rows
from marlin_cutlass.sparse import check_2_4, pack_sparse


def sparse_codes(k: int, n: int, seed: int = 0) -> torch.Tensor:
    """Random codes with 0, 1 or 2 of each four rows different from 8."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (k, n), generator=g, dtype=torch.uint8)
    order = torch.rand(-(-k // 4), 4, n, generator=g).argsort(1).reshape(-1, n)[:k]
    return torch.where(order < 2, q, torch.full_like(q, 8))


def scales_for(k: int, n: int, group_size: int, dtype=torch.float16) -> torch.Tensor:
    g = torch.Generator().manual_seed(k + n)
    groups = 1 if group_size < 0 else k // group_size
    return ((torch.rand(groups, n, generator=g) + 0.5) * 0.01).to(dtype)


def bits(buffer: bytes, place: layout.Bits) -> int:
    word = int.from_bytes(buffer[place.word : place.word + 4], "little")
    return ((word >> place.bit | word << (32 - place.bit)) & 0xFFFFFFFF) & 15


@pytest.mark.parametrize(
    "k, n, group_size", [(128, 64, 128), (384, 100, 64), (200, 70, -1), (1024, 130, 256)]
)
def test_layout_is_its_definition(k: int, n: int, group_size: int) -> None:
    q = sparse_codes(k, n)
    weight = pack_sparse(q, scales_for(k, n, group_size), group_size=group_size)
    weight.check()
    places = layout.SparseLayout(k, n, group_size)
    buffer = weight.packed.numpy().tobytes()
    assert len(buffer) == layout.packed_bytes(k, n, group_size, False, sparse=True)
    g = torch.Generator().manual_seed(1)
    for _ in range(300):
        chunk = int(torch.randint(0, -(-k // 4), (), generator=g))
        column = int(torch.randint(0, n, (), generator=g))
        meta = bits(buffer, places.meta(chunk, column))
        low, high = meta & 3, meta >> 2
        assert low < high
        got = [8] * 4
        got[low] = bits(buffer, places.code(chunk, 0, column))
        got[high] = bits(buffer, places.code(chunk, 1, column))
        want = q[4 * chunk : 4 * chunk + 4, column].tolist()
        assert got[: len(want)] == want


def test_metadata_is_valid_everywhere() -> None:
    """Also in padding and slack: an index pair that does not rise is undefined for the hardware."""
    weight = pack_sparse(sparse_codes(132, 65), scales_for(132, 65, -1), group_size=-1)
    width = layout.sparse_block_bytes(-1)
    assert width == 3072
    meta = weight.packed.view(-1, width)[:, 2048:3072]
    nibbles = torch.cat((meta & 15, meta >> 4))
    assert bool(((nibbles & 3) < (nibbles >> 2)).all())


@pytest.mark.parametrize("group_size, width", [(64, 3328), (128, 3200), (256, 3200), (-1, 3072)])
def test_block_bytes(group_size: int, width: int) -> None:
    assert layout.sparse_block_bytes(group_size) == width


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 140), st.sampled_from([64, 128, -1]), st.integers(0, 1000))
def test_dequantises_like_the_dense_layout(groups: int, n: int, group_size: int, seed: int) -> None:
    k = 4 * groups + 1 if group_size < 0 else groups * group_size
    q, scales = sparse_codes(k, n, seed), scales_for(k, n, group_size)
    weight = pack_sparse(q, scales, group_size=group_size)
    dense = mc.pack(q, scales, group_size=group_size)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(mc.dequantize(weight, dtype), mc.dequantize(dense, dtype))
    assert torch.equal(weight.col_scale, dense.col_scale)


def test_scales_lie_behind_the_metadata() -> None:
    k, n = 256, 80
    q, scales = sparse_codes(k, n), scales_for(k, n, 64)
    weight = pack_sparse(q, scales, group_size=64)
    dense = mc.pack(q, scales, group_size=64)
    here, there = layout.SparseLayout(k, n, 64), layout.Layout(k, n, 64)
    for row, column in ((0, 0), (63, 17), (64, 79), (255, 6)):
        a, b = here.scale(row, column), there.scale(row, column)
        assert torch.equal(weight.packed[a : a + 2], dense.packed[b : b + 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gemm_on_the_cpu(dtype: torch.dtype) -> None:
    k, n = 256, 72
    q, scales = sparse_codes(k, n), scales_for(k, n, 128)
    weight = pack_sparse(q, scales, group_size=128)
    dense = mc.pack(q, scales, group_size=128)
    a = torch.randn(5, k, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = torch.randn(n).to(dtype)
    assert torch.equal(mc.gemm(a, weight, bias), mc.gemm(a, dense, bias))
    identity = torch.eye(k, dtype=dtype)
    assert torch.equal(mc.gemm(identity, weight), mc.dequantize(weight, dtype))


def test_gradient_of_the_activations() -> None:
    k, n = 128, 64
    q, scales = sparse_codes(k, n), scales_for(k, n, 128)
    a = torch.randn(3, k).half()
    grads = []
    for weight in (
        pack_sparse(q, scales, group_size=128),
        mc.pack(q, scales, group_size=128),
    ):
        x = a.clone().requires_grad_()
        mc.gemm(x, weight).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_check_names_the_first_violation() -> None:
    weight = torch.zeros(3, 16)
    check_2_4(weight)
    weight[1, 8:11] = 1.0
    weight[2, 0:4] = 1.0
    with pytest.raises(ValueError, match=r"weight\[1, 8:12\] has 3 values"):
        check_2_4(weight)
    q = torch.full((128, 64), 8, dtype=torch.uint8)
    q[4:7, 5] = 1
    with pytest.raises(ValueError, match=r"weight\[5, 4:8\] has 3 values"):
        pack_sparse(q, scales_for(128, 64, 128), group_size=128)


def test_groups_of_32_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size=32 is not supported with 2:4"):
        pack_sparse(sparse_codes(128, 64), scales_for(128, 64, 32), group_size=32)


def test_magnitude_keeps_the_two_largest() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0]])
    assert prune_2_4(weight).tolist() == [[0.0, -3.0, 2.0, 0.0, 1.0, 1.0, 0.0, 0.0]]
    big = torch.randn(33, 64)
    pruned = prune_2_4(big)
    check_2_4(pruned)
    assert bool(((pruned == big) | (pruned == 0)).all())
    assert int((pruned != 0).sum()) == big.numel() // 2


def test_sparsegpt_beats_magnitude_on_correlated_inputs() -> None:
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(192, 192, generator=g) * 0.3 + torch.eye(192)
    x = torch.randn(2048, 192, generator=g) @ mix
    weight = torch.randn(64, 192, generator=g)
    errors = {}
    for method, options in (("magnitude", {}), ("sparsegpt", {"inputs": x})):
        pruned = prune_2_4(weight, method, **options)
        check_2_4(pruned)
        errors[method] = float((x @ (pruned - weight).t()).norm())
    assert errors["sparsegpt"] < 0.8 * errors["magnitude"]


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"method": "random"}, "method='random' is unknown"),
        ({"method": "sparsegpt"}, "exactly one of inputs"),
        ({"method": "magnitude", "hessian": torch.eye(8)}, "takes neither"),
        ({"method": "sparsegpt", "hessian": torch.eye(4)}, "hessian has shape"),
    ],
)
def test_prune_refuses(arguments: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        prune_2_4(torch.randn(4, 8), **arguments)


def test_prune_refuses_a_depth_that_is_not_fours() -> None:
    with pytest.raises(ValueError, match="K=6 is not a multiple of 4"):
        prune_2_4(torch.randn(4, 6))


def test_quantize_sparse() -> None:
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(3)) * 0.02
    packed = mc.quantize(weight, group_size=128, sparsity="2:4")
    assert packed.sparse
    dense = mc.dequantize(packed, torch.float32).t()
    check_2_4(dense)
    pruned = prune_2_4(weight)
    assert float((dense - pruned).norm() / pruned.norm()) < 0.12
    with pytest.raises(ValueError, match="sparsity='1:4'"):
        mc.quantize(weight, sparsity="1:4")
    with pytest.raises(ValueError, match="symmetric"):
        mc.quantize(weight, sparsity="2:4", symmetric=False)
    with pytest.raises(ValueError, match="group_size=32 is not supported with 2:4"):
        mc.quantize(weight, sparsity="2:4", group_size=32)
    with pytest.raises(ValueError, match="prune='magnitude' with sparsity=None"):
        mc.quantize(weight, prune="magnitude")
    with pytest.raises(ValueError, match="prune='random' with sparsity='2:4'"):
        mc.quantize(weight, sparsity="2:4", prune="random")


def correlated(k: int, tokens: int = 2048, seed: int = 0) -> torch.Tensor:
    """Inputs [tokens, k] whose features depend on one another."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=g) * 0.2 + torch.eye(k)
    return torch.randn(tokens, k, generator=g) @ mix


@pytest.mark.parametrize("group_size", [64, 128, 256, -1])
def test_gptq_prunes_and_rounds_in_one_sweep(group_size: int) -> None:
    x, k = correlated(512), 512
    weight = torch.randn(96, k, generator=torch.Generator().manual_seed(1)) * 0.02
    held_out = correlated(k, 512, seed=0)[:256] + 0.1 * correlated(k, 256, seed=5)
    packed, errors = {}, {}
    for name, options in {
        "rtn": {"method": "rtn", "clip": "mse"},
        "pruned, then rounded": {"method": "rtn", "prune": "sparsegpt", "inputs": x, "clip": "mse"},
        "gptq": {"method": "gptq", "inputs": x},
        "gptq, magnitude": {"method": "gptq", "inputs": x, "prune": "magnitude"},
    }.items():
        w = mc.quantize(weight, sparsity="2:4", group_size=group_size, **options)
        assert w.sparse
        dense = mc.dequantize(w, torch.float32).t()
        check_2_4(dense)
        packed[name] = dense
        errors[name] = float((held_out @ (dense - weight).t()).norm())
    assert errors["gptq"] < 0.8 * errors["rtn"]
    assert errors["gptq"] < errors["pruned, then rounded"]
    assert errors["gptq"] < errors["gptq, magnitude"] < errors["rtn"]
    zeros = prune_2_4(weight) == 0
    assert bool((packed["gptq, magnitude"][zeros] == 0).all())


def test_gptq_keeps_the_zeros_of_a_pruned_weight() -> None:
    x = correlated(128)
    weight = prune_2_4(torch.randn(64, 128, generator=torch.Generator().manual_seed(2)))
    packed = mc.quantize(weight, "gptq", sparsity="2:4", prune="magnitude", inputs=x)
    dense = mc.dequantize(packed, torch.float32).t()
    assert bool((dense[weight == 0] == 0).all())
    rtn = mc.dequantize(mc.quantize(weight, sparsity="2:4"), torch.float32).t()
    errors = [float((x @ (w - weight).t()).norm()) for w in (dense, rtn)]
    assert errors[0] < errors[1]


def test_gptq_without_sparsity_is_what_it_was() -> None:
    x = correlated(128)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    dense = mc.quantize(weight, "gptq", inputs=x)
    assert not dense.sparse and int((mc.dequantize(dense) == 0).sum()) < 64 * 128 / 4
    for order in (True, "static"):
        with pytest.raises(ValueError, match="needs the natural order"):
            mc.quantize(weight, "gptq", inputs=x, sparsity="2:4", act_order=order)
    with pytest.raises(ValueError, match="K=126 is not a multiple of 4"):
        mc.quantize(weight[:, :126], "gptq", group_size=-1, inputs=x[:, :126], sparsity="2:4")


def test_state_and_files(tmp_path) -> None:
    weight = pack_sparse(sparse_codes(128, 64), scales_for(128, 64, 64), group_size=64)
    assert PackedWeight.from_state(weight.state()) == weight
    mc.save(weight, tmp_path / "w.safetensors")
    loaded = mc.load(tmp_path / "w.safetensors")
    assert loaded == weight and loaded.sparse
    dense = mc.pack(sparse_codes(128, 64), scales_for(128, 64, 64), group_size=64)
    assert "sparse" not in dense.metadata()
    state = weight.state()
    del state["metadata"]["sparse"]
    with pytest.raises(ValueError, match="packed has shape"):
        PackedWeight.from_state(state)


def test_layer_and_its_files(tmp_path) -> None:
    weight = pack_sparse(sparse_codes(128, 70), scales_for(128, 70, 128), group_size=128)
    layer = mc.QuantLinear.from_packed(weight)
    assert layer.weight_packed == weight
    x = torch.randn(2, 128).half()
    assert torch.equal(layer(x), mc.gemm(x, weight))
    model = torch.nn.Sequential(layer)
    mc.save(model, tmp_path / "m.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(128, 70, bias=False))
    mc.load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("n, k, group_size", [(256, 256, 128), (72, 384, 64), (48, 40, -1)])
def test_shards_and_fusion(n: int, k: int, group_size: int) -> None:
    weight = pack_sparse(sparse_codes(k, n), scales_for(k, n, group_size), group_size=group_size)
    whole = mc.dequantize(weight)
    columns = [shard_columns(weight, rank, 2) for rank in range(2)]
    rows = [shard_rows(weight, rank, 2) for rank in range(2)]
    for part in (*columns, *rows):
        part.check()
    assert torch.equal(torch.cat([mc.dequantize(w) for w in columns], 1), whole)
    assert torch.equal(torch.cat([mc.dequantize(w) for w in rows], 0), whole)
    fused = fuse_columns(columns)
    fused.check()
    assert torch.equal(mc.dequantize(fused), whole)
    dense = mc.pack(sparse_codes(k, n), scales_for(k, n, group_size), group_size=group_size)
    with pytest.raises(ValueError, match="sparse differs"):
        fuse_columns([weight, dense])
