"""Hostile files: safetensors, config.json, indexes, manifests and tuning files from anywhere.

Every reader either gives what the file says or raises an error that names the file; it reads no
other file, needs no more memory than the file has bytes (times a small factor), runs no code and
leaves nothing half written behind.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import fake_cuda
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import marlin_cutlass as mc
from generator.arch import ARCHS
from generator.rows import read_measurements
from marlin_cutlass import dispatch
from marlin_cutlass.checkpoint import convert_checkpoint
from marlin_cutlass.checkpoint_read import read_tensor
from marlin_cutlass.errors import TableError
from marlin_cutlass.explore_tuning import TuningFile
from marlin_cutlass.files import load_with_metadata
from marlin_cutlass.formats.bits import pack_nibbles
from marlin_cutlass.json_file import parse_object, read_object
from marlin_cutlass.manifest import MANIFEST_FORMAT
from marlin_cutlass.safetensors_stream import read_header

REPO = Path(__file__).resolve().parent.parent
REFUSED = (ValueError, TypeError, FileNotFoundError, FileExistsError)
HUGE = 2**62


def settings_of(examples: int):
    """SAFETY_SCALE=8 tries eight times as many."""
    return settings(
        max_examples=examples * int(os.environ.get("SAFETY_SCALE", "1")),
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


# ---- safetensors ----


def write(path: Path, header, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F16", shape=(2, 2), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DEEP = b"[" * 100_000 + b"]" * 100_000
HEADERS = {
    "empty file": (None, "not a safetensors file"),
    "header longer than the file": ((b"{}", b"", 10**6), "not a safetensors file"),
    "header of 2^64 bytes": ((b"{}", b"", 2**64 - 1), "not a safetensors file"),
    "no header": ((b"", b"", 0), "not a safetensors file"),
    "no JSON": ((b"{'a': 1}",), "not valid JSON"),
    "bad UTF-8": ((b'{"\xff": 1}',), "not valid JSON"),
    "deep nesting": ((b'{"a":' + DEEP + b"}",), "nested too deeply"),
    "a list": ((b"[]",), "holds a list"),
    "a tensor twice": ((b'{"a": 1, "a": 2}',), "'a' occurs twice"),
    "metadata of numbers": (({"__metadata__": {"a": 1}},), "must map names to texts"),
    "metadata list": (({"__metadata__": []},), "must map names to texts"),
    "entry of another kind": (({"a": [1]},), "a damaged entry"),
    "entry without shape": (({"a": {"dtype": "F16", "data_offsets": [0, 8]}},), "a damaged entry"),
    "dtype of another kind": (({"a": entry(dtype=["F16"])}, b"\0" * 8), "not supported"),
    "unknown dtype": (({"a": entry(dtype="F4")}, b"\0" * 8), "dtype F4, not supported"),
    "negative size": (({"a": entry(shape=(-2, -2))}, b"\0" * 8), "at most 64 sizes from 0 on"),
    "true as a size": (({"a": entry(shape=(True, 4))}, b"\0" * 8), "at most 64 sizes from 0 on"),
    "fractional size": (({"a": entry(shape=(0.5, 8))}, b"\0" * 8), "at most 64 sizes from 0 on"),
    "rank 65": (({"a": entry(shape=[1] * 65, offsets=(0, 2))}, b"\0" * 8), "at most 64 sizes"),
    "huge sizes": (({"a": entry(shape=(HUGE, HUGE))}, b"\0" * 8), "needs .* bytes and has 8"),
    "overflowing sizes": (({"a": entry(shape=(2**33, 2**31))}, b"\0" * 8), "needs .* and has 8"),
    "negative offset": (({"a": entry(offsets=(-8, 0))}, b"\0" * 8), "a start and an end"),
    "end before start": (({"a": entry(offsets=(8, 0))}, b"\0" * 8), "a start and an end"),
    "three offsets": (({"a": entry(offsets=(0, 4, 8))}, b"\0" * 8), "a start and an end"),
    "offset beyond the file": (({"a": entry(offsets=(HUGE, HUGE + 8))},), "cut short"),
    "truncated data": (({"a": entry()}, b"\0" * 7), "cut short"),
    "sizes that do not agree": (({"a": entry(shape=(3,))}, b"\0" * 8), "needs 6 bytes and has 8"),
    "overlapping tensors": (
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12),
        "a and b overlap",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_safetensors_file_is_named(tmp_path, name):
    parts, text = HEADERS[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"") if parts is None else write(path, *parts)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=text) as caught:
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000
    assert peak < 4 << 20, f"{peak} bytes for a file of {path.stat().st_size}"
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        mc.load(path)


@pytest.mark.timeout(20)
def test_pipes_folders_and_devices_are_not_opened(tmp_path):
    pipe, folder, device = (tmp_path / f"{name}.safetensors" for name in "abc")
    os.mkfifo(pipe)
    folder.mkdir()
    device.symlink_to("/dev/zero")
    for path in (pipe, folder, device):
        with pytest.raises(ValueError, match="not a regular file"):
            read_header(path)
        with pytest.raises(ValueError, match="not a regular file"):
            read_object(path)
        with pytest.raises(FileNotFoundError):
            mc.load(path)


@pytest.fixture(scope="module")
def good_file(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "x.safetensors"
    tensors = {"a": torch.arange(6.0).half().view(2, 3), "b.c": torch.arange(8, dtype=torch.int32)}
    save_file(tensors, path, {"note": "text"})
    return path.read_bytes()


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, inserted, removed or repeated; more often in the first 400."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(data), 400) if rng.random() < 0.8 else len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at:at] = rng.choice([b"-", b"9" * 20, b"[", b'"', b"\0", b"{}", b"1e9", b"\xff"])
        elif kind == 3:
            del data[at : at + rng.randint(1, 30)]
        else:
            data[at:at] = data[at : at + rng.randint(1, 60)]
        if not data:
            break
    return bytes(data)


@settings_of(300)
@given(seed=st.integers(0, 2**32))
def test_mutated_files_are_read_rightly_or_refused(tmp_path_factory, good_file, seed):
    """What our header reader accepts it reads as the format's own library does."""
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(mutate(good_file, random.Random(seed)))
    try:
        header, _ = read_header(path)
    except ValueError:
        return
    ours = {name: read_tensor(path, info) for name, info in header.items()}
    try:
        theirs = load_file(path)
    except Exception:
        return  # their reader is stricter: it refuses gaps and trailing bytes
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape and tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8))


