"""`Plan.to_json` and `Plan.from_json`: round trips, limits and hostile text."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from pathlib import Path

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Round trips

numbers = st.floats(-1e6, 1e6)
steps = st.integers(0, 3) | st.text(max_size=3)
indices = st.none() | steps | st.lists(steps, min_size=1, max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, dims: int = 3) -> Tensor:
    shape = draw(st.lists(st.integers(0 if dims > 1 else 1, 3), min_size=dims == 1, max_size=dims))
    seed = draw(st.integers(0, 2**32))
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    made = made.to(draw(st.sampled_from(FLOATS)))
    return made.mT if draw(st.booleans()) and made.dim() > 1 else made  # not contiguous


@st.composite
def interventions(draw: st.DrawFn) -> fh.Intervention:
    index: dict[str, Any] = {"output_index": draw(indices)}
    low, width = draw(numbers), draw(st.floats(0, 1e6))
    return draw(
        st.sampled_from(
            [
                lambda: fh.Add(draw(tensors()), draw(numbers), **index),
                lambda: fh.Scale(draw(numbers), **index),
                lambda: fh.Ablate(draw(tensors(1)), **index),
                lambda: fh.Clamp(draw(tensors(1)), low, low + width, **index),
                lambda: fh.Clamp(draw(tensors(1)), high=low, **index),
                lambda: fh.Replace(draw(tensors()), **index),
                lambda: fh.Zero(**index),
            ]
        )
    )()


patterns = st.sampled_from([re.compile("a|b$"), re.compile("(?i)x", re.MULTILINE), re.compile("")])
selectors = st.none() | st.recursive(
    st.text(max_size=8) | patterns,
    lambda each: (
        st.lists(each, max_size=3)
        | st.lists(each, max_size=3).map(tuple)
        | st.frozensets(st.text(max_size=3) | patterns, max_size=3)
    ),
    max_leaves=5,
)
ints = st.none() | st.integers(-5, 5)
slices = st.builds(slice, ints, ints, st.none() | st.integers(1, 3))
ats = st.sampled_from([None, "prompt", "last_prompt", "generated"]) | st.integers(-9, 9) | slices
rows = st.lists(st.integers(0, 9), unique=True, max_size=3) | st.lists(st.booleans(), max_size=3)
index = st.integers(-9, 9) | slices | rows | st.just(...)
hooks = st.fixed_dictionaries(
    {},
    optional={
        "at": ats,
        "phase": st.sampled_from(["forward", "forward_pre"]),
        "priority": st.integers(-(2**31), 2**31 - 1),
        "prepend": st.booleans(),
        "on_error": st.sampled_from(["raise", "disable", "ignore"]),
    },
)
captures = st.fixed_dictionaries(
    {},
    optional={
        "at": ats,
        "label": st.text(max_size=3),
        "inputs": st.booleans(),
        "output_index": indices,
        "detach": st.booleans(),
        "device": st.sampled_from(["cpu", torch.device("meta")]),
        "dtype": st.sampled_from([*FLOATS, torch.int64]),
        "slice": index | st.lists(index | st.none(), max_size=3).map(tuple),
        "copy": st.sampled_from(["checked", "clone", "ref"]),
        "calls": st.sampled_from(["last", "all"]) | st.integers(1, 9),
        "max_bytes": st.integers(1, 2**40),
        "stop": st.booleans(),
    },
).map(lambda own: {name: it for name, it in own.items() if name != "at" or "slice" not in own})
entries = st.builds(
    lambda what, hook, own: fh.on(what, hook, **own), selectors, interventions(), hooks
)
entries |= st.builds(lambda what, own: fh.keep(what, **own), selectors, captures)


def test_the_smallest_priority_survives_json() -> None:
    plan = fh.Plan(fh.on("0", fh.Zero(), priority=-sys.maxsize))
    assert fh.Plan.from_json(plan.to_json()) == plan


@settings(deadline=None)
@given(st.lists(entries, max_size=4))
def test_a_plan_survives_json(made: list[Any]) -> None:
    plan = fh.Plan(*made)
    text = plan.to_json()
    for each in (text, text.encode(), json.loads(text)):
        read = fh.Plan.from_json(each, regex=True)
        assert read == plan
        assert hash(read) == hash(plan)
    assert fh.Plan.from_json(text, regex=True).to_json() == text


def test_a_read_plan_acts_as_the_written_one() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    plan = fh.Plan(
        fh.on("0", fh.Add(torch.randn(3), 2)),
        fh.on("1", fh.Ablate(torch.randn(3, dtype=torch.float64))),
        fh.keep("*", dtype=torch.float16, slice=0),
    )
    output, acts = fh.run(model, x, plan=plan)
    again, read = fh.run(model, x, plan=fh.Plan.from_json(plan.to_json()))
    assert torch.equal(output, again)
    assert all(torch.equal(acts[name], read[name]) for name in ("0", "1"))


def test_the_format_of_version_1_is_read() -> None:
    vector = base64.b64encode(torch.tensor([1.0, -2.0]).numpy().tobytes()).decode()
    text = {
        "version": 1,
        "entries": [
            {
                "type": "on",
                "what": ["layers.*", {"regex": "mlp$", "flags": ["IGNORECASE"]}],
                "hook": {
                    "type": "Add",
                    "vector": {"dtype": "float32", "shape": [2], "base64": vector},
                    "scale": 3,
                    "output_index": "sum",
                },
                "at": {"slice": [1, None, None]},
            },
            {"type": "keep", "slice": {"tuple": ["...", 0]}, "dtype": "bfloat16", "calls": "all"},
        ],
    }
    assert fh.Plan.from_json(json.dumps(text), regex=True) == fh.Plan(
        fh.on(
            ["layers.*", re.compile("mlp$", re.IGNORECASE)],
            fh.Add(torch.tensor([1.0, -2.0]), 3, output_index="sum"),
            at=slice(1, None),
        ),
        fh.keep(slice=(..., 0), dtype=torch.bfloat16, calls="all"),
    )


# Python objects in a plan


def steer(_module: object, _args: object, _output: object) -> None: ...


@pytest.mark.parametrize(
    ("entry", "error", "reason"),
    [
        (fh.on("a", steer), fh.HookTypeError, "entries[1].hook: steer is not an intervention"),
        (
            fh.on("a", fh.ForwardHook(lambda _input, output: output)),
            fh.HookTypeError,
            "entries[1].hook: ForwardHook is not an intervention",
        ),
        (
            fh.on("a", fh.detectors.CallCounter()),
            fh.HookTypeError,
            "entries[1].hook: CallCounter is not an intervention",
        ),
        (fh.on(nn.Linear, fh.Zero()), fh.HookTypeError, "entries[1].what: .* not Linear"),
        (fh.keep(["a", lambda *_: True]), fh.HookTypeError, "entries[1].what[1]: .*<lambda>"),
        (fh.keep(re.compile(b"a")), fh.HookTypeError, "entries[1].what: .*re.compile(b'a')"),
        (
            fh.on("a", fh.Zero(), at=lambda positions: positions > 1),
            fh.HookTypeError,
            "entries[1].at: .* not the function .*<lambda>",
        ),
        (fh.keep(slice=torch.tensor([1])), fh.HookTypeError, "entries[1].slice: .* got Tensor"),
        (fh.keep(output_index=(1, 2.5)), fh.HookTypeError, "entries[1].output_index: .* got float"),
        (
            fh.on("a", fh.Add(torch.ones(2, dtype=torch.complex64))),
            fh.HookTypeError,
            "entries[1].hook.vector: .* got complex64",
        ),
        (
            fh.on("a", fh.Add(torch.ones(2, requires_grad=True))),
            fh.HookTypeError,
            "entries[1].hook.vector: .* pass tensor.detach()",
        ),
        (
            fh.on("a", fh.Scale(float("inf"))),
            ValueError,
            "entries[1].hook.factor: JSON cannot hold NaN",
        ),
        (
            fh.on("a", fh.Replace(torch.tensor([1, torch.nan]))),
            ValueError,
            "entries[1].hook.value: JSON cannot hold NaN",
        ),
    ],
)
def test_what_json_cannot_say_is_refused_by_entry(
    entry: Any, error: type[Exception], reason: str
) -> None:
    pattern = re.escape(reason).replace(r"\.\*", ".*")
    with pytest.raises(error, match=pattern):
        fh.Plan(fh.keep(), entry).to_json()


# Hostile text

ZERO = {"type": "on", "what": "a", "hook": {"type": "Zero"}}
VECTOR = {"dtype": "float32", "shape": [1], "base64": "AAAAAA=="}
ADD = {"type": "Add", "vector": VECTOR}


def vector(**fields: Any) -> dict[str, Any]:
    return {**ZERO, "hook": {**ADD, "vector": {**VECTOR, **fields}}}


HOSTILE = [
    (3, "entries[1]: expected an object whose type is one of on, keep, gate, stop, got 3"),
    ({}, "entries[1]: expected an object whose type is one of on, keep, gate, stop, got None"),
    ({"type": "run", "what": "a"}, "entries[1]: .*, got 'run'"),
    ({"type": ["on"]}, "entries[1]: .*, got list"),
    ({"type": "on", "what": "a"}, "entries[1]: the key 'hook' is missing"),
    ({**ZERO, "code": "1"}, "entries[1]: unknown key 'code'"),
    ({**ZERO, "x" * 999: "1"}, "entries[1]: unknown key 'xxx"),
    ({**ZERO, "what": 3}, "entries[1].what: expected a path, a glob, a regex .*, got 3"),
    ({**ZERO, "what": {"class": "Linear"}}, "entries[1].what: .*, got an object"),
    ({**ZERO, "what": ["a", None]}, "entries[1].what[1]: .*, got None"),
    ({**ZERO, "what": "x" * 2000}, "entries[1].what: expected a string of at most 1024"),
    ({**ZERO, "what": ["a"] * 5000}, "max_selectors=4,096"),
    ({**ZERO, "what": {"regex": "a"}}, "entries[1].what: a regex may run forever"),
    ({**ZERO, "at": "first"}, "entries[1]: at must be one of"),
    ({**ZERO, "at": {"slice": [1, 2]}}, "entries[1].at: expected .*[start, stop, step]"),
    ({**ZERO, "at": {"slice": [1, 2, 0]}}, "entries[1]: the step of a slice"),
    ({**ZERO, "at": {"slice": [True, 2, 1]}}, "entries[1].at: "),
    ({**ZERO, "at": [1]}, "entries[1].at: .*, got list"),
    ({**ZERO, "at": 10**30}, "entries[1].at: .*64-bit"),
    ({**ZERO, "priority": "high"}, "entries[1]: "),
    ({**ZERO, "priority": 2**63}, "entries[1].priority: .*64-bit"),
    ({**ZERO, "phase": "backward", "at": 1}, "entries[1]: "),
    ({**ZERO, "on_error": "run"}, "entries[1]: "),
    ({**ZERO, "hook": "Zero"}, "entries[1].hook: .* type is one of Add, Scale,"),
    ({**ZERO, "hook": {"type": "__class__"}}, "entries[1].hook: .*, got '__class__'"),
    ({**ZERO, "hook": {"type": "Add"}}, "entries[1].hook: .*'vector'"),
    ({**ZERO, "hook": {"type": "Zero", "vector": 1}}, "entries[1].hook: unknown key 'vector'"),
    (
        {**ZERO, "hook": {"type": "Scale", "factor": "2"}},
        "entries[1].hook: factor of Scale must be a",
    ),
    (
        {**ZERO, "hook": {"type": "Scale", "factor": None}},
        "entries[1].hook: factor of Scale must be a",
    ),
    ({**ZERO, "hook": {**ADD, "scale": {}}}, "entries[1].hook.scale: .*, got an object"),
    (
        {**ZERO, "hook": {**ADD, "output_index": [[0]]}},
        "entries[1].hook.output_index: .*, got list",
    ),
    ({**ZERO, "hook": {**ADD, "output_index": []}}, "entries[1].hook.output_index: .*, got list"),
    ({"type": "keep", "output_index": [0, True]}, "entries[1].output_index: .*, got list"),
    ({"type": "keep", "output_index": [0] * 65}, "entries[1].output_index: .*, got list"),
    ({**ZERO, "hook": {**ADD, "vector": [1.0]}}, "entries[1].hook.vector: expected an object"),
    (
        {**ZERO, "hook": {"type": "Ablate", "direction": VECTOR}},
        "entries[1].hook: direction of Ablate must have a length from 1e-18 to 1e+18, got 0",
    ),
    (
        vector(dtype="int64"),
        "entries[1].hook.vector: the dtype .* one of bfloat16, .*, got 'int64'",
    ),
    (vector(dtype="load"), "entries[1].hook.vector: the dtype .* one of bfloat16, .*, got 'load'"),
    (vector(shape=[2]), "entries[1].hook.vector: a tensor of shape [2] .* needs 8 bytes, .* has 4"),
    (vector(shape=[-1]), "entries[1].hook.vector.shape: expected a list of at most 8 ints"),
    (vector(shape=[1] * 9), "entries[1].hook.vector.shape: "),
    (vector(shape=[True]), "entries[1].hook.vector.shape: "),
    (vector(shape=[1.0]), "entries[1].hook.vector.shape: "),
    (vector(shape=[2**62, 2**62]), "entries[1].hook.vector: the plan's tensors exceed max_bytes="),
    (vector(shape=[0, 2**62, 2**62], base64=""), "entries[1].hook.vector: "),
    (vector(base64="AAAA AAA="), "entries[1].hook.vector: "),
    (vector(base64="é"), "entries[1].hook.vector: "),
    (vector(base64=1), "entries[1].hook.vector: base64 must be a string, got 1"),
    (vector(base64="AADAfw=="), "entries[1].hook.vector: the tensor contains NaN"),
    (vector(base64="AACAfw=="), "entries[1].hook.vector: the tensor contains NaN or infinity"),
    (vector(pickle="x"), "entries[1].hook.vector: unknown key 'pickle'"),
    (vector(tensor="x"), "entries[1].hook.vector: unknown key 'base64'"),
    (
        {**ZERO, "hook": {**ADD, "vector": {"tensor": "../x"}}},
        "entries[1].hook.vector: no tensor named '../x'",
    ),
    ({"type": "keep", "hook": {}}, "entries[1]: unknown key 'hook'"),
    ({"type": "keep", "dtype": "load"}, "entries[1].dtype: expected the name of a dtype"),
    ({"type": "keep", "device": "moon"}, "entries[1]: "),
    ({"type": "keep", "device": "cuda:99"}, "entries[1]: "),
    ({"type": "keep", "slice": "1"}, "entries[1].slice: expected ints"),
    ({"type": "keep", "slice": [0, 0]}, "entries[1].slice: a list of indices must not"),
    ({"type": "keep", "slice": [[0], [0]]}, "entries[1].slice: .* must not contain one twice"),
    ({"type": "keep", "slice": {"tuple": 3}}, "entries[1].slice: "),
    ({"type": "keep", "max_bytes": 0}, "entries[1]: max_bytes must be at least 1"),
    ({"type": "keep", "copy": "deep"}, "entries[1]: copy must be 'checked', 'clone' or 'ref'"),
    ({"type": "keep", "calls": {}}, "entries[1].calls: "),
]


def nested(value: Any, depth: int) -> Any:
    return value if not depth else [nested(value, depth - 1)]


def plan_of(*entries: Any) -> str:
    return json.dumps({"version": 1, "entries": entries})


@pytest.mark.parametrize(("entry", "reason"), HOSTILE, ids=lambda it: str(it)[:50])
def test_a_hostile_entry_is_refused_by_name(entry: Any, reason: str) -> None:
    pattern = re.escape(reason).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=pattern) as seen:
        fh.Plan.from_json(plan_of(ZERO, entry))
    assert len(str(seen.value)) < 2000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the plan is not valid JSON"),
        ("{", "the plan is not valid JSON"),
        (b"\xff", "the plan is not valid JSON"),
        ("[]", "the plan: expected an object, got list"),
        ("{}", "the plan: the key 'entries' is missing"),
        (
            '{"version": 2, "entries": []}',
            "version: this ferrohook reads plans of version 1, got 2",
        ),
        ('{"version": true, "entries": []}', "version: .*, got True"),
        (
            '{"version": 1, "entries": {}}',
            "entries: expected a list of at most max_entries=256, got an object",
        ),
        (
            '{"version": 1, "entries": [], "entries": []}',
            "the plan: the key 'entries' appears twice",
        ),
        (
            '{"version": 1, "entries": [{"type": "keep", "at": 1, "at": 2}]}',
            "entries[0]: the key 'at' appears twice",
        ),
        (
            '{"version": 1, "entries": [{"type": "keep", "slice": {"slice": [], "slice": []}}]}',
            "entries[0].slice: the key 'slice' appears twice",
        ),
        *(
            (
                fh.Plan(fh.on("a", fh.Scale(7))).to_json().replace("7.0", number),
                "entries[0].hook.factor: .* finite 64-bit number",
            )
            for number in ("NaN", "Infinity", "-Infinity", "1e999", "1" * 9999)
        ),
        (f'{{"version": 1, "entries": {"[" * 100_000}', "the plan is n"),
        (plan_of({"type": "keep", "what": nested("a", 20)}), "nested more than 8 deep"),
        (plan_of({"type": "keep", "slice": nested(1, 20)}), "nested more than 8 deep"),
        (plan_of(*[ZERO] * 257), "entries: expected a list of at most max_entries=256, got 257"),
        (" " * (2**24 + 1), "characters, more than max_text=16,777,216"),
    ],
    ids=lambda it: str(it)[:50],
)
def test_hostile_text_is_refused(text: str | bytes, reason: str) -> None:
    pattern = re.escape(reason).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=pattern):
        fh.Plan.from_json(text)


def test_limits_are_arguments() -> None:
    plan = fh.Plan(
        fh.on(["a", "b"], fh.Add(torch.ones(4))), fh.on("c", fh.Add(torch.ones(4))), fh.keep("a")
    )
    text = plan.to_json()
    fits: dict[str, int] = {
        "max_text": len(text),
        "max_entries": 3,
        "max_selectors": 5,  # the list too
        "max_bytes": 32,
    }
    assert fh.Plan.from_json(text, **fits) == plan
    for name, limit in fits.items():
        with pytest.raises(ValueError, match=name):
            fh.Plan.from_json(text, **{**fits, name: limit - 1})


def test_a_regex_needs_leave_and_is_short() -> None:
    for pattern, reason in (("(", "missing"), ("a" * 300, "at most 256 characters")):
        text = plan_of({"type": "keep", "what": {"regex": pattern}})
        with pytest.raises(ValueError, match=rf"entries\[0\]\.what.*{reason}"):
            fh.Plan.from_json(text, regex=True)
    text = plan_of({"type": "keep", "what": {"regex": "a", "flags": ["DEBUG"]}})
    with pytest.raises(ValueError, match=r"entries\[0\]\.what\.flags: expected a list of"):
        fh.Plan.from_json(text, regex=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.data())
def test_a_changed_text_is_a_plan_or_a_value_error(data: st.DataObject) -> None:
    text = json.loads(fh.Plan(data.draw(entries)).to_json())
    place: Any = text
    while isinstance(place, dict | list) and place:
        key = data.draw(st.sampled_from([*place] if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not (isinstance(inner, dict | list) and inner) or data.draw(st.booleans()):
            place[key] = data.draw(json_values)
            break
        place = inner
    with contextlib.suppress(ValueError):
        fh.Plan.from_json(json.dumps(text), regex=True)


# Named tensors


def named(*names: str) -> str:
    hooks = [{**ZERO, "hook": {**ADD, "vector": {"tensor": name}}} for name in names]
    return plan_of(*hooks)


def test_tensors_are_found_by_name(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    given = {"a": torch.randn(3), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.arange(3)}
    file = tmp_path / "vectors.safetensors"
    safetensors.save_file(given, file)
    expected = fh.Plan(fh.on("a", fh.Add(given["a"])), fh.on("a", fh.Add(given["b"])))
    for tensors in (given, file, str(file)):
        assert fh.Plan.from_json(named("a", "b"), tensors) == expected
        with pytest.raises(ValueError, match=r"entries\[1\]\.hook\.vector: no tensor named 'd'"):
            fh.Plan.from_json(named("a", "d"), tensors)
        with pytest.raises(ValueError, match=r"entries\[0\]\.hook\.vector: the dtype of a tensor"):
            fh.Plan.from_json(named("c"), tensors)
        with pytest.raises(ValueError, match=r"entries\[2\]\.hook\.vector: .*max_bytes=24"):
            fh.Plan.from_json(named("a", "a", "a"), tensors, max_bytes=24)
    with pytest.raises(FileNotFoundError):
        fh.Plan.from_json(named("a"), tmp_path / "no.safetensors")
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(ValueError, match="junk is not a safetensors file"):
        fh.Plan.from_json(named("a"), tmp_path / "junk")


def test_a_named_tensor_is_not_trained_and_not_shared() -> None:
    weight = torch.ones(2, requires_grad=True)
    plan = fh.Plan.from_json(named("w"), {"w": weight})
    vector = plan.entries[0].hook.vector
    assert not vector.requires_grad
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(vector, torch.ones(2))
    with pytest.raises(fh.HookTypeError, match=r"tensors\['w'\] must be a tensor, got list"):
        fh.Plan.from_json(named("w"), {"w": [1.0]})  # type: ignore[dict-item]
    with pytest.raises(fh.HookTypeError, match="from_json needs a str, bytes or the dict"):
        fh.Plan.from_json(3)  # type: ignore[arg-type]
