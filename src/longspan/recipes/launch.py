"""`longspan launch`: a recipe as a batch script of Slurm, or as a JobSet of Kubernetes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longspan.cli_values import read_flags
from longspan.core.errors import LongspanError
from longspan.core.sections import make
from longspan.core.validation import LARGEST_JOB, check_name, check_number, check_output
from longspan.plan.hardware import read_hardware
from longspan.train import TrainConfig

_PORT = 29500
_SAVING_S = 120  # between Slurm's or Kubernetes' signal and the end


@dataclass(frozen=True)
class LaunchConfig:
    """Print the script that runs a recipe on a cluster, or submit it.

    A job that reaches its time limit saves a checkpoint; submit it again to resume.
    """

    recipe: Path
    """TOML file of `longspan train`, on a disk that all nodes see."""
    nodes: int = 1
    """Number of nodes."""
    gpus_per_node: int = 8
    """GPUs of a node, each of which runs a rank."""
    to: Literal["slurm", "kubernetes"] = "slurm"
    """slurm: an sbatch script. kubernetes: a manifest of the kind JobSet (jobset.x-k8s.io)."""
    name: str = ""
    """Name of the job. By default the recipe's file name."""
    time: str = "24:00:00"
    """Time limit of the job: hours:minutes:seconds, or days-hours:minutes:seconds."""
    partition: str = ""
    """Slurm's partition."""
    account: str = ""
    """Slurm's account."""
    image: str = ""
    """Container image with longspan, for Kubernetes. docs/how-to/several-nodes.md builds one."""
    volume: str = ""
    """Persistent volume claim that Kubernetes mounts at the recipe's folder. It holds data and --out, too."""
    gpu: str = ""
    """Check by the planner that the recipe fits on this kind of GPU (h100, ...; see `longspan plan --help`)."""
    out: Path | None = None
    """Write the script to this file instead of printing it."""
    submit: bool = False
    """Submit the script by `sbatch`, or by `kubectl create`."""

    @property
    def job_name(self) -> str:
        """The name of the job: letters, digits and hyphens, as Kubernetes requires."""
        return self.name or re.sub(r"[^a-z0-9]+", "-", self.recipe.stem.lower()).strip("-") or "longspan"

    def check(self) -> None:
        """Raise on invalid values, without reading the recipe."""
        check_number("--nodes", self.nodes, 1, LARGEST_JOB)
        check_number("--gpus-per-node", self.gpus_per_node, 1, LARGEST_JOB)
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?", self.job_name):
            raise LongspanError(
                f"--name {self.job_name} must be lower-case letters, digits and hyphens, at most 48; for example "
                "--name long-chats"
            )
        self.seconds()
        for flag, text in (("--partition", self.partition), ("--account", self.account), ("--image", self.image)):
            if text:
                check_name(flag, text)
                if re.search(r"\s", text):
                    raise LongspanError(f"{flag} {text!r} has spaces; give one name")
        only = {
            "slurm": (("--image", self.image), ("--volume", self.volume)),
            "kubernetes": (("--partition", self.partition), ("--account", self.account)),
        }[self.to]
        for flag, text in only:
            if text:
                raise LongspanError(f"{flag} {text} has no meaning with --to {self.to}; leave it out")
        if self.to == "kubernetes":
            for flag, text, what in (
                ("--image", self.image, "a container image with longspan"),
                ("--volume", self.volume, "the volume claim that holds the recipe, the data and --out"),
            ):
                if not text:
                    raise LongspanError(f"--to kubernetes needs {flag}: {what}")

    def seconds(self) -> int:
        """Return the time limit in seconds."""
        match = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,4}):([0-5]\d):([0-5]\d)", self.time)
        if match is None:
            raise LongspanError(f"--time {self.time} is not hours:minutes:seconds; for example --time 24:00:00")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        if total < 2 * _SAVING_S:
            raise LongspanError(f"--time {self.time} leaves no time to train; give at least {2 * _SAVING_S} seconds")
        return total


def run(config: LaunchConfig) -> int:
    """Print, write or submit the script; return the exit code: 0, or that of `sbatch` or `kubectl`."""
    config.check()
    train = _read(config)
    script = sbatch_script(config, train) if config.to == "slurm" else jobset(config, train)
    if config.out is not None:
        check_output("--out", config.out)
        config.out.write_text(script)
    if config.submit:
        return _submit(config, script)
    if config.out is None:
        sys.stdout.write(script)
    return 0


