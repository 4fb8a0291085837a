"""A conversion takes the memory of its largest tensor, not of the model: measured in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from megacore.checkpoint.tensor_file import write_file
from tests.e2e.launching import run_cold, words

# Imports what a conversion imports, then converts as each list of flags says, and says how far memory rose above that.
PROGRAM = """
import re, sys, torch, transformers, megacore.commands.conversions
from pathlib import Path
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from tools.convert_checkpoint import main
def memory(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
for flags in " ".join(sys.argv[1:]).split(" then "):
    assert main(flags.split()) == 0
print("peak", memory("VmHWM") - before, memory("VmHWM"))
"""


def llama(path: Path, *, hidden: int, layers: int, vocabulary: int, dtype: torch.dtype) -> tuple[int, int]:
    """A Llama of random weights, written a tensor at a time; bytes of the largest tensor, and of all."""
    inner = 2 * hidden
    config = {"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8}
    config |= {"num_key_value_heads": 4, "intermediate_size": inner, "vocab_size": vocabulary}
    config |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.self_attn.{one}_proj.weight": (hidden, hidden) for one in "qo"}
        shapes |= {f"{block}.self_attn.{one}_proj.weight": (hidden // 2, hidden) for one in "kv"}
        shapes |= {f"{block}.mlp.{one}_proj.weight": (inner, hidden) for one in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{block}.{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    tensors = ((name, torch.randn(shape, dtype=dtype).mul_(0.03)) for name, shape in shapes.items())
    write_file(path / "model.safetensors", {name: (dtype, shape) for name, shape in shapes.items()}, tensors)
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes.values()]
    return max(sizes), sum(sizes)


def peak(*arguments: str) -> tuple[int, int]:
    """Bytes above what was there before, and in all."""
    done = run_cold(sys.executable, "-c", PROGRAM, *arguments, timeout=240)
    assert done.returncode == 0, done.stderr
    _, above, whole = done.stdout.splitlines()[-1].split()
    return int(above), int(whole)


@pytest.mark.parametrize(
    ("hidden", "layers", "vocabulary", "dtype"),
    [(1024, 7, 2048, torch.float32), pytest.param(2048, 24, 65536, torch.bfloat16, marks=pytest.mark.slow)],
)
def test_memory_is_that_of_the_largest_tensor(
    hidden: int, layers: int, vocabulary: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    largest, whole = llama(tmp_path / "hf", hidden=hidden, layers=layers, vocabulary=vocabulary, dtype=dtype)
    room = 64 << 20  # what torch and transformers set up on first use
    assert whole > 3 * (2 * largest + room) or dtype != torch.float32, "the model would fit as a whole"
    there = words(input=tmp_path / "hf", output=tmp_path / "megacore", max_shard_size="50MB")
    back = words(input=tmp_path / "megacore", output=tmp_path / "back")
    flags = [*there, "--from", "hf", "--to", "megacore"]
    if dtype != torch.float32:  # the way back takes as long again
        flags += ["then", *back, "--from", "megacore", "--to", "hf"]
    above, total = peak(*flags)
    assert above < 2 * largest + room
    assert total < 2 * largest + (1 << 30)
