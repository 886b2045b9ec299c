"""PackedWeight: state, equality, copies in place, and states that must not reach a kernel."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch

from marlin_cutlass import PackedWeight, dequantize, pack


def weight(k=256, n=80, group_size=64, zeros=False, act_order=False, seed=0) -> PackedWeight:
    torch.manual_seed(seed)
    rows = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    z = torch.randint(0, 17, (rows, n)) if zeros else None
    g_idx = (torch.arange(k) // group_size)[torch.randperm(k)] if act_order else None
    return pack(q, torch.rand(rows, n).half() + 0.1, z, group_size=group_size, g_idx=g_idx)


FORMS = [
    {},
    {"zeros": True},
    {"act_order": True},
    {"group_size": -1, "zeros": True},
    {"group_size": 256, "k": 512},
]


@pytest.mark.parametrize("form", FORMS)
def test_state_round_trip(form):
    w = weight(**form)
    again = PackedWeight.from_state(w.state())
    assert again == w and again.packed is w.packed
    assert torch.equal(dequantize(again), dequantize(w))


def test_metadata_may_be_text_as_in_file_headers():
    w = weight(zeros=True)
    state = w.state()
    state["metadata"] = {name: str(value) for name, value in state["metadata"].items()}
    assert PackedWeight.from_state(state) == w


def test_equality_compares_contents():
    w = weight()
    assert w == weight() and w != weight(seed=1) and w != "w"
    assert w != weight(zeros=True) and w != weight(act_order=True)
    changed = w.clone()
    changed.col_scale[0] *= 2
    assert w != changed
    with pytest.raises(TypeError, match="unhashable"):
        hash(w)


@pytest.mark.parametrize("form", FORMS)
def test_copies_share_nothing(form):
    w = weight(**form)
    buffer = io.BytesIO()
    torch.save(w, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), w.clone(), loaded):
        assert other == w
        assert other.packed.data_ptr() != w.packed.data_ptr()
        assert other.col_scale.data_ptr() != w.col_scale.data_ptr()


def test_copy_in_place_keeps_addresses():
    w, new = weight(act_order=True), weight(act_order=True, seed=1)
    before = {name: tensor.data_ptr() for name, tensor in w.tensors().items()}
    assert w.copy_(new) is w and w == new
    assert {name: tensor.data_ptr() for name, tensor in w.tensors().items()} == before


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"n": 64}, "n=80 and 64"),
        ({"group_size": 32}, "group_size=64 and 32"),
        ({"zeros": True}, "has_zeros=False and True"),
        ({"act_order": True}, "act_order=False and True"),
    ],
)
def test_copy_in_place_refuses_another_form(form, text):
    w = weight()
    before = w.clone()
    with pytest.raises(ValueError, match=text):
        w.copy_(weight(**form))
    assert w == before


def test_moving_to_the_same_device_is_free():
    w = weight()
    assert w.to("cpu") is w and w.cpu() is w


def test_meta_weights_keep_their_form():
    w = weight(act_order=True).to("meta")
    assert w.device.type == "meta" and w.shape == (256, 80)
    assert PackedWeight.from_state(w.state()).shape == (256, 80)


def test_description():
    text = repr(weight(zeros=True, act_order=True))
    assert "k=256, n=80, group_size=64, zero points, act-order, float16" in text


# ---- hostile states ----


def broken(**changes):
    state = weight(act_order=True).state()
    metadata = {**state["metadata"], **changes.pop("metadata", {})}
    return {**state, "metadata": metadata, **changes}


def flipped(index: int, value: int) -> torch.Tensor:
    perm = torch.arange(256, dtype=torch.int32)
    perm[index] = value
    return perm


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ({}, ValueError, "state lacks packed, col_scale, metadata"),
        (broken(extra=1), ValueError, "unknown entries extra"),
        (
            broken(packed=torch.zeros(10, dtype=torch.uint8)),
            ValueError,
            r"packed has shape \(10,\)",
        ),
        (broken(packed=torch.zeros(10)), TypeError, "packed has dtype float32"),
        (broken(packed=[1]), TypeError, "must be a torch.Tensor"),
        (broken(col_scale=torch.ones(80)), ValueError, r"needs \(128,\)"),
        (broken(col_scale=torch.ones(128).half()), TypeError, "col_scale has dtype float16"),
        (broken(col_scale=torch.ones(256)[::2]), ValueError, "col_scale is not contiguous"),
        (broken(perm=flipped(0, 256)), ValueError, "it must permute 0..255"),
        (broken(perm=flipped(0, -1)), ValueError, "it must permute 0..255"),
        (broken(perm=flipped(0, 1)), ValueError, "perm repeats a row"),
        (broken(perm=torch.arange(256)), TypeError, "perm has dtype int64"),
        (broken(metadata={"layout_version": 2}), ValueError, "layout_version=2 is not supported"),
        (broken(metadata={"n": 200}), ValueError, "packed has shape"),
        (broken(metadata={"k": 257}), ValueError, "K=257 is not a multiple"),
        (broken(metadata={"n": 0}), ValueError, "must be at least 1"),
        (broken(metadata={"n": 2**30}), ValueError, "packed has shape"),
        (broken(metadata={"n": 2**40}), ValueError, r"must be below 2\^31"),
        (broken(metadata={"n": 96.5}), ValueError, "n=96.5 is not a whole number"),
        (broken(metadata={"group_size": 48}), ValueError, "group_size=48 is not supported"),
        (broken(metadata={"dtype": "float64"}), ValueError, "dtype=float64 is not supported"),
        (broken(metadata={"has_zeros": True}), ValueError, "packed has shape"),
    ],
)
def test_states_that_do_not_fit_are_refused(state, error, text):
    with pytest.raises(error, match=text):
        PackedWeight.from_state(state)


def test_state_lacking_metadata_fields_is_refused():
    state = weight().state()
    del state["metadata"]["group_size"]
    with pytest.raises(ValueError, match="metadata lacks group_size"):
        PackedWeight.from_state(state)


def test_the_fields_are_those_of_the_constructor():
    w = weight()
    again = PackedWeight(**{f.name: getattr(w, f.name) for f in dataclasses.fields(w)})
    assert again.form == w.form is not None
    small = dataclasses.replace(w, n=np.uint8(w.n), k=np.uint16(w.k))
    assert small.form == w.form


def test_the_form_follows_the_sizes():
    w = weight()
    form, codes = w.form, w.packed
    w.has_zeros = not w.has_zeros
    assert w.form is None
    w.has_zeros = not w.has_zeros
    assert w.form == form
    w.packed = codes[:-1]
    assert w.form is None
    w.packed = codes
    assert w.form == form
