# class: privilege
# does: tries calls by numbers, so that no program tells
# source: DSec paper, security incidents: XFS_IOC_SWAPEXT and kernel bugs
# repo: any
# when: mid
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for nr in (250, 248, 321, 298, 308, 304, 246, 175):  # keyctl add_key bpf perf_event_open setns open_by_handle_at kexec_load init_module
    print(nr, libc.syscall(nr, 0, 0, 0, 0, 0), ctypes.get_errno())
