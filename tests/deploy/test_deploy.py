"""The files in deploy/ fit Kubernetes' schemas, hadolint and pass-run serve. No image is built."""

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
CLOSING_SECONDS = 10
"""The most time that `pass-run serve` takes after --drain-seconds: 5 s to send errors to clients,
and 5 s to close connections."""


def read(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")))


def pods(name: str) -> dict:
    return read(name)[0]["spec"]["template"]


def container(name: str) -> dict:
    (only,) = pods(name)["spec"]["containers"]
    return only


def parsed(arguments: list[str]) -> dict:
    """Parse the arguments of pass-run as it does."""
    command, *rest = arguments
    assert command == "serve"
    return serve.make_context("serve", list(rest)).params


def commands(dockerfile: str, instruction: str) -> list[list[str]]:
    text = (DEPLOY / dockerfile).read_text(encoding="utf-8")
    return [*map(yaml.safe_load, re.findall(rf"(?m)^{instruction} (\[.*\])$", text))]


def test_the_wheel_and_mypy_list_every_package():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    files = [*ROOT.glob("exporter/*/__init__.py"), *ROOT.glob("runtime/*/__init__.py")]
    packages = {path.parent for path in files}
    wheel = config["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {ROOT / name for name in wheel} == packages
    assert set(config["mypy"]["packages"]) == {path.name for path in packages}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_the_kubernetes_schemas(name, version):
    """Unknown fields are errors."""
    validator = pytest.importorskip("kubernetes_validate")
    for document in read(name):
        validator.validate(document, version, strict=True)
    broken = read(name)[0]
    broken["spec"]["nonsense"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing(name):
    beside_python = shutil.which("hadolint", path=Path(sys.executable).parent)
    hadolint = beside_python or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [hadolint, str(DEPLOY / name)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)


def test_every_manifest_is_listed():
    (listed,) = read("kustomization.yaml")
    others = {"kustomization.yaml", "prometheus-adapter.yaml"}
    assert set(listed["resources"]) | {"triton.yaml"} == set(MANIFESTS)
    assert {path.name for path in (DEPLOY / "kubernetes").iterdir()} == set(MANIFESTS) | others


@pytest.mark.parametrize("name", DOCKERFILES)
def test_files_that_a_dockerfile_copies_exist_and_are_not_ignored(name):
    allowed = (DEPLOY / f"{name}.dockerignore").read_text(encoding="utf-8").splitlines()
    text = (DEPLOY / name).read_text(encoding="utf-8")
    for line in re.findall(r"(?m)^COPY (?!--)(.*) \S+$", text):
        for source in shlex.split(line):
            assert (ROOT / source).exists(), source
            assert source == "." or f"!{source}" in allowed, source


def test_the_images_command_has_a_key_file_and_a_port():
    assert commands("Dockerfile", "ENTRYPOINT") == [["tini", "--", "pass-run"]] * 2
    for arguments in commands("Dockerfile", "CMD"):
        params = parsed(arguments)
        assert params["port"] == 8000
        assert params["api_key_file"] is not None  # because it listens on all interfaces


def test_the_command_of_the_pod_fits_its_ports_volumes_and_limits():
    pod = container("deployment.yaml")
    params = parsed(pod["args"])
    assert [port["containerPort"] for port in pod["ports"]] == [params["port"]]
    mounted = [Path(mount["mountPath"]) for mount in pod["volumeMounts"]]
    assert params["bundle"] in mounted
    assert params["api_key_file"].parent in mounted
    assert str(params["threads"]) == pod["resources"]["limits"]["cpu"]
    volumes = {volume["name"] for volume in pods("deployment.yaml")["spec"]["volumes"]}
    assert {mount["name"] for mount in pod["volumeMounts"]} == volumes
    with pytest.raises(click.NoSuchOption):
        parsed(["serve", "/bundle", "--nonsense"])


def test_a_pod_has_time_to_drain():
    spec, params = pods("deployment.yaml")["spec"], parsed(container("deployment.yaml")["args"])
    before = container("deployment.yaml")["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = before + params["drain_seconds"] + CLOSING_SECONDS
    assert spec["terminationGracePeriodSeconds"] >= needed
    triton = container("triton.yaml")
    (flag,) = [flag for flag in triton["args"] if "exit-timeout" in flag]
    exit_timeout = int(flag.rpartition("=")[2])
    grace = pods("triton.yaml")["spec"]["terminationGracePeriodSeconds"]
    assert grace > triton["lifecycle"]["preStop"]["sleep"]["seconds"] + exit_timeout
    assert exit_timeout >= DRAIN_SECONDS + 5  # 5 s to unload models
    entrypoint = commands("Dockerfile.triton", "ENTRYPOINT")[0]
    assert entrypoint[:3] == ["tini", "-g", "--"]  # -g: signals go to the models, too


def test_a_pod_on_the_cpu_has_room_for_full_sequences():
    """SmolLM2-135M in fp32: 538 MB of weights, K/V of 30 layers with 3 heads of 64 numbers, and for
    a while two caches."""
    slots = parsed(container("deployment.yaml")["args"])["max_batch_size"]
    entry_bytes = 2 * 30 * 3 * 64 * 4 * slots
    needed = 538e6 + entry_bytes * (4096 + 8192) + 2**29
    limit = container("deployment.yaml")["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("Gi")) * 2**30 > needed


@pytest.mark.parametrize("name", ["deployment.yaml", "triton.yaml"])
def test_containers_do_not_run_as_root(name):
    security = pods(name)["spec"]["securityContext"]
    assert security["runAsNonRoot"]
    dockerfile = DEPLOY / ("Dockerfile.triton" if name == "triton.yaml" else "Dockerfile")
    user, group = re.findall(r"(?m)^USER (\d+):(\d+)$", dockerfile.read_text(encoding="utf-8"))[-1]
    assert (int(user), int(group)) == (security["runAsUser"], security["runAsGroup"])
    assert container(name)["securityContext"]["allowPrivilegeEscalation"] is False


def test_selectors_and_names_match():
    for name in ("deployment.yaml", "triton.yaml"):
        labels = pods(name)["metadata"]["labels"]
        assert read(name)[0]["spec"]["selector"]["matchLabels"] == labels
    deployment, (service,) = read("deployment.yaml")[0], read("service.yaml")
    (disruption,), (autoscaler,) = read("disruption.yaml"), read("autoscaler.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == disruption["spec"]["selector"]["matchLabels"] == labels
    assert autoscaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    triton, triton_service = read("triton.yaml")
    assert triton_service["spec"]["selector"] == triton["spec"]["template"]["metadata"]["labels"]
    for name, of_pods in (("deployment.yaml", service), ("triton.yaml", triton_service)):
        ports = {port["name"] for port in container(name)["ports"]}
        assert {port["targetPort"] for port in of_pods["spec"]["ports"]} <= ports


def installs(name: str) -> str:
    text = re.sub(r"\\\n\s*", "", (DEPLOY / name).read_text(encoding="utf-8"))
    runs = [line for line in text.splitlines() if line.startswith("RUN") and "pip install" in line]
    return re.sub(r"^RUN (--mount=\S+ )?", "", runs[-1])


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_for_gpus_installs_the_extra_gpu(name):
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
def test_an_image_for_engines_needs_their_version(name, extras, engines):
    check = installs(name).split(" && ")[0]
    environment = {"EXTRAS": extras, "ENGINES": engines}
    done = subprocess.run(["sh", "-c", check], env=environment, capture_output=True, check=False)
    assert (done.returncode == 0) == ("tensorrt" not in extras or "==" in engines)
    assert "pip install" in installs(name) and '${ENGINES:+"$ENGINES"}' in installs(name)


def test_every_part_has_the_same_major_versions_of_tensorrt():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["tensorrt"]
    (line,) = [each for each in extra if each.startswith("tensorrt-cu13")]
    source = (ROOT / "runtime/cpp/src/backends/trt/library.cpp").read_text(encoding="utf-8")
    majors = sorted(map(int, re.findall(r'"libnvinfer\.so\.(\d+)"', source)))
    versions = Requirement(line).specifier
    assert LIBRARIES["tensorrt"].minimum == (majors[0], 15) and f"{majors[0]}.15" in versions
    assert [each for each in range(8, 16) if f"{each}.99" in versions] == majors


def test_every_image_has_telemetry_turned_off():
    for path in (*(DEPLOY / name for name in DOCKERFILES), ROOT / "runtime/cpp/Dockerfile"):
        stages = re.split(r"(?m)^FROM ", path.read_text(encoding="utf-8"))
        images = [stage for stage in stages if "\nENTRYPOINT" in stage]
        assert images
        for stage in images:
            assert re.search(r"(?m)^ENV .*\bORT_DISABLE_TELEMETRY=1\b", stage), path


@pytest.mark.serve
def test_probes_and_the_metric_of_the_autoscaler_are_served(session):
    from starlette.testclient import TestClient

    from pass_server.app import make_app

    client = TestClient(make_app(session))
    pod = container("deployment.yaml")
    probes = [pod[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    paths = [probe["httpGet"]["path"] for probe in probes]
    annotations = pods("deployment.yaml")["metadata"]["annotations"]
    for path in [*paths, annotations["prometheus.io/path"]]:
        assert client.get(path).status_code == 200, path
    (metric,) = read("autoscaler.yaml")[0]["spec"]["metrics"]
    (rule,) = read("prometheus-adapter.yaml")[0]["rules"]["custom"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert re.search(rf"(?m)^{series}\{{", client.get("/metrics").text)
