"""Report the adapters inside streamed layers, for `describe`. [Note: adapters]"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from streambp.layer.expert_adapters import LoraParameter
from streambp.layer.layer_state import LayerState


def adapter_notes(layer_states: Iterable[LayerState]) -> list[str]:
    """Return lines for `streambp.describe` about LoRA adapters inside of layers. The first line
    counts the Linears that are computed together with their adapters as one operation. The second
    line counts the Linears that run peft's own, slower forward, with reasons. Two more lines count
    adapted weights of experts.

    Args:
        layer_states: state of each decoder layer, with its adapters (`LayerState`). Layers that
            were not called yet are left out.
    """
    number_of_fused = 0
    number_of_factored = 0
    reasons_of = collections.Counter[str]()
    reasons_of_experts = collections.Counter[str]()
    for layer_state in layer_states:
        by_name = {} if layer_state.fingerprint.last is None else layer_state.adapters
        for name, lora_module in by_name.items():
            why = lora_module.why or lora_module.why_in_call
            if isinstance(lora_module, LoraParameter):
                if why is None:
                    number_of_factored += 1
                else:
                    reasons_of_experts[f"{lora_module.module.parameter_name}: {why}"] += 1
            elif why is None:
                number_of_fused += 1
            else:
                reasons_of[f"{name.rpartition('.')[2]}: {why}"] += 1
    notes = (
        [f"{number_of_fused} Linears with adapters are computed as one operation"]
        if number_of_fused
        else []
    )
    if reasons_of:
        reasons = "; ".join(f"{number} x {why}" for why, number in sorted(reasons_of.items()))
        notes.append(
            f"{reasons_of.total()} Linears with adapters are computed by peft's code, which takes "
            f"longer ({reasons})"
        )
    if number_of_factored:
        notes.append(
            f"{number_of_factored} weights of experts are added to their adapters once for each "
            "pass through a layer"
        )
    if reasons_of_experts:
        reasons = "; ".join(
            f"{number} x {why}" for why, number in sorted(reasons_of_experts.items())
        )
        notes.append(
            f"{reasons_of_experts.total()} weights of experts get their adapters by peft's code, "
            f"which makes a gradient of the whole weight in each chunk ({reasons})"
        )
    return notes
