"""`select`: matches, order and errors."""

from __future__ import annotations

import functools
import re
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ferrohook as fh
from ferrohook.errors import HookError, HookTypeError, SelectionError
from ferrohook.names.select import select


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(2, 2)
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Model(nn.Module):
    """A model with a module of two names, and names with glob characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"tokens": nn.Embedding(3, 2)})
        self.tied = self.embed
        self.gone = None
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.odd = nn.ModuleDict({name: nn.Identity() for name in ("x*", "xy", "[z", "**", "0")})
        self.register_module("none", None)


@pytest.fixture
def model() -> Model:
    return Model()


def names(model: nn.Module, **options: Any) -> list[str]:
    return [name for name, _ in model.named_modules(**options)]


def layers(*paths: str) -> list[str]:
    return [f"layers.{i}{path}" for i in range(12) for path in paths]


ODD = [f"odd.{name}" for name in ("x*", "xy", "[z", "**", "0")]

FOUND: dict[str, tuple[Any, list[str]]] = {
    "the model": ("", [""]),
    "a path": ("layers.3.mlp", ["layers.3.mlp"]),
    "a second path": ("tied.tokens", ["tied.tokens"]),
    "both paths": (["tied", "embed"], ["embed", "tied"]),
    "a path with a star": ("odd.x*", ["odd.x*"]),
    "a path with two": ("odd.**", ["odd.**"]),
    "a path with a bracket": ("odd.[z", ["odd.[z"]),
    "a star": ("*", ["embed", "layers", "odd"]),
    "a star in a path": ("layers.*.mlp", layers(".mlp")),
    "a star in a segment": ("layers.*.m*p", layers(".mlp")),
    "two stars in a segment": ("layers.*.m**", layers(".mlp")),
    "a question mark": ("layers.1?.attn", ["layers.10.attn", "layers.11.attn"]),
    "a set": ("layers.[13].attn", ["layers.1.attn", "layers.3.attn"]),
    "a range": ("layers.[0-1].attn", ["layers.0.attn", "layers.1.attn"]),
    "a complement": ("odd.[!x0]*", ["odd.[z", "odd.**"]),
    "a quoted star": ("odd.[*]*", ["odd.**"]),
    "an unbalanced bracket": ("o*.[z", ["odd.[z"]),
    "any segments first": ("**.attn", layers(".attn")),
    "none of them": ("**.embed", ["embed"]),
    "any segments last": ("embed.**", ["embed", "embed.tokens"]),
    "any segments inside": ("layers.**.0", ["layers.0", *layers(".mlp.0")]),
    "any segments twice": ("**.**.tokens", ["embed.tokens"]),
    "a depth": ("*.*.*.*", layers(".mlp.0", ".mlp.1")),
    "a regex": (re.compile(r"\.1\.mlp"), [f"layers.1.mlp{rest}" for rest in ("", ".0", ".1")]),
    "an anchored regex": (re.compile(r"^(embed|odd)$"), ["embed", "odd"]),
    "a regex with flags": (re.compile("TOKENS", re.IGNORECASE), ["embed.tokens"]),
    "a regex for the model": (re.compile("^$"), [""]),
    "a class": (Block, layers("")),
    "a base class": (nn.ModuleDict, ["embed", "odd"]),
    "the model's class": (Model, [""]),
    "classes": ((nn.ReLU, nn.Embedding), ["embed.tokens", *layers(".mlp.1")]),
    "a predicate": (lambda name, module: name > "o" and not [*module.children()], ODD),
    "a truthy predicate": (lambda name, _: re.match("emb", name), ["embed", "embed.tokens"]),
    "a partial": (functools.partial(lambda wanted, name, _: name == wanted, "odd"), ["odd"]),
    "a list": (["odd", "embed"], ["embed", "odd"]),
    "a set of paths": ({"odd", "embed"}, ["embed", "odd"]),
    "a frozenset": (frozenset({"odd", nn.Embedding}), ["embed.tokens", "odd"]),
    "keys": ({"odd": 1, "embed": 2}.keys(), ["embed", "odd"]),
    "nested": ([("odd", [Block]), {re.compile("tok")}], ["embed.tokens", *layers(""), "odd"]),
    "overlapping": (["odd", "od?", "odd"], ["odd"]),
    "a text": (type("Text", (str,), {})("odd"), ["odd"]),
}


@pytest.mark.parametrize("case", FOUND)
def test_select_finds_the_expected_modules(model: Model, case: str) -> None:
    what, expected = FOUND[case]
    found = select(model, what)
    assert list(found) == expected
    real = dict(model.named_modules(remove_duplicate=False))
    assert all(module is real[name] for name, module in found.items())


@pytest.mark.parametrize("everything", [None, "**", "**.**", re.compile(""), nn.Module])
def test_selecting_everything_equals_named_modules(model: Model, everything: Any) -> None:
    assert list(select(model, everything).items()) == list(model.named_modules())
    assert select(model) == dict(model.named_modules())


def test_predicates_get_every_module_once_under_its_first_name(model: Model) -> None:
    seen: list[tuple[str, nn.Module]] = []

    def seeing(name: str, module: nn.Module) -> bool:
        seen.append((name, module))
        return True

    select(model, seeing)
    assert seen == list(model.named_modules())


@pytest.mark.parametrize("pattern", ["tied*", "tied.*", "**.tied", re.compile("tied")])
def test_second_names_match_only_exact_paths(model: Model, pattern: Any) -> None:
    assert select(model, "tied") == {"tied": model.embed}
    with pytest.raises(SelectionError):
        select(model, pattern)


def test_a_wrapper_in_the_model_is_found_itself(model: Model) -> None:
    hooked = fh.HookedModule(model.layers[3])
    model.layers[3] = hooked
    assert select(model, "layers.3") == {"layers.3": hooked}
    assert select(model, fh.HookedModule) == {"layers.3": hooked}
    assert list(select(model, Block)) == layers("")
    assert select(model, "layers.3.*") == {"layers.3.attn": hooked.attn, "layers.3.mlp": hooked.mlp}
    whole = fh.HookedModule(model)
    assert list(select(whole)) == names(model)
    assert select(whole, "")[""] is whole


def test_a_module_that_contains_itself_is_visited_once() -> None:
    parent = nn.ModuleDict({"child": nn.ModuleDict()})
    parent["child"]["parent"] = parent
    assert list(select(parent)) == ["", "child"]
    assert select(parent, "child.parent.child") == {"child.parent.child": parent["child"]}


def test_a_module_with_very_many_paths_is_visited_once() -> None:
    module: nn.Module = nn.Identity()
    for _ in range(60):
        module = nn.Sequential(module, module)
    last = ".".join("1" * 60)
    assert list(select(module, [last, ""])) == ["", last]
    assert len(select(module)) == 61
    with pytest.raises(SelectionError):
        select(module, last + ".1")


def test_a_predicate_may_change_the_model(model: Model) -> None:
    before = names(model)

    def adding(name: str, module: nn.Module) -> bool:
        module.add_module("added", nn.Identity())
        return True

    assert list(select(model, adding)) == before
    assert "layers.0.added" in names(model)


@pytest.mark.usefixtures("switch_often")
def test_another_thread_may_change_the_model(model: Model) -> None:
    for i in range(200):
        model.odd[f"more{i}"] = nn.Identity()
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            model.odd["changing"] = nn.Identity()
            del model.odd["changing"]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(500):
            assert list(select(model, "odd.more*"))[::199] == ["odd.more0", "odd.more199"]
    finally:
        stop.set()
        thread.join()


# Refused arguments. The whole text of errors is compared: users rely on it.

TAKES = (
    "a selector must be a path, a glob, a compiled regex of str, a module, a subclass of "
    "nn.Module, a predicate (name, module) -> bool, or a list, tuple or set of these, got "
)
WRONG: dict[str, tuple[Any, str]] = {
    "a number": (3, "int"),
    "bytes": (b"odd", "bytes"),
    "a regex of bytes": (re.compile(b"odd"), "the pattern re.compile(b'odd')"),
    "a class": (int, "the class int"),
    "a class among others": ((nn.ReLU, int), "the class int"),
    "a union of classes": (nn.Linear | nn.ReLU, "UnionType"),
    "a generic class": (fh.HookedModule[nn.Linear], "GenericAlias"),
    "a mapping": ({"odd": 1}, "dict"),
    "an iterator": (iter(["odd"]), "list_iterator"),
    "None among others": (["odd", None], "NoneType"),
    "a number deep inside": (["odd", ("odd", {3})], "int"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_types_are_refused(model: Model, case: str) -> None:
    what, given_ = WRONG[case]
    with pytest.raises(HookTypeError) as caught:
        select(model, what)
    assert str(caught.value) == TAKES + given_


@pytest.mark.parametrize(
    ("wrong", "given_"), [(Model, "the class Model"), ("odd", "str"), (None, "NoneType")]
)
def test_selecting_from_anything_but_a_module_is_refused(wrong: Any, given_: str) -> None:
    with pytest.raises(HookTypeError) as caught:
        select(wrong, "odd")
    message = f"model must be an instance of nn.Module, got {given_}"
    assert str(caught.value) == message


def test_a_module_is_a_selector(model: Model) -> None:
    for module, name in [
        (model.layers[0].mlp, "layers.0.mlp"),
        (model.tied, "embed"),
        (model, ""),
    ]:
        assert select(model, module) == {name: module}
        assert set(select(model, ["odd", module])) == {name, "odd"}
    with pytest.raises(SelectionError, match=r"^this ReLU is not in the Model$"):
        select(model, ["odd", nn.ReLU()])


def test_modules_are_taken_where_names_are(model: Model) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x, zero = torch.ones(1, 2), torch.zeros(1, 2)
    plan = fh.Plan(fh.on(net[0], fh.Zero()), fh.keep(net[0]))
    assert "Linear(in_features=2" in repr(plan)
    for each in (
        fh.run(net, x, plan=plan),
        fh.run(net, x, hooks={net[0]: fh.Zero()}, capture=net[0]),
    ):
        assert torch.equal(each.acts["0"], zero)
    with fh.register(net, net[1], fh.Zero()), fh.capture(net, net) as acts:
        assert torch.equal(net(x), zero)
    assert torch.equal(acts[""], zero)
    with pytest.raises(HookTypeError, match=r"JSON can hold only paths.* not Linear\("):
        plan.to_json()


def takes_one(name: str) -> bool:
    return bool(name)


def takes_three(name: str, module: nn.Module, more: int) -> bool:
    return bool(name)


class Unnamed:
    def __call__(self, name: str) -> bool:
        return bool(name)

    def __repr__(self) -> str:
        return "<one>"


@pytest.mark.parametrize(
    ("predicate", "title"),
    [
        (takes_one, f"{__name__}.takes_one"),
        (takes_three, f"{__name__}.takes_three"),
        (functools.lru_cache(takes_one), f"{__name__}.takes_one"),
        (len, "builtins.len"),
        (Unnamed(), "<one>"),
    ],
)
def test_a_predicate_takes_name_and_module(model: Model, predicate: Any, title: str) -> None:
    with pytest.raises(HookTypeError) as caught:
        select(model, predicate)
    called = "a function that selects modules must accept (name, module)"
    assert str(caught.value) == f"{called}, got {title}"
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("error", [KeyError("its own"), TypeError("its own"), KeyboardInterrupt()])
def test_an_exception_of_a_predicate_propagates(model: Model, error: BaseException) -> None:
    def raising(name: str, module: nn.Module) -> bool:
        raise error

    with pytest.raises(type(error)) as caught:
        select(model, raising)
    assert caught.value is error
    assert error.__cause__ is None


def test_an_exception_of_bool_on_a_predicates_result_propagates(model: Model) -> None:
    class Undecided:
        def __bool__(self) -> bool:
            msg = "neither"
            raise TypeError(msg)

    with pytest.raises(TypeError, match="neither") as caught:
        select(model, lambda *_: Undecided())
    assert not isinstance(caught.value, HookError)


NEAR: dict[str, tuple[Any, list[str]]] = {
    "one letter missing": ("layer.3.mlp", ["layers.3.mlp"]),
    "two letters swapped": ("mpl", [f"layers.{i}.mlp" for i in range(5)]),
    "the last segment alone": ("attn", [f"layers.{i}.attn" for i in range(5)]),
    "another root": ("transformer.h.11.attn", ["layers.11.attn"]),
    "a case": ("Embed", ["embed"]),
    "an index too many": ("layers.12", ["layers.1", "layers.2", "layers.10", "layers.11"]),
    "a parameter": ("layers.3.attn.weight", ["layers.3.attn"]),
    "a dot too many": ("layers.3.", ["layers.3"]),
    "a prefix": (".odd", ["odd"]),
    "a glob": ("layer.*.mlp", ["layers.0.mlp"]),
    "a glob below": ("**.tokns", ["embed.tokens"]),
    "a second name's child": ("tied.token", ["embed.tokens"]),
    "a regex": (re.compile(r"layer\.3\.mlp"), ["layers.3.mlp"]),
}


def suggested(error: SelectionError) -> list[str]:
    return re.findall("'(.*?)'", str(error).split(" in it are ")[1])


@pytest.mark.parametrize("case", NEAR)
def test_the_closest_names_are_suggested(model: Model, case: str) -> None:
    what, expected = NEAR[case]
    with pytest.raises(SelectionError) as caught:
        select(model, what)
    assert str(caught.value).startswith(f"nothing in Model matches {what!r}; the closest names in")
    assert suggested(caught.value)[: len(expected)] == expected
    assert len(suggested(caught.value)) <= 5
    assert set(suggested(caught.value)) <= set(names(model))


DEEPER = {
    "*.mlp": "layers.*.mlp",
    "?.mlp": "layers.?.mlp",
    "tok*": "embed.tok*",
    "mlp.*": "**.mlp.*",
    "nope.*": None,
    "att*": "**.att*",
}


@pytest.mark.parametrize("glob", DEEPER)
def test_a_glob_that_matches_further_down_is_suggested_with_its_prefix(
    model: Model, glob: str
) -> None:
    with pytest.raises(SelectionError) as caught:
        select(model, glob)
    deeper = DEEPER[glob]
    shown = f"nothing in Model matches {glob!r}; {deeper!r} does"
    assert (str(caught.value) == shown) == (deeper is not None)
    assert deeper is None or select(model, deeper)


def fits_none(name: str, module: nn.Module) -> None:
    pass


class Tokens(nn.Module):
    pass


class Linear(nn.Module):
    """A class with the name of torch's."""


