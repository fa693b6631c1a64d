"""A fork server: processes that need not import JAX, because their parent has.

    python forks.py serve SOCKET
    python forks.py stand-in SOCKET MODULE [ARGUMENT ...]

The server imports the library, runs no JAX program, and forks for each stand-in. A stand-in
passes its folder, environment, arguments and files to its fork, waits, and exits with the
fork's status; if it is killed, so is the fork. So a process that is started in the usual
way does not take the two seconds of importing.

Strings have the same hashes in all forks. Tests whose processes compile the same programs
start new processes instead.
"""

import array
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys


LOADED = "jax", "jax.numpy", "optax", "sparsejax", "sparsejax.advise"
FILES = 0, 1, 2


def serve(path):
    """Serves forks until stdin is closed; returns the module to run in each fork."""
    for name in LOADED:
        importlib.import_module(name)
    forks = {}  # by connection
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            waits = 0.01 if forks else None
            ready, *_ = select.select([sys.stdin, listener, *forks], [], [], waits)
            if sys.stdin in ready:  # its other end is closed
                for fork in forks.values():
                    os.kill(fork, signal.SIGKILL)
                sys.exit()
            if listener in ready:
                connection, _ = listener.accept()
                wanted, files = received(connection)
                fork = os.fork()
                if fork == 0:
                    for other in (connection, *forks):
                        other.close()
                    return become(*wanted, files)
                forks[connection] = fork
                for file in files:
                    os.close(file)
            for connection, fork in [*forks.items()]:
                if connection in ready:  # its stand-in was killed
                    os.kill(fork, signal.SIGKILL)
                    os.waitpid(fork, 0)
                else:
                    ended, status = os.waitpid(fork, os.WNOHANG)
                    if not ended:
                        continue
                    with contextlib.suppress(BrokenPipeError):
                        connection.sendall(str(status).encode())
                connection.close()
                del forks[connection]


def received(connection):
    """Receives a stand-in's folder, environment and arguments, and its files."""
    size = array.array("i").itemsize * len(FILES)
    text, control, *_ = connection.recvmsg(4, socket.CMSG_SPACE(size))
    files = array.array("i")
    files.frombytes(control[0][2][:size])
    length, text = int.from_bytes(text, "little"), b""
    while len(text) < length:
        text += connection.recv(length - len(text))
    return json.loads(text), files.tolist()


def become(folder, environment, arguments, files):
    """Takes a stand-in's folder, environment and files; returns the module to run."""
    os.chdir(folder)
    for file, own in zip(files, FILES, strict=True):
        os.dup2(file, own)
        os.close(file)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    # A shell that runs the tests in the background makes all processes ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = arguments[1:]
    return arguments[0]


def stand_in(path, *arguments):
    """Makes a fork run a module, and exits with its status or by its signal."""
    text = json.dumps([os.getcwd(), dict(os.environ), arguments]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        files = array.array("i", FILES).tobytes()
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        connection.sendmsg([len(text).to_bytes(4, "little")], control)
        connection.sendall(text)
        for file in FILES:  # readers then wait for the fork only
            os.close(file)
        status = int(connection.recv(16))
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        runpy.run_module(serve(sys.argv[2]), run_name="__main__", alter_sys=True)
    else:
        stand_in(*sys.argv[2:])
