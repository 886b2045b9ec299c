"""Gated MLPs whose gate, up and SwiGLU are one launch: `fuse_mlps(model)`.

For Transformers' Llama-like models in `QuantLinear` form and for others by the same names; imports
no engine.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ops
from ..nn import QuantLinear
from ..reference import swiglu
from ..sharding import fuse_gate_up, interleave_pairs, why_not_fuse

LAYERS = ("gate_proj", "up_proj", "down_proj")
ACTIVATION = "act_fn"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FusedMLP(nn.Module):
    """down(silu(gate) * up), gate and up of one product whose kernel stores the half of its columns
    that SwiGLU leaves.

    gate_up: QuantLinear [K, 2 I] with columns and bias as `fuse_gate_up` lays them. down: any
    module that takes [..., I]. Activations and gradients are as in `QuantLinear`; where the input
    needs a gradient, SwiGLU is a step of its own.
    """

    def __init__(self, gate_up: QuantLinear, down: nn.Module) -> None:
        """Raises TypeError unless gate_up is a QuantLinear, ValueError unless its N is a multiple
        of 4."""
        super().__init__()
        if not isinstance(gate_up, QuantLinear):
            raise TypeError(f"gate_up must be a QuantLinear, not {type(gate_up).__name__}")
        ops.check_swiglu(gate_up.out_features)
        self.gate_up, self.down = gate_up, down

    @classmethod
    def from_layers(cls, gate: QuantLinear, up: QuantLinear, down: nn.Module) -> FusedMLP:
        """Fuse two projections [K, I], bit for bit; `down` is taken as it is.

        Raises ValueError where `fuse_gate_up` does, and for a bias in only one of them.
        """
        weight = fuse_gate_up(gate.weight_packed, up.weight_packed)
        if (gate.bias is None) != (up.bias is None):
            raise ValueError("gate and up cannot be fused: bias present in 1 of 2")
        bias = None
        if gate.bias is not None:
            bias = interleave_pairs(gate.bias, up.bias)
        return cls(QuantLinear.from_packed(weight, bias), down)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> what `down` makes of [..., I], which has x's dtype (under autocast: the
        autocast dtype)."""
        layer = self.gate_up
        if isinstance(layer, QuantLinear):
            return self.down(layer(x, swiglu=True))
        return self.down(swiglu(layer(x)))  # wrapped, by an adapter


def fuse_mlps(model: nn.Module) -> int:
    """Replace, in place, every gated MLP of quantised layers by a `FusedMLP`; returns how many.

    An MLP is replaced if its class' name ends with MLP, it consists of gate_proj, up_proj,
    down_proj and a SiLU act_fn and nothing else, its forward is down(silu(gate(x)) * up(x)), and
    gate_proj and up_proj are QuantLinear layers that `fuse_gate_up` takes. Others stay as they are:
    other activations, dense layers, adapters, act-orders or group sizes that differ, experts, and
    modules with hooks, which would be lost. `model` itself has no parent and is never replaced.

    For inference, after loading: keys of the state dict change (gate_proj.*, up_proj.* ->
    gate_up.*, down_proj.* -> down.*), so save before; `save_pretrained` and `dequantize` of a
    model that was loaded by `hf` refuse afterwards. The originals are dropped one module at a time.
    Raises TypeError unless model is a torch.nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    places = _places(model)
    for names in reversed(places):  # one inside another's `down_proj` first
        _replace(model, names)
    return len(places)


def _places(model: nn.Module) -> list[list[str]]:
    """Names of each MLP to be replaced, several where one is shared; no reference to any."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and (id(module) in places or _qualifies(module)):
            places.setdefault(id(module), []).append(name)
    return list(places.values())


def _replace(model: nn.Module, names: list[str]) -> None:
    old = model.get_submodule(names[0])
    fused = FusedMLP.from_layers(*(getattr(old, name) for name in LAYERS))
    fused.training = fused.gate_up.training = old.training  # `down` keeps its own
    for name in names:
        model.set_submodule(name, fused)


def _qualifies(module: nn.Module) -> bool:
    children = {name: child for name, child in module._modules.items() if child is not None}
    if not type(module).__name__.endswith("MLP") or not set(LAYERS) <= children.keys():
        return False
    tensors = (*module._parameters.values(), *module._buffers.values())
    if children.keys() - {*LAYERS, ACTIVATION} or any(t is not None for t in tensors):
        return False
    act = getattr(module, ACTIVATION, None)
    gate, up = children["gate_proj"], children["up_proj"]
    lost = [module, gate, up, *([act] if isinstance(act, nn.Module) else [])]
    if not _is_silu(act) or any(_is_hooked(m) for m in lost):
        return False
    # A subclass may compute something else.
    return type(gate) is type(up) is QuantLinear and _can_fuse(gate, up) and _is_plain(module)


def _is_silu(act: object) -> bool:
    """Whether act is torch's SiLU, as a module or a function, or Transformers' module."""
    if act is functional.silu or type(act) is nn.SiLU:
        return True
    return isinstance(act, nn.Module) and type(act).__name__ == "SiLUActivation"


def _is_hooked(module: nn.Module) -> bool:
    """Whether a call of module does more than its class says. Accelerate replaces the forward of
    the instance."""
    return "forward" in vars(module) or any(getattr(module, name) for name in _HOOKS)


def _can_fuse(gate: QuantLinear, up: QuantLinear) -> bool:
    """Whether two projections become one; not on meta, where nothing is loaded yet."""
    if gate.device.type == "meta" or gate.out_features != up.out_features or gate.out_features % 2:
        return False
    if (gate.bias is None) != (up.bias is None) or gate.dtype != up.dtype:
        return False
    return why_not_fuse([gate.weight_packed, up.weight_packed]) is None


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    """Whether forward takes one argument and is down(silu(gate(x)) * up(x)): tried in float64 on
    the CPU, small dense layers in place of the three, small to large values.

    Multipliers, clamps, dropout and steps in another dtype have neither parameters nor modules of
    their own to be known by.
    """
    forward = type(module).forward
    if len(inspect.signature(forward).parameters) != 2:
        return False
    with torch.random.fork_rng(devices=[]):  # the CPU's, from which dropout draws as well
        torch.default_generator.manual_seed(0)
        options = {"bias": True, "device": "cpu", "dtype": torch.float64}
        gate, up, down = (nn.Linear(*size, **options) for size in ((8, 16), (8, 16), (16, 8)))
        x = torch.randn(8, 4, 8, device="cpu", dtype=torch.float64)
        x *= 10.0 ** torch.arange(-2, 6, device="cpu").view(-1, 1, 1)
        expected = down(functional.silu(gate(x)) * up(x))
        limit = 1e-12 * expected.abs().amax(-1, keepdim=True)
        for training in (False, True):
            trial = object.__new__(type(module))
            modules = {**module._modules, **dict(zip(LAYERS, (gate, up, down), strict=True))}
            vars(trial).update(vars(module), _modules=modules, training=training)
            try:
                out = forward(trial, x.clone())
                if out.dtype != x.dtype or not bool(((out - expected).abs() <= limit).all()):
                    return False
            except Exception:  # whatever it needs, it is not this
                return False
    return True
