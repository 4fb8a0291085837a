"""What a run needs of memory, against hand-computed numbers; what is said and recommended where it does not fit."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from megacore.models.outline import outline
from megacore.parallel.host_memory import AvailableMemory, host_capacity, host_memory
from megacore.plan import fit
from megacore.plan.fit import check_memory, host_problem
from megacore.plan.memory import GIB, plan_memory
from tests.unit import refusals
from tests.unit.planning import with_flags
from tests.unit.refusals import Refuse, parse

alone, refuse = refusals.alone, refusals.refuse  # fixtures
MOCK = ("--mock-data", "--train-iters", "2")
LLAMA = (*MOCK, "--preset", "llama-3-8b", "--device", "cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> AvailableMemory:
    """24 GiB, of which the kernel says that 23 are available."""
    memory = AvailableMemory(23 * GIB, "MemAvailable of this machine")
    monkeypatch.setattr(fit, "host_memory", lambda: memory)
    return memory


def ranks_of(world: int, monkeypatch: pytest.MonkeyPatch, local: int = 1, rank: int = 0) -> None:
    """This process is one of a job of so many ranks, `local` of them on each machine."""
    for name, value in {"WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")


def test_llama_3_8b_is_refused_on_24_gib_in_one_message(machine: AvailableMemory, refuse: Refuse) -> None:
    """By hand: 16 bytes for each of 8,030,261,248 parameters; logits of 8192 x 128,256 fp32 numbers."""
    text = refuse(*LLAMA, checks=[check_memory])
    assert text.startswith("megacore: refused: 1 problem\n  - --preset llama-3-8b needs at least ")
    assert "but 23.0 GiB are available (MemAvailable of this machine)" in text
    assert f"state        {16 * 8_030_261_248 / GIB:.1f} GiB: parameters {4 * 8_030_261_248 / GIB:.1f} GiB" in text
    assert re.findall(r"^ +(\d)\. ", text, re.MULTILINE) == ["1", "2", "3"]
    assert "--zero-stage 3" in text
    assert "--tp" in text
    assert "a smaller model" in text
    assert "--no-memory-check" in text
    assert parse(*LLAMA, "--no-memory-check", checks=[check_memory]).model.num_layers == 32


def ways(text: str) -> list[str]:
    """The ways out that a message lists."""
    return re.findall(r"^ +\d\. (.*)$", text, re.MULTILINE)


CASES = [
    (23, ("gpt2-small", "--micro-batch-size", "16")),
    (23, ("llama-3-8b", "--precision", "bf16")),
    (23, ("mistral-7b", "--global-batch-size", "4")),
    (2, ("llama-3-8b",)),
    (2, ("gpt2-small", "--num-layers", "1", "--micro-batch-size", "8")),
]


@pytest.mark.parametrize(("gib", "flags"), CASES, ids=str)
def test_what_is_recommended_fits(
    gib: int, flags: tuple[str, ...], refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way out, typed as it stands, is accepted, and needs no more than it says."""
    monkeypatch.setattr(fit, "host_memory", lambda: AvailableMemory(gib * GIB, "MemAvailable of this machine"))
    given = [*MOCK, "--device", "cpu", "--preset", *flags]
    batch = parse(*given).training.global_batch_size
    listed = ways(refuse(*given, checks=[check_memory]))
    assert len(listed) >= 3
    notes = "(?:, a smaller model|, the longest sequences that fit)?"
    form = rf"(--.*?)(?:, on (\d+) machines.*?)?{notes}: ([\d.]+ [GM]iB) per rank(?: \(tight: .*\))?"
    fitting = [match for way in listed if (match := re.fullmatch(form, way))]  # the others name larger machines
    assert len(fitting) >= 2
    for words, machines, size in (match.groups() for match in fitting):
        changed = shlex.split(words)
        ranks_of(int(machines or 1), monkeypatch)
        config = parse(*with_flags(given, changed), checks=[check_memory])
        assert config.training.global_batch_size == batch or "--global-batch-size" in changed
        needed = max(rank.expected for rank in plan_memory(config, outline(config), on_cpu=True)) / GIB
        told, unit = size.split()
        assert needed == pytest.approx(float(told) / (1 if unit == "GiB" else 1024), abs=0.06)
        assert needed <= gib


WIDE = ("--hidden-size", "16384", "--num-attention-heads", "128", "--num-layers", "2", "--vocab-size", "50257")


LARGE = (("--preset", "llama-3-8b"), ("--preset", "mistral-7b", "--num-layers", "30"), WIDE)
LITTLE = (0.3, 1, 2, 4, 8, 16, 17.4, 20, 60)


@pytest.mark.parametrize(
    ("flags", "gib"),
    # By default every second amount of memory once; all of them for every model are slow.
    [
        pytest.param(flags, gib, marks=[pytest.mark.slow] * ((i - j) % len(LARGE) != 0 or j % 2))
        for i, flags in enumerate(LARGE)
        for j, gib in enumerate(LITTLE)
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, tuple) else str(value),
)
def test_there_are_three_suggestions_however_little_there_is(flags: tuple[str, ...], gib: float) -> None:
    config = parse(*MOCK, *flags, "--device", "cpu")
    text = host_problem(config, outline(config), memory=AvailableMemory(gib * GIB, ""))
    assert text is not None
    found = ways(text)
    assert len(set(found)) == len(found) >= 3
    for way in found:
        size = re.search(r"([\d.]+) ([GM]iB) per rank(?: \(tight: .*\))?$", way)
        assert size is not None
        fits = float(size[1]) / (1 if size[2] == "GiB" else 1024) <= gib + 0.05
        assert fits != ("machines with at least" in way), way


