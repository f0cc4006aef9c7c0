"""Load a checkpoint whose experts are in MXFP4 (gpt-oss), and keep them in MXFP4.

transformers trains no weights in MXFP4, and decodes them in `from_pretrained`. Inside `keep_mxfp4` the
step that decodes keeps the bytes instead. The experts get a stand-in for their weight, a tensor of
the right shape that takes no memory, so peft can add adapters to the weight. The end of the context
replaces the stand-in by the bytes (`offload/mxfp4.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streambp.errors import StreamBPError
from streambp.known_names import MXFP4_DECODING, MXFP4_INTEGRATION, MXFP4_PARTS, MXFP4_QUANTIZER
from streambp.offload.mxfp4 import keep_in_mxfp4
from streambp.tensors import replace_attribute


@dataclasses.dataclass(eq=False)
class LoadedWeight:
    """A weight of experts that was loaded in MXFP4.

    Attributes:
        module: the experts.
        name: name of the weight in `module`.
        blocks: the weight's bytes, [E, out, blocks, 16] uint8.
        scales: exponents of the blocks' powers of two, [E, out, blocks] uint8.
        stand_in: the parameter [E, in, out] in place of the weight; its elements are NaN.
    """

    module: nn.Module
    name: str
    blocks: Tensor
    scales: Tensor
    stand_in: nn.Parameter

    def pack(self) -> None:
        """Replace the stand-in by the bytes.

        Raises:
            StreamBPError: other code has replaced the stand-in.
        """
        if self.module._parameters.get(self.name) is not self.stand_in:
            raise StreamBPError(
                f"{self.name} of experts was moved or replaced inside of streambp.keep_mxfp4(). "
                "Load all layers onto one device, without offloading, and move the model after it."
            )
        keep_in_mxfp4(self.module, self.name, self.blocks, self.scales)


@contextlib.contextmanager
def keep_mxfp4() -> Iterator[None]:
    """Context manager in which `from_pretrained` keeps frozen experts in MXFP4, 4.25 bits each.

    Load the model of a gpt-oss checkpoint inside, and let peft add its adapters inside if they
    adapt experts. The model can run after the context. A model that is loaded with
    `Mxfp4Config(dequantize=True)` computes the same numbers, and takes three times the memory.

    Raises:
        StreamBPError: no weights in MXFP4 were loaded inside.
    """
    integration = importlib.import_module(MXFP4_INTEGRATION)
    quantizer = importlib.import_module(MXFP4_QUANTIZER).Mxfp4HfQuantizer
    decoding = getattr(integration, MXFP4_DECODING)
    loaded: list[LoadedWeight] = []

    def convert(
        operation: Any, input_dict: Any, model: Any, full_layer_name: str, **_: Any
    ) -> dict[str, nn.Parameter]:
        weight = _loaded_weight(input_dict, model, full_layer_name)
        loaded.append(weight)
        return {full_layer_name: weight.stand_in}

    real_validate = quantizer.validate_environment

    def validate(instance: Any, *args: Any, **options: Any) -> None:
        if instance.pre_quantized:
            instance.quantization_config.dequantize = True
        real_validate(instance, *args, **options)

    with (
        replace_attribute([decoding], "convert", [convert]),
        replace_attribute([quantizer], "validate_environment", [validate]),
    ):
        yield
    if not loaded:
        raise StreamBPError(
            "No weights in MXFP4 were loaded inside of streambp.keep_mxfp4(). Call from_pretrained "
            "inside, with a checkpoint in MXFP4."
        )
    for weight in loaded:
        weight.pack()


def _loaded_weight(tensors: dict[str, Any], model: Any, path: str) -> LoadedWeight:
    """Return a weight of experts from the tensors of a checkpoint.

    Args:
        tensors: the weight's blocks and scales, alone or in lists, by names that end so.
        model: the model that is loaded.
        path: the weight's name in the model.
    """
    module_name, _, name = path.rpartition(".")
    module = model.get_submodule(module_name)
    parts = [tensors[name + suffix] for suffix in MXFP4_PARTS]
    if isinstance(parts[0], list):
        parts = [single for [single] in parts]
    expected = getattr(module, name)
    not_a_number = torch.full((), torch.nan, dtype=expected.dtype, device=parts[0].device)
    stand_in = nn.Parameter(not_a_number.expand(expected.shape), requires_grad=False)
    return LoadedWeight(module, name, parts[0], parts[1], stand_in)