# ---- our own files ----


@pytest.fixture(scope="module")
def our_file(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("ours") / "w.safetensors"
    q = torch.randint(0, 16, (256, 8), dtype=torch.uint8)
    g_idx = (torch.arange(256) // 128)[torch.randperm(256)]
    scales = torch.rand(2, 8).half()
    mc.save({"l": mc.pack(q, scales, group_size=128, g_idx=g_idx), "t": torch.ones(3)}, path)
    return path.read_bytes()


@settings_of(300)
@given(seed=st.integers(0, 2**32))
def test_mutated_weights_never_load_inconsistent(tmp_path_factory, our_file, seed):
    """A weight that loads has sizes, order and metadata that agree: `check` passes."""
    path = tmp_path_factory.getbasetemp() / "ours.safetensors"
    path.write_bytes(mutate(our_file, random.Random(seed)))
    try:
        found, _ = load_with_metadata(path)
    except REFUSED as error:
        assert len(str(error)) < 2000
        return
    for value in found.values() if isinstance(found, dict) else [found]:
        if isinstance(value, mc.PackedWeight):
            value.check()


FORM = {
    "layout_version": 1,
    "n": 8,
    "k": 256,
    "group_size": 128,
    "has_zeros": False,
    "dtype": "float16",
}


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ("[]", "holds a list"),
        ("{", "not valid JSON"),
        ('{"l": {}, "l": {}}', "occurs twice"),
        ({"l": []}, "metadata must be a dict"),
        ({"l": {}}, "metadata lacks"),
        ({"l": {**FORM, "dtype": "load"}}, "dtype=load is not supported"),
        ({"l": {**FORM, "dtype": "__class__"}}, "is not supported"),
        ({"l": {**FORM, "k": 2**70}}, "K and N must be below 2|in the file"),
        ({"l": {**FORM, "k": -256}}, "at least 1|in the file"),
        ({"l": {**FORM, "n": 8.5}}, "n=8.5 is not a whole number"),
        ({"l": {**FORM, "n": True}}, "n=True is not a whole number"),
        ({"l": {**FORM, "n": None}}, "n=None is not a whole number"),
        ({"l": {**FORM, "group_size": 2**40}}, "is not a multiple"),
        ({"l": {**FORM, "n": 2**30}}, "packed has shape|is .8, 256. in the model|in the file"),
        ({"l": FORM, "absent": FORM}, "lacks packed|no layer absent"),
    ],
)
def test_hostile_layer_metadata(tmp_path, our_file, layers, text):
    """The form of a layer decides sizes and a dtype by name: nothing else, and within bounds."""
    source = tmp_path / "source.safetensors"
    source.write_bytes(our_file)
    tensors = load_file(source)
    _, metadata = read_header(source)
    metadata["layers"] = layers if isinstance(layers, str) else json.dumps(layers)
    path = tmp_path / "hostile.safetensors"
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=text):
        mc.load(path)
    model = torch.nn.ModuleDict({"l": torch.nn.Linear(256, 8, bias=False)})
    with pytest.raises((ValueError, TypeError), match=text):
        mc.load_model(model, path)


