"""Structures of tensors: hooks, gradients, captures and interventions reach the same ones."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import ferrohook as fh
from ferrohook.data.fingerprints import fingerprint
from support.compiling import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 (the class that users have)


@dataclasses.dataclass
class Data:
    a: Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


def packed(x: Tensor) -> PackedSequence:
    return pack_padded_sequence(x[None].expand(2, *x.shape), torch.tensor([3, 1]), batch_first=True)


class Own(tuple[Any, ...]):  # noqa: SLOT001 (it has an attribute)
    """Its constructor takes other arguments than a tuple's."""

    note: str

    def __new__(cls, x: Tensor) -> Self:
        made = super().__new__(cls, (x, x * 2))
        made.note = "kept"
        return made


# The structure around tensors, and the path of the one that gives the loss.
STRUCTURES: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "tuple": (lambda y: (y, y * 2), 1),
    "list": (lambda y: [y, y * 2], 0),
    "dict": (lambda y: {"a": y, "b": 1}, "a"),
    "OrderedDict": (lambda y: OrderedDict(a=y), "a"),
    "UserDict": (lambda y: UserDict(a=y), "a"),
    "named tuple": (lambda y: Pair(y, y * 2), "b"),
    "tuple subclass": (Own, 1),
    "topk": (lambda y: torch.topk(y, 2), "values"),
    "max": (lambda y: torch.max(y, -1), 0),
    "sort": (torch.sort, "values"),
    "qr": (torch.linalg.qr, "R"),
    "svd": (torch.linalg.svd, (1,)),
    "data class": (Data, "a"),
    "frozen data class": (lambda y: Frozen((None, y)), ("a", 1)),
    "nested tuples": (lambda y: (y, (y * 2, (y * 3,))), (1, 1, 0)),
    "tuple of None": (lambda y: (None, (y, None)), (1, 0)),
    "dict of lists": (lambda y: {"a": [y, y * 2]}, ("a", 1)),
    "list of dicts": (lambda y: [{"a": y}, {"a": y * 2}], (1, "a")),
    "tuple of topk": (lambda y: (1, torch.topk(y, 2)), (1, "values")),
    "packed sequence": (packed, "data"),
    "tuple of packed sequence": (lambda y: (packed(y), (y, y)), (0, "data")),
}
structures = pytest.mark.parametrize("kind", STRUCTURES)


class Out(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 3), kind

    def forward(self, x: Tensor) -> Any:
        return STRUCTURES[self.kind][0](self.layer(x))


