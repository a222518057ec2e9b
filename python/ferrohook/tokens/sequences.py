"""Tokens of a call of a model: the sequence, position and part (prompt or generated) of each.

The one place that finds them, from these sources:

- How many tokens came before: the KV cache; for one that does not count, the calls that filled it;
  `cache_position`; an `attention_mask` that is longer than the tokens.
- Padding: `attention_mask` of (batch, tokens); in transformers' `generate` the one that it got.
- Where the prompt ends: as passed when the request was opened. Else, in `generate`, at the end of
  its input, even if that is chunked, drafted or cached. Else the first call of a sequence: its
  tokens are the prompt, and tokens that run later with its KV cache are generated.

The state of a sequence is stored with its KV cache, weakly, so that threads, turns and copies of
a cache do not mix. Once the program chooses, reorders or repeats rows itself, as in a beam search
by hand, only what all rows had in common is known. Positions that no source gives are refused
where a plan needs them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ferrohook.errors import HookError
from ferrohook.tokens.positions import PADDING, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

_TOKENS: Final = ("input_ids", "inputs_embeds")
_DECODER: Final = "decoder_"
"""Prefix of the names of a decoder's tokens, in a module with an encoder too."""
_CACHES: Final = ("cache", "past_key_values", "cache_params", "state")
"""Names of the KV cache: from transformers 5.24 on, and before; of RWKV's states."""
_GENERATE: Final = "transformers.generation.utils"
_CALLBACKS: Final = frozenset(
    {"transformers.generation.logits_process", "transformers.generation.stopping_criteria"}
)
"""Modules whose objects `generate` calls: models that they call do not run its tokens."""
_PAIR: Final = 2
"""Number of the dimensions (batch, tokens)."""
_NUMBERS: Final = itertools.count(1)
"""Numbers of sequences, but for the one of a member of batches."""
OF_REQUEST: Final = 0
"""Number of the sequences of a member of batches."""
_End: TypeAlias = tuple[int, int]
"""Row of a sequence that ends, and the position of its last token."""


class TokenStack(NamedTuple):
    """Module that takes tokens."""

    name: str
    """Name of its class, for errors."""
    parameters: tuple[str, ...]
    """Names of the parameters of its forward."""
    prefix: str
    """Prefix of the names of its tokens."""
    inner: bool
    """True if a module around it may give it its own tokens."""
    encoder: bool
    """True if no tokens are generated after its own."""

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call by name."""
        return dict(zip(self.parameters, args, strict=False)) | dict(kwargs)

    def tokens(self, arguments: Mapping[str, Any]) -> Tensor:
        """Returns the tokens of a call: (batch, length, ...).

        Raises:
            HookError: it has none.
        """
        for name in _TOKENS:
            tokens = arguments.get(self.prefix + name)
            if isinstance(tokens, Tensor) and tokens.dim() >= _PAIR:
                return tokens
        raise no_tokens(self.name, self.prefix)

    def repeats(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], outer: Tokens) -> bool:
        """True if an inner call runs the tokens of the call around it, and not another text.

        Raises:
            HookError: it has no tokens.
        """
        arguments = self.arguments(args, kwargs)
        given = self.tokens(arguments)
        if given.shape[:2] != outer.positions.shape:
            return False
        cache, mask = _given_cache(arguments), arguments.get(f"{self.prefix}attention_mask")
        if cache is not None and cache is outer.cache:
            return True
        return not (_differ(given, outer.given) or _differ(mask, outer.mask))


def no_tokens(name: str, prefix: str = "") -> HookError:
    """Makes the error for a call without tokens."""
    names = " nor ".join(prefix + each for each in _TOKENS)
    return HookError(
        f"the positions of a call of {name} are not known: it has neither {names}; in a batch, "
        "pass them with positions="
    )


def stacks_of(model: nn.Module, path: str) -> dict[str, TokenStack]:
    """Returns the modules, by path, whose calls show the positions of tokens in a module.

    That is the nearest one around it that takes tokens, and those around that one that give it
    their own.

    Raises:
        HookError: the nearest model around it takes something else, such as images.
    """
    around = [*_around(model, path)]
    found: dict[str, TokenStack] = {}
    for place in reversed(range(len(around))):
        name, module = around[place]
        # A part that takes only embeddings may be one of images.
        alone = "inputs_embeds" in _parameters(module) and place == 0
        if not (_takes_tokens(module) or alone):
            if not found and (other := _other_input(module)) is not None:
                msg = (
                    f"at= selects tokens by position, but {path!r} is in a "
                    f"{type(module).__name__}, which takes {other}"
                )
                raise HookError(msg)
            continue
        parameters = _parameters(module)
        prefix = _DECODER if _has_decoder(module) else ""
        if not found and not prefix:
            _check_beside_towers(path, module, around[-1][1])
        if prefix and any(not each.prefix for each in found.values()):
            break  # it has tokens of two kinds
        outer = [_encoder_of(each) for _, each in around[:place]]
        encoder = any(each is it for _, each in around[: place + 1] for it in outer)
        found[name] = TokenStack(
            type(module).__name__, parameters, prefix, inner=True, encoder=encoder
        )
    if found:
        outermost = [*found][-1]
        found[outermost] = found[outermost]._replace(inner=False)
    return found


def stacks_in(model: nn.Module) -> dict[str, TokenStack]:
    """Returns all modules of a model, by path, that take tokens of one kind."""
    found: dict[str, TokenStack] = {}
    for path, module in model.named_modules():
        if (_takes_tokens(module) and not _has_decoder(module)) or not path:
            found |= {at: it for at, it in stacks_of(model, path).items() if not it.prefix}
    return found


def _around(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules on a path, by name, from the model to the last one."""
    yield "", model
    module, names = model, path.split(".") if path else []
    for place, name in enumerate(names):
        inside = getattr(module, name, None)
        if not isinstance(inside, nn.Module):
            return  # the path of a point inside of attention
        module = inside
        yield ".".join(names[: place + 1]), module


