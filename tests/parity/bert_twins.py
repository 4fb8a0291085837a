"""transformers' BERT models and megacore's with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig as TransformersConfig
from transformers import BertForPreTraining, ModernBertConfig, ModernBertForMaskedLM, PreTrainedModel

from megacore.config.bert import ResolvedBertConfig
from megacore.data.bert.dataset import BertBatch
from megacore.layers.context import BuildContext
from megacore.models.bert import bert_layers
from megacore.parallel.mesh import ALONE, Mesh
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage, tensors_of
from megacore.train.bert_task import BertTask
from tests.parity.bert_runs import make_bert_config
from tests.parity.hf_models import disturbed, give

VOCAB, POSITIONS, HIDDEN, HEADS, LAYERS = 101, 24, 32, 4, 3
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
SHAPE |= {"initializer_range": 0.2, "attn_implementation": "eager"}


def classic_twin() -> BertForPreTraining:
    """A small random model, evaluated, with weights so large that a wrong layout cannot hide."""
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": POSITIONS, "num_hidden_layers": LAYERS, "intermediate_size": 4 * HIDDEN}
    config = TransformersConfig(**SHAPE, **sizes)
    return disturbed(BertForPreTraining(config).eval())


def modern_twin() -> ModernBertForMaskedLM:
    """The same of ModernBERT: a window of 8 tokens and six layers, the first and fourth of which see everything."""
    torch.manual_seed(0)
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = ModernBertConfig(**SHAPE, num_hidden_layers=6, intermediate_size=48, local_attention=8, **ends)
    return disturbed(ModernBertForMaskedLM(config).eval())


def modern_config(**changes: object) -> ResolvedBertConfig:
    """The configuration of the modern twin."""
    own: dict[str, object] = {"bert_style": "modern", "norm_epsilon": 1e-5, "num_layers": 6, "ffn_hidden_size": 48}
    return classic_config(**own | {"window_size": 8} | changes)


def classic_config(**changes: object) -> ResolvedBertConfig:
    """The configuration of the classic twin."""
    own: dict[str, object] = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "seq_length": POSITIONS}
    own |= {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_layers": LAYERS, "norm_epsilon": 1e-12}
    return make_bert_config((1, 1, 1), "nowhere", **own | changes)


def stage_of(config: ResolvedBertConfig, twin: PreTrainedModel) -> Stage:
    """megacore's model on one rank, with a twin's weights, evaluated."""
    device = torch.device("cpu")
    context = BuildContext.of(config, layer_group=ALONE, device=device, streams=RandomStreams(0, device))
    stage = Stage(bert_layers(config, context)).eval()
    give(stage, twin)
    return stage


def batch_of(lengths: tuple[int, ...], *, documents: Tensor | None = None) -> BertBatch:
    """Random pairs of these lengths, padded to POSITIONS, a third of their tokens masked; or of these documents."""
    draw = torch.Generator().manual_seed(1)
    shape = len(lengths), POSITIONS
    tokens, labels = torch.randint(0, VOCAB, (2, *shape), generator=draw)
    places = torch.arange(POSITIONS).expand(shape)
    ends = torch.tensor(lengths).unsqueeze(1)
    numbers = (places < ends).long() if documents is None else documents
    masked = (torch.rand(shape, generator=draw) < 0.3) & (numbers > 0)
    return BertBatch(
        index=0,
        tokens=tokens,
        token_types=((places > ends // 2) & (numbers > 0)).long(),
        documents=numbers,
        labels=labels,
        loss_mask=masked.float(),
        sentence_labels=torch.arange(len(lengths)) % 2,
    )


def bert_input(batch: BertBatch) -> tuple[Tensor, Tensor, Tensor]:
    """What the first layer takes of a microbatch."""
    return batch.tokens, batch.token_types, batch.documents


def hidden_states(stage: Stage, batch: BertBatch) -> list[Tensor]:
    """What the embedding and every block give."""
    found, value = [], bert_input(batch)
    for layer in stage.layers[:-1]:
        value = layer(value)
        found.append(tensors_of(value)[0])
    return found


def loss_of(config: ResolvedBertConfig, output: Tensor | tuple[Tensor, Tensor], batch: BertBatch) -> Tensor:
    """The mean loss over the masked tokens, plus that over the pairs; 0 for either where there is none."""
    task = BertTask(config, Mesh(device=torch.device("cpu")))
    return (task.loss(output, batch) / task.counts(batch).float().clamp(min=1)).sum()
