"""deploy/: what Kubernetes and hadolint say of it, and that it fits pass-run serve. No image is
built here."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from packaging.requirements import Requirement

from pass_runtime.backends.trt.library import LIBRARIES
from pass_server.command import serve
from pass_server.triton.config import DRAIN_SECONDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = ["deployment.yaml", "service.yaml", "autoscaler.yaml", "disruption.yaml", "triton.yaml"]
DOCKERFILES = ["Dockerfile", "Dockerfile.triton"]
TOLD_SECONDS = 10
"""What `pass-run serve` takes at most when --drain-seconds are over: 5 to tell clients, 5 to close
connections."""


def read(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")))


def pods(name: str) -> dict:
    return read(name)[0]["spec"]["template"]


def container(name: str) -> dict:
    (only,) = pods(name)["spec"]["containers"]
    return only


def parsed(arguments: list[str]) -> dict:
    """As pass-run does; an unknown flag raises."""
    command, *rest = arguments
    assert command == "serve"
    return serve.make_context("serve", list(rest)).params


def commands(dockerfile: str, instruction: str) -> list[list[str]]:
    text = (DEPLOY / dockerfile).read_text(encoding="utf-8")
    return [
        yaml.safe_load(found)
        for found in re.findall(rf"^{instruction} (\[.*\])$", text, re.MULTILINE)
    ]


def test_the_wheel_and_the_type_checker_have_every_package():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    packages = {
        path.parent
        for room in ("exporter", "runtime")
        for path in (ROOT / room).glob("*/__init__.py")
    }
    wheel = config["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {ROOT / name for name in wheel} == packages
    assert set(config["mypy"]["packages"]) == {path.name for path in packages}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_takes_it(name, version):
    """By the API's own schemas, with no field that they do not know."""
    validator = pytest.importorskip("kubernetes_validate")
    for document in read(name):
        validator.validate(document, version, strict=True)
    broken = read(name)[0]
    broken["spec"]["nonsense"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say(name):
    found = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([found, str(DEPLOY / name)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_list_of_manifests_is_whole():
    (listed,) = read("kustomization.yaml")
    others = {"kustomization.yaml", "prometheus-adapter.yaml"}
    assert set(listed["resources"]) | {"triton.yaml"} == set(MANIFESTS)
    assert {path.name for path in (DEPLOY / "kubernetes").iterdir()} == set(MANIFESTS) | others


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_exists_and_is_not_ignored(name):
    allowed = (DEPLOY / f"{name}.dockerignore").read_text(encoding="utf-8").splitlines()
    for line in re.findall(
        r"^COPY (?!--)(.*) \S+$", (DEPLOY / name).read_text(encoding="utf-8"), re.MULTILINE
    ):
        for source in shlex.split(line):
            assert (ROOT / source).exists(), source
            assert source == "." or f"!{source}" in allowed, source


def test_the_images_command():
    assert commands("Dockerfile", "ENTRYPOINT") == [["tini", "--", "pass-run"]] * 2
    for arguments in commands("Dockerfile", "CMD"):
        params = parsed(arguments)
        assert params["port"] == 8000
        assert params["api_key_file"] is not None  # it listens beyond the machine


def test_the_pods_command_and_what_it_needs():
    here, params = container("deployment.yaml"), parsed(container("deployment.yaml")["args"])
    assert [port["containerPort"] for port in here["ports"]] == [params["port"]]
    mounted = [Path(mount["mountPath"]) for mount in here["volumeMounts"]]
    assert params["bundle"] in mounted
    assert params["api_key_file"].parent in mounted
    assert str(params["threads"]) == here["resources"]["limits"]["cpu"]
    volumes = {volume["name"] for volume in pods("deployment.yaml")["spec"]["volumes"]}
    assert {mount["name"] for mount in here["volumeMounts"]} == volumes
    with pytest.raises(click.NoSuchOption):
        parsed(["serve", "/bundle", "--nonsense"])


def test_a_pod_has_time_to_drain():
    spec, params = pods("deployment.yaml")["spec"], parsed(container("deployment.yaml")["args"])
    before = container("deployment.yaml")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= before + params["drain_seconds"] + TOLD_SECONDS
    triton = container("triton.yaml")
    (exit_timeout,) = [
        int(flag.rpartition("=")[2]) for flag in triton["args"] if "exit-timeout" in flag
    ]
    grace = pods("triton.yaml")["spec"]["terminationGracePeriodSeconds"]
    assert grace > triton["lifecycle"]["preStop"]["sleep"]["seconds"] + exit_timeout
    assert exit_timeout >= DRAIN_SECONDS + 5  # in which models are unloaded
    assert commands("Dockerfile.triton", "ENTRYPOINT")[0][:3] == [
        "tini",
        "-g",
        "--",
    ]  # models get the signal too


def test_a_pod_on_the_cpu_has_room_for_full_sequences():
    """SmolLM2-135M in fp32: 538 MB of weights; keys and values of 30 layers with 3 heads of 64
    numbers. A cache of 4096 columns is copied to one of 8192."""
    sequences = parsed(container("deployment.yaml")["args"])["max_batch_size"]
    column = 2 * 30 * 3 * 64 * 4 * sequences
    needed = 538e6 + column * (4096 + 8192) + 2**29
    given = container("deployment.yaml")["resources"]["limits"]["memory"]
    assert int(given.removesuffix("Gi")) * 2**30 > needed


@pytest.mark.parametrize("name", ["deployment.yaml", "triton.yaml"])
def test_nobody_is_root(name):
    security = pods(name)["spec"]["securityContext"]
    assert security["runAsNonRoot"]
    text = (DEPLOY / ("Dockerfile.triton" if name == "triton.yaml" else "Dockerfile")).read_text(
        encoding="utf-8"
    )
    last = re.findall(r"^USER (\d+):(\d+)$", text, re.MULTILINE)[-1]
    assert tuple(map(int, last)) == (security["runAsUser"], security["runAsGroup"])
    assert container(name)["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_names_fit_together():
    for name in ("deployment.yaml", "triton.yaml"):
        labels = pods(name)["metadata"]["labels"]
        assert read(name)[0]["spec"]["selector"]["matchLabels"] == labels
    deployment, (service,) = read("deployment.yaml")[0], read("service.yaml")
    (disruption,), (autoscaler,) = read("disruption.yaml"), read("autoscaler.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == disruption["spec"]["selector"]["matchLabels"] == labels
    assert autoscaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    triton, beside = read("triton.yaml")
    assert beside["spec"]["selector"] == triton["spec"]["template"]["metadata"]["labels"]
    for name, served in (("deployment.yaml", service), ("triton.yaml", beside)):
        ports = {port["name"] for port in container(name)["ports"]}
        assert {port["targetPort"] for port in served["spec"]["ports"]} <= ports


def installs(name: str) -> str:
    """The shell command with which the last stage of a Dockerfile installs packages, on one
    line."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / name).read_text(encoding="utf-8"))
    found = [line for line in text.splitlines() if line.startswith("RUN") and "pip install" in line]
    return re.sub(r"^RUN (--mount=\S+ )?", "", found[-1])


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_pod_with_a_gpu_runs_an_image_with_the_gpus_parts(name):
    """By the extra that users install too, in one command; the image for CPUs has the other
    build."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    assert container("triton.yaml")["resources"]["limits"]["nvidia.com/gpu"] == 1
    *others, last = [
        extras.split(",") for extras in re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    ]
    assert "gpu" in last and "cpu" not in last
    assert all("cpu" in extras and "gpu" not in extras for extras in others)
    assert "[${EXTRAS}]" in installs(name) and installs(name).count("pip install") == 1


@pytest.mark.parametrize("name", DOCKERFILES)
@pytest.mark.parametrize("extras", ["gpu,serve", "gpu,tensorrt", "gpu,serve,tensorrt-rtx"])
@pytest.mark.parametrize("engines", ["", "tensorrt-cu13", "tensorrt-rtx-cu13==1.7.1.116"])
def test_an_image_for_engines_is_told_their_version(name, extras, engines):
    check, done = installs(name).split(" && ")[0], "installs"
    told = subprocess.run(
        ["sh", "-c", f"{check} && echo {done}"],
        env={"EXTRAS": extras, "ENGINES": engines},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done in told.stdout) == ("tensorrt" not in extras or "==" in engines)
    assert "pip install" in installs(name) and '${ENGINES:+"$ENGINES"}' in installs(name)


def test_every_part_has_the_same_major_versions_of_tensorrt():
    """The extra, and the libraries that the C++ runtime opens: either reads the other's engines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (line,) = [
        each
        for each in project["optional-dependencies"]["tensorrt"]
        if each.startswith("tensorrt-cu13")
    ]
    source = (ROOT / "runtime/cpp/src/backends/trt/library.cpp").read_text(encoding="utf-8")
    majors = sorted(map(int, re.findall(r'"libnvinfer\.so\.(\d+)"', source)))
    versions = Requirement(line).specifier
    assert LIBRARIES["tensorrt"].minimum == (majors[0], 15) and f"{majors[0]}.15" in versions
    assert [each for each in range(8, 16) if f"{each}.99" in versions] == majors


@pytest.mark.serve
def test_the_paths_and_metrics_are_served(session):
    """Probes, and the metric that the autoscaler reads through the adapter."""
    from starlette.testclient import TestClient

    from pass_server.app import make_app

    client = TestClient(make_app(session))
    here = container("deployment.yaml")
    paths = [
        here[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")
    ]
    annotations = pods("deployment.yaml")["metadata"]["annotations"]
    for path in [*paths, annotations["prometheus.io/path"]]:
        assert client.get(path).status_code == 200, path
    (metric,) = read("autoscaler.yaml")[0]["spec"]["metrics"]
    (rule,) = read("prometheus-adapter.yaml")[0]["rules"]["custom"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert re.search(rf"(?m)^{series}\{{", client.get("/metrics").text)
