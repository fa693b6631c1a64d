"""Jobs of several processes, each a thread, with a coordination service between them."""

import collections
import concurrent.futures
import threading
import time
import types

import jax

from sparsejax.jobs import store


class _Counters(threading.local):
    """The counters of the store, one dict for each thread."""

    def __init__(self):
        self.kept = {}

    def setdefault(self, key, value):
        return self.kept.setdefault(key, value)


class Service:
    """A fake of the coordination service of a job."""

    def __init__(self, processes):
        self.processes = processes
        self.kept = {}
        self.came = collections.Counter()
        self.failed = set()
        self.change = threading.Condition()

    def key_value_set(self, key, text):
        with self.change:
            self.kept[key] = text
            self.change.notify_all()

    def key_value_dir_get(self, folder):
        with self.change:
            return [(k, v) for k, v in self.kept.items() if k.startswith(folder)]

    def blocking_key_value_get(self, key, milliseconds):
        self._wait(lambda: key in self.kept, milliseconds)
        return self.kept[key]

    def wait_at_barrier(self, name, milliseconds, process_ids=None):
        wanted = self.processes if process_ids is None else len(process_ids)
        if name in self.failed:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        with self.change:
            self.came[name] += 1
            self.change.notify_all()
        try:
            self._wait(lambda: self.came[name] >= wanted, milliseconds)
        except jax.errors.JaxRuntimeError:
            self.failed.add(name)
            raise

    def _wait(self, is_there, milliseconds):
        end = time.monotonic() + milliseconds / 1e3
        with self.change:
            if not self.change.wait_for(is_there, max(0, end - time.monotonic())):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")


def run(monkeypatch, functions):
    """Runs functions concurrently, each as another process of one job to `store`.

    Returns for each function its result, or the exception that it raised.
    """
    here = threading.local()
    service = Service(len(functions))
    state = types.SimpleNamespace(client=service)
    fake = types.SimpleNamespace(state=lambda: state)
    place = lambda: store.Place(here.process, len(functions), "node:1")
    monkeypatch.setattr(store, "distributed", fake)
    monkeypatch.setattr(store, "place", place)
    monkeypatch.setattr(store, "_asked", _Counters())
    monkeypatch.setattr(store, "_silent", [])

    def call(process, function):
        here.process = process
        try:
            return function()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(call, range(len(functions)), functions))
