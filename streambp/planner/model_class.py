"""Build a model of a configuration, and compute the loss of a counted step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)

from streambp.admission.stacks import Stack, find_stacks, is_bidirectional
from streambp.attention.position_biases import biases_distances
from streambp.errors import ConfigError, UnsupportedModelError

LANGUAGE_MODEL_SUFFIXES = ("LM", "PreTraining", "LMHeadModel", "ConditionalGeneration")
PREFIX_TYPE = "paligemma"
AUDIO_STRIDE = 2  # audio frames of a position of Whisper's encoder


def build_as(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a new model of a configuration. The class is that of a causal language model, except
    in the following cases.

    A model has bidirectional attention if the configuration has is_causal=False or
    use_bidirectional_attention, or if transformers' class for it is a masked language model. A
    bidirectional model has a language-model head, unless `architectures` names a class without head
    (an embedding model). An encoder-decoder has encoder and decoder. A model of images and text is
    returned complete, but its steps run later without images.

    Args:
        config: the configuration, which is not changed.
        options: arguments of transformers' `from_config`, such as the dtype.
    """
    kind = type(config)
    is_masked = (
        kind in AutoModelForMaskedLM._model_mapping
        and kind not in AutoModelForSeq2SeqLM._model_mapping
        and not getattr(config, "is_decoder", False)
    )
    auto: Any = AutoModelForCausalLM
    if is_masked:
        auto = AutoModelForMaskedLM
    elif config.is_encoder_decoder:
        auto = AutoModelForSeq2SeqLM
        if kind not in auto._model_mapping:
            auto = AutoModelForSpeechSeq2Seq
    elif (
        kind not in AutoModelForCausalLM._model_mapping
        and kind in AutoModelForImageTextToText._model_mapping
    ):
        auto = AutoModelForImageTextToText
    if (is_masked or says_bidirectional(config)) and _has_no_head(config):
        auto = AutoModel
    model: PreTrainedModel = auto.from_config(copy.deepcopy(config), **options)
    if getattr(config, "is_causal", True) is False:
        # transformers reads the field for masks alone; programs set the modules' attribute, too
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
    return model


def says_bidirectional(config: PreTrainedConfig) -> bool:
    """True if the configuration has is_causal=False or use_bidirectional_attention, which make the
    attention of a decoder bidirectional. Such a model may have no language-model head."""
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    return getattr(config, "is_causal", True) is False or bidirectional in (True, "all")


def _has_no_head(config: PreTrainedConfig) -> bool:
    """True if the configuration's field `architectures` names a class without a language-model
    head, such as an embedding model. False if the field is empty."""
    names: Sequence[str] = getattr(config, "architectures", None) or ()
    return bool(names) and not names[0].endswith(LANGUAGE_MODEL_SUFFIXES)


def inputs_of(model: nn.Module, ids: Tensor, encoder_len: int | None = None) -> dict[str, Any]:
    """Return the keyword arguments of a model's forward for a batch of token ids [B, T], by name.
    The decoder of an encoder-decoder gets these ids, and the encoder gets zeros.

    Args:
        model: the model.
        ids: the token ids.
        encoder_len: positions of each row of the encoder, if the model has one; None: T, or the
            length that the encoder's configuration fixes.

    Raises:
        ConfigError: the encoder reads neither tokens nor Whisper's audio.
    """
    inputs: dict[str, Any] = {"input_ids": ids}
    if _has_prefix(model):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if not is_encoder_decoder(model):
        # BERT slices these buffers of its embeddings if the arguments are left out. A tower has
        # buffers of the same names, which are not the text's.
        for name, buffer in _embeddings_of(model).named_buffers(recurse=False):
            if name in ("position_ids", "token_type_ids") and buffer.shape[-1] < ids.shape[-1]:
                inputs.setdefault(name, torch.zeros_like(ids))
        return inputs
    inputs = {"decoder_input_ids": ids}
    rows, length = ids.shape
    audio = fixed_positions(model)
    if audio is None:
        inputs["input_ids"] = ids.new_zeros(rows, encoder_len or length)
        return inputs
    config: Any = model.config
    dtype = next(model.parameters()).dtype
    sizes = (rows, config.num_mel_bins, AUDIO_STRIDE * audio)
    inputs["input_features"] = torch.zeros(sizes, dtype=dtype, device=ids.device)
    # its table of positions is sliced unless a position is passed for each token
    inputs["decoder_position_ids"] = torch.arange(length, device=ids.device)[None]
    return inputs