def test_a_row_order_out_of_range_is_refused_at_loading(tmp_path, our_file):
    """It would stop the device at the first multiply, far from its cause."""
    source, path = tmp_path / "source.safetensors", tmp_path / "w.safetensors"
    source.write_bytes(our_file)
    tensors = {name: t for name, t in load_file(source).items() if name != "t"}
    tensors["l.perm"][5] = 10**9
    save_file(tensors, path, read_header(source)[1])
    with pytest.raises(ValueError, match=r"layer l: perm spans 0\.\.1000000000"):
        mc.load(path)
    model = torch.nn.ModuleDict({"l": torch.nn.Linear(256, 8, bias=False)})
    with pytest.raises(RuntimeError, match=r"l\.perm spans 0\.\.1000000000"):
        mc.load_model(model, path)


# ---- whole checkpoints ----


def gptq(path: Path, **quant) -> Path:
    path.mkdir(exist_ok=True)
    q = torch.randint(0, 16, (64, 16), dtype=torch.uint8)
    tensors = {
        "m.qweight": pack_nibbles(q, 0),
        "m.qzeros": pack_nibbles(torch.full((1, 16), 7, dtype=torch.uint8), 1),
        "m.scales": torch.rand(1, 16).half(),
        "norm": torch.ones(4),
    }
    save_file(tensors, path / "model.safetensors")
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, **quant}
    (path / "config.json").write_text(json.dumps({"quantization_config": quant}))
    return path


def converted(src: Path, dst: Path) -> bool:
    """Whether it converts; if not, it says so properly and leaves nothing behind."""
    before = set(dst.parent.iterdir())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            convert_checkpoint(src, dst, workers=1)
    except REFUSED:
        assert set(dst.parent.iterdir()) == before
        return False
    return True


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["", "4", "gptq", "awq", "marlin", "compressed-tensors", "group", "../x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
KEYS = [
    "quant_method",
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "checkpoint_format",
    "is_marlin_format",
    "dynamic",
    "zero_point",
    "version",
    "w_bit",
    "q_group_size",
    "config_groups",
    "format",
    "ignore",
]


@settings_of(120)
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_quantization_config_is_converted_or_refused(tmp_path_factory, changes):
    base = tmp_path_factory.mktemp("config")
    assert converted(gptq(base / "src", **changes), base / "dst") == (base / "dst").is_dir()


@settings_of(50)
@given(value=VALUES)
def test_any_config_is_converted_or_refused(tmp_path_factory, value):
    base = tmp_path_factory.mktemp("config")
    src = gptq(base / "src")
    for key in ("quantization_config", "compression_config"):
        (src / "config.json").write_text(json.dumps({key: value}))
        converted(src, base / f"dst-{key}")


@settings_of(100)
@given(seed=st.integers(0, 2**32))
def test_mutated_checkpoints_are_converted_or_refused(tmp_path_factory, seed):
    rng = random.Random(seed)
    base = tmp_path_factory.mktemp("mutated")
    src = gptq(base / "src")
    victim = src / rng.choice(["model.safetensors", "config.json"])
    victim.write_bytes(mutate(victim.read_bytes(), rng))
    if converted(src, base / "dst"):
        mc.load(base / "dst" / "model.safetensors")


SCALE_SHAPES = [(), (0,), (1,), (16,), (1, 15), (2, 16), (1, 16, 1), (0, 16), (16, 1)]


@pytest.mark.parametrize("role", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.float64, torch.bool])
def test_tensors_of_any_shape_and_type_are_refused(tmp_path, role, dtype):
    for i, shape in enumerate(SCALE_SHAPES):
        src = gptq(tmp_path / f"src{i}")
        tensors = load_file(src / "model.safetensors")
        right = role == "scales" and dtype.is_floating_point and shape == (1, 16)
        tensors[f"m.{role}"] = torch.ones(shape, dtype=dtype)
        save_file(tensors, src / "model.safetensors")
        assert not converted(src, tmp_path / f"dst{i}") or right or role == "g_idx"


