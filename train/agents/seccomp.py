"""The system calls that are refused inside the sandbox, as a filter that libseccomp makes.

Namespaces leave some ways to the host's kernel open: sockets of families that no network namespace confines (vsock
reaches a virtual machine's host), memory that belongs to no process and so escapes its limit, and calls with a long
record of holes that computing never needs.
"""

import ctypes
import errno
import functools
import os
import socket

LIBRARY = "libseccomp.so.2"
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(0)
DIFFERENT, EQUAL, GREATER, MASKED_EQUAL = 1, 4, 6, 7  # SCMP_CMP_NE, _EQ, _GT, _MASKED_EQ

# IP ends at the loopback; netlink tells its addresses, for which libzmq asks.
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
NETLINK_ROUTE = 0
NEW_NAMESPACES = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET  # fmt: skip
# Memory that counts for no process, or kernel memory that a user can pile up.
UNCOUNTED = (
    "memfd_create",
    "memfd_secret",
    "shmget",
    "msgget",
    "semget",
    "mq_open",
    "add_key",
    "request_key",
    "keyctl",
)
REFUSED = (
    "unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "fsopen", "fsconfig", "fsmount", "fspick",
    "open_tree", "move_mount", "mount_setattr", "name_to_handle_at", "open_by_handle_at", "quotactl", "quotactl_fd",
    "swapon", "swapoff", "acct", "reboot", "syslog", "vhangup", "iopl", "ioperm", "modify_ldt", "personality",
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "settimeofday", "clock_settime",
    "adjtimex", "clock_adjtime", "bpf", "perf_event_open", "userfaultfd", "fanotify_init", "lookup_dcookie", "ptrace",
    "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd", "mbind", "set_mempolicy",
    "migrate_pages", "move_pages",
)  # fmt: skip
# Libraries try an older call where these are not there.
NOT_THERE = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")


class _Compare(ctypes.Structure):
    """`struct scmp_arg_cmp`."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


@functools.cache
def make_filter() -> bytes:
    """Return the filter as BPF for this machine; calls of any other architecture end the process.

    Returns:
        What bwrap's `--seccomp` reads.

    Raises:
        OSError: If libseccomp is not there, or can not make it.
    """
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW)))

    def refuse(call: str, error: int, *compare: _Compare) -> None:
        number = library.seccomp_syscall_resolve_name(call.encode())
        array = (_Compare * len(compare))(*compare)
        action = ctypes.c_uint32(REFUSE | error)
        if number == -1:  # of a kernel newer than the library
            return
        status = library.seccomp_rule_add_array(context, action, number, len(compare), array)
        if status:
            raise OSError(-status, f"libseccomp does not take the rule for {call}")

    for call in (*UNCOUNTED, *REFUSED):
        refuse(call, errno.EPERM)
    for call in NOT_THERE:
        refuse(call, errno.ENOSYS)
    for flag in NEW_NAMESPACES:
        refuse("clone", errno.EPERM, _Compare(0, MASKED_EQUAL, flag, flag))
    for family in range(max(FAMILIES) + 1):
        if family not in FAMILIES:
            refuse("socket", errno.EAFNOSUPPORT, _Compare(0, EQUAL, family, 0))
    other = (_Compare(0, EQUAL, socket.AF_NETLINK, 0), _Compare(2, DIFFERENT, NETLINK_ROUTE, 0))
    refuse("socket", errno.EAFNOSUPPORT, *other)
    refuse("socket", errno.EAFNOSUPPORT, _Compare(0, GREATER, max(FAMILIES), 0))

    fd = os.memfd_create("filter")
    try:
        if status := library.seccomp_export_bpf(context, fd):
            raise OSError(-status, "libseccomp does not export its filter")
        return os.pread(fd, 2**20, 0)
    finally:
        os.close(fd)
        library.seccomp_release(context)
