"""Pages of the documentation run, print what they show, and keep their promises."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh
from support.interpreters import run_with_torch
from support.pages import DOCS, blocks, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Names = dict[str, Any]
PROCESSES = 2
# The page at the start has extracts: README's code is whole, and runs.
PAGES = [page for page in sorted(DOCS.glob("*.md")) if blocks(page) and page.stem != "index"]
BY_TORCHRUN = [page for page in PAGES if "torchrun" in page.read_text()]
# Ranks are forked from a process that has imported what takes seconds. They skip C++ destructors:
# gloo's abort a process now and then, with plain PyTorch too.
BY_RANKS = """
import torch._dynamo, torch.distributed.fsdp
os.chdir({folder!r})
os.environ.update({torchrun})
ranks = []
for rank in range(int(os.environ["WORLD_SIZE"])):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        exec({code!r}, {{"__name__": "__main__"}})
        os._exit(0)
assert not any([os.waitpid(rank, 0)[1] for rank in ranks])
"""


def analyses(names: Names) -> None:
    model, clean, corrupted, effects = (
        names[name] for name in ("model", "clean", "corrupted", "effects")
    )
    # Patching the last layer at the last position restores the clean answer completely.
    assert effects["@resid_post.29"][-1] == pytest.approx(1, abs=1e-4)
    logits, lens, words = model(clean).logits[0, -1], names["lens"], names["lens"].texts()
    assert effects.scores == {
        "clean": pytest.approx(float(logits[names["PARIS"]] - logits[names["BERLIN"]]), abs=1e-4),
        "corrupted": pytest.approx(float(names["metric"](model(corrupted))), abs=1e-4),
    }
    assert [line[-1] == " Paris" for line in words] == 9 * [False] + [True]
    chance = float(logits.softmax(-1)[names["PARIS"]])
    assert float(lens.probabilities[-1, 0, -1, 0]) == pytest.approx(chance, abs=1e-4)
    # The attention of block 23, and its head 4, switched off by PyTorch's own hooks.
    attention = model.model.layers[23].self_attn

    def mean(_module: Any, _args: Any, output: Any) -> Any:
        return output[0].mean((0, 1), keepdim=True).expand_as(output[0]), *output[1:]

    def without_head(_module: Any, args: Any) -> Any:
        args[0][..., 64 * 4 : 64 * 5] = 0

    handle = attention.register_forward_hook(mean)
    ablated = names["metric"](model(clean))[0]
    handle.remove()
    handle = attention.o_proj.register_forward_pre_hook(without_head)
    headless = names["metric"](model(clean))[0]
    handle.remove()
    plain, table = effects.scores["clean"], names["table"]
    assert table["@attn_out.23"] == pytest.approx(float(ablated) - plain, abs=1e-4)
    assert table.largest(1)[0][0] == "@attn_out.23"
    assert float(names["heads"]["@z.23"][4]) == pytest.approx(float(headless) - plain, abs=1e-4)
    # The last MLP at the last token reaches the logits by the final norm and the head alone.
    kept: list[Any] = []
    watched = model.model.layers[29].mlp, model.model.norm
    handles = [it.register_forward_hook(lambda *seen: kept.append(seen[1:])) for it in watched]
    model(clean)
    for handle in handles:
        handle.remove()
    (_, added), ((stream,), normed) = kept
    head = model.lm_head.weight[names["PARIS"]] - model.lm_head.weight[names["BERLIN"]]
    expected = float((added * normed / stream @ head)[0, -1])
    assert float(names["terms"].sources["@mlp_out.29"][-1]) == pytest.approx(expected, abs=1e-3)


def command_line(_names: Names) -> None:
    layers = torch.load("small.pt", weights_only=False)
    with fh.data.LocalStore("acts", read_only=True) as store, torch.no_grad():
        stored = store.get("run", 0, "2")["output"]
        torch.testing.assert_close(stored, layers(torch.load("x.pt")))


def compiling(names: Names) -> None:
    model, x = names["model"], names["x"]
    with fh.capture(model, "0") as acts, torch.no_grad():
        names["compiled"](x)
    torch.testing.assert_close(acts["0"], model[0](x))


def datasets(names: Names) -> None:
    acts, model = names["data"][:], names["model"]
    with torch.no_grad():
        torch.testing.assert_close(acts, model(names["x"]))


def engines_transformers(names: Names) -> None:
    steered, prompt = names["outputs"]["req_0"], names["prompts"][0]
    tokens = torch.tensor([prompt + steered.generated_tokens[:-1]])
    with fh.capture(names["model"], "model.layers.0") as acts, torch.no_grad():
        names["model"](tokens)
    torch.testing.assert_close(
        steered.acts["model.layers.0"], acts["model.layers.0"][0], atol=1e-4, rtol=1e-4
    )


def from_mi_crow(names: Names) -> None:
    model, batches = names["model"], names["batches"]
    assert torch.equal(names["activations"], (model[0].forward(batches[9]) / 2).half())


def from_transformerlens(names: Names) -> None:
    blocks, corrupted, expected = (names[name] for name in ("blocks", "corrupted", "expected"))
    distance = names["distance"]
    plain = (blocks(corrupted) - expected).norm()
    # A patch mends its own position, and no other.
    assert (distance < plain).all()
    total = 4 * plain.square().expand(3)
    torch.testing.assert_close(distance.square().sum(1), total, rtol=1e-4, atol=0)


def from_transformers(names: Names) -> None:
    assert names["states"][1].dtype == torch.float16
    assert isinstance(names["model"].layers[0], names["Halve"])


def plotting(names: Names) -> None:
    states: list[list[torch.Tensor]] = [[], []]
    for ids, found in zip((names["ids"], names["others"]), states, strict=True):
        handles = [
            block.register_forward_hook(
                lambda _module, _args, output, found=found: found.append(output)
            )
            for block in names["model"].model.layers
        ]
        names["model"](ids)
        for handle in handles:
            handle.remove()
    france, germany = map(torch.cat, states)
    assert torch.equal(names["acts"].stack("model.layers.*")[:, 0], france[::5, 1:])
    norms = france.norm(dim=-1)
    assert (norms[:, 0] > 50 * norms[:, 1:].amax(1)).nonzero().flatten().tolist() == [
        *range(11, 25)
    ]
    moved = (france - germany).norm(dim=-1) / norms
    drawn = torch.tensor(names["ax"].images[0].get_array().data, dtype=moved.dtype)
    torch.testing.assert_close(drawn[1:], moved[::5, 1:], atol=1e-5, rtol=1e-5)
    assert moved[20, -1] < 0.1
    assert moved[25, -1] > 0.3


def plans(names: Names) -> None:
    model, ids, vector = names["model"], names["ids"], names["vector"]
    hidden, expected = model.embed(ids), []
    for number, layer in enumerate(model.layers):
        taken = layer(hidden) + (4 * vector if number == 1 else 0)
        hidden = hidden + taken
        expected.append(taken.half())
    _, acts = fh.run(model, ids, plan=names["plan"])
    torch.testing.assert_close(acts.stack(), torch.stack(expected))


def rows(names: Names) -> None:
    a, b, y, batch = (names[name] for name in ("a", "b", "y", "batch"))
    assert list(batch.errors) == [names["c"]]
    assert b.error is None
    model, x, joy = names["model"], names["x"], names["joy"]
    steered = model[2](model[1](model[0](x[:4]) + joy))
    torch.testing.assert_close(a.acts["2"], steered)
    assert torch.equal(y[:4], model(x)[:4])


def saelens(names: Names) -> None:
    data, context = names["data"], names["CONTEXT"]
    made = names["made"].with_format("torch")
    whole = len(data) // context * context
    assert torch.equal(made[names["LAYER"]][:].flatten(0, 1), data[:whole])
    assert torch.equal(made["token_ids"][:].flatten(), data.tokens[:whole])


def serving(names: Names) -> None:
    answers = (names[name]["hidden"] for name in ("plain", "halved", "batched"))
    plain, halved, batched = map(torch.tensor, answers)
    torch.testing.assert_close(halved, plain / 2)
    torch.testing.assert_close(batched[0], halved)
    assert names["batched"]["score"] == [pytest.approx(names["halved"]["score"])]


def threads(names: Names) -> None:
    layer, x = names["model"][0], names["x"]
    assert len(names["results"]) == 100
    for factor, result in enumerate(names["results"]):
        assert torch.equal(result, layer(x) * factor)
    assert len(names["outputs"]) == len(names["acts"]["0"]) == 16


def tutorial(names: Names) -> None:
    again, acts, net, ids = (names[name] for name in ("again", "acts", "net", "ids"))
    assert all(torch.equal(again[name], acts[name]) for name in acts)
    hidden = net.embed(ids)
    for number, block in enumerate(net.blocks):
        hidden = block(hidden)
        torch.testing.assert_close(acts[f"blocks.{number}"], hidden)
    assert names["nans"].first == "blocks.1.mlp"
    for each in (names["early"], names["late"]):
        assert each.removed


CHECKS: dict[str, Callable[[Names], None]] = {
    "analyses": analyses,
    "command-line": command_line,
    "compiling": compiling,
    "datasets": datasets,
    "engines-transformers": engines_transformers,
    "migrating-from-mi-crow": from_mi_crow,
    "migrating-from-transformerlens": from_transformerlens,
    "migrating-from-transformers": from_transformers,
    "plans": plans,
    "plotting": plotting,
    "rows": rows,
    "saelens": saelens,
    "serving": serving,
    "threads": threads,
    "tutorial": tutorial,
}


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in BY_TORCHRUN], ids=lambda page: page.stem
)
def test_page_prints_its_shown_output_and_holds(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = CHECKS.get(page.stem)
    names = run(page, monkeypatch, capsys, all_=check is not None)
    if check is not None:
        check(names)


@pytest.mark.parametrize("page", CHECKS)
def test_pages_with_a_check_show_outputs_and_no_asserts(page: str) -> None:
    found = blocks(DOCS / f"{page}.md")
    assert not [block.code for block in found if "assert " in block.code]
    assert any(block.printed for block in found)


@pytest.mark.parametrize("page", BY_TORCHRUN, ids=lambda page: page.stem)
def test_page_runs_on_several_processes(page: Path, tmp_path: Path) -> None:
    code = "\n".join(block.code for block in blocks(page))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{PROCESSES}"}
    done = run_with_torch(BY_RANKS.format(torchrun=torchrun, folder=str(tmp_path), code=code))
    assert done.returncode == 0, done.stderr


def test_pages_with_code_are_found() -> None:
    assert len(PAGES) > len(BY_TORCHRUN) > 0
