"""Fixtures of tests that run pages: small checkpoints and data, and a folder to run in."""

from __future__ import annotations

import json

import pytest

from tests.docs import stand_ins

EIGHT_GPU_SETTINGS = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
SEVENTY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="session")
def stand_in_folder(tmp_path_factory):
    """Small checkpoints and data under the names that pages use, and configurations of an 8B and a
    70B model for plans."""
    folder = tmp_path_factory.mktemp("made")
    stand_ins.make(folder)
    for size, config in (("8B", EIGHT_GPU_SETTINGS), ("70B", SEVENTY)):
        (folder / size).mkdir()
        (folder / size / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def inside(stand_in_folder, tmp_path, tmp_path_factory, monkeypatch):
    """A folder with what earlier pages leave behind: the first program's model, texts, an
    adapter."""
    text = stand_in_folder / stand_ins.CHECKPOINTS[0]
    (tmp_path / "first-model").symlink_to(text)
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"text": stand_ins.content(i, 30)}) for i in range(8))
    )
    (tmp_path / "lengths.txt").write_text(
        "\n".join(map(str, [100, 3000, 200, 400, 800, 100, 90, 1200]))
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "plans"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path
