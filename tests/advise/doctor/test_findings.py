"""What the doctor finds in one process, and what it makes of what processes say."""

import argparse
import concurrent.futures
import json
import os
import re
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import distributed

import sparsejax
from sparsejax import __main__ as command, errors
from sparsejax.advise.doctor import links
from sparsejax.jobs import store, versions
from sparsejax.jobs.start import check, coordinator, facts, launchers, roll_call
from tests import helpers
from tests.helpers import jobs, processes
from tests.monitor.test_replicas import placed


TABLE = {"embedding": np.zeros((50_000, 8), np.float32), "bias": np.zeros(8, np.float32)}
NETWORK = sparsejax.Network(1.0, 20.0)


def of(report, about):
    return [
        (one.status, f"{one.text} {one.fix}")
        for one in report.findings
        if one.about == about
    ]


def test_devices_of_one_process_are_told_and_nothing_is_wrong():
    report = sparsejax.doctor()
    assert report.wrong == ()
    (((status, text)),) = of(report, "devices")
    assert (status, text[:15]) == ("OK", "8 devices (cpu)")
    (((status, text)),) = of(report, "network")
    assert (status, "8 simulated devices" in text) == ("note", True)
    ((_, text),) = of(report, "versions")
    assert f"jax {jax.__version__}" in text
    assert f"sources of sparsejax {versions.versions()['sources of sparsejax']}" in text
    assert [text.split()[0] for _, text in of(report, "kernels")] == ["triton", "pallas"]
    assert report.links is None
    assert report.explanation is None
    assert str(report).endswith("Nothing that was checked is wrong.")


def test_a_file_that_differs_changes_the_hash_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(versions.importlib.resources, "files", lambda _: tmp_path)
    file, hashes = tmp_path / "wire" / "wire.py", []
    file.parent.mkdir()
    for text in ("one = 1", "one = 2"):
        file.write_text(text)
        hashes.append(versions._sources.__wrapped__())
    file.rename(file.with_name("other.py"))
    hashes.append(versions._sources.__wrapped__())
    assert len({*hashes}) == 3


def test_what_was_not_checked_is_no_ok():
    """With one process, one copy of the parameters and no gradient nothing is compared."""
    report = sparsejax.doctor(params={"w": np.ones(3, np.float32)})
    found = {one.about: one.status for one in report.findings}
    assert {about for about, status in found.items() if status == "OK"} == {
        "devices",
        "plan",
    }
    assert "one copy of each: there is nothing to compare" in of(report, "parameters")[0][1]
    assert "There is one process: nothing to compare" in of(report, "versions")[0][1]


@pytest.mark.parametrize("name", ["triton", "foo"])
def test_a_backend_that_is_named_and_cannot_run_is_wrong(monkeypatch, name):
    monkeypatch.setenv("SPARSEJAX_KERNELS", name)
    (wrong,) = sparsejax.doctor().wrong
    assert f"SPARSEJAX_KERNELS={name!r}: " in wrong.text
    monkeypatch.setenv("SPARSEJAX_KERNELS", "reference")
    assert sparsejax.doctor().wrong == ()


def test_an_optimizer_without_parameters_is_not_passed_over():
    report = sparsejax.doctor(optax.sgd(0.1), mesh=helpers.mesh_of(1))
    ((status, text),) = of(report, "plan")
    assert status == "note"
    assert "tx was not checked: no parameters were given. Give doctor params=" in text
    assert of(sparsejax.doctor(mesh=helpers.mesh_of(1)), "plan") == []


def test_what_is_no_optimizer_is_refused():
    match = "tx must be an optax .* got a Mesh: mesh= is a keyword"
    with pytest.raises(errors.ArgumentError, match=match):
        sparsejax.doctor(helpers.mesh_of(1))


def test_a_model_is_explained_and_dense_is_named_where_it_is_better():
    tx = optax.chain(sparsejax.zen_sync(), optax.adam(1e-3))
    sparse = sparsejax.doctor(tx, TABLE, network=NETWORK, density=0.001)
    ((status, text),) = of(sparse, "sync")
    assert status == "OK"
    assert "on 8 ranks" in text
    assert "keep sparsejax.zen_sync()" in text
    assert sparse.explanation.row("embedding").density == pytest.approx(0.001)
    assumed = sparsejax.doctor(tx, TABLE, network=NETWORK)
    assert "a rank touches 1% of the rows of embedding" in of(assumed, "sync")[0][1]
    dense = sparsejax.doctor(tx, TABLE, network=NETWORK, density=1.0, ranks=16)
    (status, text), (_, row) = of(dense, "sync")
    assert status == "note"
    assert "on 16 ranks" in text
    assert "use sparsejax.dense_sync(): nothing here is sparse" in text
    assert "embedding: dense is better here" in row
    assert dense.wrong == ()
    alone = sparsejax.doctor(tx, TABLE, mesh=helpers.mesh_of(1))
    (one,) = [one for one in alone.findings if one.about == "network"]
    assert "--gbit-per-s" in one.fix
    nothing = sparsejax.doctor(optax.sgd(0.1), TABLE, network=NETWORK)
    assert "no sparsejax synchronization" in nothing.wrong[0].text


