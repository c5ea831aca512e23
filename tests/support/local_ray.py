"""A stand-in for Ray that runs tasks in this process, some of which die: for fuzzing."""

import copy
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import ray.exceptions


class _Failed(ray.exceptions.RayTaskError):
    def __init__(self, cause):
        self.cause = cause  # all that is looked at


class LocalRay:
    """The parts of `ray` that segcal uses.

    Args:
        dies: numbers of tasks whose worker dies.
    """

    exceptions = ray.exceptions

    def __init__(self, dies=()):
        self.dies, self.count = set(dies), 0

    def is_initialized(self):
        return False

    def init(self, address, **_):
        """Take any address of the form that Ray does not wait for in vain."""
        assert address in ("auto", "local") or address.rpartition(":")[2].isdecimal(), address

    def shutdown(self):
        pass

    def cluster_resources(self):
        return {"CPU": 2.0}

    def put(self, value):
        return value

    def remote(self, **_):
        def made(function):
            def submit(*arguments):
                number, self.count = self.count, self.count + 1
                return number, function, copy.deepcopy(arguments)

            return SimpleNamespace(remote=submit)

        return made

    def wait(self, handles):
        return handles[:1], handles[1:]

    def get(self, handle):
        number, function, arguments = handle
        if number in self.dies:
            raise ray.exceptions.WorkerCrashedError
        try:
            return function(*arguments)
        except Exception as error:
            raise _Failed(error) from None

    def cancel(self, handle):
        pass


@contextmanager
def installed(dies=()):
    """`import ray` gives the stand-in, and every address of a host answers."""
    import socket

    usual, answered = sys.modules["ray"], socket.create_connection
    sys.modules["ray"] = LocalRay(dies)
    socket.create_connection = lambda *_, **__: SimpleNamespace(close=lambda: None)
    try:
        yield
    finally:
        sys.modules["ray"], socket.create_connection = usual, answered
