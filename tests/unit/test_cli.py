"""The command line as a user meets it: what is taken, and what each refusal says, on which rank, and once."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacore.config import Config, ResolvedConfig
from megacore.config.flags import all_fields
from megacore.errors import ConfigError, DataError
from tests.patience import patience
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse, parse, problems

ROOT = Path(__file__).parents[2]
alone, refuse = refusals.alone, refusals.refuse  # fixtures


# ---- what is accepted ------------------------------------------------------------------------------------------------


# Flags without which a flag is refused.
ROPE = ["--position-embedding-type", "rope"]
YARN = [*ROPE, "--rope-scaling", "yarn", "--rope-original-max-positions", "8"]
LATENT = [*ROPE, "--multi-latent-attention", "--disable-bias-linear"]
NEEDED = {
    "wandb_name": ["--wandb-project", "a"],
    "etp": ["--num-experts", "2", "--disable-bias-linear"],
    "moe_shared_expert_size": ["--num-experts", "2", "--disable-bias-linear"],
    **dict.fromkeys(("rope_beta_fast", "rope_beta_slow", "rope_mscale", "rope_mscale_all_dim"), YARN),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), LATENT),
}


def test_every_alias_equals_its_flag(tmp_path: Path) -> None:
    values = {"norm_epsilon": "1e-3", "tokenizer": str(tmp_path), "output_dir": str(tmp_path)}
    values |= {"qk_rope_head_dim": "8", "rope_beta_fast": "64"}
    aliased = [info for info in all_fields().values() if info.aliases]
    assert len(aliased) >= 6
    for info in aliased:
        value = [] if info.kind is bool else [values.get(info.name, "1")]
        needed = NEEDED.get(info.name, [])
        assert len({repr(parse(*GOOD, *needed, name, *value)) for name in info.flags}) == 1, info.name


# ---- ranks -----------------------------------------------------------------------------------------------------------


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, world_size: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank, local_rank", [(1, 1), (4, 0), (5, 1)])
def test_only_rank_0_speaks(rank: int, local_rank: int, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, rank, local_rank, 8)
    assert refuse(*GOOD, "--tp", "3") == ""


def test_another_machine_names_itself_and_only_its_own_files(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 4, 0, 8)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    text = refuse(*GOOD, "--tp", "3", "--tokenizer", "/no/such")
    assert text.startswith("megacore: refused on node7: 1 problem\n  - --tokenizer /no/such")
    as_rank(monkeypatch, 5, 1, 8)
    assert refuse(*GOOD, "--tp", "3") == ""


def test_the_launcher_is_told_the_cause(refuse: Refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    text = refuse(*GOOD, "--tp", "3")
    cause = json.loads(file.read_text())["message"]
    assert cause["message"] == cause["extraInfo"]["py_callstack"] == text.rstrip("\n")
    assert int(cause["extraInfo"]["timestamp"]) == pytest.approx(time.time(), abs=60)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such"))
    assert problems(refuse(*GOOD, "--tp", "3"))


def test_the_inputs_complete_and_check_the_configuration(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ResolvedConfig] = []

    def unreadable(config: Config) -> int:
        raise DataError("tok.json is not a tokenizer\ngive another")

    def refused(config: Config) -> None:
        raise ConfigError(["first", "second"])

    assert parse(*GOOD, vocabulary=lambda config: 64, checks=[seen.append]) == seen[0] == parse(*GOOD)
    assert "  - tok.json is not a tokenizer\n    give another\n" in refuse(*GOOD, vocabulary=unreadable)
    assert "refused: 3 problems" in refuse(*GOOD, vocabulary=unreadable, checks=[refused])
    assert "refused: 1 problem\n" in refuse(*GOOD, vocabulary=unreadable, checks=[unreadable])
    assert problems(refuse(*GOOD, checks=[refused])) == ["first", "second"]
    as_rank(monkeypatch, 1, 1, 2)
    parse(*GOOD, checks=[refused])  # not this rank's to check
    assert refuse(*GOOD, vocabulary=unreadable) == ""
    assert len(seen) == 1


# ---- the process -----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
try:
    parse_config(sys.argv[1:], prog="pretrain_gpt.py", description="Pretrain a GPT.", kind=Config)
finally:
    print("loaded:", sorted({"torch", "numpy"} & set(sys.modules)))
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=patience(60))


def test_a_refusal_is_quick_and_loads_nothing() -> None:
    start = time.monotonic()
    done = run(sys.executable, "-c", SCRIPT, *GOOD, "--tp", "3", "--nope")
    assert time.monotonic() - start < patience(3)
    assert done.returncode == 2
    assert done.stdout == "loaded: []\n"
    assert "Traceback" not in done.stderr
    assert len(problems(done.stderr)) == 2


def test_help_into_a_closed_pipe_ends_quietly() -> None:
    command = f"{shlex.quote(sys.executable)} pretrain_gpt.py --help all | true"
    done = run("bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")
