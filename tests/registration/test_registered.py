"""`hooks` and `clear`: global hooks, where they were registered, and how they go."""

from __future__ import annotations

import copy
import gc
import inspect
import linecache
import runpy
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat.transformer_lens import HookPoint
from ferrohook.rows import sites
from support.hooks import add
from support.internals import is_instrumented
from support.limits import LIMIT
from support.memory import resident
from support.threads import run_together

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

X = torch.ones(1, 2)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), nn.Identity()))


def line() -> int:
    """Returns the number of the line that calls it."""
    frame: FrameType | None = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def places(model: nn.Module) -> list[tuple[str, int]]:
    """Returns the module and the line of each hook, which are all in this file."""
    assert {each.file for each in fh.hooks(model)} <= {__file__}
    return [(each.module, each.line or 0) for each in fh.hooks(model)]


def test_hooks_tells_module_phase_handle_file_and_line() -> None:
    model = small()
    observe = fh.ForwardPreHook(lambda taken: taken)
    first = line() + 1
    fh.register(model, ["0", "1.1"], add(1))
    group = fh.register(model, "0", observe)
    model(X)
    found = fh.hooks(model)
    assert [(each.module, each.phase, each.hook, each.line) for each in found] == [
        ("0", "forward_pre", observe, first + 1),
        ("0", "forward", found[1].hook, first),
        ("1.1", "forward", found[1].hook, first),
    ]
    assert {each.file for each in found} == {__file__}
    assert [each.handle.calls for each in found] == [1, 1, 1]
    assert found[1].code == 'fh.register(model, ["0", "1.1"], add(1))'
    found[0].handle.remove()
    assert group.removed
    fh.clear(model)


def test_every_way_to_register_a_global_hook_tells_its_line() -> None:
    plain, wrapped, point = nn.Identity(), fh.HookedModule(nn.Identity()), HookPoint()
    model = nn.Sequential(plain, wrapped, point)

    def hook(*_: Any, **__: Any) -> None: ...

    with fh.instrument(model):
        first = line() + 1
        plain.register_forward_hook(hook)
        wrapped.register_forward_pre_hook(hook)
        wrapped.register_full_backward_hook(hook)
        point.add_hook(hook)
        fh.register(model, "0", hook, phase="backward")
        copied = copy.deepcopy(model)
        names = [("0", first), ("0", first + 4), ("1", first + 1), ("1", first + 2)]
        assert places(model) == places(copied) == [*names, ("2", first + 3)]
        fh.clear(model)
        assert fh.hooks(model) == []
        assert len(fh.hooks(copied)) == 5
        assert is_instrumented(plain)


def test_code_that_was_compiled_from_a_text_has_its_lines() -> None:
    # As a notebook's cells are.
    model, cell = small(), "import ferrohook as fh\n\nfh.register(\n    model, '0', hook)\n"
    for name in ("<cell 1>", "<cell 2>"):
        linecache.cache[name] = len(cell), None, cell.splitlines(keepends=True), name
        exec(compile(cell, name, "exec"), {"model": model, "hook": add(1)})
    found = fh.hooks(model)
    assert [(each.file, each.line) for each in found] == [("<cell 1>", 3), ("<cell 2>", 3)]
    assert found[0].code == "fh.register("
    fh.clear(model)


def test_hooks_of_entered_scopes_are_counted() -> None:
    model = small()
    fh.register(model, "0", fh.Scale(2.0))
    with fh.scope() as scope:
        fh.register(model, ["0", "1"], fh.Zero())
        assert repr(fh.hooks(model)).endswith(
            "\n(2 hooks more in scopes that this context has entered)"
        )
        fh.clear(model)
        alone = fh.hooks(model)
        assert (
            repr(alone) == "no global hooks\n(2 hooks more in scopes that this context has entered)"
        )
        assert "2 hooks more" in alone._repr_html_()
    assert (len(alone), alone.of_scopes, fh.hooks(model).of_scopes) == (0, 2, 0)
    scope.close()


def test_hooks_print_as_a_table() -> None:
    model = small()
    assert repr(fh.hooks(model)) == "no global hooks"
    here = line() + 1
    fh.register(model, ["", "0"], fh.Scale(2.0))
    place = f"{__file__}:{here}"
    head, root, first = str(fh.hooks(model)).splitlines()
    assert head.split() == ["module", "phase", "hook", "state", "calls", "registered", "in", "by"]
    assert root.startswith("(model)  forward  Scale(factor=2.0)  enabled      0  ")
    assert f"  {place}  fh.register(model," in first
    html = fh.hooks(model)._repr_html_()
    assert html.count("<tr>") == 3
    assert place in html
    assert place in repr(fh.hooks(model)[0])
    fh.clear(model)


def test_clear_makes_the_model_plain_again_though_no_handle_was_kept() -> None:
    model = small()
    for _ in range(2):  # a cell that is run twice
        fh.register(model, "**", add(1))
    group = fh.register(model, "1", add(1))
    assert model(X)[0, 0] > 1
    fh.clear(model)
    assert torch.equal(model(X), X)
    assert not any(map(is_instrumented, model.modules()))
    assert group.removed
    group.remove()  # does nothing
    with fh.register(model, "0", add(1)):
        assert torch.equal(model(X), X + 1)
        group.attachment.release()
        assert torch.equal(model(X), X + 1)
    assert not any(map(is_instrumented, model.modules()))


