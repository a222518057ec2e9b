"""Plans compare by content with its types, and hostile texts are refused by ValueError alone."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TEXTS: list[dict[str, Any]] = [
    {"type": "keep", "what": ["a", {"tuple": ["b*"]}], "slice": [{"slice": [0, None, 2]}, "..."]},
    {"type": "keep", "what": {"set": ["a", "b"]}, "label": "x", "calls": 3, "dtype": "float16"},
    {"type": "keep", "what": None, "slice": [True, False]},
    {"type": "keep", "what": None, "at": {"slice": [1, -1, None]}},
    {"type": "on", "what": "a", "hook": {"type": "Scale", "factor": 2.0, "output_index": 0}},
    {
        "type": "on",
        "what": "a",
        "at": "prompt",
        "hook": {
            "type": "Add",
            "vector": {"dtype": "float32", "shape": [1], "base64": "AACAPw=="},
            "output_index": "sum",
        },
        "priority": 3,
        "on_error": "ignore",
    },
]
HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    1.0,
    -0.0,
    2**63,
    1e400,
    float("nan"),
    "",
    "...",
    "\ud800",
    "a" * 2000,
    [],
    [[1]],
    [[[[[[[[[[0]]]]]]]]]],
    {},
    {"set": [[1]]},
    {"set": [{"slice": [0, None, None]}]},
    {"set": ["a", "a"]},
    {"tuple": {"set": []}},
    {"slice": [0, 1]},
    {"slice": [None, None, 0]},
    {"regex": "("},
    {"regex": {"set": []}},
    {"tensor": []},
    {"type": []},
    "qint8",
    "bits8",
    "meta",
]


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all parts of a value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *itertools.chain.from_iterable(nodes(each, (*path, key)) for key, each in items)]


def mutated(draw: random.Random) -> Any:
    """Makes a text of a plan with some of its parts replaced."""
    plan: Any = {"version": 1, "entries": copy.deepcopy(draw.sample(TEXTS, draw.randint(1, 3)))}
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice(nodes(plan)[1:])
        parent = plan
        for key in path:
            parent = parent[key]
        kind = draw.random()
        if kind < 0.6:
            parent[last] = copy.deepcopy(draw.choice(HOSTILE))
        elif kind < 0.8:
            parent[last] = {draw.choice(["set", "tuple", "slice", "regex", "type"]): parent[last]}
        elif isinstance(parent, dict):
            parent[draw.choice(["type", "at", "slice", "output_index", "label", "x"])] = parent.pop(
                last
            )
    return plan


@pytest.mark.parametrize("seed", range(8))
def test_mutated_texts_raise_nothing_but_value_errors(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 (reproducible)
    accepted = 0
    for _ in range(400):
        text = mutated(draw)
        try:
            plan = fh.Plan.from_json(text if draw.random() < 0.5 else json.dumps(text), regex=True)
        except ValueError:
            continue
        accepted += 1
        again = fh.Plan.from_json(plan.to_json(), regex=True)
        assert again == plan
        assert again.to_json() == plan.to_json()
    assert accepted > 10


@pytest.mark.parametrize("entry", TEXTS, ids=range(len(TEXTS)))
def test_texts_that_are_mutated_are_accepted_as_they_are(entry: dict[str, Any]) -> None:
    fh.Plan.from_json({"version": 1, "entries": [entry]})


class Unread(list[Any]):
    """A list whose members must not be read."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        pytest.fail("the members of a list that is too long were read")


@pytest.mark.parametrize(
    "fields",
    [
        {"what": Unread(5000)},
        {"what": ["a", {"tuple": Unread(5000)}]},
        {"what": {"regex": "a", "flags": Unread(5000)}},
        {"slice": Unread(2**17)},
        {"slice": [{"tuple": Unread(2**17)}]},
        {"slice": {"slice": Unread(5000)}},
        {"at": {"slice": Unread(5000)}},
        {
            "type": "on",
            "hook": {
                "type": "Add",
                "vector": {"dtype": "float32", "base64": "", "shape": Unread(5000)},
            },
        },
    ],
)
def test_a_list_is_refused_at_its_length(fields: dict[str, Any]) -> None:
    entry = {"type": "keep", "what": "a"} | fields
    with pytest.raises(ValueError, match=r"^entries\[0\]\."):
        fh.Plan.from_json({"version": 1, "entries": [entry]}, regex=True)