FIRST = "the first names in it are 'embed', 'embed.tokens', 'layers', 'layers.0', 'layers.0.attn'"
TORCH = "torch.nn.modules"
EMBEDDING = f"{TORCH}.sparse.Embedding"
FIRST_CLASSES = (
    f"'{__name__}.Model', '{TORCH}.container.ModuleDict', '{EMBEDDING}', "
    f"'{TORCH}.container.ModuleList', '{__name__}.Block'"
)
MESSAGES: dict[str, tuple[Any, str]] = {
    "a path like none": ("QQQQ", f"'QQQQ'; {FIRST}"),
    "a regex like none": (re.compile("QQQQ"), f"re.compile('QQQQ'); {FIRST}"),
    "a predicate": (fits_none, f"the predicate {__name__}.fits_none; {FIRST}"),
    "a glob": (
        "odd.x?z",
        "'odd.x?z'; the closest names in it are 'odd.x*', 'odd.xy', 'odd.[z', 'odd.0', 'odd.**'",
    ),
    "a class": (
        nn.EmbeddingBag,
        f"the class {TORCH}.sparse.EmbeddingBag; the closest classes in it are '{EMBEDDING}'",
    ),
    "another class of the same name": (
        Linear,
        f"the class {__name__}.Linear; the closest classes in it are '{TORCH}.linear.Linear'",
    ),
    "a class like none": (
        Tokens,
        f"the class {__name__}.Tokens; the first classes in it are " + FIRST_CLASSES,
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_the_error_of_no_match_names_the_selector_and_available_names(
    model: Model, case: str
) -> None:
    what, message = MESSAGES[case]
    for selector in (
        what,
        ["odd", (what,)],
    ):  # other members of a collection do not hide the failure
        with pytest.raises(SelectionError) as caught:
            select(model, selector)
        assert str(caught.value) == f"nothing in Model matches {message}"
        assert isinstance(caught.value, HookError)
        assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize(
    ("what", "shown"),
    [("0", "'0'"), ("*", "'*'"), (nn.ReLU, "the class torch.nn.modules.activation.ReLU")],
)
def test_the_error_names_a_model_without_submodules(what: Any, shown: str) -> None:
    with pytest.raises(SelectionError) as caught:
        select(nn.Sequential(), what)
    assert str(caught.value) == f"nothing in Sequential matches {shown}: it has no submodules"


@pytest.mark.parametrize("path", ["layers.0.attn", "**.attn", re.compile("attn")])
def test_a_model_without_submodules_is_selected_itself(path: Any) -> None:
    leaf = nn.Linear(1, 1)
    assert select(leaf) == select(leaf, "") == select(leaf, "**") == {"": leaf}
    with pytest.raises(SelectionError):
        select(leaf, path)


@pytest.mark.parametrize("empty", [[], (), set(), frozenset(), {}.keys()])
def test_an_empty_collection_is_an_error(model: Model, empty: Any) -> None:
    message = f"^an empty {type(empty).__name__} selects nothing$"
    for selector in (empty, ["odd", empty]):
        with pytest.raises(SelectionError, match=message):
            select(model, selector)


@pytest.mark.parametrize(
    "path",
    ["layers.", ".layers", "layers..0", ".", " odd", "ODD", "**.ATTN", "none", "gone", "layers.-1"],
)
def test_a_path_matches_literally(model: Model, path: str) -> None:
    with pytest.raises(SelectionError):
        select(model, path)


# Random models: a module has any later modules of a list as children, in any number of places.

NAMES = st.text("ab*[]!", min_size=1, max_size=3)


@st.composite
def models(draw: st.DrawFn, segments: st.SearchStrategy[str] = NAMES) -> nn.Module:
    modules: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 6))):
        children = (
            draw(st.dictionaries(segments, st.sampled_from(modules), max_size=3)) if modules else {}
        )
        modules.append(nn.ModuleDict(children))
    return modules[-1]


