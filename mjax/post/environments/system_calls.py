"""A seccomp filter: system calls that a program in the sandbox has no need of.

Namespaces leave open what the kernel has no namespace for (vsock, keys), and memory that no limit
of a process counts (shared segments, memory files, message queues). Each call here fails with
EPERM. So does a namespace of its own, in which a program would have capabilities again. A call by
another architecture's numbers ends the process. Numbers are those of Linux's asm/unistd.h, and the
program is classic BPF (linux/filter.h, linux/seccomp.h).

New processes fail with EAGAIN, threads are let through. RLIMIT_NPROC does not bind root, and
processes that double faster than a busy host can end them leave it no number for others.
"""

import platform
import struct

from mjax.errors import UserError

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH
# name, its number on x86_64, on aarch64
_REFUSED = """
    socket 41 198, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,
    pidfd_getfd 438 438, shmget 29 194, semget 64 190, msgget 68 186, mq_open 240 180,
    memfd_create 319 279, memfd_secret 447 447, userfaultfd 323 282, bpf 321 280,
    perf_event_open 298 241, add_key 248 217, request_key 249 218, keyctl 250 219,
    io_uring_setup 425 425, inotify_init1 294 26, unshare 272 97, setns 308 268
"""
_FORKS = (57, 58), ()  # fork and vfork; aarch64 has only clone
_CLONE, _CLONE3 = (56, 220), 435
_CLONE_THREAD = 0x1_0000
# CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_NEW_NAMESPACES = 0x7E02_0000
_X32 = 0x4000_0000  # calls of x86_64 by numbers from here on are other ones
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_EPERM, _EAGAIN, _ENOSYS = 1, 11, 38
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # places in seccomp_data


def system_call_filter() -> bytes:
    """The BPF program. Raises `UserError` on a machine whose numbers are not known."""
    if platform.machine() not in _MACHINES:
        known = " and ".join(_MACHINES)
        raise UserError(f"the sandbox knows the system calls of {known}, not {platform.machine()}")
    column, architecture = _MACHINES[platform.machine()]
    refused = [int(row.split()[1 + column]) for row in _REFUSED.split(",")]
    errors = dict.fromkeys(refused, _EPERM) | dict.fromkeys(_FORKS[column], _EAGAIN)
    errors[_CLONE3] = _ENOSYS  # its flags lie in memory; libraries then take clone
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number, error in errors.items():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]
    program += [
        (_EQUAL, 0, 5, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERROR | _EAGAIN),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
