"""BERT: norms after the residual sums, token types, and its masked-token head, with or without the sentence task."""

from __future__ import annotations

from megacore.models.hf.family import Family, Same, TensorRule, q_k_v, read_tied, write_tied

_LAYER = "bert.encoder.layer.{i}"
# Transformers holds the head's bias twice. The decoder's is the one that is added; a tied model takes the other for it.
_BIAS, _DECODER_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"


def _both(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    return tuple(TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias"))


BERT = Family(
    model_type="bert",
    architecture="BertForPreTraining",
    without_sentences="BertForMaskedLM",
    bert_style="classic",
    prefix="bert.",
    same=(
        Same("num_layers", ("num_hidden_layers",), 12),
        Same("hidden_size", ("hidden_size",), 768),
        Same("num_attention_heads", ("num_attention_heads",), 12),
        Same("ffn_hidden_size", ("intermediate_size",), 3072),
        Same("max_position_embeddings", ("max_position_embeddings",), 512),
        Same("vocab_size", ("vocab_size",), 30522),
        Same("norm_epsilon", ("layer_norm_eps",), 1e-12),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("hidden_dropout", ("hidden_dropout_prob",), 0.1),
        Same("attention_dropout", ("attention_probs_dropout_prob",), 0.1),
    ),
    fixed={
        "hidden_act": (("gelu",), "gelu"),
        "type_vocab_size": ((2,), 2),
        "is_decoder": ((False,), False),
    },
    optional={"position_embedding_type": ("absolute",)},
    constants={"activation": "gelu-exact"},
    read=lambda reader: read_tied(reader, default=True),
    write=write_tied,
    rules=(
        TensorRule("embedding.tokens.weight", ("bert.embeddings.word_embeddings.weight",)),
        TensorRule("embedding.positions", ("bert.embeddings.position_embeddings.weight",)),
        TensorRule("embedding.segments", ("bert.embeddings.token_type_embeddings.weight",)),
        *_both("embedding.norm", "bert.embeddings.LayerNorm"),
        *(
            TensorRule(
                f"blocks.{{i}}.attention.qkv.{kind}",
                tuple(f"{_LAYER}.attention.self.{one}.{kind}" for one in ("query", "key", "value")),
                q_k_v,
            )
            for kind in ("weight", "bias")
        ),
        *_both("blocks.{i}.attention.output", f"{_LAYER}.attention.output.dense"),
        *_both("blocks.{i}.attention_norm", f"{_LAYER}.attention.output.LayerNorm"),
        *_both("blocks.{i}.mlp.up", f"{_LAYER}.intermediate.dense"),
        *_both("blocks.{i}.mlp.down", f"{_LAYER}.output.dense"),
        *_both("blocks.{i}.mlp_norm", f"{_LAYER}.output.LayerNorm"),
        *_both("head.transform", "cls.predictions.transform.dense"),
        *_both("head.transform_norm", "cls.predictions.transform.LayerNorm"),
        TensorRule("head.weight", ("cls.predictions.decoder.weight",)),
        TensorRule("head.bias", (_BIAS,), untied=(_DECODER_BIAS,)),
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
