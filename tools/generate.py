"""Generate text from a checkpoint of any layout, in one process.

python tools/generate.py --checkpoint output --prompt "def " --max-new-tokens 64 --temperature 0.8 --top-p 0.95
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megacore.checkpoint.load import load_parameters
from megacore.checkpoint.manifest import Manifest, find_checkpoint, read_manifest
from megacore.checkpoint.save import TOKENIZER_DIRECTORY
from megacore.config import ModelConfig, ParallelConfig
from megacore.data.tokenizer import Tokenizer, load_tokenizer
from megacore.errors import EXIT_REFUSED, CheckpointError, UserError
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.parallel.mesh import select_device
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from megacore.sections import MAX_SEED
from megacore.train.generate import Sampling, generate

DEVICES = get_args(get_type_hints(ParallelConfig)["device"])


def main(argv: list[str] | None = None) -> int:
    """Print the prompt and its continuation; returns the exit status."""
    arguments = _parse(argv)
    try:
        directory = find_checkpoint(Path(arguments.checkpoint))
        manifest = read_manifest(directory)
        config = _model_config(manifest, directory)
        tokenizer = _tokenizer(arguments.tokenizer, directory)
        prompt = tokenizer.encode(_text(arguments.prompt))
        if not prompt:
            raise UserError("--prompt has no tokens: give at least one character")
        stage = _load(directory, config, select_device(arguments.device))
    except UserError as error:
        print(f"generate.py: refused: {error}", file=sys.stderr)
        return EXIT_REFUSED
    sampling = Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, seed=arguments.seed
    )
    print(tokenizer.decode(prompt), end="", flush=True)
    new: list[int] = []
    shown = ""
    for token in generate(stage, config, prompt, max_new_tokens=arguments.max_new_tokens, sampling=sampling):
        if token == tokenizer.eod:
            break
        new.append(token)
        text = tokenizer.decode(new)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character: wait for the rest
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, help="a step_NNNNNNNN directory, or a run's output directory (its newest)"
    )
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokenizer", help="tokenizer to use instead of the checkpoint's own")
    parser.add_argument("--max-new-tokens", type=_at_least(int, 1), default=64, help="tokens to generate (default 64)")
    parser.add_argument(
        "--temperature", type=_at_least(float, 0), default=0.8, help="0 always takes the likeliest token (default 0.8)"
    )
    parser.add_argument(
        "--top-k", type=_at_least(int, 0), default=0, help="keep the k likeliest tokens; 0 keeps all (default)"
    )
    parser.add_argument(
        "--top-p", type=_share, default=1.0, help="keep the likeliest tokens up to this probability (default 1)"
    )
    parser.add_argument("--seed", type=_seed, default=1234, help="of the random draws (default 1234)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")
    return parser.parse_args(argv)


def _at_least(kind: type, low: float):  # type: ignore[no-untyped-def]  # an argparse type is any callable
    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be at least {low}")
        return float(value) if kind is float else value

    return parse


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and at most {MAX_SEED}")
    return value


def _text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("--prompt is not valid UTF-8 text") from None
    return prompt


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value


def _model_config(manifest: Manifest, directory: Path) -> ModelConfig:
    try:
        return ModelConfig(**manifest.config["model"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{directory}: its manifest does not describe a model ({error})") from None


def _tokenizer(path: str | None, directory: Path) -> Tokenizer:
    stored = directory / TOKENIZER_DIRECTORY
    if path is None and not stored.is_dir():
        raise CheckpointError(f"{directory} holds no tokenizer (it was trained without one): give --tokenizer PATH")
    return load_tokenizer(path or str(stored))


def _load(directory: Path, config: ModelConfig, device: torch.device) -> Stage:
    stage = Stage(gpt_layers(config, BuildContext(device=device, streams=RandomStreams(0, device))))
    load_parameters(directory, stage.by_name().values())
    return stage


if __name__ == "__main__":
    sys.exit(main())