def _embeddings_of(model: nn.Module) -> nn.Module:
    """Return the module that has the model's input embedding as a direct child; the model itself if
    there is no such module."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    for module in model.modules():
        if any(child is embedding for child in module.children()):
            return module
    return model


def check_encoder_len(model: nn.Module, encoder_len: int | None) -> None:
    """Check that a requested length of the encoder's rows is possible for the model.

    Args:
        model: the model.
        encoder_len: positions of each row of the encoder; None: no length was requested.

    Raises:
        ConfigError: the model has no encoder, or one whose rows have another fixed length.
    """
    if encoder_len is None:
        return
    if not is_encoder_decoder(model):
        raise ConfigError(
            f"encoder_len is {encoder_len}, and {type(model).__name__} has no encoder. Leave "
            "encoder_len out."
        )
    fixed = fixed_positions(model)
    if fixed is not None and fixed != encoder_len:
        raise ConfigError(
            f"encoder_len is {encoder_len}, and the encoder of {type(model).__name__} reads "
            f"{fixed} positions in each row. Leave encoder_len out."
        )


def adds_biases(model: nn.Module) -> bool:
    """True if attention modules of the model add a bias by the distance of query and key, as T5
    does. Unpatched attention then builds a bias for all pairs of positions, so a step's bytes have
    a part that grows with the square of the length."""
    return any(map(biases_distances, model.modules()))


def refuse_other_biases(model: nn.Module) -> None:
    """Raise if an attention module adds a bias by the distance of query and key, but is in no layer
    that streambp computes chunk by chunk. LongT5's encoder, which attends in local blocks, has such
    modules.

    Args:
        model: the model.

    Raises:
        UnsupportedModelError: a module outside of these layers adds such a bias.
    """
    streamed: set[nn.Module] = set()
    for stack in find_stacks(model).stacks:
        for layer in stack.layers:
            streamed.update(layer.modules())
    for module in model.modules():
        if biases_distances(module) and module not in streamed:
            raise UnsupportedModelError(
                f"{type(module).__name__} adds a bias for each distance between two positions, and "
                "its layers do not stream. The planner does not count such layers. Run a step and "
                "measure its memory (torch.cuda.max_memory_allocated)."
            )


def counted_stack(model: nn.Module) -> Stack:
    """Return the stack of a model (a module with its list of layers) whose layers are counted
    separately when the memory of a step is counted. Each forward and each backward of such a layer
    is then a phase of the step, with its own memory.

    The stack is the decoder if both stacks of an encoder-decoder run chunk by chunk (T5). Otherwise
    the stack has the most layers. Layers of other stacks are counted as parts of the embedding or
    of the head.
    """
    stacks = find_stacks(model).stacks
    decoders = []
    for stack in stacks:
        if is_encoder_decoder(model) and getattr(stack.backbone.config, "is_decoder", False):
            decoders.append(stack)
    return max(decoders or stacks, key=lambda stack: len(stack.layers))


def is_encoder_decoder(model: nn.Module) -> bool:
    """True if the model has a decoder that reads an encoder's output. A training step of such a
    model needs an input for the encoder as well."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def fixed_positions(model: nn.Module) -> int | None:
    """Return the number of positions in each row of the encoder's output, if the encoder reads
    audio of a fixed length (Whisper). None if the encoder reads tokens, in rows of any length.

    Raises:
        ConfigError: the encoder reads neither tokens nor Whisper's audio.
    """
    name = getattr(model, "main_input_name", "input_ids")
    if name == "input_ids":
        return None
    config: Any = model.config
    if name != "input_features" or not hasattr(config, "num_mel_bins"):
        raise ConfigError(
            f"{type(model).__name__} reads {name}, and the planner makes rows of tokens and of "
            "Whisper's audio alone. Run a step and measure its memory "
            "(torch.cuda.max_memory_allocated)."
        )
    return int(config.max_source_positions)


