"""`ActivationCache`: the mapping that a capture fills, and its files."""

from __future__ import annotations

import json
import re
import stat
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.capture import Data, Frozen, Named, Twice, tensors_of
from support.modules import Returning

if TYPE_CHECKING:
    from pathlib import Path

# The cache


@pytest.fixture
def acts(model: nn.Sequential, x: Tensor) -> fh.ActivationCache:
    with fh.capture(model) as acts:
        model(x)
    return acts


def test_a_cache_is_a_mapping(acts: fh.ActivationCache) -> None:
    assert list(acts) == list(acts.keys()) == [name for name, _ in acts.items()]
    assert len(acts) == len(list(acts.values())) == 4
    assert "0" in acts
    assert "nope" not in acts
    assert acts.get("nope") is None
    assert acts.get("nope", 3) == 3
    assert acts.get("0") is acts["0"]
    for cache in (acts, acts.to("cpu")):
        with pytest.raises(KeyError):
            cache["nope"]
        with pytest.raises(fh.SelectionError, match=r"'nope' .* modules: '0', '1', '2', ''$"):
            cache["nope"]


def test_stack(acts: fh.ActivationCache) -> None:
    assert torch.equal(acts.stack("0"), acts["0"][None])
    stacked = acts.stack(re.compile("[01]"))
    assert torch.equal(stacked, torch.stack([acts["0"], acts["1"]]))
    with pytest.raises(fh.SelectionError, match=r"'x\.\*' matches no captured module"):
        acts.stack("x.*")
    with pytest.raises(fh.HookTypeError, match="stack needs a name, a glob or a compiled regex"):
        acts.stack(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="equal size"):
        acts.stack()


def test_stack_takes_all_calls() -> None:
    model = Twice()
    with fh.capture(model, "shared", calls="all") as acts:
        model(torch.zeros(1))
    assert acts.stack("shared").tolist() == [[0], [2]]


def test_a_name_that_is_no_str_is_refused_as_one(acts: fh.ActivationCache) -> None:
    with pytest.raises(KeyError) as caught:
        acts[0]  # type: ignore[index]
    expected = "the name of a module must be a str, got int 0; captured: '0', '1', '2', ''"
    assert str(caught.value) == expected
    assert 0 not in acts
    assert acts.get(0) is None  # type: ignore[call-overload]


def test_gradients_that_were_not_captured_name_the_option(
    tmp_path: Path, acts: fh.ActivationCache
) -> None:
    acts.save(tmp_path / "acts")
    for cache in (acts, acts.to("cpu"), fh.ActivationCache.load(tmp_path / "acts")):
        assert not cache.grads
        with pytest.raises(fh.SelectionError, match="open the capture with grads=True"):
            cache.grads["0"]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # of torch, once
def test_sparse_tensors_count_what_they_store() -> None:
    x = torch.eye(4)
    sparse = {"coo": x.to_sparse(), "csr": x.to_sparse_csr(), "csc": x.to_sparse_csc()}
    values = 4 * 4
    sizes = {"coo": values + 2 * 4 * 8, "csr": values + 9 * 8, "csc": values + 9 * 8}
    for name, each in sparse.items():
        assert fh.ActivationCache({name: each}).nbytes == sizes[name], name
        assert str(sizes[name]) in repr(fh.ActivationCache({name: each}))
    assert fh.ActivationCache(sparse).nbytes == sum(sizes.values())


def test_nbytes_and_repr(acts: fh.ActivationCache) -> None:
    assert acts.nbytes == 80 + 80 + 40 + 40
    assert repr(acts).splitlines() == [
        "name     shape   dtype    bytes",
        "0        (5, 4)  float32     80",
        "1        (5, 4)  float32     80",
        "2        (5, 2)  float32     40",
        "(model)  (5, 2)  float32     40",
    ]
    assert repr(fh.ActivationCache({})).split() == ["name", "shape", "dtype", "bytes"]


