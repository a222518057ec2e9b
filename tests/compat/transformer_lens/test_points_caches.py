"""Caches of hook points, and `Slice`."""

from __future__ import annotations

import contextvars
import copy
import pickle
import weakref
from typing import Any

import pytest
import torch

import ferrohook as fh
from ferrohook.compat.transformer_lens import HookedRootModule, HookPoint, PointCache, Slice
from support.points import BATCH, MID, NAMES, POS, WIDTH, Model, Transposed, adding

np = pytest.importorskip("numpy")

# --- caches ---


def test_run_with_cache_caches_every_point_in_order(model: Model, x: torch.Tensor) -> None:
    out, cache = model.run_with_cache(x)
    assert torch.equal(out, model(x))
    assert list(cache) == NAMES
    assert torch.equal(cache["hook_embed"], x)
    assert torch.equal(cache[MID], model.blocks[0].linear(x))
    assert not cache[MID].requires_grad
    assert not model.hook_dict[MID].has_hooks()


@pytest.mark.parametrize(
    "names",
    [
        [NAMES[2], MID],
        (NAMES[2], MID),
        {NAMES[2], MID},
        frozenset((NAMES[2], MID)),
        lambda name: name.endswith("hook_mid"),
    ],
)
def test_names_filters(model: Model, x: torch.Tensor, names: Any) -> None:
    _, cache = model.run_with_cache(x, names_filter=names)
    assert list(cache) == [MID, NAMES[2]]
    _, cache = model.run_with_cache(x, names_filter=MID)
    assert list(cache) == [MID]
    cache, fwd, bwd = model.get_caching_hooks(names, incl_bwd=True)
    assert [name for name, _ in fwd] == [name for name, _ in bwd] == [MID, NAMES[2]]
    assert len(model.run_with_cache(x, names_filter=[])[1]) == 0
    assert len(model.run_with_cache(x, names_filter=[], pos_slice=1)[1]) == 0


@pytest.mark.parametrize("options", [{}, {"pos_slice": (0, POS)}, {"reset_hooks_end": False}])
def test_values_are_cached_after_the_hooks(
    model: Model, x: torch.Tensor, options: dict[str, Any]
) -> None:
    fh.register(model, MID, lambda module, args, output: output * 2, priority=-1)
    with model.hooks([(MID, adding(1))]):
        _, cache = model.run_with_cache(x, names_filter=MID, **options)
    model.reset_hooks()
    assert torch.equal(cache[MID], (model.blocks[0].linear(x) + 1) * 2)


def test_gradients_are_cached(model: Model, x: torch.Tensor) -> None:
    x.requires_grad_()
    weights = [p.grad for p in model.parameters()]
    assert weights == [None] * 4
    _, cache = model.run_with_cache(x, incl_bwd=True)
    assert list(cache) == NAMES + [f"{name}_grad" for name in reversed(NAMES)]
    assert torch.equal(cache["hook_out_grad"], torch.ones_like(x))
    assert x.grad is not None
    assert torch.equal(cache["hook_embed_grad"], x.grad)
    _, cache = model.run_with_cache(x.detach(), incl_bwd=True)
    assert "hook_embed_grad" not in cache
    assert f"{MID}_grad" in cache


@pytest.mark.parametrize("options", [{}, {"pos_slice": (0, POS)}])
def test_a_later_backward_does_not_change_cached_gradients(
    x: torch.Tensor, options: dict[str, Any]
) -> None:
    class TwoLosses(Model):
        def forward(self, x: torch.Tensor, **_options: Any) -> torch.Tensor:
            y = self.hook_embed(x)
            self.other = (y * 3).sum()
            return y.sum()

    model = TwoLosses()
    _, cache = model.run_with_cache(x.requires_grad_(), incl_bwd=True, **options)
    model.other.backward()
    assert torch.equal(cache["hook_embed_grad"], torch.ones_like(x))


def test_a_point_that_runs_twice_has_the_gradient_of_the_last_call() -> None:
    # TransformerLens pairs the last call's activation with the first call's gradient.
    class Twice(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook = HookPoint()
            self.setup()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.hook(x) * 2).sum() + (self.hook(x + 1) * 3).sum()

    _, cache = Twice().run_with_cache(torch.zeros(1, requires_grad=True), incl_bwd=True)
    assert cache["hook"].item() == 1
    assert cache["hook_grad"].item() == 3


