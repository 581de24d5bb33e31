"""Faults in a rank, in its disk access, its memory, its messages, its numbers or what it does, for torture scripts and
tests: with this folder on PYTHONPATH, Python imports it at its start. FAULTS, a JSON list in the environment, names the
faults; without it nothing happens.

    {"do": "kill", "rank": 1, "on": ["write"], "path": "step-00000004.writing", "at": 3, "once": FILE}

do      kill: SIGKILL to this process. fail: OSError with `errno`. slow: sleep for `seconds`. wait: until the file
        `until` exists.
rank    the rank that has the fault; all of them if left out.
on      write (a file is opened for writing), read (likewise), list, mkdir, rename, remove, fsync; any if left out.
path    what the path must contain; for a rename, the new name.
at      the number of the first such event to have the fault, 1 if left out; times: how many have it, 1 if left out.
once    a file made when it strikes; if that exists already, from the process before a restart, it does not strike.

At SIGUSR1, wherever the main thread then is: {"do": "deadlock", "on": ["signal"]} waits for ever in Python, "leave"
ends the process with exit code 0, and "skip" makes the next call of "path", MODULE:FUNCTION, return its argument.

Others need torch, and have `rank` and `once` as above:

flip    a bit of a parameter of this `shape`, the first in the last of the optimizer's groups that has one, or of its
        moment `of`, after the optimizer's step number `at`: bit `bit` of its number `place`.
delay   every message to the ranks `peers`, or in a group with them, waits up to `seconds` before it leaves, drawn from
        `seed`; number `at` waits for `stall` seconds.
nan     number `place` of what the module named `module` returns becomes NaN in the step after `at` optimizer's steps,
        in the microbatch number `microbatch` of `of`, each time it is computed (once, then once more in a repeated
        step); with `parameter`, of the gradient of that parameter of the module.
"""

import json
import os
import random
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


def strikes(once):
    """Whether this is the first process to have the fault."""
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def local(tensor):
    """This rank's part, in memory that can be changed without autograd's knowledge."""
    return getattr(tensor, "_local_tensor", tensor).data


class Steps:
    """Of the optimizer."""

    def __init__(self):
        self.made = 0
        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(self.count)

    def count(self, optimizer, args, kwargs):
        self.made += 1
        self.after(optimizer)

    def after(self, optimizer):
        pass


class Flip(Steps):
    def __init__(self, shape, place, bit, at, once, of="", **_):
        self.shape, self.place, self.bit, self.at, self.once, self.of = shape, place, bit, at, once, of
        super().__init__()

    def after(self, optimizer):
        if self.made != self.at or not strikes(self.once):
            return
        groups = reversed(optimizer.param_groups)
        p = next(p for group in groups for p in group["params"] if list(p.shape) == self.shape)
        numbers = (optimizer.state[p][self.of] if self.of else p).data.view(-1)
        byte = self.place * numbers.element_size() + self.bit // 8
        numbers.view(sys.modules["torch"].uint8)[byte] ^= 1 << self.bit % 8


class Nan(Steps):
    def __init__(self, module, place, at, microbatch, of, once, parameter="", **_):
        self.module, self.place, self.at, self.parameter, self.once = module, place, at, parameter, once
        self.struck = {microbatch, of + microbatch}
        """Of the times that the module's stage runs, or the gradient arrives, once it is that step."""
        self.depth, self.runs, self.gradients, self.hooked = 0, 0, 0, False
        super().__init__()
        modules = sys.modules["torch.nn.modules.module"]
        modules.register_module_forward_pre_hook(self.enter)
        modules.register_module_forward_hook(self.leave, always_call=True)

    def now(self, count):
        return self.made == self.at and count in self.struck

    def enter(self, module, args):
        self.depth += 1
        if self.depth == 1 and (target := dict(module.named_modules()).get(self.module)) is not None:
            self.target, self.inside = target, True
        elif self.depth == 1:
            self.inside = False

    def leave(self, module, args, out):
        self.depth -= 1
        if not self.inside:
            return
        if module is self.target and self.parameter and not self.hooked:
            self.hooked = True  # before any other hook, which then sees what this one returns
            getattr(module, self.parameter).register_hook(self.gradient)
        elif module is self.target and not self.parameter and self.now(self.runs):
            self.spoil(out)
        if self.depth == 0 and self.made == self.at:
            self.runs += 1

    def gradient(self, grad):
        spoilt = None
        if self.now(self.gradients):
            spoilt = grad.clone()
            self.spoil(spoilt)
        self.gradients += self.made == self.at
        return spoilt

    def spoil(self, tensor):
        strikes(self.once)
        numbers = local(tensor)
        place = sys.modules["torch"].arange(numbers.numel()).view(numbers.shape) == self.place % numbers.numel()
        numbers.masked_fill_(place, float("nan"))  # it may not be contiguous


class Delay:
    SENDS = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"
    POINT_TO_POINT = "isend", "send"

    def __init__(self, peers, seconds, at, stall, seed, once, **_):
        self.peers, self.seconds, self.at, self.stall, self.once = set(peers), seconds, at, stall, once
        self.draw, self.seen = random.Random(seed), 0
        torch, dist = sys.modules["torch"], sys.modules["torch.distributed"]
        self.c10d = sys.modules["torch.distributed.distributed_c10d"]
        functional = torch.ops._c10d_functional
        for name in self.SENDS:
            setattr(functional, name, self.slowly(getattr(functional, name), lambda args, kwargs: args[-1]))
        for name in self.POINT_TO_POINT:
            slow = self.slowly(getattr(dist, name), self.to)
            setattr(dist, name, slow)
            setattr(self.c10d, name, slow)

    def to(self, args, kwargs):
        """The rank that gets it."""
        if kwargs.get("group_dst") is not None:
            return [self.c10d.get_global_rank(kwargs["group"], kwargs["group_dst"])]
        return [args[1] if len(args) > 1 else kwargs["dst"]]

    def slowly(self, function, where):
        def slow(*args, **kwargs):
            to = where(args, kwargs)
            if isinstance(to, str):
                to = self.c10d.get_process_group_ranks(self.c10d._resolve_process_group(to))
            if not self.peers.isdisjoint(to):
                self.seen += 1
                if self.seen == self.at:
                    strikes(self.once)
                time.sleep(self.stall if self.seen == self.at else self.draw.uniform(0, self.seconds))
            return function(*args, **kwargs)

        return slow


WITH_TORCH = {"flip": Flip, "nan": Nan, "delay": Delay}


def later(faults):
    """Once torch is there."""
    while not hasattr(sys.modules.get("torch"), "compile"):  # among the last things that importing it defines
        time.sleep(0.01)
    for fault in faults:
        WITH_TORCH[fault["do"]](**fault)


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
    with_torch = [fault for fault in wanted if fault["do"] in WITH_TORCH]
    at_signals = [fault for fault in wanted if "signal" in fault.get("on", ())]
    for fault in at_signals:
        at_signal(**fault)
    if with_torch:
        threading.Thread(target=later, args=(with_torch,), daemon=True).start()
    if others := [fault for fault in wanted if fault not in with_torch and fault not in at_signals]:
        install([Fault(**fault) for fault in others])
