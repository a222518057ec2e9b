"""Dictionaries on their way to an engine: what arrives is what was sent, or refused at the door."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("safetensors")

import safetensors.torch

import ferrohook as fh
from ferrohook.dictionaries.formulas import Rounding
from ferrohook.dictionaries.packing import settings_of, weights_of
from ferrohook.engines.admission import Admission
from ferrohook.engines.model.modules import NEVER_RAN, ModuleInfo, ModuleTable
from ferrohook.engines.options import EngineOptions
from ferrohook.engines.uploads import Uploads, UploadsOfPlan
from ferrohook.engines.wire import bytes_of, digest_of, packed_uploads, unpacked_uploads
from ferrohook.plans.entries import HookEntry
from support.dictionaries import D_IN, D_SAE, KINDS, dictionary_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
    from torch import Tensor

SAE = dictionary_of("relu", name="sae")
ROOM = 2**20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_arrives_is_what_was_sent(kind: str, dtype: torch.dtype) -> None:
    weights = {name: it.to(dtype) for name, it in weights_of(dictionary_of(kind)).items()}
    weights["W_enc"] = weights["W_enc"].T.contiguous().T
    made = fh.Dictionary(
        **weights,
        activation=kind.partition(" ")[0],
        **KINDS[kind],
        name="sae",
        reads="@resid_post.1",
        normalize_activations="layer_norm",
        max_activations=torch.rand(D_SAE),
        rounding=Rounding(linear_encoder=True),
    )
    data = packed_uploads({"sae": made, "v": torch.ones(3)})
    found = unpacked_uploads(data)
    sae = found["sae"]
    assert isinstance(sae, fh.Dictionary)
    assert sae == made
    assert digest_of(sae) == digest_of(made)
    assert sae.formula == made.formula
    assert torch.equal(torch.ones(3), found["v"])  # type: ignore[arg-type]
    x = torch.randn(5, D_IN)
    assert torch.equal(sae.encode(x), made.encode(x))


def test_a_transcoder_arrives() -> None:
    made = dictionary_of(
        "topk", transcoder=True, W_skip=torch.rand(D_IN, D_IN), reads="a", writes="b", name="t"
    )
    (found,) = unpacked_uploads(packed_uploads({"t": made})).values()
    assert found == made
    assert {digest_of(found), digest_of(made)} == {digest_of(found)}


def test_digests_differ_where_anything_does() -> None:
    weights = weights_of(SAE)
    other: Any = {**weights, "b_dec": weights["b_dec"] + 1e-6}
    made = [
        SAE,
        fh.Dictionary(**other, name="sae"),
        fh.Dictionary(**weights, name="other"),
        fh.Dictionary(**weights, name="sae", apply_b_dec_to_input=True),
        fh.Dictionary(**weights, name="sae", max_activations=torch.ones(D_SAE)),
        fh.Dictionary(**weights, name="sae", normalize_activations="layer_norm"),
        fh.Dictionary(**{name: it.double() for name, it in weights.items()}, name="sae"),
    ]
    assert len({*map(digest_of, made)}) == len(made)


def body(
    settings: Any = None, weights: dict[str, Tensor] | None = None, name: str = "sae"
) -> bytes:
    """An upload of `SAE` with some settings and weights replaced; None leaves one out."""
    if not isinstance(settings, str):
        changed = settings_of(SAE) | (settings or {})
        settings = json.dumps({name: {key: it for key, it in changed.items() if it != "left out"}})
    tensors = {**weights_of(SAE), **(weights or {})}
    found = {f"{name}/{key}": it.clone() for key, it in tensors.items() if it is not None}
    return safetensors.torch.save(found, {"dictionaries": settings})


LARGE = torch.zeros(D_IN, D_SAE)
HOSTILE: list[tuple[bytes, str]] = [
    (b"", "not valid safetensors"),
    (b"\x80\x04cos\nsystem\n", "not valid safetensors"),  # a pickle
    (b"\xff" * 64, "not valid safetensors"),
    (body("{"), "are not JSON"),
    (body("[" * 100_000), "are not JSON"),
    (body("5"), "must be an object"),
    (body('{"sae": 5}'), "its settings must be an object"),
    (body('{"sae": null}'), "its settings must be an object"),
    (body({"activation": "exec"}), "activation must be one of relu, jumprelu"),
    (body({"activation": ["relu"]}), "its activation must be a string"),
    (body({"activation": "left out"}), "the setting 'activation' is missing"),
    (body({"activation": "jumprelu"}), "jumprelu needs threshold"),
    (body({"activation": "topk"}), "topk needs k"),
    (body({"activation": "topk", "k": 10**30}), "k must be at most"),
    (body({"activation": "topk", "k": 1.5}), "k must be an int"),
    (body({"activation": "topk", "k": float("nan")}), "k must be an int"),
    (body({"path": "/etc/passwd"}), "unknown setting 'path'"),
    (body({"name": 5}), "its name must be a string"),
    (body({"name": "another"}), "'sae' have another name, 'another'"),
    (body({"reads": "\ud800"}), "reads"),
    (body({"reads": {}}), "reads of Dictionary must be a str"),
    (body({"transcoder": 1}), "transcoder of Dictionary must be a bool"),
    (body({"rounding": ["__class__"]}), "its rounding must have names of"),
    (body({"rounding": {"linear_encoder": True}}), "its rounding must be a list"),
    (body({"normalize_activations": []}), "normalize_activations must be one of"),
    (body(weights={"W_dec": None}), "the tensor 'W_dec' is missing"),  # type: ignore[dict-item]
    (body(weights={"b_enc": None}), "relu needs b_enc"),  # type: ignore[dict-item]
    (body(weights={"norms": LARGE}), "unknown tensor 'norms'"),
    (body(weights={"threshold": torch.ones(D_SAE)}), "relu has no threshold"),
    (body(weights={"W_enc": torch.zeros(D_IN, D_SAE - 1)}), "W_dec must have the shape"),
    (body(weights={"W_enc": LARGE[0]}), "W_enc must be a matrix"),
    (body(weights={"W_enc": LARGE[:0]}), "W_enc must be a matrix"),
    (body(weights={"W_enc": LARGE.to(torch.int32)}), "one dtype of float32"),
    (body(weights={"b_enc": torch.full((D_SAE,), torch.nan)}), "b_enc must not have NaN"),
    (body(weights={"b_dec": torch.full((D_IN,), torch.inf)}), "b_dec must not have NaN or inf"),
    (body(weights={"max_activations": torch.ones(2)}), "max_activations must be of floating"),
    (safetensors.torch.save({"v": torch.ones(3)}), "has 'v', which is not a dictionary"),
]


def put(uploads: Uploads, content: bytes, kind: str = "dictionaries") -> httpx.Response:
    """Uploads to routes whose engine has nothing else."""
    return call(uploads, "PUT", kind, content)


def call(uploads: Uploads, method: str, path: str, content: bytes = b"") -> httpx.Response:
    """Calls one of the routes of uploads."""
    fastapi = pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx")
    from support.upload_routes import Routes  # noqa: PLC0415 (needs fastapi)

    app = fastapi.FastAPI()
    app.include_router(Routes(uploads).router())

    async def run() -> Any:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, f"/v1/ferrohook/{path}", content=content)

    found: httpx.Response = asyncio.run(run())
    return found


@pytest.mark.parametrize(("content", "reason"), HOSTILE)
def test_a_malformed_dictionary_is_refused_at_the_door(content: bytes, reason: str) -> None:
    uploads = Uploads(ROOM)
    answer = put(uploads, content)
    assert answer.status_code == 422
    assert reason in answer.json()["detail"]
    assert not uploads


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (packed_uploads({"x" * 201: dictionary_of("relu", name="x" * 201)}), 413, "201|longer"),
        (packed_uploads({"v": dictionary_of("relu", name="v")}), 409, "a vector has the name 'v'"),
        (bytes(2**18), 413, "must not exceed"),
    ],
)
def test_uploads_beyond_the_limits_are_refused(content: bytes, status: int, reason: str) -> None:
    uploads = Uploads(bytes_of(SAE) + 100)
    assert put(uploads, safetensors.torch.save({"v": torch.ones(3)}), "vectors").is_success
    answer = put(uploads, content)
    assert answer.status_code == status
    assert any(each in answer.json()["detail"] for each in reason.split("|"))
    assert [*uploads] == ["v"]
    assert put(uploads, body()).json()["sae"]["digest"] == digest_of(SAE)
    larger = dictionary_of("relu", name="more")
    assert "more than vectors_bytes=" in put(uploads, packed_uploads({"more": larger})).text


def test_an_upload_is_dropped_at_the_route_of_its_kind() -> None:
    uploads = uploaded(SAE)
    assert put(uploads, packed_uploads({"v": torch.ones(3)}), "vectors").is_success
    for path in ("dictionaries/v", "vectors/sae"):
        assert call(uploads, "DELETE", path).status_code == 404
    assert [*uploads] == ["sae", "v"]
    for path in ("dictionaries/sae", "vectors/v"):
        assert call(uploads, "DELETE", path).is_success
    assert not uploads


@pytest.mark.parametrize("name", [".", "..", "a/../b", "a\nb", "a\0"])
def test_names_whose_routes_cannot_be_called_are_refused(name: str) -> None:
    uploads = Uploads(ROOM)
    answer = put(uploads, packed_uploads({name: torch.ones(3)}), "vectors")
    assert answer.status_code == 422
    assert "cannot stand in a URL" in answer.json()["detail"]
    assert not uploads


TABLE = ModuleTable({name: ModuleInfo("tensor", D_IN, 4 * D_IN) for name in ("", "0")}, {})
PLAN = fh.Plan(fh.on("0", fh.Feature(SAE, [1, 2], set=3.0)), fh.keep("0", features=SAE, top=2))


def reader() -> Callable[[Uploads, fh.Plan], Any]:
    judge = Admission(TABLE, EngineOptions(), b"secret")

    def read(uploads: Uploads, plan: fh.Plan = PLAN) -> Any:
        found = judge.read(plan.to_json(), UploadsOfPlan(uploads.find))
        return found, judge.salt(found, 8, None)

    return read


def uploaded(*dictionaries: fh.Dictionary) -> Uploads:
    uploads = Uploads(ROOM)
    named = {str(each.name): each for each in dictionaries}
    uploads.put(named, {name: digest_of(each) for name, each in named.items()})
    return uploads


def test_requests_share_a_dictionary_and_its_salt() -> None:
    uploads, read = uploaded(SAE), reader()
    (first, salt), (second, again) = read(uploads, PLAN), read(uploads, PLAN)
    hooks = [each.plan.entries[0].hook for each in (first, second)]
    assert hooks[0].dictionary is hooks[1].dictionary is first.plan.entries[1].options["features"]
    assert salt == again is not None
    assert first.digest == second.digest
    other = dictionary_of("relu", seed=1, name="sae")
    assert put(uploads, packed_uploads({"sae": other})).is_success
    third, another = read(uploads, PLAN)
    assert another != salt
    assert third.digest != first.digest
    assert third.used == {"sae": digest_of(other)}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (fh.keep("0", features=dictionary_of("relu", width=8, name="sae"), top=1), "width of 8|8"),
        (fh.on("0", fh.Feature(dictionary_of("relu", width=8, name="sae"), 0, set=1.0)), "width"),
        (fh.gate("g", "0", fh.FeatureActivation(dictionary_of("relu", 0, 8, name="sae"), 0)), "8"),
        (fh.keep("0", features=dictionary_of("relu", name="gone"), top=1), "no dictionary 'gone'"),
        (fh.keep("0", features=SAE, top=1, inputs=True), "inputs=True"),
    ],
)
def test_entries_that_do_not_fit_are_refused(entry: Any, reason: str) -> None:
    narrow = dictionary_of("relu", width=8, name="sae")
    uploads = uploaded(SAE if entry.options.get("inputs") else narrow)
    with pytest.raises(ValueError, match=reason):
        reader()(uploads, fh.Plan(entry))


LAYERS = ModuleTable(
    {
        "": ModuleInfo("tensor", D_IN, 4 * D_IN, start=1, end=8),
        "first": ModuleInfo("stream", D_IN, 48, outputs=((D_IN, 48), (8, 32)), start=2, end=3),
        "other": ModuleInfo("other", outputs=((D_IN, 48), (8, 32)), start=4, end=5),
        "last": ModuleInfo("tensor", D_IN, 4 * D_IN, start=6, end=7),
        "never": NEVER_RAN,
    },
    {"whole": ["part"]},
)


def coder(reads: str = "first", width: int = D_IN, **more: Any) -> fh.Dictionary:
    own = {"transcoder": True, "reads": reads, "name": "coder"}
    return dictionary_of("relu", width=width, d_out=D_IN, **own | more)


def admitted(table: ModuleTable, *entries: Any) -> Any:
    hooks = [it.hook for it in entries if isinstance(it, HookEntry)]
    uploads = UploadsOfPlan(uploaded(*(it.dictionary for it in hooks)).find)
    return Admission(table, EngineOptions(), b"secret").read(fh.Plan(*entries).to_json(), uploads)


def test_a_transcoder_reads_where_the_engine_has_its_tensor() -> None:
    read = admitted(LAYERS, fh.on("last", fh.Feature(coder(), 3, set=1.0), at="prompt"))
    (entry,) = read.plan.entries
    assert entry.reads == ("first", "sum")
    assert (entry.what, entry.at, entry.hook.output_index) == (["last"], "prompt", None)
    (entry,) = admitted(LAYERS, fh.on("first", fh.Feature(coder(), 3, set=1.0))).plan.entries
    assert (entry.reads, entry.hook.output_index) == (("first", "sum"), "sum")


def test_a_transcoder_that_reads_elsewhere_has_another_salt() -> None:
    judge = Admission(LAYERS, EngineOptions(), b"secret")
    reads = (coder("first"), coder("last"), coder("first"))
    entries = [fh.on("last", fh.Feature(each, 3, set=1.0)) for each in reads]
    one, other, again = (judge.salt(admitted(LAYERS, each), 8, None) for each in entries)
    assert one == again != other


@pytest.mark.parametrize(
    ("own", "what", "reason"),
    [
        (coder("second"), "last", "nothing in Model matches 'second'"),
        (coder("never"), "last", "never runs"),
        (coder("part"), "last", "part of a module that the engine fuses: 'whole'"),
        (coder("other"), "last", "returns several tensors"),
        (coder("@mlp_in.1"), "last", "@mlp_in.1 is not proved|has no @mlp_in"),
        (coder("last"), "first", "reads last, which runs later than first, where it writes"),
        (coder(""), "last", r"reads \(model\), which runs later than last"),
        (coder(width=8), "last", "reads vectors of width 8, but first has 12"),
        (
            dictionary_of(
                "relu", width=D_IN, d_out=8, transcoder=True, reads="first", name="coder"
            ),
            "last",
            "width of 8",
        ),
        (coder("*st"), "last", "reads and writes one place each, not 'first', 'last'"),
        (coder(), ["first", "last"], "reads and writes one place each, not 'first', 'last'"),
    ],
)
def test_a_transcoder_that_does_not_fit_is_refused(
    own: fh.Dictionary, what: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"entries\[0\]: .*({reason})"):
        admitted(LAYERS, fh.on(what, fh.Feature(own, 3, set=1.0)))


def test_a_compiled_engine_changes_features_at_its_sites() -> None:
    info = ModuleInfo("tensor", D_IN, 4 * D_IN)
    sited, _ = ModuleTable(dict.fromkeys(("", "0", "1"), info), {}).at_sites(["0"])
    elsewhere = coder("1", name="elsewhere")
    judge = Admission(sited, EngineOptions(), b"secret")

    def admitted_at_sites(entry: Any) -> fh.Plan:
        find = UploadsOfPlan(uploaded(SAE, coder("0"), elsewhere).find)
        return judge.read(fh.Plan(entry).to_json(), find).plan

    for entry in (
        fh.keep("0", features=SAE, top=2),
        fh.on("0", fh.Feature(SAE, 1, set=3.0)),
        fh.on("0", fh.Feature(coder("0"), 1, set=3.0)),
    ):
        assert len(admitted_at_sites(entry).entries) == 1
    with pytest.raises(ValueError, match="not a site of this compiled engine"):
        admitted_at_sites(fh.on("0", fh.Feature(elsewhere, 1, set=3.0)))


def test_captures_of_features_count_their_own_bytes() -> None:
    judge = Admission(TABLE, EngineOptions(capture_bytes=4 * 10 * 2 * 2), b"secret")
    read, _ = reader()(uploaded(SAE), PLAN)
    judge.check_captures(read.plan, 5, 6)
    with pytest.raises(ValueError, match="may take 176 bytes"):
        judge.check_captures(read.plan, 5, 7)


def test_the_weights_that_a_plan_copies_are_bounded() -> None:
    own = 4 * 2 * D_IN
    feature = fh.on("0", fh.Feature(SAE, [1, 2], set=3.0))
    plan = fh.Plan(feature, fh.keep("0", features=SAE, index=[3]))
    text = plan.to_json()
    assert fh.Plan.from_json(text, dictionaries={"sae": SAE}, max_bytes=3 * own) == plan
    with pytest.raises(ValueError, match=r"entries\[1\]: the plan's tensors exceed max_bytes"):
        fh.Plan.from_json(text, dictionaries={"sae": SAE}, max_bytes=3 * own - 1)


def test_replaced_uploads_that_a_server_forgets_are_told() -> None:
    """Another server may have replaced them, so that nobody else forgets them."""
    one, other = Uploads(3 * 400), Uploads(3 * 400)
    worker: dict[str, Any] = {}
    forgotten = []
    for value in range(12):
        server = one if value % 3 < 2 else other
        vectors = {"a": torch.full((100,), float(value))}
        data, digests = server.packed(vectors)
        worker |= unpacked_uploads(data)
        forgotten += server.put(vectors, digests)
        sent = packed_uploads(worker, names=json.dumps(digests))
        for each in (one, other):
            forgotten += each.sync(sent)
        for digest in forgotten:
            worker.pop(digest, None)
    assert len(worker) <= 2 * 3
    assert digests["a"] in worker
