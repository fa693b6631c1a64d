"""Processes that need not import JAX: forks of one that has, which has run no program.

    python forks.py serve SOCKET
    python forks.py stand-in SOCKET MODULE [ARGUMENT ...]

The first imports the library, and forks for each of the second, which passes on its
folder, its environment, its arguments and its files. The second waits, and ends as the fork
does; where it is killed, so is the fork. So a process that is started like any other costs
what it does, and not the two seconds of importing.

Strings have the same hashes in all forks. Tests whose processes compile the same programs
start them anew.
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
    """Forks until nobody wants it any more; returns in a fork, which runs what that is."""
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
    """What a stand-in wants to be run, and its files."""
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
    # A shell that runs the tests in the background has all of them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = arguments[1:]
    return arguments[0]


def stand_in(path, *arguments):
    """Has a fork run a module, and ends as it does."""
    text = json.dumps([os.getcwd(), dict(os.environ), arguments]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        files = array.array("i", FILES).tobytes()
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        connection.sendmsg([len(text).to_bytes(4, "little")], control)
        connection.sendall(text)
        for file in FILES:  # whoever reads them waits for the fork alone
            os.close(file)
        status = int(connection.recv(16))
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # of SIGKILL there is no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        runpy.run_module(serve(sys.argv[2]), run_name="__main__", alter_sys=True)
    else:
        stand_in(*sys.argv[2:])
