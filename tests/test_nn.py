"""QuantLinear, sharding and fusing (field reports 20, 21, 39, 80, 82, 89, 92-98)."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import marlin_cutlass as mc
from marlin_cutlass import sharding
from marlin_cutlass.nn import QuantLinear


def weight(k=256, n=192, g=64, zeros=False, act_order=False, seed=0) -> mc.PackedWeight:
    gen = torch.Generator().manual_seed(seed)
    groups = 1 if g == -1 else k // g
    q = torch.randint(0, 16, (k, n), generator=gen, dtype=torch.uint8)
    # Scales over five powers of two: the exponent of a column depends on its largest group.
    s = (torch.rand(groups, n, generator=gen) + 0.5) * 2.0 ** torch.randint(
        -9, -4, (groups, n), generator=gen
    )
    z = torch.randint(0, 16, (groups, n), generator=gen, dtype=torch.uint8) if zeros else None
    g_idx = (torch.arange(k) // (k // groups))[torch.randperm(k, generator=gen)]
    return mc.pack(q, s.half(), z, group_size=g, g_idx=g_idx if act_order else None)


def layer(bias=True, **options) -> QuantLinear:
    w = weight(**options)
    b = torch.arange(w.n, dtype=torch.float16) if bias else None
    return QuantLinear.from_packed(w, b)


def activations(*shape, dtype=torch.float16, seed=1):
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=gen) * 0.5).to(dtype)


def test_forward_is_gemm_plus_natural_bias():
    module = layer()
    x = activations(2, 3, 256)
    expected = mc.gemm(x, module.weight_packed, module.bias)
    assert torch.equal(module(x), expected) and expected.shape == (2, 3, 192)
    zero = torch.zeros(5, 256, dtype=torch.float16)
    assert torch.equal(module(zero), module.bias.expand(5, -1))


def test_from_linear_keeps_bias_presence_and_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for bias in (True, False):
            linear = nn.Linear(256, 96, bias=bias).to(dtype)
            module = QuantLinear.from_linear(linear, group_size=64)
            assert (module.bias is not None) == bias
            x = activations(4, 256, dtype=dtype)
            y = module(x)
            assert y.dtype == dtype
            want = linear(x).detach()
            assert float((y - want).float().norm() / want.float().norm()) < 0.15


def test_from_linear_refuses_a_bare_weight():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Linear, not Tensor"):
        QuantLinear.from_linear(torch.randn(96, 256))


def test_buffers_not_parameters_and_canonical_state_dict():
    module = layer(act_order=True)
    assert list(module.parameters()) == []
    assert set(module.state_dict()) == {"packed", "col_scale", "perm", "bias"}
    assert set(layer(bias=False).state_dict()) == {"packed", "col_scale"}


def test_strict_load_refuses_a_missing_bias_and_loads_order_either_way():
    source = layer(bias=False)
    target = QuantLinear(256, 192, bias=True, group_size=64)
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        target.load_state_dict(source.state_dict())
    target.load_state_dict(source.state_dict(), strict=False)
    assert torch.equal(target.bias, torch.zeros(192, dtype=torch.float16))
    ordered = layer(act_order=True)
    plain = QuantLinear(256, 192, bias=True, group_size=64)
    plain.load_state_dict(ordered.state_dict())
    x = activations(3, 256)
    assert torch.equal(plain(x), ordered(x))
    plain.load_state_dict(layer().state_dict())
    assert plain.perm is None
    with pytest.raises(RuntimeError, match="size mismatch"):
        QuantLinear(256, 128, bias=True, group_size=64).load_state_dict(ordered.state_dict())


def test_meta_construction_and_assign():
    source = layer(act_order=True)
    with torch.device("meta"):
        target = QuantLinear(256, 192, bias=True, group_size=64)
    assert target.packed.device.type == "meta"
    target.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(target(activations(3, 256)), source(activations(3, 256)))
    fake = target.to("meta")(torch.empty(8, 256, dtype=torch.bfloat16, device="meta"))
    assert fake.shape == (8, 192) and fake.dtype == torch.bfloat16


def test_casts_change_no_stored_bit():
    module = layer()
    packed, col_scale = module.packed.clone(), module.col_scale.clone()
    x = activations(3, 256)
    before = module(x)
    for cast in (module.bfloat16, module.half, module.float, lambda: module.to(torch.bfloat16)):
        cast()
        assert torch.equal(module.packed, packed)
        assert module.col_scale.dtype == torch.float32
        assert torch.equal(module.col_scale, col_scale)
    assert module.dtype == torch.bfloat16 and module.bias.dtype == torch.bfloat16
    module.half()
    assert torch.equal(module(x), before)


def test_float32_activations_are_converted_and_the_result_back():
    module = layer()
    x = activations(3, 256, dtype=torch.float32)
    assert torch.equal(module(x), module(x.half()).float())
    assert layer(bias=False).bfloat16().dtype == torch.bfloat16


def test_copies_and_pickles_are_equal_and_independent():
    module = layer(act_order=True)
    x = activations(3, 256)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(other(x), module(x))
        assert other.packed.data_ptr() != module.packed.data_ptr()


def test_forward_leaves_the_state_alone():
    module = layer(act_order=True)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    module(activations(3, 256))
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_gradient_of_activations():
    module = layer(act_order=True)
    x = activations(2, 3, 256).requires_grad_()
    out = module(x)
    grad = activations(*out.shape, seed=5)
    out.backward(grad)
    expected = grad.float() @ mc.dequantize(module.weight_packed, torch.float32).t()
    assert x.grad.shape == (2, 3, 256)
    assert float((x.grad.float() - expected).norm() / expected.norm()) < 2e-3


def test_lora_autocast_and_checkpointing():
    from torch.utils.checkpoint import checkpoint

    module = layer(bias=False)
    a = nn.Parameter(torch.randn(256, 8) * 0.02)
    b = nn.Parameter(torch.zeros(8, 192))
    x = torch.randn(4, 256, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = checkpoint(lambda t: module(t) + t @ a @ b, x, use_reentrant=False)
        assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert b.grad is not None and float(b.grad.abs().sum()) > 0
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_reload_in_place_keeps_addresses():
    module = layer()
    address = module.packed.data_ptr()
    other = layer(seed=9)
    module.load_state_dict(other.state_dict())
    assert module.packed.data_ptr() == address
    third = weight(seed=10)
    module.copy_(third, other.bias)
    assert module.packed.data_ptr() == address
    assert torch.equal(module.weight_packed.packed, third.packed)
    with pytest.raises(ValueError, match="bias"):
        module.copy_(third)
    with pytest.raises(ValueError, match="same form"):
        module.copy_(weight(g=128), other.bias)


def test_attributes_that_wrappers_read():
    module = layer()
    assert (module.in_features, module.out_features) == (256, 192)
    assert module.device == torch.device("cpu") and module.bias is not None
    assert module.dequantize().shape == (192, 256)
    assert "group_size=64" in repr(module)


def test_compile_has_one_graph_and_no_clone():
    seen = []

    def backend(graph, _inputs):
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    module = layer(act_order=True)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for m in (7, 1, 64):
        x = activations(m, 256)
        assert torch.equal(compiled(x), module(x))
    assert len(seen) <= 2
    assert all("clone" not in name for names in seen for name in names), seen
    exported = torch.export.export(module, (activations(4, 256),))
    assert torch.equal(exported.module()(activations(4, 256)), module(activations(4, 256)))


def test_opcheck():
    module = layer(act_order=True)
    form = (module.out_features, module.in_features, module.group_size, module.has_zeros)
    arguments = (activations(3, 256), module.packed, module.col_scale, module.bias, module.perm)
    torch.library.opcheck(torch.ops.marlin_cutlass.gemm.default, (*arguments, *form))


# Shards and fused siblings ----------------------------------------------------------------------

KINDS = [
    {"g": 64},
    {"g": 128, "zeros": True},
    {"g": 32},
    {"g": -1},
    {"g": -1, "zeros": True},
    {"g": 256, "zeros": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("n", "world"), [(512, 4), (192, 2), (96, 4)])
def test_column_shards_are_exact(kind, n, world):
    whole = weight(n=n, **kind)
    parts = [sharding.shard_columns(whole, r, world) for r in range(world)]
    for dtype in (torch.float16, torch.bfloat16):
        dense = torch.cat([mc.dequantize(p, dtype) for p in parts], 1)
        assert torch.equal(dense, mc.dequantize(whole, dtype))
    for part in parts:
        part.check()
    again = sharding.fuse_columns(parts)
    assert torch.equal(again.packed, whole.packed) and torch.equal(again.col_scale, whole.col_scale)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("k", "world"), [(1024, 4), (768, 3), (512, 2)])
def test_row_shards_are_exact(kind, k, world):
    whole = weight(k=k, n=96, **kind)
    parts = [sharding.shard_rows(whole, r, world) for r in range(world)]
    for dtype in (torch.float16, torch.bfloat16):
        dense = torch.cat([mc.dequantize(p, dtype) for p in parts])
        assert torch.equal(dense, mc.dequantize(whole, dtype))


def test_column_shards_equal_packing_the_shard():
    # 21: the same checkpoint right at TP1 and wrong at TP4.
    gen = torch.Generator().manual_seed(3)
    q = torch.randint(0, 16, (256, 512), generator=gen, dtype=torch.uint8)
    s = (torch.rand(4, 512, generator=gen) * 0.05).half()
    whole = mc.pack(q, s, group_size=64)
    for rank in range(4):
        columns = slice(128 * rank, 128 * rank + 128)
        alone = mc.pack(q[:, columns].contiguous(), s[:, columns].contiguous(), group_size=64)
        assert sharding.shard_columns(whole, rank, 4) == alone


def test_row_shards_of_64_rows_and_cut_groups():
    # 20: tp=8 of K=1024 is one group of 128 each; tp=16 would cut it.
    whole = weight(k=1024, n=256, g=128)
    parts = [sharding.shard_rows(whole, r, 8) for r in range(8)]
    assert torch.equal(torch.cat([mc.dequantize(p) for p in parts]), mc.dequantize(whole))
    with pytest.raises(ValueError, match=r"rows 64\.\.128 cut a group.*group_size=128"):
        sharding.shard_rows(whole, 1, 16)
    fine = weight(k=1024, n=256, g=32)
    parts = [sharding.shard_rows(fine, r, 16) for r in range(16)]
    assert torch.equal(torch.cat([mc.dequantize(p) for p in parts]), mc.dequantize(fine))


def test_act_order_shards():
    whole = weight(k=512, n=256, g=128, act_order=True)
    parts = [sharding.shard_columns(whole, r, 2) for r in range(2)]
    assert torch.equal(torch.cat([mc.dequantize(p) for p in parts], 1), mc.dequantize(whole))
    with pytest.raises(ValueError, match="act-order"):
        sharding.shard_rows(whole, 0, 2)
    dense = torch.zeros(512, 256, dtype=torch.float16)
    for rank in range(4):
        part, features = sharding.shard_rows_in_order(whole, rank, 4)
        assert part.perm is None
        dense[features] = mc.dequantize(part)
    assert torch.equal(dense, mc.dequantize(whole))


def test_layer_shards_add_up():
    whole = layer(k=512, n=256, g=128)
    x = activations(4, 512)
    columns = torch.cat([whole.shard(r, 2, "column")(x) for r in range(2)], 1)
    assert torch.equal(columns, whole(x))
    rows = [whole.shard(r, 2, "row") for r in range(2)]
    assert rows[0].bias is not None and rows[1].bias is None
    total = rows[0](x[:, :256]).float() + rows[1](x[:, 256:]).float()
    assert torch.allclose(total, whole(x).float(), atol=0.3, rtol=2e-3)
    with pytest.raises(ValueError, match="world=3"):
        whole.shard(0, 3, "column")


def test_fusing_is_refused_with_the_reason():
    a = layer(n=128)
    fused = QuantLinear.fuse([a, layer(n=96, seed=2), layer(n=64, seed=3)])
    x = activations(3, 256)
    parts = [a, layer(n=96, seed=2), layer(n=64, seed=3)]
    assert torch.equal(fused(x), torch.cat([p(x) for p in parts], 1))
    cases = [
        (layer(g=128), "group_size differs"),
        (layer(zeros=True), "has_zeros differs"),
        (layer(k=512), "k differs"),
        (layer(act_order=True), "act-order"),
        (layer(bias=False), "bias present in 1 of 2"),
    ]
    for other, message in cases:
        with pytest.raises(ValueError, match=message):
            QuantLinear.fuse([a, other])


def test_offloaded_layer_gives_the_same_output():
    # 97: device maps that keep a layer elsewhere move its buffers in for each forward.
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(layer(act_order=True), nn.ReLU(), layer(bias=False, k=192, n=64))
    x = activations(4, 256)
    expected = model(x)
    accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)
    assert model[0].packed.device.type == "meta"
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


# Buffers that are something else ----------------------------------------------------------------


def with_bias() -> tuple[QuantLinear, torch.Tensor, torch.Tensor]:
    module = layer()
    x = activations(3, 256)
    return module, x, module(x)


def test_a_bias_that_is_no_buffer_is_added():
    module, x, want = with_bias()
    bias = module.bias
    module.bias = torch.nn.Parameter(bias)
    assert torch.equal(module(x), want)
    del module.bias
    module.bias = bias  # a plain attribute, as in a replica
    assert "bias" not in module._buffers and torch.equal(module(x), want)
    module, x, want = with_bias()
    torch.nn.utils.parametrize.register_parametrization(module, "bias", torch.nn.Identity())
    assert torch.equal(module(x), want)


def test_codes_that_are_a_parameter():
    module, x, want = with_bias()
    module.packed = torch.nn.Parameter(module.packed, requires_grad=False)
    assert torch.equal(module(x), want)
    del module.packed
    with pytest.raises(AttributeError, match="packed"):
        module(x)


def test_a_bias_that_learns_has_a_gradient():
    module, x, _ = with_bias()
    module.bias = torch.nn.Parameter(module.bias)
    module(x).sum().backward()
    assert torch.equal(module.bias.grad, torch.full((192,), 3.0, dtype=torch.float16))


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64])
def test_sizes_of_numpy(kind):
    module = QuantLinear(kind(256), kind(96), group_size=kind(64))
    assert module(activations(2, 256)).shape == (2, 96)
