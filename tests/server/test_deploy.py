"""The files of deploy/: valid in form, and true of the server that they start."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from octavo.cli.app import run_command
from octavo.config.engine_config import option_fields
from octavo.config.option import get_options
from octavo.server.settings import ServerSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
FLAGS = {"--" + name.replace("_", "-") for name in (*get_options(ServerSettings), *option_fields())}
PORT = ServerSettings().port
PROBES = {"/health/live", "/health/ready"}


def test_every_metric_of_the_dashboard_exists(http):
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"octavo:\w+", query)}
    assert len(named) >= 15
    http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
    served = set(re.findall(r"^(octavo:\w+)[{ ]", http.get("/metrics").text, re.MULTILINE))
    assert named <= served, named - served
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_manifest_is_clean_and_its_probes_are_routes(http):
    text = (DEPLOY / "kubernetes.yaml").read_text()
    config = YamlLintConfig("extends: default\nrules: {line-length: {max: 100}, braces: disable}")
    assert not list(linter.run(text, config))
    deployment, service = yaml.safe_load_all(text)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    live, ready = (
        container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")
    )
    assert {live, ready} == PROBES and live != ready
    assert all(http.get(path).status_code == 200 for path in PROBES)
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert {flag.partition("=")[0] for flag in container["args"][2:]} <= FLAGS


@pytest.mark.parametrize("name", ["octavo.service", "Containerfile"])
def test_every_flag_that_a_file_gives_exists(name):
    command = re.findall(r"^(?:ExecStart|CMD).*$", (DEPLOY / name).read_text(), re.MULTILINE)
    flags = re.findall(r"--[a-z][a-z-]+", " ".join(command))
    assert flags and set(flags) <= FLAGS


def test_the_unit_is_what_systemd_reads(tmp_path):
    """Where systemd is installed its own linter reads the unit; else its form is checked alone."""
    text = (DEPLOY / "octavo.service").read_text()
    sections = re.findall(r"^\[(\w+)\]$", text, re.MULTILINE)
    assert sections == ["Unit", "Service", "Install"]
    if (linter_path := shutil.which("systemd-analyze")) is None:
        return
    unit = tmp_path / "octavo.service"
    unit.write_text(text.replace("/opt/octavo/bin/octavo", "/bin/true"))
    found = subprocess.run(
        [linter_path, "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert "octavo.service" not in found.stderr, found.stderr


def arguments_of_the_container():
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    return pod["containers"][0]["args"], pod["terminationGracePeriodSeconds"]


def arguments_of_the_unit():
    text = (DEPLOY / "octavo.service").read_text()
    command = re.search(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)[1].split()
    return command, int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1])


def arguments_of_the_image():
    text = (DEPLOY / "Containerfile").read_text()
    return json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1]), None


@pytest.mark.parametrize(
    "found", [arguments_of_the_container, arguments_of_the_unit, arguments_of_the_image]
)
def test_the_command_line_is_one_that_octavo_takes(found, monkeypatch):
    """The settings are valid together, and a stop waits longer than the server drains."""
    arguments, stop_s = found()
    taken = []
    monkeypatch.setattr("octavo.server.run.serve", lambda *given: taken.append(given))
    assert run_command(arguments) == 0
    ((specs, settings, _),) = taken
    assert [spec.model for spec in specs] == ["smollm2"] and settings.port == PORT
    assert stop_s is None or stop_s > settings.shutdown_timeout_s


def test_every_file_names_the_same_port():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == PORT
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    probes = [one for name, one in container.items() if name.endswith("Probe")]
    assert len(probes) == 3 and {one["httpGet"]["port"] for one in probes} == {port["name"]}
    image = (DEPLOY / "Containerfile").read_text()
    assert re.findall(r"^EXPOSE (\d+)$", image, re.MULTILINE) == [str(PORT)]
    uid = re.search(r"^USER (\d+)$", image, re.MULTILINE)[1]
    security = deployment["spec"]["template"]["spec"]["securityContext"]
    assert security["runAsUser"] == int(uid) and f"--uid {uid}" in image
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in deployment["spec"]["template"]["spec"]["volumes"]}