@pytest.mark.parametrize(
    ("pos_slice", "part"),
    [
        (1, np.s_[:, [1]]),
        (-1, np.s_[:, [-1]]),
        ((1,), np.s_[:, :1]),
        ((0, 3, 2), np.s_[:, 0:3:2]),
        ([0, 2], np.s_[:, [0, 2]]),
        (torch.tensor([2]), np.s_[:, [2]]),
        (np.array([True, False, True]), np.s_[:, [0, 2]]),
        (Slice(1), np.s_[:, 1]),
        (None, np.s_[:]),
    ],
)
def test_the_position_dimension_is_sliced(
    model: Model, x: torch.Tensor, pos_slice: Any, part: Any
) -> None:
    _, cache = model.run_with_cache(x, pos_slice=pos_slice, incl_bwd=True)
    _, whole = model.run_with_cache(x, incl_bwd=True)
    assert list(cache) == list(whole)
    for name in cache:
        assert torch.equal(cache[name], whole[name][part])
    cache, fwd, bwd = model.get_caching_hooks(None, True, pos_slice=pos_slice)
    with model.hooks(fwd, bwd):
        model(x).backward()
    for name in whole:
        assert torch.equal(cache[name], whole[name][part])


def test_the_position_dimension_depends_on_the_layout_of_heads() -> None:
    class Heads(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook_q, self.hook_declared, self.hook_flat = (HookPoint() for _ in range(3))
            self.hook_declared.pos_dim = 1
            self.setup()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hook_flat(x[0, 0, 0])
            return self.hook_declared(self.hook_q(x))

    x = torch.randn(1, 5, 2, 3)  # batch, position, head, inside
    for remove in (False, True):
        _, cache = Heads().run_with_cache(x, pos_slice=(1, 3), remove_batch_dim=remove)
        wanted = x[0, 1:3] if remove else x[:, 1:3]
        assert torch.equal(cache["hook_q"], wanted)
        assert torch.equal(cache["hook_declared"], wanted)
        assert torch.equal(cache["hook_flat"], x[0, 0, 0])


def test_a_cached_slice_does_not_keep_the_whole_tensor_alive(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x, pos_slice=(0, 1))
    assert cache[MID].untyped_storage().nbytes() == cache[MID].nbytes


def test_the_batch_dimension_is_dropped(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x[:1], remove_batch_dim=True)
    assert {tuple(value.shape) for value in cache.values()} == {(POS, WIDTH)}
    with pytest.raises(ValueError, match="has size 2"):
        model.run_with_cache(x, remove_batch_dim=True)
    cache = model.add_caching_hooks(remove_batch_dim=True)
    model(x)
    assert {tuple(value.shape) for value in cache.values()} == {(BATCH, POS, WIDTH)}


def test_tensors_go_to_a_device(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x, device="meta")
    assert {value.device.type for value in cache.values()} == {"meta"}
    _, cache = model.run_with_cache(x, device=torch.device("cpu"))
    assert torch.equal(cache["hook_embed"], x)
    with pytest.raises(RuntimeError, match="nowhere"):
        model.run_with_cache(x, device="nowhere")


@pytest.mark.cuda
@pytest.mark.not_emulated("autograd's device threads")
def test_copies_from_a_gpu_are_complete_when_they_are_read(model: Model) -> None:
    model = model.cuda()
    for factor in range(1, 6):
        x = torch.full((BATCH, POS, WIDTH), float(factor), device="cuda")
        torch.cuda._sleep(50_000_000)
        _, cache = model.run_with_cache(x, device="cpu", incl_bwd=True)
        assert torch.equal(cache["hook_embed"], torch.full((BATCH, POS, WIDTH), float(factor)))
        assert torch.equal(cache["hook_out_grad"], torch.ones(BATCH, POS, WIDTH))
        assert not cache[MID].is_cuda


def test_caches_hold_converted_tensors(model: Model, x: torch.Tensor) -> None:
    model.hook_dict[MID].enable_reshape(Transposed())
    _, cache = model.run_with_cache(x, incl_bwd=True)
    assert list(cache)[:4] == NAMES
    assert torch.equal(cache[MID], model.blocks[0].linear(x).transpose(-1, -2))
    assert cache[f"{MID}_grad"].shape == (BATCH, WIDTH, POS)
    kept = model.add_caching_hooks(MID, incl_bwd=True)
    model(x).backward()
    assert torch.equal(kept[MID], cache[MID])
    assert torch.equal(kept[f"{MID}_grad"], cache[f"{MID}_grad"])


def test_the_copy_option_applies_to_caches(model: Model, x: torch.Tensor) -> None:
    class Careless(Model):
        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            out = self.hook_embed(x)
            out.add_(1)
            return self.hook_out(out)

    model, before = Careless(), x.clone()
    for reset in (True, False):
        x = before.clone()
        _, cache = model.run_with_cache(x, reset_hooks_end=reset, names_filter=["hook_embed"])
        with pytest.raises(fh.StaleActivationError, match=r"hook_embed. was changed.*clone"):
            cache["hook_embed"]
        assert "hook_embed" in cache
        assert "(2, 3, 4)" in repr(cache)
        model.reset_hooks()
        x = before.clone()
        _, cache = model.run_with_cache(
            x, copy="ref", reset_hooks_end=reset, names_filter=["hook_embed"]
        )
        assert torch.equal(cache["hook_embed"], before + 1)
        model.reset_hooks()
        for pos_slice in (None, (0, 3)):
            _, cache = model.run_with_cache(
                before.clone(), copy="clone", reset_hooks_end=reset, pos_slice=pos_slice
            )
            assert torch.equal(cache["hook_embed"], before)
            model.reset_hooks()
    with pytest.raises(ValueError, match="'checked', 'clone' or 'ref'"):
        model.run_with_cache(x, copy="deep")


def test_inference_tensors_are_cached(model: Model, x: torch.Tensor) -> None:
    with torch.inference_mode():
        _, cache = model.run_with_cache(x.clone())
        kept = model.add_caching_hooks()
        model(x.clone())
    assert torch.equal(cache["hook_embed"], x)
    assert torch.equal(kept["hook_embed"], x)


def test_a_cache_is_a_mutable_mapping(model: Model, x: torch.Tensor, tmp_path: Any) -> None:
    _, cache = model.run_with_cache(x, incl_bwd=True)
    assert dict(cache).keys() == set(cache)
    cache["mine"] = x
    assert cache["mine"] is x
    assert torch.equal(cache.pop(MID), model.blocks[0].linear(x))
    assert MID not in cache
    assert cache.get(MID) is None
    with pytest.raises(fh.SelectionError, match=MID):
        cache[MID]
    with pytest.raises(KeyError):
        del cache[MID]
    assert torch.equal(cache.to("cpu")["hook_embed"], x)
    cache.save(tmp_path / "acts.safetensors")
    assert list(fh.ActivationCache.load(tmp_path / "acts.safetensors")) == list(cache)
    loaded = PointCache.load(tmp_path / "acts.safetensors")
    assert torch.equal(loaded["hook_embed"], x)
    copied = copy.copy(cache)
    copied["mine"] = None
    del copied["hook_embed"]
    assert cache["mine"] is x
    assert "hook_embed" in cache
    assert cache.stack("blocks.*.hook_mid").shape == (1, *x.shape)
    cache.clear()
    assert not cache


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
)
@pytest.mark.parametrize("options", [{}, {"incl_bwd": True}, {"pos_slice": 1}])
def test_a_duplicate_of_a_cache_answers_as_the_cache(
    model: Model, x: torch.Tensor, duplicate: Any, options: dict[str, Any]
) -> None:
    _, cache = model.run_with_cache(x, **options)
    cache["own"] = 3
    copied = duplicate(cache)
    assert type(copied) is PointCache
    assert list(copied) == list(cache)
    assert repr(copied) == repr(cache)
    for name in set(cache) - {"own"}:
        assert torch.equal(copied[name], cache[name])
    copied[MID].zero_()
    assert not copied[MID].any()
    assert cache[MID].any()
    del copied["own"]
    assert "own" in cache


