"""Running calibration samples through a model, whole or block by block, with early exit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from .hessian import Moments


class _StopForwardError(Exception):
    """Raised by a hook: everything that was to be seen in this forward has been seen."""


def normalise_sample(sample) -> tuple[tuple, dict]:
    """A sample is a tensor, a tuple of arguments or a dict of keywords -> (args, kwargs)."""
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    if hasattr(sample, "items"):
        return (), dict(sample.items())
    raise TypeError(
        f"calibration sample is {type(sample).__name__}: tensor, tuple or dict required"
    )


def to_device(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(v, device) for v in value)
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    return value


def token_mask(kwargs: dict) -> torch.Tensor | None:
    """The attention mask [B, T] of a sample, which marks the tokens that are not padding."""
    mask = kwargs.get("attention_mask")
    return mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


class Calls:
    """Recorded calls of one callable: (args, kwargs, mask) per sample, kept on the CPU."""

    def __init__(
        self,
        run: Callable,
        samples: list[tuple[tuple, dict, torch.Tensor | None]],
        device: torch.device,
    ) -> None:
        self.run, self.samples, self.device = run, samples, device

    def __iter__(self) -> Iterator[tuple[Callable[[], object], torch.Tensor | None]]:
        for args, kwargs, mask in self.samples:
            yield lambda a=args, k=kwargs: self._call(a, k), mask

    @torch.no_grad()
    def _call(self, args, kwargs):
        try:
            return self.run(*to_device(args, self.device), **to_device(kwargs, self.device))
        except _StopForwardError:
            return None


def model_calls(model: nn.Module, calibration: Iterable) -> Calls:
    """Calls of the whole model, one per sample (variable lengths are fine)."""
    parameter = next(model.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    samples = []
    for sample in calibration:
        args, kwargs = normalise_sample(sample)
        samples.append((args, kwargs, token_mask(kwargs)))
    return Calls(model, samples, device)


class Streams:
    """Calls of the model being quantised and, for matching, the same calls of the original."""

    def __init__(self, calls: Calls, original: Calls | None = None) -> None:
        self.calls, self.original = calls, original


def collect_moments(
    streams: Streams,
    layers: dict[str, nn.Linear],
    originals: dict[str, nn.Linear] | None = None,
    weights: dict[str, list[torch.Tensor | None]] | None = None,
) -> dict[str, Moments]:
    """Moments of the inputs of `layers` over all calls; a forward stops when all were seen.

    originals: the same layers of the original model, whose inputs become the references. weights:
    by layer, how much each token of each call counts.
    """
    paired = originals is not None
    moments = {n: Moments(m.in_features, m.weight.device, paired) for n, m in layers.items()}
    references: dict[str, torch.Tensor] = {}

    sample = 0

    def keep(name, x, _mask):
        references[name] = x

    def add(name, x, mask):
        given = weights[name][sample] if weights and name in weights else None
        given = _fitting(given, x)
        if not paired:
            moments[name].add(x, _fitting(mask, x), weights=given)
        elif name in references and references[name].shape == x.shape:
            moments[name].add(x, _fitting(mask, x), references[name], given)

    pairs = (
        zip(streams.calls, streams.original, strict=True)
        if paired
        else ((call, None) for call in streams.calls)
    )
    for sample, ((call, mask), original) in enumerate(pairs):  # noqa: B007 - read by add
        if paired:
            references.clear()
            _observe(original[0], originals, keep, mask)
        _observe(call, layers, add, mask)
    return moments


def _observe(call: Callable, layers: dict[str, nn.Linear], see: Callable, mask) -> None:
    """Run `call`, giving see(name, input, mask) each layer's input; stop once all have run."""
    left = set(layers)

    def hook(name):
        def observe(_module, args, _output):
            see(name, args[0].detach(), mask)
            left.discard(name)
            if not left:
                raise _StopForwardError

        return observe

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(hook(name)).remove)
        call()


