"""A first day with an installed streambp: the package's page from its first line on, by copying; no
network, no GPU.

From nothing to a patched model, a plan that fits a 24 GB card, a verified model and a trained
adapter. Blocks and commands are the page's, which is README.md as the package brings it. The
checkpoints and the data set of the Hub that they name are folders here, small but for the
configuration that `plan` reads. Run it away from the sources, with the Python of the environment
(install.py does).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent  # with the command that the archive brings
os.environ |= {
    "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(Path("cache").resolve()), "HF_HOME": str(Path("cache").resolve()),
    "CUDA_VISIBLE_DEVICES": "", "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
}  # fmt: skip
STAND_INS = Path(__file__).parents[1] / "docs" / "stand_ins.py"
# Sizes of a checkpoint of 8B parameters, which `plan` takes from its config.json alone.
LARGE_DOWNLOADS = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
LAST_HEADING = "## Try it on this machine"  # of a clone, with its tests
FIRST_PROGRAM = "first.py"  # a program that the page gives no name
ON_CPU = "use_cpu=True, bf16=False"  # as a comment of the page says
# What commands must print, by their beginning.
EXPECTED_OUTPUTS = {
    "python first.py": "last step: 512 tokens in 4 chunks of 128, streamed", "streambp plan": "65,536 tokens: streambp.",
    "streambp verify": "EXACT", "python train.py": "",
}  # fmt: skip


def command(line: str, says: str) -> None:
    """Run a command line; it must succeed, and print these words."""
    print(f"$ {line}", flush=True)
    first, *words = shlex.split(line)
    result = subprocess.run(
        [shutil.which(first) or first, *words], capture_output=True, text=True, check=False
    )
    print(result.stdout[:3000], flush=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert says in result.stdout, result.stdout


def commands_of(text: str) -> list[str]:
    """The commands of a block, each in one line: long ones go on behind a backslash."""
    return re.sub(r"\\\n\s*", "", text).splitlines()


def copy_the_page(page: str) -> list[str]:
    """Write its files and run its commands, down to the adapter; those that ran."""
    ran = []
    for language, title, text in FENCE.findall(page.partition(LAST_HEADING)[0]):
        if language == "python":
            assert title != "train.py" or ON_CPU in text
            text = re.sub(r"(StreamSFTConfig\([^()]*)\)", rf"\1, {ON_CPU})", text)
            Path(title or FIRST_PROGRAM).write_text(text, "utf-8")
        lines = [] if title else [f"python {FIRST_PROGRAM}"]
        if language == "bash":
            lines = commands_of(text)
        for line in lines:
            if line.startswith("pip install"):
                print(f"$ {line}\n(done by install.py)")
            elif "train.py" in line and importlib.util.find_spec("trl") is None:
                print(f"$ {line}\n(not here: TRL has no release for this Python)")
            else:
                command(
                    line,
                    next(
                        words for start, words in EXPECTED_OUTPUTS.items() if line.startswith(start)
                    ),
                )
                ran.append(line)
    return ran


def train_and_load(ids: Any) -> None:
    """An adapter in a loop of one's own, which loads without streambp and computes the same."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    import streambp

    name = "Qwen/Qwen3-0.6B"
    base = AutoModelForCausalLM.from_pretrained(name)
    adapted = get_peft_model(
        base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
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
        reloaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(name), "adapter"
        ).eval()
        difference = abs(
            reloaded(input_ids=ids, labels=ids).loss
            - adapted.eval()(input_ids=ids, labels=ids).loss
        )
    assert difference < 1e-4, difference


def main() -> None:
    import streambp

    package_file = Path(streambp.__file__).resolve()
    assert Path(sys.prefix).resolve() in package_file.parents, (
        f"{package_file} is not the installed package"
    )
    command("streambp --version", says=importlib.metadata.version("streambp-hf"))
    command("streambp env", says=f"streambp: {streambp.__version__}")

    import torch

    spec = importlib.util.spec_from_file_location("stand_ins", STAND_INS)
    assert spec is not None
    assert spec.loader is not None
    stand_ins = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_ins)
    torch.manual_seed(0)
    stand_ins.make(Path())
    Path("Qwen/Qwen3-8B/config.json").write_text(json.dumps(LARGE_DOWNLOADS))

    ran = copy_the_page(str(importlib.metadata.metadata("streambp-hf").get_payload()))
    assert [line.split()[1] for line in ran][:3] == ["first.py", "plan", "verify"]
    if "python train.py" in ran:
        assert Path("out/adapter/adapter_config.json").is_file()
    train_and_load(torch.arange(256)[None] % 89)  # [B, T]
    print(f"the first day went well: {len(ran)} commands of the page ran", flush=True)


if __name__ == "__main__":
    main()