def test_deleting_from_a_cache_frees_the_tensor(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x)
    gone, other = weakref.ref(cache[MID]), cache["hook_embed"]
    del cache[MID]
    assert gone() is None
    assert cache["hook_embed"] is other
    other.add_(1)
    with pytest.raises(fh.StaleActivationError):
        cache["hook_embed"]
    del cache["hook_embed"]
    _, cache = model.run_with_cache(x)
    cache["hook_embed"].add_(1)
    del cache[MID]
    with pytest.raises(fh.StaleActivationError):
        cache["hook_embed"]


def test_caching_hooks_fill_until_reset(model: Model, x: torch.Tensor) -> None:
    cache = model.add_caching_hooks(MID, incl_bwd=True)
    assert isinstance(cache, PointCache)
    assert model.is_caching
    model(x).backward()
    first = cache[MID]
    model(x + 1)
    assert not torch.equal(cache[MID], first)
    assert list(cache) == [MID, f"{MID}_grad"]
    # `run_with_cache` in between removes only its own hooks.
    model.run_with_cache(x)
    assert model.is_caching
    model.reset_hooks()
    assert not model.is_caching
    cache.clear()
    model(x)
    assert not cache
    mine: dict[str, Any] = {}
    assert model.add_caching_hooks([MID], cache=mine) is mine
    model(x)
    assert list(mine) == [MID]


