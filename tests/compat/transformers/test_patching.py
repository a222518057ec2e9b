"""Patching: classes replaced by name, always undone, and recorders of one instance."""

from __future__ import annotations

import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat.transformers import (
    OutputRecorder,
    apply_patches,
    capture_outputs,
    clear_patch_mapping,
    get_patch_mapping,
    patch_output_recorders,
    register_patch_mapping,
    unregister_patch_mapping,
)
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x


class Other(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 2, x * 2


class Third(Other):
    pass


class Model(nn.Module):
    _can_record_outputs: Any = {"attentions": OutputRecorder(Attention, index=1)}  # noqa: RUF012 (a class's dict)

    def __init__(self, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.attention = attention()

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": self.attention(x)[0]}


X = torch.ones(2)


@pytest.fixture(autouse=True)
def _nothing_registered() -> Iterator[None]:
    clear_patch_mapping()
    yield
    clear_patch_mapping()


@pytest.fixture
def package() -> Iterator[Any]:
    """A package of modules with an Attention, a class that is not a module, and a function."""
    module = types.ModuleType("their_package.modeling")
    vars(module).update(
        Attention=Attention,
        BigAttention=type("BigAttention", (Attention,), {}),
        AttentionConfig=type("AttentionConfig", (), {}),
        attention_Attention=lambda: None,
        Model=Model,
    )
    sys.modules["their_package.modeling"] = module
    yield module
    del sys.modules["their_package.modeling"]


def test_registering_and_unregistering() -> None:
    register_patch_mapping({"Attention": Other})
    register_patch_mapping({"Big.*": Third})
    assert get_patch_mapping() == {"Attention": Other, "Big.*": Third}
    get_patch_mapping().clear()
    register_patch_mapping({"Attention": Third}, overwrite=True)
    assert get_patch_mapping()["Attention"] is Third
    unregister_patch_mapping(["Attention"])
    assert list(get_patch_mapping()) == ["Big.*"]
    clear_patch_mapping()
    assert get_patch_mapping() == {}


def test_bad_input_names_the_key_and_registers_nothing() -> None:
    register_patch_mapping({"Attention": Other})
    with pytest.raises(
        ValueError, match="'Attention' already has a replacement: pass overwrite=True"
    ):
        register_patch_mapping({"New": Third, "Attention": Third})
    with pytest.raises(ValueError, match=r"'\*Attention' is neither .* nor a regex: nothing to"):
        register_patch_mapping({"New": Third, "*Attention": Third})
    for wrong in (3, int, Other()):
        with pytest.raises(fh.HookTypeError, match="replacement of 'New' must be a subclass of nn"):
            register_patch_mapping({"New": wrong})  # type: ignore[dict-item]
    with pytest.raises(fh.HookTypeError, match="a key must be the name of a class or a regex"):
        register_patch_mapping({3: Third})  # type: ignore[dict-item]
    with pytest.raises(fh.HookTypeError, match="the mapping must be a dict"):
        register_patch_mapping([Third])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'Atention' has no replacement.* 'Attention'"):
        unregister_patch_mapping(["Attention", "Atention"])
    with pytest.raises(fh.HookTypeError, match="a list of keys, got the str 'Attention'"):
        unregister_patch_mapping("Attention")
    with pytest.raises(fh.HookTypeError, match="patch_output_recorders needs an instance"):
        patch_output_recorders(3)  # type: ignore[arg-type]
    assert get_patch_mapping() == {"Attention": Other}


def test_exact_names_precede_patterns_which_match_by_search(package: Any) -> None:
    register_patch_mapping({"ttention": Third, "Attention": Other})
    with apply_patches("their_package"):
        assert package.Attention is Other
        assert package.BigAttention is Third
        assert package.AttentionConfig.__name__ == "AttentionConfig"
        assert callable(package.attention_Attention)
    assert package.Attention is Attention
    assert package.BigAttention.__name__ == "BigAttention"
    register_patch_mapping({"^Attention$": Third}, overwrite=True)
    with apply_patches("their"):  # a prefix of the package's name
        assert package.Attention is Attention


def test_an_exception_undoes_patches(package: Any) -> None:
    register_patch_mapping({"Attention": Other})
    with pytest.raises(KeyboardInterrupt), apply_patches("their_package"):
        raise KeyboardInterrupt
    assert package.Attention is Attention


class ReadOnly(types.ModuleType):
    """A Python module with a switch that makes it read-only."""

    writable = True

    def __setattr__(self, name: str, value: object) -> None:
        if not self.writable:
            raise PermissionError(name)
        super().__setattr__(name, value)


def test_a_read_only_module_undoes_earlier_patches(package: Any) -> None:
    register_patch_mapping({"Attention": Other})
    fixed = ReadOnly("their_package.fixed")
    fixed.Attention = Attention  # type: ignore[attr-defined]
    sys.modules["their_package.fixed"] = fixed
    fixed.writable = False
    try:
        with pytest.raises(PermissionError), apply_patches("their_package"):
            pytest.fail("the block ran")
        assert package.Attention is fixed.Attention is Attention
        vars(fixed)["writable"] = True
        # Nothing of the failed block is cached: the next one finds the current class.
        vars(fixed)["Attention"] = Third
        with apply_patches("their_package"):
            assert fixed.Attention is Other
        assert fixed.Attention is Third
    finally:
        del sys.modules["their_package.fixed"]


def test_changes_by_others_during_the_block_are_kept(package: Any) -> None:
    register_patch_mapping({"Attention": Other})
    with apply_patches("their_package"):
        clear_patch_mapping()
        package.Attention = Third
    assert package.Attention is Third


@pytest.mark.parametrize("first_in_is_first_out", [True, False])
def test_blocks_that_overlap(package: Any, *, first_in_is_first_out: bool) -> None:
    register_patch_mapping({"Attention": Other})
    one = apply_patches("their_package")
    one.__enter__()
    register_patch_mapping({"Attention": Third}, overwrite=True)
    two = apply_patches("their_package")
    two.__enter__()
    assert package.Attention is Third
    left, last = (one, two) if first_in_is_first_out else (two, one)
    left.__exit__(None, None, None)
    assert package.Attention is (Third if last is two else Other)
    last.__exit__(None, None, None)
    assert package.Attention is Attention


@pytest.mark.usefixtures("switch_often")
def test_concurrent_patching_restores_the_original(package: Any) -> None:
    register_patch_mapping({"Attention": Other})
    wrong: list[object] = []

    def run(_number: int) -> None:
        for _ in range(20):
            with apply_patches("their_package"):
                if package.Attention is not Other:
                    wrong.append(package.Attention)

    in_threads(4, run)
    assert wrong == []
    assert package.Attention is Attention


@pytest.mark.parametrize(
    "declared",
    [Attention, "Attention", OutputRecorder(Attention, index=1), [Attention]],
    ids=["class", "suffix", "recorder", "list"],
)
def test_recorders_are_patched_for_one_instance_only(declared: Any) -> None:
    class Declares(Model):
        _can_record_outputs = {"attentions": declared}  # noqa: RUF012 (a class's dict)

    patched, plain = Declares(Other), Declares(Attention)
    register_patch_mapping({"Attention$": Other})
    patch_output_recorders(patched)
    clear_patch_mapping()
    assert torch.equal(patched(X, output_attentions=True)["attentions"][0], X * 2)
    assert Declares._can_record_outputs["attentions"] is declared
    assert torch.equal(plain(X, output_attentions=True)["attentions"][0], X)
    assert "_can_record_outputs" not in vars(plain)


def test_patching_after_the_first_recording_takes_effect() -> None:
    model = Model()
    assert len(model(X, output_attentions=True)["attentions"]) == 1
    model.attention = Other()
    register_patch_mapping({"Attention": Other})
    patch_output_recorders(model)
    assert torch.equal(model(X, output_attentions=True)["attentions"][0], X * 2)


def test_an_empty_mapping_changes_nothing() -> None:
    model = Model()
    patch_output_recorders(model)
    assert "_can_record_outputs" not in vars(model)
    register_patch_mapping({"Unrelated": Other})
    patch_output_recorders(model)
    assert "_can_record_outputs" not in vars(model)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_is_built_with_replacements() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaModel  # noqa: PLC0415 (takes seconds)
    from transformers.models.llama import modeling_llama  # noqa: PLC0415

    original = modeling_llama.LlamaMLP

    class Doubled(original):  # type: ignore[misc, valid-type]
        pass

    register_patch_mapping({"^LlamaMLP$": Doubled})
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=9,
    )
    with apply_patches():
        model = LlamaModel(config)
    assert type(model.layers[0].mlp) is Doubled
    assert type(LlamaModel(config).layers[0].mlp) is original
    # transformers' own forwards record what the class declares.
    register_patch_mapping({"^LlamaDecoderLayer$": Doubled})
    with pytest.raises(fh.HookError, match=r"use transformers.monkey_patching.patch_output_rec"):
        patch_output_recorders(model)
    assert "_can_record_outputs" not in vars(model)
    assert modeling_llama.LlamaMLP is original


@pytest.mark.filterwarnings("ignore")
def test_a_recorder_of_transformers_is_patched_for_one_model_only() -> None:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2Model  # noqa: PLC0415 (takes seconds)
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention  # noqa: PLC0415

    class Quiet(nn.Module):
        """Class that is not a subclass of the one it replaces."""

        def __init__(self, *_args: Any, **_options: Any) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
            return x * 0, x[0, 0, 0]

    GPT2Patched = type("GPT2Patched", (GPT2Model,), {"forward": ours(GPT2Model.forward)})  # noqa: N806 (a class)
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9, attn_implementation="eager")
    declared = GPT2Model._can_record_outputs["attentions"]
    register_patch_mapping({"^GPT2Attention$": Quiet})
    with apply_patches():
        patched = GPT2Patched(config)
        patch_output_recorders(patched)
    clear_patch_mapping()
    plain = GPT2Patched(config)

    batch = torch.zeros(1, 3, dtype=torch.long)
    shapes = [
        [each.shape for each in model(batch, output_attentions=True).attentions]
        for model in (patched, plain)
    ]
    assert shapes == [[()] * 2, [(1, 2, 3, 3)] * 2]
    # Only the recorder's class differs.
    assert patched._can_record_outputs["attentions"].layer_name == declared.layer_name
    assert GPT2Model._can_record_outputs["attentions"] is declared
    assert declared.target_class is GPT2Attention


def ours(forward: Any) -> Any:
    """`forward` of transformers with our decorator instead."""
    return capture_outputs(inspect.unwrap(forward))
