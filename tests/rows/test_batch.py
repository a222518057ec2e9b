"""`fh.batch`: each request's hooks see and change its own rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.linear(x).tanh() * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def by_hand(model: nn.Module, x: Tensor, rows: dict[str, list[tuple[object, object]]]) -> Tensor:
    """Runs the model with a loop over requests in PyTorch hooks."""
    handles = []
    for name, changes in rows.items():

        def hook(_m: object, _a: object, output: Tensor, changes: object = changes) -> Tensor:
            changed = output.clone()
            for own, change in changes:  # type: ignore[attr-defined]
                changed[own] = change(output[own])
            return changed

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    try:
        return model(x)
    finally:
        for handle in handles:
            handle.remove()


def test_rows_of_plans_with_python_hooks_and_interventions(model: Net) -> None:
    x, v, w = torch.randn(9, WIDTH), torch.randn(WIDTH), torch.randn(WIDTH)
    seen = []

    def double(_module: object, args: tuple[Tensor], output: Tensor) -> Tensor:
        seen.append((args[0].shape, output.shape))
        return output * 2

    plans = [
        fh.Plan(fh.on("layers.1", fh.Add(v)), fh.keep("layers.*")),
        fh.Plan(fh.on("layers.1", double), fh.on("layers.2", fh.Ablate(w)), fh.keep("head")),
        fh.Plan(fh.on("layers.1", fh.Scale(3)), fh.on("layers.1", fh.Add(w))),
    ]
    expected = by_hand(
        model,
        x,
        {
            "layers.1": [
                (slice(0, 3), lambda h: h + v),
                (slice(3, 5), lambda h: h * 2),
                ([8, 6], lambda h: h * 3 + w),
            ],
            "layers.2": [(slice(3, 5), lambda h: fh.Ablate(w) and _ablated(h, w))],
        },
    )
    prepared = [plan.prepare(model) for plan in plans]
    a, b, c = (each.open() for each in prepared)
    with fh.batch({a: slice(0, 3), b: range(3, 5), c: torch.tensor([8, 6])}):
        out = model(x)
    assert torch.equal(out, expected)
    assert seen == [((2, WIDTH), (2, WIDTH))]
    assert a.acts["layers.1"].shape == (3, WIDTH)
    assert torch.equal(b.acts["head"], expected[3:5])
    assert [each.error for each in (a, b, c)] == [None] * 3
    assert torch.equal(model(x), by_hand(model, x, {}))  # nothing fires outside


def _ablated(h: Tensor, direction: Tensor) -> Tensor:
    d = direction / direction.norm()
    return h - (h * d).sum(-1, keepdim=True) * d


def test_the_same_requests_in_batch_after_batch(model: Net) -> None:
    v = torch.randn(WIDTH)
    with fh.Plan(fh.on("layers.0", fh.Add(v)), fh.keep("layers.0", calls="all")).prepare(
        model
    ) as p:
        a, b = p.open(), p.open()
        for step in range(3):
            x = torch.randn(4, WIDTH)
            rows = {a: [0, 3], b: slice(1, 3)} if step % 2 else {b: 0, a: slice(2, 4)}
            with fh.batch(rows, size=4):
                model(x)
        assert [len(each) for each in a.acts["layers.0"]] == [2, 2, 2]
        assert [len(each) for each in b.acts["layers.0"]] == [1, 2, 1]


def test_scopes_captures_and_typed_hooks(model: Net) -> None:
    x = torch.randn(2, 5, WIDTH)
    scope, seen = fh.scope(), []
    fh.register(model, "layers.0", fh.ForwardHook(lambda i, o: seen.append(o.shape)), scope=scope)
    fh.register(
        model, "layers.1", fh.ForwardPreHook(lambda i: i + 1), phase="forward_pre", scope=scope
    )
    capture = fh.capture(model, "layers.1", inputs=True)
    with fh.batch({scope: slice(0, 2), capture: [4, 3]}, dim=1):
        out = model(x)
    assert seen == [(2, 2, WIDTH)]
    assert capture.acts["layers.1"].shape == (2, 2, WIDTH)
    plain = model(x)
    assert torch.equal(out[:, 2:], plain[:, 2:])
    assert not torch.isclose(out[:, :2], plain[:, :2]).all()


def test_hooks_of_the_whole_batch_keep_their_place(model: Net) -> None:
    x, order = torch.randn(4, WIDTH), []

    def hook(name: str):  # noqa: ANN202
        return lambda _m, _a, output: order.append((name, len(output)))

    plan = fh.Plan(fh.on("head", hook("late"), priority=-1), fh.on("head", hook("early")))
    request = plan.prepare(model).open()
    with fh.scope() as whole, fh.capture(model, "layers.2") as acts:
        fh.register(model, "head", hook("first"), priority=1, scope=whole)
        fh.register(model, "head", hook("middle"), scope=whole)
        fh.register(model, "head", hook("last"), priority=-2, scope=whole)
        other = fh.Plan(fh.on("layers.2", fh.Zero())).prepare(model).open()
        with fh.batch({request: slice(1, 3), other: 3}):
            model(x)
    assert order == [("first", 4), ("early", 2), ("middle", 4), ("late", 2), ("last", 4)]
    assert acts["layers.2"][3].count_nonzero() == 0  # a capture around it sees what members did


def test_one_copy_for_all_that_change_and_none_where_nobody_does(model: Net) -> None:
    x, clones = torch.randn(6, WIDTH), []
    outputs = []
    observe = fh.Plan(fh.on("layers.1", lambda _m, _a, output: None))
    double = fh.Plan(fh.on("layers.0", lambda _m, _a, output: output * 2))
    requests = [observe.prepare(model).open() for _ in range(2)]
    requests += [double.prepare(model).open() for _ in range(2)]
    with fh.scope() as whole:
        ahead = {"scope": whole, "priority": 1}
        behind = {"scope": whole, "priority": -1}
        for name in ("layers.0", "layers.1"):
            for place in (ahead, behind):
                fh.register(model, name, lambda _m, _a, o: outputs.append(o), **place)
        with (
            fh.batch({each: [number] for number, each in enumerate(requests)}, size=6),
            _Clones(clones),
        ):
            model(x)
    assert outputs[2] is outputs[3]
    assert outputs[0] is not outputs[1]
    assert clones == ["clone"]


class _Clones(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        if func is torch.ops.aten.clone.default and len(args[0]) == 6:  # of the whole batch
            self.found.append("clone")
        return func(*args, **(kwargs or {}))


def test_structures_keywords_and_pre_hooks() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor, shared: Tensor, flag: bool) -> object:
            assert flag
            return {"h": x * mask, "pair": (x.sum(-1), shared), "text": "t"}

    model = Mixed()
    scope = fh.scope()
    seen = []

    def pre(_m: object, args: tuple[Tensor], kwargs: dict[str, object]) -> object:
        seen.append({name: getattr(value, "shape", value) for name, value in kwargs.items()})
        return (args[0] + 1,), {**kwargs, "mask": kwargs["mask"] * 0}

    fh.register(model, "", pre, phase="forward_pre", with_kwargs=True, scope=scope)
    x, mask, shared = torch.randn(4, 3), torch.ones(4, 3), torch.ones(7)
    with fh.batch({scope: slice(1, 3)}, size=4):
        out = model(x, mask=mask, shared=shared, flag=True)
    assert seen == [{"mask": (2, 3), "shared": (7,), "flag": True}]
    expected = x.clone()
    expected[1:3] = 0
    assert torch.equal(out["h"], expected)
    assert out["pair"][1] is shared
    assert out["text"] == "t"


def test_gradients_reach_the_right_rows(model: Net) -> None:
    x = torch.randn(5, WIDTH, requires_grad=True)
    weights = [torch.randn(WIDTH, requires_grad=True) for _ in range(2)]
    hooks = [lambda _m, _a, o, w=w: o * w for w in weights]
    a, b = (fh.Plan(fh.on("layers.1", hook)).prepare(model).open() for hook in hooks)
    with fh.batch({a: slice(0, 2), b: [4, 2]}):
        model(x).square().sum().backward()
    got = [x.grad, *(w.grad for w in weights)]
    x.grad = weights[0].grad = weights[1].grad = None
    own = [(slice(0, 2), lambda h: h * weights[0]), ([4, 2], lambda h: h * weights[1])]
    by_hand(model, x, {"layers.1": own}).square().sum().backward()
    for mine, theirs in zip(got, [x.grad, *(w.grad for w in weights)], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rows", [slice(1, 3), [3, 1]])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_in_place_change_own_rows(model: Net, rows: object, mode: object) -> None:
    def write(_m: object, _a: object, output: Tensor) -> None:
        output.mul_(2)

    x = torch.randn(4, WIDTH)
    writer = fh.Plan(fh.on("layers.1", write)).prepare(model).open()
    reader = fh.Plan(fh.keep("layers.1")).prepare(model).open()
    with mode():  # type: ignore[operator]
        with fh.batch({reader: 0, writer: rows}, size=4):
            out = model(x)
        assert torch.equal(out, by_hand(model, x, {"layers.1": [(rows, lambda h: h * 2)]}))
    reader.acts["layers.1"]  # not stale: the write is in rows of another
    assert writer.error is None


def test_gathered_rows(model: Net) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.lm_head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, last: Tensor) -> Tensor:
            return self.lm_head(self.body(x)[last])

    lm, x, last = Last(), torch.randn(6, WIDTH), torch.tensor([1, 2, 5])
    plan = fh.Plan(fh.on("lm_head", fh.Zero()), fh.keep("body"))
    a, b = plan.prepare(lm).open(), fh.Plan(fh.keep("lm_head")).prepare(lm).open()
    for index in (last, lambda _m, _a, _k, _o: last):
        with fh.batch({a: slice(2, 6), b: slice(0, 2)}, gathered={"lm_*": index}):
            out = lm(x, last)
        assert out[1:].count_nonzero() == 0
        assert torch.equal(b.acts["lm_head"], out[:1])


def test_always_called_hooks_run_where_the_module_raises(model: Net) -> None:
    scope, seen = fh.scope(), []

    def note(_m: object, _a: object, output: object) -> None:
        seen.append(output)

    def fails(_m: object, _a: object) -> None:
        raise ZeroDivisionError

    fh.register(model, "layers.1", note, always_call=True, scope=scope)
    handle = model.layers[1].linear.register_forward_pre_hook(fails)
    with fh.batch({scope: 0}, size=2), pytest.raises(ZeroDivisionError):
        model(torch.randn(2, WIDTH))
    handle.remove()
    assert seen == [None]