INDEXES = {
    "a list": ("[]", "holds a list"),
    "no weight_map": ({}, "has no weight_map"),
    "weight_map list": ({"weight_map": []}, "has no weight_map"),
    "parent": ({"weight_map": {"a": "../other/model.safetensors"}}, "plain file names"),
    "absolute": ({"weight_map": {"a": "/etc/passwd"}}, "plain file names"),
    "dots": ({"weight_map": {"a": ".."}}, "plain file names"),
    "a number": ({"weight_map": {"a": 5}}, "plain file names"),
    "absent": ({"weight_map": {"a": "b.safetensors"}}, "missing shards b.safetensors"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_stays_in_its_folder(tmp_path, name):
    index, text = INDEXES[name]
    src = gptq(tmp_path / "src")
    gptq(tmp_path / "other")
    path = src / "model.safetensors.index.json"
    path.write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        convert_checkpoint(src, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_links_are_followed_inside_the_checkpoint_only(tmp_path):
    """As the Hugging Face cache lays them out; never to a private file elsewhere."""
    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    src = gptq(cache / "snapshots" / "abc")
    (cache / "blobs" / "123").write_text("from the cache")
    (tmp_path / "private").write_text("secret")
    (src / "tokenizer.json").symlink_to("../../blobs/123")
    (src / "vocab.txt").symlink_to(tmp_path / "private")
    (src / "merges.txt").symlink_to("tokenizer.json")
    report = convert_checkpoint(src, tmp_path / "dst")
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == "from the cache"
    assert (tmp_path / "dst" / "merges.txt").read_text() == "from the cache"
    assert not (tmp_path / "dst" / "vocab.txt").exists()
    assert any("vocab.txt" in note and "not followed" in note for note in report.notes)


def test_odd_tensor_names_fit_the_header(tmp_path):
    """Names that grow when they are written: quotes, controls, other alphabets; long shapes."""
    src = gptq(tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    for name in ('"' * 200, "\x01\x02" * 90, "\u91cf\u5316" * 150, "..", "/etc/passwd", "a\nb"):
        tensors[name] = torch.ones(2)
    tensors["deep"] = torch.ones([1] * 40)
    layer = {k: v for k, v in tensors.items() if k.startswith("m.")}
    tensors |= {f"\u00e9{'x' * 300}.{k.split('.')[1]}": v.clone() for k, v in layer.items()}
    save_file(tensors, src / "model.safetensors")
    convert_checkpoint(src, tmp_path / "dst")
    found = mc.load(tmp_path / "dst" / "model.safetensors")
    assert {"/etc/passwd", "..", '"' * 200, "deep", f"\u00e9{'x' * 300}"} <= found.keys()


def test_pickled_weights_are_not_read(tmp_path):
    src = gptq(tmp_path / "src")
    (src / "model.safetensors").rename(src / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="are pickles and are not read"):
        convert_checkpoint(src, tmp_path / "dst")


# ---- manifests ----


def manifest() -> dict:
    entries = [fake_cuda.kernel(), fake_cuda.kernel("hopper", "bf16", decomposition="stream_k")]
    rows = [fake_cuda.row(e, m=(0, 64)) for e in entries]
    return {
        "format": MANIFEST_FORMAT,
        "arch": "sm_90a",
        "layout_version": 1,
        "variants": entries,
        "dispatch": rows,
    }


def places(value, path=()):
    """Paths to every value inside a JSON value."""
    yield path
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


HOSTILE = st.one_of(
    VALUES,
    st.sampled_from(
        [0, -1, 1, 2**31, 2**32, 2**32 + 16, 2**63, 1e400, "..", "a/b", "\0", "x" * 99]
    ),
)


@settings_of(300)
@given(data=st.data())
def test_a_changed_manifest_is_refused_or_harmless(tmp_path_factory, fake, data):
    """What is accepted reaches the launcher: selecting and scheduling with it must not crash."""
    content = copy.deepcopy(manifest())
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([p for p in places(content) if p]))
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = data.draw(HOSTILE)
        names = dispatch.Kernel.__dataclass_fields__
        for kernel in content["variants"] if isinstance(content["variants"], list) else ():
            try:  # so that the name does not give the change away
                kernel["name"] = dispatch.kernel_name({k: kernel[k] for k in names})
            except (TypeError, KeyError, ValueError, AttributeError):
                continue
    folder = tmp_path_factory.getbasetemp() / "sm_90a"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(content))
    try:
        table = dispatch.load_table(folder)
    except TableError as error:
        assert "manifest.json" in str(error)
        return
    fake.launcher.add_table(table, 9, 0)
    for m, n, k in ((1, 64, 128), (64, 4096, 4096), (2**31 - 1, 2**20, 2**20)):
        for kernel in table.kernels:
            try:
                fake.launcher.schedule(kernel, m, n, k, 132)
            except RuntimeError as error:
                assert "exceed" in str(error)
        try:
            index = fake.launcher.select((9, 0), (m, n, k, 128), "f16", False, 132)
            assert 0 <= index < len(table.kernels)
        except RuntimeError as error:
            assert "no kernel of the" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":' + DEEP + b"}", "nested too deeply"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"format": 2, "format": 2}', "occurs twice"),
        (b"", "not valid JSON"),
    ],
)
def test_a_manifest_that_is_no_manifest(tmp_path, text, message):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(TableError, match=message):
        dispatch.load_table(tmp_path)