@given(models())
def test_selecting_everything_equals_named_modules_of_any_model(model: nn.Module) -> None:
    assert list(select(model).items()) == list(model.named_modules())


@given(models(), st.data())
def test_any_paths_are_found_in_the_order_of_named_modules(
    model: nn.Module, data: st.DataObject
) -> None:
    every = dict(model.named_modules(remove_duplicate=False))
    wanted = data.draw(st.lists(st.sampled_from(list(every)), min_size=1))
    found = select(model, wanted)
    assert list(found) == [name for name in every if name in wanted]
    assert all(module is every[name] for name, module in found.items())


@given(models(), st.data())
def test_a_collection_is_the_union_of_its_members(model: nn.Module, data: st.DataObject) -> None:
    single = st.one_of(
        st.sampled_from(names(model, remove_duplicate=False)),
        st.sampled_from(["*", "**", "a*", "**.b", "*.*", re.compile("a"), nn.ModuleDict, nn.ReLU]),
    )
    what = data.draw(st.recursive(single, st.lists, max_leaves=5))
    if not isinstance(what, list):
        what = [what]
    try:
        parts = [select(model, member) for member in what]
    except SelectionError as error:
        with pytest.raises(SelectionError, match=f"^{re.escape(str(error))}$"):
            select(model, what)
        return
    if parts:
        union = {name for part in parts for name in part}
        every = names(model, remove_duplicate=False)
        assert list(select(model, what)) == [name for name in every if name in union]
        assert select(model, reversed_deep(what)) == select(model, tuple(what))