def test_a_gradient_that_was_summed_is_wrong_and_a_local_one_is_not():
    def loss(params, x):
        return jnp.sum(params["w"] * x) + jnp.sum(params["b"])

    params, x = {"w": np.ones(3, np.float32), "b": np.ones(2, np.float32)}, np.ones((8, 3))
    given = {"params": params, "batch": x.astype(np.float32)}
    summed = sparsejax.doctor(grad_fn=jax.grad(loss), **given)
    assert [one.about for one in summed.wrong] == ["gradient"]
    assert "'b', 'w' is summed over 'data'" in summed.wrong[0].text
    assert "sparsejax.local(params)" in summed.wrong[0].fix

    def local(params, x):
        return jax.grad(loss)(sparsejax.local(params), x)

    report = sparsejax.doctor(grad_fn=local, **given)
    assert of(report, "gradient") == [("OK", "it is local: each rank has its own. ")]
    broken = sparsejax.doctor(grad_fn=lambda params, x: params["v"], **given)
    assert "cannot be traced: KeyError: 'v'" in broken.wrong[0].text
    ((status, text),) = of(sparsejax.doctor(), "gradient")
    assert status == "note"
    assert text.startswith("not checked: none was given")


def test_devices_with_other_bytes_of_a_parameter_are_wrong():
    mesh = helpers.mesh_of(8)
    copies = [np.full(4, number == 5, np.float32) for number in range(8)]
    apart = placed(mesh, jax.P(), copies)
    equal = helpers.placed(np.ones(4, np.float32), mesh, jax.P())
    tx = sparsejax.zen_sync()
    report = sparsejax.doctor(tx, {"w": apart, "b": equal}, mesh=mesh)
    assert [one.about for one in report.wrong] == ["parameters"]
    assert "hold other bytes of 'w'." in report.wrong[0].text
    assert sparsejax.doctor(tx, {"w": equal}, mesh=mesh).wrong == ()
    shapes = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
    assert of(sparsejax.doctor(tx, shapes, mesh=mesh), "parameters")[0][0] == "note"


def test_messages_are_timed_in_turn_and_their_rates_are_of_what_was_sent(monkeypatch):
    told = []
    found = links.measure(
        helpers.mesh_of(3), "data", told.append, rounds=2, longest=1 << 15
    )
    assert told == [
        "sending arrays of 131,072 bytes",
        *(f"timing messages, round {turn} of 2" for turn in (1, 2)),
    ]
    assert (found.long.bytes, found.short.bytes, found.ranks) == (1 << 17, 4, 3)
    assert links.ROUNDS == 7  # as docs/doctor.md says
    for times in (found.short, found.long, found.dense):
        assert 0 < times.least <= times.median <= times.most
    # 2/3 of the array twice, in four messages that wait, at that rate.
    expected = 8e-9 * 4 / 3 * found.long.bytes / found.gbit_per_s
    assert found.dense_forecast == pytest.approx(expected + 4e-6 * found.latency_us)
    slow = links.MessageTimes.of(1 << 17, [0.012, 0.010, 0.020])
    assert (slow.median, slow.spread) == (0.012, 2.0)
    # Two megabytes less two words' time: 1 MB in 10 ms each.
    word = links.MessageTimes.of(4, [0.001])
    assert links._bytes_per_second(1e6, 2, slow, word) == pytest.approx(1e8)


