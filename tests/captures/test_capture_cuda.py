"""Captures on a GPU."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.limits import LIMIT


@pytest.fixture
def on_gpu() -> tuple[nn.Sequential, Tensor]:
    model = nn.Sequential(nn.Linear(1_024, 1_024), nn.ReLU(inplace=True)).cuda()
    return model, torch.randn(4_096, 1_024, device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"slice": (slice(None), 0)}, {"dtype": torch.bfloat16}])
def test_copies_to_the_cpu_are_complete_when_they_are_read(
    on_gpu: tuple[nn.Sequential, Tensor], options: dict[str, Any]
) -> None:
    model, x = on_gpu
    for _ in range(5):
        with torch.no_grad(), fh.capture(model, "0", device="cpu", **options) as acts:
            torch.cuda._sleep(50_000_000)
            model(x)  # overwrites the captured tensor in place
            read = acts["0"].clone()
        torch.cuda.synchronize()
        expected = model[0](x)[options.get("slice", ...)].to(options.get("dtype", torch.float32))
        assert torch.equal(read, expected.cpu())


@pytest.mark.cuda
def test_copies_in_inference_mode_are_complete_when_they_are_read() -> None:
    """An inference tensor has no version, so a checked capture clones it."""
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    expected = model(x)
    model, there = model.cuda(), x.cuda()
    with torch.inference_mode(), fh.capture(model, "", device="cpu") as acts:
        torch.cuda._sleep(50_000_000)
        model(there)
    assert torch.allclose(acts[""], expected, atol=1e-5)


@pytest.mark.cuda
def test_copies_have_a_bounded_part_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrohook.util.host_copies.MOST_PINNED", 4 * 48)
    model = nn.Linear(4, 4)
    inputs = [torch.randn(3, 4) for _ in range(20)]
    expected = [model(x) for x in inputs]
    model = model.cuda()

    def copies() -> list[Tensor]:
        with torch.no_grad(), fh.capture(model, "", device="cpu", calls="all") as acts:
            for x in inputs:
                model(x.cuda())
        return list(acts[""])

    first = copies()
    second = copies()  # while the first ones are alive
    assert all(map(torch.allclose, [*first, *second], [*expected, *expected]))
    assert [each.is_pinned() for each in first] == [True] * 4 + [False] * 16
    assert not any(each.is_pinned() for each in second)
    view = first[0][1:]
    del first
    assert [each.is_pinned() for each in copies()] == [True] * 3 + [False] * 17
    del view
    assert [each.is_pinned() for each in copies()] == [True] * 4 + [False] * 16


@pytest.mark.cuda
def test_copies_to_the_cpu_do_not_wait_for_the_gpu(on_gpu: tuple[nn.Sequential, Tensor]) -> None:
    model, x = on_gpu
    with torch.no_grad(), fh.capture(model, "0", device="cpu") as acts:
        for _ in range(3):
            model(x)
            acts["0"]  # the first copy pins memory, which waits for the GPU
        torch.cuda._sleep(2_000_000_000)
        model(x)
        assert not torch.cuda.current_stream().query()
    assert torch.equal(acts["0"], model[0](x).cpu())


@pytest.mark.cuda
def test_a_write_after_the_capture_does_not_reach_the_copy(
    on_gpu: tuple[nn.Sequential, Tensor],
) -> None:
    model, x = on_gpu
    with torch.no_grad(), fh.capture(model, "0", device="cpu", calls="all") as acts:
        for factor in range(1, 6):
            out = model(factor * x)
            out.zero_()
    for factor, kept in enumerate(acts["0"], 1):
        assert torch.equal(kept, model[0](factor * x).cpu())


@pytest.mark.cuda
def test_reader_threads_get_complete_copies(on_gpu: tuple[nn.Sequential, Tensor]) -> None:
    model, x = on_gpu
    expected = model[0](x).cpu()
    with torch.no_grad(), fh.capture(model, "0", device="cpu") as acts:
        for _ in range(5):
            torch.cuda._sleep(50_000_000)
            model(x)
            with ThreadPoolExecutor(4) as executor:
                reads = [executor.submit(acts.__getitem__, "0") for _ in range(4)]
            assert all(torch.equal(read.result(LIMIT), expected) for read in reads)


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_without_an_index_is_the_current_device(
    on_gpu: tuple[nn.Sequential, Tensor], device: str
) -> None:
    model, x = on_gpu
    with fh.capture(model, "0", device=device, copy="clone") as acts:
        model(x)
    assert torch.equal(acts["0"], model[0](x))  # not the output of ReLU
    with fh.capture(model, "0", device=device, slice=0) as acts:
        model(x)
    assert acts["0"].untyped_storage().nbytes() == acts["0"].nbytes


@pytest.mark.cuda
@pytest.mark.not_emulated("autograd's device threads")
def test_gradients_are_copied_to_the_cpu(on_gpu: tuple[nn.Sequential, Tensor]) -> None:
    model, x = on_gpu
    with fh.capture(model, "0", device="cpu", grads=True) as acts:
        out = model(x)
        out.sum().backward()
    assert torch.equal(acts.grads["0"], (out > 0).float().cpu())
    assert acts.to("cuda")["0"].is_cuda


@pytest.mark.cuda
@pytest.mark.not_emulated("autograd's device threads")
def test_a_checkpointed_region_is_recomputed_with_the_scopes_hooks_on_a_gpu() -> None:
    fired: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda()
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    with fh.scope() as s:
        fh.register(model, "0", lambda *_: fired.append("x"), phase="forward_pre", scope=s)
        # Autograd's GPU threads have no context.
        out = torch.utils.checkpoint.checkpoint(
            model,
            x,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), s.activate()),
        )
        out.sum().backward()
    assert fired == ["x", "x"]