def reversed_deep(what: Any) -> Any:
    return [reversed_deep(member) for member in reversed(what)] if isinstance(what, list) else what


@given(models(), st.text() | st.text("ab*?[]!-.@", max_size=8))
def test_any_text_finds_real_modules_or_raises(model: nn.Module, text: str) -> None:
    try:
        found = select(model, text)
    except SelectionError as error:
        said = f"{text!r} is a quantity" if text.startswith("@") else f" matches {text!r}"
        assert said in str(error)  # noqa: PT017 (no error is valid too)
        assert text not in names(model)
    else:
        assert found
        assert found.items() <= dict(model.named_modules(remove_duplicate=False)).items()


# Globs: a pattern is drawn as parts, a part as tokens; the oracle matches tokens, not text.

TOKENS = {
    "a": "a",
    "b": "b",
    "?": "abc",
    "[ab]": "ab",
    "[!a]": "bc",
    "[b-c]": "bc",
    "[!a-b]": "c",
}
PARTS = st.just(["**"]) | st.lists(st.sampled_from([*TOKENS, "*"]), min_size=1, max_size=3).filter(
    lambda tokens: tokens != ["*", "*"]
)


def spells(tokens: list[str], text: str) -> bool:
    if not tokens:
        return not text
    if tokens[0] == "*":
        return any(spells(tokens[1:], text[i:]) for i in range(len(text) + 1))
    return text[:1] in [*TOKENS[tokens[0]]] and spells(tokens[1:], text[1:])


