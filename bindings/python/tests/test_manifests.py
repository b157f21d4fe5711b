"""The Kubernetes manifest obeys the schemas of Kubernetes. No cluster has run it."""

from pathlib import Path

import pytest

validator = pytest.importorskip(
    "kubernetes_validate", reason="NOT TESTED: it needs the package kubernetes-validate"
)
yaml = pytest.importorskip("yaml", reason="NOT TESTED: it needs the package pyyaml")

MANIFEST = Path(__file__).resolve().parents[3] / "examples/kubernetes/job.yaml"
VERSION = validator.latest_version()


def parts():
    """The service and the job."""
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    return service, job


def test_every_part_obeys_its_schema():
    for part in parts():
        validator.validate(part, VERSION, strict=True)


def test_the_schema_check_can_fail():
    _, job = parts()
    job["spec"]["completionModus"] = job["spec"].pop("completionMode")
    with pytest.raises(validator.ValidationError):
        validator.validate(job, VERSION, strict=True)


def test_the_parts_fit_together():
    service, job = parts()
    template = job["spec"]["template"]["spec"]
    worker = template["containers"][0]
    variables = {variable["name"]: variable.get("value") for variable in worker["env"]}
    # The name of a pod of an Indexed Job is the job's and the index; its domain is the service's.
    name = service["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    first = f"{job['metadata']['name']}-0.{name}:{port}"
    assert variables["POSEIDON_COORDINATOR"] == first
    assert template["subdomain"] == name
    assert service["spec"]["clusterIP"] == "None"
    count = job["spec"]["completions"]
    assert variables["WORLD_SIZE"] == str(count) and job["spec"]["parallelism"] == count
    mounts = {mount["name"] for mount in worker["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["volumes"]}
