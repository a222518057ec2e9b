"""The tests of transformers that every architecture there runs, on small models of five.

Its source distribution has these tests, and not the files that run them for each architecture. The
script `ecosystem` puts this file among them.
"""

from __future__ import annotations

import sys
import types
import unittest
from typing import Any

import torch
import transformers

# Two suites that the tests derive from and that the source distribution lacks.
for _name, _class in (
    ("exporters.test_export", "ExportTesterMixin"),
    ("generation.test_utils", "GenerationTesterMixin"),
):
    _module = types.ModuleType(f"tests.{_name}")
    setattr(_module, _class, type(_class, (), {}))
    sys.modules[f"tests.{_name.partition('.')[0]}"] = types.ModuleType("package")
    sys.modules[_module.__name__] = _module

from tests import test_modeling_common  # noqa: E402

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class _Tester:
    """A small model's settings and inputs, by the names that the tests read."""

    batch_size, num_choices, num_masks, is_training = 3, 4, 2, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, config: type[Any], inputs: str, settings: dict[str, Any]) -> None:
        self._config, self._inputs, self._settings = config, inputs, settings
        self.seq_length = 226 if inputs == "pixel_values" else 7  # 15 * 15 patches and one token

    def get_config(self) -> Any:
        return self._config(**self._settings)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        if self._inputs == "pixel_values":
            return self.get_config(), {"pixel_values": torch.rand(self.batch_size, 3, 30, 30)}
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self._inputs == "decoder_input_ids":
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
        return self.get_config(), inputs

    def prepare_config_and_inputs_for_model_class(self, _: type) -> tuple[Any, Any]:
        return self.prepare_config_and_inputs_for_common()


def _suite(name: str, heads: str, inputs: str = "input_ids", **settings: Any) -> type:
    models = tuple(getattr(transformers, name + head) for head in heads.split())

    class Suite(test_modeling_common.ModelTesterMixin, unittest.TestCase):
        all_model_classes = models
        is_encoder_decoder = inputs == "decoder_input_ids"

        def setUp(self) -> None:
            torch.manual_seed(0)
            config = getattr(transformers, name + "Config")
            self.model_tester = _Tester(config, inputs, {**_SMALL, **settings})

    Suite.__name__ = Suite.__qualname__ = f"Test{name}"
    return Suite


TestBert = _suite("Bert", "Model ForMaskedLM ForSequenceClassification ForTokenClassification")
TestGPT2 = _suite("GPT2", "Model LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64)
TestLlama = _suite("Llama", "Model ForCausalLM", num_key_value_heads=2)
TestT5 = _suite(
    "T5",
    "Model ForConditionalGeneration",
    "decoder_input_ids",
    d_model=32,
    d_ff=37,
    d_kv=8,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
TestViT = _suite("ViT", "Model ForImageClassification", "pixel_values", image_size=30, patch_size=2)