def test_the_repr_shows_parts_of_structures() -> None:
    x = torch.ones(1)
    value = {"a": [(x, {"b": torch.ones(2)}), None], "d": Data(x, Named(x, [1, 2])), "n": 3}
    assert repr(fh.ActivationCache(value)).splitlines() == [
        "name  part         shape  dtype     bytes",
        "a     [0][0]       (1,)   float32       4",
        "a     [0][1]['b']  (2,)   float32       8",
        "a     [1]          -      NoneType      -",
        "d     .first       (1,)   float32       4",
        "d     .second[0]   (1,)   float32       4",
        "d     .second[1]   -      list          -",
        "n                  -      int           -",
    ]


def test_the_repr_shows_the_call_of_each_row(tmp_path: Path) -> None:
    model = Twice()
    model.once.forward = lambda x: (x, x)  # type: ignore[assignment, method-assign, return-value]
    with fh.capture(model, ["shared", "once"], calls="all", grads=True) as acts:
        model.shared(torch.zeros(1))
        model.shared(torch.zeros(2))
        model.once(torch.zeros(3))
    shown = [
        "name    call  part  shape  dtype    bytes",
        "shared  0           (1,)   float32      4",
        "shared  1           (2,)   float32      8",
        "once    0     [0]   (3,)   float32     12",
        "once    0     [1]   (3,)   float32     12",
    ]
    acts.save(tmp_path / "acts")
    for cache in (acts, acts.to("cpu"), fh.ActivationCache.load(tmp_path / "acts")):
        assert repr(cache).splitlines() == shown
    assert len(repr(acts.grads).splitlines()) == 1  # none has arrived


def test_to_preserves_structures_and_shares_tensors_on_the_device(x: Tensor) -> None:
    value = (Named(x, [Data(x, {"a": Frozen(x)})]), OrderedDict(b=None))
    module = Returning(lambda: value)
    with fh.capture(module, "", grads=True) as acts:
        module()
    same = acts.to("cpu")
    assert repr(same[""]) == repr(acts[""])
    assert same[""][0].first is x
    assert same[""][0].second[0].second["a"].first is x
    moved = acts.to("meta")
    assert type(moved[""][1]) is OrderedDict
    frozen = moved[""][0].second[0].second["a"]
    assert type(frozen) is Frozen
    assert frozen.first.device.type == "meta"
    assert acts[""][0].first is x
    with pytest.raises(fh.SelectionError, match="no gradient has reached ''"):
        moved.grads[""]


# Files


def test_save_and_load_restore_every_entry(tmp_path: Path, model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, grads=True, calls="all") as acts:
        for _ in range(2):
            model(x).sum().backward()
    path = tmp_path / "acts.safetensors"
    acts.save(path)
    loaded = fh.ActivationCache.load(str(path))
    assert list(loaded) == list(acts)
    for name, calls in acts.items():
        assert all(map(torch.equal, loaded[name], calls))
        assert all(map(torch.equal, loaded.grads[name], acts.grads[name]))
    # Metadata for other readers of the format.
    tensors = safetensors.torch.load_file(path)
    assert torch.equal(tensors["/activations/0/1"], acts["0"][1])


