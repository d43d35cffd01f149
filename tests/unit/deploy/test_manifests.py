"""The manifests of deploy/kubernetes: what Kubernetes takes, with flags, paths and times that the server has.

No cluster is asked. What helm makes of the chart is test_chart.py's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from command_parsers import serve_parser

from holdfast.cli.commands import serve
from holdfast.config import EngineConfig, ServerConfig
from holdfast.engine.fake import FakeEngine
from holdfast.errors import ConfigurationError
from holdfast.server.app import create_app
from holdfast.server.run import FLUSH_TIMEOUT_S, STOP_TIMEOUT_S
from holdfast.server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
PAGE = ROOT / "docs" / "kubernetes.md"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""The oldest that has all fields (a preStop that sleeps), and the newest whose schemas are known."""
CUSTOM = {"PodMonitor", "LeaderWorkerSet"}
"""Kinds of operators, of which Kubernetes has no schema."""


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


ALL = [(path.name, document) for path in sorted(FOLDER.glob("*.yaml")) for document in documents(path)]
DEPLOYMENTS = ("gpu.yaml", "cpu.yaml")


def only(kind: str, name: str | None = None) -> dict[str, Any]:
    [found] = [document for file, document in ALL if document["kind"] == kind and name in (None, file)]
    return found


def pod(name: str) -> dict[str, Any]:
    return only("Deployment", name)["spec"]["template"]["spec"]


def container(name: str) -> dict[str, Any]:
    [found] = pod(name)["containers"]
    return found


def settings(name: str) -> tuple[EngineConfig, ServerConfig]:
    """As the server reads them."""
    program, command, *words = container(name)["args"]
    assert (program, command) == ("holdfast", "serve")
    return serve.read_settings(serve_parser().parse_args(words))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("file", "document"), ALL, ids=[f"{file}-{document['kind']}" for file, document in ALL])