class In(nn.Module):
    """Takes a structure, and computes with one tensor in it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, value: Any) -> Tensor:
        return at(value, STRUCTURES[self.kind][1]) * 2


def at(value: Any, path: Any) -> Any:
    """The part of a value at a path."""
    for step in path if isinstance(path, tuple) else (path,):
        if isinstance(value, dict | UserDict) or isinstance(step, int):
            value = value[step]
        else:
            value = getattr(value, step)
    return value


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of a structure, tensors and others; of a packed sequence its tensors."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict | UserDict):
        value = [*value.values()]
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def same(one: Any, other: Any) -> bool:
    pairs = [*zip([*leaves(one)], [*leaves(other)], strict=True)]
    notes = [getattr(each, "note", None) for each in (one, other)]
    return (
        type(one) is type(other)
        and notes[0] == notes[1]
        and all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)
    )


def step_of(path: Any) -> tuple[Any, Any]:
    return (path[0], path[1:]) if isinstance(path, tuple) else (path, ())


def place_of(value: Any, step: Any) -> int:
    """Index of an item in a structure."""
    if isinstance(step, int):
        return step
    if isinstance(value, PackedSequence):
        return 0
    if isinstance(value, dict | UserDict):
        return [*value].index(step)
    fields = type(value).__match_args__ if isinstance(value, tuple) else vars(value)
    return [*fields].index(step)


@structures
@pytest.mark.parametrize("way", ["wrapper", "register"])
def test_backward_hooks_see_the_gradient_of_each_tensor(kind: str, way: str) -> None:
    path = STRUCTURES[kind][1]
    plain, seen = Out(kind), []
    x = torch.randn(3, 3, requires_grad=True)
    part = at(plain(x), path)
    weights = torch.randn_like(part)
    (part * weights).sum().backward()
    expected, x.grad = x.grad, None

    def hook(_module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        seen.append((grad_input, grad_output))

    model: Any = fh.HookedModule(copy.deepcopy(plain)) if way == "wrapper" else plain
    if way == "wrapper":
        model.register_full_backward_hook(hook)
    else:
        fh.register(model, "", hook, phase="backward")
    result = model(x)
    assert same(result, STRUCTURES[kind][0](plain.layer(x)))
    (at(result, path) * weights).sum().backward()
    ((grad_input, grad_output),) = seen
    first, rest = step_of(path)
    assert torch.allclose(at(grad_output[place_of(result, first)], rest), weights)
    assert torch.allclose(grad_input[0], expected)
    assert torch.allclose(x.grad, expected)


@structures
def test_backward_hooks_see_the_gradients_of_inputs_in_structures(kind: str) -> None:
    make, path = STRUCTURES[kind]
    x = torch.randn(3, 3, requires_grad=True)
    value, model, seen = make(x), In(kind), []
    (expected,) = torch.autograd.grad(model(value).sum(), at(value, path), retain_graph=True)
    with fh.register(
        model, "", lambda _m, grad_input, _go: seen.append(grad_input), phase="backward"
    ):
        model(value).sum().backward()
    ((gradients,),) = seen
    assert torch.equal(at(gradients, path), expected)


@pytest.mark.parametrize("kind", ["nested tuples", "dict of lists", "tuple of packed sequence"])
@pytest.mark.parametrize("phase", ["backward", "backward_pre"])
def test_backward_hooks_replace_gradients_in_structures(kind: str, phase: Any) -> None:
    make, path = STRUCTURES[kind]

    def doubled(gradients: Any) -> Any:
        if isinstance(gradients, Tensor):
            return gradients * 2
        if isinstance(gradients, PackedSequence):
            return gradients._replace(data=doubled(gradients.data))
        if isinstance(gradients, dict):
            return {key: doubled(each) for key, each in gradients.items()}
        if isinstance(gradients, tuple | list):
            return type(gradients)(map(doubled, gradients))
        return gradients

    grads = []
    model = In(kind) if phase == "backward" else Out(kind)
    for hooked in (False, True):
        x = torch.randn(3, 3, requires_grad=True, generator=torch.Generator().manual_seed(0))
        handle = None
        if hooked:
            handle = fh.register(model, "", lambda _m, g, *_: doubled(g), phase=phase)
        if phase == "backward":
            model(make(x)).sum().backward()
        else:
            at(model(x), path).sum().backward()
        grads.append(x.grad)
        if handle is not None:
            handle.remove()
    assert torch.allclose(grads[1], grads[0] * 2)


def test_gradients_of_another_structure_are_refused() -> None:
    model = Out("nested tuples")
    wrong = [(None,), (None, (None,)), (None, torch.ones(3, 3)), (None, {"a": None})]
    for result in wrong:
        with fh.register(model, "", lambda _m, _g, it=result: it, phase="backward_pre"):
            y = model(torch.randn(3, 3))
            with pytest.raises(RuntimeError, match=r"returned"):
                y[1][1][0].sum().backward()


def test_a_list_that_contains_itself_passes() -> None:
    class Ring(nn.Module):
        def forward(self, x: Tensor) -> Any:
            ring: list[Any] = [x]
            ring.append(ring)
            return ring

    model = Ring()
    with fh.register(model, "", lambda *_: None, phase="backward"):
        first, again = model(torch.ones(2, requires_grad=True))
        first.sum().backward()
    assert torch.equal(first, torch.ones(2))
    assert isinstance(again, list)


@structures
def test_an_intervention_changes_the_part_at_a_path(kind: str) -> None:
    make, path = STRUCTURES[kind]
    model, x = Out(kind), torch.randn(3, 3)
    plain = make(model.layer(x))
    for output_index in (path, path if isinstance(path, tuple) else (path,)):
        with fh.register(model, "", fh.Scale(2.0, output_index=output_index)):
            changed = model(x)
        assert type(changed) is type(plain)
        part = at(plain, path)
        expected = [each * 2 if each is part else each for each in leaves(plain)]
        assert all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b
            for a, b in zip(leaves(changed), expected, strict=True)
        )


@structures
def test_a_capture_keeps_the_part_at_a_path(kind: str) -> None:
    path = STRUCTURES[kind][1]
    model, x = Out(kind), torch.randn(3, 3)
    with fh.capture(model, "", output_index=path) as acts:
        model(x)
    assert torch.equal(acts[""], at(STRUCTURES[kind][0](model.layer(x)), path))


@compiled
@pytest.mark.parametrize(
    "kind", ["nested tuples", "tuple of None", "dict of lists", "list of dicts", "named tuple"]
)
def test_a_path_in_a_graph(kind: str) -> None:
    path = STRUCTURES[kind][1]
    model, x = Out(kind), torch.randn(3, 3)
    with fh.register(model, "", fh.Scale(2.0, output_index=path)):
        expected = model(x)
        changed = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert same(changed, expected)


@pytest.mark.parametrize("path", [(1, 0), (0,), (2, 1)])
def test_paths_in_a_batch(path: Any) -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, (x * 2, None), {1: x * 3}

    model, x = Many(), torch.randn(5, 4)
    vectors = torch.randn(2, 4)
    plans = [
        fh.Plan(fh.on("", fh.Add(v, output_index=path)), fh.keep("", output_index=path))
        for v in vectors
    ]
    with plans[0].prepare(model) as one, plans[1].prepare(model) as two:
        members = one.open(), two.open()
        with fh.batch({members[0]: slice(0, 2), members[1]: slice(2, 5)}):
            y = model(x)
    expected = at(Many()(x), path) + vectors.repeat_interleave(torch.tensor([2, 3]), 0)
    assert torch.equal(at(y, path), expected)
    for member, rows in zip(members, (slice(0, 2), slice(2, 5)), strict=True):
        assert torch.equal(member.acts[""], expected[rows])


def test_a_path_ends_in_a_sum() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"hidden": (x, x * 2)}

    model, d = Layer(), torch.tensor([1.0, 0.0])
    with fh.register(model, "", fh.Ablate(d, output_index=("hidden", "sum"))):
        hidden, residual = model(torch.ones(3, 2))["hidden"]
    assert torch.equal(hidden + residual, torch.tensor([[0.0, 3.0]]).expand(3, 2))


@pytest.mark.parametrize("path", [(), (True,), (1, None), ((0,),), (0, 1.5)])
def test_a_path_has_steps(path: Any) -> None:
    with pytest.raises(fh.HookTypeError, match=r"output_index of Zero must be an int, a key"):
        fh.Zero(output_index=path)
    if path in {(), (True,)}:
        with pytest.raises(fh.HookTypeError, match=r"output_index must be an int, a key"):
            fh.capture(nn.Identity(), output_index=path)


def test_a_path_that_is_not_there_is_named() -> None:
    model, x = Out("nested tuples"), torch.randn(3, 3)
    for path in ((1, 5), (1, "a"), (5, 0), (0, 0, 0, 0)):
        with (
            fh.register(model, "", fh.Zero(output_index=path)),
            pytest.raises((fh.SelectionError, fh.HookTypeError), match=r"output_index"),
        ):
            model(x)
    with (
        fh.register(model, "", fh.Zero(output_index=1)),
        pytest.raises(fh.HookTypeError, match=r"choose a tensor in it with a path"),
    ):
        model(x)


# --- Recurrent networks ----------------------------------------------------------------------


class Net(nn.Module):
    """Classifies by the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Any) -> Tensor:
        _, (h, _) = self.lstm(x)
        return self.head(h[-1])  # type: ignore[no-any-return]