def test_clear_leaves_scopes_captures_and_plans() -> None:
    model = small()
    fh.register(model, "0", add(100))
    with fh.Plan(fh.on("1.0", fh.Scale(2.0))).prepare(model) as plan, plan.open(), fh.scope():
        fh.register(model, "0", add(1))
        with fh.capture(model, "0") as acts:
            fh.clear(model)
            assert fh.hooks(model) == []
            assert torch.equal(model(X), (X + 1) * 2)
            assert torch.equal(acts["0"], X + 1)
    assert not any(map(is_instrumented, model.modules()))


def test_clear_of_a_part_leaves_the_rest() -> None:
    model = small()
    group = fh.register(model, "**", add(1))
    fh.clear(model[1])
    assert torch.equal(model(X), X + 2)  # of "" and "0"
    assert [each.module for each in fh.hooks(model)] == ["", "0"]
    group.remove()
    assert not any(map(is_instrumented, model.modules()))


def test_clear_of_a_copy_leaves_the_original() -> None:
    model = small()
    fh.register(model, "0", add(1))
    copied = copy.deepcopy(model)
    fh.clear(copied)
    assert torch.equal(copied(X), X)
    assert torch.equal(model(X), X + 1)
    assert not any(map(is_instrumented, copied.modules()))
    fh.clear(model)
    assert not any(map(is_instrumented, model.modules()))


def test_clear_reaches_hooks_of_a_wrapper_and_of_the_module_inside() -> None:
    plain = nn.Identity()
    with fh.instrument(plain):
        plain.register_forward_hook(add(1))
        wrapped = fh.HookedModule(plain)
        wrapped.register_forward_hook(add(10))
        assert torch.equal(wrapped(X), X + 11)
        assert len(fh.hooks(nn.Sequential(wrapped))) == 2
        fh.clear(wrapped)
        assert torch.equal(wrapped(X), X)


def test_torchs_own_hooks_stay() -> None:
    model = small()
    with fh.register(model, "0", add(1)):
        model[0].register_forward_hook(add(10))  # in torch's dict: the module is to be restored
        fh.clear(model)
        assert torch.equal(model(X), X + 10)


def test_restore_names_hooks_and_clear() -> None:
    model = small()
    fh.register(model, "0", add(1))
    with pytest.raises(fh.HookError, match=r"has 1 global hook: fh.hooks.*fh.clear") as refused:
        fh.restore(model)
    fh.clear(model)
    with pytest.raises(fh.HookError, match="is not instrumented: call instrument") as plain:
        fh.restore(model)
    assert "fh.clear" in str(refused.value)
    assert "fh.clear" not in str(plain.value)


def test_sites_that_were_cleared_serve_no_batch() -> None:
    model = small()
    opened = sites(model, "0", width=2, max_requests=1, max_rows=1)
    fh.clear(model)
    assert opened.closed
    plan = fh.Plan(fh.on("0", fh.Add(torch.ones(2))))
    with plan.prepare(model) as prepared, fh.batch({prepared.open(): [0]}, size=1):  # without sites
        assert torch.equal(model(X), X + 1)
    with sites(model, "0", width=2, max_requests=1, max_rows=1):
        pass
    assert not any(map(is_instrumented, model.modules()))


@pytest.mark.parametrize("wrong", [3, None, nn.Linear, [nn.Identity()]])
def test_only_modules_have_hooks(wrong: Any) -> None:
    with pytest.raises(fh.HookTypeError, match=r"instance of nn\.Module"):
        fh.hooks(wrong)
    with pytest.raises(fh.HookTypeError, match=r"instance of nn\.Module"):
        fh.clear(wrong)


def test_a_line_keeps_no_model_alive() -> None:
    def made() -> weakref.ref[nn.Module]:
        model = small()
        fh.register(model, "**", lambda *_: model(X))
        return weakref.ref(model)

    gone = made()
    gc.collect()
    assert gone() is None


def test_registering_and_removing_on_an_instrumented_model_frees_its_memory() -> None:
    model = nn.Identity()

    def churn(count: int) -> int:
        for _ in range(count):
            fh.register(model, "", add(1)).remove()
        gc.collect()
        return resident()

    with fh.instrument(model):
        before = churn(2_000)
        assert churn(20_000) - before < 2**20


def test_threads_that_clear_and_register_leave_nothing() -> None:
    model = small()

    def register() -> None:
        for _ in range(50):
            fh.register(model, "**", add(1))
            model(X)

    def clear() -> None:
        for _ in range(50):
            fh.clear(model)
            fh.hooks(model)

    run_together(register, clear, register, clear)
    fh.clear(model)
    assert torch.equal(model(X), X)
    assert not any(map(is_instrumented, model.modules()))


def test_registering_from_no_python_code_has_no_line() -> None:
    model = small()
    done = threading.Thread(target=fh.register, args=(model, "0", add(1)))
    done.start()
    done.join(LIMIT)
    (found,) = fh.hooks(model)
    assert found.file == threading.__file__  # what called it
    fh.clear(model)


def test_a_copy_of_the_package_elsewhere_is_found(tmp_path: Path) -> None:
    # Code of a user that happens to be called like a file of the package is the user's.
    script = tmp_path / "groups.py"
    script.write_text(
        "import ferrohook as fh, torch\n"
        "model = torch.nn.Sequential(torch.nn.Identity())\n"
        "fh.register(model, '0', lambda *_: None)\n"
    )
    (found,) = fh.hooks(runpy.run_path(str(script))["model"])
    assert (found.file, found.line) == (str(script), 3)
