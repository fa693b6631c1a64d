"""Real processes of a job that does not fit together: refused on all, and nobody waits."""

import json
import os
import re
import socket

import pytest

from tests.helpers import processes
from tests.helpers.processes import outputs


WORKER = "tests.advise.doctor.agreeing_worker"

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        ((1, 1), r"^taken$"),
        ((1, 2), r"number of devices is 1 on host .*process 0.* 2 on .*process 1"),
    ],
)
def test_a_job_is_taken_or_refused_on_all_processes(devices, match):
    address = processes.free_address()
    jobs = [processes.fork(WORKER, address, i, 2, n) for i, n in enumerate(devices)]
    for output in outputs(jobs):
        assert re.search(match, output, re.MULTILINE), output


def test_another_version_on_one_host_is_refused_on_all(tmp_path):
    # Found before the one that is installed.
    installed = tmp_path / "optax-9.9.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: optax\nVersion: 9.9.9\n"
    )
    path = os.pathsep.join([str(tmp_path), str(processes.ROOT)])
    other = {"PYTHONPATH": path, "JAX_ENABLE_X64": "1"}
    address = processes.free_address()
    first = processes.fork(WORKER, address, 0, 2, 1)
    for output in outputs([first, processes.start(WORKER, address, 1, 2, 1, **other)]):
        assert re.search(r"optax is \S+ on host .*, and 9\.9\.9 on host", output), output
        assert "jax_enable_x64 is False on host" in output
        assert "Install the same on all hosts." in output


def doctor(*arguments, rank=None, address=None):
    job = ["--coordinator", address, "--processes", "2", "--process", rank, "--one-host"]
    return processes.fork("sparsejax", "doctor", *(job if address else ()), *arguments)


def test_the_doctor_examines_a_job_from_rank_0_and_all_end_alike():
    address = processes.free_address()
    line = ["examples.multi_host.train:model", "--json"]
    jobs = [doctor(*line, rank=rank, address=address) for rank in (0, 1)]
    first, second = outputs(jobs)
    assert [job.returncode for job in jobs] == [0, 0], first
    assert "timing messages, round 7 of 7" in first
    report = json.loads(first[first.index("{") :])
    texts = {one["about"]: one["text"] for one in report["findings"]}
    assert "2 leaves are equal as bytes on 2 processes" in texts["parameters"]
    assert texts["devices"].startswith("1 device (cpu) each; 2 processes on 1 host")
    assert report["links"]["gbit_per_s"] > 0
    assert report["explanation"]["network"]["gbit_per_s"] == report["links"]["gbit_per_s"]
    assert "{" not in second


def test_the_doctor_finds_parameters_that_differ_on_all_ranks():
    address = processes.free_address()
    line = ["tests.advise.doctor.differing:model", "--gbit-per-s", "1", "--latency-us", "9"]
    jobs = [doctor(*line, rank=rank, address=address) for rank in (0, 1)]
    first, second = outputs(jobs)
    assert [job.returncode for job in jobs] == [1, 1], (first, second)
    assert re.search(r"WRONG  parameters  process 1 on \S+ has other bytes of 'w'", first)
    assert "WRONG" not in second


def test_the_doctor_refuses_what_is_asked_in_another_way_on_a_rank():
    address = processes.free_address()
    jobs = [doctor("--ranks", n, rank=n, address=address) for n in (0, 1)]
    first, _ = outputs(jobs)
    assert [job.returncode for job in jobs] == [1, 1]
    assert re.search(
        "WRONG  job         the argument ranks is 0 on host .* 1 on host", first
    )
    assert "nothing else was looked at" in first


def test_the_doctor_ends_where_a_process_says_nothing():
    address = processes.free_address()
    silent = processes.fork("tests.advise.doctor.silent_worker", address)
    examined = doctor("--timeout", "4", rank=0, address=address)
    output, _ = examined.communicate(timeout=processes.TIMEOUT)
    silent.kill()
    silent.communicate()
    assert examined.returncode == 1, output
    assert "process 1 of 2 did not say whether it has its model within 4 s" in output


def test_the_doctor_says_where_a_model_is_missing_and_where_no_job_is():
    address = processes.free_address()
    models = "examples.multi_host.train:model", "no.such:model"
    jobs = [doctor(model, rank=i, address=address) for i, model in enumerate(models)]
    for output in outputs(jobs):
        assert re.search(r"process 1 on host \S+ cannot read its model: ModuleN", output)
    assert [job.returncode for job in jobs] == [2, 2]
    alone = doctor("--job")
    assert "finds no job of Slurm or Open MPI" in outputs([alone])[0]
    assert alone.returncode == 2


def launched(monkeypatch, module, *line, numbers, of):
    """Processes that find their numbers in Slurm's variables."""
    number = processes.free_port_of_launchers() - processes.LEAST_OF_LAUNCHERS
    job = {"JOB_ID": number, "STEP_NODELIST": "localhost", "NTASKS": of}
    started = []
    for number in numbers:
        for name, value in (job | {"PROCID": number, "LOCALID": 0}).items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        started.append(processes.fork(module, *line))
    return started


def test_one_number_of_a_launcher_for_two_is_refused_on_all(monkeypatch):
    line = "doctor", "--job", "--timeout", "60"
    jobs = launched(monkeypatch, "sparsejax", *line, numbers=(0, 1, 1), of=3)
    host = socket.gethostname()
    where = f"{host} (SLURM_PROCID=1)"
    for output in outputs(jobs):
        assert "process 1 was started more than once; there were process 0" in output
        assert f"process 1 on host {where} and {where}" in output
    assert [job.returncode for job in jobs] == [1, 1, 1]


def test_the_doctor_examines_the_job_of_a_launcher(monkeypatch):
    line = "doctor", "--job", "--gbit-per-s", "1", "--latency-us", "9"
    jobs = launched(monkeypatch, "sparsejax", *line, numbers=(0, 1), of=2)
    first, second = outputs(jobs)
    assert [job.returncode for job in jobs] == [0, 0], (first, second)
    assert "2 processes on 1 host" in first
