"""The configurations for GPUs fit the GPUs that they name, by the planner."""

from __future__ import annotations

import json

import pytest

from tests.e2e.launching import ROOT, words
from tools.plan import main

PARAMETERS = {
    "llama-3.2-1b-8gpu": 1_235_814_400,
    "llama-3-8b-64gpu": 8_030_261_248,
    "mixtral-8x7b-64gpu": 46_702_792_704,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_configuration_fits_its_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = name.rsplit("-", 1)[1].removesuffix("gpu")
    config = str(ROOT / "examples" / f"{name}.toml")
    run = words(config=config, mock_data=True, cluster="h100", world_size=gpus)
    assert main(["pretrain_gpt.py", *run, "--estimate", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"]["value"] == PARAMETERS[name]
    assert plan["fits"], plan


def test_every_file_of_an_example_is_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "examples").rglob("*.py")}
    assert [f"{path.relative_to(ROOT)}: {count}" for path, count in lines.items() if count >= 250] == []
