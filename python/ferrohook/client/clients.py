"""`Client`, which waits, and `AsyncClient`, which awaits."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from ferrohook.client.calls import Calls
from ferrohook.client.errors import error_of_status, unreachable
from ferrohook.client.streaming import AsyncTextStream, TextStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from ferrohook.client.answers import Embedded, Generated, ServerInfo
    from ferrohook.client.calls import AnyPlan, Prompt, Steps
    from ferrohook.dictionaries.dictionary import Dictionary

T = TypeVar("T")


def _settings(
    base_url: str, api_key: str | None, timeout: float, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the options of an httpx client."""
    headers = httpx.Headers(options.get("headers"))
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    # As OpenAI's clients take it, with the /v1 that all paths here begin with.
    url = base_url.rstrip("/").removesuffix("/v1")
    return {"timeout": timeout, **options, "base_url": url, "headers": headers}


class Client:
    """Client of a server that takes plans. A context manager; threads may share it.

    Args:
        base_url: of the server, with or without /v1.
        api_key: of the server.
        timeout: seconds without a byte from the server after which a request fails.
        **options: of `httpx.Client`, such as `transport` and `verify`.

    Examples:
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     client.generate("Once upon a time", plan, max_tokens=20).text
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0, **options: Any
    ) -> None:
        self._http = httpx.Client(**_settings(base_url, api_key, timeout, options))
        self._calls = Calls(self._http)

    def info(self) -> ServerInfo:
        """Returns the features and modules of the server, which it asks once.

        Raises:
            ServerError: the server does not support plans; or see `generate`.
        """
        return self._run(self._calls.info())

    def generate(
        self, prompt: Prompt, plan: AnyPlan = None, *, model: str | None = None, **options: Any
    ) -> Generated:
        """Generates a text, and fetches what its plan keeps.

        Args:
            prompt: a text, its tokens, or the messages of a chat.
            plan: hooks and captures of this request, as a `Plan` or as its JSON.
            model: name of the model, where the server has several.
            **options: further fields of OpenAI's completions or chats, such as `max_tokens`. With
                `n`, the texts after the first one are in `Generated.others`.

        Raises:
            RequestRefusedError: the request is bad, or the server serves no such plan.
            PlanFailedError: the plan failed while it ran.
            UnavailableError: the server cannot be reached, is busy, or closed the connection.
            ServerError: any other error of the server, such as a plan that it ignored.
            HookTypeError: `prompt` or `plan` has the wrong type, or the plan has Python functions
                in it.
            ValueError: the plan has NaN or an infinity, or is not JSON.
        """
        return self._run(self._calls.generate(prompt, plan, model, options))

    @contextlib.contextmanager
    def stream(
        self, prompt: Prompt, plan: AnyPlan = None, *, model: str | None = None, **options: Any
    ) -> Iterator[TextStream]:
        """Streams a text while it is generated; leaving the block ends it.

        Args:
            prompt: see `generate`.
            plan: see `generate`.
            model: see `generate`.
            **options: see `generate`.

        Raises:
            ServerError, HookTypeError, ValueError: see `generate`.

        Examples:
            >>> with client.stream("Once upon a time", plan) as stream:
            ...     for piece in stream:
            ...         print(piece, end="")
            ...     stream.generated.acts
        """
        pending = self._run(self._calls.begin(prompt, plan, model, options, stream=True))
        response = self._send(pending.request, stream=True)
        with contextlib.closing(response):
            if not response.is_success:
                response.read()
                raise error_of_status(response)
            yield TextStream(
                pending,
                response,
                lambda text, proof: self._run(self._calls.finish(pending, text, proof)),
            )

    def embed(
        self,
        texts: Sequence[str],
        plan: AnyPlan = None,
        *,
        reduce: Sequence[str] = ("mean",),
        count: Sequence[str] = (),
    ) -> Embedded:
        """Embeds texts with a service.

        Args:
            texts: the texts.
            plan: hooks and captures of this request, as a `Plan` or as its JSON.
            reduce: how each capture is answered, see `Embedded.captures`.
            count: modules whose calls are counted.

        Raises:
            ServerError, HookTypeError, ValueError: see `generate`.

        Warns:
            NeverFiredWarning: captured modules never ran.
        """
        return self._run(self._calls.embed(texts, plan, reduce, count))

    def put_vectors(self, vectors: Mapping[str, Tensor]) -> None:
        """Uploads vectors, which the JSON of plans refers to by name, as in `{"tensor": "joy"}`.

        Raises:
            HookTypeError: a vector is no tensor.
            ServerError: see `generate`.
        """
        self._run(self._calls.put_vectors(vectors))

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Lists the uploaded vectors, with their shapes.

        Raises:
            ServerError: see `generate`.
        """
        return self._run(self._calls.vectors())

    def drop_vectors(self, names: Iterable[str]) -> None:
        """Drops uploaded vectors.

        Raises:
            KeyError: no vector has the name.
            ServerError: see `generate`.
        """
        self._run(self._calls.drop("vectors", names))

    def put_dictionaries(self, dictionaries: Iterable[Dictionary]) -> None:
        """Uploads dictionaries, which plans name by `Dictionary.name`, unless the server has them.

        If a name was used before, later requests with it use the new dictionary.

        Args:
            dictionaries: each with a name.

        Raises:
            HookTypeError: one is no `Dictionary`.
            ValueError: one has no name, or two have the same.
            ServerError: see `generate`.

        Examples:
            >>> sae = fh.Dictionary.load("sae/blocks.8.hook_resid_post", name="sae")
            >>> client.put_dictionaries([sae])
            >>> plan = fh.Plan(fh.on(sae.reads, fh.Feature(sae, 3, set=5.0)))
        """
        self._run(self._calls.put_dictionaries(dictionaries))

    def dictionaries(self) -> dict[str, dict[str, Any]]:
        """Lists the uploaded dictionaries: `digest`, `bytes`, `activation`, `d_in`, `d_sae`, ...

        Raises:
            ServerError: see `generate`.
        """
        return self._run(self._calls.dictionaries())

    def drop_dictionaries(self, names: Iterable[str]) -> None:
        """Drops uploaded dictionaries.

        Raises:
            KeyError: no dictionary has the name.
            ServerError: see `generate`.
        """
        self._run(self._calls.drop("dictionaries", names))

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Calls any route of a service, such as one of yours with a `PlanBody`.

        Args:
            method: of HTTP.
            path: of the route.
            body: anything for JSON; plans in it are written as objects, tensors as lists.

        Returns:
            The JSON of the answer.

        Raises:
            ServerError: see `generate`.

        Examples:
            >>> client.call("POST", "/score", {"x": x, "plan": plan})
        """
        return self._run(self._calls.call(method, path, body))

    def close(self) -> None:
        """Closes the connections; idempotent."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self._http.base_url}>"

    def _run(self, steps: Steps[T]) -> T:
        with contextlib.closing(steps):
            try:
                request = next(steps)
                while True:
                    request = steps.send(self._send(request))
            except StopIteration as end:
                result: T = end.value
                return result

    def _send(self, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
        try:
            return self._http.send(request, stream=stream)
        except httpx.TransportError as error:
            raise unreachable(error, request) from error


class AsyncClient:
    """Client of a server that takes plans, for asyncio. An asynchronous context manager.

    Args:
        base_url: see `Client`.
        api_key: see `Client`.
        timeout: see `Client`.
        **options: of `httpx.AsyncClient`.

    Examples:
        >>> async with AsyncClient("http://127.0.0.1:8000") as client:
        ...     plain, steered = await asyncio.gather(
        ...         client.generate(text), client.generate(text, plan)
        ...     )
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0, **options: Any
    ) -> None:
        self._http = httpx.AsyncClient(**_settings(base_url, api_key, timeout, options))
        self._calls = Calls(self._http)

    async def info(self) -> ServerInfo:
        """Returns the features of the server, see `Client.info`."""
        return await self._run(self._calls.info())

    async def generate(
        self, prompt: Prompt, plan: AnyPlan = None, *, model: str | None = None, **options: Any
    ) -> Generated:
        """Generates a text, see `Client.generate`."""
        return await self._run(self._calls.generate(prompt, plan, model, options))

    @contextlib.asynccontextmanager
    async def stream(
        self, prompt: Prompt, plan: AnyPlan = None, *, model: str | None = None, **options: Any
    ) -> AsyncIterator[AsyncTextStream]:
        """Streams a text while it is generated, see `Client.stream`."""
        begin = self._calls.begin(prompt, plan, model, options, stream=True)
        pending = await self._run(begin)
        response = await self._send(pending.request, stream=True)
        try:
            if not response.is_success:
                await response.aread()
                raise error_of_status(response)
            yield AsyncTextStream(
                pending,
                response,
                lambda text, proof: self._run(self._calls.finish(pending, text, proof)),
            )
        finally:
            await response.aclose()

    async def embed(
        self,
        texts: Sequence[str],
        plan: AnyPlan = None,
        *,
        reduce: Sequence[str] = ("mean",),
        count: Sequence[str] = (),
    ) -> Embedded:
        """Embeds texts, see `Client.embed`."""
        return await self._run(self._calls.embed(texts, plan, reduce, count))

    async def put_vectors(self, vectors: Mapping[str, Tensor]) -> None:
        """Uploads vectors, see `Client.put_vectors`."""
        await self._run(self._calls.put_vectors(vectors))

    async def vectors(self) -> dict[str, tuple[int, ...]]:
        """Lists the uploaded vectors, see `Client.vectors`."""
        return await self._run(self._calls.vectors())

    async def drop_vectors(self, names: Iterable[str]) -> None:
        """Drops uploaded vectors, see `Client.drop_vectors`."""
        await self._run(self._calls.drop("vectors", names))

    async def put_dictionaries(self, dictionaries: Iterable[Dictionary]) -> None:
        """Uploads dictionaries, see `Client.put_dictionaries`."""
        await self._run(self._calls.put_dictionaries(dictionaries))

    async def dictionaries(self) -> dict[str, dict[str, Any]]:
        """Lists the uploaded dictionaries, see `Client.dictionaries`."""
        return await self._run(self._calls.dictionaries())

    async def drop_dictionaries(self, names: Iterable[str]) -> None:
        """Drops uploaded dictionaries, see `Client.drop_dictionaries`."""
        await self._run(self._calls.drop("dictionaries", names))

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Calls any route of a service, see `Client.call`."""
        return await self._run(self._calls.call(method, path, body))

    async def close(self) -> None:
        """Closes the connections; idempotent."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncClient of {self._http.base_url}>"

    async def _run(self, steps: Steps[T]) -> T:
        with contextlib.closing(steps):
            try:
                request = next(steps)
                while True:
                    request = steps.send(await self._send(request))
            except StopIteration as end:
                result: T = end.value
                return result

    async def _send(self, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
        try:
            return await self._http.send(request, stream=stream)
        except httpx.TransportError as error:
            raise unreachable(error, request) from error
