"""Check by coordinates that muP makes activations independent of the width, and draw it.

    python tools/mup_check.py -o mup.svg
    python tools/mup_check.py --widths 64 128 256 512 --optimizer muon --lr 0.01 -o mup.png

Models of several widths take a few steps on generated tokens, with muP and without. The tool prints by how much the
hidden states after the last block and the logits have changed since the first step (mean magnitude), and the slope of
each over the width, on logarithmic axes: with muP it is about 0, because steps change what the model computes as much
at any width. Without, it is above 0: the learning rate that is right for one width is too large for a wider model
(Yang et al. 2022, arXiv 2203.03466, appendix D.1).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.commands.tool import ToolParser, run_tool
from megacore.config import Config, TrainingConfig
from megacore.drawing.canvas import require_writable, save
from megacore.drawing.curves import Curve, curves
from megacore.errors import UserError

_LAYERS, _VOCAB, _SEQUENCE, _BATCH, _HEAD = 2, 64, 32, 8, 16
QUANTITIES = ("hidden states", "logits")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 2 refused."""
    return run_tool(ToolParser.of("mup_check", head=_HEAD), argv, _check)


def _check(args: argparse.Namespace) -> None:
    widths = sorted(set(args.widths))
    if len(widths) < 2 or any(width % _HEAD for width in widths):
        raise UserError(f"--widths {' '.join(map(str, args.widths))} must be two or more multiples of {_HEAD}")
    if not 0 < args.lr < math.inf:
        raise UserError(f"--lr {args.lr} must be above 0 and finite")
    if args.output is not None:
        require_writable(args.output)
    panels = []
    print("".ljust(28), *(f"{width:>10}" for width in widths), "     slope")
    for base in (widths[0], None):
        found = [changes(width, base, steps=args.steps, lr=args.lr, optimizer=args.optimizer) for width in widths]
        for number, quantity in enumerate(QUANTITIES):
            sizes = [change[number] for change in found]
            title = f"{quantity}, {'muP' if base else 'without muP'}"
            line = statistics.linear_regression(list(map(math.log, widths)), list(map(math.log, sizes)))
            print(title.ljust(28), *(f"{size:10.4g}" for size in sizes), f"{line.slope:10.2f}")
            panels.append(Curve(title=f"change of {title}", points=list(zip(map(float, widths), sizes, strict=True))))
    if args.output is not None:
        save(curves(f"Changes in {args.steps} steps", panels, x_title="hidden size", logarithmic=True), args.output)
        print(args.output)


def changes(width: int, base: int | None, *, steps: int, lr: float, optimizer: str) -> tuple[float, float]:
    """The mean magnitude of the change of hidden states and logits.

    Args:
        width: hidden size of the model.
        base: base width of muP; None: without muP.
        steps: of training.
        lr: learning rate, at the base width.
        optimizer: its name.
    """
    import torch  # a wrong flag is refused before these are loaded

    from megacore.data.gpt.mock import MockDataset
    from megacore.data.loading.loader import Microbatch
    from megacore.parallel.mesh import Mesh
    from megacore.train.gpt_task import GPTTask
    from megacore.train.step import TrainStep

    def batch(number: int) -> Microbatch:
        samples = [data[number * _BATCH + place] for place in range(_BATCH)]
        names = ("tokens", "labels", "loss_mask")
        tensors = {name: torch.stack([torch.from_numpy(sample[name]) for sample in samples]) for name in names}
        return Microbatch(index=number, **tensors)

    @torch.no_grad()
    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states after the last block, and logits, of the first batch."""
        (stage,), x = trained.model.chunks, batch(0).tokens
        for index in range(len(stage.layers)):
            hidden, x = x, stage.run_layer(index, x)
        return hidden.float(), x[..., :_VOCAB].float()

    with tempfile.TemporaryDirectory() as directory:
        values = {
            "num_layers": _LAYERS, "hidden_size": width, "num_attention_heads": width // _HEAD, "vocab_size": _VOCAB,
            "mup_base_width": base, "device": "cpu", "mock_data": True, "seq_length": _SEQUENCE, "lr": lr,
            "optimizer": optimizer, "lr_decay_style": "constant", "clip_grad": 0.0,
            "micro_batch_size": _BATCH, "global_batch_size": _BATCH,
        }  # fmt: skip
        training = TrainingConfig(train_iters=steps, output_dir=directory)
        config = Config(training=training).with_values(values).resolve(1)
        mesh = Mesh(device=torch.device("cpu"))
        trained = TrainStep(GPTTask(config, mesh), config, mesh)
        data = MockDataset(_VOCAB, _SEQUENCE, _BATCH * (steps + 1), config.training.seed)
        before = outputs()
        for number in range(1, steps + 1):
            trained.compute_gradients([batch(number)])
            trained.update_weights()
        hidden, logits = (float((after - first).abs().mean()) for after, first in zip(outputs(), before, strict=True))
    return hidden, logits


if __name__ == "__main__":
    sys.exit(main())
