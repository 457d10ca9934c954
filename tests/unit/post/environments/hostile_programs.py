"""Programs that try to leave the sandbox, to outlive it, or to be paid without an answer.

Each prints the secret if it has reached what it should not. HOST stands for facts of the host: the
path of a file, a process's number, a port where a server listens. The text beside a program is how
it must end: a regular expression of its reason.
"""

C = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"


def calling(number: int, *args: object) -> str:
    """A system call by its number on x86_64; its error is raised."""
    given = ", ".join(map(str, (number, *args)))
    return (
        f"{C}import os\n"
        f"if libc.syscall({given}) < 0: raise OSError(ctypes.get_errno(), 'refused')\n"
        f"print('reached')"
    )


NO_FILE = "FileNotFoundError"
READ_ONLY = "OSError: .*Read-only file system"
NO_PROCESS = "BlockingIOError: .*Resource temporarily unavailable"
# Outside of a PID namespace these would reach the machine that runs the tests.
FIRST = "import os\nassert os.getpid() == 1\n"
REFUSED = "PermissionError: .*(not permitted|refused)|PermissionError: .*Permission denied"

# name -> (program, reason)
QUICK = {
    "fork bomb": (f"{FIRST}while True: os.fork()", NO_PROCESS),
    "network": (
        "import socket; socket.create_connection(('127.0.0.1', PORT)).sendall(b'x')",
        REFUSED,
    ),
    "read a file": ("print(open('HOST').read())", NO_FILE),
    "memory": ("x = bytearray(10**11)", "memory limit"),
}
OTHERS = {
    "bomb of shells": (
        f"{FIRST}import subprocess\n"
        "subprocess.run(['/usr/bin/bash', '-c', 'f() { f | f & }; f; sleep 9'])",
        NO_PROCESS,
    ),
    "threads": (
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(1,)).start()",
        "RuntimeError: can't start new thread|(memory|thread) limit",
    ),
    "memory of children": (
        "import os, time\nfor _ in range(12): os.fork() or [bytearray(10**8), time.sleep(9)]\n"
        "time.sleep(9)",
        NO_PROCESS,
    ),
    "shared memory": (
        "import mmap\nall = [mmap.mmap(-1, 10**8) for _ in range(12)]\n"
        "for m in all: m.write(b'x' * 10**8)",
        "memory limit|OSError: .*Cannot allocate memory",
    ),
    "memory files": ("import os; os.memfd_create('x'); print('reached')", REFUSED),
    "memory segments": (calling(29, 0, 10**9, 0o1600), REFUSED),
    "message queues": (calling(68, 0, 0o1600), REFUSED),
    "power": ("x = 10 ** 10 ** 10", "time limit|memory limit"),
    "unpacked zeros": (
        "import zlib\nc = zlib.compressobj(9); one = c.compress(bytes(10**7)) * 100\n"
        "x = [bytes(10**7) for _ in range(1000)]",
        "memory limit",
    ),
    "endless loop": ("while True: pass", "time limit"),
    "sleep": ("import time; time.sleep(1000)", "time limit"),
    "stopped": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "wrong output|time"),
    "closed output": (
        "import os, time\nfor n in range(64):\n    try: os.close(n)\n    except OSError: pass\n"
        "time.sleep(1000)",
        "time limit",
    ),
    "deaf to signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "time limit",
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(1000)\n    os._exit(0)\ntime.sleep(0.1)",
        NO_PROCESS,
    ),
    "flood of output": ("while True: print('x' * 10**5)", "output limit"),
    "flood of errors": ("import os\nwhile True: os.write(2, b'x' * 10**5)", "output limit"),
    "write a file": ("open('HOST', 'w').write('mine')", NO_FILE),
    "accounts": ("print(open('/etc/passwd').read())", NO_FILE),
    "write in usr": ("open('/usr/lib/mine', 'w')", READ_ONLY),
    "change Python": ("import json; open(json.__file__, 'w')", READ_ONLY),
    "fill the root": ("open('/x', 'wb').write(bytes(10**9))", READ_ONLY),
    "change itself": ("open('/program.py', 'w')", READ_ONLY),
    "symlink": ("import os; os.symlink('HOST', '/link'); print(open('/link').read())", READ_ONLY),
    "device": ("import os; os.mknod('/disk', 0o60666, os.makedev(8, 0))", f"{READ_ONLY}|{REFUSED}"),
    "proc": ("print(open('/proc/1/environ').read())", NO_FILE),
    "root of a process": ("import os; print(os.listdir('/proc/1/root'))", NO_FILE),
    "network by a program": (
        "import subprocess; print(subprocess.run(['/usr/bin/bash', '-c', "
        "'echo x > /dev/tcp/127.0.0.1/PORT && echo reached'], capture_output=True))",
        NO_PROCESS,
    ),
    "host's sockets": (calling(41, 40, 1, 0), REFUSED),  # vsock has no namespace
    "kill all": (f"{FIRST}os.kill(-1, 9); os.kill(PID, 9)", "ProcessLookupError"),
    "kill the first": (f"{FIRST}os.kill(1, 9); os.kill(os.getppid(), 15)", "wrong output|SIG"),
    "kill the group": (f"{FIRST}os.killpg(0, 9)", "wrong output|SIGKILL"),
    "trace": (calling(101, 16, 1, 0, 0), REFUSED),
    "memory of others": (calling(310, 1, 0, 0, 0, 0, 0), REFUSED),
    "namespace of its own": (calling(272, 0x10000000), REFUSED),
    "namespace by clone": (calling(56, 0x10000011, 0, 0, 0, 0), REFUSED),
    "mount": (
        f"{C}import os\nif libc.mount(b'x', b'/usr', b'tmpfs', 0, 0) == 0: print('reached')\n"
        "else: raise OSError(ctypes.get_errno(), 'refused')",
        REFUSED,
    ),
    "chroot": ("import os; os.chroot('/usr')", REFUSED),
    "io_uring": (calling(425, 8, 0), REFUSED),
    "keys": (calling(250, 0, -3, 0), REFUSED),
    "bpf": (calling(321, 0, 0, 0), REFUSED),
    "other numbers": (calling(0x40000000 + 39), "SIGSYS"),
    "become root": ("import os; os.setuid(0)", "OSError: .*Invalid argument"),
    "su": ("import subprocess; print(subprocess.run(['/usr/bin/su', '-c', 'id']))", NO_PROCESS),
    "spawn": ("import os; print(os.posix_spawn('/usr/bin/id', ['id'], {}))", NO_PROCESS),
    "many threads": (
        "import threading, time\nthreading.stack_size(2**15)\n"
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()",
        "RuntimeError: can't start new thread|(memory|thread) limit",
    ),
    "clock": ("import time; time.clock_settime(0, 0)", REFUSED),
    "raise limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "ValueError|PermissionError",
    ),
    "crash": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [*map(f, [x])]\nf(1)",
        "SIGSEGV|memory limit|RecursionError",
    ),
    "variables": ("import os; print(dict(os.environ))", "wrong output"),
    "open files": (
        "import os\nfor n in range(3, 64):\n    try: print(os.read(n, 10**6))\n"
        "    except OSError: pass",
        "wrong output",
    ),
    "look for the answer": (
        "import gc, sys\nprint(open('/given.json').read(), sys.orig_argv)\n"
        "print([o for o in gc.get_objects() if isinstance(o, (list, dict))])",
        "wrong output|output limit",
    ),
    "nothing": ("", "wrong output"),
    "no program": ("I cannot do this.", "SyntaxError"),
    "zeros": ("\0", "SyntaxError"),
}

# Answers to "assert add(1, 2) == 3", which is evaluated beside the program.
CHEATS = {
    "early exit": ("import os; os._exit(0)", "ended early"),
    "quiet exit": ("raise SystemExit(0)", "ended early"),
    "forged line": ("print('[true, \"3\"]', flush=True)", "NameError"),
    "always equal": (
        "class Any:\n    def __eq__(self, other): return True\n"
        "    def __repr__(self): return 'Any()'\ndef add(a, b): return Any()",
        "wrong value",
    ),
    "deep value": ("def add(a, b):\n    print('x')\n    return '(' * 10**5", "wrong value"),
    "hostile repr": (
        "class Deep:\n    def __repr__(self): return '-' * 10**5 + '3'\n"
        "def add(a, b): return Deep()",
        "wrong value",
    ),
    "changed builtins": (
        "import builtins, json\nbuiltins.eval = lambda *_: None\njson.dumps = lambda *_: '[true]'\n"
        "def add(a, b): return 0",
        "wrong",
    ),
    "endless call": ("def add(a, b):\n    while True: pass", "time limit"),
    "error": ("def add(a, b): return a + c", "NameError: name 'c' is not defined"),
}
