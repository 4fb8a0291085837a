"""What must hold between the data, the model that reads it and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Iterator

from megacore.config.checkpoint import AUTO
from megacore.config.problem import Problem, Values, up_to
from megacore.config.rules import FURTHER, Rules
from megacore.config.schema import Config

DATA_RULES = Rules()


@DATA_RULES.about("vocab_size", "tokenizer", "preset", "init_from_hf")  # whatever is wrong with the data
def _vocabulary(config: Config, world_size: int) -> Iterator[str]:
    if (
        config.model.vocab_size is None
        and config.checkpoint.init_from_hf is None  # its config.json has the size, or is refused
        and config.data.tokenizer is None
    ):
        source = "--mock-data" if config.data.mock_data else "--data-path"
        yield f"{source} needs a vocabulary: use --tokenizer PATH or --vocab-size N"


@DATA_RULES.about("seq_length", "max_position_embeddings")
def _positions(config: Config, world_size: int) -> Iterator[str]:
    length, positions = config.data.seq_length, config.model.max_position_embeddings
    if positions is not None and length > positions:
        more = range(length, length + FURTHER)
        yield Problem(
            f"--seq-length {length} must be at most --max-position-embeddings {positions}",
            up_to("seq_length", length, positions),
            Values(name="max_position_embeddings", among=more, near=positions, bound="or more"),
        )


@DATA_RULES.about("reset_position_ids", "reset_attention_mask", "packing", "position_embedding_type")
def _positions_of_documents(config: Config, world_size: int) -> Iterator[str]:
    if config.data.beside_tokens == ("positions",) and config.model.position_embedding_type == "alibi":
        yield (
            "--reset-position-ids has no meaning with --position-embedding-type alibi, which goes by distances, unless "
            "attention stays within documents: use --reset-attention-mask too, or leave it out"
        )


@DATA_RULES.about("skip_train", "train_data_path", "valid_data_path", "data_path", "valid_sets")
def _evaluated_data(config: Config, world_size: int) -> Iterator[str]:
    data = config.data
    if config.training.skip_train and data.is_split and not data.valid_data_path and not data.valid_sets:
        yield (
            "--skip-train evaluates, and --train-data-path has no validation data beside it: use --valid-data-path or "
            "--valid-sets"
        )


@DATA_RULES.about("valid_sets", "eval_interval")
def _evaluated_sets(config: Config, world_size: int) -> Iterator[str]:
    if config.data.valid_sets and config.training.eval_interval == 0:
        yield "--valid-sets has no effect with --eval-interval 0, which turns evaluation off: leave one of them out"


@DATA_RULES.about("preset", "init_from_hf", "load", "pretrained_checkpoint")
def _start_of_weights(config: Config, world_size: int) -> Iterator[str]:
    source, load, preset = config.checkpoint.init_from_hf, config.checkpoint.load, config.model.preset
    pretrained = config.start.pretrained_checkpoint
    if source is not None and load not in (None, AUTO):
        yield f"--init-from-hf {source} and --load {load} exclude each other: leave one of them out"
    if pretrained is not None and load not in (None, AUTO):
        yield (
            f"--pretrained-checkpoint {pretrained} and --load {load} exclude each other: use --load auto, which "
            "continues this run where it has a checkpoint, or leave one of them out"
        )
    if pretrained is not None and source is not None:
        given = f"--pretrained-checkpoint {pretrained} and --init-from-hf {source}"
        yield f"{given} exclude each other: leave one of them out"
    if not config.start.load_optim and load is None:
        yield "--no-load-optim has no effect without --load: leave it out"
    if source is not None and preset is not None:
        yield f"--preset {preset} has no effect with --init-from-hf {source}, which sets the shape: leave it out"
