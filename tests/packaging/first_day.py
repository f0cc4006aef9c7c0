"""A first day with an installed streambp, step by step; no network, no GPU, a minute.

From nothing to a patched model, a plan that fits a 24 GB card, a verified model and a trained adapter. Run it away from the
sources, with the Python of the environment (install.py does).
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(Path("cache").resolve())}
STREAMBP = [str(Path(sys.executable).with_name("streambp"))]  # the command that the archive brings
# Sizes of a checkpoint of 8B parameters, which `plan` takes from its config.json alone, and a small one.
LARGE = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97,
}  # fmt: skip


def command(*words: str, says: str) -> str:
    """Run a command line of streambp; it must succeed, and print these words."""
    print(f"$ streambp {' '.join(words)}", flush=True)
    result = subprocess.run([*STREAMBP, *words], capture_output=True, text=True, check=False)
    print(result.stdout[:3000], flush=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert says in result.stdout, result.stdout
    return result.stdout


def main() -> None:
    import streambp

    here = Path(streambp.__file__).resolve()
    assert Path(sys.prefix).resolve() in here.parents, f"{here} is not the installed package"
    command("--version", says=importlib.metadata.version("streambp"))
    command("env", says=f"streambp: {streambp.__version__}")

    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    Qwen3Config(**LARGE).save_pretrained("large")
    told = command("plan", "large", "--seq-len", "64k", "--gpu-memory", "24GiB", "--lora", "16", says="65,536 tokens: ")
    assert "streambp.StreamConfig(chunk_size=" in told

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SMALL)).save_pretrained("small")
    command("verify", "small", "--seq-len", "256", says="EXACT")

    model = streambp.patch(AutoModelForCausalLM.from_pretrained("small"), streambp.StreamConfig(chunk_size=32))
    ids = torch.arange(256)[None] % 89  # [B, T]
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    told = streambp.describe(model)
    print(told, flush=True)
    assert "streams: 2 x Qwen3DecoderLayer" in told

    from peft import LoraConfig, PeftModel, get_peft_model

    adapted = get_peft_model(streambp.unpatch(model), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    streambp.patch(adapted, streambp.StreamConfig(chunk_size=32))
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"adapter: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    assert losses[-1] < losses[0] - 0.3
    adapted.save_pretrained("adapter")
    with torch.no_grad():
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("small"), "adapter").eval()
        difference = abs(again(input_ids=ids, labels=ids).loss - adapted.eval()(input_ids=ids, labels=ids).loss)
    assert difference < 1e-4, difference
    print("the first day went well", flush=True)


if __name__ == "__main__":
    main()
