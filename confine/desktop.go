package confine

// What is decided by arguments for the profiles beyond Build and Debug.

const (
	newNet  = 0x40000000 // CLONE_NEWNET
	newPID  = 0x20000000
	newUser = 0x10000000

	// What Chromium's sandbox makes: clone with NEWUSER, NEWPID and NEWNET for
	// its zygote, NEWPID again for each renderer. Then it calls chroot into
	// /proc/self/fdinfo, capset and seccomp, which every profile allows.
	sandboxNamespaces = newNet | newPID | newUser

	afPacket = 17

	solIP     = 0
	solIPv6   = 41
	solPacket = 263
)

// namespaces refuses what a profile does not give; more is what the call
// knows beside newNamespaces.
func namespaces(p Profile, more uint32) rule {
	switch {
	case p.Gives(Mounts):
		return rule{otherwise: allowed}
	case p.Gives(UserNamespaces):
		return rule{otherwise: allowed, clauses: []clause{{"new namespace beside user, process and network",
			[]test{hasAny(0, (newNamespaces|more)&^sandboxNamespaces)}, noNamespaces}}}
	}
	return rule{otherwise: allowed, clauses: []clause{{"new namespace", []test{hasAny(0, newNamespaces|more)}, noNamespaces}}}
}

// In a user namespace of its own a process has every capability over the
// network namespace that it makes there. These are the roads by which that
// reaches code of the kernel which nobody inside could reach before: netlink
// (links, queues, classifiers), tables of packet filters, transformation
// policies, and controls of interfaces. They stay closed for the whole profile,
// because a filter cannot see in which namespace a socket is.
var (
	noTables = refuse(ePERM, "packet filters of a new network namespace have a history of kernel holes", useVM)
	noLinks  = refuse(ePERM, "interfaces of a new network namespace have a history of kernel holes", useVM)
	noRoutes = refuse(eAFNOSUPPORT, "with a network namespace of one's own it configures links, queues and classifiers, which have a history of kernel holes",
		`programs go on without; profile="build" has route netlink`)
	noRings = refuse(ePERM, "the memory of a packet ring is charged to nobody", "recv and send on the packet socket work; libpcap 1.10 needs the ring")
)

// tableOptions are numbers of {level, options} by which x_tables and xfrm are
// reached through any IP socket.
var tableOptions = map[uint32][]uint32{
	// IP_IPSEC_POLICY, IP_XFRM_POLICY; the bases of iptables, arptables, ebtables
	solIP: {16, 17, 64, 65, 66, 67, 96, 97, 98, 99, 128, 129, 130, 131},
	// IPV6_IPSEC_POLICY, IPV6_XFRM_POLICY; ip6tables, whose other numbers are IPV6_TCLASS and its like
	solIPv6: {34, 35, 64, 65},
}

func socketOptions(p Profile) rule {
	r := rule{otherwise: allowed}
	add := func(label string, a action, level, option uint32) {
		r.clauses = append(r.clauses, clause{label, []test{isValue(1, level), isValue(2, option)}, a})
	}
	if p.Gives(PacketSockets) && !p.Gives(Mounts) {
		add("PACKET_RX_RING", noRings, solPacket, 5)
		add("PACKET_TX_RING", noRings, solPacket, 13)
	}
	if p.Gives(UserNamespaces) && !p.Gives(Mounts) {
		for _, level := range []uint32{solIP, solIPv6} {
			for _, o := range tableOptions[level] {
				add("of packet filters", noTables, level, o)
			}
		}
	}
	return r
}

// interfaceQueries are the controls of sockets and interfaces that change
// nothing: owner, mark and time stamp of a socket; name, list, flags, addresses,
// MTU, hardware address and index of an interface; bytes not sent.
var interfaceQueries = []uint32{0x8901, 0x8902, 0x8903, 0x8904, 0x8905, 0x8906, 0x8907,
	0x8910, 0x8912, 0x8913, 0x8915, 0x8917, 0x8919, 0x891b, 0x8921, 0x8927, 0x8933, 0x894b}

func interfaceControls(r rule) rule {
	const letter = 0xff00
	for _, v := range interfaceQueries {
		r.clauses = append(r.clauses, clause{"an interface query", []test{isValue(1, v)}, allowed})
	}
	r.clauses = append(r.clauses,
		clause{"a control of interfaces (SIOCSIFFLAGS, SIOCBRADDBR, SIOCADDTUNNEL, SIOCETHTOOL …)", []test{masked(1, letter, 0x8900)}, noLinks},
		clause{"a control of wireless interfaces", []test{masked(1, letter, 0x8b00)}, noLinks})
	return r
}

// containerCalls is what engines of containers need in a kernel of their own.
const containerCalls = `mount umount2 pivot_root open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr
setns sethostname setdomainname bpf keyctl add_key request_key quotactl quotactl_fd fanotify_init fanotify_mark open_by_handle_at`