def _has_prefix(model: nn.Module) -> bool:
    """True if tokens at the start of each row attend in both directions, as in PaliGemma. The
    model's forward then needs `token_type_ids`, which mark these tokens."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "model_type", "") == PREFIX_TYPE for config in configs)


def loss_of(
    model: nn.Module, ids: Tensor, has_head: bool, encoder_len: int | None = None
) -> Tensor:
    """Run a model's forward on token ids [B, T], which are also the labels, and return the scalar
    loss. The loss of a model without a language-model head is the mean of its hidden states.

    Args:
        model: the model.
        ids: the token ids.
        has_head: True if the model has a language-model head.
        encoder_len: positions of each row of an encoder-decoder's encoder; None: T, or the length
            that the encoder's configuration fixes.
    """
    inputs = inputs_of(model, ids, encoder_len)
    if has_head:
        return model(**inputs, labels=ids, use_cache=False).loss
    if hasattr(getattr(model, "config", None), "use_cache"):
        inputs["use_cache"] = False
    hidden: Tensor = model(**inputs)[0]
    return hidden.mean(1).float().mean()


def assumptions(
    model: nn.Module, layers: Iterable[nn.Module], has_head: bool, encoder_len: int | None
) -> tuple[str, ...]:
    """Return notes for a plan of a model that is no causal language model (an encoder-decoder or a
    model of images, for example): what its predicted memory assumes. () for a causal language
    model.

    Args:
        model: the model.
        layers: the model's decoder layers, which streambp computes in chunks.
        has_head: True if the model has a language-model head.
        encoder_len: positions of each row of an encoder-decoder's encoder; None: the length of the
            decoder's rows, or the length that the encoder's configuration fixes.
    """
    if is_encoder_decoder(model):
        positions = encoder_len or fixed_positions(model)
        if positions is None:
            rows = "as many positions in each row as the decoder (--encoder-len)"
        else:
            rows = f"{positions:,} positions in each row"
        if adds_biases(model) and len(find_stacks(model).stacks) > 1:
            return (
                f"lengths are the decoder's; the encoder has {rows}, and streams, too; unpatched "
                "steps build the bias of all pairs of positions",
            )
        return (
            f"lengths are the decoder's; the encoder has {rows}, stays as it is and keeps what its "
            "backward needs (model.gradient_checkpointing_enable() would leave it less, which is "
            "not counted)",
        )
    if _has_prefix(model):
        return (
            "the rows have no images; the prefix is counted as causal; the model builds a mask "
            "[T, T], whose bytes are right near 8,192 tokens alone",
        )
    kinds = [layer for layer in layers if is_bidirectional(layer)]
    if not kinds:
        return ()
    texts = ["attention is bidirectional, so queries read all keys of their row or window"]
    if not has_head:
        texts.append("the loss is the mean of the hidden states, without a language-model head")
    dropout = 0.0
    windows = False
    for layer in kinds:
        for module in layer.modules():
            windows = windows or bool(getattr(module, "sliding_window", None))
            config = getattr(module, "config", None)
            dropout = max(dropout, getattr(config, "attention_probs_dropout_prob", 0.0) or 0.0)
            dropout = max(dropout, getattr(config, "attention_dropout", 0.0) or 0.0)
    if dropout:
        texts.append(
            f"attention drops weights with probability {dropout:g}, so streamed layers attend by "
            "plain products"
        )
    if windows:
        texts.append(
            "windows are computed by plain products in tiles; the scan of their masks, of T^2 "
            "elements a step, is not counted"
        )
    return tuple(texts)