def sequences(kind: str) -> Any:
    x = torch.randn(2, 5, 3)
    if kind == "dense":
        return x
    return pack_padded_sequence(x, torch.tensor([3, 5]), batch_first=True, enforce_sorted=False)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_state_of_an_lstm(kind: str) -> None:
    net, x = Net(), sequences(kind)
    with fh.register(net, "lstm", fh.Zero(output_index=(1, 0))):
        assert torch.equal(net(x), net.head(torch.zeros(2, 4)))
    fired: list[Any] = []
    with fh.register(net, "lstm", lambda _m, _gi, go: fired.append(go), phase="backward"):
        net(x).sum().backward()
    ((of_output, (of_h, of_c)),) = fired
    assert of_output is None
    assert of_c is None
    assert torch.allclose(of_h[0], net.head.weight.expand(2, 4))


def test_the_data_of_a_packed_sequence() -> None:
    lstm, x = nn.LSTM(3, 4, batch_first=True), sequences("packed")
    plain, _ = pad_packed_sequence(lstm(x)[0], batch_first=True)
    v = torch.randn(4)
    with fh.register(lstm, "", fh.Add(v, output_index=(0, "data"))):
        changed, lengths = pad_packed_sequence(lstm(x)[0], batch_first=True)
    for row, length in enumerate(lengths):
        assert torch.equal(changed[row, :length], plain[row, :length] + v)
    with fh.capture(lstm, "", output_index=(0, "data")) as acts:
        expected = lstm(x)[0].data
    assert torch.equal(acts[""], expected)