def _read(config: LaunchConfig) -> TrainConfig:
    """Return the recipe, with a check of its ranks and, if a GPU is named, of its memory."""
    values, _ = read_flags(TrainConfig, config.recipe, "longspan train", "--recipe")
    train = make(TrainConfig, **values)
    train.check()
    ranks, gpus = train.parallel.ranks, config.nodes * config.gpus_per_node
    if ranks != gpus:
        rest = ranks // train.parallel.data_degree
        more = f", or data_degree = {gpus // rest} in [parallel]" if gpus % rest == 0 else ""
        nodes = -(-ranks // config.gpus_per_node)
        raise LongspanError(
            f"the recipe's mesh has {ranks} ranks ({train.parallel.flags}), --nodes {config.nodes} x --gpus-per-node "
            f"{config.gpus_per_node} are {gpus} GPUs; give --nodes {nodes}{more}"
        )
    if config.gpu:
        from longspan.train.resolve import resolve_memory

        _, messages = resolve_memory(train, read_hardware(config.gpu))
        print(*messages, sep="\n", file=sys.stderr)
    else:
        print("memory is not checked: give the kind of GPU, such as --gpu h100", file=sys.stderr)
    return train


def sbatch_script(config: LaunchConfig, train: TrainConfig) -> str:
    """Return a batch script (https://slurm.schedmd.com/sbatch.html): a task per GPU, which is a rank."""
    optional = [f"#SBATCH --{key}={value}" for key in ("partition", "account") if (value := getattr(config, key))]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={config.job_name}",
        f"#SBATCH --nodes={config.nodes}",
        f"#SBATCH --ntasks-per-node={config.gpus_per_node}",
        f"#SBATCH --gpus-per-node={config.gpus_per_node}",
        f"#SBATCH --time={config.time}",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.log",
        *optional,
        f"# Before the time limit the ranks save a checkpoint. Submit the job again to resume.\n"
        f"#SBATCH --signal=TERM@{_SAVING_S}",
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))}",
        *_activation(),
        "export OMP_NUM_THREADS=1",
        f"exec srun {_command(config, train)}",
    ]
    return "\n".join(lines) + "\n"


def _activation() -> list[str]:
    """Return the line that activates the current virtual environment, if any."""
    script = Path(sys.prefix) / "bin" / "activate"
    return [f"source {shlex.quote(str(script))}"] if sys.prefix != sys.base_prefix and script.exists() else []


def _command(config: LaunchConfig, train: TrainConfig) -> str:
    grace = "" if train.grace > _SAVING_S // 2 else f" --grace {_SAVING_S - 20}"
    return f"longspan train --from {shlex.quote(str(config.recipe.resolve()))}{grace}"


def jobset(config: LaunchConfig, train: TrainConfig) -> str:
    """Return a JobSet (https://jobset.sigs.k8s.io): a pod per node, in which torchrun starts a rank per GPU."""
    import yaml

    folder, name = str(config.recipe.resolve().parent), config.job_name
    torchrun = (
        f"exec torchrun --nnodes {config.nodes} --nproc-per-node {config.gpus_per_node} "
        f"--node-rank $JOB_COMPLETION_INDEX --master-addr {name}-ranks-0-0.{name} --master-port {_PORT} "
        f"--shutdown-timeout {_SAVING_S - 10} -m {_command(config, train)}"
    )
    container = {
        "name": "longspan",
        "image": config.image,
        "command": ["bash", "-c", torchrun],
        "workingDir": folder,
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": {"nvidia.com/gpu": config.gpus_per_node}},
        "volumeMounts": [{"name": "work", "mountPath": folder}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SAVING_S,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": config.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's shared memory
        ],
    }
    job = {
        "parallelism": config.nodes,
        "completions": config.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": config.seconds(),
        "template": {"spec": pod},
    }
    manifest: dict[str, Any] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {
                "maxRestarts": 3,  # a run resumes from its newest checkpoint
                "rules": [
                    {"name": "time-limit", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
                ],
            },
            "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": job}}],
        },
    }
    return str(yaml.safe_dump(manifest, sort_keys=False, width=1000))


def _submit(config: LaunchConfig, script: str) -> int:
    command = ["sbatch"] if config.to == "slurm" else ["kubectl", "create", "-f", "-"]
    if shutil.which(command[0]) is None:
        raise LongspanError(
            f"--submit needs {command[0]}, which this machine has not; write the script with --out FILE, and submit it "
            "where it is"
        )
    return subprocess.run(command, input=script, text=True).returncode
