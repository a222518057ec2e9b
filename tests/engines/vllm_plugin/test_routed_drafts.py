"""Routes and captures of experts in vLLM with speculative decoding, in this process."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
from ferrohook.effects.routing import RoutedIds
from ferrohook.engines import vllm
from ferrohook.engines.vllm.worker import RunnerWorker
from support.engines import Job, chosen_positions
from support.quantity_plans import check
from support.routes import CHOSEN, KEPT, LAYERS, Routed, by_hand, drawn
from support.serving import Arrivals
from support.speculation import WORDS, DraftCount, save_repeating_model, speculative_config
from support.vllm_engine import sampling, scheduling_ahead, start, state, stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from support.routes import Chosen

NEW = 16
KINDS = {"ngram": "glm4_moe", "draft_model": "mixtral", "draft_model ahead": "mixtral"}
"""Models, by the method of speculative decoding and how the engine schedules."""


class Drafting(NamedTuple):
    """An engine that drafts, and its model."""

    llm: Any
    model: Any


@pytest.fixture(scope="module", params=KINDS)
def drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafting]:
    """Engine with blocks for a few requests."""
    folder = tmp_path_factory.mktemp("repeating")
    model = save_repeating_model(folder, KINDS[request.param])
    method, _, ahead = request.param.partition(" ")
    with scheduling_ahead() if ahead else contextlib.nullcontext():
        llm = start(
            folder,
            speculative_config=speculative_config(method, folder),
            num_gpu_blocks_override=11,
            max_num_batched_tokens=48,
        )
    yield Drafting(llm, model)
    stop(llm)


def placed(chosen: Mapping[int, Tensor], weights: Tensor | None, start: int, stop: int) -> Chosen:
    """Returns the experts that rows of ids from a position on give, by block."""

    def found(block: int, position: int) -> tuple[list[int], list[float] | None] | None:
        ids, row = chosen.get(block), position - start
        if ids is None or position >= stop or not 0 <= row < len(ids) or int(ids[row, 0]) < 0:
            return None
        return ids[row].tolist(), None if weights is None else weights.tolist()

    return found


def routed(rng: random.Random) -> Routed:
    """Draws a request of which tokens of the prompt, of the text or of both have routes."""
    words = [rng.randrange(2, WORDS) for _ in range(9)]
    prompt = (words * 9)[: rng.randint(2, 60)]
    tokens = len(prompt) + NEW - 1
    ids = drawn(tokens, rng.randrange(10**6))
    ids[torch.rand(tokens, generator=torch.Generator().manual_seed(len(prompt))) < 0.2] = -1
    block = rng.randrange(LAYERS)
    match rng.randrange(6):
        case 0:
            return Routed(prompt, None, lambda _block, _position: None)
        case 1:  # the first ones, perhaps only of the prompt
            ids = ids[: rng.randint(1, tokens)]
            rows = {each: ids[:, each] for each in range(LAYERS)}
            return Routed(prompt, fh.replay(ids), placed(rows, None, 0, tokens))
        case 2:  # the last ones, perhaps only of the text
            first = rng.randrange(tokens)
            rows = {each: ids[first:, each] for each in range(LAYERS)}
            entry = fh.replay(ids[first:], start=first)
            return Routed(prompt, entry, placed(rows, None, first, tokens))
        case 3:  # of the text
            own = ids[: rng.randint(1, NEW - 1), block]
            entry = fh.on(f"@experts.{block}", fh.Route(own), at="generated")
            return Routed(prompt, entry, placed({block: own}, None, len(prompt), tokens))
        case 4:  # around the end of the prompt
            first = max(0, len(prompt) - rng.randint(0, 3))
            own = ids[first : first + rng.randint(1, 9), block]
            at = slice(first, first + len(own))
            entry = fh.on(f"@experts.{block}", fh.Route(own), at=at)
            return Routed(prompt, entry, placed({block: own}, None, first, tokens))
    first = rng.randrange(tokens)
    last, weights = first + rng.randint(1, 9), torch.rand(CHOSEN) + 0.1
    one = drawn(1, rng.randrange(10**6))[0, 0]
    entry = fh.on("@experts.*", fh.Route(one, weights), at=slice(first, last))
    rows = dict.fromkeys(range(LAYERS), one.expand(last - first, -1))
    return Routed(prompt, entry, placed(rows, weights, first, last))


class Asked(NamedTuple):
    """A request with a route, and the positions at which it keeps values."""

    routed: Routed
    at: Any

    @property
    def plan(self) -> fh.Plan:
        """Its plan."""
        return fh.Plan(*filter(None, [self.routed.entry]), fh.keep([*KEPT], at=self.at))

    def alone(self, model: Any, guess: list[int]) -> tuple[list[int], dict[str, Tensor]]:
        """Returns text and captures of the request by itself, sooner if a guess is right."""
        prompt = self.routed.prompt
        text, acts = by_hand(model, prompt, self.routed.chosen, guess)
        chosen = chosen_positions(self.at, len(prompt) + NEW - 1, len(prompt))
        return text, {name: rows[chosen] for name, rows in acts.items()}


def drawn_requests(number: int) -> list[Asked]:
    """Requests, of which each keeps some rows."""
    rng = random.Random(23)  # noqa: S311 (tests)
    torch.manual_seed(23)
    ats: list[Any] = [None, None, "prompt", "generated", -1, slice(-2, None)]
    return [Asked(routed(rng), rng.choice(ats)) for _ in range(number)]


def serve(llm: Any, asked: list[Asked]) -> dict[int, tuple[list[int], Mapping[str, Tensor]]]:
    """Serves requests that arrive at random; returns texts and captures by number."""
    engine, arrivals = llm.llm_engine, Arrivals([Job(each.routed.prompt) for each in asked], 3)
    found: dict[int, tuple[list[int], Mapping[str, Tensor]]] = {}
    while arrivals.waiting or engine.has_unfinished_requests():
        for name in arrivals.step()[0]:
            each = asked[arrivals.running[name]]
            params = sampling(each.plan, NEW, ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": each.routed.prompt}, params)
        for output in filter(lambda each: each.finished, engine.step()):
            acts = vllm.activations(llm, output).acts
            number = arrivals.running.pop(output.request_id)
            found[number] = [*output.outputs[0].token_ids], acts
    return found


def wrong(model: Any, asked: list[Asked], found: Mapping[int, Any]) -> list[str]:
    """Returns how answers differ from those of the requests alone."""
    errors = []
    for number, each in enumerate(asked):
        try:
            check(f"request {number}", found[number], each.alone(model, found[number][0]))
        except AssertionError as error:
            errors.append(str(error))
    return errors


@pytest.mark.v2
def test_requests_take_their_experts(
    drafting: Drafting, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of rejected drafts take experts of their positions, and leave none of theirs."""
    asked = drawn_requests(request.config.getoption("requests") or 24)
    count = DraftCount(drafting.llm, monkeypatch)
    assert wrong(drafting.model, asked, serve(drafting.llm, asked)) == []
    assert min(count.accepted, count.rejected) > 5, count
    assert count.preempted
    print(f"{len(asked)} texts, {count}")
    drafting.llm.generate({"prompt_token_ids": [5, 6, 7]}, sampling(None, 1), use_tqdm=False)
    assert state(drafting.llm)["requests"] == 0


def test_other_routes_in_steps_with_drafts_would_be_found(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, of_tokens, drafts = RunnerWorker.settle, RoutedIds.of_tokens, [0]

    def settling(self: RunnerWorker, *call: Any) -> None:
        drafts[0] = sum(map(len, self._drafts.values()))
        settle(self, *call)

    def taken(self: RoutedIds, rows: Sequence[int], sequences: Sequence[int]) -> Any:
        return of_tokens(self, [row + bool(drafts[0]) for row in rows], sequences)

    monkeypatch.setattr(RunnerWorker, "settle", settling)
    monkeypatch.setattr(RoutedIds, "of_tokens", taken)
    asked = drawn_requests(8)
    assert wrong(drafting.model, asked, serve(drafting.llm, asked))