def test_a_cache_without_reset_fills_on_later_calls(model: Model, x: torch.Tensor) -> None:
    _, cache = model.run_with_cache(x, reset_hooks_end=False)
    before = cache[MID]
    model(x * 2)
    assert not torch.equal(cache[MID], before)
    contextvars.Context().run(model, x * 3)
    assert torch.equal(cache["hook_embed"], x * 2)
    model.reset_hooks()
    model(x)
    assert torch.equal(cache["hook_embed"], x * 2)


def test_deprecated_cache_methods_warn(model: Model, x: torch.Tensor) -> None:
    cache: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match="cache_all is deprecated"):
        model.cache_all(cache)
    model(x)
    assert list(cache) == NAMES
    model.reset_hooks()
    cache.clear()
    with pytest.warns(DeprecationWarning, match="cache_some is deprecated"):
        model.cache_some(cache, lambda name: name == MID, incl_bwd=True)
    model(x).backward()
    assert list(cache) == [MID, f"{MID}_grad"]


def test_is_caching_is_true_for_hooks_of_a_cached_run(model: Model, x: torch.Tensor) -> None:
    seen: list[Any] = []
    model.add_hook(MID, lambda tensor, hook: seen.append((model.is_caching, hook.has_hooks())))
    model(x)
    model.run_with_cache(x)
    assert [row[0] for row in seen] == [False, True]


# --- Slice ---


@pytest.mark.parametrize(
    ("given", "mode", "taken"),
    [
        (2, "int", [2]),
        (-1, "int", [-1]),
        (np.int32(3), "int", [3]),
        (torch.tensor(3), "int", [3]),
        (np.array(3), "int", [3]),
        ((3,), "slice", [0, 1, 2]),
        ((1, 4), "slice", [1, 2, 3]),
        ((1, None, 3), "slice", [1, 4]),
        (slice(1, 3), "slice", [1, 2]),
        ([0, 4], "array", [0, 4]),
        (torch.tensor([4, 0]), "array", [4, 0]),
        (np.array([True, False, False, False, True]), "array", [0, 4]),
        (None, "identity", [0, 1, 2, 3, 4]),
    ],
)
def test_slices(given: Any, mode: str, taken: list[int]) -> None:
    made = Slice(given)
    tensor = torch.arange(10).reshape(2, 5)
    assert made.mode == mode
    assert made.indices(5).tolist() == taken
    result = made.apply(tensor, dim=-1)
    assert result.tolist() == tensor[:, taken[0] if mode == "int" else taken].tolist()
    assert torch.equal(made.apply(tensor.T, dim=0).T if result.ndim > 1 else result, result)
    assert Slice.unwrap(made) is made
    kept = Slice.unwrap(given)
    assert kept.apply(tensor, 1).tolist() == tensor[:, taken].tolist()
    assert mode in repr(made)


@pytest.mark.parametrize("given", ["1", 1.5, True, (), (1, 2, 3, 4), {1}])
def test_invalid_slices_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="a Slice must be created from"):
        Slice(given)


def test_a_slice_needs_the_size() -> None:
    with pytest.raises(ValueError, match="max_ctx"):
        Slice((1,)).indices()
