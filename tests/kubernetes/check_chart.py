"""The Helm chart and the plain manifests against the schemas of Kubernetes, and their flags against our programs.

`make test-kubernetes`: in an environment of its own, with helm and the schemas from the package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "legato"
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
HELM = Path(sys.executable).parent / "helm"
VERSIONS = ("1.27", "1.31", "1.35")
# Of operators, without schemas in Kubernetes: what they must have is looked at below.
CUSTOM = {"PodMonitor", "ScaledObject", "LeaderWorkerSet"}
CASES: dict[str, list[str]] = {
    "default": [],
    "deployment": ["replicas.kind=Deployment", "persistence.existingClaim=models"],
    "download at every start": ["replicas.kind=Deployment"],
    "hpa": ["autoscaling.kind=hpa", "autoscaling.max=3"],
    "keda": ["autoscaling.kind=keda", "podMonitor.enabled=true"],
    "secrets": ["apiKeys.existingSecret=keys", "routeKey.existingSecret=route", "extraArgs={--num-shard=2}"],
    "several machines": ["replicas.kind=LeaderWorkerSet", "nodes.size=4", "nodes.stages=4", "podMonitor.enabled=true"],
    "several machines, hpa": ["replicas.kind=LeaderWorkerSet", "autoscaling.kind=hpa", "nodes.existingSecret=mine"],
    "gpus": ["replicas.resources.limits.nvidia\\.com/gpu=1", "replicas.nodeSelector.kind=h200"],
}


def rendered(settings: list[str]) -> list[dict[str, Any]]:
    words = [str(HELM), "template", "demo", str(CHART), "--namespace=models", *(f"--set={each}" for each in settings)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [found for found in yaml.safe_load_all(result.stdout) if found]


def documents(name: str) -> list[dict[str, Any]]:
    if name in CASES:
        return rendered(CASES[name])
    return [found for found in yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / name).read_text()) if found]


ALL = [*CASES, *(path.name for path in MANIFESTS)]


def test_the_chart_lints() -> None:
    result = subprocess.run([str(HELM), "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ALL)
def test_everything_follows_the_schemas(name: str, version: str) -> None:
    found = documents(name)
    assert found
    for document in found:
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)
        for template in group_templates(document):
            kubernetes_validate.validate(as_deployment(template), version, strict=True)


def group_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a LeaderWorkerSet: the leader's and the others'."""
    if document["kind"] != "LeaderWorkerSet":
        return []
    group = document["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def as_deployment(template: dict[str, Any]) -> dict[str, Any]:
    """Kubernetes has a schema for what makes pods, none for LeaderWorkerSet."""
    spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pod"}, "spec": spec}


def pods(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates, by the name of what makes them."""
    kinds = ("Deployment", "StatefulSet")
    single = {each["metadata"]["name"]: each["spec"]["template"] for each in found if each["kind"] in kinds}
    groups = [group_templates(each) for each in found if each["kind"] == "LeaderWorkerSet"]
    return single | {
        name: template for group in groups for name, template in zip(("leader", "worker"), group, strict=True)
    }


@pytest.mark.parametrize("name", ALL)
def test_selectors_find_pods_and_ports_are_theirs(name: str) -> None:
    found = documents(name)
    templates = list(pods(found).values())
    for document in found:
        spec = document.get("spec", {})
        selector = spec.get("selector", {})
        wanted = selector.get("matchLabels", selector if document["kind"] == "Service" else {})
        ports = {each.get("targetPort") for each in spec.get("ports", ())}
        ports |= {each["port"] for each in spec.get("podMetricsEndpoints", ())}
        if not wanted:
            continue
        chosen = [each for each in templates if wanted.items() <= each["metadata"]["labels"].items()]
        assert len(chosen) == 1, document["metadata"]["name"]
        named = {port["name"] for container in chosen[0]["spec"]["containers"] for port in container.get("ports", ())}
        assert ports <= named


@pytest.mark.parametrize("name", ALL)
def test_probes_ask_the_routes_that_are_meant_for_them(name: str) -> None:
    for owner, template in pods(documents(name)).items():
        (container,) = template["spec"]["containers"]
        if owner == "worker":
            assert "ports" not in container and "livenessProbe" not in container, "only the leader answers HTTP"
            continue
        paths = {
            kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        }
        start = "/livez" if "router" in owner else "/startupz"
        assert paths == {"startupProbe": start, "livenessProbe": "/livez", "readinessProbe": "/readyz"}
        grace = next(int(word.split("=")[1]) for word in container["args"] if "graceful-termination" in word)
        assert template["spec"]["terminationGracePeriodSeconds"] > grace


@pytest.mark.parametrize("name", ALL)
def test_every_flag_is_one_of_the_program(name: str) -> None:
    pages = {
        "router": subprocess.run(
            [os.environ.get("LEGATO", ROOT / ".venv-dev/bin/legato"), "route", "--help"], capture_output=True, text=True
        ).stdout,
        "legato": (ROOT / "docs" / "launcher.md").read_text(),
    }
    for template in pods(documents(name)).values():
        (container,) = template["spec"]["containers"]
        for word in container["args"]:
            assert word.split("=")[0] in pages[container["name"]], word


@pytest.mark.parametrize("name", ["several machines", "several machines, hpa", "several-machines.yaml"])
def test_the_machines_of_a_group_are_started_alike_and_share_a_key(name: str) -> None:
    found = documents(name)
    (group,) = [each for each in found if each["kind"] == "LeaderWorkerSet"]
    leader, worker = (template["spec"]["containers"][0] for template in group_templates(group))
    assert leader["args"] == worker["args"] and leader["env"] == worker["env"]
    variables = {each["name"]: each for each in leader["env"]}
    key = variables["CLUSTER_KEY"]["valueFrom"]["secretKeyRef"]
    made = {each["metadata"]["name"]: each["data"] for each in found if each["kind"] == "Secret"}
    assert key["name"] in ("mine", "legato-cluster") or key["key"] in made[key["name"]]
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    assert int(variables["PIPELINE_PARALLEL_SIZE"]["value"]) == size, "a stage for each machine"
    assert group["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


SCALED = [
    ("hpa", "HorizontalPodAutoscaler"),
    ("keda", "ScaledObject"),
    ("several machines, hpa", "HorizontalPodAutoscaler"),
]


@pytest.mark.parametrize(("name", "kind"), SCALED)
def test_autoscalers_name_metrics_that_exist_and_the_set_that_is_there(name: str, kind: str) -> None:
    found = documents(name)
    (scaler,) = [each for each in found if each["kind"] == kind]
    target = scaler["spec"]["scaleTargetRef"]
    (scaled,) = [
        each for each in found if each["kind"] == target["kind"] and each["metadata"]["name"] == target["name"]
    ]
    assert scaled["apiVersion"] == target["apiVersion"]
    assert "replicas" not in scaled["spec"], "helm would undo what the autoscaler does"
    page, text = (ROOT / "docs" / "metrics.md").read_text(), yaml.dump(scaler)
    for metric in ("tgi_queue_size", "legato_kv_usage"):
        assert metric in text and f"`{metric}`" in page


def test_an_unknown_kind_of_autoscaling_is_refused() -> None:
    words = [str(HELM), "template", "demo", str(CHART), "--set=autoscaling.kind=magic"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode != 0 and "expected none, hpa or keda" in result.stderr