def leads(parts: list[list[str]], segments: list[str]) -> bool:
    if not parts:
        return not segments
    if parts[0] == ["**"]:
        return any(leads(parts[1:], segments[i:]) for i in range(len(segments) + 1))
    return bool(segments) and spells(parts[0], segments[0]) and leads(parts[1:], segments[1:])


@given(models(st.text("abc", min_size=1, max_size=3)), st.lists(PARTS, min_size=1, max_size=4))
def test_globs_match_as_documented(model: nn.Module, parts: list[list[str]]) -> None:
    glob = ".".join("".join(tokens) for tokens in parts)
    expected = [name for name in names(model) if leads(parts, name.split(".") if name else [])]
    if glob in names(model, remove_duplicate=False):
        expected = [glob]
    try:
        found = list(select(model, glob))
    except SelectionError:
        found = []
    assert found == expected


# Real models.


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=16, num_hidden_layers=3, **sizes)
    model = transformers.BertForMaskedLM(config)
    assert isinstance(model, nn.Module)
    return model


def test_a_model_of_transformers(bert: nn.Module) -> None:
    assert list(select(bert).items()) == list(bert.named_modules())
    attention = [f"bert.encoder.layer.{i}.attention.self" for i in range(3)]
    for what in (
        attention,
        "bert.encoder.layer.*.attention.self",
        "**.self",
        re.compile(r"attention\.self$"),
        type(bert.get_submodule(attention[0])),
        lambda name, _: name.endswith(".self"),
    ):
        assert list(select(bert, what)) == attention
    embeddings = select(bert, nn.Embedding)
    assert list(embeddings) == [
        f"bert.embeddings.{kind}_embeddings" for kind in ("word", "position", "token_type")
    ]
    dense = {name for name, module in bert.named_modules() if isinstance(module, nn.Linear)}
    assert set(select(bert, nn.Linear)) == dense
    for missing, closest in [
        ("encoder.layers.2.attention.self", attention[2]),
        ("**.slef", attention[0]),
    ]:
        with pytest.raises(SelectionError) as caught:
            select(bert, missing)
        assert closest in suggested(caught.value)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripted_and_compiled_modules(model: Model) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    assert list(select(scripted).items()) == list(scripted.named_modules())
    assert [*select(scripted, "0")] == [*select(scripted, ["0"])] == ["0"]
    with pytest.raises(SelectionError, match=r"nothing in .* matches '3'"):
        select(scripted, "3")
    with pytest.raises(HookError, match="TorchScript"), fh.capture(scripted, "0"):
        pass
    compiled = torch.compile(model)
    assert list(select(compiled, "**.attn")) == [f"_orig_mod.{name}" for name in layers(".attn")]


@pytest.mark.parametrize("what", ["layers.3", ["layers.3"], ("tied.tokens",)])
def test_a_path_is_found_without_a_walk_through_the_model(
    model: Model, what: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = what if isinstance(what, str) else what[0]
    monkeypatch.delattr("ferrohook.names.select._Tree")
    assert select(model, what) == {path: model.get_submodule(path)}


class _Equal(nn.Sequential):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Equal)

    def __hash__(self) -> int:
        return 1


def test_models_that_are_equal_have_their_own_modules() -> None:
    first, second = _Equal(nn.ReLU()), _Equal(nn.ReLU())
    assert fh.select(first, "*") == {"0": first[0]}
    assert fh.select(second, "*") == {"0": second[0]}
    plan = fh.Plan(fh.on("0", fh.Zero()))
    for model in (first, second):
        assert not fh.run(model, torch.ones(2), plan=plan).output.any()