def said(**other):
    """What a process says of itself."""
    arguments = {"steps": "100", "rate": "0.1"}
    return {**facts.of_process(None, None), "arguments": arguments, **other}


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            {"versions": {**versions.versions(), "jax": "9.9"}},
            r"jax is .* on host a .*9\.9 on host b",
        ),
        (
            {"arguments": {"steps": "7", "rate": "0.1"}},
            "the argument steps is 100 on host a",
        ),
        ({"arguments": {"steps": "100"}}, "argument rate is 0.1 .* and nothing on host b"),
        (
            {"settings": {**versions.settings(), "jax_enable_x64": "True"}},
            "jax_enable_x64 is",
        ),
        ({"coordinator": ["127.0.1.1"], "network": "b"}, "stands for 127.0.1.1 on host b"),
    ],
)
def test_processes_that_differ_are_told_who_has_what(other, match):
    (found,) = check.disagreements(
        [said(host="a"), said(**{"host": "b", **other})], "node:1"
    )
    assert re.search(match, found), found


def test_names_that_only_their_own_host_reaches_are_found():
    there = {"own_address": ["10.0.0.2"], "network": "b", "host": "b"}
    here = {"own_address": ["127.0.1.1", "::1"], "host": "a"}
    (found,) = check._unreachable([said(**here), said(**there)])
    assert "host a (process 0) has 127.0.1.1, ::1 under its own name" in found


@pytest.mark.parametrize(
    ("address", "process", "kind", "match"),
    [
        ("node", 0, errors.ArgumentError, "written name:port, as node1:12345, got 'node'"),
        ("localhost:4", 0, errors.JobError, "on host .* no other host can reach"),
        ("127.0.0.1:4", 1, errors.JobError, r"\(process 1\), an address that no other"),
        ("nowhere.invalid:4", 1, errors.JobError, "does not know the coordinator's name"),
        ("[::1]:4", 0, errors.JobError, "stands for ::1"),
        ("node:4", 2, errors.ArgumentError, "process must be one of 0 to 1, .* got 2"),
    ],
)
def test_a_coordinator_that_cannot_be_is_refused_before_anybody_waits(
    address, process, kind, match
):
    with pytest.raises(kind, match=match):
        coordinator.check_coordinator(address, 2, process, timeout=0.1)


def here(*processes_of, ranks, timeout=20.0):
    """What each process is told that comes to this host's coordinator; "" is no error."""
    address = processes.free_address()

    def come(process):
        try:
            coordinator.check_coordinator(
                address, ranks, process, one_host=True, timeout=timeout
            )
        except errors.JobError as error:
            return str(error)
        return ""

    with concurrent.futures.ThreadPoolExecutor() as pool:
        told = list(pool.map(come, processes_of))
    # The port is free again for JAX.
    with socket.create_server(("127.0.0.1", int(address.partition(":")[2]))):
        return told


def test_processes_that_all_come_go_on():
    assert here(0, 1, 2, ranks=3) == ["", "", ""]
    assert here(0, ranks=1) == [""]


def test_those_that_come_are_told_who_does_not_and_who_came_twice():
    told = here(0, 2, ranks=4, timeout=0.5)
    assert told[0] == told[1]
    host = socket.gethostname()
    assert re.match(
        r"processes 1, 3 of 4 did not come within 0\.\d+ s; there were", told[0]
    )
    assert f"process 0 on host {host}, process 2 on host {host}." in told[0]
    for text in here(0, 1, 1, ranks=3, timeout=0.5):
        assert "process 1 was started more than once" in text
    for text in here(0, 0, 1, ranks=2, timeout=0.5):
        assert "process 0 was started more than once; there were process 0 on" in text
        assert f"process 0 on host {host} and {host}" in text
    (alone,) = here(1, ranks=2, timeout=0.3)
    assert re.search(r"could not reach .* in 0\.3 s: .*refused", alone)


def test_a_port_that_another_program_has_is_told_of(monkeypatch):
    monkeypatch.setattr(roll_call, "_TO_TELL", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.JobError, match=f"cannot listen at port {port} on host"):
            coordinator.check_coordinator(f"localhost:{port}", 2, 0, one_host=True)


SLURM = {
    "SLURM_JOB_ID": "4103",
    "SLURM_STEP_NODELIST": "node[07-09],other",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "20480.0;tcp://10.0.0.7,10.1.0.7:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        (SLURM, ("node07:61447", 3, 1)),
        (SLURM | {"JAX_COORDINATOR_PORT": "7"}, ("node07:7", 3, 1)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "a:8"}, ("a:8", 3, 1)),
        (SLURM | {"JAX_COORDINATOR_BIND_ADDRESS": "[::]:9"}, None),
        (SLURM | {"SLURM_NTASKS": "many"}, None),
        (OPEN_MPI_4, ("10.0.0.7:61445", 4, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, None),
        ({}, None),
    ],
)
def test_a_job_is_found_as_jax_finds_it(monkeypatch, variables, job):
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "JAX_COORDINATOR_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(facts, "addresses", lambda name: [])
    assert launchers.found() == job
    if job is None:
        assert coordinator.check_coordinator(timeout=0.1) is None
    else:
        name = re.escape(job[0].partition(":")[0])
        match = rf"\(process {job[2]}\) does not know the coordinator's name '{name}'"
        with pytest.raises(errors.JobError, match=match):
            coordinator.check_coordinator(timeout=0.1)