_known: weakref.WeakKeyDictionary[FunctionType, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""Names of the parameters of functions."""


def _parameters(module: nn.Module) -> tuple[str, ...]:
    function = None if "forward" in vars(module) else type(module).forward
    if isinstance(function, FunctionType) and function in _known:
        return _known[function]
    try:
        names = tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()
    if isinstance(function, FunctionType):
        _known[function] = names
    return names


def _takes_tokens(module: nn.Module) -> bool:
    return "input_ids" in _parameters(module) or _has_decoder(module)


def _has_decoder(module: nn.Module) -> bool:
    return f"{_DECODER}input_ids" in _parameters(module)


def _encoder_of(module: nn.Module) -> nn.Module | None:
    find = getattr(module, "get_encoder", None) if _has_decoder(module) else None
    encoder: Any = find() if callable(find) else None
    return None if encoder is module else encoder


def _other_input(module: nn.Module) -> str | None:
    """Returns the name of the input of a model of transformers that takes no tokens."""
    if not hasattr(type(module), "main_input_name") or _takes_tokens(module):
        return None
    names, main = _parameters(module), str(module.main_input_name)
    return main if main in names or not names else names[0]


def _check_beside_towers(path: str, model: nn.Module, module: nn.Module) -> None:
    """Validates that a module of a model with other towers is one that runs on tokens.

    Raises:
        HookError: it is not known to.
    """
    other = next((each for each in model.modules() if _other_input(each) is not None), None)
    if other is None or module is model or any(map(_takes_tokens, module.modules())):
        return
    head = getattr(model, "get_output_embeddings", None)
    if callable(head) and head() is module:
        return
    msg = (
        f"at= selects tokens by position, but the model of {path!r} also has a "
        f"{type(other).__name__}, which takes no tokens: {path!r} is not known to run on tokens"
    )
    raise HookError(msg)


class _Sequence(NamedTuple):
    """Prompts and length of the sequences of a KV cache."""

    prompt: tuple[Tensor, int] | None
    """Tokens of the prompts, (batch,), and their columns; None if no source says where they end."""
    seen: int
    """Columns that ran, padding included."""
    ends: Tensor | None
    """Position after the last token of each: (batch,); None if no source says."""
    number: int
    """See `Tokens`."""
    batch: int
    memory: StorageWeakRef | None = None
    """Memory of the keys after the call; it changes when rows are chosen, reordered or repeated."""

    def of_other_rows(self, batch: int) -> _Sequence:
        """Returns the facts common to all rows, for rows chosen from these."""

        def common(values: Tensor | None) -> Tensor | None:
            if values is None or bool((values != values[:1]).any()):
                return None
            return values[:1].expand(batch)

        lengths = None if self.prompt is None else common(self.prompt[0])
        prompt = None if self.prompt is None or lengths is None else (lengths, self.prompt[1])
        return _Sequence(prompt, self.seen, common(self.ends), next(_NUMBERS), batch)


class _GenerateCall(NamedTuple):
    """Input of a running call of `generate`."""

    columns: int
    mask: Tensor | None
    """True for the columns without padding; None for all."""
    lengths: Tensor | None
    """Tokens of the prompts; None if they are not known."""
    use_cache: bool
    drafts: bool
    """True if it runs tokens that it may reject."""
    beams: bool
    """True if rows change hands between its calls."""
    number: int
    """Id of its sequences, if they have no cache or share it with drafts."""
    latest: list[int]
    """Id of the sequences of its last call, once it has made one."""
    has_run: bool = False
    """True if this is not its first call of the model."""

    def columns_until(self, end: int, call: _StackCall) -> Tensor:
        """Returns which of the first columns are no padding.

        Raises:
            HookError: the call has other rows.
        """
        if self.mask is None:
            return torch.ones(call.batch, end, dtype=torch.bool, device=call.device)
        if len(self.mask) != call.batch:
            msg = f"generate has {len(self.mask)} rows, but calls the model with {call.batch}"
            raise HookError(msg)
        mask = self.mask.to(call.device)
        new = mask.new_ones(call.batch, max(end - self.columns, 0))
        return torch.cat((mask, new), 1)[:, :end]


class Sequences:
    """Sequences that a request or batch has seen run.

    Args:
        prompt: numbers of tokens of the prompts, one for each row or one for all; none if the
            caller did not pass them.
        accept: called with the number of tokens that have run and stay, and the id of their
            sequences: after each step of a generation with drafts, and where a cache was cut back.
        stopped: returns the ends of the sequences of an id, of earlier turns too.
    """

    def __init__(
        self,
        prompt: Sequence[int] = (),
        accept: Callable[[int, int], None] | None = None,
        stopped: Callable[[int], Iterable[_End]] | None = None,
    ) -> None:
        self.prompt = prompt
        self._accept = accept
        self._stopped = stopped
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = {}
        """Sequences by their cache and generations by their configuration: by address."""

    def _get(self, key: Any) -> Any:
        key = _lasting(key)
        known = self._known.get(id(key))
        return None if known is None or known[0]() is not key else known[1]

    def _put(self, key: Any, value: Any) -> None:
        key = _lasting(key)
        address, known = id(key), self._known
        with contextlib.suppress(TypeError):  # a tuple: nothing can be kept with it
            known[address] = (weakref.ref(key, lambda _: known.pop(address, None)), value)

    def find(
        self, stack: TokenStack, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tokens:
        """Finds the tokens of a call.

        Raises:
            HookError: their positions are not known.
        """
        call = _StackCall(stack, stack.arguments(args, kwargs))
        before: _Sequence | None = None if call.cache is None else self._get(call.cache)
        past = call.past(before)
        generation = None if stack.encoder else self._generation(module, call, past)
        if before is not None and call.has_other_rows(before, reorders=generation is not None):
            before = before.of_other_rows(call.batch)
        if generation is not None and call.cache is None and generation.has_run:
            # Without a cache all tokens run again. Else the model keeps its own cache, and a longer
            # mask may show how many tokens it holds.
            past = past or None if generation.use_cache else 0
        goes_on = _continued(before, past, generation)
        positions = call.positions(past, generation, goes_on)
        ends = positions.amax(-1) + 1 if call.length else positions.new_zeros(call.batch)
        if goes_on is not None and goes_on.ends is not None:
            ends = torch.maximum(goes_on.ends, ends)
        prompt = None
        if generation is None and past == 0:
            prompt = (ends, call.length) if call.is_one_run() else None
        elif generation is None and before is not None and past and before.prompt is not None:
            # Not if the cache was cut back into its prompt.
            prompt = before.prompt if past >= before.prompt[1] else None
        number = _number_of(call, past, before, generation)
        drafts = generation is not None and generation.drafts
        if before is not None and past and past < before.seen and call.length and not drafts:
            number = self._cut_back(positions, number)
        after = (
            _Sequence(prompt, past + call.length, ends, number, call.batch)
            if past is not None and call.length
            else None
        )
        if call.cache is not None and after is not None:
            self._put(call.cache, after)
        if generation is not None:
            generation.latest[:] = [number]
            lengths = generation.lengths
        else:
            lengths = None if prompt is None else prompt[0]
        lengths = self._lengths(call, lengths)
        if drafts and _drafts_itself(module):  # its accepted tokens run again
            positions = torch.full_like(positions, PADDING)
        return Tokens(positions, lengths, after, number, call.cache, call.given, call.mask)

    def _cut_back(self, positions: Tensor, number: int) -> int:
        """Takes back the rows of tokens that were cut out of a cache; returns the new number.

        Args:
            positions: of the tokens that run after the cut.
            number: of the sequences before it.
        """
        starts = positions[:, 0].unique().tolist()
        if self._accept is None or len(starts) > 1:
            return next(_NUMBERS)  # no row of before is part of its value any more
        self._accept(starts[0], number)
        return number

    def note(self, tokens: Tokens, output: Any) -> None:
        """Takes note of the KV cache after a call: the given one, or the one in its output."""
        cache = _cache_in(output) if tokens.cache is None else tokens.cache
        if tokens.after is not None and cache is not None:
            self._put(cache, tokens.after._replace(memory=_memory_of(cache)))

    def _generation(
        self, module: nn.Module, call: _StackCall, past: int | None
    ) -> _GenerateCall | None:
        """Returns the input of the call of `generate` that a call is in; None outside of any."""
        local = self._generate_of(module)
        if local is None:
            return None
        config = local.get("generation_config")
        known: _GenerateCall | None = self._get(config)
        if known is None:
            known = _read(local, call, past)
            if known.drafts and self._accept is not None:
                _watch(local, known, self._accept)
            if self._stopped is not None:
                _end_rows(local, known, self._stopped)
            self._put(config, known._replace(has_run=True))
        return known

    @staticmethod
    def in_callback() -> bool:
        """Returns True in a call by what `generate` calls for each token, as a logits processor."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_globals.get("__name__") in _CALLBACKS:
                return True
            frame = frame.f_back
        return False

    def _lengths(self, call: _StackCall, found: Tensor | None) -> Tensor | None:
        """Returns the lengths of the prompts of a call; None if no source gives them."""
        if not self.prompt:
            return found if found is not None and len(found) == call.batch else None
        if len(self.prompt) not in {1, call.batch}:
            msg = f"prompt has {len(self.prompt)} lengths for a call of {call.batch} rows"
            raise HookError(msg)
        return torch.tensor(self.prompt, device=call.device).expand(call.batch)

    def _generate_of(self, module: nn.Module) -> dict[str, Any] | None:
        """Returns the local variables of the call of transformers' `generate` that a call is in.

        They are read from the stack frame: each call has one, on its thread, and nothing of
        transformers is changed. An assistant, which drafts, runs inside the call that it assists.
        """
        local: dict[str, Any] | None = None
        for found in _calls_of_generate():
            config = found.get("generation_config")
            if local is None and self._get(config) is None and not _contains(found, module):
                break
            local = found
            if not _is_assistant(found):
                break
        return local


class _StackCall:
    """Arguments of a call of a stack."""

    def __init__(self, stack: TokenStack, arguments: dict[str, Any]) -> None:
        self._name = stack.name
        self._arguments = arguments
        self.given = stack.tokens(arguments)
        self.batch, self.length = self.given.shape[:2]
        self.device = self.given.device
        self.cache = _given_cache(arguments)
        self.mask = arguments.get(f"{stack.prefix}attention_mask")
        self._mask = _unpadded(self.mask)
        places = arguments.get(f"{stack.prefix}position_ids")
        # With three dimensions they are not only positions of tokens (M-RoPE).
        self._places: Tensor | None = None
        if isinstance(places, Tensor) and places.dim() <= _PAIR:
            self._places = places.long()

    def past(self, before: _Sequence | None) -> int | None:
        """Returns how many tokens, padding included, came before; None if no source shows it."""
        cache, start = self.cache, self._arguments.get("cache_position")
        if isinstance(cache, tuple | list) and cache and isinstance(cache[0], tuple | list):
            return int(cache[0][0].shape[-2])
        if cache is not None and (length := _length_of(cache)) is not None:
            return length
        if before is not None:
            return before.seen
        if isinstance(start, Tensor) and start.numel():
            return int(start.reshape(-1)[0])
        mask = self._columns()
        if cache is not None and (mask is None or mask.shape[1] == self.length):
            return None
        return 0 if mask is None else max(mask.shape[1] - self.length, 0)

    def has_other_rows(self, before: _Sequence, *, reorders: bool) -> bool:
        """True if the rows of the cache were chosen, reordered or repeated since a call.

        Args:
            before: the sequence after that call.
            reorders: the caller is known to reorder rows itself.
        """
        if before.batch != self.batch:
            return True
        if reorders or self.batch == 1 or before.memory is None:
            return False
        memory = _memory_of(self.cache)
        return memory is not None and memory.cdata != before.memory.cdata

    def is_one_run(self) -> bool:
        """True if each row is one sequence, its tokens in order."""
        if self._places is None or self._columns() is not None:
            return True
        return bool((self._places.diff() == 1).all())

    def positions(
        self, past: int | None, generation: _GenerateCall | None, before: _Sequence | None
    ) -> Tensor:
        """Returns the position of each token, `PADDING` for padding: (batch, length).

        Raises:
            HookError: no source shows them.
        """
        if past is None:
            if self._places is None:
                raise self._unknown
            return self._places.expand(self.batch, self.length)
        own, until = self._columns(), past + self.length
        if own is not None and own.shape[1] >= until:
            return _counted(own[:, :until])[:, past:]
        if generation is not None:
            return _counted(generation.columns_until(until, self))[:, past:]
        if own is not None and before is not None and own.shape[1] == self.length:
            if before.ends is None:
                raise self._unknown
            counted = _counted(own)
            return (counted + before.ends[:, None]).where(counted >= 0, PADDING)
        if self._places is not None and (self._mask is None or self.is_one_run()):
            return self._places.expand(self.batch, self.length)
        if self._mask is not None or (before is not None and before.ends is None):
            raise self._unknown
        columns = torch.arange(self.length, device=self.device).expand(self.batch, self.length)
        return columns + (past if before is None else cast("Tensor", before.ends)[:, None])

    def _columns(self) -> Tensor | None:
        mask = self._mask
        return mask if isinstance(mask, Tensor) and mask.dim() == _PAIR else None

    @property
    def _unknown(self) -> HookError:
        given = [name for name, value in self._arguments.items() if value is not None]
        return HookError(
            f"the positions of a call of {self._name} are not known: {', '.join(given)} do not "
            "show how many tokens came before, or which are padding. Pass an attention_mask of "
            "shape (batch, tokens so far), or position_ids that increase by one"
        )


def _continued(
    before: _Sequence | None, past: int | None, generation: _GenerateCall | None
) -> _Sequence | None:
    """Returns the sequences that a call continues, with their ends if these are still known."""
    if before is None or not past:
        return None
    if past == before.seen:
        return before
    # The cache was cut back or filled elsewhere: how much of that was padding is not known.
    padded = before.ends is None or bool((before.ends != before.seen).any())
    return before._replace(ends=None) if padded and generation is None else None


def _number_of(
    call: _StackCall, past: int | None, before: _Sequence | None, generation: _GenerateCall | None
) -> int:
    """Returns the number of the sequences that a call continues, or a new one."""
    if generation is not None and generation.beams:
        return next(_NUMBERS)
    # A model may draft for itself: its call with the drafts replaces their rows.
    if generation is not None and generation.drafts:
        return generation.number
    if before is not None and past:
        return before.number
    # Without a cache all tokens of a generation run again.
    if generation is not None and call.cache is None:
        return generation.number
    return next(_NUMBERS)


def _unpadded(mask: Any) -> Any:
    """Returns a mask of (batch, tokens) as bools: models take any number but 0 as 1."""
    return mask != 0 if isinstance(mask, Tensor) and mask.dim() == _PAIR else mask


def _differ(one: Any, other: Any) -> bool:
    """True if two ids or two masks of one shape differ.

    Embeddings do not count: a model may change them before its inner call.
    """
    if not all(isinstance(each, Tensor) and each.dim() == _PAIR for each in (one, other)):
        return False
    if one is other or one.shape != other.shape:
        return False
    if one.is_floating_point() != other.is_floating_point():
        return False  # a part that gets embeddings for `input_ids`

    def memory(tensor: Tensor) -> Any:
        return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.stride()

    # The host waits for a GPU that compares, so the same memory is not compared.
    return memory(one) != memory(other) and bool((one != other.to(one.device)).any())


def _counted(mask: Tensor) -> Tensor:
    """Returns the position of each column, `PADDING` for padding."""
    return (mask.cumsum(-1) - 1).where(mask, PADDING)


def _has_states_alone(cache: Any) -> bool:
    """True for the cache of a state-space model, which has no keys and does not count."""
    return all(getattr(cache, "is_linear", None) or [False])


def _lasting(cache: Any) -> Any:
    """Returns the key of a cache: the first of a list of states, which are written in place."""
    states = isinstance(cache, tuple | list) and cache and isinstance(cache[0], Tensor)
    return cache[0] if states else cache


def _memory_of(cache: Any) -> StorageWeakRef | None:
    """Returns the memory of a cache's keys or states, if it keeps them in one place."""
    cache = getattr(cache, "self_attention_cache", cache)
    if getattr(cache, "offloading", False):
        return None
    layers = getattr(cache, "layers", ())
    kept = [getattr(layer, "keys", None) for layer in layers] or getattr(cache, "key_cache", [])
    for layer in layers:
        kept.extend(getattr(layer, "recurrent_states", {}).values())  # written in place
    found = next((each for each in kept if isinstance(each, Tensor) and each.numel()), None)
    return None if found is None else StorageWeakRef(found.untyped_storage())


def _length_of(cache: Any) -> int | None:
    """Returns the number of tokens that a KV cache holds; None if it does not know."""
    if _has_states_alone(cache):
        return None if cache.has_previous_state() else 0
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else None


def _given_cache(named: dict[str, Any]) -> Any:
    """Returns the KV cache in named values, if there is one."""
    found = (dict.get(named, name) for name in _CACHES)
    return next((cache for cache in found if cache is not None), None)


def _cache_in(output: Any) -> Any:
    """Returns the KV cache in a model's output, if there is one."""
    if isinstance(output, dict):
        return _given_cache(output)
    items = output if isinstance(output, tuple | list) else ()
    return next((item for item in items if hasattr(item, "get_seq_length")), None)


def _contains(local: Mapping[str, Any], module: nn.Module) -> bool:
    """True if a module is part of the model that generates."""
    model = local.get("self")
    return isinstance(model, nn.Module) and any(each is module for each in model.modules())


def _calls_of_generate() -> Iterator[dict[str, Any]]:
    """Yields the local variables of the calls of `generate` that a call is in, inner ones first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        place = frame.f_globals.get("__name__")
        if place in _CALLBACKS:
            return
        if place == _GENERATE and frame.f_code.co_name == "generate":
            yield frame.f_locals
        frame = frame.f_back


def _is_assistant(local: Mapping[str, Any]) -> bool:
    return bool(getattr(local.get("generation_config"), "is_assistant", False))


def _drafts_itself(module: nn.Module) -> bool:
    """True in a call by an assistant that is the model that it assists, as with early exit."""
    inner, *around = _calls_of_generate()
    return _is_assistant(inner) and any(_contains(each, module) for each in around)


def _read(local: Mapping[str, Any], call: _StackCall, past: int | None) -> _GenerateCall:
    """Reads the input of a call of `generate`, as its first call of the model begins.

    Raises:
        HookError: this version of transformers has others.
    """
    try:
        config, options, ids = (
            local[name] for name in ("generation_config", "model_kwargs", "input_ids")
        )
        decodes = bool(getattr(local["self"].config, "is_encoder_decoder", False))
    except KeyError as error:
        msg = (
            f"generate of this version of transformers does not expose its prompt ({error}): pass "
            "the number of its tokens with open(prompt=...)"
        )
        raise HookError(msg) from error
    mask = _unpadded(options.get(f"{_DECODER}attention_mask" if decodes else "attention_mask"))
    embeds = None if decodes else options.get("inputs_embeds")
    # After a cache its input is the whole text, if it has a mask as long, and else a continuation.
    whole = getattr(config, "_mask_length", None) if mask is None else mask.shape[1]
    if embeds is not None:
        columns = embeds.shape[1]
    elif whole is None or (past and _has_states_alone(call.cache)):
        columns = (past or 0) + ids.shape[1]
    else:
        columns = whole
    lengths: Tensor | None = torch.full((len(ids),), columns, device=call.device)
    if mask is not None:
        fits = mask.dim() == _PAIR and mask.shape[1] == columns
        mask, lengths = (mask, mask.to(call.device).sum(-1)) if fits else (None, None)
    drafts = getattr(local.get("decoding_method"), "__name__", "") == "_assisted_decoding"
    if not drafts and past is not None and past + call.length > columns:
        lengths = None  # a tuned prompt, of which `generate` does not know
    if (local.get("generation_mode_kwargs") or {}).get("assistant_tokenizer") is not None:
        lengths = None  # the drafts are of other tokens
    beams, number = (getattr(config, "num_beams", None) or 1) > 1, next(_NUMBERS)
    uses_cache = bool(config.use_cache)
    return _GenerateCall(columns, mask, lengths, uses_cache, drafts, beams, number, latest=[])


def _watch(
    local: Mapping[str, Any], generation: _GenerateCall, accept: Callable[[int, int], None]
) -> None:
    """Makes the stopping criteria of a call of `generate` report its accepted tokens, step by step.

    The list of them is made for the call. There is one row: others `generate` does not draft for.
    """
    before = local["input_ids"].shape[1]
    padding = 0 if generation.mask is None else int((~generation.mask).sum())
    prompt = generation.columns - padding

    def accepted(ids: Tensor, _scores: Any, **_others: Any) -> Tensor:
        # The last token was computed, and has not run.
        accept(prompt + ids.shape[1] - before - 1, generation.number)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    criteria = local.get("prepared_stopping_criteria")
    if not isinstance(criteria, list):
        msg = "generate of this version of transformers does not expose which drafts it rejects"
        raise HookError(msg)
    criteria.append(accepted)


def _end_rows(
    local: Mapping[str, Any], generation: _GenerateCall, stopped: Callable[[int], Iterable[_End]]
) -> None:
    """Makes a call of `generate` end rows: the next token of each is the end-of-sequence token.

    Args:
        local: its local variables: the lists of processors and criteria, which are made for it.
        generation: its input.
        stopped: returns the ends of some sequences.

    Raises:
        HookError: it drafts or has beams, has several texts and no token to end one with, or this
            version of transformers has other lists.
    """
    if generation.drafts or generation.beams:
        msg = "a plan with stop() needs generate without drafts and beams"
        raise HookError(msg)
    processors = local.get("prepared_logits_processor")
    criteria = local.get("prepared_stopping_criteria")
    if not isinstance(processors, list) or not isinstance(criteria, list):
        msg = "generate of this version of transformers does not expose how its rows end"
        raise HookError(msg)
    config = local["generation_config"]
    ends = [getattr(config, name, None) for name in ("_eos_token_tensor", "_pad_token_tensor")]
    end = next((int(it.reshape(-1)[0]) for it in ends if isinstance(it, Tensor)), None)
    if end is None and len(local["input_ids"]) > 1:
        msg = (
            "a plan with stop() cannot end one of several texts without a token for it: pass "
            "eos_token_id or pad_token_id to generate"
        )
        raise HookError(msg)
    lasts = None if generation.lengths is None else (generation.lengths - 1).tolist()

    def ended_rows() -> list[int]:
        found = [it for number in generation.latest for it in stopped(number) or ()]
        # An end before the last token of the prompt belongs to an earlier turn.
        return [row for row, position in found if lasts is None or position >= lasts[row]]

    def end_next(_ids: Tensor, scores: Tensor, **_others: Any) -> Tensor:
        rows = ended_rows()
        if not rows or end is None:
            return scores
        scores = scores.clone()
        scores[rows] = -torch.inf
        scores[rows, end] = 0
        return scores

    def ended(ids: Tensor, _scores: Any, **_others: Any) -> Tensor:
        found = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        found[ended_rows()] = True
        return found

    processors.append(end_next)
    criteria.append(ended)