def test_sequences_far_too_long_are_answered_with_the_longest_that_fit_first() -> None:
    small = (*MOCK, "--vocab-size", "512", "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4")

    def needed(length: int) -> float:
        config = parse(*small, "--device", "cpu", "--seq-length", str(length))
        return max(rank.expected for rank in plan_memory(config, outline(config), on_cpu=True)) / GIB

    config = parse(*small, "--device", "cpu", "--no-memory-check", "--seq-length", "99999999")
    text = host_problem(config, outline(config), memory=AvailableMemory(8 * GIB, ""))
    assert text is not None
    first = re.match(
        r"--seq-length (\d+) --max-position-embeddings (\d+), the longest sequences that fit: ", ways(text)[0]
    )
    assert first is not None
    length = int(first[1])
    assert first[2] == first[1]
    assert needed(length) <= 8 < needed(length + 16)


def on_device(flags: tuple[str, ...], device: float, host: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(fit, "host_memory", lambda: AvailableMemory(host * GIB, "host"))
    config = parse(*MOCK, *flags)
    text = fit.device_problem(config, outline(config), 0, AvailableMemory(device * GIB, "device"))
    assert text is not None
    return ways(text)


def test_no_device_is_told_to_offload_more_than_its_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 16 bytes for each of 8.03e9 parameters are 119.7 GiB."""
    flags = ("--preset", "llama-3-8b", "--precision", "bf16")
    assert "--offload-optimizer" in " ".join(on_device(flags, 79, 200, monkeypatch))
    found = on_device(flags, 79, 100, monkeypatch)
    assert "--offload-optimizer" not in " ".join(found)
    assert len(found) >= 3


def test_a_checkpoint_is_not_given_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(*MOCK, "--preset", "llama-3-8b", "--device", "cpu", "--load", "auto")
    text = host_problem(config, outline(config), memory=AvailableMemory(8 * GIB, ""))
    assert text is not None
    assert len(ways(text)) >= 3
    assert "smaller model" not in text


def test_what_may_not_fit_is_warned_of() -> None:
    config = parse(*MOCK, "--preset", "gpt2-small", "--micro-batch-size", "1")
    (rank,) = plan_memory(config, outline(config), on_cpu=True, torch_is_loaded=True)
    between = AvailableMemory((rank.certain + rank.expected) / 2, "MemAvailable of this machine")
    assert host_problem(config, outline(config), memory=between, torch_is_loaded=True) is None
    told = fit.host_warning(config, outline(config), between)
    assert told is not None
    assert re.fullmatch(
        r"tight: expected [\d.]+ GiB of [\d.]+ GiB available \(MemAvailable of this machine\); "
        r"see docs/guides/memory.md",
        told,
    )
    assert fit.host_warning(config, outline(config), AvailableMemory(rank.expected, "")) is None


def test_ranks_that_share_a_machine_share_its_memory(machine: AvailableMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (*MOCK, "--device", "cpu", "--preset", "gpt2-large", "--recompute", "full")
    ranks_of(4, monkeypatch, local=1)
    parse(*flags, checks=[check_memory])
    ranks_of(4, monkeypatch, local=4)
    with pytest.raises(SystemExit):
        parse(*flags, checks=[check_memory])


def test_only_the_stages_of_this_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 2 and 3 of four stages, the last of which has the logits."""
    ranks_of(4, monkeypatch, local=2, rank=2)
    config = parse(*MOCK, "--preset", "gpt2-small", "--pp", "4")
    ranks = plan_memory(config, outline(config), on_cpu=True)
    needed = ranks[2].certain + ranks[3].certain
    assert host_problem(config, outline(config), memory=AvailableMemory(needed, "")) is None
    assert host_problem(config, outline(config), memory=AvailableMemory(needed - 1, "")) is not None


# ---- how much there is -----------------------------------------------------------------------------------------------


MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
GROUPS = tomllib.loads(Path(__file__).with_name("memory_groups.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_limits_the_memory_of_its_machine(name: str, tmp_path: Path) -> None:
    files, available, capacity = (GROUPS[name][key] for key in ("files", "available", "capacity"))
    for file, text in {"/proc/meminfo": MEMINFO, **files}.items():
        path = tmp_path / (file[1:] if file.startswith("/") else f"sys/fs/cgroup/{file}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    memory = host_memory(tmp_path)
    assert memory is not None
    assert (memory.available, host_capacity(tmp_path)) == (available, capacity)
    assert ("memory.max 500000" if capacity == 500_000 else "") in memory.source
    assert files or memory.source == "MemAvailable of this machine"
    assert (host_memory(tmp_path / "nowhere"), host_capacity(tmp_path / "nowhere")) == (None, None)
