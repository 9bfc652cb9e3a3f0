"""Kills a run at a chosen moment. Python imports this module by itself in every process that has its folder in
PYTHONPATH: the program under test is the documented command, unchanged.

RLSCALE_TEST_KILL is ``moment:count:seconds``: rank 0 sends SIGKILL to its process group (launcher, ranks, engines,
scorers) that many seconds after the count-th call of a function of `MOMENTS` has begun. Its parent is told by a file,
RLSCALE_TEST_KILLED.
"""

import importlib.machinery
import os
import signal
import sys
import threading
import time

MOMENTS = {
    "rollout": ("rlscale.rollout.rollout", "Rollout", "generate"),
    "scoring": ("rlscale.reward.pool", "RewardPool", "score"),
    "update": ("rlscale.train.engine", "Engine", "update"),
    "sync": ("rlscale.rollout.rollout", "Rollout", "sync"),
    "save": ("rlscale.checkpoint.store", "Store", "begin"),
    "publish": ("rlscale.checkpoint.store", "Store", "publish"),
}


class Finder:
    """Finds one module, and changes one of its methods when it has been loaded."""

    def __init__(self, moment, count, seconds):
        self.moment, self.count, self.seconds = moment, int(count), float(seconds)
        self.module, self.owner, self.method = MOMENTS[moment]

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            owner = getattr(module, self.owner)
            setattr(owner, self.method, self.counted(getattr(owner, self.method)))

        spec.loader.exec_module = exec_module
        return spec

    def counted(self, function):
        def wrapper(*args, **kwargs):
            self.count -= 1
            if self.count == 0:
                threading.Thread(target=self.kill, daemon=True).start()
            return function(*args, **kwargs)

        return wrapper

    def kill(self):
        time.sleep(self.seconds)
        with open(os.environ["RLSCALE_TEST_KILLED"], "w") as file:
            file.write(self.moment)
        os.killpg(0, signal.SIGKILL)


if os.environ.get("RLSCALE_TEST_KILL") and os.environ.get("RANK") == "0":
    sys.meta_path.insert(0, Finder(*os.environ["RLSCALE_TEST_KILL"].split(":")))