def test_a_file_too_large_to_be_one_is_not_read(tmp_path):
    path = tmp_path / "manifest.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # no bytes on disk
    with pytest.raises(TableError, match="too large for what it should be"):
        dispatch.load_table(tmp_path)


# ---- tuning files ----

TUNING = {
    "arch": "sm_90a",
    "gpu": "NVIDIA H200",
    "date": "2026-11-29",
    "entries": [
        {
            "sms": 132,
            "n": 4096,
            "k": 4096,
            "m": 16,
            "geometry": "w4a16_hopper_m16_n256k256_w4x1_p4_dp_c1",
            "us": 5.0,
        }
    ],
}


@settings_of(150)
@given(data=st.data())
def test_a_changed_tuning_file_is_refused_or_whole(tmp_path_factory, data):
    content = copy.deepcopy(TUNING)
    path = data.draw(st.sampled_from([p for p in places(content) if p]))
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(HOSTILE)
    folder = tmp_path_factory.getbasetemp() / "tuning"
    folder.mkdir(exist_ok=True)
    (folder / "x.json").write_text(json.dumps(content))
    try:
        for found in read_measurements(ARCHS["sm_90a"], folder):
            assert 0 < found.us < float("inf") and min(found.sms, found.n, found.k, found.m) > 0
    except ValueError as error:
        assert "x.json" in str(error)
    try:
        TuningFile.load(folder / "x.json")
    except ValueError as error:
        assert "x.json" in str(error)


# ---- no code from data ----

FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "joblib"}


def sources() -> list[Path]:
    folders = ("marlin_cutlass", "generator", "emulator")
    return [REPO / "build.py", *(p for f in folders for p in sorted((REPO / f).rglob("*.py")))]


def test_no_source_unpickles_or_evaluates():
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(REPO)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {a.name.split(".")[0] for a in node.names} & FORBIDDEN, where
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in FORBIDDEN, where
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "os.system", "compile"), where
            shell = [k for k in node.keywords if k.arg == "shell"]
            assert not any(getattr(k.value, "value", True) for k in shell), where


def test_listing_and_rendering_leave_nothing_in_the_current_folder(tmp_path):
    """CUTLASS's own Python package keeps a cache of pickles where it runs; ours must not."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"}
    for command in (
        [str(REPO / "build.py"), "--arch", "sm_90a", "--dry-run"],
        [
            "-c",
            "from generator import render, space, arch\n"
            "print(render.render(next(iter(space.default_space(arch.ARCHS['sm_86']))).variant)[:9])",
        ],
    ):
        run = [sys.executable, *command]
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_repeated_keys_cost_linear_time():
    text = json.dumps({str(i): 0 for i in range(200_000)})[:-1] + ', "199999": 1}'
    with pytest.raises(ValueError, match="'199999' occurs twice"):
        parse_object(text, "text")
