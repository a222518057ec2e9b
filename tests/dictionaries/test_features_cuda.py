"""Features on a GPU: the copies of weights, their streams, and no waits of the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.dictionaries import D_IN, dictionary_of
from support.modules import Tokens

pytestmark = pytest.mark.cuda
KINDS = ["relu", "gated", "topk rescaled", "groupmax"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_changes_are_those_of_the_cpu(kind: str) -> None:
    dictionary = dictionary_of(kind, normalize_activations="layer_norm")
    x = torch.randn(6, D_IN) * 3
    hook = fh.Feature(dictionary, [3, 9], set=[5.0, None], scale=[None, 2.0])
    # Four streams, the first of which makes the copies.
    for stream in [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            on_gpu = x.cuda()
            values, changed = dictionary.encode(on_gpu), hook.apply(on_gpu)
            decoded = dictionary.decode(values, on_gpu)
        stream.synchronize()
        torch.testing.assert_close(values.cpu(), dictionary.encode(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(changed.cpu(), hook.apply(x), rtol=1e-4, atol=1e-4)
        expected = dictionary.decode(dictionary.encode(x), x)
        torch.testing.assert_close(decoded.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_members_of_a_batch(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D_IN, D_IN)).cuda().requires_grad_(requires_grad=False)
    dictionary = dictionary_of(kind)
    plans = [
        fh.Plan(fh.on("0", fh.Feature(dictionary, n, set=5.0)), fh.keep("0", device="cpu"))
        for n in range(3)
    ]
    x = torch.randn(6, D_IN).cuda()
    for _ in range(2):
        requests = [plan.open(model) for plan in plans]
        with fh.batch({it: slice(2 * n, 2 * n + 2) for n, it in enumerate(requests)}, size=6):
            model(x)
        plain = model(x).cpu()
        for n, request in enumerate(requests):
            expected = fh.Feature(dictionary, n, set=5.0).apply(plain[2 * n : 2 * n + 2])
            torch.testing.assert_close(request.acts["0"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_transcoder(kind: str) -> None:
    torch.manual_seed(0)
    model = Tokens(nn.Linear(D_IN, D_IN), nn.Linear(D_IN, D_IN)).cuda()
    own = dictionary_of(kind, transcoder=True, reads="0", writes="1")
    direction = torch.randn(D_IN)
    plan = fh.Plan(
        fh.gate("g", "0", fh.Dot(direction)),
        fh.on("1", fh.Feature(own, [3, 9], set=5.0), when=fh.above("g", 0.0)),
        fh.keep(["0", "1"], device="cpu"),
    )
    x, positions = torch.randn(2, 4, D_IN).cuda(), torch.arange(4).expand(2, -1)
    with torch.no_grad():
        request = plan.open(model)
        with fh.batch({request: [0, 1]}, positions=positions):
            model(x)
        plain = model(x).cpu()
    read = request.acts["0"]
    rows = own.written(torch.tensor([3, 9]), read[0, 0])
    changed = (5.0 - own.encode(read)[..., [3, 9]]) @ rows
    expected = torch.where((read @ direction > 0)[..., None], plain + changed, plain)
    torch.testing.assert_close(request.acts["1"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_makes_the_host_wait_for_nothing(kind: str) -> None:
    hook = fh.Feature(dictionary_of(kind), [3, 9], set=5.0)
    x = torch.randn(6, D_IN).cuda()
    hook.apply(x)  # makes the copies
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hook.apply(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
