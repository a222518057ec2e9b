"""Writes docs/llms.txt: the whole API in one file of text, for language models.

`python script/llms.py` writes it; a test compares the file with its output.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "llms.txt"
WIDTH = 220
"""Characters of a line, beyond which it has the signature alone."""
FRONTS = (
    "",
    "typing",
    "errors",
    "analysis",
    "rows",
    "data",
    "detectors",
    "plot",
    "engines",
    "service",
    "client",
)
INTERNAL = {
    *("at_part", "content", "extra_repr", "fits", "formula", "needs", "of_block", "vector_as")
}
"""Methods that other classes of the package call."""
INTRODUCTION = """\
# ferrohook

> Inspect or change what any nn.Module computes, for every caller or just for one thread, task or
> request, with hooks on a Rust core, eagerly and under torch.compile. `import ferrohook as fh`.

- What: a selector names modules by path ("layers.3"), glob ("layers.*", "**"), regex, class,
  predicate or a list of these; "@resid_post.3" names a quantity of the computation in the same
  places.
- A hook is PyTorch's: `hook(module, args, output)`; None observes, a value replaces.
  Interventions (fh.Add, fh.Scale, ...) and detectors are hooks that run natively.
- `with fh.capture(model, "layers.*") as acts: model(x)` then `acts["layers.3"]`, `acts.stack()`,
  `print(acts)`.
- `with fh.register(model, "layers.3", hook): model(x)`; without `with`, `.remove()` the handles
  that it returns.
- `with fh.scope(): fh.register(...)`: for this context's calls; `scope="global"`: every caller's.
- `fh.run(model, x, hooks={...}, capture="layers.*")` does all in one call: `output, acts = ...`.
- `fh.Plan(fh.on("layers.3", fh.Add(v)), fh.keep("layers.*")).prepare(model)`, then `with
  prepared.open() as request:` for each request, and `request.acts`. Without Python functions a
  plan is JSON: `to_json`, `from_json`.
- `fh.hooks(model)` lists the global hooks, `fh.clear(model)` removes them.
- Errors: fh.HookError is the base; fh.SelectionError names the closest modules, fh.HookTypeError
  the expected type; fh.errors has all of them.
- Pages: choosing.md, tutorial.md, recipes/, hooked-module.md, quantities.md, plans.md, rows.md,
  threads.md, serving.md, deploying.md, contract.md, reference.md.
"""


def text() -> str:
    """Returns the content of the file."""
    parts = [INTRODUCTION]
    for front in FRONTS:
        name = f"ferrohook.{front}".removesuffix(".")
        module = importlib.import_module(name)
        lines = [f"## {name}"]
        public = {each: getattr(module, each) for each in module.__all__ if each != "__version__"}
        errors = [each for each, value in public.items() if _is_error(value)]
        aliases = [each for each, value in public.items() if _is_alias(value)]
        for each, value in public.items():
            lines += [] if each in {*errors, *aliases} else described(each, value)
        for what, names in (("errors and warnings", errors), ("types of arguments", aliases)):
            lines += [f"- {what}: {', '.join(names)}"] if names else []
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def described(name: str, value: Any) -> list[str]:
    """Returns the lines of one public name."""
    if isinstance(value, ModuleType) or name.startswith("__"):
        return []
    if inspect.isclass(value):
        lines = [_line(f"{name}{_signature(value)}", value)]
        # Its methods for hooks are native; methods of other native bases are not for users.
        native = [base for base in value.__bases__ if base.__name__ == "HookedBase"]
        likewise = ""
        for each in sorted({name for owner in (value, *native) for name in vars(owner)}):
            member = inspect.getattr_static(value, each)
            if each.startswith("_") or each in INTERNAL or _is_override(value, each):
                continue
            sentence = (inspect.getdoc(member) or "").partition("\n\n")[0]
            if found := re.search(rf"see `((?!{name}\b)\w+)\.{each}`", sentence):
                likewise = f" Methods as those of `{found[1]}`."
            elif callable(getattr(value, each, None)):
                lines.append("  " + _line(f".{each}{_signature(getattr(value, each))}", member))
        if names := [each for each in sorted(vars(value)) if _is_attribute(value, each)]:
            lines[0] += f" Attributes: {', '.join(names)}."
        lines[0] += likewise
        return lines
    return [_line(f"{name}{_signature(value)}" if callable(value) else name, value)]


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _is_alias(value: object) -> bool:
    # A string, where the type refers to itself.
    return isinstance(value, str) or get_origin(value) is not None


def _is_attribute(owner: type, name: str) -> bool:
    member = inspect.getattr_static(owner, name)
    return not name.startswith("_") and (
        isinstance(member, property) or inspect.isdatadescriptor(member)
    )


def _is_override(owner: type, name: str) -> bool:
    """True for a method that its base describes."""
    described = inspect.getattr_static(owner, name).__doc__
    return not described and any(name in vars(base) for base in owner.__mro__[1:])


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        each.replace(annotation=each.empty)
        for name, each in signature.parameters.items()
        if name not in {"self", "_cls"}
    ]
    plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return re.sub(r"<(\w+)[^>]*>", r"\1", str(plain))


def _line(head: str, value: Any) -> str:
    about = inspect.getdoc(value) if callable(value) or isinstance(value, classmethod) else ""
    sentence = " ".join((about or "").partition("\n\n")[0].split())
    whole = f"- {head}: {sentence}" if sentence else f"- {head}"
    return whole if len(whole) <= WIDTH else f"- {head}"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"{FILE.relative_to(ROOT)}: {len(FILE.read_text().splitlines())} lines")
    sys.exit(0)