def test_no_job_is_found_where_jax_keeps_launchers_elsewhere(monkeypatch):
    for name, value in OPEN_MPI_4.items():
        monkeypatch.setenv(name, value)
    assert launchers.found() is not None
    monkeypatch.delattr(distributed, "clusters")
    assert launchers.found() is None


def test_a_job_is_named_whole_or_not_at_all():
    with pytest.raises(errors.ArgumentError, match="the address, processes and process of"):
        coordinator.check_coordinator("node:4", 2)


def test_numbers_that_launchers_give_are_told_with_the_hosts(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "7")
    host = f"{socket.gethostname()} (SLURM_PROCID=7)"
    for text in here(0, 1, 1, ranks=2, timeout=0.5):
        assert f"process 0 on host {host}, process 1 on host {host} and {host}. " in text
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    for text in here(0, 1, ranks=2, timeout=0.5):
        assert f"host {socket.gethostname()} (process 1) has JAX_PROCESS_ID=0: " in text
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    (alone,) = here(0, ranks=1, timeout=0.5)
    assert "(process 0) has JAX_PROCESS_ID=1: start it as that process" in alone


def test_a_number_that_the_environment_contradicts_is_told_of():
    there = {"host": "b", "launcher": {"JAX_PROCESS_ID": "0", "SLURM_PROCID": "1"}}
    (found,) = check.disagreements([said(host="a"), said(**there)], "node:1")
    assert found.startswith("host b (process 1) has JAX_PROCESS_ID=0: ")
    there["launcher"] = {"JAX_PROCESS_ID": "1", "SLURM_PROCID": "0"}
    assert not check.disagreements([said(host="a"), said(**there)], "node:1")


def test_a_host_whose_devices_cannot_be_used_is_named_on_all(monkeypatch):
    own = facts.devices()

    def devices():
        if store.place().process == 1:
            raise RuntimeError("no CUDA-capable device is detected.")
        return own

    monkeypatch.setattr(facts, "devices", devices)
    told = [said(host="a"), said(host="b")]
    compare = lambda: check.compare_devices(told, 20.0)
    match = "host b (process 1) cannot use its devices: RuntimeError: no CUDA-capable"
    for (found,), _ in jobs.run(monkeypatch, [compare, compare]):
        assert match in found


class Late:
    """A job's store, which process 1 reaches and process 2 does not."""

    def __init__(self):
        self.kept, self.waited = {}, []

    def key_value_set(self, key, text):
        self.kept |= {key: text, f"{key.rpartition('/')[0]}/1": '["b", "what it is", 7]'}

    def wait_at_barrier(self, name, milliseconds):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    def key_value_dir_get(self, folder):
        return [(k, v) for k, v in self.kept.items() if k.startswith(folder)]

    def blocking_key_value_get(self, key, milliseconds):
        self.waited.append(key)
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")


def test_process_0_lets_those_that_are_there_read_who_is_missing(monkeypatch):
    state, client = distributed.global_state, Late()
    for name, value in {"process_id": 0, "num_processes": 3, "client": client}.items():
        monkeypatch.setattr(state, name, value)
    monkeypatch.setattr(store, "_silent", [])
    with pytest.raises(errors.JobError, match="process 2 of 3 did not say what it is"):
        store.of_all("what it is", 3, 1.0)
    (waited,) = client.waited
    assert waited.endswith(" read/1")


def connected(host, port):
    """A connection as soon as somebody listens."""
    end = time.monotonic() + 10
    while isinstance(line := coordinator._connected(host, port), OSError):
        assert time.monotonic() < end, line
    return line


def test_a_process_may_be_stopped_and_started_again_while_others_are_missing():
    host, _, port = processes.free_address().partition(":")

    def come(process):
        line = connected(host, int(port))
        if process == "stopped":
            line.sendall(b'{"process": 1, "host": "b"}\n')
            return line.close()
        return roll_call.answer(line, process, "b", 20.0)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        called = pool.submit(roll_call.call, int(port), 3, "a", 20.0)
        come("stopped")
        told = [pool.submit(come, 2)]
        time.sleep(0.6)  # All numbers were said once, but process 1 is not there.
        told += [pool.submit(come, 1)]
        assert [one.result() for one in (called, *told)] == [None, None, None]


