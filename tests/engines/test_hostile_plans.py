"""Plans with parts exchanged, at the doors of services and engines: a plan, or a ValueError."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")
pytest.importorskip("fastapi", reason="plan_of is in the group service")

import ferrohook as fh
from ferrohook.engines.admission import Admission
from ferrohook.engines.model.modules import ModuleInfo, ModuleTable
from ferrohook.engines.options import EngineOptions
from ferrohook.engines.uploads import UploadsOfPlan
from ferrohook.service import plan_of
from support.dictionaries import dictionary_of
from support.made_engine import Worker

WIDTH = dictionary_of("relu").d_in
TIMES = {"": (1, 6), "0": (2, 3), "1": (4, 5)}
TABLE = ModuleTable(
    {
        name: ModuleInfo("tensor", WIDTH, 4 * WIDTH, start=start, end=end)
        for name, (start, end) in TIMES.items()
    },
    {},
)
SAE = dictionary_of("relu", name="sae")
CODER = dictionary_of("relu", name="coder", transcoder=True, reads="0", writes="1")
KNOWN = {"sae": SAE, "coder": CODER}
VECTOR = torch.linspace(-1, 1, WIDTH)


def whole() -> list[Any]:
    """The JSON of plans with all kinds of entries, readings, conditions and positions."""
    cosine, probe = fh.Cosine(VECTOR), fh.Probe(VECTOR, 0.5)
    plans = [
        fh.Plan(
            fh.gate("a", "0", fh.Dot(VECTOR), at=slice(1, -1), over=fh.window(3), by="mean"),
            fh.gate("b", ["0", "1"], cosine, over="so_far", by="max", lag=1),
            fh.on("1", fh.Add(VECTOR), when=fh.above("a", 0.5) & ~fh.between("b", 0, 1)),
            fh.on("1", fh.Scale(0.5), strength=fh.ramp("a", 0.0, 2.0), at="generated"),
            fh.keep("@gate.a"),
            fh.stop(when=fh.below("b", -1.0) | fh.above("a", 9.0)),
        ),
        fh.Plan(
            fh.gate("c", "0", probe, over=fh.ema(0.5)),
            fh.gate("d", SAE.reads or "0", fh.FeatureActivation(SAE, 3), over="prompt"),
            fh.on("0", fh.Feature(SAE, 3, set=5.0), strength=0.5, when=fh.above("d", 1.0)),
            fh.on("0", fh.Clamp(VECTOR, -1.0, 1.0), at=-2),
            fh.keep("0", features=SAE, top=4, label="x"),
            fh.keep(["0", "1"], at="last_prompt", dtype=torch.float16, max_bytes=10**6),
        ),
        fh.Plan(
            fh.gate("e", "0", fh.FeatureActivation(CODER, 3)),
            fh.on("1", fh.Feature(CODER, [3, 5], scale=2.0, output_index=None), at="generated"),
            fh.on("1", fh.Feature(CODER, 7, add=1.0), strength=0.5, when=fh.above("e", 0.0)),
            fh.on("0", fh.Feature(CODER, 7, set=1.0), strength=fh.ramp("e", 0.0, 1.0)),
        ),
        fh.Plan(
            fh.on("@experts.0", fh.Route(torch.tensor([1, 0]), torch.tensor([0.5, 0.5]))),
            fh.on("0", fh.Replace(VECTOR, output_index=0), at=3),
            fh.on("1", fh.Ablate(VECTOR), priority=3),
            fh.keep("@resid_post.0"),
        ),
    ]
    return [json.loads(plan.to_json()) for plan in plans]


def nested(rng: random.Random, inner: Any) -> Any:
    for _ in range(rng.choice([3, 300])):
        inner = [inner] if rng.random() < 0.5 else {"when": inner, "type": "not"}
    return inner


def junk(rng: random.Random, parts: list[Any]) -> Any:
    """A value that does not belong there, or a part of a plan that belongs elsewhere."""
    return rng.choice(
        [
            lambda: rng.choice([None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**400]),
            lambda: rng.choice([1e308, -1e308, 5e-324, float("nan"), float("inf"), 0.5]),
            lambda: rng.choice(
                ["", "a", "@gate.a", "@gate.", "0", "sae", "coder", "\x00", "\ud800"]
            ),
            lambda: rng.choice(["x" * 10_000, "**", "float16", "prompt", "on", "__class__"]),
            lambda: rng.choice([[], {}, [[]], [None], {"": None}, {"type": None}, {"tensor": "v"}]),
            lambda: copy.deepcopy(rng.choice(parts)),
            lambda: nested(rng, copy.deepcopy(rng.choice(parts))),
        ]
    )()


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Places in a plan: containers, and keys in them."""
    found, waiting = [], [value]
    while waiting:
        each = waiting.pop()
        keys = [*each] if isinstance(each, dict) else range(len(each))
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys if isinstance(each[key], dict | list)]
    return found


def spoilt(rng: random.Random, bodies: list[Any]) -> Any:
    """A plan of which one to three parts are exchanged, missing, repeated or renamed."""
    body = copy.deepcopy(rng.choice(bodies))
    values = [each[key] for it in bodies for each, key in parts_of(it)]
    for _ in range(rng.choice([1, 1, 2, 3])):
        if not (places := parts_of(body)):
            break
        each, key = rng.choice(places)
        match rng.choice(["exchange", "exchange", "swap", "drop", "repeat"]):
            case "drop":
                del each[key]
            case "repeat" if isinstance(each, list):
                each.insert(rng.randrange(len(each) + 1), copy.deepcopy(each[key]))
            case "repeat":
                each[rng.choice(["what", "when", "hook", "vector", "kind", "x"])] = each.pop(key)
            case "swap":
                other, place = rng.choice(places)
                each[key] = copy.deepcopy(other[place])
            case _:
                each[key] = junk(rng, values)
    return body


def test_spoilt_plans_are_refused_as_values(request: pytest.FixtureRequest) -> None:
    rng = random.Random(48)  # noqa: S311 (tests)
    bodies = whole()
    judge = Admission(TABLE, EngineOptions(), b"secret")
    worker = Worker(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    services: list[str] = []
    engines: list[str] = []
    whole_number = request.config.getoption("requests") or 3000
    for body in bodies:
        plan_of(body, dictionaries=KNOWN)
    for number in range(whole_number):
        body = spoilt(rng, bodies)
        try:
            plan_of(json.dumps(body) if number % 2 else body, dictionaries=KNOWN)
        except ValueError as error:
            services.append(str(error))
        try:
            found = {name: (each, name) for name, each in KNOWN.items()}
            read = judge.read(body, UploadsOfPlan.travelled({"v": VECTOR}, found))
            judge.check_captures(read.plan, 4, 8)
            judge.salt(read, 4, None)
        except ValueError as error:
            engines.append(str(error))
            continue
        worker.plans.serve(read.plan)  # where the model runs: nothing is left to refuse
    assert all((*services, *engines))
    assert 0 < whole_number - len(engines) < whole_number / 2
