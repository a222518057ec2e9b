"""`collect` resumes a run only over the same model and data, and recomputes missing batches."""

from __future__ import annotations

import functools
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from ferrohook.data import LocalStore, Store
from support.limits import LIMIT
from support.threads import Together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(2, 4) for _ in range(4)]


def sae_of(width: int) -> fh.Dictionary:
    torch.manual_seed(0)
    encoder, decoder = torch.randn(width, 8), torch.randn(8, width)
    return fh.Dictionary(encoder, decoder, b_enc=torch.zeros(8), b_dec=torch.zeros(width))


def contents(store: Store) -> dict[tuple[int, str], Tensor]:
    return {
        (batch, layer): store.get("run", batch, layer)["output"]
        for batch in store.batches("run")
        for layer in store.layers("run", batch)
    }


def refused(store: Store, told: str, *args: Any, **kwargs: Any) -> None:
    """Asserts that `collect` refuses, and that it changes nothing."""
    before = contents(store)
    with pytest.raises(fh.errors.ResumeError, match=told):
        fh.collect(*args, store, **kwargs)
    after = contents(store)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


# Refused


def test_another_model_is_refused(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    fh.collect(model, torch.ones(8, 4).split(2), "", store)
    with torch.no_grad():
        model[2].weight.zero_()
    told = r"run 'run' does not match this call \(parameters and buffers: '2.weight' changed\)"
    refused(store, told, model, torch.zeros(8, 4).split(4), "")
    refused(store, told, model, torch.ones(8, 4).split(2), "")


def retrained(model: nn.Sequential) -> None:
    model[0](torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()


def half(model: nn.Sequential) -> None:
    model[2].half().float()


def another_buffer(model: nn.Sequential) -> None:
    model[0].register_buffer("scale", torch.ones(1))


def another_class(model: nn.Sequential) -> None:
    model[1] = nn.GELU()


def shorter(model: nn.Sequential) -> None:
    del model[2]


def training(model: nn.Sequential) -> None:
    model[1].train()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (retrained, r"parameters and buffers: '0.weight', '0.bias' changed\)"),
        (half, r"parameters and buffers: '2.weight', '2.bias' changed\)"),
        (another_buffer, r"parameters and buffers: '0.scale' added\)"),
        (another_class, r"classes of modules: '1' changed\)"),
        (shorter, r"classes of modules: '2' missing; parameters .*: '2.weight', '2.bias' missing"),
        (training, r"option 'modules in training mode': 0, now 1\)"),
    ],
)
def test_the_changes_of_a_model_are_named(
    model: nn.Sequential,
    batches: list[Tensor],
    store: Store,
    change: Callable[[nn.Sequential], None],
    told: str,
) -> None:
    fh.collect(model, batches[:2], "0", store)
    change(model)
    refused(store, told, model, batches, "0")
    # Another run is another matter.
    assert fh.collect(model, batches, "0", store, run="other") == (4, 0)


