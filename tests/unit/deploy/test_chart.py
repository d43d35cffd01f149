"""The Helm chart: values, their schema and templates fit each other and the plain manifests.

Where helm is installed it renders the chart, which must give what the manifests say; elsewhere texts are compared.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "holdfast"
PLAIN = ROOT / "deploy" / "kubernetes"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
IMAGE = "REGISTRY/holdfast:0.1.0"
CPU_RESOURCES = '{"requests":{"cpu":"4","memory":"8Gi"},"limits":{"cpu":"4","memory":"8Gi"}}'
HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed: the chart is not rendered here")


def names(values: Any, before: str = "") -> set[str]:
    """All of them, down to where a template takes a whole value."""
    found = set()
    for name, value in values.items():
        whole = name not in ("cache", "resources")
        found |= {before + name} if whole else names(value, f"{before}{name}.")
    return found


def test_templates_name_every_value_and_no_other() -> None:
    used = set(re.findall(r"\.Values\.([\w.]+)", "".join(TEMPLATES.values())))
    assert used == names(VALUES)


def test_blocks_of_templates_are_closed() -> None:
    for name, text in TEMPLATES.items():
        assert text.count("{{") == text.count("}}"), name
        opened = re.findall(r"\{\{-? *(if|with|range|define)\b", text)
        assert len(opened) == len(re.findall(r"\{\{-? *end\b", text)), name


def test_the_schema_knows_the_values_and_wants_an_image() -> None:
    assert set(SCHEMA["properties"]) == set(VALUES) | {"global"}
    jsonschema.validate({**VALUES, "image": IMAGE}, SCHEMA)
    for wrong in ({}, {"image": IMAGE, "gpu": 1}, {"image": IMAGE, "replicas": "two"}, {"image": IMAGE, "args": [2]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**VALUES, **wrong}, SCHEMA)


def test_lines_without_values_are_those_of_the_plain_manifests() -> None:
    plain = {_bare(line) for path in PLAIN.glob("*.yaml") for line in path.read_text().splitlines()}
    lines = {_bare(line) for name in ("common.yaml", "deployment.yaml") for line in TEMPLATES[name].splitlines()}
    fixed = {line for line in lines if "{{" not in line}
    # A chart's own: it may keep a volume, and names its block of tolerations itself.
    assert fixed - plain == {"annotations:", "helm.sh/resource-policy: keep"}
    assert len(fixed) > 60


def _bare(line: str) -> str:
    return re.sub(r"(^| +)#.*", "", line).strip()


def rendered(*chosen: str) -> list[dict[str, Any]]:
    command = [HELM or "helm", "template", "holdfast", str(CHART), "--set", f"image={IMAGE}"]
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document is not None]


def _comparable(document: dict[str, Any]) -> str:
    """Without what helm adds to names and labels."""
    text = json.dumps(document, sort_keys=True)
    text = re.sub(r'"labels": \{[^}]*\}', '"labels": {}', text)
    return re.sub(r'"app.kubernetes.io/instance": "holdfast", ', "", text)


@needs_helm
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("gpu.yaml", ()),
        ("cpu.yaml", ("--set", "gpus=0,model=Qwen/Qwen3-0.6B", "--set-json", f"resources={CPU_RESOURCES}")),
    ],
)
def test_helm_renders_the_plain_manifests(file: str, chosen: tuple[str, ...]) -> None:
    found = rendered("--set", "podMonitor=true", *chosen)
    for document in found:
        document["metadata"].pop("annotations", None)
    paths = (PLAIN / "common.yaml", PLAIN / "podmonitor.yaml", PLAIN / file)
    wanted = [document for path in paths for document in yaml.safe_load_all(path.read_text())]
    assert sorted(map(_comparable, found)) == sorted(map(_comparable, wanted))


@needs_helm
def test_helm_renders_every_value() -> None:
    found = rendered(
        "--set", "replicas=null,cache.storageClass=fast,runtimeClassName=nvidia,nodeSelector.disk=ssd,secretName=keys",
        "--set", "drainTimeout=600,startupTimeout=7200,args={--max-model-len=8192},tolerations[0].key=spot",
    )  # fmt: skip
    for document in found:
        kubernetes_validate.validate(document, "1.30", strict=True)
    [deployment] = [document for document in found if document["kind"] == "Deployment"]
    assert "replicas" not in deployment["spec"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 620
    assert (pod["runtimeClassName"], pod["nodeSelector"]) == ("nvidia", {"disk": "ssd"})
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu", "spot"]
    [main] = pod["containers"]
    assert main["args"][-2:] == ["--drain-timeout=600", "--max-model-len=8192"]
    assert main["startupProbe"]["failureThreshold"] == 720


@needs_helm
def test_helm_finds_nothing_wrong() -> None:
    command = [HELM or "helm", "lint", "--strict", str(CHART), "--set", f"image={IMAGE}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
