"""Plans on their way into an engine: salts that no client can make, and limits."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import pytest
import torch

import ferrohook as fh
from ferrohook.engines.admission import Admission, check_salt, text_of
from ferrohook.engines.model.modules import ModuleInfo, ModuleTable
from ferrohook.engines.options import EngineOptions

WIDTH = 4
TABLE = ModuleTable({name: ModuleInfo("tensor", WIDTH, 4 * WIDTH) for name in ("", "0")}, {})
CHANGE = fh.Plan(fh.on("0", fh.Scale(2.0)))
BEFORE_END = fh.Plan(fh.on("0", fh.Scale(2.0), at=-2))


def admission(secret: bytes = b"secret") -> Admission:
    return Admission(TABLE, EngineOptions(), secret)


def salt(
    plan: fh.Plan, prompt: int = 8, of_client: Any = None, secret: bytes = b"secret"
) -> str | None:
    judge = admission(secret)
    return judge.salt(judge.read(plan.to_json(), {}, {}), prompt, of_client)


def test_a_salt_is_one_of_this_process() -> None:
    """A client that knows the plan, the code and its own salt cannot make it."""
    made = salt(CHANGE, secret=b"one")
    assert made != salt(CHANGE, secret=b"other")
    read = admission().read(CHANGE.to_json(), {}, {})
    for content in (
        read.digest,
        json.dumps([None, read.digest, None]),
        json.dumps([None, read.digest, 8]),
    ):
        for size in (16, 32, 64):
            public = hashlib.blake2b(content.encode(), digest_size=size).hexdigest()
            assert public not in str(made)
    with pytest.raises(ValueError, match="is made by ferrohook alone"):
        check_salt(made)


def test_salts_differ_where_anything_does() -> None:
    """Of a client, that could be taken for another's together with a plan or a length."""
    plans = [CHANGE, BEFORE_END, fh.Plan(fh.on("0", fh.Scale(3.0)))]
    read = admission().read(CHANGE.to_json(), {}, {})
    clients: list[Any] = [
        None,
        "",
        "None",
        "null",
        "8",
        8,
        f'", "{read.digest}", null]',
        read.digest,
        ["a", "b"],
        ["a, b"],
        "\ud800",
        "\x00",
    ]
    found = [salt(plan, 8, client) for plan, client in itertools.product(plans, clients)]
    assert len({*found}) == len(plans) * len(clients)
    assert salt(CHANGE, 8) == salt(CHANGE, 9), "its positions do not depend on the prompt"
    assert salt(BEFORE_END, 8) != salt(BEFORE_END, 9)


def test_what_changes_nothing_shares_the_cache() -> None:
    assert salt(fh.Plan(fh.keep("0"))) is None


def test_vectors_of_one_name_have_salts_of_their_content() -> None:
    judge = admission()
    found = set()
    for number in (1.0, 2.0):
        vectors = {"v": torch.full((WIDTH,), number)}
        plan = '{"version": 1, "entries": []}'
        used = {
            name: hashlib.sha256(it.numpy().tobytes()).hexdigest() for name, it in vectors.items()
        }
        read = judge.read(plan, vectors, used)
        found.add(read.digest)
    assert len(found) == 2


def test_objects_are_measured_as_the_text_that_they_are() -> None:
    content = {"entries": ["x" * 1000]}
    assert text_of(content) == json.dumps(content)
    assert text_of("{ }") == "{ }"


def nested() -> list[Any]:
    whole: list[Any] = []
    for _ in range(100_000):
        whole = [whole]
    return whole


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object(), b"{}", nested()], ids=type)
def test_what_is_no_json_is_the_clients_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"the JSON of Plan\.to_json|an object is expected"):
        admission().read(value, {}, {})
