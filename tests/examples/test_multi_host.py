"""The launchers start one job, on this host and on hosts of the testbed, or say why not."""

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import pytest
import yaml

from benchmarks.testbed import job, network
from examples.multi_host import start
from tests.bench import test_testbed
from tests.examples import tiny
from tests.helpers import processes


ROOT = processes.ROOT
FOLDER = ROOT / "examples" / "multi_host"
MACHINE = socket.gethostname()
TRAIN = ["examples.multi_host.train", "--steps", "20"]
# In place of it where a launcher alone is tried: processes tell each other their ranks.
MEET = """
import jax
from jax.experimental import multihost_utils
told = multihost_utils.process_allgather(jax.numpy.array([jax.process_index()]))
print(f"{jax.process_count()} processes, {jax.device_count()} devices, {told.ravel()}")
"""


def real(test):
    """Marks a test that starts real processes."""
    return pytest.mark.slow(pytest.mark.multiprocess(test))


# Runs a command twice, as srun and mpirun do on the hosts of a job, without their options.
TWICE = """#!/bin/sh
shift {options}
status=0
for rank in 0 1; do
    env {variables} "$@" > "{folder}/$rank.txt" 2>&1 &
    eval "process$rank=\\$!"
done
wait $process0 || status=$?
wait $process1 || status=$?
exit $status
"""
SLURM = "SLURM_JOB_ID={port} SLURM_STEP_NODELIST=localhost,other SLURM_NTASKS=2 "
SLURM += "SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_NUM_NODES=2"
OPEN_MPI = (
    "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank"
)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)


def assert_trained(text):
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", text)]
    assert len(losses) == 3, text
    assert losses[-1] < losses[0], text
    assert "2 processes, 2 devices" in text


MPI = ["sh", FOLDER / "mpi.sh", 2, "--", "localhost:{port}", "--one-host", "meet"]


@real
@pytest.mark.parametrize(
    ("variables", "options", "line"),
    [(SLURM, 1, ["sh", FOLDER / "slurm.sh", "meet"]), (OPEN_MPI, 2, MPI)],
    ids=["slurm", "open-mpi"],
)
def test_a_launchers_variables_are_enough(here, tmp_path, variables, options, line):
    port, twice = processes.free_port_of_launchers(), tmp_path / "srun"
    variables = variables.format(port=port - processes.LEAST_OF_LAUNCHERS)
    twice.write_text(TWICE.format(options=options, variables=variables, folder=tmp_path))
    twice.chmod(0o755)
    (tmp_path / "meet.py").write_text(MEET)
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    own |= {"PYTHON": sys.executable, "MPIRUN": str(twice)}
    own["PATH"] = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    line = [str(part).format(port=port) for part in line]
    done = subprocess.run(line, env=os.environ | own, timeout=240, check=False)
    texts = [tmp_path.joinpath(f"{rank}.txt").read_text() for rank in (0, 1)]
    assert done.returncode == 0, texts
    assert all("2 processes, 2 devices, [0 1]" in text for text in texts), texts


