"""`fuse_mlps`: tiny Llama and Qwen2 in Transformers, and modules that must be left alone (CPU).

The CPU operator makes every column of a product by itself and applies SwiGLU in the two steps of
the modules it replaces, each rounded to the activations' dtype: results are compared bit for bit
but for float32 activations, which the fused layer rounds to float16 ahead of silu.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from marlin_cutlass import PackedWeight, QuantLinear, fuse_mlps, pack, pack_sparse, prune_2_4
from marlin_cutlass.integrations import fused_mlp
from marlin_cutlass.integrations.fused_mlp import FusedMLP

IDS = torch.arange(1, 19).view(2, 9) * 5 % 96
K, I = 128, 64


def weight(k=K, n=I, group_size=64, zeros=False, order=None, seed=0) -> PackedWeight:
    """order: seed of an act-order."""
    gen = torch.Generator().manual_seed(seed)
    groups = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), generator=gen, dtype=torch.uint8)
    scales = ((torch.rand(groups, n, generator=gen) + 0.5) * 0.02).half()
    z = torch.randint(0, 16, (groups, n), generator=gen, dtype=torch.uint8) if zeros else None
    g_idx = None
    if order is not None:
        rows = torch.randperm(k, generator=torch.Generator().manual_seed(order))
        g_idx = (torch.arange(k) // (k // groups))[rows]
    return pack(q, scales, z, group_size=group_size, g_idx=g_idx)


def sparse_weight(seed):
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (K, I), dtype=torch.uint8, generator=gen)
    kept = prune_2_4(torch.rand(I, K, generator=gen)).t() != 0
    scales = torch.rand(2, I, generator=gen).half() * 0.02
    return pack_sparse(torch.where(kept, codes, 8), scales, group_size=64)


def layer(w: PackedWeight, bias: bool = False) -> QuantLinear:
    return QuantLinear.from_packed(w, torch.arange(w.n).half() / w.n - 0.5 if bias else None)


class MLP(nn.Module):
    def __init__(self, act=None, bias=False, gate=None, up=None, **form):
        super().__init__()
        self.gate_proj = gate or layer(weight(seed=1, **form), bias)
        self.up_proj = up or layer(weight(seed=2, **form), bias)
        self.down_proj = layer(weight(I, K, seed=3), bias)
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def activations(*shape, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def fused(mlp: nn.Module) -> FusedMLP:
    model = nn.Sequential(mlp)
    assert fuse_mlps(model) == 1 and isinstance(model[0], FusedMLP)
    return model[0]


# ---- one module ----

FORMS = [
    {},
    {"group_size": -1},
    {"group_size": 32, "zeros": True},
    {"order": 7},
    {"bias": True},
    {"n": 50, "bias": True},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_module_keeps_its_bits(form, dtype):
    mlp = MLP(**form)
    if form.get("n"):
        mlp.down_proj = nn.Linear(50, K).to(dtype)
    for x in (activations(2, 3, K, dtype=dtype), activations(K, dtype=dtype)):
        want = mlp(x)
        out = fused(mlp)(x)
        assert out.dtype == dtype and torch.equal(out, want)


def test_sparse_projections():
    mlp, x = MLP(gate=layer(sparse_weight(1)), up=layer(sparse_weight(2))), activations(5, K)
    want, new = mlp(x), fused(mlp)
    assert new.gate_up.sparse and torch.equal(new(x), want)


def test_float32_activations_and_autocast():
    mlp, x = MLP(bias=True), activations(4, K, dtype=torch.float32)
    new, want = fused(mlp), mlp(x)
    out = new(x)
    assert out.dtype == torch.float32
    # silu and the product are rounded to float16 here, and once, behind the product, there.
    assert float((out - want).abs().max() / want.abs().max()) < 2e-3
    assert torch.equal(out, new(x.half()).float())
    with torch.autocast("cpu", torch.bfloat16):
        out, want = new(x), mlp(x)
        assert out.dtype == torch.bfloat16 and torch.equal(out, want)
    new.bfloat16()
    assert new.gate_up.dtype == torch.bfloat16 and new.gate_up.col_scale.dtype == torch.float32
    assert torch.equal(new(x), new(x.bfloat16()).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_gradient_of_the_input(dtype):
    mlp = MLP(bias=True, order=7)
    new, grads = fused(mlp), []
    for module in (mlp, new):
        x = activations(4, K, dtype=dtype).requires_grad_()
        out = module(x)
        out.float().pow(2).sum().backward()
        grads.append(x.grad.float())
    # The old gradient is the sum of two products, each rounded; the new one is one product.
    assert grads[0].abs().max() > 0
    assert float((grads[0] - grads[1]).abs().max() / grads[0].abs().max()) < 3e-3
    x = activations(4, K)
    assert torch.equal(new(x.clone().requires_grad_()), new(x))


def test_the_projections_it_is_made_of():
    gate, up = layer(weight(seed=1), bias=True), layer(weight(seed=2), bias=True)
    new = FusedMLP.from_layers(gate, up, nn.Identity())
    assert (new.gate_up.in_features, new.gate_up.out_features) == (K, 2 * I)
    dense = new.gate_up.dequantize().view(-1, 2, 2, K)
    assert torch.equal(dense[:, 0].reshape(I, K), gate.dequantize())
    assert torch.equal(dense[:, 1].reshape(I, K), up.dequantize())
    assert set(new.state_dict()) == {f"gate_up.{n}" for n in ("packed", "col_scale", "bias")}
    assert new(activations(0, K)).shape == (0, I)
    assert new.to("meta")(activations(3, K).to("meta")).shape == (3, I)
    with pytest.raises(ValueError, match="bias present in 1 of 2"):
        FusedMLP.from_layers(gate, layer(weight()), nn.Identity())
    with pytest.raises(TypeError, match="gate_up must be a QuantLinear, not Linear"):
        FusedMLP(nn.Linear(K, 2 * I), nn.Identity())
    with pytest.raises(ValueError, match="N=50 must be a multiple of 4 for swiglu"):
        FusedMLP(layer(weight(n=50)), nn.Identity())


# ---- what is found ----


@pytest.mark.parametrize("act", ["function", "module", "transformers"])
def test_activations_that_are_silu(act):
    class SiLUActivation(nn.Module):
        def forward(self, x):
            return functional.silu(x)

    kinds = {"function": functional.silu, "module": nn.SiLU(), "transformers": SiLUActivation()}
    mlp, x = MLP(kinds[act]), activations(3, K)
    want = mlp(x)
    assert torch.equal(fused(mlp)(x), want)


def test_places_in_the_model_and_modes():
    inner = nn.ModuleDict({"mlp": MLP(), "other": MLP(nn.GELU())})
    shared = MLP(bias=True)
    hooked = shared.down_proj  # stays itself, with its hooks
    seen = []
    hooked.register_forward_hook(lambda *_: seen.append(1))
    model = nn.ModuleList([inner, shared, nn.ModuleList([shared])]).eval()
    hooked.train()
    assert fuse_mlps(model) == 2
    assert isinstance(model[0]["mlp"], FusedMLP) and isinstance(model[0]["other"], MLP)
    assert isinstance(model[1], FusedMLP) and model[2][0] is model[1]
    assert model[1].down is hooked and hooked.training
    assert not model[1].training and not model[1].gate_up.training
    model[1](activations(1, K))
    assert seen == [1]
    assert fuse_mlps(model) == 0
    assert fuse_mlps(MLP()) == 0  # has no parent
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not list"):
        fuse_mlps([MLP()])


def test_the_originals_are_dropped_one_at_a_time(monkeypatch):
    model = nn.Sequential(*(MLP() for _ in range(4)))
    originals = [weakref.ref(mlp.gate_proj.packed) for mlp in model]
    alive, made = [], fused_mlp.fuse_gate_up

    def counted(*weights):
        alive.append(sum(ref() is not None for ref in originals))
        return made(*weights)

    monkeypatch.setattr(fused_mlp, "fuse_gate_up", counted)
    assert fuse_mlps(model) == 4
    assert alive == [4, 3, 2, 1] and not any(ref() is not None for ref in originals)


# ---- what is left alone ----


class Gated(MLP):
    pass


class ScaledMLP(MLP):
    factor = 0.5

    def forward(self, x):
        return super().forward(x) * self.factor


class ClampedMLP(MLP):
    limit = 10.0

    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(gate) * up)


class DroppingMLP(MLP):
    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(functional.dropout(hidden, 0.1, self.training))


class Float32MLP(MLP):
    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj((self.act_fn(gate.float()) * up.float()).to(gate.dtype))


class SwappedMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class TwoArgumentsMLP(MLP):
    def forward(self, x, mask=None):
        return super().forward(x)


class TupleMLP(MLP):
    def forward(self, x):
        return (super().forward(x),)


class Swish(nn.SiLU):
    pass


class RoundedQuantLinear(QuantLinear):
    def forward(self, x):
        return super().forward(x).round()


def with_part(name, part):
    mlp = MLP()
    setattr(mlp, name, part)
    return mlp


def hooked(pick, register):
    mlp = MLP()
    getattr(pick(mlp), register)(lambda *_: None)
    return mlp


def replaced_forward():
    mlp = MLP()
    mlp.gate_proj.forward = lambda x: QuantLinear.forward(mlp.gate_proj, x)
    return mlp


def experts():
    """One of Mixtral's by its names in a checkpoint."""
    mlp = MLP()
    mlp.w1, mlp.w3, mlp.w2 = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    del mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return mlp


