"""Provider of models for Inspect: evaluations of a model under a plan.

Inspect finds it by its entry point. Needs the packages inspect-ai and openai as well.

Examples:
    >>> from inspect_ai import eval
    >>> args = {"plan": plan.to_json()}
    >>> eval(task, model="ferrohook/llama", model_base_url=url, model_args=args)

    $ inspect eval task.py --model ferrohook/llama --model-base-url URL -M plan=calm.json
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import safetensors.torch
from inspect_ai.model import (
    GenerateConfig,
    ModelAPI,
    ModelCall,
    ModelOutput,
    messages_to_openai,
    model_output_from_openai,
    modelapi,
)
from inspect_ai.tool import ToolFunction

from ferrohook.client.calls import plan_text
from ferrohook.client.clients import AsyncClient
from ferrohook.client.errors import UnavailableError
from ferrohook.engines.wire import NAME
from ferrohook.errors import HookError, HookTypeError
from ferrohook.plans import Plan

if TYPE_CHECKING:
    from inspect_ai.model import ChatMessage
    from inspect_ai.tool import ToolChoice, ToolInfo

    from ferrohook.client.answers import Generated

_FIELDS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "stop_seqs": "stop",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "num_choices": "n",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "reasoning_effort": "reasoning_effort",
}
"""Options of Inspect, by OpenAI's names."""


@modelapi(name="ferrohook")  # type: ignore[untyped-decorator, unused-ignore]  # if not installed
def ferrohook() -> type[ModelAPI]:
    """Returns the provider, as Inspect loads it."""
    return FerrohookAPI


class FerrohookAPI(ModelAPI):  # type: ignore[misc, unused-ignore]  # likewise
    """Model of a server that takes plans.

    Args:
        model_name: name of the server's model.
        base_url: of the server.
        api_key: of the server; defaults to the environment variable `FERROHOOK_API_KEY`.
        config: options of all requests.
        plan: of all requests: its JSON, as text or as a dict, or the path of a file of that. A
            request whose `GenerateConfig.extra_body` has the key "ferrohook" has that plan instead.
        captures: folder for what plans keep: a safetensors file for each answer, named in its
            output's metadata, where several (`num_choices`) are a list.
        **options: of `AsyncClient`.

    Raises:
        HookError: no `base_url`.
        HookTypeError: a `Plan` in place of its JSON: Inspect takes the models of all such plans for
            one.
        ValueError: the plan is no JSON.
        OSError: its file cannot be read.
    """

    def __init__(  # noqa: PLR0913 (Inspect's own, and two)
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        *,
        plan: Any = None,
        captures: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model_name, base_url, api_key, ["FERROHOOK_API_KEY"], config or GenerateConfig()
        )
        if base_url is None:
            msg = "the provider ferrohook needs the server's address: pass model_base_url"
            raise HookError(msg)
        self._plan = _Planned(plan)
        if self._plan.text is not None:
            # Part of the key of Inspect's cache of answers, which `model_args` are not.
            digest = hashlib.blake2b(self._plan.text.encode(), digest_size=16).hexdigest()
            self.base_url = f"{base_url}#plan={digest}"
        self._folder = None if captures is None else Path(captures)
        self._numbers = itertools.count()
        # A connection for each request: Inspect keeps a model for evaluations in several event
        # loops, and a connection belongs to one. Their number is Inspect's `max_connections`.
        options.setdefault(
            "limits", httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self._client = AsyncClient(base_url, api_key=self.api_key, **options)

    async def generate(
        self,
        input: list[ChatMessage],  # noqa: A002 (Inspect's name)
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Generates an answer, as Inspect asks for it."""
        options = _options(tools, tool_choice, config)
        plan = _Planned(options.pop(NAME)) if NAME in options else self._plan
        plan.check()
        if self._folder is None and plan.keeps:
            msg = "the plan keeps activations: pass captures=FOLDER to save them"
            raise HookError(msg)
        messages: Any = await messages_to_openai(input)
        found = await self._client.generate(messages, plan.text, model=self.model_name, **options)
        output = await model_output_from_openai(dict(found.raw))
        if paths := [path for each in (found, *found.others) if (path := self._saved(each))]:
            captures = paths if found.others else paths[0]
            output.metadata = {**(output.metadata or {}), "captures": captures}
        sent = {"messages": messages, "model": self.model_name, **options}
        if plan.text is not None:
            sent[NAME] = plan.text
        return output, ModelCall.create(sent, dict(found.raw))

    def _saved(self, found: Generated) -> str | None:
        """Saves the captures of an answer; returns the path of their file, None without any."""
        if self._folder is None or not found.acts:
            return None
        path = self._folder / f"{next(self._numbers):06}-{found.id}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(dict(found.acts), path)
        return str(path)

    def should_retry(self, ex: BaseException) -> bool:
        """True for a server that is busy or cannot be reached."""
        return isinstance(ex, UnavailableError)

    def connection_key(self) -> str:
        """Returns the address: requests to it share their limit."""
        return str(self.base_url)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.close()


class _Planned:
    """A plan that an evaluation names, as JSON."""

    def __init__(self, plan: Any) -> None:
        if isinstance(plan, Plan):
            msg = "the provider needs the JSON of a plan: pass plan.to_json()"
            raise HookTypeError(msg)
        self._file: Path | None = None
        if isinstance(plan, str | Path) and not str(plan).lstrip().startswith("{"):
            self._file = Path(plan)
        given: Any = plan if self._file is None else self._file.read_text()
        self.text: str | None = None
        self.keeps = False
        if given is not None:
            self.text, self.keeps = plan_text(given)

    def check(self) -> None:
        """Checks that the file has the plan that it had: Inspect keeps models.

        Raises:
            HookError: it has another.
        """
        if self._file is not None and self._file.read_text() != self.text:
            msg = f"{self._file} changed since its plan was read: use a separate file for each plan"
            raise HookError(msg)


def _options(tools: list[ToolInfo], choice: ToolChoice, config: GenerateConfig) -> dict[str, Any]:
    """Returns the fields of a chat."""
    found: dict[str, Any] = {
        field: value
        for name, field in _FIELDS.items()
        if (value := getattr(config, name)) is not None
    }
    if config.response_schema is not None:
        schema = config.response_schema.model_dump(exclude_none=True)
        schema["schema"] = schema.pop("json_schema")
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    if tools:
        kept = {"name", "description", "parameters"}
        found["tools"] = [
            {"type": "function", "function": it.model_dump(include=kept, exclude_none=True)}
            for it in tools
        ]
        if isinstance(choice, ToolFunction):
            found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            found["tool_choice"] = "required" if choice == "any" else choice
        if config.parallel_tool_calls is not None:
            found["parallel_tool_calls"] = config.parallel_tool_calls
    return {**found, **(config.extra_body or {})}
