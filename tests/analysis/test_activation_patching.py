"""Activation and attribution patching equal the loops by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook import analysis
from support.analysis import HEADS, POSITIONS, WIDTH, changed, difference, modules, output_of

if TYPE_CHECKING:
    from support.analysis import Case, Net

HEAD = WIDTH // HEADS


def scored(case: Case, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return case.metric(case.model(ids)).mean()


def patched_by_hand(case: Case, over: tuple[str, ...]) -> Tensor:
    low, high = scored(case, case.corrupted), scored(case, case.clean)
    rows = []
    for module in modules(case.model, case.layers).values():
        source = output_of(module, case.model, case.clean)
        positions = [slice(p, p + 1) for p in range(POSITIONS)] if "position" in over else [...]
        heads = (
            [slice(h * HEAD, h * HEAD + HEAD) for h in range(HEADS)] if "head" in over else [...]
        )
        for position in positions:
            for head in heads:

                def change(
                    tensor: Tensor, p: Any = position, h: Any = head, s: Tensor = source
                ) -> Tensor:
                    tensor = tensor.clone()
                    at = (
                        slice(None),
                        slice(None) if p is ... else p,
                        slice(None) if h is ... else h,
                    )
                    tensor[at] = s[at]
                    return tensor

                with changed(module, change):
                    rows.append((scored(case, case.corrupted) - low) / (high - low))
    return torch.stack(rows).double()


@pytest.mark.parametrize("over", [(), ("position",), ("head",), ("position", "head")])
@pytest.mark.parametrize("batch_size", [1, 6, 32])
def test_each_cell_is_a_patch_by_hand(case: Case, over: Any, batch_size: int) -> None:
    effects = analysis.activation_patching(
        case.model,
        case.clean,
        case.corrupted,
        case.metric,
        case.layers,
        over=over,
        heads=HEADS if "head" in over else None,
        batch_size=batch_size,
    )
    expected = patched_by_hand(case, over)
    shape = {"position": POSITIONS, "head": HEADS}
    names = [*modules(case.model, case.layers)]
    assert effects.values.shape == (len(names), *(shape[each] for each in over))
    torch.testing.assert_close(effects.values.flatten(), expected, rtol=1e-3, atol=1e-3)
    assert effects.names == names
    ends = {"clean": case.clean, "corrupted": case.corrupted}
    assert effects.scores == {
        name: pytest.approx(float(scored(case, ids)), abs=1e-5) for name, ids in ends.items()
    }


def test_a_single_cell_has_the_bits_of_the_loop(case: Case) -> None:
    ours = analysis.activation_patching(
        case.model, case.clean, case.corrupted, case.metric, case.layers, batch_size=1
    )
    low, high = ours.scores["corrupted"], ours.scores["clean"]
    for name, module in modules(case.model, case.layers).items():
        source = output_of(module, case.model, case.clean)

        def change(tensor: Tensor, s: Tensor = source) -> Tensor:
            return torch.cat([tensor[:, :3], s[:, 3:4], tensor[:, 4:]], dim=1)

        with changed(module, change), torch.no_grad():
            value = float(case.metric(case.model(case.corrupted)).double().mean())
        assert float(ours[name][3]) == (value - low) / (high - low)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_attribution_is_the_gradient_times_the_change(case: Case, frozen: bool, mode: Any) -> None:
    case.model.requires_grad_(not frozen)
    case.model.zero_grad()
    with mode():
        inputs = case.clean.clone(), case.corrupted.clone()  # no tensors that autograd can save
        estimate = analysis.attribution_patching(case.model, *inputs, case.metric, case.layers)
    assert all(parameter.grad is None for parameter in case.model.parameters())
    low, high = scored(case, case.corrupted), scored(case, case.clean)
    for name, module in modules(case.model, case.layers).items():
        source = output_of(module, case.model, case.clean)
        zero = torch.zeros_like(source, requires_grad=True)
        with changed(module, lambda tensor, zero=zero: tensor + zero):
            gradient = torch.autograd.grad(case.metric(case.model(case.corrupted)).mean(), zero)[0]
        change = source - output_of(module, case.model, case.corrupted)
        expected = (gradient * change).sum((0, 2)) / (high - low)
        torch.testing.assert_close(estimate[name], expected.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_attribution_in_batches_is_that_of_all_texts(case: Case, batch_size: int) -> None:
    def estimate(clean: Tensor, corrupted: Tensor, batch_size: int | None) -> Any:
        return analysis.attribution_patching(
            case.model, clean, corrupted, case.metric, case.layers, batch_size=batch_size
        )

    clean, corrupted = (torch.cat([ids, ids.flip(1)])[:3] for ids in (case.clean, case.corrupted))
    whole, batched = (estimate(clean, corrupted, size) for size in (None, batch_size))
    torch.testing.assert_close(batched.values, whole.values, rtol=1e-4, atol=1e-6)
    assert batched.scores == pytest.approx(whole.scores, rel=1e-5)
    with pytest.raises(ValueError, match="batch_size"):
        estimate(clean, corrupted, 0)
    with pytest.raises(fh.HookTypeError, match="must have equally many texts, got 2 and 3"):
        estimate(clean[:2], corrupted, 2)


def test_estimates_of_heads_sum_up_to_those_of_positions(case: Case) -> None:
    def estimate(over: Any) -> Tensor:
        arguments = (case.model, case.clean, case.corrupted, case.metric, case.layers)
        heads = HEADS if "head" in over else None
        return analysis.attribution_patching(*arguments, over=over, heads=heads).values

    both = estimate(("head", "position"))  # in any order
    torch.testing.assert_close(both.sum(2), estimate("position"))
    torch.testing.assert_close(both.sum(1), estimate("head"))
    torch.testing.assert_close(both.sum((1, 2)), estimate(()))


def test_inputs_of_modules_are_patched_too(net: Net) -> None:
    ids = torch.randint(32, (2, 2, POSITIONS))
    effects = [
        analysis.activation_patching(net, ids[0], ids[1], difference, what, inputs=inputs, over=())
        for what, inputs in ((["embed", "blocks.0"], False), (["blocks.0", "blocks.1"], True))
    ]
    torch.testing.assert_close(effects[0].values, effects[1].values)
    # By their place in a tuple, or among the keywords.
    again = analysis.activation_patching(
        net, ids[0], ids[1], difference, "blocks.0", output_index=0, over=()
    )
    torch.testing.assert_close(again.values, effects[0].values[1:], rtol=1e-3, atol=1e-4)
    byname = analysis.activation_patching(
        _ByName(net), ids[0], ids[1], difference, "net", inputs=True, output_index="ids", over=()
    )
    assert byname.values.tolist() == [1]


class _ByName(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor) -> Any:
        return self.net(ids=ids)


def test_inputs_may_be_positional_or_keywords(net: Net) -> None:
    one, other = torch.randint(32, (2, 2, POSITIONS))
    found = [
        analysis.activation_patching(net, *pair, difference, "blocks.*").values
        for pair in ((one, other), ((one,), (other,)), ({"ids": one}, {"ids": other}))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# Refusals


class _Loss(nn.Module):
    """Returns a number for the whole batch beside the logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.net(ids)
        return {"logits": logits, "loss": logits[:, -1, 3].mean()}


