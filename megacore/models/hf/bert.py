"""BERT: norms after the residual sums, token types, and its masked-token head, with or without the sentence task.
RoBERTa, XLM-RoBERTa and CamemBERT: without that task, and with positions that begin after the number of the padding
token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Same, TensorRule, q_k_v, read_tied, write_tied

# Transformers holds the head's bias twice. The decoder's is the one that is added; a tied model takes the other for it.
_BIAS, _DECODER_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"


def _both(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    return tuple(TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias"))


_SAME = (
    Same("num_layers", ("num_hidden_layers",), 12),
    Same("hidden_size", ("hidden_size",), 768),
    Same("num_attention_heads", ("num_attention_heads",), 12),
    Same("ffn_hidden_size", ("intermediate_size",), 3072),
    Same("norm_epsilon", ("layer_norm_eps",), 1e-12),
    Same("init_method_std", ("initializer_range",), 0.02),
    Same("hidden_dropout", ("hidden_dropout_prob",), 0.1),
    Same("attention_dropout", ("attention_probs_dropout_prob",), 0.1),
)
_FIXED: dict[str, tuple[tuple[Any, ...], Any]] = {
    "hidden_act": (("gelu",), "gelu"),
    "is_decoder": ((False,), False),
}


def _body(prefix: str) -> tuple[TensorRule, ...]:
    """The tensors of the embedding and the blocks."""
    layer = f"{prefix}.encoder.layer.{{i}}"
    return (
        TensorRule("embedding.tokens.weight", (f"{prefix}.embeddings.word_embeddings.weight",)),
        TensorRule("embedding.positions", (f"{prefix}.embeddings.position_embeddings.weight",)),
        TensorRule("embedding.segments", (f"{prefix}.embeddings.token_type_embeddings.weight",)),
        *_both("embedding.norm", f"{prefix}.embeddings.LayerNorm"),
        *(
            TensorRule(
                f"blocks.{{i}}.attention.qkv.{kind}",
                tuple(f"{layer}.attention.self.{one}.{kind}" for one in ("query", "key", "value")),
                q_k_v,
            )
            for kind in ("weight", "bias")
        ),
        *_both("blocks.{i}.attention.output", f"{layer}.attention.output.dense"),
        *_both("blocks.{i}.attention_norm", f"{layer}.attention.output.LayerNorm"),
        *_both("blocks.{i}.mlp.up", f"{layer}.intermediate.dense"),
        *_both("blocks.{i}.mlp.down", f"{layer}.output.dense"),
        *_both("blocks.{i}.mlp_norm", f"{layer}.output.LayerNorm"),
    )


BERT = Family(
    model_type="bert",
    architecture="BertForPreTraining",
    without_sentences="BertForMaskedLM",
    bert_style="classic",
    prefix="bert.",
    same=(
        *_SAME,
        Same("max_position_embeddings", ("max_position_embeddings",), 512),
        Same("vocab_size", ("vocab_size",), 30522),
    ),
    fixed={**_FIXED, "type_vocab_size": ((2,), 2)},
    optional={"position_embedding_type": ("absolute",)},
    constants={"activation": "gelu-exact"},
    read=lambda reader: read_tied(reader, default=True),
    write=write_tied,
    rules=(
        *_body("bert"),
        *_both("head.transform", "cls.predictions.transform.dense"),
        *_both("head.transform_norm", "cls.predictions.transform.LayerNorm"),
        TensorRule("head.weight", ("cls.predictions.decoder.weight",)),
        TensorRule("head.bias", (_BIAS,), instead=(_DECODER_BIAS,)),
        *_both("head.sentence.pooler", "bert.pooler.dense"),
        *_both("head.sentence.classifier", "cls.seq_relationship"),
    ),
    aliases={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    buffers=(".position_ids",),
    ties={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        _DECODER_BIAS: _BIAS,
    },
    unused={_BIAS: _DECODER_BIAS},
)


# ---- RoBERTa ---------------------------------------------------------------------------------------------------------

_HEAD_BIAS, _DECODERS_BIAS = "lm_head.bias", "lm_head.decoder.bias"


def _read_roberta(reader: ConfigReader) -> dict[str, Any]:
    """Padding has a row of the position table, and the first token the row after it."""
    padding, rows = reader.get("pad_token_id", 1), reader.copied("max_position_embeddings", _POSITIONS, 512)
    if type(padding) is not int or not 0 <= padding < rows - 1:
        reader.problem("pad_token_id", f"is {str(padding)[:40]!r}, not a row of the position table before the last")
        padding = 1
    return read_tied(reader, default=True) | {
        "position_offset": padding + 1,
        "max_position_embeddings": rows - padding - 1,
    }


def _read_token_types(reader: ConfigReader) -> dict[str, Any]:
    types = reader.get("type_vocab_size", 2)
    if type(types) is not int or types not in (1, 2):
        reader.problem("type_vocab_size", f"is {str(types)[:40]!r}, but megacore has only 1 or 2")
        types = 2
    return {"num_token_types": types}


def _write_roberta(config: ResolvedModel) -> dict[str, Any]:
    return write_tied(config) | {
        "pad_token_id": config.position_offset - 1,
        "max_position_embeddings": config.position_rows,
    }


_POSITIONS = ("max_position_embeddings",)
ROBERTA = Family(
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    bert_style="classic",
    prefix="roberta.",
    same=(*_SAME, Same("vocab_size", ("vocab_size",), 50265)),
    fixed=_FIXED,
    optional={"position_embedding_type": ("absolute",)},
    constants={"activation": "gelu-exact"},
    read=_read_roberta,
    write=_write_roberta,
    read_bert=_read_token_types,
    write_bert=lambda config, bert: {"type_vocab_size": bert.num_token_types},
    rules=(
        *_body("roberta"),
        *_both("head.transform", "lm_head.dense"),
        *_both("head.transform_norm", "lm_head.layer_norm"),
        TensorRule("head.weight", ("lm_head.decoder.weight",)),
        TensorRule("head.bias", (_HEAD_BIAS,), instead=(_DECODERS_BIAS,)),
    ),
    buffers=(".position_ids",),
    ties={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        _DECODERS_BIAS: _HEAD_BIAS,
    },
    unused={_HEAD_BIAS: _DECODERS_BIAS},
)
_SAME_AS_ROBERTA = (*_SAME, Same("vocab_size", ("vocab_size",), 30522))
XLM_ROBERTA = replace(ROBERTA, model_type="xlm-roberta", architecture="XLMRobertaForMaskedLM", same=_SAME_AS_ROBERTA)
CAMEMBERT = replace(ROBERTA, model_type="camembert", architecture="CamembertForMaskedLM", same=_SAME_AS_ROBERTA)