def test_another_selection_is_refused(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    fh.collect(model, batches, "0", store)
    refused(store, r"selection: '2' added\)", model, batches, ["0", "2"])
    refused(store, r"selection: '2' added, '0' missing\)", model, batches, "2")
    for same in (["0"], {"0"}, lambda name, _: name == "0"):
        assert fh.collect(model, batches, same, store) == (0, 4)


def test_other_detectors_and_options_are_refused(
    model: nn.Sequential, batches: list[Tensor], tmp_path: Path
) -> None:
    detector = fi.LayerActivationDetector
    with LocalStore(tmp_path) as store:
        fh.collect(model, batches, detector(0, target_dtype=torch.float16), store)
        for other, told in (
            (detector(0), r'target_dtype=None\)" added, .*target_dtype=torch.float16\)" missing'),
            (detector(2, target_dtype=torch.float16), "forward of '2', .* added"),
            ("0", "selection: '0' added, \"LayerActivationDetector"),
        ):
            with pytest.raises(fh.errors.ResumeError, match=told):
                fh.collect(model, batches, other, store)
        again = detector("0", "another id", target_dtype=torch.float16)
        with fi_layers(model, again):
            assert fh.collect(model, batches, again, store) == (0, 4)


class fi_layers:  # noqa: N801 (a function in all but the syntax)
    """Registers a detector for a block."""

    def __init__(self, model: nn.Module, detector: fi.Detector) -> None:
        self.layers, self.detector = fi.Layers(model), detector

    def __enter__(self) -> None:
        self.layers.register_hook("sequential_0", self.detector)

    def __exit__(self, *error: object) -> None:
        self.layers.unregister_hook(self.detector)


def test_another_forward_is_refused(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    def twice(batch: Tensor) -> None:
        model(2 * batch)

    fh.collect(model, batches, "0", store)
    told = r"option 'forward': None, now '.*twice'\)"
    refused(store, told, model, batches, "0", forward=twice)


def test_other_batches_are_refused(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    fh.collect(model, batches[:3], "0", store)
    told = "batch {} of run 'run' was collected from a different batch"
    refused(store, told.format(1), model, [batches[0], batches[1] + 1e-6, *batches[2:]], "0")
    refused(store, told.format(0), model, batches[::-1], "0")
    refused(store, told.format(0), model, torch.cat(batches).split(4), "0")
    refused(store, told.format(2), model, [*batches[:2], (batches[2], 1)], "0")
    refused(store, told.format(0), model, [batches[0].double(), *batches[1:]], "0")
    assert fh.collect(model, [batch.clone() for batch in batches], "0", store) == (1, 3)


def test_a_first_call_that_stored_nothing_decides_nothing(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    def fails(batch: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fh.collect(model, batches, "0", store, forward=fails)
    assert store.manifest("run") is None
    assert fh.collect(model, batches[::-1], "2", store) == (4, 0)


def test_another_process_compares_too(
    model: nn.Sequential, batches: list[Tensor], tmp_path: Path
) -> None:
    with LocalStore(tmp_path) as store:
        fh.collect(model, batches, "*", store)
    lines = (tmp_path / "run" / "index.jsonl").read_text().splitlines()
    assert ["manifest" in json.loads(line) for line in lines] == [True, False, False, False]
    with LocalStore(tmp_path) as store:
        assert fh.collect(model, batches, "*", store) == (0, 4)
        model[0].bias.data.add_(1)
        refused(store, "'0.bias' changed", model, batches, "*")


def test_hooks_and_wrappers_do_not_count(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    fh.collect(model, batches, "0", store)
    hooks = fh.register(model, "*", lambda *_: None)
    assert fh.collect(model, batches, "0", store) == (0, 4)
    hooks.remove()
    assert fh.collect(fh.HookedModule(model), batches, "0", store) == (0, 4)


# Made again


def test_missing_batches_are_made_again(
    model: nn.Sequential, batches: list[Tensor], tmp_path: Path
) -> None:
    with LocalStore(tmp_path / "whole") as store:
        fh.collect(model, batches, "*", store)
    whole = files(tmp_path / "whole")
    with LocalStore(tmp_path / "store") as store:
        fh.collect(model, batches, "*", store)
        folder = tmp_path / "store" / "run"
        (folder / "00000001.safetensors").unlink()
        with (folder / "00000002.safetensors").open("r+b") as file:
            file.truncate(50)
        # Compared with the batches that were there, before anything is written.
        refused_batches = [batches[0], batches[0], *batches[2:]]
        with pytest.raises(fh.errors.ResumeError, match="batch 1 of run 'run'"):
            fh.collect(model, refused_batches, "*", store)
        assert fh.collect(model, batches, "*", store) == (2, 2)
        assert files(tmp_path / "store") == whole
        assert store.verify() == []
        assert fh.collect(model, batches, "*", store) == (0, 4)
    with LocalStore(tmp_path / "store") as store:
        assert fh.collect(model, batches, "*", store) == (0, 4)


def files(folder: Path) -> dict[str, bytes]:
    """Contents of the files by batch, each of which has one."""
    paths = [*folder.glob("run/*.safetensors")]
    found = {path.name.partition(".")[0]: path.read_bytes() for path in paths}
    assert len(found) == len(paths)
    return found


def test_a_batch_that_was_begun_is_made_anew(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    fh.collect(model, batches[:1], "0", store)
    store.put("run", 1, "gone", {"output": torch.ones(9)})
    store.flush()  # a killed process leaves such a batch
    store.put("run", 1, "gone as well", {"output": torch.ones(9)})
    assert fh.collect(model, batches, "0", store) == (3, 1)
    assert store.layers("run", 1) == ["0"]
    if isinstance(store, LocalStore):
        assert files(store._folder.path).keys() == {f"{number:08}" for number in range(4)}


def test_an_interrupted_repair_is_repeated(
    model: nn.Sequential, batches: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalStore(tmp_path, max_pending=40) as store:  # layers are written one by one
        fh.collect(model, batches, "*", store)
        (tmp_path / "run" / "00000001.safetensors").unlink()
        put = LocalStore.put
        for stop_at in ("0", "1", "2"):

            def putting(self: LocalStore, run: str, batch: int, layer: str, *rest: Any, **kw: Any):  # type: ignore[no-untyped-def] # noqa: ANN202
                put(self, run, batch, layer, *rest, **kw)
                if layer == stop_at:  # noqa: B023 (called in this turn)
                    raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(LocalStore, "put", putting)
                with pytest.raises(KeyboardInterrupt):
                    fh.collect(model, batches, "*", store)
            other = [batches[0], batches[0], *batches[2:]]
            with pytest.raises(fh.errors.ResumeError, match="batch 1"):
                fh.collect(model, other, "*", store)
        assert fh.collect(model, batches, "*", store) == (1, 3)
        assert store.verify() == []
        for layer in "012":
            expected = model[: int(layer) + 1](batches[1])
            assert torch.equal(store.get("run", 1, layer)["output"], expected)


# Batches of `put`


def test_batches_without_a_fingerprint_are_accepted_with_a_warning(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    for number in (0, 1):
        store.put("run", number, "0", {"output": torch.zeros(1)})
        store.complete("run", number)
    told = "run 'run' skips batches 0, 1, which have no fingerprint"
    with pytest.warns(fh.errors.UnverifiedWarning, match=told) as caught:
        assert fh.collect(model, batches, "0", store) == (2, 2)
    assert caught[0].filename == __file__
    with pytest.warns(fh.errors.UnverifiedWarning, match=told):
        refused(store, "batch 3", model, batches[:3] + batches[:1], "0")


# Two calls at once


def test_a_second_call_into_a_run_is_refused(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    inside, go = threading.Event(), threading.Event()

    def feed() -> Iterator[Tensor]:
        yield batches[0]
        inside.set()
        assert go.wait(LIMIT)
        yield from batches[1:]

    first = Together(functools.partial(fh.collect, model, feed(), "0", store, progress=False))
    assert inside.wait(LIMIT)
    with pytest.raises(fh.errors.ResumeError, match="run 'run' is being collected by another call"):
        fh.collect(model, batches, "0", store)
    assert fh.collect(model, batches, "0", store, run="other") == (4, 0)
    go.set()
    first.join()
    assert store.completed("run") == [0, 1, 2, 3]
    assert fh.collect(model, batches, "0", store) == (0, 4)


def test_an_exception_that_is_kept_does_not_keep_the_run(
    model: nn.Sequential, batches: list[Tensor], store: Store
) -> None:
    def stop() -> Iterator[Tensor]:
        yield batches[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        fh.collect(model, stop(), "0", store)
    assert fh.collect(model, batches, "0", store) == (3, 1)
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda model: fh.on("0", fh.detectors.NormDetector()),
        lambda model: fh.on("0", fh.Feature(sae_of(4), 1, set=2.0)),
    ],
    ids=["detector", "feature"],
)
def test_a_plan_is_the_same_after_its_use(
    model: nn.Sequential, batches: list[Tensor], store: Store, make: Any
) -> None:
    plan = fh.Plan(make(model))
    fh.collect(model, batches[:2], "0", store, plan=plan)
    hash(plan)
    assert fh.collect(model, batches, "0", store, plan=plan) == (2, 2)
