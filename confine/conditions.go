package confine

// What is decided by arguments.

const (
	newNamespaces = 0x7e020000 // CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
	newTime       = 0x80       // CLONE_NEWTIME, for unshare only: in clone it is part of the exit signal
)

var noNamespaces = action{errno: ePERM, reason: "a user namespace gives root's rights over much more of the kernel",
	way: `profile="desktop" allows what Chromium's sandbox makes; ` + useVM}

func isValue(arg int, v uint32) test         { return test{arg: arg, mask: 0xffffffff, value: v} }
func masked(arg int, mask, v uint32) test    { return test{arg: arg, mask: mask, value: v} }
func hasAny(arg int, mask uint32) test       { return test{arg: arg, mask: mask, any: true} }
func refuse(e errno, why, way string) action { return action{errno: e, reason: why, way: way} }

func conditions(p Profile) map[string]rule {
	rules := map[string]rule{
		"clone":       namespaces(p, 0),
		"unshare":     namespaces(p, newTime),
		"personality": personality(),
		"socket":      sockets(p),
		"fcntl": {otherwise: allowed, clauses: []clause{{"F_SETLEASE", []test{isValue(1, fSetLease)},
			refuse(eACCES, "whoever opens the file next waits for the holder of the lease, the node included", "flock and F_SETLK work")}}},
		"socketpair": {clauses: []clause{{"AF_UNIX", []test{isValue(0, afUnix)}, allowed}},
			otherwise: refuse(eAFNOSUPPORT, "only AF_UNIX has useful pairs", "AF_UNIX works")},
		"ioctl": ioctls(),
	}
	if p.Gives(PacketSockets) || p.Gives(UserNamespaces) {
		rules["setsockopt"] = socketOptions(p)
		rules["getsockopt"] = socketOptions(p)
	}
	if p.Gives(UserNamespaces) && !p.Gives(Mounts) {
		rules["ioctl"] = interfaceControls(rules["ioctl"])
	}
	return rules
}

func personality() rule {
	r := rule{otherwise: refuse(ePERM, "this personality makes memory executable or changes the kernel's answers", "setarch -R, linux32 and --uname-2.6 work")}
	const noRandom, uname26, linux32 = 0x0040000, 0x0020000, 0x0008
	for _, v := range []uint32{0, linux32, uname26, uname26 | linux32, noRandom, noRandom | linux32, 0xffffffff} {
		r.clauses = append(r.clauses, clause{"", []test{isValue(0, v)}, allowed})
	}
	return r
}

const (
	afUnix    = 1
	afInet    = 2
	afInet6   = 10
	afNetlink = 16

	fSetLease = 1024

	sockStream = 1
	sockDgram  = 2
	sockRaw    = 3
	sockKind   = 0xf // the rest are flags
)

// sockets allows what the kernel would offer if it were built without exotic
// families and protocols, each of which a plain socket() would load.
//
// What raw and echo sockets receive is charged to nobody: Build has none.
func sockets(p Profile) rule {
	r := rule{otherwise: refuse(eAFNOSUPPORT, "exotic address families have a history of kernel holes", "AF_UNIX, AF_INET, AF_INET6 and route netlink work")}
	add := func(label string, a action, t ...test) { r.clauses = append(r.clauses, clause{label, t, a}) }
	ok := func(label string, t ...test) { add(label, allowed, t...) }
	ok("AF_UNIX", isValue(0, afUnix))
	for _, family := range []uint32{afInet, afInet6} {
		for _, protocol := range []uint32{0, 6} { // TCP
			ok("TCP", isValue(0, family), masked(1, sockKind, sockStream), isValue(2, protocol))
		}
		for _, protocol := range []uint32{0, 17} {
			ok("UDP", isValue(0, family), masked(1, sockKind, sockDgram), isValue(2, protocol))
		}
		for _, protocol := range []uint32{1, 58} {
			add("ICMP echo", unaccounted(p), isValue(0, family), masked(1, sockKind, sockDgram), isValue(2, protocol))
		}
		add("raw", unaccounted(p), isValue(0, family), masked(1, sockKind, sockRaw))
		r.clauses = append(r.clauses, clause{"other protocol", []test{isValue(0, family)},
			refuse(ePROTONOSUPPORT, "protocols beside TCP, UDP and ICMP have a history of kernel holes", "TCP and UDP work")})
	}
	if p.Gives(PacketSockets) {
		ok("AF_PACKET", isValue(0, afPacket))
	}
	switch {
	case p.Gives(Mounts):
		ok("netlink", isValue(0, afNetlink))
	case p.Gives(UserNamespaces):
		add("netlink", noRoutes, isValue(0, afNetlink))
	default:
		r.netlink()
	}
	return r
}

func (r *rule) netlink() {
	r.clauses = append(r.clauses, clause{"route netlink", []test{isValue(0, afNetlink), isValue(2, 0)}, allowed})
	r.clauses = append(r.clauses, clause{"other netlink", []test{isValue(0, afNetlink)},
		refuse(ePROTONOSUPPORT, "netlink beside route reaches much of the kernel", "programs go on as if the kernel had no audit or netfilter")})
}

func unaccounted(p Profile) action {
	if p.Gives(RawSockets) {
		return allowed
	}
	return refuse(eACCES, "what such a socket receives is charged to no memory limit", `profile="debug" and "pwn" allow ping and raw sockets`)
}

// ioctls: terminals, pipes and files work; what a file system offers beyond
// files does not. Whole groups are refused by their letter, so that a number
// not known today is refused as well.
func ioctls() rule {
	const letter = 0xff00
	fs := refuse(ePERM, "it moves, swaps or pins a file system's blocks behind the files, or acts on all of it", "copy and rename; reflinks by cp --reflink work")
	tty := refuse(ePERM, "it types into, takes over or reprograms a terminal", "write to the program's own input")
	r := rule{otherwise: allowed}
	add := func(label string, a action, t ...test) { r.clauses = append(r.clauses, clause{label, t, a}) }
	add("TIOCSTI", tty, isValue(1, 0x5412))
	add("TIOCLINUX", tty, isValue(1, 0x541c))
	add("TIOCCONS", tty, isValue(1, 0x541d))
	add("TIOCSETD", tty, isValue(1, 0x5423))
	// Most calls are of other letters: they pass here after eight comparisons.
	add("FS_IOC_FSGETXATTR", allowed, isValue(1, 0x801c581f))
	add("FS_IOC_GETFSLABEL", allowed, isValue(1, 0x81009431))
	add("FS_IOC_GETFLAGS", allowed, isValue(1, 0x80086601))
	add("FS_IOC_GETVERSION", allowed, isValue(1, 0x80087601))
	add("FS_IOC_FIEMAP", allowed, isValue(1, 0xc020660b))
	add("FICLONE", allowed, isValue(1, 0x40049409))
	add("FICLONERANGE", allowed, isValue(1, 0x4020940d))
	add("an XFS or file system control (XFS_IOC_SWAPEXT, XFS_IOC_EXCHANGE_RANGE, FIFREEZE, FITRIM …)", fs, masked(1, letter, 'X'<<8))
	add("an ext4 control (EXT4_IOC_MOVE_EXT, EXT4_IOC_SWAP_BOOT, FS_IOC_SETFLAGS …)", fs, masked(1, letter, 'f'<<8))
	add("a btrfs control or FIDEDUPERANGE", fs, masked(1, letter, 0x94<<8))
	add("an F2FS control", fs, masked(1, letter, 0xf5<<8))
	add("a bcachefs control", fs, masked(1, letter, 0xbc<<8))
	return r
}