LEFT = {
    "another activation": lambda: MLP(nn.GELU()),
    "an activation of unknown class": lambda: MLP(Swish()),
    "no activation": lambda: with_part("act_fn", None),
    "dense layers": lambda: MLP(gate=nn.Linear(K, I), up=nn.Linear(K, I)),
    "one dense layer": lambda: MLP(up=nn.Linear(K, I)),
    "a subclass": lambda: MLP(gate=RoundedQuantLinear.from_packed(weight())),
    "another group size": lambda: MLP(up=layer(weight(group_size=32))),
    "zero points in one": lambda: MLP(up=layer(weight(zeros=True))),
    "sparsity in one": lambda: MLP(up=layer(sparse_weight(1))),
    "act-order in one": lambda: MLP(up=layer(weight(order=1))),
    "act-orders that differ": lambda: MLP(
        gate=layer(weight(order=1)), up=layer(weight(order=2, seed=1))
    ),
    "a bias in one": lambda: MLP(up=layer(weight(), bias=True)),
    "another dtype": lambda: MLP(up=layer(weight()).bfloat16()),
    "an odd N": lambda: MLP(n=33),
    "other names": experts,
    "a hook of the module": lambda: hooked(lambda m: m, "register_forward_hook"),
    "a hook ahead of the module": lambda: hooked(lambda m: m, "register_forward_pre_hook"),
    "a hook of gate": lambda: hooked(lambda m: m.gate_proj, "register_forward_pre_hook"),
    "a hook of up": lambda: hooked(lambda m: m.up_proj, "register_forward_hook"),
    "a hook of the activation": lambda: hooked(lambda m: m.act_fn, "register_forward_hook"),
    "a backward hook": lambda: hooked(lambda m: m.up_proj, "register_full_backward_hook"),
    "a forward of its own": replaced_forward,
    "another submodule": lambda: with_part("dropout", nn.Dropout(0.0)),
    "a parameter": lambda: with_part("scale", nn.Parameter(torch.ones(1))),
    "another name of the class": Gated,
    "a multiplier": ScaledMLP,
    "a clamp": ClampedMLP,
    "dropout in forward": DroppingMLP,
    "steps in float32": Float32MLP,
    "gate and up swapped": SwappedMLP,
    "a second argument": TwoArgumentsMLP,
    "a tuple": TupleMLP,
    "nothing loaded yet": lambda: MLP().to("meta"),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_alone(case):
    mlp = LEFT[case]()
    before = dict(vars(mlp)["_modules"])
    model, state = nn.Sequential(mlp), torch.get_rng_state()
    assert fuse_mlps(model) == 0
    assert model[0] is mlp and vars(mlp)["_modules"] == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_neutral_multiplier_is_no_obstacle():
    mlp = ScaledMLP()
    mlp.factor = 1.0
    assert fuse_mlps(nn.Sequential(mlp)) == 1


# ---- Transformers ----

MODELS = {"llama": {}, "llama-biased": {"mlp_bias": True}, "qwen2": {}}


@pytest.fixture
def load(tmp_path):
    """A tiny model in QuantLinear form."""
    pytest.importorskip("transformers", minversion="5.16", reason="needs transformers")
    from integration_models import write_folder

    from marlin_cutlass import hf

    def loaded(name="llama", dtype=torch.float16, fmt="gptq", **options):
        write_folder(tmp_path / "a", name.split("-")[0], fmt, **MODELS.get(name, {}), **options)
        model = hf.from_pretrained(tmp_path / "a", dtype=dtype)
        for module in model.modules():
            if isinstance(module, QuantLinear) and module.bias is not None:
                module.bias.copy_(activations(module.out_features))
        return model

    return loaded


def mlps(model):
    return [block.mlp for block in model.model.layers]


@torch.no_grad()
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_keep_their_bits(load, name, dtype, act_order):
    model = load(name, dtype, act_order=act_order)
    biased = [mlp.gate_proj.bias is not None for mlp in mlps(model)]
    assert all(biased) if name == "llama-biased" else not any(biased)
    assert (model.model.layers[0].self_attn.q_proj.bias is not None) == (name == "qwen2")
    want = model(IDS).logits
    assert fuse_mlps(model) == 2
    assert all(isinstance(mlp, FusedMLP) and not mlp.training for mlp in mlps(model))
    assert torch.equal(model(IDS).logits, want)
    keys = {key.split("mlp.")[1] for key in model.state_dict() if "mlp." in key}
    assert {key.split(".")[0] for key in keys} == {"gate_up", "down"}


@torch.no_grad()
def test_hooks_on_the_fused_layer_run():
    mlp = fused(MLP())
    seen = []
    mlp.gate_up.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    out = mlp(activations(3, K))
    assert seen == [(3, I)] and out.shape[0] == 3


def test_tensor_parallelism_refuses_what_it_would_leave_whole():
    from marlin_cutlass.integrations.tensor_parallel import plan_for

    model = nn.Sequential(MLP())
    assert plan_for(model)
    assert fuse_mlps(model) == 1
    with pytest.raises(ValueError, match="0 was fused by fuse_mlps: shard a model whose MLPs"):
        plan_for(model)


@pytest.mark.parametrize("part", [False, True])
def test_a_fused_model_is_not_saved(load, tmp_path, part):
    model = load("llama")
    model.save_pretrained(tmp_path / "before")
    assert fuse_mlps(model.model if part else model) > 0
    with pytest.raises(ValueError, match="save_pretrained: 2 MLPs were fused by fuse_mlps"):
        model.save_pretrained(tmp_path / "behind")
    assert not list((tmp_path / "behind").glob("*.safetensors"))


def test_a_float32_model(load):
    model = load(dtype=torch.float32)
    want = model(IDS).logits
    assert fuse_mlps(model) == 2
    out = model(IDS).logits
    assert out.dtype == torch.float32
    # silu is rounded to float16 in each layer.
    assert float((out - want).abs().max() / want.abs().max()) < 2e-3


@torch.no_grad()
def test_generate_with_a_static_cache(load):
    model = load("qwen2", fmt="awq")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["cache_implementation"] = "static"
    want = model.generate(IDS, **options)
    assert fuse_mlps(model) == 2
    out = model.generate(IDS, **options)
    assert out.shape == (2, 15) and torch.equal(out, want)


@torch.no_grad()
def test_the_model_compiles_as_one_graph(load):
    model = load("llama-biased")
    assert fuse_mlps(model) == 2
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    out = compiled(IDS, use_cache=False).logits
    assert torch.equal(out, model(IDS, use_cache=False).logits)


def test_gradients_reach_the_inputs(load):
    model = load()
    assert fuse_mlps(model) == 2
    x = (activations(1, 4, 128) / 4).requires_grad_()
    model(inputs_embeds=x).logits.float().square().mean().backward()
    assert bool(x.grad.isfinite().all()) and float(x.grad.abs().max()) > 0


@torch.no_grad()
def test_a_fused_model_is_not_made_dense(load):
    model = load("llama-biased")
    assert fuse_mlps(model) == 2
    with pytest.raises(ValueError, match="dequantize: 2 MLPs were fused by fuse_mlps"):
        model.dequantize()
    assert isinstance(mlps(model)[0], FusedMLP)


@pytest.mark.parametrize("name, options", [("llama", {"hidden_act": "gelu"}), ("mixtral", {})])
def test_models_that_have_nothing_to_fuse(load, name, options):
    model = load(name, **options)
    before = [type(module) for module in model.modules()]
    assert fuse_mlps(model) == 0
    assert [type(module) for module in model.modules()] == before


def test_other_forwards_of_transformers_are_left_alone():
    pytest.importorskip("transformers", minversion="5.16", reason="needs transformers")
    from transformers import FalconH1Config, Phi3Config, SeedOssConfig
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
    from transformers.models.phi3.modeling_phi3 import Phi3MLP
    from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP

    sizes = {"hidden_size": K, "intermediate_size": I}
    falcon = FalconH1MLP(FalconH1Config(**sizes, mlp_multipliers=[0.5, 2.0]))
    seed = SeedOssMLP(SeedOssConfig(**sizes, residual_dropout=0.1))
    phi = Phi3MLP(Phi3Config(**sizes, pad_token_id=0))
    for module in (falcon, seed, phi):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, QuantLinear.from_linear(child.half(), group_size=64))
        assert fuse_mlps(nn.Sequential(module)) == 0
    # The same modules where their own steps do nothing.
    falcon.gate_multiplier = falcon.down_multiplier = 1.0
    seed.residual_dropout = 0.0
    assert fuse_mlps(nn.Sequential(falcon, seed)) == 2
