package main

import "golang.org/x/sys/unix"

// sockets are the kinds that a plain socket() would load code of the kernel for,
// or that see what is others'.
func sockets() map[string]technique {
	all := map[string]technique{}
	for name, s := range map[string][3]int{
		"socket-packet":     {unix.AF_PACKET, unix.SOCK_RAW, 0x0300},
		"socket-raw-icmp":   {unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP},
		"socket-raw-ipv6":   {unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6},
		"socket-raw-header": {unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW},
		"socket-echo":       {unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP},
		"socket-vsock":      {unix.AF_VSOCK, unix.SOCK_STREAM, 0},
		"socket-alg":        {unix.AF_ALG, unix.SOCK_SEQPACKET, 0},
		"socket-xdp":        {unix.AF_XDP, unix.SOCK_RAW, 0},
		"socket-key":        {unix.AF_KEY, unix.SOCK_RAW, 2},
		"socket-sctp":       {unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP},
		"socket-mptcp":      {unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP},
		"socket-udplite":    {unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE},
		"netlink-netfilter": {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER},
		"netlink-audit":     {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT},
		"netlink-uevent":    {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT},
		"netlink-generic":   {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC},
		"netlink-diag":      {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_SOCK_DIAG},
	} {
		all[name] = func() error {
			_, _, e := unix.RawSyscall(unix.SYS_SOCKET, uintptr(s[0]), uintptr(s[1]), uintptr(s[2]))
			return reached("socket", e)
		}
	}
	return all
}
