"""The files of deploy/ name metrics, paths and options that there are."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import httpx
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runtime"))

import live_server
from castiron.runtime.async_engine import AsyncEngine
from castiron.runtime.server.app import make_app
from castiron.runtime.server.service import ServerConfig, Service
from fake_core import make_session
from prometheus_client.parser import text_string_to_metric_families

from castiron.commands.serve_engine import command

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
WITH_METRICS = [
    *("grafana/castiron.json", "prometheus/alerts.yaml", "kubernetes/adapter-rules.yaml"),
    "kubernetes/autoscaling.yaml",
]
#: Labels that Prometheus adds, and the one of a histogram's buckets.
ADDED = {"job", "instance", "namespace", "pod", "le"}


@pytest.fixture(scope="module")
def exported():
    """{name of a sample: its labels} of what /metrics says."""
    with live_server.serve() as (url, _):
        httpx.post(f"{url}/v1/completions", json={"prompt": [3, 4], "max_tokens": 2}).raise_for_status()
        assert httpx.post(f"{url}/v1/completions", json={"prompt": 7}).status_code == 400
        text = httpx.get(f"{url}/metrics").text
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def documents(path):
    text = path.read_text()
    return [json.loads(text)] if path.suffix == ".json" else list(yaml.safe_load_all(text))


def expressions(node):
    """All texts of a document."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            yield from expressions(each)


@pytest.mark.parametrize("name", WITH_METRICS)
def test_every_metric_is_exported_with_the_labels_that_are_asked_for(name, exported):
    found = 0
    for text in (t for d in documents(DEPLOY / name) for t in expressions(d)):
        for metric, labels in re.findall(r"\bcastiron:([a-z0-9_]+)(?:\{([^}]*)\})?", text):
            assert f"castiron:{metric}" in exported, f"{name} asks for castiron:{metric}"
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels))
            assert used <= exported[f"castiron:{metric}"] | ADDED, (name, metric, used)
            found += 1
        # A rule over several metrics names them in one expression, the autoscaler without the colon.
        for metrics in re.findall(r"castiron:\(([a-z0-9_|]+)\)", text):
            assert all(f"castiron:{metric}" in exported for metric in metrics.split("|"))
            found += 1
        if metric := re.fullmatch(r"castiron_([a-z0-9_]+)", text):
            assert f"castiron:{metric[1]}" in exported
            found += 1
    assert found, f"{name} names no metric"


def test_all_manifests_parse_and_select_the_same_pods():
    labels = []
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in documents(path):
            if "kind" in document:
                assert document["apiVersion"]
                assert document["metadata"]["name"] == "castiron"
            selector = document.get("spec", {}).get("selector", {})
            labels.append(selector.get("matchLabels", selector))
    assert [one for one in labels if one] == [{"app.kubernetes.io/name": "castiron"}] * 4


def test_the_deployment_starts_a_server_that_answers_its_probes_and_drains_in_its_time():
    (deployment,) = [d for d in documents(DEPLOY / "kubernetes/deployment.yaml") if d["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = command.make_context("serve-engine", list(container["args"])).params
    assert container["ports"][0]["containerPort"] == 8000
    service = Service(AsyncEngine(make_session()), ServerConfig(("m",)))
    paths = _paths(make_app(service))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
    service.engine.session.close()
    timeout = next(int(a.partition("=")[2]) for a in container["args"] if a.startswith("--shutdown-timeout"))
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause + timeout < pod["terminationGracePeriodSeconds"]
    assert given["engine"] == container["volumeMounts"][0]["mountPath"]


def test_variables_that_kubernetes_makes_of_the_service_are_not_taken_for_options():
    manifests = documents(DEPLOY / "kubernetes/deployment.yaml")
    (service,) = (d for d in manifests if d["kind"] == "Service")
    (deployment,) = (d for d in manifests if d["kind"] == "Deployment")
    options = {f"CASTIRON_{p.name.upper()}" for p in command.params}
    # The variables are {NAME}_PORT, {NAME}_SERVICE_HOST and so on, by Kubernetes' documentation.
    assert f"{service['metadata']['name'].upper()}_PORT" in options
    assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_the_image_starts_with_options_that_there_are():
    text = (DEPLOY / "Dockerfile").read_text()
    entry, arguments = (
        json.loads(re.search(rf"^{word} (\[.*\])$", text, re.M)[1]) for word in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["castiron", "serve-engine"]
    command.make_context("serve-engine", arguments)


def _paths(app):
    return {route.partition(" ")[2] for route in app.routes}
