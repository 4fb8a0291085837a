"""The files of examples/launch/ start the run of run.toml on its nodes.

Manifests have the fields that Kubernetes asks for, and scripts the words that torchrun and Slurm take.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from megacore.config import Config
from megacore.config.cli import parse_config
from tests.patience import patience, until

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
NODES, GPUS = 4, 8
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
JOB, OPERATED = LAUNCH / "kubernetes-job.yaml", LAUNCH / "kubernetes-pytorchjob.yaml"


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """The objects of a manifest by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """The specification of every pod of the manifests, with its name."""
    yield "Job", documents(JOB)["Job"]["spec"]["template"]["spec"]
    for name, replica in documents(OPERATED)["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].items():
        yield name, replica["template"]["spec"]


def test_the_indexed_job_has_a_pod_for_every_node() -> None:
    objects = documents(JOB)
    service, job = objects["Service"], objects["Job"]
    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == NODES
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # what a Job allows
    # A pod is POD.SUBDOMAIN if a headless service of the subdomain's name selects it.
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    given = torchrun_words(pod["containers"][0]["args"])
    assert given.master_addr == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert given.node_rank == "$(JOB_COMPLETION_INDEX)"
    assert any(variable["name"] == "JOB_COMPLETION_INDEX" for variable in pod["containers"][0]["env"])
    assert (given.nnodes, given.nproc_per_node) == (str(NODES), str(GPUS))


def test_the_pytorchjob_has_a_pod_for_every_node() -> None:
    job = documents(OPERATED)["PyTorchJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    spec = job["spec"]
    assert spec.keys() <= {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs", "elasticPolicy"}
    assert spec["nprocPerNode"] == str(GPUS)  # text, as `auto` and `gpu` are
    assert spec["runPolicy"].keys() <= {"cleanPodPolicy", "backoffLimit", "activeDeadlineSeconds", "schedulingPolicy"}
    replicas = spec["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    assert sum(replica["replicas"] for replica in replicas.values()) == NODES
    for replica in replicas.values():
        assert replica.keys() == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        assert replica["template"]["spec"]["containers"][0]["name"] == "pytorch"


@pytest.mark.parametrize("pod", [pytest.param(pod, id=name) for name, pod in pods()])
def test_a_pod_starts_the_run(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert container["command"] == ["torchrun"]
    given = torchrun_words([word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in container["args"]])
    assert given.training_script == "pretrain_gpt.py"
    assert given.training_script_args == ["--config=examples/launch/run.toml"]


def torchrun_words(words: list[str]) -> Any:
    """What torchrun's own parser makes of them; a word that it does not know ends the test."""
    parser = get_args_parser()
    for action in parser._actions:
        action.type = None  # `$(JOB_COMPLETION_INDEX)` becomes a number later
    return parser.parse_args(words)


def test_the_run_is_one_for_these_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (LAUNCH / "run.toml").read_text()
    text = re.sub(r"^(data_path|tokenizer) = .*$", "", text, flags=re.MULTILINE)
    (tmp_path / "run.toml").write_text(text.replace("/runs", str(tmp_path)))
    job = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": NODES * GPUS, "LOCAL_WORLD_SIZE": GPUS}
    for name, value in {**job, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    argv = ["--config", str(tmp_path / "run.toml"), "--mock-data"]
    config = parse_config(argv, prog="x", description="x", kind=Config)
    assert (config.parallel.tp, config.parallel.pp, config.parallel.dp) == (2, 1, NODES * GPUS // 2)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one_of_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert script.read_text().startswith("#!/bin/bash\n")


@pytest.mark.parametrize(("name", "tasks"), [("slurm-torchrun.sbatch", 1), ("slurm-srun.sbatch", GPUS)])
def test_a_batch_script_asks_slurm_for_the_nodes(name: str, tasks: int) -> None:
    text = (LAUNCH / name).read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    assert (asked["nodes"], asked["gpus-per-node"]) == (str(NODES), str(GPUS))
    assert int(asked["ntasks-per-node"]) == tasks
    assert {"requeue", "time", "signal", "open-mode"} <= asked.keys()
    assert re.fullmatch(r"USR2@\d+", asked["signal"])
    # Slurm reads its lines only before the first command.
    assert "#SBATCH" not in text[text.index("\nset ") :]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "per_node"), [("slurm-torchrun.sbatch", 1), ("slurm-srun.sbatch", 2)])
def test_a_batch_script_saves_before_its_end_and_queues_again(tmp_path: Path, name: str, per_node: int) -> None:
    """The script with stand-ins for Slurm's programs: two nodes, and the signal that Slurm sends to their tasks."""
    programs, output = Path(__file__).with_name("slurm"), tmp_path / "out"
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "gpt2-tiny"\n[data]\nmock_data = true\n'
        f'[training]\ntrain_iters = 1000000\nglobal_batch_size = 4\noutput_dir = "{output}"\n'
        '[checkpoint]\nload = "auto"\n'
    )
    slurm = {"SLURM_JOB_ID": os.getpid(), "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": 2, "SLURM_GPUS_ON_NODE": 1}
    slurm |= {"SLURM_NTASKS": 2 * per_node, "SLURM_NTASKS_PER_NODE": per_node}
    files = {"REQUEUED": tmp_path / "requeued", "SRUN_PID": tmp_path / "srun.pid", "CONFIG": tmp_path / "run.toml"}
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {name: str(value) for name, value in {**slurm, **files}.items()}
    environment = os.environ | variables | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for folder in ("pretrain_gpt.py", "examples", "megacore"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    with (tmp_path / "log").open("w") as log:
        options: Any = {"cwd": tmp_path, "env": environment, "start_new_session": True}
        job = subprocess.Popen(["bash", str(LAUNCH / name)], stdout=log, stderr=log, **options)
    metrics = output / "metrics.jsonl"
    try:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, 90, "no steps")
        os.kill(int(files["SRUN_PID"].read_text()), signal.SIGUSR2)
        assert job.wait(patience(60)) == 0, (tmp_path / "log").read_text()
    finally:
        job.kill()
    assert files["REQUEUED"].read_text().strip() == str(os.getpid())
    assert list(output.glob("step_*"))
    said = "\n".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert "stopped by SIGUSR2" in said + (tmp_path / "log").read_text()


def test_a_finished_run_is_not_queued_again(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[training]\ntrain_iters = 20\noutput_dir = "{tmp_path}/out"\n')

    main = runpy.run_path(str(LAUNCH / "is_finished.py"))["main"]

    def status(*flags: str, name: str = "run.toml") -> int:
        found: int = main([str(tmp_path / name), *flags])
        return found

    command = [sys.executable, str(LAUNCH / "is_finished.py"), str(tmp_path / "run.toml")]
    assert status() == subprocess.run(command, check=False).returncode == 1
    assert status(name="missing.toml") == 2
    for step, expected in ((10, 3), (20, 0)):
        (tmp_path / "out" / f"step_{step:08d}").mkdir(parents=True)
        assert status() == expected
    # Flags of the batch script override the file, as they do for the run.
    other = tmp_path / "other"
    (other / "step_00000010").mkdir(parents=True)
    (other / "step_00000020.tmp-1a2b3c4d").mkdir()
    for flags in (["--output-dir", str(other)], [f"--output-dir={other}"], ["--tp", "2", "--save", str(other)]):
        assert status(*flags) == 3
    (other / "config.toml").write_text("[training]\ntrain_iters = 10\n")  # a run writes what it was started with
    assert status("--output-dir", str(other), "--train-iters", "10") == 0
    assert status("--save", "s3://bucket/run") == 2
