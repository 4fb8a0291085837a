"""The documents about the configuration say what the fields say."""

from __future__ import annotations

import re
from pathlib import Path

from megacore.arrive.megatron import FOREIGN, LISTS, NOT_YET, REPLACED
from megacore.config import sections_of
from megacore.config.bert import BertConfig
from megacore.config.cli import flag_names
from megacore.config.dry_run_flags import DRY_RUN_FLAGS
from megacore.config.other_trainers import other_trainers

ROOT = Path(__file__).parents[2]


def test_the_documentation_names_every_table_of_a_file() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    sentence = re.search(r"A file has the tables ([^:]*), and its keys", page)
    assert sentence is not None
    assert re.findall(r"`\[(\w+)\]`", sentence[1]) == list(sections_of(BertConfig))


def test_the_page_for_megatron_users_names_flags_that_exist_and_help_answers_for_every_one() -> None:
    page = (ROOT / "docs" / "guides" / "coming-from-megatron.md").read_text()
    named = set(re.findall(r"--[a-zA-Z][a-zA-Z0-9-]+(?![\w*-])", page))
    ours = {name for main, others in flag_names(BertConfig).items() for name in (main, *others)}
    dropped = REPLACED.keys() | NOT_YET.keys()
    assert all(other_trainers().help_of(flag) for flag in dropped | FOREIGN.keys())
    assert not dropped & ours
    assert not FOREIGN.keys() & (dropped | ours)
    of_launchers = {"--nproc-per-node", "--processes", "--help"}
    assert named <= dropped | ours | FOREIGN.keys() | DRY_RUN_FLAGS.keys() | of_launchers | {"--flag", "--no-flag"}
    becomes = {flag: foreign.becomes for flag, foreign in {**FOREIGN, **LISTS}.items()}
    for table in (REPLACED, NOT_YET, becomes):
        for flag, text in table.items():
            assert set(re.findall(r"--[a-z0-9-]+", text)) <= ours, flag
