"""deploy/: units, manifests and images parse, and name commands, options and files that exist."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from kvstow.cli import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def settings() -> dict[str, str]:
    lines = (DEPLOY / "systemd/kvstow.env").read_text().splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return dict(word.split("=", 1) for line in words for word in line)


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # systemd's names have capitals
    parser.read_string(path.read_text())
    return parser


def command(path: Path) -> list[str]:
    """The words of ExecStart, as systemd hands them over."""
    known = settings()
    return [
        re.sub(r"\$\{(\w+)\}", lambda name: known[name[1]], word)
        for word in unit(path)["Service"]["ExecStart"].split()
    ]


def documents(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text()))


def container(path: Path) -> dict:
    (deployment,) = [each for each in documents(path) if each["kind"] == "Deployment"]
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return only


def check_kvstow(words: list[str]) -> None:
    """The command line takes these words."""
    get_command(app).commands[words[0]].make_context(words[0], words[1:])


def check_connector(text: str) -> None:
    """vLLM is told of kvstow's connector, with options that it has."""
    from kvstow.adapters.vllm.options import ConnectorOptions

    config = json.loads(text)
    assert config["kv_connector"] == "KvstowConnector"
    assert config["kv_connector_module_path"] == "kvstow.adapters.vllm"
    assert config["kv_role"] == "kv_both"
    ConnectorOptions.of(config.get("kv_connector_extra_config", {}))


def test_there_is_one_of_everything_for_prefill_decode_and_router():
    names = ["decode", "prefill", "router"]
    assert [path.stem for path in UNITS] == [f"kvstow-{name}" for name in names]
    assert [path.stem for path in MANIFESTS] == names


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_a_command_that_exists(path):
    found = unit(path)
    assert found["Install"]["WantedBy"] == "multi-user.target"
    assert found["Service"]["EnvironmentFile"] == "/etc/kvstow/kvstow.env"
    program, *words = command(path)
    if Path(program).name == "kvstow":
        check_kvstow(words)
    else:
        assert Path(program).name == "vllm"
        assert words[0] == "serve"
        check_connector(words[words.index("--kv-transfer-config") + 1])


def test_the_router_asks_where_prefill_and_decode_listen():
    ports = {}
    for name in ("prefill", "decode"):
        words = command(DEPLOY / f"systemd/kvstow-{name}.service")
        ports[name] = words[words.index("--port") + 1]
    words = command(DEPLOY / "systemd/kvstow-router.service")
    for name, port in ports.items():
        assert words[words.index(f"--{name}") + 1] == f"http://127.0.0.1:{port}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path):
    for path in UNITS:
        text = re.sub(r"/opt/kvstow/bin/\w+", "/bin/true", path.read_text())
        (tmp_path / path.name).write_text(text.replace("User=kvstow", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "kvstow" in line]
    assert ours == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_has_a_deployment_and_its_service(path):
    deployment, service = documents(path)
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert deployment["metadata"]["name"] == service["metadata"]["name"] == f"kvstow-{path.stem}"
    ports = {port["name"] for port in container(path)["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    volumes = {each["name"] for each in deployment["spec"]["template"]["spec"].get("volumes", [])}
    assert {mount["name"] for mount in container(path).get("volumeMounts", [])} == volumes


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_instance_in_a_cluster_uses_the_connector_with_keys_of_its_own(name):
    only = container(DEPLOY / f"kubernetes/{name}.yaml")
    assert only["command"] == ["vllm", "serve"]
    (config,) = [each for each in only["args"] if each.startswith("--kv-transfer-config=")]
    text = config.partition("=")[2]
    check_connector(text.replace("$(POD_IP)", "10.0.0.1"))
    names = {each["name"] for each in only["env"]}
    assert set(re.findall(r"\$\((\w+)\)", text)) <= names
    extra = json.loads(text)["kv_connector_extra_config"]
    mounts = [mount["mountPath"] for mount in only["volumeMounts"]]
    assert str(Path(extra["keys_file"]).parent) in mounts
    port = int(extra["listen"].rpartition(":")[2])
    assert port in {each["containerPort"] for each in only["ports"]}


def test_the_router_in_a_cluster_asks_services_that_exist():
    only = container(DEPLOY / "kubernetes/router.yaml")
    check_kvstow(only["args"])
    services = {
        (each["metadata"]["name"], port["port"])
        for path in MANIFESTS
        for each in documents(path)
        if each["kind"] == "Service"
        for port in each["spec"]["ports"]
    }
    asked = re.findall(r"--(?:prefill|decode)=http://([\w-]+):(\d+)", " ".join(only["args"]))
    assert len(asked) == 2
    assert {(name, int(port)) for name, port in asked} <= services


def test_the_images_copy_files_and_install_extras_that_exist():
    text = (DEPLOY / "Containerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    assert targets == {"router", "engine"}
    for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    for names in re.findall(r"/src\[([^\]]+)\]", text):
        assert set(names.split(",")) <= set(EXTRAS)
    images = {container(path)["image"] for path in MANIFESTS}
    built = set(re.findall(r"-t (\S+)", text))
    assert images == built


def test_the_extras_install_what_their_names_say():
    assert any(line.startswith("nixl-cu12") for line in EXTRAS["nixl-cu12"])
    assert any(line.startswith("nixl-cu13") for line in EXTRAS["nixl-cu13"])
    assert any(line.startswith("vllm") for line in EXTRAS["vllm"])
    for name, lines in EXTRAS.items():
        assert lines, name
        for mentioned in re.findall(r"kvstow\[([^\]]+)\]", " ".join(lines)):
            assert set(mentioned.split(",")) <= set(EXTRAS)