@real
def test_an_example_is_a_job(here, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("ONE_HOST", "1")
    line = [*tiny.text(tmp_path), "--devices", "0", "--sync", "dense", "--save-every", "2"]
    line += ["--checkpoint", str(tmp_path / "kept"), "--json", "--steps", "3"]
    texts = by_hand("examples.language_model", *line)
    assert json.loads(texts[0].splitlines()[-1])["dense"]["replicas_equal"]
    assert "dense" not in texts[1]  # one process reports
    assert {path.name for path in (tmp_path / "kept" / "dense").iterdir()} == {"2", "3"}


def by_hand(*line):
    """What two processes on this host print, each started by hand."""
    script, where = FOLDER / "by_hand.sh", f"localhost:{processes.free_port_of_launchers()}"
    started = [
        subprocess.Popen(
            ["sh", script, where, "2", str(rank), *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in (0, 1)
    ]
    texts = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], texts
    return texts


@pytest.mark.parametrize(
    "line",
    [["by_hand.sh", "node1:1", "2", "0"], ["mpi.sh", "2", "--host", "a", "b", "c"]],
    ids=["by_hand", "mpi"],
)
def test_a_launcher_whose_line_is_not_whole_says_how_it_is_used(line):
    own = os.environ | {"PYTHON": "true", "MPIRUN": "true"}
    line = ["sh", FOLDER / line[0], *line[1:]]
    done = subprocess.run(
        line, env=own, timeout=20, check=False, text=True, capture_output=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: "), done.stderr


def test_ranks_are_read_from_a_launchers_variables_unless_they_are_given(monkeypatch):
    for name in (*start.RANKS, *start.SIZES):
        monkeypatch.delenv(name, raising=False)
    assert start._first(None, start.RANKS) is None
    monkeypatch.setenv("PMI_RANK", "3")  # of MPICH
    monkeypatch.setenv("PMI_SIZE", "4")
    assert (start._first(None, start.RANKS), start._first(None, start.SIZES)) == (3, 4)
    assert start._first(0, start.RANKS) == 0


@pytest.mark.parametrize(("status", "fails"), [("0", False), ("3", True)])
def test_a_script_that_exits_with_0_has_come_to_its_end(
    monkeypatch, tmp_path, status, fails
):
    (tmp_path / "exits.py").write_text(f"import sys\nsys.exit({status})\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) if fails else contextlib.nullcontext():
        start.run("exits")


def container():
    """The container of the Job, and its manifest."""
    service, manifest = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    (one,) = manifest["spec"]["template"]["spec"]["containers"]
    return service, manifest, one


def test_the_manifest_names_one_job_and_its_service_throughout():
    service, manifest, one = container()
    spec = manifest["spec"]
    assert spec["completionMode"] == "Indexed"
    assert service["spec"]["selector"] == {"job-name": manifest["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    (variable,) = one["env"]
    name, domain = variable["value"].partition(":")[0].split(".")
    assert variable["name"] == "JAX_COORDINATOR_ADDRESS"
    assert name == f"{manifest['metadata']['name']}-0"
    assert domain == service["metadata"]["name"]
    pods = one["args"][one["args"].index("--processes") + 1]
    assert str(spec["parallelism"]) == str(spec["completions"]) == pods


def on_hosts(script, folder, names=("", ""), rate="1gbit", ranks=2):
    """Runs a script on hosts whose /etc/hosts begin so; the outcome, and what each told."""
    command = ["sh", "-c", f"{script} > {folder}/$TESTBED_RANK.txt 2>&1"]
    variables = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    variables["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")  # compiled as tests are
    with network.Network(ranks, rate) as net:
        for host, lines in zip(net.hosts, names, strict=True):
            known = network.NETNS / host.namespace / "hosts"
            # The host's own name stands there, and is not to have two addresses.
            others = "" if MACHINE in lines else known.read_text()
            known.write_text(f"{lines}\n{others}")
        outcome = job.run(command, ranks, net, 200, environment=variables)
    return outcome, [pathlib.Path(folder, f"{i}.txt").read_text() for i in range(ranks)]


@real
def test_processes_that_come_are_told_who_does_not():
    address, lines = processes.free_address(), []
    for rank in (0, 2):
        line = ["--coordinator", address, "--processes", 3, "--process", rank, "--one-host"]
        line = ["examples.multi_host.start", *line, "--timeout", 8, *TRAIN]
        lines.append(processes.start(*line))
    for process in lines:
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 1, told
        assert "process 1 of 3 did not come within" in told
        assert "process 0 on host" in told
        assert "process 2 on host" in told


@real
@test_testbed.shaped
def test_two_hosts_train_by_hand(here, tmp_path):
    script = f"{FOLDER}/by_hand.sh $TESTBED_COORDINATOR 2 $TESTBED_RANK {' '.join(TRAIN)}"
    outcome, texts = on_hosts(script, tmp_path)
    assert outcome.status == 0, texts
    assert_trained(texts[0])
    # Each sent the other what it says that it sent, twenty times.
    sent = float(re.search(r"([\d,]+) bytes", texts[0])[1].replace(",", ""))
    assert min(outcome.sent) > 10 * sent


@real
@test_testbed.shaped
def test_two_pods_find_each_other_by_the_manifest(here, tmp_path):
    _, _, one = container()
    (variable,) = one["env"]
    name, _, _ = variable["value"].partition(":")
    module = " ".join(one["command"]).replace("python", sys.executable, 1)
    script = "JOB_COMPLETION_INDEX=$TESTBED_RANK KUBERNETES_SERVICE_HOST=10.0.0.1 "
    script += f"{variable['name']}={variable['value']} {module} {' '.join(one['args'])}"
    outcome, texts = on_hosts(script, tmp_path, [f"10.77.0.1 {name}"] * 2)
    assert outcome.status == 0, texts
    assert_trained(texts[0])
    assert "loss" not in texts[1]


@real
@test_testbed.shaped
@pytest.mark.parametrize(
    ("coordinator", "names", "match"),
    [
        (
            "leader:47311",
            ("127.0.1.1 leader", "10.77.0.1 leader"),
            r"leader:47311 stands for 127\.0\.1\.1 on host \S+ \(process 0\)",
        ),
        (
            "10.77.0.1:47311",
            ("", f"127.0.1.1 {MACHINE}"),
            r"\(process 1\) has 127\.0\.1\.1 under its own name",
        ),
    ],
)
def test_names_that_mislead_a_host_are_refused_on_all(
    here, tmp_path, coordinator, names, match
):
    script = f"{FOLDER}/by_hand.sh {coordinator} 2 $TESTBED_RANK {' '.join(TRAIN)}"
    begun = time.monotonic()
    outcome, texts = on_hosts(script, tmp_path, names)
    assert outcome.status == 1, texts
    assert time.monotonic() - begun < 60
    for text in texts:
        assert re.search(match, text), text
        assert "loss" not in text


@real
@test_testbed.shaped
def test_the_doctor_measures_the_rate_of_the_links(here, tmp_path):
    script = f"{sys.executable} -m sparsejax doctor --coordinator $TESTBED_COORDINATOR"
    script += " --processes $TESTBED_RANKS --process $TESTBED_RANK --json"
    outcome, texts = on_hosts(script, tmp_path, rate="50mbit")
    assert outcome.status == 0, texts
    rate = float(re.search(r'"gbit_per_s": ([\d.]+)', texts[0])[1])
    assert 0.6 * 0.05 < rate < 1.05 * 0.05
