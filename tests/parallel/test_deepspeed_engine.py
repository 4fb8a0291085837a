"""`megacore.initialize`: a training loop written for DeepSpeed equals plain torch, on any ZeRO stage and replicas."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacore
from megacore.config import WatchConfig
from megacore.errors import ConfigError, UserError
from tests.distributed import run_distributed

UNWATCHED: dict[str, Any] = {"watch": WatchConfig(hang_timeout_minutes=0.0)}
MICRO, ACCUMULATION, STEPS = 3, 2, 4


class Net(nn.Module):
    """With a keyword argument, a tied weight, a frozen weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.outer = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.outer.weight
        self.head = nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, gain: float = 1.0) -> dict[str, Tensor]:
        h = torch.tanh(self.inner(x)) * self.frozen
        return {"logits": self.head(self.again(torch.tanh(self.outer(h)))) * gain}


def net(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def data(step: int, number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(MICRO, 5, generator=draw), torch.randint(4, (MICRO,), generator=draw)


def document(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        **changes,
    }


def groups(model: nn.Module) -> list[dict[str, Any]]:
    learning = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in learning if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in learning if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.9, 0.95))


def plain(replicas: int, rates: list[float] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the same training in plain torch, on one process with all replicas' samples."""
    model = net()
    optimizer = adamw(model)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 if rates is None else rates[step]
        total = 0.0
        for number in range(ACCUMULATION * replicas):
            x, y = data(step, number)
            loss = F.cross_entropy(model(x, gain=2.0)["logits"], y) / (ACCUMULATION * replicas)
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


def train(engine: Any, steps: range) -> list[float]:
    """The loop of a program for DeepSpeed; the losses of the steps over all replicas."""
    losses = []
    replicas, rank = engine.mesh.batch.size, engine.mesh.batch.rank
    for step in steps:
        for number in range(engine.gradient_accumulation_steps()):
            x, y = data(step, number * replicas + rank)
            loss = F.cross_entropy(engine(x, gain=2.0)["logits"].float(), y)
            engine.backward(loss)
            engine.step()
        losses.append(float(engine._last.loss))
    return losses


def on_rank(rank: int, ranks: int, zero: int, where: str) -> tuple[list[float], dict[str, Tensor]]:
    changes = {"zero_optimization": {"stage": zero, "reduce_bucket_size": 30}}
    engine, *_ = megacore.initialize(model=net(seed=rank), config=document(**changes), **UNWATCHED)
    losses = train(engine, range(2))
    engine.save_checkpoint(where, client_state={"note": 7})
    again, *_ = megacore.initialize(model=net(seed=9), config=document(**changes), mesh=engine.mesh, **UNWATCHED)
    path, state = again.load_checkpoint(where)
    assert path is not None
    assert (again.global_steps, again.micro_steps, state) == (2, 2 * ACCUMULATION, {"note": 7})
    return losses + train(again, range(2, STEPS)), again.module_state_dict()


def assert_equal(got: tuple[list[float], dict[str, Tensor]], want: tuple[list[float], dict[str, Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    for name, tensor in want[1].items():
        if name != "again.weight":  # the same tensor as outer.weight
            torch.testing.assert_close(got[1][name], tensor, rtol=1e-6, atol=1e-6)


def test_the_last_checkpoint_is_loaded_whatever_its_tag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, *_ = megacore.initialize(model=net(), config=document(), **UNWATCHED)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    train(engine, range(1, 3))
    engine.save_checkpoint(tmp_path, tag="epoch2")
    path, _ = engine.load_checkpoint(tmp_path)
    assert (Path(str(path)).parent, engine.global_steps) == (tmp_path / "epoch2", 3)
    assert (engine.local_rank, engine.zero_optimization_stage()) == (0, 0)
    assert engine.load_checkpoint(tmp_path, tag="epoch3") == (None, {})
    assert f"note: {tmp_path / 'epoch3'} does not exist: nothing is loaded" in capsys.readouterr().err
    engine.save_checkpoint(tmp_path)
    path, _ = engine.load_checkpoint(tmp_path)
    assert Path(str(path)).parent == tmp_path


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1, 3])
def test_replicas_and_zero_stages_equal_plain_torch_also_after_a_resume(zero: int, tmp_path: Path) -> None:
    results = run_distributed(on_rank, 2, zero, str(tmp_path))
    for result in results:
        assert_equal(result, plain(2))


@pytest.mark.parametrize(("form", "bound"), [("bf16", 0.05), ("fp16", 0.01)])
def test_sixteen_bits_stay_near_fp32(form: str, bound: float) -> None:
    settings = {"enabled": True, **({"initial_scale_power": 8} if form == "fp16" else {})}
    engine, *_ = megacore.initialize(model=net(), config=document(**{form: settings}), **UNWATCHED)
    assert next(engine.module.parameters()).dtype == (torch.bfloat16 if form == "bf16" else torch.float16)
    losses, _ = plain(1)
    assert train(engine, range(STEPS)) == pytest.approx(losses, rel=bound)
    assert engine.module_state_dict()["head.weight"].dtype == torch.float32  # master weights


def test_the_learning_rate_is_that_of_the_configuration_or_of_a_scheduler_of_torchs() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 4e-3, "warmup_num_steps": 4, "warmup_type": "linear"}}
    config = document(scheduler=scheduler)
    engine, optimizer, _, schedule = megacore.initialize(model=net(), config=config, **UNWATCHED)
    rates = []
    for step in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == [rates[-1]] == engine.get_lr()
        train(engine, range(step, step + 1))
        assert engine.pipeline.lr == rates[-1]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])
    assert_equal(([], engine.module_state_dict()), ([], plain(1, rates)[1]))

    def halved(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    engine, _, _, _ = megacore.initialize(model=net(), config=document(), lr_scheduler=halved, **UNWATCHED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = train(engine, range(STEPS))
    expected = plain(1, [1e-2 * 0.5**step for step in range(STEPS)])
    assert_equal((losses, engine.module_state_dict()), expected)


class Loss(nn.Module):
    """A model whose output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x, gain=2.0)["logits"], y)


class Numbered(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 4 * MICRO

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((5,), float(index)), torch.tensor(index % 4)


def test_train_batch_takes_a_model_that_returns_its_loss() -> None:
    engine, *_ = megacore.initialize(model=Loss(), config=document(), **UNWATCHED)
    losses = []
    for step in range(STEPS):
        losses.append(float(engine.train_batch(iter([data(step, 0), data(step, 1)]))))
    want_losses, want = plain(1)
    assert losses == pytest.approx(want_losses, rel=1e-6)
    torch.testing.assert_close(engine.module_state_dict()["net.head.weight"], want["head.weight"], rtol=1e-6, atol=1e-6)
    evaluated = float(engine.eval_batch(iter([data(0, 0), data(0, 1)])))
    with torch.no_grad():
        expected = sum(float(engine.module(*data(0, number))) for number in range(2)) / 2
    assert evaluated == pytest.approx(expected, rel=1e-6)


def test_training_data_become_a_loader_of_microbatches() -> None:
    engine, _, loader, _ = megacore.initialize(model=Loss(), config=document(), training_data=Numbered(), **UNWATCHED)
    assert loader is not None
    seen = sorted(int(x) for inputs, _ in loader for x in inputs[:, 0])
    assert seen == list(range(4 * MICRO))
    for _ in range(3):  # more than an epoch
        engine.train_batch()
    assert engine.global_steps == 3


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        (
            {"optimizer": {"type": "ZeroOneAdam"}, "zero_optimization": {"stages": 1}},
            {},
            "is not a key of.*\n.*ZeroOneAdam",
        ),
        ({"optimizer": {"type": "Muon"}}, {}, "optimizer muon of an engine needs the names of the matrices"),
        ({"scheduler": {"type": "LRRangeTest"}}, {}, "needs the length of the run, which an engine does not know"),
        ({"checkpoint": {"writer": {"decoupled": True}}}, {}, "--async-save is of the training programs"),
        ({}, {"mpu": object()}, "mpu is given"),
        ({}, {"model_parameters": []}, "model_parameters leaves out inner.weight"),
    ],
)
def test_what_is_not_possible_is_refused(changes: dict[str, Any], arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        megacore.initialize(model=net(), config=document(**changes), **arguments, **UNWATCHED)


def test_two_optimizers_several_decays_and_unknown_optimizers_are_refused() -> None:
    model, config = net(), document()
    with pytest.raises(ConfigError, match="the configuration has one too"):
        megacore.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config, **UNWATCHED)
    del config["optimizer"]
    only_vectors, decaying = groups(model), [group | {"weight_decay": 0.1} for group in groups(model)]
    only_vectors[0]["weight_decay"], only_vectors[1]["weight_decay"] = 0.0, 0.1
    with pytest.raises(ConfigError, match="give the matrices one value, and the vectors one value or 0"):
        megacore.initialize(model=model, optimizer=torch.optim.AdamW(only_vectors), config=config, **UNWATCHED)
    with pytest.raises(ConfigError, match="give vectors a group with weight_decay 0"):
        megacore.initialize(model=model, model_parameters=decaying, config=document(), **UNWATCHED)
    with pytest.raises(ConfigError, match="RMSprop is not in megacore"):
        megacore.initialize(model=model, optimizer=torch.optim.RMSprop(model.parameters()), config=config, **UNWATCHED)


def test_a_step_that_overflows_or_is_not_finite_changes_nothing() -> None:
    settings = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    scheduler = torch.optim.lr_scheduler.StepLR
    engine, _, _, schedule = megacore.initialize(
        model=net(), config=document(fp16=settings), lr_scheduler=lambda made: scheduler(made, 1, 0.5), **UNWATCHED
    )
    before = engine.module_state_dict()
    with pytest.warns(UserWarning, match="step 1 is skipped"):
        train(engine, range(1))
    assert schedule.get_last_lr() == [1e-2]
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    engine, *_ = megacore.initialize(model=net(), config=document(), **UNWATCHED)
    for number in range(ACCUMULATION):
        x, y = data(0, number)
        engine.backward(F.cross_entropy(engine(x / (1 - number))["logits"], y))
    with pytest.warns(UserWarning, match="step 1 is skipped"):
        engine.step()
    assert all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    train(engine, range(1, 2))
    assert engine.global_steps == 2


def test_the_script_of_the_manual_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "guides" / "any-model.md").read_text(encoding="utf-8")
    part = manual.partition("## The API of DeepSpeed")[2]
    (script,) = re.findall(r"```python\n(.*?)```", part.partition("\n## ")[0], re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    assert [path.name for path in Path("output/any").glob("step_*.json")] == ["step_00000010.client.json"]


def test_a_loop_in_the_wrong_order_is_refused() -> None:
    engine, optimizer, *_ = megacore.initialize(model=net(), config=document(), **UNWATCHED)
    with pytest.raises(UserError, match=r"call engine\.step"):
        optimizer.step()
    for number in range(ACCUMULATION):
        engine.backward(F.cross_entropy(engine(data(0, number)[0])["logits"], data(0, number)[1]))
    with pytest.raises(UserError, match="is called for microbatch 3 of a step of 2"):
        engine.backward(torch.zeros((), requires_grad=True))