def test_save_and_load_preserve_structures_shared_storage_and_strides(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    value = {
        "same": (base, base),
        "views": [base.t(), base[1:], base[:, ::2], base.expand(2, 3, 4)],
        "a/b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "empty": [torch.empty(0), (), [], {}],
        "plain": (None, True, 3, 2.5, "text"),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "kinds": [torch.ones(2, dtype=kind) for kind in (torch.bool, torch.int8, torch.bfloat16)],
        "data": Data(base, Named(1, base)),
    }
    path = tmp_path / "acts.safetensors"
    fh.ActivationCache(value).save(path)
    loaded = fh.ActivationCache.load(path)
    assert list(loaded) == list(value)
    expected = list(tensors_of(value))
    found = list(tensors_of(dict(loaded)))
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(map(torch.equal, found, expected))
    assert loaded["plain"] == (None, True, 3, 2.5, "text")
    assert loaded["plain"][1] is True
    assert loaded["empty"][1:] == [(), [], {}]
    assert type(loaded["same"]) is tuple
    assert loaded["data"]["second"][0] == 1
    assert fh.ActivationCache.load(path).nbytes == sum(each.nbytes for each in expected)


def test_an_undetached_capture_can_be_saved(
    tmp_path: Path, model: nn.Sequential, x: Tensor
) -> None:
    with fh.capture(model, "0", detach=False) as acts:
        model(x)
    acts.save(tmp_path / "file")
    assert torch.equal(fh.ActivationCache.load(tmp_path / "file")["0"], acts["0"])


@pytest.mark.parametrize("wrong", [object(), {1: torch.ones(1)}, b"bytes"])
def test_a_failed_save_leaves_the_file_unchanged(
    tmp_path: Path, wrong: Any, acts: fh.ActivationCache
) -> None:
    path = tmp_path / "file"
    acts.save(path)
    before = path.read_bytes()
    with pytest.raises(fh.HookTypeError, match="/activations/x"):
        fh.ActivationCache({"a": torch.ones(1), "x": [wrong]}).save(path)
    sparse = fh.ActivationCache({"x": torch.ones(2, 2).to_sparse()})
    with pytest.raises(fh.HookTypeError, match="/activations/x: a tensor of layout"):
        sparse.save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_save_replaces_a_file_and_gives_it_default_permissions(
    tmp_path: Path, acts: fh.ActivationCache
) -> None:
    path = tmp_path / "file"
    path.write_text("other")
    acts.save(path)
    assert len(fh.ActivationCache.load(path)) == 4
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no safetensors")
    (tmp_path / "empty").touch()
    structures = {"cut": "{", "list": "[]", "value": '{"value": 1}', "dict": '{"dict": {}}'}
    number = {"value": 3}
    written = {
        "activations": {"dict": {"a": number}},
        "grads": {"value": None},
        "model": {"value": "Model"},
        "per_call": {"value": False},
    }
    hostile: dict[str, dict[str, Any]] = {
        "unknown": written | {"other": number},
        "few": {name: written[name] for name in ("activations", "grads", "per_call")},
        "gradients": written | {"grads": number},
        "model": written | {"model": number},
        "flag": written | {"per_call": number},
        "calls": written | {"per_call": {"value": True}},
        "nested": written | {"activations": {"dict": {"a": {"nested": [number]}}}},
        "jagged": written | {"activations": {"dict": {"a": {"jagged": []}}}},
    }
    structures |= {name: json.dumps({"dict": fields}) for name, fields in hostile.items()}
    valid = {"ferrohook": json.dumps({"dict": written})}
    safetensors.torch.save_file({}, tmp_path / "written", valid)
    assert fh.ActivationCache.load(tmp_path / "written")["a"] == 3
    for name, text in {"other": None, **structures}.items():
        metadata = None if text is None else {"ferrohook": text}
        safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / name, metadata)
    for name in ("text", "empty", "other", *structures):
        with pytest.raises(
            fh.HookError, match=f"{name} contains no activations saved by ferrohook"
        ):
            fh.ActivationCache.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        fh.ActivationCache.load(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        fh.ActivationCache({}).save(tmp_path / "no" / "folder")


def test_the_name_of_the_model_in_tables_is_a_key() -> None:
    model = nn.Sequential(nn.Identity())
    with fh.capture(model) as acts:
        out = model(torch.ones(2))
    assert "(model)" in repr(acts)
    assert acts["(model)"] is acts[""]
    assert torch.equal(acts["(model)"], out)
    assert "(model)" not in acts  # names are the modules'
    with fh.capture(model, "0") as acts:
        model(torch.ones(2))
    with pytest.raises(fh.SelectionError):
        acts["(model)"]


def test_a_module_with_the_name_of_the_model_comes_first() -> None:
    model = nn.Sequential()
    model.add_module("(model)", nn.ReLU())
    with fh.capture(model, inputs=True) as acts:
        model(x := torch.ones(2))
    assert acts["(model)"] is x