def test_a_number_of_the_whole_batch_is_refused_but_in_forwards_of_its_own(net: Net) -> None:
    one, other = torch.randint(32, (2, 2, POSITIONS))

    def patched(model: Any, metric: Any, **options: Any) -> Tensor:
        found = analysis.activation_patching(model, one, other, metric, "**.blocks.*", **options)
        return found.values

    def loss(output: Any) -> Any:
        return output["loss"]

    with pytest.raises(fh.HookError, match=r"output\['loss'\] has shape \(\), .*batch_size=1"):
        patched(_Loss(net), loss)
    expected = patched(net, lambda logits: logits[:, -1, 3])
    torch.testing.assert_close(patched(_Loss(net), loss, batch_size=1), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("extra", [nn.BatchNorm1d(POSITIONS), nn.Dropout()])
def test_rows_that_are_not_independent_are_refused(net: Net, extra: nn.Module) -> None:
    model = nn.Sequential(net.embed, nn.Linear(WIDTH, WIDTH), extra, nn.Linear(WIDTH, 8)).train()
    one, other = torch.randint(32, (2, 2, POSITIONS))

    def call(**options: Any) -> fh.analysis.Effects:
        return analysis.activation_patching(model, one, other, difference, "1", **options)

    refused = r"a different output for the same input .*model\.eval\(\)"
    with pytest.raises(fh.HookError, match=refused):
        call()
    if isinstance(extra, nn.Dropout):
        with pytest.raises(fh.HookError, match=refused):
            call(batch_size=1)
    model.eval()
    assert call().values.isfinite().all()


def test_bad_arguments_are_refused_and_leave_nothing(net: Net) -> None:
    one, other = torch.randint(32, (2, 2, POSITIONS))
    classes = [id(type(module)) for module in net.modules()]

    def refused(error: type[Exception], text: str, *args: Any, **options: Any) -> None:
        defaults = [net, one, other, difference, "blocks.*"]
        with pytest.raises(error, match=text):
            analysis.activation_patching(*args, *defaults[len(args) :], **options)
        assert [id(type(module)) for module in net.modules()] == classes

    refused(fh.HookTypeError, "an analysis needs an instance of nn.Module, got int", 1)
    refused(
        fh.HookTypeError,
        "clean must contain a tensor with one row .*got str: tokenize the text first",
        net,
        "one",
    )
    refused(
        fh.HookTypeError, "corrupted must contain a tensor with one row", net, one, {"ids": [1]}
    )
    refused(fh.HookError, "no difference to analyse", net, one, one)
    refused(fh.SelectionError, "nope", net, one, other, difference, "nope")
    refused(fh.HookTypeError, "a metric must map .*got Tensor", net, one, other, lambda o: o[:0])
    refused(fh.HookTypeError, "a metric must map .*got str", net, one, other, lambda o: "high")
    refused(fh.HookTypeError, "over must be 'position', 'head', both", over="positions")
    refused(fh.HookTypeError, "over='head' needs the number of heads", over="head")
    refused(fh.HookTypeError, "a width of 16 cannot be divided into 3 heads", over="head", heads=3)
    refused(
        fh.HookTypeError, "tokens must have one label per position: expected 5, got 1", tokens=["a"]
    )
    refused(fh.HookTypeError, r"tokens= labels positions, but over=\(\)", tokens="abcde", over=())
    refused(
        fh.HookTypeError, "heads= only works when over= includes 'head'.*'position'", heads=HEADS
    )
    refused(ValueError, "batch_size must be at least 1, got 0", batch_size=0)
    refused(fh.HookTypeError, "output_index 1 of a tuple is not a tensor", output_index=1)
    refused(ZeroDivisionError, "division by zero", net, one, other, lambda o: 1 / 0)
    short = one[:, :3]
    open_ended = nn.Sequential(net.embed, nn.Linear(WIDTH, 8))
    refused(
        fh.HookTypeError,
        r"'1' has shape \(2, 3, 8\) on the clean input and \(2, 5, 8\)",
        open_ended,
        short,
        other,
        difference,
        "1",
    )
    flat = nn.Sequential(nn.Flatten(), nn.Linear(POSITIONS, 8))
    refused(
        fh.HookTypeError,
        r"'1' has shape \(2, 8\), without positions",
        flat,
        one.float(),
        other.float(),
        lambda out: out[:, 0],
        "1",
    )


def test_modules_that_run_twice_or_never_are_refused(net: Net) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    twice = nn.Sequential(net.embed, layer, layer)
    one, other = torch.randint(32, (2, 2, POSITIONS))
    with pytest.raises(fh.HookError, match="'1' runs more than once in a call"):
        analysis.activation_patching(twice, one, other, difference, "1")
    net.extra = nn.Linear(1, 1)
    for analyse in (analysis.activation_patching, analysis.attribution_patching):
        with pytest.raises(fh.HookError, match="'extra' was selected and never ran"):
            analyse(net, one, other, difference, ["blocks.0", "extra"])


def test_a_metric_without_a_gradient_is_refused(net: Net) -> None:
    one, other = torch.randint(32, (2, 2, POSITIONS))
    with pytest.raises(fh.HookError, match="the metric has no gradient"):
        analysis.attribution_patching(
            net, one, other, lambda out: difference(out).detach(), "blocks.*"
        )


class _Aside(nn.Module):
    """Computes an unused value."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.aside = net, nn.Linear(POSITIONS, 1)

    def forward(self, ids: Tensor) -> Any:
        self.aside(ids.float())
        return self.net(ids)


def test_a_metric_of_more_than_the_output_and_a_place_without_an_effect(net: Net) -> None:
    one, other = torch.randint(32, (2, 2, POSITIONS))
    found = analysis.attribution_patching(
        _Aside(net),
        one,
        other,
        lambda out: net.embed.weight.sum() * 0 + difference(out),  # needs a gradient everywhere
        ["aside", "net.blocks.0"],
        over=(),
    )
    assert found["aside"] == 0
    assert found["net.blocks.0"] != 0


def test_calls_of_other_threads_are_not_patched(net: Net) -> None:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    one, other = torch.randint(32, (2, 2, POSITIONS))
    with torch.no_grad():
        expected = net(other)
    seen = []
    with ThreadPoolExecutor(1) as pool:

        def metric(output: Tensor) -> Tensor:
            seen.append(pool.submit(lambda: net(other).detach()).result())
            return difference(output)

        analysis.activation_patching(net, one, other, metric, "blocks.*")
    assert all(torch.equal(each, expected) for each in seen)
