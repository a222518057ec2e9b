"""Modules of a model that take tokens."""

from __future__ import annotations

import inspect
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor, nn

from ferrohook.errors import HookError
from ferrohook.tokens.caches import given_cache
from ferrohook.tokens.positions import PAIR, unpadded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ferrohook.tokens.positions import Tokens

_TOKENS: Final = ("input_ids", "inputs_embeds")
DECODER: Final = "decoder_"
"""Prefix of the names of a decoder's tokens, in a module with an encoder too."""


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
            if isinstance(tokens, Tensor) and tokens.dim() >= PAIR:
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
        cache, mask = given_cache(arguments), arguments.get(f"{self.prefix}attention_mask")
        if cache is not None and cache is outer.cache:
            return True
        return not (_differ(given, outer.given) or _differ(mask, outer.mask, as_bools=True))


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
        prefix = DECODER if _has_decoder(module) else ""
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
    return f"{DECODER}input_ids" in _parameters(module)


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


def _differ(inner: Any, outer: Any, *, as_bools: bool = False) -> bool:
    """True if the ids, or the masks, of an inner call and of the call around it differ.

    A model may change embeddings ahead of its inner call, and replace negative ids, which are no
    tokens: these do not count.
    """
    if not all(isinstance(each, Tensor) and each.dim() == PAIR for each in (inner, outer)):
        return False

    def memory(tensor: Tensor) -> Any:
        return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.stride()

    # The host waits for a GPU that compares, so the same memory is not compared.
    if inner.shape != outer.shape or memory(inner) == memory(outer):
        return False
    if as_bools:
        inner, outer = unpadded(inner), unpadded(outer)
    if inner.is_floating_point() != outer.is_floating_point():
        return False  # a part that gets embeddings for `input_ids`
    outer = outer.to(inner.device)
    return bool(((inner != outer) & (outer >= 0)).any())