def test_a_connection_to_itself_is_none(monkeypatch):
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: itself)
    assert isinstance(coordinator._connected("localhost", 1), ConnectionRefusedError)


@pytest.mark.parametrize("said", [b'{"process": 1}\n', b"GET / HTTP/1.1\n"])
def test_a_stranger_at_the_port_is_nobody_of_the_job(said):
    host, _, port = processes.free_address().partition(":")

    def come():
        line = connected(host, int(port))
        with line:
            line.sendall(said)
            return line.makefile().readline()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        told = pool.submit(come)
        with pytest.raises(errors.JobError, match="process 1 of 2 did not come"):
            roll_call.call(int(port), 2, "here", 0.5)
    assert "did not come" in told.result()


def test_arguments_are_compared_as_texts_whatever_holds_them():
    as_mapping = {"b": "2", "a": "'x'"}
    assert facts.as_texts({"a": "x", "b": 2}) == as_mapping
    assert facts.as_texts(argparse.Namespace(a="x", b=2)) == as_mapping
    assert facts.as_texts(["--steps", 3]) == {"arguments": "--steps 3"}
    assert facts.as_texts(None) == {}
    # Each process has its own order of a set, and its own addresses.
    words = [f"word {number}" for number in range(9)]
    for names in (words, [*reversed(words)]):
        listed = "{" + ", ".join(map(repr, words)) + "}"
        assert facts.as_texts({"a": [set(names)]}) == {"a": f"[{listed}]"}
        assert facts.as_texts({"a": {name: frozenset(names) for name in "ba"}}) == {
            "a": f"{{'a': {listed}, 'b': {listed}}}"
        }
        assert facts.as_texts(set(names)) == {"arguments": " ".join(words)}
        place = store.Place(0, 2, frozenset(names))
        assert facts.as_texts({"a": place})["a"].endswith(f"coordinator={listed})")
    one, other = (facts.as_texts({"loss": object()}) for _ in range(2))
    assert one == other == {"loss": "<object object>"}


def test_a_job_of_one_process_has_nothing_to_compare():
    assert sparsejax.check_job(arguments={"steps": 3}) is None
    with pytest.raises(errors.ArgumentError, match="timeout must be above 0"):
        sparsejax.check_job(timeout=0)


def test_the_command_prints_findings_and_says_by_its_status_what_it_found(capsys):
    line = ["doctor", "--leaf", "table=50000x8", "--density", "0.001"]
    line += ["--gbit-per-s", "1", "--latency-us", "20"]
    assert command.main([*line, "--ranks", "4"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[-1] == "Nothing that was checked is wrong."
    assert {text[:5].strip() for text in lines[:-1]} == {"OK", "note"}
    # The columns are aligned.
    assert {text[7:17].strip() for text in lines[:-1]} == {
        *("versions", "devices", "kernels", "gradient", "parameters", "network"),
        *("plan", "sync"),
    }
    assert "comparing versions" in printed.err
    assert command.main([*line, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["wrong"] == 0
    assert report["explanation"]["ranks"] == 8
    assert {one["about"] for one in report["findings"]} >= {"devices", "sync"}


def summed():
    """A gradient function that sums, and its batch."""
    return jax.grad(lambda w, x: jnp.sum(w["w"] * x)), np.ones((8, 2), np.float32)


def model():
    return {"w": np.ones(2, np.float32)}


def test_the_command_ends_with_1_where_something_is_wrong_and_2_where_it_is_misused(capsys):
    line = ["doctor", "tests.advise.doctor.test_findings:model", "--gradient"]
    assert command.main([*line, "tests.advise.doctor.test_findings:summed"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG  gradient    'w' is summed over 'data'" in printed
    assert printed.endswith("1 thing is wrong.\n")
    for wrong, match in [
        (["no.such.module:x"], "No module named 'no'"),
        (["--gradient", "tests.advise.doctor.test_findings:summed"], "needs a model"),
        ([*line[1:], "tests.advise.doctor.test_findings:model"], "must name a pair"),
        (["--process", "0"], "--coordinator, --processes and --process together"),
        (["--gbit-per-s", "1"], "--latency-us belong together"),
    ]:
        assert command.main(["doctor", *wrong]) == 2
        assert match in capsys.readouterr().err
