"""Plans on their way into an engine: salts that no client can make, and limits."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import pytest
import torch

import ferrohook as fh
from ferrohook.engines import uploads
from ferrohook.engines.admission import Admission, check_salt, text_of
from ferrohook.engines.model.modules import ModuleInfo, ModuleTable
from ferrohook.engines.options import EngineOptions
from ferrohook.engines.uploads import Uploads, UploadsOfPlan

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
    return judge.salt(judge.read(plan.to_json(), UploadsOfPlan.travelled({})), prompt, of_client)


def test_a_salt_is_one_of_this_process() -> None:
    """A client that knows the plan, the code and its own salt cannot make it."""
    made = salt(CHANGE, secret=b"one")
    assert made != salt(CHANGE, secret=b"other")
    read = admission().read(CHANGE.to_json(), UploadsOfPlan.travelled({}))
    for content in (
        read.digest,
        json.dumps([None, read.digest, None]),
        json.dumps([None, read.digest, 8]),
    ):
        for size in (16, 32, 64):
            public = hashlib.blake2b(content.encode(), digest_size=size).hexdigest()
            assert public not in str(made)
    with pytest.raises(ValueError, match="is reserved for ferrohook"):
        check_salt(made)


def test_salts_differ_where_anything_does() -> None:
    """A client's salt, with a plan or a length, must not equal another client's."""
    plans = [CHANGE, BEFORE_END, fh.Plan(fh.on("0", fh.Scale(3.0)))]
    read = admission().read(CHANGE.to_json(), UploadsOfPlan.travelled({}))
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
        named = UploadsOfPlan.travelled({"v": torch.full((WIDTH,), number)})
        add = {"type": "Add", "vector": {"tensor": "v"}}
        plan = {"version": 1, "entries": [{"type": "on", "what": "0", "hook": add}]}
        found.add(judge.read(plan, named).digest)
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
    with pytest.raises(ValueError, match=r"the JSON of Plan\.to_json|expected an object"):
        admission().read(value, UploadsOfPlan.travelled({}))


def test_bounds_come_before_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest of each of 200,000 names takes seconds."""
    digested: list[Any] = []
    whole = uploads.digest_of

    def counted(vector: Any) -> str:
        digested.append(vector)
        return whole(vector)

    monkeypatch.setattr(uploads, "digest_of", counted)
    vector = torch.ones(WIDTH)
    many = {str(number): vector for number in range(10_001)}
    with pytest.raises(ValueError, match="at most 10,000 vectors and dictionaries can be uploaded"):
        Uploads(2**30).packed(many)
    with pytest.raises(ValueError, match="more than vectors_bytes=99"):
        Uploads(99).packed({str(number): vector for number in range(10)})
    assert digested == []
    add = {"type": "Add", "vector": {"tensor": "7"}}
    plan = {"version": 1, "entries": [{"type": "on", "what": "0", "hook": add}] * 3}
    read = admission().read(plan, UploadsOfPlan.travelled(many))
    assert len(digested) == 1
    assert read.used.keys() == {"7"}
