"""Megatron-LM's flags that say the same in another form: the configuration they give, and what each refusal names."""

from __future__ import annotations

import pytest

from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse, parse, problems

alone, refuse = refusals.alone, refusals.refuse  # fixtures
PP = (*GOOD, "--pp", "4", "--num-layers", "24")


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["--num-virtual-stages-per-pipeline-rank", "3"], ["--virtual-stages", "3", "--schedule", "interleaved"]),
        (["--num-virtual-stages-per-pipeline-rank", "1"], []),
        (["--num-layers-per-virtual-pipeline-stage", "2"], ["--virtual-stages", "3", "--schedule", "interleaved"]),
        (["--num-layers-per-virtual-pipeline-stage", "6"], []),
        (["--pipeline-model-parallel-layout", "Et*5|(t*6|)*2t*7,L"], ["--pipeline-layout", "E,5*t|6*t|6*t|7*t,H"]),
        (
            ["--pipeline-model-parallel-layout", "Ettt|(ttt|)*6tttL"],
            [
                "--pipeline-layout",
                "E,3*t|" + "3*t|" * 6 + "3*t,H",
                "--virtual-stages",
                "2",
                "--schedule",
                "interleaved",
            ],
        ),
        (["--use-flash-attn"], ["--attention", "sdpa"]),
        (["--attention-backend", "flash"], ["--attention", "sdpa"]),
        (["--attention-backend", "unfused"], ["--attention", "fused-softmax"]),
        (["--attention-backend", "auto"], []),
        (["--use-flash-attn", "--attention-backend=fused"], ["--attention", "sdpa"]),
    ],
)
def test_a_translated_flag_is_ours(given: list[str], ours: list[str]) -> None:
    assert parse(*PP, *given) == parse(*PP, *ours)


def test_a_translated_flag_goes_with_lists_and_unset_values(refuse: Refuse) -> None:
    assert parse(*GOOD, "--use-flash-attn", "--dp", "None") == parse(*GOOD, "--attention", "sdpa")
    found = problems(
        refuse("--use-flash-attn", "--data-path", "1", "a", "2", "b", "--vocab-size", "8", "--train-iters", "7")
    )
    assert [problem.split(":")[0] for problem in found] == ["--data-path a", "--data-path b"]


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--num-layers-per-virtual-pipeline-stage", "4"], "must divide the 6 layers per rank"),
        (["--num-layers-per-virtual-pipeline-stage", "0"], "'0' is not a whole number of 1 or more"),
        (["--num-virtual-stages-per-pipeline-rank"], "needs one value, and has 0"),
        (["--pipeline-model-parallel-layout", "Ettt|tm|L"], "multi-token prediction (m) is not in megacore"),
        (["--pipeline-model-parallel-layout", "Et*24||L"], "has an empty stage"),
        (["--pipeline-model-parallel-layout", "Et*12|t*12L"], "has 2 stages, which --pp 4 must divide"),
        (["--pipeline-model-parallel-layout", "E(t*999999|)*999999L"], "more than 100,000 layers"),
        (["--attention-backend", "falsh"], "use auto, flash, fused, unfused or local (did you mean flash?)"),
        (["--use-flash-attn", "yes"], "a switch takes no value"),
        (["--use-flash-attn", "--attention", "fused-softmax"], "--attention fused-softmax is given as well: keep one"),
        (["--use-flash-attn", "--attention-backend", "local"], "--use-flash-attn is given as well: keep one of them"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(given: list[str], said: str, refuse: Refuse) -> None:
    (problem,) = problems(refuse(*PP, *given))
    assert said in problem
    assert any(word in problem for word in given if word.startswith("--"))


def test_a_layout_without_a_pipeline_names_the_flag_that_was_given(refuse: Refuse) -> None:
    (problem,) = problems(refuse(*GOOD, "--pipeline-model-parallel-layout", "Et|tL"))
    assert problem == (
        "--pipeline-model-parallel-layout Et|tL has 2 stages, and without a pipeline there is one: use --pp 2, or "
        "leave --pipeline-model-parallel-layout out"
    )


@pytest.mark.usefixtures("four_ranks")
def test_layers_of_unequal_stages_have_another_way(refuse: Refuse) -> None:
    (problem,) = problems(
        refuse(*GOOD, "--pp", "4", "--num-layers", "23", "--num-layers-per-virtual-pipeline-stage", "2")
    )
    assert "--pp 4 does not divide --num-layers 23" in problem
    assert "--virtual-stages" in problem
