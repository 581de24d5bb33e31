"""Faults within a rank: in its disk access, its numbers or its calls. For scripts.torture and tests.

With this folder on PYTHONPATH, Python imports the file at its start. FAULTS in the environment is a JSON list of them:

    {"do": "kill", "rank": 1, "on": ["write"], "path": "step-00000004.writing", "at": 3, "once": FILE}

"rank" is the rank that has the fault; all have it if left out. "once" is a file that is made when the fault strikes; if
it exists already, from the process before a restart, the fault does not strike. Other settings are those of `Fault`, of
`at_signal` with "on": ["signal"], and of `flip` and `Nan` with "do": "flip" and "nan".
"""

import functools
import itertools
import json
import os
import signal
import sys
import threading
import time

EVENTS = ("os.scandir", "os.listdir", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def strikes(once):
    """Create the file `once` and return True; return False if it exists, because an earlier process has made it."""
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# ---- of disk access


class Fault:
    """A fault of disk access: an error, a delay or a kill at a chosen disk event.

    do      kill: SIGKILL to this process. fail: OSError with `errno`. slow: sleep for `seconds`. wait: until the file
            `until` exists.
    on      write or read (a file is opened for it), scandir, listdir, mkdir, rename, remove, rmdir, fsync; any if left
            out.
    path    what the path must contain; for a rename, the new name.
    at      number of the first such event to have the fault, 1 if left out; times: how many have it, 1 if left out.
    """

    on, path, at, times, once, until, seen = (), "", 1, 1, "", "", 0

    def __init__(self, **fault):
        vars(self).update(fault)

    def meet(self, event, path):
        """Kill this process, raise an OSError, sleep or wait for a file if the fault is set for this disk event.

        `event` is its kind, such as "write", and `path` the file or folder. Counts the events that fit.
        """
        if (self.on and event not in self.on) or self.path not in path:
            return
        self.seen += 1
        if self.seen == self.at and self.once and not strikes(self.once):
            self.times = 0
        if not self.at <= self.seen < self.at + self.times:
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


def install(faults):
    """Make these `Fault`s apply to all later file operations of this process, by an audit hook, for good."""
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
            meet(event[3:], args[1] if event == "os.rename" else args[0])

    def fsync(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        meet("fsync", os.readlink(f"/proc/self/fd/{number}"))
        real_fsync(descriptor)

    real_fsync, os.fsync = os.fsync, fsync
    sys.addaudithook(audit)


# ---- at a signal


def at_signal(do, path="", seconds=0.0, **_):
    """Set what this process does at SIGUSR1.

    Args:
        do: "leave": end with exit code 0; "deadlock": wait for ever; "skip": make the next call of a function return
            its first argument and do nothing; "barrier": make it wait for all ranks first; "slow": make all later calls
            take longer.
        path: the function that the last three change, MODULE:FUNCTION or MODULE:CLASS.METHOD, imported by then.
        seconds: delay of each call of the function, for "slow".
    """

    def act(*_):
        if do == "leave":
            os._exit(0)
        elif do == "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        module, _, name = path.partition(":")
        *owners, name = name.split(".")
        home = functools.reduce(getattr, owners, sys.modules[module])
        function = getattr(home, name)

        def skipped(first, *args, **kwargs):
            setattr(home, name, function)
            return first

        def with_barrier(*args, **kwargs):
            setattr(home, name, function)
            sys.modules["torch.distributed"].barrier()
            return function(*args, **kwargs)

        def slowly(*args, **kwargs):
            time.sleep(seconds)
            return function(*args, **kwargs)

        setattr(home, name, {"skip": skipped, "barrier": with_barrier, "slow": slowly}[do])

    signal.signal(signal.SIGUSR1, act)


# ---- of numbers, once torch is there


def after_steps(do):
    """Register a hook that calls do(optimizer, number from 1 on) after each optimizer step. Needs torch imported."""
    made = itertools.count(1)
    hook = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook
    hook(lambda optimizer, *_: do(optimizer, next(made)))


def flip(shape, place, bit, at, once, of="", **_):
    """Register a hook that flips one bit of a parameter or moment after an optimizer step. Needs torch imported.

    Args:
        shape: the parameter's, as a list: of the first one with it in the last of the optimizer's groups that has one.
        place: index of the number in the flattened parameter.
        bit: index of the bit in the number.
        at: number of the optimizer step, from 1 on.
        once: file that is made when it strikes; if it exists, nothing is flipped.
        of: name of the optimizer's moment; "" for the parameter itself.
    """

    def after(optimizer, made):
        if made != at or not strikes(once):
            return
        groups = reversed(optimizer.param_groups)
        p = next(p for group in groups for p in group["params"] if list(p.shape) == shape)
        numbers = (optimizer.state[p][of] if of else p).data.view(-1)
        byte = place * numbers.element_size() + bit // 8
        numbers.view(sys.modules["torch"].uint8)[byte] ^= 1 << bit % 8

    after_steps(after)


class Nan:
    """The fault that makes a number of a module's output NaN, or of its parameter's gradient, even if `once` exists.

    It is number `place` of the module named `module`, in the step after `at` optimizer steps, in the microbatch number
    `microbatch` of `of`, each time it is computed (once, then once more in a repeated step); with `parameter`, of the
    gradient of that parameter of the module.
    """

    def __init__(self, module, place, at, microbatch, of, once, parameter="", **_):
        self.module, self.place, self.parameter, self.once = module, place, parameter, once
        self.seen, self.struck = 0, {microbatch, of + microbatch}
        """Number of computations so far, and the indices of the computations that get the NaN: that of the microbatch,
        and the same one when the step is repeated."""
        self.target, self.hooked, self.due = None, False, at == 0
        after_steps(lambda optimizer, made: setattr(self, "due", made == at))
        modules = sys.modules["torch.nn.modules.module"]
        modules.register_module_forward_pre_hook(self.enter)
        modules.register_module_forward_hook(self.leave)

    def enter(self, module, args):
        if self.target is None:
            self.target = dict(module.named_modules()).get(self.module)

    def leave(self, module, args, out):
        if module is self.target and not self.parameter:
            self.meet(out)
        elif module is self.target and not self.hooked:
            self.hooked = True  # before any other hook, which then sees what this one returns
            getattr(module, self.parameter).register_hook(lambda grad: self.meet(grad.clone()))

    def meet(self, tensor):
        if self.due:
            if self.seen in self.struck:
                strikes(self.once)
                numbers = getattr(tensor, "_local_tensor", tensor).data  # this rank's part, unknown to autograd
                place = sys.modules["torch"].arange(numbers.numel()).view(numbers.shape) == self.place % numbers.numel()
                numbers.masked_fill_(place, float("nan"))  # it may not be contiguous
            self.seen += 1
        return tensor


WITH_TORCH = {"flip": flip, "nan": Nan}


def later(do, **fault):
    """Wait until torch is imported, then set up the fault `do`, a key of WITH_TORCH; runs in a thread of its own."""
    while not hasattr(sys.modules.get("torch"), "compile"):  # among the last things that importing it defines
        time.sleep(0.01)
    WITH_TORCH[do](**fault)


if "FAULTS" in os.environ and "RANK" in os.environ:  # torchrun itself has no rank
    of_disk = []
    for fault in json.loads(os.environ["FAULTS"]):
        if fault.get("rank") not in (None, int(os.environ["RANK"])):
            continue
        if fault["do"] in WITH_TORCH:
            threading.Thread(target=later, kwargs=fault, daemon=True).start()
        elif "signal" in fault.get("on", ()):
            at_signal(**fault)
        else:
            of_disk.append(Fault(**fault))
    if of_disk:
        install(of_disk)