def test_kubernetes_takes_it(file: str, document: dict[str, Any], version: str) -> None:
    if document["kind"] in CUSTOM:
        assert document["apiVersion"].count(".") >= 2  # Of nobody's group but an operator's.
        return
    kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_is_not_taken() -> None:
    service = only("Service")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {**service["spec"], "port": 8000}}, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_server_takes_the_flags_and_listens_where_it_is_asked(name: str) -> None:
    _, server = settings(name)
    [port] = container(name)["ports"]
    assert (server.host, server.port) == ("0.0.0.0", port["containerPort"])
    probes = [container(name)[kind]["httpGet"]["port"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
    [served] = only("Service")["spec"]["ports"]
    [scraped] = only("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert {port["name"]} == {*probes, served["targetPort"], scraped["port"]}
    assert served["port"] == port["containerPort"]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_one_label_selects_the_pods(name: str) -> None:
    labels = only("Deployment", name)["spec"]["template"]["metadata"]["labels"]
    assert only("Service")["spec"]["selector"] == labels
    for selecting in (only("Deployment", name), only("PodMonitor"), only("PodDisruptionBudget")):
        assert selecting["spec"]["selector"]["matchLabels"] == labels
    target = only("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert {field: only("Deployment", name)[field] for field in ("apiVersion", "kind")} | {
        "name": only("Deployment", name)["metadata"]["name"]
    } == target


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_key_is_the_mounted_one_and_prometheus_has_it(name: str) -> None:
    _, server = settings(name)
    [mount] = [mount for mount in container(name)["volumeMounts"] if mount["name"] == "api-key"]
    [volume] = [volume["secret"] for volume in pod(name)["volumes"] if volume["name"] == "api-key"]
    [item] = volume["items"]
    assert server.api_key_file == f"{mount['mountPath']}/{item['path']}"
    [scraped] = only("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scraped["authorization"]["credentials"] == {"name": volume["secretName"], "key": item["key"]}
    assert "subPath" not in mount  # Such a file is never brought up to date.
    made = re.search(r"kubectl create secret generic (\S+) --from-literal=([\w-]+)=", PAGE.read_text())
    assert made is not None
    assert made.groups() == (volume["secretName"], item["key"])


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_what_is_mounted_is_there_and_all_that_is_written_is_mounted(name: str) -> None:
    mounts = {mount["mountPath"]: mount["name"] for mount in container(name)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(name)["volumes"]}
    assert sorted(mounts.values()) == sorted(volumes)
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == only("PersistentVolumeClaim")["metadata"]["name"]
    assert container(name)["securityContext"]["readOnlyRootFilesystem"]
    [home] = [variable["value"] for variable in container(name)["env"] if variable["name"] == "HOME"]
    assert {home, "/tmp", "/dev/shm"} <= set(mounts)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_nothing_is_killed_before_it_has_drained(name: str) -> None:
    _, server = settings(name)
    slept_s = container(name)["lifecycle"]["preStop"]["sleep"]["seconds"]
    least_s = slept_s + server.drain_timeout + FLUSH_TIMEOUT_S + STOP_TIMEOUT_S
    assert least_s < pod(name)["terminationGracePeriodSeconds"] <= least_s + 30


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_probes_leave_time(name: str) -> None:
    def patience_s(kind: str) -> int:
        probe = container(name)[kind]
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]
        return probe["periodSeconds"] * probe["failureThreshold"]

    # One body may keep the front end busy for seconds (docs/serve.md).
    assert patience_s("readinessProbe") < patience_s("livenessProbe") < patience_s("startupProbe")
    assert patience_s("livenessProbe") >= 60
    assert patience_s("startupProbe") >= 3600


async def _asked(engine: FakeEngine, *paths: str) -> list[int]:
    app = create_app(engine, ServerSettings(served_model_names=("fake",), api_key=("key",)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        return [(await client.get(path)).status_code for path in paths]


@pytest.mark.parametrize("name", DEPLOYMENTS)
async def test_probes_need_no_key_and_a_server_that_loads_drains_or_restarts_lives(name: str) -> None:
    found = [container(name)[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
    loading = FakeEngine()
    assert await _asked(loading, *found) == [503, 503, 200]
    loading.restarts = 1
    assert await _asked(loading, *found) == [503, 503, 200]
    ready = FakeEngine()
    await ready.start()
    assert await _asked(ready, *found) == [200, 200, 200]
    await ready.drain(0)
    assert await _asked(ready, *found) == [503, 503, 200]


async def test_what_is_scraped_has_the_metric_that_scales() -> None:
    [scraped] = only("PodMonitor")["spec"]["podMetricsEndpoints"]
    app = create_app(FakeEngine(), ServerSettings(served_model_names=("fake",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://pod") as client:
        answer = await client.get(scraped["path"])
    rule = re.search(r"seriesQuery: '(\S+?)\{.*?as: (\w+)", PAGE.read_text(), re.DOTALL)
    assert rule is not None
    assert f"\n{rule.group(1)}{{" in answer.text
    [metric] = only("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule.group(2)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_variables_of_the_service_are_kept_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pod(name)["enableServiceLinks"] is False
    monkeypatch.setenv(only("Service")["metadata"]["name"].upper() + "_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConfigurationError, match="SERVICE_HOST"):
        settings(name)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_server_has_no_rights_that_it_does_not_need(name: str) -> None:
    assert pod(name)["automountServiceAccountToken"] is False
    assert pod(name)["securityContext"]["runAsNonRoot"]
    assert pod(name)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(name)["securityContext"]["allowPrivilegeEscalation"] is False
    assert container(name)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_both_deployments_differ_in_the_model_and_the_device_only() -> None:
    gpu, cpu = ({**only("Deployment", name)} for name in DEPLOYMENTS)
    assert "nvidia.com/gpu" in container("gpu.yaml")["resources"]["limits"]
    for deployment in (gpu, cpu):
        spec = deployment["spec"]["template"]["spec"]
        spec = {**spec, "tolerations": None}
        [main] = spec["containers"]
        spec["containers"] = [{**main, "resources": None, "args": main["args"][:2] + main["args"][3:]}]
        deployment["spec"] = {**deployment["spec"], "template": spec}
    assert gpu == cpu


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_image_has_the_user_and_the_program_that_pods_name(name: str) -> None:
    text = (ROOT / "deploy" / "Containerfile").read_text()
    user = pod(name)["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}\n" in text
    assert f"--uid {user['runAsUser']} " in text
    assert '\nENTRYPOINT ["tini", "--"]\n' in text  # Else a signal before the server listens for it is lost.
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for word in line.split()]
    assert [word for word in copied if not (ROOT / word).exists()] == []
    assert "src" in copied


# Several machines


def templates() -> dict[str, dict[str, Any]]:
    """Of the leader and of its workers."""
    found = only("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return {"leader": found["leaderTemplate"], "worker": found["workerTemplate"]}


def node_settings(role: str, index: int) -> tuple[EngineConfig, ServerConfig]:
    """As the pod of this number reads them, with the variables that LeaderWorkerSet and its own env give it."""
    [main] = templates()[role]["spec"]["containers"]
    size = only("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"]
    given = {
        "LWS_GROUP_SIZE": str(size),
        "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": "holdfast-0.holdfast.default",
        "POD_IP": f"10.0.0.{index + 1}",
    }
    words = [re.sub(r"\$\((\w+)\)", lambda match: given[match.group(1)], word) for word in main["args"]]
    assert {variable["name"] for variable in main["env"]} & {*given} == {"POD_IP"}
    return serve.read_settings(serve_parser().parse_args(words[2:]))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("role", ["leader", "worker"])
def test_kubernetes_takes_the_pods_of_several_machines(role: str, version: str) -> None:
    """LeaderWorkerSet has a schema of its own, which is not part of the tests: its fields are compared by name."""
    document = only("LeaderWorkerSet")
    assert document["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(document["spec"]) <= {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy"}
    made = document["spec"]["leaderWorkerTemplate"]
    assert set(made) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert made["restartPolicy"] == "None"  # A pod that fails comes back alone: streams go on.
    template = templates()[role]
    named = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role, **template["metadata"]}}
    kubernetes_validate.validate({**named, "spec": template["spec"]}, version, strict=True)


def test_machines_have_the_flags_of_one_engine() -> None:
    size = only("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"]
    (head, server), (other, headless) = node_settings("leader", 0), node_settings("worker", size - 1)
    assert (head.nnodes, head.node_rank, other.node_rank) == (size, 0, size - 1)
    assert (server.headless, headless.headless) == (False, True)
    for name in ("model", "nnodes", "tensor_parallel_size", "pipeline_parallel_size", "master_addr", "master_port"):
        assert getattr(head, name) == getattr(other, name), name
    assert server.drain_timeout == headless.drain_timeout
    assert head.device == other.device == "auto"
    for template in templates().values():
        [main] = template["spec"]["containers"]
        assert main["resources"]["limits"]["nvidia.com/gpu"] == head.tensor_parallel_size, "a rank for each GPU"
        assert template["spec"]["tolerations"] == pod("gpu.yaml")["tolerations"]
    assert head.node_timeout >= 3600  # As long as the startup probe waits.


def test_the_service_has_the_leader_alone_and_nodes_have_their_secret() -> None:
    leader, worker = templates()["leader"], templates()["worker"]
    assert only("Service")["spec"]["selector"] == leader["metadata"]["labels"]
    assert only("Service")["spec"]["selector"] != worker["metadata"]["labels"]
    for role, template in templates().items():
        [main] = template["spec"]["containers"]
        config, _ = node_settings(role, 0 if role == "leader" else 1)
        [mount] = [mount["mountPath"] for mount in main["volumeMounts"] if mount["name"] == "keys"]
        [volume] = [volume["secret"] for volume in template["spec"]["volumes"] if volume["name"] == "keys"]
        assert config.node_secret_file in {f"{mount}/{item['path']}" for item in volume["items"]}
        assert '"stringData": {"node-secret": ' in PAGE.read_text()
        assert main["securityContext"]["readOnlyRootFilesystem"]
        assert template["spec"]["enableServiceLinks"] is False


def test_the_leader_is_the_deployment_of_a_gpu_with_other_flags() -> None:
    one, [leader] = container("gpu.yaml"), templates()["leader"]["spec"]["containers"]
    for name in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "securityContext", "image"):
        assert leader[name] == one[name], name
    assert pod("gpu.yaml")["securityContext"] == templates()["leader"]["spec"]["securityContext"]
