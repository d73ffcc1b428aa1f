"""Put on PYTHONPATH, this ends or holds a process at one exact place, named by EVALKIT_FAULT.

EVALKIT_FAULT is JSON: {"role": "worker" or "command", "module": "evalkit.state.points", "function": "settle",
"when": "before" or "after", "action": "kill", "stop", "hold" or a number, "skip": N, "note": PATH}. The place is the
function as the module names it once it is imported; a dot in the name reaches into a class. `kill` is SIGKILL to
oneself, `stop` is SIGSTOP, `hold` waits until the file PATH.go (or "go") is there, a number is an errno to raise, or 0
for none. PATH is made first, so that a test can wait for it.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time

FAULT = json.loads(os.environ.get("EVALKIT_FAULT", "null"))


def strike():
    with open(FAULT["note"], "w") as note:  # noqa: PTH123
        note.write(str(os.getpid()))
    if FAULT["action"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT["action"] == "bug":
        raise ZeroDivisionError("a bug")
    if FAULT["action"] == 0:
        return
    if isinstance(FAULT["action"], int):
        raise OSError(FAULT["action"], os.strerror(FAULT["action"]), "a file")
    if FAULT["action"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    deadline = time.monotonic() + 60
    while not os.path.exists(FAULT.get("go") or FAULT["note"] + ".go") and time.monotonic() < deadline:
        time.sleep(0.01)


def wrap(function):
    left = [FAULT.get("skip", 0)]

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        hit = left[0] == 0
        left[0] -= 1
        if hit and FAULT["when"] == "before":
            strike()
        result = function(*args, **kwargs)
        if hit and FAULT["when"] == "after":
            strike()
        return result

    return wrapped


def patch(module):
    holder = module
    *path, name = FAULT["function"].split(".")
    for part in path:
        holder = getattr(holder, part)
    setattr(holder, name, wrap(getattr(holder, name)))


class Patching(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != FAULT["module"]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), patch(module))[0]
        return spec


role = "worker" if any("evalkit.verbs.worker" in word for word in sys.orig_argv) else "command"
if FAULT and FAULT["role"] == role:
    sys.meta_path.insert(0, Patching())