def test_the_indices_of_all_entries_are_counted() -> None:
    half = {"type": "keep", "what": "a", "slice": [*range(2**15)]}
    entries = [half, half | {"label": "x"}]
    assert len(fh.Plan.from_json({"version": 1, "entries": entries}).entries) == 2
    with pytest.raises(
        ValueError, match=r"entries\[2\].slice: .* more than 65,536 indices: use slices"
    ):
        fh.Plan.from_json({"version": 1, "entries": [*entries, half | {"label": "y"}]})


INDICES: list[Any] = [
    [True, False],
    [1, 0],
    (True, False),
    (1, 0),
    [1, False],
    True,
    1,
    0,
    False,
    slice(0, 1),
    slice(False, True),
    slice(0, 1, 1),
    [[1, 0]],
    [[True, False]],
    None,
    ...,
]


def test_plans_with_a_redefined_intervention_are_not_equal() -> None:
    def defined(change: Callable[[Tensor, float], Tensor]) -> type[fh.Intervention]:
        class Rescaled(fh.Intervention):
            number_fields = ("factor",)
            formula = staticmethod(change)

        return Rescaled

    former, redefined = defined(lambda x, factor: x * factor), defined(lambda x, factor: x + factor)
    first, again, other = (fh.Plan(fh.on("", it(2.0))) for it in (former, former, redefined))
    assert first == again
    assert hash(first) == hash(again)
    assert first != other


def test_plans_with_indices_of_other_types_are_not_equal() -> None:
    plans = []
    for index in INDICES:
        try:
            plans.append(fh.Plan(fh.keep("0", slice=index)))
        except (TypeError, ValueError):
            continue  # refused
    assert len(plans) > 8
    for one, other in itertools.combinations(plans, 2):
        assert one != other
        assert len({one, other}) == 2
    factors = [fh.Plan(fh.on("0", fh.Scale(factor))) for factor in (0.0, -0.0, 1.0)]
    assert len({*factors}) == 3


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32, torch.bits8])
def test_dtypes_that_nothing_converts_to_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(fh.HookTypeError, match="convert"):
        fh.keep("0", dtype=dtype)


def test_a_label_with_a_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        fh.keep("0", label="\ud800")


@pytest.mark.parametrize(
    ("part", "other", "error"),
    [
        (b"generated", b"generates", ValueError),
        (b"max_bytes", b"max_bites", TypeError),
        (b"priority", b"priorite", TypeError),
    ],
)
def test_a_damaged_pickle_is_refused_as_it_is_read(
    part: bytes, other: bytes, error: type[Exception]
) -> None:
    plan = fh.Plan(
        fh.on("0", fh.Scale(2.0), at="generated", priority=2),
        fh.keep("*", label="x", max_bytes=100, slice=slice(0, 2)),
    )
    pickled = pickle.dumps(plan)
    assert pickle.loads(pickled) == plan
    assert copy.deepcopy(plan) == plan
    with pytest.raises(error):
        pickle.loads(pickled.replace(part, other))


EXITS = {
    "plans": """
    import torch
    from torch import nn
    import ferrohook as fh
    from ferrohook.plans.prepared_plans import PreparedPlans

    plans = PreparedPlans(nn.Sequential(nn.Linear(4, 4)))
    for number in range(3):
        plans.prepare(fh.Plan(fh.on("0", fh.Add(torch.full((4,), float(number))))))
    """,
    "attention": """
    import ferrohook as fh
    from support.attention_models import attention_model

    model = attention_model("llama")
    request = fh.Plan(fh.keep("@z.1")).prepare(model).open()
    """,
}


@pytest.mark.parametrize("code", EXITS.values(), ids=EXITS)
def test_plans_that_are_alive_at_exit_say_nothing(code: str) -> None:
    if "attention" in code:
        pytest.importorskip("transformers")
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert not ended.stderr