def execution_order(calls: Calls, layers: dict[str, nn.Linear]) -> list[dict[str, nn.Linear]]:
    """Layers grouped by the tensor they read, in order of execution (q, k, v together).

    Layers that the first sample does not reach (experts) come last, together. More than 8 groups
    are merged into one: each group costs a pass over the data.
    """
    groups: list[tuple[torch.Tensor, dict[str, nn.Linear]]] = []

    def see(name, x, _mask):
        for tensor, members in groups:
            if tensor.data_ptr() == x.data_ptr() and tensor.shape == x.shape:
                members[name] = layers[name]
                return
        groups.append((x, {name: layers[name]}))

    for call, mask in calls:
        _observe(call, layers, see, mask)
        break
    seen = {name for _, members in groups for name in members}
    rest = {name: layer for name, layer in layers.items() if name not in seen}
    stages = [members for _, members in groups] + ([rest] if rest else [])
    return stages if len(stages) <= 8 else [layers]


def _fitting(mask, x: torch.Tensor):
    return mask if mask is not None and mask.shape == x.shape[:-1] else None


def find_blocks(model: nn.Module, wanted: set[str]) -> list[tuple[str, nn.Module]]:
    """The ModuleList that holds most of the wanted layers, at least two members with some each;
    members that are skipped as a whole are run like the others."""
    best: list[tuple[str, nn.Module]] = []
    best_count = 0
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        names = [f"{prefix}.{i}" if prefix else str(i) for i in range(len(module))]
        counts = [sum(w.startswith(n + ".") for w in wanted) for n in names]
        if sum(c > 0 for c in counts) >= 2 and sum(counts) > best_count:
            best, best_count = list(zip(names, module, strict=True)), sum(counts)
    return best


def first_output(output):
    """The hidden states of a block's return value: itself, or the first member of a tuple."""
    return output[0] if isinstance(output, (tuple, list)) else output


def blocks_are_chained(calls: Calls, blocks: list[nn.Module]) -> bool:
    """True if each block runs once, in order, on its predecessor's very output.

    All other arguments must be equal too. Only then may blocks run on their own; for masks that
    differ between blocks, skips, and encoders that feed decoders, whole forwards are used instead.
    """
    seen: list[tuple] = []
    outputs: list = []

    def before(_module, args, kwargs):
        seen.append((args, kwargs))

    def after(_module, _args, output):
        outputs.append(first_output(output))

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(after).remove)
        for call, _ in calls:
            call()
            break
    if len(seen) != len(blocks) or not all(args for args, _ in seen):
        return False
    chained = all(seen[i + 1][0][0] is outputs[i] for i in range(len(blocks) - 1))
    return chained and all(_same_rest(seen[0], call) for call in seen[1:])


def _same_rest(first: tuple, other: tuple) -> bool:
    (args_a, kwargs_a), (args_b, kwargs_b) = first, other
    if len(args_a) != len(args_b) or kwargs_a.keys() != kwargs_b.keys():
        return False
    pairs = [*zip(args_a[1:], args_b[1:], strict=True)]
    pairs += [(kwargs_a[key], kwargs_b[key]) for key in kwargs_a]
    return all(a is b or (not isinstance(a, torch.Tensor) and _equal(a, b)) for a, b in pairs)


def _equal(a, b) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        return all(x is y for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and isinstance(a, (int, float, str, bool)) and a == b


def capture_block_calls(calls: Calls, block: nn.Module) -> Calls:
    """Record the arguments of `block` for every sample, on the CPU, stopping the model there."""
    samples: list[tuple] = []
    current: dict = {}

    def before(_module, args, kwargs):
        samples.append((to_device(args, "cpu"), to_device(kwargs, "cpu"), current["mask"]))
        raise _StopForwardError

    handle = block.register_forward_pre_hook(before, with_kwargs=True)
    try:
        for call, mask in calls:
            current["mask"] = mask
            call()
    finally:
        handle.remove()
    return Calls(block, samples, calls.device)


def advance(calls: Calls, next_block: nn.Module) -> Calls:
    """Run a block; its outputs become the first argument of the next block's calls."""
    samples = []
    for (args, kwargs, mask), (call, _) in zip(calls.samples, calls, strict=True):
        hidden = first_output(call()).to("cpu")
        samples.append(((hidden, *args[1:]), kwargs, mask))
    return Calls(next_block, samples, calls.device)


@contextmanager
def evaluation_mode(model: nn.Module):
    """eval() and no key-value cache while calibrating; both restored afterwards."""
    training = model.training
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    model.eval()
    if use_cache is not None:
        config.use_cache = False
    try:
        yield
    finally:
        model.train(training)
        if use_cache is not None:
            config.use_cache = use_cache
