"""`summary`: the hooked modules of a model as a tree."""

from __future__ import annotations

import copy
import functools
import io
import re
import sys
import time
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.detectors import CallCounter
from support.hooks import ignore


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


@pytest.fixture
def x() -> Tensor:
    return torch.ones(2, 3)


def shown(model: nn.Module) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=200).print(fh.summary(model))
    return file.getvalue().splitlines()


def test_the_summary_is_a_tree_of_hooked_modules(model: nn.Sequential, x: Tensor) -> None:
    assert shown(model) == ["Sequential"]
    group = fh.register(model, "1.0", ignore, priority=3)
    with fh.scope() as s:
        fh.register(model, ["1.0", ""], ignore, phase="forward_pre", scope=s)
        model(x)
        group.disable()
        assert shown(model) == [
            "Sequential",
            "├── forward_pre ignore (1 call)",
            "└── 1 Sequential",
            "    └── 0 Linear",
            "        ├── forward_pre ignore (1 call)",
            "        └── forward ignore (1 call, priority 3, disabled by hand)",
        ]
    assert len(shown(model)) == 4
    group.remove()
    assert shown(model) == ["Sequential"]


def test_a_printed_summary_has_no_addresses(model: nn.Sequential, x: Tensor) -> None:
    class Steer:
        def __call__(self, *_: Any) -> None: ...

    fh.register(model, "1.1", Steer())
    fh.register(model, "1.1", functools.partial(ignore, 1))
    fh.register(model, ["0", "1.1"], CallCounter(), priority=-1)
    model[1](x)
    printed = str(fh.summary(model)).splitlines()
    assert printed[:4] == [
        "Sequential",
        "├── 0 Linear",
        "│   └── forward CallCounter(calls=0) (0 calls, priority -1)",
        "└── 1 Sequential",
    ]
    assert "Steer object" in printed[5]
    assert "partial" in printed[6]
    assert printed[7].endswith("forward CallCounter(calls=1) (1 call, priority -1)")
    assert "0x" not in str(printed)
    assert len(printed) == 8


def test_a_summary_is_its_tree_in_a_prompt_and_in_a_notebook(model: nn.Sequential) -> None:
    fh.register(model, "1.1", ignore)
    tree = fh.summary(model)
    assert repr(tree) == str(tree)
    text = re.sub("<.*?>", "", tree._repr_mimebundle_([], [])["text/html"])
    assert [line.rstrip() for line in text.rstrip().splitlines()] == str(tree).splitlines()


def test_the_summary_shows_wrappers_captures_and_literal_markup(x: Tensor) -> None:
    model = nn.ModuleDict({"[red]a[/red]": fh.HookedModule(nn.Identity())})
    wrapper = model["[red]a[/red]"]
    wrapper.register_forward_hook(lambda *_: None)
    with fh.capture(wrapper, "") as acts:
        wrapper(x)
        lines = shown(model)
    assert "" in acts
    assert lines[0] == "ModuleDict"
    assert lines[1].startswith("└── [red]a[/red] ")
    assert "test_the_summary_shows_wrappers" in lines[2]
    assert lines[3].endswith("forward capture (1 call)")


def test_the_summary_of_a_call_shows_shapes_and_parameters(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1, bias=False)))
    rows = len(x)
    text = str(fh.summary(model, x))
    assert text.splitlines() == [
        f"Sequential ({rows}, 1), 10 parameters",
        f"├── 0 Linear ({rows}, 2), 8 parameters",
        f"└── 1 Sequential ({rows}, 1), 2 parameters",
        f"    ├── 0 ReLU ({rows}, 2)",
        f"    └── 1 Linear ({rows}, 1), 2 parameters",
    ]
    assert str(fh.summary(model, input=x)) == text
    assert not fh.hooks(model)
    assert type(model[0]) is nn.Linear
    root, first = str(fh.summary(model, x, also="0")).splitlines()
    assert (root, first[4:]) == (text.splitlines()[0], f"0 Linear ({rows}, 2), 8 parameters")


def test_the_summary_of_a_call_changes_nothing(x: Tensor) -> None:
    model = nn.Sequential(nn.BatchNorm1d(x.shape[-1]), nn.Dropout())
    handle = fh.register(model, "1", ignore)
    before = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    assert str(fh.summary(model, x)).endswith("(0 calls)")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert model.training
    assert handle.calls == 0


def test_the_summary_of_many_modules_is_fast() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Identity()) for _ in range(2_000)])
    with fh.instrument(model):
        for each in model:
            fh.register(each, "0", ignore)
        start = time.thread_time()
        tree = fh.summary(model)
        took = time.thread_time() - start
    assert len(tree.children) == 2_000
    assert took < 3  # quadratic comparison of names takes longer


def test_the_summary_refuses_anything_but_a_module() -> None:
    with pytest.raises(fh.HookTypeError, match=r"summary needs an instance of nn\.Module, got"):
        fh.summary("model")  # type: ignore[arg-type]


def test_the_summary_needs_rich(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.tree", None)
    with pytest.raises(fh.HookError, match=r"summary needs the package rich: pip install rich"):
        fh.summary(model)