def test_a_captured_packed_sequence_unpacks() -> None:
    lstm, x = nn.LSTM(3, 4, batch_first=True), sequences("packed")
    plain, _ = pad_packed_sequence(lstm(x)[0], batch_first=True)
    for options in ({"slice": (..., 0)}, {"dtype": torch.float16}, {"copy": "clone"}):
        with fh.capture(lstm, "", **options) as acts:
            lstm(x)
        unpacked, _ = pad_packed_sequence(acts[""][0], batch_first=True)
        expected = plain[..., 0] if "slice" in options else plain
        assert torch.allclose(unpacked, expected.to(unpacked.dtype), atol=1e-3)


def test_a_packed_sequence_without_some_of_its_tokens_is_captured_as_data() -> None:
    lstm, x = nn.LSTM(3, 4, batch_first=True), sequences("packed")
    with fh.capture(lstm, "", slice=(slice(0, 2),)) as acts:
        sequence, (h, c) = lstm(x)
    data, states = acts[""]
    assert torch.equal(data, sequence.data[:2])
    assert all(map(torch.equal, states, (h[:2], c[:2])))


@pytest.mark.parametrize("index", [1, -1])
def test_a_change_of_a_tuple_asks_for_one_of_its_tensors(index: int) -> None:
    net = Net()
    with (
        fh.register(net, "lstm", fh.Zero(output_index=index)),
        pytest.raises(
            fh.HookTypeError, match=rf"output_index {index} of .* is a tuple: .* path, such as"
        ),
    ):
        net(sequences("dense"))


def test_a_packed_sequence_in_a_file(tmp_path: Any) -> None:
    lstm, x = nn.LSTM(3, 4, batch_first=True), sequences("packed")
    with fh.capture(lstm, "") as acts:
        (sequence, _) = lstm(x)
    acts.save(tmp_path / "acts.safetensors")
    again = fh.ActivationCache.load(tmp_path / "acts.safetensors")[""][0]
    assert all(torch.equal(a, b) for a, b in zip(again, sequence, strict=True))


def test_fingerprints_know_the_sizes_of_a_packed_sequence() -> None:
    data = torch.randn(4, 3)
    one, other = (PackedSequence(data, torch.tensor(sizes)) for sizes in ([2, 2], [1, 1, 1, 1]))
    assert fingerprint(one) != fingerprint(other)


def test_a_gradient_that_reaches_one_of_several_tensors_of_an_operation() -> None:
    class Singular(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.linalg.svd(x, full_matrices=False)

    model, x = nn.Sequential(Singular()), torch.randn(4, 3, requires_grad=True)
    with fh.capture(model, "0", grads=True) as acts:
        model(x).S.sum().backward()
    of_u, of_s, of_vh = acts.grads["0"]
    assert (of_u, of_vh) == (None, None)
    assert torch.equal(of_s, torch.ones(3))
