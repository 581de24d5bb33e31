"""Faults in a rank, in its disk access, its memory or what it does, for torture scripts and tests: with this folder
on PYTHONPATH, Python imports it at its start. FAULTS, a JSON list in the environment, names the faults; without it
nothing happens.

    {"do": "kill", "rank": 1, "on": ["write"], "path": "step-00000004.writing", "at": 3, "once": FILE}

do      kill: SIGKILL to this process. fail: OSError with `errno`. slow: sleep for `seconds`. wait: until the file
        `until` exists. flip: a bit of a parameter of this `shape`, after the optimizer's step number `at`: bit `bit` of
        its number `place`.
rank    the rank that has the fault; all of them if left out.
on      write (a file is opened for writing), read (likewise), list, mkdir, rename, remove, fsync; any if left out.
path    what the path must contain; for a rename, the new name.
at      the number of the first such event to have the fault, 1 if left out; times: how many have it, 1 if left out.
once    a file made when it strikes; if that exists already, from the process before a restart, it does not strike.

At SIGUSR1, wherever the main thread then is: {"do": "deadlock", "on": ["signal"]} waits for ever in Python, "leave"
ends the process with exit code 0, and "skip" makes the next call of "path", MODULE:FUNCTION, return its argument.
"""

import json
import os
import signal
import sys
import threading
import time

EVENTS = {
    "os.scandir": "list",
    "os.listdir": "list",
    "os.mkdir": "mkdir",
    "os.rename": "rename",
    "os.remove": "remove",
    "os.rmdir": "remove",
}


class Fault:
    def __init__(self, do, on=(), path="", at=1, times=1, once="", until="", errno=0, seconds=0.0, rank=None):
        self.do, self.on, self.path, self.at, self.times = do, on, path, at, times
        self.once, self.until, self.errno, self.seconds = once, until, errno, seconds
        self.seen = 0

    def meet(self, event, path):
        if (self.on and event not in self.on) or self.path not in path:
            return
        self.seen += 1
        if not self.at <= self.seen < self.at + self.times:
            return
        if self.once and self.seen == self.at:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                self.times = 0
                return
        if self.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.do == "fail":
            raise OSError(self.errno, os.strerror(self.errno), path)
        elif self.do == "slow":
            time.sleep(self.seconds)
        else:
            while not os.path.exists(self.until):
                time.sleep(0.02)


def flip_later(shape, place, bit, at, once, do, rank=None):
    steps = 0

    def after_step(optimizer, args, kwargs):
        nonlocal steps
        steps += 1
        if steps != at or os.path.exists(once):
            return
        there = [p for group in optimizer.param_groups for p in group["params"] if list(p.shape) == shape]
        there[0].data.view(-1).view(sys.modules["torch"].uint8)[place * there[0].element_size() + bit // 8] ^= (
            1 << bit % 8
        )
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))

    def wait_for_torch():
        while not hasattr(sys.modules.get("torch"), "compile"):  # among the last things that importing it defines
            time.sleep(0.01)
        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(after_step)

    threading.Thread(target=wait_for_torch, daemon=True).start()


def install(faults):
    inside = False  # what a fault itself does to the disk

    def meet(event, path):
        nonlocal inside
        if inside:
            return
        inside = True
        try:
            for fault in faults:
                fault.meet(event, os.fspath(path) if isinstance(path, (str, os.PathLike)) else "")
        finally:
            inside = False

    def audit(event, args):
        if event == "open":
            writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            meet("write" if writes else "read", args[0])
        elif event in EVENTS:
            meet(EVENTS[event], args[1] if event == "os.rename" else args[0])

    def fsync(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        meet("fsync", os.readlink(f"/proc/self/fd/{number}"))
        real_fsync(descriptor)

    real_fsync, os.fsync = os.fsync, fsync
    sys.addaudithook(audit)


def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def skip(path):
    module, _, name = path.partition(":")
    home = sys.modules[module]
    function = getattr(home, name)

    def skipped(first, *args, **kwargs):
        setattr(home, name, function)
        return first

    setattr(home, name, skipped)


def at_signal(do, path="", rank=None, on=()):
    acts = {"deadlock": deadlock, "leave": lambda: os._exit(0), "skip": lambda: skip(path)}
    signal.signal(signal.SIGUSR1, lambda *_: acts[do]())


if "FAULTS" in os.environ and "RANK" in os.environ:  # torchrun itself has no rank
    wanted = [
        fault for fault in json.loads(os.environ["FAULTS"]) if fault.get("rank") in (None, int(os.environ["RANK"]))
    ]
    for fault in wanted:
        if fault["do"] == "flip":
            flip_later(**fault)
        elif "signal" in fault.get("on", ()):
            at_signal(**fault)
    others = [fault for fault in wanted if fault["do"] != "flip" and "signal" not in fault.get("on", ())]
    install([Fault(**fault) for fault in others])
