"""Where the rules of the house have exceptions, and who alone may do certain things; each with its reason."""

from __future__ import annotations

# Imports that are not at the head of the module, with the reason: (file, imported module) -> why.
START_UP = "torch takes seconds to load; a wrong flag or input is refused before that"
LATE_IMPORTS = {
    ("megacore/convert/start.py", "megacore.convert.from_hf"): START_UP,
    ("megacore/commands/pretrain_gpt.py", "megacore.models.gpt"): START_UP,
    ("megacore/commands/pretrain_gpt.py", "megacore.parallel.products"): START_UP,
    ("megacore/commands/pretrain_gpt.py", "megacore.train.gpt_task"): START_UP,
    ("megacore/commands/pretrain_gpt.py", "megacore.train.trainer"): START_UP,
    ("megacore/commands/dry_run.py", "megacore.commands.plan"): "the planner is optional, and only a plan needs it",
    ("megacore/commands/plan.py", "megacore.commands.dry_run_report"): "loads torch, which only --dry-run=full needs",
    ("megacore/commands/plan.py", "megacore.commands.plan_calibration"): "only --calibrate needs it",
    ("megacore/commands/plan.py", "megacore.commands.plan_fit"): "only --fit needs it",
    ("megacore/commands/plan.py", "megacore.convert.start"): "slow to load, and only --init-from-hf needs it",
    ("megacore/commands/plan.py", "megacore.data.gpt.build"): "slow to load, and only a tokenizer needs it",
    ("megacore/verify/rehearse.py", "torch"): "only a run on accelerators needs it",
    ("megacore/watch/nodes.py", "torch.distributed"): "only a watcher of a job over several nodes needs it",
    ("tools/quickstart.py", "torch"): "takes seconds, in which nothing would be said",
    ("megacore/tracer/cache.py", "megacore.tracer"): START_UP,
    ("megacore/commands/plan_operators.py", "megacore.tracer.step_trace"): START_UP,
    ("megacore/remote.py", "fsspec"): "only URLs need it",
    ("megacore/drawing/canvas.py", "matplotlib"): "optional, and only PNG needs it",
    ("megacore/train/trackers/wandb_run.py", "wandb"): "optional, takes a second to load, and only rank 0 needs it",
    ("megacore/convert/check.py", "transformers"): "optional, and only a conversion's check needs it",
    ("megacore/data/indexed/corpus.py", "pyarrow.parquet"): "optional, and only Parquet files need it",
    ("megacore/data/tokenizers/fast_bpe.py", "tiktoken"): "optional, and only a large input is worth its proof",
    ("megacore/data/tokenizers/tokenizer.py", "transformers"): "optional: only directories without a tokenizer.json",
    ("megacore/data/tokenizers/chat_template.py", "transformers"): "optional: only a chat template needs it",
}
# Operators load their kernel when they first run it.
TRITON = "Triton is optional, and takes a second to load"
KERNELS_OF = {
    "activation": ("gelu", "swiglu"), "adamw": ("adamw",), "block_attention": ("attention",), "dropout": ("dropout",),
    "grouped": ("grouped", "permute"), "loss": ("cross_entropy",), "norm": ("norm",), "position": ("rotary",),
    "softmax": ("softmax",),
}  # fmt: skip
LATE_IMPORTS |= {
    (f"megacore/ops/{name}.py", f"megacore.kernels.{kernel}"): TRITON
    for name, kernels in KERNELS_OF.items() for kernel in kernels
}  # fmt: skip
# Who besides megacore.ops may import kernels: what compiles them without running them.
KERNEL_USERS = {"tools/kernel_cases.py"}
# Who locks and replaces files: one module, and those that replace a file of another kind, with the reason.
FILES = "megacore/files.py"
FILE_REPLACERS = {
    FILES: "locks and atomic writes",
    "megacore/checkpoint/storage.py": "the tests stop it between the writing and the renaming of the pointer",
    "megacore/data/indexed/writer.py": "publishes files that were written over hours",
    "megacore/watch/ledger.py": "the file is mapped into memory before it gets its name",
}
# Who proposes or prints flags such as --dp, and therefore names degrees.
DEGREES_BY_NAME = {"megacore/plan/plan_json.py", "megacore/plan/search_space.py", "megacore/plan/ways_out.py"}
# Who may load torch before the configuration is accepted: nobody of `config`; of `data` the loader; of `watch` what
# training itself calls.
TORCH_IN_DATA = {
    "megacore/data/loading/loader.py", "megacore/watch/stragglers.py", "megacore/watch/same_operations.py",
}  # fmt: skip

DISTRIBUTED = {
    "megacore/parallel/collectives.py": "collectives",
    "megacore/parallel/mesh.py": "groups",
    "megacore/parallel/gloo.py": "groups",  # on which threads they run
    "megacore/pipeline/transport.py": "point-to-point",
    "megacore/watch/nodes.py": "store",
    "megacore/parallel/direct.py": "point-to-point",  # of which it makes collectives
    "megacore/convert/dcp_files.py": "checkpoints",  # of torch.distributed.checkpoint, written by one process
}
DEVICE_SEAM = "megacore/parallel/mesh.py"
CUDA_NAMES = {
    **dict.fromkeys(("megacore/config/parallel.py", "tools/generate.py"), "the value that --device takes"),
    "tools/kernel_report.py": "the compiler's name for what it compiles to",
}
# Who may load a pickle: with torch's restricted loader (weights_only=True), or with an unpickler that makes only what
# it is told to.
PICKLE_READERS = {"megacore/convert/pickled.py"}
